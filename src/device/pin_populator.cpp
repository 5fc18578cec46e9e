#include "src/device/pin_populator.hpp"

#include <sys/mman.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <exception>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::detail {

namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int populate_read = MADV_POPULATE_READ;
constexpr int populate_write = MADV_POPULATE_WRITE;
#else
constexpr int populate_read = 22;  // Linux 5.14, newer than some C libraries
constexpr int populate_write = 23;
#endif

/// Bytes per madvise call, small enough to stop soon on a slow disk.
constexpr std::size_t part_bytes = std::size_t{4} << 20;

}  // namespace

pin_populator::pin_populator(const std::atomic<bool>& stop) : stop_(stop) {
    try {
        thread_ = system::start_thread("prefaults pages", [this] { run(); });
    } catch (const system_failure&) {
        return;  // the registration brings them in, more slowly
    }
}

pin_populator::~pin_populator() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        ending_.store(true, std::memory_order_relaxed);
        requests_.clear();
    }
    changed_.notify_all();
    thread_.join();
}

void pin_populator::add(const request& wanted) {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        requests_.push_back(wanted);
    }
    changed_.notify_all();
}

void pin_populator::wait_for_next() {
    if (!thread_.joinable()) return;
    std::unique_lock lock(mutex_);
    ++awaited_count_;
    changed_.wait(lock, [&] { return finished_count_ >= awaited_count_; });
}

bool pin_populator::is_ending() const noexcept {
    return stop_.load(std::memory_order_relaxed) || ending_.load(std::memory_order_relaxed);
}

void pin_populator::run() noexcept {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return !requests_.empty() || ending_.load(std::memory_order_relaxed); });
        if (requests_.empty()) return;
        const request next = requests_.front();
        requests_.pop_front();
        lock.unlock();
        populate(next);
        lock.lock();
        ++finished_count_;
        changed_.notify_all();
    }
}

/// Brings in read-only pages on this thread, all other pages with all cores. Pages of files and of shared
/// memory are only read, because a write fault can change the file's size on disk and modification time. For
/// pages that a truncated file has lost, the registration reports the error.
void pin_populator::populate(const request& wanted) const noexcept {
    const int how = wanted.read_only || wanted.shared ? populate_read : populate_write;
    const std::span<const std::byte> pages = wanted.pages;
    const auto bring_in = [&](std::size_t part) {
        if (is_ending()) return;
        const auto rest = pages.subspan(part * part_bytes);
        system::advise(rest.data(), std::min(part_bytes, rest.size()), how);
    };
    const std::size_t part_count = (pages.size() + part_bytes - 1) / part_bytes;
    const auto bring_in_all = [&] {
        for (std::size_t part = 0; part < part_count; ++part)
            bring_in(part);
    };
    if (wanted.read_only) return bring_in_all();
    try {
        if (part_count > 1) start_worker_threads();
        tbb::parallel_for(std::size_t{0}, part_count, bring_in);
    } catch (const std::exception&) {
        bring_in_all();  // there was no memory for tasks
    }
}

}  // namespace pinflow::detail
