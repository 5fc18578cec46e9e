#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/rows.hpp"
#include "src/rows/link_profile.hpp"

namespace pinflow::detail {

/// How rows travel between files or host memory and the batches. On the host device, decode and read write
/// directly to the slot.
enum class transfer : std::uint8_t {
    held,         ///< read once, then kept and gathered on the loader's device
    copy_engine,  ///< copied by the copy engine, from or to registered pages
    kernel,       ///< gathered from, or scattered to, registered pages by a kernel
    staged,       ///< gathered or scattered by the CPU in a pinned staging buffer, copied by the copy engine
    decode,       ///< like staged, for rows available only through row_source::read_rows
    read,         ///< like staged, read from the file even if it is mapped
    slot_copy,    ///< host device: copied into the slot
    view,         ///< host device: the mapping itself
};

/// "held", "copy engine", "kernel", "staged", "decode", "read", "slot copy", "view".
std::string_view to_string(transfer transfer) noexcept;

/// A part of the rows, and how they travel.
struct transfer_part {
    transfer how = transfer::staged;
    double share = 1;  ///< of the rows of each call or batch; loads do not use it
    /// kernel, staged: rows are taken in the order of their indices, equal ones once. In a plan with two
    /// parts only the value of the first counts, and scatters are sorted, except direct ones on the host
    /// device. In the loader, a sorted kernel takes rows in the order of their addresses, and gathers a
    /// repeated row each time.
    bool sorted = false;
    unsigned blocks = 0;                ///< kernel: thread blocks; 0: as many as the work fills
    std::uint64_t min_piece_bytes = 0;  ///< copy engine: smaller pieces are not copied in place; 0: none
    /// Copy engine, in the loader: smaller pieces of longer runs are read with pread, up to this many bytes
    /// in a batch. Beyond that, rows with such pieces take the fallback.
    std::uint64_t read_piece_bytes = 0;
};

/// Page-locking the mapped pages of an array while its rows are delivered.
struct registration {
    bool is_required = false;  ///< loading fails if the pages cannot be registered
    /// Rows wait for their pages. They take the fallback only if these are refused or left out, or if
    /// registration makes no progress for max_page_wait of the thresholds.
    bool is_awaited = false;
    /// Whether pages are registered even after their rows were staged.
    bool registers_rest = true;
    std::uint64_t piece_bytes = 0;  ///< registered by one call; 0: the default
};

/// How the rows of one array of a sample, the rows of one call of a row exchange, or the units of a load
/// travel. Without `pages`, `parts`
/// apply to all rows. With `pages`, they apply to rows on registered pages, and `fallback`, if set, to the
/// other rows, and to those whose smaller pieces the loader cannot read separately.
struct transfer_plan {
    std::vector<transfer_part>
        parts;  ///< at least one; two for the hybrid route of a call, and if a load copies and stages
    std::optional<transfer> fallback;
    std::optional<registration> pages;  ///< set if a loader registers the array's pages
    std::string reason;                 ///< one sentence: why this plan
    /// In a loader: rows that are staged or read, also as a fallback, pass through staging buffers that all
    /// slots share. No slot has a staging side then.
    bool is_buffered = false;

    /// The transfer of the first part: for the hybrid route the kernel, for a load with two the copy engine.
    transfer main() const { return parts.front().how; }
    /// The part that travels by `how`; null if there is none.
    const transfer_part* find(transfer how) const {
        const auto found = std::ranges::find(parts, how, &transfer_part::how);
        return found == parts.end() ? nullptr : &*found;
    }
};

/// A plan with one part, for all rows.
inline transfer_plan only(const transfer_part& part, std::string reason) {
    return {{part}, std::nullopt, std::nullopt, std::move(reason)};
}

/// The public name of how a call of a row exchange travels.
row_route route_of(const transfer_plan& plan);

}  // namespace pinflow::detail
