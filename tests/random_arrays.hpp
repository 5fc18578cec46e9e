#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/file.hpp"
#include "tests/support/file_bytes.hpp"

/// Arrays of random types, shapes and orders, and what they hold, worked out element by element.

using random_engine = std::mt19937_64;

inline std::vector<std::byte> random_bytes(random_engine& random, std::size_t size) {
    std::vector<std::byte> bytes(size);
    for (std::byte& byte : bytes)
        byte = static_cast<std::byte>(random());
    return bytes;
}

/// Plain types of either byte order, and structured ones: gaps, fields that are arrays, nesting up to
/// `depth`.
inline pinflow::dtype random_type(random_engine& random, int depth) {
    if (depth == 0 || random() % 3 == 0) {
        static const std::vector<std::string> plain = {"|u1", "<i2", ">i2", "<f4", ">f4",  ">f8",    "<c8",
                                                       ">c8", "|S5", "|V3", ">U2", ">c16", ">M8[s]", ">f16"};
        return pinflow::dtype::parse(plain[random() % plain.size()]);
    }
    std::vector<pinflow::dtype_field> fields;
    std::uint64_t end = 0;
    for (std::uint64_t index = 0, count = 1 + random() % 4; index < count; ++index) {
        pinflow::dtype_field field{"f" + std::to_string(index), "", random_type(random, depth - 1), {}, 0};
        for (std::uint64_t axes = random() % 4 / 2; axes > 0; --axes)
            field.shape.push_back(1 + random() % 3);
        field.offset_bytes = end + random() % 3;
        end = field.offset_bytes + field.size_bytes();
        fields.push_back(std::move(field));
    }
    return pinflow::dtype::structured(std::move(fields), end + random() % 3);
}

/// The names of all fields of a type, and of theirs: "f0", "f0.f1".
inline std::vector<std::string> field_names(const pinflow::dtype& type, const std::string& prefix = {}) {
    std::vector<std::string> names;
    for (const pinflow::dtype_field& field : type.fields()) {
        names.push_back(prefix + field.name);
        const auto inner = field_names(field.type, names.back() + ".");
        names.insert(names.end(), inner.begin(), inner.end());
    }
    return names;
}

/// Reverses the bytes of the big-endian numbers of one element.
inline void make_little_endian(const pinflow::dtype& type, std::span<std::byte> element) {
    if (type.fields().empty()) {
        if (type.order() == std::endian::little) return;
        const auto size = static_cast<std::ptrdiff_t>(type.swap_size_bytes());
        for (auto number = element.begin(); number != element.end(); number += size)
            std::reverse(number, number + size);
    }
    for (const pinflow::dtype_field& field : type.fields()) {
        const std::uint64_t end = field.offset_bytes + field.size_bytes();
        for (std::uint64_t at = field.offset_bytes; at < end; at += field.type.size_bytes())
            make_little_endian(field.type, element.subspan(at, field.type.size_bytes()));
    }
}

/// What an array holds: elements in C order, as a reader has to deliver them.
struct expected_elements {
    pinflow::dtype type;
    pinflow::shape_vector shape;
    std::vector<std::byte> bytes;  ///< of either byte order, as in the file

    std::vector<std::byte> little_endian() const {
        auto result = bytes;
        for (std::uint64_t at = 0; at < result.size(); at += type.size_bytes())
            make_little_endian(type, std::span(result).subspan(at, type.size_bytes()));
        return result;
    }

    /// The field at the path `name`, such as "f0.f1". Field names have no dots.
    expected_elements field(const std::string& name) const {
        const std::size_t dot = name.find('.');
        const auto found = std::ranges::find(type.fields(), name.substr(0, dot), &pinflow::dtype_field::name);
        expected_elements result{found->type, shape, {}};
        result.shape.insert(result.shape.end(), found->shape.begin(), found->shape.end());
        for (std::uint64_t at = found->offset_bytes; at < bytes.size(); at += type.size_bytes()) {
            const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(at);
            result.bytes.insert(result.bytes.end(), first,
                                first + static_cast<std::ptrdiff_t>(found->size_bytes()));
        }
        return dot == name.npos ? result : result.field(name.substr(dot + 1));
    }
};

/// The elements that lie one after the other in `stored`, put in C order.
inline expected_elements in_c_order(const pinflow::dtype& type, const pinflow::shape_vector& shape,
                                    bool fortran_order, std::span<const std::byte> stored) {
    expected_elements result{type, shape, {}};
    pinflow::shape_vector index(shape.size());
    for (std::uint64_t count = pinflow::element_count(shape); count > 0; --count) {
        std::uint64_t position = 0;
        for (std::size_t step = 0; step < shape.size(); ++step) {
            const std::size_t axis = fortran_order ? shape.size() - 1 - step : step;
            position = position * shape[axis] + index[axis];
        }
        const auto element = stored.subspan(position * type.size_bytes(), type.size_bytes());
        result.bytes.insert(result.bytes.end(), element.begin(), element.end());
        for (std::size_t axis = shape.size(); axis > 0; --axis) {
            if (++index[axis - 1] < shape[axis - 1]) break;
            index[axis - 1] = 0;
        }
    }
    return result;
}

/// An array of the file `path`, behind `offset_bytes` other bytes and before up to two more, and what it
/// holds.
inline std::pair<pinflow::array, expected_elements> make_array(
    random_engine& random, const std::filesystem::path& path, const pinflow::dtype& type,
    const pinflow::shape_vector& shape, bool fortran_order, std::uint64_t offset_bytes = 13) {
    const std::uint64_t size_bytes = pinflow::element_count(shape) * type.size_bytes();
    const auto content = random_bytes(random, offset_bytes + size_bytes + random() % 3);
    std::filesystem::remove(path);  // another array may still map it
    write_bytes(path, content);
    return {pinflow::array::of_file(std::make_shared<const pinflow::input_file>(path), offset_bytes, type,
                                    shape, fortran_order),
            in_c_order(type, shape, fortran_order, std::span(content).subspan(offset_bytes, size_bytes))};
}

/// The same elements as an array in memory.
inline pinflow::array in_memory(const expected_elements& elements) {
    auto memory = pinflow::memory_region::anonymous(elements.bytes.size());
    std::ranges::copy(elements.bytes, memory.data());
    return {std::move(memory), elements.type, elements.shape};
}

/// Copies a mapped array to memory, with its order and byte order.
inline pinflow::array in_memory(const pinflow::array& source, bool fortran_order) {
    auto memory = pinflow::memory_region::anonymous(source.size_bytes());
    std::copy_n(source.view().data(), source.size_bytes(), memory.data());
    return pinflow::array::of_memory(std::move(memory), source.dtype(), source.shape(), fortran_order,
                                     "copied");
}
