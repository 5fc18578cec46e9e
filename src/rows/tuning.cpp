#include "src/rows/tuning.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/buffer.hpp"
#include "src/rows/route_plan.hpp"

namespace pinflow::detail {

namespace {

using clock = std::chrono::steady_clock;

/// The maximum size of one measurement, which limits its time and memory.
constexpr std::uint64_t max_measured_bytes = std::uint64_t{512} << 20;
constexpr std::uint64_t max_measured_rows = std::uint64_t{1} << 20;

/// Measures plans by gathering rows into its own memory. Each gather has new indices, random or contiguous.
class measurement {
 public:
    measurement(const call_facts& call, const timed_gathers& gathers)
        : gathers_(gathers),
          row_bytes_(call.row_bytes),
          count_(measured_rows(call.row_bytes, call.count)),
          rows_(count_ * row_bytes_, gathers.stream) {}

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
            gathers_.finish();
            const auto start = clock::now();
            for (const std::vector<std::uint64_t>& ids : calls)
                gathers_.gather_async(plan, ids, rows_.data());
            gathers_.finish();
            const double seconds = std::chrono::duration<double>(clock::now() - start).count();
            if (repetition > 0) rates.push_back(2 * measured_bytes() / seconds / 1e9);
        }
        std::ranges::sort(rates);
        return rates[1];
    }

    std::vector<std::uint64_t> random_ids() {
        std::vector<std::uint64_t> ids(count_);
        std::uniform_int_distribution<std::uint64_t> any(0, gathers_.row_count - 1);
        std::ranges::generate(ids, [&] { return any(random_); });
        return ids;
    }

    std::vector<std::uint64_t> neighbouring_ids() {
        const std::uint64_t last_first = gathers_.row_count - std::min(gathers_.row_count, count_);
        const std::uint64_t first = std::uniform_int_distribution<std::uint64_t>(0, last_first)(random_);
        std::vector<std::uint64_t> ids(count_);
        std::ranges::generate(
            ids, [&, i = std::uint64_t{0}]() mutable { return (first + i++) % gathers_.row_count; });
        return ids;
    }

    const timed_gathers& gathers_;
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
    return fmt::format("{}{} {:.1f}", to_string(route_of(rated.plan)),
                       rated.plan.parts.front().sorted ? " sorted" : "", rated.gbps);
}

/// Measures the gather plans and returns the fastest. Does not write to the table.
rated_plan measure_gather(const call_facts& call, const timed_gathers& gathers) {
    measurement measurement(call, gathers);
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
rated_plan derive_scatter(const call_facts& call, const timed_gathers& gathers) {
    measurement measurement(call, gathers);
    call_facts gather = call;
    gather.is_scatter = false;
    // sorted, as scatters are
    const auto forced = [&](row_route route) {
        gather.requested = route;
        transfer_plan plan = plan_call(gather).plan;
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

/// The key of a measurement: everything that a rate depends on.
struct measured_key {
    device_kind kind;
    int device;
    bool is_scatter;
    ids_in ids;
    bool is_file_backed;
    bool is_aligned;
    std::uint64_t row_bytes;
    int count_magnitude;
    int table_magnitude;
    unsigned threads;
    std::uint64_t buffer_bytes;
    int staging_magnitude;
    unsigned blocks;
    double staged_share;

    auto operator<=>(const measured_key&) const = default;
};

measured_key key_of(const call_facts& call, const device& device) {
    return {.kind = device.kind(),
            .device = device.index(),
            .is_scatter = call.is_scatter,
            .ids = call.ids,
            .is_file_backed = call.is_file_backed,
            .is_aligned = call.is_aligned,
            .row_bytes = call.row_bytes,
            .count_magnitude = static_cast<int>(std::bit_width(measured_rows(call.row_bytes, call.count))),
            .table_magnitude = static_cast<int>(std::bit_width(call.table_bytes)),
            .threads = call.threads,
            .buffer_bytes = call.staging_buffer_bytes,
            .staging_magnitude = static_cast<int>(std::bit_width(call.staging_bytes)),
            .blocks = call.blocks,
            .staged_share = call.staged_share};
}

/// The plans measured so far. Its lock is held only briefly, because every call looks up its plan here.
class known_plans {
 public:
    /// Never destroyed: static objects may exchange rows.
    static known_plans& process() {
        static auto& all = *new known_plans;
        return all;
    }

    std::optional<rated_plan> find(const measured_key& key) {
        const std::lock_guard lock(mutex_);
        const auto found = plans_.find(key);
        return found == plans_.end() ? std::nullopt : std::optional(found->second);
    }
    /// Whether any plan uses staging buffers, of those that agree with `key` in all but direction, number of
    /// rows and place of the indices.
    bool has_staged(measured_key key) {
        const std::lock_guard lock(mutex_);
        return std::ranges::any_of(plans_, [&](const auto& known) {
            key.is_scatter = known.first.is_scatter;
            key.ids = known.first.ids;
            key.count_magnitude = known.first.count_magnitude;
            return key == known.first && known.second.plan.find(transfer::staged) != nullptr;
        });
    }
    void add(const measured_key& key, rated_plan plan) {
        const std::lock_guard lock(mutex_);
        plans_.emplace(key, std::move(plan));
    }

 private:
    std::mutex mutex_;
    std::map<measured_key, rated_plan> plans_;
};

}  // namespace

std::uint64_t measured_rows(std::uint64_t row_bytes, std::uint64_t count) noexcept {
    const std::uint64_t max_rows =
        std::min(max_measured_bytes / std::max<std::uint64_t>(row_bytes, 1), max_measured_rows);
    return std::max<std::uint64_t>(std::min(count, max_rows), 1);
}

void tune_call(const call_facts& call, const timed_gathers& gathers) {
    static std::mutex& measuring = *new std::mutex;  // never destroyed, as above
    const measured_key key = key_of(call, gathers.stream.device());
    // two simultaneous measurements would each see half of the link
    const std::lock_guard lock(measuring);
    known_plans& known = known_plans::process();
    if (known.find(key)) return;
    known.add(key, call.is_scatter ? derive_scatter(call, gathers) : measure_gather(call, gathers));
}

std::optional<rated_plan> tuned_plan(const call_facts& call, const device& device) {
    return known_plans::process().find(key_of(call, device));
}

bool has_tuned_staged_plan(const call_facts& call, const device& device) {
    return known_plans::process().has_staged(key_of(call, device));
}

}  // namespace pinflow::detail
