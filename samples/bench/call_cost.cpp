// call_cost [ROW_BYTES]
//
// Measures what a call of a row exchange costs the host thread that makes it: if the stream is idle ("call"),
// and behind up to seven calls in flight ("queued"). Also measures the time until the rows of a call on an
// idle stream have arrived ("complete"). Gathers and scatters of 64, 4096 and 131072 rows (512 bytes, or
// ROW_BYTES) of a table of 1 GiB, with indices in host and in device memory. For each number of rows and each
// kind of memory, compares the rows of the last gather with the table and prints one line: the medians of 200
// calls, and for "queued" of 175, since every eighth call finds the stream idle and is left out. Exit 77
// without a CUDA device.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "pinflow/pinflow.hpp"

namespace {

using namespace pinflow;
using clock = std::chrono::steady_clock;

constexpr std::uint64_t table_bytes = std::uint64_t{1} << 30;
constexpr int calls = 200;

double microseconds_since(clock::time_point start) {
    return std::chrono::duration<double, std::micro>(clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
}

struct figures {
    std::vector<double> call;
    std::vector<double> queued;
    std::vector<double> complete;
};

/// Indices of one call, in both kinds of memory.
struct id_lists {
    id_lists(std::uint64_t count, std::uint64_t row_count, std::mt19937_64& random, const stream& stream)
        : on_host(count), on_device(count * sizeof(std::uint64_t), stream) {
        for (std::uint64_t& id : on_host)
            id = random() % row_count;
        copy_to_device_async(on_device.data(), std::as_bytes(std::span(on_host)), stream);
        stream.synchronize();
    }
    row_ids ids(bool in_device_memory) const {
        if (!in_device_memory) return {std::span<const std::uint64_t>(on_host)};
        return row_ids::on_device(on_device.data(), on_host.size());
    }
    std::vector<std::uint64_t> on_host;
    device_buffer on_device;
};

template <typename Call>
figures measure(const stream& stream, Call call) {
    figures found;
    for (int i = -10; i < calls; ++i) {
        const auto start = clock::now();
        call(static_cast<std::size_t>(i) + 10);
        const double host = microseconds_since(start);
        stream.synchronize();
        if (i < 0) continue;
        found.call.push_back(host);
        found.complete.push_back(microseconds_since(start));
    }
    constexpr int calls_in_flight = 8;
    for (int i = 0; i < calls; ++i) {
        if (i % calls_in_flight == 0) stream.synchronize();
        const auto start = clock::now();
        call(static_cast<std::size_t>(i));
        if (i % calls_in_flight != 0) found.queued.push_back(microseconds_since(start));
    }
    stream.synchronize();
    return found;
}

void run(std::uint64_t row_bytes) {
    const device gpu = device::cuda(0);
    const std::uint64_t row_count = table_bytes / row_bytes;
    const pinned_buffer table(row_count * row_bytes, gpu);
    std::mt19937_64 random(1);
    for (std::uint64_t row = 0; row < row_count; ++row)
        std::memcpy(table.data() + row * row_bytes, &row, std::min(row_bytes, sizeof row));
    const stream stream(gpu);
    row_exchange exchange(row_table(table.bytes(), row_bytes), gpu);
    for (const std::uint64_t count : std::array<std::uint64_t, 3>{64, 4096, 131072}) {
        std::vector<id_lists> lists;
        for (int i = 0; i < 8; ++i)
            lists.emplace_back(count, row_count, random, stream);
        const device_buffer rows(count * row_bytes, stream);
        for (const bool in_device_memory : {false, true}) {
            const figures gather = measure(stream, [&](std::size_t i) {
                exchange.gather_async(lists[i % 8].ids(in_device_memory), rows.data(), stream);
            });
            const id_lists& last = lists[(calls - 1) % 8];
            std::vector<std::byte> arrived(count * row_bytes);
            copy_to_host_async(arrived, rows.data(), stream);
            stream.synchronize();
            for (std::uint64_t i = 0; i < count; ++i) {
                if (std::memcmp(arrived.data() + i * row_bytes, table.data() + last.on_host[i] * row_bytes,
                                row_bytes) != 0)
                    throw std::runtime_error("a gathered row is wrong");
            }
            const figures scatter = measure(stream, [&](std::size_t) {
                exchange.scatter_async(last.ids(in_device_memory), rows.data(), duplicate_policy::last,
                                       stream);
            });
            const char* const kind = in_device_memory ? "device" : "host";
            std::printf(
                "%6llu rows, indices in %-6s memory, us: gather call %6.1f, queued %6.1f, complete %7.1f; "
                "scatter call %6.1f, queued %6.1f, complete %7.1f\n",
                static_cast<unsigned long long>(count), kind, median(gather.call), median(gather.queued),
                median(gather.complete), median(scatter.call), median(scatter.queued),
                median(scatter.complete));
            std::fflush(stdout);
        }
    }
    exchange.check();
}

}  // namespace

int main(int argc, char** argv) {
    try {
        if (device::cuda_count() == 0) return 77;
        run(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 512);
        return 0;
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "call_cost: %s\n", failure.what());
        return 1;
    }
}
