// make_npy OUT.npy [--rows N] [--row-bytes B] [--dtype float32|uint8] [--seed S]
//
// Writes a .npy file of any size with seeded random content: 4096 rows of 256 KiB unless told otherwise. The
// content depends only on the arguments, so that the same arguments make the same file everywhere.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "pinflow/pinflow.hpp"

namespace {

struct usage_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

std::uint64_t number(const std::string& text) {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || *end != '\0') throw usage_error("'" + text + "' is not a number");
    return value;
}

/// The 64-bit word at `position`: splitmix64, which can begin anywhere in its sequence.
std::uint64_t random_word(std::uint64_t seed, std::uint64_t position) {
    std::uint64_t z = seed + (position + 1) * 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

void make(const std::string& path, std::uint64_t rows, std::uint64_t row_bytes, bool floats,
          std::uint64_t seed) {
    const std::uint64_t item_bytes = floats ? 4 : 1;
    const auto type = floats ? pinflow::dtype::of<float>() : pinflow::dtype::of<std::uint8_t>();
    // data at a multiple of 4096, as suits direct reads from a disk; the writer checks the sizes
    pinflow::npy_writer writer(path, type, {rows, row_bytes / item_bytes}, 4096);
    const std::uint64_t size_bytes = rows * row_bytes;

    std::vector<std::uint64_t> piece(std::size_t{1} << 17);
    for (std::uint64_t done = 0; done < size_bytes;) {
        for (std::size_t index = 0; index < piece.size(); ++index) {
            const std::uint64_t word = random_word(seed, done / 8 + index);
            // two floats in [1, 2): 23 random bits each below a fixed exponent
            piece[index] = floats ? (word & 0x007FFFFF007FFFFF) | 0x3F8000003F800000 : word;
        }
        const auto bytes = std::as_bytes(std::span(piece));
        const std::uint64_t part = std::min<std::uint64_t>(bytes.size(), size_bytes - done);
        writer.write(bytes.first(static_cast<std::size_t>(part)));
        done += part;
    }
    writer.finish();  // only now does the file have its name
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const std::string path = argc > 1 ? argv[1] : "";
        std::uint64_t rows = 4096, row_bytes = 256 << 10, seed = 0;
        bool floats = true;
        for (int index = 2; index < argc; index += 2) {
            const std::string flag = argv[index];
            if (flag != "--rows" && flag != "--row-bytes" && flag != "--seed" && flag != "--dtype")
                throw usage_error("there is no option '" + flag + "'");
            if (index + 1 == argc) throw usage_error(flag + " needs a value");
            const std::string value = argv[index + 1];
            if (flag == "--rows") {
                rows = number(value);
            } else if (flag == "--row-bytes") {
                row_bytes = number(value);
            } else if (flag == "--seed") {
                seed = number(value);
            } else if (value == "float32" || value == "uint8") {
                floats = value == "float32";
            } else {
                throw usage_error("--dtype must be float32 or uint8, not '" + value + "'");
            }
        }
        if (path.empty() || path.starts_with('-'))
            throw usage_error("the first argument must be the file to make");
        if (floats && row_bytes % 4 != 0)
            throw usage_error("--row-bytes must be a multiple of 4 for float32");
        const auto started = std::chrono::steady_clock::now();
        make(path, rows, row_bytes, floats, seed);
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
        std::printf("%s: %.3f GB in %.2f s\n", path.c_str(), static_cast<double>(rows * row_bytes) / 1e9,
                    taken.count());
        return 0;
    } catch (const usage_error& failure) {
        std::fprintf(stderr,
                     "make_npy: error: %s\nusage: make_npy OUT.npy [--rows N] [--row-bytes B] "
                     "[--dtype float32|uint8] [--seed S]\n",
                     failure.what());
        return 2;
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "make_npy: error: %s\n", failure.what());
        return 1;
    }
}
