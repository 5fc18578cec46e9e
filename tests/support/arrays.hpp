#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "devices.hpp"
#include "pinflow/array.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/digest.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/row_source.hpp"

/// An array in memory with these elements.
template <typename T>
pinflow::array array_of(const std::vector<T>& elements, pinflow::shape_vector shape) {
    auto memory = pinflow::memory_region::anonymous(elements.size() * sizeof(T));
    if (!elements.empty()) std::memcpy(memory.data(), elements.data(), elements.size() * sizeof(T));
    return {std::move(memory), pinflow::dtype::of<T>(), std::move(shape)};
}

/// Rows of `width` 64-bit words that all hold the row's number, so that a delivered row identifies itself.
inline pinflow::array numbered_rows(std::uint64_t row_count, std::uint64_t width = 4) {
    std::vector<std::uint64_t> elements(row_count * width);
    for (std::size_t i = 0; i < elements.size(); ++i) {
        elements[i] = i / width;
    }
    return array_of(elements, {row_count, width});
}

/// A .npy file of rows of `width` 64-bit words: the row's number, then random ones.
inline void write_random_rows(const std::filesystem::path& path, std::uint64_t row_count, std::uint64_t width,
                              std::uint64_t seed) {
    std::mt19937_64 random(seed);
    pinflow::npy_writer writer(path, pinflow::dtype::of<std::uint64_t>(), {row_count, width});
    std::vector<std::uint64_t> row(width);
    for (std::uint64_t number = 0; number < row_count; ++number) {
        for (std::uint64_t& word : row)
            word = random();
        row[0] = number;
        writer.write(std::as_bytes(std::span(row)));
    }
    writer.finish();
}

/// Streams the remaining batches of `loader`. @return the digest, computed on the loader's device.
inline std::uint64_t digest_of(pinflow::loader& loader) {
    const pinflow::stream stream(loader.device());
    pinflow::digest digest(loader.device());
    while (const auto batch = loader.next(stream))
        digest.add_async(*batch, stream);
    return digest.value();
}

/// Array `index` of a batch on any device, brought to the host in `stream`'s order.
template <typename T>
std::vector<T> elements_of(const pinflow::batch& batch, std::size_t index, pinflow::stream_view stream) {
    std::vector<T> elements(batch[index].size());
    pinflow::copy_to_host_async(std::as_writable_bytes(std::span(elements)), batch[index].data(), stream);
    stream.synchronize();
    return elements;
}

/// Whether a batch of numbered rows holds the rows that it says it does.
inline bool holds_its_rows(const pinflow::batch& batch, pinflow::stream_view stream) {
    const auto elements = elements_of<std::uint64_t>(batch, 0, stream);
    if (batch.row_count() == 0 || elements.size() % batch.row_count() != 0) return false;
    const std::size_t width = elements.size() / batch.row_count();
    for (std::size_t i = 0; i < elements.size(); ++i) {
        if (elements[i] != batch.row_ids()[i / width]) return false;
    }
    return true;
}

/// Numbered rows that call functions of the test when they are read or checked: to fail, to wait, to count.
class scripted_rows final : public pinflow::row_source {
 public:
    explicit scripted_rows(std::uint64_t row_count, std::uint64_t width = 4)
        : row_count_(row_count), row_shape_{width}, dtype_(pinflow::dtype::of<std::uint64_t>()) {}

    /// Called before rows are read, with the first of them; may throw or wait.
    std::function<void(std::uint64_t first_row)> before_read;
    /// Called by check_unchanged; may throw.
    std::function<void()> on_check;

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const pinflow::shape_vector& row_shape() const noexcept override { return row_shape_; }
    std::uint64_t row_count() const noexcept override { return row_count_; }
    std::uint64_t row_size_bytes() const noexcept override { return row_shape_[0] * sizeof(std::uint64_t); }
    std::string description() const override { return "rows of a test"; }
    std::span<const pinflow::row_extent> extents() const noexcept override { return {}; }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override {
        if (before_read && !ids.empty()) before_read(ids[0]);
        for (std::size_t i = 0; i < ids.size(); ++i) {
            const std::vector<std::uint64_t> row(row_shape_[0], ids[i]);
            std::memcpy(destination.data() + i * row_size_bytes(), row.data(), row_size_bytes());
        }
        return {};
    }
    void check_unchanged() const override {
        if (on_check) on_check();
    }

 private:
    std::uint64_t row_count_;
    pinflow::shape_vector row_shape_;
    pinflow::dtype dtype_;
};
