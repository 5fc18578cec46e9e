#include "pinflow/train/embedding_table.hpp"

#include <fmt/format.h>
#include <sys/types.h>
#include <unistd.h>

#include <mutex>
#include <utility>

#include "pinflow/error.hpp"
#include "src/train/table_layout.hpp"
#include "src/train/table_state.hpp"

namespace pinflow {

namespace {

/// Locks a table's call_mutex.
/// @throws device_error in a forked process: a thread that does not exist there may have locked it.
std::unique_lock<std::mutex> locked(::pid_t process, std::mutex& call_mutex) {
    if (::getpid() != process)
        throw device_error("cannot use an embedding table in a forked process: it belongs to the parent");
    return std::unique_lock(call_mutex);
}

}  // namespace

// ---- leases ----------------------------------------------------------------------------------------------

embedding_lease::embedding_lease(std::unique_ptr<state> held) : state_(std::move(held)) {}
embedding_lease::embedding_lease(embedding_lease&&) noexcept = default;
embedding_lease& embedding_lease::operator=(embedding_lease&&) noexcept = default;
embedding_lease::~embedding_lease() = default;

bool embedding_lease::is_valid() const noexcept {
    return state_ && state_->step != nullptr;
}

const embedding_lease::state& embedding_lease::valid() const {
    if (!is_valid())
        throw invalid_argument(
            "cannot use a lease of an embedding table that was committed, written back or moved");
    return *state_;
}

std::uint64_t embedding_lease::row_count() const {
    return valid().table->count_rows(*valid().step);
}
std::byte* embedding_lease::weights() const {
    return valid().step->records.data();
}
std::uint64_t embedding_lease::stride_bytes() const {
    return valid().table->layout.size_bytes;
}
const std::uint64_t* embedding_lease::device_row_count() const {
    return &valid().step->device_numbers().row_count;
}
const std::uint64_t* embedding_lease::device_ids() const {
    return valid().step->device_groups().ids;
}
const std::int64_t* embedding_lease::positions() const {
    return valid().step->device_groups().groups;
}
std::uint64_t embedding_lease::position_count() const {
    return valid().step->position_count;
}
std::span<const std::uint64_t> embedding_lease::ids() const {
    if (valid().step->requested_on_device != nullptr)
        throw unsupported(
            "the host does not know the ids of this lease, which were in device memory: see device_ids()");
    auto& table = *valid().table;
    detail::table_step& step = *valid().step;
    if (!step.is_grouped_on_device) return step.ids();
    const std::uint64_t count = table.count_rows(step);
    {
        const auto lock = locked(table.process, table.call_mutex);
        table.copy_ids_to_host(step);
    }
    step.listed.synchronize();
    return {step.host_groups().ids, count};
}

// ---- the table -------------------------------------------------------------------------------------------

std::uint64_t embedding_table::record_size_bytes(const embedding_options& options) {
    return detail::lay_out_record(options).size_bytes;
}

embedding_table::embedding_table(embedding_options options, const pinflow::device& device)
    : state_(std::make_shared<state>(std::move(options), device)) {}
embedding_table::embedding_table(embedding_table&&) noexcept = default;
embedding_table& embedding_table::operator=(embedding_table&&) noexcept = default;
embedding_table::~embedding_table() = default;

embedding_table::state& embedding_table::valid() const {
    if (!state_) throw invalid_argument("cannot use a moved-from embedding table");
    return *state_;
}

const embedding_options& embedding_table::options() const {
    return valid().options;
}
const pinflow::device& embedding_table::device() const {
    return valid().device;
}

void embedding_table::prefetch(row_ids ids) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.prefetch(ids);
}

void embedding_table::cancel_prefetches() {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.cancel_prefetches();
}

embedding_lease embedding_table::fetch(row_ids ids, stream_view stream) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.check_stream(stream);
    detail::table_step& step = table.fetch(ids, stream);
    return embedding_lease(std::make_unique<embedding_lease::state>(state_, step, stream));
}

void embedding_table::commit(embedding_lease&& lease, const std::byte* gradients, const pinflow::dtype& type,
                             stream_view stream) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    detail::table_step& step = *lease.valid().step;
    if (lease.state_->table != state_)
        throw invalid_argument("cannot commit a lease of another embedding table");
    table.check_stream(stream);
    table.check_gradients(step, gradients, type);
    const embedding_lease ended = std::move(lease);
    table.commit(step, gradients, type, stream);
    ended.state_->step = nullptr;
}

void embedding_table::write_back(embedding_lease&& lease, stream_view stream) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    detail::table_step& step = *lease.valid().step;
    if (lease.state_->table != state_)
        throw invalid_argument("cannot write back a lease of another embedding table");
    table.check_stream(stream);
    const embedding_lease ended = std::move(lease);
    table.write_back(step, stream);
    ended.state_->step = nullptr;
}

void embedding_table::set_rate(double rate, stream_view stream) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.check_stream(stream);
    table.set_rate(rate, stream);
}

void embedding_table::read_weights(row_ids ids, std::span<std::byte> destination) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.read_weights(ids, destination);
}

void embedding_table::write_weights(row_ids ids, std::span<const std::byte> weights) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.write_weights(ids, weights);
}

void embedding_table::grow(std::uint64_t row_count) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.grow(row_count);
}

void embedding_table::export_weights(const std::filesystem::path& path) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.export_weights(path);
}

void embedding_table::import_weights(const std::filesystem::path& path) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.import_weights(path);
}

void embedding_table::save(const std::filesystem::path& path) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.save(path);
}

void embedding_table::load(const std::filesystem::path& path) {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.load(path);
}

void embedding_table::synchronize() {
    state& table = valid();
    const auto lock = locked(table.process, table.call_mutex);
    table.synchronize();
}

}  // namespace pinflow
