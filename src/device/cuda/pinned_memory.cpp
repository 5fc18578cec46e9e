#include "src/device/cuda/pinned_memory.hpp"

#include <sys/mman.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/system.hpp"
#include "src/core/worker_threads.hpp"
#include "src/device/pin_registry.hpp"

namespace pinflow::detail::cuda {

namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int populate_write = MADV_POPULATE_WRITE;
#else
constexpr int populate_write = 23;  // Linux 5.14, newer than some C libraries
#endif

constexpr std::uint64_t page_bytes = 4096;
constexpr std::uint64_t slab_bytes = std::uint64_t{4} << 20;
constexpr std::uint64_t max_small_bytes = slab_bytes / 4;  ///< larger pieces are allocated by themselves

/// Throws if the system lacks this much memory: locking it would not fail, but make the system kill a
/// process.
void check_available(std::uint64_t size_bytes) {
    constexpr std::uint64_t small_bytes = std::uint64_t{64} << 20;  // too small to check
    if (size_bytes < small_bytes) return;
    const std::string shortage = memory_shortage(size_bytes);
    if (!shortage.empty())
        throw device_error(fmt::format("cannot page-lock {} bytes, {}", size_bytes, shortage));
}

memory_region anonymous(std::uint64_t size_bytes) {
    try {
        return memory_region::anonymous(size_bytes);
    } catch (const system_failure& failure) {
        throw device_error(fmt::format("cannot page-lock {} bytes: {}", size_bytes, failure.what()));
    }
}

/// Faults pages in with all cores. Otherwise the registration does it on one thread while it holds the
/// driver's lock. Isolated, because the caller may hold locks that its other tasks need.
void populate(std::byte* data, std::uint64_t size_bytes) {
    constexpr std::uint64_t piece_bytes = std::uint64_t{64} << 20;
    const std::uint64_t pieces = (size_bytes + piece_bytes - 1) / piece_bytes;
    if (pieces > 1) start_worker_threads();
    tbb::this_task_arena::isolate([=] {
        tbb::parallel_for(std::uint64_t{0}, pieces, [=](std::uint64_t piece) {
            const std::uint64_t begin = piece * piece_bytes;
            system::advise(data + begin, std::min(piece_bytes, size_bytes - begin), populate_write);
        });
    });
}

}  // namespace

std::byte* pinned_memory::allocate(std::uint64_t size_bytes) {
    return size_bytes <= max_small_bytes ? allocate_small(size_bytes) : allocate_pages(size_bytes);
}

std::byte* pinned_memory::allocate_small(std::uint64_t size_bytes) {
    const std::uint64_t rounded_bytes = rounded_up(size_bytes, page_bytes);
    const auto take = [&] {
        const std::lock_guard lock(mutex_);
        return slabs_.take(rounded_bytes);
    };
    std::byte* data = take();
    while (data == nullptr) {
        std::byte* const slab = allocate_pages(slab_bytes);  // without the lock, because the driver may wait
        try {
            const std::lock_guard lock(mutex_);
            slabs_.add(slab, slab_bytes);
        } catch (...) {
            release_pages(slab);
            throw;
        }
        data = take();
    }
    std::memset(data, 0, rounded_bytes);  // it may have been used before
    return data;
}

void pinned_memory::release(std::byte* data) noexcept {
    slab_pool::returned returned;
    {
        const std::lock_guard lock(mutex_);
        returned = slabs_.give_back(data);
    }
    if (!returned.was_taken) return release_pages(data);
    if (returned.slab != nullptr) release_pages(returned.slab);
}

std::byte* pinned_memory::allocate_pages(std::uint64_t size_bytes) {
    check_available(size_bytes);
    const context& context = context::for_host_memory(device_);
    memory_region region = anonymous(size_bytes);
    std::byte* const data = region.data();
    populate(data, size_bytes);
    cudaError_t status = context.run([&] { return host_register(data, size_bytes, false); });
    if (status == cudaSuccess) {
        remember(data, {std::move(region), size_bytes}, [&] { return host_unregister(data); });
        return data;
    }
    region = {};
    if (is_fatal(status)) fail(fmt::format("cannot page-lock {} bytes", size_bytes), status);
    void* allocated = nullptr;
    status = context.run([&] { return host_allocate(allocated, size_bytes); });
    check(status, "cannot page-lock {} bytes", size_bytes);
    std::memset(allocated, 0, size_bytes);
    remember(static_cast<std::byte*>(allocated), {{}, size_bytes}, [&] { return host_free(allocated); });
    return static_cast<std::byte*>(allocated);
}

template <typename GiveBack>
void pinned_memory::remember(std::byte* data, locked_pages pages, GiveBack give_back) {
    try {
        const std::lock_guard lock(mutex_);
        const auto added = registered_.try_emplace(data, std::move(pages)).first;
        pin_registry::process().add_buffer(added->second.size_bytes);
    } catch (...) {
        static_cast<void>(context::for_host_memory(device_).run(give_back));
        throw;
    }
}

void pinned_memory::release_pages(std::byte* data) noexcept {
    locked_pages pages;
    {
        const std::lock_guard lock(mutex_);
        const auto found = registered_.find(data);
        if (found == registered_.end()) return;
        pages = std::move(found->second);
        registered_.erase(found);
    }
    const bool ours = static_cast<bool>(pages.region);
    const context& context = context::for_host_memory(device_);  // the one that allocate used
    const cudaError_t status = context.run([&] { return ours ? host_unregister(data) : host_free(data); });
    // pages that CUDA still treats as registered must not be unmapped and reused: leak them
    if (ours && status != cudaSuccess) {
        static_cast<void>(new (std::nothrow) memory_region(std::move(pages.region)));
    } else {
        pin_registry::process().remove_buffer(pages.size_bytes);
    }
}

}  // namespace pinflow::detail::cuda
