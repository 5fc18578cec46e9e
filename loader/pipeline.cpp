#include "loader/pipeline.hpp"

#include <fmt/format.h>
#include <tbb/blocked_range.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/parallel_pipeline.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "loader/stage_seam.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"

namespace pinflow {

namespace {

using clock = std::chrono::steady_clock;

constexpr std::uint64_t array_alignment_bytes = 256;  // what CUDA's own allocations have
constexpr std::uint64_t default_memory_bytes = std::uint64_t{1} << 30;
constexpr std::uint64_t gather_piece_bytes = std::uint64_t{1} << 20;  // enough to be worth a task
constexpr std::size_t rows_of_sample_task = 8192;
constexpr unsigned most_slots = 8;

std::vector<std::shared_ptr<const row_source>> checked(
    std::vector<std::shared_ptr<const row_source>> sources) {
    if (sources.empty()) throw invalid_argument("a loader needs at least one source of rows");
    for (const auto& source : sources) {
        if (source == nullptr) throw invalid_argument("a loader was given a source of rows that is null");
        if (source->row_count() != sources[0]->row_count()) {
            throw invalid_argument(
                fmt::format("the arrays of a sample need equal row counts: {} has {}, {} has {}",
                            sources[0]->description(), sources[0]->row_count(), source->description(),
                            source->row_count()));
        }
    }
    return sources;
}

loader_options checked(loader_options options) {
    if (options.batch_rows == 0) throw invalid_argument("a batch needs at least one row");
    if (options.slots == 1)
        throw invalid_argument("a loader needs at least 2 slots: one is filled while another is held");
    return options;
}

std::uint64_t count_batches(std::uint64_t rows, std::uint64_t batch_rows, tail tail) {
    const bool partial = tail == tail::partial && rows % batch_rows != 0;
    return rows / batch_rows + (partial ? 1 : 0);
}

std::uint64_t count_all_batches(std::uint64_t batches_per_epoch, std::uint64_t epochs) {
    std::uint64_t total = 0;
    if (!detail::multiply(batches_per_epoch, epochs, total)) {
        throw invalid_argument(
            fmt::format("{} epochs of {} batches are too many", epochs, batches_per_epoch));
    }
    return total;
}

/// How many slots of `each_bytes` the memory allows.
unsigned count_slots(const loader_options& options, std::uint64_t each_bytes) {
    const std::uint64_t limit = options.memory_bytes == 0 ? default_memory_bytes : options.memory_bytes;
    const std::uint64_t fitting = limit / std::max<std::uint64_t>(1, each_bytes);
    const unsigned least = options.slots == 0 ? 2 : options.slots;
    if (options.memory_bytes != 0 && fitting < least) {
        throw invalid_argument(fmt::format(
            "{} slots of {} bytes do not fit into {} bytes: allow more memory, or make batches smaller",
            least, each_bytes, options.memory_bytes));
    }
    if (options.slots != 0) return options.slots;
    return static_cast<unsigned>(std::clamp<std::uint64_t>(fitting, 2, most_slots));
}

int count_threads(unsigned asked) {
    return asked == 0 ? tbb::info::default_concurrency() : static_cast<int>(std::min(asked, 1024U));
}

}  // namespace

loader::pipeline::pipeline(std::vector<std::shared_ptr<const row_source>> sources,
                           const loader_options& options)
    : sources_(checked(std::move(sources))),
      options_(checked(options)),
      route_(detail::choose_route(sources_, options_)),
      sampler_(options.order, sources_[0]->row_count(), options.seed),
      batches_per_epoch_(count_batches(row_count(), options.batch_rows, options.tail)),
      batch_total_(count_all_batches(batches_per_epoch_, options.epochs)),
      streams_{stream(options.device), stream(options.device)},
      arena_(count_threads(options.threads), 1),
      half_arena_(std::max(1, count_threads(options.threads) / 2), 1) {
    const std::uint64_t slot_rows = std::min(options_.batch_rows, row_count());
    for (const auto& source : sources_) {
        array_offsets_.push_back(slot_bytes_);
        std::uint64_t bytes = 0;
        if (!detail::multiply(slot_rows, source->row_size_bytes(), bytes) ||
            !detail::add(bytes, array_alignment_bytes - 1, bytes) ||
            !detail::add(slot_bytes_, bytes / array_alignment_bytes * array_alignment_bytes, slot_bytes_)) {
            throw invalid_argument(fmt::format("a batch of {} rows is too large", options_.batch_rows));
        }
    }
    // a slot's memory: its sides, and the lists of the rows that are in it
    const std::uint64_t side_count = (route_.host_side ? 1U : 0U) + (route_.device_side ? 1U : 0U);
    const std::uint64_t list_bytes =
        sizeof(std::uint64_t) + (route_.registers_pages ? sources_.size() * sizeof(copy_range) : 0);
    std::uint64_t sides_bytes = 0;
    std::uint64_t each_bytes = 0;
    if (!detail::multiply(slot_bytes_, side_count, sides_bytes) ||
        !detail::multiply(slot_rows, list_bytes, each_bytes) ||
        !detail::add(sides_bytes, each_bytes, each_bytes)) {
        throw invalid_argument(fmt::format("a batch of {} rows is too large", options_.batch_rows));
    }
    pool_ = std::make_shared<detail::slot_pool>(options_.device, count_slots(options_, each_bytes),
                                                route_.host_side ? slot_bytes_ : 0,
                                                route_.device_side ? slot_bytes_ : 0, sources_);
    if (arena_.max_concurrency() > tbb::info::default_concurrency()) {
        more_threads_.emplace(tbb::global_control::max_allowed_parallelism,
                              static_cast<std::size_t>(arena_.max_concurrency()));
    }
    register_pages();
    driver_ = std::thread([this] { drive(); });
}

loader::pipeline::~pipeline() {
    pool_->stop();
    driver_.join();
    // the streams go next, and wait for the copies enqueued on them: those depend on nobody else
}

void loader::pipeline::register_pages() {
    from_pages_.resize(sources_.size());
    if (!route_.registers_pages) return;
    std::vector<pin_range> ranges;
    for (std::size_t index = 0; index < sources_.size(); ++index) {
        // small pieces are gathered by the CPU, where there is a host side to gather them in
        from_pages_[index] = detail::worth_copying(*sources_[index], options_) ||
                             (!route_.host_side && !route_.device_gathers);
        if (from_pages_[index] || route_.device_gathers)
            std::ranges::move(pin_ranges(sources_[index]), std::back_inserter(ranges));
    }
    pin_options how;
    how.budget_bytes = options_.pin_budget_bytes;
    how.alongside_reader = route_.host_side;
    pages_.emplace(std::move(ranges), options_.device, how);
    if (!route_.host_side) {
        pages_->require();
        begin_device_gathers();
    }
}

void loader::pipeline::begin_device_gathers() {
    if (!route_.device_gathers || !exchanges_.empty()) return;
    exchanges_.resize(sources_.size());
    for (std::size_t index = 0; index < sources_.size(); ++index) {
        if (from_pages_[index] || sources_[index]->row_size_bytes() == 0) continue;
        exchanges_[index].emplace(row_table(sources_[index]), options_.device,
                                  row_exchange_options{.route = row_route::direct});
    }
}

/// Groups of half of the slots are filled while the consumer uses the other half.
std::size_t loader::pipeline::slots_together() const noexcept {
    return exchanges_.empty() ? 1 : std::max<std::size_t>(pool_->slot_count() / 2, 1);
}

bool loader::pipeline::gathered_by_device(std::size_t index) const noexcept {
    return !exchanges_.empty() && exchanges_[index].has_value();
}

std::unique_ptr<detail::slot_lease> loader::pipeline::next() {
    if (pool_->forked()) {
        throw device_error(
            "a loader cannot be used in a forked process: its threads exist in the parent only");
    }
    detail::slot* const slot = pool_->lease();
    return slot == nullptr ? nullptr : std::make_unique<detail::slot_lease>(pool_, *slot);
}

void loader::pipeline::drive() {
    try {
        while (next_batch_ < batch_total_ && !pool_->failed() && pool_->wait_for_free(slots_together())) {
            const bool registering = pages_ && !pages_->finished();
            if (pages_ && !registering && pages_->wait()) begin_device_gathers();
            if (exchanges_.empty()) {
                (registering ? half_arena_ : arena_).execute([&] { fill_free_slots(registering); });
            } else {
                arena_.execute([&] { fill_together(); });
            }
        }
        pool_->finish();
    } catch (...) {
        pool_->finish(std::current_exception());
    }
}

void loader::pipeline::fill_free_slots(bool while_registering) {
    using detail::slot;
    using detail::stage;
    const auto take = [this, while_registering](tbb::flow_control& control) -> slot* {
        const bool go_on =
            next_batch_ < batch_total_ && !pool_->failed() && !(while_registering && pages_->finished());
        slot* const taken = go_on ? pool_->take_free() : nullptr;
        if (taken == nullptr) {
            control.stop();
            return nullptr;
        }
        run_stage(stage::sample, *taken, [&] { sample(*taken); });
        return taken;
    };
    const auto gather_rows = [this](slot* filling) {
        run_stage(stage::gather, *filling, [&] { gather(*filling); });
        return filling;
    };
    const auto copy_rows = [this](slot* filling) {
        run_stage(stage::copy, *filling, [&] { copy(*filling); });
        return filling;
    };
    const auto deliver = [this](slot* filled) {
        run_stage(stage::deliver, *filled, [&] { check_sources(); });
        pool_->deliver(*filled);
    };
    tbb::parallel_pipeline(pool_->slot_count(),
                           tbb::make_filter<void, slot*>(tbb::filter_mode::serial_in_order, take) &
                               tbb::make_filter<slot*, slot*>(tbb::filter_mode::parallel, gather_rows) &
                               tbb::make_filter<slot*, slot*>(tbb::filter_mode::serial_in_order, copy_rows) &
                               tbb::make_filter<slot*, void>(tbb::filter_mode::serial_in_order, deliver));
}

void loader::pipeline::fill_together() {
    using detail::stage;
    std::vector<detail::slot*> taken;
    std::vector<detail::slot*> sampled;
    while (taken.size() < slots_together() && next_batch_ < batch_total_ && !pool_->failed()) {
        detail::slot* const slot = pool_->take_free();
        if (slot == nullptr) break;
        taken.push_back(slot);
        run_stage(stage::sample, *slot, [&] { sample(*slot); });
        run_stage(stage::gather, *slot, [&] { gather(*slot); });
        if (!slot->error) sampled.push_back(slot);
    }
    bool gathered = false;
    for (detail::slot* const slot : taken) {
        run_stage(stage::copy, *slot, [&] {
            // what is wrong with the gathers of all is met by the first, and ends the loader
            if (!std::exchange(gathered, true)) gather_on_device(sampled);
            copy(*slot);
        });
        run_stage(stage::deliver, *slot, [&] { check_sources(); });
        pool_->deliver(*slot);
    }
}

template <typename Work>
void loader::pipeline::run_stage(detail::stage where, detail::slot& slot, Work work) noexcept {
    if (slot.error) return;
    try {
        if (where == detail::stage::sample) slot.number = next_batch_++;
        detail::pass_stage_seam(where, slot.number);
        work();
    } catch (...) {
        slot.error = std::current_exception();
    }
}

void loader::pipeline::sample(detail::slot& slot) {
    slot.epoch = slot.number / batches_per_epoch_;
    slot.index = slot.number % batches_per_epoch_;
    slot.last = slot.number + 1 == batch_total_;
    const std::uint64_t first = slot.index * options_.batch_rows;
    const std::uint64_t rows = std::min(options_.batch_rows, row_count() - first);
    try {
        slot.row_ids.resize(rows);
    } catch (const std::exception&) {
        throw invalid_argument(
            fmt::format("a batch of {} rows is too large for this machine's memory", rows));
    }
    // isolated, so that a thread that waits here begins nothing else meanwhile
    tbb::this_task_arena::isolate([&] {
        tbb::parallel_for(tbb::blocked_range<std::size_t>(0, rows, rows_of_sample_task),
                          [&](const auto& part) {
                              sampler_.rows_at(slot.epoch, first + part.begin(),
                                               std::span(slot.row_ids).subspan(part.begin(), part.size()));
                          });
    });
}

void loader::pipeline::gather(detail::slot& slot) {
    slot.arrays.clear();
    slot.copies.clear();
    std::atomic<std::int64_t> storage_ns = 0;
    std::atomic<std::int64_t> total_ns = 0;
    const auto before = clock::now();
    for (std::size_t index = 0; index < sources_.size(); ++index) {
        const row_source& source = *sources_[index];
        shape_vector shape = source.row_shape();
        shape.insert(shape.begin(), slot.row_ids.size());
        if (!route_.device_side) {
            const std::byte* const rows = source.extents()[0].data;
            const std::byte* const first =
                rows == nullptr ? nullptr : rows + slot.row_ids[0] * source.row_size_bytes();
            slot.arrays.emplace_back(first, source.dtype(), std::move(shape));
            continue;
        }
        const std::uint64_t offset = array_offsets_[index];
        slot.arrays.emplace_back(slot.device_side.data() + offset, source.dtype(), std::move(shape));
        if (gathered_by_device(index)) continue;
        std::vector<row_run> missing{{0, slot.row_ids.size()}};
        if (from_pages_[index]) missing = list_copies(slot, index);
        if (missing.empty()) continue;
        if (from_pages_[index] && !route_.host_side) {
            throw unsupported(fmt::format("pages of {} are not registered", source.description()));
        }
        std::byte* const side = (route_.host_side ? slot.host_side.data() : slot.device_side.data()) + offset;
        gather_rows(slot, index, missing, side, storage_ns, total_ns);
        if (from_pages_[index]) {
            for (const row_run& run : missing)
                gathered_bytes_ += run.count * source.row_size_bytes();
        }
        if (!route_.host_side) continue;
        const std::uint64_t row_bytes = source.row_size_bytes();
        for (const row_run& run : missing) {
            slot.copies.push_back({slot.device_side.data() + offset + run.first * row_bytes,
                                   side + run.first * row_bytes, run.count * row_bytes});
        }
    }
    // the pieces ran side by side: the stage's own time is shared out as theirs was
    const std::chrono::nanoseconds wall = clock::now() - before;
    const double waiting =
        total_ns > 0 ? static_cast<double>(storage_ns) / static_cast<double>(total_ns) : 0.0;
    slot.times.storage = std::chrono::duration_cast<std::chrono::nanoseconds>(wall * std::min(1.0, waiting));
    slot.times.cpu = wall - slot.times.storage;
}

void loader::pipeline::gather_rows(const detail::slot& slot, std::size_t index, std::span<const row_run> runs,
                                   std::byte* destination, std::atomic<std::int64_t>& storage_ns,
                                   std::atomic<std::int64_t>& total_ns) const {
    const row_source& source = *sources_[index];
    const std::uint64_t row_bytes = source.row_size_bytes();
    const std::span<const std::uint64_t> ids = slot.row_ids;
    const auto gather_run = [&](const row_run& run) {
        if (pool_->stopped()) return;  // nobody will see this batch
        const auto before = clock::now();
        const auto waited = source.read_rows(ids.subspan(run.first, run.count),
                                             {destination + run.first * row_bytes, run.count * row_bytes});
        storage_ns += waited.count();
        total_ns += std::chrono::nanoseconds(clock::now() - before).count();
    };
    const std::size_t rows_a_piece =
        std::max<std::uint64_t>(1, gather_piece_bytes / std::max<std::uint64_t>(1, row_bytes));
    std::vector<row_run> pieces;
    for (const row_run& run : runs) {
        for (std::size_t done = 0; done < run.count; done += rows_a_piece)
            pieces.push_back({run.first + done, std::min(rows_a_piece, run.count - done)});
    }
    if (pieces.size() == 1) {
        gather_run(pieces[0]);
        return;
    }
    // isolated, so that a thread that waits here for the last piece does not begin another batch meanwhile
    tbb::this_task_arena::isolate([&] {
        tbb::parallel_for(
            std::size_t{0}, pieces.size(), [&](std::size_t i) { gather_run(pieces[i]); },
            tbb::simple_partitioner());
    });
}

std::vector<loader::pipeline::row_run> loader::pipeline::list_copies(detail::slot& slot,
                                                                     std::size_t index) const {
    const row_source& source = *sources_[index];
    const std::uint64_t row_bytes = source.row_size_bytes();
    std::vector<row_run> missing;
    if (row_bytes == 0) return missing;
    std::byte* const destination = slot.device_side.data() + array_offsets_[index];
    const std::span<const std::uint64_t> ids = slot.row_ids;
    // rows [first, last) of the batch lie one after the other at `rows`
    const auto list = [&](std::size_t first, std::size_t last, const std::byte* rows) {
        while (first < last) {
            const pin_stretch stretch = pages_->stretch_at(rows, (last - first) * row_bytes);
            std::size_t count = stretch.size_bytes / row_bytes;
            const bool registered = stretch.registered && count > 0;
            if (registered) {
                slot.copies.push_back({destination + first * row_bytes, rows, count * row_bytes});
            } else {
                // a row that is registered in part counts with those that are not
                count = stretch.registered ? 1 : (stretch.size_bytes + row_bytes - 1) / row_bytes;
                if (!missing.empty() && missing.back().first + missing.back().count == first) {
                    missing.back().count += count;
                } else {
                    missing.push_back({first, count});
                }
            }
            first += count;
            rows += count * row_bytes;
        }
    };
    for (std::size_t first = 0; first < ids.size();) {
        std::uint64_t row = ids[first];
        const auto* extent = source.extents().data();
        while (row >= extent->row_count) {
            row -= extent->row_count;
            ++extent;
        }
        // rows that follow each other in the extent are one piece, when all of them are registered
        std::size_t last = first + 1;
        while (last < ids.size() && ids[last] == ids[last - 1] + 1 &&
               row + (last - first) < extent->row_count) {
            ++last;
        }
        list(first, last, extent->data + row * row_bytes);
        first = last;
    }
    return missing;
}

/// Rows that several batches want are taken in the order of their addresses, which small ones of large arrays
/// need to come fast.
void loader::pipeline::gather_on_device(std::span<detail::slot* const> slots) {
    std::vector<row_gather> gathers;
    for (std::size_t index = 0; index < sources_.size(); ++index) {
        if (!gathered_by_device(index)) continue;
        gathers.clear();
        for (const detail::slot* each : slots) {
            gathers.push_back({std::span<const std::uint64_t>(each->row_ids),
                               each->device_side.data() + array_offsets_[index]});
        }
        exchanges_[index]->gather_group_async(gathers, streams_[0]);
    }
}

void loader::pipeline::copy(detail::slot& slot) {
    // what the device gathers for several batches at once is in one stream
    const stream_view stream = streams_[exchanges_.empty() ? slot.number % streams_.size() : 0];
    if (slot.copies.size() == 1) {
        const copy_range& whole = slot.copies[0];
        copy_to_device_async(whole.destination, {whole.source, whole.size_bytes}, stream);
    } else if (!slot.copies.empty()) {
        copy_batch_to_device_async(slot.copies, stream);
    }
    slot.ready.record(stream);
}

void loader::pipeline::check_sources() const {
    for (const auto& source : sources_) {
        source->check_unchanged();
    }
}

loader_report loader::pipeline::report() const {
    const detail::slot_pool::statistics collected = pool_->collected();
    loader_report report;
    report.route = route_.route;
    report.reason = route_.reason;
    if (pages_) {
        const pin_report pinned = pages_->report();
        report.pin_time = pinned.duration;
        if (pinned.finished) report.reason = pinned.reason;
        // rows of pages that could not be registered take the staged route
        if (pinned.finished && !pinned.complete) report.route = route::staged;
        if (const std::uint64_t gathered = gathered_bytes_; gathered > 0) {
            report.reason +=
                fmt::format("; {:.2f} GB {} gathered into pinned slots, the rest copied in place",
                            static_cast<double>(gathered) / 1e9,
                            pinned.finished && pinned.complete ? "came before, and were" : "were");
        }
    }
    report.slots = static_cast<unsigned>(pool_->slot_count());
    report.slot_bytes = slot_bytes_;
    report.batches = collected.batches;
    report.rows = collected.rows;
    for (const auto& source : sources_) {
        report.bytes += collected.rows * source->row_size_bytes();
    }
    report.storage_wait = collected.waits.storage;
    report.cpu_wait = collected.waits.cpu;
    report.link_wait = collected.waits.link;
    report.consumer_wait = collected.consumer_wait;
    return report;
}

}  // namespace pinflow
