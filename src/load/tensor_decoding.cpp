#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/cast.hpp"
#include "src/core/quote.hpp"
#include "src/load/tensor_reader.hpp"

// tensor_reader: tensors that the CPU decodes.

namespace pinflow::detail {

namespace {

/// Elements that are left out are read in pieces of about this size.
constexpr std::uint64_t skipped_piece_bytes = 1 << 20;
/// Memory for decoding, of each thread.
constexpr std::uint64_t decoding_memory_bytes = std::uint64_t{16} << 20;
/// The most for a dataset with large bands of chunks.
constexpr std::uint64_t max_decoding_memory_bytes = std::uint64_t{32} << 20;
/// Slices of at most this size keep the chunks that they decode, as others of the same chunks may follow.
constexpr std::uint64_t max_small_part_bytes = std::uint64_t{4} << 20;
/// Memory of up to 16 threads for tensors in Fortran order. The more rows a block has, the longer are the
/// runs that are read: 4 KiB of each column of floats, if 1024 rows fit.
constexpr std::uint64_t reordering_memory_bytes = std::uint64_t{256} << 20;

}  // namespace

/// The memory for decoding a job.
std::uint64_t tensor_reader::memory_for(const load_job& job) const {
    const stored_tensor& stored = opened_.stored[job.tensor];
    if (stored.is_fortran_order && stored.part_rows == 0) {
        constexpr std::uint64_t max_shares = reordering_memory_bytes / decoding_memory_bytes;
        return reordering_memory_bytes / std::clamp<std::uint64_t>(plan_.fortran_count, 1, max_shares);
    }
    if (stored.part_rows == 0) return decoding_memory_bytes;
    // half of it for a chunk, or for the smallest part, so that no chunk is decoded twice
    const std::uint64_t part_bytes = stored.size_bytes / stored.shape[0] * stored.part_rows;
    return std::max(2 * chunk_bytes_of(stored),
                    std::clamp(2 * part_bytes, decoding_memory_bytes, max_decoding_memory_bytes));
}

void tensor_reader::open_stream(const load_job& job) {
    const stored_tensor& stored = opened_.stored[job.tensor];
    const std::string_view name = stored.has_no_name ? std::string_view() : stored.name;
    stream_job_ = nullptr;
    const element_file& elements = opened_.elements_of(stored.file);
    const bool is_small_part = !job.part.is_whole() && job.size_bytes <= max_small_part_bytes;
    stream_ = is_small_part ? elements.stream_of_part(name, memory_for(job))
                            : elements.stream(name, memory_for(job));
    // the file was opened by its path, now or for an earlier load
    const bool is_same = stream_->dtype() == stored_type_of(opened_, job) &&
                         std::ranges::equal(stream_->shape(), stored.shape);
    if (!is_same)
        throw data_changed(fmt::format(
            "'{}' has changed since it was opened: {} had the shape {} and elements "
            "of {}, and now has {} and {}",
            opened_.paths[stored.file].string(), quote(stored.name), to_string(stored.shape),
            stored_type_of(opened_, job).descr(), to_string(stream_->shape()), stream_->dtype().descr()));
    stream_job_ = &job;
}

/// Throws because the stream cannot deliver a part, although the listing of the file said so.
void tensor_reader::refuse_other_layout(const load_job& job) const {
    const stored_tensor& stored = opened_.stored[job.tensor];
    opened_.files[stored.file]->check_unchanged();
    throw data_changed(
        fmt::format("'{}' has changed since it was opened: {} can no longer be decoded in parts",
                    opened_.paths[stored.file].string(), quote(stored.name)));
}

void tensor_reader::begin_decoding(const load_piece& piece) {
    const load_job& job = plan_.jobs[piece.job];
    const stored_tensor& stored = opened_.stored[job.tensor];
    const bool is_part = piece.size_bytes != job.size_bytes;
    if (!is_part || stream_job_ != &job) open_stream(job);
    delivers_only_piece_ = true;
    reads_whole_tensor_ = true;
    position_bytes_ = 0;
    done_bytes_ = 0;
    if (is_part || slice_along(job, 0) != nullptr) {
        const auto [begin, end] = range_of(opened_, job, 0);
        const std::uint64_t row_bytes = job.size_bytes / (end - begin);
        const std::uint64_t first = begin + piece.begin_bytes / row_bytes;
        if (stream_->select(0, first, first + piece.size_bytes / row_bytes)) {
            reads_whole_tensor_ = false;
            position_bytes_ = first * (stored.size_bytes / stored.shape[0]);
        } else if (is_part) {
            refuse_other_layout(job);
        } else {
            delivers_only_piece_ = false;
        }
        done_bytes_ = piece.begin_bytes / type_of(opened_, job).size_bytes() *
                      stored_type_of(opened_, job).size_bytes();
    }
    for (std::size_t i = 0; i < job.part.slice_count() && delivers_only_piece_; ++i) {
        const auto& [axis, begin, end] = job.part[i];
        if (axis == 0) continue;
        delivers_only_piece_ = stream_->select(axis, begin, end);
        if (delivers_only_piece_) reads_whole_tensor_ = false;
    }
}

void tensor_reader::decode_box(const load_piece& piece, const std::atomic<bool>& stopped,
                               std::span<std::byte> destination) {
    stopped_ = &stopped;
    const load_job& job = plan_.jobs[piece.job];
    with_change_check(job, [&] {
        if (stream_job_ != &job) open_stream(job);
        const element_box box = box_of(opened_, job, piece);
        if (job.is_cast()) {
            const dtype& stored_type = stored_type_of(opened_, job);
            const std::uint64_t count = element_count(box.lengths);
            const std::uint64_t stored_bytes = count * stored_type.size_bytes();
            std::byte* const stored = cast_scratch_.reserve(stored_bytes);
            read_box(job, box, {stored, stored_bytes});
            cast_elements(stored_type, stored, *job.cast, destination.data(), count);
        } else {
            read_box(job, box, destination);
        }
        if (!stopped) stream_->finish();
    });
}

void tensor_reader::decode_box_on_host(const load_piece& piece, const std::atomic<bool>& stopped,
                                       std::byte* memory) {
    const load_job& job = plan_.jobs[piece.job];
    if (is_contiguous(box_of(opened_, job, piece), shape_of(opened_, job)))
        return decode_box(piece, stopped, {memory + piece.begin_bytes, piece.size_bytes});
    std::byte* const decoded = box_scratch_.reserve(piece.size_bytes);
    decode_box(piece, stopped, {decoded, piece.size_bytes});
    if (!stopped) scatter_on_host(opened_, job, piece, decoded, memory);
}

void tensor_reader::read_box(const load_job& job, const element_box& box, std::span<std::byte> destination) {
    const stored_tensor& stored = opened_.stored[job.tensor];
    const auto select = [&](std::size_t axis) {
        return stream_->select(axis, box.first[axis], box.first[axis] + box.lengths[axis]);
    };
    std::size_t selected = 0;
    while (selected < stored.shape.size() && select(selected))
        ++selected;
    if (selected == stored.shape.size()) return stream_->read(destination);
    // a dataset whose chunks have not been written as expected: run by run along the last axis
    if (selected == 0) refuse_other_layout(job);
    const std::uint64_t element_bytes = stored_type_of(opened_, job).size_bytes();
    const std::uint64_t run_bytes = box.lengths.back() * element_bytes;
    position_bytes_ = box.first[0] * (stored.size_bytes / stored.shape[0]);
    for (std::uint64_t run = 0; !destination.empty() && !*stopped_; ++run) {
        std::uint64_t begin = box.first.back(), item = 1, rest = run;
        for (std::size_t axis = stored.shape.size() - 1; axis-- > 0; rest /= box.lengths[axis]) {
            item *= stored.shape[axis + 1];
            begin += (box.first[axis] + rest % box.lengths[axis]) * item;
        }
        begin *= element_bytes;
        if (begin > position_bytes_) skip(begin - position_bytes_);
        stream_->read(destination.first(run_bytes));
        position_bytes_ = begin + run_bytes;
        destination = destination.subspan(run_bytes);
    }
}

void tensor_reader::decode_next(const load_job& job, std::span<std::byte> destination) {
    if (!job.is_cast()) return decode_stored(job, destination);
    const dtype& stored_type = stored_type_of(opened_, job);
    const std::uint64_t count = destination.size() / job.cast->size_bytes();
    const std::uint64_t stored_bytes = count * stored_type.size_bytes();
    std::byte* const stored = cast_scratch_.reserve(stored_bytes);
    decode_stored(job, {stored, stored_bytes});
    cast_elements(stored_type, stored, *job.cast, destination.data(), count);
}

void tensor_reader::decode_stored(const load_job& job, std::span<std::byte> destination) {
    if (delivers_only_piece_) return stream_->read(destination);
    const byte_runs runs = runs_of(opened_, job);
    while (!destination.empty()) {
        const std::uint64_t in_run = done_bytes_ % runs.size_bytes;
        const std::uint64_t begin = runs.first_bytes + runs.offset_of(done_bytes_);
        if (begin > position_bytes_) skip(begin - position_bytes_);
        if (*stopped_) return;
        const auto part =
            destination.first(std::min<std::uint64_t>(destination.size(), runs.size_bytes - in_run));
        stream_->read(part);
        position_bytes_ += part.size();
        done_bytes_ += part.size();
        destination = destination.subspan(part.size());
    }
}

void tensor_reader::skip(std::uint64_t size_bytes) {
    const std::uint64_t element_bytes = stream_->dtype().size_bytes();
    const std::uint64_t piece_bytes =
        std::max(skipped_piece_bytes / element_bytes * element_bytes, element_bytes);
    position_bytes_ += size_bytes;
    if (stream_->skip(size_bytes)) return;
    while (size_bytes > 0 && !*stopped_) {
        const std::uint64_t part = std::min(piece_bytes, size_bytes);
        stream_->read({read_scratch_.reserve(part), part});
        size_bytes -= part;
    }
}

void tensor_reader::finish_decoding(const load_piece& piece) {
    const load_job& job = plan_.jobs[piece.job];
    const stored_tensor& whole = opened_.stored[job.tensor];
    if (reads_whole_tensor_ && !delivers_only_piece_ && position_bytes_ < whole.size_bytes)
        skip(whole.size_bytes - position_bytes_);
    if (!*stopped_) stream_->finish();
    if (piece.size_bytes != job.size_bytes) return;  // the next piece may be of the same job
    stream_.reset();
    stream_job_ = nullptr;
}

}  // namespace pinflow::detail
