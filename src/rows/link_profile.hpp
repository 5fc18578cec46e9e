#pragma once

#include <cstdint>

namespace pinflow::detail {

/// The thresholds that the rules of transfer_planner.cpp compare with, as shipped: measured on an H200, PCIe
/// Gen5 x16, with 16 cores. samples/bench/RESULTS.md, "Thresholds of the planner", has the figures and the
/// commands. 1 GB is 1e9 bytes.
struct link_profile {
    // ---- which transfer
    std::uint64_t max_held_bytes = 64 << 20;  ///< held arrays, all of a sample together
    /// Contiguous pieces from this size on use the copy engine. At 48 KiB a kernel is as fast. At 32 KiB the
    /// kernel reaches 50.6 GB/s, the copy engine 46.5.
    std::uint64_t min_engine_bytes = 48 << 10;
    /// Smaller pieces of files must not use it: CUDA copies them with the CPU if the stream is idle,
    /// registered or not, and a truncated file would end the process.
    std::uint64_t min_copied_bytes = 32 << 10;
    std::uint64_t max_trivial_bytes = 64;  ///< rows that the CPU copies as fast as it lists their addresses
    std::uint64_t min_unsorted_bytes = 2 << 10;  ///< rows that a kernel moves as fast in any order
    /// Tables up to this size are never sorted: the GPU's address translation covers them, so that row order
    /// does not matter.
    std::uint64_t covered_bytes = 1 << 30;

    // ---- registering while rows are delivered
    double register_gbps = 28;  ///< pages in the page cache: 15 to 50, by machine; more threads gain nothing
    double stage_gbps_per_core = 5;  ///< rows that the CPU gathers into staging buffers
    double max_stage_gbps = 50;
    unsigned registering_cores = 2;  ///< one thread registers, another brings pages into the page table
    /// While pages are registered, half of the cores bring rows, but at least this many if there are more.
    /// With all of them registration is slower.
    unsigned min_beside_registering = 3;
    unsigned max_beside_registering = 10;  ///< which bring rows at the rate of the link
    /// From this many cores on (4 and 16 were measured), rows for the copy engine that lie on pages that are
    /// not registered are read with pread: threads that touch pages for the first time slow registration
    /// down, and each other.
    unsigned min_reading_cores = 10;
    std::uint64_t piece_bytes = 32 << 20;  ///< registered by one call, so that staged pieces lie between

    // ---- batches that are filled together
    std::uint64_t group_bytes = 16 << 20;       ///< for a GPU: what hides the time between two groups
    std::uint64_t read_group_bytes = 32 << 20;  ///< the same of rows that threads read: 52.7 GB/s, not 48.8
    std::uint64_t host_group_bytes =
        4 << 20;  ///< on the host: copying takes some 200 us, waking a thread only 10 us
    unsigned max_group_batches = 64;
    unsigned groups_of_slots = 4;       ///< groups that all slots make up, for a GPU: 8 are slower
    unsigned host_groups_of_slots = 4;  ///< two are filled, one is ready, one is the consumer's
    unsigned min_slots = 8;
    unsigned listing_threads = 4;  ///< which list rows that the device fetches by itself

    // ---- the consumer
    /// Groups whose data `next` waits for on the calling thread: a stream that waits polls across the link,
    /// and costs up to 7 % of it.
    std::uint64_t min_awaited_bytes = 8 << 20;

    // ---- calls of a row exchange
    std::uint64_t min_copied_row_bytes =
        16 << 10;  ///< rows that are tried with one copy of the copy engine each
    std::uint64_t min_staging_bytes = 256 << 10;               ///< staging buffers that are tried
    std::uint64_t large_table_bytes = std::uint64_t{8} << 30;  ///< tables that scatters need more blocks for
    unsigned gather_blocks = 8;       ///< of 1024 threads, for rows that are not long
    unsigned long_gather_blocks = 4;  ///< of min_long_bytes and more
    unsigned busy_blocks = 32;        ///< of unaligned rows and sums
    unsigned busy_large_blocks = 16;  ///< the same of large tables
    unsigned busy_long_blocks = 8;    ///< the same of long rows
    std::uint64_t min_long_bytes = 4 << 10;
    double usual_staged_share = 0.4;  ///< of the hybrid route, if nothing is measured
    double min_gain = 1.05;           ///< a measured rate must be so much higher to be preferred
    double scatter_of_direct =
        1.06;  ///< scatter throughput over gather throughput, by kernel: writes are not waited for
    double scatter_of_staged = 1.4;
};

}  // namespace pinflow::detail
