#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <semaphore>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "pinflow/cuda.hpp"
#include "pinflow/error.hpp"
#include "pinflow/mapped_file.hpp"
#include "pinflow/pin.hpp"
#include "src/device/backend.hpp"
#include "src/device/cuda/api.hpp"
#include "src/device/digest_host.hpp"
#include "src/device/pin_registry.hpp"
#include "tests/side_by_side.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;

namespace {

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;

std::shared_ptr<const mapped_file> map_pattern(const std::filesystem::path& path, std::uint64_t size_bytes) {
    write_bytes(path, pattern_bytes(size_bytes));
    return std::make_shared<mapped_file>(std::make_shared<input_file>(path), 0, size_bytes);
}

pin_range range_of(const std::shared_ptr<const mapped_file>& file) {
    return {file->bytes(), "'" + file->file()->path() + "'", file};
}

/// Registers in pieces of `piece_bytes`, with a budget above every test's size.
pin_options generous(std::uint64_t piece_bytes = 64 * mebibyte) {
    pin_options options;
    options.budget_bytes = generous_pin_budget;
    options.piece_bytes = piece_bytes;
    return options;
}

bool known_to_cuda(const std::byte* data) {
    cudaPointerAttributes attributes{};
    const cudaError_t status = ::cudaPointerGetAttributes(&attributes, data);
    return status == cudaSuccess && attributes.type == cudaMemoryTypeHost;
}

/// RssAnon in bytes.
std::uint64_t anonymous_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with("RssAnon:")) return std::stoull(line.substr(8)) * 1024;
    }
    return 0;
}

/// Registers `file` in pieces of 16 MiB, copies from it and reads it by a kernel.
void check_in_place(const std::shared_ptr<const mapped_file>& file) {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    const std::vector<std::byte> expected = pattern_bytes(file->size_bytes());
    const std::size_t registrations = detail::pin_registry::process().size();
    const std::uint64_t anonymous = anonymous_bytes();
    {
        const pin_options options = generous(16 * mebibyte);
        const pinned_pages pages({range_of(file)}, gpu, options);
        pages.require();
        INFO(pages.report().reason);
        CHECK(contains(pages.report().reason, "registered read-only"));
        CHECK(anonymous_bytes() < anonymous + 16 * mebibyte);  // nothing was copied
        CHECK(pages.covers(file->data(), file->size_bytes()));
        CHECK(detail::pin_registry::process().size() ==
              registrations + (file->size_bytes() + options.piece_bytes - 1) / options.piece_bytes);
        CHECK(known_to_cuda(file->data()));
        CHECK(known_to_cuda(file->data() + file->size_bytes() - 1));

        // across the edges of pieces
        const device_buffer memory(file->size_bytes(), stream);
        copy_to_device_async(memory.data(), file->bytes(), stream);
        CHECK(to_host(memory.data(), file->size_bytes(), stream) == expected);
        std::vector<copy_range> ranges;
        constexpr std::uint64_t row = 300'001;
        const std::uint64_t rows = file->size_bytes() / row;
        for (std::uint64_t i = 0; i < rows; ++i) {
            ranges.push_back({memory.data() + i * row, file->data() + (rows - 1 - i) * row, row});
        }
        copy_batch_to_device_async(ranges, stream);
        const std::vector<std::byte> reversed = to_host(memory.data(), rows * row, stream);
        bool equal = true;
        for (std::uint64_t i = 0; i < rows && equal; ++i) {
            const auto from = expected.begin() + static_cast<std::ptrdiff_t>((rows - 1 - i) * row);
            equal = std::equal(from, from + row, reversed.begin() + static_cast<std::ptrdiff_t>(i * row));
        }
        CHECK(equal);

        // a kernel reads the pages at the host's own addresses
        const detail::digest_array array{file->data(), 4096};
        const std::uint64_t samples = file->size_bytes() / 4096;
        const std::uint64_t zero = 0;
        copy_to_device_async(memory.data(), std::as_bytes(std::span(&zero, 1)), stream);
        gpu.backend().add_digest({&array, 1}, samples, reinterpret_cast<std::uint64_t*>(memory.data()),
                                 stream.view().native_handle());
        std::uint64_t digest = 0;
        std::memcpy(&digest, to_host(memory.data(), sizeof digest, stream).data(), sizeof digest);
        CHECK(digest == detail::digest_of_rows({&array, 1}, samples));
    }
    CHECK(detail::pin_registry::process().size() == registrations);
    CHECK_FALSE(known_to_cuda(file->data()));
}

}  // namespace

TEST_CASE("cuda pin: a file's mapped pages are registered where they are, copied from and read by a kernel") {
    const temporary_folder folder;
    check_in_place(map_pattern(folder / "x.bin", 100 * mebibyte + 12'345));
}

TEST_CASE("cuda pin: pages of a file in shared memory are registered where they are, too") {
    const std::filesystem::path path = "/dev/shm/pinflow-cuda-pin-test.bin";
    const auto file = map_pattern(path, 33 * mebibyte + 1);
    std::filesystem::remove(path);
    check_in_place(file);
}

TEST_CASE("cuda pin: memory of the process's own is registered too") {
    const device gpu = device::cuda(0);
    const auto memory = std::make_shared<memory_region>(memory_region::anonymous(5 * mebibyte));
    memory->bytes()[4 * mebibyte] = std::byte{9};
    const pinned_pages pages({{memory->bytes(), "an array in memory", memory}}, gpu, generous());
    pages.require();
    CHECK(known_to_cuda(memory->data()));
    const stream stream(gpu);
    const device_buffer copy(memory->size_bytes(), stream);
    copy_to_device_async(copy.data(), memory->bytes(), stream);
    CHECK(to_host(copy.data(), memory->size_bytes(), stream)[4 * mebibyte] == std::byte{9});
}

TEST_CASE("cuda pin: memory that begins in the last page of an array can still be copied") {
    const device gpu = device::cuda(0);
    const auto memory = std::make_shared<memory_region>(memory_region::anonymous(mebibyte));
    const std::span<std::byte> array = memory->bytes().first(100 * 4096 + 500);
    const std::span<std::byte> next = memory->bytes().subspan(array.size(), 8000);
    next.back() = std::byte{7};
    const pinned_pages pages({{array, "an array in memory", memory}}, gpu, generous());
    CHECK_FALSE(pages.wait());
    CHECK_FALSE(known_to_cuda(array.data()));
    // cudaMemcpy stands for other libraries, which do not split copies where registered pages end
    const stream stream(gpu);
    const device_buffer copy(array.size(), stream);
    stream.synchronize();
    CHECK(cudaMemcpy(copy.data(), next.data(), next.size(), cudaMemcpyHostToDevice) == cudaSuccess);
    next.back() = std::byte{0};
    CHECK(cudaMemcpy(next.data(), copy.data(), next.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(next.back() == std::byte{7});
    CHECK(cudaMemcpy(copy.data(), array.data(), array.size(), cudaMemcpyHostToDevice) == cudaSuccess);
}

TEST_CASE("cuda pin: two arrays of one mapping, and two mappings of one file, are registered independently") {
    const temporary_folder folder;
    const device gpu = device::cuda(0);
    const auto file = map_pattern(folder / "x.bin", 8 * mebibyte);
    const auto again = std::make_shared<mapped_file>(file->file(), 0, file->size_bytes());
    const std::size_t registrations = detail::pin_registry::process().size();
    {
        const std::uint64_t middle = 4 * mebibyte + 100;
        auto front = std::make_unique<pinned_pages>(
            std::vector<pin_range>{{file->bytes().first(middle), "'x.bin:a'", file}}, gpu, generous());
        const pinned_pages back({{file->bytes().subspan(middle), "'x.bin:b'", file}}, gpu, generous());
        const pinned_pages other({range_of(again)}, gpu, generous());
        front->require();
        back.require();
        other.require();
        front.reset();
        CHECK(back.covers(file->data() + middle, 4 * mebibyte - 100));
        CHECK(known_to_cuda(file->data() + middle));
        CHECK(known_to_cuda(again->data()));
    }
    CHECK(detail::pin_registry::process().size() == registrations);
    CHECK_FALSE(known_to_cuda(file->data()));
    CHECK_FALSE(known_to_cuda(again->data()));
}

TEST_CASE("cuda pin: memory that other code has registered counts as registered, and stays so") {
    const device gpu = device::cuda(0);
    const std::size_t registrations = detail::pin_registry::process().size();
    const memory_region memory = memory_region::anonymous(2 * mebibyte);
    REQUIRE(::cudaHostRegister(memory.data(), memory.size_bytes(), cudaHostRegisterMapped) == cudaSuccess);
    for (unsigned repetition = 0; repetition < 2; ++repetition) {
        const pinned_pages pages({{memory.bytes(), "memory", nullptr}}, gpu, generous());
        CHECK(pages.wait());
        CHECK(pages.covers(memory.data(), memory.size_bytes()));
    }
    CHECK(known_to_cuda(memory.data()));
    CHECK(::cudaPeekAtLastError() == cudaSuccess);
    CHECK(::cudaHostUnregister(memory.data()) == cudaSuccess);
    const pinned_pages pages({{memory.bytes(), "memory", nullptr}}, gpu, generous());  // by pinflow now
    CHECK(pages.wait());
    CHECK(detail::pin_registry::process().size() == registrations + 1);
}

TEST_CASE("cuda pin: memory of which other code has registered a part does not count as registered") {
    const device gpu = device::cuda(0);
    const memory_region memory = memory_region::anonymous(2 * mebibyte);
    for (const std::size_t missing : {std::size_t{10}, mebibyte}) {
        REQUIRE(::cudaHostRegister(memory.data() + missing, memory.size_bytes() - missing,
                                   cudaHostRegisterMapped) == cudaSuccess);
        {
            const pinned_pages pages({{memory.bytes(), "memory", nullptr}}, gpu, generous());
            CHECK_FALSE(pages.wait());
            CHECK_FALSE(pages.covers(memory.data(), 1));
        }
        CHECK(::cudaHostUnregister(memory.data() + missing) == cudaSuccess);
    }
    CHECK(::cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("cuda pin: memory that other code has allocated page-locked counts as registered") {
    const device gpu = device::cuda(0);
    void* data = nullptr;
    REQUIRE(::cudaHostAlloc(&data, 2 * mebibyte, cudaHostAllocDefault) == cudaSuccess);
    const auto* const bytes = static_cast<const std::byte*>(data);
    const std::size_t registrations = detail::pin_registry::process().size();
    {
        const pinned_pages pages({{{bytes, 2 * mebibyte}, "memory", nullptr}}, gpu, generous());
        CHECK(pages.wait());
        CHECK(pages.covers(bytes, 2 * mebibyte));
    }
    CHECK(detail::pin_registry::process().size() == registrations);
    CHECK(known_to_cuda(bytes));
    CHECK(::cudaPeekAtLastError() == cudaSuccess);
    CHECK(::cudaFreeHost(data) == cudaSuccess);
}

TEST_CASE("cuda pin: pages of a file registered by other code are not registered, and the reason says so") {
    const temporary_folder folder;
    const device gpu = device::cuda(0);
    const auto file = map_pattern(folder / "x.bin", 2 * mebibyte);
    void* const data = const_cast<std::byte*>(file->data());
    REQUIRE(::cudaHostRegister(data, file->size_bytes(), cudaHostRegisterMapped | cudaHostRegisterReadOnly) ==
            cudaSuccess);
    {
        const pinned_pages pages({range_of(file)}, gpu, generous());
        CHECK_FALSE(pages.wait());
        CHECK(contains(pages.report().reason, "cudaErrorHostMemoryAlreadyRegistered"));
        CHECK(contains(message_of<unsupported>([&] { pages.require(); }), "something else in this process"));
        CHECK_FALSE(pages.covers(file->data(), 1));
    }
    CHECK(::cudaPeekAtLastError() == cudaSuccess);
    CHECK(::cudaHostUnregister(data) == cudaSuccess);
}

TEST_CASE("cuda pin: memory that runs out for one piece leaves the others usable") {
    const temporary_folder folder;
    const device gpu = device::cuda(0);
    const auto file = map_pattern(folder / "x.bin", 8 * mebibyte);
    std::atomic<unsigned> calls = 0;
    const detail::cuda::scoped_failure_hook hook([&](std::string_view call) {
        return call == "cudaHostRegister" && ++calls == 3 ? cudaErrorMemoryAllocation : cudaSuccess;
    });
    const pinned_pages pages({range_of(file)}, gpu, generous(mebibyte));
    CHECK_FALSE(pages.wait());
    CHECK(calls == 8);
    CHECK(pages.covers(file->data(), 2 * mebibyte));
    CHECK_FALSE(pages.covers(file->data() + 2 * mebibyte, 1));
    CHECK(pages.covers(file->data() + 3 * mebibyte, 5 * mebibyte));
    CHECK(pages.registered_prefix_bytes() == 2 * mebibyte);
    CHECK(contains(pages.report().reason, "registered read-only, 7.0 MiB of 8.0 MiB (87 %)"));
    CHECK(contains(pages.report().reason,
                   "cannot register 1048576 bytes at offset 2097152 of the mapping of '"));
    CHECK(contains(pages.report().reason, "cudaErrorMemoryAllocation"));
    const stream stream(gpu);
    const device_buffer memory(file->size_bytes(), stream);
    copy_to_device_async(memory.data(), file->bytes(), stream);  // registered, then not: still right
    CHECK(to_host(memory.data(), file->size_bytes(), stream) == pattern_bytes(file->size_bytes()));
}

TEST_CASE("cuda pin: pages whose device address cannot be queried do not stay registered") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", mebibyte);
    const detail::cuda::scoped_failure_hook hook([](std::string_view call) {
        return call == "cudaHostGetDevicePointer" ? cudaErrorInvalidValue : cudaSuccess;
    });
    const pinned_pages pages({range_of(file)}, device::cuda(0), generous());
    CHECK_FALSE(pages.wait());
    CHECK_FALSE(known_to_cuda(file->data()));
}

TEST_CASE("cuda pin: a file that lost pages gives a reason, not a signal") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 4 * mebibyte);
    std::filesystem::resize_file(folder / "x.bin", mebibyte);
    const pinned_pages pages({range_of(file)}, device::cuda(0), generous());
    CHECK_FALSE(pages.wait());
    CHECK_FALSE(pages.report().reason.empty());
    const pinned_pages in_pieces({range_of(file)}, device::cuda(0), generous(mebibyte));
    CHECK_FALSE(in_pieces.wait());
    CHECK(in_pieces.registered_prefix_bytes() == mebibyte);
    CHECK(in_pieces.report().registered_bytes == mebibyte);
    CHECK(known_to_cuda(file->data()));
}

TEST_CASE("cuda pin: a file that is 5 % over the budget is registered to 95 %, and copied whole") {
    const temporary_folder folder;
    const device gpu = device::cuda(0);
    const auto file = map_pattern(folder / "x.bin", 20 * mebibyte);
    pin_options options = generous(mebibyte);
    const detail::pin_registry& registry = detail::pin_registry::process();
    options.budget_bytes = registry.reserved_bytes() + registry.buffer_bytes() + 19 * mebibyte;
    const pinned_pages pages({range_of(file)}, gpu, options);
    CHECK_FALSE(pages.wait());
    CHECK(pages.registered_prefix_bytes() == 19 * mebibyte);
    CHECK(contains(pages.report().reason, "(95 %)"));
    CHECK(known_to_cuda(file->data() + 19 * mebibyte - 1));
    CHECK_FALSE(known_to_cuda(file->data() + 19 * mebibyte));
    const stream stream(gpu);
    const device_buffer memory(file->size_bytes(), stream);
    copy_to_device_async(memory.data(), file->bytes(), stream);
    CHECK(to_host(memory.data(), file->size_bytes(), stream) == pattern_bytes(file->size_bytes()));
}

TEST_CASE("cuda pin: pieces that a reader has passed are left out if registers_rest is not set") {
    const temporary_folder folder;
    const device gpu = device::cuda(0);
    const auto file = map_pattern(folder / "x.bin", 10 * mebibyte);
    // the reader comes while the first piece is registered
    pinned_pages* reading = nullptr;
    std::binary_semaphore made(0);
    unsigned calls = 0;
    const detail::cuda::scoped_failure_hook hook([&](std::string_view call) {
        if (call == "cudaHostRegister" && ++calls == 1) {
            made.acquire();
            reading->set_reader_position(file->data() + 6 * mebibyte);
        }
        return cudaSuccess;
    });
    pin_options options = generous(mebibyte);
    options.registers_rest = false;
    pinned_pages pages({range_of(file)}, gpu, options);
    reading = &pages;
    made.release();
    CHECK_FALSE(pages.wait());
    CHECK_FALSE(pages.report().failed);
    CHECK(pages.covers(file->data(), mebibyte));
    for (std::uint64_t piece = 0; piece < 10; ++piece) {
        const std::byte* const data = file->data() + piece * mebibyte;
        CHECK(known_to_cuda(data) == pages.covers(data, mebibyte));
        if (piece > 0 && piece < 6) CHECK_FALSE(pages.covers(data, mebibyte));
    }
    const stream stream(gpu);
    const device_buffer memory(file->size_bytes(), stream);
    copy_to_device_async(memory.data(), file->bytes(), stream);
    CHECK(to_host(memory.data(), file->size_bytes(), stream) == pattern_bytes(file->size_bytes()));
}

TEST_CASE("cuda pin: a driver that does not support a registration is not asked for every piece") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 8 * mebibyte);
    std::atomic<unsigned> calls = 0;
    const detail::cuda::scoped_failure_hook hook([&](std::string_view call) {
        if (call != "cudaHostRegister") return cudaSuccess;
        ++calls;
        return cudaErrorNotSupported;
    });
    const pinned_pages pages({range_of(file)}, device::cuda(0), generous(mebibyte));
    CHECK_FALSE(pages.wait());
    CHECK(calls == 1);
    CHECK(contains(pages.report().reason, "registered nothing of 8.0 MiB"));
    CHECK(contains(pages.report().reason, "cudaErrorNotSupported"));
}

TEST_CASE("cuda pin: files that are mapped side by side are registered and read across their edges") {
    const temporary_folder folder;
    const device gpu = device::cuda(0);
    constexpr std::uint64_t row = 1000;
    const auto source = std::make_shared<const side_by_side_rows>(
        folder.path(), std::vector<std::uint64_t>{300, 5000, 1, 700, 2000, 64}, row);
    const std::vector<pin_range> ranges = pin_ranges(source);
    REQUIRE(ranges.size() == 1);
    const std::span<const std::byte> bytes = ranges[0].bytes;
    const std::size_t registrations = detail::pin_registry::process().size();
    {
        const pinned_pages pages(ranges, gpu, generous());
        pages.require();
        CHECK(detail::pin_registry::process().size() == registrations + 1);
        const stream stream(gpu);
        const device_buffer memory(bytes.size(), stream);
        copy_to_device_async(memory.data(), bytes, stream);
        const std::vector<std::byte> copied = to_host(memory.data(), bytes.size(), stream);
        CHECK(std::equal(copied.begin(), copied.end(), bytes.begin(), bytes.end()));
        // a kernel reads the rows of each file
        for (const row_extent& extent : source->extents()) {
            CHECK(pages.covers(extent.data, extent.row_count * row));
            const detail::digest_array array{extent.data, row};
            const std::uint64_t zero = 0;
            copy_to_device_async(memory.data(), std::as_bytes(std::span(&zero, 1)), stream);
            gpu.backend().add_digest({&array, 1}, extent.row_count,
                                     reinterpret_cast<std::uint64_t*>(memory.data()),
                                     stream.view().native_handle());
            std::uint64_t digest = 0;
            std::memcpy(&digest, to_host(memory.data(), sizeof digest, stream).data(), sizeof digest);
            CHECK(digest == detail::digest_of_rows({&array, 1}, extent.row_count));
        }
    }
    CHECK(detail::pin_registry::process().size() == registrations);
}

TEST_CASE("cuda pin: a registration that does not return is given up, and cleans up after itself") {
    const temporary_folder folder;
    const device gpu = device::cuda(0);
    auto file = map_pattern(folder / "x.bin", 4 * mebibyte);
    const std::byte* const data = file->data();
    const std::weak_ptr<const mapped_file> watched = file;
    detail::pin_registry& registry = detail::pin_registry::process();
    const std::size_t registrations = registry.size();
    const std::uint64_t reserved_bytes = registry.reserved_bytes();
    gate driver;
    std::atomic<unsigned> calls = 0;
    const detail::cuda::scoped_failure_hook hook([&](std::string_view call) {
        if (call == "cudaHostRegister" && ++calls == 3) driver.wait();
        return cudaSuccess;
    });
    {
        pin_options options = generous(mebibyte);
        options.piece_deadline = std::chrono::seconds(1);
        const pinned_pages pages({range_of(file)}, gpu, options);
        file.reset();
        CHECK_FALSE(pages.wait());
        CHECK(contains(message_of<unsupported>([&] { pages.require(); }), "has not returned for"));
        CHECK(pages.covers(data, 2 * mebibyte));
        CHECK_FALSE(pages.covers(data + 2 * mebibyte, 1));
        // what is registered can be used
        const stream stream(gpu);
        const device_buffer memory(2 * mebibyte, stream);
        copy_to_device_async(memory.data(), {data, 2 * mebibyte}, stream);
        CHECK(to_host(memory.data(), 2 * mebibyte, stream) == pattern_bytes(2 * mebibyte));
    }
    CHECK_FALSE(watched.expired());
    CHECK(registry.size() == registrations + 3);
    driver.open();
    while (!watched.expired())
        std::this_thread::yield();
    CHECK(registry.size() == registrations);
    CHECK(registry.reserved_bytes() == reserved_bytes);
}

TEST_CASE("cuda pin: a range can be waited for") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 8 * mebibyte);
    const pinned_pages pages({range_of(file)}, device::cuda(0), generous(mebibyte));
    CHECK(pages.wait_for(file->data() + 3 * mebibyte, mebibyte, std::chrono::hours(1)));
    CHECK(known_to_cuda(file->data() + 3 * mebibyte));
    CHECK(pages.wait_for(file->data(), 8 * mebibyte, std::chrono::hours(1)));
    CHECK(pages.wait());
    CHECK(pages.all_registered());
    CHECK_FALSE(pages.wait_for(file->data() + 1, 8 * mebibyte, std::chrono::hours(1)));
}
