#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"

/// What must hold for parse_npy_header and any bytes: shared by the fuzz target and the test that replays its
/// findings.

namespace npy_header_invariants {

/// @return an empty string, or what does not hold for the fields of `type`.
inline std::string broken_for(const pinflow::dtype& type) {
    std::uint64_t end = 0;
    for (const pinflow::dtype_field& field : type.fields()) {
        if (field.name.empty()) return "a field has no name";
        if (field.offset_bytes < end) return "two fields overlap";
        std::uint64_t size_bytes = std::ranges::count(field.shape, 0u) > 0 ? 0 : field.type.size_bytes();
        for (const std::uint64_t length : field.shape)
            size_bytes *= length;
        if (size_bytes != field.size_bytes()) return "a field's size is not that of its elements";
        end = field.offset_bytes + size_bytes;
        if (end > type.size_bytes()) return "a field ends past its type";
        if (const std::string broken = broken_for(field.type); !broken.empty()) return broken;
    }
    if (!type.little_endian().is_little_endian()) return "little-endian is not little-endian";
    return "";
}

/// @return an empty string, or what does not hold.
inline std::string broken_for(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
    try {
        const pinflow::npy_header header = pinflow::parse_npy_header(bytes, file_size_bytes);
        // an array with an axis of length 0 has no payload, however long the others are
        std::uint64_t payload_bytes =
            std::ranges::count(header.shape, 0u) > 0 ? 0 : header.dtype.size_bytes();
        for (const std::uint64_t length : header.shape) {
            if (length > 0 && payload_bytes > file_size_bytes / length)
                return "the payload is larger than the file";
            payload_bytes *= length;
        }
        if (header.data_offset_bytes > bytes.size()) return "the data begins past the bytes that were parsed";
        if (payload_bytes > file_size_bytes - header.data_offset_bytes)
            return "the payload ends past the file";
        if (const std::string broken = broken_for(header.dtype); !broken.empty()) return broken;
        // what is written may be longer than what was read (escapes), and longer than numpy's limit
        if (bytes.size() > 2'000) return "";

        const std::string text = pinflow::format_npy_header(header.dtype, header.shape, header.fortran_order);
        const auto again = pinflow::parse_npy_header(std::as_bytes(std::span(text)),
                                                     std::numeric_limits<std::uint64_t>::max());
        if (again.dtype != header.dtype || again.shape != header.shape ||
            again.fortran_order != header.fortran_order || again.data_offset_bytes != text.size()) {
            return "what is written for it reads differently";
        }
        if (text.size() % 64 != 0) return "what is written for it is not aligned";
    } catch (const pinflow::format_error& failure) {
        return std::string(failure.what()).find('\n') == std::string::npos ? ""
                                                                           : "the sentence has several lines";
    } catch (const pinflow::unsupported& failure) {
        return std::string(failure.what()).find('\n') == std::string::npos ? ""
                                                                           : "the sentence has several lines";
    } catch (const std::exception& failure) {
        return std::string("an exception of another type: ") + failure.what();
    }
    return "";
}

/// The same, for a file of exactly these bytes and for one that continues for ever.
inline std::string broken_for(std::span<const std::byte> bytes) {
    const std::string broken = broken_for(bytes, bytes.size());
    return broken.empty() ? broken_for(bytes, std::numeric_limits<std::int64_t>::max()) : broken;
}

}  // namespace npy_header_invariants
