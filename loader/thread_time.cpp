#include "loader/thread_time.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <ctime>

namespace pinflow::detail {

namespace {

::rusage usage_of_thread() noexcept {
    ::rusage usage{};
    ::getrusage(RUSAGE_THREAD, &usage);
    return usage;
}

}  // namespace

blocked_timer::blocked_timer() noexcept : begin_(now()) {}

blocked_timer::reading blocked_timer::now() noexcept {
    ::timespec cpu{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
    const ::rusage usage = usage_of_thread();
    return {std::chrono::steady_clock::now().time_since_epoch(),
            std::chrono::seconds(cpu.tv_sec) + std::chrono::nanoseconds(cpu.tv_nsec), usage.ru_nvcsw,
            usage.ru_majflt};
}

std::chrono::nanoseconds blocked_timer::blocked() const noexcept {
    const reading end = now();
    // without a voluntary switch, the thread was only preempted, not blocked
    if (end.voluntary_switches == begin_.voluntary_switches) return {};
    return std::max((end.wall - begin_.wall) - (end.cpu - begin_.cpu), std::chrono::nanoseconds{});
}

bool blocked_timer::has_faulted() const noexcept {
    return usage_of_thread().ru_majflt != begin_.major_faults;
}

}  // namespace pinflow::detail
