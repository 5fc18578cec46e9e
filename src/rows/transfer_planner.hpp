#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/rows.hpp"
#include "src/rows/link_profile.hpp"
#include "src/rows/transfer_plan.hpp"

/// Decides how rows travel, with pure functions of facts. Nothing here measures or accesses a device or a
/// file. The rules are in transfer_planner.cpp. A plan that `tune` measured is preferred to plan_by_sizes.
namespace pinflow::detail {

// ---- the arrays of a sample ------------------------------------------------------------------------------

/// Facts about one array.
struct array_facts {
    std::string name;  ///< begins a message: "'x.npy'"
    std::uint64_t row_bytes = 0;
    std::uint64_t row_count = 0;
    std::uint64_t bytes_left = 0;    ///< bytes that this loader still has to deliver
    std::uint64_t extent_count = 1;  ///< contiguous pieces that contain the rows; 0: none
    bool is_file_backed = false;
    bool is_mapped = false;         ///< every row is mapped in its delivered form
    bool is_partly_mapped = false;  ///< some rows are
    bool is_decoded = false;        ///< rows are available only through row_source::read_rows
    bool has_files = false;         ///< every extent is in a file; also true without extents
    bool has_any_file = false;      ///< some extent is in a file
    bool is_aligned = true;         ///< addresses and sizes of all rows are multiples of 16 bytes
    std::string not_mapped_reason;  ///< the end of a message that begins with `name`
};

/// Facts about a sample and the machine.
struct sample_facts {
    bool on_host = false;
    bool is_in_order = false;                          ///< the rows of a batch are consecutive
    std::uint64_t batch_rows = 1;                      ///< rows of the largest batch
    std::uint64_t epoch_batches = 1;                   ///< batches per epoch
    unsigned cores = 1;                                ///< threads that the loader may use
    bool is_guarded = false;                           ///< the fault guard is active
    std::uint64_t memory_bytes = 0;                    ///< memory that the loader may use; 0: the default
    std::optional<transfer> requested = std::nullopt;  ///< the transfer that the route option asks for
};

/// Makes one plan per array, in the order of the arrays. The largest array is never held.
/// @throws unsupported if the requested transfer cannot work.
std::vector<transfer_plan> plan_sample(const sample_facts& sample, std::span<const array_facts> arrays,
                                       const link_profile& profile = {});

// ---- calls of a row exchange -----------------------------------------------------------------------------

/// Facts about a call. Borrows `not_reached_reason`.
struct call_facts {
    bool is_scatter = false;
    bool on_host = false;
    bool has_host_ids = true;
    bool is_aligned = true;       ///< rows of the table can be moved 16 bytes at a time
    bool is_file_backed = false;  ///< the table lies in a file, which may be truncated at any time
    std::uint64_t count = 0;      ///< rows, of all batches together
    std::uint64_t row_bytes = 0;
    std::uint64_t table_bytes = 0;
    unsigned threads = 1;  ///< threads of the staged route
    std::uint64_t staging_buffer_bytes = 0;
    std::string_view not_reached_reason;  ///< why the device cannot read the table in place; empty if it can
    // from the options
    row_route requested = row_route::automatic;
    std::uint64_t staging_bytes = 0;
    unsigned blocks = 0;
    double staged_share = 0;
};

/// The plan that the options, the device or the kind of table determine.
/// @return nothing if there is a choice: then the caller takes the measured plan, or plan_by_sizes if there
/// is none.
std::optional<transfer_plan> plan_call(const call_facts& call, const link_profile& profile = {});
/// The plan for a call that was not measured.
transfer_plan plan_by_sizes(const call_facts& call, const link_profile& profile = {});

/// A plan and its rate in GB/s (1 GB is 1e9 bytes).
struct rated_plan {
    transfer_plan plan;
    double gbps = 0;  ///< 0: not measured
};
/// The gather plans that are worth measuring: kernel unsorted, kernel sorted, then others.
std::vector<transfer_plan> gather_candidates(const call_facts& call, const link_profile& profile = {});
/// The hybrid plan: kernel and staging at once, with shares by the rate that each reached alone.
transfer_plan hybrid_candidate(const call_facts& call, double kernel_gbps, double staged_gbps,
                               const link_profile& profile = {});
/// Returns the fastest plan of `measured`, which must not be empty. A later plan replaces the best so far
/// only if it is faster by `min_gain` of the profile.
const rated_plan& fastest(std::span<const rated_plan> measured, const link_profile& profile = {});
/// Chooses the transfer of a scatter from the measured throughput of sorted gathers, by kernel and staged.
/// `link` is the throughput of rows in order, which limits both. A rate of 0 means not measured.
rated_plan judge_scatter(const call_facts& call, double kernel_gbps, double staged_gbps, double link,
                         const link_profile& profile = {});
/// Whether staging buffers of this size are large enough to be used.
bool tries_staging(const call_facts& call, const link_profile& profile = {}) noexcept;
/// Thread blocks for kernels that wait longer for each byte: unaligned rows, sums, scatters to large tables.
unsigned busy_blocks(const call_facts& call, const link_profile& profile = {}) noexcept;

}  // namespace pinflow::detail
