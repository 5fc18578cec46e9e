#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <string>
#include <vector>

#include "tests/fuzz/npy_header_invariants.hpp"
#include "tests/npy_headers.hpp"
#include "tests/support/sanitized.hpp"

// Headers of .npy files that attack the parser.

using npy_bytes::as_bytes;
using npy_bytes::header;
using npy_bytes::text;
using pinflow::format_error;

// ---- the largest allocation, counted for the whole executable ---------------------------------------------

namespace {
std::atomic<std::size_t> largest_allocation = 0;
}

// not inlined, as g++ would see new without delete in one place and free without malloc in another, and warn
[[gnu::noinline]] void* operator new(std::size_t size) {
    std::size_t largest = largest_allocation.load();
    while (size > largest && !largest_allocation.compare_exchange_weak(largest, size)) {
    }
    if (void* const data = std::malloc(size == 0 ? 1 : size)) return data;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* data) noexcept {
    std::free(data);
}
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept {
    std::free(data);
}

TEST_CASE("npy header: no hostile length or shape makes it allocate more than 4 KiB at once") {
    using namespace std::string_literals;
    const std::vector<std::string> hostile = {
        "\x93NUMPY\2\0\xF0\xFF\xFF\xFF"s,
        "\x93NUMPY\2\0\xF0\xFF\xFF\xFF{}"s,
        "\x93NUMPY\3\0\xFF\xFF\xFF\xFF{}"s,
        "\x93NUMPY\1\0\xFF\xFF{}"s,
        header(text("'<f4'", "(9223372036854775807,)")),
        header(text("'<f4'", "(0, 9223372036854775807)")),
        header(text("'<f4'", "(1099511627776, 2)")),
        header(text("'|S2147483647'", "(2147483647, 2)")),
        header(text("'|S99999999999999999999'", "(1,)")),
        header(text("'" + std::string(9'000, 'x') + "'", "(1,)")),
        header(text("'<f4'", "(" + repeated("1, ", 3'000) + ")")),
        header(text("'<f4'", "(" + std::string(9'000, '9') + ",)")),
        header(repeated("(", 9'999)),
        header(text(repeated("[", 9'000), "()")),
        header(text(nested(1'000), "()")),
        header(text("[('a', " + repeated("(", 9'000), "()")),
        header(text("[('a', '<f4', (2147483647, 2147483647, 2147483647))]", "(1,)")),
        header(text("[('a', '|S2147483647', 2147483647)]", "(1,)")),
        header("{" + std::string(9'000, '\'')),
    };
    std::size_t refused = 0;
    std::size_t largest = 0;
    for (const std::string& bytes : hostile) {
        for (const std::uint64_t file_size : {std::uint64_t{bytes.size()}, any_size}) {
            largest_allocation = 0;
            try {
                parse(bytes, file_size);
            } catch (const format_error&) {
                ++refused;
            }
            largest = std::max(largest, largest_allocation.load());
        }
    }
    CHECK(refused > hostile.size());
    CHECK(largest > 0);
    CHECK(largest <= 4096);
}

TEST_CASE("npy header: the invariants hold for the fuzzer's seeds, findings and their mutations") {
    const auto folder = std::filesystem::path(__FILE__).parent_path() / "fuzz";
    std::size_t files = 0;
    for (const auto& inputs : {folder / "seeds" / "npy_header", folder / "regressions" / "npy_header"}) {
        if (!std::filesystem::exists(inputs)) continue;  // nothing found so far
        for (const auto& entry : std::filesystem::directory_iterator(inputs)) {
            CAPTURE(entry.path().filename().string());
            std::string bytes = npy_bytes::read_file(entry.path().string());
            ++files;
            CHECK(npy_header_invariants::broken_for(as_bytes(bytes)) == "");
            constexpr std::size_t step = sanitized ? 5 : 1;  // the fuzz targets run under sanitizers, too
            for (std::size_t at = 0; at < bytes.size(); at += step) {
                const char original = bytes[at];
                for (const char replacement : {'\0', ' ', '\'', '(', ',', '0', 'L', '\\', '\xFF'}) {
                    bytes[at] = replacement;
                    const std::string broken = npy_header_invariants::broken_for(as_bytes(bytes));
                    if (!broken.empty()) FAIL_CHECK("byte " << at << ": " << broken);
                }
                bytes[at] = original;
            }
        }
    }
    CHECK(files > 10);
}
