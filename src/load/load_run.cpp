#include "src/load/load_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>
#include <string_view>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/worker_threads.hpp"
#include "src/device/backend.hpp"
#include "src/load/chunk_boxes.hpp"
#include "src/load/device_conversions.hpp"
#include "src/load/load_streams.hpp"

namespace pinflow::detail {

namespace {

constexpr std::chrono::milliseconds progress_interval{100};

}  // namespace

// ---- beginning -----------------------------------------------------------------------------------------

load_run::load_run(const opened_tensors& opened, const load_plan& plan, const pinflow::device& device,
                   const load_options& options)
    : opened_(opened),
      plan_(plan),
      device_(device),
      options_(options),
      way_(choose_route(opened, plan, device, options)),
      own_stream_(device),
      copies_(own_stream_.view()),
      blocks_(plan.blocks.size()),
      addresses_(plan.blocks.size()),
      private_pages_(opened.files.size()),
      own_reader_(opened, plan),
      queue_(plan) {
    queue_.start(way_.route);
    announce_decoding();
    if (!wants_pages()) start_threads(way_.threads);
}

/// Tells the files which small chunked datasets will be decoded.
void load_run::announce_decoding() const {
    constexpr std::uint64_t small_bytes = std::uint64_t{64} << 20;
    std::map<std::size_t, std::vector<std::string_view>> names;
    const load_job* last = nullptr;
    for (const load_unit& unit : std::span(plan_.others).first(plan_.decoded_count)) {
        const load_job& job = plan_.jobs[plan_.pieces_of(unit).front().job];
        const stored_tensor& stored = opened_.stored[job.tensor];
        if (std::exchange(last, &job) == &job) continue;
        if (!stored.chunk_shape.empty() && stored.size_bytes < small_bytes)
            names[stored.file].push_back(stored.name);
    }
    for (const auto& [file, of_file] : names) {
        if (of_file.size() < 2) continue;
        try {
            opened_.elements_of(file).expect(of_file);
        } catch (const error&) {
            continue;  // the threads will get it, too
        }
    }
}

/// Begins to register pages. If a file cannot be mapped, all files are staged, or, if the route `copy` was
/// requested, this throws.
void load_run::begin_pages() {
    try {
        pages_.emplace(opened_, plan_, device_, options_);
    } catch (const system_failure& failure) {
        if (options_.route == load_route::copy) throw;
        pages_reason_ = failure.what();
        way_.route = load_route::staged;
        way_.reason = "the files cannot be mapped";
        queue_.stop_copies();
        start_threads(way_.threads_without_pages);
    }
}

// ---- threads ---------------------------------------------------------------------------------------------

/// Starts threads until `count` are running: the first one, which starts the others, so that the caller does
/// not wait for them. If the system refuses them, `finish` does their work.
void load_run::start_threads(unsigned count) noexcept {
    {
        const std::scoped_lock lock(mutex_);
        wanted_threads_ = started_threads_ - running_ + count;
    }
    try {
        start_thread();
    } catch (const std::exception&) {
        return;
    }
}

/// Starts one thread, unless as many as wanted have been started.
void load_run::start_thread() {
    load_thread* started = nullptr;
    {
        const std::scoped_lock lock(mutex_);
        if (stopped_ || started_threads_ >= wanted_threads_) return;
        started = &threads_.emplace_back();
        ++started_threads_;
        ++running_;
    }
    try {
        *started = load_thread([this] { run_thread(); });
    } catch (...) {
        const std::scoped_lock lock(mutex_);
        --started_threads_;
        --running_;
        throw;
    }
}

/// Each thread starts two others first.
void load_run::start_others() noexcept {
    try {
        start_thread();
        start_thread();
    } catch (const std::exception&) {
        return;  // this thread does their work
    }
}

void load_run::run_thread() noexcept {
    {
        const std::scoped_lock lock(mutex_);
        max_running_ = std::max(max_running_, running_);
    }
    start_others();
    try {
        if (!stopped_) work_on_units([] {});
    } catch (...) {
        fail(std::current_exception());
    }
    const std::scoped_lock lock(mutex_);
    --running_;
    changed_.notify_all();
}

void load_run::work_on_units(const std::function<void()>& after_each) {
    tensor_reader reader(opened_, plan_, is_on_host());
    std::optional<load_buffers> buffers;
    if (!is_on_host()) {
        try {
            buffers.emplace(device_);
        } catch (const error&) {
            const std::scoped_lock lock(mutex_);
            if (!buffer_failure_) buffer_failure_ = std::current_exception();
            return;  // other threads or the copy engine may do its work
        }
    }
    // the copies must end before their buffers are used by another load
    try {
        while (!stopped_) {
            const load_unit* const unit = queue_.take_for_thread();
            if (unit == nullptr) break;
            const auto work = [&] {
                if (is_on_host()) {
                    fill(*unit, reader);
                } else if (unit->is_decoded) {
                    decode(*unit, reader, *buffers);
                } else {
                    stage(*unit, reader, *buffers);
                }
            };
            // enough units for all threads: each is decoded by one
            if (unit->is_decoded && is_decoded_alone()) {
                run_serially(work);
            } else {
                work();
            }
            after_each();
        }
    } catch (...) {
        if (buffers) copies_.synchronize();
        throw;
    }
    if (buffers) {
        static_cast<void>(buffers->next());
        static_cast<void>(buffers->next());
    }
}

/// Whether there are units to decode for all threads.
bool load_run::is_decoded_alone() {
    const std::scoped_lock lock(mutex_);
    return running_ > 1 && queue_.count_decoded() >= running_;
}

/// Fills memory of the host device.
void load_run::fill(const load_unit& unit, tensor_reader& reader) {
    for (const load_piece& piece : plan_.pieces_of(unit)) {
        std::byte* const target = target_of(piece);
        if (target == nullptr) return;
        const load_job& job = plan_.jobs[piece.job];
        if (unit.is_box) {
            reader.decode_box_on_host(piece, stopped_, start_of(job));
            staged_bytes_ += piece.size_bytes;
        } else if (unit.is_decoded) {
            std::byte* next = target;
            reader.decode(
                piece, load_unit_bytes, stopped_,
                [&](std::uint64_t size_bytes) { return std::exchange(next, next + size_bytes); },
                [&](std::uint64_t, std::span<const std::byte> filled) { staged_bytes_ += filled.size(); });
        } else {
            reader.read(job, piece.begin_bytes, {target, piece.size_bytes});
            staged_bytes_ += piece.size_bytes;
        }
    }
}

void load_run::stage(const load_unit& unit, tensor_reader& reader, load_buffers& buffers) {
    if (unit.reads_gaps) return stage_with_gaps(plan_.pieces_of(unit).front(), reader, buffers);
    load_buffer& buffer = buffers.next();
    reader.read(unit, buffer.host.data());
    for (const load_piece& piece : plan_.pieces_of(unit)) {
        if (target_of(piece) == nullptr)
            return;  // before a conversion is enqueued, for which nothing would wait
    }
    std::vector<copy_range> copies;
    for (const load_piece& piece : plan_.pieces_of(unit)) {
        std::byte* const side = buffer.host.data() + piece.unit_offset_bytes;
        const load_job& job = plan_.jobs[piece.job];
        std::byte* const target = target_of(piece);
        if (job.is_converted_by_device) {
            device_.backend().convert_to_device(conversion_of(opened_, job, piece, side, start_of(job)),
                                                copies_.native_handle());
            continue;
        }
        copy_range* const last = copies.empty() ? nullptr : &copies.back();
        const bool is_own = plan_.blocks[job.block].destination == nullptr;
        // the padding between neighbours in a block is copied, too
        const bool follows = last != nullptr && target - last->destination == side - last->source &&
                             target >= last->destination + last->size_bytes &&
                             target < last->destination + last->size_bytes + block_alignment;
        if (follows && is_own && job.block == plan_.jobs[(&piece - 1)->job].block) {
            last->size_bytes = static_cast<std::uint64_t>(side - last->source) + piece.size_bytes;
        } else {
            copies.push_back({target, side, piece.size_bytes});
        }
    }
    if (copies.size() == 1) {
        copy_to_device_async(copies[0].destination, {copies[0].source, copies[0].size_bytes}, copies_);
    } else if (!copies.empty()) {
        copy_batch_to_device_async(copies, copies_);
    }
    buffer.copied.record(copies_);
    for (const load_piece& piece : plan_.pieces_of(unit))
        staged_bytes_ += piece.size_bytes;
}

/// Stages runs of a slice, together with the gaps between them.
void load_run::stage_with_gaps(const load_piece& piece, tensor_reader& reader, load_buffers& buffers) {
    const load_job& job = plan_.jobs[piece.job];
    const stored_span span = span_of(opened_, job, piece);
    const byte_runs runs = runs_of(opened_, job);
    load_buffer& buffer = buffers.next();
    reader.read_range(span.begin.file, span.begin.offset_bytes, buffer.host.bytes().first(span.size_bytes));
    std::byte* const target = target_of(piece);
    if (target == nullptr) return;
    const strided_copy copy{.destination = target,
                            .source = buffer.host.data(),
                            .run_bytes = runs.size_bytes,
                            .stride_bytes = runs.stride_bytes,
                            .run_count = piece.size_bytes / runs.size_bytes};
    device_.backend().copy_strided_to_device(copy, copies_.native_handle());
    buffer.copied.record(copies_);
    staged_bytes_ += piece.size_bytes;
}

void load_run::decode(const load_unit& unit, tensor_reader& reader, load_buffers& buffers) {
    const load_piece& piece = plan_.pieces_of(unit).front();
    std::byte* target = target_of(piece);
    if (target == nullptr) return;
    if (unit.is_box) {
        load_buffer& box = buffers.next();
        reader.decode_box(piece, stopped_, box.host.bytes().first(piece.size_bytes));
        if (stopped_) return;
        device_.backend().convert_to_device(scatter_of(opened_, plan_.jobs[piece.job], piece, box.host.data(),
                                                       start_of(plan_.jobs[piece.job])),
                                            copies_.native_handle());
        box.copied.record(copies_);
        staged_bytes_ += piece.size_bytes;
        return;
    }
    load_buffer* buffer = nullptr;
    reader.decode(
        piece, load_unit_bytes, stopped_,
        [&](std::uint64_t) {
            buffer = &buffers.next();
            return buffer->host.data();
        },
        [&](std::uint64_t begin, std::span<const std::byte> filled) {
            copy_to_device_async(target + begin, filled, copies_);
            buffer->copied.record(copies_);
            staged_bytes_ += filled.size();
        });
}

// ---- the end ---------------------------------------------------------------------------------------------

void load_run::finish() {
    if (pages_) copy_from_pages();
    if (way_.is_small) work_on_units([this] { say_progress(); });
    wait_for_threads();
    rethrow_failure();
    // what is left if the system has refused threads or staging buffers, or if page-locking ended while the
    // last threads did
    if (!queue_.is_empty()) work_on_units([this] { say_progress(); });
    if (!queue_.is_empty()) std::rethrow_exception(buffer_failure_);
    if (!is_on_host()) copies_.synchronize();
    const stream_view later = load_release_stream(device_);
    for (const std::shared_ptr<loaded_block>& each : blocks_) {
        if (each) each->set_stream(later);
    }
    std::vector<bool> is_used(opened_.files.size(), false);
    for (const load_job& job : plan_.jobs)
        is_used[opened_.stored[job.tensor].file] = true;
    for (std::size_t file = 0; file < is_used.size(); ++file) {
        if (is_used[file]) opened_.files[file]->check_unchanged();
    }
    call_progress();
}

void load_run::wait_for_threads() {
    for (;;) {
        {
            std::unique_lock lock(mutex_);
            if (changed_.wait_for(lock, progress_interval, [&] { return running_ == 0; })) break;
        }
        say_progress();
    }
}

load_run::~load_run() {
    stopped_ = true;
    {
        const std::scoped_lock lock(mutex_);
    }
    changed_.notify_all();
    join_threads();
    try {
        if (!is_on_host()) copies_.synchronize();  // before buffers and memory are given back
    } catch (const error&) {
        return;  // the failure has been thrown already, or the memory is lost with the device
    }
}

/// A thread is in the list before those that it starts, and has started them when it ends.
void load_run::join_threads() noexcept {
    for (std::size_t i = 0;; ++i) {
        load_thread* next = nullptr;
        {
            const std::scoped_lock lock(mutex_);
            if (i == threads_.size()) return;
            next = &threads_[i];
        }
        next->join();
    }
}

void load_run::fail(std::exception_ptr failure) noexcept {
    {
        const std::scoped_lock lock(mutex_);
        if (!failure_) failure_ = std::move(failure);
        stopped_ = true;
    }
    changed_.notify_all();
}

void load_run::rethrow_failure() {
    const std::scoped_lock lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
}

void load_run::say_progress() {
    const auto now = std::chrono::steady_clock::now();
    if (now - said_ < progress_interval) return;
    said_ = now;
    call_progress();
}

void load_run::call_progress() const {
    if (options_.progress)
        options_.progress(plan_.mapped_bytes + copied_bytes_ + staged_bytes_, plan_.total_bytes);
}

load_report load_run::report() const {
    load_report report;
    report.size_bytes = plan_.total_bytes;
    report.copied_bytes = copied_bytes_;
    report.staged_bytes = staged_bytes_;
    report.mapped_bytes = plan_.mapped_bytes;
    report.threads = max_running_;
    report.reason = is_on_host() ? way_.reason : fmt::format("{}: {}", to_string(way_.route), way_.reason);
    if (!pages_reason_.empty()) report.reason += "; " + pages_reason_;
    return report;
}

}  // namespace pinflow::detail
