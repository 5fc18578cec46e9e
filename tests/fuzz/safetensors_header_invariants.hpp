#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/safetensors_header.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "src/core/quote.hpp"

/// What must hold for parse_safetensors_header and any bytes: shared by the fuzz target and the test that
/// replays its findings.

namespace safetensors_header_invariants {

inline std::span<const std::byte> as_bytes(std::string_view text) {
    return std::as_bytes(std::span(text));
}

/// @return an empty string, or what does not hold for a header that was accepted.
inline std::string broken_for(const pinflow::safetensors_header& header, std::uint64_t file_size_bytes) {
    std::set<std::string_view> names;
    std::vector<pinflow::safetensors_writer::tensor> writable;
    std::uint64_t end = header.tensors.empty() ? file_size_bytes : header.tensors[0].offset_bytes;
    for (const auto& tensor : header.tensors) {
        if (!names.insert(tensor.name).second) return "two tensors have one name";
        if (tensor.offset_bytes != end) return "the tensors overlap or leave holes";
        if (tensor.size_bytes > file_size_bytes - end) return "a tensor ends past the file";
        end += tensor.size_bytes;
        if (tensor.shape.size() > 64) return "a tensor has too many axes";
        if (!tensor.dtype) continue;
        // an array with an axis of length 0 has no payload, however long the others are
        std::uint64_t size = std::ranges::count(tensor.shape, 0u) > 0 ? 0 : tensor.dtype->size_bytes();
        for (const std::uint64_t length : tensor.shape) {
            if (length > 0 && size > std::numeric_limits<std::uint64_t>::max() / length)
                return "the size of a tensor overflows";
            size *= length;
        }
        if (size != tensor.size_bytes) return "the size of a tensor is not that of its shape";
        writable.push_back({tensor.name, *tensor.dtype, tensor.shape});
    }
    if (end != file_size_bytes) return "the tensors do not end with the file";
    if (writable.size() != header.tensors.size()) return "";

    const auto written = pinflow::detail::format_safetensors_header(writable, header.metadata, 64);
    if (written.bytes.size() % 64 != 0) return "what is written for it is not aligned";
    auto again = pinflow::parse_safetensors_header(as_bytes(written.bytes),
                                                   written.bytes.size() + written.data_size_bytes);
    if (again.tensors.size() != header.tensors.size()) return "what is written for it has other tensors";
    for (auto& tensor : again.tensors) {
        tensor.offset_bytes += header.tensors[0].offset_bytes - written.bytes.size();
    }
    if (again.metadata != header.metadata || again.tensors != header.tensors)
        return "what is written for it reads differently";
    return "";
}

/// What a parser makes of a header: its tensors and metadata, or an error.
struct outcome {
    pinflow::safetensors_header header;
    std::string error;
};
template <typename Parse>
outcome outcome_of(Parse parse) {
    try {
        return {parse(), {}};
    } catch (const pinflow::format_error& failure) {
        return {{}, failure.what()};
    }
}

/// @return an empty string, or what differs between the parser of plain headers and that of all headers.
inline std::string differs_for(std::string_view bytes, std::uint64_t file_size_bytes) {
    using namespace pinflow::detail;
    std::uint64_t data_offset = 0;
    try {
        data_offset = safetensors_data_offset_bytes(as_bytes(bytes), file_size_bytes);
    } catch (const pinflow::format_error&) {
        return "";
    }
    if (bytes.size() < data_offset) return "";
    auto text = as_bytes(bytes).first(data_offset).subspan(8);
    const outcome second = outcome_of([&] {
        return to_safetensors_header(parse_safetensors_text([&] { return std::exchange(text, {}); },
                                                            data_offset, file_size_bytes,
                                                            safetensors_metadata::kept));
    });
    for (const std::size_t part_bytes : {plain_part_bytes, 1 + bytes.size() % 100}) {
        const outcome first = outcome_of([&] {
            return to_safetensors_header(parse_safetensors_bytes(as_bytes(bytes), file_size_bytes,
                                                                 safetensors_metadata::kept, part_bytes));
        });
        if (first.error != second.error) return "two parsers give different errors";
        if (first.header.tensors != second.header.tensors || first.header.metadata != second.header.metadata)
            return "two parsers give different tensors";
    }
    return "";
}

/// @return an empty string, or what does not hold for a file of `file_size_bytes` that begins with `bytes`.
inline std::string broken_for(std::string_view bytes, std::uint64_t file_size_bytes) {
    try {
        const std::string difference = differs_for(bytes, file_size_bytes);
        if (!difference.empty()) return difference;
        return broken_for(pinflow::parse_safetensors_header(as_bytes(bytes), file_size_bytes),
                          file_size_bytes);
    } catch (const pinflow::format_error& failure) {
        const std::string sentence = failure.what();
        const bool is_printable = pinflow::detail::printable(sentence, sentence.size()) == sentence;
        return is_printable ? "" : "the sentence is not one line of printable text";
    } catch (const std::exception& failure) {
        return std::string("an exception of another type: ") + failure.what();
    }
}

/// The largest number in a text: usually the end of the data. The last digits of longer numbers are ignored,
/// so that it stays below 2^61.
inline std::uint64_t largest_number(std::string_view text) {
    constexpr std::uint64_t most = std::uint64_t{1} << 61;
    std::uint64_t largest = 0;
    std::uint64_t number = 0;
    for (const char character : text) {
        if (character < '0' || character > '9') {
            number = 0;
        } else if (number < most / 16) {
            number = number * 10 + static_cast<unsigned>(character - '0');
            largest = std::max(largest, number);
        }
    }
    return largest;
}

/// The same for a file of exactly these bytes, and for the bytes as the JSON of a file with matching length
/// and data, so that not every mutation makes the file invalid.
inline std::string broken_for(std::string_view bytes) {
    std::string broken = broken_for(bytes, bytes.size());
    if (!broken.empty()) return broken;
    std::string file;
    for (unsigned index = 0; index < 8; ++index) {
        file += static_cast<char>(bytes.size() >> (8 * index) & 0xFF);
    }
    file += bytes;
    broken = broken_for(file, file.size());
    return broken.empty() ? broken_for(file, file.size() + largest_number(bytes)) : broken;
}

}  // namespace safetensors_header_invariants
