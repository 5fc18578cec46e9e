#include "src/cli/open.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "pinflow/file.hpp"
#include "pinflow/formats/npy.hpp"
#include "src/cli/arguments.hpp"

namespace pinflow::cli {

namespace {

/// The text at `offset_bytes`, shorter where the file ends.
std::string read_text(const input_file& file, std::uint64_t offset_bytes, std::uint64_t most_bytes) {
    if (offset_bytes >= file.size_bytes()) return {};
    std::string text(std::min(most_bytes, file.size_bytes() - offset_bytes), '\0');
    file.read(offset_bytes, std::as_writable_bytes(std::span(text)));
    return text;
}

bool is_hdf5(const input_file& file) {
    // the superblock comes first or, after a user block, at a power of two from 512 on
    constexpr std::string_view signature = "\x89HDF\r\n\x1a\n";
    if (read_text(file, 0, signature.size()) == signature) return true;
    for (std::uint64_t offset = 512; offset < file.size_bytes() && offset != 0; offset *= 2) {
        if (read_text(file, offset, signature.size()) == signature) return true;
    }
    return false;
}

bool is_safetensors(const input_file& file) {
    const std::string head = read_text(file, 0, 9);
    if (head.size() < 9 || head[8] != '{') return false;
    std::uint64_t header_bytes = 0;
    for (std::size_t i = 0; i < 8; ++i) {
        header_bytes |= std::uint64_t{static_cast<unsigned char>(head[i])} << (8 * i);
    }
    return header_bytes <= file.size_bytes() - 8;
}

/// What a file is when this build has no reader for it; empty otherwise.
std::string_view unread_format(const input_file& file) {
    const std::string head = read_text(file, 0, 4);
    if (head.starts_with("\x93NUM")) return {};
    if (head == "PK\x03\x04" || head == "PK\x05\x06") return "a zip archive (.npz)";
    if (is_hdf5(file)) return "an HDF5 file";
    if (is_safetensors(file)) return "a safetensors file";
    return {};
}

}  // namespace

opened_array open_argument(const std::string& text) {
    if (text.starts_with("shm:")) {
        throw usage_error(
            fmt::format("this build of pinflow cannot open shared segments, such as '{}'", text));
    }
    if (text.empty()) throw invalid_argument("cannot open '': the path is empty");
    const file_argument argument = split_file_argument(text);
    if (const std::string_view format = unread_format(input_file(argument.path)); !format.empty()) {
        throw usage_error(
            fmt::format("'{}' is {}, which this build of pinflow cannot read", argument.path, format));
    }
    array opened = open_npy(argument.path);
    if (argument.name) {
        throw invalid_argument(
            fmt::format("'{}' is an .npy file, whose one array has no name, so that there is no '{}' in it",
                        argument.path, *argument.name));
    }
    const std::string header = read_text(*opened.file(), 0, opened.offset_bytes());
    const bool fortran_order =
        parse_npy_header(std::as_bytes(std::span(header)), opened.file()->size_bytes()).fortran_order;
    return {std::move(opened), "npy", fortran_order};
}

}  // namespace pinflow::cli
