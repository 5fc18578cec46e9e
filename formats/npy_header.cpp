#include "formats/npy_header.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/npy_header_text.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "src/core/checked.hpp"
#include "src/core/utf8.hpp"

namespace pinflow {

namespace {

constexpr std::string_view magic = "\x93NUMPY";
using detail::max_npy_axes;
using detail::max_npy_header_characters;
using detail::max_npy_size_bytes;

template <typename... Arguments>
[[noreturn]] void fail(fmt::format_string<Arguments...> sentence, Arguments&&... arguments) {
    throw format_error(fmt::format(sentence, std::forward<Arguments>(arguments)...));
}

// ---- magic, version, length -------------------------------------------------------------------------------

struct preamble {
    unsigned major_version = 0;
    std::uint64_t text_offset_bytes = 0;
    std::uint64_t text_size_bytes = 0;
};

preamble parse_preamble(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
    const auto byte_at = [&](std::size_t index) { return std::to_integer<unsigned>(bytes[index]); };
    const std::size_t present = std::min(bytes.size(), magic.size());
    const std::string_view begin(reinterpret_cast<const char*>(bytes.data()), present);
    if (begin != magic.substr(0, present))
        fail("it is not a .npy file, as it does not begin with \\x93NUMPY");
    if (file_size_bytes < 10 || bytes.size() < 10) {
        fail("the file ends after {} bytes, within the .npy header", file_size_bytes);
    }

    const unsigned major_version = byte_at(6);
    const unsigned minor_version = byte_at(7);
    if (major_version < 1 || major_version > 3 || minor_version != 0) {
        fail("its .npy version is {}.{}; 1.0, 2.0 and 3.0 exist", major_version, minor_version);
    }
    const std::size_t length_size = major_version == 1 ? 2 : 4;
    preamble result{major_version, 8 + length_size, 0};
    if (file_size_bytes < result.text_offset_bytes || bytes.size() < result.text_offset_bytes) {
        fail("the file ends after {} bytes, within the .npy header", file_size_bytes);
    }
    for (std::size_t index = 0; index < length_size; ++index) {
        result.text_size_bytes |= std::uint64_t{byte_at(8 + index)} << (8 * index);
    }
    if (result.text_size_bytes > file_size_bytes - result.text_offset_bytes) {
        fail("the header's length is given as {} bytes, but only {} follow in the file",
             result.text_size_bytes, file_size_bytes - result.text_offset_bytes);
    }
    const std::uint64_t max_bytes = max_npy_header_characters * (major_version == 3 ? 4 : 1);
    if (result.text_size_bytes > max_bytes) {
        fail("the header is {} bytes long; numpy and pinflow read at most {} characters",
             result.text_size_bytes, max_npy_header_characters);
    }
    return result;
}

// ---- sizes ------------------------------------------------------------------------------------------------

/// Checks that the array of the header is within the file.
/// @throws format_error if it is not.
void check_size(const npy_header& header, std::uint64_t file_size_bytes) {
    const std::uint64_t item_size_bytes = header.dtype.size_bytes();
    // as numpy does, lengths of 0 are left out at first, so that the size of the other axes is checked in any
    // case; elements of 0 bytes count as one byte for the same reason
    std::uint64_t size_bytes = std::max<std::uint64_t>(item_size_bytes, 1);
    for (const std::uint64_t length : header.shape) {
        if (length == 0) continue;
        if (!detail::multiply(size_bytes, length, size_bytes) || size_bytes > max_npy_size_bytes) {
            fail("the shape {} of {}-byte elements is larger than any file", to_string(header.shape),
                 item_size_bytes);
        }
    }
    if (item_size_bytes == 0 || std::ranges::find(header.shape, 0u) != header.shape.end()) size_bytes = 0;
    if (size_bytes > file_size_bytes - header.data_offset_bytes) {
        std::uint64_t needed = 0;
        if (!detail::add(header.data_offset_bytes, size_bytes, needed) || needed > max_npy_size_bytes) {
            fail("the shape {} of {}-byte elements is larger than any file", to_string(header.shape),
                 item_size_bytes);
        }
        fail("the header declares {} bytes of data, but the file has {}", size_bytes,
             file_size_bytes - header.data_offset_bytes);
    }
}

// ---- writing ----------------------------------------------------------------------------------------------

/// The type as stored in the file. Types that numpy lacks are stored as opaque bytes, as ml_dtypes does.
/// @throws invalid_argument for big-endian bfloat16.
dtype type_in_file(const dtype& type) {
    if (type.is_structured()) {
        std::vector<dtype_field> fields(type.fields().begin(), type.fields().end());
        for (dtype_field& field : fields)
            field.type = type_in_file(field.type);
        return dtype::structured(std::move(fields), type.size_bytes());
    }
    if (type.is_known_to_numpy()) return type;
    if (!type.is_little_endian()) {
        throw invalid_argument(
            "a .npy file cannot tell that bfloat16 is big-endian; convert it to little-endian first");
    }
    return {dtype_kind::opaque, type.size_bytes()};
}

/// Converts UTF-8 text to Latin-1; empty if it has other characters.
std::optional<std::string> as_latin_1(std::string_view text) {
    std::string result;
    result.reserve(text.size());
    for (std::size_t position = 0; position < text.size();) {
        const auto code = detail::next_code_point(text, position);
        if (!code || *code > 0xFF) return std::nullopt;
        result += static_cast<char>(*code);
    }
    return result;
}

}  // namespace

std::uint64_t detail::npy_data_offset_bytes(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
    const preamble start = parse_preamble(bytes, file_size_bytes);
    return start.text_offset_bytes + start.text_size_bytes;
}

npy_header parse_npy_header(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
    const preamble start = parse_preamble(bytes, file_size_bytes);
    if (bytes.size() - start.text_offset_bytes < start.text_size_bytes) {
        fail("the header's length is given as {} bytes, but only {} are there", start.text_size_bytes,
             bytes.size() - start.text_offset_bytes);
    }
    const auto text_bytes = bytes.subspan(start.text_offset_bytes, start.text_size_bytes);
    const std::string_view text(reinterpret_cast<const char*>(text_bytes.data()), text_bytes.size());
    if (start.major_version == 3) {
        const auto characters = detail::count_code_points(text);
        if (!characters) fail("the header is not valid UTF-8, as version 3.0 demands");
        if (*characters > max_npy_header_characters) {
            fail("the header is {} characters long; numpy and pinflow read at most {}", *characters,
                 max_npy_header_characters);
        }
    }
    npy_header header = detail::parse_npy_header_text(text, start.major_version);
    header.data_offset_bytes = start.text_offset_bytes + start.text_size_bytes;
    check_size(header, file_size_bytes);
    return header;
}

std::string format_npy_header(const dtype& type, std::span<const std::uint64_t> shape, bool fortran_order,
                              std::uint64_t alignment_bytes) {
    if (!std::has_single_bit(alignment_bytes) || alignment_bytes < 16 || alignment_bytes > 8192) {
        throw invalid_argument(fmt::format(
            "a .npy file's data cannot be aligned to {} bytes: it takes a power of two from 16 to 8192",
            alignment_bytes));
    }
    if (shape.size() > max_npy_axes) {
        throw invalid_argument(
            fmt::format("a .npy file cannot have {} axes: numpy allows {}", shape.size(), max_npy_axes));
    }
    if (std::ranges::any_of(shape, [](std::uint64_t length) { return length > max_npy_size_bytes; })) {
        throw invalid_argument(
            fmt::format("the shape {} has a length above numpy's limit of 2^63 - 1", to_string(shape)));
    }

    const dtype stored = type_in_file(type);
    const std::string descr = stored.is_structured() ? stored.descr() : fmt::format("'{}'", stored.descr());
    std::string text = fmt::format("{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}", descr,
                                   fortran_order ? "True" : "False", to_string(shape));
    if (!shape.empty()) {
        // numpy leaves room for the growing axis to reach 21 digits, so that a file can be appended to in
        // place
        constexpr std::size_t max_digits = 21;
        text.append(max_digits - std::to_string(fortran_order ? shape.back() : shape.front()).size(), ' ');
    }

    const auto latin_1 = as_latin_1(text);  // for version 1.0; other names need UTF-8 and version 3.0
    if (latin_1) text = *latin_1;
    const std::size_t length_size = latin_1 ? 2 : 4;
    const std::size_t unpadded = 8 + length_size + text.size() + 1;
    text.append(alignment_bytes - unpadded % alignment_bytes,
                ' ');  // numpy pads by 1 to `alignment`, never by 0
    text += '\n';
    const std::uint64_t characters = latin_1 ? text.size() : *detail::count_code_points(text);
    if (characters > max_npy_header_characters) {
        throw invalid_argument(
            fmt::format("a .npy header of {} characters would be needed; numpy and pinflow read at most {}",
                        characters, max_npy_header_characters));
    }

    std::string header(magic);
    header += {latin_1 ? '\x01' : '\x03', '\x00'};
    for (std::size_t index = 0; index < length_size; ++index) {
        header += static_cast<char>(text.size() >> (8 * index) & 0xFF);
    }
    return header + text;
}

}  // namespace pinflow
