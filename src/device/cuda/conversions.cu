#include "src/core/scalar.hpp"
#include "src/device/cuda/conversions.hpp"

// Threads read the source from host memory in loads of 16 bytes, which keeps enough reads in flight for the
// link. Device memory is many times faster than the link, so elements are written one by one, even if each
// goes to another sector.

namespace pinflow::detail::cuda {

namespace {

/// Where elements go, one after the other in the order of the source.
class destination_cursor {
 public:
    __device__ destination_cursor(const device_conversion& work, std::uint64_t index) : work_(work) {
        if (work.axis_count == 0) {
            element_ = index;
            return;
        }
        std::uint64_t rest = work.first + index;
#pragma unroll
        for (unsigned axis = 0; axis < device_conversion::max_axes; ++axis) {
            if (axis >= work.axis_count) break;
            indices_[axis] = rest % work.axes[axis].length;
            rest /= work.axes[axis].length;
            element_ += indices_[axis] * work.axes[axis].stride;
        }
    }

    __device__ std::uint64_t element() const { return element_; }
    __device__ void advance() {
        if (work_.axis_count == 0) {
            ++element_;
            return;
        }
#pragma unroll
        for (unsigned axis = 0; axis < device_conversion::max_axes; ++axis) {
            if (axis >= work_.axis_count) break;
            element_ += work_.axes[axis].stride;
            if (++indices_[axis] < work_.axes[axis].length) return;
            element_ -= work_.axes[axis].length * work_.axes[axis].stride;
            indices_[axis] = 0;
        }
    }

 private:
    const device_conversion& work_;
    std::uint64_t element_ = 0;
    std::uint64_t indices_[device_conversion::max_axes] = {};
};

__device__ unsigned reversed(unsigned word) {
    return __byte_perm(word, 0, 0x0123);
}

/// Reverses the bytes of each word.
__device__ uint4 swapped(uint4 pack, std::uint32_t swap_size_bytes) {
    switch (swap_size_bytes) {
        case 2:
            return {__byte_perm(pack.x, 0, 0x2301), __byte_perm(pack.y, 0, 0x2301),
                    __byte_perm(pack.z, 0, 0x2301), __byte_perm(pack.w, 0, 0x2301)};
        case 4:
            return {reversed(pack.x), reversed(pack.y), reversed(pack.z), reversed(pack.w)};
        case 8:
            return {reversed(pack.y), reversed(pack.x), reversed(pack.w), reversed(pack.z)};
        default:
            return pack;
    }
}

template <typename From, typename To>
__global__ void convert_all(device_conversion work) {
    constexpr unsigned count = conversion_pack_bytes / sizeof(From);
    auto* const destination = reinterpret_cast<To*>(work.destination);
    const std::uint64_t threads = std::uint64_t{gridDim.x} * blockDim.x;
    const std::uint64_t packs = (work.count + count - 1) / count;
    for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < packs; i += threads) {
        const std::byte* const source = work.source + i * conversion_pack_bytes;
        const std::uint64_t left = work.count - i * count;
        uint4 pack{};
        if (left >= count) {
            pack = *reinterpret_cast<const uint4*>(source);
        } else {
            memcpy(&pack, source, left * sizeof(From));
        }
        pack = swapped(pack, work.swap_size_bytes);
        From elements[count];
        memcpy(elements, &pack, sizeof pack);
        destination_cursor next(work, i * count);
        for (unsigned j = 0; j < count && j < left; ++j) {
            destination[next.element()] = cast_scalar<To>(elements[j]);
            next.advance();
        }
    }
}

template <typename From, typename To>
const void* address_of() {
    return reinterpret_cast<const void*>(&convert_all<From, To>);
}

template <typename Type>
struct tag {
    using type = Type;
};

/// Calls visit(tag<T>) with the floats of that type. @return null for an opaque type.
template <typename Visit>
const void* visit_float(converted_type type, Visit visit) {
    switch (type) {
        case converted_type::float16:
            return visit(tag<half_bits>());
        case converted_type::bfloat16:
            return visit(tag<bfloat16_bits>());
        case converted_type::float32:
            return visit(tag<float>());
        case converted_type::float64:
            return visit(tag<double>());
        case converted_type::float8_e4m3fn:
            return visit(tag<float8_e4m3fn_bits>());
        case converted_type::float8_e5m2:
            return visit(tag<float8_e5m2_bits>());
        default:
            return nullptr;
    }
}

}  // namespace

const void* conversion_kernel(converted_type from, converted_type to) {
    switch (from) {
        case converted_type::bytes1:
            return address_of<std::uint8_t, std::uint8_t>();
        case converted_type::bytes2:
            return address_of<std::uint16_t, std::uint16_t>();
        case converted_type::bytes4:
            return address_of<std::uint32_t, std::uint32_t>();
        case converted_type::bytes8:
            return address_of<std::uint64_t, std::uint64_t>();
        case converted_type::bytes16:
            return address_of<uint4, uint4>();
        default:
            return visit_float(from, [to](auto source) {
                return visit_float(to, [](auto target) {
                    return address_of<typename decltype(source)::type, typename decltype(target)::type>();
                });
            });
    }
}

}  // namespace pinflow::detail::cuda
