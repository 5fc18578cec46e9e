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

/// A pool of memory for decoded chunks. Keeps released memory of 256 KiB or more for later chunks of the same
/// size, up to a limit. Thread-safe.
class hdf5_chunk_pool {
 public:
    explicit hdf5_chunk_pool(std::uint64_t max_spare_bytes);

    /// Takes or allocates memory. It is returned when the last pointer is destroyed, which may be after the
    /// pool.
    /// @throws system_failure if no memory is left; std::bad_alloc.
    hdf5_chunk_memory take(std::uint64_t size_bytes) const;

 private:
    struct spare_memory;
    std::shared_ptr<spare_memory> spare_;
};

/// The memory that the readers of datasets opened by one call share: cached decoded chunks, and memory for
/// decoding. Thread-safe.
class hdf5_memory {
 public:
    /// Divides `size_bytes` in half between the cache and decoding.
    explicit hdf5_memory(std::uint64_t size_bytes)
        : hdf5_memory(size_bytes - size_bytes / 2, size_bytes / 2) {}
    hdf5_memory(std::uint64_t cache_bytes, std::uint64_t decoding_bytes);

    std::uint64_t size_bytes() const noexcept { return cache.max_bytes() + decoding_bytes_; }

    /// A new number for the cache keys of one reader.
    std::uint64_t new_reader() noexcept;

    /// Reserves `size_bytes` for a thread that is about to decode. Waits until that much is free, or no other
    /// thread decodes; threads are served in the order of their calls. A thread must not wait for another
    /// thread between this and `end_decoding`.
    void begin_decoding(std::uint64_t size_bytes);
    /// The same without waiting; does not overtake a thread that waits.
    /// @return whether the memory is reserved.
    bool try_begin_decoding(std::uint64_t size_bytes);
    void end_decoding(std::uint64_t size_bytes) noexcept;

    /// A decoder that was given back, or a new one.
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
