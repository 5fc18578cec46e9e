#include "loader/pipeline.hpp"

#include <fmt/format.h>
#include <tbb/blocked_range.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/parallel_pipeline.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "loader/ranges.hpp"
#include "loader/stage_seam.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/device/backend.hpp"

namespace pinflow {

namespace {

using clock = std::chrono::steady_clock;

constexpr std::size_t rows_of_sample_task = 8192;

/// From where on the steps of a loader are counted. @throws invalid_argument for a state of something else.
detail::place start_of(const loader_options& options, const detail::state_origin& origin) {
    return options.resume_from ? origin.place_of(*options.resume_from) : detail::place();
}

detail::schedule_terms terms_of(const loader_options& options, const detail::state_origin& origin) {
    return {.position_count = options.sampler->position_count(),
            .batch_rows = options.batch_rows,
            .shard = options.shard,
            .tail = options.tail,
            .epochs = options.epochs,
            .start = start_of(options, origin),
            .max_steps = options.max_batches};
}

constexpr detail::range range_of(detail::stage where) noexcept {
    switch (where) {
        case detail::stage::sample:
            return detail::range::sample;
        case detail::stage::gather:
            return detail::range::gather;
        case detail::stage::copy:
            return detail::range::copy;
        case detail::stage::deliver:
            break;
    }
    return detail::range::deliver;
}

int count_threads(unsigned asked) {
    return asked == 0 ? tbb::info::default_concurrency() : static_cast<int>(std::min(asked, 1024U));
}

}  // namespace

loader::pipeline::pipeline(std::vector<std::shared_ptr<const row_source>> sources,
                           const loader_options& options)
    : sources_(detail::checked(std::move(sources))),
      options_(detail::resolved(options, sources_)),
      origin_(std::make_shared<const detail::state_origin>(options_.sampler->identity(), sources_)),
      schedule_(terms_of(options_, *origin_)),
      route_(detail::choose_route(sources_, options_)),
      layout_(detail::lay_out(sources_, options_)),
      streams_{stream(options.device), stream(options.device)},
      arena_(count_threads(options.threads), 1),
      half_arena_(std::max(1, count_threads(options.threads) / 2), 1) {
    // a slot's memory: its sides, and the lists of the rows that are in it
    const std::uint64_t side_count = (route_.host_side ? 1U : 0U) + (route_.device_side ? 1U : 0U);
    const std::uint64_t list_bytes =
        sizeof(std::uint64_t) + (route_.registers_pages ? sources_.size() * sizeof(copy_range) : 0);
    std::uint64_t sides_bytes = 0;
    std::uint64_t each_bytes = 0;
    if (!detail::multiply(layout_.side_bytes, side_count, sides_bytes) ||
        !detail::multiply(layout_.row_count, list_bytes, each_bytes) ||
        !detail::add(sides_bytes, each_bytes, each_bytes)) {
        throw invalid_argument(fmt::format("a batch of {} rows is too large", options_.batch_rows));
    }
    pool_ = std::make_shared<detail::slot_pool>(
        options_.device, detail::count_slots(options_, each_bytes, route_.device_gathers),
        route_.host_side ? layout_.side_bytes : 0, route_.device_side ? layout_.side_bytes : 0, sources_);
    for (const auto& source : sources_) {
        // one that is read as it lies, or that decodes in threads of its own, says what it waited for; one
        // made by a user may not
        measures_itself_.push_back(!source->extents().empty() || source->memory_bytes() > 0);
    }
    if (arena_.max_concurrency() > tbb::info::default_concurrency()) {
        more_threads_.emplace(tbb::global_control::max_allowed_parallelism,
                              static_cast<std::size_t>(arena_.max_concurrency()));
    }
    // kernels are loaded now, and not when pages are registered: CUDA waits for all streams meanwhile, and a
    // consumer's may be waiting for the consumer, and the consumer for the next batch
    if (route_.device_gathers) options_.device.backend().prepare_rows();
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
    how.limit = options_.pin_limit;
    // what is not registered yet is gathered meanwhile, or not at all
    how.allow_partial = route_.host_side;
    how.first_share = route_.host_side ? 0.5 : 1;
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

/// A quarter of the slots at a time: the consumer uses one group while the next ones are on their way, or
/// wait for the device, which must never be without work.
std::size_t loader::pipeline::slots_together() const noexcept {
    return exchanges_.empty() ? 1 : (pool_->slot_count() + 3) / 4;
}

bool loader::pipeline::gathered_by_device(std::size_t index) const noexcept {
    return !exchanges_.empty() && exchanges_[index].has_value();
}

std::unique_ptr<detail::slot_lease> loader::pipeline::next(bool with_data) {
    if (pool_->forked()) {
        throw device_error(
            "a loader cannot be used in a forked process: its threads exist in the parent only");
    }
    const detail::profiled_range range(detail::range::next);
    detail::slot* const slot = pool_->lease(with_data);
    return slot == nullptr ? nullptr : std::make_unique<detail::slot_lease>(pool_, *slot, origin_);
}

void loader::pipeline::drive() {
    try {
        while (more_batches() && !pool_->failed() && pool_->wait_for_free(slots_together())) {
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
        const bool go_on = more_batches() && !pool_->failed() && !(while_registering && pages_->finished());
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
    while (taken.size() < slots_together() && more_batches() && !pool_->failed()) {
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
    using detail::stage;
    if (slot.error) return;
    const auto before = clock::now();
    try {
        if (where == stage::sample) slot.number = next_batch_++;
        const detail::profiled_range range(range_of(where), slot.number);
        detail::pass_stage_seam(where, slot.number);
        work();
    } catch (...) {
        slot.error = std::current_exception();
    }
    // gathering tells for itself what it was waiting for
    const std::chrono::nanoseconds spent = clock::now() - before;
    if (where == stage::sample) slot.times.cpu += spent;
    if (where == stage::copy) slot.times.link += spent;
    if (where == stage::deliver) slot.times.storage += spent;
}

void loader::pipeline::sample(detail::slot& slot) {
    slot.step = schedule_.at(slot.number);
    slot.last = slot.number + 1 == schedule_.batch_count();
    const auto [first, rows] = std::pair(slot.step.position, slot.step.row_count);
    try {
        slot.row_ids.resize(rows);
    } catch (const std::exception&) {
        throw invalid_argument(
            fmt::format("a batch of {} rows is too large for this machine's memory", rows));
    }
    // isolated, so that a thread that waits here begins nothing else meanwhile
    tbb::this_task_arena::isolate([&] {
        tbb::parallel_for(
            tbb::blocked_range<std::size_t>(0, rows, rows_of_sample_task), [&](const auto& part) {
                options_.sampler->rows_at(slot.step.epoch, slot.step.position + part.begin(),
                                          std::span(slot.row_ids).subspan(part.begin(), part.size()));
            });
    });
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
    report.slot_bytes = layout_.side_bytes;
    report.batches = collected.batches;
    report.rows = collected.rows;
    for (const auto& source : sources_) {
        report.bytes += collected.rows * source->row_size_bytes();
    }
    report.wall_time = collected.wall;
    report.storage_wait = collected.waits.storage;
    report.cpu_wait = collected.waits.cpu;
    report.link_wait = collected.waits.link;
    // there is no link: what looks like it is the CPU's scheduling
    if (device().kind() == device_kind::host) {
        report.cpu_wait += std::exchange(report.link_wait, {});
    }
    report.consumer_wait = collected.consumer_wait;
    if (collected.batches > 0) {
        report.mean_ready = static_cast<double>(collected.ready) / static_cast<double>(collected.batches);
    }
    report.most_ready = static_cast<unsigned>(collected.most_ready);
    return report;
}

loader_state loader::pipeline::state() const {
    if (pool_->forked()) {
        throw device_error(
            "the state of a loader cannot be asked for in a forked process: it is the parent's");
    }
    const detail::slot_pool::statistics collected = pool_->collected();
    if (collected.ended) return origin_->state_at(schedule_.end());
    return origin_->state_at(collected.reached.value_or(schedule_.start()));
}

}  // namespace pinflow
