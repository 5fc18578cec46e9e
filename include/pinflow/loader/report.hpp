#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "pinflow/loader/route.hpp"

namespace pinflow {

/// How the rows of one array are copied.
struct array_report {
    std::string name;  ///< its path, or another description
    /// On any device: "held" (read once, then kept on the device), "staged" (gathered by the CPU into a
    /// staging buffer), "decode" (as staged, by row_source::read_rows, which decodes or converts the rows) or
    /// "read" (as staged, read from the file even if it is mapped). On the host, decode and read fill the
    /// slot directly.
    /// Only on a GPU: "copy engine" or "kernel" (both read registered pages).
    /// Only on the host: "slot copy" (copied into the slot) or "view" (the mapping itself).
    std::string transfer;
    std::string reason;       ///< one sentence: why this transfer, and its result so far
    std::uint64_t bytes = 0;  ///< bytes delivered
};

/// Where a loader's time went, so far.
struct loader_report {
    /// The route of the array with the largest rows; of equal ones, the first.
    pinflow::route route = route::automatic;
    /// One sentence: why this route.
    std::string reason;
    /// One entry for each array of a sample, in their order.
    std::vector<array_report> arrays;
    /// The maximum number of threads that gather rows at the same time. While pages are being registered,
    /// fewer gather: three quarters, but at least 3 and at most 12. Of 2 or 3 threads, one is left out; a
    /// single one gathers. If the device fetches all rows by itself, at most 4 list their addresses.
    unsigned threads = 0;
    /// Why there are fewer threads than the loader wanted: memory is short, the system starts no more
    /// threads, the application limits oneTBB, or the process was forked. Empty if there are not fewer.
    std::string threads_reason;
    /// Batches that can exist at once: being filled, ready or leased.
    unsigned slots = 0;
    /// Slots that are not filled again, because no event could be recorded in a stream that used them: the
    /// stream was being captured, the device failed, or memory was exhausted.
    unsigned lost_slots = 0;
    /// One sentence if a shortage of host memory lowers the default number of slots. Empty otherwise, also if
    /// `slots` or `memory_bytes` lowers it.
    std::string slots_reason;
    /// Bytes of one full batch, with each array padded to a multiple of 256 bytes. A slot takes this much
    /// device memory (none if batches are views of a mapping), and as much pinned memory if it has a
    /// staging buffer (see loader_options::memory_bytes).
    std::uint64_t slot_bytes = 0;
    /// Batches, rows and bytes that `next` has returned.
    std::uint64_t batches = 0;
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;
    /// From the first call of `next`, or of a `wait_for` that had to wait, until `next` returned no batch or
    /// threw the loader's error; until now if it has not.
    std::chrono::nanoseconds wall_time{};
    /// How long the registration of mapped pages took, in parallel with the first batches: the longest of the
    /// arrays whose registration has finished. Zero if there is none.
    std::chrono::nanoseconds pin_time{};
    /// Bytes of the pages, of all arrays, that are registered by now.
    std::uint64_t pinned_bytes = 0;
    /// Time that `next` and `wait_for` made their callers wait, by cause: reads from storage, opening and
    /// checking files, gathering by the CPU, the link to the device. The wait until a batch is delivered is
    /// divided in proportion to the time that each step of the batch took. A wait for its copy after that
    /// counts as `link_wait`, which is 0 on the host device. Time in which the loader waited for the
    /// consumer's streams does not count. If several threads wait, their times are added.
    std::chrono::nanoseconds storage_wait{};
    std::chrono::nanoseconds file_wait{};
    std::chrono::nanoseconds cpu_wait{};
    std::chrono::nanoseconds link_wait{};
    /// Time the loader was idle because too few slots were free: the others held ready batches, were leased,
    /// or were in use by the consumer's streams. Includes the time until the consumer took the last batch.
    std::chrono::nanoseconds consumer_wait{};
    /// Batches that were ready when `next` was called: their mean and maximum. If the mean is high, the
    /// consumer is the limit, and fewer slots may suffice. If it is near 0, the consumer is faster than the
    /// loader, and fewer slots can make it slower.
    double mean_ready = 0;
    unsigned max_ready = 0;

    /// Bytes or rows delivered per second of wall time; 0 before the first batch.
    double bytes_per_second() const noexcept;
    double rows_per_second() const noexcept;

    /// The limiting part, in one sentence: "the storage is the limit: the consumer waited 71% of the time,
    /// 96% of that for reads". The larger of the consumer's and the loader's waiting time decides, if it is
    /// at least a fifth of the wall time. Otherwise the verdict is that nothing stands out. `slots_reason`
    /// and lost slots follow, if there are any. While `wall_time` is 0, the verdict is that no batch has been
    /// requested.
    std::string verdict() const;
};

}  // namespace pinflow
