#include "src/rows/calls_in_flight.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/device/backend.hpp"

namespace pinflow::detail {

namespace {

/// Prints indices of 2^63 or more as negative numbers: the caller probably passed signed integers.
std::string spelled(std::uint64_t id) {
    constexpr auto max_signed = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    return id > max_signed ? fmt::format("{}", static_cast<std::int64_t>(id)) : fmt::format("{}", id);
}

/// How many calls get scratch memory. More would make exchanges large: a loop rarely has more in flight.
std::size_t calls_with_scratch(std::uint64_t scratch_bytes, unsigned max_calls) {
    constexpr std::uint64_t max_bytes = std::uint64_t{64} << 20;
    if (scratch_bytes == 0) return 0;
    return std::min<std::size_t>(std::clamp<std::uint64_t>(max_bytes / scratch_bytes, 2, 8), max_calls);
}

}  // namespace

std::string outside_sentence(const std::string& what, std::uint64_t outside_count, std::uint64_t count,
                             std::uint64_t row_count, std::uint64_t id, std::uint64_t position,
                             std::uint64_t unchecked_count) {
    std::string sentence = fmt::format(
        "{}: {} of {} indices{} {} outside the table, which has {} rows: the first is {}, at position {}",
        what, outside_count, count, unchecked_count == 0 ? "" : " in host memory",
        outside_count == 1 ? "is" : "are", row_count, spelled(id), position);
    if (unchecked_count == 0) return sentence;
    return sentence +
           fmt::format(" of the group ({} in device memory not checked)",
                       unchecked_count == 1 ? "1 index" : fmt::format("{} indices", unchecked_count));
}

// ---- pending_call ----------------------------------------------------------------------------------------

void pending_call::add(std::exception_ptr failure) noexcept {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
}

/// Returns the exception of the call; null if there is none.
std::exception_ptr pending_call::error_of(const index_errors& wrong) const {
    if (failure_) return failure_;
    if (wrong.outside_count > 0) {
        return std::make_exception_ptr(
            invalid_argument(outside_sentence(facts_.what, wrong.outside_count, facts_.count,
                                              facts_.row_count, wrong.outside_id, wrong.outside_position)));
    }
    if (wrong.repeated_count > 0) {
        return std::make_exception_ptr(invalid_argument(fmt::format(
            "{}: {} of {} indices {} repeated, which duplicate_policy::error refuses: the first is {}, at "
            "position {}",
            facts_.what, wrong.repeated_count, facts_.count, wrong.repeated_count == 1 ? "is" : "are",
            spelled(wrong.repeated_id), wrong.repeated_position)));
    }
    return nullptr;
}

// ---- the memory of calls ---------------------------------------------------------------------------------

taken_memory::~taken_memory() {
    if (memory_ != nullptr) from_->give_back(*memory_);
}

calls_in_flight::calls_in_flight(pinflow::device device, std::uint64_t max_rows, unsigned max_calls,
                                 std::uint64_t scratch_bytes, std::shared_ptr<memory_resource> resource)
    : max_rows_(max_rows), process_(::getpid()) {
    // no two calls share a cache line
    const std::uint64_t pinned_bytes = rounded_up(call_memory::size_bytes(max_rows), 64);
    const std::uint64_t errors_bytes = rounded_up(max_calls * sizeof(device_error_memory), 256);
    scratch_bytes = rounded_up(scratch_bytes, 256);
    with_scratch_ = calls_with_scratch(scratch_bytes, max_calls);
    pages_ = pinned_buffer(saturated(pinned_bytes, max_calls), device);
    const stream clearing = synchronous_stream(device);
    on_device_ = device_buffer(errors_bytes + with_scratch_ * scratch_bytes, clearing, std::move(resource));
    device.backend().fill_zero(on_device_.data(), errors_bytes, clearing.view().native_handle());
    clearing.synchronize();
    memory_.reserve(max_calls);
    std::byte* scratch = on_device_.data() + errors_bytes;
    for (unsigned i = 0; i < max_calls; ++i) {
        const std::uint64_t size_bytes = i < with_scratch_ ? scratch_bytes : 0;
        memory_.emplace_back(pages_.data() + i * pinned_bytes,
                             reinterpret_cast<device_error_memory*>(on_device_.data()) + i,
                             std::span(scratch, size_bytes), max_rows, device);
        scratch += size_bytes;
    }
}

bool calls_in_flight::can_take(void* stream, std::size_t count) const noexcept {
    std::size_t free = 0;
    std::size_t own = 0;
    for (const call_memory& each : memory_) {
        if (each.state_ == state::free) {
            ++free;
        } else if (each.stream_ == stream) {
            ++own;
        }
    }
    return own + 2 * count <= free + 1;
}

bool calls_in_flight::has_free_scratch() const noexcept {
    const std::span with_scratch(memory_.data(), with_scratch_);
    return with_scratch.empty() || std::ranges::any_of(with_scratch, [](const call_memory& each) {
               return each.state_ == state::free;
           });
}

/// The oldest call in flight on `stream` or, if there is none, on any stream. Null if no call is in flight.
call_memory* calls_in_flight::oldest_in_flight(void* stream) noexcept {
    call_memory* oldest = nullptr;
    for (call_memory& each : memory_) {
        if (each.state_ != state::in_flight) continue;
        const auto order = [&](const call_memory& of) { return std::pair(of.stream_ != stream, of.number_); };
        if (oldest == nullptr || order(each) < order(*oldest)) oldest = &each;
    }
    return oldest;
}

void calls_in_flight::await_some(std::unique_lock<std::mutex>& lock, void* stream) {
    // short, because other memory may become free first
    constexpr std::chrono::microseconds pause{200};
    const call_memory* const awaited = oldest_in_flight(stream);
    if (awaited == nullptr) {
        changed_.wait_for(lock, pause);
        return;
    }
    lock.unlock();
    awaited->last_use_.synchronize_for(pause);
    lock.lock();
}

std::vector<taken_memory> calls_in_flight::take(stream_view stream, std::size_t count) {
    std::vector<taken_memory> taken;
    taken.reserve(count);
    void* const handle = stream.native_handle();
    std::unique_lock lock(mutex_);
    if (!has_free_scratch()) end_oldest(handle);
    while (!can_take(handle, count)) {
        end_passed();
        if (!can_take(handle, count)) await_some(lock, handle);
    }
    for (call_memory& each : memory_) {
        if (taken.size() == count) break;
        if (each.state_ != state::free) continue;
        each.state_ = state::taken;
        each.stream_ = handle;
        *each.errors_.report = {};
        taken.emplace_back(*this, each);
    }
    return taken;
}

void calls_in_flight::give_back(call_memory& memory) noexcept {
    {
        const std::lock_guard lock(mutex_);
        memory.state_ = state::free;
    }
    changed_.notify_all();
}

void calls_in_flight::put_in_flight(taken_memory& memory, stream_view stream,
                                    std::shared_ptr<pending_call> call) {
    std::list<std::shared_ptr<pending_call>> entry;
    if (call) entry.push_back(std::move(call));
    memory->mark(stream);  // without the lock: it waits if the stream's queue is full
    const std::lock_guard lock(mutex_);
    call_memory& put = memory.release();
    put.number_ = ++last_number_;
    put.state_ = state::in_flight;
    put.call_ = std::move(entry);
    if (put.call_.empty()) return;
    put.call_.front()->memory_ = &put;
    put.call_.front()->number_ = put.number_;
}

// ---- errors ----------------------------------------------------------------------------------------------

/// Ends the calls that their streams have passed.
void calls_in_flight::end_passed() {
    for (call_memory& each : memory_) {
        if (each.state_ == state::in_flight && each.last_use_.done()) end(each);
    }
}

/// Ends completed calls, those of `stream` first, the oldest first, until one is not completed. Asks for few
/// events, as each takes a microsecond.
void calls_in_flight::end_oldest(void* stream) {
    for (call_memory* oldest = oldest_in_flight(stream); oldest != nullptr && oldest->last_use_.done();
         oldest = oldest_in_flight(stream))
        end(*oldest);
}

/// Keeps the error of a call that its stream has passed, and frees its memory.
void calls_in_flight::end(call_memory& memory) noexcept {
    memory.state_ = state::free;
    if (memory.call_.empty()) return;
    pending_call& call = *memory.call_.front();
    call.memory_ = nullptr;
    try {
        call.error_ = call.error_of(*memory.errors_.report);
    } catch (...) {
        call.error_ = std::current_exception();  // there is no memory for the message
    }
    if (!call.error_ || !call.facts_.is_listed) return memory.call_.clear();
    const auto later =
        std::ranges::find_if(listed_, [&](const auto& each) { return each->number_ > call.number_; });
    listed_.splice(later, memory.call_);
    if (listed_.size() > max_listed) listed_.pop_front();
}

void calls_in_flight::check() {
    const std::lock_guard lock(mutex_);
    end_passed();
    if (listed_.empty()) return;
    const std::shared_ptr<pending_call> oldest = std::move(listed_.front());
    listed_.pop_front();
    std::rethrow_exception(std::exchange(oldest->error_, nullptr));
}

void calls_in_flight::check(pending_call& call) {
    const std::lock_guard lock(mutex_);
    if (call.memory_ != nullptr && call.memory_->last_use_.done()) end(*call.memory_);
    if (!call.error_) return;
    std::erase_if(listed_, [&](const auto& each) { return each.get() == &call; });
    std::rethrow_exception(std::exchange(call.error_, nullptr));
}

void calls_in_flight::close() noexcept {
    if (::getpid() != process_) return;
    try {
        for (call_memory& each : memory_) {
            each.last_use_.synchronize();  // without the lock: handles may be asked meanwhile
            const std::lock_guard lock(mutex_);
            if (each.state_ == state::in_flight) end(each);
        }
    } catch (...) {
        return;  // a failed device runs nothing any more
    }
    // released after the lock
    pinned_buffer pages;
    device_buffer on_device;
    const std::lock_guard lock(mutex_);
    memory_.clear();
    pages = std::move(pages_);
    on_device = std::move(on_device_);
}

}  // namespace pinflow::detail
