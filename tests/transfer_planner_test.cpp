#include "src/rows/transfer_planner.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pinflow/error.hpp"

// How the arrays of a sample travel: rules without a device, a file or a measurement.

using namespace pinflow;
using namespace pinflow::detail;

namespace {

constexpr std::uint64_t kib = 1024, mib = 1024 * kib, gib = 1024 * mib;

/// A mapped array of a file with `epochs` epochs left.
array_facts mapped(std::uint64_t row_bytes, std::uint64_t size_bytes, std::uint64_t epochs = 5) {
    return {.name = "'x.npy'",
            .row_bytes = row_bytes,
            .row_count = size_bytes / row_bytes,
            .bytes_left = epochs * size_bytes,
            .is_file_backed = true,
            .is_mapped = true,
            .is_partly_mapped = true,
            .is_decoded = false,
            .has_files = true,
            .has_any_file = true,
            .is_aligned = row_bytes % 16 == 0,
            .not_mapped_reason = {}};
}

constexpr sample_facts gpu{.batch_rows = 64, .epoch_batches = 1000, .cores = 16, .is_guarded = true};
constexpr sample_facts host{
    .on_host = true, .batch_rows = 64, .epoch_batches = 1000, .cores = 2, .is_guarded = true};

sample_facts in_order(sample_facts sample) {
    sample.is_in_order = true;
    return sample;
}
sample_facts with_cores(sample_facts sample, unsigned cores) {
    sample.cores = cores;
    return sample;
}
sample_facts requested(sample_facts sample, transfer how) {
    sample.requested = how;
    return sample;
}

transfer_plan plan_of(const sample_facts& sample, const array_facts& array) {
    const std::vector<transfer_plan> plans = plan_sample(sample, {&array, 1});
    REQUIRE(plans.size() == 1);
    CHECK_FALSE(plans[0].reason.empty());
    return plans[0];
}
transfer transfer_of(const sample_facts& sample, const array_facts& array) {
    return plan_of(sample, array).main();
}

}  // namespace

TEST_CASE("planner of samples: the size of a row decides between copy engine, kernel and CPU") {
    for (const std::uint64_t row_bytes : {48 * kib, 64 * kib, 256 * kib, 4 * mib})
        CHECK(transfer_of(gpu, mapped(row_bytes, 8 * gib)) == transfer::copy_engine);
    for (const std::uint64_t row_bytes : {32 * kib, 3 * kib, std::uint64_t{512}, std::uint64_t{72}})
        CHECK(transfer_of(gpu, mapped(row_bytes, 8 * gib)) == transfer::kernel);
    for (const std::uint64_t row_bytes : {std::uint64_t{1}, std::uint64_t{8}, std::uint64_t{64}})
        CHECK(transfer_of(gpu, mapped(row_bytes, gib)) == transfer::staged);
}

TEST_CASE("planner of samples: batches in the order of the file are pieces of the copy engine") {
    CHECK(transfer_of(in_order(gpu), mapped(3 * kib, 8 * gib)) == transfer::copy_engine);
    sample_facts single = in_order(gpu);
    single.batch_rows = 1;
    CHECK(transfer_of(single, mapped(3 * kib, 8 * gib)) == transfer::kernel);
}

TEST_CASE("planner of samples: small rows of large tables are sorted by address, unless they are in order") {
    CHECK_FALSE(plan_of(in_order(gpu), mapped(512, 8 * gib)).parts[0].sorted);
    CHECK(plan_of(gpu, mapped(512, 8 * gib)).parts[0].sorted);
    CHECK_FALSE(plan_of(gpu, mapped(512, gib)).parts[0].sorted);
    CHECK_FALSE(plan_of(gpu, mapped(4 * kib, 8 * gib)).parts[0].sorted);
}

TEST_CASE("planner of samples: rows of small files are gathered by a kernel, in file order, too") {
    array_facts files = mapped(4 * kib, gib);
    const auto with_rows = [&](std::uint64_t rows_of_file) {
        files.extent_count = files.row_count / rows_of_file;
        return transfer_of(in_order(gpu), files);
    };
    CHECK(with_rows(64) == transfer::copy_engine);
    CHECK(with_rows(4) == transfer::kernel);
    // batches of 64 rows end within files of 13: most pieces are shorter than either
    CHECK(with_rows(13) == transfer::kernel);
    CHECK(with_rows(1) == transfer::kernel);
}

TEST_CASE("planner of samples: the copy engine never copies small pieces of files, even if requested") {
    array_facts memory = mapped(4 * kib, gib);
    memory.is_file_backed = memory.has_files = memory.has_any_file = false;
    array_facts both = memory;
    both.has_any_file = true;
    for (const auto& sample : {in_order(gpu), requested(in_order(gpu), transfer::copy_engine)}) {
        for (const array_facts& array : {mapped(4 * kib, gib), mapped(256 * kib, gib), both}) {
            const transfer_plan plan = plan_of(sample, array);
            CHECK(plan.main() == transfer::copy_engine);
            CHECK(plan.parts.front().min_piece_bytes >= 32 * kib);
            CHECK(plan.fallback);
        }
        CHECK(plan_of(sample, memory).parts.front().min_piece_bytes == 0);
    }
    CHECK_FALSE(plan_of(requested(in_order(gpu), transfer::copy_engine), memory).fallback);
}

TEST_CASE("planner of samples: pages are registered if their rows come often enough") {
    const array_facts once = mapped(256 * kib, 8 * gib, 1);
    const array_facts often = mapped(256 * kib, 8 * gib, 5);
    for (const sample_facts& sample : {gpu, in_order(gpu)}) {
        CHECK(plan_of(sample, often).pages);
        CHECK(transfer_of(with_cores(sample, 4), once) == transfer::copy_engine);
        CHECK(plan_of(with_cores(sample, 4), once).fallback == transfer::staged);
    }
    // many cores bring a single epoch at the rate of the link: large rows by reading, small ones by copying
    for (const sample_facts& sample : {gpu, in_order(gpu)}) {
        CHECK(transfer_of(sample, once) == transfer::read);
        CHECK_FALSE(plan_of(sample, once).pages);
    }
    CHECK(transfer_of(gpu, mapped(4 * kib, 8 * gib, 1)) == transfer::staged);
    CHECK(transfer_of(in_order(gpu), mapped(4 * kib, 8 * gib, 1)) == transfer::read);
    // few cores register ahead of the reader
    CHECK_FALSE(plan_of(with_cores(in_order(gpu), 4), once).pages->registers_rest);
    CHECK(plan_of(with_cores(in_order(gpu), 4), often).pages->registers_rest);
    CHECK_FALSE(plan_of(with_cores(in_order(gpu), 4), often).pages->is_awaited);
    // two cores register only
    CHECK(plan_of(with_cores(in_order(gpu), 2), once).pages->is_awaited);
    CHECK(plan_of(with_cores(in_order(gpu), 2), once).pages->registers_rest);
    // a tenth of a shuffled epoch is over before its pages are registered
    array_facts few = once;
    few.bytes_left = once.bytes_left / 10;
    CHECK(transfer_of(with_cores(gpu, 4), few) == transfer::staged);
}

TEST_CASE("planner of samples: many cores read large rows whose pages are not registered") {
    CHECK(plan_of(gpu, mapped(256 * kib, 8 * gib)).fallback == transfer::read);
    CHECK(plan_of(with_cores(gpu, 4), mapped(256 * kib, 8 * gib)).fallback == transfer::staged);
    CHECK(plan_of(gpu, mapped(4 * kib, 8 * gib)).fallback == transfer::staged);
    CHECK(plan_of(in_order(gpu), mapped(4 * kib, 8 * gib)).fallback == transfer::read);
    array_facts memory = mapped(256 * kib, 8 * gib);
    memory.has_files = false;
    CHECK(plan_of(gpu, memory).fallback == transfer::staged);
}

TEST_CASE("planner of samples: small arrays of files are held beside the largest one, 64 MiB in all") {
    const auto transfers = [](const sample_facts& sample, const std::vector<array_facts>& arrays) {
        std::vector<bool> held;
        for (const transfer_plan& plan : plan_sample(sample, arrays))
            held.push_back(plan.main() == transfer::held);
        return held;
    };
    const array_facts images = mapped(256 * kib, 8 * gib);
    using flags = std::vector<bool>;
    CHECK(transfers(gpu, {images, mapped(8, 256 * kib)}) == flags{false, true});
    CHECK(transfers(host, {mapped(8, 256 * kib), images}) == flags{true, false});
    CHECK(transfers(gpu, {mapped(8, 256 * kib)}) == flags{false});
    CHECK(transfers(gpu, {mapped(8, 256 * kib), mapped(8, 256 * kib)}) == flags{false, true});
    CHECK(transfers(gpu, {images, mapped(8, 40 * mib), mapped(8, 30 * mib), mapped(8, 8 * mib)}) ==
          flags{false, false, true, true});
    CHECK(transfers(gpu, {images, mapped(8, 65 * mib)}) == flags{false, false});
    // also if only read_rows gives their rows, but not if nothing notices that they change
    array_facts decoded = mapped(8, mib);
    decoded.is_mapped = decoded.is_partly_mapped = false;
    decoded.extent_count = 0;
    decoded.is_decoded = true;
    CHECK(transfers(gpu, {images, decoded}) == flags{false, true});
    array_facts in_memory = mapped(8, mib);
    in_memory.is_file_backed = false;
    CHECK(transfers(gpu, {images, in_memory}) == flags{false, false});
    // whatever is asked for the others, but views are views of all
    CHECK(transfers(requested(gpu, transfer::staged), {images, mapped(8, mib)}) == flags{false, true});
    CHECK(transfers(requested(in_order(host), transfer::view), {images, mapped(8, mib)}) ==
          flags{false, false});
    // within a quarter of what the loader may take
    sample_facts little = gpu;
    little.memory_bytes = 4 * mib;
    CHECK(transfers(little, {images, mapped(8, 2 * mib), mapped(8, mib)}) == flags{false, false, true});
}

TEST_CASE("planner of samples: rows that cannot be taken in place are staged, decoded or refused") {
    array_facts array = mapped(256 * kib, gib);
    array.is_mapped = array.is_partly_mapped = false;
    array.extent_count = 0;
    array.not_mapped_reason = "is compressed";
    CHECK(transfer_of(gpu, array) == transfer::staged);
    array.is_decoded = true;
    CHECK(transfer_of(gpu, array) == transfer::decode);
    CHECK(transfer_of(host, array) == transfer::decode);
    CHECK(plan_of(gpu, array).reason == "'x.npy' is compressed");
    CHECK_THROWS_AS(plan_of(requested(gpu, transfer::kernel), array), unsupported);
    CHECK_THROWS_AS(plan_of(requested(gpu, transfer::copy_engine), array), unsupported);
    CHECK_THROWS_AS(plan_of(requested(in_order(host), transfer::view), array), unsupported);
    CHECK_THROWS_AS(plan_of(requested(host, transfer::view), mapped(256 * kib, gib)), unsupported);
    array.has_files = false;
    CHECK_THROWS_AS(plan_of(requested(gpu, transfer::read), array), unsupported);
}

TEST_CASE("planner of samples: a requested route is taken even if another route is faster") {
    const array_facts small = mapped(3 * kib, gib);
    for (const transfer how : {transfer::copy_engine, transfer::kernel}) {
        CHECK(transfer_of(requested(gpu, how), small) == how);
        CHECK(plan_of(requested(gpu, how), small).pages->is_required);
    }
    for (const transfer how : {transfer::staged, transfer::read}) {
        CHECK(transfer_of(requested(gpu, how), small) == how);
        CHECK(transfer_of(requested(host, how), small) == how);
        CHECK_FALSE(plan_of(requested(gpu, how), small).pages);
    }
    CHECK(transfer_of(requested(in_order(host), transfer::view), small) == transfer::view);
}

TEST_CASE("planner of samples: batches are filled in groups of some bytes, in a bounded number of slots") {
    const auto groups = [](const sample_facts& sample, std::uint64_t batch_bytes) {
        const std::vector<transfer_plan> plans{plan_of(sample, mapped(4 * kib, gib))};
        const group_plan plan = plan_groups(sample, plans, batch_bytes);
        CHECK(plan.max_slots == std::max(8U, 4 * plan.batches));
        return plan.batches;
    };
    CHECK(groups(gpu, 16 * mib) == 1);
    CHECK(groups(gpu, 100 * mib) == 1);
    CHECK(groups(gpu, 2 * mib) == 8);
    CHECK(groups(gpu, 256 * kib) == 64);
    CHECK(groups(gpu, 0) == 64);
    CHECK(groups(host, 2 * mib) == 2);
    CHECK(groups(requested(gpu, transfer::read), 2 * mib) == 16);
    sample_facts tiny = gpu;
    tiny.epoch_batches = 20;
    const std::vector<transfer_plan> plans{plan_of(gpu, mapped(4 * kib, gib))};
    CHECK(plan_groups(tiny, plans, 4 * kib).max_slots == 20);
}

TEST_CASE("planner of samples: the number of threads follows the work") {
    CHECK(count_threads({.copies = true}, 16) == 16);
    CHECK(count_threads({.copies = true, .registers = true}, 16) == 8);
    CHECK(count_threads({.copies = true, .registers = true}, 4) == 3);
    CHECK(count_threads({.copies = true, .registers = true}, 2) == 1);
    CHECK(count_threads({.copies = true, .registers = true}, 64) == 10);
    CHECK(count_threads({.copies = true, .registers = true}, 1) == 1);
    CHECK(count_threads({}, 16) == 4);
    CHECK(count_threads({}, 2) == 2);
}

TEST_CASE("planner of calls: rows of files are left to the device's kernels") {
    call_facts call{.row_bytes = 64 * kib,
                    .table_bytes = gib,
                    .staging_buffer_bytes = mib,
                    .not_reached_reason = {},
                    .requested = row_route::copy};
    const auto kernels = [&] {
        const std::vector<transfer_plan> plans = gather_candidates(call);
        return std::ranges::count(plans, transfer::kernel, &transfer_plan::main) ==
               static_cast<std::ptrdiff_t>(plans.size());
    };
    CHECK(plan_call(call)->main() == transfer::copy_engine);
    CHECK_FALSE(kernels());
    call.is_file_backed = true;
    CHECK(plan_call(call)->main() == transfer::kernel);
    CHECK(kernels());
}
