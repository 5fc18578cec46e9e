#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/array.hpp"

/// .npy files put together by hand, and arrays of numbers, for the tests of readers and writers.
namespace npy_bytes {

/// 0, 1, 2, ...
inline std::vector<std::int32_t> counted(std::size_t count) {
    std::vector<std::int32_t> values(count);
    std::iota(values.begin(), values.end(), 0);
    return values;
}

/// The elements of an array of 32-bit integers that has a view.
inline std::vector<std::int32_t> payload(const pinflow::array& opened) {
    std::vector<std::int32_t> values(opened.size_bytes() / 4);
    if (!values.empty()) std::memcpy(values.data(), opened.view().data(), opened.size_bytes());
    return values;
}

/// Magic, version, length and text: a header as in a file, without padding.
inline std::string header(std::string_view text, unsigned major_version = 1) {
    std::string result("\x93NUMPY");
    result += static_cast<char>(major_version);
    result += '\0';
    for (unsigned index = 0; index < (major_version == 1 ? 2 : 4); ++index) {
        result += static_cast<char>(text.size() >> (8 * index) & 0xFF);
    }
    result += text;
    return result;
}

/// The text of a header, from Python literals.
inline std::string text(std::string_view descr, std::string_view shape,
                        std::string_view fortran_order = "False") {
    return "{'descr': " + std::string(descr) + ", 'fortran_order': " + std::string(fortran_order) +
           ", 'shape': " + std::string(shape) + ", }";
}

inline std::span<const std::byte> as_bytes(std::string_view text) {
    return std::as_bytes(std::span(text));
}

inline void write_file(const std::string& path, std::string_view content) {
    std::ofstream(path, std::ios::binary) << content;
}

inline std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace npy_bytes
