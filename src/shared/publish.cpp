#include <fmt/format.h>
#include <sys/mman.h>
#include <tbb/parallel_pipeline.h>
#include <tbb/task_arena.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <set>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/quote.hpp"
#include "src/core/source_check.hpp"
#include "src/core/system.hpp"
#include "src/core/worker_threads.hpp"
#include "src/shared/segment_file.hpp"

namespace pinflow {

namespace {

using namespace detail;

struct state_deleter {
    void operator()(XXH3_state_t* state) const { static_cast<void>(XXH3_freeState(state)); }
};

class checksum {
 public:
    checksum() : state_(XXH3_createState()) {
        if (!state_) throw std::bad_alloc();
        XXH3_128bits_reset(state_.get());
    }
    void add(std::span<const std::byte> bytes) {
        XXH3_128bits_update(state_.get(), bytes.data(), bytes.size());
    }
    std::string text() const {
        const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
        return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
    }

 private:
    std::unique_ptr<XXH3_state_t, state_deleter> state_;
};

/// A piece of the data, in bytes.
struct piece {
    std::uint64_t begin = 0;
    std::uint64_t size = 0;
};

/// Copies pieces of a source. With extents a piece is any range of bytes, otherwise it is whole rows.
class row_copier {
 public:
    row_copier(const row_source& source, std::span<std::byte> to) : source_(source), to_(to) {
        std::uint64_t begin = 0;
        for (const row_extent& each : source.extents()) {
            begins_.push_back(begin);
            begin += each.row_count * source.row_size_bytes();
        }
    }

    /// The size of all pieces but the last.
    std::uint64_t piece_bytes() const {
        // the copied bytes are still in the CPU's cache when they are hashed
        constexpr std::uint64_t usual_bytes = std::uint64_t{4} << 20;
        if (!begins_.empty()) return usual_bytes;
        const std::uint64_t row_bytes = source_.row_size_bytes();
        return std::max<std::uint64_t>(usual_bytes / row_bytes, 1) * row_bytes;
    }

    void copy(const piece& what) const {
        const std::span<std::byte> to = to_.subspan(what.begin, what.size);
        populate(to);
        if (begins_.empty()) {
            const std::uint64_t row_bytes = source_.row_size_bytes();
            std::vector<std::uint64_t> ids(what.size / row_bytes);
            std::iota(ids.begin(), ids.end(), what.begin / row_bytes);
            static_cast<void>(source_.read_rows(ids, to));
        } else {
            copy_extents(what.begin, to);
        }
    }

 private:
    /// Takes the page faults of whole pages at once; only a hint, as all memory is there.
    static void populate(std::span<std::byte> to) {
#ifdef MADV_POPULATE_WRITE
        constexpr std::uintptr_t page = 4096;
        const auto begin = reinterpret_cast<std::uintptr_t>(to.data()) / page * page;
        const auto end = reinterpret_cast<std::uintptr_t>(to.data() + to.size());
        system::advise(reinterpret_cast<const std::byte*>(begin), end - begin, MADV_POPULATE_WRITE);
#endif
    }

    void copy_extents(std::uint64_t begin, std::span<std::byte> to) const {
        const std::span<const row_extent> extents = source_.extents();
        auto at = static_cast<std::size_t>(std::ranges::upper_bound(begins_, begin) - begins_.begin() - 1);
        for (; !to.empty(); ++at) {
            const row_extent& extent = extents[at];
            const std::uint64_t skipped = begin - begins_[at];
            const std::uint64_t left = extent.row_count * source_.row_size_bytes() - skipped;
            const std::span<std::byte> part = to.first(std::min<std::uint64_t>(to.size(), left));
            // pread: a mapping of a truncated file would raise SIGBUS
            if (extent.file) {
                static_cast<void>(extent.file->read(extent.offset_bytes + skipped, part));
            } else if (!part.empty()) {
                std::memcpy(part.data(), extent.data + skipped, part.size());
            }
            to = to.subspan(part.size());
            begin += part.size();
        }
    }

    const row_source& source_;
    std::span<std::byte> to_;
    std::vector<std::uint64_t> begins_;  ///< of the extents, in bytes of the data
};

struct progress {
    const publish_options& options;
    std::uint64_t copied_bytes = 0;
    std::uint64_t total_bytes = 0;

    void add(std::uint64_t size_bytes) {
        copied_bytes += size_bytes;
        if (options.progress) options.progress(copied_bytes, total_bytes);
    }
};

/// Copies all rows to `file`, hashed in order while other pieces are copied.
std::string copy_all(const row_source& source, const segment_file& file, progress& done) {
    const std::span<std::byte> data = file.data();
    checksum sum;
    if (data.empty()) return sum.text();
    const row_copier copier(source, data);
    const std::uint64_t piece_bytes = copier.piece_bytes();
    std::uint64_t next = 0;
    // twice as many pieces as threads, so that a thread that waits for its turn to hash keeps no other
    // waiting
    const auto tokens = static_cast<std::size_t>(2 * tbb::this_task_arena::max_concurrency());
    const auto take = [&](tbb::flow_control& flow) -> piece {
        if (next == data.size()) {
            flow.stop();
            return {};
        }
        const piece taken{next, std::min<std::uint64_t>(piece_bytes, data.size() - next)};
        next += taken.size;
        return taken;
    };
    const auto copy = [&](piece what) {
        copier.copy(what);
        return what;
    };
    const auto hash = [&](piece what) {
        sum.add(data.subspan(what.begin, what.size));
        done.add(what.size);
    };
    // isolated, so that a caller's cancelled task group does not leave rows uncopied
    tbb::task_group_context context(tbb::task_group_context::isolated);
    tbb::parallel_pipeline(tokens,
                           tbb::make_filter<void, piece>(tbb::filter_mode::serial_in_order, take) &
                               tbb::make_filter<piece, piece>(tbb::filter_mode::parallel, copy) &
                               tbb::make_filter<piece, void>(tbb::filter_mode::serial_in_order, hash),
                           context);
    source.check_unchanged();
    return sum.text();
}

shape_vector shape_of(const row_source& source) {
    shape_vector shape{source.row_count()};
    shape.insert(shape.end(), source.row_shape().begin(), source.row_shape().end());
    return shape;
}

std::string one_name(std::string_view name) {
    std::vector<std::string> names = parse_segment_name(name);
    if (names.size() != 1)
        throw invalid_argument(
            fmt::format("{} cannot be published: its name has a slash, which stands "
                        "between a group and its arrays",
                        quote(name)));
    return std::move(names.front());
}

/// Refuses one array's name that is the folder of another, or the same.
void check_distinct(std::string_view group, std::span<const std::vector<std::string>> names) {
    std::set<std::vector<std::string>> arrays(names.begin(), names.end());
    bool collide = arrays.size() != names.size();
    for (const std::vector<std::string>& each : names) {
        for (std::size_t length = 1; length < each.size(); ++length)
            collide = collide ||
                      arrays.contains({each.begin(), each.begin() + static_cast<std::ptrdiff_t>(length)});
    }
    if (collide) {
        throw invalid_argument(fmt::format(
            "cannot publish {}: two of its arrays have the same name, or one has the name of another's group",
            quote(group)));
    }
}

}  // namespace

segment_info publish(std::string_view name, const row_source& source, const publish_options& options) {
    const std::string checked = one_name(name);
    check_row_source(source);
    const checked_folder folder = checked_folder::create(options.folder);
    check_name_is_free(folder, checked, false, options.replace);
    start_worker_threads();
    segment_file file(folder, folder.file_of({checked}), source.dtype(), shape_of(source));
    progress done{options, 0, file.data().size()};
    file.finish(copy_all(source, file, done));
    give_name(file, folder, checked, options.replace);
    return info_of(open_checked(folder, {checked}), checked);
}

std::vector<segment_info> publish_group(std::string_view name, std::span<const named_rows> arrays,
                                        const publish_options& options) {
    const std::string checked = one_name(name);
    if (arrays.empty())
        throw invalid_argument(fmt::format("cannot publish {}: no arrays are given", quote(name)));
    std::vector<std::vector<std::string>> names;
    for (const named_rows& each : arrays) {
        names.push_back(parse_segment_name(each.name));
        if (!each.rows)
            throw invalid_argument(
                fmt::format("cannot publish {}: the array {} is null", quote(name), quote(each.name)));
        check_row_source(*each.rows);
    }
    check_distinct(checked, names);
    const checked_folder folder = checked_folder::create(options.folder);
    check_name_is_free(folder, checked, true, options.replace);
    start_worker_threads();
    progress done{options};
    std::vector<named_file> files;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        std::vector<std::string> whole{checked};
        whole.insert(whole.end(), names[i].begin(), names[i].end());
        const row_source& rows = *arrays[i].rows;
        // memory for all of them, before the first byte is copied
        files.push_back(
            {names[i], segment_file(folder, folder.file_of(whole), rows.dtype(), shape_of(rows))});
        done.total_bytes += files.back().file.data().size();
    }
    for (std::size_t i = 0; i < arrays.size(); ++i)
        files[i].file.finish(copy_all(*arrays[i].rows, files[i].file, done));
    give_names(files, folder, checked, options.replace);
    std::vector<segment_info> published;
    for (const named_rows& each : arrays) {
        const std::string whole = checked + "/" + each.name;
        published.push_back(info_of(open_checked(folder, parse_segment_name(whole)), whole));
    }
    return published;
}

void verify_segment(std::string_view name, const std::filesystem::path& folder) {
    const opened_segment opened = open_checked(checked_folder(folder), parse_segment_name(name));
    const std::string& path = opened.data.file()->path();
    if (opened.trailer.is_writable)
        throw unsupported(fmt::format("cannot verify '{}': it can be written, so it has no checksum", path));
    checksum sum;
    std::vector<std::byte> buffer(
        std::min<std::uint64_t>(opened.trailer.data_size_bytes, std::uint64_t{1} << 20));
    for (std::uint64_t at = 0; at < opened.trailer.data_size_bytes; at += buffer.size()) {
        const auto part = std::span(buffer).first(
            std::min<std::uint64_t>(buffer.size(), opened.trailer.data_size_bytes - at));
        opened.data.file()->read(opened.trailer.data_offset_bytes + at, part);
        sum.add(part);
    }
    if (sum.text() == opened.trailer.checksum) return;
    throw format_error(
        fmt::format("'{}' has changed: the checksum of its data is {}, but its trailer says {}", path,
                    sum.text(), opened.trailer.checksum));
}

}  // namespace pinflow
