#pragma once

#include <bit>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace pinflow {

/// What an element is; the values are the letters that numpy uses for the same kinds.
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
    opaque = 'V',   ///< numpy's void: bytes without a meaning
};

/// The type of an array's elements: kind, size, byte order and, for times, unit. A small value; equal values
/// are equal types.
class dtype {
 public:
    /// A type from its parts. `unit` is numpy's, without brackets ("ns", "25s"), for times only; empty is
    /// numpy's generic unit. Types of which order has no meaning (one byte, byte strings, opaque) ignore
    /// `order`.
    /// @throws invalid_argument when no such type exists (a 3-byte float).
    dtype(dtype_kind kind, std::uint64_t size_bytes, std::endian order = std::endian::little,
          std::string_view unit = {});

    /// Reads numpy's spelling: `<f4`, `>i8`, `|S10`, `<U5`, `<M8[ns]`, `|V7`, also `=f4`, `f4` and `float32`.
    /// The source of the grammar is numpy's array-protocol type strings.
    /// @throws format_error for what numpy rejects; unsupported for pickled objects and structured types.
    static dtype parse(std::string_view descr);

    /// The type of T: bool, the fixed-width integers, float, double, std::complex of both, std::byte (`|V1`).
    template <typename T>
    static dtype of();

    dtype_kind kind() const noexcept { return kind_; }
    /// Bytes an element takes.
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    /// Byte order of each number within an element; little where order has no meaning.
    std::endian order() const noexcept { return order_; }
    /// Bytes of the numbers that byte order applies to (4 for `<U5` and `<c8`); 1 where order has no meaning.
    std::uint64_t swap_size_bytes() const noexcept;
    /// Time unit without brackets ("ns"); empty for other kinds and for the generic unit.
    const std::string& unit() const noexcept { return unit_; }
    /// The same type, little-endian.
    dtype little_endian() const;
    /// numpy's spelling, byte order included: `<f4`, `|b1`, `>U5`, `<M8[25s]`.
    std::string descr() const;

    friend bool operator==(const dtype&, const dtype&) = default;

 private:
    dtype_kind kind_;
    std::endian order_;
    std::uint64_t size_bytes_;
    std::string unit_;
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
