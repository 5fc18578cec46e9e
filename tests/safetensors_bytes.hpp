#pragma once

#include <fmt/format.h>

#include <complex>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/dtype.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "tests/npy_bytes.hpp"

/// safetensors files put together by hand, for the tests of readers.
namespace safetensors_bytes {

/// A length, as a file begins with it.
inline std::string eight_bytes(std::uint64_t number) {
    std::string bytes;
    for (unsigned index = 0; index < 8; ++index) {
        bytes += static_cast<char>(number >> (8 * index) & 0xFF);
    }
    return bytes;
}

/// A file as it is on disk.
inline std::string file_of(const std::string& json, const std::string& data = "") {
    return eight_bytes(json.size()) + json + data;
}

/// The JSON of one tensor.
inline std::string entry(const std::string& name, const std::string& type, const std::string& shape,
                         const std::string& offsets) {
    return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, type, shape, offsets);
}

/// A header with just that tensor.
inline std::string only(const std::string& type, const std::string& shape, const std::string& offsets) {
    return "{" + entry("a", type, shape, offsets) + "}";
}

inline pinflow::safetensors_header parsed(const std::string& file) {
    return pinflow::parse_safetensors_header(npy_bytes::as_bytes(file), file.size());
}

/// The types that both the format and pinflow have, by their names in the format.
inline const std::vector<std::pair<std::string, pinflow::dtype>>& named_types() {
    static const std::vector<std::pair<std::string, pinflow::dtype>> types{
        {"BOOL", pinflow::dtype::of<bool>()},
        {"U8", pinflow::dtype::of<std::uint8_t>()},
        {"I8", pinflow::dtype::of<std::int8_t>()},
        {"F8_E5M2", {pinflow::dtype_kind::float8_e5m2, 1}},
        {"F8_E4M3", {pinflow::dtype_kind::float8_e4m3fn, 1}},
        {"F8_E8M0", {pinflow::dtype_kind::float8_e8m0fnu, 1}},
        {"F8_E4M3FNUZ", {pinflow::dtype_kind::float8_e4m3fnuz, 1}},
        {"F8_E5M2FNUZ", {pinflow::dtype_kind::float8_e5m2fnuz, 1}},
        {"I16", pinflow::dtype::of<std::int16_t>()},
        {"U16", pinflow::dtype::of<std::uint16_t>()},
        {"F16", {pinflow::dtype_kind::floating, 2}},
        {"BF16", {pinflow::dtype_kind::bfloat16, 2}},
        {"I32", pinflow::dtype::of<std::int32_t>()},
        {"U32", pinflow::dtype::of<std::uint32_t>()},
        {"F32", pinflow::dtype::of<float>()},
        {"C64", pinflow::dtype::of<std::complex<float>>()},
        {"F64", pinflow::dtype::of<double>()},
        {"I64", pinflow::dtype::of<std::int64_t>()},
        {"U64", pinflow::dtype::of<std::uint64_t>()},
    };
    return types;
}

}  // namespace safetensors_bytes
