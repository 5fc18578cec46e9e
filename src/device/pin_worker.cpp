#include "src/device/pin_worker.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <system_error>
#include <utility>

#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

#ifdef MADV_POPULATE_READ
constexpr int populate_read = MADV_POPULATE_READ;
#else
constexpr int populate_read = 22;  // Linux 5.14, newer than some C libraries
#endif

std::uint64_t page_bytes() {
    static const auto size = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    return size;
}

/// The whole pages that `bytes` lie on; they are mapped as far as `bytes` are.
std::span<const std::byte> pages_of(std::span<const std::byte> bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
    const std::uintptr_t begin = address / page_bytes() * page_bytes();
    const std::uintptr_t end = (address + bytes.size() + page_bytes() - 1) / page_bytes() * page_bytes();
    return {reinterpret_cast<const std::byte*>(begin), end - begin};
}

}  // namespace

pin_worker::machine_answers pin_worker::this_machine() {
    return {read_memory_limits(), read_own_maps()};
}

pin_worker::pin_worker(const std::vector<pin_range>& ranges, std::string reason) {
    for (const pin_range& range : ranges) {
        total_bytes_ += range.bytes.size();
    }
    finish(std::move(reason));
}

pin_worker::pin_worker(std::vector<pin_range> ranges, page_locker& locker, pin_registry& registry,
                       const pin_options& options, ask_machine ask)
    : locker_(&locker), registry_(&registry), options_(options) {
    for (pin_range& range : ranges) {
        if (range.bytes.empty()) continue;
        total_bytes_ += range.bytes.size();
        ranges_.push_back(std::make_unique<tracked_range>(std::move(range)));
        by_address_.push_back(ranges_.back().get());
    }
    std::sort(by_address_.begin(), by_address_.end(), [](const tracked_range* a, const tracked_range* b) {
        return std::less<>()(a->range.bytes.data(), b->range.bytes.data());
    });
    try {
        thread_ = std::thread([this, ask] { run(ask); });
    } catch (const std::system_error& failure) {
        finish(fmt::format("no thread could be started to register pages: {}", failure.what()));
    }
}

pin_worker::~pin_worker() {
    stop_.store(true, std::memory_order_relaxed);
    if (thread_.joinable()) thread_.join();
    if (registry_ == nullptr) return;
    registry_->release(held_);
    registry_->give_back(reserved_bytes_);
}

void pin_worker::run(ask_machine ask) noexcept {
    const auto start = std::chrono::steady_clock::now();
    std::string reason;
    try {
        reason = register_all(ask);
    } catch (const std::exception& failure) {
        reason = failure.what();
        if (reason.empty()) reason = "registering failed";
    }
    const std::chrono::nanoseconds duration = std::chrono::steady_clock::now() - start;
    const bool complete = reason.empty();
    if (complete) {
        const char* const how = read_only_bytes_ > 0 ? "registered read-only" : "registered";
        reason = fmt::format("{}, {}, {:.2f} s", how, in_binary_units(total_bytes_),
                             std::chrono::duration<double>(duration).count());
    }
    {
        const std::lock_guard lock(mutex_);
        duration_ = duration;
        complete_ = complete;
    }
    finish(std::move(reason));
}

std::string pin_worker::register_all(ask_machine ask) {
    const machine_answers machine = ask();
    std::uint64_t pages_bytes = 0;
    std::vector<page_verdict> verdicts;
    for (const auto& tracked : ranges_) {
        const std::span<const std::byte> pages = pages_of(tracked->range.bytes);
        pages_bytes += pages.size();
        verdicts.push_back(judge_pages(machine.maps, pages));
        if (!verdicts.back().refusal.empty()) {
            return fmt::format("cannot register {}: {}", tracked->range.description, verdicts.back().refusal);
        }
    }
    const pin_budget budget = choose_pin_budget(options_.budget_bytes, machine.limits);
    if (!registry_->reserve(pages_bytes, budget.size_bytes)) {
        const std::uint64_t others = registry_->reserved_bytes();
        return fmt::format(
            "{} to register {} larger than the pin budget of {}{} ({})", in_binary_units(pages_bytes),
            others == 0 ? "are" : "would make what is registered", in_binary_units(budget.size_bytes),
            others == 0 ? "" : fmt::format(", of which {} are in use", in_binary_units(others)),
            budget.source);
    }
    reserved_bytes_ = pages_bytes;
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
        if (std::string reason = register_range(*ranges_[i], verdicts[i].read_only); !reason.empty())
            return reason;
    }
    return {};
}

std::string pin_worker::register_range(tracked_range& tracked, bool read_only) {
    const std::span<const std::byte> bytes = tracked.range.bytes;
    const std::span<const std::byte> pages = pages_of(bytes);
    const std::uint64_t piece_bytes =
        std::max(options_.piece_bytes / page_bytes(), std::uint64_t{1}) * page_bytes();
    for (std::uint64_t done = 0; done < pages.size();) {
        if (stop_.load(std::memory_order_relaxed)) return "stopped before everything was registered";
        const std::span<const std::byte> piece =
            pages.subspan(done, std::min(piece_bytes, pages.size() - done));
        // cold pages are read here, outside the driver's lock, in which copies would have to wait for the
        // disk; pages that a truncated file has lost are left to the registration's own error
        if (read_only) system::advise(piece.data(), piece.size(), populate_read);
        const std::string reason = registry_->acquire(*locker_, piece, read_only, tracked.range.owner, held_);
        if (!reason.empty()) {
            return fmt::format("cannot register {} bytes, {} bytes into {}: {}", piece.size(), done,
                               tracked.range.description, reason);
        }
        if (read_only) read_only_bytes_ += piece.size();
        done += piece.size();
        const auto before = static_cast<std::uint64_t>(bytes.data() - pages.data());
        tracked.registered_bytes.store(std::min<std::uint64_t>(done - std::min(done, before), bytes.size()),
                                       std::memory_order_release);
    }
    return {};
}

void pin_worker::finish(std::string reason) {
    {
        const std::lock_guard lock(mutex_);
        reason_ = std::move(reason);
        finished_.store(true, std::memory_order_release);
    }
    ended_.notify_all();
}

bool pin_worker::covers(const std::byte* data, std::uint64_t size_bytes) const noexcept {
    const auto after = std::upper_bound(by_address_.begin(), by_address_.end(), data,
                                        [](const std::byte* address, const tracked_range* p) {
                                            return std::less<>()(address, p->range.bytes.data());
                                        });
    if (after == by_address_.begin()) return false;
    const tracked_range& candidate = **std::prev(after);
    const std::uint64_t registered = candidate.registered_bytes.load(std::memory_order_acquire);
    const auto offset = static_cast<std::uint64_t>(data - candidate.range.bytes.data());
    return offset <= registered && size_bytes <= registered - offset;
}

std::uint64_t pin_worker::registered_prefix_bytes() const noexcept {
    std::uint64_t sum = 0;
    for (const auto& tracked : ranges_) {
        const std::uint64_t registered = tracked->registered_bytes.load(std::memory_order_acquire);
        sum += registered;
        if (registered < tracked->range.bytes.size()) break;
    }
    return sum;
}

bool pin_worker::wait() const {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return finished(); });
    return complete_;
}

pin_report pin_worker::report() const {
    pin_report report;
    report.total_bytes = total_bytes_;
    for (const auto& tracked : ranges_) {
        report.registered_bytes += tracked->registered_bytes.load(std::memory_order_acquire);
    }
    const std::lock_guard lock(mutex_);
    report.finished = finished();
    report.complete = complete_;
    report.duration = duration_;
    report.reason = reason_;
    return report;
}

}  // namespace pinflow::detail
