#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "tests/npy_bytes.hpp"

/// Parsing .npy headers that tests make.

constexpr std::uint64_t any_size = std::numeric_limits<std::int64_t>::max();

inline pinflow::npy_header parse(const std::string& bytes, std::uint64_t file_size_bytes = any_size) {
    return pinflow::parse_npy_header(npy_bytes::as_bytes(bytes), file_size_bytes);
}

/// The sentence that `bytes` are refused with, in a file of that size, or "accepted".
inline std::string refusal(const std::string& bytes, std::uint64_t file_size_bytes = any_size) {
    try {
        parse(bytes, file_size_bytes);
        return "accepted";
    } catch (const pinflow::format_error& failure) {
        return failure.what();
    }
}

inline std::string repeated(std::string_view piece, std::size_t times) {
    std::string result;
    for (std::size_t index = 0; index < times; ++index)
        result += piece;
    return result;
}

/// A structured type around a number, that many deep.
inline std::string nested(std::size_t depth) {
    return repeated("[('a', ", depth) + "'<f4'" + repeated(")]", depth);
}
