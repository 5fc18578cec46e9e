#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "sanitized.hpp"
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

/// The largest anonymous memory while all of `path` is streamed, and the upper bound of the slots' part.
struct seen_memory {
    std::uint64_t peak_bytes = 0;
    std::uint64_t slot_bytes = 0;
};
seen_memory memory_while_streaming(const std::filesystem::path& path, order order) {
    loader loader({open_npy(path)}, {.device = device::host(), .order = order});
    const stream stream(device::host());
    seen_memory seen{.slot_bytes = loader.report().slots * loader.report().slot_bytes};
    while (loader.next(stream)) {
        seen.peak_bytes = std::max(seen.peak_bytes, anonymous_bytes());
    }
    return seen;
}

}  // namespace

TEST_CASE("memory: streaming 8 GiB takes no more anonymous memory than its slots and 16 MiB") {
    const temporary_folder folder;
    make_sparse_npy(folder / "small.npy", 4096);
    make_sparse_npy(folder / "large.npy", 8 * 4096);
    for (const order order : {order::sequential, order::shuffled}) {
        const std::uint64_t before = anonymous_bytes();
        const seen_memory small = memory_while_streaming(folder / "small.npy", order);
        const seen_memory large = memory_while_streaming(folder / "large.npy", order);
        INFO("before: " << before << " bytes, 1 GiB: " << small.peak_bytes
                        << " bytes, 8 GiB: " << large.peak_bytes << " bytes");
        CHECK(small.peak_bytes > before);
        CHECK(large.slot_bytes == small.slot_bytes);
        // AddressSanitizer's shadow memory has a byte for every eight bytes of the slots
        const std::uint64_t sanitizer_bytes = sanitized ? large.slot_bytes / 8 : 0;
        // not every slot need be used, because the last released slot is filled first
        CHECK(large.peak_bytes < before + large.slot_bytes + sanitizer_bytes + (std::uint64_t{16} << 20));
    }
}
