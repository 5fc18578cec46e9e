#include <doctest/doctest.h>
#include <tbb/parallel_for.h>
#include <tbb/task_group.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "pinflow/train/embedding_table.hpp"
#include "tests/plain_embedding_table.hpp"
#include "tests/support/temporary_folder.hpp"

// Embedding tables in oneTBB tasks whose group was cancelled, for example because another task threw.

using namespace pinflow;

namespace {

/// Throws what `work` throws, which oneTBB would drop.
template <typename Work>
void in_cancelled_group(Work work) {
    tbb::task_group_context cancelled;
    std::exception_ptr failure;
    bool has_run = false;
    tbb::parallel_for(
        0, 1,
        [&](int) {
            cancelled.cancel_group_execution();
            try {
                work();
            } catch (...) {
                failure = std::current_exception();
            }
            has_run = true;
        },
        cancelled);
    REQUIRE(has_run);
    if (failure) std::rethrow_exception(failure);
}

}  // namespace

TEST_CASE("embedding table: in a cancelled group of tasks, calls do all of their work") {
    const temporary_folder folder;
    embedding_options options;
    options.row_count = 50'000;
    options.columns = 5;
    options.weights = uniform_weights(1, 2, 4);
    options.max_batch_ids = 40'000;
    const auto ids = all_ids(options.row_count);
    embedding_table expected(options, device::host());
    const auto first_weights = weights_of(expected, ids);

    std::optional<embedding_table> table;
    in_cancelled_group([&] { table.emplace(options, device::host()); });
    CHECK(weights_of(*table, ids) == first_weights);

    in_cancelled_group([&] {
        table->save(folder / "table.safetensors");
        table->export_weights(folder / "weights.npy");
    });
    embedding_options zeros = options;
    zeros.weights = {};
    embedding_table loaded(zeros, device::host());
    in_cancelled_group([&] { loaded.load(folder / "table.safetensors"); });
    CHECK(weights_of(loaded, ids) == first_weights);
    embedding_table imported(zeros, device::host());
    in_cancelled_group([&] { imported.import_weights(folder / "weights.npy"); });
    CHECK(weights_of(imported, ids) == first_weights);

    std::mt19937_64 random(8);
    const auto fetched = random_ids(random, options.row_count, options.max_batch_ids);
    const stream stream(device::host());
    in_cancelled_group([&] {
        const embedding_lease lease = table->fetch(fetched, stream);
        const std::set<std::uint64_t> different(fetched.begin(), fetched.end());
        CHECK(std::ranges::equal(lease.ids(), different));
    });

    in_cancelled_group([&] { table->grow(70'000); });
    embedding_options larger = options;
    larger.row_count = 70'000;
    embedding_table all(larger, device::host());
    CHECK(weights_of(*table, all_ids(70'000)) == weights_of(all, all_ids(70'000)));
}
