#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// Page-locked blocks for the indices and errors of calls. A block is reused once the streams that used it
/// have passed. For one thread at a time.
class pinned_scratch {
 public:
    explicit pinned_scratch(pinflow::device device) : device_(device) {}
    pinned_scratch(const pinned_scratch&) = delete;
    pinned_scratch& operator=(const pinned_scratch&) = delete;
    /// Waits until the streams no longer use the blocks.
    ~pinned_scratch();

    class block {
     public:
        explicit block(pinflow::device device, std::uint64_t size_bytes)
            : memory_(size_bytes, device), used_(device) {}
        std::byte* data() const noexcept { return memory_.data(); }

     private:
        friend class pinned_scratch;
        pinned_buffer memory_;
        event used_;
        bool taken_ = false;
    };

    /// Takes a block of at least `size_bytes`. The caller owns it until `give_back`.
    /// @throws device_error.
    block& take(std::uint64_t size_bytes);
    /// The two steps of `take`, for users that allocate without their lock. `find` returns null if no block
    /// is free.
    block* find(std::uint64_t size_bytes);
    std::list<block> allocate(std::uint64_t size_bytes) const;
    block& add(std::list<block> allocated) noexcept;
    /// Returns a block. It is reused once `stream` has completed the work enqueued so far.
    void give_back(block& used, stream_view stream);
    /// The first step of that: marks `stream`'s work so far as the last use.
    static void mark(block& used, stream_view stream) { used.used_.record(stream); }
    /// Returns a block that no stream uses any more, or that is marked.
    static void give_back(block& used) noexcept { used.taken_ = false; }

 private:
    pinflow::device device_;
    std::list<block> blocks_;
};

/// Owns a block until it is given back. The destructor returns a block that no stream uses.
class taken_block {
 public:
    taken_block() noexcept = default;
    taken_block(pinned_scratch& from, std::uint64_t size_bytes)
        : from_(&from), block_(&from.take(size_bytes)) {}
    taken_block(taken_block&& other) noexcept
        : from_(other.from_), block_(std::exchange(other.block_, nullptr)) {}
    taken_block& operator=(taken_block&& other) noexcept {
        std::swap(from_, other.from_);
        std::swap(block_, other.block_);
        return *this;
    }
    taken_block(const taken_block&) = delete;
    taken_block& operator=(const taken_block&) = delete;
    ~taken_block() {
        if (block_ != nullptr) pinned_scratch::give_back(*block_);
    }

    explicit operator bool() const noexcept { return block_ != nullptr; }
    std::byte* data() const noexcept { return block_->data(); }
    /// Returns the block, if there is one. It is reused once `stream` has completed the work enqueued so far.
    void give_back(stream_view stream) {
        if (block_ == nullptr) return;
        from_->give_back(*block_, stream);
        block_ = nullptr;
    }

 private:
    pinned_scratch* from_ = nullptr;
    pinned_scratch::block* block_ = nullptr;
};

/// One piece of device memory, cut into parts for one call.
class device_scratch {
 public:
    /// Adds a part of `size_bytes`, aligned to 256 bytes. Must be called before `allocate`.
    /// @return its number.
    std::size_t add(std::uint64_t size_bytes);
    /// Allocates the memory, in the order of `stream`.
    /// @throws device_error.
    void allocate(stream_view stream);
    std::byte* part(std::size_t number) const noexcept { return memory_.data() + offsets_[number]; }
    template <typename Value>
    Value* part_as(std::size_t number) const noexcept {
        return reinterpret_cast<Value*>(part(number));
    }
    /// Frees the memory once `stream` has completed the work enqueued so far.
    void release(stream_view stream) noexcept;

 private:
    std::vector<std::uint64_t> offsets_;
    std::uint64_t size_bytes_ = 0;
    device_buffer memory_;
};

}  // namespace pinflow::detail
