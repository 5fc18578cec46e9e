#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "formats/hdf5_output.hpp"
#include "formats/hdf5_write_chunks.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"
#include "src/core/utf8.hpp"

namespace pinflow {

namespace {

using detail::quote;
using dataset = hdf5_writer::dataset;

constexpr unsigned max_deflate_level = 12;
constexpr unsigned max_zlib_level = 9;
/// Contiguous elements that arrive in smaller pieces are collected, up to this size.
constexpr std::size_t piece_bytes = std::size_t{1} << 20;

// ---- checks: messages continue "the dataset NAME" --------------------------------------------------------

/// The paths that are already in the file.
class path_tree {
 public:
    /// @return the groups that the path leads through.
    /// @throws invalid_argument if no dataset can have this path.
    std::vector<std::string> check(const std::string& path) const;
    /// Adds a path. @throws as check.
    void add(const std::string& path);

 private:
    std::set<std::string, std::less<>> datasets_;
    std::set<std::string, std::less<>> groups_;
};

std::vector<std::string> path_tree::check(const std::string& path) const {
    if (path.empty()) throw invalid_argument("has an empty name");
    if (path.find('\0') != path.npos) throw invalid_argument("has a zero byte in its name");
    if (!detail::count_code_points(path)) throw invalid_argument("has a name that is not UTF-8");
    if (datasets_.contains(path)) throw invalid_argument("has the same name as another dataset");
    if (groups_.contains(path)) throw invalid_argument("has the name of a group that holds others");
    std::vector<std::string> leads_through;
    for (std::size_t begin = 0; begin <= path.size();) {
        const std::size_t end = std::min(path.find('/', begin), path.size());
        const std::string_view part = std::string_view(path).substr(begin, end - begin);
        if (part.empty()) throw invalid_argument("has an empty part in its name, before or after a '/'");
        if (part == "." || part == "..") {
            throw invalid_argument(
                fmt::format("has the part '{}' in its name, which is not a valid name", part));
        }
        if (end < path.size()) leads_through.push_back(path.substr(0, end));
        begin = end + 1;
    }
    for (const std::string& group : leads_through) {
        if (datasets_.contains(group)) {
            throw invalid_argument(fmt::format("cannot be in {}, which is a dataset", quote(group)));
        }
    }
    return leads_through;
}

void path_tree::add(const std::string& path) {
    const std::vector<std::string> groups = check(path);
    groups_.insert(groups.begin(), groups.end());
    datasets_.insert(path);
}

std::uint64_t payload_bytes_of(const dataset& of) {
    if (!detail::fits_strides(of.shape, of.dtype.size_bytes())) {
        throw invalid_argument(
            fmt::format("of {} and shape {} is too large", of.dtype.descr(), to_string(of.shape)));
    }
    return element_count(of.shape) * of.dtype.size_bytes();
}

void check_chunks(const dataset& of, std::uint64_t payload_bytes) {
    if (of.deflate_level > max_deflate_level) {
        throw invalid_argument(fmt::format("cannot be deflated at level {}: levels are 1 to {}, 0 is none",
                                           of.deflate_level, max_deflate_level));
    }
    if (of.chunk_shape.empty()) return;
    const auto refuse = [&](std::string_view why) {
        throw invalid_argument(fmt::format("of shape {} cannot be stored in chunks of shape {}: {}",
                                           to_string(of.shape), to_string(of.chunk_shape), why));
    };
    if (of.deflate_level == 0) refuse("only deflated datasets have chunks, and its deflate level is 0");
    if (of.chunk_shape.size() != of.shape.size()) refuse("the numbers of axes differ");
    if (payload_bytes == 0) return;
    constexpr std::uint64_t limit = std::uint64_t{1} << 32;
    std::uint64_t chunk_bytes = of.dtype.size_bytes();
    for (std::size_t axis = 0; axis < of.shape.size(); ++axis) {
        const std::uint64_t length = of.chunk_shape[axis];
        if (length == 0) refuse("a chunk has no elements");
        if (length > of.shape[axis]) refuse("a chunk is longer than the dataset");
        if (!detail::multiply(chunk_bytes, length, chunk_bytes) || chunk_bytes >= limit) {
            refuse("HDF5 limits chunks to less than 4 GiB");
        }
    }
}

void check_type(const dtype& type) {
    const detail::hdf5::library_lock lock;
    try {
        detail::hdf5::file_type_of(type);
    } catch (const format_error& failure) {
        throw unsupported(failure.what());
    }
}

/// @return the bytes of the elements.
std::uint64_t check_dataset(const dataset& of, const path_tree& paths) {
    const std::uint64_t payload_bytes = payload_bytes_of(of);
    if (of.shape.size() > H5S_MAX_RANK) {
        throw unsupported(fmt::format("has {} axes: HDF5 allows {}", of.shape.size(), H5S_MAX_RANK));
    }
    check_chunks(of, payload_bytes);
    check_type(of.dtype);
    static_cast<void>(paths.check(of.name));
    return payload_bytes;
}

}  // namespace

// ---- the writer -------------------------------------------------------------------------------------------

struct hdf5_writer::state {
    state(const std::filesystem::path& path, std::uint64_t alignment)
        : file(path), alignment_bytes(alignment) {}

    /// "cannot write 'a.h5'"
    std::string attempt() const { return fmt::format("cannot write '{}'", file.path()); }
    void check_complete() const;
    std::uint64_t check(const dataset& of, const path_tree& among) const;
    void write_contiguous(std::span<const std::byte> bytes);

    detail::hdf5::output file;
    std::uint64_t alignment_bytes;
    path_tree paths;
    // of the dataset begun last
    std::string description;  ///< empty before the first
    std::uint64_t expected_bytes = 0;
    std::uint64_t written_bytes = 0;
    std::optional<detail::hdf5_chunk_writer> chunks;  ///< empty for a contiguous dataset
    std::uint64_t offset_bytes = 0;                   ///< of the next elements of a contiguous dataset
    std::vector<std::byte> collected;                 ///< contiguous elements that are not written yet
    bool finished = false;
};

void hdf5_writer::state::check_complete() const {
    if (finished) throw invalid_argument(fmt::format("{}: it is finished", attempt()));
    if (written_bytes != expected_bytes) {
        throw invalid_argument(fmt::format("{}: {} declares {} bytes, but {} were written", attempt(),
                                           description, expected_bytes, written_bytes));
    }
}

std::uint64_t hdf5_writer::state::check(const dataset& of, const path_tree& among) const {
    const auto sentence = [&](const error& failure) {
        return fmt::format("{}: the dataset {} {}", attempt(), quote(of.name), failure.what());
    };
    try {
        return check_dataset(of, among);
    } catch (const invalid_argument& failure) {
        throw invalid_argument(sentence(failure));
    } catch (const unsupported& failure) {
        throw unsupported(sentence(failure));
    }
}

void hdf5_writer::state::write_contiguous(std::span<const std::byte> bytes) {
    const auto put = [&](std::span<const std::byte> piece) {
        file.write_at(offset_bytes, piece);
        offset_bytes += piece.size();
    };
    if (collected.size() + bytes.size() >= piece_bytes) {
        if (!collected.empty()) put(collected);
        collected.clear();
    }
    if (bytes.size() >= piece_bytes) {
        put(bytes);
    } else {
        collected.reserve(piece_bytes);
        collected.insert(collected.end(), bytes.begin(), bytes.end());
    }
    if (written_bytes == expected_bytes && !collected.empty()) {
        put(collected);
        collected.clear();
    }
}

hdf5_writer::hdf5_writer(const std::filesystem::path& path, std::uint64_t alignment_bytes) {
    constexpr std::uint64_t min_bytes = 16;
    constexpr std::uint64_t max_bytes = std::uint64_t{2} << 20;
    if (!std::has_single_bit(alignment_bytes) || alignment_bytes < min_bytes || alignment_bytes > max_bytes) {
        throw invalid_argument(fmt::format(
            "cannot write '{}': data cannot be aligned to {} bytes: it takes a power of two from {} to {}",
            path.string(), alignment_bytes, min_bytes, max_bytes));
    }
    state_ = std::make_unique<state>(path, alignment_bytes);
}

hdf5_writer::hdf5_writer(hdf5_writer&&) noexcept = default;
hdf5_writer& hdf5_writer::operator=(hdf5_writer&&) noexcept = default;
hdf5_writer::~hdf5_writer() = default;

hdf5_writer::state& hdf5_writer::valid_state() const {
    if (!state_) throw invalid_argument("cannot use a moved-from hdf5_writer");
    return *state_;
}

void hdf5_writer::check(std::span<const dataset> datasets) const {
    state& own = valid_state();
    path_tree paths = own.paths;
    for (const dataset& each : datasets) {
        own.check(each, paths);
        paths.add(each.name);
    }
}

void hdf5_writer::begin(const dataset& begun) {
    state& now = valid_state();
    now.check_complete();
    const std::uint64_t payload_bytes = now.check(begun, now.paths);
    now.chunks.reset();
    if (begun.deflate_level > 0 && payload_bytes > 0 && !begun.shape.empty()) {
        const shape_vector chunk_shape =
            begun.chunk_shape.empty()
                ? detail::hdf5_default_chunk_shape(begun.shape, begun.dtype.size_bytes())
                : begun.chunk_shape;
        now.chunks.emplace(begun.shape, chunk_shape, begun.dtype.size_bytes(), begun.deflate_level,
                           [&file = now.file](std::span<const std::uint64_t> first_element,
                                              std::uint32_t filter_mask, std::span<const std::byte> stored) {
                               file.write_chunk(first_element, filter_mask, stored);
                           });
        now.paths.add(begun.name);  // after a failure from here on, nothing can be written
        now.file.create_chunked(begun.name, begun.dtype, begun.shape, chunk_shape,
                                std::min(begun.deflate_level, max_zlib_level));
    } else {
        now.paths.add(begun.name);
        now.offset_bytes = now.file.create_contiguous(begun.name, begun.dtype, begun.shape, payload_bytes,
                                                      now.alignment_bytes);
    }
    now.description = fmt::format("the dataset {} of {} and shape {}", quote(begun.name), begun.dtype.descr(),
                                  to_string(begun.shape));
    now.expected_bytes = payload_bytes;
    now.written_bytes = 0;
}

void hdf5_writer::write(std::span<const std::byte> bytes) {
    state& now = valid_state();
    if (bytes.size() > now.expected_bytes - now.written_bytes) {
        throw invalid_argument(
            fmt::format("{}: {} bytes are too many after {} of the {} bytes of {}", now.attempt(),
                        bytes.size(), now.written_bytes, now.expected_bytes,
                        now.description.empty() ? "a file in which no dataset was begun" : now.description));
    }
    if (bytes.empty()) return;
    now.written_bytes += bytes.size();
    if (now.chunks) {
        now.chunks->write(bytes);
    } else {
        now.write_contiguous(bytes);
    }
}

void hdf5_writer::finish() {
    state& own = valid_state();
    own.check_complete();
    own.chunks.reset();
    own.file.commit();
    own.finished = true;
}

}  // namespace pinflow
