#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "formats/hdf5_output.hpp"
#include "formats/throw_formatted.hpp"
#include "src/core/quote.hpp"

/// pinflow's types as HDF5's, spelled as h5py spells numpy's.
namespace pinflow::detail::hdf5 {

namespace {

constexpr std::string_view not_creatable = "holds elements of a type that cannot be made";

type_handle copy_of(::hid_t type) {
    return {::H5Tcopy(type), not_creatable};
}

void set_order(const type_handle& type, std::endian order) {
    checked(::H5Tset_order(type.id(), order == std::endian::big ? H5T_ORDER_BE : H5T_ORDER_LE),
            not_creatable);
}

type_handle integer_type(const dtype& type) {
    const bool is_signed = type.kind() == dtype_kind::signed_integer;
    type_handle result = copy_of(is_signed ? H5T_STD_I64LE : H5T_STD_U64LE);
    checked(::H5Tset_size(result.id(), type.size_bytes()), not_creatable);  // the precision follows
    set_order(result, type.order());
    return result;
}

/// A float of any layout of the usual kind: sign, exponent and mantissa from the highest bit down.
type_handle floating_type(std::size_t size_bytes, std::size_t exponent_bits, std::size_t mantissa_bits,
                          std::endian order) {
    type_handle result = copy_of(H5T_IEEE_F64LE);
    if (size_bytes > 8) checked(::H5Tset_size(result.id(), size_bytes), not_creatable);
    const std::size_t sign = exponent_bits + mantissa_bits;
    if (sign >= 64) checked(::H5Tset_precision(result.id(), sign + 1), not_creatable);
    checked(::H5Tset_fields(result.id(), sign, mantissa_bits, exponent_bits, 0, mantissa_bits),
            not_creatable);
    // fields must always be within the size
    if (size_bytes < 8) checked(::H5Tset_size(result.id(), size_bytes), not_creatable);
    checked(::H5Tset_ebias(result.id(), (std::size_t{1} << (exponent_bits - 1)) - 1), not_creatable);
    set_order(result, order);
    return result;
}

type_handle floating_type(const dtype& type) {
    switch (type.size_bytes()) {
        case 2:
            return floating_type(2, 5, 10, type.order());
        case 4:
            return floating_type(4, 8, 23, type.order());
        case 8:
            return floating_type(8, 11, 52, type.order());
        default:
            break;
    }
    // x86's long double, which stores the leading bit of its mantissa (no implied bit)
    if (type.order() == std::endian::big)
        throw_unsupported("holds {}, which HDF5 has no type for", type.descr());
    type_handle result = floating_type(16, 15, 64, type.order());
    checked(::H5Tset_norm(result.id(), H5T_NORM_NONE), not_creatable);
    return result;
}

type_handle boolean_type() {
    type_handle result(::H5Tenum_create(H5T_STD_I8LE), not_creatable);
    for (signed char value = 0; value <= 1; ++value)
        checked(::H5Tenum_insert(result.id(), value == 0 ? "FALSE" : "TRUE", &value), not_creatable);
    return result;
}

type_handle complex_type(const dtype& type) {
    const std::uint64_t part_bytes = type.size_bytes() / 2;
    const type_handle part = floating_type(dtype(dtype_kind::floating, part_bytes, type.order()));
    type_handle result(::H5Tcreate(H5T_COMPOUND, type.size_bytes()), not_creatable);
    checked(::H5Tinsert(result.id(), "r", 0, part.id()), not_creatable);
    checked(::H5Tinsert(result.id(), "i", part_bytes, part.id()), not_creatable);
    return result;
}

type_handle bytes_type(const dtype& type) {
    type_handle result = copy_of(H5T_C_S1);
    checked(::H5Tset_size(result.id(), type.size_bytes()), not_creatable);
    checked(::H5Tset_strpad(result.id(), H5T_STR_NULLPAD), not_creatable);
    return result;
}

/// Times are tagged as h5py tags them.
type_handle opaque_type(const dtype& type, const std::string& tag) {
    type_handle result(::H5Tcreate(H5T_OPAQUE, type.size_bytes()), not_creatable);
    checked(::H5Tset_tag(result.id(), tag.c_str()), not_creatable);
    return result;
}

type_handle convert(const dtype& type);

type_handle field_type(const dtype_field& field) {
    type_handle element = convert(field.type);
    if (field.shape.empty()) return element;
    if (std::ranges::find(field.shape, 0u) != field.shape.end()) {
        throw_unsupported("holds no elements, as its shape is {}, which HDF5 does not allow",
                          to_string(field.shape));
    }
    if (field.shape.size() > H5S_MAX_RANK) {
        throw_unsupported("holds arrays of {} axes: HDF5 allows {}", field.shape.size(), H5S_MAX_RANK);
    }
    const std::vector<::hsize_t> lengths(field.shape.begin(), field.shape.end());
    return {::H5Tarray_create2(element.id(), static_cast<unsigned>(lengths.size()), lengths.data()),
            not_creatable};
}

type_handle structured_type(const dtype& type) {
    type_handle result(::H5Tcreate(H5T_COMPOUND, type.size_bytes()), not_creatable);
    for (const dtype_field& field : type.fields()) {
        try {
            const type_handle member = field_type(field);
            checked(::H5Tinsert(result.id(), field.name.c_str(), field.offset_bytes, member.id()),
                    not_creatable);
        } catch (const unsupported& failure) {
            throw_unsupported("has a field {} that {}", quote(field.name), failure.what());
        }
    }
    return result;
}

type_handle convert(const dtype& type) {
    if (type.size_bytes() == 0 || (type.is_structured() && type.fields().empty()))
        throw_unsupported("holds {}, and HDF5 has no types without bytes or fields", type.descr());
    switch (type.kind()) {
        case dtype_kind::boolean:
            return boolean_type();
        case dtype_kind::signed_integer:
        case dtype_kind::unsigned_integer:
            return integer_type(type);
        case dtype_kind::floating:
            return floating_type(type);
        case dtype_kind::bfloat16:
            return floating_type(2, 8, 7, type.order());
        case dtype_kind::float8_e5m2:
            return floating_type(1, 5, 2, type.order());
        case dtype_kind::complex:
            return complex_type(type);
        case dtype_kind::timedelta:
        case dtype_kind::datetime:
            return opaque_type(type, "NUMPY:" + type.descr());
        case dtype_kind::bytes:
            return bytes_type(type);
        case dtype_kind::opaque:
            return type.is_structured() ? structured_type(type) : opaque_type(type, "");
        case dtype_kind::unicode:        // HDF5's strings are UTF-8
        case dtype_kind::float8_e4m3fn:  // indistinguishable from the 8-bit float with infinities
        case dtype_kind::float8_e4m3fnuz:
        case dtype_kind::float8_e5m2fnuz:
        case dtype_kind::float8_e8m0fnu:  // without a mantissa
            break;
    }
    throw_unsupported("holds {}, which HDF5 has no type for; it can hold the same bytes as |V{}",
                      type.descr(), type.size_bytes());
}

}  // namespace

type_handle file_type_of(const dtype& type) {
    type_handle result = convert(type);
    // field titles are lost, and every reader takes two floats named r and i for a complex number
    const element_type read_back = element_type_of(result.id());
    if (read_back.type != type || !read_back.shape.empty()) {
        throw_unsupported("holds {}, which would be read back as {}", type.descr(), read_back.type.descr());
    }
    return result;
}

}  // namespace pinflow::detail::hdf5
