#include <memory>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "src/rows/exchange_state.hpp"

namespace pinflow {

namespace {

detail::exchange_state& used(const std::unique_ptr<detail::exchange_state>& state) {
    if (!state) throw invalid_argument("cannot use a moved-from row_exchange");
    return *state;
}

}  // namespace

exchange_call::exchange_call(std::shared_ptr<detail::calls_in_flight> calls,
                             std::vector<std::shared_ptr<detail::pending_call>> pending)
    : calls_(std::move(calls)), pending_(std::move(pending)) {}

void exchange_call::check() const {
    for (const std::shared_ptr<detail::pending_call>& call : pending_)
        calls_->check(*call);
}

row_exchange::row_exchange(row_table table, pinflow::device device, const row_exchange_options& options)
    : state_(std::make_unique<detail::exchange_state>(std::move(table), device, options)) {}

row_exchange::row_exchange(row_exchange&&) noexcept = default;

row_exchange& row_exchange::operator=(row_exchange&&) noexcept = default;

row_exchange::~row_exchange() = default;

const row_table& row_exchange::table() const noexcept {
    static const row_table empty({}, 1);
    return state_ ? state_->table() : empty;
}

const device& row_exchange::device() const noexcept {
    static const pinflow::device host = pinflow::device::host();
    return state_ ? state_->device() : host;
}

bool row_exchange::is_in_place() const noexcept {
    return state_ && state_->is_in_place();
}

void row_exchange::check() {
    used(state_).check();
}

// ---- gather ----------------------------------------------------------------------------------------------

void row_exchange::gather(row_ids ids, std::byte* destination) {
    used(state_).run(detail::row_direction::gather, {ids, destination}, duplicate_policy::last);
}

exchange_call row_exchange::gather_async(row_ids ids, std::byte* destination, stream_view stream) {
    const row_gather batch{ids, destination};
    return gather_group_async({&batch, 1}, stream);
}

exchange_call row_exchange::gather_group_async(std::span<const row_gather> batches, stream_view stream) {
    std::vector<detail::row_batch> all;
    all.reserve(batches.size());
    for (const row_gather& batch : batches)
        all.push_back({batch.ids, batch.destination});
    detail::exchange_state& state = used(state_);
    return {state.calls(),
            state.enqueue({detail::row_direction::gather, all, duplicate_policy::last, stream})};
}

// ---- scatter ---------------------------------------------------------------------------------------------

void row_exchange::scatter(row_ids ids, const std::byte* source, duplicate_policy policy) {
    used(state_).run(detail::row_direction::scatter, {ids, const_cast<std::byte*>(source)}, policy);
}

exchange_call row_exchange::scatter_async(row_ids ids, const std::byte* source, duplicate_policy policy,
                                          stream_view stream) {
    const row_scatter batch{ids, source};
    return scatter_group_async({&batch, 1}, policy, stream);
}

exchange_call row_exchange::scatter_group_async(std::span<const row_scatter> batches, duplicate_policy policy,
                                                stream_view stream) {
    std::vector<detail::row_batch> all;
    all.reserve(batches.size());
    for (const row_scatter& batch : batches)
        all.push_back({batch.ids, const_cast<std::byte*>(batch.source)});
    detail::exchange_state& state = used(state_);
    return {state.calls(), state.enqueue({detail::row_direction::scatter, all, policy, stream})};
}

// ---- plans -----------------------------------------------------------------------------------------------

void row_exchange::tune(std::uint64_t batch_rows, unsigned batches) {
    used(state_).tune(batch_rows, batches);
}

row_plan row_exchange::plan_gather(std::uint64_t batch_rows, unsigned batches) const {
    return used(state_).plan(detail::row_direction::gather, batch_rows, batches);
}

row_plan row_exchange::plan_scatter(std::uint64_t batch_rows, unsigned batches) const {
    return used(state_).plan(detail::row_direction::scatter, batch_rows, batches);
}

}  // namespace pinflow
