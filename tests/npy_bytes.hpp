#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <string_view>

/// .npy files put together by hand, for the tests of readers.
namespace npy_bytes {

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
