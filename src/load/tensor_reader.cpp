#include "src/load/tensor_reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/cast.hpp"
#include "src/core/fault_guard.hpp"
#include "src/core/quote.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

/// The largest read of runs and gaps.
constexpr std::uint64_t max_joined_read_bytes = 1 << 20;
/// If the gaps are short, the kernel is asked to read ahead this many bytes of runs and gaps: storage reads a
/// few pages as fast as one.
constexpr std::uint64_t read_ahead_bytes = 1 << 20;
constexpr std::uint64_t max_read_ahead_gap_bytes = 16 << 10;
/// Copying a longer run from a page is no faster than reading it, as the page must be mapped first.
constexpr std::uint64_t max_copied_run_bytes = 8 << 10;
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

thread_descriptor::thread_descriptor(const input_file& file) : shared_(file.lease_descriptor()) {
    try {
        // not /proc/self, which has the descriptors of the main thread
        own_ = system::open_for_reading(fmt::format("/proc/thread-self/fd/{}", shared_.get()));
    } catch (const system_failure&) {
        return;  // the shared one serves, too
    }
}

thread_descriptor::~thread_descriptor() {
    if (own_ >= 0) system::close(own_);
}

const thread_descriptor& tensor_reader::descriptor_of(std::size_t file) {
    if (const auto found = descriptors_.find(file); found != descriptors_.end()) return found->second;
    descriptors_.clear();
    return descriptors_.try_emplace(file, *opened_.files[file]).first->second;
}

void tensor_reader::read(const load_job& job, std::uint64_t begin_bytes, std::span<std::byte> destination) {
    if (!job.is_cast()) return read_stored(job, begin_bytes, destination);
    const dtype& stored_type = stored_type_of(opened_, job);
    const std::uint64_t element_bytes = job.cast->size_bytes();
    const std::uint64_t count = destination.size() / element_bytes;
    const std::uint64_t stored_bytes = stored_type.size_bytes();
    std::byte* const stored = cast_scratch_.reserve(count * stored_bytes);
    read_stored(job, begin_bytes / element_bytes * stored_bytes, {stored, count * stored_bytes});
    cast_elements(stored_type, stored, *job.cast, destination.data(), count);
}

void tensor_reader::read(const load_unit& unit, std::byte* buffer) {
    const std::span<const load_piece> pieces = plan_.pieces_of(unit);
    const auto offset_of = [&](const load_piece& piece) {
        const file_position place = position_of(opened_, plan_.jobs[piece.job]);
        return file_position{place.file, place.offset_bytes + piece.begin_bytes};
    };
    for (std::size_t begin = 0; begin < pieces.size();) {
        const load_piece& first = pieces[begin++];
        std::uint64_t size_bytes = first.size_bytes;
        const load_job& job = plan_.jobs[first.job];
        if (job.is_contiguous()) {
            const file_position place = offset_of(first);
            for (; begin < pieces.size(); ++begin) {
                const load_piece& next = pieces[begin];
                const file_position next_place = offset_of(next);
                const bool follows = next_place.file == place.file &&
                                     next_place.offset_bytes == place.offset_bytes + size_bytes &&
                                     next.unit_offset_bytes == first.unit_offset_bytes + size_bytes;
                if (!follows || !plan_.jobs[next.job].is_contiguous()) break;
                size_bytes += next.size_bytes;
            }
        }
        std::byte* const place = buffer + first.unit_offset_bytes;
        if (job.is_converted_by_device) {
            read_stored(job, staged_bytes_of(opened_, job, first.begin_bytes),
                        {place, staged_bytes_of(opened_, job, size_bytes)});
        } else {
            read(job, first.begin_bytes, {place, size_bytes});
        }
    }
}

void tensor_reader::read_range(std::size_t file, std::uint64_t offset_bytes,
                               std::span<std::byte> destination) {
    const input_file& source = *opened_.files[file];
    std::size_t count = 0;
    // Threads that read with one descriptor delay each other. A descriptor of the thread's own is worth
    // opening for several reads.
    constexpr unsigned several = 4;
    if (std::exchange(last_file_, file) != file) reads_ = 0;
    if (++reads_ > several)
        count = system::read_at(descriptor_of(file).get(), source.path(), offset_bytes, destination);
    // also the rest of a short read, and the error at the end of a truncated file
    source.read(offset_bytes + count, destination.subspan(count));
}

void tensor_reader::read_stored(const load_job& job, std::uint64_t begin_bytes,
                                std::span<std::byte> destination) {
    const file_position first = position_of(opened_, job);
    const input_file& file = *opened_.files[first.file];
    if (!job.has_gaps) {
        read_range(first.file, first.offset_bytes + begin_bytes, destination);
        return;
    }
    const byte_runs runs = runs_of(opened_, job);
    if (is_on_host_ && copy_runs(job, runs, begin_bytes, destination)) return;
    if (!reads_and_drops_gaps(runs)) return read_runs(job, begin_bytes, destination);
    const std::uint64_t joined_runs = std::max<std::uint64_t>(max_joined_read_bytes / runs.stride_bytes, 1);
    while (!destination.empty()) {
        const std::uint64_t run = begin_bytes / runs.size_bytes;
        const std::uint64_t skipped = begin_bytes % runs.size_bytes;
        const std::uint64_t offset = first.offset_bytes + run * runs.stride_bytes + skipped;
        const std::uint64_t wanted =
            std::min<std::uint64_t>(joined_runs * runs.size_bytes - skipped, destination.size());
        const std::uint64_t of_first = std::min(runs.size_bytes - skipped, wanted);
        if (wanted == of_first) {
            file.read(offset, destination.first(wanted));
        } else {
            // from the first wanted byte to the last one
            const std::uint64_t others = wanted - of_first;
            const std::uint64_t last_runs = (others - 1) / runs.size_bytes;
            const std::uint64_t span_bytes = runs.stride_bytes - skipped + last_runs * runs.stride_bytes +
                                             (others - last_runs * runs.size_bytes);
            std::byte* const span = read_scratch_.reserve(span_bytes);
            file.read(offset, {span, span_bytes});
            std::memcpy(destination.data(), span, of_first);
            for (std::uint64_t done = 0; done < others; done += runs.size_bytes)
                std::memcpy(destination.data() + of_first + done,
                            span + (runs.stride_bytes - skipped) + done / runs.size_bytes * runs.stride_bytes,
                            std::min(runs.size_bytes, others - done));
        }
        destination = destination.subspan(wanted);
        begin_bytes += wanted;
    }
}

/// Copies runs from the file's pages. @return false if they must be read: they are long, the first byte is
/// not in the page cache, or the file cannot be mapped or has been truncated.
bool tensor_reader::copy_runs(const load_job& job, const byte_runs& runs, std::uint64_t begin_bytes,
                              std::span<std::byte> destination) {
    const file_position first = position_of(opened_, job);
    const std::uint64_t skipped = begin_bytes % runs.size_bytes;
    const std::uint64_t offset =
        first.offset_bytes + begin_bytes / runs.size_bytes * runs.stride_bytes + skipped;
    if (runs.size_bytes > max_copied_run_bytes || destination.empty()) return false;
    // a test's hook sees reads only
    if (!is_guarded_thread() || system::hook_is_installed()) return false;
    std::array<std::byte, 1> byte{};
    bool supported = true;
    const auto cached = system::read_cached_at(descriptor_of(first.file).get(), offset, byte, supported);
    if (supported && cached.value_or(0) == 0) return false;
    const std::byte* const pages = opened_.pages_of(first.file);
    if (pages == nullptr) return false;
    return run_guarded([=] {
        const std::byte* source = pages + offset;
        std::uint64_t part = std::min<std::uint64_t>(runs.size_bytes - skipped, destination.size());
        for (std::uint64_t done = 0; done < destination.size();) {
            std::memcpy(destination.data() + done, source, part);
            source += done == 0 ? runs.stride_bytes - skipped : runs.stride_bytes;
            done += part;
            part = std::min<std::uint64_t>(runs.size_bytes, destination.size() - done);
        }
    });
}

/// Reads each run by itself.
void tensor_reader::read_runs(const load_job& job, std::uint64_t begin_bytes,
                              std::span<std::byte> destination) {
    const file_position first = position_of(opened_, job);
    const input_file& file = *opened_.files[first.file];
    const byte_runs runs = runs_of(opened_, job);
    const int descriptor = descriptor_of(first.file).get();
    const bool reads_ahead = runs.stride_bytes - runs.size_bytes <= max_read_ahead_gap_bytes;
    std::uint64_t ahead = 0;  // read-ahead was requested up to this offset of the file
    while (!destination.empty()) {
        const std::uint64_t skipped = begin_bytes % runs.size_bytes;
        const std::uint64_t offset =
            first.offset_bytes + begin_bytes / runs.size_bytes * runs.stride_bytes + skipped;
        const std::uint64_t wanted = std::min<std::uint64_t>(runs.size_bytes - skipped, destination.size());
        if (reads_ahead && offset + wanted > ahead) {
            const std::uint64_t left = destination.size() / runs.size_bytes * runs.stride_bytes + wanted;
            system::read_ahead(descriptor, offset, std::min(left, read_ahead_bytes));
            ahead = offset + std::min(left, read_ahead_bytes);
        }
        const std::size_t count = system::read_at(descriptor, file.path(), offset, destination.first(wanted));
        // the rest of a short read, and the error at the end of a truncated file
        if (count < wanted) file.read(offset + count, destination.subspan(count, wanted - count));
        destination = destination.subspan(wanted);
        begin_bytes += wanted;
    }
}

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
    const bool is_small_part = job.slice != nullptr && job.size_bytes <= max_small_part_bytes;
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
    const bool selects_rows = job.slice != nullptr && job.slice->axis == 0;
    delivers_only_piece_ = job.slice == nullptr;
    reads_whole_tensor_ = true;
    position_bytes_ = 0;
    done_bytes_ = 0;
    if (is_part || selects_rows) {
        const auto [begin, end] = range_of(opened_, job, 0);
        const std::uint64_t row_bytes = job.size_bytes / (end - begin);
        const std::uint64_t first = begin + piece.begin_bytes / row_bytes;
        if (stream_->select(0, first, first + piece.size_bytes / row_bytes)) {
            reads_whole_tensor_ = false;
            delivers_only_piece_ = job.slice == nullptr || selects_rows;
            position_bytes_ = first * (stored.size_bytes / stored.shape[0]);
        } else if (is_part) {
            refuse_other_layout(job);
        }
        done_bytes_ = piece.begin_bytes / type_of(opened_, job).size_bytes() *
                      stored_type_of(opened_, job).size_bytes();
    }
    if (job.slice != nullptr && !selects_rows &&
        stream_->select(job.slice->axis, job.slice->begin, job.slice->end)) {
        reads_whole_tensor_ = false;
        delivers_only_piece_ = true;
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
        const std::uint64_t begin =
            runs.first_bytes + done_bytes_ / runs.size_bytes * runs.stride_bytes + in_run;
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
        std::max(max_joined_read_bytes / element_bytes * element_bytes, element_bytes);
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
