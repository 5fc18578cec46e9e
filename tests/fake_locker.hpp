#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pinflow/mapped_file.hpp"
#include "pinflow/memory.hpp"
#include "src/device/pin_job.hpp"
#include "src/device/pin_limits.hpp"
#include "src/device/pin_registry.hpp"
#include "tests/support/file_bytes.hpp"

/// Shared by tests of page-locking: a stand-in for the driver, and pages.
namespace pinflow::detail {

inline constexpr std::uint64_t page = 4096;
inline constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;

/// Stands in for CUDA: remembers what is locked, refuses to lock a page twice, and fails or waits when a test
/// wants it.
class fake_locker final : public page_locker {
 public:
    std::optional<pin_refusal> lock(std::span<const std::byte> pages, bool read_only) override {
        std::unique_lock guard(mutex);
        ++calls;
        ++waiting;
        changed.notify_all();
        changed.wait(guard, [&] { return permits > 0; });
        --permits;
        --waiting;
        if (calls == fail_at_call || (refuse && refuse(pages, read_only)))
            return pin_refusal{"cudaErrorMemoryAllocation (out of memory)", refuses_all};
        for (const auto& other : locked) {
            if (other.data() < pages.data() + pages.size() && pages.data() < other.data() + other.size()) {
                return pin_refusal{"cudaErrorHostMemoryAlreadyRegistered"};
            }
        }
        locked.push_back(pages);
        all_read_only = all_read_only && read_only;
        return {};
    }
    bool unlock(std::span<const std::byte> pages) noexcept override {
        std::unique_lock guard(mutex);
        changed.wait(guard, [&] { return unlock_permits > 0; });
        --unlock_permits;
        const auto found = std::find_if(locked.begin(), locked.end(), [&](const auto& there) {
            return there.data() == pages.data() && there.size() == pages.size();
        });
        if (found == locked.end()) {
            ++strays;
        } else {
            if (unlocks) locked.erase(found);
        }
        return unlocks;
    }

    void yield_driver() noexcept override { ++yield_count; }

    std::uint64_t locked_bytes() {
        const std::lock_guard guard(mutex);
        std::uint64_t sum = 0;
        for (const auto& pages : locked)
            sum += pages.size();
        return sum;
    }
    std::size_t call_count() {
        const std::lock_guard guard(mutex);
        return calls;
    }
    void allow(std::size_t calls_more) {
        {
            const std::lock_guard guard(mutex);
            permits += calls_more;
            unlock_permits += calls_more;
        }
        changed.notify_all();
    }
    void await_waiting() {
        std::unique_lock guard(mutex);
        changed.wait(guard, [&] { return waiting > 0; });
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::span<const std::byte>> locked;
    std::size_t calls = 0;
    std::size_t waiting = 0;
    std::size_t permits = std::numeric_limits<std::size_t>::max() / 2;
    std::size_t unlock_permits = std::numeric_limits<std::size_t>::max() / 2;
    std::size_t fail_at_call = 0;
    std::function<bool(std::span<const std::byte> pages, bool read_only)> refuse;  // a call fails if true
    bool refuses_all = false;  // pin_refusal::same_for_others of its refusals
    std::size_t strays = 0;
    std::size_t yield_count = 0;  // read after the worker has ended
    bool all_read_only = true;
    bool unlocks = true;
};

inline std::span<const std::byte> pages_at(const memory_region& memory, std::uint64_t first,
                                           std::uint64_t count) {
    return memory.bytes().subspan(first * page, count * page);
}

/// A machine without limits, whose mappings are the real ones.
inline pin_job::machine_answers generous() {
    return {{}, read_own_maps()};
}

/// The pieces that are locked, by their numbers within `pages`, in the order of locking.
inline std::vector<std::ptrdiff_t> locked_pieces(fake_locker& locker, std::span<const std::byte> pages,
                                                 std::uint64_t piece_bytes) {
    const std::lock_guard guard(locker.mutex);
    std::vector<std::ptrdiff_t> numbers;
    for (const auto& each : locker.locked)
        numbers.push_back((each.data() - pages.data()) / static_cast<std::ptrdiff_t>(piece_bytes));
    return numbers;
}

/// A mapped file of pattern bytes.
inline std::shared_ptr<const mapped_file> map_pattern(const std::filesystem::path& path,
                                                      std::uint64_t size_bytes,
                                                      std::uint64_t offset_bytes = 0) {
    write_bytes(path, pattern_bytes(size_bytes));
    return std::make_shared<mapped_file>(std::make_shared<input_file>(path), offset_bytes,
                                         size_bytes - offset_bytes);
}

inline pin_range range_of(const std::shared_ptr<const mapped_file>& file) {
    return {file->bytes(), "'x.bin'", file};
}

}  // namespace pinflow::detail
