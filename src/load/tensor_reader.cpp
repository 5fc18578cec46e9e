#include "src/load/tensor_reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/cast.hpp"
#include "src/core/fault_guard.hpp"
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
/// For a GPU, runs of larger parts are read: unmapping the pages afterwards would take as long.
constexpr std::uint64_t max_copied_part_bytes = 1 << 20;

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
    const bool may_copy = is_on_host_ || job.size_bytes <= max_copied_part_bytes;
    if (may_copy && copy_runs(job, runs, begin_bytes, destination)) return;
    if (!reads_and_drops_gaps(runs)) return read_runs(job, begin_bytes, destination);
    const std::uint64_t joined_runs = std::max<std::uint64_t>(max_joined_read_bytes / runs.stride_bytes, 1);
    while (!destination.empty()) {
        const std::uint64_t skipped = begin_bytes % runs.size_bytes;
        const std::uint64_t offset = first.offset_bytes + runs.offset_of(begin_bytes);
        const std::uint64_t wanted = std::min({joined_runs * runs.size_bytes - skipped,
                                               runs.group_bytes() - begin_bytes % runs.group_bytes(),
                                               std::uint64_t{destination.size()}});
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
    if (runs.size_bytes > max_copied_run_bytes || destination.empty()) return false;
    // a test's hook sees reads only
    if (!is_guarded_thread() || system::hook_is_installed()) return false;
    std::array<std::byte, 1> byte{};
    bool supported = true;
    const auto cached = system::read_cached_at(
        descriptor_of(first.file).get(), first.offset_bytes + runs.offset_of(begin_bytes), byte, supported);
    if (supported && cached.value_or(0) == 0) return false;
    const std::byte* const pages = opened_.pages_of(first.file);
    if (pages == nullptr) return false;
    return run_guarded([=, &runs] {
        for (std::uint64_t done = 0; done < destination.size();) {
            const std::uint64_t begin = begin_bytes + done;
            const std::uint64_t skipped = begin % runs.size_bytes;
            // the runs of one group
            const std::uint64_t left = std::min<std::uint64_t>(
                runs.group_bytes() - begin % runs.group_bytes(), destination.size() - done);
            const std::byte* source = pages + first.offset_bytes + runs.offset_of(begin);
            std::uint64_t part = std::min(runs.size_bytes - skipped, left);
            for (std::uint64_t copied = 0; copied < left;) {
                std::memcpy(destination.data() + done + copied, source, part);
                source += copied == 0 ? runs.stride_bytes - skipped : runs.stride_bytes;
                copied += part;
                part = std::min(runs.size_bytes, left - copied);
            }
            done += left;
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
        const std::uint64_t offset = first.offset_bytes + runs.offset_of(begin_bytes);
        const std::uint64_t wanted =
            std::min<std::uint64_t>(runs.size_bytes - begin_bytes % runs.size_bytes, destination.size());
        if (reads_ahead && offset + wanted > ahead) {
            const std::uint64_t of_group = std::min<std::uint64_t>(
                destination.size(), runs.group_bytes() - begin_bytes % runs.group_bytes());
            const std::uint64_t left = of_group / runs.size_bytes * runs.stride_bytes + wanted;
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

}  // namespace pinflow::detail
