#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/stack.hpp"
#include "tests/mapped_files.hpp"
#include "tests/random_arrays.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::array;
using pinflow::dtype;
using pinflow::shape_vector;
using pinflow::stack;

namespace {

using row_ids = std::vector<std::uint64_t>;
using rows_pointer = std::shared_ptr<const pinflow::row_source>;

std::vector<std::byte> read(const pinflow::row_source& rows, const row_ids& ids) {
    std::vector<std::byte> destination(ids.size() * rows.row_size_bytes());
    rows.read_rows(ids, destination);
    return destination;
}

/// Arrays of one type and shape, and what each holds as it is delivered.
struct samples {
    std::vector<array> arrays;
    std::vector<std::vector<std::byte>> contents;

    std::vector<rows_pointer> sources() const { return {arrays.begin(), arrays.end()}; }
    /// Each array as a source of one row, which is also possible without axes and in Fortran order.
    std::vector<rows_pointer> rows() const {
        std::vector<rows_pointer> rows;
        for (const array& each : arrays)
            rows.push_back(pinflow::detail::one_row_of(each));
        return rows;
    }
    std::vector<std::byte> rows_of(const row_ids& ids) const {
        std::vector<std::byte> bytes;
        for (const std::uint64_t id : ids)
            bytes.insert(bytes.end(), contents[id].begin(), contents[id].end());
        return bytes;
    }
};

samples make_samples(const temporary_folder& folder, std::size_t count, const std::string& descr,
                     const shape_vector& shape, bool fortran_order = false) {
    random_engine random(count);
    samples made;
    for (std::size_t index = 0; index < count; ++index) {
        const auto [opened, elements] = make_array(random, folder / std::to_string(index),
                                                   dtype::parse(descr), shape, fortran_order, random() % 300);
        made.arrays.push_back(opened);
        made.contents.push_back(elements.little_endian());
    }
    return made;
}

const row_ids some_ids{0, 3, 3, 1, 2, 0};

}  // namespace

TEST_CASE("stacked_rows: each file is one row, with an extent in its mapping") {
    const temporary_folder folder;
    const auto given = make_samples(folder, 4, "<f4", {5, 3});
    const rows_pointer rows = stack(given.sources());
    CHECK(rows->row_count() == 4);
    CHECK(rows->row_shape() == shape_vector{5, 3});
    CHECK(rows->dtype() == dtype::parse("<f4"));
    CHECK(rows->row_size_bytes() == 60);
    CHECK(rows->file_backed());
    CHECK(rows->description() ==
          "'" + (folder / "0").string() + "' to '" + (folder / "3").string() + "' (4 sources)");
    CHECK((read(*rows, some_ids) == given.rows_of(some_ids)));
    REQUIRE(rows->extents().size() == 4);
    for (std::size_t index = 0; index < 4; ++index) {
        const pinflow::row_extent& extent = rows->extents()[index];
        CHECK(extent.row_count == 1);
        CHECK(extent.offset_bytes == given.arrays[index].offset_bytes());
        CHECK(std::memcmp(extent.data, given.contents[index].data(), 60) == 0);
    }
    std::filesystem::last_write_time(folder / "2", std::filesystem::file_time_type());
    CHECK(contains(message_of<pinflow::data_changed>([&] { rows->check_unchanged(); }), folder / "2"));
}

TEST_CASE(
    "stacked_rows: stacked vectors give rows of one axis, and stacked sources of such rows give rows of "
    "two") {
    const temporary_folder folder;
    const auto vectors = make_samples(folder, 4, "<i2", {7});
    const rows_pointer rows = stack(vectors.sources());
    CHECK(rows->row_shape() == shape_vector{7});
    CHECK((read(*rows, some_ids) == vectors.rows_of(some_ids)));
    const rows_pointer deeper = stack({rows, rows, rows});
    CHECK(deeper->row_count() == 3);
    CHECK(deeper->row_shape() == shape_vector{4, 7});
    CHECK((read(*deeper, {2}) == vectors.rows_of({0, 1, 2, 3})));
    CHECK(deeper->extents().empty());
    CHECK(contains_all(deeper->no_extents_reason(),
                       {"cannot be taken in place", rows->description(), "lies in 4 pieces"}));
}

TEST_CASE("stacked_rows: big-endian files are converted") {
    const temporary_folder folder;
    const auto given = make_samples(folder, 4, ">i4", {5, 3});
    const rows_pointer rows = stack(given.sources());
    CHECK(rows->dtype() == dtype::parse("<i4"));
    CHECK((read(*rows, some_ids) == given.rows_of(some_ids)));
    CHECK(rows->extents().empty());
    CHECK(contains(rows->no_extents_reason(), "is big-endian"));
    CHECK(rows->file_backed());
    CHECK_NOTHROW(rows->check_unchanged());
}

TEST_CASE("stacked_rows: files in Fortran order are reordered if they are whole rows") {
    const temporary_folder folder;
    for (const char* descr : {"<i4", ">i4"}) {
        const auto given = make_samples(folder, 4, descr, {5, 3, 2}, true);
        const rows_pointer rows = pinflow::detail::stack_rows(given.rows());
        CHECK(rows->row_shape() == shape_vector{5, 3, 2});
        CHECK((read(*rows, some_ids) == given.rows_of(some_ids)));
        CHECK(rows->extents().empty());
        CHECK(contains(rows->no_extents_reason(),
                       "is in Fortran order, so its elements are reordered when they are read"));
        CHECK(rows->file_backed());
        CHECK_THROWS_AS(stack(given.sources()), pinflow::unsupported);
    }
    // of one axis, it is C order as well
    const auto vectors = make_samples(folder, 4, "<i4", {5}, true);
    CHECK(pinflow::detail::stack_rows(vectors.rows())->extents().size() == 4);
}

TEST_CASE("stacked_rows: arrays without axes are elements of a vector") {
    const temporary_folder folder;
    for (const char* descr : {"<i8", ">i8"}) {
        const auto given = make_samples(folder, 4, descr, {});
        const rows_pointer rows = pinflow::detail::stack_rows(given.rows());
        CHECK(rows->row_count() == 4);
        CHECK(rows->row_shape().empty());
        CHECK(rows->row_size_bytes() == 8);
        CHECK((read(*rows, some_ids) == given.rows_of(some_ids)));
        CHECK(rows->extents().size() == (descr[0] == '<' ? 4 : 0));
    }
}

TEST_CASE("stacked_rows: fields of structured arrays can be stacked") {
    const temporary_folder folder;
    random_engine random(7);
    const dtype type = dtype::structured(
        {{"id", "", dtype::parse("<i4"), {}, 0}, {"at", "", dtype::parse("<f4"), {2}, 4}}, 12);
    std::vector<rows_pointer> rows;
    std::vector<std::byte> wanted;
    for (const char* name : {"a", "b", "c"}) {
        const auto [opened, elements] = make_array(random, folder / name, type, {3}, false);
        rows.push_back(opened.field("at"));
        const auto field = elements.field("at").little_endian();
        wanted.insert(wanted.end(), field.begin(), field.end());
    }
    const rows_pointer stacked = stack(rows);
    CHECK(stacked->row_shape() == shape_vector{3, 2});
    CHECK(stacked->extents().empty());
    CHECK((read(*stacked, {0, 1, 2}) == wanted));
}

TEST_CASE("stacked_rows: arrays in memory stay where they are") {
    const temporary_folder folder;
    random_engine random(8);
    std::vector<rows_pointer> rows;
    std::vector<std::byte> wanted;
    for (const char* name : {"a", "b"}) {
        const auto [opened, elements] = make_array(random, folder / name, dtype::parse("<f4"), {3, 2}, false);
        rows.push_back(in_memory(elements));
        wanted.insert(wanted.end(), elements.bytes.begin(), elements.bytes.end());
    }
    const rows_pointer stacked = stack(rows);
    REQUIRE(stacked->extents().size() == 2);
    CHECK(stacked->extents()[1].data == rows[1]->extents()[0].data);
    CHECK_FALSE(stacked->file_backed());
    CHECK((read(*stacked, {0, 1}) == wanted));
}

TEST_CASE("stacked_rows: a source of more rows than are read at once is read whole") {
    const temporary_folder folder;
    const auto given = make_samples(folder, 2, ">i2", {150'000});
    CHECK((read(*stack(given.sources()), {1, 0}) == given.rows_of({1, 0})));
}

TEST_CASE("stacked_rows: one source is one row, and empty ones are rows without bytes") {
    const temporary_folder folder;
    const auto one = make_samples(folder, 1, "<f4", {5, 3});
    const rows_pointer row = stack(one.sources());
    CHECK(row->row_count() == 1);
    CHECK(row->row_shape() == shape_vector{5, 3});
    CHECK(row->extents().size() == 1);
    CHECK((read(*row, {0}) == one.rows_of({0})));
    for (const char* descr : {"<f4", ">f4"}) {
        const auto empty = make_samples(folder, 3, descr, {0, 3});
        const rows_pointer rows = stack(empty.sources());
        CHECK(rows->row_count() == 3);
        CHECK(rows->row_shape() == shape_vector{0, 3});
        CHECK(rows->row_size_bytes() == 0);
        CHECK(read(*rows, {2, 0}).empty());
        CHECK_THROWS_AS(read(*rows, {3}), pinflow::invalid_argument);
    }
}

TEST_CASE("stacked_rows: incompatible sources are refused, and named") {
    const temporary_folder folder;
    random_engine random(9);
    const auto make = [&](const std::string& name, const std::string& descr, const shape_vector& shape) {
        return make_array(random, folder / name, dtype::parse(descr), shape, false).first.rows();
    };
    const rows_pointer first = make("first", "<f4", {2, 3});
    const auto refusal = [&](const rows_pointer& other) {
        return message_of<pinflow::invalid_argument>([&] { stack({first, first, other}); });
    };
    const auto names_both = [&](const std::string& sentence, const std::string& other) {
        return contains_all(
            sentence, {"'" + (folder / "first").string() + "' and '" + (folder / "other").string() + "'",
                       "cannot be stacked", "the first is <f4 of shape (2, 3)", "the second " + other});
    };
    CHECK(names_both(refusal(make("other", "<i4", {2, 3})), "<i4 of shape (2, 3)"));
    CHECK(names_both(refusal(make("other", "<f4", {2, 4})), "<f4 of shape (2, 4)"));
    CHECK(names_both(refusal(make("other", "<f4", {3, 3})), "<f4 of shape (3, 3)"));
    CHECK(names_both(refusal(make("other", "<f4", {6})), "<f4 of shape (6,)"));
    CHECK(refusal(make("other", ">f4", {2, 3})).empty());
    CHECK(contains_all(message_of<pinflow::invalid_argument>([] { stack({}); }),
                       {"cannot stack", "empty list"}));
    CHECK_THROWS_AS(stack({first, nullptr}), pinflow::invalid_argument);
}

TEST_CASE("stacked_rows: files that changed are noticed by reading") {
    const temporary_folder folder;
    const auto given = make_samples(folder, 3, "<f4", {50, 3});
    const rows_pointer rows = stack(given.sources());
    std::filesystem::resize_file(folder / "1", given.arrays[1].offset_bytes() + 599);
    CHECK((read(*rows, {0, 2}) == given.rows_of({0, 2})));
    CHECK_THROWS_AS(read(*rows, {0, 1, 2}), pinflow::data_changed);
}
