#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <utility>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// Page-locked blocks for the indices and errors of calls. A block is reused once the streams that used it
/// have passed. Thread-safe. Its lock is not held while a block is allocated or an event is recorded.
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
        /// Marks `stream`'s work so far as the last use.
        void mark(stream_view stream) { used_.record(stream); }
        /// Whether the marked use is over.
        bool passed() const { return used_.done(); }
        void wait_until_passed() const { used_.synchronize(); }
        /// Makes `stream` wait until the marked use is over.
        void hold_up(stream_view stream) const { stream.wait(used_); }
        /// Returns the block. It is reused once the marked use is over.
        void give_back() noexcept { taken_.store(false, std::memory_order_release); }
        void give_back(stream_view stream) {
            mark(stream);
            give_back();
        }

     private:
        friend class pinned_scratch;
        pinned_buffer memory_;
        event used_;
        std::atomic<bool> taken_ = true;
    };

    /// Takes a block of at least `size_bytes`. The caller owns it until `give_back`.
    /// @throws device_error.
    block& take(std::uint64_t size_bytes);

 private:
    block* find(std::uint64_t size_bytes);

    pinflow::device device_;
    std::mutex mutex_;  ///< for the list
    std::list<block> blocks_;
};

/// Owns a block until it is given back. The destructor returns a block that no stream uses.
class taken_block {
 public:
    taken_block() noexcept = default;
    taken_block(pinned_scratch& from, std::uint64_t size_bytes) : block_(&from.take(size_bytes)) {}
    taken_block(taken_block&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
    taken_block& operator=(taken_block&& other) noexcept {
        std::swap(block_, other.block_);
        return *this;
    }
    taken_block(const taken_block&) = delete;
    taken_block& operator=(const taken_block&) = delete;
    ~taken_block() {
        if (block_ != nullptr) block_->give_back();
    }

    explicit operator bool() const noexcept { return block_ != nullptr; }
    std::byte* data() const noexcept { return block_->data(); }
    pinned_scratch::block* operator->() const noexcept { return block_; }
    /// Returns the block, if there is one. It is reused once `stream` has completed the work enqueued so far.
    void give_back(stream_view stream) {
        if (block_ == nullptr) return;
        block_->give_back(stream);
        block_ = nullptr;
    }

 private:
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
