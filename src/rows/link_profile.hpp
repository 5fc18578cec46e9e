#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace pinflow::detail {

/// The thresholds used by the rules of transfer_planner.cpp, by the code that carries out its plans, and by
/// loader/pipeline_plan. Most defaults were measured on H200s, PCIe Gen5 x16, with up to 16 cores. Most of
/// the figures are in samples/bench/RESULTS.md, "Thresholds of the planner". 1 GB is 1e9 bytes.
struct link_profile {
    // ---- which transfer
    std::uint64_t max_held_bytes = 64 << 20;  ///< all held arrays of a sample together
    /// Contiguous pieces from this size on use the copy engine. At 48 KiB a kernel is as fast. At 32 KiB the
    /// kernel reaches 50.6 GB/s, the copy engine 46.5.
    std::uint64_t min_engine_bytes = 48 << 10;
    /// Smaller pieces of files must not use the copy engine. If the stream is idle, CUDA copies them with the
    /// CPU, registered or not, and a truncated file would end the process.
    std::uint64_t min_copied_bytes = 32 << 10;
    /// Rows up to this size that are not for the copy engine are gathered by the CPU. In random order only
    /// with min_staging_threads threads: samples of 52, 104 and 4 B, 65,536 a batch, arrive at 29 GB/s with
    /// 16 threads, at 18 with 4, by kernels at 20. Rows of arrays in memory with any number: pages of small
    /// ones often cannot be registered.
    std::uint64_t max_trivial_bytes = 64;
    /// From this row size on, a kernel is nearly as fast in any order.
    std::uint64_t min_unsorted_bytes = 2 << 10;
    /// Gathers from tables up to this size are not sorted: the GPU's address translation covers the table, so
    /// that the order of rows does not matter. Rows of 64 B arrive at 26 GB/s from 512 MiB in either order,
    /// and from 1 GiB at 6 unsorted, 25 sorted. A row exchange may sort smaller tables if a route was
    /// requested or measured.
    std::uint64_t covered_bytes = 512 << 20;
    /// Memory per slot and array for pieces below min_copied_bytes, at boundaries between registrations.
    std::uint64_t short_pieces_bytes = 32 << 10;
    /// After a copy or a read that waited for storage, rows are read with pread until this many
    /// consecutive reads have not waited.
    int reads_after_wait = 16;

    // ---- registering while rows are delivered
    double register_gbps = 28;  ///< pages in the page cache: 15 to 50, by machine; more threads gain nothing
    double stage_gbps_per_core = 5;  ///< the CPU gathers rows into staging buffers
    /// From so many passes over the pages on, rows count as coming again. Two passes are faster in place, one
    /// is faster staged with many cores; windows that overlap by one element take a little more than one.
    double min_passes = 1.5;
    double max_stage_gbps = 50;
    /// One thread registers, another one brings pages into the page table. With no more cores than this, rows
    /// wait for their pages, and loads only copy from pages.
    unsigned registering_cores = 2;
    /// While pages are registered, three quarters of the loader's threads gather rows, but at least this
    /// many. A loader with no more threads than this uses all but one, or its only one. If all cores gather
    /// rows, registration is slower.
    unsigned min_beside_registering = 3;
    unsigned max_beside_registering = 12;  ///< enough to gather rows at the rate of the link
    /// From this many cores on (4 and 16 were measured), rows for the copy engine on unregistered pages are
    /// read with pread. Threads that touch mapped pages for the first time slow down registration and each
    /// other.
    unsigned min_reading_cores = 10;
    /// Registered by one call. If the reader is close behind, one or two pieces are skipped, and their rows
    /// are staged.
    std::uint64_t piece_bytes = 32 << 20;
    /// The longest that rows wait for their pages while registration makes no progress.
    std::chrono::milliseconds max_page_wait{1000};

    // ---- batches that are filled together
    std::uint64_t group_bytes = 16 << 20;  ///< for a GPU: enough to hide the time between two groups
    /// For a GPU, if rows are read with pread, or all pass through shared staging buffers: one epoch that was
    /// read reached 52.7 GB/s, and 48.8 in groups of 16 MiB.
    std::uint64_t read_group_bytes = 32 << 20;
    /// Staging buffers of a loader, two for each thread. Together they should fit into the CPU's last-level
    /// cache, and each copy should be long: with 16 threads, buffers of 512 KiB, 1, 2 and 4 MiB reached 27,
    /// 41, 46 and 36 GB/s from ext4 (an H100).
    std::uint64_t staging_buffer_bytes = 2 << 20;
    /// If every array that is not held has fewer bytes in a batch, rows are staged in the slots, whose copies
    /// are enqueued together. Otherwise rows of all of them may pass through the shared buffers.
    std::uint64_t min_buffered_bytes = 1 << 20;
    unsigned max_staging_buffers = 32;  ///< more threads than 16 were not measured; they share these
    /// On the host, for each thread of the loader: copying takes some 100 us, waking a thread 10 us. Slots
    /// are reused sooner if groups are small, so that more of their memory is still in the CPU's cache: with
    /// 4 MiB, one machine was slower by a fifth, and another one faster by as much.
    std::uint64_t host_group_bytes = 2 << 20;
    std::uint64_t max_host_group_bytes = 4 << 20;  ///< on the host: more threads fill several groups
    unsigned max_group_batches = 64;
    unsigned groups_of_slots = 4;           ///< for a GPU: groups that the slots form; 8 are slower
    unsigned buffered_groups_of_slots = 8;  ///< the same, if all rows pass through shared staging buffers
    unsigned host_groups_of_slots = 4;      ///< on the host: two being filled, one ready, one in use
    /// Groups that are filled at the same time, if all rows pass through shared staging buffers. With more,
    /// the first ones are late: one epoch of rows of 64 KiB with labels reached 45 GB/s with eight, and 49
    /// GB/s with four.
    unsigned max_groups_filled = 4;
    unsigned min_slots = 8;
    /// From this number on, two threads enqueue the copies of a group, if at most one group is still being
    /// copied. One thread takes some 0.9 us a copy, or more, and the link moves 48 KiB in that time.
    std::size_t min_split_copies = 128;
    /// The threads of a loader that only computes row ids and addresses, for kernels and the copy engine.
    /// More for small samples: see bytes_while_listing.
    unsigned listing_threads = 4;
    /// What the link moves while one thread computes the id and the addresses of a sample: some 25 ns in
    /// random order, 3 in order.
    std::uint64_t bytes_while_listing = 1250;
    std::uint64_t bytes_while_listing_in_order = 150;

    // ---- the consumer
    /// If a loader's full groups have this size or more, `next` waits for the data of every batch on the
    /// calling thread. A waiting stream polls over PCIe, which costs up to 7 % of the link.
    std::uint64_t min_awaited_bytes = 8 << 20;

    // ---- calls of a row exchange
    /// Direct gathers of fewer bytes are not sorted, unless the route was requested or measured. For 2 MiB of
    /// 512-byte rows, a kernel reaches 32 GB/s sorted and 21 unsorted. Even a sort of few indices takes some
    /// 20 us.
    std::uint64_t min_sorted_bytes = 1 << 20;
    /// In larger tables, kernels alone move short rows at 26 to 35 GB/s; with the CPU's help 39 to 50.
    std::uint64_t huge_table_bytes = std::uint64_t{32} << 30;
    /// From this many on, the CPU's help pays off, also for small rows of loaders.
    unsigned min_staging_threads = 8;
    std::uint64_t min_copied_row_bytes = 16 << 10;  ///< from this row size on, `tune` tries one copy per row
    std::uint64_t min_staging_bytes = 256 << 10;    ///< smaller staging buffers are used only if required
    std::uint64_t large_table_bytes = std::uint64_t{8} << 30;  ///< tables of more bytes are large
    unsigned usual_blocks = 8;         ///< for shorter rows, but not for scatters to large tables
    unsigned long_gather_blocks = 4;   ///< for gathers of rows of min_long_bytes and more
    unsigned long_scatter_blocks = 7;  ///< for scatters of rows of min_long_scatter_bytes and more
    /// From this size on, more blocks do not make a scatter faster, and they take the link from gathers that
    /// run at the same time.
    std::uint64_t min_long_scatter_bytes = 1024;
    // kernels that wait longer for each byte: of unaligned rows, of sums, of scatters of short rows to large
    // tables
    unsigned busy_blocks = 32;        ///< if the table is not large
    unsigned busy_large_blocks = 16;  ///< if it is large
    unsigned busy_long_blocks = 8;    ///< for rows of min_long_bytes and more, in any table
    std::uint64_t min_long_bytes = 4 << 10;
    double default_staged_share = 0.4;  ///< for the hybrid route, if nothing is measured
    double min_gain = 1.05;             ///< a plan is preferred if its rate is higher by this factor
    /// Scatter throughput divided by gather throughput, by kernel. The GPU does not wait for writes.
    double direct_scatter_ratio = 1.06;
    double staged_scatter_ratio = 1.4;  ///< the same for the staged route

    // ---- loads of tensors
    /// Unless a route was requested, loads with fewer bytes that the copy engine can take are staged:
    /// page-locking costs more than it saves.
    std::uint64_t min_pinned_bytes = 32 << 20;
    /// Shorter runs of a slice are not for strided copies: runs of 64 bytes reach 35 GB/s, of 128 bytes 50.
    std::uint64_t min_run_bytes = 64;
    /// If slices of several axes leave gaps, groups of runs with fewer bytes are gathered by the CPU. Each of
    /// them would need a strided copy: 256 groups of 256 KiB took 0.87 of the time of the whole tensors,
    /// which are 8 times as large, and 0.30 if the CPU gathers them (16 cores).
    std::uint64_t min_group_bytes = 1 << 20;
    /// Strided rows are taken from registered pages, and slices by the copy engine, only if registering costs
    /// at most as much as registering this many times their own bytes. A core registers 20 to 40 GB/s, and
    /// reads 3 GB/s in runs of 4 KiB.
    std::uint64_t max_registered_ratio = 4;
    /// A system call that reads takes as long as reading this many bytes. Shorter gaps between the runs of a
    /// slice are read, too.
    std::uint64_t read_call_bytes = 3 << 10;
    /// A call to register pages takes as long as registering this many bytes. Larger gaps between the runs of
    /// a slice are not registered.
    std::uint64_t registering_call_bytes = 1 << 20;
    /// From this many threads on, loads only stage: registering pages at the same time gains little or
    /// nothing (samples/bench/NOTEBOOK.md, "what 4 cores can do, and when threads begin"). Threads that read
    /// slices more slowly than whole tensors count as fewer.
    unsigned min_load_threads = 9;
    /// Replaces min_load_threads on tmpfs while pages of an earlier load are being unregistered, which takes
    /// cores and the driver's locks. Pages of tmpfs are registered one by one, those of other file systems in
    /// groups.
    unsigned min_load_threads_while_unlocking = 4;
};

/// The shipped defaults.
inline constexpr link_profile thresholds;

}  // namespace pinflow::detail
