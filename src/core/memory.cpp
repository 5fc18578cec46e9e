#include "pinflow/memory.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <new>
#include <unordered_set>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/error_advice.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/system.hpp"

namespace pinflow {

namespace {

constexpr std::uint64_t huge_page_bytes = std::uint64_t{2} << 20;

/// The ends of all live anonymous regions.
struct region_ends {
    std::mutex mutex;
    std::unordered_set<const std::byte*> ends;
};

/// Never destroyed: regions may live until the process ends. Takes no memory, since a destructor may be the
/// first to call it.
region_ends& live_ends() noexcept {
    alignas(region_ends) static std::byte place[sizeof(region_ends)];
    static auto& live = *new (place) region_ends;
    // a child of fork must not inherit the lock of another thread
    static const int is_registered =
        ::pthread_atfork([] { live_ends().mutex.lock(); }, [] { live_ends().mutex.unlock(); },
                         [] { live_ends().mutex.unlock(); });
    static_cast<void>(is_registered);
    return live;
}

void release_pages(std::byte* data, std::uint64_t size_bytes, void*) noexcept {
    {
        // before the pages are unmapped, and another region can end there
        region_ends& live = live_ends();
        const std::lock_guard lock(live.mutex);
        live.ends.erase(data + size_bytes);
    }
    detail::system::unmap(data, size_bytes);
    detail::region_memory_bytes -= size_bytes;
}

memory_region region_of(std::byte* data, std::uint64_t size_bytes) {
    detail::region_memory_bytes += size_bytes;
    memory_region region(data, size_bytes, release_pages);
    region_ends& live = live_ends();
    const std::lock_guard lock(live.mutex);
    live.ends.insert(data + size_bytes);
    return region;
}

}  // namespace

bool detail::is_region_end(const std::byte* end) {
    region_ends& live = live_ends();
    const std::lock_guard lock(live.mutex);
    return live.ends.contains(end);
}

memory_region::memory_region(memory_region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      release_(std::exchange(other.release_, nullptr)),
      context_(std::exchange(other.context_, nullptr)) {}

memory_region& memory_region::operator=(memory_region&& other) noexcept {
    if (this != &other) {
        const memory_region old = std::move(*this);  // released at the end of this block
        data_ = std::exchange(other.data_, nullptr);
        size_bytes_ = std::exchange(other.size_bytes_, 0);
        release_ = std::exchange(other.release_, nullptr);
        context_ = std::exchange(other.context_, nullptr);
    }
    return *this;
}

memory_region::~memory_region() {
    if (release_ != nullptr) release_(data_, size_bytes_, context_);
}

memory_region memory_region::anonymous(std::uint64_t size_bytes) {
    if (size_bytes == 0) return {};
    if (size_bytes < huge_page_bytes) {
        return region_of(detail::system::map_anonymous(size_bytes), size_bytes);
    }
    // mapped_bytes is rounded up to whole pages, because only whole pages can be unmapped
    const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    std::uint64_t mapped_bytes = 0;
    if (!detail::add(size_bytes, huge_page_bytes + page_bytes - 1, mapped_bytes)) {
        const auto code = std::make_error_code(std::errc::not_enough_memory);
        throw system_failure(
            fmt::format("cannot allocate {} bytes of memory: {}", size_bytes, detail::described(code)), code);
    }
    mapped_bytes -= mapped_bytes % page_bytes;
    std::byte* const begin = detail::system::map_anonymous(mapped_bytes);
    const std::uint64_t misaligned = reinterpret_cast<std::uintptr_t>(begin) % huge_page_bytes;
    const std::uint64_t before = misaligned == 0 ? 0 : huge_page_bytes - misaligned;
    const std::uint64_t behind = huge_page_bytes - before;
    if (before > 0) detail::system::unmap(begin, before);
    detail::system::unmap(begin + mapped_bytes - behind, behind);
    detail::system::advise(begin + before, size_bytes, MADV_HUGEPAGE);
    return region_of(begin + before, size_bytes);
}

}  // namespace pinflow
