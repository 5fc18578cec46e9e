#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/system.hpp"
#include "tests/pattern_arrays.hpp"
#include "tests/random_arrays.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::array;
using pinflow::array_view;
using pinflow::dtype;
using pinflow::memory_region;
using pinflow::shape_vector;
namespace seam = pinflow::detail::system;

TEST_CASE("strided_rows: sliding windows and rows with gaps between them are delivered, from one extent") {
    const temporary_folder folder;
    struct expectation {
        std::uint64_t length, step, count, stride_bytes;
    };
    for (const expectation& each :
         {expectation{4, 1, 98, 36}, expectation{5, 3, 33, 108}, expectation{2, 5, 20, 180},
          expectation{7, 7, 14, 0}, expectation{101, 1, 1, 0}, expectation{60, 1000, 1, 0}}) {
        CAPTURE(each.length);
        for (const array& source :
             {array_of_file(folder, "<i4", {101, 9}), array_of_memory("<i4", {101, 9})}) {
            const array windows = source.sliding_windows(each.length, each.step);
            CHECK(windows.shape() == shape_vector{each.count, each.length, 9});
            CHECK(windows.offset_bytes() == source.offset_bytes());
            CHECK(windows.label() == source.label());
            const rows_pointer rows = windows;
            CHECK(rows->row_shape() == shape_vector{each.length, 9});
            CHECK(rows->file_backed() == (source.file() != nullptr));
            CHECK(rows->no_extents_reason().empty());
            REQUIRE(rows->extents().size() == 1);
            CHECK(rows->extents()[0].row_count == each.count);
            CHECK(rows->extents()[0].stride_bytes == each.stride_bytes);
            CHECK(rows->extents()[0].data == source.view().data());
            const auto elements = pattern_bytes(source.size_bytes());
            for (std::uint32_t seed = 0; seed < 20; ++seed) {
                const row_ids ids = random_ids(each.count, 1 + seed * 3, seed);
                std::vector<std::byte> wanted;
                for (const std::uint64_t id : ids) {
                    const auto row = std::span(elements).subspan(id * each.step * 36, rows->row_size_bytes());
                    wanted.insert(wanted.end(), row.begin(), row.end());
                }
                CHECK((read(rows, ids) == wanted));
            }
        }
    }
}

TEST_CASE("strided_rows: there are no windows longer than the array, and a length or step of 0 is refused") {
    const array source = array_of_memory("<i4", {10});
    CHECK(source.sliding_windows(11).shape() == shape_vector{0, 11});
    CHECK(source.sliding_windows(11).rows()->row_count() == 0);
    CHECK(source.sliding_windows(10).shape() == shape_vector{1, 10});
    CHECK(source.sliding_windows(1).shape() == shape_vector{10, 1});
    CHECK(array_of_memory("<i4", {0, 3}).sliding_windows(2).shape() == shape_vector{0, 2, 3});
    CHECK(source.sliding_windows(3, ~std::uint64_t{0}).shape() == shape_vector{1, 3});
    CHECK(source.sliding_windows(4, 2).sliding_windows(2, 1).shape() == shape_vector{3, 2, 4});
    CHECK_THROWS_AS(source.sliding_windows(0), pinflow::invalid_argument);
    CHECK_THROWS_AS(source.sliding_windows(1, 0), pinflow::invalid_argument);
    CHECK_THROWS_AS(source.sliding_windows(~std::uint64_t{0}), pinflow::invalid_argument);
    CHECK_THROWS_AS(array_of_memory("<i4", {}).sliding_windows(1), pinflow::invalid_argument);
}

TEST_CASE("strided_rows: big-endian windows are converted when they are read") {
    const temporary_folder folder;
    const array big = array_of_file(folder, ">i4", {20});
    const rows_pointer rows = big.sliding_windows(3, 2);
    CHECK(rows->extents().empty());
    CHECK(contains(rows->no_extents_reason(), "big-endian"));
    const row_ids one{4}, elements{8, 9, 10};
    CHECK((read(rows, one) == read(big, elements)));
}

TEST_CASE("strided_rows: strided rows in memory are read where they lie") {
    const auto elements = pattern_bytes(100);
    const auto region = [&] {
        auto memory = memory_region::anonymous(100);
        std::ranges::copy(elements, memory.data());
        return memory;
    };
    const dtype type = dtype::of<std::uint8_t>();
    for (const std::uint64_t stride_bytes : {1U, 10U, 30U, 45U}) {
        const rows_pointer rows = array::of_strided_memory(region(), type, {3, 10}, stride_bytes);
        const row_ids ids{2, 0, 1};
        std::vector<std::byte> wanted;
        for (const std::uint64_t id : ids)
            wanted.insert(wanted.end(), elements.begin() + static_cast<std::ptrdiff_t>(id * stride_bytes),
                          elements.begin() + static_cast<std::ptrdiff_t>(id * stride_bytes + 10));
        CHECK((read(rows, ids) == wanted));
        CHECK(rows->extents().size() == 1);
    }
    CHECK_THROWS_AS(array::of_strided_memory(region(), type, {3, 10}, 46), pinflow::invalid_argument);
    CHECK_THROWS_AS(array::of_strided_memory(region(), type, {3, 10}, ~std::uint64_t{0}),
                    pinflow::invalid_argument);
    CHECK_THROWS_AS(array::of_strided_memory(region(), type, {}, 1), pinflow::invalid_argument);
    CHECK_THROWS_AS(array::of_strided_memory(region(), type, {3, 10}, 0), pinflow::invalid_argument);
}

// ---- fields of structured arrays --------------------------------------------------------------------------

namespace {

/// Records of 24 bytes: `>i4` at 2, two `<f4` at 8.
dtype record_type() {
    return dtype::structured({{"a", "", dtype::parse(">i4"), {}, 2}, {"b", "", dtype::parse("<f4"), {2}, 8}},
                             24);
}

/// The rows `ids` of elements in C order.
std::vector<std::byte> rows_of(const expected_elements& elements, const row_ids& ids) {
    const auto delivered = elements.little_endian();
    const std::uint64_t row_size = delivered.size() / std::max<std::uint64_t>(elements.shape[0], 1);
    std::vector<std::byte> result;
    for (const std::uint64_t id : ids) {
        const auto row = std::span(delivered).subspan(id * row_size, row_size);
        result.insert(result.end(), row.begin(), row.end());
    }
    return result;
}

}  // namespace

TEST_CASE("strided_rows: structured elements and fields of them are delivered little-endian and contiguous") {
    const temporary_folder folder;
    for (std::uint32_t seed = 0; seed < 200; ++seed) {
        CAPTURE(seed);
        random_engine random(seed);
        const dtype type = random_type(random, 2);
        shape_vector shape{1 + random() % 40};
        for (std::uint64_t axes = random() % 3; axes > 0; --axes)
            shape.push_back(1 + random() % 4);
        CAPTURE(type.descr());
        CAPTURE(pinflow::to_string(shape));
        const auto [source, expected] = make_array(random, folder / "data", type, shape, false);

        auto names = field_names(type);
        names.resize(std::min<std::size_t>(names.size(), 6));
        names.emplace_back();  // for the whole
        for (const std::string& name : names) {
            CAPTURE(name);
            const auto& elements = name.empty() ? expected : expected.field(name);
            for (const array& whole : {source, in_memory(expected)}) {
                const array part = name.empty() ? whole : whole.field(name);
                const rows_pointer rows = part.rows();
                CHECK(rows->dtype() == elements.type.little_endian());
                CHECK(rows->row_count() == shape[0]);
                CHECK(rows->row_shape() == shape_vector(elements.shape.begin() + 1, elements.shape.end()));
                const row_ids ids = random_ids(shape[0], 30, seed);
                CHECK((read(rows, ids) == rows_of(elements, ids)));
                // only rows that are stored as they are delivered have extents
                const auto strides = std::span(part.strides_bytes()).subspan(1);
                const array_view row(part.view().data(), part.dtype(), rows->row_shape(),
                                     {strides.begin(), strides.end()});
                const bool in_place = row.c_contiguous() && part.dtype().is_little_endian();
                CHECK(rows->extents().empty() != in_place);
                CHECK(rows->no_extents_reason().empty() == in_place);
            }
        }
    }
}

TEST_CASE("strided_rows: records that follow each other are read at once, up to a bound") {
    const temporary_folder folder;
    random_engine random(1);
    const auto [source, expected] = make_array(random, folder / "data", record_type(), {100'000}, false);
    const rows_pointer rows = source.field("b").rows();
    int reads = 0;
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
        reads += what == seam::call::pread ? 1 : 0;
        return seam::injected_failure{};
    });
    const auto elements = expected.field("b");
    const auto reads_of = [&](const row_ids& ids) {
        reads = 0;
        CHECK((read(rows, ids) == rows_of(elements, ids)));
        return reads;
    };
    CHECK(reads_of({}) == 0);
    CHECK(reads_of({5}) == 1);
    CHECK(reads_of({3, 4, 5, 6, 7, 8}) == 1);
    CHECK(reads_of({3, 4, 5, 99'999, 0, 1, 1, 2}) == 4);
    row_ids all(100'000);
    std::iota(all.begin(), all.end(), std::uint64_t{0});
    CHECK(reads_of(all) == 5);  // 2.4 MB, 512 KiB at a time
}

TEST_CASE("strided_rows: windows of a field are delivered without the gaps") {
    const temporary_folder folder;
    random_engine random(1);
    const auto [source, expected] = make_array(random, folder / "data", record_type(), {300}, false);
    const auto values = expected.field("b");
    const std::size_t value_bytes = values.bytes.size() / 300;
    for (const auto& [length, step] :
         {std::pair{7U, 1U}, std::pair{7U, 3U}, std::pair{3U, 7U}, std::pair{4U, 4U}}) {
        for (const array& whole : {source, in_memory(expected)}) {
            const rows_pointer rows = whole.field("b").sliding_windows(length, step);
            CHECK(rows->extents().empty());
            for (std::uint32_t seed = 0; seed < 20; ++seed) {
                const row_ids ids = random_ids(rows->row_count(), 40, seed);
                std::vector<std::byte> wanted;
                for (const std::uint64_t id : ids) {
                    const auto window =
                        std::span(values.bytes).subspan(id * step * value_bytes, length * value_bytes);
                    wanted.insert(wanted.end(), window.begin(), window.end());
                }
                CHECK((read(rows, ids) == wanted));
            }
        }
    }
}

TEST_CASE("strided_rows: windows that overlap are read at once") {
    const temporary_folder folder;
    const array source = array_of_file(folder, "<u2", {100'000});
    const rows_pointer rows = source.sliding_windows(65, 16);
    int reads = 0;
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
        reads += what == seam::call::pread ? 1 : 0;
        return seam::injected_failure{};
    });
    row_ids all(rows->row_count());
    std::iota(all.begin(), all.end(), std::uint64_t{0});
    const auto elements = pattern_bytes(200'000);
    std::vector<std::byte> wanted;
    for (std::size_t first = 0; first + 65 <= 100'000; first += 16) {
        const auto window = std::span(elements).subspan(2 * first, 130);
        wanted.insert(wanted.end(), window.begin(), window.end());
    }
    CHECK((read(rows, all) == wanted));
    CHECK(reads == 1);  // 200 kB
}

TEST_CASE("strided_rows: rows of a file are backed by the file, whatever their layout") {
    const temporary_folder folder;
    random_engine random(1);
    CHECK(array_of_file(folder, "<i4", {10, 2}).rows()->file_backed());
    CHECK(array_of_file(folder, ">i4", {10, 2}).rows()->file_backed());
    CHECK_FALSE(array_of_memory("<i4", {10, 2}).rows()->file_backed());
    const auto [records, expected] = make_array(random, folder / "records", record_type(), {10}, false);
    CHECK(records.field("b").rows()->file_backed());
    const array unmapped =
        array::of_file_unmapped(records.file(), records.offset_bytes(), records.dtype(), {10});
    CHECK(unmapped.rows()->file_backed());
    CHECK(unmapped.rows()->extents().empty() == records.rows()->extents().empty());
    CHECK(contains(unmapped.reason(), "without a mapping"));
}

TEST_CASE("strided_rows: gives the reason if rows cannot be taken in place") {
    const temporary_folder folder;
    random_engine random(2);
    const auto [source, expected] = make_array(random, folder / "data", record_type(), {10}, false);
    const auto reason = [](const array& refused) { return std::string(refused.rows()->no_extents_reason()); };
    CHECK(reason(source.view_as(dtype::parse("|V24"))).empty());
    CHECK(contains_all(reason(source), {"big-endian", "converted"}));
    CHECK(contains_all(reason(source.field("a")), {"big-endian", "converted"}));
    CHECK(reason(source.field("b")).empty());
    const auto [pairs, others] = make_array(random, folder / "pairs", record_type(), {10, 2}, false);
    CHECK(
        contains_all(reason(pairs.field("b")), {"has gaps within its rows", "fields of structured arrays"}));
}

TEST_CASE("strided_rows: a file truncated under a field is an error and not a signal") {
    const temporary_folder folder;
    random_engine random(3);
    const auto [source, expected] = make_array(random, folder / "data", record_type(), {1'000}, false, 0);
    const rows_pointer rows = source.field("a").rows();
    std::filesystem::resize_file(folder / "data", 12'000);
    CHECK(contains(message_of<pinflow::data_changed>([&] { read(rows, {999}); }), "has 12000 bytes now"));
    CHECK_THROWS_AS(read(rows, {498, 499, 500}), pinflow::data_changed);
    CHECK_THROWS_AS(rows->check_unchanged(), pinflow::data_changed);
    const row_ids kept{0, 499};
    CHECK((read(rows, kept) == rows_of(expected.field("a"), kept)));
}

TEST_CASE("strided_rows: a field keeps its source alive") {
    const temporary_folder folder;
    random_engine random(4);
    rows_pointer of_file;
    rows_pointer of_memory;
    expected_elements elements = [&] {
        const auto [source, expected] = make_array(random, folder / "data", record_type(), {50}, false);
        of_file = source.field("b").rows();
        of_memory = in_memory(expected).field("b").rows();
        return expected.field("b");
    }();
    std::filesystem::remove(folder / "data");
    const row_ids ids{49, 0, 7, 8};
    CHECK((read(of_file, ids) == rows_of(elements, ids)));
    CHECK((read(of_memory, ids) == rows_of(elements, ids)));
}

TEST_CASE("strided_rows: fields in Fortran order are refused if rows are not contiguous") {
    const temporary_folder folder;
    random_engine random(5);
    const auto [source, expected] = make_array(random, folder / "data", record_type(), {4, 5}, true);
    CHECK(contains(message_of<pinflow::unsupported>([&] { source.field("b").rows(); }),
                   "has shape (4, 5, 2) in Fortran order"));
    const auto [vector, expected_vector] = make_array(random, folder / "data", record_type(), {20}, true);
    const row_ids ids{19, 3, 4};
    CHECK((read(vector.field("b").rows(), ids) == rows_of(expected_vector.field("b"), ids)));
}
