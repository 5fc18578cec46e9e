#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/load.hpp"
#include "src/device/pin_registry.hpp"
#include "src/rows/link_profile.hpp"
#include "tests/api/load/model_files.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/fake_locker.hpp"

namespace pinflow {

/// A device that page-locks, which is the host under another name. Records what loads copy and page-lock.
class load_backend final : public fake_cuda_backend {
 public:
    detail::fake_locker lock;
    std::atomic<std::uint64_t> pinned_bytes = 0;
    std::atomic<std::uint64_t> max_pinned_bytes = 0;
    bool has_pinned_memory = true;

    std::atomic<std::size_t> copied_pieces = 0;  ///< in calls of copy_batch_to_device
    // in calls of copy_strided_to_device
    std::atomic<std::uint64_t> strided_bytes = 0;
    std::atomic<std::size_t> cut_strided_copies = 0;  ///< across a boundary of registrations
    std::atomic<std::size_t> short_strided_copies = 0;

    // in calls of convert_to_device
    std::atomic<std::uint64_t> converted_elements = 0;
    std::atomic<std::size_t> wrong_conversions = 0;  ///< misaligned, or not from one pinned buffer

    std::mutex mutex;
    std::vector<copy_range> batch_copies;                    ///< ranges of these calls; guarded by `mutex`
    std::vector<std::span<const std::byte>> pinned_buffers;  ///< also guarded by it; all that were made

    detail::page_locker* locker() override { return &lock; }
    void copy_batch_to_device(std::span<const copy_range> ranges, void* stream) override {
        std::vector<copy_range> pieces;
        detail::pin_registry::process().cut(ranges, pieces);
        copied_pieces += pieces.size();
        {
            const std::scoped_lock guard(mutex);
            batch_copies.insert(batch_copies.end(), ranges.begin(), ranges.end());
        }
        fake_cuda_backend::copy_batch_to_device(ranges, stream);
    }
    void convert_to_device(const detail::device_conversion& work, void* stream) override {
        const std::uint64_t from_bytes = detail::size_bytes_of(work.from);
        const std::uint64_t to_bytes = detail::size_bytes_of(work.to);
        const std::byte* const end = work.source + work.count * from_bytes;
        const auto has_source = [&](std::span<const std::byte> buffer) {
            return buffer.data() <= work.source && end <= buffer.data() + buffer.size();
        };
        {
            const std::scoped_lock guard(mutex);
            if (reinterpret_cast<std::uintptr_t>(work.source) % 16 != 0 ||
                reinterpret_cast<std::uintptr_t>(work.destination) % to_bytes != 0 ||
                std::ranges::none_of(pinned_buffers, has_source))
                ++wrong_conversions;
        }
        converted_elements += work.count;
        fake_cuda_backend::convert_to_device(work, stream);
    }
    void copy_strided_to_device(const detail::strided_copy& runs, void* stream) override {
        const copy_range span{runs.destination, runs.source,
                              (runs.run_count - 1) * runs.stride_bytes + runs.run_bytes};
        std::vector<copy_range> pieces;
        detail::pin_registry::process().cut({&span, 1}, pieces);
        if (pieces.size() != 1) ++cut_strided_copies;
        if (runs.size_bytes() < detail::thresholds.min_copied_bytes) ++short_strided_copies;
        strided_bytes += runs.size_bytes();
        fake_cuda_backend::copy_strided_to_device(runs, stream);
    }
    std::byte* allocate_pinned(std::uint64_t size_bytes) override {
        if (!has_pinned_memory) throw device_error("no memory can be page-locked");
        pinned_bytes += size_bytes;
        const std::scoped_lock guard(mutex);
        max_pinned_bytes = std::max(max_pinned_bytes.load(), pinned_bytes.load());
        std::byte* const data = fake_cuda_backend::allocate_pinned(size_bytes);
        pinned_buffers.emplace_back(data, size_bytes);
        return data;
    }
    void release_pinned(std::byte* data, std::uint64_t size_bytes) noexcept override {
        pinned_bytes -= size_bytes;
        fake_cuda_backend::release_pinned(data, size_bytes);
    }
};

/// A backend that is never destroyed: its staging buffers outlive a test.
inline load_backend& new_backend() {
    static auto& all = *new std::vector<load_backend*>;
    all.push_back(new load_backend);
    return *all.back();
}

/// Tensors of 6 MB, of 64 KiB, and of less than the copy engine takes.
inline std::vector<model_tensor> large_model() {
    std::vector<model_tensor> tensors;
    for (unsigned i = 0; i < 12; ++i)
        tensors.push_back(random_tensor("w" + std::to_string(i), dtype::of<float>(), {1'500'000 + i}));
    for (unsigned i = 0; i < 300; ++i)
        tensors.push_back(random_tensor("b" + std::to_string(i), dtype::of<float>(), {1 + i * 31}));
    for (unsigned i = 0; i < 40; ++i)
        tensors.push_back(random_tensor("m" + std::to_string(i), dtype::of<float>(), {16384}));
    return tensors;
}

inline void check_equal(const loaded_tensors& loaded, const std::vector<model_tensor>& expected) {
    REQUIRE(loaded.tensors.size() == expected.size());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        if (loaded.tensors[i].name() != expected[i].name || bytes_of(loaded.tensors[i]) != expected[i].bytes)
            ++wrong;
    }
    CHECK(wrong == 0);
}

}  // namespace pinflow
