#include "pinflow/loader/digest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <iterator>
#include <mutex>
#include <span>
#include <utility>

#include "loader/slot_lease.hpp"
#include "pinflow/error.hpp"
#include "src/device/backend.hpp"
#include "src/device/digest_host.hpp"

namespace pinflow {

/// The first error of a task that could not read its rows. Thread-safe.
class digest::lost_rows {
 public:
    void set(std::exception_ptr error) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = std::move(error);
    }
    void rethrow() const {
        const std::lock_guard lock(mutex_);
        if (error_) std::rethrow_exception(error_);
    }

 private:
    mutable std::mutex mutex_;
    std::exception_ptr error_;
};

namespace {

using source_list = std::vector<std::shared_ptr<const row_source>>;

/// Makes the data_changed error for lost pages. It names the file that changed. If no change is found, it
/// names the first source, and says that it was truncated or its storage failed.
std::exception_ptr error_of_lost_pages(const source_list& sources) {
    try {
        for (const auto& source : sources)
            source->check_unchanged();
        throw data_changed(
            fmt::format("{} could not be read through its mapping: it was truncated, or its storage failed",
                        sources.empty() ? "a batch" : sources.front()->description()));
    } catch (...) {
        return std::current_exception();
    }
}

}  // namespace

digest::digest(const pinflow::device& device)
    : stream_(device), sum_(sizeof(std::uint64_t), stream_), lost_(std::make_shared<lost_rows>()) {
    constexpr std::array<std::byte, sizeof(std::uint64_t)> zero{};
    copy_to_device_async(sum_.data(), zero, stream_);
    stream_.synchronize();  // `zero` goes out of scope
}

digest::~digest() {
    try {
        for (const added_stream& each : added_)
            each.last.synchronize();
    } catch (...) {
        return;  // a failed device runs nothing any more
    }
}

void digest::add_async(const batch& batch, stream_view stream) {
    if (stream.device() != stream_.device()) {
        throw invalid_argument(fmt::format("a digest on {} cannot be computed on a stream of {}",
                                           stream_.device().name(), stream.device().name()));
    }
    const auto& lease = detail::lease_of(batch);
    if (!lease) throw invalid_argument("a batch that has been released cannot be added to a digest");
    lost_->rethrow();
    arrays_.clear();
    for (std::size_t index = 0; index < batch.array_count(); ++index) {
        const array_view& rows = batch[index];
        arrays_.push_back({rows.data(), batch.row_count() == 0 ? 0 : rows.size_bytes() / batch.row_count()});
    }
    auto known = std::ranges::find(added_, stream.native_handle(), &added_stream::handle);
    if (known == added_.end()) {
        added_.push_back({stream.native_handle(), event(stream_.device())});
        known = std::prev(added_.end());
    }
    const bool is_view =
        stream_.device().kind() == device_kind::host && !lease->pool().viewed_sources().empty();
    if (is_view) {
        add_views_async(batch, stream);
    } else {
        stream.device().backend().add_digest(arrays_, batch.row_count(),
                                             reinterpret_cast<std::uint64_t*>(sum_.data()),
                                             stream.native_handle());
    }
    try {
        known->last.record(stream);
    } catch (...) {
        stream.synchronize();  // without the event, nothing else waits for this use of sum_
        throw;
    }
}

/// Adds a batch of views. The sum is in host memory: only the host device delivers views.
void digest::add_views_async(const batch& batch, stream_view stream) {
    const auto viewed = detail::lease_of(batch)->pool().viewed_sources();
    auto* const sum = reinterpret_cast<std::uint64_t*>(sum_.data());
    stream.host_function_async([arrays = arrays_, row_count = batch.row_count(), sum, lost = lost_,
                                sources = source_list(viewed.begin(), viewed.end())] {
        if (const auto added = detail::digest_of_rows(arrays, row_count)) {
            std::atomic_ref(*sum).fetch_add(*added, std::memory_order_relaxed);
        } else {
            lost->set(error_of_lost_pages(sources));
        }
    });
}

std::uint64_t digest::value() {
    for (const added_stream& each : added_)
        stream_.wait(each.last);
    std::uint64_t sum = 0;
    copy_to_host_async(std::as_writable_bytes(std::span(&sum, 1)), sum_.data(), stream_);
    stream_.synchronize();
    lost_->rethrow();
    return sum;
}

}  // namespace pinflow
