#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/dtype.hpp"
#include "pinflow/formats/safetensors.hpp"

/// Tensors as the parsers of safetensors headers make them.
namespace pinflow::detail {

/// A type as the format spells it.
struct safetensors_type {
    std::string_view name;
    unsigned bits;                   ///< of an element
    std::optional<dtype_kind> kind;  ///< empty if pinflow has no such type
};

/// All types of the format.
std::span<const safetensors_type> safetensors_types() noexcept;

/// The type in pinflow, which is never destroyed. Null if pinflow has no such type.
const dtype* dtype_of(const safetensors_type& type);

inline constexpr std::size_t max_safetensors_axes = 64;

/// A tensor as the JSON of a header describes it.
struct described_tensor {
    std::string_view name;
    std::string_view type_name;
    std::span<const std::uint64_t> shape;
    std::uint64_t begin_bytes = 0;  ///< the data_offsets
    std::uint64_t end_bytes = 0;
};

/// A tensor of a header. Small and without memory of its own, as a header may have many: each 4 KiB of new
/// memory costs a page fault, and each allocation of a worker thread may wait for other threads.
struct header_tensor {
    std::string_view name;
    const safetensors_type* type = nullptr;
    std::span<const std::uint64_t> shape;
    std::uint64_t offset_bytes = 0;  ///< of the data
    std::uint64_t size_bytes = 0;    ///< of the data
};

/// Checks a tensor by itself. Its name and shape are those of `described`, its offset is relative to the
/// beginning of the data.
/// @throws format_error (a sentence without the path) for unknown types, and for data_offsets that do not fit
/// type and shape.
header_tensor checked_tensor(const described_tensor& described);

/// @throws format_error (a sentence without the path) for a type that the format lacks.
[[noreturn]] void refuse_type(std::string_view tensor, std::string_view type_name);

/// Holds names and shapes of tensors until it is destroyed. Moving it leaves them in place.
class tensor_memory {
 public:
    /// Copies the name and the shape of a tensor, which then uses the copies.
    void keep(header_tensor& tensor);

 private:
    static constexpr std::size_t first_block_bytes = 4096;

    std::unique_ptr<std::pmr::monotonic_buffer_resource> blocks_ =
        std::make_unique<std::pmr::monotonic_buffer_resource>(first_block_bytes);
};

/// The content of a header, as safetensors_header.
struct header_content {
    /// The tensors, in the lists of the threads that have parsed them. One list after the other is in order.
    std::vector<std::vector<header_tensor>> lists;
    std::map<std::string, std::string> metadata;
    std::vector<tensor_memory> memory;  ///< of the tensors

    std::size_t count() const;
    auto tensors() const { return std::views::join(lists); }
};

/// The same with entries that own their names and shapes.
safetensors_header to_safetensors_header(header_content content);

/// Why a tensor of a type without a dtype cannot be opened.
std::string unsupported_reason(std::string_view type_name);

}  // namespace pinflow::detail
