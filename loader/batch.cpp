#include "pinflow/loader/batch.hpp"

#include <fmt/format.h>

#include <utility>

#include "loader/slot_lease.hpp"
#include "pinflow/error.hpp"

namespace pinflow {

batch::batch(std::shared_ptr<detail::slot_lease> lease) noexcept : lease_(std::move(lease)) {}
batch::batch(batch&&) noexcept = default;

batch& batch::operator=(batch&& other) noexcept {
    if (this != &other) {
        release();
        lease_ = std::move(other.lease_);
    }
    return *this;
}

batch::~batch() {
    release();
}

std::uint64_t batch::row_count() const noexcept {
    return lease_ ? lease_->leased_slot().row_ids.size() : 0;
}

std::size_t batch::array_count() const noexcept {
    return lease_ ? lease_->leased_slot().arrays.size() : 0;
}

const array_view& batch::operator[](std::size_t index) const {
    if (index >= array_count()) {
        throw invalid_argument(
            lease_ ? fmt::format("there is no array {}: the batch has {}", index, array_count())
                   : fmt::format("there is no array {}: the batch has been released", index));
    }
    return lease_->leased_slot().arrays[index];
}

void batch::check_on_host(std::size_t index) const {
    if (!lease_ || lease_->pool().device().kind() == device_kind::host) return;
    throw invalid_argument(
        fmt::format("the CPU cannot read array {} of a batch, which is on {}: give its address to a kernel, "
                    "or copy it to the host",
                    index, lease_->pool().device().name()));
}

std::span<const std::uint64_t> batch::row_ids() const noexcept {
    return lease_ ? std::span<const std::uint64_t>(lease_->leased_slot().row_ids)
                  : std::span<const std::uint64_t>();
}

std::uint64_t batch::epoch() const noexcept {
    return lease_ ? lease_->leased_slot().scheduled.epoch : 0;
}

std::uint64_t batch::index() const noexcept {
    return lease_ ? lease_->leased_slot().scheduled.index : 0;
}

bool batch::last_of_epoch() const noexcept {
    return lease_ && lease_->leased_slot().scheduled.last_of_epoch;
}

loader_state batch::state() const {
    if (!lease_) throw invalid_argument("there is no state: the batch has been released");
    return lease_->state();
}

void batch::used_on(stream_view stream, std::shared_ptr<const void> owner) {
    if (!lease_) throw invalid_argument("a batch that has been released cannot be used on a stream");
    lease_->use_on(stream, std::move(owner));
}

void batch::release() noexcept {
    if (!lease_) return;
    detail::leave_to_tensors(lease_);
    lease_.reset();
}

const std::shared_ptr<detail::slot_lease>& detail::lease_of(const batch& batch) noexcept {
    return batch.lease_;
}

}  // namespace pinflow
