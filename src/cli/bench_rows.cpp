#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string_view>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/error.hpp"
#include "pinflow/loader/sampler.hpp"
#include "pinflow/rows.hpp"
#include "pinflow/stream.hpp"
#include "src/cli/bench.hpp"
#include "src/cli/bench_words.hpp"
#include "src/cli/elapsed.hpp"
#include "src/cli/output.hpp"
#include "src/core/checked.hpp"
#include "src/rows/tuning.hpp"

namespace pinflow::cli {

namespace {

using clock = std::chrono::steady_clock;

/// Batches of the largest group that `plan` measures.
constexpr unsigned max_group = 64;
/// Two groups in flight in each direction, and some to spare.
constexpr unsigned max_calls = 8;

/// Sizes of the work, with defaults for options that were not given.
struct sizes {
    /// @throws invalid_argument when the table is too small for the batches.
    sizes(const bench_options& options, row_ways of)
        : row_bytes(options.row_bytes == 0 ? 512 : options.row_bytes),
          batch_rows(options.batch_rows == 0 ? 131072 : options.batch_rows),
          batches(options.batches),
          max_known(options.known),
          ways(of) {
        constexpr std::uint64_t typical_rows = 10'000'000;
        const std::uint64_t requested_bytes =
            options.table_bytes == 0 ? detail::saturated(typical_rows, row_bytes) : options.table_bytes;
        row_count = requested_bytes / row_bytes;
        if (row_count < batch_rows) {
            throw invalid_argument(fmt::format(
                "a table of {} bytes has {} of {} bytes, but a batch needs {}: make --table larger or "
                "--batch smaller",
                requested_bytes, readable_count(row_count, "row", "rows"), row_bytes, batch_rows));
        }
        if (!ways.to_device || !ways.to_host) return;
        // no row is both read and written, so that what arrives can be checked
        const std::uint64_t lists = row_count / batch_rows;
        if (lists < 2) {
            throw invalid_argument(fmt::format(
                "duplex needs a table of at least two batches of {} rows, but it has {}: make --table larger "
                "or --batch smaller",
                batch_rows, readable_count(row_count, "row", "rows")));
        }
        batches = std::min(batches, lists / 2);
    }

    std::uint64_t row_bytes;
    std::uint64_t batch_rows;
    std::uint64_t batches;
    unsigned max_known;  ///< 2 at least
    row_ways ways;
    std::uint64_t row_count = 0;

    unsigned known() const { return static_cast<unsigned>(std::min<std::uint64_t>(max_known, batches)); }
    /// Batches of a group, which travel together: half of the known batches, because the group after the
    /// group in flight is known, too.
    unsigned together() const {
        return static_cast<unsigned>(std::min<std::uint64_t>(max_known / 2, batches));
    }
    /// Rows of the largest call: of a group of this work, or of the largest group that `plan` measures.
    std::uint64_t max_call_rows() const {
        return std::max(batch_rows * together(),
                        detail::measured_rows(row_bytes, detail::saturated(batch_rows, max_group)));
    }
    std::uint64_t batch_bytes() const { return batch_rows * row_bytes; }
    std::uint64_t table_bytes() const { return row_count * row_bytes; }
    double payload_bytes() const { return static_cast<double>(batches * batch_bytes()); }
    std::string in_words() const {
        return fmt::format("{} x {} rows of {} B from {:.2f} GiB, {} known, {} together", batches, batch_rows,
                           row_bytes, static_cast<double>(table_bytes()) / (1 << 30), known(), together());
    }
};

using id_list = std::vector<std::uint64_t>;

/// Row lists of one repetition: each batch has its own random order of rows. No row is twice in a batch.
std::vector<id_list> fresh_lists(const sizes& sizes, std::uint64_t repetition) {
    std::vector<id_list> lists(sizes.batches, id_list(sizes.batch_rows));
    tbb::parallel_for(std::uint64_t{0}, sizes.batches, [&](std::uint64_t batch) {
        sampler::shuffled(sizes.row_count, repetition * sizes.batches + batch).rows_at(0, 0, lists[batch]);
    });
    return lists;
}

/// Row lists that share no row: consecutive batches of one random order of all rows, from batch `first` of it
/// on.
std::vector<id_list> lists_apart(const sizes& sizes, std::uint64_t seed, std::uint64_t first) {
    std::vector<id_list> lists(sizes.batches, id_list(sizes.batch_rows));
    const auto rows = sampler::shuffled(sizes.row_count, seed);
    tbb::parallel_for(std::uint64_t{0}, sizes.batches, [&](std::uint64_t batch) {
        rows.rows_at(0, (first + batch) * sizes.batch_rows, lists[batch]);
    });
    return lists;
}

/// A stream on which at most two groups of batches are enqueued: the group in flight and the next one.
/// So no batch is known, or sorted, more than `sizes::max_known` batches ahead of the one in flight.
class group_stream {
 public:
    explicit group_stream(const device& device) : stream_(device), passed_{event(device), event(device)} {}

    operator stream_view() const noexcept { return stream_; }
    void synchronize() const { stream_.synchronize(); }

    /// Waits until the group before the previous one has passed, then calls `enqueue` with the stream.
    template <typename Enqueue>
    void hand_over(Enqueue enqueue) {
        event& passed = passed_[next_];
        next_ = 1 - next_;
        passed.synchronize();
        enqueue(stream_.view());
        passed.record(stream_);
    }

 private:
    stream stream_;
    std::array<event, 2> passed_;  ///< recorded after the last even-numbered and the last odd-numbered group
    unsigned next_ = 0;
};

/// A table, its batches in device memory, and the exchange between them.
class exchange_bench {
 public:
    exchange_bench(const bench_options& options, const sizes& of)
        : sizes_(of),
          stream_(options.device),
          back_(options.device),
          table_(of.table_bytes(), options.device),
          host_batch_(of.ways.to_device || of.ways.to_host ? of.batch_bytes() : 0, options.device),
          exchange_(row_table(table_.bytes(), of.row_bytes), options.device,
                    {.route = options.route,
                     .max_batch_rows = of.max_call_rows(),
                     .max_calls_in_flight = max_calls,
                     .blocks = options.blocks,
                     .staged_share = options.staged_share}) {
        fill_with_words(table_.bytes(), table_seed);
        if (of.ways.to_device) gathered_ = device_batches();
        if (of.ways.to_host) sources_ = device_batches();
        if (of.ways.to_host) written_.resize(of.row_count);
        stream_.synchronize();
        if (options.tunes) exchange_.tune(of.batch_rows, of.together());
    }

    row_exchange& exchange() { return exchange_; }

    /// Gathers all batches, group after group. @return seconds from passing the first indices until the last
    /// row has arrived; the same below.
    double gather(const std::vector<id_list>& ids) {
        const auto start = clock::now();
        for (std::uint64_t first = 0; first < ids.size(); first += sizes_.together())
            enqueue_gather(ids, first, stream_);
        stream_.synchronize();
        return seconds_since(start);
    }

    double scatter(const std::vector<id_list>& ids) {
        const auto start = clock::now();
        for (std::uint64_t first = 0; first < ids.size(); first += sizes_.together())
            enqueue_scatter(ids, first, stream_);
        stream_.synchronize();
        return seconds_since(start);
    }

    /// Gathers and scatters on a stream each. Groups are enqueued alternately on the two, as in training.
    double duplex(const std::vector<id_list>& gathered, const std::vector<id_list>& scattered) {
        const auto start = clock::now();
        for (std::uint64_t first = 0; first < gathered.size(); first += sizes_.together()) {
            enqueue_gather(gathered, first, stream_);
            enqueue_scatter(scattered, first, back_);
        }
        stream_.synchronize();
        back_.synchronize();
        return seconds_since(start);
    }

    /// One call that is waited for.
    double one_gather(const id_list& ids) {
        const auto start = clock::now();
        exchange_.gather(std::span<const std::uint64_t>(ids), gathered_[0].data());
        return seconds_since(start);
    }

    /// Overwrites the first `batches` destinations, so that rows of an earlier gather cannot pass as new
    /// ones.
    void clear_gathered(std::uint64_t batches) {
        std::memset(host_batch_.data(), 0xEE, host_batch_.size_bytes());
        for (const device_buffer& batch : std::span(gathered_).first(batches))
            copy_to_device_async(batch.data(), host_batch_.bytes(), stream_);
        stream_.synchronize();
    }

    /// Different contents for each batch and each repetition.
    void fill_sources(std::uint64_t repetition) {
        for (std::uint64_t batch = 0; batch < sources_.size(); ++batch) {
            fill_with_words(host_batch_.bytes(), source_seed(repetition, batch));
            copy_to_device_async(sources_[batch].data(), host_batch_.bytes(), stream_);
            stream_.synchronize();
        }
    }

    /// @throws format_error unless every batch, from the first on, has the table's rows.
    void check_gathered(std::span<const id_list> ids) {
        for (std::uint64_t batch = 0; batch < ids.size(); ++batch) {
            copy_to_host_async(host_batch_.bytes(), gathered_[batch].data(), stream_);
            stream_.synchronize();
            compare(ids[batch], batch, [](std::uint64_t) { return true; });
        }
    }

    /// The same check for a written table: if several batches wrote a row, the last batch counts.
    void check_scattered(const std::vector<id_list>& ids, std::uint64_t repetition) {
        std::vector<bool> seen(sizes_.row_count);
        for (std::uint64_t batch = ids.size(); batch-- > 0;) {
            fill_with_words(host_batch_.bytes(), source_seed(repetition, batch));
            std::vector<char> last(ids[batch].size());
            for (std::uint64_t i = 0; i < last.size(); ++i) {
                last[i] = seen[ids[batch][i]] ? 0 : 1;
                seen[ids[batch][i]] = true;
                written_[ids[batch][i]] = true;
            }
            compare(ids[batch], batch, [&](std::uint64_t i) { return last[i] != 0; });
        }
    }

    /// @throws format_error unless the rows that were never scattered to are as they were.
    void check_untouched() const {
        std::atomic<std::uint64_t> wrong = 0;
        tbb::parallel_for(std::uint64_t{0}, sizes_.row_count, [&](std::uint64_t row) {
            if (written_[row]) return;
            const std::uint64_t place = row * sizes_.row_bytes;
            if (!has_words(table_.bytes().subspan(place, sizes_.row_bytes), place, table_seed)) ++wrong;
        });
        if (wrong > 0) {
            throw format_error(fmt::format("{} of {} rows have changed without having been scattered to",
                                           wrong.load(), std::ranges::count(written_, false)));
        }
    }

 private:
    std::vector<device_buffer> device_batches() const {
        std::vector<device_buffer> batches;
        for (std::uint64_t batch = 0; batch < sizes_.batches; ++batch)
            batches.emplace_back(sizes_.batch_bytes(), stream_);
        return batches;
    }

    void enqueue_gather(const std::vector<id_list>& ids, std::uint64_t first, group_stream& groups) {
        std::vector<row_gather> group;
        for (std::uint64_t i = first; i < std::min<std::uint64_t>(first + sizes_.together(), ids.size()); ++i)
            group.push_back({std::span<const std::uint64_t>(ids[i]), gathered_[i].data()});
        groups.hand_over([&](stream_view stream) { exchange_.gather_group_async(group, stream); });
    }

    void enqueue_scatter(const std::vector<id_list>& ids, std::uint64_t first, group_stream& groups) {
        std::vector<row_scatter> group;
        for (std::uint64_t i = first; i < std::min<std::uint64_t>(first + sizes_.together(), ids.size()); ++i)
            group.push_back({std::span<const std::uint64_t>(ids[i]), sources_[i].data()});
        groups.hand_over([&](stream_view stream) {
            exchange_.scatter_group_async(group, duplicate_policy::last, stream);
        });
    }

    template <typename Wanted>
    void compare(const id_list& ids, std::uint64_t batch, Wanted wanted) const {
        std::atomic<std::uint64_t> wrong = 0;
        tbb::parallel_for(std::uint64_t{0}, static_cast<std::uint64_t>(ids.size()), [&](std::uint64_t i) {
            if (!wanted(i)) return;
            const std::byte* const row = table_.data() + ids[i] * sizes_.row_bytes;
            if (std::memcmp(host_batch_.data() + i * sizes_.row_bytes, row, sizes_.row_bytes) != 0) ++wrong;
        });
        if (wrong > 0) {
            throw format_error(
                fmt::format("{} of {} rows of batch {} are wrong", wrong.load(), ids.size(), batch));
        }
    }

    /// One for each batch of each repetition, and none of them the table's.
    std::uint64_t source_seed(std::uint64_t repetition, std::uint64_t batch) const {
        return table_seed + 1 + repetition * sizes_.batches + batch;
    }

    static constexpr std::uint64_t table_seed = 7;

    sizes sizes_;
    group_stream stream_;
    group_stream back_;
    pinned_buffer table_;
    pinned_buffer host_batch_;
    std::vector<device_buffer> gathered_;
    std::vector<device_buffer> sources_;
    std::vector<bool> written_;  ///< the rows that were ever scattered to
    row_exchange exchange_;
};

std::string plan_in_words(const row_plan& plan) {
    std::string words(to_string(plan.route));
    if (plan.sorted) words += ", sorted";
    if (plan.blocks > 0) words += ", " + readable_count(plan.blocks, "block", "blocks");
    if (plan.route == row_route::hybrid) words += fmt::format(", {:.0f} % staged", 100 * plan.staged_share);
    return words;
}

/// @throws invalid_argument when `needed_bytes` of `what` are more than `memory` has.
void check_memory(double needed_bytes, std::string_view what, std::string_view whose,
                  const device::memory_sizes& memory) {
    constexpr double gibibyte = 1 << 30;
    const auto free_bytes = static_cast<double>(memory.free_bytes);
    if (memory.total_bytes == 0 || needed_bytes <= free_bytes) return;
    throw invalid_argument(
        fmt::format("{} would take {:.4g} GiB of the memory of {}, which has {:.4g} GiB free; --table, "
                    "--row-bytes, --batch and --batches set how much it is",
                    what, needed_bytes / gibibyte, whose, free_bytes / gibibyte));
}

}  // namespace

void check_rows(const bench_options& options, row_ways ways) {
    const sizes sizes(options, ways);
    const device& device = options.device;
    const double directions = (ways.to_device ? 1 : 0) + (ways.to_host ? 1 : 0);
    const double rows =
        directions * static_cast<double>(sizes.batches) * static_cast<double>(sizes.batch_rows);
    const double batch_bytes = rows * static_cast<double>(sizes.row_bytes);
    // the table, the row numbers, a batch for comparison, and two bits a row if rows are scattered
    double host_bytes = static_cast<double>(sizes.table_bytes()) + rows * sizeof(std::uint64_t);
    if (directions > 0) host_bytes += static_cast<double>(sizes.batch_bytes());
    if (ways.to_host) host_bytes += static_cast<double>(sizes.row_count) / 4;
    const bool on_host = device.kind() == device_kind::host;
    if (on_host) host_bytes += batch_bytes;
    check_memory(host_bytes, on_host ? "the table with its batches" : "the table", "the host",
                 device::host().memory());
    if (!on_host) check_memory(batch_bytes, "all batches", device.name(), device.memory());
}

void bench_gather(const bench_options& options, const link_rates& link, const bench_report& report) {
    const sizes sizes(options, ways_of_gather);
    exchange_bench bench(options, sizes);
    const row_plan plan = bench.exchange().plan_gather(sizes.batch_rows, sizes.together());
    std::vector<double> seconds;
    for (unsigned repetition = 0; repetition <= options.repetitions; ++repetition) {
        const auto ids = fresh_lists(sizes, repetition);
        bench.clear_gathered(sizes.batches);
        const double taken = bench.gather(ids);
        if (repetition > 0) seconds.push_back(taken);
        bench.check_gathered(ids);
    }
    const double rate = sizes.payload_bytes() / median(seconds) / 1e9;
    report({"gather", rate, rate / link.to_device, median(seconds),
            fmt::format("{}; {}", sizes.in_words(), plan_in_words(plan))});
    std::vector<double> latencies;
    const auto ids = fresh_lists(sizes, options.repetitions + 1);
    for (const id_list& list : ids) {
        bench.clear_gathered(1);
        latencies.push_back(bench.one_gather(list));
        bench.check_gathered({&list, 1});
    }
    const double one = median(latencies);
    const double one_rate = static_cast<double>(sizes.batch_bytes()) / one / 1e9;
    report({"gather, one call, waited for", one_rate, one_rate / link.to_device, one,
            fmt::format("{:.2f} ms; {}", 1e3 * one,
                        plan_in_words(bench.exchange().plan_gather(sizes.batch_rows)))});
}

void bench_scatter(const bench_options& options, const link_rates& link, const bench_report& report) {
    const sizes sizes(options, ways_of_scatter);
    exchange_bench bench(options, sizes);
    const row_plan plan = bench.exchange().plan_scatter(sizes.batch_rows, sizes.together());
    std::vector<double> seconds;
    for (unsigned repetition = 0; repetition <= options.repetitions; ++repetition) {
        const auto ids = fresh_lists(sizes, repetition);
        bench.fill_sources(repetition);
        const double taken = bench.scatter(ids);
        if (repetition > 0) seconds.push_back(taken);
        bench.check_scattered(ids, repetition);
    }
    bench.check_untouched();
    const double rate = sizes.payload_bytes() / median(seconds) / 1e9;
    report({"scatter", rate, rate / link.to_host, median(seconds),
            fmt::format("{}; {}; LINK is the rate to the host", sizes.in_words(), plan_in_words(plan))});
}

void bench_duplex(const bench_options& options, const link_rates& link, const bench_report& report) {
    const sizes sizes(options, ways_of_duplex);
    exchange_bench bench(options, sizes);
    std::vector<double> seconds;
    for (unsigned repetition = 0; repetition <= options.repetitions; ++repetition) {
        const std::vector<id_list> gathered = lists_apart(sizes, repetition, 0);
        const std::vector<id_list> scattered = lists_apart(sizes, repetition, sizes.batches);
        bench.clear_gathered(sizes.batches);
        bench.fill_sources(repetition);
        const double taken = bench.duplex(gathered, scattered);
        if (repetition > 0) seconds.push_back(taken);
        bench.check_gathered(gathered);
        bench.check_scattered(scattered, repetition);
    }
    bench.check_untouched();
    const double rate = 2 * sizes.payload_bytes() / median(seconds) / 1e9;
    report({"duplex, gather and scatter in total", rate, rate / link.to_device, median(seconds),
            sizes.in_words()});
}

void bench_plan(const bench_options& options, const link_rates& link, const bench_report& report) {
    const sizes sizes(options, ways_of_plan);
    exchange_bench bench(options, sizes);
    const auto tell = [&](const char* direction, const row_plan& plan, unsigned batches, double link_rate) {
        std::string note = plan.reason;
        if (plan.gbps > 0) {
            note += fmt::format("; the smallest group within 3 % of the best rate has {}",
                                readable_count(plan.batches, "batch", "batches"));
        }
        report({fmt::format("plan, {}, {} at a time: {}", direction, batches, plan_in_words(plan)), plan.gbps,
                plan.gbps / link_rate, 0, note});
    };
    std::vector<unsigned> groups{1};
    if (sizes.together() > 1) groups.push_back(sizes.together());
    bench.exchange().tune(sizes.batch_rows, max_group);
    for (const unsigned batches : groups) {
        tell("gather", bench.exchange().plan_gather(sizes.batch_rows, batches), batches, link.to_device);
        tell("scatter", bench.exchange().plan_scatter(sizes.batch_rows, batches), batches, link.to_host);
    }
}

}  // namespace pinflow::cli
