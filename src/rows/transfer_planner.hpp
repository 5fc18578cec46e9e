#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/row_source.hpp"
#include "pinflow/rows.hpp"
#include "src/core/checked.hpp"
#include "src/rows/transfer_plan.hpp"

/// Decides how the rows of samples, the rows of calls, and the bytes of loads to a GPU travel: functions of
/// facts, which measure nothing. Only plan_load_transfer accesses files, through two functions of its facts.
/// The rules are in transfer_planner.cpp, the thresholds in link_profile.hpp. What belongs to one transfer is
/// planned elsewhere: thread blocks in route_plan.cpp, the units of a load in load_plan.cpp.
namespace pinflow::detail {

// ---- the arrays of a sample ------------------------------------------------------------------------------

/// Facts about one array.
struct array_facts {
    std::string name;  ///< begins a message: "'x.npy'"
    std::uint64_t row_bytes = 0;
    std::uint64_t row_count = 0;
    std::uint64_t span_bytes =
        0;  ///< that the extents span: fewer than size_bytes if rows overlap, more with gaps
    std::uint64_t bytes_left = 0;    ///< bytes that this loader still has to deliver
    std::uint64_t extent_count = 1;  ///< 0: rows come only from row_source::read_rows
    bool is_file_backed = false;     ///< as row_source::file_backed
    bool is_mapped = false;          ///< every row is mapped in its delivered form
    bool is_partly_mapped = false;   ///< some rows are
    bool is_decoded = false;         ///< rows are available only through row_source::read_rows
    bool is_callers_own = false;     ///< the same, and the source is none of pinflow's
    bool has_files = false;          ///< every extent is in a file; also true without extents
    bool has_any_file = false;       ///< some extent is in a file
    bool is_strided = false;         ///< rows of an extent overlap, or have gaps between them
    bool is_aligned = true;          ///< addresses and sizes of all rows are multiples of 16 bytes
    std::string not_mapped_reason;   ///< the end of a message that begins with `name`

    std::uint64_t size_bytes() const noexcept { return saturated(row_bytes, row_count); }
};

/// One array of a loader's samples: its source, facts and plan.
struct sample_array {
    std::shared_ptr<const row_source> source;  ///< not used by the planner
    array_facts facts;
    transfer_plan plan = {};         ///< written by plan_sample
    std::uint64_t offset_bytes = 0;  ///< offset of its rows in a side of a slot

    std::uint64_t row_bytes() const noexcept { return facts.row_bytes; }
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
    std::uint64_t max_staging_bytes = 0;               ///< the most for shared staging buffers
    std::optional<transfer> requested = std::nullopt;  ///< the transfer that the route option asks for
};

/// Staging buffers that all batches of a loader share.
struct staging_plan {
    std::size_t count = 0;
    std::uint64_t buffer_bytes = 0;

    std::uint64_t size_bytes() const noexcept { return count * buffer_bytes; }
};

/// Writes the plan of each array, which must have none. The largest array is never held.
/// @return the staging buffers through which rows of arrays with plan.is_buffered pass; none if there are no
/// such arrays.
/// @throws unsupported if the requested transfer cannot work.
staging_plan plan_sample(const sample_facts& sample, std::span<sample_array> arrays);

/// How the CPU gets rows.
enum class row_access : std::uint8_t {
    memory,  ///< copied from the mapping
    source,  ///< by row_source::read_rows
};

/// Facts about rows that the CPU is about to gather.
struct access_facts {
    bool is_mapped = false;          ///< some rows are mapped, and the plan does not ask for reads
    bool is_file_backed = false;     ///< some extent is in a file
    bool can_be_guarded = false;     ///< the fault guard works on this thread
    bool has_waited_lately = false;  ///< for storage, fewer than reads_after_wait reads ago
};
/// How the CPU gets these rows. Rows that then turn out not to be mapped, or to be lost, are read.
row_access plan_access(const access_facts& rows) noexcept;

// ---- calls of a row exchange -----------------------------------------------------------------------------

/// Where the indices of a call are.
enum class ids_in : std::uint8_t { host_memory, device_memory };

/// Facts about a call. Borrows `not_reached_reason`.
struct call_facts {
    bool is_scatter = false;
    bool on_host = false;
    ids_in ids = ids_in::host_memory;
    bool is_aligned = true;       ///< rows of the table can be moved 16 bytes at a time
    bool is_file_backed = false;  ///< the table lies in a file, which may be truncated at any time
    bool can_stage = true;        ///< there are staging buffers, or they can be made
    std::uint64_t count = 0;      ///< rows, of all batches together
    std::uint64_t row_bytes = 0;
    std::uint64_t table_bytes = 0;
    unsigned threads = 1;  ///< threads of the staged route
    std::uint64_t staging_buffer_bytes = 0;
    /// Why the device cannot read the table in place; empty if it can.
    std::string_view not_reached_reason = {};  // NOLINT(readability-redundant-member-init): g++ wants it
    // from the options
    row_route requested = row_route::automatic;
    std::uint64_t staging_bytes = 0;
    unsigned blocks = 0;
    double staged_share = 0;
};

/// A plan and its rate in GB/s (1 GB is 1e9 bytes).
struct rated_plan {
    transfer_plan plan;
    double gbps = 0;  ///< 0: not measured
};

/// Whether the options, the device and the kind of table leave a choice, so that plans are worth measuring.
bool has_choice(const call_facts& call);
/// Plans a call. The options, the device or the kind of table may determine the plan. Otherwise it is
/// `measured`, if that needs no staging buffers that are missing. Otherwise sizes decide.
/// @param measured the plan that was measured for such calls
rated_plan plan_call(const call_facts& call, std::optional<rated_plan> measured = std::nullopt);

/// The gather plans that are worth measuring: kernel unsorted, kernel sorted, then others.
std::vector<transfer_plan> gather_candidates(const call_facts& call);
/// The hybrid plan: kernel and staging at once. They share the link, so each gets a part of the rows by the
/// rate that it reached alone, and both finish at the same time.
transfer_plan hybrid_candidate(const call_facts& call, double kernel_gbps, double staged_gbps);
/// Returns the fastest plan of `measured`, which must not be empty. A later plan replaces the best so far
/// only if it is faster by `min_gain` of the thresholds.
const rated_plan& fastest(std::span<const rated_plan> measured);
/// Chooses the transfer of a scatter from the measured throughput of sorted gathers, by kernel and staged.
/// `link_gbps` is the throughput of rows in order, which limits both. A rate of 0 means not measured.
rated_plan judge_scatter(const call_facts& call, double kernel_gbps, double staged_gbps, double link_gbps);

// ---- loads of tensors ------------------------------------------------------------------------------------

/// Facts about a load to a GPU, which copies each byte once.
struct load_facts {
    std::uint64_t copyable_bytes = 0;  ///< bytes that the copy engine can read in the pages of the files
    bool is_all_copyable = false;
    unsigned cores = 1;
    unsigned threads = 1;        ///< that may read files
    double read_rate_ratio = 1;  ///< a thread's rate with the copyable bytes, divided by that of long reads
    bool is_unlocking = false;   ///< pages of earlier loads are being unlocked
    /// What the route option asks for; empty: a choice.
    std::vector<transfer_part> requested = {};  // NOLINT(readability-redundant-member-init): g++ wants it
    // called only if the answer matters, because it takes system calls
    std::function<bool()> is_in_page_cache;
    std::function<bool()> is_on_tmpfs;
};

/// Plans a load. The parts of the plan are the copy engine, staged, or both: the copy engine then begins with
/// the first units, staging with the last, until they meet. What the copy engine cannot take is always
/// staged.
/// @throws unsupported if the copy engine alone was requested and cannot take everything.
transfer_plan plan_load_transfer(const load_facts& load);

}  // namespace pinflow::detail
