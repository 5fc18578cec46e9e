#include <cuda_runtime_api.h>
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/cuda.hpp"
#include "pinflow/dlpack.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/load.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/rows.hpp"
#include "pinflow/train/embedding_table.hpp"
#include "src/device/backend.hpp"
#include "src/device/cuda/api.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/row_tables.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

// What calls and batches request of CUDA once they are under way, and what they refuse.

using namespace pinflow;

namespace {

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;

/// Whether a CUDA function allocates outside the pool, page-locks, creates or destroys something, or waits
/// for a stream, an event or the device.
bool is_forbidden(std::string_view call) {
    const auto has = [&](std::string_view part) { return call.find(part) != std::string_view::npos; };
    if (call == "cudaMallocFromPoolAsync" || call == "cudaFreeAsync") return false;
    return has("Malloc") || has("cudaFree") || has("HostAlloc") || has("Register") || has("Create") ||
           has("Destroy") || has("Synchronize");
}

/// Notes the forbidden calls while it is listening.
class listener {
 public:
    /// @param hears_pool whether it also notes allocations from the pool.
    explicit listener(bool hears_pool = false) : hears_pool_(hears_pool) {}
    void listen() { listens_ = true; }
    std::set<std::string> heard() {
        listens_ = false;
        const std::lock_guard lock(mutex_);
        return heard_;
    }

 private:
    bool hears_pool_;
    std::atomic<bool> listens_ = false;
    std::mutex mutex_;
    std::set<std::string> heard_;
    detail::cuda::scoped_failure_hook hook_{[this](std::string_view call) {
        const bool is_of_pool = call == "cudaMallocFromPoolAsync" || call == "cudaFreeAsync";
        if (listens_ && (is_forbidden(call) || (hears_pool_ && is_of_pool))) {
            const std::lock_guard lock(mutex_);
            heard_.emplace(call);
        }
        return cudaSuccess;
    }};
};

constexpr int first_step = 10;
constexpr int last_step = 110;

}  // namespace

TEST_CASE(
    "cuda steady: gathers and scatters make no CUDA call that allocates outside the pool, creates or waits") {
    const device gpu = device::cuda(0);
    constexpr std::uint64_t row_bytes = 512;
    constexpr std::uint64_t row_count = 32'768;
    constexpr std::uint64_t max_rows = 4096;
    std::mt19937_64 random(71);
    for (const row_route route :
         {row_route::automatic, row_route::direct, row_route::copy, row_route::staged, row_route::hybrid}) {
        for (const id_place place : {id_place::host, id_place::device}) {
            if (route == row_route::copy && place == id_place::device) continue;
            CAPTURE(to_string(route));
            CAPTURE(static_cast<int>(place));
            const pinned_buffer memory(row_count * row_bytes, gpu);
            const stream stream(gpu);
            const device_buffer rows(max_rows * row_bytes, stream);
            std::vector<id_list> lists;
            for (std::uint64_t i = 0; i < 8; ++i) {
                lists.emplace_back(gpu, make_ids(id_order::random, max_rows - 500 * i, row_count, random),
                                   place);
            }
            row_exchange exchange(row_table(memory.bytes(), row_bytes), gpu, {.route = route});
            listener listener;
            for (int step = 0; step < last_step; ++step) {
                if (step == first_step) listener.listen();
                const id_list& ids = lists[static_cast<std::size_t>(step) % lists.size()];
                exchange.gather_async(ids.get(), rows.data(), stream);
                exchange.scatter_async(ids.get(), rows.data(), duplicate_policy::last, stream);
                exchange.check();
            }
            const std::set<std::string> heard = listener.heard();
            stream.synchronize();
            for (const std::string& call : heard)
                FAIL_CHECK(call);
        }
    }
}

TEST_CASE("cuda steady: the first calls of an exchange return within a millisecond, whatever their sizes") {
    const device gpu = device::cuda(0);
    constexpr std::uint64_t row_bytes = 512;
    constexpr std::uint64_t row_count = 200'000;
    constexpr std::uint64_t rows_more = sanitized ? 64 : 2048;  // in each call than in the call before
    std::mt19937_64 random(74);
    const pinned_buffer memory(row_count * row_bytes, gpu);
    for (const id_place place : {id_place::host, id_place::device}) {
        for (const bool scatters : {false, true}) {
            CAPTURE(static_cast<int>(place));
            CAPTURE(scatters);
            const stream stream(gpu);
            std::vector<id_list> lists;
            for (std::uint64_t i = 1; i <= 64; ++i)
                lists.emplace_back(gpu, make_ids(id_order::random, rows_more * i, row_count, random), place);
            const device_buffer rows(64 * rows_more * row_bytes, stream);
            stream.synchronize();
            row_exchange exchange(row_table(memory.bytes(), row_bytes), gpu);
            std::vector<double> milliseconds;
            for (const id_list& ids : lists) {
                const auto start = std::chrono::steady_clock::now();
                if (scatters) {
                    exchange.scatter_async(ids.get(), rows.data(), duplicate_policy::last, stream);
                } else {
                    exchange.gather_async(ids.get(), rows.data(), stream);
                }
                const std::chrono::duration<double, std::milli> passed =
                    std::chrono::steady_clock::now() - start;
                milliseconds.push_back(passed.count());
                stream.synchronize();
            }
            exchange.check();
            if (sanitized) continue;  // instrumented calls take longer
            CHECK(milliseconds.front() < 1);
            // the machine may interrupt one of them
            std::ranges::sort(milliseconds);
            CHECK(milliseconds[milliseconds.size() - 2] < 1);
        }
    }
}

TEST_CASE("cuda steady: a loader makes no CUDA call that allocates outside the pool, creates or waits") {
    const device gpu = device::cuda(0);
    const temporary_folder folder;
    write_random_rows(folder / "images.npy", 4096, 3072, 72);
    write_random_rows(folder / "labels.npy", 4096, 8, 73);
    for (const order order : {order::sequential, order::shuffled}) {
        loader batches({open_npy(folder / "images.npy").rows(), open_npy(folder / "labels.npy").rows()},
                       {.device = gpu, .batch_rows = 32, .order = order, .epochs = 1000});
        const stream stream(gpu);
        listener listener;
        while (batches.report().pin_time.count() == 0)  // pages are registered beside the first batches
            REQUIRE(batches.next(stream));
        for (int step = 0; step < last_step; ++step) {
            if (step == first_step) listener.listen();
            auto batch = batches.next(stream);
            REQUIRE(batch);
            for (const std::size_t index : {0U, 1U})
                CHECK(to_dlpack(*batch, index, stream) != nullptr);
        }
        for (const std::string& call : listener.heard())
            FAIL_CHECK(call);
    }
}

TEST_CASE(
    "cuda steady: steps of an embedding table make no CUDA call that allocates, frees, creates or waits") {
    const device gpu = device::cuda(0);
    embedding_options options;
    options.row_count = 20'000;
    options.columns = 32;
    options.rule = adam{};
    options.max_batch_ids = 3000;
    options.look_ahead = 2;
    options.device_rows = 1000;
    const stream stream(gpu);
    const device_buffer gradients(options.max_batch_ids * options.columns * sizeof(float), stream);
    const std::vector<std::byte> zeros(gradients.size_bytes());
    copy_to_device_async(gradients.data(), zeros, stream);
    stream.synchronize();
    embedding_table table(options, gpu);
    std::mt19937_64 random(5);
    std::vector<std::vector<std::uint64_t>> batches(last_step + 2);
    for (std::size_t i = 0; i < batches.size(); ++i) {
        batches[i].resize(i % 2 == 0 ? options.max_batch_ids : 1000);  // the GPU groups 2048 and more
        std::ranges::generate(batches[i], [&] { return random() % options.row_count; });
    }
    const device_buffer on_device(options.max_batch_ids * sizeof(std::uint64_t), stream);
    copy_to_device_async(on_device.data(), std::as_bytes(std::span(batches[0])), stream);
    listener calls(true);
    table.prefetch(batches[0]);
    table.prefetch(batches[1]);
    for (int step = 0; step < last_step; ++step) {
        if (step == first_step) calls.listen();
        const auto number = static_cast<std::size_t>(step);
        embedding_lease lease = table.fetch(batches[number], stream);
        table.prefetch(batches[number + 2]);
        CHECK(lease.ids().size() == lease.row_count());
        table.commit(std::move(lease), gradients.data(), dtype::of<float>(), stream);
        table.commit(table.fetch(row_ids::on_device(on_device.data(), options.max_batch_ids), stream),
                     gradients.data(), dtype::of<float>(), stream);
    }
    CHECK(calls.heard() == std::set<std::string>());
    table.synchronize();
}

TEST_CASE("cuda steady: a stream that is being captured into a graph is refused, and its capture goes on") {
    const device gpu = device::cuda(0);
    const pinned_buffer memory(4096, gpu);
    row_exchange exchange(row_table(memory.bytes(), 64), gpu);
    CHECK(exchange.is_in_place());
    embedding_table table({.row_count = 10, .columns = 4, .max_batch_ids = 8}, gpu);
    const stream stream(gpu);
    const device_buffer rows(64, stream);
    const id_vector ids{1};
    stream.synchronize();
    REQUIRE(::cudaStreamBeginCapture(to_cuda(stream), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK_THROWS_AS(exchange.gather_async(ids_of(ids), rows.data(), stream), unsupported);
    CHECK_THROWS_AS(table.fetch(row_ids::on_device(rows.data(), 1), stream), unsupported);
    CHECK_THROWS_AS(table.fetch(ids_of(ids), stream), unsupported);
    cudaGraph_t graph = nullptr;
    CHECK(::cudaStreamEndCapture(to_cuda(stream), &graph) == cudaSuccess);
    CHECK(::cudaGraphDestroy(graph) == cudaSuccess);
    exchange.gather_async(ids_of(ids), rows.data(), stream);
    stream.synchronize();
    exchange.check();
}

TEST_CASE("cuda steady: in global mode a graph is captured while loaders, loads and tables work") {
    const device gpu = device::cuda(0);
    const temporary_folder folder;
    write_random_rows(folder / "rows.npy", 500, 3000, 1);
    const stream captured(gpu);
    const device_buffer memory(64, captured);
    captured.synchronize();
    REQUIRE(::cudaStreamBeginCapture(to_cuda(captured), cudaStreamCaptureModeGlobal) == cudaSuccess);
    std::string failure;
    const auto work = [&] {
        const stream stream(gpu);
        loader loader({open_npy(folder / "rows.npy")},
                      {.device = gpu, .batch_rows = 16, .order = order::shuffled, .epochs = 3});
        std::uint64_t rows = 0;
        while (const auto batch = loader.next(stream))
            rows += batch->row_count();
        CHECK(rows == 1500);
        CHECK(load_tensors(std::vector{folder / "rows.npy"}, gpu).tensors.size() == 1);
        constexpr std::uint64_t id_count = 10'000;  // many, which the GPU groups
        embedding_table table({.row_count = 1000, .columns = 4, .max_batch_ids = id_count}, gpu);
        const device_buffer gradients(id_count * 16, stream);
        const std::vector<std::byte> zeros(gradients.size_bytes());
        copy_to_device_async(gradients.data(), zeros, stream);
        const std::vector<std::uint64_t> ids(id_count, 7);
        const device_buffer on_device(id_count * sizeof(std::uint64_t), stream);
        copy_to_device_async(on_device.data(), std::as_bytes(std::span(ids)), stream);
        for (int step = 0; step < 10; ++step) {
            table.prefetch(ids);
            table.commit(table.fetch(ids, stream), gradients.data(), dtype::of<float>(), stream);
            table.commit(table.fetch(row_ids::on_device(on_device.data(), id_count), stream),
                         gradients.data(), dtype::of<float>(), stream);
        }
        stream.synchronize();
        table.synchronize();
    };
    std::thread worker([&] {
        try {
            work();
        } catch (const std::exception& error) {
            failure = error.what();
        }
    });
    worker.join();
    CHECK(failure == "");
    CHECK(::cudaMemsetAsync(memory.data(), 0, 64, to_cuda(captured)) == cudaSuccess);
    cudaGraph_t graph = nullptr;
    CHECK(::cudaStreamEndCapture(to_cuda(captured), &graph) == cudaSuccess);
    if (graph != nullptr) CHECK(::cudaGraphDestroy(graph) == cudaSuccess);
}

TEST_CASE("cuda steady: a hole between registrations of others is found in a table of 300 MiB") {
    const device gpu = device::cuda(0);
    constexpr std::uint64_t size_bytes = 300 * mebibyte;
    constexpr std::uint64_t page_bytes = 4096;
    const memory_region memory = memory_region::anonymous(size_bytes);
    detail::device_backend& backend = gpu.backend();
    const std::uint64_t hole = 177 * mebibyte + 5 * page_bytes;
    std::byte* const behind = memory.data() + hole + page_bytes;
    CHECK_FALSE(backend.reaches(memory.data(), size_bytes));
    REQUIRE(::cudaHostRegister(memory.data(), hole, cudaHostRegisterPortable) == cudaSuccess);
    REQUIRE(::cudaHostRegister(behind, size_bytes - hole - page_bytes, cudaHostRegisterPortable) ==
            cudaSuccess);
    CHECK(backend.reaches(memory.data(), hole));
    CHECK(backend.reaches(memory.data() + 100, hole - 100));
    CHECK(backend.reaches(behind, size_bytes - hole - page_bytes));
    CHECK_FALSE(backend.reaches(memory.data(), hole + 1));
    CHECK_FALSE(backend.reaches(memory.data(), size_bytes));
    REQUIRE(::cudaHostRegister(memory.data() + hole, page_bytes, cudaHostRegisterPortable) == cudaSuccess);
    CHECK(backend.reaches(memory.data(), size_bytes));
    for (std::byte* const registered : {memory.data(), memory.data() + hole, behind})
        CHECK(::cudaHostUnregister(registered) == cudaSuccess);
}
