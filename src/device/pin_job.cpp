#include "src/device/pin_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <set>
#include <utility>

#include "src/device/pin_pages.hpp"

namespace pinflow::detail {

namespace {

/// The maximum number of pieces populated ahead of the piece being registered. Populating is faster than
/// registering (40 to 50 GB/s against 30), so a few are enough.
constexpr std::size_t max_pieces_ahead = 3;
/// After this many refusals the rest is not tried: all remaining pages of a truncated file would be refused.
constexpr std::uint64_t max_refusals = 16;

std::uint64_t piece_size(const pin_options& options) {
    std::uint64_t size_bytes = options.piece_bytes;
    // small pieces, so that at most a sixteenth of a budget stays unused, unless the budget is tiny
    constexpr std::uint64_t min_bytes = std::uint64_t{1} << 20;
    if (options.budget_bytes != 0 && options.allow_partial)
        size_bytes = std::min(size_bytes, std::max(options.budget_bytes / 16, min_bytes));
    return std::max(size_bytes / page_bytes(), std::uint64_t{1}) * page_bytes();
}

double seconds(std::chrono::nanoseconds duration) {
    return std::chrono::duration<double>(duration).count();
}

}  // namespace

// ---- what went wrong -------------------------------------------------------------------------------------

void pin_job::shortfall::add(std::string failure) {
    if (count++ == 0) reason = std::move(failure);
}

std::string pin_job::shortfall::text() const {
    if (count < 2) return reason;
    return fmt::format("{} (and {} more failure{}{})", reason, count - 1, count == 2 ? "" : "s",
                       ends_early ? ", after which the rest was not tried" : "");
}

// ---- beginning and end -----------------------------------------------------------------------------------

pin_job::pin_job(std::vector<pin_range> ranges, page_locker& locker, pin_registry& registry,
                 const pin_options& options, ask_machine ask)
    : tracker_(std::move(ranges), piece_size(options)),
      locker_(&locker),
      registry_(&registry),
      options_(options),
      ask_(ask) {}

pin_job::pin_job(std::vector<pin_range> ranges, std::string reason)
    : tracker_(std::move(ranges), piece_size({})) {
    refuse(std::move(reason));
}

pin_job::~pin_job() {
    // pages are held here only if the thread hung and returned after the owner had gone
    if (holds_pages()) release();
}

void pin_job::refuse(std::string reason) {
    const std::lock_guard lock(mutex_);
    reason_ = std::move(reason);
    failed_ = true;
    finished_.store(true, std::memory_order_release);
}

void pin_job::run() noexcept {
    try {
        register_all();
    } catch (const std::exception& failure) {
        shortfall_.add(failure.what());
    }
    if (populator_) {
        begin_call("populating", current_.piece);
        populator_.reset();
        end_call();
    }
    finish();
}

void pin_job::finish() {
    const std::chrono::nanoseconds duration = pin_clock::now() - start_;
    const bool failed = shortfall_.count > 0;
    std::string incomplete_reason = shortfall_.text();
    if (!failed && leaves_out_)
        incomplete_reason = "the reader had passed the other pages, or was close to them";
    std::string reason = summary(duration, incomplete_reason);
    {
        const std::lock_guard lock(mutex_);
        reason_ = std::move(reason);
        duration_ = duration;
        failed_ = failed;
        complete_.store(!failed && !leaves_out_, std::memory_order_release);
        finished_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
}

void pin_job::release() noexcept {
    for (const std::uintptr_t& held : held_) {
        {
            const std::lock_guard lock(mutex_);
            release_watch_.begin(later(pin_clock::now(), options_.piece_deadline));
        }
        changed_.notify_all();
        registry_->release({&held, 1});
        release_watch_.end();
    }
    held_.clear();
    for (const std::span<const std::byte> pages : reserved_)
        registry_->give_back(pages);
    reserved_.clear();
    {
        const std::lock_guard lock(mutex_);
        released_ = true;
    }
    changed_.notify_all();
}

// ---- registering -----------------------------------------------------------------------------------------

void pin_job::register_all() {
    const machine_answers machine = ask_();
    for (const pin_piece& piece : tracker_.pieces())
        pieces_.push_back({piece});
    pin_order order(pieces_.size(), options_.registers_rest,
                    tracker_.piece_at(options_.begin_at).value_or(0));
    judge(order, process_mappings(machine.maps));
    reserve(order, choose_pin_budget(options_.budget_bytes, options_.limit, machine.limits,
                                     registry_->buffer_bytes()));
    register_pieces(order);
}

/// Leaves out the pieces that must not be registered.
void pin_job::judge(pin_order& order, const process_mappings& mappings) {
    std::set<const tracked_range*> refused;
    const auto is_refused = [&](std::size_t index) {
        judged_piece& judged = pieces_[index];
        page_verdict verdict = mappings.judge(judged.piece.pages());
        if (verdict.refusal.empty() && mappings.may_share_last_page(judged.piece.tracked->range.bytes)) {
            // this applies to all pieces of the array: a copy of the array would end in the page that was
            // left out
            verdict.refusal =
                "other memory of the process may begin in its last page, and CUDA would refuse copies of "
                "that "
                "memory; end the array at a page boundary, or use a pinned_buffer";
        }
        judged.read_only = verdict.read_only;
        judged.shared = verdict.shared;
        if (verdict.refusal.empty()) return false;
        const tracked_range* const range = judged.piece.tracked;
        if (refused.insert(range).second)
            shortfall_.add(fmt::format("cannot register {}: {}", range->range.description, verdict.refusal));
        judged.piece.set_state(piece_state::left_out);
        return true;
    };
    order.leave_out(is_refused);
    if (shortfall_.count > 0 && !options_.allow_partial) order.clear();
}

/// Leaves out the pieces that do not fit the budget.
void pin_job::reserve(pin_order& order, const pin_budget& budget) {
    std::uint64_t own_bytes = 0;
    bool all_fit = true;
    reserved_.reserve(pieces_.size());
    const auto does_not_fit = [&](std::size_t index) {
        const pin_piece& piece = pieces_[index].piece;
        const std::span<const std::byte> pages = piece.pages();
        if ((!all_fit && !options_.allow_partial) || !registry_->reserve(pages, budget.size_bytes)) {
            all_fit = false;
            piece.set_state(piece_state::left_out);
            return true;
        }
        reserved_.push_back(pages);
        own_bytes += pages.size();
        return false;
    };
    order.leave_out(does_not_fit);
    if (all_fit) return;
    const std::uint64_t reserved_bytes = registry_->reserved_bytes();
    const std::uint64_t others_bytes = reserved_bytes - std::min(reserved_bytes, own_bytes);
    shortfall_.add(fmt::format(
        "the pin budget of {} {}{} ({})", in_binary_units(budget.size_bytes),
        !options_.allow_partial                  ? "is too small for all pages"
        : reserved_.empty() && others_bytes == 0 ? "is too small for the first piece"
                                                 : "is used up",
        others_bytes == 0
            ? ""
            : fmt::format(": other objects of this process hold {} of it", in_binary_units(others_bytes)),
        budget.bound));
    if (options_.allow_partial) return;
    order.clear();
    for (const std::span<const std::byte> pages : reserved_)
        registry_->give_back(pages);
    reserved_.clear();
}

void pin_job::register_pieces(pin_order& order) {
    if (order.empty()) return;
    populator_.emplace(stop_);
    std::deque<pin_order::step> upcoming;
    for (;;) {
        while (upcoming.size() <= max_pieces_ahead) {
            const std::optional<pin_order::step> next = order.take(tracker_.reader());
            if (!next) break;
            upcoming.push_back(*next);
            const judged_piece& soon = pieces_[next->index];
            populator_->add({soon.piece.pages(), soon.read_only, soon.shared});
        }
        if (upcoming.empty()) {
            leaves_out_ = !order.empty();
            return;
        }
        const pin_order::step step = upcoming.front();
        upcoming.pop_front();
        const judged_piece& wanted = pieces_[step.index];
        begin_call("populating", wanted.piece);
        populator_->wait_for_next();
        if (!end_call()) return;
        if (stop_.load(std::memory_order_relaxed))
            return shortfall_.add("stopped before everything was registered");
        if (step.is_ahead && order.is_passed(step.index, tracker_.reader())) {
            order.put_back(step.index);
            continue;
        }
        if (!register_piece(wanted)) return;
        // pieces that would be refused need not be populated
        if (is_refused_kind_[wanted.read_only ? 1 : 0]) {
            order.leave_out([&](std::size_t index) {
                if (pieces_[index].read_only != wanted.read_only) return false;
                pieces_[index].piece.set_state(piece_state::left_out);
                return true;
            });
        }
    }
}

bool pin_job::register_piece(const judged_piece& wanted) {
    const pin_piece& piece = wanted.piece;
    bool& is_refused_kind = is_refused_kind_[wanted.read_only ? 1 : 0];
    if (is_refused_kind) {
        piece.set_state(piece_state::left_out);
        return true;
    }
    begin_call("registering", piece);
    const std::optional<pin_refusal> refusal =
        registry_->acquire(*locker_, piece.pages(), wanted.read_only, piece.tracked->range.owner, held_,
                           options_.piece_deadline);
    if (!end_call()) return false;
    if (refusal) {
        piece.set_state(piece_state::left_out);
        shortfall_.add(fmt::format("cannot register {} bytes at offset {} of the mapping of {}: {}",
                                   piece.pages().size(), piece.offset_bytes(),
                                   piece.tracked->range.description, refusal->reason));
        is_refused_kind = refusal->same_for_others;
        shortfall_.ends_early = ++refusal_count_ == max_refusals;
        return options_.allow_partial && !shortfall_.ends_early;
    }
    if (wanted.read_only) read_only_.store(true, std::memory_order_relaxed);
    piece.set_state(piece_state::registered);
    // a reader's copies use the same driver
    if (tracker_.reader()) locker_->yield_driver();
    return true;
}

// ---- calls that may not return ---------------------------------------------------------------------------

void pin_job::begin_call(const char* verb, const pin_piece& piece) {
    {
        const std::lock_guard lock(mutex_);
        current_ = {verb, piece, pin_clock::now()};
        watch_.begin(later(current_.began, options_.piece_deadline));
    }
    changed_.notify_all();  // the previous piece is done, and the deadline is new
}

bool pin_job::end_call() {
    const bool in_time = watch_.end();
    if (!in_time) shortfall_.add(describe_call("returned only after"));
    return in_time;
}

/// Called by the thread, or with the lock held.
std::string pin_job::describe_call(const char* outcome) const {
    return fmt::format("{} {} bytes at offset {} of the mapping of {} {} {:.1f} s", current_.verb,
                       current_.piece.pages().size(), current_.piece.offset_bytes(),
                       current_.piece.tracked->range.description, outcome,
                       seconds(pin_clock::now() - current_.began));
}

template <typename Condition>
void pin_job::wait_until(std::unique_lock<std::mutex>& lock, const call_watch& watch,
                         pin_clock::time_point limit, Condition condition) const {
    while (!condition() && pin_clock::now() < limit) {
        const pin_clock::time_point next = std::min(limit, watch.due());
        if (next == pin_clock::time_point::max()) {
            changed_.wait(lock);
        } else {
            changed_.wait_until(lock, next);
        }
    }
}

bool pin_job::wait_for_run() {
    std::unique_lock lock(mutex_);
    wait_until(lock, watch_, pin_clock::time_point::max(), [&] { return finished(); });
    return finished_.load(std::memory_order_acquire);
}

bool pin_job::wait_for_release() {
    std::unique_lock lock(mutex_);
    wait_until(lock, release_watch_, pin_clock::time_point::max(),
               [&] { return released_ || release_watch_.has_given_up(); });
    return released_;
}

// ---- answers ---------------------------------------------------------------------------------------------

bool pin_job::wait() const {
    std::unique_lock lock(mutex_);
    wait_until(lock, watch_, pin_clock::time_point::max(), [&] { return finished(); });
    return all_registered();
}

bool pin_job::wait_for(const std::byte* data, std::uint64_t size_bytes,
                       std::chrono::nanoseconds timeout) const {
    const pin_clock::time_point limit = later(pin_clock::now(), timeout);
    std::unique_lock lock(mutex_);
    wait_until(lock, watch_, limit, [&] {
        return tracker_.covers(data, size_bytes) || !tracker_.may_cover(data, size_bytes) || finished();
    });
    return tracker_.covers(data, size_bytes);
}

std::string pin_job::summary(std::chrono::nanoseconds duration, const std::string& incomplete_reason) const {
    const char* const how =
        read_only_.load(std::memory_order_relaxed) ? "registered read-only" : "registered";
    const std::uint64_t total_bytes = tracker_.total_bytes();
    if (incomplete_reason.empty())
        return fmt::format("{}, {}, {:.2f} s", how, in_binary_units(total_bytes), seconds(duration));
    const std::uint64_t registered_bytes = tracker_.registered_bytes();
    if (registered_bytes == 0)
        return fmt::format("registered nothing of {}: {}", in_binary_units(total_bytes), incomplete_reason);
    return fmt::format("{}, {} of {} ({} %), {:.2f} s: {}", how, in_binary_units(registered_bytes),
                       in_binary_units(total_bytes), registered_bytes * 100 / total_bytes, seconds(duration),
                       incomplete_reason);
}

pin_report pin_job::report() const {
    pin_report report;
    const std::lock_guard lock(mutex_);
    report.finished = finished();
    report.complete = all_registered();
    report.total_bytes = tracker_.total_bytes();
    report.registered_bytes = tracker_.registered_bytes();
    if (finished_.load(std::memory_order_acquire)) {
        report.failed = failed_;
        report.duration = duration_;
        report.reason = reason_;
    } else if (report.finished) {  // the thread hangs
        report.failed = true;
        report.duration = later(current_.began, options_.piece_deadline) - start_;
        report.reason = summary(report.duration, describe_call("has not returned for"));
    }
    return report;
}

}  // namespace pinflow::detail
