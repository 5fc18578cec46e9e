#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <span>
#include <string>

#include "pinflow/error.hpp"
#include "src/shared/segment_trailer.hpp"

/// What must hold for the reader of trailers and any bytes: shared by the fuzz target and the test that
/// replays its findings.

namespace segment_trailer_invariants {

/// @param bytes 8 bytes of the file's size, then the trailer; what is missing is zeros
/// @return an empty string, or what does not hold.
inline std::string broken_for(std::span<const std::byte> bytes) {
    namespace detail = pinflow::detail;
    std::array<std::byte, sizeof(std::uint64_t) + detail::trailer_size_bytes> input{};
    std::ranges::copy(bytes.first(std::min(bytes.size(), input.size())), input.begin());
    std::uint64_t file_size_bytes = 0;
    std::memcpy(&file_size_bytes, input.data(), sizeof(file_size_bytes));
    const auto trailer_bytes = std::span(input).last<detail::trailer_size_bytes>();
    try {
        const detail::segment_trailer trailer = detail::read_trailer(trailer_bytes, file_size_bytes);
        if (trailer.data_offset_bytes > file_size_bytes ||
            trailer.data_size_bytes > file_size_bytes - trailer.data_offset_bytes ||
            file_size_bytes - trailer.data_offset_bytes - trailer.data_size_bytes !=
                detail::trailer_size_bytes)
            return "the data and the trailer are not the file";
        if (trailer.checksum.size() != (trailer.is_writable ? 0u : 32u)) return "the checksum is not whole";
        std::array<std::byte, detail::trailer_size_bytes> again{};
        detail::write_trailer(trailer, again);
        const detail::segment_trailer copy = detail::read_trailer(again, file_size_bytes);
        const bool is_same =
            copy.data_offset_bytes == trailer.data_offset_bytes &&
            copy.data_size_bytes == trailer.data_size_bytes && copy.is_writable == trailer.is_writable &&
            copy.checksum == trailer.checksum && copy.boot_id == trailer.boot_id && copy.pid == trailer.pid &&
            copy.uid == trailer.uid && copy.created_ns == trailer.created_ns && copy.type == trailer.type;
        return is_same ? "" : "what is written again is read differently";
    } catch (const pinflow::format_error& failure) {
        return std::string(failure.what()).find('\n') == std::string::npos ? ""
                                                                           : "the sentence has several lines";
    } catch (const pinflow::unsupported& failure) {
        return std::string(failure.what()).find('\n') == std::string::npos ? ""
                                                                           : "the sentence has several lines";
    } catch (const std::exception& failure) {
        return std::string("an exception of another type: ") + failure.what();
    }
}

}  // namespace segment_trailer_invariants
