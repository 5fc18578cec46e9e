#include "loader/pipeline.hpp"

#include <fmt/format.h>
#include <tbb/info.h>
#include <tbb/parallel_pipeline.h>

#include <algorithm>
#include <utility>

#include "loader/pipeline_plan.hpp"
#include "loader/ranges.hpp"
#include "pinflow/error.hpp"
#include "src/core/fork_gate.hpp"
#include "src/core/system.hpp"
#include "src/device/backend.hpp"

namespace pinflow {

namespace {

/// The position at which the loader starts. @throws as state_origin::resume_position.
detail::epoch_position start_of(const loader_options& options, const detail::state_origin& origin) {
    return options.resume_from ? origin.resume_position(*options.resume_from)
                               : detail::epoch_position{.epoch = options.first_epoch, .position = 0};
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

/// The public name of a transfer.
route route_of(detail::transfer how, device_kind kind) {
    using detail::transfer;
    switch (how) {
        case transfer::view:
        case transfer::kernel:
            return route::direct;
        case transfer::copy_engine:
        case transfer::slot_copy:
            return route::copy;
        case transfer::read:
            return route::read;
        case transfer::decode:
        case transfer::held:
            return kind == device_kind::host ? route::copy : route::staged;
        case transfer::staged:
            break;
    }
    return route::staged;
}

}  // namespace

loader::pipeline::pipeline(std::vector<std::shared_ptr<const row_source>> sources,
                           const loader_options& options)
    : options_(detail::resolved(options, detail::checked(sources))),
      origin_(std::make_shared<const detail::state_origin>(options_.sampler->identity(), sources)),
      schedule_(terms_of(options_, *origin_)),
      workers_(options.threads),
      arena_(static_cast<int>(workers_.count()), 1),
      checks_(sources) {
    plan(std::move(sources));
    detail::watch_forks();
    driver_ = detail::system::start_thread("runs a loader", [this] { drive(); });
}

loader::pipeline::~pipeline() {
    pool_->stop();
    driver_.join();
    // the streams of the stages are destroyed next, and wait for their copies, which depend on nothing else
}

/// Plans how rows travel, and makes the slots, transfers and stages.
void loader::pipeline::plan(std::vector<std::shared_ptr<const row_source>> sources) {
    using detail::transfer;
    std::vector<detail::sample_array> arrays = detail::arrays_of(sources, schedule_.row_count());
    const detail::slot_layout layout = detail::lay_out(arrays, options_);
    const detail::slot_budget budget = detail::find_budget(options_);
    detail::sample_facts sample = detail::facts_of_sample(options_, layout, budget, workers_.count());
    sample.epoch_batches = schedule_.batches_per_epoch();
    detail::staging_plan staging;
    try {
        staging = detail::plan_sample(sample, arrays);
    } catch (const unsupported& refusal) {
        throw unsupported(
            fmt::format("the route {} cannot be taken: {}", to_string(options_.route), refusal.what()));
    }
    const detail::group_plan groups = detail::plan_groups(sample, arrays, layout.side_bytes);
    detail::slot_sizes sizes = detail::size_slots(options_, arrays, layout, budget, groups, staging);
    slot_bytes_ = layout.side_bytes;
    slots_reason_ = sizes.reason;
    // with few slots a group has a quarter of them, so that one group is filled while another is consumed
    group_size_ = std::clamp<std::size_t>(sizes.count / 4, 1, groups.batches);
    sizes.max_group_slots = static_cast<unsigned>(group_size_);
    const stream allocation_stream(options_.device);
    const detail::device_allocator allocator{allocation_stream, options_.device_memory};
    pool_ = std::make_shared<detail::slot_pool>(sizes, std::move(sources), allocator);

    detail::loader_setup setup{
        .device = options_.device,
        .allocator = allocator,
        .slot_count = sizes.count,
        .max_slot_rows = layout.row_count,
        .is_in_order = sample.is_in_order,
        .first_row = sample.is_in_order ? schedule_.start().position : 0,
        .pinning = {.budget_bytes = options_.pin_budget_bytes, .limit = options_.pin_limit},
        .is_stopped = [pool = pool_] { return pool->stopped(); }};
    const auto is_held = [](const detail::sample_array& each) { return each.plan.main() == transfer::held; };
    for (const detail::sample_array& each : arrays)
        sample_bytes_ += is_held(each) ? 0 : each.row_bytes();
    is_in_order_ = sample.is_in_order;
    const auto needs_kernels = [&](const detail::sample_array& each) {
        return !sample.on_host && (each.plan.main() == transfer::kernel || is_held(each));
    };
    // load kernels now: CUDA waits for all streams when it loads one at its first launch. A consumer's stream
    // may be waiting for the consumer, which waits for the next batch: a deadlock
    if (std::ranges::any_of(arrays, needs_kernels)) options_.device.backend().prepare_rows();
    if (!sample.on_host && std::ranges::any_of(arrays, is_held))
        setup.held =
            std::make_shared<detail::device_held>(setup.slot_count, setup.max_slot_rows, options_.device);
    for (detail::sample_array& each : arrays)
        transfers_.push_back(detail::make_transfer(std::move(each), setup));
    allocation_stream.synchronize();  // from here on, any stream may use the memory
    if (staging.count > 0) buffers_.emplace(options_.device, staging.count, staging.buffer_bytes);
    // the most groups that can be in flight
    std::size_t max_groups = std::max<std::size_t>(2, sizes.count / group_size_);
    if (groups.max_filled != 0) max_groups = std::min<std::size_t>(max_groups, groups.max_filled);
    stages_.emplace(detail::stages::parts{*pool_, schedule_, *options_.sampler, transfers_, checks_,
                                          setup.held, buffers_ ? &*buffers_ : nullptr},
                    max_groups);
}

void loader::pipeline::refuse_forked() const {
    if (pool_->forked()) {
        throw device_error(
            "a loader cannot be used in a forked process: its threads exist in the parent only");
    }
}

bool loader::pipeline::wait_for(std::chrono::nanoseconds timeout) {
    refuse_forked();
    return pool_->wait_for_next(timeout);
}

std::shared_ptr<detail::slot_lease> loader::pipeline::next(detail::lease_when when) {
    refuse_forked();
    const detail::profiled_range range(detail::range::next);
    detail::slot* const slot = pool_->lease(when);
    if (slot == nullptr) return nullptr;
    try {
        return std::make_shared<detail::slot_lease>(pool_, *slot, origin_);
    } catch (...) {
        pool_->undo_lease(*slot);
        throw;
    }
}

// ---- the driver ------------------------------------------------------------------------------------------

unsigned loader::pipeline::wanted_threads() const noexcept {
    detail::work_facts work{.is_in_order = is_in_order_, .sample_bytes = sample_bytes_};
    for (const auto& array : transfers_) {
        work.needs_cpu = work.needs_cpu || array->needs_cpu();
        work.registers = work.registers || (array->pages() != nullptr && !array->pages()->finished());
    }
    return detail::count_threads(work, workers_.count());
}

void loader::pipeline::drive() {
    try {
        {
            const detail::unforked_section section;
            arena_.execute([&] { stages_->begin(); });
        }
        while (stages_->more_batches() && !pool_->failed()) {
            const std::size_t count = pool_->wait_for_free(group_size_);
            if (count == 0) break;
            const detail::unforked_section section;
            if (const auto threads = static_cast<int>(wanted_threads());
                threads != arena_.max_concurrency()) {
                arena_.terminate();
                arena_.initialize(threads, 1);
            }
            arena_.execute([&] { run_stages(count); });
        }
        pool_->finish();
    } catch (...) {
        pool_->finish(std::current_exception());
    }
}

void loader::pipeline::run_stages(std::size_t first_count) {
    using detail::slot_group;
    const unsigned threads = wanted_threads();
    std::size_t count = first_count;
    // On the host, groups that are sampled one after the other are also filled one after the other: their
    // slots stay in the CPU's cache. For a GPU, all threads have to sample if rows are small.
    const bool samples_first = device().kind() == device_kind::host;
    const auto take = [&](tbb::flow_control& control) -> slot_group* {
        // otherwise restart, with another number of threads or after a fork
        const bool goes_on = threads == wanted_threads() && !detail::is_fork_pending();
        slot_group* const group = goes_on ? stages_->take(std::exchange(count, group_size_)) : nullptr;
        if (group == nullptr) {
            control.stop();
        } else if (samples_first) {
            stages_->sample(*group);
        }
        return group;
    };
    const auto fill = [&](slot_group* group) {
        if (!samples_first) stages_->sample(*group);
        stages_->fill(*group);
        return group;
    };
    const auto deliver = [&](slot_group* group) { stages_->deliver(*group); };
    tbb::parallel_pipeline(
        stages_->max_groups(),
        tbb::make_filter<void, slot_group*>(tbb::filter_mode::serial_in_order, take) &
            tbb::make_filter<slot_group*, slot_group*>(tbb::filter_mode::parallel, fill) &
            tbb::make_filter<slot_group*, void>(tbb::filter_mode::serial_in_order, deliver));
}

// ---- report and state ------------------------------------------------------------------------------------

loader_report loader::pipeline::report() const {
    if (pool_->forked())
        throw device_error(
            "the report of a loader is not available in a forked process: the loader belongs to the parent");
    const detail::slot_pool::statistics collected = pool_->collected();
    const bool on_host = device().kind() == device_kind::host;
    loader_report report;
    std::optional<std::uint64_t> max_row_bytes;
    for (const auto& each : transfers_) {
        const std::uint64_t row_bytes = each->array().row_bytes();
        report.arrays.push_back({each->array().facts.name, std::string(to_string(each->main())),
                                 each->reason(), collected.rows * row_bytes});
        if (!max_row_bytes || row_bytes > *max_row_bytes) {
            // the loader's route is that of the array with the largest rows
            report.route = route_of(each->main(), device().kind());
            report.reason = report.arrays.back().reason;
            max_row_bytes = row_bytes;
        }
        if (each->pages() != nullptr) {
            const pin_report pinned = each->pages()->report();
            report.pin_time = std::max(report.pin_time, pinned.duration);
            report.pinned_bytes += pinned.registered_bytes;
        }
        report.bytes += collected.rows * row_bytes;
    }
    report.threads = workers_.count();
    report.threads_reason = workers_.reason();
    report.slots = static_cast<unsigned>(pool_->slot_count());
    report.lost_slots = static_cast<unsigned>(collected.lost_slots);
    report.slots_reason = slots_reason_;
    report.slot_bytes = slot_bytes_;
    report.batches = collected.batches;
    report.rows = collected.rows;
    report.wall_time = collected.wall;
    report.storage_wait = collected.waits.storage;
    report.file_wait = collected.waits.files;
    report.cpu_wait = collected.waits.cpu;
    report.link_wait = collected.waits.link;
    // the host device has no link: there, the CPU enqueues and copies
    if (on_host) report.cpu_wait += std::exchange(report.link_wait, {});
    report.consumer_wait = collected.consumer_wait;
    if (collected.batches > 0) {
        report.mean_ready = static_cast<double>(collected.ready_sum) / static_cast<double>(collected.batches);
    }
    report.max_ready = static_cast<unsigned>(collected.max_ready);
    return report;
}

loader_state loader::pipeline::state() const {
    if (pool_->forked()) {
        throw device_error(
            "the state of a loader is not available in a forked process: the loader belongs to the parent");
    }
    const detail::slot_pool::statistics collected = pool_->collected();
    if (collected.ended) return origin_->state_at(schedule_.end());
    return origin_->state_at(collected.reached.value_or(schedule_.start()));
}

}  // namespace pinflow
