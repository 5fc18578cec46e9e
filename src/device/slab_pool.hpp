#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace pinflow::detail {

/// Cuts pieces out of slabs. It knows addresses only: its owner allocates and releases the slabs. Takes the
/// lowest piece that is large enough, so that slabs at higher addresses become empty. Not thread-safe.
class slab_pool {
 public:
    /// @return a piece of `size_bytes`, at least 1; null if no slab has one.
    std::byte* take(std::uint64_t size_bytes);
    /// Adds a slab, which must not be in the pool.
    void add(std::byte* slab, std::uint64_t size_bytes);

    struct returned {
        bool was_taken = false;     ///< false: the piece is not one of this pool
        std::byte* slab = nullptr;  ///< a slab that has left the pool, because it and another one are empty
    };
    /// Returns a piece. Keeps one empty slab, for the next piece.
    returned give_back(std::byte* piece) noexcept;

 private:
    using pieces = std::map<std::byte*, std::uint64_t>;  ///< sizes by address
    struct slab_pieces {
        pieces free;  ///< no two of them touch
        pieces used;
    };
    static void join(pieces& free, pieces::iterator added) noexcept;

    std::map<std::byte*, slab_pieces> slabs_;  ///< by their first addresses
};

}  // namespace pinflow::detail
