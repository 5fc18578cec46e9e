#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/cast.hpp"
#include "src/core/checked.hpp"
#include "src/core/worker_threads.hpp"
#include "src/device/backend.hpp"
#include "src/train/table_layout.hpp"
#include "src/train/table_state.hpp"

// How an embedding table is made (storage, first weights, the numbers of the rule), and how it grows.

namespace pinflow {

namespace {

using detail::table_step;

/// The size of the records that are written to device memory at once when a table is made, and the grain of
/// the parallel copy when it grows.
constexpr std::uint64_t fill_bytes = std::uint64_t{16} << 20;

}  // namespace

embedding_table::state::state(embedding_options chosen, const pinflow::device& where)
    : options(std::move(chosen)),
      device(where),
      layout(detail::lay_out_record(options)),
      rule(detail::layout_of(options.rule)),
      groupings_(device),
      gathers_(device),
      writes_(device),
      lists_(device),
      rate_set_(device) {
    detail::start_worker_threads();
    detail::device_backend& backend = device.backend();
    backend.prepare_rows();
    backend.prepare_records(rule.kind);
    make_storage();
    upload_rule();
    // so that lists of steps never allocate later
    for (auto* const list : {&prefetched_, &leased_, &committed_})
        list->reserve(step_count());
    for (unsigned i = 0; i < step_count(); ++i)
        steps_.push_back(
            std::make_unique<table_step>(options.max_batch_ids, layout, gathers_, options.resource));
    groups_on_device_ = can_group_on_device();
    if (groups_on_device_) make_grouper();
    if (!options.keeps_records) initialise();
    gathers_.synchronize();
}

embedding_table::state::~state() {
    threads_.reset();
    if (::getpid() != process) return;  // the streams are the parent's
    const auto wait_for = [](const auto& work) {
        try {
            work.synchronize();
        } catch (const error&) {
            return;  // the device has failed
        }
    };
    for (const stream* const own : {&groupings_, &gathers_, &writes_, &lists_})
        wait_for(*own);
    wait_for(rate_set_);
    for (const std::unique_ptr<table_step>& step : steps_) {  // callers' streams
        wait_for(step->ready);
        wait_for(step->released);
    }
}

void embedding_table::state::make_storage() {
    const std::uint64_t host_rows = options.row_count - options.device_rows;
    if (options.device_rows != 0)
        first_rows_ = device_buffer(options.device_rows * layout.size_bytes, gathers_, options.resource);
    if (options.storage) {
        const row_table& storage = *options.storage;
        if (storage.row_size_bytes() != layout.size_bytes || storage.row_count() != options.row_count)
            throw invalid_argument(fmt::format(
                "the storage of an embedding table has {} rows of {} bytes, and {} of {} are needed",
                storage.row_count(), storage.row_size_bytes(), options.row_count, layout.size_bytes));
        if (!storage.writable()) throw unsupported("the storage of an embedding table must be writable");
    }
    if (host_rows == 0) return;
    if (options.storage) {
        const std::span<std::byte> all(const_cast<std::byte*>(options.storage->data()),
                                       options.storage->size_bytes());
        exchange_rows({all.subspan(options.device_rows * layout.size_bytes), layout.size_bytes,
                       dtype::of<std::byte>(), options.storage->owner()});
    } else {
        const auto memory = std::make_shared<pinned_buffer>(host_rows * layout.size_bytes, device);
        exchange_rows({memory->bytes(), layout.size_bytes, dtype::of<std::byte>(), memory});
    }
}

/// Makes the exchange for the rows from device_rows on.
void embedding_table::state::exchange_rows(row_table rows) {
    row_exchange_options how;
    how.max_batch_rows = options.max_batch_ids;
    how.max_calls_in_flight = 4 * step_count();  // a stream may use half of them
    how.device_memory = options.resource;
    row_exchange made(std::move(rows), device, how);
    exchange_ = std::move(made);
}

/// The records of the rows from device_rows on.
std::span<std::byte> embedding_table::state::host_records() noexcept {
    if (!exchange_) return {};
    const row_table& rows = exchange_->table();
    return {const_cast<std::byte*>(rows.data()), rows.size_bytes()};
}

/// Writes new records for the rows from `first_row` on: the first weights, and zeros for all else.
void embedding_table::state::fill(std::uint64_t first_row, std::span<std::byte> records) const {
    constexpr std::uint64_t rows_of_task = 64;
    const std::uint64_t row_count = records.size() / layout.size_bytes;
    detail::run_in_parallel((row_count + rows_of_task - 1) / rows_of_task, [&](std::size_t task) {
        std::vector<float> weights(options.columns);
        const std::uint64_t begin = task * rows_of_task;
        for (std::uint64_t row = begin; row < std::min(begin + rows_of_task, row_count); ++row) {
            const std::span<std::byte> record = records.subspan(row * layout.size_bytes, layout.size_bytes);
            std::ranges::fill(record, std::byte{0});
            if (!options.weights) continue;
            options.weights(first_row + row, weights);
            detail::cast_elements(dtype::of<float>(), reinterpret_cast<const std::byte*>(weights.data()),
                                  options.type, record.data(), options.columns);
        }
    });
}

void embedding_table::state::initialise() {
    if (options.device_rows != 0) {
        const std::uint64_t rows_at_once = std::max<std::uint64_t>(fill_bytes / layout.size_bytes, 1);
        const pinned_buffer piece(rows_at_once * layout.size_bytes, device);
        for (std::uint64_t row = 0; row < options.device_rows; row += rows_at_once) {
            const auto records =
                piece.bytes().first(std::min(rows_at_once, options.device_rows - row) * layout.size_bytes);
            fill(row, records);
            copy_to_device_async(first_rows_.data() + row * layout.size_bytes, records, gathers_);
            gathers_.synchronize();
        }
    }
    fill(options.device_rows, host_records());
}

void embedding_table::state::grow(std::uint64_t row_count) {
    if (row_count < options.row_count)
        throw invalid_argument(fmt::format("an embedding table of {} rows cannot get {} rows: it only grows",
                                           options.row_count, row_count));
    if (options.storage)
        throw unsupported(
            "an embedding table grows only in memory of its own: make larger storage, and copy the records");
    embedding_options grown = options;
    grown.row_count = row_count;
    static_cast<void>(detail::lay_out_record(grown));
    if (row_count == options.row_count) return;
    begin_change();
    const std::uint64_t host_rows = row_count - options.device_rows;
    const auto memory = std::make_shared<pinned_buffer>(host_rows * layout.size_bytes, device);
    const std::span<const std::byte> old = host_records();
    detail::run_in_parallel((old.size() + fill_bytes - 1) / fill_bytes, [&](std::size_t piece) {
        const std::size_t begin = piece * fill_bytes;
        std::memcpy(memory->data() + begin, old.data() + begin,
                    std::min<std::size_t>(fill_bytes, old.size() - begin));
    });
    fill(options.row_count, memory->bytes().subspan(old.size()));
    exchange_rows({memory->bytes(), layout.size_bytes, dtype::of<std::byte>(), memory});
    groups_on_device_ = can_group_on_device();
    options.row_count = row_count;
}

/// Makes the numbers of the rule and its tables in device memory.
void embedding_table::state::upload_rule() {
    detail::rule_tables tables;
    tables.add(options.rule);
    constexpr std::uint64_t tables_begin = detail::rounded_up(sizeof(detail::rule_numbers), 256);
    const std::uint64_t tables_bytes = tables.elements().size() * sizeof(double);
    rule_memory_ = device_buffer(tables_begin + tables_bytes, gathers_, options.resource);
    detail::rule_numbers numbers = detail::numbers_of(options.rule);
    tables.point(numbers, 0, reinterpret_cast<const double*>(rule_memory_.data() + tables_begin));
    std::vector<std::byte> contents(tables_begin + tables_bytes);
    std::memcpy(contents.data(), &numbers, sizeof numbers);
    if (tables_bytes != 0)
        std::memcpy(contents.data() + tables_begin, tables.elements().data(), tables_bytes);
    copy_to_device_async(rule_memory_.data(), contents, gathers_);
    gathers_.synchronize();
    numbers_ = reinterpret_cast<const detail::rule_numbers*>(rule_memory_.data());
}

}  // namespace pinflow
