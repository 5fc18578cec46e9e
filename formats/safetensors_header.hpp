#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "formats/safetensors_plain.hpp"
#include "formats/safetensors_tensor.hpp"
#include "formats/safetensors_text.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/safetensors.hpp"

namespace pinflow::detail {

/// Bytes at the beginning of a file: the length of the header, and its first character '{'.
inline constexpr std::size_t safetensors_preamble_size_bytes = 9;
/// The limit of the reference implementation.
inline constexpr std::uint64_t max_safetensors_header_bytes = 100'000'000;
/// The key that is not a tensor.
inline constexpr std::string_view safetensors_metadata_name = "__metadata__";

/// The offset of the data, from the first bytes of a file (safetensors_preamble_size_bytes, or all of a
/// shorter file). It is within the file and bounded, so that this many bytes can safely be read and parsed.
/// @throws format_error (a sentence without the path) if the bytes are not the beginning of a safetensors
/// file.
std::uint64_t safetensors_data_offset_bytes(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

/// How to treat "__metadata__".
enum class safetensors_metadata : std::uint8_t {
    kept,
    checked,  ///< checks and drops it; keeps a 16-byte hash of each name until the end, to find duplicates
};

/// Parses the JSON of a safetensors header piece by piece.
/// @throws format_error (a sentence without the path), as parse_safetensors_header; system_failure if memory
/// is short (without the path, too); what `next_piece` throws.
header_content parse_safetensors_text(safetensors_text::piece_source next_piece,
                                      std::uint64_t data_offset_bytes, std::uint64_t file_size_bytes,
                                      safetensors_metadata wanted);

/// The same for bytes that hold the whole header, including its length.
/// @param part_bytes as in parse_plain_header.
/// @throws as parse_safetensors_text, and as safetensors_data_offset_bytes.
header_content parse_safetensors_bytes(std::span<const std::byte> bytes, std::uint64_t file_size_bytes,
                                       safetensors_metadata wanted,
                                       std::size_t part_bytes = plain_part_bytes);

/// Reads the header of an open file.
/// @throws system_failure, format_error, data_changed; each message names the path.
header_content read_safetensors_header(const input_file& file, safetensors_metadata wanted);

/// Reads the "__metadata__" of a file.
/// @throws system_failure, format_error, data_changed; each message names the path.
std::map<std::string, std::string> read_safetensors_metadata(const std::filesystem::path& path);

/// The beginning of a file, up to its data.
struct safetensors_beginning {
    std::string bytes;                  ///< length and JSON, padded to the alignment
    std::uint64_t data_size_bytes = 0;  ///< of all tensors after it
};

/// Formats the beginning of a file of these tensors, in this order.
/// @throws invalid_argument (a sentence without the path) as the constructor of safetensors_writer.
safetensors_beginning format_safetensors_header(std::span<const safetensors_writer::tensor> tensors,
                                                const std::map<std::string, std::string>& metadata,
                                                std::uint64_t alignment_bytes);

}  // namespace pinflow::detail
