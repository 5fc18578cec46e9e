#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

/// Arrays of known bytes, and their rows.

using row_ids = std::vector<std::uint64_t>;
using rows_pointer = std::shared_ptr<const pinflow::row_source>;

/// The pattern as an array of a file, behind `offset` other bytes.
inline pinflow::array array_of_file(const temporary_folder& folder, const std::string& descr,
                                    pinflow::shape_vector shape, bool fortran_order = false,
                                    std::size_t offset = 13) {
    const auto type = pinflow::dtype::parse(descr);
    std::vector<std::byte> content(offset);
    const auto elements =
        pattern_bytes(static_cast<std::size_t>(pinflow::element_count(shape) * type.size_bytes()));
    content.insert(content.end(), elements.begin(), elements.end());
    write_bytes(folder / "data", content);
    return pinflow::array::of_file(std::make_shared<const pinflow::input_file>(folder / "data"), offset, type,
                                   std::move(shape), fortran_order);
}

/// The pattern as an array in memory.
inline pinflow::array array_of_memory(const std::string& descr, pinflow::shape_vector shape) {
    const auto type = pinflow::dtype::parse(descr);
    const auto elements =
        pattern_bytes(static_cast<std::size_t>(pinflow::element_count(shape) * type.size_bytes()));
    auto memory = pinflow::memory_region::anonymous(elements.size());
    std::ranges::copy(elements, memory.data());
    return {std::move(memory), type, std::move(shape)};
}

inline std::vector<std::byte> read(const rows_pointer& rows, const row_ids& ids) {
    std::vector<std::byte> destination(ids.size() * rows->row_size_bytes());
    rows->read_rows(ids, destination);
    return destination;
}

/// Row numbers below `row_count`, with repetitions and with runs.
inline row_ids random_ids(std::uint64_t row_count, std::size_t count, std::uint32_t seed) {
    std::mt19937_64 random(seed);
    row_ids ids;
    while (ids.size() < count) {
        const std::uint64_t first = random() % row_count;
        const std::uint64_t run = 1 + random() % 5;
        for (std::uint64_t id = first; id < std::min(first + run, row_count) && ids.size() < count; ++id) {
            ids.push_back(id);
        }
    }
    return ids;
}
