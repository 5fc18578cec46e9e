// Trains a table of embeddings that stays in host memory: each step gathers the rows of its two batches to
// the device, changes them, and scatters them back. Fails unless the table equals the result of a plain loop.
//
// The table is small so that this takes a second. It could be far larger than the device's memory.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "pinflow/pinflow.hpp"

namespace {

constexpr std::uint64_t row_count = 50'000;
constexpr std::uint64_t row_floats = 128;
constexpr std::uint64_t row_bytes = row_floats * sizeof(float);
constexpr std::uint64_t batch_rows = 4096;
constexpr std::uint64_t batch_bytes = batch_rows * row_bytes;
constexpr std::uint64_t step_count = 20;

std::span<float> floats_in(const pinflow::pinned_buffer& buffer) {
    return {reinterpret_cast<float*>(buffer.data()), buffer.size_bytes() / sizeof(float)};
}

/// What the table holds before training.
void fill(std::span<float> table) {
    for (std::size_t i = 0; i < table.size(); ++i)
        table[i] = static_cast<float>(i % 1021);
}

/// The indices of a batch's rows: no row twice, but two batches share some rows.
std::vector<std::uint64_t> rows_of_batch(std::uint64_t batch) {
    std::vector<std::uint64_t> ids(batch_rows);
    pinflow::sampler::shuffled(row_count, 1).rows_at(batch, 0, ids);
    return ids;
}

/// The new value of one number after training with a batch.
float trained(float value, std::uint64_t batch) {
    return 0.5F * value + static_cast<float>(batch);
}

/// Stands for the kernels of a training step, which would work on rows in device memory. This one computes on
/// the CPU, also in the stream's order, so that it runs on every device.
class model {
 public:
    explicit model(const pinflow::device& device) : scratch_(batch_bytes, device) {}

    /// Enqueues only.
    void train_async(std::byte* rows, std::uint64_t batch, pinflow::stream_view stream) const {
        pinflow::copy_to_host_async(scratch_.bytes(), rows, stream);
        stream.host_function_async([values = floats_in(scratch_), batch] {
            for (float& value : values)
                value = trained(value, batch);
        });
        pinflow::copy_to_device_async(rows, scratch_.bytes(), stream);
    }

 private:
    pinflow::pinned_buffer scratch_;
};

/// All steps without a row exchange. Both batches of a step begin with the table after the previous step. If
/// both have a row, the second batch's result is kept.
std::vector<float> table_by_a_plain_loop() {
    std::vector<float> table(row_count * row_floats);
    fill(table);
    for (std::uint64_t step = 0; step < step_count; ++step) {
        const std::vector<float> before = table;
        for (const std::uint64_t batch : {2 * step, 2 * step + 1}) {
            for (const std::uint64_t row : rows_of_batch(batch)) {
                for (std::uint64_t i = row * row_floats; i < (row + 1) * row_floats; ++i)
                    table[i] = trained(before[i], batch);
            }
        }
    }
    return table;
}

void print_plan(const char* direction, const pinflow::row_plan& plan) {
    std::printf("%s, %s: %s\n", direction, std::string(to_string(plan.route)).c_str(), plan.reason.c_str());
}

}  // namespace

int main() try {
    const pinflow::device device = pinflow::device::best();
    const model model(device);

    // include/pinflow/README.md shows this
    const pinflow::pinned_buffer memory(row_count * row_bytes, device);
    fill(floats_in(memory));
    const pinflow::row_table table(memory.bytes(), row_bytes, pinflow::dtype::of<float>());
    const pinflow::stream stream(device);
    const pinflow::device_buffer batch_1(batch_bytes, stream), batch_2(batch_bytes, stream);
    pinflow::row_exchange exchange(table, device);  // last: its destructor waits for its calls
    for (std::uint64_t step = 0; step < step_count; ++step) {
        const std::vector<std::uint64_t> ids_1 = rows_of_batch(2 * step), ids_2 = rows_of_batch(2 * step + 1);
        const pinflow::row_gather known[] = {{ids_1, batch_1.data()}, {ids_2, batch_2.data()}};
        exchange.gather_group_async(known, stream);  // batches that are known ahead travel together
        model.train_async(batch_1.data(), 2 * step, stream);
        model.train_async(batch_2.data(), 2 * step + 1, stream);
        const pinflow::row_scatter changed[] = {{ids_1, batch_1.data()}, {ids_2, batch_2.data()}};
        exchange.scatter_group_async(changed, pinflow::duplicate_policy::last, stream);
        exchange.check();  // throws the errors of calls that have finished; does not wait for others
    }
    stream.synchronize();
    exchange.check();

    const std::uint64_t rows = step_count * 2 * batch_rows;
    std::printf("%llu rows of %llu bytes went to %s and back\n", static_cast<unsigned long long>(rows),
                static_cast<unsigned long long>(row_bytes), device.name().c_str());
    print_plan("gather", exchange.plan_gather(batch_rows, 2));
    print_plan("scatter", exchange.plan_scatter(batch_rows, 2));

    const std::vector<float> expected = table_by_a_plain_loop();
    std::uint64_t wrong = 0;
    for (std::size_t i = 0; i < expected.size(); ++i)
        wrong += floats_in(memory)[i] == expected[i] ? 0U : 1U;
    std::printf("%llu of %zu numbers differ from what a plain loop makes of the table\n",
                static_cast<unsigned long long>(wrong), expected.size());
    return wrong == 0 ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "embedding_rows: %s\n", error.what());
    return 1;
}
