#include "src/load/load_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>
#include <string_view>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/worker_threads.hpp"
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
    // On the host, threads start after allocating: under `ulimit -v`, their stacks could use up the
    // addresses.
    if (!wants_pages() && !is_on_host()) start_threads(way_.threads);
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
    if (rest_is_staged_) report.reason += "; the rest is staged: " + pages_->reason();
    return report;
}

}  // namespace pinflow::detail
