// table_memory [GIB]
//
// Measures which memory is best for a table of rows: GIB GiB (5) of pinflow's own page-locked memory, of
// plain anonymous pages, of a file in a tmpfs, and of huge pages of 2 MiB if the kernel has any
// (nr_hugepages). Prints one line for each: the seconds until it is allocated, zeroed and written, the
// seconds of making a row exchange, which page-locks it (pinned_buffer already is), and the rate of gathering
// rows of 512 bytes from it: 64 batches of 131072 fresh rows, 8 together. In each repetition, compares one of
// the 64 batches with the table. Exit 77 without a CUDA device.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "pinflow/pinflow.hpp"

namespace {

using namespace pinflow;
using clock = std::chrono::steady_clock;

constexpr std::uint64_t row_bytes = 512;
constexpr std::uint64_t batch_rows = 131072;
constexpr std::uint64_t batches = 64;
constexpr std::uint64_t together = 8;

double seconds_since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
}

/// A file in memory, mapped; `flags` as memfd_create takes them.
std::span<std::byte> map_memory_file(std::uint64_t size_bytes, unsigned flags) {
    const int descriptor = ::memfd_create("table", flags);
    if (descriptor < 0) return {};
    void* data = MAP_FAILED;
    if (::ftruncate(descriptor, static_cast<off_t>(size_bytes)) == 0)
        data = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    ::close(descriptor);
    if (data == MAP_FAILED) return {};
    return {static_cast<std::byte*>(data), size_bytes};
}

std::span<std::byte> map_plain_pages(std::uint64_t size_bytes) {
    void* const data = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) return {};
    ::madvise(data, size_bytes, MADV_NOHUGEPAGE);
    return {static_cast<std::byte*>(data), size_bytes};
}

/// Fills the table with words that are a function of their index.
void fill(std::span<std::byte> table) {
    auto* const words = reinterpret_cast<std::uint64_t*>(table.data());
    for (std::uint64_t i = 0; i < table.size() / sizeof(std::uint64_t); ++i)
        words[i] = i * 0x9E3779B97F4A7C15;
}

/// GB/s (1e9 bytes), the median of 5 times 64 batches.
/// @throws std::runtime_error for a wrong row.
double gather_rate(row_exchange& exchange, std::span<const std::byte> table, const device& gpu) {
    const stream stream(gpu);
    std::vector<device_buffer> arrived;
    for (std::uint64_t i = 0; i < batches; ++i)
        arrived.emplace_back(batch_rows * row_bytes, stream);
    const pinned_buffer looked_at(batch_rows * row_bytes, gpu);
    stream.synchronize();
    std::vector<double> rates;
    for (std::uint64_t repetition = 0; repetition <= 5; ++repetition) {
        std::vector<std::vector<std::uint64_t>> ids(batches, std::vector<std::uint64_t>(batch_rows));
        for (std::uint64_t i = 0; i < batches; ++i)
            sampler::shuffled(table.size() / row_bytes, repetition * batches + i).rows_at(0, 0, ids[i]);
        const auto start = clock::now();
        for (std::uint64_t first = 0; first < batches; first += together) {
            std::vector<row_gather> group;
            for (std::uint64_t i = first; i < first + together; ++i)
                group.push_back({std::span<const std::uint64_t>(ids[i]), arrived[i].data()});
            exchange.gather_group_async(group, stream);
        }
        stream.synchronize();
        const double seconds = seconds_since(start);
        if (repetition > 0) rates.push_back(batches * batch_rows * row_bytes / seconds / 1e9);
        copy_to_host_async(looked_at.bytes(), arrived[repetition].data(), stream);
        stream.synchronize();
        for (std::uint64_t i = 0; i < batch_rows; ++i) {
            const std::byte* const row = table.data() + ids[repetition][i] * row_bytes;
            if (std::memcmp(looked_at.data() + i * row_bytes, row, row_bytes) != 0)
                throw std::runtime_error("a gathered row is wrong");
        }
    }
    std::ranges::sort(rates);
    return rates[rates.size() / 2];
}

void measure(const char* name, const device& gpu, const std::function<std::span<std::byte>()>& make) {
    const auto start = clock::now();
    const std::span<std::byte> table = make();
    if (table.empty()) {
        std::printf("%-36s is not available on this machine\n", name);
        return;
    }
    fill(table);
    const double made = seconds_since(start);
    const auto before_locking = clock::now();
    row_exchange exchange(
        row_table(table, row_bytes), gpu,
        {.route = row_route::direct, .max_batch_rows = together * batch_rows, .max_calls_in_flight = 8});
    const double locked = seconds_since(before_locking);
    std::printf("%-36s made and filled in %6.2f s, page-locked in %6.3f s, gathered at %6.2f GB/s\n", name,
                made, locked, gather_rate(exchange, table, gpu));
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    try {
        if (device::cuda_count() == 0) {
            std::printf("skipped: %s\n", device::no_cuda_reason().c_str());
            return 77;
        }
        const std::uint64_t size_bytes = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 5) << 30;
        const device gpu = device::cuda(0);
        std::unique_ptr<const pinned_buffer> own;
        measure("pinned_buffer", gpu, [&] {
            own = std::make_unique<const pinned_buffer>(size_bytes, gpu);
            return own->bytes();
        });
        own.reset();
        struct {
            const char* name;
            std::span<std::byte> (*map)(std::uint64_t);
        } const kinds[] = {
            {"anonymous pages of 4 KiB", map_plain_pages},
            {"a file in a tmpfs", [](std::uint64_t bytes) { return map_memory_file(bytes, MFD_CLOEXEC); }},
            {"huge pages of 2 MiB (hugetlb)",
             [](std::uint64_t bytes) { return map_memory_file(bytes, MFD_CLOEXEC | MFD_HUGETLB); }},
        };
        for (const auto& kind : kinds) {
            std::span<std::byte> table;
            measure(kind.name, gpu, [&] { return table = kind.map(size_bytes); });
            if (!table.empty()) ::munmap(table.data(), table.size());
        }
        return 0;
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "table_memory: %s\n", failure.what());
        return 1;
    }
}
