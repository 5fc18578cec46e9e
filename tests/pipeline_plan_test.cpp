#include "loader/pipeline_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>

// The sizes of a loader's groups and the number of its slots and threads.

using namespace pinflow::detail;

namespace {

constexpr std::uint64_t kib = 1024, mib = 1024 * kib;

constexpr sample_facts gpu{.batch_rows = 64, .epoch_batches = 1000, .cores = 16, .is_guarded = true};
constexpr sample_facts host{.on_host = true, .batch_rows = 64, .epoch_batches = 1000, .cores = 2};

group_plan planned(const sample_facts& sample, transfer how, std::uint64_t batch_bytes) {
    sample_array array;
    array.plan = only({how}, {});
    return plan_groups(sample, {&array, 1}, batch_bytes);
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
    CHECK(groups(host, transfer::slot_copy, mib) == 4);
    CHECK(groups(host, transfer::slot_copy, 256 * kib) == 16);
    sample_facts many = host;
    many.cores = 1;
    CHECK(groups(many, transfer::slot_copy, 256 * kib) == 8);
    many.cores = 16;
    CHECK(groups(many, transfer::slot_copy, 256 * kib) == 16);
    CHECK(groups(gpu, transfer::read, 2 * mib) == 16);
    sample_facts tiny = gpu;
    tiny.epoch_batches = 20;
    CHECK(planned(tiny, transfer::kernel, 4 * kib).max_slots == 20);
    CHECK(planned(host, transfer::view, 4 * kib).batches == 1);
}

TEST_CASE("pipeline plan: batches of a caller's own source form no groups, and keep the number of slots") {
    sample_array own;
    own.facts.is_decoded = own.facts.is_callers_own = true;
    own.plan = only({transfer::decode}, {});
    for (const sample_facts& sample : {gpu, host}) {
        const group_plan plan = plan_groups(sample, {&own, 1}, 64 * kib);
        CHECK(plan.batches == 1);
        CHECK(plan.max_slots == planned(sample, transfer::decode, 64 * kib).max_slots);
        CHECK(planned(sample, transfer::decode, 64 * kib).batches > 1);
    }
}

TEST_CASE(
    "pipeline plan: if all rows pass through shared buffers, slots form more groups, few are filled at "
    "once") {
    sample_array images;
    images.facts.row_bytes = 32 * kib;
    images.plan = only({transfer::read}, {});
    const auto plan = [&] { return plan_groups(gpu, {&images, 1}, 2 * mib); };
    CHECK(plan().max_filled == 0);
    CHECK(plan().max_slots == 4 * plan().batches);
    images.plan.is_buffered = true;
    CHECK(plan().max_filled == 4);
    CHECK(plan().max_slots == 8 * plan().batches);
    // only rows whose pages are not registered yet pass through the buffers
    images.plan = only({transfer::copy_engine}, {});
    images.plan.is_buffered = true;
    images.plan.pages = registration{};
    CHECK(plan().max_filled == 0);
    CHECK(plan().max_slots == 4 * plan().batches);
}

TEST_CASE("pipeline plan: the number of threads follows the work") {
    CHECK(count_threads({.needs_cpu = true}, 16) == 16);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 16) == 12);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 8) == 6);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 4) == 3);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 2) == 1);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 64) == 12);
    CHECK(count_threads({.needs_cpu = true, .registers = true}, 1) == 1);
    CHECK(count_threads({.sample_bytes = 4096}, 16) == 4);
    CHECK(count_threads({.sample_bytes = 4096}, 2) == 2);
    // samples of few bytes
    CHECK(count_threads({.is_in_order = true, .sample_bytes = 128}, 16) == 4);
    CHECK(count_threads({.is_in_order = true, .sample_bytes = 4}, 16) == 16);
    CHECK(count_threads({.sample_bytes = 128}, 16) == 9);
    CHECK(count_threads({.sample_bytes = 8}, 16) == 16);
    CHECK(count_threads({.registers = true, .sample_bytes = 128}, 16) == 12);
}
