#include "src/load/load_pages.hpp"

#include <algorithm>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/quote.hpp"
#include "src/core/system.hpp"
#include "src/device/page_releaser.hpp"
#include "src/device/pin_limits.hpp"
#include "src/device/pin_registry.hpp"
#include "src/rows/link_profile.hpp"

namespace pinflow::detail {

load_pages::load_pages(const opened_tensors& opened, const load_plan& plan, const pinflow::device& device,
                       const load_options& options)
    : mappings_(opened.files.size()) {
    pin_options pinning;
    pinning.budget_bytes = options.pin_budget_bytes;
    pinning.limit = options.pin_limit;
    std::vector<pin_range> ranges = map_all(opened, plan);
    std::uint64_t wanted_bytes = 0;
    for (const pin_range& range : ranges)
        wanted_bytes += range.bytes.size();
    // pages of earlier loads count against the budget until they are unregistered
    const pin_registry& registry = pin_registry::process();
    const pin_budget budget =
        choose_pin_budget(pinning.budget_bytes, pinning.limit, read_memory_limits(), registry.buffer_bytes());
    if (registry.reserved_bytes() + wanted_bytes > budget.size_bytes) wait_for_released_pages();
    pages_.emplace(std::move(ranges), device, pinning);
}

load_pages::~load_pages() {
    release_in_background(std::move(*pages_));
}

std::vector<pin_range> load_pages::map_all(const opened_tensors& opened, const load_plan& plan) {
    std::vector<pin_range> ranges;
    for (const load_unit& unit : plan.copyable) {
        for (const load_piece& piece : plan.pieces_of(unit)) {
            const load_job& job = plan.jobs[piece.job];
            const stored_span span = span_of(opened, job, piece);
            auto& mapping = mappings_[span.begin.file];
            const auto& file = opened.files[span.begin.file];
            if (!mapping) mapping = std::make_shared<const mapped_file>(file, 0, file->size_bytes());
            const std::uint64_t max_gap_bytes =
                job.has_gaps ? max_registered_gap_bytes() : thresholds.min_engine_bytes;
            const auto add = [&](const stored_span& bytes, std::uint64_t) {
                add_range(ranges, mapping, bytes, max_gap_bytes);
            };
            if (job.has_gaps && runs_of(opened, job).gap_bytes() > max_gap_bytes) {
                for_each_run(opened, job, piece, add);
            } else {
                add(span, 0);
            }
        }
    }
    return ranges;
}

/// Adds bytes of a file, joined with those before if the gap between them has at most `max_gap_bytes`.
void load_pages::add_range(std::vector<pin_range>& ranges, const std::shared_ptr<const mapped_file>& mapping,
                           const stored_span& span, std::uint64_t max_gap_bytes) {
    const std::uint64_t begin = span.begin.offset_bytes;
    pin_range* const last = ranges.empty() ? nullptr : &ranges.back();
    if (last != nullptr && last->owner == mapping) {
        const auto first = static_cast<std::uint64_t>(last->bytes.data() - mapping->data());
        const std::uint64_t end = first + last->bytes.size();
        if (first <= begin && begin <= end + max_gap_bytes) {
            last->bytes = mapping->bytes().subspan(first, std::max(end, begin + span.size_bytes) - first);
            return;
        }
    }
    ranges.push_back({mapping->bytes().subspan(begin, span.size_bytes),
                      quote(mapping->file()->path(), max_shown_path), mapping});
}

bool load_pages::cover(const std::vector<copy_range>& ranges) const {
    return std::ranges::all_of(
        ranges, [&](const copy_range& range) { return pages_->covers(range.source, range.size_bytes); });
}

bool load_pages::wait_for(const std::vector<copy_range>& ranges, std::chrono::nanoseconds timeout) const {
    for (const copy_range& range : ranges) {
        if (pages_->wait_for(range.source, range.size_bytes, timeout)) continue;
        return pages_->may_cover(range.source, range.size_bytes);
    }
    return true;
}

std::string load_pages::reason() const {
    return pages_->finished() ? pages_->report().reason : "some pages cannot be registered";
}

}  // namespace pinflow::detail
