#include "src/device/pin_registry.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>
#include <utility>

namespace pinflow::detail {

namespace {

/// The first address, and the address after the last byte.
std::pair<std::uintptr_t, std::uintptr_t> address_range_of(std::span<const std::byte> bytes) noexcept {
    const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
    return {begin, begin + bytes.size()};
}

std::span<const std::byte> bytes_between(std::uintptr_t begin, std::uintptr_t end) {
    return {reinterpret_cast<const std::byte*>(begin), end - begin};
}

/// Refuses pages that another holder has kept busy for too long. The cause is likely to delay other
/// registrations too, so the refusal also applies to other pages (same_for_others).
pin_refusal refuse_busy(std::chrono::nanoseconds waited) {
    return {
        fmt::format("another holder has been registering or unregistering some of these pages for {:.1f} s",
                    std::chrono::duration<double>(waited).count()),
        true};
}

/// Converts an exception of a locker.
/// @throws the exception again if it is not a std::exception.
pin_refusal refusal_of(const std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const std::exception& failure) {
        return {failure.what()};
    }
}

}  // namespace

pin_registry& pin_registry::process() {
    // never destroyed: pages may be held by static objects
    static pin_registry& registry = *new pin_registry;
    return registry;
}

std::optional<pin_refusal> pin_registry::acquire(page_locker& locker, std::span<const std::byte> pages,
                                                 bool read_only, const std::shared_ptr<const void>& owner,
                                                 holds& held, std::chrono::nanoseconds busy_deadline) {
    holds taken;
    std::unique_lock lock(mutex_);
    std::optional<pin_refusal> refusal;
    try {
        refusal = acquire_locked(lock, locker, pages, read_only, owner, taken, busy_deadline);
        if (!refusal) held.insert(held.end(), taken.begin(), taken.end());
    } catch (...) {
        release_locked(lock, taken);
        throw;
    }
    if (refusal) release_locked(lock, taken);
    return refusal;
}

std::optional<pin_refusal> pin_registry::acquire_locked(
    std::unique_lock<std::mutex>& lock, page_locker& locker, std::span<const std::byte> pages, bool read_only,
    const std::shared_ptr<const void>& owner, holds& taken, std::chrono::nanoseconds busy_deadline) {
    const auto [begin, end] = address_range_of(pages);
    for (std::uintptr_t at = begin; at < end;) {
        taken.reserve(taken.size() + 1);  // so that push_back below cannot throw
        auto next = intervals_.upper_bound(at);
        if (next != intervals_.begin() && std::prev(next)->second.end > at) {
            auto& [start, there] = *std::prev(next);
            if (there.busy) {
                const auto waited = pin_clock::now() - there.busy_since;
                if (waited >= busy_deadline) return refuse_busy(waited);
                changed_.wait_until(lock, later(there.busy_since, busy_deadline));
                continue;  // the interval may have been removed
            }
            ++there.users;
            taken.push_back(start);
            at = there.end;
            continue;
        }
        const std::uintptr_t gap_end = next == intervals_.end() ? end : std::min(end, next->first);
        std::list<std::shared_ptr<const void>> to_keep{owner};  // made here, since nothing may throw below
        intervals_.emplace(at, interval{gap_end, 1, true, pin_clock::now(), &locker, owner});
        lock.unlock();
        std::optional<pin_refusal> refusal;
        std::exception_ptr error;
        try {
            refusal = locker.lock(bytes_between(at, gap_end), read_only);
        } catch (...) {
            error = std::current_exception();
        }
        lock.lock();
        const auto registered = intervals_.find(at);
        if (refusal || error) {
            // keeps the pages mapped: a later mapping at these addresses could not be registered
            if (refusal && refusal->may_be_locked) kept_.splice(kept_.end(), to_keep);
            intervals_.erase(registered);
            changed_.notify_all();
            return error ? refusal_of(error) : std::move(refusal);
        }
        registered->second.busy = false;
        count_.store(intervals_.size(), std::memory_order_release);
        changed_.notify_all();
        taken.push_back(at);
        at = gap_end;
    }
    return {};
}

void pin_registry::release(std::span<const std::uintptr_t> held) noexcept {
    std::unique_lock lock(mutex_);
    release_locked(lock, held);
}

void pin_registry::release_locked(std::unique_lock<std::mutex>& lock,
                                  std::span<const std::uintptr_t> held) noexcept {
    for (const std::uintptr_t start : held) {
        const auto found = intervals_.find(start);
        if (found == intervals_.end() || --found->second.users > 0) continue;
        found->second.busy = true;
        found->second.busy_since = pin_clock::now();
        const std::uintptr_t end = found->second.end;
        page_locker* const locker = found->second.locker;
        lock.unlock();
        const bool unlocked = locker->unlock(bytes_between(start, end));
        lock.lock();
        const auto there = intervals_.find(start);
        there->second.busy = false;
        changed_.notify_all();
        // if they may still be locked, the interval stays, and the pages stay mapped
        if (!unlocked) continue;
        // released last and without the lock: the owner may unmap the pages, and runs foreign code
        std::shared_ptr<const void> owner = std::move(there->second.owner);
        intervals_.erase(there);
        count_.store(intervals_.size(), std::memory_order_release);
        lock.unlock();
        owner.reset();
        lock.lock();
    }
}

bool pin_registry::reserve(std::span<const std::byte> pages, std::uint64_t budget_bytes) {
    const std::lock_guard lock(mutex_);
    return reserved_.add(pages, budget_bytes);
}

void pin_registry::give_back(std::span<const std::byte> pages) noexcept {
    const std::lock_guard lock(mutex_);
    reserved_.remove(pages);
}

std::uint64_t pin_registry::reserved_bytes() const {
    const std::lock_guard lock(mutex_);
    return reserved_.size_bytes();
}

bool pin_registry::knows(std::span<const std::byte> bytes) const {
    const auto [begin, end] = address_range_of(bytes);
    const std::lock_guard lock(mutex_);
    const auto after = intervals_.lower_bound(end);
    return after != intervals_.begin() && std::prev(after)->second.end > begin;
}

std::size_t pin_registry::size() const {
    const std::lock_guard lock(mutex_);
    return intervals_.size();
}

/// The end of the interval that contains `address`; otherwise the beginning of the next one.
std::uintptr_t pin_registry::edge_after(std::uintptr_t address) const {
    const auto next = intervals_.upper_bound(address);
    if (next != intervals_.begin() && std::prev(next)->second.end > address)
        return std::prev(next)->second.end;
    return next == intervals_.end() ? std::numeric_limits<std::uintptr_t>::max() : next->first;
}

void pin_registry::cut(std::span<const copy_range> ranges, std::vector<copy_range>& pieces) const {
    pieces.reserve(pieces.size() + ranges.size());
    if (count_.load(std::memory_order_acquire) == 0) {
        std::ranges::copy_if(ranges, std::back_inserter(pieces),
                             [](const copy_range& range) { return range.size_bytes != 0; });
        return;
    }
    const std::lock_guard lock(mutex_);
    for (copy_range rest : ranges) {
        if (rest.size_bytes == 0) continue;
        for (;;) {
            const auto begin = reinterpret_cast<std::uintptr_t>(rest.source);
            const std::uint64_t left = edge_after(begin) - begin;
            if (rest.size_bytes <= left) break;
            pieces.push_back({rest.destination, rest.source, left});
            rest.destination += left;
            rest.source += left;
            rest.size_bytes -= left;
        }
        pieces.push_back(rest);
    }
}

}  // namespace pinflow::detail
