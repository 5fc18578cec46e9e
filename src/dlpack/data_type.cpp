#include <fmt/format.h>

#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "src/dlpack/element_type.hpp"

namespace pinflow {

namespace {

using dlpack::type_code;

/// What helps with a little-endian type without a code.
std::string advice_for(const dtype& type) {
    if (type.is_structured()) return "array::field (in Python: numpy's array[NAME]) gives one field of it";
    const bool is_time = type.kind() == dtype_kind::datetime || type.kind() == dtype_kind::timedelta;
    const std::uint64_t size = type.size_bytes();
    if (size == 1 || size == 2 || size == 4 || size == 8)
        return fmt::format(
            "array::view_as(dtype::parse(\"<{0}{1}\")) (in Python: numpy's view('{0}{1}')) gives the same "
            "bytes as "
            "integers",
            is_time ? 'i' : 'u', size);
    return "it has only numbers of 1, 2, 4 or 8 bytes, and complex ones of up to 16; numpy's view('u1') "
           "gives "
           "the bytes";
}

}  // namespace

dlpack::data_type dlpack::type_of(const dtype& type) {
    const auto coded = [&](type_code code) {
        return data_type{code, static_cast<std::uint8_t>(8 * type.size_bytes()), 1};
    };
    const auto refuse = [&](const std::string& why) {
        return unsupported(fmt::format("DLPack has no type for elements of {}: {}", type.descr(), why));
    };
    if (!type.is_structured() && !type.is_little_endian())
        throw refuse("they are big-endian; a loader delivers them little-endian");
    switch (type.kind()) {
        case dtype_kind::boolean:
            return coded(type_code::boolean);
        case dtype_kind::signed_integer:
            return coded(type_code::signed_integer);
        case dtype_kind::unsigned_integer:
            return coded(type_code::unsigned_integer);
        case dtype_kind::floating:
            if (type.size_bytes() <= 8) return coded(type_code::floating);
            throw refuse("numpy's long double differs between platforms; convert it to float64");
        case dtype_kind::complex:
            if (type.size_bytes() <= 16) return coded(type_code::complex);
            throw refuse("numpy's long double differs between platforms; convert it to complex128");
        case dtype_kind::bfloat16:
            return coded(type_code::bfloat);
        case dtype_kind::float8_e4m3fn:
            return coded(type_code::float8_e4m3fn);
        case dtype_kind::float8_e5m2:
            return coded(type_code::float8_e5m2);
        case dtype_kind::float8_e8m0fnu:
            return coded(type_code::float8_e8m0fnu);
        case dtype_kind::float8_e4m3fnuz:
            return coded(type_code::float8_e4m3fnuz);
        case dtype_kind::float8_e5m2fnuz:
            return coded(type_code::float8_e5m2fnuz);
        case dtype_kind::timedelta:
        case dtype_kind::datetime:
        case dtype_kind::bytes:
        case dtype_kind::unicode:
        case dtype_kind::opaque:
            break;
    }
    throw refuse(advice_for(type));
}

dtype detail::element_type(const dlpack::data_type& type) {
    const auto refuse = [&] {
        return unsupported(fmt::format(
            "elements of DLPack type code {} with {} bits and {} lanes have no counterpart in pinflow",
            static_cast<unsigned>(type.code), type.bits, type.lanes));
    };
    if (type.lanes != 1 || type.bits % 8 != 0 || type.bits == 0) throw refuse();
    const std::uint64_t size_bytes = type.bits / 8;
    const auto made = [&](dtype_kind kind) {
        try {
            return dtype(kind, size_bytes);
        } catch (const invalid_argument&) {
            throw refuse();
        }
    };
    switch (type.code) {
        case type_code::signed_integer:
            return made(dtype_kind::signed_integer);
        case type_code::unsigned_integer:
            return made(dtype_kind::unsigned_integer);
        case type_code::floating:
            if (size_bytes > 8) throw refuse();
            return made(dtype_kind::floating);
        case type_code::bfloat:
            return made(dtype_kind::bfloat16);
        case type_code::complex:
            if (size_bytes > 16) throw refuse();
            return made(dtype_kind::complex);
        case type_code::boolean:
            return made(dtype_kind::boolean);
        case type_code::float8_e4m3fn:
            return made(dtype_kind::float8_e4m3fn);
        case type_code::float8_e5m2:
            return made(dtype_kind::float8_e5m2);
        case type_code::float8_e8m0fnu:
            return made(dtype_kind::float8_e8m0fnu);
        case type_code::float8_e4m3fnuz:
            return made(dtype_kind::float8_e4m3fnuz);
        case type_code::float8_e5m2fnuz:
            return made(dtype_kind::float8_e5m2fnuz);
    }
    throw refuse();
}

}  // namespace pinflow
