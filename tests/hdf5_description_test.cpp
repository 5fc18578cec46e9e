#include "formats/hdf5_description.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/fuzz/hdf5_description_invariants.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/file_bytes.hpp"

namespace {

using pinflow::array_listing;
using pinflow::dtype;
using pinflow::dtype_kind;
using pinflow::format_error;
using pinflow::detail::check_hdf5_description;
using pinflow::detail::hdf5_chunk;
using pinflow::detail::hdf5_description;
using pinflow::detail::hdf5_storage;
using pinflow::detail::parse_array_listings;
using pinflow::detail::parse_hdf5_description;
using pinflow::detail::serialize;

constexpr std::uint64_t file_size = 4096;

hdf5_description contiguous() {
    hdf5_description description;
    description.name = "group/data";
    description.dtype = dtype(dtype_kind::floating, 4, std::endian::big);
    description.shape = {10, 5};
    description.storage = hdf5_storage::contiguous;
    description.offset_bytes = 2054;
    return description;
}

/// 3 x 2 chunks of 4 x 4 elements of 2 bytes, one of them never written.
hdf5_description chunked() {
    hdf5_description description;
    description.name = "chunks";
    description.dtype = dtype::of<std::int16_t>();
    description.shape = {9, 7};
    description.storage = hdf5_storage::chunked;
    description.fill = {std::byte{1}, std::byte{2}};
    description.chunk_shape = {4, 4};
    description.filters = {{2, "shuffle", {2}}, {1, "deflate", {6}}};
    description.chunks = {{512, 20, 0}, {600, 32, 3}, {}, {700, 1, 0}, {4000, 96, 0}, {0, 30, 2}};
    return description;
}

hdf5_description inlined() {
    hdf5_description description;
    description.name = "compact";
    description.dtype = dtype::structured(
        {{"a", {}, dtype(dtype_kind::bytes, 3), {}, 0},
         {"b", "title", dtype(dtype_kind::datetime, 8, std::endian::little, "25s"), {2}, 4}},
        24);
    description.dtype = dtype::structured({{"inner", {}, description.dtype, {}, 8}}, 40);
    description.shape = {2};
    description.storage = hdf5_storage::compact;
    description.compact_data = pattern_bytes(80);
    return description;
}

hdf5_description absent() {
    hdf5_description description;
    description.name = "never written";
    description.shape = {};
    description.fill = {std::byte{7}};
    return description;
}

hdf5_description of_library() {
    hdf5_description description = chunked();
    description.storage = hdf5_storage::library;
    description.library_reason = "it says so";
    description.chunks.clear();
    return description;
}

std::vector<hdf5_description> descriptions() {
    return {contiguous(), chunked(), inlined(), absent(), of_library()};
}

std::vector<array_listing> listings() {
    std::vector<array_listing> result;
    for (const hdf5_description& description : descriptions())
        result.push_back(pinflow::detail::hdf5_listing(description));
    result.emplace_back().name = "refused";
    result.back().reason = "the dataset 'refused' holds references to other objects";
    return result;
}

/// What the check says after `change`.
template <typename Change>
std::string refusal(hdf5_description description, Change change) {
    change(description);
    const std::string sentence =
        message_of<format_error>([&] { check_hdf5_description(description, file_size); });
    CHECK(message_of<format_error>([&] { parse_hdf5_description(serialize(description), file_size); }) ==
          sentence);
    return sentence;
}

}  // namespace

TEST_CASE("hdf5 description: what is written reads back the same") {
    for (const hdf5_description& description : descriptions()) {
        CAPTURE(description.name);
        CHECK(parse_hdf5_description(serialize(description), file_size) == description);
    }
    const auto written = serialize(listings());
    const auto read = parse_array_listings(written);
    REQUIRE(read.size() == 6);
    CHECK(serialize(read) == written);
    CHECK(read[0].offset_bytes == std::uint64_t{2054});
    CHECK(read[0].mappable);
    CHECK(!read[1].offset_bytes.has_value());
    CHECK(read[0].chunk_shape.empty());
    CHECK(read[1].chunk_shape == chunked().chunk_shape);
    CHECK(read[2].dtype == inlined().dtype);
    CHECK(!read[5].dtype.has_value());
    CHECK(read[5].reason == "the dataset 'refused' holds references to other objects");
    CHECK(parse_array_listings(serialize(std::vector<array_listing>{})).empty());
}

TEST_CASE("hdf5 description: every truncation, and whatever follows the end, is refused") {
    for (const hdf5_description& description : descriptions()) {
        CAPTURE(description.name);
        auto bytes = serialize(description);
        for (std::size_t size = 0; size < bytes.size(); ++size)
            CHECK_THROWS_AS(parse_hdf5_description(std::span(bytes).first(size), file_size), format_error);
        bytes.push_back({});
        CHECK_THROWS_AS(parse_hdf5_description(bytes, file_size), format_error);
    }
    auto bytes = serialize(listings());
    for (std::size_t size = 0; size < bytes.size(); ++size)
        CHECK_THROWS_AS(parse_array_listings(std::span(bytes).first(size)), format_error);
    bytes.push_back({});
    CHECK_THROWS_AS(parse_array_listings(bytes), format_error);
    CHECK_THROWS_AS(parse_array_listings(serialize(contiguous())), format_error);
    CHECK_THROWS_AS(parse_hdf5_description(serialize(listings()), file_size), format_error);
}

TEST_CASE("hdf5 description: data outside the file is refused") {
    CHECK(refusal(contiguous(), [](auto& d) { d.offset_bytes = 3896; }).empty());
    CHECK(contains_all(refusal(contiguous(), [](auto& d) { d.offset_bytes = 3897; }),
                       {"dataset 'group/data'", "has 200 bytes", "at offset 3897,", "file has 4096 bytes"}));
    CHECK(contains(refusal(contiguous(), [](auto& d) { d.offset_bytes = std::uint64_t(-1); }), "at offset"));
    CHECK(
        contains_all(refusal(chunked(), [](auto& d) { d.chunks[0] = {4000, 97, 0}; }),
                     {"dataset 'chunks'", "a chunk of 97 bytes", "at offset 4000,", "file has 4096 bytes"}));
    CHECK(contains(refusal(chunked(), [](auto& d) { d.chunks[5] = {4097, 1, 0}; }), "offset 4097"));
    CHECK(
        contains(refusal(chunked(), [](auto& d) { d.chunks[5] = {1, std::uint64_t(-1), 0}; }), "offset 1,"));
    CHECK(contains(refusal(inlined(), [](auto& d) { d.compact_data.pop_back(); }), "has 79 bytes, not 80"));
}

TEST_CASE("hdf5 description: shapes that are too large are refused") {
    constexpr std::uint64_t large = std::uint64_t{1} << 32;
    for (const pinflow::shape_vector& shape : {pinflow::shape_vector{large, large},
                                               {std::uint64_t(-1), 2},
                                               {0, large, large},
                                               {std::uint64_t{1} << 61, 1}})
        CHECK(contains(refusal(contiguous(), [&](auto& d) { d.shape = shape; }), "is too large"));
    CHECK(contains(refusal(contiguous(), [](auto& d) { d.shape.assign(65, 1); }), "has 65 axes"));
    CHECK(refusal(contiguous(), [](auto& d) { d.shape = {0, 10, 1u << 30}; }).empty());
}

TEST_CASE("hdf5 description: chunks that do not form a grid are refused") {
    CHECK(contains(refusal(chunked(), [](auto& d) { d.chunks.pop_back(); }), "cannot have 5 chunks"));
    CHECK(contains(refusal(chunked(), [](auto& d) { d.shape = {9, 9}; }), "cannot have 6 chunks"));
    CHECK(contains(refusal(chunked(), [](auto& d) { d.shape = {0, 7}; }), "cannot have 6 chunks"));
    CHECK(
        contains(refusal(chunked(), [](auto& d) { d.chunk_shape = {4, 0}; }), "cannot be stored in chunks"));
    CHECK(contains(refusal(chunked(), [](auto& d) { d.chunk_shape = {4}; }), "cannot be stored in chunks"));
    CHECK(contains(refusal(chunked(), [](auto& d) { d.chunk_shape.clear(); }), "cannot be stored in chunks"));
    CHECK(contains(refusal(chunked(), [](auto& d) { d.shape.clear(); }), "cannot be stored in chunks"));
    CHECK(contains(refusal(chunked(), [](auto& d) { d.chunk_shape = {1u << 16, 1u << 15}; }),
                   "larger than 4294967295"));
    CHECK(
        contains(refusal(chunked(), [](auto& d) { d.chunk_shape = {std::uint64_t(-1), std::uint64_t(-1)}; }),
                 "larger"));
    CHECK(contains(refusal(chunked(), [](auto& d) { d.chunks[2].filter_mask = 1; }), "a chunk of no bytes"));
    CHECK(contains(refusal(chunked(), [](auto& d) { d.chunks[2].offset_bytes = 8; }), "a chunk of no bytes"));
    // without filters, a chunk has the size of its elements
    const auto unfiltered = [](auto& d) {
        d.filters.clear();
        for (hdf5_chunk& chunk : d.chunks)
            chunk = {512, 32, 0};
    };
    CHECK(refusal(chunked(), unfiltered).empty());
    CHECK(contains(refusal(chunked(),
                           [&](auto& d) {
                               unfiltered(d);
                               d.chunks[4].size_bytes = 31;
                           }),
                   "a chunk of 31 bytes at offset 512, which takes 32 without filters"));
    // a grid of more chunks than 64 bits can count
    CHECK(!pinflow::detail::hdf5_grid_size({std::uint64_t(-1), std::uint64_t(-1)}, {1, 1}).has_value());
    CHECK(pinflow::detail::hdf5_grid_size({std::uint64_t(-1), 3}, {std::uint64_t(-1), 2}) == 2u);
    CHECK(pinflow::detail::hdf5_grid_size({std::uint64_t(-1)}, {2}) == std::uint64_t{1} << 63);
    CHECK(pinflow::detail::hdf5_grid_size({}, {}) == 1u);
}

TEST_CASE("hdf5 description: elements of no bytes are refused, as HDF5 has none") {
    for (const dtype& type : {dtype(dtype_kind::opaque, 0), dtype::structured({}, 0)})
        CHECK(contains(refusal(contiguous(), [&](auto& d) { d.dtype = type; }), "elements of no bytes"));
}

TEST_CASE("hdf5 description: contradictory fields are refused") {
    CHECK(contains(refusal(contiguous(), [](auto& d) { d.fill.resize(3); }), "a fill value of 3 bytes"));
    CHECK(contains(refusal(chunked(), [](auto& d) { d.filters.resize(33); }), "has 33 filters"));
    const auto contradicts = [](const hdf5_description& description, auto change) {
        CHECK(contains(refusal(description, change), "contradicts itself"));
    };
    contradicts(contiguous(), [](auto& d) { d.chunk_shape = {1, 1}; });
    contradicts(contiguous(), [](auto& d) { d.filters.resize(1); });
    contradicts(contiguous(), [](auto& d) { d.chunks.resize(1); });
    contradicts(contiguous(), [](auto& d) { d.compact_data.resize(1); });
    contradicts(contiguous(), [](auto& d) { d.library_reason = "no"; });
    contradicts(chunked(), [](auto& d) { d.offset_bytes = 1; });
    contradicts(of_library(), [](auto& d) { d.library_reason.clear(); });
    contradicts(of_library(), [](auto& d) { d.chunks.resize(6); });
}

TEST_CASE(
    "hdf5 description: counts of more items than follow, unknown kinds and control characters are refused") {
    hdf5_description empty;
    empty.fill = {};
    const auto with_number = [&](std::size_t at, std::uint64_t value) {
        auto bytes = serialize(empty);
        REQUIRE(bytes.size() == 15 * 8);
        for (std::size_t index = 0; index < 8; ++index)
            bytes[8 * at + index] = static_cast<std::byte>(value >> (8 * index));
        return message_of<format_error>([&] { parse_hdf5_description(bytes, file_size); });
    };
    CHECK(with_number(1, 0).empty());
    // the lengths of name, unit, shape, library_reason, data, fill value, chunk, filters, chunks
    for (const std::size_t at : {1u, 5u, 6u, 8u, 10u, 11u, 12u, 13u, 14u}) {
        CAPTURE(at);
        for (const std::uint64_t value : {std::uint64_t{20 * 8}, std::uint64_t{1} << 61, std::uint64_t(-1)})
            CHECK(contains(with_number(at, value), "declares more items or bytes than follow"));
    }
    CHECK(contains(with_number(0, 1), "known magic number"));
    CHECK(contains(with_number(2, 'x'), "unknown kind"));
    CHECK(contains(with_number(2, 256), "too large"));
    CHECK(contains(with_number(7, 5), "kind of storage"));

    hdf5_description library = of_library();
    library.library_reason = "two\nlines";
    CHECK_THROWS_AS(parse_hdf5_description(serialize(library), file_size), format_error);
    auto listed = listings();
    listed[5].reason = "\x1b[2J";
    CHECK_THROWS_AS(parse_array_listings(serialize(listed)), format_error);
}

TEST_CASE("hdf5 description: structures nested too deeply are refused") {
    hdf5_description description = absent();
    description.fill.clear();
    description.dtype = dtype(dtype_kind::opaque, 1);
    for (unsigned depth = 0; depth < 64; ++depth)
        description.dtype = dtype::structured({{"x", {}, description.dtype, {}, 0}}, 1);
    CHECK(parse_hdf5_description(serialize(description), file_size) == description);
    description.dtype = dtype::structured({{"x", {}, description.dtype, {}, 0}}, 1);
    CHECK_THROWS_AS(parse_hdf5_description(serialize(description), file_size), format_error);
}

TEST_CASE("hdf5 description: the reason says where the bytes are") {
    using pinflow::detail::hdf5_storage_reason;
    CHECK(contains_all(hdf5_storage_reason(contiguous()), {"mapped in place", "no multiple of 4"}));
    CHECK(contains_all(hdf5_storage_reason(chunked()),
                       {"chunks of shape (4, 4)", "filtered by shuffle, deflate"}));
    auto unnamed = chunked();
    unnamed.filters = {{32000, "", {}}, {1, "bad\nname", {}}};
    CHECK(contains_all(hdf5_storage_reason(unnamed),
                       {"chunks of shape (4, 4)", R"(filtered by 32000, bad\nname)"}));
    unnamed.filters.clear();
    CHECK(contains(hdf5_storage_reason(unnamed), "chunks of shape (4, 4)"));
    CHECK_FALSE(contains(hdf5_storage_reason(unnamed), "filtered"));
    // a listing also says whether rows are mapped chunk by chunk, as far as that is known
    const auto listed = [&] { return pinflow::detail::hdf5_listing(unnamed).reason; };
    CHECK(listed() == hdf5_storage_reason(unnamed));
    unnamed.shape = {9, 4};
    unnamed.chunks = {{512, 64, 0}, {}, {1024, 64, 0}};
    CHECK(contains_all(listed(), {"chunks of shape (4, 4)", "1 of 3 ", "never written", "are not mapped"}));
    unnamed.chunks[1] = {768, 64, 0};
    CHECK(contains_all(listed(), {"chunks of shape (4, 4)", "maps its rows chunk by chunk"}));
    CHECK_FALSE(contains(listed(), "if all chunks"));
    unnamed.chunks.clear();
    CHECK(
        contains_all(listed(), {"chunks of shape (4, 4)", "maps its rows chunk by chunk", "if all chunks"}));
    CHECK_FALSE(contains(listed(), "read by libhdf5"));
    unnamed.shape = {1 << 23, 4};
    CHECK(contains_all(listed(), {"if all chunks", "if few of its chunks", "read by libhdf5"}));
    unnamed.dtype = dtype(dtype_kind::signed_integer, 2, std::endian::big);
    unnamed.shape = {9, 4};
    CHECK(contains(listed(), "chunks of shape (4, 4)"));
    CHECK(listed() == hdf5_storage_reason(unnamed));
    CHECK(contains(hdf5_storage_reason(inlined()), "in the file's metadata (compact)"));
    CHECK(contains_all(hdf5_storage_reason(absent()), {"never written", "fill value"}));
    CHECK(contains_all(hdf5_storage_reason(of_library()), {"read by libhdf5", "it says so"}));
    auto empty = absent();
    empty.shape = {0, 3};
    CHECK(contains(hdf5_storage_reason(empty), "no bytes to map"));
}

TEST_CASE("hdf5 description: the fuzzer's seeds equal the current output") {
    // run with PINFLOW_WRITE_SEEDS set, this case writes them
    const auto folder = std::filesystem::path(__FILE__).parent_path() / "fuzz" / "seeds" / "hdf5_description";
    std::map<std::string, std::vector<std::byte>> seeds{{"listings", serialize(listings())}};
    for (const hdf5_description& description : descriptions()) {
        std::string name =
            description.name + (description.storage == hdf5_storage::library ? " library" : "");
        std::ranges::replace(name, '/', '_');
        std::ranges::replace(name, ' ', '_');
        seeds[name] = serialize(description);
    }
    CHECK(seeds.size() == 6);
    for (const auto& [name, bytes] : seeds) {
        const std::string content(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        if (std::getenv("PINFLOW_WRITE_SEEDS") != nullptr) npy_bytes::write_file(folder / name, content);
        CAPTURE(name);
        CHECK((npy_bytes::read_file((folder / name).string()) == content));
    }
}

TEST_CASE("hdf5 description: the invariants hold for the fuzzer's seeds, findings and their mutations") {
    const auto folder = std::filesystem::path(__FILE__).parent_path() / "fuzz";
    std::size_t files = 0;
    for (const auto& inputs :
         {folder / "seeds" / "hdf5_description", folder / "regressions" / "hdf5_description"}) {
        if (!std::filesystem::exists(inputs)) continue;  // nothing found so far
        for (const auto& entry : std::filesystem::directory_iterator(inputs)) {
            CAPTURE(entry.path().filename().string());
            std::string bytes = npy_bytes::read_file(entry.path().string());
            ++files;
            CHECK(hdf5_description_invariants::broken_for(npy_bytes::as_bytes(bytes)) == "");
            for (char& byte : bytes) {
                const char original = byte;
                for (const char replacement : {'\0', '\1', '\2', '\x7F', '\xFF'}) {
                    byte = replacement;
                    const std::string broken =
                        hdf5_description_invariants::broken_for(npy_bytes::as_bytes(bytes));
                    if (!broken.empty()) FAIL_CHECK(broken);
                }
                byte = original;
            }
        }
    }
    CHECK(files >= 6);
}
