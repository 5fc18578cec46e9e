#include "src/rows/planner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <tuple>
#include <vector>

namespace pinflow::detail {

namespace {

using clock = std::chrono::steady_clock;

/// Thread blocks that move rows in no order.
constexpr unsigned unsorted_blocks = 32;

/// And in the order of addresses: few, so that rows in flight are neighbours, the fewer the longer rows are;
/// and twice as many for a gather, whose reads are waited for, as for a scatter, so that they share the link
/// evenly when both are under way (measured: samples/bench/RESULTS.md).
unsigned sorted_blocks(row_direction direction, const row_table& table) {
    constexpr std::uint64_t small_table_bytes = std::uint64_t{8} << 30;
    constexpr std::uint64_t long_row_bytes = 4096;
    const bool few = table.size_bytes() > small_table_bytes;
    const unsigned scatter_blocks = table.row_size_bytes() >= long_row_bytes ? 8 : few ? 16 : 32;
    return direction == row_direction::scatter ? scatter_blocks : 2 * scatter_blocks;
}

/// From here on the copy engine is worth one copy a row.
constexpr std::uint64_t least_copied_row_bytes = 16 << 10;
/// What is measured with at most.
constexpr std::uint64_t most_measured_bytes = std::uint64_t{512} << 20;
/// A route must be so much faster to be taken instead of one that keeps less of the machine busy.
constexpr double worth_it = 1.05;

row_plan plan_of(row_route route, bool sorted, const exchange_state& exchange, row_direction direction) {
    row_plan plan;
    plan.route = route;
    plan.sorted = sorted;
    if (route == row_route::direct || route == row_route::hybrid) {
        plan.blocks = sorted ? sorted_blocks(direction, exchange.table()) : unsorted_blocks;
    }
    return plan;
}

/// Moves fresh random rows by each of some plans, in memory of its own.
class measurement {
 public:
    measurement(exchange_state& exchange, const row_workload& workload)
        : exchange_(exchange),
          direction_(workload.direction),
          row_bytes_(exchange.table().row_size_bytes()),
          count_(std::clamp<std::uint64_t>(most_measured_bytes / row_bytes_, 1, workload.count)),
          rows_(count_ * row_bytes_, exchange.own_stream()) {}

    double measured_bytes() const { return static_cast<double>(count_ * row_bytes_); }

    /// GB a second of two calls, one behind the other; the median of three times, after a first one.
    double rate(const row_plan& plan) {
        std::vector<double> rates;
        for (int repetition = 0; repetition < 4; ++repetition) {
            const std::array<std::vector<std::uint64_t>, 2> calls{fresh_ids(), fresh_ids()};
            exchange_.own_stream().synchronize();
            const auto start = clock::now();
            for (const std::vector<std::uint64_t>& ids : calls) {
                const exchange_state::batch batch{row_ids(std::span<const std::uint64_t>(ids)), rows_.data()};
                exchange_.enqueue_as(plan, direction_, {&batch, 1}, duplicate_policy::last,
                                     exchange_.own_stream());
            }
            exchange_.own_stream().synchronize();
            const double seconds = std::chrono::duration<double>(clock::now() - start).count();
            if (repetition > 0) rates.push_back(2 * measured_bytes() / seconds / 1e9);
        }
        std::ranges::sort(rates);
        return rates[1];
    }

 private:
    std::vector<std::uint64_t> fresh_ids() {
        std::vector<std::uint64_t> ids(count_);
        std::uniform_int_distribution<std::uint64_t> any(0, exchange_.table().row_count() - 1);
        std::ranges::generate(ids, [&] { return any(random_); });
        return ids;
    }

    exchange_state& exchange_;
    row_direction direction_;
    std::uint64_t row_bytes_;
    std::uint64_t count_;
    device_buffer rows_;
    std::mt19937_64 random_{0x5EED};
};

row_plan measured(row_plan plan, measurement& measurement) {
    plan.gbps = measurement.rate(plan);
    return plan;
}

/// The fastest of the gathers. The table is only read.
row_plan measure_gather(exchange_state& exchange, const row_workload& workload) {
    measurement measurement(exchange, workload);
    std::vector<row_plan> tried;
    if (exchange.reached()) {
        tried.push_back(
            measured(plan_of(row_route::direct, false, exchange, row_direction::gather), measurement));
        tried.push_back(
            measured(plan_of(row_route::direct, true, exchange, row_direction::gather), measurement));
        if (workload.host_ids && exchange.table().row_size_bytes() >= least_copied_row_bytes) {
            tried.push_back(
                measured(plan_of(row_route::copy, false, exchange, row_direction::gather), measurement));
        }
    }
    tried.push_back(measured(plan_of(row_route::staged, !workload.host_ids, exchange, row_direction::gather),
                             measurement));
    if (exchange.reached()) {
        // the two ways share the link: each gets the part that it can do in the same time
        row_plan hybrid = plan_of(row_route::hybrid, true, exchange, row_direction::gather);
        const double direct = tried[1].gbps;
        const double staged = tried.back().gbps;
        hybrid.staged_share = std::clamp(staged / (direct + staged), 0.1, 0.6);
        tried.push_back(measured(hybrid, measurement));
    }
    row_plan best = tried.front();
    for (const row_plan& each : tried) {
        if (each.gbps > best.gbps * worth_it) best = each;
    }
    std::string others;
    for (const row_plan& each : tried) {
        others += fmt::format("{}{}{} {:.1f}", others.empty() ? "" : ", ", to_string(each.route),
                              each.sorted ? " sorted" : "", each.gbps);
    }
    best.reason = fmt::format("measured with {:.0f} MB of random rows, GB/s: {}",
                              measurement.measured_bytes() / 1e6, others);
    return best;
}

/// Scatters are not measured, as that would write to the table: kernels write as fast as they read, within
/// some percents (samples/bench/RESULTS.md), and the CPU places rows faster than it gathers them.
row_plan derive_scatter(exchange_state& exchange, const row_workload& workload) {
    row_workload reading = workload;
    reading.direction = row_direction::gather;
    measurement measurement(exchange, reading);
    const row_plan direct =
        measured(plan_of(row_route::direct, true, exchange, row_direction::gather), measurement);
    const row_plan staged =
        measured(plan_of(row_route::staged, true, exchange, row_direction::gather), measurement);
    const row_plan& faster = staged.gbps > direct.gbps * worth_it ? staged : direct;
    row_plan best = plan_of(faster.route, true, exchange, row_direction::scatter);
    best.gbps = faster.gbps;
    best.reason =
        fmt::format("measured by gathering {:.0f} MB of random rows, GB/s: direct {:.1f}, staged {:.1f}",
                    measurement.measured_bytes() / 1e6, direct.gbps, staged.gbps);
    return best;
}

/// What measurements are kept by: sizes by their magnitude.
using measured_key = std::tuple<std::string, row_direction, std::uint64_t, int, int, bool, bool, int>;

row_plan forced(exchange_state& exchange, const row_workload& workload) {
    const row_route route = exchange.options().route;
    const bool gather = workload.direction == row_direction::gather;
    row_plan plan = plan_of(route, !gather || route == row_route::hybrid || route == row_route::direct,
                            exchange, workload.direction);
    plan.reason = "asked for";
    if (route == row_route::hybrid) plan.staged_share = 0.4;
    return plan;
}

}  // namespace

row_plan plan_rows(exchange_state& exchange, const row_workload& workload) {
    const row_route route = exchange.options().route;
    const bool gather = workload.direction == row_direction::gather;
    if (route != row_route::automatic) {
        return forced(exchange, workload);
    }
    if (!exchange.reached()) {
        row_plan plan = plan_of(row_route::staged, !gather, exchange, workload.direction);
        plan.reason = exchange.why_not_reached();
        return plan;
    }
    if (exchange.device().kind() == device_kind::host) {
        if (exchange.reads_file()) {
            row_plan plan = plan_of(row_route::staged, !gather, exchange, workload.direction);
            plan.reason = "rows of a file are read, as touching those of one that was truncated is a fault";
            return plan;
        }
        row_plan plan = plan_of(row_route::direct, !gather, exchange, workload.direction);
        plan.reason = "the host device copies rows from where they lie to where they go";
        return plan;
    }
    const std::uint64_t table_bytes = exchange.table().size_bytes();
    if (exchange.table().row_size_bytes() == 0 || table_bytes == 0)
        return plan_of(row_route::direct, !gather, exchange, workload.direction);
    // never destroyed: static objects may exchange rows
    static std::mutex& mutex = *new std::mutex;
    static auto& known = *new std::map<measured_key, row_plan>;
    const measured_key key{exchange.device().name(),
                           workload.direction,
                           exchange.table().row_size_bytes(),
                           std::bit_width(workload.count),
                           std::bit_width(table_bytes),
                           workload.host_ids,
                           exchange.table().source() != nullptr,
                           exchange.thread_count()};
    {
        const std::lock_guard lock(mutex);
        if (const auto found = known.find(key); found != known.end()) return found->second;
    }
    const row_plan plan = gather ? measure_gather(exchange, workload) : derive_scatter(exchange, workload);
    const std::lock_guard lock(mutex);
    return known.emplace(key, plan).first->second;
}

unsigned batches_worth_taking(exchange_state& exchange, const row_workload& batch) {
    constexpr unsigned most = 64;
    constexpr double nearly = 0.97;
    const std::uint64_t batch_bytes = batch.count * exchange.table().row_size_bytes();
    std::vector<double> rates;  // of 1, 2, 4, ... batches
    for (unsigned batches = 1; batches <= most; batches *= 2) {
        if (batches > 1 && batch_bytes > most_measured_bytes / batches) break;
        row_workload together = batch;
        together.count *= batches;
        rates.push_back(plan_rows(exchange, together).gbps);
    }
    const double best = std::ranges::max(rates);
    const auto enough =
        std::ranges::find_if(rates, [=](double rate) { return rate >= nearly * best; }) - rates.begin();
    return 1U << enough;
}

}  // namespace pinflow::detail
