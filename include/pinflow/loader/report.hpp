#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "pinflow/loader/route.hpp"

namespace pinflow {

/// How the rows of one array travel.
struct array_report {
    std::string name;  ///< what the array is: its path, for one
    /// "held" (read once, kept on the device), "copy engine", "kernel" (both from registered pages), "staged"
    /// (gathered by the CPU into pinned memory), "decode", "read"; on the host "slot copy" or "view".
    std::string transfer;
    std::string reason;       ///< one sentence: why, and what has become of it
    std::uint64_t bytes = 0;  ///< handed out
};

/// Where a loader's time went, so far.
struct loader_report {
    /// That of the array with most bytes.
    pinflow::route route = route::automatic;
    /// One sentence: why this route.
    std::string reason;
    /// One entry for each array of a sample, in their order.
    std::vector<array_report> arrays;
    /// Threads that may gather rows at the same time.
    unsigned threads = 0;
    /// Why the system starts fewer threads than the loader wanted; empty if it does not. Memory that is short
    /// lowers the default without a reason here.
    std::string threads_reason;
    unsigned slots = 0;
    /// One sentence: why there are fewer slots than by default, or empty.
    std::string slots_reason;
    std::uint64_t slot_bytes = 0;
    /// What `next` has handed out.
    std::uint64_t batches = 0;
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;
    /// From the first call of `next` until it said that all epochs are over; until now, while it has not.
    std::chrono::nanoseconds wall_time{};
    /// Time spent registering mapped pages, beside the first batches; zero where none are.
    std::chrono::nanoseconds pin_time{};
    /// Page-locked by now, of the pages of all arrays.
    std::uint64_t pinned_bytes = 0;
    /// Time that `next` made its caller wait, by what it waited for (in the proportion in which the awaited
    /// batch spent its own time): reads from storage, opening and checking files, the CPU's gathering, the
    /// link to the device. If several threads wait, the sum of their times.
    std::chrono::nanoseconds storage_wait{};
    std::chrono::nanoseconds file_wait{};
    std::chrono::nanoseconds cpu_wait{};
    std::chrono::nanoseconds link_wait{};
    /// Time the loader stood still because the consumer, or its streams, held every slot, or had yet to take
    /// the last batch.
    std::chrono::nanoseconds consumer_wait{};
    /// Batches that were ready when `next` was called: their mean and maximum. If the maximum stays below
    /// `slots`, fewer slots would do; a mean near 0 means that the consumer is faster.
    double mean_ready = 0;
    unsigned max_ready = 0;

    /// Of what was handed out, by the wall time; 0 before there is any.
    double bytes_per_second() const noexcept;
    double rows_per_second() const noexcept;

    /// What is to be improved first, in one sentence: "the storage is the limit: the consumer waited 71% of
    /// the time, 96% of that for reads". The consumer's waiting or the loader's counts when it takes a fifth
    /// of the time or more, the larger of them; when neither does, nothing stands out.
    std::string verdict() const;
};

}  // namespace pinflow
