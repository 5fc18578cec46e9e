#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "formats/safetensors_text.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/formats/safetensors.hpp"

namespace pinflow::detail {

/// Bytes that tell how long a header is: its length, and the '{' that it begins with.
inline constexpr std::size_t safetensors_preamble_size_bytes = 9;
/// The reference implementation refuses longer headers, and so does pinflow.
inline constexpr std::uint64_t max_safetensors_header_bytes = 100'000'000;
/// The name that stands for no tensor.
inline constexpr std::string_view safetensors_metadata_name = "__metadata__";

/// Where the data begins, from the first bytes of a file alone (safetensors_preamble_size_bytes, or all of a
/// shorter file). The result lies within the file and is bounded, so that many bytes can safely be read and
/// parsed.
/// @throws format_error (a sentence without the path) for what is not the beginning of a safetensors file.
std::uint64_t safetensors_data_offset_bytes(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

/// What to do with "__metadata__".
enum class safetensors_metadata : std::uint8_t {
    kept,
    checked,  ///< checks and drops it; keeps a 16-byte hash of each name until the end, to find duplicates
};

/// Parses the JSON of a safetensors header piece by piece.
/// @throws format_error (a sentence without the path), as parse_safetensors_header.
safetensors_header parse_safetensors_text(safetensors_text::piece_source next_piece,
                                          std::uint64_t data_offset_bytes, std::uint64_t file_size_bytes,
                                          safetensors_metadata wanted);

/// The same for bytes that hold the whole header, its length included.
safetensors_header parse_safetensors_bytes(std::span<const std::byte> bytes, std::uint64_t file_size_bytes,
                                           safetensors_metadata wanted);

/// The "__metadata__" of a file. @throws system_failure, format_error; each sentence names the path.
std::map<std::string, std::string> read_safetensors_metadata(const std::filesystem::path& path);

/// A type as the format spells it.
struct safetensors_type {
    std::string_view name;
    unsigned bits;                   ///< of an element
    std::optional<dtype_kind> kind;  ///< empty when pinflow has no such type
};

/// All types of the format.
std::span<const safetensors_type> safetensors_types() noexcept;

/// What a file begins with, up to its data.
struct safetensors_beginning {
    std::string bytes;                  ///< length and JSON, padded to the alignment
    std::uint64_t data_size_bytes = 0;  ///< of all tensors, which follow
};

/// The beginning of a file of these tensors, in this order.
/// @throws invalid_argument (a sentence without the path) for what safetensors_writer refuses.
safetensors_beginning format_safetensors_header(std::span<const safetensors_writer::tensor> tensors,
                                                const std::map<std::string, std::string>& metadata,
                                                std::uint64_t alignment_bytes);

}  // namespace pinflow::detail
