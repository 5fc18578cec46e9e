#include "src/cli/target_file.hpp"

#include <fmt/format.h>

#include <bit>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "formats/hdf5_path.hpp"
#include "formats/patterns.hpp"
#include "pinflow/error.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/output.hpp"
#include "src/core/checked.hpp"
#include "src/core/system.hpp"

namespace pinflow::cli {

namespace {

std::optional<file_format> format_by_extension(const std::string& path) {
    const std::string extension = std::filesystem::path(path).extension().string();
    if (extension == ".npy") return file_format::npy;
    if (extension == ".npz") return file_format::npz;
    if (extension == ".safetensors") return file_format::safetensors;
    if (extension == ".h5" || extension == ".hdf5") return file_format::hdf5;
    return std::nullopt;
}

/// A lower bound of the arrays' size in a file.
std::uint64_t min_file_bytes(std::span<const target_array> arrays, const target_layout& layout) {
    std::uint64_t payload_bytes = 0;
    for (const target_array& each : arrays)
        payload_bytes =
            pinflow::detail::saturated(element_count(each.shape), each.dtype.size_bytes(), payload_bytes);
    // deflate codes at most 258 bytes in 2 bits: a file that might fit must not be refused
    constexpr std::uint64_t max_deflate_ratio = 1032;
    return layout.deflate_level == 0 ? payload_bytes : payload_bytes / max_deflate_ratio;
}

/// @throws system_failure if the filesystem reports too little room for the file. If other processes take the
/// room later, writing fails and leaves no file.
void check_free_space(const target_argument& target, std::span<const target_array> arrays,
                      const target_layout& layout) {
    std::error_code unknown;
    const std::filesystem::path path = std::filesystem::absolute(target.path, unknown);
    if (unknown) return;
    // a file that is replaced keeps its space until the new one is complete
    const std::uint64_t needed_bytes = min_file_bytes(arrays, layout);
    const auto free_bytes = pinflow::detail::system::free_bytes(path.parent_path().string());
    if (!free_bytes || needed_bytes <= *free_bytes) return;
    throw system_failure(
        fmt::format(
            "cannot write '{}': it takes at least {} bytes ({}), and its filesystem has {} bytes ({}) free; "
            "free space there, or write to another filesystem",
            target.path, needed_bytes, readable_size(needed_bytes), *free_bytes, readable_size(*free_bytes)),
        std::make_error_code(std::errc::no_space_on_device));
}

/// As split_file_and_name, for a file that may not exist yet: then the longest prefix before a colon that
/// has one of the extensions is the file.
file_and_name split_target(const std::string& text) {
    if (pinflow::detail::exists(text)) return {text, "", false};
    std::optional<file_and_name> found;
    for (std::size_t colon = text.rfind(':'); colon != std::string::npos && colon > 0;
         colon = text.rfind(':', colon - 1)) {
        const std::string path = text.substr(0, colon);
        if (!format_by_extension(path)) continue;
        if (!found || pinflow::detail::exists(path)) found = {path, text.substr(colon + 1), true};
        if (pinflow::detail::exists(path)) break;
    }
    return found.value_or(file_and_name{text, "", false});
}

using writer = std::variant<npy_writer, npz_writer, safetensors_writer, hdf5_writer>;

hdf5_writer::dataset dataset_of(const target_array& array, const target_layout& layout) {
    return {array.name, array.dtype, array.shape, layout.deflate_level};
}

writer make_writer(const target_argument& target, std::span<const target_array> arrays,
                   const text_map& metadata, const target_layout& layout) {
    check_free_space(target, arrays, layout);
    switch (target.format) {
        case file_format::npy:
            return npy_writer(target.path, arrays.front().dtype, arrays.front().shape,
                              layout.alignment_bytes);
        case file_format::npz:
            return npz_writer(target.path, layout.alignment_bytes);
        case file_format::safetensors: {
            std::vector<safetensors_writer::tensor> tensors;
            tensors.reserve(arrays.size());
            for (const target_array& each : arrays)
                tensors.push_back({each.name, each.dtype, each.shape});
            return safetensors_writer(target.path, tensors, metadata, layout.alignment_bytes);
        }
        case file_format::hdf5: {
            hdf5_writer result(target.path, layout.alignment_bytes);
            std::vector<hdf5_writer::dataset> datasets;
            datasets.reserve(arrays.size());
            for (const target_array& each : arrays)
                datasets.push_back(dataset_of(each, layout));
            result.check(datasets);  // before time is spent on writing the first
            return result;
        }
    }
    throw std::logic_error("a format that cannot be written");
}

}  // namespace

target_argument parse_target(const std::string& text) {
    if (text.starts_with("shm:") && !pinflow::detail::exists(text)) {
        throw usage_error(
            fmt::format("cannot write '{}': `pinflow pin` makes segments; './{}' is a file", text, text));
    }
    file_and_name split = split_target(text);
    const std::optional<file_format> format = format_by_extension(split.path);
    if (!format) {
        throw usage_error(fmt::format(
            "cannot tell from the name '{}' what to write: .npy, .npz, .safetensors, .h5 or .hdf5", text));
    }
    if (*format == file_format::hdf5 && !has_hdf5()) {
        throw usage_error(
            fmt::format("this build of pinflow cannot write HDF5 files, such as '{}': build it with "
                        "-DPINFLOW_HDF5=ON and libhdf5",
                        text));
    }
    if (split.named && *format == file_format::npy) {
        throw usage_error(fmt::format(
            "cannot write '{}': the one array of a .npy file has no name; name the file alone, '{}'", text,
            split.path));
    }
    if (split.named && split.name.empty()) {
        throw usage_error(fmt::format("'{}' ends in a colon without a name after it", text));
    }
    if (!split.named) split.name = "data";
    // names of members are given with or without .npy, which npz_writer appends
    if (*format == file_format::npz && split.name.size() > 4 && split.name.ends_with(".npy")) {
        split.name.resize(split.name.size() - 4);
    }
    if (*format == file_format::hdf5) {
        split.name = pinflow::detail::hdf5_path(split.name);
        if (split.name.empty())
            throw usage_error(fmt::format("'{}' ends in slashes, which name nothing", text));
    }
    return {std::move(split.path), std::move(split.name), split.named, *format};
}

void check_alignment(file_format format, std::uint64_t alignment_bytes) {
    // numpy refuses a .npy header that is padded to 16384 bytes; a zip entry has little room for padding
    constexpr std::uint64_t min_bytes = 16;
    const bool narrow = format == file_format::npy || format == file_format::npz;
    const std::uint64_t max_bytes = narrow ? 8192 : std::uint64_t{2} << 20;
    if (!std::has_single_bit(alignment_bytes) || alignment_bytes < min_bytes || alignment_bytes > max_bytes) {
        throw usage_error(fmt::format("--align takes a power of two from {} to {} for {}, not {}", min_bytes,
                                      max_bytes, to_string(format), alignment_bytes));
    }
}

target_file::target_file(const target_argument& target, std::span<const target_array> arrays,
                         const text_map& metadata, const target_layout& layout)
    : writer_(make_writer(target, arrays, metadata, layout)), layout_(layout) {}

void target_file::begin(const target_array& array) {
    if (auto* const archive = std::get_if<npz_writer>(&writer_)) {
        archive->begin(array.name, array.dtype, array.shape);
    } else if (auto* const file = std::get_if<hdf5_writer>(&writer_)) {
        file->begin(dataset_of(array, layout_));
    }
}

void target_file::write(std::span<const std::byte> bytes) {
    std::visit([&](auto& writer) { writer.write(bytes); }, writer_);
}

void target_file::finish() {
    std::visit([](auto& writer) { writer.finish(); }, writer_);
}

}  // namespace pinflow::cli
