// publish_speed FILE [ROUNDS]
//
// Compares publishing the rows of FILE, which should be in the page cache, with the least that a copy for
// several processes takes: a memcpy of the same bytes, from a mapping of FILE to new pages of a tmpfs, in
// pieces of 4 MiB by one thread for each core. In turns, ROUNDS (5) times each; prints the medians, one "name
// value unit" a line, and checks both copies. Takes as much shared memory as the file is large.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/formats/npy.hpp"
#include "pinflow/shared/segment.hpp"

namespace {

using clock = std::chrono::steady_clock;

double seconds_since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
}

void copy_by_all_cores(std::byte* to, const std::byte* from, std::uint64_t size_bytes) {
    constexpr std::uint64_t piece_bytes = 4 << 20;
    std::atomic<std::uint64_t> next = 0;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < std::max(1U, std::thread::hardware_concurrency()); ++i) {
        threads.emplace_back([&] {
            for (;;) {
                const std::uint64_t at = next.fetch_add(piece_bytes);
                if (at >= size_bytes) return;
                std::memcpy(to + at, from + at, std::min(piece_bytes, size_bytes - at));
            }
        });
    }
    for (std::thread& each : threads)
        each.join();
}

/// @return the seconds that the copy to new pages took.
double measure_memcpy(const pinflow::array& rows) {
    const std::uint64_t size_bytes = rows.size_bytes();
    const auto start = clock::now();
    const int descriptor = ::open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (descriptor == -1 || ::ftruncate(descriptor, static_cast<::off_t>(size_bytes)) != 0)
        throw std::runtime_error("cannot make a file in /dev/shm");
    void* const pages = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (pages == MAP_FAILED) throw std::runtime_error("cannot map a file in /dev/shm");
    copy_by_all_cores(static_cast<std::byte*>(pages), rows.view().data(), size_bytes);
    const double seconds = seconds_since(start);
    const bool is_right = std::memcmp(pages, rows.view().data(), size_bytes) == 0;
    ::munmap(pages, size_bytes);
    ::close(descriptor);
    if (!is_right) throw std::runtime_error("the memcpy copied something else");
    return seconds;
}

/// @return the seconds that publishing took.
double measure_publish(const pinflow::array& rows, const std::string& name) {
    const auto source = rows.rows();
    const auto start = clock::now();
    pinflow::publish(name, *source);
    const double seconds = seconds_since(start);
    const bool is_right =
        std::memcmp(pinflow::open_segment(name).view().data(), rows.view().data(), rows.size_bytes()) == 0;
    pinflow::remove_segment(name);
    if (!is_right) throw std::runtime_error("the segment holds something else");
    return seconds;
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc != 2 && argc != 3) {
        std::fprintf(stderr, "usage: publish_speed FILE [ROUNDS]\n");
        return 2;
    }
    const int rounds = argc == 3 ? std::atoi(argv[2]) : 5;
    const pinflow::array rows = pinflow::open_npy(argv[1]);
    const std::string name = "publish-speed-" + std::to_string(::getpid());
    std::vector<double> copied;
    std::vector<double> published;
    measure_memcpy(rows);  // reads the file into the page cache
    measure_publish(rows, name);
    for (int i = 0; i < std::max(rounds, 1); ++i) {
        copied.push_back(measure_memcpy(rows));
        published.push_back(measure_publish(rows, name));
    }
    const auto size_bytes = static_cast<double>(rows.size_bytes());
    std::printf("%-40s %8.2f GB/s\n", "memcpy to new pages", size_bytes / median(copied) / 1e9);
    std::printf("%-40s %8.2f GB/s\n", "publish", size_bytes / median(published) / 1e9);
    std::printf("%-40s %8.2f\n", "publish, ratio to memcpy", median(copied) / median(published));
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "publish_speed: error: %s\n", error.what());
    return 1;
}
