#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace pinflow::detail {

/// Memory of a decoded chunk, shared by those who copy from it.
using hdf5_chunk_memory = std::shared_ptr<std::byte>;

/// How the bytes of a decoded chunk lie.
struct hdf5_chunk_bytes {
    const std::byte* data = nullptr;
    /// When it is still shuffled, which those who copy from it undo: the size of elements; otherwise 0.
    std::uint64_t shuffled_bytes = 0;
};

/// A chunk that was found, there as long as this is.
struct hdf5_kept_chunk {
    hdf5_chunk_memory memory;
    std::uint64_t shuffled_bytes = 0;

    explicit operator bool() const noexcept { return memory != nullptr; }
    hdf5_chunk_bytes bytes() const noexcept { return {memory.get(), shuffled_bytes}; }
};

/// One chunk of one reader among those that share a cache.
struct hdf5_chunk_key {
    std::uint64_t reader = 0;
    std::uint64_t index = 0;

    friend bool operator==(const hdf5_chunk_key&, const hdf5_chunk_key&) = default;
};

/// The chunks decoded last, and those being decoded now. The first caller that asks for a
/// missing chunk decodes it. Callers that ask meanwhile register what they need from it and continue with
/// other work. The decoding thread calls them back when the chunk is decoded. So no chunk is decoded twice
/// at the same time, however small the cache is, and no caller waits for a chunk while others wait for that
/// caller. The lock is never held while chunks are decoded or copied.
///
/// Chunks decoded for the first time pass through an eighth of the cache, in the order in which they came;
/// the rest is for those that were wanted again later, the one used last first. So who goes through a
/// dataset once takes little memory, and does not push out what others come back to (after the 2Q of Johnson
/// and Shasha, VLDB 1994). One chunk is kept even when it is larger than all of the cache, unless that has no
/// bytes at all. Thread-safe.
class hdf5_chunk_cache {
 public:
    /// One who asks for chunks: called by another thread, once for each promise.
    class user {
     public:
        user() = default;
        user(const user&) = delete;
        user& operator=(const user&) = delete;
        /// `chunk` is there until this returns.
        virtual void use(std::size_t work, const hdf5_chunk_bytes& chunk) noexcept = 0;
        /// The other one failed: the chunk is to be asked for again.
        virtual void ask_again(std::size_t work) noexcept = 0;

     protected:
        ~user() = default;
    };

    enum class answer : std::uint8_t {
        found,     ///< here it is
        claimed,   ///< it is the caller's to decode, who calls `complete` or `give_up` without waiting for
                   ///< anything
        promised,  ///< the user will be called, `work` telling for what
    };

    /// A chunk on its way into the cache.
    struct decoded_chunk {
        hdf5_chunk_bytes bytes;    ///< for those who wait for it
        hdf5_chunk_memory memory;  ///< to be kept; null when it is not to be
        std::uint64_t size_bytes = 0;
        bool wanted_again = false;  ///< it was here before, or will be wanted for sure
    };

    explicit hdf5_chunk_cache(std::uint64_t max_bytes) : max_bytes_(max_bytes) {}

    std::uint64_t max_bytes() const noexcept { return max_bytes_; }
    /// What chunks decoded for the first time can take.
    std::uint64_t max_passing_bytes() const noexcept { return max_bytes_ / 8; }
    /// What a kept chunk of that size counts for, its entry included.
    static std::uint64_t cost_bytes(std::uint64_t chunk_bytes) noexcept { return chunk_bytes + 256; }

    /// `found` is set with that answer only.
    answer ask(const hdf5_chunk_key& key, user& asking, std::size_t work, hdf5_kept_chunk& found);
    /// The chunk when it is kept, otherwise none; claims nothing.
    hdf5_kept_chunk peek(const hdf5_chunk_key& key);
    /// Serves those who wait for the chunk, and keeps its memory.
    void complete(const hdf5_chunk_key& key, decoded_chunk chunk) noexcept;
    /// Sends those who wait for the chunk to ask again.
    void give_up(const hdf5_chunk_key& key) noexcept;
    /// Drops what is kept of a reader that is done.
    void forget(std::uint64_t reader) noexcept;

 private:
    struct promise {
        user* to;
        std::size_t work;
    };
    struct entry {
        hdf5_chunk_key key;
        hdf5_kept_chunk chunk;  ///< none while it is decoded
        std::vector<promise> promises;
        std::uint64_t cost_bytes = 0;
        bool in_kept = false;  ///< or in passing_
    };
    using entry_list = std::list<entry>;
    struct key_hash {
        std::size_t operator()(const hdf5_chunk_key& key) const noexcept;
    };

    const hdf5_kept_chunk& touch(entry_list::iterator place) noexcept;
    void drop_what_is_too_much(entry_list& dropped) noexcept;
    void drop(entry_list& from, entry_list::iterator place, entry_list& dropped) noexcept;

    std::uint64_t max_bytes_;
    std::mutex mutex_;
    entry_list decoded_now_;
    entry_list passing_;  // the one that came last first
    entry_list kept_;     // the one used last first
    std::uint64_t passing_bytes_ = 0;
    std::uint64_t kept_bytes_ = 0;
    std::unordered_map<hdf5_chunk_key, entry_list::iterator, key_hash> by_key_;
};

}  // namespace pinflow::detail
