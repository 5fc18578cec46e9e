// Devices, streams, copies and memory on a GPU, and `main` of all cuda_*_test.cpp. Tests that hold on every
// device are in stream_test.cpp, buffer_test.cpp and api/.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/cuda.hpp"
#include "pinflow/error.hpp"
#include "pinflow/memory.hpp"
#include "pinflow/pin.hpp"
#include "src/device/backend.hpp"
#include "src/device/cuda/api.hpp"
#include "src/device/cuda/context.hpp"
#include "src/device/pin_registry.hpp"
#include "tests/cuda_kernels.hpp"
#include "tests/cuda_process_test.hpp"
#include "tests/listener.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/file_bytes.hpp"

using namespace pinflow;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;

unsigned cases_run = 0;

struct case_counter : listener {
    using listener::listener;
    void test_case_start(const doctest::TestCaseData&) override { ++cases_run; }
};

/// An int in pinned memory that a spinning kernel waits for; set at the end, so that a failed test does not
/// hang.
class spin_flag {
 public:
    explicit spin_flag(const device& device) : memory_(sizeof(int), device) {}
    spin_flag(const spin_flag&) = delete;
    spin_flag& operator=(const spin_flag&) = delete;
    ~spin_flag() {
        set();
        ::cudaDeviceSynchronize();
    }
    void set() const { std::atomic_ref<int>(*word()).store(1); }
    int* word() const { return reinterpret_cast<int*>(memory_.data()); }

 private:
    pinned_buffer memory_;
};

unsigned* word_of(const device_buffer& buffer) {
    return reinterpret_cast<unsigned*>(buffer.data());
}

unsigned first_word(const std::vector<std::byte>& bytes) {
    unsigned word = 0;
    std::memcpy(&word, bytes.data(), sizeof word);
    return word;
}

}  // namespace

DOCTEST_REGISTER_LISTENER("case_counter", 1, case_counter);

int main(int argc, char** argv) {
    // loading a kernel at its first launch may wait for a kernel that spins until the test continues
    ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    if (device::cuda_count() == 0) {
        std::printf("skipped: %s\n", device::no_cuda_reason().c_str());
        return 77;
    }
    if (argc == 3 && std::string_view(argv[1]) == "--child") return run_as_child(argv[2]);
    doctest::Context context(argc, argv);
    const int status = context.run();
    if (context.shouldExit()) return status;
    if (cases_run == 0) {
        std::fputs("no test case was run: the filters match none\n", stderr);
        return 1;
    }
    return status;
}

// ---- devices ------------------------------------------------------------------------------------

TEST_CASE("cuda: the device says what it is") {
    const device gpu = device::cuda(0);
    CHECK(gpu.kind() == device_kind::cuda);
    CHECK(gpu.name() == "cuda:0");
    CHECK_FALSE(gpu.model().empty());
    CHECK(gpu.memory().total_bytes >= gpu.memory().free_bytes);
    CHECK(gpu.memory().free_bytes > 0);
    CHECK(device::best() == gpu);
    CHECK(device::parse("cuda:0") == gpu);
    CHECK(device::no_cuda_reason().empty());
    CHECK(contains(message_of<device_error>([] { device::cuda(1000); }), "cuda:1000"));
    CHECK(contains(message_of<device_error>([] { device::cuda(-1); }), "counted from 0"));
}

TEST_CASE("cuda: the calling thread's device and context stay as they were, even none") {
    std::thread([] {
        CUcontext before = nullptr;
        CHECK(detail::cuda::current_context(before) == cudaSuccess);
        CHECK(before == nullptr);  // a new thread has none
        const device gpu = device::cuda(0);
        {
            const stream stream(gpu);
            const device_buffer memory(4096, stream);
            const pinned_buffer pinned(4096, gpu);
            copy_to_device_async(memory.data(), pinned.bytes(), stream);
            stream.synchronize();
        }
        CUcontext after = nullptr;
        CHECK(detail::cuda::current_context(after) == cudaSuccess);
        CHECK(after == nullptr);
        int index = -1;
        CHECK(::cudaGetDevice(&index) == cudaSuccess);
        CHECK(index == 0);
    }).join();
}

TEST_CASE("cuda: pinflow leaves no status for the program's own cudaGetLastError") {
    const device gpu = device::cuda(0);
    const stream busy(gpu);
    event mark(gpu);
    const spin_flag flag(gpu);
    launch_spin(flag.word(), to_cuda(busy));
    mark.record(busy);
    CHECK_FALSE(mark.done());
    CHECK(::cudaPeekAtLastError() == cudaSuccess);
    flag.set();
    busy.synchronize();
    CHECK_THROWS_AS(device_buffer(std::uint64_t{1} << 50, busy), device_error);
    CHECK(::cudaPeekAtLastError() == cudaSuccess);
}

// ---- streams and events -------------------------------------------------------------------------

TEST_CASE("cuda: a stream that waits for an event sees earlier writes, and old data if it does not wait" *
          blocks_copies) {
    const device gpu = device::cuda(0);
    const stream writer(gpu);
    const stream waiter(gpu);
    const stream other(gpu);
    event written(gpu);
    const device_buffer memory(sizeof(unsigned), writer);
    launch_store(word_of(memory), 1, to_cuda(writer));
    writer.synchronize();
    const spin_flag flag(gpu);
    launch_spin(flag.word(), to_cuda(writer));
    launch_store(word_of(memory), 2, to_cuda(writer));
    written.record(writer);
    waiter.wait(written);
    const pinned_buffer seen(sizeof(unsigned), gpu);
    copy_to_host_async(seen.bytes(), memory.data(), waiter);

    CHECK(first_word(to_host(memory.data(), sizeof(unsigned), other)) == 1);
    CHECK_FALSE(written.done());
    CHECK_FALSE(waiter.done());
    CHECK_FALSE(written.synchronize_for(2ms));
    flag.set();
    CHECK(written.synchronize_for(10s));
    CHECK(written.done());
    waiter.synchronize();
    CHECK(waiter.done());
    unsigned value = 0;
    std::memcpy(&value, seen.data(), sizeof value);
    CHECK(value == 2);
}

TEST_CASE("cuda: an event never recorded is done, and can be recorded again") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    event mark(gpu);
    CHECK(mark.done());
    CHECK(mark.synchronize_for(0us));
    for (int i = 0; i < 3; ++i) {
        const spin_flag flag(gpu);
        launch_spin(flag.word(), to_cuda(stream));
        mark.record(stream);
        CHECK_FALSE(mark.done());
        flag.set();
        mark.synchronize();
        CHECK(mark.done());
    }
}

TEST_CASE("cuda: our streams do not wait for the legacy default stream") {
    const device gpu = device::cuda(0);
    const stream ours(gpu);
    const spin_flag flag(gpu);
    launch_spin(flag.word(), nullptr);
    const device_buffer memory(sizeof(unsigned), ours);
    launch_store(word_of(memory), 7, to_cuda(ours));
    CHECK(first_word(to_host(memory.data(), sizeof(unsigned), ours)) == 7);
    CHECK(::cudaStreamQuery(nullptr) == cudaErrorNotReady);
    flag.set();
}

TEST_CASE("cuda: a host function that waits blocks its own stream and no other") {
    const device gpu = device::cuda(0);
    std::vector<stream> streams;
    for (int i = 0; i < 3; ++i) {
        streams.emplace_back(gpu);
    }
    const stream free(gpu);
    std::array<gate, 3> gates;
    for (std::size_t i = 0; i < gates.size(); ++i) {
        hold(streams[i], gates[i]);
    }
    std::atomic<int> ran = 0;
    free.host_function_async([&] { ++ran; });
    free.synchronize();
    CHECK(ran == 1);
    for (std::size_t i = gates.size(); i-- > 0;) {
        streams[i].host_function_async([&] { ++ran; });
        CHECK_FALSE(streams[i].done());
        gates[i].open();
        streams[i].synchronize();
        CHECK(ran == 1 + static_cast<int>(gates.size() - i));
    }
}

TEST_CASE("cuda: host functions of one stream run in order, between the copies around them") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    const device_buffer memory(sizeof(int), stream);
    const pinned_buffer in(sizeof(int), gpu);
    const pinned_buffer out(sizeof(int), gpu);
    int& input = *reinterpret_cast<int*>(in.data());
    const int& output = *reinterpret_cast<const int*>(out.data());
    std::vector<int> seen;
    for (int i = 0; i < 500; ++i) {
        stream.host_function_async([&, i] { input = i; });
        copy_to_device_async(memory.data(), in.bytes(), stream);
        copy_to_host_async(out.bytes(), memory.data(), stream);
        stream.host_function_async([&] { seen.push_back(output); });
    }
    stream.synchronize();
    std::vector<int> expected(500);
    std::iota(expected.begin(), expected.end(), 0);
    CHECK(seen == expected);
}

TEST_CASE("cuda: foreign streams are taken as they are, the legacy and the per-thread default ones too") {
    const device gpu = device::cuda(0);
    REQUIRE(::cudaSetDevice(0) == cudaSuccess);
    cudaStream_t foreign = nullptr;
    REQUIRE(::cudaStreamCreate(&foreign) == cudaSuccess);
    const std::vector<std::byte> bytes = pattern_bytes(100'000);
    const pinned_buffer source(bytes.size(), gpu);
    std::memcpy(source.data(), bytes.data(), bytes.size());
    for (cudaStream_t handle :
         {foreign, static_cast<cudaStream_t>(nullptr), cudaStreamLegacy, cudaStreamPerThread}) {
        const stream_view view = from_cuda(handle, 0);
        CHECK(to_cuda(view) == handle);
        device_buffer memory(bytes.size(), view);
        const std::array<copy_range, 2> ranges{
            copy_range{memory.data(), source.data(), 50'000},
            copy_range{memory.data() + 60'000, source.data() + 60'000, 40'000}};
        copy_batch_to_device_async(ranges, view);
        copy_to_device_async(memory.data() + 50'000, source.bytes().subspan(50'000, 10'000), view);
        event copied(gpu);
        copied.record(view);
        const stream ours(gpu);
        ours.wait(copied);
        CHECK(to_host(memory.data(), bytes.size(), ours) == bytes);
        std::atomic<bool> ran = false;
        view.host_function_async([&] { ran = true; });
        view.synchronize();
        CHECK(ran);
        CHECK(view.done());
        memory.release_after({&copied, 1});
    }
    CHECK(::cudaStreamDestroy(foreign) == cudaSuccess);
    CHECK_THROWS_AS(to_cuda(stream(device::host())), invalid_argument);
}

// ---- copies -------------------------------------------------------------------------------------

TEST_CASE("cuda: copies go both ways, of any size and alignment") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    for (const std::size_t size :
         {std::size_t{1}, std::size_t{4095}, std::size_t{65537}, std::size_t{9'000'001}}) {
        const pinned_buffer in(size + 3, gpu);
        const pinned_buffer out(size, gpu);
        const std::vector<std::byte> bytes = pattern_bytes(size);
        std::memcpy(in.data() + 3, bytes.data(), size);
        const device_buffer memory(size + 5, stream);
        copy_to_device_async(memory.data() + 5, in.bytes().subspan(3), stream);
        copy_to_host_async(out.bytes(), memory.data() + 5, stream);
        stream.synchronize();
        CHECK(std::ranges::equal(out.bytes(), bytes));
    }
    copy_to_device_async(nullptr, {}, stream);
    copy_to_host_async({}, nullptr, stream);
    stream.synchronize();
}

TEST_CASE("cuda: a batch of copies puts every range where it belongs") {
    const device gpu = device::cuda(0);
    const stream ours(gpu);
    constexpr std::size_t size = 8 << 20;
    const pinned_buffer source(size, gpu);
    const std::vector<std::byte> bytes = pattern_bytes(size);
    std::memcpy(source.data(), bytes.data(), size);
    std::mt19937_64 random(7);
    for (const std::size_t count :
         {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{64}, std::size_t{1000}}) {
        for (const stream_view stream : {ours.view(), from_cuda(nullptr, 0)}) {
            // rows in a shuffled order, as a loader copies them; the first four stay adjacent
            const std::size_t row = count == 0 ? 0 : size / count;
            std::vector<std::size_t> ids(count);
            std::iota(ids.begin(), ids.end(), 0);
            if (count > 4) std::shuffle(ids.begin() + 4, ids.end(), random);
            const device_buffer memory(size, stream);
            std::vector<copy_range> ranges;
            std::vector<std::byte> expected;
            for (std::size_t i = 0; i < count; ++i) {
                ranges.push_back({memory.data() + i * row, source.data() + ids[i] * row, row});
                expected.insert(expected.end(), bytes.begin() + static_cast<std::ptrdiff_t>(ids[i] * row),
                                bytes.begin() + static_cast<std::ptrdiff_t>((ids[i] + 1) * row));
            }
            copy_batch_to_device_async(ranges, stream);
            CHECK(to_host(memory.data(), expected.size(), stream) == expected);
        }
    }
}

TEST_CASE("cuda: a strided copy puts runs one after the other") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    const std::vector<std::byte> bytes = pattern_bytes(300'000);
    const pinned_buffer source(bytes.size(), gpu);
    std::memcpy(source.data(), bytes.data(), bytes.size());
    for (const auto& [run, stride] :
         {std::pair<std::size_t, std::size_t>{1, 3}, {64, 200}, {1001, 1003}, {4096, 8192}}) {
        CAPTURE(run);
        const std::size_t count = (bytes.size() - 17 - run) / stride + 1;
        const device_buffer memory(run * count, stream);
        gpu.backend().copy_strided_to_device({memory.data(), source.data() + 17, run, stride, count},
                                             stream.view().native_handle());
        std::vector<std::byte> expected;
        for (std::size_t i = 0; i < count; ++i) {
            const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(17 + i * stride);
            expected.insert(expected.end(), begin, begin + static_cast<std::ptrdiff_t>(run));
        }
        CHECK(to_host(memory.data(), expected.size(), stream) == expected);
    }
    // the last run ends with the registration, the gap after it would not
    constexpr std::size_t page = 4096;
    const memory_region region = memory_region::anonymous(25 * page);
    std::memcpy(region.data(), bytes.data(), region.size_bytes());
    REQUIRE(::cudaHostRegister(region.data(), region.size_bytes(), cudaHostRegisterDefault) == cudaSuccess);
    const device_buffer memory(13 * page, stream);
    gpu.backend().copy_strided_to_device({memory.data(), region.data(), page, 2 * page, 13},
                                         stream.view().native_handle());
    const std::vector<std::byte> even_pages = to_host(memory.data(), 13 * page, stream);
    for (std::size_t i = 0; i < 13; ++i)
        CHECK(std::memcmp(even_pages.data() + i * page, bytes.data() + 2 * i * page, page) == 0);
    CHECK(::cudaHostUnregister(region.data()) == cudaSuccess);
    // no runs: nothing is copied
    gpu.backend().copy_strided_to_device({nullptr, source.data(), 64, 200, 0}, stream.view().native_handle());
    stream.synchronize();
}

TEST_CASE("cuda: a driver without batch copies is served by single ones") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    const std::vector<std::byte> bytes = pattern_bytes(10'000);
    const device_buffer memory(bytes.size(), stream);
    std::atomic<unsigned> asked = 0;
    std::atomic<unsigned> singles = 0;
    const detail::cuda::scoped_failure_hook hook([&](std::string_view call) {
        if (call == "cudaMemcpyAsync") ++singles;
        if (call != "cudaMemcpyBatchAsync") return cudaSuccess;
        ++asked;
        return cudaErrorNotSupported;
    });
    const std::array<copy_range, 2> ranges{copy_range{memory.data(), bytes.data(), 4000},
                                           copy_range{memory.data() + 5000, bytes.data() + 5000, 5000}};
    copy_batch_to_device_async(ranges, stream);
    CHECK(asked == 1);
    CHECK(singles == 2);
    // the gaps were never written: initcheck would report a read
    CHECK(std::ranges::equal(to_host(memory.data(), 4000, stream), std::span(bytes).first(4000)));
    CHECK(std::ranges::equal(to_host(memory.data() + 5000, 5000, stream), std::span(bytes).subspan(5000)));
}

// ---- memory -------------------------------------------------------------------------------------

TEST_CASE("cuda: memory released after an event is not reused before the event") {
    const device gpu = device::cuda(0);
    const stream user(gpu);
    const stream other(gpu);
    constexpr std::size_t size = 32 << 20;
    const spin_flag flag(gpu);
    device_buffer memory(size, user);
    std::byte* const address = memory.data();
    launch_spin(flag.word(), to_cuda(user));
    event used(gpu);
    used.record(user);
    memory.release_after({&used, 1});  // does not wait: the flag is not set yet
    CHECK(memory.data() == nullptr);
    const device_buffer next(size, other);
    CHECK(next.data() != address);
    flag.set();
    user.synchronize();
}

TEST_CASE("cuda: device memory is aligned, and asking for too much says how much is free") {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    for (const std::uint64_t size : {1ULL, 255ULL, 4097ULL, 1ULL << 24}) {
        const device_buffer memory(size, stream);
        CHECK(reinterpret_cast<std::uintptr_t>(memory.data()) % 256 == 0);
    }
    const std::string reason =
        message_of<device_error>([&] { device_buffer(std::uint64_t{1} << 50, stream); });
    CHECK(contains(reason, "1125899906842624 bytes"));
    CHECK(contains(reason, "of free memory"));
    CHECK(contains(reason, "cudaErrorMemoryAllocation"));
    const device_buffer memory(4096, stream);  // the device continues
    stream.synchronize();
}

TEST_CASE("cuda: pinned memory is zero-filled, aligned, and known to CUDA") {
    const device gpu = device::cuda(0);
    for (const std::uint64_t size : {1ULL, 4097ULL, (3ULL << 20) + 5, 64ULL << 20}) {
        const pinned_buffer memory(size, gpu);
        CHECK(reinterpret_cast<std::uintptr_t>(memory.data()) % 4096 == 0);
        CHECK(std::ranges::all_of(memory.bytes(), [](std::byte byte) { return byte == std::byte{0}; }));
        cudaPointerAttributes attributes{};
        REQUIRE(::cudaPointerGetAttributes(&attributes, memory.data() + size - 1) == cudaSuccess);
        CHECK(attributes.type == cudaMemoryTypeHost);
        CHECK(attributes.devicePointer == memory.data() + size - 1);
    }
    CHECK(contains(message_of<device_error>([&] { pinned_buffer(std::uint64_t{1} << 50, gpu); }),
                   "cannot page-lock"));
}

TEST_CASE("cuda: pinned memory that cannot be registered is allocated by CUDA") {
    const device gpu = device::cuda(0);
    bool allocate_too = false;
    const detail::cuda::scoped_failure_hook hook([&](std::string_view call) {
        if (call == "cudaHostRegister") return cudaErrorMemoryAllocation;
        return allocate_too && call == "cudaHostAlloc" ? cudaErrorMemoryAllocation : cudaSuccess;
    });
    constexpr std::uint64_t size_bytes = 4 * mebibyte;  // small pieces come from slabs
    const detail::pin_registry& registry = detail::pin_registry::process();
    const std::uint64_t counted_bytes = registry.buffer_bytes();
    {
        const pinned_buffer memory(size_bytes, gpu);
        CHECK(registry.buffer_bytes() == counted_bytes + size_bytes);
        CHECK(std::ranges::all_of(memory.bytes(), [](std::byte byte) { return byte == std::byte{0}; }));
    }
    allocate_too = true;
    CHECK(contains(message_of<device_error>([&] { pinned_buffer(size_bytes, gpu); }),
                   "cannot page-lock 4194304 bytes: cudaErrorMemoryAllocation"));
    CHECK(registry.buffer_bytes() == counted_bytes);
}

// ---- what does not wait for a stream that is stuck ----------------------------------------------

namespace {

/// Whether `work` returns while a stream of the device is stuck. The stream is released after two seconds at
/// most.
template <typename Work>
bool returns_while_stuck(const device& gpu, Work work) {
    const stream stuck(gpu);
    gate gate;
    hold(stuck, gate);
    std::atomic<bool> returned = false;
    bool returned_in_time = false;
    std::thread watch([&] {
        const auto end = std::chrono::steady_clock::now() + 2s;
        while (!returned && std::chrono::steady_clock::now() < end)
            std::this_thread::yield();
        returned_in_time = returned;
        gate.open();
    });
    work();
    returned = true;
    watch.join();
    return returned_in_time;
}

}  // namespace

TEST_CASE("cuda: what a loader does while it runs does not wait for a stream that is stuck" * blocks_copies) {
    const device gpu = device::cuda(0);
    const stream other(gpu);
    const pinned_buffer source(mebibyte, gpu);
    CHECK(returns_while_stuck(gpu, [&] {
        device_buffer memory(300 * mebibyte, other);
        event mark(gpu);
        copy_to_device_async(memory.data(), source.bytes(), other);
        mark.record(other);
        mark.synchronize();
        memory.release_after({&mark, 1});
    }));
    CHECK(returns_while_stuck(gpu, [&] { const stream short_lived(gpu); }));
    CHECK(returns_while_stuck(gpu, [&] { gpu.memory(); }));
}

TEST_CASE("cuda: page-locking memory and giving it back do not wait for a stream that is stuck") {
    if (detail::cuda::context::for_host_memory(0).is_primary()) {
        MESSAGE("skipped: the device is too small for a second context, in which memory is registered");
        return;
    }
    const device gpu = device::cuda(0);
    std::optional<pinned_buffer> memory;
    CHECK(returns_while_stuck(gpu, [&] { memory.emplace(8 * mebibyte, gpu); }));
    CHECK(returns_while_stuck(gpu, [&] { memory.reset(); }));
    const auto own = std::make_shared<memory_region>(memory_region::anonymous(8 * mebibyte));
    std::optional<pinned_pages> pages;
    CHECK(returns_while_stuck(gpu, [&] {
        pages.emplace(std::vector<pin_range>{{own->bytes(), "an array in memory", own}}, gpu);
        pages->require();
    }));
    CHECK(returns_while_stuck(gpu, [&] { pages.reset(); }));
}
