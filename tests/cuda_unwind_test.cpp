#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/load.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/rows.hpp"
#include "pinflow/stream.hpp"
#include "pinflow/train/embedding_table.hpp"
#include "src/device/cuda/api.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/row_tables.hpp"
#include "tests/support/temporary_folder.hpp"

// Exceptions in the middle of a loop that uses memory asynchronously. compute-sanitizer sees what the test
// cannot: work that runs on memory that was freed.

using namespace pinflow;

namespace {

constexpr std::uint64_t row_bytes = 512;
constexpr std::uint64_t row_count = 2000;
constexpr std::uint64_t batch_rows = 300;
constexpr std::uint64_t batch_bytes = batch_rows * row_bytes;
constexpr std::uint64_t max_calls = 100'000;  ///< far more than a loop makes

/// A loop of gathers and scatters. All memory is freed when it ends, also by an exception.
void train(const device& gpu, row_route route) {
    const pinned_buffer values(batch_bytes, gpu);
    const pinned_buffer memory(row_count * row_bytes, gpu);
    const stream stream(gpu);
    const device_buffer batch_1(batch_bytes, stream);
    const device_buffer batch_2(batch_bytes, stream);
    const device_buffer ids_on_device(batch_rows * sizeof(std::uint64_t), stream);
    row_exchange exchange(row_table(memory.bytes(), row_bytes), gpu,
                          {.route = route, .max_calls_in_flight = 4, .staging_bytes = 64 << 10});
    for (std::uint64_t step = 0; step < 3; ++step) {
        id_vector ids_1(batch_rows);
        id_vector ids_2(batch_rows);
        for (std::uint64_t i = 0; i < batch_rows; ++i) {
            ids_1[i] = (step * 700 + i) % row_count;
            ids_2[i] = (step * 700 + 200 + i) % row_count;
        }
        const row_gather known[] = {{ids_of(ids_1), batch_1.data()}, {ids_of(ids_2), batch_2.data()}};
        exchange.gather_group_async(known, stream);
        for (const device_buffer* const batch : {&batch_1, &batch_2}) {
            copy_to_host_async(values.bytes(), batch->data(), stream);
            stream.host_function_async([bytes = values.bytes()] {
                for (std::byte& byte : bytes)
                    byte ^= std::byte{1};
            });
            copy_to_device_async(batch->data(), values.bytes(), stream);
        }
        const row_scatter changed[] = {{ids_of(ids_1), batch_1.data()}, {ids_of(ids_2), batch_2.data()}};
        exchange.scatter_group_async(changed, duplicate_policy::last, stream);
        exchange.check();
        if (route == row_route::copy) continue;  // takes only indices in host memory
        copy_to_device_async(ids_on_device.data(), std::as_bytes(std::span(ids_1)), stream);
        const row_ids ids = row_ids::on_device(ids_on_device.data(), batch_rows);
        exchange.gather_async(ids, batch_1.data(), stream);
        exchange.scatter_async(ids, batch_1.data(), duplicate_policy::error, stream);
        stream.synchronize();  // ids_1 was copied
    }
    stream.synchronize();
    exchange.check();
}

/// Steps of an embedding table. The GPU groups 2048 ids and more, the CPU fewer.
void train_table(const device& gpu) {
    embedding_options options;
    options.row_count = row_count;
    options.columns = 8;
    options.max_batch_ids = 3000;
    options.device_rows = 100;
    const stream stream(gpu);
    const device_buffer gradients(options.max_batch_ids * options.columns * sizeof(float), stream);
    const std::vector<std::byte> zeros(gradients.size_bytes());
    copy_to_device_async(gradients.data(), zeros, stream);
    stream.synchronize();
    std::vector<std::uint64_t> many(2500);
    for (std::size_t i = 0; i < many.size(); ++i)
        many[i] = i * 7 % row_count;
    const std::vector<std::uint64_t> few(many.begin(), many.begin() + 300);
    const device_buffer on_device(many.size() * sizeof(std::uint64_t), stream);
    copy_to_device_async(on_device.data(), std::as_bytes(std::span(many)), stream);
    stream.synchronize();
    embedding_table table(options, gpu);
    const auto commit = [&](embedding_lease lease) {
        table.commit(std::move(lease), gradients.data(), dtype::of<float>(), stream);
    };
    for (int step = 0; step < 2; ++step) {
        table.prefetch(many);
        embedding_lease lease = table.fetch(many, stream);
        table.prefetch(few);
        const std::uint64_t different = lease.row_count();  // an exception must leave this function
        const std::span<const std::uint64_t> ids = lease.ids();
        CHECK(ids.size() == different);
        commit(std::move(lease));
        commit(table.fetch(few, stream));
        static_cast<void>(table.fetch(many, stream));
        commit(table.fetch(row_ids::on_device(on_device.data(), many.size()), stream));
    }
    table.synchronize();
}

/// Three shuffled epochs of rows of 64-bit words, the first of which is the row's number, and of numbers
/// beside them, which are held. Ends with an exception, or has delivered all rows.
void stream_rows(const device& gpu, const std::filesystem::path& folder, std::uint64_t rows_of_batch) {
    const stream stream(gpu);
    loader loader({open_npy(folder / "rows.npy"), open_npy(folder / "numbers.npy")},
                  {.device = gpu, .batch_rows = rows_of_batch, .order = order::shuffled, .epochs = 3});
    std::vector<unsigned> delivered(loader.row_count());
    while (const auto batch = loader.next(stream)) {
        const auto numbers = elements_of<std::uint64_t>(*batch, 1, stream);
        CHECK(std::ranges::equal(numbers, batch->row_ids()));
        const auto words = elements_of<std::uint64_t>(*batch, 0, stream);
        const std::size_t width = words.size() / numbers.size();
        for (std::size_t row = 0; row < numbers.size(); ++row) {
            CHECK(words[row * width] == numbers[row]);
            ++delivered[numbers[row]];
        }
    }
    CHECK(std::ranges::count(delivered, 3U) == std::ssize(delivered));
}

/// Loads a tensor. Ends with an exception, or has loaded it.
void load_rows(const device& gpu, const std::filesystem::path& path, load_route route,
               std::span<const std::byte> expected) {
    load_options options;
    options.route = route;
    const loaded_tensors loaded = load_tensors({path}, gpu, options);
    const device_tensor& tensor = loaded["rows"];
    const stream stream(gpu);
    const auto found = to_host(tensor.data(), tensor.size_bytes(), stream);
    CHECK(std::ranges::equal(found, expected));
}

/// Runs `loop` once for each CUDA call that it makes, and makes that call fail.
template <typename Loop>
void fail_each_call(Loop loop) {
    loop();  // makes what is made once
    std::uint64_t thrown = 0;
    std::uint64_t failing = 1;
    for (bool is_reached = true; is_reached; ++failing) {
        REQUIRE(failing < max_calls);
        std::atomic<std::uint64_t> calls = 0;
        try {
            const detail::cuda::scoped_failure_hook hook([&](std::string_view) {
                return ++calls == failing ? cudaErrorMemoryAllocation : cudaSuccess;
            });
            loop();
        } catch (const error&) {
            ++thrown;
        }
        is_reached = calls >= failing;
    }
    MESSAGE((failing - 2) << " calls of CUDA, " << thrown << " exceptions");
    CHECK(thrown > 0);
    loop();
}

}  // namespace

TEST_CASE(
    "cuda unwind: an exception at any CUDA call of a loop of exchanges ends it, and the next one runs") {
    const device gpu = device::cuda(0);
    for (const row_route route : {row_route::direct, row_route::staged, row_route::hybrid, row_route::copy}) {
        CAPTURE(to_string(route));
        fail_each_call([&] { train(gpu, route); });
    }
}

TEST_CASE(
    "cuda unwind: a loader delivers all rows or throws if a CUDA call fails, and the next loader runs") {
    const temporary_folder folder;
    for (const std::uint64_t words : {512U, 8192U}) {  // for kernels, and for the copy engine
        CAPTURE(words);
        const std::uint64_t rows = words == 512 ? 300 : 60;
        write_random_rows(folder / "rows.npy", rows, words, 1);
        write_random_rows(folder / "numbers.npy", rows, 1, 1);
        fail_each_call([&] { stream_rows(device::cuda(0), folder.path(), rows / 4); });
    }
}

TEST_CASE("cuda unwind: a load gives the right bytes or throws if a CUDA call fails, and the next one runs") {
    const temporary_folder folder;
    write_random_rows(folder / "rows.npy", 1000, 8192, 1);
    const loaded_tensors mapped = load_tensors({folder / "rows.npy"}, device::host());
    const std::span expected(mapped["rows"].data(), mapped["rows"].size_bytes());
    for (const load_route route : {load_route::staged, load_route::copy, load_route::both}) {
        CAPTURE(static_cast<int>(route));
        fail_each_call([&] { load_rows(device::cuda(0), folder / "rows.npy", route, expected); });
    }
}

TEST_CASE(
    "cuda unwind: an exception at any CUDA call of an embedding table ends its steps, and those of the next "
    "table run") {
    fail_each_call([gpu = device::cuda(0)] { train_table(gpu); });
}
