#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "pinflow/dtype.hpp"
#include "pinflow/formats/safetensors.hpp"

namespace pinflow::detail {

/// Bytes that tell how long a header is: its length, and the '{' that it begins with.
inline constexpr std::size_t safetensors_preamble_size_bytes = 9;
/// The reference implementation refuses longer headers, and so does pinflow.
inline constexpr std::uint64_t most_safetensors_header_bytes = 100'000'000;
/// The name that stands for no tensor.
inline constexpr std::string_view safetensors_metadata_name = "__metadata__";

/// Where the data begins, from the first bytes of a file alone (safetensors_preamble_size_bytes, or all of a
/// shorter file). The result lies within the file and is bounded, so that many bytes can safely be read and
/// parsed.
/// @throws format_error (a sentence without the path) for what is not the beginning of a safetensors file.
std::uint64_t safetensors_data_offset_bytes(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

/// Refuses text with a zero byte, which JSON never holds: a piece of a header, `offset_bytes` behind its
/// beginning. @throws format_error (a sentence without the path).
void check_safetensors_text(std::span<const std::byte> text, std::uint64_t offset_bytes);

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
