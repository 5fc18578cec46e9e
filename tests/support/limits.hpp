#pragma once

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "devices.hpp"
#include "pinflow/loader/loader.hpp"

/// The limit that a loader reports if one chosen step takes much longer than all others.

namespace limits {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Blocks the thread, as something outside of the process would.
inline void block_for(milliseconds time) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable nothing;
    nothing.wait_for(lock, time, [] { return false; });
}

inline std::chrono::nanoseconds thread_time() {
    std::timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

/// Computes until the thread has used this much CPU time.
inline void compute_for(milliseconds time) {
    const auto end = thread_time() + time;
    while (thread_time() < end) {
    }
}

/// A step that takes this long for a batch is the limit, as all others take microseconds. The first value
/// suffices unless the machine is so busy that threads wait as long for a core.
inline constexpr std::array<milliseconds, 3> slownesses{milliseconds(8), milliseconds(40), milliseconds(200)};
inline constexpr std::uint64_t batch_rows = 10;
inline constexpr std::uint64_t batch_count = 12;

/// Takes every batch of `source`, doing `work(stream)` with each. @return what the loader says then.
template <typename Work>
pinflow::loader_report report_of(const std::shared_ptr<const pinflow::row_source>& source,
                                 const pinflow::device& device, pinflow::route route, Work work) {
    pinflow::loader loader({source}, {.device = device,
                                      .batch_rows = batch_rows,
                                      .route = route,
                                      .slots = 2,
                                      .threads = 1,
                                      .pin_budget_bytes = generous_pin_budget});
    const pinflow::stream stream(device);
    while (const auto batch = loader.next(stream))
        work(stream);
    const pinflow::loader_report report = loader.report();
    CHECK(report.batches == batch_count);
    return report;
}

inline pinflow::loader_report report_of(const std::shared_ptr<const pinflow::row_source>& source,
                                        const pinflow::device& device,
                                        pinflow::route route = pinflow::route::automatic) {
    return report_of(source, device, route, [](pinflow::stream_view) {});
}

inline bool is_limit(const pinflow::loader_report& report, std::string_view what) {
    return report.verdict().starts_with("the " + std::string(what) + " is the limit: ");
}

/// Checks that for one of `slownesses`, the report of `run(slowness)` says that `what` is the limit, and its
/// `wait` is more than half of the wall time.
template <typename Run>
void check_limit(std::string_view what, std::chrono::nanoseconds pinflow::loader_report::* wait, Run run) {
    std::string verdicts;
    for (const milliseconds slowness : slownesses) {
        const pinflow::loader_report report = run(slowness);
        if (is_limit(report, what) && 2 * report.*wait > report.wall_time) return;
        verdicts += report.verdict() + "\n";
    }
    FAIL_CHECK("the " << what << " should have been the limit: " << verdicts);
}

}  // namespace limits
