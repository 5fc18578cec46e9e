#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "devices.hpp"
#include "file_bytes.hpp"
#include "pinflow/array.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/row_source.hpp"
#include "row_lists.hpp"

/// Samples with known bytes, and the batches that a loader has to deliver.

/// One array of a sample.
struct known_array {
    std::shared_ptr<const pinflow::row_source> source;
    std::vector<std::byte> content;  ///< all rows as they are to be delivered, one after the other

    std::span<const std::byte> row(std::uint64_t id) const {
        const std::size_t row_bytes = source->row_size_bytes();
        return std::span(content).subspan(id * row_bytes, row_bytes);
    }
};
using known_sample = std::vector<known_array>;

inline std::vector<std::shared_ptr<const pinflow::row_source>> sources_of(const known_sample& sample) {
    std::vector<std::shared_ptr<const pinflow::row_source>> sources;
    for (const known_array& array : sample)
        sources.push_back(array.source);
    return sources;
}

// ---- arrays -------------------------------------------------------------------------------------

/// Reverses the bytes of each big-endian number.
inline void make_little_endian(const pinflow::dtype& type, std::span<std::byte> elements) {
    if (type.order() == std::endian::little) return;
    for (std::size_t at = 0; at < elements.size(); at += type.swap_size_bytes())
        std::ranges::reverse(elements.subspan(at, type.swap_size_bytes()));
}

/// Writes a .npy file at once, without making it durable.
inline void write_npy_bytes(const std::filesystem::path& path, const pinflow::dtype& type,
                            const pinflow::shape_vector& shape, std::span<const std::byte> elements) {
    const std::string header = pinflow::format_npy_header(type, shape);
    std::vector<std::byte> file(header.size() + elements.size());
    std::memcpy(file.data(), header.data(), header.size());
    if (!elements.empty()) std::memcpy(file.data() + header.size(), elements.data(), elements.size());
    write_bytes(path, file);
}

/// A .npy file of random elements.
inline known_array npy_file(const std::filesystem::path& path, std::string_view descr,
                            const pinflow::shape_vector& shape, std::mt19937_64& random) {
    const auto type = pinflow::dtype::parse(descr);
    auto elements = random_bytes(pinflow::element_count(shape) * type.size_bytes(), random);
    write_npy_bytes(path, type, shape, elements);
    make_little_endian(type, elements);
    return {pinflow::open_npy(path), std::move(elements)};
}

/// The field `label`, a number of 4 bytes, of a .npy file of structured elements of 31 bytes.
inline known_array npy_label_field(const std::filesystem::path& path, std::uint64_t row_count,
                                   std::mt19937_64& random) {
    constexpr std::size_t element_bytes = 31;
    constexpr std::size_t label_offset_bytes = 25;
    const auto type = pinflow::dtype::structured(
        {{"position", "", pinflow::dtype::of<double>(), {3}, 0},
         {"label", "", pinflow::dtype::of<std::int32_t>(), {}, label_offset_bytes}},
        element_bytes);
    const auto elements = random_bytes(row_count * element_bytes, random);
    write_npy_bytes(path, type, {row_count}, elements);
    std::vector<std::byte> labels(row_count * sizeof(std::int32_t));
    for (std::size_t row = 0; row < row_count; ++row) {
        std::memcpy(labels.data() + row * sizeof(std::int32_t),
                    elements.data() + row * element_bytes + label_offset_bytes, sizeof(std::int32_t));
    }
    return {pinflow::open_npy(path).field("label"), std::move(labels)};
}

/// The sliding windows of an array, and their elements one window after the other.
inline known_array windows_of(const pinflow::array& array, std::uint64_t length, std::uint64_t step) {
    const pinflow::array windows = array.sliding_windows(length, step);
    const std::uint64_t element_bytes = array.size_bytes() / array.shape()[0];
    const std::size_t window_bytes = length * element_bytes;
    std::vector<std::byte> content(windows.size_bytes());
    for (std::size_t i = 0; i < windows.shape()[0]; ++i)
        std::memcpy(content.data() + i * window_bytes, array.view().data() + i * step * element_bytes,
                    window_bytes);
    return {windows, std::move(content)};
}

/// An array in memory, of random bytes.
inline known_array array_in_memory(std::uint64_t row_count, std::uint64_t row_bytes,
                                   std::mt19937_64& random) {
    auto content = random_bytes(row_count * row_bytes, random);
    auto memory = pinflow::memory_region::anonymous(content.size());
    if (!content.empty()) std::memcpy(memory.data(), content.data(), content.size());
    const pinflow::array array(std::move(memory), pinflow::dtype::of<std::uint8_t>(), {row_count, row_bytes});
    return {array, std::move(content)};
}

/// Rows that can only be read through `read_rows`, as those of a user's own source.
class read_only_rows final : public pinflow::row_source {
 public:
    read_only_rows(std::vector<std::byte> content, std::uint64_t row_bytes)
        : content_(std::move(content)), row_shape_{row_bytes} {}

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const pinflow::shape_vector& row_shape() const noexcept override { return row_shape_; }
    std::uint64_t row_count() const noexcept override { return content_.size() / row_shape_[0]; }
    std::uint64_t row_size_bytes() const noexcept override { return row_shape_[0]; }
    std::string description() const override { return "rows of a test's own"; }
    std::span<const pinflow::row_extent> extents() const noexcept override { return {}; }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override {
        for (std::size_t i = 0; i < ids.size(); ++i) {
            std::memcpy(destination.data() + i * row_shape_[0], content_.data() + ids[i] * row_shape_[0],
                        row_shape_[0]);
        }
        return {};
    }
    void check_unchanged() const override {}

 private:
    std::vector<std::byte> content_;
    pinflow::shape_vector row_shape_;
    pinflow::dtype dtype_ = pinflow::dtype::of<std::uint8_t>();
};

inline known_array rows_of_own(std::uint64_t row_count, std::uint64_t row_bytes, std::mt19937_64& random) {
    auto content = random_bytes(row_count * row_bytes, random);
    auto source = std::make_shared<read_only_rows>(content, row_bytes);
    return {std::move(source), std::move(content)};
}

// ---- routes and orders --------------------------------------------------------------------------

/// The routes that a sample of these arrays can take.
inline std::vector<pinflow::route> routes_of(const known_sample& sample, const pinflow::device& device,
                                             pinflow::order order) {
    using pinflow::route;
    bool has_extents = true;
    bool has_files = true;
    bool in_one_piece = true;
    bool are_contiguous = true;
    for (const known_array& array : sample) {
        const auto extents = array.source->extents();
        has_extents = has_extents && !extents.empty();
        in_one_piece = in_one_piece && extents.size() == 1;
        for (const pinflow::row_extent& extent : extents) {
            has_files = has_files && extent.file != nullptr;
            are_contiguous = are_contiguous && extent.stride_bytes == 0;
        }
    }
    const bool on_host = device.kind() == pinflow::device_kind::host;
    std::vector<route> routes{route::automatic, route::staged};
    if (has_extents) routes.push_back(route::copy);
    if (has_extents && has_files) routes.push_back(route::read);
    const bool has_views = order == pinflow::order::sequential && are_contiguous;
    if (in_one_piece && (!on_host || has_views)) routes.push_back(route::direct);
    return routes;
}

/// The order that `options` describe for data of so many rows.
inline pinflow::sampler sampler_of(const pinflow::loader_options& options, std::uint64_t row_count) {
    if (options.sampler) return *options.sampler;
    if (options.order == pinflow::order::shuffled) return pinflow::sampler::shuffled(row_count, options.seed);
    if (options.order == pinflow::order::windowed)
        return pinflow::sampler::windowed(row_count, options.seed, options.window_rows);
    return pinflow::sampler::sequential(row_count);
}

/// Options for one of these orders, with the tests' seed and window.
inline pinflow::loader_options options_for(const pinflow::device& device, pinflow::order order) {
    return {.device = device,
            .order = order,
            .seed = 5,
            .window_rows = order == pinflow::order::windowed ? 64U : 0U,
            .pin_budget_bytes = generous_pin_budget};
}

inline constexpr std::array every_plain_order{pinflow::order::sequential, pinflow::order::shuffled,
                                              pinflow::order::windowed};

// ---- what is delivered --------------------------------------------------------------------------

/// Whether a batch has the arrays of `sample` with their types and shapes, and the rows of its row numbers.
/// The data must be there when `stream` reaches it.
inline bool holds_rows_of(const known_sample& sample, const pinflow::batch& batch,
                          pinflow::stream_view stream) {
    if (batch.array_count() != sample.size() || batch.row_ids().size() != batch.row_count()) return false;
    const bool on_host = stream.device().kind() == pinflow::device_kind::host;
    if (on_host) stream.synchronize();
    for (std::size_t index = 0; index < sample.size(); ++index) {
        const known_array& array = sample[index];
        const pinflow::array_view& view = batch[index];
        pinflow::shape_vector shape = array.source->row_shape();
        shape.insert(shape.begin(), batch.row_count());
        if (view.dtype() != array.source->dtype() || view.shape() != shape) return false;
        const std::size_t row_bytes = array.source->row_size_bytes();
        if (view.size_bytes() != batch.row_count() * row_bytes) return false;
        std::span<const std::byte> rows(view.data(), view.size_bytes());
        std::vector<std::byte> copy;
        if (!on_host) rows = copy = to_host(view.data(), view.size_bytes(), stream);
        for (std::size_t i = 0; i < batch.row_count(); ++i) {
            if (!same_bytes(rows.subspan(i * row_bytes, row_bytes), array.row(batch.row_ids()[i])))
                return false;
        }
    }
    return true;
}

/// Takes every batch of a loader of `sample` with `options`: each must come in its order, with the rows of
/// the order and their bytes.
inline void check_every_batch(pinflow::loader& loader, const known_sample& sample,
                              const pinflow::loader_options& options) {
    const std::uint64_t row_count = sample[0].source->row_count();
    const pinflow::sampler sampler = sampler_of(options, row_count);
    const pinflow::stream stream(options.device);
    std::uint64_t batches = 0;
    for (std::uint64_t epoch = 0; epoch < options.epochs; ++epoch) {
        const row_list rows = epoch_of(sampler, epoch);
        for (std::uint64_t first = 0; first < rows.size(); first += options.batch_rows) {
            const auto batch = loader.next(stream);
            REQUIRE(batch);
            REQUIRE(batch->epoch() == epoch);
            REQUIRE(batch->index() == first / options.batch_rows);
            REQUIRE(batch->row_count() == std::min(options.batch_rows, rows.size() - first));
            REQUIRE(std::ranges::equal(batch->row_ids(), std::span(rows).subspan(first, batch->row_count())));
            REQUIRE(batch->last_of_epoch() == (first + batch->row_count() == rows.size()));
            REQUIRE(holds_rows_of(sample, *batch, stream));
            ++batches;
        }
    }
    CHECK_FALSE(loader.next(stream).has_value());
    const pinflow::loader_report report = loader.report();
    CHECK(report.batches == batches);
    CHECK(report.rows == row_count * options.epochs);
}

inline void check_every_batch(const known_sample& sample, const pinflow::loader_options& options) {
    INFO("route " << pinflow::to_string(options.route) << ", order " << pinflow::to_string(options.order)
                  << ", batches of " << options.batch_rows << ", " << options.slots << " slots, "
                  << options.threads << " threads, memory " << options.memory_bytes);
    pinflow::loader loader(sources_of(sample), options);
    check_every_batch(loader, sample, options);
}
