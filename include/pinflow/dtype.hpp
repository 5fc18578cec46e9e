#pragma once

#if __cplusplus < 202002L
#error "pinflow needs C++20: compile with -std=c++20"
#endif

#include <bit>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace pinflow {

/// The kind of an element. The values are the letters that numpy uses for the same kinds.
enum class dtype_kind : char {
    boolean = 'b',
    signed_integer = 'i',
    unsigned_integer = 'u',
    floating = 'f',
    complex = 'c',
    timedelta = 'm',
    datetime = 'M',
    bytes = 'S',    ///< fixed-length byte strings, zero-padded
    unicode = 'U',  ///< fixed-length UCS-4 strings, zero-padded
    opaque = 'V',   ///< numpy's void: bytes without a meaning, or the fields of a structured type
    // numpy has no letters for these: in .npy files they are `|V2` and `|V1`, which `array::view_as` can
    // reinterpret as these kinds
    bfloat16 = 'B',       ///< the upper half of a float32
    float8_e4m3fn = 'E',  ///< OCP 8-bit float with 4 bits of exponent, without infinities
    float8_e5m2 = 'F',    ///< OCP 8-bit float with 5 bits of exponent
    // stored, but never cast
    float8_e8m0fnu = 'G',   ///< OCP 8-bit scale: a power of two, or NaN
    float8_e4m3fnuz = 'H',  ///< 4 bits of exponent, no infinities, one zero and one NaN
    float8_e5m2fnuz = 'K',  ///< 5 bits of exponent, no infinities, one zero and one NaN
};

struct dtype_field;

/// The type of an array's elements: kind, size, byte order, the unit of times, and the fields of structured
/// types. A small value; equal values are equal types.
class dtype {
 public:
    /// A type from its parts. `unit` is numpy's, without brackets ("ns", "25s"), and for times only; empty
    /// means numpy's generic unit. Types without a byte order (one byte, byte strings, opaque) ignore
    /// `order`.
    /// @throws invalid_argument if no such type exists (a 3-byte float).
    dtype(dtype_kind kind, std::uint64_t size_bytes, std::endian order = std::endian::little,
          std::string_view unit = {});

    /// A structured type: fields in the order of their offsets within an element of `size_bytes`. Fields may
    /// leave gaps, and may themselves be structured. An empty list of fields is allowed (`[]`).
    /// @throws invalid_argument if a name or title occurs twice or is not UTF-8, if a name is empty, if
    /// fields overlap, are not in order of their offsets or do not fit into `size_bytes`, and for more bytes
    /// than numpy allows.
    static dtype structured(std::vector<dtype_field> fields, std::uint64_t size_bytes);

    /// Reads numpy's spelling: `<f4`, `>i8`, `|S10`, `<U5`, `<M8[ns]`, `|V7`, also `=f4`, `f4` and `float32`.
    /// Also reads ml_dtypes' names of types that numpy lacks: `bfloat16`, `>bfloat16`, `float8_e4m3fn`,
    /// `float8_e5m2`, `float8_e8m0fnu`, `float8_e4m3fnuz`, `float8_e5m2fnuz`. The source of the grammar is
    /// numpy's array-protocol type strings.
    /// @throws format_error for any other text, including names without a size such as `int`, `f` and `S`.
    /// @throws unsupported for pickled objects and lists of fields.
    static dtype parse(std::string_view descr);

    /// The type of T: bool, the fixed-width integers, float, double, std::complex of both, std::byte (`|V1`).
    template <typename T>
    static dtype of();

    dtype_kind kind() const noexcept { return kind_; }
    /// Bytes of one element. 0 for `|S0`, `<U0`, `|V0`, and for structured types whose fields all have 0
    /// bytes and leave no gaps.
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    /// Byte order of each number within an element; little for types without a byte order, and for structured
    /// types, whose fields have their own.
    std::endian order() const noexcept { return order_; }
    /// Bytes of the numbers that byte order applies to (4 for `<U5` and `<c8`); 1 for types without a byte
    /// order.
    std::uint64_t swap_size_bytes() const noexcept;
    /// Time unit without brackets ("ns"); empty for other kinds and for the generic unit.
    const std::string& unit() const noexcept { return unit_; }
    /// Whether this is a structured type; true also if it has no fields (`[]`).
    bool is_structured() const noexcept { return fields_ != nullptr; }
    /// The fields of a structured type; empty for all others. They live as long as any copy of the type.
    std::span<const dtype_field> fields() const noexcept;
    /// The same type in little-endian order, including its fields.
    dtype little_endian() const;
    /// Whether every number in it is little-endian or has no byte order.
    bool is_little_endian() const noexcept;
    /// Whether numpy has this type. It lacks bfloat16 and the 8-bit floats. True for structured types,
    /// whatever their fields.
    bool is_known_to_numpy() const noexcept;
    /// numpy's spelling, with byte order: `<f4`, `|b1`, `>U5`, `<M8[25s]`. A structured type is the list that
    /// numpy.dtype takes, `[('a', '<f4'), ('b', '<i2', (3,))]`, with gaps as fields named '' of type `|V`.
    /// Types that numpy lacks have the names that `parse` reads.
    std::string descr() const;

    friend bool operator==(const dtype& a, const dtype& b);

 private:
    dtype_kind kind_;
    std::endian order_;
    std::uint64_t size_bytes_;
    std::string unit_;
    std::shared_ptr<const std::vector<dtype_field>>
        fields_;  // null unless structured; shared, as it never changes
};

/// One field of a structured type.
struct dtype_field {
    std::string name;
    std::string title;  ///< a second name that numpy allows; usually empty
    dtype type;
    std::vector<std::uint64_t> shape;  ///< the shape of an array field; empty for a single element
    std::uint64_t offset_bytes = 0;    ///< within the element

    /// The size of the field in bytes.
    /// @throws invalid_argument if numpy does not allow the field: it is too large, has more than 64 axes, or
    /// is an array of elements of 0 bytes (`|S0`, `<U0`, `|V0`).
    std::uint64_t size_bytes() const;
    friend bool operator==(const dtype_field&, const dtype_field&) = default;
};

template <typename T>
dtype dtype::of() {
    if constexpr (std::is_same_v<T, bool>) {
        return {dtype_kind::boolean, 1};
    } else if constexpr (std::is_same_v<T, std::byte>) {
        return {dtype_kind::opaque, 1};
    } else if constexpr (std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>) {
        return {dtype_kind::complex, sizeof(T), std::endian::native};
    } else if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
        return {dtype_kind::floating, sizeof(T), std::endian::native};
    } else {
        static_assert(std::is_integral_v<T>, "no numpy type corresponds to this C++ type");
        return {std::is_signed_v<T> ? dtype_kind::signed_integer : dtype_kind::unsigned_integer, sizeof(T),
                std::endian::native};
    }
}

}  // namespace pinflow
