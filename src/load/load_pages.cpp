#include "src/load/load_pages.hpp"

#include <algorithm>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/quote.hpp"
#include "src/core/system.hpp"
#include "src/rows/link_profile.hpp"

namespace pinflow::detail {

namespace {

/// Pages that are registered and released together: a quarter of all within these bounds. The upper one is
/// four pieces of pin_options::piece_bytes.
constexpr std::uint64_t min_chunk_bytes = std::uint64_t{32} << 20;
constexpr std::uint64_t max_chunk_bytes = std::uint64_t{256} << 20;

}  // namespace

load_pages::load_pages(const opened_tensors& opened, const load_plan& plan, const pinflow::device& device,
                       stream_view copies, const load_options& options)
    : device_(device), copies_(copies), mappings_(opened.files.size()) {
    options_.budget_bytes = options.pin_budget_bytes;
    options_.limit = options.pin_limit;
    plan_chunks(opened, plan);
    start_chunk();
}

load_pages::~load_pages() {
    for (page_chunk& chunk : chunks_) {
        if (!chunk.releaser.joinable() && chunk.pages) release(chunk);
    }
    for (page_chunk& chunk : chunks_) {
        if (chunk.releaser.joinable()) chunk.releaser.join();
    }
}

void load_pages::plan_chunks(const opened_tensors& opened, const load_plan& plan) {
    std::uint64_t chunk_bytes =
        std::clamp(plan.copyable.size() * load_unit_bytes / 4, min_chunk_bytes, max_chunk_bytes);
    // two chunks are registered at a time
    if (options_.budget_bytes != 0) chunk_bytes = std::min(chunk_bytes, options_.budget_bytes / 3);
    for (std::size_t i = 0; i < plan.copyable.size(); ++i) {
        if (chunks_.empty() || chunks_.back().size_bytes >= chunk_bytes) chunks_.emplace_back(device_);
        page_chunk& chunk = chunks_.back();
        chunk.end_unit = i + 1;
        for (const load_piece& piece : plan.pieces_of(plan.copyable[i])) {
            const file_position place = position_of(opened, plan.jobs[piece.job]);
            auto& mapping = mappings_[place.file];
            const auto& file = opened.files[place.file];
            if (!mapping) mapping = std::make_shared<const mapped_file>(file, 0, file->size_bytes());
            add_range(chunk, mapping, place.offset_bytes + piece.begin_bytes, piece.size_bytes);
        }
    }
}

/// Adds bytes of a file to a chunk, joined with those before if there is only a small gap.
void load_pages::add_range(page_chunk& chunk, const std::shared_ptr<const mapped_file>& mapping,
                           std::uint64_t begin, std::uint64_t size_bytes) const {
    chunk.size_bytes += size_bytes;
    pin_range* const last = chunk.ranges.empty() ? nullptr : &chunk.ranges.back();
    if (last != nullptr && last->owner == mapping) {
        const auto first = static_cast<std::uint64_t>(last->bytes.data() - mapping->data());
        const std::uint64_t end = first + last->bytes.size();
        if (first <= begin && begin <= end + link_profile().min_engine_bytes) {
            last->bytes = mapping->bytes().subspan(first, std::max(end, begin + size_bytes) - first);
            return;
        }
    }
    chunk.ranges.push_back({mapping->bytes().subspan(begin, size_bytes),
                            quote(mapping->file()->path(), max_shown_path), mapping});
}

/// Begins to register the pages of the next chunk, if there is one.
void load_pages::start_chunk() {
    if (started_ == chunks_.size()) return;
    // Earlier chunks count against the budget until they are unregistered: without waiting for that, it would
    // depend on timing whether the next one fits.
    for (std::size_t i = 0; options_.budget_bytes != 0 && i < now_; ++i) {
        if (chunks_[i].releaser.joinable()) chunks_[i].releaser.join();
    }
    page_chunk& chunk = chunks_[started_++];
    chunk.pages = std::make_unique<pinned_pages>(std::move(chunk.ranges), device_, options_);
}

/// Releases the pages of a chunk after its last copy, on a thread of its own if one can be started.
void load_pages::release(page_chunk& chunk) {
    try {
        chunk.copied.record(copies_);
        chunk.releaser = system::start_thread("releases pages", [&chunk] {
            try {
                chunk.copied.synchronize();
            } catch (const error&) {
                return;  // the stream has failed: the destructor releases the pages
            }
            chunk.pages.reset();
        });
    } catch (const std::exception&) {
        return;  // the destructor releases the pages
    }
}

void load_pages::begin_unit(std::size_t unit) {
    if (ends_chunk(unit)) release(chunks_[now_++]);
    if (started_ == now_) start_chunk();
    // the next chunk begins to read pages into memory while the last pieces of this one are registered
    const page_chunk& chunk = chunks_[now_];
    if (started_ == now_ + 1 &&
        chunk.pages->registered_prefix_bytes() + 2 * options_.piece_bytes >= chunk.size_bytes)
        start_chunk();
}

bool load_pages::cover(const std::vector<copy_range>& ranges) const {
    return std::ranges::all_of(ranges, [&](const copy_range& range) {
        return chunks_[now_].pages->covers(range.source, range.size_bytes);
    });
}

bool load_pages::wait_for(const std::vector<copy_range>& ranges, std::chrono::nanoseconds timeout) const {
    const pinned_pages& pages = *chunks_[now_].pages;
    for (const copy_range& range : ranges) {
        if (pages.wait_for(range.source, range.size_bytes, timeout)) continue;
        return !pages.finished() || pages.covers(range.source, range.size_bytes);
    }
    return true;
}

}  // namespace pinflow::detail
