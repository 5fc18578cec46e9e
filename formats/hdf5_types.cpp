#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "formats/hdf5_handles.hpp"
#include "formats/throw_formatted.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"

/// HDF5's types as pinflow's.
namespace pinflow::detail::hdf5 {

namespace {

/// Limit on nested structures, arrays and enumerations.
constexpr unsigned max_depth = 32;

[[noreturn]] void fail_type() {
    fail("has a type that cannot be read");
}

type_handle owned(::hid_t type) {
    return {type, "has a type that cannot be read"};
}

std::uint64_t size_of(::hid_t type) {
    const std::size_t size_bytes = ::H5Tget_size(type);
    if (size_bytes == 0) fail_type();
    return size_bytes;
}

/// Text that the library has allocated.
class library_text {
 public:
    explicit library_text(char* text) : text_(text) {
        if (text == nullptr) fail_type();
    }
    library_text(const library_text&) = delete;
    library_text& operator=(const library_text&) = delete;
    ~library_text() { ::H5free_memory(text_); }

    std::string_view view() const noexcept { return text_; }

 private:
    char* text_;
};

/// The layout of a number's bits in its bytes.
struct number_layout {
    std::uint64_t size_bytes = 0;
    std::uint64_t precision_bits = 0;
    std::endian order = std::endian::little;
};

number_layout layout_of(::hid_t type, std::string_view what) {
    number_layout layout;
    layout.size_bytes = size_of(type);
    layout.precision_bits = ::H5Tget_precision(type);
    const ::H5T_order_t order = ::H5Tget_order(type);
    if (layout.precision_bits == 0 || order == H5T_ORDER_ERROR) fail_type();
    if (order != H5T_ORDER_LE && order != H5T_ORDER_BE)
        throw_unsupported("{} in a byte order that is neither little-endian nor big-endian", what);
    if (order == H5T_ORDER_BE) layout.order = std::endian::big;
    if (::H5Tget_offset(type) != 0)
        throw_unsupported("{} whose significant bits do not begin at bit 0", what);
    return layout;
}

// ---- numbers ---------------------------------------------------------------------------------------------

dtype integer_type(::hid_t type, std::string_view what, bool is_signed) {
    const number_layout layout = layout_of(type, what);
    if (!std::has_single_bit(layout.size_bytes) || layout.size_bytes > 8) {
        throw_unsupported("{} of {} bytes", what, layout.size_bytes);
    }
    if (layout.precision_bits != 8 * layout.size_bytes) {
        throw_unsupported("{} of {} bits in {} bytes", what, layout.precision_bits, layout.size_bytes);
    }
    return {is_signed ? dtype_kind::signed_integer : dtype_kind::unsigned_integer, layout.size_bytes,
            layout.order};
}

struct float_layout {
    dtype_kind kind;
    std::uint64_t size_bytes;
    std::uint64_t precision_bits;
    std::size_t exponent_bits;
    std::size_t mantissa_bits;
    ::H5T_norm_t norm;
};

/// Sign, exponent and mantissa follow one another from the highest bit down; the exponent's bias is the usual
/// one.
constexpr std::array float_layouts{
    float_layout{dtype_kind::floating, 2, 16, 5, 10, H5T_NORM_IMPLIED},
    float_layout{dtype_kind::floating, 4, 32, 8, 23, H5T_NORM_IMPLIED},
    float_layout{dtype_kind::floating, 8, 64, 11, 52, H5T_NORM_IMPLIED},
    float_layout{dtype_kind::floating, 16, 80, 15, 64, H5T_NORM_NONE},  // x86's long double
    float_layout{dtype_kind::bfloat16, 2, 16, 8, 7, H5T_NORM_IMPLIED},
    float_layout{dtype_kind::float8_e5m2, 1, 8, 5, 2, H5T_NORM_IMPLIED},
    // two 8-bit floats have this layout, one with infinities; the file does not tell which, so the caller
    // names the type with array::view_as
    float_layout{dtype_kind::opaque, 1, 8, 4, 3, H5T_NORM_IMPLIED},
};

dtype floating_type(::hid_t type) {
    constexpr std::string_view what = "floating-point numbers";
    const number_layout layout = layout_of(type, what);
    std::size_t sign = 0;
    std::size_t exponent = 0;
    std::size_t exponent_bits = 0;
    std::size_t mantissa = 0;
    std::size_t mantissa_bits = 0;
    if (::H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits) < 0) fail_type();
    const std::size_t bias = ::H5Tget_ebias(type);
    const ::H5T_norm_t norm = ::H5Tget_norm(type);
    for (const float_layout& known : float_layouts) {
        const bool same_bits = layout.size_bytes == known.size_bytes &&
                               layout.precision_bits == known.precision_bits &&
                               exponent_bits == known.exponent_bits && mantissa_bits == known.mantissa_bits &&
                               mantissa == 0 && exponent == mantissa_bits && sign == exponent + exponent_bits;
        if (!same_bits || norm != known.norm || bias != (std::size_t{1} << (exponent_bits - 1)) - 1) continue;
        if (known.size_bytes == 16 && layout.order == std::endian::big) continue;  // no system has it
        return {known.kind, known.size_bytes, layout.order};
    }
    throw_unsupported(
        "{} of {} bytes with {} bits of exponent and {} of mantissa, in a layout that pinflow lacks", what,
        layout.size_bytes, exponent_bits, mantissa_bits);
}

/// Whether an enumeration is how h5py, and others after it, store truth values.
bool is_boolean(::hid_t type) {
    if (size_of(type) != 1 || ::H5Tget_nmembers(type) != 2) return false;
    for (unsigned index = 0; index < 2; ++index) {
        const library_text name(::H5Tget_member_name(type, index));
        unsigned char value = 0;
        if (::H5Tget_member_value(type, index, &value) < 0) fail_type();
        if (value > 1 || name.view() != (value == 0 ? "FALSE" : "TRUE")) return false;
    }
    return true;
}

// ---- bytes -----------------------------------------------------------------------------------------------

dtype string_type(::hid_t type) {
    const ::htri_t is_variable = ::H5Tis_variable_str(type);
    if (is_variable < 0) fail_type();
    if (is_variable > 0)
        throw_unsupported("strings of variable length, whose characters are stored elsewhere in the file");
    // padding is left unchanged; usually it is zeros
    return {dtype_kind::bytes, size_of(type)};
}

/// HDF5 defines no type for numpy's times: h5py stores them as opaque bytes, tagged with numpy's name of the
/// type. Other tags are ignored.
dtype opaque_type(::hid_t type) {
    const std::uint64_t size_bytes = size_of(type);
    dtype opaque(dtype_kind::opaque, size_bytes);
    const library_text tag(::H5Tget_tag(type));
    constexpr std::string_view prefix = "NUMPY:";
    if (!tag.view().starts_with(prefix)) return opaque;
    try {
        dtype tagged = dtype::parse(tag.view().substr(prefix.size()));
        const bool is_time = tagged.kind() == dtype_kind::datetime || tagged.kind() == dtype_kind::timedelta;
        return is_time && tagged.size_bytes() == size_bytes ? tagged : opaque;
    } catch (const error&) {
        return opaque;
    }
}

// ---- types of types --------------------------------------------------------------------------------------

element_type convert(::hid_t type, unsigned depth);

element_type array_type(::hid_t type, unsigned depth) {
    const int rank = ::H5Tget_array_ndims(type);
    if (rank <= 0 || rank > H5S_MAX_RANK) fail_type();
    std::array<::hsize_t, H5S_MAX_RANK> lengths{};
    if (::H5Tget_array_dims2(type, lengths.data()) < 0) fail_type();
    element_type result = convert(owned(::H5Tget_super(type)).id(), depth + 1);
    result.shape.insert(result.shape.begin(), lengths.begin(), lengths.begin() + rank);
    return result;
}

/// Whether the fields are two floats of one type called r and i, as h5py writes complex numbers.
bool is_complex(const std::vector<dtype_field>& fields, std::uint64_t size_bytes) {
    if (fields.size() != 2 || fields[0].name != "r" || fields[1].name != "i") return false;
    const dtype& real = fields[0].type;
    return real.kind() == dtype_kind::floating && real.size_bytes() >= 4 && real == fields[1].type &&
           fields[0].shape.empty() && fields[1].shape.empty() && size_bytes == 2 * real.size_bytes() &&
           fields[0].offset_bytes == 0 && fields[1].offset_bytes == real.size_bytes();
}

dtype compound_type(::hid_t type, unsigned depth) {
    const int count = ::H5Tget_nmembers(type);
    if (count < 0) fail_type();
    std::vector<dtype_field> fields;
    for (unsigned index = 0; index < static_cast<unsigned>(count); ++index) {
        const library_text name(::H5Tget_member_name(type, index));
        try {
            element_type member = convert(owned(::H5Tget_member_type(type, index)).id(), depth + 1);
            fields.push_back({std::string(name.view()),
                              {},
                              std::move(member.type),
                              std::move(member.shape),
                              ::H5Tget_member_offset(type, index)});
        } catch (const unsupported& failure) {
            throw_unsupported("{} in the field {}", failure.what(), quote(name.view()));
        }
    }
    std::ranges::sort(fields, {}, &dtype_field::offset_bytes);
    const std::uint64_t size_bytes = size_of(type);
    if (is_complex(fields, size_bytes)) {
        return {dtype_kind::complex, size_bytes, fields[0].type.order()};
    }
    try {
        return dtype::structured(std::move(fields), size_bytes);
    } catch (const invalid_argument& failure) {
        throw_unsupported("structures that numpy would not allow: {}", failure.what());
    }
}

element_type convert(::hid_t type, unsigned depth) {
    if (depth > max_depth) throw_unsupported("types nested more than {} deep", max_depth);
    switch (::H5Tget_class(type)) {
        case H5T_INTEGER:
            return {integer_type(type, "integers", ::H5Tget_sign(type) == H5T_SGN_2), {}};
        case H5T_BITFIELD:
            return {integer_type(type, "bit fields", false), {}};
        case H5T_FLOAT:
            return {floating_type(type), {}};
        case H5T_STRING:
            return {string_type(type), {}};
        case H5T_OPAQUE:
            return {opaque_type(type), {}};
        case H5T_COMPOUND:
            return {compound_type(type, depth), {}};
        case H5T_ENUM:
            if (is_boolean(type)) return {dtype(dtype_kind::boolean, 1), {}};
            return convert(owned(::H5Tget_super(type)).id(), depth + 1);
        case H5T_ARRAY:
            return array_type(type, depth);
        case H5T_REFERENCE:
            throw_unsupported("references to other objects");
        case H5T_VLEN:
            throw_unsupported(
                "sequences of variable length, whose elements are stored elsewhere in the file");
        case H5T_TIME:
            throw_unsupported("times of the class H5T_TIME, whose meaning HDF5 does not define");
        case H5T_NO_CLASS:
            fail_type();
        default:
            throw_unsupported("elements of a class that pinflow does not know");
    }
}

}  // namespace

element_type element_type_of(::hid_t type) {
    try {
        return convert(type, 0);
    } catch (const unsupported& failure) {
        throw unsupported(fmt::format("holds {}", failure.what()));
    } catch (const invalid_argument& failure) {  // elements larger than numpy's
        throw unsupported(fmt::format("holds elements that numpy would not allow: {}", failure.what()));
    }
}

}  // namespace pinflow::detail::hdf5
