#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "formats/hdf5_chunk_cache.hpp"
#include "formats/hdf5_filters.hpp"
#include "pinflow/memory.hpp"

namespace pinflow::detail {

/// Memory for decoded chunks. What is given back is kept for the next ones, up to a limit. Thread-safe.
class hdf5_chunk_pool {
 public:
    explicit hdf5_chunk_pool(std::uint64_t max_spare_bytes);

    /// Goes back by itself, even when the pool is gone. @throws system_failure when there is none,
    /// std::bad_alloc.
    hdf5_chunk_memory take(std::uint64_t size_bytes) const;

 private:
    struct spare_memory;
    std::shared_ptr<spare_memory> spare_;
};

/// What readers of datasets that were opened together take together: decoded chunks that are kept, and what
/// decoding needs besides. Thread-safe.
class hdf5_memory {
 public:
    /// Half of it for each.
    explicit hdf5_memory(std::uint64_t size_bytes)
        : hdf5_memory(size_bytes - size_bytes / 2, size_bytes / 2) {}
    hdf5_memory(std::uint64_t cache_bytes, std::uint64_t decoding_bytes);

    std::uint64_t size_bytes() const noexcept { return cache.max_bytes() + decoding_bytes_; }

    /// A number for a reader's keys in the cache.
    std::uint64_t new_reader() noexcept;

    /// For a thread that is about to decode, and takes `size_bytes` for it: waits until there is as much, or
    /// nobody else decodes. In the order in which they ask. Nobody waits for anything between this and
    /// `end_decoding`.
    void begin_decoding(std::uint64_t size_bytes);
    /// The same if that is now. @return whether it is.
    bool try_begin_decoding(std::uint64_t size_bytes);
    void end_decoding(std::uint64_t size_bytes) noexcept;

    std::unique_ptr<hdf5_chunk_decoder> take_decoder();
    void give_back(std::unique_ptr<hdf5_chunk_decoder> decoder) noexcept;

    hdf5_chunk_cache cache;
    const hdf5_chunk_pool chunks;

 private:
    bool has_room_for(std::uint64_t size_bytes) const noexcept;

    std::uint64_t decoding_bytes_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::uint64_t taken_bytes_ = 0;
    std::uint64_t next_ticket_ = 0;
    std::uint64_t now_served_ = 0;
    std::uint64_t readers_ = 0;
    std::vector<std::unique_ptr<hdf5_chunk_decoder>> decoders_;
    std::uint64_t decoder_bytes_ = 0;
};

}  // namespace pinflow::detail
