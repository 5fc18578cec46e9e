#include "src/device/slab_pool.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace pinflow::detail {

void slab_pool::add(std::byte* slab, std::uint64_t size_bytes) {
    const auto added = slabs_.try_emplace(slab).first;
    try {
        added->second.free.emplace(slab, size_bytes);
    } catch (...) {
        slabs_.erase(added);
        throw;
    }
}

std::byte* slab_pool::take(std::uint64_t size_bytes) {
    for (auto& [start, slab] : slabs_) {
        const auto found =
            std::ranges::find_if(slab.free, [=](const auto& piece) { return piece.second >= size_bytes; });
        if (found == slab.free.end()) continue;
        std::byte* const piece = found->first;
        if (found->second == size_bytes) {
            slab.used.insert(slab.free.extract(found));
        } else {
            // the free piece's node is used again for the rest of it
            slab.used.emplace(piece, size_bytes);
            auto rest = slab.free.extract(found);
            rest.key() = piece + size_bytes;
            rest.mapped() -= size_bytes;
            slab.free.insert(std::move(rest));
        }
        return piece;
    }
    return nullptr;
}

/// Joins a free piece with its neighbours.
void slab_pool::join(pieces& free, pieces::iterator added) noexcept {
    if (const auto next = std::next(added);
        next != free.end() && added->first + added->second == next->first) {
        added->second += next->second;
        free.erase(next);
    }
    if (added == free.begin()) return;
    const auto before = std::prev(added);
    if (before->first + before->second != added->first) return;
    before->second += added->second;
    free.erase(added);
}

slab_pool::returned slab_pool::give_back(std::byte* piece) noexcept {
    const auto after = slabs_.upper_bound(piece);
    if (after == slabs_.begin()) return {};
    const auto of = std::prev(after);
    slab_pieces& slab = of->second;
    auto node = slab.used.extract(piece);
    if (node.empty()) return {};
    join(slab.free, slab.free.insert(std::move(node)).position);
    const auto is_empty = [](const auto& each) { return each.second.used.empty(); };
    if (!slab.used.empty() || std::ranges::count_if(slabs_, is_empty) < 2) return {true, nullptr};
    std::byte* const released = of->first;
    slabs_.erase(of);
    return {true, released};
}

}  // namespace pinflow::detail
