#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model_files.hpp"
#include "pinflow/array.hpp"

struct stored_order {
    bool is_fortran_order;
    bool is_big_endian;
};

inline constexpr stored_order changed_orders[] = {{true, false}, {false, true}, {true, true}};

/// A tensor as it is stored: its bytes, and a view of them.
class stored_model_tensor {
 public:
    stored_model_tensor(const model_tensor& tensor, const stored_order& order)
        : type_(order.is_big_endian ? pinflow::dtype::parse(">" + tensor.dtype.descr().substr(1))
                                    : tensor.dtype),
          shape_(tensor.shape),
          strides_(order.is_fortran_order ? pinflow::fortran_strides_bytes(shape_, type_.size_bytes())
                                          : pinflow::c_strides_bytes(shape_, type_.size_bytes())),
          bytes_(tensor.bytes) {
        const std::uint64_t element_bytes = type_.size_bytes();
        const std::uint64_t count = order.is_fortran_order ? pinflow::element_count(shape_) : 0;
        for (std::uint64_t i = 0; i < count; ++i)
            std::copy_n(tensor.bytes.data() + i * element_bytes, element_bytes, bytes_.data() + offset_of(i));
        const std::uint64_t word_bytes = order.is_big_endian ? type_.swap_size_bytes() : 1;
        for (std::size_t word = 0; word_bytes > 1 && word < bytes_.size(); word += word_bytes)
            std::reverse(bytes_.data() + word, bytes_.data() + word + word_bytes);
    }

    pinflow::array_view view() const { return {bytes_.data(), type_, shape_, strides_}; }

 private:
    /// Of an element in C order.
    std::uint64_t offset_of(std::uint64_t element) const {
        std::uint64_t offset = 0;
        for (std::size_t axis = shape_.size(); axis-- > 0; element /= shape_[axis])
            offset += element % shape_[axis] * static_cast<std::uint64_t>(strides_[axis]);
        return offset;
    }

    pinflow::dtype type_;
    pinflow::shape_vector shape_;
    std::vector<std::int64_t> strides_;
    std::vector<std::byte> bytes_;
};

/// The whole tensor, a slice along each axis, and a box.
inline std::vector<pinflow::tensor_request> requests_of(const model_tensor& tensor) {
    std::vector<pinflow::tensor_request> requests{{.name = tensor.name}};
    for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis) {
        const std::uint64_t length = tensor.shape[axis];
        requests.push_back(
            {.name = tensor.name, .slice = pinflow::tensor_slice{axis, length / 3, length - length / 4}});
    }
    pinflow::tensor_request box{.name = tensor.name};
    for (std::size_t axis = tensor.shape.size(); axis-- > 0;) {
        const std::uint64_t length = tensor.shape[axis];
        box.further_slices.push_back({axis, length / 5, length - length / 3});
    }
    requests.push_back(std::move(box));
    return requests;
}
