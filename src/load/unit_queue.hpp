#pragma once

#include <cstddef>
#include <mutex>

#include "src/load/load_plan.hpp"

namespace pinflow::detail {

/// Hands out the units of a plan. Thread-safe.
class unit_queue {
 public:
    explicit unit_queue(const load_plan& plan) : plan_(plan), end_(plan.copyable.size()) {}

    /// Says who takes the copyable units. Comes before all calls below. With `copy` and `both` the copy
    /// engine takes them from the front. With `both` threads take them from the end, with `staged` from the
    /// front.
    void start(load_route route);

    /// The next unit for the copy engine, without taking it; null if there is none.
    const load_unit* front() const;
    /// Takes the unit that `front` has returned. @return false if a thread has taken it meanwhile.
    bool take_front();
    /// The next unit for a thread; null if there is none.
    const load_unit* take_for_thread();
    /// The number of units left to decode.
    std::size_t count_decoded() const;
    bool is_empty() const;
    /// Leaves the units that the copy engine has not taken to the threads.
    void stop_copies();

 private:
    const load_plan& plan_;
    mutable std::mutex mutex_;
    bool copies_ = false;
    bool stages_ = false;
    std::size_t front_ = 0;
    std::size_t end_;
    std::size_t next_other_ = 0;
};

}  // namespace pinflow::detail
