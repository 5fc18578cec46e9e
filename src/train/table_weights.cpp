#include <fmt/format.h>

#include <cstring>
#include <memory>
#include <span>

#include "pinflow/error.hpp"
#include "src/train/table_state.hpp"

// How the host reads and replaces the weights of an embedding table.

namespace pinflow {

using detail::table_step;

void embedding_table::state::check_weights(row_ids ids, std::span<const std::byte> weights) const {
    check_inside(ids);
    const std::uint64_t expected = ids.size() * options.columns * options.type.size_bytes();
    if (weights.size() != expected)
        throw invalid_argument(fmt::format("the weights of {} rows take {} bytes, not {}", ids.size(),
                                           expected, weights.size()));
    if (weights.data() == nullptr && expected != 0)
        throw invalid_argument(
            fmt::format("the weights of {} rows cannot lie at a null pointer", ids.size()));
}

/// Prepares for the host to change records: no device work reads or writes them.
void embedding_table::state::begin_change() {
    free_dropped();
    if (!leased_.empty())
        throw invalid_argument(fmt::format(
            "cannot change the rows of an embedding table while leases are held ({} now): commit or "
            "drop them first",
            leased_.size()));
    cancel_prefetches();
    gathers_.synchronize();
    synchronize();
}

void embedding_table::state::read_weights(row_ids ids, std::span<std::byte> destination) {
    check_weights(ids, destination);
    synchronize();
    const std::uint64_t row_bytes = options.columns * options.type.size_bytes();
    std::byte* to = destination.data();
    for (const std::uint64_t id : std::span(ids.data(), ids.size())) {
        if (id < options.device_rows) {
            copy_to_host_async({to, row_bytes}, first_rows_.data() + id * layout.size_bytes, writes_);
        } else {
            std::memcpy(to, host_records().data() + (id - options.device_rows) * layout.size_bytes,
                        row_bytes);
        }
        to += row_bytes;
    }
    writes_.synchronize();
}

void embedding_table::state::write_weights(row_ids ids, std::span<const std::byte> weights) {
    check_weights(ids, weights);
    begin_change();
    const std::uint64_t row_bytes = options.columns * options.type.size_bytes();
    const std::byte* from = weights.data();
    for (const std::uint64_t id : std::span(ids.data(), ids.size())) {
        if (id < options.device_rows) {
            copy_to_device_async(first_rows_.data() + id * layout.size_bytes, {from, row_bytes}, writes_);
        } else {
            std::memcpy(host_records().data() + (id - options.device_rows) * layout.size_bytes, from,
                        row_bytes);
        }
        from += row_bytes;
    }
    writes_.synchronize();
}

void embedding_table::state::synchronize() {
    writes_.synchronize();
    if (exchange_) exchange_->check();
    for (const std::unique_ptr<table_step>& step : steps_) {
        if (step->requested_on_device != nullptr) step->gathered.synchronize();
    }
    throw_wrong_ids();
}

}  // namespace pinflow
