#include "pinflow/loader/loader.hpp"

#include <fmt/format.h>

#include <utility>

#include "loader/pipeline.hpp"
#include "pinflow/error.hpp"

namespace pinflow {

loader::loader(std::vector<std::shared_ptr<const row_source>> sources, const loader_options& options)
    : pipeline_(std::make_unique<pipeline>(std::move(sources), options)) {}
loader::loader(loader&&) noexcept = default;

loader& loader::operator=(loader&& other) noexcept {
    const loader old = std::move(*this);
    pipeline_ = std::move(other.pipeline_);
    return *this;
}

loader::~loader() {
    // a forked process lacks the threads, and waiting for them would never end, so the pipeline is leaked
    // NOLINTNEXTLINE(bugprone-unused-return-value)
    if (pipeline_ && pipeline_->pool().forked()) pipeline_.release();
}

loader::pipeline& loader::valid_pipeline() const {
    if (!pipeline_) throw invalid_argument("cannot use a moved-from loader");
    return *pipeline_;
}

std::optional<batch> loader::next(stream_view stream) {
    pipeline& work = valid_pipeline();
    if (stream.device() != device()) {
        throw invalid_argument(fmt::format("a loader on {} cannot deliver to a stream of {}", device().name(),
                                           stream.device().name()));
    }
    std::shared_ptr<detail::slot_lease> lease = work.next(detail::lease_when::delivered);
    if (!lease) return std::nullopt;
    try {
        lease->use_on(stream);
    } catch (...) {
        lease->undo();
        throw;
    }
    return batch(std::move(lease));
}

std::optional<batch> loader::next() {
    std::shared_ptr<detail::slot_lease> lease = valid_pipeline().next(detail::lease_when::complete);
    if (!lease) return std::nullopt;
    return batch(std::move(lease));
}

void loader::take_back(batch&& unused) {
    const pipeline& work = valid_pipeline();
    if (work.pool().forked())
        throw device_error("a forked process cannot give a batch back: the loader belongs to the parent");
    const std::shared_ptr<detail::slot_lease>& lease = detail::lease_of(unused);
    if (!lease || &lease->pool() != &work.pool() || lease.use_count() != 1)
        throw invalid_argument(
            "a loader takes back only a batch of its own that is held and of which there are no tensors");
    lease->undo();
    unused.release();
}

bool loader::wait_for(std::chrono::nanoseconds timeout) {
    return valid_pipeline().wait_for(timeout);
}

void loader::stop() const noexcept {
    if (pipeline_ && !pipeline_->pool().forked()) pipeline_->pool().stop();
}

std::uint64_t loader::row_count() const noexcept {
    return pipeline_ ? pipeline_->row_count() : 0;
}

std::uint64_t loader::batches_per_epoch() const noexcept {
    return pipeline_ ? pipeline_->schedule().batches_per_epoch() : 0;
}

std::uint64_t loader::batch_total() const noexcept {
    return pipeline_ ? pipeline_->schedule().batch_count() : 0;
}

std::uint64_t loader::row_total() const noexcept {
    return pipeline_ ? pipeline_->schedule().row_count() : 0;
}

const device& loader::device() const noexcept {
    static const pinflow::device host = pinflow::device::host();
    return pipeline_ ? pipeline_->device() : host;
}

loader_report loader::report() const {
    return valid_pipeline().report();
}

loader_state loader::state() const {
    return valid_pipeline().state();
}

}  // namespace pinflow
