#include <cstddef>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"
#include "src/train/table_layout.hpp"
#include "src/train/table_state.hpp"

namespace pinflow {

using detail::table_step;

// commit, write_back and set_rate of an embedding table, and how leases end.

void embedding_table::state::check_gradients(const table_step& step, const std::byte* gradients,
                                             const pinflow::dtype& type) const {
    static_cast<void>(detail::weight_type_of(type));
    if (step.row_count != 0 && gradients == nullptr)
        throw invalid_argument("cannot commit null gradients to an embedding table");
}

void embedding_table::state::commit(table_step& step, const std::byte* gradients, const pinflow::dtype& type,
                                    stream_view stream) {
    throw_wrong_ids(step);
    stream.wait(step.ready);
    stream.wait(rate_set_);
    while (!step.newer.empty())  // commits of other leases, since the fetch
        patch(step, stream);
    if (step.row_count != 0) {
        detail::record_update work;
        work.rows = step.rows();
        work.layout = layout;
        work.rule = rule.kind;
        work.numbers = numbers_;
        work.starts = step.device_groups().starts;
        work.positions = step.device_groups().positions;
        work.position_count = step.position_count;
        work.sums = reinterpret_cast<float*>(step.sums.data());
        work.gradients = gradients;
        work.gradient_type = detail::weight_type_of(type);
        device.backend().update_records(work, stream.native_handle());
    }
    write(step, stream);
}

void embedding_table::state::write_back(table_step& step, stream_view stream) {
    throw_wrong_ids(step);
    stream.wait(step.ready);
    forget_newer(step);  // the caller's weights replace what others have committed
    write(step, stream);
}

/// Enqueues the write of records that `stream` has changed.
void embedding_table::state::write(table_step& step, stream_view stream) {
    free_dropped();
    step.updated.record(stream);
    writes_.wait(step.updated);
    // The rows of leases are used as they are. Those of prefetched steps are patched, so on a GPU it does not
    // matter if they are half-written; but the CPU must not read what it is writing.
    for (const table_step* const other : leased_)
        writes_.wait(other->gathered);
    for (const table_step* const later : prefetched_) {
        if (is_on_host() && phase_of(*later) == table_step::phase::prefetched) writes_.wait(later->gathered);
    }
    try {
        scatter(step);
    } catch (...) {
        detail::record_or_wait_noexcept(step.written, writes_);  // a part may have been enqueued
        throw;
    }
    detail::record_or_wait(step.written, writes_);
    step.is_ordered = false;
    std::erase(leased_, &step);
    for (const auto* const others : {&leased_, &prefetched_}) {
        for (table_step* const other : *others) {
            // a gather that comes later will see this commit
            if (phase_of(*other) == table_step::phase::grouping || other->failure) continue;
            other->newer.push_back(&step);
            ++step.readers;
        }
    }
    set_phase(step, table_step::phase::committed);
    committed_.push_back(&step);
}

void embedding_table::state::scatter(const table_step& step) {
    if (step.row_count == 0) return;
    if (step.is_grouped_on_device) {
        scatter_ranges(step);
        return;
    }
    const std::uint64_t on_device = device_count(step);
    if (on_device != 0)
        device.backend().scatter_rows(transfer_of(step, on_device), detail::repeated_rows::last,
                                      detail::sum_type::int32, writes_.view().native_handle());
    if (on_device < step.row_count)
        exchange_->scatter_async(exchanged_ids(step), step.records.data() + on_device * layout.size_bytes,
                                 duplicate_policy::last, writes_);
}

void embedding_table::state::drop(table_step& step, stream_view stream) noexcept {
    auto phase = table_step::phase::lost;
    try {
        // the event would become a part of the graph
        if (!device.backend().is_capturing(stream.native_handle())) {
            step.released.record(stream);
            phase = table_step::phase::dropped;
        }
    } catch (...) {
        phase = table_step::phase::lost;  // the device may still read the rows
    }
    set_phase(step, phase);
}

void embedding_table::state::set_rate(double rate, stream_view stream) {
    const optimizer changed = with_rate(options.rule, rate);
    check_settings(changed);
    for (const std::unique_ptr<table_step>& step : steps_)
        stream.wait(step->updated);  // earlier commits use the old rate
    stream.wait(rate_set_);          // another stream may still have to write an earlier rate
    auto* const numbers = reinterpret_cast<std::byte*>(rule_memory_.data());
    device.backend().set_number(reinterpret_cast<double*>(numbers + offsetof(detail::rule_numbers, rate)),
                                rate, stream.native_handle());
    rate_set_.record(stream);
    options.rule = changed;
}

}  // namespace pinflow
