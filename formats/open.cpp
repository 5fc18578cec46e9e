#include "pinflow/formats/open.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "formats/element_streams.hpp"
#include "formats/hdf5_shared_rows.hpp"
#include "formats/npy_file.hpp"
#include "formats/patterns.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "src/core/quote.hpp"
#include "src/core/stack.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow {

namespace {

using detail::array_mapping;
using detail::exists;
using detail::has_wildcards;
using detail::matches_of;
using detail::quote;
using detail::try_cuts;

// ---- what a file is ---------------------------------------------------------------------------------------

/// The bytes at `offset_bytes`; fewer at the end of the file.
std::string read_text(const input_file& file, std::uint64_t offset_bytes, std::uint64_t max_bytes) {
    if (offset_bytes >= file.size_bytes()) return {};
    std::string text(std::min(max_bytes, file.size_bytes() - offset_bytes), '\0');
    file.read(offset_bytes, std::as_writable_bytes(std::span(text)));
    return text;
}

bool is_hdf5(const input_file& file) {
    // the superblock comes first or, after a user block, at a power of two from 512 on
    constexpr std::string_view signature = "\x89HDF\r\n\x1a\n";
    if (read_text(file, 0, signature.size()) == signature) return true;
    for (std::uint64_t offset = 512; offset < file.size_bytes(); offset *= 2) {
        if (read_text(file, offset, signature.size()) == signature) return true;
    }
    return false;
}

/// What a file of no known format may be, as the end of a message.
std::string_view guess_of(std::string_view head) {
    if (head.starts_with("version https://git-lfs"))
        return ". It is a Git LFS pointer: fetch the file itself with `git lfs pull`";
    if (head.starts_with('{'))
        return ". If it is the index of several safetensors files, open the files that it names";
    if (head.size() > 1 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5)
        return ". It may be a Python pickle: save its arrays as .npz or safetensors";
    return "";
}

file_format format_of_file(const input_file& file) {
    constexpr std::string_view npy_magic = "\x93NUMPY";
    const std::string text = read_text(file, 0, 32);
    const std::string head = text.substr(0, 9);
    if (head.empty()) throw format_error(fmt::format("cannot open '{}': the file is empty", file.path()));
    if (head.starts_with(npy_magic) || npy_magic.starts_with(head)) return file_format::npy;
    if (head.starts_with("PK\x03\x04") || head.starts_with("PK\x05\x06")) return file_format::npz;
    // a length below 2^48: no text begins like this. The reader checks whether it is right
    if (head.size() == 9 && head[6] == '\0' && head[7] == '\0' && head[8] == '{') {
        return file_format::safetensors;
    }
    if (is_hdf5(file)) return file_format::hdf5;
    throw format_error(
        fmt::format("cannot open '{}': it is no .npy, .npz, safetensors or HDF5 file; it begins with {}{}",
                    file.path(), quote(head.substr(0, 8)), guess_of(text)));
}

array_listing list_npy(const std::filesystem::path& path) {
    const array opened = open_npy(path);
    // an array without elements, or with at most one axis longer than 1, is contiguous in both orders: only
    // the header tells its order
    const std::string header = read_text(*opened.file(), 0, opened.offset_bytes());
    const bool fortran_order =
        parse_npy_header(std::as_bytes(std::span(header)), opened.file()->size_bytes()).fortran_order;
    return {.name = {},
            .dtype = opened.dtype(),
            .shape = opened.shape(),
            .fortran_order = fortran_order,
            .offset_bytes = opened.offset_bytes(),
            .size_bytes = opened.size_bytes(),
            .mappable = opened.has_view(),
            .reason = opened.reason()};
}

/// Opens a file. If there is none and `path` may be a pattern, the error says which function takes patterns.
std::shared_ptr<const input_file> open_one_file(const std::filesystem::path& path) {
    try {
        return std::make_shared<const input_file>(path);
    } catch (const system_failure& failure) {
        if (failure.code() != std::errc::no_such_file_or_directory || !has_wildcards(path.string())) throw;
        throw system_failure(
            fmt::format(
                "{}; if it is a pattern, use open_rows, which takes the files that match as one array",
                failure.what()),
            failure.code());
    }
}

array open_npy_field(std::shared_ptr<const input_file> file, std::string_view name,
                     array_mapping mapping = array_mapping::own) {
    const std::string path = file->path();
    const array whole = detail::open_npy_file(std::move(file), mapping);
    if (whole.dtype().fields().empty()) {
        throw invalid_argument(fmt::format(
            "cannot open {} of '{}': it is a .npy file, whose one array has no name and no fields; leave "
            "out the name",
            quote(name), path));
    }
    try {
        return whole.field(name);
    } catch (const invalid_argument& failure) {
        throw invalid_argument(fmt::format("cannot open {} of '{}': {}", quote(name), path, failure.what()));
    }
}

std::string only_name(const std::filesystem::path& path) {
    return detail::only_array(path).name;
}

// ---- rows -------------------------------------------------------------------------------------------------

using source_pointer = std::shared_ptr<const row_source>;

/// The HDF5 cache that all files of one call share. Created with the first HDF5 file: sizing it reads /proc.
class shared_hdf5_memory {
 public:
    explicit shared_hdf5_memory(std::uint64_t size_bytes) : size_bytes_(size_bytes) {}

    std::shared_ptr<detail::hdf5_memory> get() {
        if (!memory_) memory_ = detail::make_hdf5_memory(size_bytes_);
        return memory_;
    }

 private:
    std::uint64_t size_bytes_;
    std::shared_ptr<detail::hdf5_memory> memory_;
};

/// How the files of one call are opened.
struct opening {
    std::shared_ptr<shared_hdf5_memory> memory;
    array_mapping mapping = array_mapping::own;
    bool stacked = false;  ///< each file is one row
};

source_pointer rows_of(const array& opened, const opening& how) {
    return how.stacked ? detail::one_row_of(opened) : opened.rows();
}

source_pointer rows_of_npy(const std::shared_ptr<const input_file>& file, const file_and_name& source,
                           const opening& how) {
    return rows_of(source.named ? open_npy_field(file, source.name, how.mapping)
                                : detail::open_npy_file(file, how.mapping),
                   how);
}

/// The same array without a mapping, if it is mapped and in C or Fortran order.
array unmapped(const array& opened) {
    if (!opened.file() || !opened.has_view()) return opened;
    const bool c_order = opened.view().c_contiguous();
    if (!c_order && !opened.view().fortran_contiguous()) return opened;
    return array::of_file_unmapped(opened.file(), opened.offset_bytes(), opened.dtype(), opened.shape(),
                                   !c_order)
        .labelled(opened.label());
}

source_pointer rows_of_other(file_format format, const file_and_name& source, const opening& how) {
    const std::string name = source.named ? source.name : only_name(source.path);
    if (format == file_format::hdf5) {  // decodes chunks when rows are read
        const auto open_hdf5 = how.stacked ? detail::open_hdf5_row : detail::open_hdf5_rows;
        return open_hdf5(source.path, name, how.memory->get());
    }
    const array opened = open(source.path, name);
    return rows_of(how.mapping == array_mapping::own ? opened : unmapped(opened), how);
}

source_pointer rows_of(const file_and_name& source, const opening& how) {
    const auto file = std::make_shared<const input_file>(source.path);
    const file_format format = format_of_file(*file);
    return format == file_format::npy ? rows_of_npy(file, source, how) : rows_of_other(format, source, how);
}

/// The row sources of all files that match the pattern `source.path`; empty if there are none. Headers of
/// .npy files are read in parallel. Throws the first error in the order of the paths.
std::vector<source_pointer> rows_of_matches(const file_and_name& source, opening how) {
    const std::vector<std::string> paths = matches_of(source.path);
    if (paths.size() > 1) how.mapping = array_mapping::later;
    const auto source_at = [&](std::size_t index) {
        return file_and_name{paths[index], source.name, source.named};
    };
    struct result {
        file_format format = file_format::npy;
        source_pointer rows;  ///< null for other formats, which are opened one after the other
        std::exception_ptr failure;
    };
    std::vector<result> results(paths.size());
    std::atomic<std::size_t> first_failed = paths.size();
    const auto open_at = [&](std::size_t index) {
        if (index > first_failed) return;  // an error here would not be reported
        result& opened = results[index];
        try {
            const auto file = std::make_shared<const input_file>(paths[index]);
            opened.format = format_of_file(*file);
            if (opened.format == file_format::npy) opened.rows = rows_of_npy(file, source_at(index), how);
        } catch (...) {
            opened.failure = std::current_exception();
            std::size_t known = first_failed;
            while (index < known && !first_failed.compare_exchange_weak(known, index)) {
            }
        }
    };
    detail::run_in_parallel(paths.size(), open_at);

    std::vector<source_pointer> sources;
    sources.reserve(paths.size());
    for (std::size_t index = 0; index < paths.size(); ++index) {
        result& opened = results[index];
        if (opened.failure) std::rethrow_exception(opened.failure);
        if (!opened.rows) opened.rows = rows_of_other(opened.format, source_at(index), how);
        sources.push_back(std::move(opened.rows));
    }
    return sources;
}

}  // namespace

std::string_view to_string(file_format format) noexcept {
    switch (format) {
        case file_format::npy:
            return "npy";
        case file_format::npz:
            return "npz";
        case file_format::safetensors:
            return "safetensors";
        case file_format::hdf5:
            return "hdf5";
    }
    return "unknown";
}

file_format format_of(const std::filesystem::path& path) {
    return format_of_file(input_file(path));
}

std::vector<array_listing> list_arrays(const std::filesystem::path& path) {
    switch (format_of(path)) {
        case file_format::npy:
            return {list_npy(path)};
        case file_format::npz:
            return list_npz(path);
        case file_format::safetensors:
            return list_safetensors(path);
        case file_format::hdf5:
            return list_hdf5(path);
    }
    throw std::logic_error("a format that is not listed");
}

array open(const std::filesystem::path& path) {
    if (const file_and_name split = split_file_and_name(path.string()); split.named) {
        throw invalid_argument(fmt::format(
            R"(cannot open '{}': there is no such file; the array {} of '{}' is opened by open("{}", "{}"))",
            path.string(), quote(split.name), split.path, split.path, split.name));
    }
    const auto file = open_one_file(path);
    if (format_of_file(*file) == file_format::npy) return detail::open_npy_file(file, array_mapping::own);
    return open(path, only_name(path));
}

array open(const std::filesystem::path& path, std::string_view name) {
    const auto file = open_one_file(path);
    switch (format_of_file(*file)) {
        case file_format::npy:
            return open_npy_field(file, name);
        case file_format::npz:
            return open_npz(path, name);
        case file_format::safetensors:
            return open_safetensors(path, name);
        case file_format::hdf5:
            return open_hdf5(path, name);
    }
    throw std::logic_error("a format that cannot be opened");
}

file_and_name split_file_and_name(const std::string& text) {
    std::optional<file_and_name> found;
    try_cuts(text, [&](file_and_name cut) {
        if (exists(cut.path)) found = std::move(cut);
        return found.has_value();
    });
    return found.value_or(file_and_name{text, {}, false});
}

bool is_pattern(const std::string& text) {
    bool exists_as_file = false;
    try_cuts(text, [&](const file_and_name& cut) { return exists_as_file = exists(cut.path); });
    return !exists_as_file && has_wildcards(text);
}

std::shared_ptr<const row_source> open_rows(const std::string& text, const open_options& options) {
    opening how;
    how.memory = std::make_shared<shared_hdf5_memory>(options.memory_bytes);
    source_pointer rows;
    try_cuts(text, [&](const file_and_name& cut) {
        if (exists(cut.path)) {
            rows = rows_of(cut, how);
            return true;
        }
        opening of_matches = how;
        of_matches.stacked = options.stack;
        auto sources = rows_of_matches(cut, of_matches);
        if (sources.empty()) return false;
        rows = options.stack ? detail::stack_rows(std::move(sources)) : concatenate(std::move(sources));
        return true;
    });
    if (rows) return rows;
    if (has_wildcards(text)) {
        throw invalid_argument(fmt::format("cannot open '{}': no file has that name or matches it", text));
    }
    return open(text).rows();  // its error says why the file cannot be opened
}

namespace detail {

namespace {

class npy_elements final : public element_file {
 public:
    explicit npy_elements(std::filesystem::path path) : path_(std::move(path)) {}

    std::unique_ptr<element_stream> stream(std::string_view name, std::uint64_t memory_bytes) const override {
        return stream_elements(
            name.empty() ? open_npy(path_) : open_npy_field(std::make_shared<const input_file>(path_), name),
            memory_bytes);
    }

 private:
    std::filesystem::path path_;
};

}  // namespace

array_listing only_array(const std::filesystem::path& path) {
    std::vector<array_listing> listings = list_arrays(path);
    if (listings.size() == 1) return std::move(listings.front());
    if (listings.empty()) {
        throw invalid_argument(fmt::format("cannot open '{}': there is no array in it", path.string()));
    }
    constexpr std::size_t max_names = 10;
    std::string names;
    for (std::size_t index = 0; index < std::min(listings.size(), max_names); ++index) {
        names += (index == 0 ? "" : ", ") + quote(listings[index].name);
    }
    throw invalid_argument(fmt::format("cannot open '{}' without a name: there are {} arrays in it, {}{}",
                                       path.string(), listings.size(), names,
                                       listings.size() > max_names ? ", ..." : ""));
}

std::unique_ptr<element_file> open_elements(const std::filesystem::path& path) {
    switch (format_of(path)) {
        case file_format::npy:
            return std::make_unique<npy_elements>(path);
        case file_format::npz:
            return open_npz_elements(path);
        case file_format::safetensors:
            return open_safetensors_elements(path);
        case file_format::hdf5:
            return open_hdf5_elements(path);
    }
    throw std::logic_error("a format without elements");
}

}  // namespace detail

}  // namespace pinflow
