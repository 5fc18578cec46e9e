// Trains a table of embeddings with Adam: big_table [ROWS COLUMNS BATCH STEPS LOOK_AHEAD DEVICE_ROWS]. The
// first DEVICE_ROWS rows lie in device memory, the others in page-locked host memory, each with Adam's state
// beside it. While one step is computed and written back, the rows of the next one are on their way. Fails if
// a weight of some sampled rows differs from that of a plain loop by 1e-6 or more.
//
// The default table is small, so that this takes a second. 10000000 rows of 128 take 15.5 GB.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
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
};

settings read_arguments(int count, char** values) {
    settings chosen;
    std::uint64_t* const all[] = {&chosen.rows,  &chosen.columns,    &chosen.batch,
                                  &chosen.steps, &chosen.look_ahead, &chosen.device_rows};
    for (int i = 1; i < count && i <= 6; ++i)
        *all[i - 1] = std::strtoull(values[i], nullptr, 10);
    for (std::uint64_t* const size : {&chosen.rows, &chosen.columns, &chosen.batch, &chosen.steps})
        *size = std::max<std::uint64_t>(*size, 1);
    chosen.device_rows = std::min(chosen.device_rows, chosen.rows);
    return chosen;
}

/// The rule of Adam for one weight, whose gradients are 1 for each time that its id is in the batch.
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

    std::mt19937_64 random(1);
    std::vector<std::vector<std::uint64_t>> batches(chosen.steps);
    for (auto& ids : batches) {
        ids.resize(chosen.batch);
        std::ranges::generate(ids, [&] { return random() % chosen.rows; });
    }
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
    pinflow::embedding_table table(options, device);
    const std::uint64_t record_bytes = pinflow::embedding_table::record_size_bytes(options);
    std::printf("%llu records of %llu bytes\n", static_cast<unsigned long long>(chosen.rows),
                static_cast<unsigned long long>(record_bytes));

    std::uint64_t moved_rows = 0;
    std::size_t prefetched = 0;
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t step = 0; step < batches.size(); ++step) {
        pinflow::embedding_lease lease = table.fetch(batches[step], stream);
        moved_rows += lease.row_count();
        for (prefetched = std::max(prefetched, step + 1);
             prefetched < batches.size() && prefetched <= step + chosen.look_ahead; ++prefetched)
            table.prefetch(batches[prefetched]);
        // a model would read lease.weights() and lease.positions() on `stream`, and write the gradients
        table.commit(std::move(lease), gradients.data(), pinflow::dtype::of<float>(), stream);
    }
    table.synchronize();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%.2f ms a step, %.1f GB/s to %s and back together, %.1f million ids a second\n",
                seconds / static_cast<double>(chosen.steps) * 1e3,
                2e-9 * static_cast<double>(moved_rows * record_bytes) / seconds, device.name().c_str(),
                1e-6 * static_cast<double>(chosen.steps * chosen.batch) / seconds);

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
