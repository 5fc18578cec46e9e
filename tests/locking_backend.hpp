#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/device/pin_registry.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/fake_locker.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/temporary_folder.hpp"

/// Shared by tests of loaders for a device that page-locks, which is the host under another name. They use
/// every transfer of a GPU, and need no GPU.
namespace pinflow {

/// Counts the loader's requests to its device.
class locking_backend final : public fake_cuda_backend {
 public:
    detail::fake_locker lock;
    std::atomic<unsigned> gathers = 0;
    std::atomic<unsigned> unaligned_gathers = 0;
    std::atomic<unsigned> sorts = 0;
    std::atomic<unsigned> held_gathers = 0;
    std::atomic<std::uint64_t> copies = 0;
    /// Called before each call that makes copies to the device, with their number and stream. May throw.
    std::function<void(std::size_t, void*)> before_copies;

    detail::page_locker* locker() override { return &lock; }
    void gather_rows(const detail::row_transfer& transfer, void* stream) override {
        ++gathers;
        if (!is_aligned(transfer)) ++unaligned_gathers;
        fake_cuda_backend::gather_rows(transfer, stream);
    }
    void sort_rows(const detail::row_sort& sort, void* stream) override {
        ++sorts;
        fake_cuda_backend::sort_rows(sort, stream);
    }
    void gather_held(const detail::held_gather& gather, void* stream) override {
        ++held_gathers;
        fake_cuda_backend::gather_held(gather, stream);
    }
    void copy_batch_to_device(std::span<const copy_range> ranges, void* stream) override {
        if (before_copies) before_copies(ranges.size(), stream);
        copies += ranges.size();
        note_copies(ranges);
        fake_cuda_backend::copy_batch_to_device(ranges, stream);
    }
    void copy_to_device(std::byte* destination, std::span<const std::byte> source, void* stream) override {
        if (before_copies) before_copies(1, stream);
        const copy_range range{destination, source.data(), source.size()};
        note_copies({&range, 1});
        fake_cuda_backend::copy_to_device(destination, source, stream);
    }

    /// The size of the smallest copy from these pages; nothing if there was none. Must not be
    /// called while copies are enqueued.
    std::optional<std::size_t> min_copy_of(std::span<const std::byte> pages) const {
        std::optional<std::size_t> min_bytes;
        for (const std::span<const std::byte> each : copied_) {
            if (is_in(pages, each)) min_bytes = std::min(min_bytes.value_or(each.size()), each.size());
        }
        return min_bytes;
    }
    /// The bytes that were copied from these pages. Must not be called while copies are enqueued.
    std::uint64_t bytes_copied_from(std::span<const std::byte> pages) const {
        std::uint64_t bytes = 0;
        for (const std::span<const std::byte> each : copied_)
            bytes += is_in(pages, each) ? each.size() : 0;
        return bytes;
    }

 private:
    static bool is_in(std::span<const std::byte> pages, std::span<const std::byte> copy) {
        return copy.data() >= pages.data() && copy.data() < pages.data() + pages.size();
    }
    /// Notes the copies, cut as the CUDA backend cuts them.
    void note_copies(std::span<const copy_range> ranges) {
        std::vector<copy_range> pieces;
        detail::pin_registry::process().cut(ranges, pieces);
        const std::lock_guard guard(mutex_);
        for (const copy_range& piece : pieces)
            copied_.emplace_back(piece.source, piece.size_bytes);
    }

    std::mutex mutex_;
    std::vector<std::span<const std::byte>> copied_;
};

/// Files of numbered rows: each word of a row is the row's number.
struct numbered_file {
    numbered_file(const temporary_folder& folder, const std::string& name, std::uint64_t rows,
                  std::uint64_t width)
        : path(folder / name) {
        write_npy(path, numbered_rows(rows, width).view());
    }
    array open() const { return open_npy(path); }
    std::filesystem::path path;
};

/// Takes all batches, each of which must hold its rows in every array of 64-bit words.
/// @return how many rows came.
inline std::uint64_t take_all(loader& batches, const std::function<void(std::uint64_t)>& after_batch = {}) {
    const stream stream(batches.device());
    std::uint64_t rows = 0;
    std::uint64_t number = 0;
    while (const auto batch = batches.next(stream)) {
        for (std::size_t a = 0; a < batch->array_count(); ++a) {
            const auto words = elements_of<std::uint64_t>(*batch, a, stream);
            const std::size_t width = words.size() / batch->row_count();
            bool right = true;
            for (std::size_t i = 0; i < words.size(); ++i)
                right = right && words[i] == batch->row_ids()[i / width];
            CHECK(right);
        }
        rows += batch->row_count();
        if (after_batch) after_batch(number++);
    }
    return rows;
}

inline constexpr std::uint64_t words_of_64k = 8192;

inline loader_options options_for(locking_backend& backend, order order = order::shuffled) {
    return {.device = backend.device(), .batch_rows = 16, .order = order, .epochs = 4};
}

inline void wait_until_pinning_ended(const loader& batches) {
    while (batches.report().pin_time.count() == 0)
        std::this_thread::yield();
}

}  // namespace pinflow
