#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pinflow {

/// Owns a piece of host memory and the function that releases it: one move-only type for anonymous pages
/// and mappings. Moving is cheap and leaves the source empty. Not thread-safe: only one thread at a time may
/// move it.
class memory_region {
 public:
    /// Releases the memory; must not throw.
    using release_function = void (*)(std::byte* data, std::uint64_t size_bytes, void* context) noexcept;

    memory_region() noexcept = default;
    /// Takes over `size_bytes` at `data`; `release(data, size_bytes, context)` is called exactly once.
    memory_region(std::byte* data, std::uint64_t size_bytes, release_function release,
                  void* context = nullptr) noexcept
        : data_(data), size_bytes_(size_bytes), release_(release), context_(context) {}
    memory_region(memory_region&& other) noexcept;
    memory_region& operator=(memory_region&& other) noexcept;
    memory_region(const memory_region&) = delete;
    memory_region& operator=(const memory_region&) = delete;
    ~memory_region();

    /// Allocates zero-filled private pages, aligned to 4096 bytes. From 2 MiB on they are aligned to 2 MiB,
    /// and huge pages are requested. Returns an empty region for 0 bytes.
    /// @throws system_failure if the system cannot provide the memory.
    static memory_region anonymous(std::uint64_t size_bytes);

    std::byte* data() const noexcept { return data_; }
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    std::span<std::byte> bytes() const noexcept { return {data_, size_bytes_}; }
    explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
    std::byte* data_ = nullptr;
    std::uint64_t size_bytes_ = 0;
    release_function release_ = nullptr;
    void* context_ = nullptr;
};

}  // namespace pinflow
