#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pinflow::detail {

/// How rows travel between files or memory and the place where batches are consumed.
enum class transfer : std::uint8_t {
    held,         ///< read once, kept where batches are consumed, gathered there
    copy_engine,  ///< copied by the copy engine, from registered pages
    kernel,       ///< gathered from, or scattered to, registered pages by a kernel
    staged,       ///< gathered or placed by the CPU in a pinned staging buffer, which the copy engine carries
    decode,       ///< as staged, of rows that only row_source::read_rows gives
    read,         ///< as staged, read from the file whether or not it is mapped
    slot_copy,    ///< host device: copied into the slot
    view,         ///< host device: the mapping itself
};

/// "held", "copy engine", "kernel", "staged", "decode", "read", "slot copy", "view".
std::string_view to_string(transfer transfer) noexcept;

/// Some of the rows, and what moves them.
struct transfer_part {
    transfer how = transfer::staged;
    double share = 1;                   ///< of the rows of each call or batch
    bool sorted = false;                ///< kernel: rows are taken in the order of their addresses
    unsigned blocks = 0;                ///< kernel: thread blocks; 0: as many as there is work for
    std::uint64_t min_piece_bytes = 0;  ///< copy engine: smaller pieces are staged; 0: none
};

/// Page-locking the mapped pages of an array while its rows are delivered.
struct registration {
    bool is_required = false;  ///< the loader waits for it, and cannot do without
    bool is_awaited = false;   ///< rows wait for their pages rather than be staged
    /// Whether pages whose rows were staged before they were registered are registered in the end.
    bool registers_rest = true;
    std::uint64_t piece_bytes = 0;  ///< registered by one call; 0: the usual
};

/// How the rows of one array of a sample, or of one call of a row exchange, travel. A plan for an array says
/// what happens to rows whose pages are registered; `fallback` is for the others, and for pieces smaller
/// than `min_piece_bytes`.
struct transfer_plan {
    std::vector<transfer_part> parts;  ///< at least one; of a row exchange's hybrid route two
    std::optional<transfer> fallback;
    std::optional<registration> pages;  ///< of an array whose pages are registered
    std::string reason;                 ///< one sentence: why this plan

    /// What moves most rows.
    transfer main() const { return parts.front().how; }
    /// The part that is moved by `how`; null if there is none.
    const transfer_part* find(transfer how) const {
        const auto found = std::ranges::find(parts, how, &transfer_part::how);
        return found == parts.end() ? nullptr : &*found;
    }
};

}  // namespace pinflow::detail
