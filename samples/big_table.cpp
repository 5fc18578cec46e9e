// Trains a table of embeddings with Adam:
// big_table [ROWS COLUMNS BATCH STEPS LOOK_AHEAD DEVICE_ROWS] [zipf] [segment] [device_ids]
//
// The first DEVICE_ROWS rows lie in device memory, the others in page-locked host memory, or with `segment`
// in a segment in shared memory, each with Adam's state beside it. While one step is computed and written
// back, the rows of the next one are on their way. Ids are uniform, or with `zipf` as frequent as words of a
// language: the frequency of id i is roughly proportional to 1 / (i + 1). With `device_ids` they are in
// device memory, and no rows are prefetched. Fails if a weight of some sampled rows differs from that of a
// plain loop by 1e-6 or more.
//
// The default table is small, so that this takes a second. 10000000 rows of 128 take 16 GB.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "pinflow/pinflow.hpp"

namespace {

struct settings {
    std::uint64_t rows = 100'000;
    std::uint64_t columns = 64;
    std::uint64_t batch = 4096;
    std::uint64_t steps = 30;
    std::uint64_t look_ahead = 1;
    std::uint64_t device_rows = 10'000;
    bool is_zipf = false;
    bool in_segment = false;
    bool has_device_ids = false;
};

settings read_arguments(int count, char** values) {
    settings chosen;
    std::uint64_t* const all[] = {&chosen.rows,  &chosen.columns,    &chosen.batch,
                                  &chosen.steps, &chosen.look_ahead, &chosen.device_rows};
    std::size_t numbers = 0;
    for (const std::string_view word : std::span(values, values + count).subspan(1)) {
        if (word == "zipf") {
            chosen.is_zipf = true;
        } else if (word == "segment") {
            chosen.in_segment = true;
        } else if (word == "device_ids") {
            chosen.has_device_ids = true;
        } else if (numbers < std::size(all)) {
            *all[numbers++] = std::strtoull(word.data(), nullptr, 10);
        }
    }
    for (std::uint64_t* const size : {&chosen.rows, &chosen.columns, &chosen.batch, &chosen.steps})
        *size = std::max<std::uint64_t>(*size, 1);
    chosen.device_rows = std::min(chosen.device_rows, chosen.rows);
    if (chosen.has_device_ids) chosen.look_ahead = 0;
    return chosen;
}

/// Rows of bytes in shared memory, removed at the end.
class temporary_segment {
 public:
    temporary_segment(std::uint64_t rows, std::uint64_t row_bytes)
        : segment_(
              pinflow::writable_segment::create(name, pinflow::dtype::of<std::byte>(), {rows, row_bytes})) {}
    temporary_segment(const temporary_segment&) = delete;
    temporary_segment& operator=(const temporary_segment&) = delete;
    ~temporary_segment() {
        try {
            pinflow::remove_segment(name);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "big_table: %s\n", error.what());
        }
    }
    pinflow::row_table table() const { return segment_.table(); }

 private:
    static constexpr const char* name = "big_table";
    pinflow::writable_segment segment_;
};

std::vector<std::vector<std::uint64_t>> make_batches(const settings& chosen) {
    std::mt19937_64 random(1);
    std::uniform_real_distribution<double> fraction;
    std::vector<std::vector<std::uint64_t>> batches(chosen.steps);
    for (auto& ids : batches) {
        ids.resize(chosen.batch);
        std::ranges::generate(ids, [&]() -> std::uint64_t {
            if (!chosen.is_zipf) return random() % chosen.rows;
            const double drawn = std::pow(static_cast<double>(chosen.rows) + 1, fraction(random)) - 1;
            return std::min(static_cast<std::uint64_t>(drawn), chosen.rows - 1);
        });
    }
    return batches;
}

std::uint64_t count_different(std::vector<std::uint64_t> ids) {
    std::ranges::sort(ids);
    return ids.size() - std::ranges::unique(ids).size();
}

/// Adam for one weight. The gradient of a step is the number of times that the weight's id is in the batch.
class plain_adam {
 public:
    void step(double gradient) {
        ++steps_;
        mean_ = 0.9 * mean_ + 0.1 * gradient;
        square_ = 0.999 * square_ + 0.001 * gradient * gradient;
        const double corrected = mean_ / (1 - std::pow(0.9, steps_));
        weight_ -= 1e-3 * corrected / (std::sqrt(square_ / (1 - std::pow(0.999, steps_))) + 1e-8);
    }
    double weight() const { return weight_; }

 private:
    int steps_ = 0;
    double mean_ = 0, square_ = 0, weight_ = 0;
};

}  // namespace

int main(int argument_count, char** arguments) try {
    const settings chosen = read_arguments(argument_count, arguments);
    const pinflow::device device = pinflow::device::best();
    const pinflow::stream stream(device);

    const std::vector<std::vector<std::uint64_t>> batches = make_batches(chosen);
    const pinflow::pinned_buffer ones(chosen.batch * chosen.columns * sizeof(float), device);
    std::fill_n(reinterpret_cast<float*>(ones.data()), chosen.batch * chosen.columns, 1.0F);
    const pinflow::device_buffer gradients(ones.size_bytes(), stream);
    pinflow::copy_to_device_async(gradients.data(), ones.bytes(), stream);

    pinflow::embedding_options options;
    options.row_count = chosen.rows;
    options.columns = chosen.columns;
    options.rule = pinflow::adam{};
    options.max_batch_ids = chosen.batch;
    options.look_ahead = static_cast<unsigned>(chosen.look_ahead);
    options.device_rows = chosen.device_rows;
    const std::uint64_t record_bytes = pinflow::embedding_table::record_size_bytes(options);
    std::optional<temporary_segment> segment;
    if (chosen.in_segment) options.storage = segment.emplace(chosen.rows, record_bytes).table();
    pinflow::embedding_table table(options, device);
    std::printf("%llu records of %llu bytes\n", static_cast<unsigned long long>(chosen.rows),
                static_cast<unsigned long long>(record_bytes));

    std::uint64_t moved_rows = 0;
    for (const auto& ids : batches)
        moved_rows += count_different(ids);
    const std::uint64_t ids_bytes = chosen.batch * sizeof(std::uint64_t);
    const pinflow::device_buffer device_ids(chosen.has_device_ids ? batches.size() * ids_bytes : 0, stream);
    for (std::size_t step = 0; step < batches.size() && chosen.has_device_ids; ++step)
        pinflow::copy_to_device_async(device_ids.data() + step * ids_bytes,
                                      std::as_bytes(std::span(batches[step])), stream);
    stream.synchronize();

    using clock = std::chrono::steady_clock;
    std::size_t prefetched = 0;
    const auto start = clock::now();
    for (std::size_t step = 0; step < batches.size(); ++step) {
        pinflow::embedding_lease lease =
            table.fetch(chosen.has_device_ids
                            ? pinflow::row_ids::on_device(device_ids.data() + step * ids_bytes, chosen.batch)
                            : pinflow::row_ids(batches[step]),
                        stream);
        for (prefetched = std::max(prefetched, step + 1);
             prefetched < batches.size() && prefetched <= step + chosen.look_ahead; ++prefetched)
            table.prefetch(batches[prefetched]);
        // a model would read lease.weights() and lease.positions() on `stream`, and write the gradients
        table.commit(std::move(lease), gradients.data(), pinflow::dtype::of<float>(), stream);
    }
    const auto called = clock::now();
    table.synchronize();
    const double seconds = std::chrono::duration<double>(clock::now() - start).count();
    std::printf("%.2f ms a step, %.1f steps a second on %s; %.1f GB/s of records fetched and written back\n",
                seconds / static_cast<double>(chosen.steps) * 1e3,
                static_cast<double>(chosen.steps) / seconds, device.name().c_str(),
                2e-9 * static_cast<double>(moved_rows * record_bytes) / seconds);
    std::printf(
        "%.2f million ids a second, %.2f million different ones; all calls took %.0f %% of the time\n",
        1e-6 * static_cast<double>(chosen.steps * chosen.batch) / seconds,
        1e-6 * static_cast<double>(moved_rows) / seconds,
        100 * std::chrono::duration<double>(called - start).count() / seconds);

    std::mt19937_64 random(2);
    std::vector<std::uint64_t> checked(std::min<std::uint64_t>(chosen.rows, 200));
    std::ranges::generate(checked, [&] { return batches[random() % chosen.steps][random() % chosen.batch]; });
    std::vector<float> weights(checked.size() * chosen.columns);
    table.read_weights(checked, std::as_writable_bytes(std::span(weights)));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < checked.size(); ++i) {
        plain_adam expected;
        for (const auto& ids : batches) {
            const auto times = std::ranges::count(ids, checked[i]);
            if (times != 0) expected.step(static_cast<double>(times));
        }
        for (std::uint64_t column = 0; column < chosen.columns; ++column)
            wrong += std::abs(weights[i * chosen.columns + column] - expected.weight()) < 1e-6 ? 0U : 1U;
    }
    std::printf("%zu of %zu weights differ from those of a plain loop\n", wrong, weights.size());
    return wrong == 0 ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "big_table: %s\n", error.what());
    return 1;
}
