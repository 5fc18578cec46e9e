#include "src/rows/measured_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/device/row_work.hpp"

namespace pinflow::detail {

namespace {

using clock = std::chrono::steady_clock;

/// A page or more: such rows are gathered as fast in any order, and by half of the thread blocks (measured:
/// samples/bench/RESULTS.md).
bool has_long_rows(const row_table& table) {
    constexpr std::uint64_t long_row_bytes = 4096;
    return table.row_size_bytes() >= long_row_bytes;
}

bool is_large(const row_table& table) {
    constexpr std::uint64_t large_table_bytes = std::uint64_t{8} << 30;
    return table.size_bytes() > large_table_bytes;
}

bool is_aligned(const row_table& table) {
    return detail::is_aligned(table.data(), table.row_size_bytes());
}

/// Thread blocks that move rows: few, so that rows in flight are neighbours and most multiprocessors are free
/// for others. As many for a gather, in blocks of more threads as reads are waited for, as for a scatter, so
/// that they share the link when both are under way, unless rows are long; but scatters to large tables, and
/// whatever is not aligned, take more (measured: samples/bench/RESULTS.md).
unsigned usual_blocks(row_direction direction, const row_table& table) {
    constexpr unsigned few_blocks = 8;
    const bool gather = direction == row_direction::gather;
    if (!is_aligned(table) || (!gather && is_large(table))) return busy_blocks(table);
    return gather && has_long_rows(table) ? few_blocks / 2 : few_blocks;
}

/// Of the hybrid route, where nothing is measured.
constexpr double usual_staged_share = 0.4;
/// From here on the copy engine is worth one copy a row.
constexpr std::uint64_t least_copied_row_bytes = 16 << 10;
/// The staged route is not measured with less: so small pieces are slow, and a measurement would enqueue
/// hundreds of thousands of them.
constexpr std::uint64_t least_slot_bytes = 256 << 10;
/// What is measured with at most, so that it neither takes long nor much memory.
constexpr std::uint64_t most_measured_bytes = std::uint64_t{512} << 20;
constexpr std::uint64_t most_measured_rows = std::uint64_t{1} << 20;
/// A route must be so much faster to be taken instead of one that keeps less of the machine busy.
constexpr double worth_it = 1.05;

/// Moves fresh random rows by each of some plans, in memory of its own.
class measurement {
 public:
    measurement(exchange_state& exchange, std::uint64_t count)
        : exchange_(exchange),
          row_bytes_(exchange.table().row_size_bytes()),
          count_(measured_rows(exchange.table(), count)),
          rows_(count_ * row_bytes_, exchange.own_stream()) {}

    double measured_bytes() const { return static_cast<double>(count_ * row_bytes_); }

    /// With GB a second of two gathers, one behind the other; the median of three times, after a first one.
    row_plan measured(row_plan plan) {
        return measured(std::move(plan), [&] { return random_ids(); });
    }

    /// GB a second of rows that lie one behind the other: no route is faster than that.
    double in_order(row_plan plan) {
        return measured(std::move(plan), [&] { return neighbouring_ids(); }).gbps;
    }

 private:
    template <typename Ids>
    row_plan measured(row_plan plan, const Ids& fresh_ids) {
        std::vector<double> rates;
        for (int repetition = 0; repetition < 4; ++repetition) {
            const std::array<std::vector<std::uint64_t>, 2> calls{fresh_ids(), fresh_ids()};
            exchange_.own_stream().synchronize();
            const auto start = clock::now();
            for (const std::vector<std::uint64_t>& ids : calls) {
                const exchange_state::batch batch{row_ids(std::span<const std::uint64_t>(ids)), rows_.data()};
                exchange_.enqueue_as(plan, row_direction::gather, {&batch, 1}, duplicate_policy::last,
                                     exchange_.own_stream());
            }
            exchange_.own_stream().synchronize();
            const double seconds = std::chrono::duration<double>(clock::now() - start).count();
            if (repetition > 0) rates.push_back(2 * measured_bytes() / seconds / 1e9);
        }
        std::ranges::sort(rates);
        plan.gbps = rates[1];
        return plan;
    }

    std::vector<std::uint64_t> random_ids() {
        std::vector<std::uint64_t> ids(count_);
        std::uniform_int_distribution<std::uint64_t> any(0, exchange_.table().row_count() - 1);
        std::ranges::generate(ids, [&] { return any(random_); });
        return ids;
    }

    std::vector<std::uint64_t> neighbouring_ids() {
        const std::uint64_t row_count = exchange_.table().row_count();
        const std::uint64_t last_first = row_count - std::min(row_count, count_);
        const std::uint64_t first = std::uniform_int_distribution<std::uint64_t>(0, last_first)(random_);
        std::vector<std::uint64_t> ids(count_);
        std::ranges::generate(ids, [&, i = std::uint64_t{0}]() mutable { return (first + i++) % row_count; });
        return ids;
    }

    exchange_state& exchange_;
    std::uint64_t row_bytes_;
    std::uint64_t count_;
    device_buffer rows_;
    std::mt19937_64 random_{0x5EED};
};

bool slots_are_worth_trying(const exchange_state& exchange) {
    return exchange.staging_slot_bytes() >= least_slot_bytes;
}

std::string why_slots_were_not_tried(const exchange_state& exchange) {
    if (slots_are_worth_trying(exchange)) return {};
    return fmt::format("; not through slots of {} bytes, which staging_bytes of {} leave",
                       exchange.staging_slot_bytes(), exchange.options().staging_bytes);
}

/// The fastest of the gathers. The table is only read.
row_plan measure_gather(exchange_state& exchange, const row_workload& workload) {
    measurement measurement(exchange, workload.count);
    const auto measured = [&](row_route route, bool sorted) {
        return measurement.measured(plan_of(route, sorted, exchange, row_direction::gather));
    };
    std::vector<row_plan> tried{measured(row_route::direct, false), measured(row_route::direct, true)};
    const double direct = tried.back().gbps;
    if (workload.host_ids && exchange.table().row_size_bytes() >= least_copied_row_bytes) {
        tried.push_back(measured(row_route::copy, false));
    }
    if (slots_are_worth_trying(exchange)) {
        tried.push_back(measured(row_route::staged, !workload.host_ids));
        const double staged = tried.back().gbps;
        row_plan hybrid = plan_of(row_route::hybrid, true, exchange, row_direction::gather);
        if (exchange.options().staged_share == 0) {
            // the two ways share the link: each gets the part that it can do in the same time
            hybrid.staged_share = std::clamp(staged / (direct + staged), 0.1, 0.6);
        }
        tried.push_back(measurement.measured(hybrid));
    }
    row_plan best = tried.front();
    for (const row_plan& each : tried) {
        if (each.gbps > best.gbps * worth_it) best = each;
    }
    std::string rates;
    for (const row_plan& each : tried) {
        rates += fmt::format("{}{}{} {:.1f}", rates.empty() ? "" : ", ", to_string(each.route),
                             each.sorted ? " sorted" : "", each.gbps);
    }
    best.reason = fmt::format("measured with {:.0f} MB of random rows, GB/s: {}{}",
                              measurement.measured_bytes() / 1e6, rates, why_slots_were_not_tried(exchange));
    return best;
}

/// Scatters are not measured, as that would write to the table: they are judged by gathers.
row_plan derive_scatter(exchange_state& exchange, const row_workload& workload) {
    measurement measurement(exchange, workload.count);
    const auto gather = [&](row_route route) {
        return plan_of(route, true, exchange, row_direction::gather);
    };
    const double link = measurement.in_order(gather(row_route::direct));
    const double direct = measurement.measured(gather(row_route::direct)).gbps;
    const bool tries_slots = slots_are_worth_trying(exchange);
    const double staged = tries_slots ? measurement.measured(gather(row_route::staged)).gbps : 0;
    const expected_rate judged = judged_scatter(direct, staged, link);
    row_plan plan = plan_of(judged.route, true, exchange, row_direction::scatter);
    plan.gbps = judged.gbps;
    plan.reason = fmt::format(
        "measured by gathering {:.0f} MB of random rows, GB/s: direct {:.1f}{}, rows in order {:.1f}; "
        "expected of "
        "scatters by that: {:.1f}{}",
        measurement.measured_bytes() / 1e6, direct, tries_slots ? fmt::format(", staged {:.1f}", staged) : "",
        link, judged.gbps, why_slots_were_not_tried(exchange));
    return plan;
}

row_plan measure(exchange_state& exchange, const row_workload& workload) {
    try {
        return workload.direction == row_direction::gather ? measure_gather(exchange, workload)
                                                           : derive_scatter(exchange, workload);
    } catch (const fatal_device_error&) {
        throw;
    } catch (const device_error& failure) {
        // the call itself may need far less: it must not fail for want of a measurement
        const bool sorted = usually_sorted(row_route::direct, workload.direction, exchange.table());
        row_plan plan = plan_of(row_route::direct, sorted, exchange, workload.direction);
        plan.reason = fmt::format("not measured: {}", failure.what());
        return plan;
    }
}

/// What measurements are kept by: all that a rate depends on.
struct measured_key {
    std::string device;
    row_direction direction;
    std::uint64_t row_bytes;
    int count_magnitude;
    int table_magnitude;
    bool host_ids;
    bool of_source;
    bool aligned;  ///< rows can be moved 16 bytes at a time
    int threads;
    std::uint64_t slot_bytes;
    int staging_magnitude;
    unsigned blocks;
    double staged_share;

    auto operator<=>(const measured_key&) const = default;
};

measured_key key_of(const exchange_state& exchange, const row_workload& workload) {
    const row_table& table = exchange.table();
    return {.device = exchange.device().name(),
            .direction = workload.direction,
            .row_bytes = table.row_size_bytes(),
            .count_magnitude = static_cast<int>(std::bit_width(measured_rows(table, workload.count))),
            .table_magnitude = static_cast<int>(std::bit_width(table.size_bytes())),
            .host_ids = workload.host_ids,
            .of_source = table.source() != nullptr,
            .aligned = is_aligned(table),
            .threads = exchange.thread_count(),
            .slot_bytes = exchange.staging_slot_bytes(),
            .staging_magnitude = static_cast<int>(std::bit_width(exchange.options().staging_bytes)),
            .blocks = exchange.options().blocks,
            .staged_share = exchange.options().staged_share};
}

/// What was measured. Its lock is held for moments only, as every call looks here for its plan.
class known_plans {
 public:
    std::optional<row_plan> find(const measured_key& key) {
        const std::lock_guard lock(mutex_);
        const auto found = plans_.find(key);
        return found == plans_.end() ? std::nullopt : std::optional(found->second);
    }
    void add(const measured_key& key, const row_plan& plan) {
        const std::lock_guard lock(mutex_);
        plans_.emplace(key, plan);
    }

 private:
    std::mutex mutex_;
    std::map<measured_key, row_plan> plans_;
};

}  // namespace

bool usually_sorted(row_route route, row_direction direction, const row_table& table) noexcept {
    if (direction == row_direction::scatter || route == row_route::hybrid) return true;
    return route == row_route::direct && !has_long_rows(table);
}

unsigned busy_blocks(const row_table& table) noexcept {
    return has_long_rows(table) ? 8 : is_large(table) ? 16 : 32;
}

row_plan plan_of(row_route route, bool sorted, const exchange_state& exchange, row_direction direction) {
    const row_exchange_options& options = exchange.options();
    row_plan plan;
    plan.route = route;
    plan.sorted = sorted;
    if (route == row_route::direct || route == row_route::hybrid) {
        plan.blocks = options.blocks != 0 ? options.blocks : usual_blocks(direction, exchange.table());
    }
    if (route == row_route::hybrid) {
        plan.staged_share = options.staged_share != 0 ? options.staged_share : usual_staged_share;
    }
    return plan;
}

std::uint64_t measured_rows(const row_table& table, std::uint64_t count) noexcept {
    const std::uint64_t row_bytes = std::max<std::uint64_t>(table.row_size_bytes(), 1);
    const std::uint64_t most = std::min(most_measured_bytes / row_bytes, most_measured_rows);
    return std::max<std::uint64_t>(std::min(count, most), 1);
}

expected_rate judged_scatter(double direct_gather, double staged_gather, double link) noexcept {
    // writes are not waited for, reads are. Both ways at once are left out: they gained some percents at most
    // (measured, as the factors: samples/bench/RESULTS.md)
    constexpr double direct_of_gather = 1.06;
    constexpr double staged_of_gather = 1.4;
    const double direct = std::min(direct_gather * direct_of_gather, link);
    const double staged = std::min(staged_gather * staged_of_gather, link);
    if (staged > direct * worth_it) return {row_route::staged, staged};
    return {row_route::direct, direct};
}

row_plan measured_plan(exchange_state& exchange, const row_workload& workload) {
    // never destroyed: static objects may exchange rows
    static auto& known = *new known_plans;
    static std::mutex& measuring = *new std::mutex;
    const measured_key key = key_of(exchange, workload);
    if (std::optional<row_plan> plan = known.find(key)) return *std::move(plan);
    // two that measure at the same time would each see half of the link
    const std::lock_guard lock(measuring);
    if (std::optional<row_plan> plan = known.find(key)) return *std::move(plan);
    row_plan plan = measure(exchange, workload);
    known.add(key, plan);
    return plan;
}

}  // namespace pinflow::detail
