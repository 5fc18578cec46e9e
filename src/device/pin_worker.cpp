#include "src/device/pin_worker.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <future>
#include <system_error>
#include <utility>

#include "src/core/system.hpp"
#include "src/device/pin_pages.hpp"

namespace pinflow::detail {

namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int populate_read = MADV_POPULATE_READ;
constexpr int populate_write = MADV_POPULATE_WRITE;
#else
constexpr int populate_read = 22;  // Linux 5.14, newer than some C libraries
constexpr int populate_write = 23;
#endif

/// Brings pages into the page table, outside the driver's lock, in which others would have to wait for it.
/// Cold ones of a file are read from the disk here; new ones of memory are zeroed, by all cores. Those of
/// files and of shared memory are only read: to write to them would change the file. Pages that a truncated
/// file has lost are left to the registration's own error.
void bring_in(std::span<const std::byte> pages, bool read_only, bool shared) {
    if (read_only) {
        system::advise(pages.data(), pages.size(), populate_read);
        return;
    }
    constexpr std::size_t bytes_of_task = std::size_t{4} << 20;
    const int how = shared ? populate_read : populate_write;
    tbb::parallel_for(std::size_t{0}, (pages.size() + bytes_of_task - 1) / bytes_of_task, [=](std::size_t i) {
        const auto part = pages.subspan(i * bytes_of_task);
        system::advise(part.data(), std::min(bytes_of_task, part.size()), how);
    });
}

/// The same on another thread, while others are registered.
std::future<void> bring_in_meanwhile(std::span<const std::byte> pages, bool read_only, bool shared) {
    try {
        return std::async(std::launch::async, [=] { bring_in(pages, read_only, shared); });
    } catch (const std::system_error&) {
        return {};  // no thread: the registration brings them in itself
    }
}

/// The odd ones from the front, then the even ones from the back.
template <typename Element>
std::vector<Element> every_second_first(const std::vector<Element>& all) {
    std::vector<Element> reordered;
    reordered.reserve(all.size());
    for (std::size_t i = 1; i < all.size(); i += 2)
        reordered.push_back(all[i]);
    for (std::size_t i = (all.size() + 1) / 2; i-- > 0;)
        reordered.push_back(all[2 * i]);
    return reordered;
}

}  // namespace

pin_worker::tracked_range::tracked_range(pin_range what, std::uint64_t size_of_piece)
    : range(std::move(what)),
      pages(pages_of(range.bytes)),
      piece_bytes(size_of_piece),
      registered((pages.size() + piece_bytes - 1) / piece_bytes) {}

std::uint64_t pin_worker::tracked_range::bytes_before(std::uint64_t index) const noexcept {
    const auto lead = static_cast<std::uint64_t>(range.bytes.data() - pages.data());
    const std::uint64_t end = index * piece_bytes;
    return std::min<std::uint64_t>(end - std::min(end, lead), range.bytes.size());
}

std::uint64_t pin_worker::tracked_range::registered_bytes() const noexcept {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < registered.size(); ++i) {
        if (registered[i].load(std::memory_order_acquire)) sum += bytes_before(i + 1) - bytes_before(i);
    }
    return sum;
}

std::span<const std::byte> pin_worker::piece::pages() const noexcept {
    const std::span<const std::byte> all = tracked->pages;
    return all.subspan(offset_bytes(),
                       std::min<std::uint64_t>(tracked->piece_bytes, all.size() - offset_bytes()));
}

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
    const std::uint64_t piece_bytes =
        std::max(options_.piece_bytes / page_bytes(), std::uint64_t{1}) * page_bytes();
    for (pin_range& range : ranges) {
        if (range.bytes.empty()) continue;
        total_bytes_ += range.bytes.size();
        ranges_.push_back(std::make_unique<tracked_range>(std::move(range), piece_bytes));
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
    for (const std::span<const std::byte> pages : reserved_)
        registry_->give_back(pages);
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
    const process_mappings mappings(machine.maps);
    std::uint64_t pages_bytes = 0;
    std::vector<std::span<const std::byte>> all_pages;
    std::vector<piece> pieces;
    for (const auto& tracked : ranges_) {
        pages_bytes += tracked->pages.size();
        all_pages.push_back(tracked->pages);
        const page_verdict verdict = mappings.judge(tracked->pages);
        if (!verdict.refusal.empty()) {
            return fmt::format("cannot register {}: {}", tracked->range.description, verdict.refusal);
        }
        for (std::uint64_t index = 0; index < tracked->registered.size(); ++index)
            pieces.push_back({tracked.get(), index, verdict.read_only, verdict.shared});
    }
    const pin_budget budget = choose_pin_budget(options_.budget_bytes, options_.limit, machine.limits);
    for (const std::span<const std::byte> pages : all_pages) {
        if (registry_->reserve(pages, budget.size_bytes)) {
            reserved_.push_back(pages);
            continue;
        }
        for (const std::span<const std::byte> each : reserved_)
            registry_->give_back(each);
        reserved_.clear();
        const std::uint64_t others = registry_->reserved_bytes();
        return fmt::format(
            "{} to register are more than {}the pin budget of {}{} ({})", in_binary_units(pages_bytes),
            others == 0 ? "" : "is left of ", in_binary_units(budget.size_bytes),
            others == 0 ? "" : fmt::format(", of which {} are in use", in_binary_units(others)),
            budget.source);
    }
    return register_pieces(options_.alongside_reader ? every_second_first(pieces) : pieces);
}

std::string pin_worker::register_pieces(const std::vector<piece>& pieces) {
    std::future<void> populated;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        const piece& next = pieces[i];
        if (i == 0) bring_in(next.pages(), next.read_only, next.shared);
        if (populated.valid()) populated.get();
        if (stop_.load(std::memory_order_relaxed)) return "stopped before everything was registered";
        if (i + 1 < pieces.size())
            populated =
                bring_in_meanwhile(pieces[i + 1].pages(), pieces[i + 1].read_only, pieces[i + 1].shared);
        const auto refusal =
            registry_->acquire(*locker_, next.pages(), next.read_only, next.tracked->range.owner, held_);
        if (refusal) {
            return fmt::format("cannot register {} bytes, {} bytes into {}: {}", next.pages().size(),
                               next.offset_bytes(), next.tracked->range.description, refusal->reason);
        }
        if (next.read_only) read_only_bytes_ += next.pages().size();
        next.tracked->registered[next.index].store(true, std::memory_order_release);
        if (options_.alongside_reader) locker_->give_way();
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
    const pin_stretch stretch = stretch_at(data, size_bytes);
    return stretch.registered && stretch.size_bytes == size_bytes;
}

pin_stretch pin_worker::stretch_at(const std::byte* data, std::uint64_t size_bytes) const noexcept {
    const auto after = std::upper_bound(by_address_.begin(), by_address_.end(), data,
                                        [](const std::byte* address, const tracked_range* p) {
                                            return std::less<>()(address, p->range.bytes.data());
                                        });
    if (after == by_address_.begin()) return {false, size_bytes};
    const tracked_range& candidate = **std::prev(after);
    const auto offset = static_cast<std::uint64_t>(data - candidate.range.bytes.data());
    if (offset >= candidate.range.bytes.size()) return {false, size_bytes};
    const std::uint64_t within = std::min<std::uint64_t>(size_bytes, candidate.range.bytes.size() - offset);
    const auto begin = static_cast<std::uint64_t>(data - candidate.pages.data());
    const auto registered_at = [&](std::uint64_t index) {
        return candidate.registered[index].load(std::memory_order_acquire);
    };
    std::uint64_t index = begin / candidate.piece_bytes;
    const bool registered = registered_at(index);
    while (++index * candidate.piece_bytes < begin + within) {
        if (registered_at(index) != registered) return {registered, index * candidate.piece_bytes - begin};
    }
    return {registered, within};
}

std::uint64_t pin_worker::registered_prefix_bytes() const noexcept {
    std::uint64_t sum = 0;
    for (const auto& tracked : ranges_) {
        std::uint64_t pieces = 0;
        while (pieces < tracked->registered.size() &&
               tracked->registered[pieces].load(std::memory_order_acquire))
            ++pieces;
        sum += tracked->bytes_before(pieces);
        if (pieces < tracked->registered.size()) break;
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
        report.registered_bytes += tracked->registered_bytes();
    }
    const std::lock_guard lock(mutex_);
    report.finished = finished();
    report.complete = complete_;
    report.duration = duration_;
    report.reason = reason_;
    return report;
}

}  // namespace pinflow::detail
