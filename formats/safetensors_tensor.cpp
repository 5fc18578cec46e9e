#include "formats/safetensors_tensor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "formats/throw_formatted.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"

namespace pinflow::detail {

namespace {

const safetensors_type& type_named(const described_tensor& tensor) {
    const std::string_view name = tensor.type_name;
    for (const safetensors_type& type : safetensors_types()) {
        // comparing the first characters here saves most calls of memcmp
        if (!name.empty() && type.name.front() == name.front() && type.name == name) return type;
    }
    refuse_type(tensor.name, name);
}

}  // namespace

void refuse_type(std::string_view tensor, std::string_view type_name) {
    throw_format_error("the tensor {} is of the unknown type {}", quote(tensor), quote(type_name));
}

std::span<const safetensors_type> safetensors_types() noexcept {
    using enum dtype_kind;
    static constexpr std::array<safetensors_type, 22> types{{
        {"BOOL", 8, boolean},
        {"U8", 8, unsigned_integer},
        {"I8", 8, signed_integer},
        {"F8_E5M2", 8, float8_e5m2},
        {"F8_E4M3", 8, float8_e4m3fn},
        {"F8_E8M0", 8, float8_e8m0fnu},
        {"F8_E4M3FNUZ", 8, float8_e4m3fnuz},
        {"F8_E5M2FNUZ", 8, float8_e5m2fnuz},
        {"I16", 16, signed_integer},
        {"U16", 16, unsigned_integer},
        {"F16", 16, floating},
        {"BF16", 16, bfloat16},
        {"I32", 32, signed_integer},
        {"U32", 32, unsigned_integer},
        {"F32", 32, floating},
        {"C64", 64, complex},
        {"F64", 64, floating},
        {"I64", 64, signed_integer},
        {"U64", 64, unsigned_integer},
        // known to the reference implementation (0.8), but not to pinflow
        {"F4", 4, {}},
        {"F6_E2M3", 6, {}},
        {"F6_E3M2", 6, {}},
    }};
    return types;
}

const dtype* dtype_of(const safetensors_type& type) {
    static const auto& dtypes = *[] {
        auto all = std::make_unique<std::vector<std::optional<dtype>>>();
        for (const safetensors_type& each : safetensors_types()) {
            all->emplace_back();
            if (each.kind) all->back().emplace(*each.kind, each.bits / 8);
        }
        return all.release();
    }();
    const auto& found = dtypes[static_cast<std::size_t>(&type - safetensors_types().data())];
    return found ? &*found : nullptr;
}

header_tensor checked_tensor(const described_tensor& described) {
    const auto name = [&] { return quote(described.name); };  // for errors
    const safetensors_type& type = type_named(described);
    // as in numpy, a length of 0 counts as 1, so that the result does not depend on the order of the axes
    std::uint64_t bits = type.bits;
    for (const std::uint64_t length : described.shape) {
        if (length != 0 && !multiply(bits, length, bits)) {
            throw_format_error("the tensor {} of {} and shape {} is too large", name(), type.name,
                               to_string(described.shape));
        }
    }
    if (std::ranges::find(described.shape, 0u) != described.shape.end()) bits = 0;
    if (bits % 8 != 0) {
        throw_format_error("the tensor {} of {} and shape {} ends within a byte", name(), type.name,
                           to_string(described.shape));
    }
    const std::uint64_t begin = described.begin_bytes;
    const std::uint64_t end = described.end_bytes;
    if (end < begin)
        throw_format_error("the data_offsets of the tensor {} run backwards, from {} to {}", name(), begin,
                           end);
    if (end - begin != bits / 8) {
        throw_format_error(
            "the tensor {} of {} and shape {} takes {} bytes, but its data_offsets [{}, {}] span {}", name(),
            type.name, to_string(described.shape), bits / 8, begin, end, end - begin);
    }
    return {.name = described.name,
            .type = &type,
            .shape = described.shape,
            .offset_bytes = begin,
            .size_bytes = bits / 8};
}

void tensor_memory::keep(header_tensor& tensor) {
    // a size of 0 is allowed, and gives a pointer that is not used
    auto* const name = static_cast<char*>(blocks_->allocate(tensor.name.size(), 1));
    std::ranges::copy(tensor.name, name);
    tensor.name = {name, tensor.name.size()};
    auto* const lengths =
        static_cast<std::uint64_t*>(blocks_->allocate(tensor.shape.size_bytes(), alignof(std::uint64_t)));
    std::ranges::copy(tensor.shape, lengths);
    tensor.shape = {lengths, tensor.shape.size()};
}

std::size_t header_content::count() const {
    std::size_t count = 0;
    for (const std::vector<header_tensor>& list : lists)
        count += list.size();
    return count;
}

safetensors_header to_safetensors_header(header_content content) {
    safetensors_header header;
    header.metadata = std::move(content.metadata);
    header.tensors.reserve(content.count());
    for (const header_tensor& tensor : content.tensors()) {
        safetensors_entry& entry = header.tensors.emplace_back();
        entry.name = tensor.name;
        entry.type_name = tensor.type->name;
        if (const dtype* const type = dtype_of(*tensor.type)) entry.dtype = *type;
        entry.shape.assign(tensor.shape.begin(), tensor.shape.end());
        entry.offset_bytes = tensor.offset_bytes;
        entry.size_bytes = tensor.size_bytes;
    }
    return header;
}

std::string unsupported_reason(std::string_view type_name) {
    return fmt::format("pinflow has no elements of the type {}", type_name);
}

}  // namespace pinflow::detail
