#include "src/rows/call_errors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "pinflow/error.hpp"

namespace pinflow::detail {

namespace {

/// Prints large numbers as signed: most wrong row numbers were negative signed integers.
std::string spelled(std::uint64_t id) {
    constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    return id > most ? fmt::format("{}", static_cast<std::int64_t>(id)) : fmt::format("{}", id);
}

}  // namespace

std::string outside_sentence(const std::string& what, std::uint64_t outside_count, std::uint64_t count,
                             std::uint64_t row_count, std::uint64_t id, std::uint64_t position) {
    return fmt::format(
        "{}: {} of {} row numbers {} outside the table, which has {} rows: the first is {}, at "
        "position {}",
        what, outside_count, count, outside_count == 1 ? "is" : "are", row_count, spelled(id), position);
}

void pending_call::add(std::exception_ptr failure) noexcept {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
}

std::exception_ptr pending_call::error_of_indices() const {
    const index_errors wrong = *errors();
    if (wrong.outside_count > 0) {
        return std::make_exception_ptr(invalid_argument(outside_sentence(
            what_, wrong.outside_count, count_, row_count_, wrong.outside_id, ~wrong.outside_complement)));
    }
    if (wrong.repeated_count > 0) {
        return std::make_exception_ptr(invalid_argument(fmt::format(
            "{}: {} of {} row numbers occurred before, which duplicate_policy::error refuses: the "
            "first is {}, at position {}",
            what_, wrong.repeated_count, count_, spelled(wrong.repeated_id), ~wrong.repeated_complement)));
    }
    return nullptr;
}

std::shared_ptr<pending_call> call_errors::begin() {
    {
        const std::lock_guard lock(mutex_);
        forget_ended();
    }
    pinned_scratch::block& memory = memory_->take(sizeof(index_errors));
    try {
        auto begun = std::make_shared<pending_call>(memory);
        *begun->errors() = {};
        return begun;
    } catch (...) {
        memory.give_back();
        throw;
    }
}

void call_errors::expect(const std::shared_ptr<pending_call>& begun, std::string what, std::uint64_t count,
                         std::uint64_t row_count, stream_view stream, bool is_listed) {
    begun->what_ = std::move(what);
    begun->count_ = count;
    begun->row_count_ = row_count;
    begun->is_listed_ = is_listed;
    begun->memory_.mark(stream);  // without the lock: it waits if the stream's queue is full
    const std::lock_guard lock(mutex_);
    calls_.push_back(begun);
    begun->state_ = pending_call::state::expected;
}

void call_errors::forget(const pending_call& begun, stream_view stream) {
    begun.memory_.give_back(stream);
}

void call_errors::forget(const pending_call& begun) noexcept {
    begun.memory_.give_back();
}

/// Whether the streams have passed the call; ends it if so.
bool call_errors::has_ended(pending_call& call) {
    if (call.state_ == pending_call::state::expected && call.memory_.passed()) end(call);
    return call.state_ == pending_call::state::ended;
}

/// Keeps the error of a call that its streams have passed, and returns its memory.
void call_errors::end(pending_call& call) noexcept {
    try {
        call.error_ = call.failure_ ? call.failure_ : call.error_of_indices();
    } catch (...) {
        call.error_ = std::current_exception();  // there is no memory for the message
    }
    call.memory_.give_back();
    call.state_ = pending_call::state::ended;
}

void call_errors::forget_ended() {
    constexpr std::size_t scan_distance = 64;  // not at each call: asking for an event calls the driver
    if (calls_.size() < next_scan_) return;
    std::size_t listed_count = 0;
    for (auto at = calls_.begin(); at != calls_.end();) {
        const bool is_over = has_ended(**at) && !((*at)->error_ && (*at)->is_listed_);
        if (!is_over && (*at)->error_) ++listed_count;
        at = is_over ? calls_.erase(at) : std::next(at);
    }
    for (auto at = calls_.begin(); listed_count > max_listed;) {
        const bool is_oldest = (*at)->error_ != nullptr;
        listed_count -= is_oldest ? 1 : 0;
        at = is_oldest ? calls_.erase(at) : std::next(at);
    }
    next_scan_ = calls_.size() + scan_distance;
}

void call_errors::check() {
    const std::lock_guard lock(mutex_);
    for (auto at = calls_.begin(); at != calls_.end();) {
        const std::shared_ptr<pending_call> call = *at;
        if (!call->is_listed_ || !has_ended(*call)) {
            ++at;
            continue;
        }
        at = calls_.erase(at);
        if (const std::exception_ptr error = std::exchange(call->error_, nullptr))
            std::rethrow_exception(error);
    }
}

void call_errors::check(pending_call& call) {
    const std::lock_guard lock(mutex_);
    if (!has_ended(call)) return;
    const std::exception_ptr error = std::exchange(call.error_, nullptr);
    std::erase_if(calls_, [&](const std::shared_ptr<pending_call>& each) { return each.get() == &call; });
    if (error) std::rethrow_exception(error);
}

void call_errors::close() noexcept {
    while (true) {
        std::shared_ptr<pending_call> next;
        {
            const std::lock_guard lock(mutex_);
            const auto found = std::ranges::find_if(calls_, [](const std::shared_ptr<pending_call>& each) {
                return each->state_ == pending_call::state::expected;
            });
            if (found == calls_.end()) break;
            next = *found;
        }
        try {
            next->memory_.wait_until_passed();
        } catch (...) {
            return;  // a failed device runs nothing any more
        }
        const std::lock_guard lock(mutex_);
        if (next->state_ == pending_call::state::expected) end(*next);
    }
    memory_.reset();
}

}  // namespace pinflow::detail
