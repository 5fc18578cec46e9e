#include "pinflow/loader/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace pinflow {

namespace {

using seconds = std::chrono::duration<double>;

/// The share of the time from which a wait is worth a change of settings.
constexpr double min_share = 0.2;

double share_of(std::chrono::nanoseconds part, std::chrono::nanoseconds whole) {
    return whole.count() > 0 ? std::min(1.0, seconds(part) / seconds(whole)) : 0.0;
}

double rate(std::uint64_t count, std::chrono::nanoseconds time) {
    return time.count() > 0 ? static_cast<double>(count) / seconds(time).count() : 0.0;
}

/// Something that the consumer may have waited for.
struct limit {
    const char* name;
    const char* work;
    std::chrono::nanoseconds wait;
};

}  // namespace

double loader_report::bytes_per_second() const noexcept {
    return rate(bytes, wall_time);
}

double loader_report::rows_per_second() const noexcept {
    return rate(rows, wall_time);
}

std::string loader_report::verdict() const {
    std::string shortage = slots_reason.empty() ? "" : fmt::format("; {}", slots_reason);
    if (lost_slots > 0) {
        shortage +=
            fmt::format("; {} of {} slots are lost: no event could be recorded in a stream that used them",
                        lost_slots, slots);
    }
    if (wall_time.count() <= 0) return "no batch has been requested yet";
    const std::array limits{limit{"storage", "reads", storage_wait},
                            limit{"filesystem", "files to be opened and checked", file_wait},
                            limit{"CPU", "rows to be gathered", cpu_wait},
                            limit{"link", "copies to the device", link_wait}};
    const std::chrono::nanoseconds waited = storage_wait + file_wait + cpu_wait + link_wait;
    const double consumer_waited = share_of(waited, wall_time);
    const double loader_waited = share_of(consumer_wait, wall_time);
    if (std::max(consumer_waited, loader_waited) < min_share) {
        return fmt::format(
            "nothing stands out: the consumer waited {:.0f}% of the time, and the loader {:.0f}%{}",
            100 * consumer_waited, 100 * loader_waited, shortage);
    }
    if (loader_waited > consumer_waited) {
        return fmt::format("the consumer is the limit: the loader waited {:.0f}% of the time{}",
                           100 * loader_waited, shortage);
    }
    const limit& largest = *std::ranges::max_element(limits, {}, &limit::wait);
    return fmt::format(
        "the {} is the limit: the consumer waited {:.0f}% of the time, {:.0f}% of that for {}{}",
        largest.name, 100 * consumer_waited, 100 * share_of(largest.wait, waited), largest.work, shortage);
}

}  // namespace pinflow
