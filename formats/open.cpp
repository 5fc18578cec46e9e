#include "pinflow/formats/open.hpp"

#include <fmt/format.h>
#include <glob.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "formats/element_streams.hpp"
#include "formats/hdf5_shared_rows.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "src/core/quote.hpp"

namespace pinflow {

namespace {

using detail::quote;

// ---- what a file is ---------------------------------------------------------------------------------------

/// The bytes at `offset_bytes`, fewer where the file ends.
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
    for (std::uint64_t offset = 512; offset < file.size_bytes(); offset *= 2) {
        if (read_text(file, offset, signature.size()) == signature) return true;
    }
    return false;
}

file_format format_of_file(const input_file& file) {
    constexpr std::string_view npy_magic = "\x93NUMPY";
    const std::string head = read_text(file, 0, 9);
    if (head.empty()) throw format_error(fmt::format("cannot open '{}': the file is empty", file.path()));
    if (head.starts_with(npy_magic) || npy_magic.starts_with(head)) return file_format::npy;
    if (head.starts_with("PK\x03\x04") || head.starts_with("PK\x05\x06")) return file_format::npz;
    // a length of less than 2^48, which no text begins with; whether it is right is for the reader to say
    if (head.size() == 9 && head[6] == '\0' && head[7] == '\0' && head[8] == '{') {
        return file_format::safetensors;
    }
    if (is_hdf5(file)) return file_format::hdf5;
    throw format_error(
        fmt::format("cannot open '{}': it begins with {}, as no .npy, .npz, safetensors or HDF5 file does",
                    file.path(), quote(head.substr(0, 8))));
}

array_listing list_npy(const std::filesystem::path& path) {
    const array opened = open_npy(path);
    // the order of an array with fewer than two elements shows in the header alone
    const std::string header = read_text(*opened.file(), 0, opened.offset_bytes());
    const bool fortran_order =
        parse_npy_header(std::as_bytes(std::span(header)), opened.file()->size_bytes()).fortran_order;
    return {.name = {},
            .dtype = opened.dtype(),
            .shape = opened.shape(),
            .fortran_order = fortran_order,
            .offset_bytes = opened.offset_bytes(),
            .size_bytes = opened.size_bytes(),
            .mappable = opened.mapped(),
            .reason = opened.reason()};
}

array open_npy_field(const std::filesystem::path& path, std::string_view name) {
    const array whole = open_npy(path);
    if (whole.dtype().fields().empty()) {
        throw invalid_argument(fmt::format(
            "cannot open {} of '{}': it is an .npy file, whose one array has no name and no fields",
            quote(name), path.string()));
    }
    try {
        return whole.field(name);
    } catch (const invalid_argument& failure) {
        throw invalid_argument(
            fmt::format("cannot open {} of '{}': {}", quote(name), path.string(), failure.what()));
    }
}

/// The name of the one array of a file whose arrays have names.
std::string only_name(const std::filesystem::path& path) {
    const std::vector<array_listing> listings = list_arrays(path);
    if (listings.size() == 1) return listings.front().name;
    if (listings.empty()) {
        throw invalid_argument(fmt::format("cannot open '{}': there is no array in it", path.string()));
    }
    constexpr std::size_t most_names = 10;
    std::string names;
    for (std::size_t index = 0; index < std::min(listings.size(), most_names); ++index) {
        names += (index == 0 ? "" : ", ") + quote(listings[index].name);
    }
    throw invalid_argument(fmt::format("cannot open '{}' without a name: there are {} arrays in it, {}{}",
                                       path.string(), listings.size(), names,
                                       listings.size() > most_names ? ", ..." : ""));
}

// ---- patterns ---------------------------------------------------------------------------------------------

bool exists(const std::string& path) {
    std::error_code ignored;
    return std::filesystem::exists(path, ignored);
}

/// Orders text as it is, but numbers in it by their value: "part-2" comes before "part-10".
bool natural_less(std::string_view a, std::string_view b) {
    const auto is_digit = [](char character) { return character >= '0' && character <= '9'; };
    /// Takes the digits that `text` begins with, without the zeros that do not count.
    const auto take_number = [&](std::string_view& text) {
        std::size_t size = 0;
        while (size < text.size() && is_digit(text[size]))
            ++size;
        std::string_view digits = text.substr(0, size);
        text.remove_prefix(size);
        digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size()));
        return digits;
    };
    std::string_view rest_of_a = a;
    std::string_view rest_of_b = b;
    while (!rest_of_a.empty() && !rest_of_b.empty()) {
        if (is_digit(rest_of_a.front()) && is_digit(rest_of_b.front())) {
            const std::string_view number_a = take_number(rest_of_a);
            const std::string_view number_b = take_number(rest_of_b);
            if (number_a.size() != number_b.size()) return number_a.size() < number_b.size();
            if (number_a != number_b) return number_a < number_b;
        } else {
            if (rest_of_a.front() != rest_of_b.front()) return rest_of_a.front() < rest_of_b.front();
            rest_of_a.remove_prefix(1);
            rest_of_b.remove_prefix(1);
        }
    }
    if (rest_of_a.empty() != rest_of_b.empty()) return rest_of_a.empty();
    return a < b;  // they differ in leading zeros only, if at all
}

/// The paths that match, in their natural order; none when `pattern` is not one.
std::vector<std::string> matches_of(const std::string& pattern) {
    if (pattern.find_first_of("*?[") == pattern.npos || pattern.find('\0') != pattern.npos) return {};
    ::glob_t found{};
    // a folder that is not there holds no matches, one that cannot be read might
    const auto stop_at = [](const char* /*folder*/, int failure) {
        return failure == ENOENT || failure == ENOTDIR ? 0 : 1;
    };
    const int status = ::glob(pattern.c_str(), GLOB_NOSORT, stop_at, &found);
    const int error = errno;
    std::vector<std::string> paths;
    try {
        if (status == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    } catch (...) {
        ::globfree(&found);
        throw;
    }
    ::globfree(&found);
    if (status == GLOB_NOSPACE) throw std::bad_alloc();
    if (status == GLOB_ABORTED) {
        const std::error_code code(error, std::generic_category());
        throw system_failure(
            fmt::format("cannot look for the files that match '{}': {}", pattern, code.message()), code);
    }
    std::ranges::sort(paths, natural_less);
    return paths;
}

/// What the files that are opened by one call share.
using shared_memory = std::shared_ptr<detail::hdf5_memory>;

std::shared_ptr<const row_source> rows_of(const file_and_name& source, const shared_memory& memory) {
    if (format_of(source.path) == file_format::hdf5) {  // rows of its chunks, not all of them
        return detail::open_hdf5_rows(source.path, source.named ? source.name : only_name(source.path),
                                      memory);
    }
    return (source.named ? open(source.path, source.name) : open(source.path)).rows();
}

/// The row sources of all files that `pattern` matches; empty when there are none.
std::vector<std::shared_ptr<const row_source>> rows_of_matches(const std::string& pattern,
                                                               const std::string& name, bool named,
                                                               const shared_memory& memory) {
    std::vector<std::shared_ptr<const row_source>> sources;
    for (const std::string& path : matches_of(pattern)) {
        sources.push_back(rows_of({path, name, named}, memory));
    }
    return sources;
}

/// Calls `use` for FILE and NAME as `text` may be cut, from the longest FILE to the shortest, until it
/// returns true.
template <typename Use>
void try_cuts(const std::string& text, Use use) {
    if (use(file_and_name{text, {}, false})) return;
    for (std::size_t colon = text.rfind(':'); colon != text.npos && colon > 0;
         colon = text.rfind(':', colon - 1)) {
        if (use(file_and_name{text.substr(0, colon), text.substr(colon + 1), true})) return;
    }
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
    if (format_of(path) == file_format::npy) return open_npy(path);
    return open(path, only_name(path));
}

array open(const std::filesystem::path& path, std::string_view name) {
    switch (format_of(path)) {
        case file_format::npy:
            return open_npy_field(path, name);
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

std::shared_ptr<const row_source> open_rows(const std::string& text, const open_options& options) {
    const shared_memory memory = detail::make_hdf5_memory(options.memory_bytes);
    std::shared_ptr<const row_source> rows;
    try_cuts(text, [&](const file_and_name& cut) {
        if (exists(cut.path)) {
            rows = rows_of(cut, memory);
        } else if (auto sources = rows_of_matches(cut.path, cut.name, cut.named, memory); !sources.empty()) {
            rows = concatenate(std::move(sources));
        }
        return rows != nullptr;
    });
    if (rows) return rows;
    if (text.find_first_of("*?[") != text.npos) {
        throw invalid_argument(fmt::format("cannot open '{}': no file has that name or matches it", text));
    }
    return open(text).rows();  // which says why there is no such file
}

namespace detail {

namespace {

class npy_elements final : public element_file {
 public:
    explicit npy_elements(std::filesystem::path path) : path_(std::move(path)) {}

    std::unique_ptr<element_stream> stream(std::string_view name, std::uint64_t memory_bytes) const override {
        return stream_elements(name.empty() ? open_npy(path_) : open_npy_field(path_, name), memory_bytes);
    }

 private:
    std::filesystem::path path_;
};

class hdf5_elements final : public element_file {
 public:
    explicit hdf5_elements(std::filesystem::path path) : path_(std::move(path)) {}

    std::unique_ptr<element_stream> stream(std::string_view name, std::uint64_t memory_bytes) const override {
        return open_hdf5_elements(path_, name, memory_bytes);
    }

 private:
    std::filesystem::path path_;
};

}  // namespace

std::unique_ptr<element_file> open_elements(const std::filesystem::path& path) {
    switch (format_of(path)) {
        case file_format::npy:
            return std::make_unique<npy_elements>(path);
        case file_format::npz:
            return open_npz_elements(path);
        case file_format::safetensors:
            return open_safetensors_elements(path);
        case file_format::hdf5:
            return std::make_unique<hdf5_elements>(path);
    }
    throw std::logic_error("a format without elements");
}

}  // namespace detail

}  // namespace pinflow
