#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/swap_plan.hpp"
#include "tests/random_arrays.hpp"

/// Datasets written and read back, for the tests of the writer.

/// The names in a folder, hidden ones too.
inline std::set<std::string> names_in(const std::filesystem::path& folder) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
        names.insert(entry.path().filename().string());
    return names;
}

inline std::size_t payload_bytes(const pinflow::hdf5_writer::dataset& of) {
    return pinflow::element_count(of.shape) * of.dtype.size_bytes();
}

/// Random elements for a dataset of any type.
inline std::vector<std::byte> sample(random_engine& random, const pinflow::hdf5_writer::dataset& of) {
    std::vector<std::byte> bytes = random_bytes(random, payload_bytes(of));
    for (std::byte& byte : bytes) {
        if (of.dtype.kind() == pinflow::dtype_kind::boolean) byte &= std::byte{1};
        // half of them zero, so that they shrink
        if (of.deflate_level > 0 && (byte & std::byte{1}) == std::byte{}) byte = std::byte{};
    }
    return bytes;
}

/// In pieces of random sizes, at most `max_bytes` each.
inline void write_in_pieces(random_engine& random, pinflow::hdf5_writer& writer,
                            std::span<const std::byte> bytes, std::uint64_t max_bytes) {
    while (!bytes.empty()) {
        const std::size_t count = std::min<std::size_t>(bytes.size(), 1 + random() % max_bytes);
        writer.write(bytes.first(count));
        bytes = bytes.subspan(count);
    }
}

/// Compares a dataset with what was written, as our reader finds it: mapped or decoded, and row by row.
inline void check_read_back(const std::filesystem::path& path, const pinflow::hdf5_writer::dataset& of,
                            std::span<const std::byte> bytes) {
    CAPTURE(of.name);
    CAPTURE(of.dtype.descr());
    CAPTURE(pinflow::to_string(of.shape));
    const pinflow::array array = pinflow::open_hdf5(path, of.name);
    CHECK(array.dtype() == of.dtype);
    CHECK(array.shape() == of.shape);
    REQUIRE(array.size_bytes() == bytes.size());
    CHECK(std::ranges::equal(std::span(array.view().data(), array.size_bytes()), bytes));
    if (of.shape.empty()) return;
    const auto rows = pinflow::open_hdf5_rows(path, of.name);
    // rows are delivered little-endian
    std::vector<std::byte> little(bytes.begin(), bytes.end());
    pinflow::detail::swap_plan(of.dtype).apply(little);
    std::vector<std::uint64_t> ids;
    for (std::uint64_t row = rows->row_count(); row-- > 0;)
        ids.push_back(row);
    std::vector<std::byte> read(bytes.size());
    rows->read_rows(ids, read);
    const std::size_t row_bytes = ids.empty() ? 0 : bytes.size() / ids.size();
    bool same = true;
    for (std::size_t row = 0; row < ids.size(); ++row) {
        same = same &&
               std::ranges::equal(std::span(little).subspan(row * row_bytes, row_bytes),
                                  std::span(read).subspan((ids.size() - 1 - row) * row_bytes, row_bytes));
    }
    CHECK(same);
}

inline void write_one(const std::filesystem::path& path, const pinflow::hdf5_writer::dataset& of,
                      std::span<const std::byte> bytes) {
    pinflow::hdf5_writer writer(path);
    writer.begin(of);
    writer.write(bytes);
    writer.finish();
}
