// Compares streaming a file in the page cache through the loader on the host device with a plain memcpy of
// the same rows from a mapping of the file, with the same number of threads and the same amount of memory.
// Rows of 256 KiB, 64 a batch, no digest while the clock runs. Each epoch of the shuffled order has its own
// permutation.
//
//     host_stream_bench [--gib N] [--folder FOLDER] [--threads N] [Google Benchmark's flags]
//
// The column CPU is the time of all threads together. Fails if the delivered bytes differ from the file's, or
// if the loader's median is under 0.8 of memcpy's.

#include <benchmark/benchmark.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/pinflow.hpp"

namespace {

constexpr std::uint64_t row_size_bytes = 256 << 10;
constexpr std::uint64_t batch_rows = 64;
constexpr double required_ratio = 0.8;

std::uint64_t mix(std::uint64_t z) {  // splitmix64's finaliser
    z ^= z >> 30;
    z *= 0xBF58476D1CE4E5B9;
    z ^= z >> 27;
    z *= 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

constexpr std::uint64_t golden = 0x9E3779B97F4A7C15;

/// The file that is streamed, made on construction and removed at the end.
struct test_file {
    test_file(const std::filesystem::path& folder, std::uint64_t size_bytes)
        : path(folder / ("pinflow_host_stream_bench_" + std::to_string(getpid()) + ".npy")) {
        const std::uint64_t rows = size_bytes / row_size_bytes;
        pinflow::npy_writer writer(path, pinflow::dtype::of<std::uint64_t>(), {rows, row_size_bytes / 8},
                                   4096);
        std::vector<std::uint64_t> row(row_size_bytes / 8);
        std::uint64_t counter = 0;
        for (std::uint64_t r = 0; r < rows; ++r) {
            for (std::uint64_t& word : row)
                word = mix(counter += golden);
            writer.write(std::as_bytes(std::span(row)));
        }
        writer.finish();
    }
    test_file(const test_file&) = delete;
    test_file& operator=(const test_file&) = delete;
    ~test_file() {
        std::error_code ignored;
        std::filesystem::remove(path, ignored);
    }

    std::filesystem::path path;
};

struct workload {
    pinflow::array rows;
    unsigned threads;
    unsigned slots = 0;

    std::uint64_t row_count() const { return rows.shape()[0]; }
    const std::byte* row(std::uint64_t id) const { return rows.view().data() + id * row_size_bytes; }
};

/// The digest as pinflow/loader/digest.hpp defines it, computed from the mapping alone.
std::uint64_t expected_digest(const workload& work) {
    std::uint64_t sum = 0;
    for (std::uint64_t r = 0; r < work.row_count(); ++r) {
        std::uint64_t hash = row_size_bytes;
        for (std::uint64_t i = 0; i < row_size_bytes / 8; ++i) {
            std::uint64_t word;
            std::memcpy(&word, work.row(r) + i * 8, 8);
            hash += mix(word + (i + 1) * golden);
        }
        sum += mix(mix(hash + golden));
    }
    return sum;
}

pinflow::loader make_loader(const workload& work, pinflow::order order, std::uint64_t seed,
                            std::uint64_t epochs) {
    return pinflow::loader({work.rows}, {.device = pinflow::device::host(),
                                         .batch_rows = batch_rows,
                                         .order = order,
                                         .seed = seed,
                                         .epochs = epochs,
                                         .threads = work.threads});
}

std::uint64_t delivered_digest(const workload& work, pinflow::order order) {
    pinflow::loader loader = make_loader(work, order, 1, 1);
    pinflow::stream stream(loader.device());
    pinflow::digest digest(loader.device());
    while (auto batch = loader.next(stream))
        digest.add_async(*batch, stream);
    return digest.value();
}

/// Part of the mapping that the page cache holds.
double resident_fraction(const workload& work) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first = reinterpret_cast<std::uintptr_t>(work.row(0)) / page * page;
    const auto end = reinterpret_cast<std::uintptr_t>(work.row(work.row_count()));
    std::vector<unsigned char> pages((end - first + page - 1) / page);
    if (mincore(reinterpret_cast<void*>(first), end - first, pages.data()) != 0) return 0;
    std::uint64_t resident = 0;
    for (const unsigned char p : pages)
        resident += p & 1U;
    return static_cast<double>(resident) / static_cast<double>(pages.size());
}

void set_bytes(benchmark::State& state, const workload& work) {
    state.SetBytesProcessed(static_cast<std::int64_t>(work.row_count() * row_size_bytes) *
                            static_cast<std::int64_t>(state.iterations()));
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::atomic<std::uint64_t> next_seed = 2;  // so that no two repetitions share a permutation

/// An iteration is one epoch of a loader that lives across epochs. The first epoch is not timed, so that
/// memory and page tables are warm, as for memcpy. Some slots may already be filled when an iteration begins.
/// Every iteration but the last also fills slots for the next.
void stream_epochs(benchmark::State& state, const workload& work, pinflow::order order) {
    pinflow::loader loader =
        make_loader(work, order, next_seed++, 1 + static_cast<std::uint64_t>(state.max_iterations));
    pinflow::stream stream(loader.device());
    const auto run_epoch = [&] {
        for (std::uint64_t b = 0; b < loader.batches_per_epoch(); ++b) {
            const auto batch = loader.next(stream);
            if (!batch) throw std::runtime_error("the loader ended early");
        }
        stream.synchronize();
    };
    run_epoch();
    while (state.KeepRunning()) {
        const auto start = std::chrono::steady_clock::now();
        run_epoch();
        state.SetIterationTime(seconds_since(start));
    }
    set_bytes(state, work);
}

/// The threads take the next few rows from a common counter, so that none is idle while another is delayed.
/// Each copies to its own part of the memory, so that none waits for another.
void memcpy_epochs(benchmark::State& state, const workload& work, pinflow::order order) {
    constexpr std::uint64_t rows_at_once = 4;  // 1 MiB
    const std::uint64_t places = std::max(std::uint64_t{1}, work.slots * batch_rows / work.threads);
    const auto slot_memory = pinflow::memory_region::anonymous(work.threads * places * row_size_bytes);
    const pinflow::sampler sampler = order == pinflow::order::sequential
                                         ? pinflow::sampler::sequential(work.row_count())
                                         : pinflow::sampler::shuffled(work.row_count(), next_seed++);
    std::vector<std::uint64_t> ids(work.row_count());
    const auto copy_share = [&](std::atomic<std::uint64_t>& next, std::byte* destination) {
        std::uint64_t place = 0;
        for (std::uint64_t first = next.fetch_add(rows_at_once); first < ids.size();
             first = next.fetch_add(rows_at_once)) {
            for (std::uint64_t i = first; i < std::min(first + rows_at_once, ids.size()); ++i) {
                std::memcpy(destination + place * row_size_bytes, work.row(ids[i]), row_size_bytes);
                benchmark::ClobberMemory();
                place = (place + 1) % places;
            }
        }
    };
    const auto run_epoch = [&] {
        std::atomic<std::uint64_t> next = 0;
        std::vector<std::jthread> threads;
        for (unsigned t = 0; t < work.threads; ++t) {
            std::byte* const destination = slot_memory.data() + t * places * row_size_bytes;
            threads.emplace_back([&copy_share, &next, destination] { copy_share(next, destination); });
        }
    };
    sampler.rows_at(0, 0, ids);
    run_epoch();
    std::uint64_t epoch = 1;
    while (state.KeepRunning()) {
        sampler.rows_at(epoch++, 0, ids);
        const auto start = std::chrono::steady_clock::now();
        run_epoch();
        state.SetIterationTime(seconds_since(start));
    }
    set_bytes(state, work);
}

void permute(benchmark::State& state) {
    const pinflow::permutation permutation(static_cast<std::uint64_t>(state.range(0)), next_seed++);
    std::uint64_t position = 0;
    while (state.KeepRunning()) {
        benchmark::DoNotOptimize(permutation(position));
        if (++position == permutation.size()) position = 0;
    }
}

/// Measures the time for each row of an order, which gives 8192 rows at a time.
void take_rows(benchmark::State& state, const pinflow::sampler& sampler) {
    std::vector<std::uint64_t> rows(8192);
    std::uint64_t first = 0;
    while (state.KeepRunningBatch(static_cast<benchmark::IterationCount>(rows.size()))) {
        sampler.rows_at(0, first, rows);
        benchmark::DoNotOptimize(rows.data());
        first += rows.size();
        if (first > sampler.position_count() - rows.size()) first = 0;
    }
}

/// Prints as usual, and keeps the median rates for the comparison.
class comparing_reporter : public benchmark::ConsoleReporter {
 public:
    comparing_reporter() : ConsoleReporter(OO_None) {}

    void ReportRuns(const std::vector<Run>& runs) override {
        ConsoleReporter::ReportRuns(runs);
        for (const Run& run : runs) {
            if (run.aggregate_name == "median" && run.counters.contains("bytes_per_second")) {
                median_gbps[run.run_name.function_name] = run.counters.at("bytes_per_second") / 1e9;
            }
        }
    }

    std::map<std::string, double> median_gbps;
};

/// Prints the ratio of two medians. @return whether it meets the bound.
bool compare(const std::map<std::string, double>& median_gbps, const std::string& order) {
    const auto loader = median_gbps.find("loader/" + order);
    const auto plain = median_gbps.find("memcpy/" + order);
    if (loader == median_gbps.end() || plain == median_gbps.end()) return true;  // not selected by a filter
    const double ratio = loader->second / plain->second;
    std::printf("%-10s  loader %.2f GB/s, memcpy %.2f GB/s, ratio %.3f (must hold: at least %.2f)\n",
                order.c_str(), loader->second, plain->second, ratio, required_ratio);
    return ratio >= required_ratio;
}

}  // namespace

int main(int argc, char** argv) try {
    std::vector<std::string> flags = {argv[0], "--benchmark_repetitions=9", "--benchmark_min_time=0.5",
                                      "--benchmark_enable_random_interleaving=true",
                                      "--benchmark_report_aggregates_only=true"};
    std::uint64_t gib = 1;
    unsigned threads = std::max(1U, std::thread::hardware_concurrency());
    std::filesystem::path folder = std::filesystem::temp_directory_path();
    for (int i = 1; i < argc; ++i) {
        const std::string_view flag = argv[i];
        if (flag == "--gib" && i + 1 < argc) {
            gib = std::stoull(argv[++i]);
        } else if (flag == "--threads" && i + 1 < argc) {
            threads = static_cast<unsigned>(std::stoul(argv[++i]));
        } else if (flag == "--folder" && i + 1 < argc) {
            folder = argv[++i];
        } else {
            flags.emplace_back(flag);
        }
    }
    std::vector<char*> flag_pointers;
    flag_pointers.reserve(flags.size());
    for (std::string& flag : flags)
        flag_pointers.push_back(flag.data());
    int flag_count = static_cast<int>(flag_pointers.size());
    benchmark::Initialize(&flag_count, flag_pointers.data());
    if (benchmark::ReportUnrecognizedArguments(flag_count, flag_pointers.data())) return 2;

    const test_file file(folder, gib << 30);
    workload work{pinflow::open_npy(file.path), threads};
    const std::uint64_t expected = expected_digest(work);
    for (const pinflow::order order : {pinflow::order::sequential, pinflow::order::shuffled}) {
        if (delivered_digest(work, order) != expected)
            throw std::runtime_error("the delivered bytes differ from the file's");
    }
    const pinflow::loader_report report = make_loader(work, pinflow::order::sequential, 0, 1).report();
    work.slots = report.slots;
    std::printf(
        "%s: %llu GiB in %s, %.1f%% resident; %u threads, %u slots of %llu MiB; delivered bytes "
        "checked\n%s\n",
        pinflow::device::host().model().c_str(), static_cast<unsigned long long>(gib), folder.c_str(),
        100 * resident_fraction(work), threads, report.slots,
        static_cast<unsigned long long>(report.slot_bytes >> 20), report.reason.c_str());

    for (const auto& [name, order] : {std::pair{"sequential", pinflow::order::sequential},
                                      std::pair{"shuffled", pinflow::order::shuffled}}) {
        benchmark::RegisterBenchmark((std::string("loader/") + name).c_str(), stream_epochs, work, order)
            ->UseManualTime()
            ->MeasureProcessCPUTime()
            ->Unit(benchmark::kMillisecond);
        benchmark::RegisterBenchmark((std::string("memcpy/") + name).c_str(), memcpy_epochs, work, order)
            ->UseManualTime()
            ->MeasureProcessCPUTime()
            ->Unit(benchmark::kMillisecond);
    }
    benchmark::RegisterBenchmark("permutation", permute)
        ->Arg(1000)
        ->Arg(1'000'000)
        ->Arg(1'000'000'000)
        ->Arg((1 << 30) + 1)  // the worst case: half of the network's numbers are out of range
        ->Arg(std::int64_t{1} << 40);
    const std::vector<double> weights(1'000'000, 0.1);
    for (const auto& [name, sampler] :
         {std::pair{"rows/shuffled", pinflow::sampler::shuffled(1'000'000'000, 1)},
          std::pair{"rows/windowed", pinflow::sampler::windowed(1'000'000'000, 1, 65536)},
          std::pair{"rows/weighted", pinflow::sampler::weighted(weights, 1'000'000'000, 1)}}) {
        benchmark::RegisterBenchmark(name, take_rows, sampler);
    }
    comparing_reporter reporter;
    benchmark::RunSpecifiedBenchmarks(&reporter);
    const bool sequential_holds = compare(reporter.median_gbps, "sequential");
    const bool shuffled_holds = compare(reporter.median_gbps, "shuffled");
    return sequential_holds && shuffled_holds ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "host_stream_bench: %s\n", error.what());
    return 1;
}
