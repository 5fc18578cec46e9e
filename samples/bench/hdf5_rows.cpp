// pinflow's half of hdf5_vs_h5py.py: reads a dataset as a whole, or some of its rows. Prints the seconds
// since opening the file, the CPU seconds of all threads, and the CRC-32 of the bytes read. Does this twice.

#include <zlib.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/row_source.hpp"

namespace {

class stopwatch {
 public:
    double seconds() const { return std::chrono::duration<double>(clock::now() - begin_).count(); }
    double cpu_seconds() const { return cpu_now() - cpu_begin_; }

 private:
    using clock = std::chrono::steady_clock;

    static double cpu_now() {
        std::timespec now{};
        ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
        return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
    }

    clock::time_point begin_ = clock::now();
    double cpu_begin_ = cpu_now();
};

void report(const stopwatch& watch, const std::byte* data, std::uint64_t size_bytes) {
    const double seconds = watch.seconds();
    const double cpu_seconds = watch.cpu_seconds();
    std::printf("seconds %.6f\ncpu %.6f\ncrc %08lx\n", seconds, cpu_seconds,
                ::crc32_z(0, reinterpret_cast<const Bytef*>(data), size_bytes));
}

void read_whole(const std::string& path, const std::string& name) {
    const stopwatch watch;
    const pinflow::array array = pinflow::open_hdf5(path, name);  // which decodes what is not mapped
    report(watch, array.view().data(), array.size_bytes());
}

/// Reads row numbers from a file, 8 bytes each.
std::vector<std::uint64_t> numbers_in(const std::string& path) {
    std::vector<std::uint64_t> numbers(std::filesystem::file_size(path) / sizeof(std::uint64_t));
    std::ifstream file(path, std::ios::binary);
    if (!file.read(reinterpret_cast<char*>(numbers.data()),
                   static_cast<std::streamsize>(numbers.size() * sizeof(std::uint64_t)))) {
        throw std::runtime_error("cannot read " + path);
    }
    return numbers;
}

void read_rows(const std::string& path, const std::string& name, const std::vector<std::uint64_t>& ids) {
    const stopwatch watch;
    const auto rows = pinflow::open_hdf5_rows(path, name);
    const std::uint64_t size_bytes = ids.size() * rows->row_size_bytes();
    const auto memory = std::make_unique_for_overwrite<std::byte[]>(size_bytes);
    rows->read_rows(ids, {memory.get(), size_bytes});
    report(watch, memory.get(), size_bytes);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3 && argc != 4) {
        std::fputs("usage: hdf5_rows FILE DATASET [ROW-NUMBERS]\n", stderr);
        return 2;
    }
    try {
        const std::vector<std::uint64_t> ids = argc == 4 ? numbers_in(argv[3]) : std::vector<std::uint64_t>();
        for (int round = 0; round < 2; ++round) {
            if (argc == 3) {
                read_whole(argv[1], argv[2]);
            } else {
                read_rows(argv[1], argv[2], ids);
            }
        }
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        return 1;
    }
    return 0;
}
