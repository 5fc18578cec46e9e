#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

namespace {

/// This process's anonymous memory that is resident.
std::uint64_t anonymous_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with("RssAnon:")) return std::stoull(line.substr(8)) * 1024;
    }
    throw std::runtime_error("/proc/self/status has no RssAnon");
}

/// A file of rows of 256 KiB that takes no space on the disk.
void make_sparse_npy(const std::filesystem::path& path, std::uint64_t rows) {
    const std::string header = format_npy_header(dtype::of<float>(), std::vector<std::uint64_t>{rows, 65536});
    std::ofstream(path, std::ios::binary) << header;
    std::filesystem::resize_file(path, header.size() + rows * 65536 * sizeof(float));
}

/// The most anonymous memory seen while all of `path` is streamed.
std::uint64_t peak_while_streaming(const std::filesystem::path& path, order order) {
    loader loader({open_npy(path)}, {.device = device::host(), .order = order});
    const stream stream(device::host());
    std::uint64_t peak = 0;
    while (loader.next(stream)) {
        peak = std::max(peak, anonymous_bytes());
    }
    return peak;
}

}  // namespace

TEST_CASE("memory: streaming 8 GiB takes no more anonymous memory than streaming 1 GiB") {
    const temporary_folder folder;
    make_sparse_npy(folder / "small.npy", 4096);
    make_sparse_npy(folder / "large.npy", 8 * 4096);
    for (const order order : {order::sequential, order::shuffled}) {
        const std::uint64_t small = peak_while_streaming(folder / "small.npy", order);
        const std::uint64_t large = peak_while_streaming(folder / "large.npy", order);
        INFO("1 GiB: " << small << " bytes, 8 GiB: " << large << " bytes");
        CHECK(small > 0);
        CHECK(large < small + (std::uint64_t{16} << 20));
    }
}
