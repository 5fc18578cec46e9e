#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/element_streams.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/file_bytes.hpp"

/// The contents of .npz files that tests make, and of their members as they are read.

/// 0, 1, 2, ... as bytes of int32.
inline std::string counted(std::int32_t count, std::int32_t first = 0) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(count));
    std::iota(values.begin(), values.end(), first);
    return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}

/// A .npy file; its data begins at a multiple of 64.
inline std::string npy(const pinflow::dtype& type, const pinflow::shape_vector& shape,
                       std::string_view payload, bool fortran_order = false) {
    return pinflow::format_npy_header(type, shape, fortran_order) + std::string(payload);
}

inline std::string int_npy(const pinflow::shape_vector& shape, std::string_view payload) {
    return npy(pinflow::dtype::of<std::int32_t>(), shape, payload);
}

inline std::string bytes_of(const pinflow::array& opened) {
    return {reinterpret_cast<const char*>(opened.view().data()), opened.size_bytes()};
}

inline std::int32_t first_of(const pinflow::array& opened) {
    std::int32_t value = 0;
    std::memcpy(&value, opened.view().data(), sizeof value);
    return value;
}

/// Everything that the element stream of a member delivers, `step` bytes at a time.
inline std::string streamed(const std::filesystem::path& path, std::string_view name, std::size_t step) {
    const auto stream = pinflow::detail::open_npz_elements(path)->stream(name, 1 << 20);
    std::string content(pinflow::element_count(stream->shape()) * stream->dtype().size_bytes(), '?');
    const auto bytes = std::as_writable_bytes(std::span(content));
    for (std::size_t at = 0; at < bytes.size(); at += step)
        stream->read(bytes.subspan(at, std::min(step, bytes.size() - at)));
    stream->finish();
    return content;
}

/// The message of the Error that opening the member "a" throws. Streaming it must throw the same.
template <typename Error>
inline std::string refusal(const std::filesystem::path& path) {
    const std::string opening = message_of<Error>([&] { pinflow::open_npz(path, "a"); });
    const std::string streaming = message_of<Error>([&] { streamed(path, "a", 1 << 20); });
    CHECK(opening == streaming);
    return opening;
}

inline std::vector<std::byte> vector_of(std::string_view text) {
    const auto bytes = npy_bytes::as_bytes(text);
    return {bytes.begin(), bytes.end()};
}
