#include "src/device/pin_tracker.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "src/device/pin_pages.hpp"

namespace pinflow::detail {

// ---- one range -------------------------------------------------------------------------------------------

tracked_range::tracked_range(pin_range what, std::uint64_t size_of_piece)
    : range(std::move(what)),
      pages(pages_of(range.bytes)),
      piece_bytes(size_of_piece),
      states((pages.size() + piece_bytes - 1) / piece_bytes) {}

std::uint64_t tracked_range::bytes_before(std::uint64_t index) const noexcept {
    const auto lead = static_cast<std::uint64_t>(range.bytes.data() - pages.data());
    const std::uint64_t end = index * piece_bytes;
    return std::min<std::uint64_t>(end - std::min(end, lead), range.bytes.size());
}

std::uint64_t tracked_range::registered_bytes() const noexcept {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < states.size(); ++i) {
        if (is_registered(i)) sum += bytes_before(i + 1) - bytes_before(i);
    }
    return sum;
}

std::span<const std::byte> tracked_range::pages_of_piece(std::uint64_t index) const noexcept {
    const std::uint64_t offset = index * piece_bytes;
    return pages.subspan(offset, std::min<std::uint64_t>(piece_bytes, pages.size() - offset));
}

// ---- all ranges ------------------------------------------------------------------------------------------

pin_tracker::pin_tracker(std::vector<pin_range> ranges, std::uint64_t piece_bytes) {
    for (pin_range& range : ranges) {
        if (range.bytes.empty()) continue;
        total_bytes_ += range.bytes.size();
        const std::size_t first_piece =
            ranges_.empty() ? 0 : ranges_.back()->first_piece + ranges_.back()->states.size();
        ranges_.push_back(std::make_unique<tracked_range>(std::move(range), piece_bytes));
        ranges_.back()->first_piece = first_piece;
        const std::span<const std::byte> bytes = ranges_.back()->range.bytes;
        by_address_.push_back({bytes.data(), bytes.data() + bytes.size(), ranges_.back().get()});
    }
    std::ranges::sort(by_address_, [](const address_interval& a, const address_interval& b) {
        if (a.begin != b.begin) return std::less<>()(a.begin, b.begin);
        return std::greater<>()(a.end, b.end);
    });
    // a range within another one, such as a file given twice, would hide the rest of the outer range from
    // `find`
    const std::byte* covered_to = nullptr;
    std::erase_if(by_address_, [&](const address_interval& each) {
        if (!std::less<>()(covered_to, each.end)) return true;
        covered_to = each.end;
        return false;
    });
}

std::vector<pin_piece> pin_tracker::pieces() const {
    std::vector<pin_piece> pieces;
    for (const auto& tracked : ranges_) {
        for (std::uint64_t index = 0; index < tracked->states.size(); ++index)
            pieces.push_back({tracked.get(), index});
    }
    return pieces;
}

/// The range that contains the byte at `data`, or null.
tracked_range* pin_tracker::find(const std::byte* data) const noexcept {
    const auto after = std::ranges::upper_bound(by_address_, data, std::less<>(), &address_interval::begin);
    if (after == by_address_.begin() || !std::less<>()(data, std::prev(after)->end)) return nullptr;
    return std::prev(after)->tracked;
}

bool pin_tracker::covers(const std::byte* data, std::uint64_t size_bytes) const noexcept {
    do {
        const pin_run run = run_at(data, size_bytes);
        if (!run.registered) return false;
        data += run.size_bytes;
        size_bytes -= run.size_bytes;
    } while (size_bytes > 0);
    return true;
}

bool pin_tracker::may_cover(const std::byte* data, std::uint64_t size_bytes) const noexcept {
    for (;;) {
        const tracked_range* const tracked = find(data);
        if (tracked == nullptr) return false;
        const std::span<const std::byte> bytes = tracked->range.bytes;
        const std::uint64_t within =
            std::min(size_bytes, static_cast<std::uint64_t>(bytes.data() + bytes.size() - data));
        const auto begin = static_cast<std::uint64_t>(data - tracked->pages.data());
        for (std::uint64_t index = begin / tracked->piece_bytes;
             index * tracked->piece_bytes < begin + within; ++index) {
            if (tracked->state_of(index) == piece_state::left_out) return false;
        }
        if (within == size_bytes) return true;
        data += within;
        size_bytes -= within;
    }
}

pin_run pin_tracker::run_at(const std::byte* data, std::uint64_t size_bytes) const noexcept {
    const tracked_range* const tracked = find(data);
    if (tracked == nullptr) return {false, size_bytes};
    const std::span<const std::byte> bytes = tracked->range.bytes;
    const std::uint64_t within =
        std::min(size_bytes, static_cast<std::uint64_t>(bytes.data() + bytes.size() - data));
    const auto begin = static_cast<std::uint64_t>(data - tracked->pages.data());
    std::uint64_t index = begin / tracked->piece_bytes;
    const bool registered = tracked->is_registered(index);
    while (++index * tracked->piece_bytes < begin + within) {
        if (tracked->is_registered(index) != registered)
            return {registered, index * tracked->piece_bytes - begin};
    }
    return {registered, within};
}

std::uint64_t pin_tracker::registered_prefix_bytes() const noexcept {
    std::uint64_t sum = 0;
    for (const auto& tracked : ranges_) {
        std::uint64_t pieces = 0;
        while (pieces < tracked->states.size() && tracked->is_registered(pieces))
            ++pieces;
        sum += tracked->bytes_before(pieces);
        if (pieces < tracked->states.size()) break;
    }
    return sum;
}

std::uint64_t pin_tracker::registered_bytes() const noexcept {
    std::uint64_t sum = 0;
    for (const auto& tracked : ranges_)
        sum += tracked->registered_bytes();
    return sum;
}

std::optional<std::size_t> pin_tracker::piece_at(const std::byte* data) const noexcept {
    const tracked_range* const tracked = find(data);
    if (tracked == nullptr) return {};
    const auto offset = static_cast<std::uint64_t>(data - tracked->pages.data());
    return tracked->first_piece + offset / tracked->piece_bytes;
}

void pin_tracker::set_reader_position(const std::byte* data) noexcept {
    if (const auto piece = piece_at(data)) reader_piece_.store(*piece, std::memory_order_relaxed);
}

}  // namespace pinflow::detail
