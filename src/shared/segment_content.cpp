#include "src/shared/segment_content.hpp"

#include <fmt/format.h>
#include <tbb/parallel_pipeline.h>
#include <tbb/task_arena.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "pinflow/file.hpp"
#include "src/core/extent_stride.hpp"
#include "src/core/system.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::detail {

struct checksum::state {
    XXH3_state_t hash;
};

checksum::checksum() : state_(std::make_unique<state>()) {
    XXH3_128bits_reset(&state_->hash);
}

checksum::~checksum() = default;

void checksum::add(std::span<const std::byte> bytes) {
    XXH3_128bits_update(&state_->hash, bytes.data(), bytes.size());
}

std::string checksum::text() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_->hash);
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

namespace {

/// Small enough that copied bytes are still in the CPU's cache when they are hashed, also with many threads.
constexpr std::uint64_t usual_piece_bytes = std::uint64_t{1} << 20;

/// A piece of the data, in bytes.
struct piece {
    std::uint64_t begin = 0;
    std::uint64_t size = 0;
};

/// Copies pieces of a source. With extents of contiguous rows a piece is any range of bytes, otherwise it is
/// whole rows.
class row_copier {
 public:
    row_copier(const row_source& source, const copy_target& to) : source_(source), to_(to) {
        if (!has_contiguous_extents(source)) return;
        std::uint64_t begin = 0;
        for (const row_extent& each : source.extents()) {
            begins_.push_back(begin);
            begin += each.row_count * source.row_size_bytes();
        }
    }

    /// The size of all pieces but the last.
    std::uint64_t piece_bytes() const {
        if (!begins_.empty()) return usual_piece_bytes;
        const std::uint64_t row_bytes = source_.row_size_bytes();
        constexpr std::uint64_t max_rows = std::uint64_t{1} << 16;  // whose indices take 512 KiB
        return std::clamp<std::uint64_t>(usual_piece_bytes / row_bytes, 1, max_rows) * row_bytes;
    }

    void copy(const piece& what) const {
        const std::span<std::byte> to = to_.bytes.subspan(what.begin, what.size);
        to_.allocate_pages(to);
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
    const copy_target& to_;
    std::vector<std::uint64_t>
        begins_;  ///< of the extents, in bytes of the data; empty if pieces are whole rows
};

/// Copies all rows, hashed in order while other pieces are copied.
std::string copy_rows(const row_source& source, const copy_target& to) {
    checksum sum;
    const std::span<std::byte> data = to.bytes;
    if (data.empty()) return sum.text();
    const row_copier copier(source, to);
    const std::uint64_t piece_bytes = copier.piece_bytes();
    std::uint64_t next = 0;
    // twice as many pieces as threads, so that threads go on copying while copied pieces wait to be hashed
    const std::size_t tokens = 2 * static_cast<std::size_t>(tbb::this_task_arena::max_concurrency());
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
        to.progress(what.size);
        return what;
    };
    const auto unmap = [&](piece what) { to.unmap_pages(data.subspan(what.begin, what.size)); };
    // isolated, so that a caller's cancelled task group does not leave rows uncopied
    tbb::task_group_context context(tbb::task_group_context::isolated);
    tbb::parallel_pipeline(tokens,
                           tbb::make_filter<void, piece>(tbb::filter_mode::serial_in_order, take) &
                               tbb::make_filter<piece, piece>(tbb::filter_mode::parallel, copy) &
                               tbb::make_filter<piece, piece>(tbb::filter_mode::serial_in_order, hash) &
                               tbb::make_filter<piece, void>(tbb::filter_mode::parallel, unmap),
                           context);
    source.check_unchanged();
    return sum.text();
}

class row_content final : public segment_content {
 public:
    explicit row_content(const row_source& source) : source_(source) {}
    const pinflow::dtype& dtype() const noexcept override { return source_.dtype(); }
    shape_vector shape() const override {
        shape_vector shape{source_.row_count()};
        shape.insert(shape.end(), source_.row_shape().begin(), source_.row_shape().end());
        return shape;
    }
    std::string copy(const copy_target& to) override {
        start_worker_threads();
        return copy_rows(source_, to);
    }

 private:
    const row_source& source_;
};

class stream_content final : public segment_content {
 public:
    explicit stream_content(std::unique_ptr<element_stream> stream) : stream_(std::move(stream)) {}
    const pinflow::dtype& dtype() const noexcept override { return stream_->dtype(); }
    shape_vector shape() const override { return stream_->shape(); }
    std::string copy(const copy_target& to) override {
        checksum sum;
        const std::uint64_t item_bytes = std::max<std::uint64_t>(dtype().size_bytes(), 1);
        const std::uint64_t piece_bytes =
            std::max<std::uint64_t>(usual_piece_bytes / item_bytes, 1) * item_bytes;
        for (std::span<std::byte> left = to.bytes; !left.empty();) {
            const std::span<std::byte> part = left.first(std::min<std::uint64_t>(left.size(), piece_bytes));
            to.allocate_pages(part);
            stream_->read(part);
            sum.add(part);
            to.progress(part.size());
            to.unmap_pages(part);
            left = left.subspan(part.size());
        }
        stream_->finish();
        return sum.text();
    }

 private:
    std::unique_ptr<element_stream> stream_;
};

}  // namespace

std::unique_ptr<segment_content> content_of(const row_source& source) {
    return std::make_unique<row_content>(source);
}

std::unique_ptr<segment_content> content_of(std::unique_ptr<element_stream> stream) {
    return std::make_unique<stream_content>(std::move(stream));
}

}  // namespace pinflow::detail
