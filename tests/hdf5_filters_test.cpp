#include "formats/hdf5_filters.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/support/file_bytes.hpp"

namespace {

using pinflow::detail::hdf5_chunk_decoder;
using pinflow::detail::hdf5_filter;
using pinflow::detail::hdf5_fletcher32;
using pinflow::detail::hdf5_pipeline;
using pinflow::detail::hdf5_unshuffle;
using byte_vector = std::vector<std::byte>;

const hdf5_filter deflate_filter{1, "deflate", {6}};
const hdf5_filter fletcher32{3, "fletcher32", {}};
const hdf5_filter lzf{32000, "lzf", {4, 261, 160}};

hdf5_filter shuffle(std::uint32_t element_bytes) {
    return {2, "shuffle", {element_bytes}};
}

byte_vector random_bytes(std::mt19937_64& random, std::size_t size, bool compressible) {
    byte_vector bytes(size);
    for (std::byte& byte : bytes)
        byte = static_cast<std::byte>(compressible && random() % 2 == 0 ? 7 : random());
    return bytes;
}

byte_vector deflated(std::span<const std::byte> bytes) {
    ::uLongf size = ::compressBound(static_cast<::uLong>(bytes.size()));
    byte_vector result(size);
    REQUIRE(::compress2(reinterpret_cast<::Bytef*>(result.data()), &size,
                        reinterpret_cast<const ::Bytef*>(bytes.data()), static_cast<::uLong>(bytes.size()),
                        6) == Z_OK);
    result.resize(size);
    return result;
}

byte_vector shuffled(std::span<const std::byte> bytes, std::size_t element_bytes) {
    byte_vector result;
    const std::size_t count = bytes.size() / element_bytes;
    for (std::size_t plane = 0; plane < element_bytes; ++plane) {
        for (std::size_t element = 0; element < count; ++element)
            result.push_back(bytes[element * element_bytes + plane]);
    }
    result.insert(result.end(), bytes.begin() + static_cast<std::ptrdiff_t>(count * element_bytes),
                  bytes.end());
    return result;
}

/// Fletcher's checksum as HDF5 defines it, one word at a time.
std::uint32_t slow_fletcher32(std::span<const std::byte> bytes) {
    std::uint64_t sum = 0;
    std::uint64_t sums = 0;
    for (std::size_t at = 0; at < bytes.size(); at += 2) {
        const auto low = at + 1 < bytes.size() ? std::to_integer<std::uint32_t>(bytes[at + 1]) : 0;
        sum += std::to_integer<std::uint32_t>(bytes[at]) << 8 | low;
        if (sum > 65535) sum -= 65535;
        sums += sum;
        if (sums > 65535) sums -= 65535;
    }
    return static_cast<std::uint32_t>(sums << 16 | sum);
}

byte_vector with_checksum(byte_vector bytes, std::uint32_t sum) {
    for (unsigned shift = 0; shift < 32; shift += 8)
        bytes.push_back(static_cast<std::byte>(sum >> shift));
    return bytes;
}

byte_vector with_checksum(const byte_vector& bytes) {
    return with_checksum(bytes, slow_fletcher32(bytes));
}

byte_vector bytes_of_hex(const std::string& hex) {
    byte_vector bytes;
    for (std::size_t at = 0; at < hex.size(); at += 2)
        bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(at, 2), nullptr, 16)));
    return bytes;
}

/// Checks the size and decodes, as a reader does.
byte_vector decoded(const std::vector<hdf5_filter>& filters, std::size_t chunk_bytes,
                    const byte_vector& stored, std::uint32_t mask = 0) {
    const hdf5_pipeline pipeline(filters, chunk_bytes);
    pipeline.check_size({0, stored.size(), mask});
    hdf5_chunk_decoder decoder;
    byte_vector result(chunk_bytes, std::byte{0xAA});
    const auto memory = decoder.stored_memory(stored.size());
    std::ranges::copy(stored, memory.begin());
    decoder.decode(pipeline, mask, memory, result);
    return result;
}

/// Checks that a chunk can be left shuffled, and any of its elements unshuffled alone.
void check_parts(const hdf5_pipeline& pipeline, std::uint32_t mask, const byte_vector& stored,
                 const byte_vector& bytes, std::mt19937_64& random) {
    const std::uint64_t element_bytes = pipeline.shuffle_element_bytes(mask);
    if (element_bytes == 0) return;
    const std::uint64_t count = bytes.size() / element_bytes;
    CHECK(count * element_bytes == bytes.size());
    hdf5_chunk_decoder decoder;
    byte_vector planes(bytes.size());
    decoder.decode_shuffled(pipeline, mask, stored, planes);
    CHECK((planes == shuffled(bytes, element_bytes)));
    for (int repetition = 0; repetition < 5; ++repetition) {
        const std::uint64_t first = random() % count;
        const std::uint64_t wanted = 1 + random() % (count - first);
        byte_vector result(wanted * element_bytes + 1, std::byte{0xAA});
        hdf5_unshuffle(planes.data() + first, count, element_bytes, wanted, result.data());
        const auto expected = bytes.begin() + static_cast<std::ptrdiff_t>(first * element_bytes);
        CHECK(std::equal(result.begin(), result.end() - 1, expected));
        CHECK(result.back() == std::byte{0xAA});
    }
}

std::string refusal(const std::vector<hdf5_filter>& filters, std::size_t chunk_bytes,
                    const byte_vector& stored, std::uint32_t mask = 0) {
    return message_of<pinflow::format_error>([&] { decoded(filters, chunk_bytes, stored, mask); });
}

}  // namespace

TEST_CASE("hdf5_filters: the checksum is that of h5py's files, of any length") {
    struct known {
        std::size_t size;
        std::uint32_t sum;
    };
    // the last four bytes of a chunk of 0, 1, ..., 250, 0, ... as libhdf5 1.10.8 wrote it
    for (const auto [size, sum] :
         {known{1, 0x00000000},  {2, 0x00010001},      {3, 0x02020201},     {4, 0x02050204},
          {5, 0x08090604},       {31, 0x55BEF0E1},     {32, 0x55DDF100},    {33, 0x66DE1101},
          {34, 0x66FF1122},      {35, 0x9A213322},     {64, 0xCCDAE403},    {255, 0x5E8CC748},
          {719, 0x2FAB33C8},     {720, 0x308434A1},    {721, 0x3F260EA2},   {722, 0x40010F7D},
          {5759, 0xC5A17F09},    {5760, 0xC68E7FF6},   {5761, 0x34866DF7},  {11519, 0x36A5D0E4},
          {11520, 0x3785D1C4},   {11521, 0xEA4AB2C5},  {11522, 0xEB2CB3A7}, {100001, 0x9D933401},
          {1048576, 0xFAF01EEC}, {1048579, 0xFAF64B83}}) {
        CAPTURE(size);
        CHECK(hdf5_fletcher32(pattern_bytes(size)) == sum);
    }
    // a sum that is a multiple of 65535 is stored as 65535, or as 0 if all bytes are 0
    CHECK(hdf5_fletcher32({}) == 0);
    CHECK(hdf5_fletcher32(byte_vector(777)) == 0);
    CHECK(hdf5_fletcher32(byte_vector(65536, std::byte{0xFF})) == 0xFFFFFFFF);
    CHECK(hdf5_fletcher32(byte_vector(100001, std::byte{0xFF})) == 0xFF00FF00);
    CHECK(hdf5_fletcher32(byte_vector(131070, std::byte{1})) == 0xFFFFFFFF);
    std::mt19937_64 random(1);
    for (std::size_t size = 1; size < 30000; size += 1 + random() % 97) {
        const byte_vector bytes = random_bytes(random, size, false);
        if (hdf5_fletcher32(bytes) != slow_fletcher32(bytes)) FAIL("differs at length ", size);
    }
}

TEST_CASE("hdf5_filters: bytes are unshuffled for any element size and any remainder") {
    std::mt19937_64 random(2);
    for (const std::size_t element_bytes :
         {1u, 2u, 3u, 4u, 5u, 7u, 8u, 12u, 16u, 17u, 24u, 32u, 1000u, 20000u}) {
        for (const std::size_t size : {0u, 1u, 15u, 16u, 17u, 31u, 64u, 255u, 256u, 257u, 4099u, 70001u}) {
            const byte_vector bytes = random_bytes(random, size, false);
            byte_vector result(size + 1, std::byte{0xAA});
            hdf5_unshuffle(shuffled(bytes, element_bytes), element_bytes, result.data());
            CAPTURE(element_bytes);
            CAPTURE(size);
            CHECK(std::equal(bytes.begin(), bytes.end(), result.begin()));
            CHECK(result.back() == std::byte{0xAA});
        }
    }
}

TEST_CASE("hdf5_filters: filters are undone in reverse, in any combination, without the skipped filters") {
    std::mt19937_64 random(3);
    for (int repetition = 0; repetition < 2000; ++repetition) {
        const byte_vector bytes = random_bytes(random, 1 + random() % 3000, random() % 2 == 0);
        std::vector<hdf5_filter> filters;
        byte_vector stored = bytes;
        std::uint32_t mask = 0;
        for (std::uint64_t count = random() % 5; filters.size() < count;) {
            const bool skipped = random() % 4 == 0;
            if (skipped) mask |= std::uint32_t{1} << filters.size();
            switch (random() % 3) {
                case 0:
                    filters.push_back(deflate_filter);
                    if (!skipped) stored = deflated(stored);
                    break;
                case 1:
                    filters.push_back(shuffle(static_cast<std::uint32_t>(1 + random() % 9)));
                    if (!skipped) stored = shuffled(stored, filters.back().parameters[0]);
                    break;
                default:
                    filters.push_back(fletcher32);
                    if (!skipped) stored = with_checksum(stored);
                    break;
            }
        }
        CHECK((decoded(filters, bytes.size(), stored, mask) == bytes));
        check_parts(hdf5_pipeline(filters, bytes.size()), mask, stored, bytes, random);
        const bool all_skipped = (mask + 1) >> filters.size() == 1;
        CHECK(hdf5_pipeline(filters, 1).stored_as_is(mask) == all_skipped);
    }
}

TEST_CASE(
    "hdf5_filters: a chunk can be left shuffled if shuffle was the first filter and left no remainder") {
    CHECK(hdf5_pipeline(std::vector{shuffle(4), deflate_filter}, 400).shuffle_element_bytes(0) == 4);
    CHECK(hdf5_pipeline(std::vector{shuffle(4), deflate_filter}, 400).shuffle_element_bytes(2) == 4);
    CHECK(hdf5_pipeline(std::vector{shuffle(4), deflate_filter}, 400).shuffle_element_bytes(1) == 0);
    CHECK(hdf5_pipeline(std::vector{shuffle(4), deflate_filter}, 400).shuffle_element_bytes(3) == 0);
    CHECK(hdf5_pipeline(std::vector{shuffle(4), deflate_filter}, 401).shuffle_element_bytes(0) == 0);
    CHECK(hdf5_pipeline(std::vector{shuffle(1), deflate_filter}, 400).shuffle_element_bytes(0) == 0);
    CHECK(hdf5_pipeline(std::vector{deflate_filter, shuffle(4)}, 400).shuffle_element_bytes(0) == 0);
    CHECK(hdf5_pipeline(std::vector{fletcher32, shuffle(4)}, 400).shuffle_element_bytes(0) == 0);
    CHECK(hdf5_pipeline(std::vector{fletcher32, shuffle(8)}, 400).shuffle_element_bytes(1) == 8);
    CHECK(hdf5_pipeline(std::vector<hdf5_filter>{}, 400).shuffle_element_bytes(0) == 0);
    // data of another size is an error, as in `decode`
    hdf5_chunk_decoder decoder;
    byte_vector result(400);
    const hdf5_pipeline pipeline(std::vector{shuffle(4), deflate_filter}, 400);
    for (const std::size_t size : {0u, 396u, 399u, 401u, 404u}) {
        const byte_vector stored = deflated(byte_vector(size));
        CHECK_THROWS_AS(decoder.decode_shuffled(pipeline, 0, stored, result), pinflow::format_error);
        CHECK_THROWS_AS(decoder.decode_shuffled(pipeline, 2, byte_vector(size), result),
                        pinflow::format_error);
    }
}

TEST_CASE("hdf5_filters: one decoder decodes chunks of one dataset after the other") {
    std::mt19937_64 random(4);
    const hdf5_pipeline pipeline(std::vector{shuffle(4), deflate_filter, fletcher32}, 4000);
    hdf5_chunk_decoder decoder;
    CHECK(decoder.memory_bytes() == 0);
    byte_vector result(4000);
    for (int repetition = 0; repetition < 50; ++repetition) {
        const byte_vector bytes = random_bytes(random, 4000, repetition % 2 == 0);
        decoder.decode(pipeline, 0, with_checksum(deflated(shuffled(bytes, 4))), result);
        CHECK((result == bytes));
        CHECK_THROWS_AS(decoder.decode(pipeline, 0, bytes, result), pinflow::format_error);
    }
    CHECK(decoder.memory_bytes() < 20000);
}

TEST_CASE("hdf5_filters: lzf is decoded as h5py wrote it") {
    byte_vector bytes;
    for (const unsigned value : {0u, 1u, 2u, 3u})
        bytes.insert(bytes.end(), 40, static_cast<std::byte>(value));
    const byte_vector stored = bytes_of_hex("010000e01d000001e01e000002e01e000003e01c00010303");
    CHECK((decoded({lzf}, 160, stored) == bytes));
    CHECK((decoded({shuffle(1), lzf, fletcher32}, 160, with_checksum(stored)) == bytes));
    // a chunk that could not be compressed
    CHECK((decoded({lzf}, 160, bytes, 1) == bytes));
    CHECK(contains(refusal({lzf}, 159, stored), "its lzf data continues after the 159 bytes"));
    CHECK(contains(refusal({lzf}, 161, stored), "its lzf data ends after 160 bytes, but 161 are expected"));
    for (std::size_t size = 2; size < stored.size(); ++size) {
        CHECK(!refusal({lzf}, 160,
                       byte_vector(stored.begin(), stored.begin() + static_cast<std::ptrdiff_t>(size)))
                   .empty());
    }
    CHECK(!refusal({lzf, fletcher32}, 160, with_checksum(byte_vector())).empty());
}

TEST_CASE("hdf5_filters: a byte-swapped checksum of libhdf5 1.6.2 is accepted") {
    const byte_vector bytes = pattern_bytes(7);
    CHECK((decoded({fletcher32}, 7, with_checksum(bytes)) == bytes));
    const std::uint32_t sum = slow_fletcher32(bytes);
    CHECK((decoded({fletcher32}, 7, with_checksum(bytes, (sum & 0xFF00FF) << 8 | (sum >> 8 & 0xFF00FF))) ==
           bytes));
    CHECK(contains(refusal({fletcher32}, 7, with_checksum(bytes, sum ^ 1)), "its Fletcher checksum is "));
}

TEST_CASE(
    "hdf5_filters: every flipped bit of deflated data is refused or changes nothing, every cut is refused") {
    const byte_vector bytes = pattern_bytes(500);
    const byte_vector stored = deflated(shuffled(bytes, 4));
    const std::vector<hdf5_filter> filters{shuffle(4), deflate_filter};
    std::size_t found = 0;
    for (std::size_t bit = 0; bit < stored.size() * 8; ++bit) {
        byte_vector damaged = stored;
        damaged[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
        byte_vector result;
        const auto sentence =
            message_of<pinflow::format_error>([&] { result = decoded(filters, 500, damaged); });
        if (sentence.empty()) {
            CHECK((result == bytes));
        } else {
            ++found;
        }
    }
    CHECK(found > stored.size() * 8 - 16);
    for (std::size_t size = 0; size < stored.size(); ++size) {
        CHECK(!refusal(filters, 500,
                       byte_vector(stored.begin(), stored.begin() + static_cast<std::ptrdiff_t>(size)))
                   .empty());
    }
    CHECK(contains(refusal(filters, 501, stored),
                   "its deflate data ends after 500 bytes, but 501 are expected"));
    CHECK(contains(refusal(filters, 499, stored), "its deflate data continues after the 499 bytes"));
    // one of two filters: its output size is not known, but is limited
    CHECK(contains(refusal({deflate_filter, deflate_filter}, 10, deflated(byte_vector(100000))),
                   "continues after the 4107 bytes"));
}

TEST_CASE("hdf5_filters: sizes that no chunk can have are refused before memory is taken") {
    const auto check = [](const std::vector<hdf5_filter>& filters, std::uint64_t chunk_bytes,
                          std::uint64_t stored_bytes, std::uint32_t mask = 0) {
        return message_of<pinflow::format_error>(
            [&] { hdf5_pipeline(filters, chunk_bytes).check_size({0, stored_bytes, mask}); });
    };
    const std::uint64_t large = std::uint64_t{1} << 40;
    CHECK(check({}, 100, 100).empty());
    CHECK(contains_all(check({}, 100, 99), {"given as 99 bytes", "must take 100"}));
    CHECK(check({fletcher32}, 100, 104).empty());
    CHECK(check({fletcher32}, 100, 100, 1).empty());
    CHECK(contains(check({fletcher32}, 100, 100), "must take 104"));
    CHECK(contains(check({deflate_filter}, 100, large),
                   "more than a chunk of 100 bytes can take after its filters"));
    CHECK(contains(check({deflate_filter}, large, 1000), "which cannot make a chunk of 1099511627776 bytes"));
    CHECK(check({deflate_filter}, 1032000, 1000).empty());
    CHECK(!check({deflate_filter}, 1032001, 1000).empty());
    CHECK(check({deflate_filter, deflate_filter}, 1032u * 1032u, 1).empty());
    CHECK(check({lzf}, 88000, 1000).empty());
    CHECK(!check({lzf}, 88001, 1000).empty());
    CHECK(!check({deflate_filter, fletcher32}, 10, 3).empty());
    CHECK(!check({deflate_filter}, ~std::uint64_t{0}, 1000).empty());
    CHECK(!check({fletcher32}, ~std::uint64_t{0}, 1000).empty());
}

TEST_CASE("hdf5_filters: filters that are not known are named, and parameters that make no sense refused") {
    using pinflow::detail::not_decoded_reason;
    const std::vector<hdf5_filter> known{shuffle(4), deflate_filter, fletcher32, lzf};
    const std::vector<hdf5_filter> szip{shuffle(4), {4, "szip", {}}};
    const std::vector<hdf5_filter> nameless{{32001, "", {}}};
    CHECK(not_decoded_reason(known).empty());
    CHECK(contains(not_decoded_reason(szip), "the filter 'szip' (number 4), which"));
    CHECK(contains(not_decoded_reason(nameless), "the filter number 32001, which"));
    CHECK_THROWS_AS(hdf5_pipeline(szip, 4), pinflow::unsupported);
    for (const std::vector<std::uint32_t>& parameters : {std::vector<std::uint32_t>{}, {0}, {4, 4}}) {
        const std::vector<hdf5_filter> wrong{{2, "shuffle", parameters}};
        CHECK_THROWS_AS(hdf5_pipeline(wrong, 4), pinflow::format_error);
    }
    CHECK_THROWS_AS(hdf5_pipeline(std::vector<hdf5_filter>(33, fletcher32), 4), pinflow::format_error);
}
