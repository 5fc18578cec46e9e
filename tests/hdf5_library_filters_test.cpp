#include "formats/hdf5_library_filters.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/support/file_bytes.hpp"

namespace {

using pinflow::detail::hdf5_filter;
using pinflow::detail::hdf5_library_filters;
using byte_vector = std::vector<std::byte>;

/// Each chunk in these tests has 10 elements of 4 bytes.
constexpr std::uint64_t chunk_bytes = 40;

hdf5_filter scaleoffset(std::vector<std::uint32_t> first = {2, 0, 10, 0, 4}) {
    first.resize(20);
    return {6, "scaleoffset", std::move(first)};
}

hdf5_filter nbit(std::vector<std::uint32_t> type, std::uint32_t is_done = 0, std::uint32_t count = 10) {
    type.insert(type.begin(), {static_cast<std::uint32_t>(type.size() + 3), is_done, count});
    return {5, "nbit", std::move(type)};
}

const hdf5_filter szip{4, "szip", {169, 8, 32, 10}};
const hdf5_filter shuffle{2, "shuffle", {4}};
const hdf5_filter fletcher32{3, "fletcher32", {}};

/// Bytes that begin with `bits` in little-endian order.
byte_vector beginning(std::uint32_t bits, std::size_t size) {
    byte_vector bytes(size);
    for (std::size_t index = 0; index < 4 && index < size; ++index)
        bytes[index] = static_cast<std::byte>(bits >> (8 * index));
    return bytes;
}

bool is_sure(std::vector<hdf5_filter> filters, const byte_vector& stored, std::uint32_t mask = 0) {
    return hdf5_library_filters(filters, chunk_bytes).check(mask, stored);
}

std::string refusal(std::vector<hdf5_filter> filters, const byte_vector& stored, std::uint32_t mask = 0) {
    return message_of<pinflow::format_error>([&] { is_sure(filters, stored, mask); });
}

}  // namespace

TEST_CASE("hdf5 library filters: scale-offset needs its bits, and parameters that fit the chunk") {
    // 10 elements of 7 bits take 9 bytes
    CHECK(is_sure({scaleoffset()}, beginning(7, 21 + 9)));
    CHECK(is_sure({scaleoffset()}, beginning(7, 21 + 10)));  // as libhdf5 writes them
    CHECK(contains_all(refusal({scaleoffset()}, beginning(7, 21 + 8)),
                       {"is damaged", "scale-offset data", "has 8 bytes", "not hold 70 bits"}));
    CHECK(is_sure({scaleoffset()}, beginning(0, 21)));
    CHECK(is_sure({scaleoffset()}, beginning(32, 21 + 40)));
    CHECK(contains(refusal({scaleoffset()}, beginning(33, 1000)), "33 bits for elements of 4 bytes"));
    CHECK(contains(refusal({scaleoffset()}, beginning(0xFFFFFFFF, 1000)), "4294967295 bits"));
    CHECK(contains(refusal({scaleoffset()}, beginning(0, 20)), "is truncated after 20 bytes"));
    CHECK(contains(refusal({scaleoffset()}, {}), "is truncated after 0 bytes"));
    CHECK(contains(refusal({scaleoffset({2, 0, 9, 0, 4})}, beginning(0, 21)), "9 elements of 4 bytes"));
    CHECK(contains(refusal({scaleoffset({2, 0, 40, 0, 1, 0})}, beginning(9, 1000)),
                   "9 bits for elements of 1"));
    CHECK(contains(refusal({scaleoffset({2, 0, 0, 0, 0})}, beginning(0, 21)), "0 elements of 0 bytes"));
    CHECK(contains(refusal({scaleoffset({2, 0, 1, 0, 40})}, beginning(0, 21)), "1 elements of 40 bytes"));
    CHECK(contains(refusal({{6, "", {2, 0}}}, beginning(0, 21)), "has 2 parameters, not 20"));
    // all bits of a number are kept: nothing is done
    CHECK(is_sure({scaleoffset({2, 32, 10, 0, 4})}, byte_vector(40)));
    CHECK(contains(refusal({scaleoffset({2, 32, 10, 0, 4})}, byte_vector(39)), "39 bytes are stored"));
}

TEST_CASE("hdf5 library filters: n-bit needs its bits, and a type that fits the chunk") {
    const std::vector<std::uint32_t> number{1, 4, 0, 12, 2};  // 12 bits from bit 2 on
    CHECK(is_sure({nbit(number)}, byte_vector(15)));
    CHECK(contains_all(refusal({nbit(number)}, byte_vector(14)),
                       {"is damaged", "n-bit data", "has 14 bytes", "not hold 120 bits"}));
    CHECK(contains(refusal({nbit(number, 0, 11)}, byte_vector(100)), "11 elements of 4 bytes"));
    CHECK(is_sure({nbit(number, 1)}, byte_vector(40)));
    CHECK(is_sure({nbit({}, 1)}, byte_vector(40)));
    CHECK(contains(refusal({nbit(number, 1)}, byte_vector(15)), "15 bytes are stored, but a chunk has 40"));
    CHECK(
        contains(refusal({nbit({1, 4, 0, 12, 21})}, byte_vector(100)), "12 bits from bit 21 on in 4 bytes"));
    CHECK(contains(refusal({nbit({1, 4, 0, 0, 0})}, byte_vector(100)), "0 bits"));
    CHECK(contains(refusal({nbit({1, 4, 0, 0xFFFFFFFF, 1})}, byte_vector(100)), "4294967295 bits"));
    CHECK(contains(refusal({nbit({1, 4, 2, 12, 2})}, byte_vector(100)), "12 bits"));
    CHECK(contains(refusal({nbit({1, 4, 0, 12})}, byte_vector(100)), "are truncated"));
    CHECK(contains(refusal({nbit({9})}, byte_vector(100)), "types of kind 9"));
    CHECK(contains(refusal({{5, "", {2, 0}}}, byte_vector(100)), "has 2 parameters"));
    // arrays, structures, and types that are stored whole
    CHECK(is_sure({nbit({2, 4, 1, 2, 0, 3, 0})}, byte_vector(8)));
    CHECK(contains(refusal({nbit({2, 4, 1, 2, 0, 3, 0})}, byte_vector(7)), "do not hold 60 bits"));
    CHECK(contains(refusal({nbit({2, 4, 1, 3, 0, 3, 0})}, byte_vector(100)), "arrays of 4 bytes"));
    CHECK(contains(refusal({nbit({2, 4, 1, 0, 0, 0, 0})}, byte_vector(100)), "bits"));
    CHECK(is_sure({nbit({3, 4, 2, 0, 1, 2, 0, 5, 1, 3, 4, 1})}, byte_vector(17)));
    CHECK(contains(refusal({nbit({3, 4, 2, 0, 1, 2, 0, 5, 1, 3, 4, 1})}, byte_vector(16)), "130 bits"));
    CHECK(
        contains(refusal({nbit({3, 4, 1, 3, 4, 2})}, byte_vector(100)), "a field of 2 bytes at byte 3 of 4"));
    CHECK(contains(refusal({nbit({3, 4, 0xFFFFFFFF, 0, 4, 1})}, byte_vector(100)), "are truncated"));
    // as many parameters as pinflow reads: there may be more
    CHECK(!is_sure({{5, "", std::vector<std::uint32_t>(256, 3)}}, byte_vector(1)));
}

TEST_CASE(
    "hdf5 library filters: the size that szip declares is checked, but its data cannot be checked fully") {
    CHECK(!is_sure({szip}, beginning(40, 10)));
    CHECK(
        contains(refusal({szip}, beginning(41, 10)), "declares 41 decompressed bytes, but 40 are expected"));
    CHECK(contains(refusal({szip}, beginning(40, 3)), "is truncated after 3 bytes"));
    CHECK(!is_sure({shuffle, szip}, beginning(40, 10)));
    CHECK(contains(refusal({shuffle, szip}, beginning(44, 10)), "44 decompressed bytes"));
    CHECK(!is_sure({fletcher32, szip}, beginning(44, 10)));  // a chunk and its checksum
    CHECK(!is_sure({{32768, "of an application", {}}}, {}));
}

TEST_CASE("hdf5 library filters: filters applied later are undone first, and skipped ones are not checked") {
    CHECK(is_sure({scaleoffset(), fletcher32}, beginning(7, 21 + 9 + 4)));
    CHECK(contains(refusal({scaleoffset(), fletcher32}, beginning(7, 21 + 9 + 3)), "has 8 bytes"));
    CHECK(contains(refusal({scaleoffset(), fletcher32}, byte_vector(3)), "checksum is truncated"));
    CHECK(contains(refusal({scaleoffset(), {1, "deflate", {6}}}, byte_vector(30)), "deflate data is wrong"));
    CHECK(contains(refusal({scaleoffset(), {2, "", {}}}, byte_vector(30)), "shuffle filter"));
    CHECK(is_sure({scaleoffset(), {2, "", {1}}, fletcher32, {2, "", {1}}, fletcher32},
                  beginning(7, 21 + 9 + 8)));
    CHECK(is_sure({shuffle, scaleoffset()}, beginning(7, 21 + 9)));
    CHECK(!is_sure({fletcher32, scaleoffset()},
                   beginning(7, 21 + 9)));  // its input is a chunk and its checksum
    CHECK(is_sure({scaleoffset(), szip}, beginning(7, 21 + 9), 2));
    CHECK(is_sure({scaleoffset(), szip}, byte_vector(40), 3));
    CHECK(contains(refusal({scaleoffset(), szip}, byte_vector(39), 3), "39 bytes"));
    CHECK(contains(refusal({shuffle}, byte_vector(39)), "39 bytes"));
}
