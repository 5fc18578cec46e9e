#include "src/rows/exchange_plan.hpp"

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
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/device/row_work.hpp"

namespace pinflow::detail {

namespace {

using clock = std::chrono::steady_clock;

/// The most that is measured with, to limit time and memory.
constexpr std::uint64_t max_measured_bytes = std::uint64_t{512} << 20;
constexpr std::uint64_t max_measured_rows = std::uint64_t{1} << 20;

/// Measures plans by gathering new random rows into its own memory.
class measurement {
 public:
    measurement(exchange_state& exchange, std::uint64_t count)
        : exchange_(exchange),
          row_bytes_(exchange.table().row_size_bytes()),
          count_(measured_rows(exchange.table(), count)),
          rows_(count_ * row_bytes_, exchange.own_stream()) {}

    double measured_bytes() const { return static_cast<double>(count_ * row_bytes_); }

    /// The rate of two consecutive gathers in GB/s: the median of three runs after a warm-up run.
    double gbps_of(const transfer_plan& plan) {
        return gbps_of(plan, [&] { return random_ids(); });
    }

    /// The rate for contiguous rows in GB/s, an upper limit for every route.
    double gbps_in_order(const transfer_plan& plan) {
        return gbps_of(plan, [&] { return neighbouring_ids(); });
    }

 private:
    template <typename Ids>
    double gbps_of(const transfer_plan& plan, const Ids& fresh_ids) {
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
        return rates[1];
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

std::string staging_not_tried_reason(const call_facts& call) {
    if (call.is_file_backed) return "; only the direct route is measured for rows of files";
    if (tries_staging(call)) return {};
    return fmt::format("; staging was not tried: staging_bytes leaves buffers of only {} bytes",
                       call.staging_buffer_bytes);
}

/// "hybrid sorted 43.1"
std::string described(const rated_plan& rated) {
    const row_plan plan = to_row_plan(rated);
    return fmt::format("{}{} {:.1f}", to_string(plan.route), plan.sorted ? " sorted" : "", plan.gbps);
}

/// Measures the gather plans and returns the fastest. Reads the table only.
rated_plan measure_gather(exchange_state& exchange, const call_facts& call, std::uint64_t count) {
    measurement measurement(exchange, count);
    std::vector<rated_plan> tried;
    for (const transfer_plan& plan : gather_candidates(call))
        tried.push_back({plan, measurement.gbps_of(plan)});
    if (tried.back().plan.main() == transfer::staged) {
        const double sorted_kernel = tried[1].gbps;
        const transfer_plan hybrid = hybrid_candidate(call, sorted_kernel, tried.back().gbps);
        tried.push_back({hybrid, measurement.gbps_of(hybrid)});
    }
    std::string rates;
    for (const rated_plan& each : tried)
        rates += (rates.empty() ? "" : ", ") + described(each);
    rated_plan best = fastest(tried);
    best.plan.reason = fmt::format("measured with {:.0f} MB of random rows, GB/s: {}{}",
                                   measurement.measured_bytes() / 1e6, rates, staging_not_tried_reason(call));
    return best;
}

/// Estimates a scatter from measured gathers, because measuring a scatter would write to the table.
rated_plan derive_scatter(exchange_state& exchange, const call_facts& call, std::uint64_t count) {
    measurement measurement(exchange, count);
    call_facts gather = call;
    gather.is_scatter = false;
    // sorted, as scatters are
    const auto forced = [&](row_route route) {
        gather.requested = route;
        transfer_plan plan = *plan_call(gather);
        plan.parts.front().sorted = true;
        return plan;
    };
    const double link = measurement.gbps_in_order(forced(row_route::direct));
    const double direct = measurement.gbps_of(forced(row_route::direct));
    const double staged = tries_staging(call) ? measurement.gbps_of(forced(row_route::staged)) : 0;
    rated_plan rated = judge_scatter(call, direct, staged, link);
    rated.plan.reason = fmt::format(
        "measured by gathering {:.0f} MB of random rows, GB/s: direct {:.1f}{}, rows in order {:.1f}; "
        "estimated for the scatter: {:.1f}{}",
        measurement.measured_bytes() / 1e6, direct,
        tries_staging(call) ? fmt::format(", staged {:.1f}", staged) : "", link, rated.gbps,
        staging_not_tried_reason(call));
    return rated;
}

rated_plan measure(exchange_state& exchange, const call_facts& call, std::uint64_t count) {
    try {
        return call.is_scatter ? derive_scatter(exchange, call, count)
                               : measure_gather(exchange, call, count);
    } catch (const fatal_device_error&) {
        throw;
    } catch (const device_error& failure) {
        // the call may need far less memory, so it must not fail because of the measurement
        return {plan_unmeasured(call, fmt::format("not measured: {}", failure.what())), 0};
    } catch (const system_failure& failure) {
        // the same for the host device, which uses system memory
        if (failure.code() != std::errc::not_enough_memory) throw;
        return {plan_unmeasured(call, fmt::format("not measured: {}", failure.what())), 0};
    }
}

/// The key of a measurement: everything that a rate depends on.
struct measured_key {
    std::string device;
    row_direction direction;
    std::uint64_t row_bytes;
    int count_magnitude;
    int table_magnitude;
    bool host_ids;
    bool is_file_backed;
    bool aligned;  ///< rows can be moved 16 bytes at a time
    int threads;
    std::uint64_t buffer_bytes;
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
            .is_file_backed = exchange.is_file_backed(),
            .aligned = is_aligned(table.data(), table.row_size_bytes()),
            .threads = exchange.thread_count(),
            .buffer_bytes = exchange.staging_buffer_bytes(),
            .staging_magnitude = static_cast<int>(std::bit_width(exchange.options().staging_bytes)),
            .blocks = exchange.options().blocks,
            .staged_share = exchange.options().staged_share};
}

/// The plans measured so far. Its lock is held only briefly, because every call looks up its plan here.
class known_plans {
 public:
    std::optional<rated_plan> find(const measured_key& key) {
        const std::lock_guard lock(mutex_);
        const auto found = plans_.find(key);
        return found == plans_.end() ? std::nullopt : std::optional(found->second);
    }
    void add(const measured_key& key, const rated_plan& plan) {
        const std::lock_guard lock(mutex_);
        plans_.emplace(key, plan);
    }

 private:
    std::mutex mutex_;
    std::map<measured_key, rated_plan> plans_;
};

rated_plan measured_plan(exchange_state& exchange, const call_facts& call, const row_workload& workload) {
    // never destroyed: static objects may exchange rows
    static auto& known = *new known_plans;
    static std::mutex& measuring = *new std::mutex;
    const measured_key key = key_of(exchange, workload);
    if (std::optional<rated_plan> plan = known.find(key)) return *std::move(plan);
    // two simultaneous measurements would each see half of the link
    const std::lock_guard lock(measuring);
    if (std::optional<rated_plan> plan = known.find(key)) return *std::move(plan);
    rated_plan plan = measure(exchange, call, workload.count);
    known.add(key, plan);
    return plan;
}

/// Adds to the reason the settings of the plan that the caller chose.
void tell_what_was_set(transfer_plan& plan, const row_exchange_options& options) {
    const transfer_part* const kernel = plan.find(transfer::kernel);
    if (options.blocks != 0 && kernel != nullptr)
        plan.reason += fmt::format("; {} thread blocks, as set", kernel->blocks);
    const transfer_part* const staged = plan.find(transfer::staged);
    if (options.staged_share != 0 && kernel != nullptr && staged != nullptr)
        plan.reason += fmt::format("; {:.4g} of the rows staged, as set", staged->share);
}

}  // namespace

call_facts facts_of(const exchange_state& exchange, row_direction direction, bool host_ids) {
    const row_table& table = exchange.table();
    const row_exchange_options& options = exchange.options();
    return {.is_scatter = direction == row_direction::scatter,
            .on_host = exchange.device().kind() == device_kind::host,
            .has_host_ids = host_ids,
            .is_aligned = is_aligned(table.data(), table.row_size_bytes()),
            .is_file_backed = exchange.is_file_backed(),
            .row_bytes = table.row_size_bytes(),
            .table_bytes = table.size_bytes(),
            .staging_buffer_bytes = exchange.staging_buffer_bytes(),
            .not_reached_reason = exchange.not_reached_reason(),
            .requested = options.route,
            .blocks = options.blocks,
            .staged_share = options.staged_share};
}

std::uint64_t measured_rows(const row_table& table, std::uint64_t count) noexcept {
    const std::uint64_t row_bytes = std::max<std::uint64_t>(table.row_size_bytes(), 1);
    const std::uint64_t max_rows = std::min(max_measured_bytes / row_bytes, max_measured_rows);
    return std::max<std::uint64_t>(std::min(count, max_rows), 1);
}

rated_plan plan_rows(exchange_state& exchange, const row_workload& workload) {
    const call_facts call = facts_of(exchange, workload.direction, workload.host_ids);
    std::optional<transfer_plan> known = plan_call(call);
    rated_plan rated = known ? rated_plan{*std::move(known), 0} : measured_plan(exchange, call, workload);
    tell_what_was_set(rated.plan, exchange.options());
    return rated;
}

unsigned batches_worth_taking(exchange_state& exchange, const row_workload& batch) {
    constexpr unsigned max_batches = 64;
    constexpr double nearly = 0.97;
    std::vector<double> rates;  // rates of 1, 2, 4, ... batches
    for (unsigned batches = 1; batches <= max_batches; batches *= 2) {
        row_workload together = batch;
        together.count = saturated(batch.count, batches);
        if (batches > 1 && together.count > measured_rows(exchange.table(), together.count)) break;
        rates.push_back(plan_rows(exchange, together).gbps);
    }
    const double best = std::ranges::max(rates);
    const auto enough =
        std::ranges::find_if(rates, [=](double rate) { return rate >= nearly * best; }) - rates.begin();
    return 1U << enough;
}

row_plan to_row_plan(const rated_plan& rated) {
    const transfer_part* const kernel = rated.plan.find(transfer::kernel);
    const transfer_part* const staged = rated.plan.find(transfer::staged);
    row_plan result;
    if (kernel != nullptr) {
        result.route = staged != nullptr ? row_route::hybrid : row_route::direct;
    } else {
        result.route = staged != nullptr ? row_route::staged : row_route::copy;
    }
    result.sorted = rated.plan.parts.front().sorted;
    if (kernel != nullptr) result.blocks = kernel->blocks;
    if (kernel != nullptr && staged != nullptr) result.staged_share = staged->share;
    result.gbps = rated.gbps;
    result.reason = rated.plan.reason;
    return result;
}

}  // namespace pinflow::detail
