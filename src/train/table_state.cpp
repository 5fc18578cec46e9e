#include "src/train/table_state.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"

namespace pinflow {

namespace {

using detail::table_step;

}  // namespace

// ---- checks ----------------------------------------------------------------------------------------------

void embedding_table::state::check_stream(stream_view stream) const {
    if (!(stream.device() == device))
        throw invalid_argument(fmt::format("the embedding table is on {}, and the stream is one of {}",
                                           device.name(), stream.device().name()));
    if (is_on_host() && stream.native_handle() == nullptr)
        throw invalid_argument("a null handle is no stream of the host device");
    if (device.backend().is_capturing(stream.native_handle()))
        throw unsupported("an embedding table cannot use a stream that is being captured into a CUDA graph");
}

void embedding_table::state::check_in_host_memory(row_ids ids) const {
    if (ids.on_device()) throw unsupported("only the fetch of an embedding table takes ids in device memory");
}

/// @throws invalid_argument for ids outside the table; unsupported for ids in device memory.
void embedding_table::state::check_inside(row_ids ids) const {
    check_in_host_memory(ids);
    if (ids.data() == nullptr && ids.size() != 0)
        throw invalid_argument(fmt::format("{} ids cannot lie at a null pointer", ids.size()));
    const std::span all(ids.data(), ids.size());
    const auto is_outside = [&](std::uint64_t id) { return id >= options.row_count; };
    // the highest bit tells whether one is outside; compilers vectorise this. row_count is below 2^63
    std::uint64_t signs = 0;
    for (const std::uint64_t id : all)
        signs |= id | (options.row_count - 1 - id);
    if (all.empty() || (options.row_count != 0 && signs >> 63 == 0)) return;
    const auto first = std::ranges::find_if(all, is_outside);
    throw invalid_argument(
        fmt::format("{} of {} ids are outside the embedding table of {} rows; the first is ids[{}] = {}",
                    std::ranges::count_if(all, is_outside), all.size(), options.row_count,
                    first - all.begin(), static_cast<std::int64_t>(*first)));
}

/// Checks the ids of a step: as check_inside, and that they are at most max_batch_ids.
void embedding_table::state::check_ids(row_ids ids) const {
    if (ids.size() > options.max_batch_ids)
        throw invalid_argument(fmt::format("{} ids are more than max_batch_ids, which is {}", ids.size(),
                                           options.max_batch_ids));
    if (ids.on_device()) {
        check_device_ids(ids);
    } else {
        check_inside(ids);
    }
}

// ---- rows to the device ----------------------------------------------------------------------------------

void embedding_table::state::free_dropped() {
    const std::scoped_lock lock(mutex_);
    std::erase_if(leased_, [this](table_step* step) {
        const bool is_lost = step->now == table_step::phase::lost;
        if (step->now != table_step::phase::dropped && !is_lost) return false;
        forget_newer(*step);
        if (!is_lost) step->now = table_step::phase::free;
        return true;
    });
}

/// Drops the commits that a step was to be patched with.
void embedding_table::state::forget_newer(table_step& step) noexcept {
    for (table_step* const commit : step.newer)
        --commit->readers;
    step.newer.clear();
}

/// Waits until no thread prepares a step.
void embedding_table::state::wait_for_grouping() {
    grouped_.wait(call_mutex, [&] {
        return std::ranges::none_of(prefetched_, [&](const table_step* step) {
            return phase_of(*step) == table_step::phase::grouping;
        });
    });
}

void embedding_table::state::cancel_prefetches() {
    wait_for_grouping();
    for (table_step* const step : prefetched_) {
        forget_newer(*step);
        set_phase(*step, table_step::phase::free);  // later gathers into its memory come after this one
    }
    prefetched_.clear();
}

/// What the steps are in use for, as "2 by leases, 1 by commits that older leases may need".
std::string embedding_table::state::uses_of_steps() const {
    const auto lost = std::ranges::count_if(
        steps_, [&](const auto& step) { return phase_of(*step) == table_step::phase::lost; });
    std::vector<std::string> uses;
    const auto add = [&](std::size_t count, std::string_view use) {
        if (count != 0) uses.push_back(fmt::format("{} {}", count, use));
    };
    add(leased_.size(), "by leases");
    add(prefetched_.size(), "by prefetches");
    add(committed_.size(), "by commits that older leases may need");
    add(static_cast<std::size_t>(lost), "lost");
    return fmt::format("{}", fmt::join(uses, ", "));
}

/// A step whose memory later gathers may overwrite.
table_step& embedding_table::state::take_step() {
    free_dropped();
    table_step* free = nullptr;
    for (const std::unique_ptr<table_step>& step : steps_) {
        if (phase_of(*step) != table_step::phase::free) continue;
        if (step->grouped.done()) return *step;
        if (free == nullptr) free = step.get();
    }
    if (free != nullptr) return *free;  // the caller waits for its memory
    const auto has_no_reader = [](const table_step* each) { return each->readers == 0; };
    auto oldest = std::ranges::find_if(committed_, has_no_reader);
    // Fetches that were not prefetched have overtaken prefetched ones, which may need all commits that are
    // left.
    for (auto commit = committed_.begin(); oldest == committed_.end() && commit != committed_.end();
         ++commit) {
        for (table_step* const step : prefetched_) {
            if (step->newer.empty() || step->newer.front() != *commit) continue;
            patch(*step, gathers_);
            detail::record_or_wait(step->gathered, gathers_);
        }
        oldest = std::ranges::find_if(committed_, has_no_reader);
    }
    if (oldest == committed_.end()) {
        throw all_slots_leased(fmt::format(
            "cannot fetch or prefetch: all {} steps of the embedding table are in use ({}): commit or "
            "drop leases, fetch what was prefetched, or cancel the prefetches",
            steps_.size(), uses_of_steps()));
    }
    table_step& step = **oldest;
    gathers_.view().wait(step.written);  // so later gathers see what it wrote
    committed_.erase(oldest);
    set_phase(step, table_step::phase::free);
    return step;
}

/// Replaces the rows of a step that the oldest commit among `newer` has changed.
void embedding_table::state::patch(table_step& step, stream_view stream) {
    table_step& commit = *step.newer.front();
    stream.wait(commit.updated);
    if (step.row_count != 0 && commit.row_count != 0)
        device.backend().patch_records({step.rows(), commit.rows(), layout.size_bytes},
                                       stream.native_handle());
    stream.wait(commit.released);  // the streams of earlier readers
    detail::record_or_wait(commit.released, stream);
    --commit.readers;
    step.newer.erase(step.newer.begin());
}

/// Takes a step for these ids.
table_step& embedding_table::state::begin_step(row_ids ids) {
    table_step& step = take_step();
    if (step.is_grouped_on_device) {
        // the last ids in this memory, and the error of their fetch
        if (!step.grouped.done()) step.grouped.synchronize();
        throw_wrong_ids(step);
    }
    step.position_count = ids.size();
    step.requested = {};
    step.requested_on_device = nullptr;
    step.is_grouped_on_device =
        ids.on_device() || (groups_on_device_ && ids.size() >= min_device_grouped_ids);
    if (ids.on_device()) {
        step.requested_on_device = ids.data();
    } else {
        step.copy_requested({ids.data(), ids.size()});
    }
    step.is_listed = false;
    step.newer.clear();
    step.failure = nullptr;
    return step;
}

void embedding_table::state::prefetch(row_ids ids) {
    throw_wrong_ids();
    check_in_host_memory(ids);
    check_ids(ids);
    if (prefetched_.size() >= options.look_ahead)
        throw invalid_argument(
            fmt::format("look_ahead is {}, and as many steps are prefetched already: fetch one of them, or "
                        "cancel the prefetches",
                        options.look_ahead));
    table_step& step = begin_step(ids);
    if (ids.size() >= min_threaded_ids && !step.is_grouped_on_device) {
        // two: one groups ids while the other one enqueues
        if (!threads_)
            threads_.emplace(std::min(options.look_ahead, 2U),
                             [this](table_step& of, detail::row_grouper& grouper) { prepare(of, grouper); });
        set_phase(step, table_step::phase::grouping);
        prefetched_.push_back(&step);
        if (threads_->add(step)) return;
        prefetched_.pop_back();
        set_phase(step, table_step::phase::free);
    }
    group(step, grouper_);
    gather(step);
    set_phase(step, table_step::phase::prefetched);
    prefetched_.push_back(&step);
}

/// What another thread does with a prefetched step.
void embedding_table::state::prepare(table_step& step, detail::row_grouper& grouper) noexcept {
    try {
        group(step, grouper);
    } catch (...) {
        step.failure = std::current_exception();
    }
    {
        const std::scoped_lock lock(call_mutex);
        try {
            if (!step.failure) gather(step);
        } catch (...) {
            step.failure = std::current_exception();
        }
        set_phase(step, table_step::phase::prefetched);
    }
    grouped_.notify_all();
}

std::uint64_t embedding_table::state::device_count(const table_step& step) const {
    const auto ids = step.ids();
    return static_cast<std::uint64_t>(std::ranges::lower_bound(ids, options.device_rows) - ids.begin());
}

std::span<const std::uint64_t> embedding_table::state::exchanged_ids(const table_step& step) {
    const auto ids = step.ids().subspan(device_count(step));
    if (options.device_rows == 0) return ids;
    exchanged_.assign(ids.begin(), ids.end());
    for (std::uint64_t& id : exchanged_)
        id -= options.device_rows;
    return exchanged_;
}

/// The transfer of the rows of a step that lie in device memory.
detail::row_transfer embedding_table::state::transfer_of(const table_step& step, std::uint64_t count) const {
    detail::row_transfer transfer;
    transfer.table = {first_rows_.data(), options.device_rows, layout.size_bytes};
    transfer.order = {step.device_groups().ids, nullptr, count, true};
    transfer.parts.rows[0] = step.records.data();
    transfer.parts.first[1] = count;
    transfer.parts.count = 1;
    transfer.end = count;
    return transfer;
}

/// Groups step.requested, unless the device does this later.
void embedding_table::state::group(table_step& step, detail::row_grouper& grouper) const {
    // the memory's last upload
    if (!step.grouped.done()) step.grouped.synchronize();
    step.host_numbers() = {};
    if (step.is_grouped_on_device) {
        step.row_count = step.position_count;
        return;
    }
    step.row_count = grouper.group(step.requested, options.row_count, step.host_groups());
    step.host_numbers().row_count = step.row_count;
}

/// Enqueues what brings the groups of a step to its device memory.
void embedding_table::state::enqueue_groups(table_step& step) {
    const stream_view stream = groupings_;
    // earlier users of the memory
    stream.wait(step.gathered);
    stream.wait(step.written);
    stream.wait(step.released);
    try {
        step.upload(stream);
        if (step.is_grouped_on_device) group_on_device(step);
    } catch (...) {
        detail::record_or_wait_noexcept(step.grouped, stream);  // a part may have been enqueued
        throw;
    }
    detail::record_or_wait(step.grouped, stream);
}

/// Enqueues the gather of a step, after its groups.
void embedding_table::state::gather(table_step& step) {
    enqueue_groups(step);
    const stream_view stream = gathers_;
    try {
        stream.wait(step.grouped);
        for (table_step* const commit : committed_) {
            if (commit->is_ordered) continue;
            if (!is_on_host() && commit == committed_.back() && !commit->written.done()) {
                step.newer.push_back(commit);
            } else {
                stream.wait(commit->written);
                commit->is_ordered = true;
            }
        }
        if (step.is_grouped_on_device) {
            gather_ranges(step);
        } else if (step.row_count != 0) {
            const std::uint64_t on_device = device_count(step);
            if (on_device != 0)
                device.backend().gather_rows(transfer_of(step, on_device), stream.native_handle());
            if (on_device < step.row_count)
                exchange_->gather_async(exchanged_ids(step),
                                        step.records.data() + on_device * layout.size_bytes, stream);
        }
    } catch (...) {
        step.newer.clear();
        detail::record_or_wait_noexcept(step.gathered, stream);  // a part may have been enqueued
        throw;
    }
    detail::record_or_wait(step.gathered, stream);
    for (table_step* const commit : step.newer)
        ++commit->readers;
}

table_step& embedding_table::state::fetch(row_ids ids, stream_view stream) {
    throw_wrong_ids();
    if (ids.size() == 0) ids = std::span<const std::uint64_t>();  // the device has nothing to group
    const auto found = std::ranges::find_if(prefetched_, [&](const table_step* each) {
        return !ids.on_device() && (ids.data() != nullptr || ids.size() == 0) &&
               std::ranges::equal(each->requested, std::span(ids.data(), ids.size()));
    });
    table_step* step = nullptr;
    if (found != prefetched_.end()) {
        step = *found;
        grouped_.wait(call_mutex, [&] { return phase_of(*step) != table_step::phase::grouping; });
        std::erase(prefetched_, step);
        if (step->failure) {
            set_phase(*step, table_step::phase::free);
            std::rethrow_exception(std::exchange(step->failure, nullptr));
        }
    } else {
        check_ids(ids);  // those of a prefetch have been checked
        step = &begin_step(ids);
        group(*step, grouper_);
        if (ids.on_device()) {
            step->ids_ready.record(stream);
            groupings_.view().wait(step->ids_ready);
        }
        try {
            gather(*step);
        } catch (...) {
            if (ids.on_device()) stream.wait(step->grouped);  // the device may still read the ids
            throw;
        }
    }
    set_phase(*step, table_step::phase::leased);
    leased_.push_back(step);
    try {
        stream.wait(step->gathered);
        while (!step->newer.empty())
            patch(*step, stream);
        step->ready.record(stream);
    } catch (...) {
        drop(*step, stream);
        throw;
    }
    return *step;
}

// ---- phases ------------------------------------------------------------------------------------------

table_step::phase embedding_table::state::phase_of(const table_step& step) const {
    const std::scoped_lock lock(mutex_);
    return step.now;
}

void embedding_table::state::set_phase(table_step& step, table_step::phase phase) noexcept {
    const std::scoped_lock lock(mutex_);
    step.now = phase;
}

}  // namespace pinflow
