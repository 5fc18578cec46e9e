#include "formats/hdf5_chunk_read.hpp"

#include <tbb/task_arena.h>

#include <algorithm>
#include <new>
#include <numeric>
#include <system_error>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::detail {

namespace {

using clock = std::chrono::steady_clock;

/// One thread copies up to this many bytes as fast as several, the time to start them included.
constexpr std::uint64_t max_serial_bytes = 256 << 10;
/// The fixed cost of a read, in bytes: reading this many more bytes takes as long as one more read.
constexpr std::uint64_t read_costs_bytes = 4096;
/// The fixed cost of a scattered piece, in elements: copying this many consecutive elements takes as long.
constexpr std::uint64_t unit_costs_elements = 64;
/// Rows are read in blocks of at most this size, or one by one, before the wanted parts are copied out.
constexpr std::uint64_t scratch_bytes = 1 << 20;

}  // namespace

class hdf5_chunk_read::worker {
 public:
    explicit worker(hdf5_memory& memory) : memory_(memory) {}
    worker(const worker&) = delete;
    worker& operator=(const worker&) = delete;
    ~worker() { memory_.give_back(std::move(decoder_)); }

    hdf5_chunk_decoder& decoder() {
        if (!decoder_) decoder_ = memory_.take_decoder();
        return *decoder_;
    }
    /// Memory for a chunk: the memory that leave_chunk kept, or new memory.
    hdf5_chunk_memory take_chunk(std::uint64_t size_bytes) {
        if (chunk_) return std::exchange(chunk_, nullptr);
        return memory_.chunks.take(size_bytes);
    }
    /// Keeps memory for the next chunk, while it is still in this core's caches.
    void leave_chunk(hdf5_chunk_memory chunk) noexcept { chunk_ = std::move(chunk); }
    scratch_memory scratch;
    std::chrono::nanoseconds waited{};

 private:
    hdf5_memory& memory_;
    std::unique_ptr<hdf5_chunk_decoder> decoder_;
    hdf5_chunk_memory chunk_;
};

/// Permission to take memory for decoding.
class hdf5_chunk_read::decoding_permit {
 public:
    explicit decoding_permit(const hdf5_chunk_reader& reader)
        : memory_(*reader.memory_), size_bytes_(reader.decoding_bytes()) {}
    decoding_permit(const decoding_permit&) = delete;
    decoding_permit& operator=(const decoding_permit&) = delete;
    ~decoding_permit() {
        if (has_begun_) memory_.end_decoding(size_bytes_);
    }

    void begin() {
        memory_.begin_decoding(size_bytes_);
        has_begun_ = true;
    }
    bool try_begin() { return has_begun_ = memory_.try_begin_decoding(size_bytes_); }

 private:
    hdf5_memory& memory_;
    std::uint64_t size_bytes_;
    bool has_begun_ = false;
};

hdf5_chunk_read::hdf5_chunk_read(const hdf5_chunk_reader& reader, std::span<const hdf5_row_run> runs,
                                 const hdf5_row_box& box, std::span<std::byte> destination)
    : reader_(reader), box_(box), destination_(destination) {
    const std::uint64_t band_rows = reader.grid_.rows_per_chunk();
    for (const hdf5_row_run& run : runs) {
        for (std::uint64_t done = 0; done < run.row_count;) {
            const std::uint64_t row = run.first_row + done;
            const std::uint64_t count = std::min(run.row_count - done, band_rows - row % band_rows);
            segments_.push_back({row / band_rows, row % band_rows, count, run.position + done});
            done += count;
        }
    }
    if (!std::ranges::is_sorted(segments_, {}, &segment::band)) {
        std::ranges::sort(segments_, [](const segment& a, const segment& b) {
            return a.band != b.band ? a.band < b.band : a.position < b.position;
        });
    }
    for (std::size_t index = 0; index < segments_.size(); ++index) {
        if (index == 0 || segments_[index].band != segments_[index - 1].band) bands_.push_back(index);
    }
}

std::span<const hdf5_chunk_read::segment> hdf5_chunk_read::segments_of(std::size_t work) const noexcept {
    const std::size_t band = work / box_.part_count();
    const std::size_t end = band + 1 < bands_.size() ? bands_[band + 1] : segments_.size();
    return std::span(segments_).subspan(bands_[band], end - bands_[band]);
}

std::uint64_t hdf5_chunk_read::chunk_of(std::size_t work, const hdf5_chunk_part& part) const noexcept {
    return segments_of(work).front().band * reader_.grid_.chunks_per_band() + part.column;
}

// ---- tasks ----------------------------------------------------------------------------------------------

std::chrono::nanoseconds hdf5_chunk_read::run() {
    const auto begin = clock::now();
    std::vector<std::size_t> works;
    if (destination_.size() <= max_serial_bytes) {
        worker first(*reader_.memory_);
        for (std::size_t work = 0; work < work_count(); ++work) {
            if (!do_without_decoding(work, first)) works.push_back(work);
        }
        waited_ns_ += first.waited.count();
    } else {
        works.resize(work_count());
        std::iota(works.begin(), works.end(), std::size_t{0});
    }
    busy_ns_ += std::chrono::nanoseconds(clock::now() - begin).count();
    try {
        run_tasks(works);
        finish();
    } catch (...) {
        wait_for_promises();  // other threads may be writing to the destination
        throw;
    }
    // tasks ran in parallel: the wall time is divided in the proportions of the tasks' times
    const std::chrono::nanoseconds wall = clock::now() - begin;
    const double waiting =
        busy_ns_ > 0 ? static_cast<double>(waited_ns_) / static_cast<double>(busy_ns_) : 0.0;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(wall * std::min(1.0, waiting));
}

void hdf5_chunk_read::run_tasks(std::span<const std::size_t> works) {
    const auto threads = static_cast<std::size_t>(tbb::this_task_arena::max_concurrency());
    const std::size_t tasks = std::min(threads, works.size());
    if (tasks == 0) return;
    listed_count_ = works.size();
    if (tasks == 1) {
        decoding_permit own(reader_);
        own.begin();
        return run_task(works);
    }
    run_in_parallel(tasks, [&](std::size_t index) {
        // the first task waits for memory; the others run only if memory is free
        decoding_permit own(reader_);
        if (index == 0) {
            own.begin();
        } else if (!own.try_begin()) {
            return;
        }
        run_task(works);
    });
}

void hdf5_chunk_read::run_task(std::span<const std::size_t> works) {
    const auto begin = clock::now();
    try {
        worker mine(*reader_.memory_);
        for (std::size_t index; (index = next_++) < works.size();)
            do_work(works[index], mine);
        waited_ns_ += mine.waited.count();
    } catch (...) {
        next_ = works.size();  // the others need not continue
        throw;
    }
    busy_ns_ += std::chrono::nanoseconds(clock::now() - begin).count();
}

void hdf5_chunk_read::finish() {
    std::unique_lock lock(mutex_);
    while (true) {
        served_.wait(lock, [&] { return promised_ == 0 || !again_.empty(); });
        if (again_.empty()) return;
        const std::size_t work = again_.back();
        again_.pop_back();
        lock.unlock();
        {
            decoding_permit own(reader_);
            own.begin();
            worker mine(*reader_.memory_);
            do_work(work, mine);
        }
        lock.lock();
    }
}

void hdf5_chunk_read::wait_for_promises() noexcept {
    std::unique_lock lock(mutex_);
    served_.wait(lock, [&] { return promised_ == 0; });
}

void hdf5_chunk_read::use(std::size_t work, const hdf5_chunk_bytes& chunk) noexcept {
    copy(work, chunk);
    const std::lock_guard lock(mutex_);
    --promised_;
    served_.notify_one();  // under the lock; otherwise this object could be destroyed first
}

void hdf5_chunk_read::ask_again(std::size_t work) noexcept {
    const std::lock_guard lock(mutex_);
    --promised_;
    again_.push_back(work);  // does not allocate: do_work reserved the space
    served_.notify_one();
}

// ---- one chunk ------------------------------------------------------------------------------------------

void hdf5_chunk_read::do_work(std::size_t work, worker& mine) {
    if (do_without_decoding(work, mine)) return;
    {
        const std::lock_guard lock(mutex_);
        again_.reserve(again_.size() + promised_ + 1);  // may throw, so before the promise
        ++promised_;
    }
    const std::uint64_t index = chunk_of(work, part_of(work));
    hdf5_cached_chunk found;
    const auto take_back = [&] {
        const std::lock_guard lock(mutex_);
        --promised_;
    };
    hdf5_chunk_cache::answer answer{};
    try {
        answer = reader_.memory_->cache.ask(reader_.key_of(index), *this, work, found);
    } catch (...) {
        take_back();
        throw;
    }
    if (answer == hdf5_chunk_cache::answer::promised) return;
    take_back();
    if (answer == hdf5_chunk_cache::answer::found) {
        copy(work, found.bytes());
    } else {
        decode(work, index, mine);
    }
}

/// Does the work without decoding, if possible: from the fill value, the cache, or unfiltered rows in the
/// file.
/// @return whether it is done.
bool hdf5_chunk_read::do_without_decoding(std::size_t work, worker& mine) {
    const hdf5_chunk_part part = part_of(work);
    const std::uint64_t index = chunk_of(work, part);
    if (reader_.dataset_->chunks[index].size_bytes == 0) {
        for (const segment& rows : segments_of(work))
            part.fill(reader_.fill_, row_at(rows.position), box_.row_bytes(), rows.count);
        return true;
    }
    if (const hdf5_cached_chunk chunk = reader_.memory_->cache.peek(reader_.key_of(index))) {
        copy(work, chunk.bytes());
        return true;
    }
    return read_in_place(work, part, mine);
}

bool hdf5_chunk_read::read_in_place(std::size_t work, const hdf5_chunk_part& part, worker& mine) {
    const hdf5_chunk_grid& grid = reader_.grid_;
    const std::uint64_t index = chunk_of(work, part);
    const hdf5_chunk& chunk = reader_.dataset_->chunks[index];
    if (!reader_.pipeline_.stored_as_is(chunk.filter_mask)) return false;
    const auto segments = segments_of(work);
    const bool whole_rows = part.unit_bytes == grid.chunk_row_bytes() && part.unit_bytes == box_.row_bytes();
    // many small reads take longer than reading the whole chunk
    if (!whole_rows && segments.size() >= grid.chunk_bytes() / read_costs_bytes) return false;
    for (const segment& rows : segments) {
        const std::uint64_t offset_bytes = chunk.offset_bytes + rows.first * grid.chunk_row_bytes();
        if (!whole_rows) {
            read_rows_in_place(rows, part, offset_bytes, mine);
            continue;
        }
        const std::span<std::byte> here(row_at(rows.position), rows.count * box_.row_bytes());
        mine.waited += reader_.file_->read(offset_bytes, here);
        reader_.swap_.apply(here);
    }
    return true;
}

/// Reads the chunk's part of the rows, a block at a time, and copies the wanted part out.
void hdf5_chunk_read::read_rows_in_place(const segment& rows, const hdf5_chunk_part& part,
                                         std::uint64_t offset_bytes, worker& mine) {
    const std::uint64_t row_bytes = reader_.grid_.chunk_row_bytes();
    const std::uint64_t at_once = std::max<std::uint64_t>(scratch_bytes / row_bytes, 1);
    for (std::uint64_t done = 0; done < rows.count; done += at_once) {
        const std::uint64_t count = std::min(at_once, rows.count - done);
        const std::uint64_t size_bytes = (count - 1) * row_bytes + part.source_bytes;
        const std::span<std::byte> here(mine.scratch.reserve(size_bytes), size_bytes);
        mine.waited += reader_.file_->read(offset_bytes + done * row_bytes + part.source_offset, here);
        reader_.swap_.apply(here);
        part.copy(here.data(), row_bytes, row_at(rows.position + done), box_.row_bytes(), count);
    }
}

std::byte* hdf5_chunk_read::whole_chunk_destination(std::size_t work,
                                                    const hdf5_chunk_part& part) const noexcept {
    const hdf5_chunk_grid& grid = reader_.grid_;
    if (part.unit_bytes != grid.chunk_row_bytes() || part.unit_bytes != box_.row_bytes()) return nullptr;
    for (const segment& rows : segments_of(work)) {
        if (rows.count == grid.rows_per_chunk()) return row_at(rows.position);
    }
    return nullptr;
}

/// Decodes a chunk that this call has claimed. Waits only for the file: other threads may be waiting for this
/// chunk.
void hdf5_chunk_read::decode(std::size_t work, std::uint64_t index, worker& mine) {
    hdf5_chunk_cache& cache = reader_.memory_->cache;
    const std::uint64_t chunk_bytes = reader_.grid_.chunk_bytes();
    const hdf5_chunk_part part = part_of(work);
    std::byte* chunk = nullptr;
    std::uint64_t shuffle_element_bytes = 0;
    hdf5_chunk_memory memory;
    try {
        // a sequential pass over whole chunks does not need them again soon, and would evict other chunks
        if (!reader_.keeps_all_) chunk = whole_chunk_destination(work, part);
        if (chunk == nullptr) {
            shuffle_element_bytes = shuffle_element_bytes_for(work, index, part);
            memory = mine.take_chunk(chunk_bytes);
            chunk = memory.get();
        }
        decode_into(index, {chunk, chunk_bytes}, shuffle_element_bytes != 0, mine);
    } catch (const std::bad_alloc&) {
        cache.give_up(reader_.key_of(index));
        throw system_failure(reader_.sentence(index, "cannot be decoded: there is no memory for it"),
                             std::make_error_code(std::errc::not_enough_memory));
    } catch (...) {
        cache.give_up(reader_.key_of(index));
        throw;
    }
    const bool wanted_again =
        reader_.keeps_all_ || (memory != nullptr && reader_.was_decoded_[index].exchange(true));
    const hdf5_chunk_bytes bytes{chunk, shuffle_element_bytes};
    if (wanted_again || !would_evict()) {
        cache.complete(reader_.key_of(index), {bytes, memory, chunk_bytes, wanted_again});
        copy(work, bytes);
    } else {
        cache.complete(reader_.key_of(index), {bytes, nullptr, chunk_bytes, false});
        copy(work, bytes);
        mine.leave_chunk(std::move(memory));
    }
}

std::uint64_t hdf5_chunk_read::shuffle_element_bytes_for(std::size_t work, std::uint64_t index,
                                                         const hdf5_chunk_part& part) const noexcept {
    const hdf5_chunk_grid& grid = reader_.grid_;
    const std::uint64_t element_bytes =
        reader_.pipeline_.shuffle_element_bytes(reader_.dataset_->chunks[index].filter_mask);
    if (element_bytes == 0 || grid.item_bytes() % element_bytes != 0 || !reader_.swap_.empty()) return 0;
    // chunks that stay cached are copied from often, which is faster from unshuffled chunks
    if (reader_.keeps_all_) return 0;
    const std::uint64_t units = part.units_per_row();
    const bool together = part.unit_bytes == grid.chunk_row_bytes() && part.unit_bytes == box_.row_bytes();
    std::uint64_t cost_bytes = 0;
    for (const segment& rows : segments_of(work)) {
        cost_bytes += rows.count * units * part.unit_bytes +
                      (together ? 1 : rows.count * units) * unit_costs_elements * element_bytes;
    }
    // unshuffling the whole chunk passes over it twice
    return cost_bytes < 2 * grid.chunk_bytes() ? element_bytes : 0;
}

bool hdf5_chunk_read::would_evict() const noexcept {
    const std::size_t next = next_;
    const std::uint64_t left = listed_count_ - std::min(listed_count_, next);
    const hdf5_chunk_cache& cache = reader_.memory_->cache;
    return left > cache.max_first_use_bytes() / hdf5_chunk_cache::cost_bytes(reader_.grid_.chunk_bytes());
}

void hdf5_chunk_read::decode_into(std::uint64_t index, std::span<std::byte> chunk, bool stays_shuffled,
                                  worker& mine) {
    const hdf5_chunk& where = reader_.dataset_->chunks[index];
    if (reader_.pipeline_.stored_as_is(where.filter_mask)) {
        mine.waited += reader_.file_->read(where.offset_bytes, chunk);
    } else {
        const auto stored = mine.decoder().stored_memory(where.size_bytes);
        mine.waited += reader_.file_->read(where.offset_bytes, stored);
        try {
            if (stays_shuffled) {
                mine.decoder().decode_shuffled(reader_.pipeline_, where.filter_mask, stored, chunk);
            } else {
                mine.decoder().decode(reader_.pipeline_, where.filter_mask, stored, chunk);
            }
        } catch (const format_error& failure) {
            throw format_error(reader_.sentence(index, failure.what()));
        }
        ++reader_.decoded_count_;
    }
    reader_.swap_.apply(chunk);
}

void hdf5_chunk_read::copy(std::size_t work, const hdf5_chunk_bytes& chunk) const noexcept {
    const hdf5_chunk_part part = part_of(work);
    const std::uint64_t row_bytes = reader_.grid_.chunk_row_bytes();
    for (const segment& rows : segments_of(work)) {
        const std::uint64_t offset_bytes = rows.first * row_bytes + part.source_offset;
        if (chunk.shuffle_element_bytes != 0) {
            part.copy_shuffled({chunk.data, reader_.grid_.chunk_bytes(), chunk.shuffle_element_bytes},
                               offset_bytes, row_bytes, row_at(rows.position), box_.row_bytes(), rows.count);
            continue;
        }
        const std::byte* const source = chunk.data + offset_bytes;
        if (source == row_at(rows.position)) continue;  // was decoded in place
        part.copy(source, row_bytes, row_at(rows.position), box_.row_bytes(), rows.count);
    }
}

}  // namespace pinflow::detail
