#include "loader/pipeline_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

// The sizes of a loader's groups and the number of its slots and threads.

using namespace pinflow::detail;

namespace {

constexpr std::uint64_t kib = 1024, mib = 1024 * kib;

constexpr sample_facts gpu{.batch_rows = 64, .epoch_batches = 1000, .cores = 16, .is_guarded = true};
constexpr sample_facts host{.on_host = true, .batch_rows = 64, .epoch_batches = 1000, .cores = 2};

group_plan planned(const sample_facts& sample, transfer how, std::uint64_t batch_bytes) {
    const std::vector<transfer_plan> plans{{{{how}}, std::nullopt, std::nullopt, {}}};
    return plan_groups(sample, plans, batch_bytes);
}

}  // namespace

TEST_CASE("pipeline plan: the size of a batch decides the size of groups and the number of slots") {
    const auto groups = [](const sample_facts& sample, transfer how, std::uint64_t batch_bytes) {
        const group_plan plan = planned(sample, how, batch_bytes);
        CHECK(plan.max_slots == std::max(8U, 4 * plan.batches));
        return plan.batches;
    };
    CHECK(groups(gpu, transfer::kernel, 16 * mib) == 1);
    CHECK(groups(gpu, transfer::kernel, 100 * mib) == 1);
    CHECK(groups(gpu, transfer::kernel, 2 * mib) == 8);
    CHECK(groups(gpu, transfer::kernel, 256 * kib) == 64);
    CHECK(groups(gpu, transfer::kernel, 0) == 64);
    CHECK(groups(host, transfer::slot_copy, 2 * mib) == 2);
    CHECK(groups(gpu, transfer::read, 2 * mib) == 16);
    sample_facts tiny = gpu;
    tiny.epoch_batches = 20;
    CHECK(planned(tiny, transfer::kernel, 4 * kib).max_slots == 20);
    CHECK(planned(host, transfer::view, 4 * kib).batches == 1);
}

TEST_CASE("pipeline plan: long batches that the CPU reads or stages pass through shared staging buffers") {
    struct travelling {
        transfer how;
        std::uint64_t row_bytes;
    };
    const auto plan = [&](const sample_facts& sample, const std::vector<travelling>& arrays,
                          std::uint64_t max_bytes = 1024 * mib) {
        std::vector<array_facts> facts;
        std::vector<transfer_plan> plans;
        for (const travelling& each : arrays) {
            array_facts& of_array = facts.emplace_back();
            of_array.row_bytes = each.row_bytes;
            of_array.row_count = 100'000;
            plans.push_back({{{each.how}}, std::nullopt, std::nullopt, {}});
        }
        const staging_plan staging = plan_staging(sample, facts, plans, max_bytes);
        for (std::size_t i = 0; i < plans.size(); ++i)
            CHECK(plans[i].is_buffered == (staging.count != 0 && arrays[i].how != transfer::held));
        const group_plan groups = plan_groups(sample, plans, 2 * mib);
        CHECK(groups.max_filled == (staging.count != 0 ? 4 : 0));
        if (staging.count != 0) CHECK(groups.max_slots == 8 * groups.batches);
        return staging.count;
    };
    const travelling images{transfer::read, 256 * kib};
    CHECK(plan(gpu, {images}) == 32);
    CHECK(plan(gpu, {{transfer::staged, 256 * kib}}) == 32);
    CHECK(plan(gpu, {images, {transfer::held, 8}}) == 32);
    CHECK(plan(gpu, {images, {transfer::staged, 8}}) == 32);
    sample_facts few = gpu;
    few.cores = 2;
    CHECK(plan(few, {images}) == 4);
    few.cores = 200;
    CHECK(plan(few, {images}) == 32);
    // slots need staging memory anyway, for rows that are decoded, that are longer than a buffer, or that
    // kernels gather
    CHECK(plan(gpu, {images, {transfer::decode, 8}}) == 0);
    CHECK(plan(gpu, {images, {transfer::read, 3 * mib}}) == 0);
    CHECK(plan(gpu, {images, {transfer::kernel, 4 * kib}}) == 0);
    // short batches, the host device, and little memory
    CHECK(plan(gpu, {{transfer::staged, 8 * kib}}) == 0);
    CHECK(plan(gpu, {{transfer::held, 8 * kib}}) == 0);
    CHECK(plan(host, {images}) == 0);
    CHECK(plan(gpu, {images}, 64 * mib) == 32);
    CHECK(plan(gpu, {images}, 64 * mib - 1) == 0);
}

TEST_CASE(
    "pipeline plan: rows of pages that are being registered pass through staging buffers, in groups as "
    "without") {
    array_facts images;
    images.row_bytes = 256 * kib;
    images.row_count = 100'000;
    const auto plan = [&](transfer how, bool is_required, sample_facts sample = gpu) {
        std::vector<transfer_plan> plans{
            {{{how}}, transfer::staged, registration{.is_required = is_required}, {}}};
        const staging_plan staging = plan_staging(sample, {&images, 1}, plans, 1024 * mib);
        CHECK(plans[0].is_buffered == (staging.count != 0));
        const group_plan groups = plan_groups(sample, plans, 2 * mib);
        CHECK(groups.max_filled == 0);
        CHECK(groups.max_slots == 4 * groups.batches);
        return staging.count;
    };
    CHECK(plan(transfer::copy_engine, false) == 32);
    sample_facts few = gpu;
    few.cores = 4;
    CHECK(plan(transfer::copy_engine, false, few) == 8);
    CHECK(plan(transfer::copy_engine, true) == 0);
    CHECK(plan(transfer::kernel, false) == 0);
}

TEST_CASE("pipeline plan: the number of threads follows the work") {
    CHECK(count_threads({.needs_cpu = true}, 16) == 16);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 16) == 12);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 8) == 6);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 4) == 3);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 2) == 1);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 64) == 12);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 1) == 1);
    CHECK(count_threads({}, 16) == 4);
    CHECK(count_threads({}, 2) == 2);
}
