#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/device/cuda/api.hpp"
#include "tests/arrays.hpp"
#include "tests/temporary_folder.hpp"

using namespace pinflow;

namespace {

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;
constexpr std::uint64_t row_bytes = 256 * 1024;

/// A number of /proc/self/status, which counts in KiB, in bytes.
std::uint64_t own_status_bytes(const std::string& name) {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with(name + ":")) return std::stoull(line.substr(name.size() + 1)) * 1024;
    }
    throw std::runtime_error("/proc/self/status has no " + name);
}

/// Rows of 256 KiB, mostly a hole: each begins with its number.
void make_rows(const std::filesystem::path& path, std::uint64_t rows) {
    const std::string header =
        format_npy_header(dtype::of<std::uint64_t>(), std::vector<std::uint64_t>{rows, row_bytes / 8});
    std::ofstream file(path, std::ios::binary);
    file << header;
    file.close();
    std::filesystem::resize_file(path, header.size() + rows * row_bytes);
    std::fstream numbers(path, std::ios::binary | std::ios::in | std::ios::out);
    for (std::uint64_t row = 0; row < rows; ++row) {
        numbers.seekp(static_cast<std::streamoff>(header.size() + row * row_bytes));
        numbers.write(reinterpret_cast<const char*>(&row), sizeof(row));
    }
}

/// Whether every row of the batch begins with its number; `numbers` has room for them.
bool numbers_are_right(const batch& batch, stream_view stream, const pinned_buffer& numbers) {
    for (std::size_t i = 0; i < batch.row_count(); ++i) {
        copy_to_host_async(numbers.bytes().subspan(i * 8, 8), batch[0].data() + i * row_bytes, stream);
    }
    stream.synchronize();
    const auto* const found = reinterpret_cast<const std::uint64_t*>(numbers.data());
    return std::equal(batch.row_ids().begin(), batch.row_ids().end(), found);
}

}  // namespace

TEST_CASE("cuda loader: a batch may hold rows of registered pages and others") {
    const temporary_folder folder;
    constexpr std::uint64_t rows = 5 * 64 * mebibyte / row_bytes;
    make_rows(folder / "rows.npy", rows);
    const pinned_buffer numbers(mebibyte, device::cuda(0));
    for (const order order : {order::sequential, order::shuffled}) {
        // one call for each slot, then two pieces of the file; what comes after is refused
        constexpr unsigned slots = 3;
        std::atomic<int> registered_pieces = -static_cast<int>(slots);
        const detail::cuda::scoped_fault_hook refuse([&](std::string_view call) {
            return call == "cudaHostRegister" && ++registered_pieces > 2 ? cudaErrorMemoryAllocation
                                                                         : cudaSuccess;
        });
        const stream stream(device::cuda(0));
        loader loader(
            {open_npy(folder / "rows.npy")},
            {.device = device::cuda(0), .batch_rows = 61, .order = order, .epochs = 2, .slots = slots});
        std::uint64_t seen = 0;
        while (const auto batch = loader.next(stream)) {
            CHECK(numbers_are_right(*batch, stream, numbers));
            seen += batch->row_count();
        }
        CHECK(seen == 2 * rows);
        const loader_report report = loader.report();
        CHECK(report.route == route::staged);
        CHECK(report.reason.find("cannot register") != std::string::npos);
        CHECK(registered_pieces.load() == 3);
    }
}

TEST_CASE("cuda loader: a hundred beginnings and ends leave nothing behind") {
    const temporary_folder folder;
    make_rows(folder / "rows.npy", 512);
    const device gpu = device::cuda(0);
    const pinned_buffer numbers(mebibyte, gpu);
    const auto stream_a_little = [&](int batches) {
        const stream stream(gpu);
        loader loader({open_npy(folder / "rows.npy")},
                      {.device = gpu, .batch_rows = 16, .order = order::shuffled, .epochs = 1000});
        for (int i = 0; i < batches; ++i) {
            const auto batch = loader.next(stream);
            REQUIRE(batch);
            CHECK(numbers_are_right(*batch, stream, numbers));
        }
    };
    for (int i = 0; i < 10; ++i)
        stream_a_little(i);
    const std::uint64_t free_before = gpu.memory().free_bytes;
    const std::uint64_t anonymous_before = own_status_bytes("RssAnon");
    const std::uint64_t mapped_before = own_status_bytes("VmSize");
    for (int i = 0; i < 100; ++i)
        stream_a_little(i % 40);
    CHECK(gpu.memory().free_bytes + 32 * mebibyte >= free_before);
    CHECK(own_status_bytes("RssAnon") <= anonymous_before + 32 * mebibyte);
    // the slots alone would be over 3 GiB
    CHECK(own_status_bytes("VmSize") <= mapped_before + 1024 * mebibyte);
}

TEST_CASE("cuda loader: anonymous memory does not grow with the size of the file") {
    const temporary_folder folder;
    make_rows(folder / "small.npy", 1024);
    make_rows(folder / "large.npy", 16 * 1024);
    const auto peak_while_streaming = [&](const std::string& name, order order) {
        const stream stream(device::cuda(0));
        loader loader({open_npy(folder / name)}, {.device = device::cuda(0), .order = order});
        std::uint64_t peak = 0;
        while (loader.next(stream))
            peak = std::max(peak, own_status_bytes("RssAnon"));
        CHECK(loader.report().route == route::copy);
        return peak;
    };
    for (const order order : {order::sequential, order::shuffled}) {
        const std::uint64_t small = peak_while_streaming("small.npy", order);
        const std::uint64_t large = peak_while_streaming("large.npy", order);
        INFO("256 MiB: " << small << " bytes, 4 GiB: " << large << " bytes");
        CHECK(small > 0);
        CHECK(large < small + 16 * mebibyte);
    }
}
