#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <span>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"
#include "src/device/backend.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;

namespace {

// ---- the definition, word by word ---------------------------------------------------------------

constexpr std::uint64_t golden = 0x9E3779B97F4A7C15;

std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

std::uint64_t row_hash(std::span<const std::byte> row) {
    std::uint64_t hash = row.size();
    for (std::size_t i = 0; i * 8 < row.size(); ++i) {
        std::uint64_t word = 0;
        std::memcpy(&word, row.data() + i * 8, std::min<std::size_t>(8, row.size() - i * 8));
        hash += mix(word + (i + 1) * golden);
    }
    return hash;
}

/// One array of some samples, as the test makes it.
struct test_array {
    std::uint64_t row_size_bytes;
    std::uint64_t misalignment;  // of the first row in device memory
    std::vector<std::byte> bytes;
};

std::uint64_t digest_by_definition(std::span<const test_array> arrays, std::uint64_t row_count) {
    std::uint64_t digest = 0;
    for (std::uint64_t row = 0; row < row_count; ++row) {
        std::uint64_t sample = 0;
        for (std::size_t a = 0; a < arrays.size(); ++a) {
            const std::uint64_t size = arrays[a].row_size_bytes;
            sample += mix(row_hash(std::span(arrays[a].bytes).subspan(row * size, size)) + (a + 1) * golden);
        }
        digest += mix(sample);
    }
    return digest;
}

std::vector<std::byte> random_bytes(std::uint64_t size, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::byte> bytes(size);
    for (std::size_t at = 0; at < bytes.size(); at += 8) {
        const std::uint64_t word = random();
        std::memcpy(bytes.data() + at, &word, std::min<std::size_t>(8, bytes.size() - at));
    }
    return bytes;
}

std::uint64_t digest_on_gpu(std::span<const test_array> arrays, std::uint64_t row_count) {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    std::vector<device_buffer> buffers;
    std::vector<detail::digest_array> views;
    for (const test_array& array : arrays) {
        // exactly as large as the rows, so that compute-sanitizer sees a read past the end
        buffers.emplace_back(array.misalignment + array.bytes.size(), stream);
        std::byte* const rows = buffers.back().data() + array.misalignment;
        if (!array.bytes.empty()) copy_to_device_async(rows, array.bytes, stream);
        views.push_back({rows, array.row_size_bytes});
    }
    const std::uint64_t before = 0x0123456789ABCDEF;  // the digest is added, not stored
    const device_buffer sum(sizeof before, stream);
    copy_to_device_async(sum.data(), std::as_bytes(std::span(&before, 1)), stream);
    gpu.backend().add_digest(views, row_count, reinterpret_cast<std::uint64_t*>(sum.data()),
                             stream.view().native_handle());
    std::uint64_t after = 0;
    std::memcpy(&after, to_host(sum.data(), sizeof after, stream).data(), sizeof after);
    return after - before;
}

test_array random_array(std::uint64_t row_count, std::uint64_t row_size_bytes, std::uint64_t misalignment,
                        std::uint64_t seed) {
    return {row_size_bytes, misalignment, random_bytes(row_count * row_size_bytes, seed)};
}

}  // namespace

TEST_CASE("cuda digest: the published vectors") {
    const auto rows_of_numbers = [](std::uint64_t row_size, std::uint64_t count) {
        test_array array{row_size, 0, {}};
        for (std::uint64_t i = 0; i < row_size * count; ++i)
            array.bytes.push_back(static_cast<std::byte>(i));
        return array;
    };
    const test_array three = rows_of_numbers(3, 2);
    CHECK(digest_on_gpu({&three, 1}, 2) == 0xc5121eb0e0166a0a);
    const test_array nine = rows_of_numbers(9, 1);
    CHECK(digest_on_gpu({&nine, 1}, 1) == 0xe87e5cfe1c1f92ad);
    const test_array empty = rows_of_numbers(0, 1);
    CHECK(digest_on_gpu({&empty, 1}, 1) == 0x48218226ff3cd4bf);
    CHECK(digest_on_gpu({&three, 1}, 0) == 0);
}

TEST_CASE("cuda digest: rows of every size and alignment give what the definition says") {
    constexpr std::uint64_t max_bytes = 8 << 20;
    for (const std::uint64_t row_size : std::initializer_list<std::uint64_t>{
             1,    2,    3,    7,    8,    9,     12,     15,     16,      17,           24,
             31,   32,   33,   40,   63,   64,    65,     100,    127,     128,          1000,
             4088, 4095, 4096, 4097, 8195, 65536, 196613, 262144, 1 << 20, (1 << 20) + 1}) {
        for (const std::uint64_t row_count : std::initializer_list<std::uint64_t>{1, 2, 3, 31, 64, 1000}) {
            if (row_size * row_count > max_bytes) continue;
            for (const std::uint64_t misalignment : std::initializer_list<std::uint64_t>{0, 1, 4, 8, 13}) {
                const test_array array =
                    random_array(row_count, row_size, misalignment, row_size + row_count);
                CAPTURE(row_size);
                CAPTURE(row_count);
                CAPTURE(misalignment);
                REQUIRE(digest_on_gpu({&array, 1}, row_count) ==
                        digest_by_definition({&array, 1}, row_count));
            }
        }
    }
}

TEST_CASE("cuda digest: several arrays a sample, of different row sizes") {
    constexpr std::uint64_t rows = 64;
    const std::vector<test_array> image_and_label{random_array(rows, 262144, 0, 1),
                                                  random_array(rows, 8, 0, 2)};
    const std::uint64_t digest = digest_by_definition(image_and_label, rows);
    CHECK(digest_on_gpu(image_and_label, rows) == digest);
    const std::vector<test_array> swapped{image_and_label[1], image_and_label[0]};
    CHECK(digest_on_gpu(swapped, rows) != digest);
    const std::vector<test_array> five{random_array(333, 1, 3, 1), random_array(333, 0, 0, 2),
                                       random_array(333, 70'001, 1, 3), random_array(333, 48, 5, 4),
                                       random_array(333, 4096, 0, 5)};
    CHECK(digest_on_gpu(five, 333) == digest_by_definition(five, 333));
}

TEST_CASE("cuda digest: millions of samples in one kernel") {
    constexpr std::uint64_t rows = 5'000'001;
    const std::vector<test_array> arrays{random_array(rows, 3, 1, 1), random_array(rows, 5, 0, 2)};
    CHECK(digest_on_gpu(arrays, rows) == digest_by_definition(arrays, rows));
}

TEST_CASE("cuda digest: more arrays than one kernel takes, and more rows than are hashed at a time") {
    constexpr std::uint64_t rows = 300'001;  // 2^21 hashes at a time
    std::vector<test_array> arrays;
    for (std::uint64_t i = 0; i < 9; ++i)
        arrays.push_back(random_array(rows, i + 1, i, i));
    CHECK(digest_on_gpu(arrays, rows) == digest_by_definition(arrays, rows));
}

TEST_CASE("cuda digest: one row of hundreds of megabytes") {
    const test_array array = random_array(1, (std::uint64_t{300} << 20) + 3, 8, 1);
    CHECK(digest_on_gpu({&array, 1}, 1) == digest_by_definition({&array, 1}, 1));
}
