#include "src/rows/call_errors.hpp"

#include <fmt/format.h>

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

call_errors::~call_errors() {
    for (const std::shared_ptr<call>& each : expected_) {
        try {
            each->there_.synchronize();
        } catch (const error&) {
            return;  // a failed device runs nothing any more
        }
    }
}

void call_errors::call::add(std::exception_ptr failure) noexcept {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
}

std::shared_ptr<call_errors::call> call_errors::begin(std::uint64_t waiter) {
    auto begun = std::make_shared<call>(memory_.take(sizeof(index_errors)), device_, waiter);
    *begun->errors() = {};
    return begun;
}

void call_errors::expect(std::shared_ptr<call> begun, std::string what, std::uint64_t count,
                         std::uint64_t row_count, stream_view stream) {
    begun->what_ = std::move(what);
    begun->count_ = count;
    begun->row_count_ = row_count;
    begun->there_.record(stream);
    expected_.push_back(std::move(begun));
}

void call_errors::forget(const call& begun, stream_view stream) {
    memory_.give_back(begun.memory_, stream);
}

void call_errors::check(std::uint64_t waiter) {
    for (auto at = expected_.begin(); at != expected_.end();) {
        if ((*at)->waiter_ != waiter || !(*at)->there_.done()) {
            ++at;
            continue;
        }
        const std::shared_ptr<call> ended = *at;
        at = expected_.erase(at);
        const index_errors errors = *ended->errors();
        pinned_scratch::give_back(ended->memory_);
        if (ended->failure_) std::rethrow_exception(ended->failure_);
        if (errors.outside_count > 0) {
            throw invalid_argument(outside_sentence(ended->what_, errors.outside_count, ended->count_,
                                                    ended->row_count_, errors.outside_id,
                                                    ~errors.outside_complement));
        }
        if (errors.repeated_count > 0) {
            throw invalid_argument(
                fmt::format("{}: {} of {} row numbers occurred before, which duplicate_policy::error "
                            "refuses: the first is {}, at "
                            "position {}",
                            ended->what_, errors.repeated_count, ended->count_, spelled(errors.repeated_id),
                            ~errors.repeated_complement));
        }
    }
}

}  // namespace pinflow::detail
