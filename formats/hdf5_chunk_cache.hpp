#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace pinflow::detail {

/// Memory of a decoded chunk, shared by all readers that copy from it.
using hdf5_chunk_memory = std::shared_ptr<std::byte>;

/// The bytes of a decoded chunk, and whether they are still shuffled.
struct hdf5_chunk_bytes {
    const std::byte* data = nullptr;
    /// The element size if the chunk is still shuffled (copying then unshuffles it); otherwise 0.
    std::uint64_t shuffle_element_bytes = 0;
};

/// A cached chunk. It keeps the chunk's memory alive.
struct hdf5_cached_chunk {
    hdf5_chunk_memory memory;
    std::uint64_t shuffle_element_bytes = 0;

    explicit operator bool() const noexcept { return memory != nullptr; }
    hdf5_chunk_bytes bytes() const noexcept { return {memory.get(), shuffle_element_bytes}; }
};

/// Identifies one chunk of one of the readers that share a cache.
struct hdf5_chunk_key {
    std::uint64_t reader = 0;
    std::uint64_t index = 0;

    friend bool operator==(const hdf5_chunk_key&, const hdf5_chunk_key&) = default;
};

/// A cache of decoded chunks that also tracks the chunks being decoded. The first caller that asks for a
/// missing chunk decodes it. Callers that ask meanwhile register the work that needs it and continue with
/// other work. The decoding thread calls them back when the chunk is decoded. So no chunk is decoded twice at
/// the same time, however small the cache is, and callers cannot deadlock by waiting for each other's chunks.
/// The lock is never held while chunks are decoded or copied.
///
/// Chunks decoded for the first time share an eighth of the cache, first in, first out, even if they are
/// requested again meanwhile, unless the cache has room for all chunks of their dataset. The rest holds
/// chunks that are wanted again (see decoded_chunk), and evicts the least recently used first. So one
/// sequential pass over a dataset takes little memory and does not evict chunks in repeated use (after 2Q by
/// Johnson and Shasha, VLDB 1994). One chunk is kept even if it is larger than the whole cache, unless the
/// cache size is 0. Thread-safe.
class hdf5_chunk_cache {
 public:
    /// A caller that asks for chunks. The decoding thread calls one of the members, once for each promise.
    class user {
     public:
        user() = default;
        user(const user&) = delete;
        user& operator=(const user&) = delete;
        /// Uses the decoded chunk. `chunk` is valid until this returns.
        virtual void use(std::size_t work, const hdf5_chunk_bytes& chunk) noexcept = 0;
        /// Decoding failed in the other thread: `ask` for the chunk again.
        virtual void ask_again(std::size_t work) noexcept = 0;

     protected:
        ~user() = default;
    };

    enum class answer : std::uint8_t {
        found,     ///< the chunk is cached
        claimed,   ///< the caller must decode it, and then call `complete` or `give_up`, without waiting for
                   ///< another thread
        promised,  ///< the user will be called back with `work`
    };

    /// A decoded chunk to be put into the cache.
    struct decoded_chunk {
        hdf5_chunk_bytes bytes;    ///< for callers that wait for it
        hdf5_chunk_memory memory;  ///< to be cached; null if it must not be
        std::uint64_t size_bytes = 0;
        /// It was decoded before, or the cache has room for all chunks of its reader.
        bool wanted_again = false;
    };

    explicit hdf5_chunk_cache(std::uint64_t max_bytes) : max_bytes_(max_bytes) {}

    std::uint64_t max_bytes() const noexcept { return max_bytes_; }
    /// Upper bound on the bytes of chunks decoded for the first time.
    std::uint64_t max_first_use_bytes() const noexcept { return max_bytes_ / 8; }
    /// The cost of a cached chunk of that size, including its entry.
    static std::uint64_t cost_bytes(std::uint64_t chunk_bytes) noexcept { return chunk_bytes + 256; }

    /// Asks for a chunk. Sets `found` only if the answer is `found`.
    answer ask(const hdf5_chunk_key& key, user& asking, std::size_t work, hdf5_cached_chunk& found);
    /// Returns the chunk if it is cached, otherwise an empty one. Claims nothing.
    hdf5_cached_chunk peek(const hdf5_chunk_key& key);
    /// Calls back the callers that wait for the chunk, and caches it.
    void complete(const hdf5_chunk_key& key, decoded_chunk chunk) noexcept;
    /// Makes the callers that wait for the chunk ask again.
    void give_up(const hdf5_chunk_key& key) noexcept;
    /// Drops the cached chunks of a reader that is being destroyed.
    void forget(std::uint64_t reader) noexcept;

 private:
    struct promise {
        user* to;
        std::size_t work;
    };
    struct entry {
        hdf5_chunk_key key;
        hdf5_cached_chunk chunk;  ///< empty while it is being decoded
        std::vector<promise> promises;
        std::uint64_t cost_bytes = 0;
        bool is_reused = false;  ///< in reused_
    };
    using entry_list = std::list<entry>;
    struct key_hash {
        std::size_t operator()(const hdf5_chunk_key& key) const noexcept;
    };

    const hdf5_cached_chunk& touch(entry_list::iterator item) noexcept;
    void evict_excess(entry_list& dropped) noexcept;
    void drop(entry_list& from, entry_list::iterator item, entry_list& dropped) noexcept;

    std::uint64_t max_bytes_;
    std::mutex mutex_;
    entry_list decoded_now_;
    entry_list first_use_;  // newest first
    entry_list reused_;     // most recently used first
    std::uint64_t first_use_bytes_ = 0;
    std::uint64_t reused_bytes_ = 0;
    std::unordered_map<hdf5_chunk_key, entry_list::iterator, key_hash> by_key_;
};

}  // namespace pinflow::detail
