#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "tests/random_arrays.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::concatenate;
using pinflow::dtype;
using pinflow::invalid_argument;
using pinflow::shape_vector;

namespace {

using row_ids = std::vector<std::uint64_t>;
using rows_pointer = std::shared_ptr<const pinflow::row_source>;

std::vector<std::byte> read(const pinflow::row_source& rows, const row_ids& ids) {
    std::vector<std::byte> destination(ids.size() * rows.row_size_bytes());
    rows.read_rows(ids, destination);
    return destination;
}

/// Rows of one byte. Reads are recorded, and write nothing.
class recording_rows final : public pinflow::row_source {
 public:
    explicit recording_rows(std::uint64_t row_count, std::chrono::nanoseconds wait = {})
        : row_count_(row_count), wait_(wait) {}

    mutable std::vector<row_ids> calls;
    mutable int checks = 0;

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const shape_vector& row_shape() const noexcept override { return row_shape_; }
    std::uint64_t row_count() const noexcept override { return row_count_; }
    std::uint64_t row_size_bytes() const noexcept override { return 1; }
    std::string description() const override { return "a recording"; }
    std::span<const pinflow::row_extent> extents() const noexcept override { return {}; }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override {
        REQUIRE(destination.size() == ids.size());
        calls.emplace_back(ids.begin(), ids.end());
        return wait_;
    }
    void check_unchanged() const override { ++checks; }

 private:
    std::uint64_t row_count_;
    std::chrono::nanoseconds wait_;
    pinflow::dtype dtype_ = pinflow::dtype::of<std::uint8_t>();
    shape_vector row_shape_;
};

}  // namespace

TEST_CASE("concatenated_rows: deliver any rows of any sources in the order asked for") {
    const temporary_folder folder;
    for (std::uint32_t seed = 0; seed < 60; ++seed) {
        CAPTURE(seed);
        random_engine random(seed);
        std::vector<rows_pointer> sources;
        std::vector<std::byte> all;
        shape_vector shape{0, 1 + random() % 5, 1 + random() % 3};
        for (std::uint64_t index = 0, count = 2 + random() % 9; index < count; ++index) {
            shape[0] = random() % 3 == 0 ? 0 : random() % 20;
            // sources of one delivered type, stored in different byte orders
            const dtype type = dtype::parse(random() % 4 == 0 ? ">i4" : "<i4");
            const auto [source, expected] =
                make_array(random, folder / std::to_string(index), type, shape, false);
            sources.push_back(random() % 2 == 0 ? source : in_memory(expected));
            const auto delivered = expected.little_endian();
            all.insert(all.end(), delivered.begin(), delivered.end());
        }
        const std::uint64_t row_size = shape[1] * shape[2] * 4;
        const rows_pointer rows = concatenate(sources);
        CHECK(rows->dtype() == dtype::parse("<i4"));
        CHECK(rows->row_shape() == shape_vector{shape[1], shape[2]});
        CHECK(rows->row_size_bytes() == row_size);
        REQUIRE(rows->row_count() == all.size() / row_size);
        if (rows->row_count() == 0) continue;

        row_ids ids;
        std::vector<std::byte> wanted;
        while (ids.size() < 200) {
            std::uint64_t id = random() % rows->row_count();
            for (std::uint64_t run = random() % 30; run > 0 && id < rows->row_count(); --run, ++id) {
                ids.push_back(id);
                const auto row = std::span(all).subspan(id * row_size, row_size);
                wanted.insert(wanted.end(), row.begin(), row.end());
            }
        }
        CHECK((read(*rows, ids) == wanted));
        CHECK(read(*rows, {}).empty());
        CHECK_NOTHROW(rows->check_unchanged());
    }
}

TEST_CASE("concatenated_rows: rows of one source that are asked for together are one call") {
    const auto first = std::make_shared<recording_rows>(10, std::chrono::nanoseconds(5));
    const auto empty = std::make_shared<recording_rows>(0, std::chrono::nanoseconds(1'000));
    const auto last = std::make_shared<recording_rows>(20, std::chrono::nanoseconds(700));
    const rows_pointer rows = concatenate({first, empty, last});
    CHECK(rows->row_count() == 30);
    std::vector<std::byte> destination(7);
    const auto waited = rows->read_rows(row_ids{3, 9, 0, 10, 29, 10, 4}, destination);
    CHECK((first->calls == std::vector<row_ids>{{3, 9, 0}, {4}}));
    CHECK(empty->calls.empty());
    CHECK((last->calls == std::vector<row_ids>{{0, 19, 0}}));
    CHECK(waited == std::chrono::nanoseconds(710));
}

TEST_CASE("concatenated_rows: have the extents of all sources, or none") {
    const temporary_folder folder;
    random_engine random(1);
    const auto make = [&](const std::string& name, const std::string& descr, std::uint64_t row_count) {
        return make_array(random, folder / name, dtype::parse(descr), {row_count, 3}, false).first;
    };
    const pinflow::array one = make("one", "<f4", 5);
    const pinflow::array two = make("two", "<f4", 7);
    const rows_pointer rows = concatenate({one, two});
    REQUIRE(rows->extents().size() == 2);
    CHECK(rows->extents()[0].file == one.file());
    CHECK(rows->extents()[0].row_count == 5);
    CHECK(rows->extents()[1].file == two.file());
    CHECK(rows->extents()[1].offset_bytes == two.offset_bytes());
    CHECK(std::memcmp(rows->extents()[1].data, two.view().data(), two.size_bytes()) == 0);
    CHECK(rows->extents()[1].row_count == 7);
    CHECK(rows->no_extents_reason().empty());

    const rows_pointer converted = concatenate({one, make("three", ">f4", 2), two});
    CHECK(converted->extents().empty());
    CHECK(
        contains_all(converted->no_extents_reason(),
                     {"cannot be taken in place", "'" + (folder / "three").string() + "'", "is big-endian"}));
    // without rows there is no extent
    const pinflow::array ten(pinflow::memory_region::anonymous(120), dtype::parse("<f4"), {10, 3});
    const pinflow::array none(pinflow::memory_region(), dtype::parse("<f4"), {0, 3});
    const rows_pointer mixed = concatenate({none, ten, none, make("empty", "<f4", 0)});
    REQUIRE(mixed->extents().size() == 1);
    CHECK(mixed->extents()[0].data == ten.view().data());
    CHECK(concatenate({none, none})->row_count() == 0);
    // a source without rows needs no extents
    CHECK(concatenate({one, make("three", ">f4", 0), two})->extents().size() == 2);
    CHECK(concatenate({rows, two})->extents().size() == 3);
    CHECK(concatenate({std::make_shared<recording_rows>(1), std::make_shared<recording_rows>(2)})
              ->no_extents_reason()
              .empty());
}

TEST_CASE("concatenated_rows: windows of several files keep their strides, and can be read in any order") {
    const temporary_folder folder;
    random_engine random(2);
    const dtype type = dtype::parse("<u2");
    std::optional<pinflow::array> unmapped;
    std::vector<rows_pointer> sources;
    std::vector<std::byte> all;
    for (const char* const name : {"a", "b", "c"}) {
        const auto [source, elements] = make_array(random, folder / name, type, {50}, false);
        sources.push_back(source.sliding_windows(10, 4));
        if (sources.size() == 1)
            unmapped =
                pinflow::array::of_file_unmapped(source.file(), source.offset_bytes(), type, source.shape());
        for (std::size_t first = 0; first + 10 <= 50; first += 4) {
            const auto window = std::span(elements.bytes).subspan(first * 2, 20);
            all.insert(all.end(), window.begin(), window.end());
        }
    }
    const rows_pointer rows = concatenate(sources);
    CHECK(rows->row_count() == 33);
    CHECK(rows->file_backed());
    REQUIRE(rows->extents().size() == 3);
    for (const pinflow::row_extent& extent : rows->extents()) {
        CHECK(extent.stride_bytes == 8);
        CHECK(extent.data != nullptr);
    }
    row_ids ids(33);
    for (std::size_t i = 0; i < ids.size(); ++i)
        ids[i] = i;
    CHECK((read(*rows, ids) == all));
    const auto row = std::span(all).subspan(32 * 20, 20);
    CHECK((read(*rows, {32}) == std::vector(row.begin(), row.end())));
    // unmapped files are mapped side by side
    const rows_pointer mapped = concatenate({unmapped->sliding_windows(10, 4), sources[1]});
    REQUIRE(mapped->extents().size() == 2);
    REQUIRE(mapped->extents()[0].data != nullptr);
    CHECK(std::memcmp(mapped->extents()[0].data, all.data(), 20) == 0);
    CHECK((read(*mapped, {10}) == read(*rows, {10})));
    // stacked, each source is one row, which is not contiguous
    const rows_pointer stacked = pinflow::stack(sources);
    CHECK(stacked->extents().empty());
    CHECK(contains(stacked->no_extents_reason(), "overlap or have gaps"));
    CHECK((read(*stacked, {0, 1, 2}) == all));
}

TEST_CASE("concatenated_rows: are backed by files if all sources are") {
    const temporary_folder folder;
    random_engine random(6);
    const auto [big, expected] = make_array(random, folder / "big", dtype::parse(">f4"), {5, 3}, false);
    const auto little = make_array(random, folder / "little", dtype::parse("<f4"), {5, 3}, false).first;
    CHECK(concatenate({little, little})->file_backed());
    CHECK(concatenate({big, little})->file_backed());
    CHECK(concatenate({big, big})->file_backed());
    CHECK_FALSE(concatenate({little, in_memory(expected)})->file_backed());
    CHECK_FALSE(concatenate({std::make_shared<recording_rows>(1), std::make_shared<recording_rows>(2)})
                    ->file_backed());
}

TEST_CASE("concatenated_rows: are described by the first, the last and their number") {
    const temporary_folder folder;
    random_engine random(2);
    std::vector<rows_pointer> sources;
    for (const char* name : {"a", "b", "c"}) {
        sources.push_back(make_array(random, folder / name, dtype::parse("<f4"), {2}, false).first);
    }
    CHECK(concatenate(sources)->description() ==
          "'" + (folder / "a").string() + "' to '" + (folder / "c").string() + "' (3 sources)");
}

TEST_CASE("concatenated_rows: one source is returned as it is") {
    const rows_pointer source = std::make_shared<recording_rows>(3);
    CHECK(concatenate({source}) == source);
}

TEST_CASE("concatenated_rows: incompatible sources are refused, and named") {
    const temporary_folder folder;
    random_engine random(3);
    const auto make = [&](const std::string& name, const std::string& descr, const shape_vector& shape) {
        return make_array(random, folder / name, dtype::parse(descr), shape, false).first.rows();
    };
    const rows_pointer first = make("first", "<f4", {2, 3});
    const auto refusal = [&](const rows_pointer& other) {
        return message_of<invalid_argument>([&] { concatenate({first, first, other}); });
    };
    const auto names_both = [&](const std::string& sentence, const std::string& other) {
        return contains_all(sentence,
                            {first->description() + " and '" + (folder / "other").string() + "'",
                             "cannot concatenate", "the first are <f4 of shape (3,)", "the second " + other});
    };
    CHECK(names_both(refusal(make("other", "<i4", {2, 3})), "<i4 of shape (3,)"));
    CHECK(names_both(refusal(make("other", "<f4", {2, 4})), "<f4 of shape (4,)"));
    CHECK(names_both(refusal(make("other", "<f4", {2})), "<f4 of shape ()"));
    CHECK(names_both(refusal(make("other", "<f4", {0, 4})), "<f4 of shape (4,)"));
    CHECK(refusal(make("other", "<f4", {9, 3})).empty());
    CHECK(contains_all(message_of<invalid_argument>([] { concatenate({}); }),
                       {"cannot concatenate", "empty list"}));
    CHECK_THROWS_AS(concatenate({first, nullptr}), invalid_argument);
}

TEST_CASE("concatenated_rows: more rows than can be numbered are refused") {
    const auto half = std::make_shared<recording_rows>(std::uint64_t{1} << 63);
    const auto rest = std::make_shared<recording_rows>((std::uint64_t{1} << 63) - 1);
    const rows_pointer most = concatenate({half, rest});
    CHECK(most->row_count() == ~std::uint64_t{0});
    read(*most, {~std::uint64_t{1}});
    CHECK((rest->calls == std::vector<row_ids>{{(std::uint64_t{1} << 63) - 2}}));
    CHECK(contains_all(
        message_of<invalid_argument>([&] { concatenate({half, half}); }),
        {"a recording (2 sources)", "2^64 rows or more", "a recording alone has 9223372036854775808"}));
}

TEST_CASE("concatenated_rows: a row past the end, or another size, is refused before anything is read") {
    const auto first = std::make_shared<recording_rows>(10);
    const auto last = std::make_shared<recording_rows>(20);
    const rows_pointer rows = concatenate({first, last});
    for (const std::uint64_t wrong : {std::uint64_t{30}, ~std::uint64_t{0}}) {
        std::vector<std::byte> destination(3);
        CHECK(contains_all(
            message_of<invalid_argument>([&] { rows->read_rows(row_ids{0, 15, wrong}, destination); }),
            {"row " + std::to_string(wrong) + " ", "out of range", rows->description(), "has 30 rows"}));
    }
    for (const std::size_t size : {0u, 1u, 3u}) {
        std::vector<std::byte> destination(size);
        CHECK(contains_all(
            message_of<invalid_argument>([&] { rows->read_rows(row_ids{1, 11}, destination); }),
            {"2 rows of 1 bytes", "do not fit", "destination of " + std::to_string(size) + " bytes"}));
    }
    CHECK(first->calls.empty());
    CHECK(last->calls.empty());
}

TEST_CASE("concatenated_rows: every source is asked whether it is unchanged") {
    const auto first = std::make_shared<recording_rows>(1);
    const auto empty = std::make_shared<recording_rows>(0);
    const auto last = std::make_shared<recording_rows>(2);
    concatenate({first, empty, last})->check_unchanged();
    CHECK(first->checks == 1);
    CHECK(empty->checks == 1);
    CHECK(last->checks == 1);
}

TEST_CASE("concatenated_rows: one truncated file is an error and not a signal") {
    const temporary_folder folder;
    random_engine random(4);
    const auto [one, expected_one] = make_array(random, folder / "one", dtype::parse("<i4"), {50, 2}, false);
    const auto [two, expected_two] =
        make_array(random, folder / "two", dtype::parse("<i4"), {50, 2}, false, 0);
    const rows_pointer rows = concatenate({one, two});
    std::filesystem::resize_file(folder / "two", 200);
    CHECK_THROWS_AS(read(*rows, {0, 99}), pinflow::data_changed);
    CHECK_THROWS_AS(rows->check_unchanged(), pinflow::data_changed);
    CHECK((read(*rows, {50}) ==
           std::vector<std::byte>(expected_two.bytes.begin(), expected_two.bytes.begin() + 8)));
}

TEST_CASE("concatenated_rows: keep their sources alive") {
    const temporary_folder folder;
    random_engine random(5);
    std::vector<std::byte> wanted;
    const rows_pointer rows = [&] {
        const auto [source, expected] =
            make_array(random, folder / "data", dtype::parse("<i4"), {5, 2}, false);
        wanted = expected.bytes;
        wanted.insert(wanted.end(), expected.bytes.begin(), expected.bytes.end());
        return concatenate({source, in_memory(expected)});
    }();
    std::filesystem::remove(folder / "data");
    CHECK((read(*rows, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}) == wanted));
}
