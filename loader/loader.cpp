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
    // a forked process has none of the threads: waiting for them would never end, so all is left as it is
    // NOLINTNEXTLINE(bugprone-unused-return-value)
    if (pipeline_ && pipeline_->pool().forked()) pipeline_.release();
}

std::optional<batch> loader::next(stream_view stream) {
    if (stream.device() != device()) {
        throw invalid_argument(fmt::format("a loader on {} cannot deliver to a stream of {}", device().name(),
                                           stream.device().name()));
    }
    std::unique_ptr<detail::slot_lease> lease = pipeline_->next(false);
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
    std::unique_ptr<detail::slot_lease> lease = pipeline_->next(true);
    if (!lease) return std::nullopt;
    return batch(std::move(lease));
}

std::uint64_t loader::row_count() const noexcept {
    return pipeline_->row_count();
}

std::uint64_t loader::batches_per_epoch() const noexcept {
    return pipeline_->schedule().batches_per_epoch();
}

std::uint64_t loader::batch_total() const noexcept {
    return pipeline_->schedule().batch_count();
}

std::uint64_t loader::row_total() const noexcept {
    return pipeline_->schedule().row_count();
}

const device& loader::device() const noexcept {
    return pipeline_->device();
}

loader_report loader::report() const {
    return pipeline_->report();
}

loader_state loader::state() const {
    return pipeline_->state();
}

}  // namespace pinflow
