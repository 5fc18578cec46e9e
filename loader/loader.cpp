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
    if (stream.device() != device()) {  // before a batch is taken, which would be lost
        throw invalid_argument(fmt::format("a loader on {} cannot deliver to a stream of {}", device().name(),
                                           stream.device().name()));
    }
    auto lease = pipeline_->next();
    if (!lease) return std::nullopt;
    lease->use_on(stream);
    return batch(std::move(lease));
}

std::optional<batch> loader::next() {
    auto lease = pipeline_->next();
    if (!lease) return std::nullopt;
    const auto before = std::chrono::steady_clock::now();
    lease->held().ready.synchronize();
    pipeline_->pool().add_link_wait(std::chrono::steady_clock::now() - before);
    return batch(std::move(lease));
}

std::uint64_t loader::row_count() const noexcept {
    return pipeline_->row_count();
}

std::uint64_t loader::batches_per_epoch() const noexcept {
    return pipeline_->batches_per_epoch();
}

const device& loader::device() const noexcept {
    return pipeline_->device();
}

loader_report loader::report() const {
    return pipeline_->report();
}

}  // namespace pinflow
