#include "src/rows/transfer_planner.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"

// The planner's rules for samples, reads, calls and loads, without a device, a file or a measurement.

using namespace pinflow;
using namespace pinflow::detail;

namespace {

constexpr std::uint64_t kib = 1024, mib = 1024 * kib, gib = 1024 * mib;

/// A mapped array of a file with `epochs` epochs left.
array_facts mapped(std::uint64_t row_bytes, std::uint64_t size_bytes, std::uint64_t epochs = 5) {
    return {.name = "'x.npy'",
            .row_bytes = row_bytes,
            .row_count = size_bytes / row_bytes,
            .span_bytes = size_bytes,
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
    sample_array only{nullptr, array};
    plan_sample(sample, {&only, 1});
    CHECK_FALSE(only.plan.reason.empty());
    return only.plan;
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

TEST_CASE("planner of samples: few cores leave the smallest rows of files to a kernel, in random order") {
    const array_facts labels = mapped(8, gib);
    CHECK(transfer_of(with_cores(gpu, 8), labels) == transfer::staged);
    CHECK(transfer_of(with_cores(gpu, 4), labels) == transfer::kernel);
    array_facts in_memory = labels;
    in_memory.is_file_backed = in_memory.has_files = in_memory.has_any_file = false;
    CHECK(transfer_of(with_cores(gpu, 4), in_memory) == transfer::staged);
    for (const array_facts& array : {labels, in_memory}) {
        CHECK(transfer_of(in_order(with_cores(gpu, 4)), array) == transfer::staged);
        sample_facts long_batches = in_order(gpu);
        long_batches.batch_rows = 8192;
        CHECK(transfer_of(long_batches, array) == transfer::copy_engine);
    }
}

TEST_CASE("planner of samples: in file order the size of a batch decides between copy engine and kernel") {
    CHECK(transfer_of(in_order(gpu), mapped(3 * kib, 8 * gib)) == transfer::copy_engine);
    sample_facts single = in_order(gpu);
    single.batch_rows = 1;
    CHECK(transfer_of(single, mapped(3 * kib, 8 * gib)) == transfer::kernel);
}

TEST_CASE("planner of samples: small rows of large tables are sorted by address, unless they are in order") {
    CHECK_FALSE(plan_of(in_order(gpu), mapped(512, 8 * gib)).parts[0].sorted);
    CHECK(plan_of(gpu, mapped(512, 8 * gib)).parts[0].sorted);
    CHECK(plan_of(gpu, mapped(512, gib)).parts[0].sorted);
    CHECK_FALSE(plan_of(gpu, mapped(512, 512 * mib)).parts[0].sorted);
    CHECK_FALSE(plan_of(gpu, mapped(4 * kib, 8 * gib)).parts[0].sorted);
}

TEST_CASE("planner of samples: in file order, too, a kernel gathers the rows of small files") {
    array_facts files = mapped(4 * kib, gib);
    const auto with_rows = [&](std::uint64_t rows_of_file) {
        files.extent_count = files.row_count / rows_of_file;
        return transfer_of(in_order(gpu), files);
    };
    CHECK(with_rows(64) == transfer::copy_engine);
    CHECK(with_rows(4) == transfer::kernel);
    // batches of 64 rows and files of 13 rows end at different rows: pieces average 11 rows of 4 KiB, less
    // than the 48 KiB of the copy engine
    CHECK(with_rows(13) == transfer::kernel);
    CHECK(with_rows(1) == transfer::kernel);
}

TEST_CASE("planner of samples: strided rows travel one by one") {
    array_facts windows = mapped(2 * kib, 8 * gib);
    windows.is_strided = true;
    CHECK(transfer_of(in_order(gpu), windows) == transfer::kernel);
    CHECK_THROWS_AS(plan_of(requested(in_order(host), transfer::view), windows), unsupported);
    windows = mapped(64 * kib, 8 * gib);
    windows.is_strided = true;
    CHECK(transfer_of(in_order(gpu), windows) == transfer::copy_engine);
}

TEST_CASE(
    "planner of samples: whether page-locking pays off depends on the spanned bytes, not on those of rows") {
    // one epoch of overlapping windows reads each page several times
    array_facts windows = mapped(2 * kib, 8 * gib, 1);
    windows.is_strided = true;
    CHECK_FALSE(plan_of(gpu, windows).pages);
    windows.span_bytes = gib;
    CHECK(plan_of(gpu, windows).pages);
    // windows that overlap by one element are one pass
    windows.span_bytes = 8 * gib - 4 * mib;
    CHECK_FALSE(plan_of(gpu, windows).pages);
    // few bytes of many pages, in any number of passes
    array_facts field = mapped(kib, gib, 1000);
    field.is_strided = true;
    field.span_bytes = 4 * gib;
    for (const sample_facts& sample :
         {gpu, in_order(gpu), with_cores(gpu, 2), with_cores(in_order(gpu), 2)}) {
        field.span_bytes = 4 * gib;
        CHECK(plan_of(sample, field).pages);
        field.span_bytes = 5 * gib;
        CHECK_FALSE(plan_of(sample, field).pages);
    }
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
    // with many cores, a single epoch registers nothing: rows are read, but small shuffled rows are staged
    for (const sample_facts& sample : {gpu, in_order(gpu)}) {
        CHECK(transfer_of(sample, once) == transfer::read);
        CHECK_FALSE(plan_of(sample, once).pages);
    }
    CHECK(transfer_of(gpu, mapped(4 * kib, 8 * gib, 1)) == transfer::staged);
    CHECK(transfer_of(in_order(gpu), mapped(4 * kib, 8 * gib, 1)) == transfer::read);
    // with 4 cores, pages that the reader has passed are registered only if their rows come again
    CHECK_FALSE(plan_of(with_cores(in_order(gpu), 4), once).pages->registers_rest);
    CHECK(plan_of(with_cores(in_order(gpu), 4), often).pages->registers_rest);
    CHECK_FALSE(plan_of(with_cores(in_order(gpu), 4), often).pages->is_awaited);
    // with two cores, rows wait for their pages
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
    const auto transfers = [](const sample_facts& sample, const std::vector<array_facts>& facts) {
        std::vector<sample_array> arrays;
        for (const array_facts& each : facts)
            arrays.push_back({nullptr, each});
        plan_sample(sample, arrays);
        std::vector<bool> held;
        for (const sample_array& each : arrays)
            held.push_back(each.plan.main() == transfer::held);
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
    // Decoded arrays are held too. Arrays in memory are not: the loader could not detect changes to them.
    array_facts decoded = mapped(8, mib);
    decoded.is_mapped = decoded.is_partly_mapped = false;
    decoded.extent_count = 0;
    decoded.is_decoded = true;
    CHECK(transfers(gpu, {images, decoded}) == flags{false, true});
    array_facts in_memory = mapped(8, mib);
    in_memory.is_file_backed = false;
    CHECK(transfers(gpu, {images, in_memory}) == flags{false, false});
    // A requested transfer does not apply to held arrays. Exception: with views, no array is held.
    CHECK(transfers(requested(gpu, transfer::staged), {images, mapped(8, mib)}) == flags{false, true});
    CHECK(transfers(requested(in_order(host), transfer::view), {images, mapped(8, mib)}) ==
          flags{false, false});
    // held arrays take at most a quarter of the memory that the loader may take
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

TEST_CASE("planner of calls: without a measurement, the sizes decide") {
    const call_facts usual{.count = 131072,
                           .row_bytes = 512,
                           .table_bytes = 5 * gib,
                           .threads = 16,
                           .staging_buffer_bytes = 8 * mib};
    const auto planned = [&](auto change) {
        call_facts call = usual;
        change(call);
        CHECK(has_choice(call));
        const transfer_plan plan = plan_call(call).plan;
        CHECK(plan.reason.starts_with("not measured: "));
        return std::pair(route_of(plan), plan.parts.front().sorted);
    };
    using row = std::pair<row_route, bool>;
    CHECK(planned([](call_facts&) {}) == row(row_route::direct, true));
    CHECK(planned([](call_facts& call) { call.ids = ids_in::device_memory; }) ==
          row(row_route::direct, true));
    // few rows, a small table, longer rows
    CHECK(planned([](call_facts& call) { call.count = 64; }) == row(row_route::direct, false));
    CHECK(planned([](call_facts& call) { call.table_bytes = 512 * mib; }) == row(row_route::direct, false));
    CHECK(planned([](call_facts& call) { call.table_bytes = gib; }) == row(row_route::direct, true));
    CHECK(planned([](call_facts& call) { call.row_bytes = 2 * kib; }) == row(row_route::direct, false));
    CHECK(planned([](call_facts& call) { call.row_bytes = 64 * kib; }) == row(row_route::copy, false));
    CHECK(planned([](call_facts& call) {
              call.row_bytes = 64 * kib;
              call.ids = ids_in::device_memory;
          }) == row(row_route::direct, false));
    // a table that is too large for the kernels, with and without cores that help
    CHECK(planned([](call_facts& call) { call.table_bytes = 48 * gib; }) == row(row_route::hybrid, true));
    CHECK(planned([](call_facts& call) {
              call.table_bytes = 48 * gib;
              call.threads = 2;
          }) == row(row_route::direct, true));
    CHECK(planned([](call_facts& call) {
              call.table_bytes = 48 * gib;
              call.is_file_backed = true;
          }) == row(row_route::direct, true));
    CHECK(planned([](call_facts& call) { call.is_scatter = true; }) == row(row_route::direct, true));
    CHECK(planned([](call_facts& call) {
              call.is_scatter = true;
              call.table_bytes = 48 * gib;
          }) == row(row_route::staged, true));
}

TEST_CASE("planner of calls: a measured plan is taken if there is a choice and its staging buffers exist") {
    call_facts call{
        .count = 131072, .row_bytes = 512, .table_bytes = 5 * gib, .staging_buffer_bytes = 8 * mib};
    const rated_plan direct = plan_call(call);
    const rated_plan hybrid{hybrid_candidate(call, 40, 20), 50};
    CHECK(route_of(plan_call(call, hybrid).plan) == row_route::hybrid);
    CHECK(plan_call(call, hybrid).gbps == 50);
    call.can_stage = false;
    CHECK(route_of(plan_call(call, hybrid).plan) == route_of(direct.plan));
    call.can_stage = true;
    call.requested = row_route::copy;
    CHECK_FALSE(has_choice(call));
    CHECK(route_of(plan_call(call, hybrid).plan) == row_route::copy);
}

TEST_CASE("planner of calls: rows of files are left to the device's kernels") {
    call_facts call{
        .row_bytes = 64 * kib, .table_bytes = gib, .staging_buffer_bytes = mib, .requested = row_route::copy};
    const auto kernels = [&] {
        const std::vector<transfer_plan> plans = gather_candidates(call);
        return std::ranges::count(plans, transfer::kernel, &transfer_plan::main) ==
               static_cast<std::ptrdiff_t>(plans.size());
    };
    CHECK(plan_call(call).plan.main() == transfer::copy_engine);
    CHECK_FALSE(kernels());
    call.is_file_backed = true;
    CHECK(plan_call(call).plan.main() == transfer::kernel);
    CHECK(kernels());
}

TEST_CASE(
    "planner of calls: on the host device the CPU copies rows of files, unless the route staged is "
    "requested") {
    call_facts call{.row_bytes = 64, .table_bytes = gib, .staging_buffer_bytes = mib};
    call.is_file_backed = true;
    call.on_host = true;
    for (const row_route route :
         {row_route::automatic, row_route::direct, row_route::copy, row_route::hybrid}) {
        call.requested = route;
        const transfer_plan plan = plan_call(call).plan;
        CHECK(plan.parts.size() == 1);
        CHECK(plan.main() == transfer::kernel);
        CHECK_FALSE(plan.parts.front().sorted);
        CHECK(plan.reason.starts_with("on the host device the CPU copies rows of files without staging"));
    }
    call.requested = row_route::staged;
    CHECK(plan_call(call).plan.main() == transfer::staged);
}

TEST_CASE("planner of calls: scatters are staged if that is expected to be clearly faster") {
    const auto is = [](double direct_gather, double staged_gather, double link, row_route route,
                       double gbps) {
        const rated_plan judged = judge_scatter({.is_scatter = true}, direct_gather, staged_gather, link);
        CAPTURE(direct_gather);
        CAPTURE(staged_gather);
        CHECK(route_of(judged.plan) == route);
        CHECK(judged.gbps == doctest::Approx(gbps));
    };
    // as measured with rows of 512 bytes from tables of 10 million rows, 16 GiB and 48 GiB
    is(47.7, 27.5, 55.0, row_route::direct, 50.562);
    is(42.4, 30.0, 55.0, row_route::direct, 44.944);
    is(26.3, 30.1, 55.0, row_route::staged, 42.14);
    // the throughput of rows in order limits both routes
    is(54.0, 60.0, 55.0, row_route::direct, 55.0);
    is(20.0, 60.0, 55.0, row_route::staged, 55.0);
    is(30.0, 0, 55.0, row_route::direct, 31.8);
}

TEST_CASE(
    "planner of samples: long batches that the CPU brings to a GPU pass through shared staging buffers") {
    sample_facts sample = gpu;
    sample.max_staging_bytes = gib;
    const auto count = [](const sample_facts& facts, const std::vector<array_facts>& arrays_facts) {
        std::vector<sample_array> arrays;
        for (const array_facts& each : arrays_facts)
            arrays.push_back({nullptr, each});
        const staging_plan staging = plan_sample(facts, arrays);
        for (const sample_array& each : arrays)
            CHECK(each.plan.is_buffered == (staging.count != 0 && each.plan.main() != transfer::held));
        return staging.count;
    };
    const array_facts images = mapped(256 * kib, 8 * gib, 1);  // one epoch: read
    const array_facts labels = mapped(8, 256 * kib);           // held
    const array_facts numbers = mapped(8, 2 * gib, 1);         // staged
    CHECK(count(sample, {images}) == 32);
    CHECK(count(requested(sample, transfer::staged), {images}) == 32);
    CHECK(count(sample, {images, labels}) == 32);
    CHECK(count(sample, {images, numbers}) == 32);
    CHECK(count(requested(with_cores(sample, 2), transfer::read), {images}) == 4);
    CHECK(count(with_cores(sample, 200), {images}) == 32);
    // rows of pages that are being registered, but not if all pages must be registered first
    const array_facts often = mapped(256 * kib, 8 * gib, 5);
    CHECK(count(sample, {often}) == 32);
    CHECK(count(with_cores(sample, 4), {often}) == 8);
    CHECK(count(requested(sample, transfer::copy_engine), {often}) == 0);
    CHECK(count(sample, {mapped(4 * kib, 8 * gib, 5)}) == 0);  // kernels read such rows in the slots
    // slots need staging memory anyway, for rows that are decoded, or are longer than a buffer
    array_facts decoded = mapped(kib, 4 * gib);
    decoded.is_mapped = decoded.is_partly_mapped = false;
    decoded.is_decoded = true;
    CHECK(count(sample, {images, decoded}) == 0);
    CHECK(count(sample, {mapped(3 * mib, 8 * gib, 1)}) == 0);
    // short batches, the host device, and little memory
    CHECK(count(requested(sample, transfer::staged), {mapped(8 * kib, 8 * gib)}) == 0);
    sample_facts on_host = host;
    on_host.max_staging_bytes = gib;
    CHECK(count(requested(on_host, transfer::read), {images}) == 0);
    sample.max_staging_bytes = 64 * mib;
    CHECK(count(sample, {images}) == 32);
    sample.max_staging_bytes = 64 * mib - 1;
    CHECK(count(sample, {images}) == 0);
}

TEST_CASE("planner of access: mapped rows of a file are copied under the guard, unless reads waited lately") {
    const access_facts file{.is_mapped = true, .is_file_backed = true, .can_be_guarded = true};
    const auto changed = [&](auto change) {
        access_facts rows = file;
        change(rows);
        return plan_access(rows);
    };
    CHECK(plan_access(file) == row_access::memory);
    CHECK(changed([](access_facts& rows) { rows.is_mapped = false; }) == row_access::source);
    CHECK(changed([](access_facts& rows) { rows.can_be_guarded = false; }) == row_access::source);
    CHECK(changed([](access_facts& rows) { rows.has_waited_lately = true; }) == row_access::source);
    CHECK(changed([](access_facts& rows) { rows.can_be_guarded = rows.is_file_backed = false; }) ==
          row_access::memory);
}

TEST_CASE("planner of loads: few cores or threads page-lock while they stage, and two cores do not stage") {
    bool is_cached = true;
    bool is_on_tmpfs = false;
    load_facts load{.copyable_bytes = gib,
                    .cores = 16,
                    .threads = 4,
                    .is_in_page_cache = [&] { return is_cached; },
                    .is_on_tmpfs = [&] { return is_on_tmpfs; }};
    const auto transfers = [&] {
        const transfer_plan plan = plan_load_transfer(load);
        CHECK_FALSE(plan.reason.empty());
        std::vector<transfer> how;
        for (const transfer_part& part : plan.parts)
            how.push_back(part.how);
        return how;
    };
    const std::vector<transfer> staged{transfer::staged};
    const std::vector<transfer> both{transfer::copy_engine, transfer::staged};
    CHECK(transfers() == both);
    load.threads = 8;
    CHECK(transfers() == both);
    load.threads = 9;
    CHECK(transfers() == staged);
    load.threads = 14;
    load.read_rate_ratio = 0.65;
    CHECK(transfers() == staged);
    load.read_rate_ratio = 0.5;  // short runs
    CHECK(transfers() == both);
    load.read_rate_ratio = 1;
    is_on_tmpfs = true;
    load.threads = 8;
    CHECK(transfers() == both);
    load.is_unlocking = true;
    CHECK(transfers() == staged);
    load.threads = 4;
    CHECK(transfers() == staged);
    load.threads = 3;
    CHECK(transfers() == both);
    is_on_tmpfs = false;
    load.threads = 8;
    CHECK(transfers() == both);
    is_cached = false;
    CHECK(transfers() == staged);
    is_cached = true;
    load.copyable_bytes = 32 * mib - 1;
    CHECK(transfers() == staged);
    load.copyable_bytes = 32 * mib;
    CHECK(transfers() == both);
    load.cores = 3;
    CHECK(transfers() == both);
    load.cores = 2;
    const std::vector<transfer> copied{transfer::copy_engine};
    CHECK(transfers() == copied);
    load.cores = 1;
    is_on_tmpfs = true;
    CHECK(transfers() == copied);
    is_cached = false;
    CHECK(transfers() == staged);
    load.requested = {{transfer::copy_engine}};
    CHECK_THROWS_AS(plan_load_transfer(load), unsupported);
    load.is_all_copyable = true;
    CHECK(transfers() == std::vector<transfer>{transfer::copy_engine});
    load.requested = {{transfer::staged}};
    CHECK(transfers() == staged);
}
