#include "src/device/pin_reservations.hpp"

#include <iterator>

namespace pinflow::detail {

bool pin_reservations::add(std::span<const std::byte> pages, std::uint64_t budget_bytes) {
    if (pages.empty()) return true;
    const auto begin = reinterpret_cast<std::uintptr_t>(pages.data());
    const edges::iterator first = use_edge(begin);
    edges::iterator last;
    try {
        last = use_edge(begin + pages.size());
    } catch (...) {
        drop_edge(first);
        throw;
    }
    std::uint64_t new_bytes = 0;
    for (auto at = first; at != last; ++at) {
        if (at->second.holders == 0) new_bytes += std::next(at)->first - at->first;
    }
    if (new_bytes > 0 && size_bytes_ + new_bytes > budget_bytes) {
        drop_edge(last);
        drop_edge(first);
        return false;
    }
    for (auto at = first; at != last; ++at)
        ++at->second.holders;
    size_bytes_ += new_bytes;
    return true;
}

void pin_reservations::remove(std::span<const std::byte> pages) noexcept {
    if (pages.empty()) return;
    const auto begin = reinterpret_cast<std::uintptr_t>(pages.data());
    const auto first = edges_.find(begin);
    const auto last = edges_.find(begin + pages.size());
    if (first == edges_.end() || last == edges_.end()) return;
    for (auto at = first; at != last; ++at) {
        if (--at->second.holders == 0) size_bytes_ -= std::next(at)->first - at->first;
    }
    drop_edge(last);
    drop_edge(first);
}

pin_reservations::edges::iterator pin_reservations::use_edge(std::uintptr_t address) {
    const auto after = edges_.upper_bound(address);
    const std::uint64_t holders = after == edges_.begin() ? 0 : std::prev(after)->second.holders;
    const auto there = edges_.try_emplace(after, address, edge{holders, 0});
    ++there->second.uses;
    return there;
}

void pin_reservations::drop_edge(edges::iterator which) noexcept {
    // nothing begins or ends here any more, so the pages on both sides have the same holders
    if (--which->second.uses == 0) edges_.erase(which);
}

}  // namespace pinflow::detail
