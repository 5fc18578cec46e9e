#include "pinflow/pin.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/extent_stride.hpp"
#include "src/device/backend.hpp"
#include "src/device/pin_pages.hpp"
#include "src/device/pin_worker.hpp"

namespace pinflow {

namespace {

void check(const pin_options& options) {
    if (options.piece_deadline <= std::chrono::nanoseconds::zero()) {
        throw invalid_argument(fmt::format("piece_deadline of pin_options must be above 0 ns, not {} ns",
                                           options.piece_deadline.count()));
    }
}

std::unique_ptr<detail::pin_worker> start(const device& device, std::vector<pin_range> ranges,
                                          const pin_options& options) {
    check(options);
    if (detail::page_locker* const locker = device.backend().locker(); locker != nullptr) {
        return std::make_unique<detail::pin_worker>(std::move(ranges), *locker,
                                                    detail::pin_registry::process(), options);
    }
    return std::make_unique<detail::pin_worker>(
        ranges, "the host device reads memory in place, so nothing is registered");
}

/// Whether two ranges overlap, or the second follows the first with no page between them.
bool are_joined(std::span<const std::byte> first, std::span<const std::byte> second) {
    const bool overlap =
        first.data() < second.data() + second.size() && second.data() < first.data() + first.size();
    return overlap || detail::touches(first, second);
}

const detail::pin_worker& used(const std::unique_ptr<detail::pin_worker>& worker) {
    if (!worker) throw invalid_argument("cannot use moved-from pinned_pages");
    return *worker;
}

}  // namespace

std::vector<pin_range> pin_ranges(const std::shared_ptr<const row_source>& source) {
    if (!source) throw invalid_argument("cannot pin the pages of a null pointer to a source");
    std::vector<pin_range> ranges;
    const std::string description = source->description();
    bool last_of_file = false;
    for (const row_extent& extent : source->extents()) {
        if (extent.data == nullptr || extent.row_count == 0) continue;
        const std::span bytes(extent.data, detail::span_bytes(extent, source->row_size_bytes()));
        // pages of a file are registered differently from other memory, so they are not joined
        const bool of_file = extent.file != nullptr;
        if (!ranges.empty() && of_file == last_of_file && are_joined(ranges.back().bytes, bytes)) {
            std::span<const std::byte>& joined = ranges.back().bytes;
            joined = {std::min(joined.data(), bytes.data()),
                      std::max(joined.data() + joined.size(), bytes.data() + bytes.size())};
        } else {
            ranges.push_back({bytes, description, source});
        }
        last_of_file = of_file;
    }
    return ranges;
}

pinned_pages::pinned_pages(std::vector<pin_range> ranges, pinflow::device device, const pin_options& options)
    : worker_(start(device, std::move(ranges), options)) {}

pinned_pages::pinned_pages(pinned_pages&&) noexcept = default;

pinned_pages& pinned_pages::operator=(pinned_pages&&) noexcept = default;

pinned_pages::~pinned_pages() = default;

bool pinned_pages::covers(const std::byte* data, std::uint64_t size_bytes) const noexcept {
    return worker_ && worker_->covers(data, size_bytes);
}

bool pinned_pages::may_cover(const std::byte* data, std::uint64_t size_bytes) const noexcept {
    return worker_ && worker_->may_cover(data, size_bytes);
}

pin_run pinned_pages::run_at(const std::byte* data, std::uint64_t size_bytes) const noexcept {
    return worker_ ? worker_->run_at(data, size_bytes) : pin_run{false, size_bytes};
}

std::uint64_t pinned_pages::registered_prefix_bytes() const noexcept {
    return worker_ ? worker_->registered_prefix_bytes() : 0;
}

void pinned_pages::set_reader_position(const std::byte* data) noexcept {
    if (worker_) worker_->set_reader_position(data);
}

bool pinned_pages::finished() const noexcept {
    return !worker_ || worker_->finished();
}

bool pinned_pages::all_registered() const noexcept {
    return worker_ && worker_->all_registered();
}

bool pinned_pages::wait() const {
    return used(worker_).wait();
}

bool pinned_pages::wait_for(const std::byte* data, std::uint64_t size_bytes,
                            std::chrono::nanoseconds timeout) const {
    return used(worker_).wait_for(data, size_bytes, timeout);
}

void pinned_pages::require() const {
    if (!wait()) throw unsupported(fmt::format("cannot pin in place: {}", report().reason));
}

pin_report pinned_pages::report() const {
    return used(worker_).report();
}

}  // namespace pinflow
