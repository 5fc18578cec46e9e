#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pinflow/rows.hpp"
#include "src/rows/link_profile.hpp"
#include "src/rows/transfer_plan.hpp"

/// Decides how rows travel. Pure functions of facts: nothing here measures, or touches a device or a file.
/// Every rule is in transfer_planner.cpp.
namespace pinflow::detail {

// ---- the arrays of a sample ------------------------------------------------------------------------------

/// What is known of one array.
struct array_facts {
    std::string name;  ///< as it begins a sentence: "'x.npy'"
    std::uint64_t row_bytes = 0;
    std::uint64_t row_count = 0;
    std::uint64_t bytes_left = 0;    ///< that this loader has still to deliver
    std::uint64_t extent_count = 1;  ///< pieces that the rows lie in, without a gap within a piece; 0: none
    bool is_file_backed = false;
    bool is_mapped = false;         ///< every row lies in the address space as it is delivered
    bool is_partly_mapped = false;  ///< some do
    bool is_decoded = false;        ///< only row_source::read_rows gives rows
    bool has_files = false;         ///< every row can be read from a file as it is delivered
    bool has_any_file = false;      ///< some can
    bool is_aligned = true;         ///< every row lies at a multiple of 16 bytes, and has such a size
    std::string not_mapped_reason;  ///< the end of a sentence that begins with `name`
};

/// What is known of a sample and the machine.
struct sample_facts {
    bool on_host = false;
    bool is_in_order = false;                      ///< the rows of a batch follow each other
    std::uint64_t batch_rows = 1;                  ///< of the largest batch
    std::uint64_t epoch_batches = 1;               ///< in an epoch
    unsigned cores = 1;                            ///< threads that the loader may use
    bool is_guarded = false;                       ///< the fault guard is active
    std::uint64_t memory_bytes = 0;                ///< that the loader may take; 0: the default
    std::optional<transfer> asked = std::nullopt;  ///< by the route option
};

/// One plan for each array, in their order. Of the arrays the largest is never held.
/// @throws unsupported, with a sentence, if the transfer that was asked for cannot work.
std::vector<transfer_plan> plan_sample(const sample_facts& sample, std::span<const array_facts> arrays,
                                       const link_profile& profile = {});

/// Batches that are filled, copied and announced together, and the slots for that.
struct group_plan {
    unsigned batches = 1;    ///< at most, of one group
    unsigned max_slots = 0;  ///< unless the caller says how many
};
group_plan plan_groups(const sample_facts& sample, std::span<const transfer_plan> plans,
                       std::uint64_t batch_bytes, const link_profile& profile = {});

/// What keeps the CPU busy at a time.
struct work_facts {
    bool copies = false;     ///< the CPU moves rows of some array
    bool registers = false;  ///< pages are being registered beside it
};
/// Threads that the stages of a loader are run by.
unsigned count_threads(const work_facts& work, unsigned cores, const link_profile& profile = {}) noexcept;

/// Whether `next` waits on the calling thread for the data of groups of `group_bytes`, and not only on its
/// stream.
bool is_awaited(bool on_host, std::uint64_t group_bytes, const link_profile& profile = {}) noexcept;

// ---- calls of a row exchange -----------------------------------------------------------------------------

/// What is known of a call.
struct call_facts {
    bool is_scatter = false;
    bool on_host = false;
    bool has_host_ids = true;
    bool is_aligned = true;   ///< rows of the table can be moved 16 bytes at a time
    bool reads_file = false;  ///< the table lies in a file, which may be truncated at any time
    std::uint64_t row_bytes = 0;
    std::uint64_t table_bytes = 0;
    std::uint64_t staging_buffer_bytes = 0;
    std::string not_reached_reason;  ///< why the device cannot read the table where it lies; empty if it can
    // what the options say
    row_route asked = row_route::automatic;
    unsigned blocks = 0;
    double staged_share = 0;
};

/// The plan for a call, if it takes no measurement.
std::optional<transfer_plan> plan_call(const call_facts& call, const link_profile& profile = {});
/// For a call that could not be measured.
transfer_plan plan_unmeasured(const call_facts& call, std::string reason, const link_profile& profile = {});

/// A plan and what it reached, in GB (1e9 bytes) a second.
struct rated_plan {
    transfer_plan plan;
    double gbps = 0;
};
/// Gathers that are worth measuring: two by kernel, of which the second is sorted, then others.
std::vector<transfer_plan> gather_candidates(const call_facts& call, const link_profile& profile = {});
/// Kernel and staging at once, by what each reached alone.
transfer_plan hybrid_candidate(const call_facts& call, double kernel_gbps, double staged_gbps,
                               const link_profile& profile = {});
/// The first that is clearly faster than those before it.
const rated_plan& fastest(std::span<const rated_plan> measured, const link_profile& profile = {});
/// Chooses the transfer of a scatter from the measured throughput of sorted gathers, by kernel and staged.
/// `link` is the throughput of rows in order, the upper limit of both. A rate of 0 means not measured.
rated_plan judge_scatter(const call_facts& call, double kernel_gbps, double staged_gbps, double link,
                         const link_profile& profile = {});
/// Whether staging buffers of this size are worth measuring.
bool tries_staging(const call_facts& call, const link_profile& profile = {}) noexcept;
/// Thread blocks for kernels with more work for each byte than a copy: unaligned batches, and sums.
unsigned busy_blocks(const call_facts& call, const link_profile& profile = {}) noexcept;

}  // namespace pinflow::detail
