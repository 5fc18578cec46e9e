#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/system.hpp"
#include "tests/random_arrays.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::array;
using pinflow::array_view;
using pinflow::dtype;
using pinflow::input_file;
using pinflow::memory_region;
using pinflow::shape_vector;
namespace seam = pinflow::detail::system;

namespace {

using row_ids = std::vector<std::uint64_t>;
using rows_pointer = std::shared_ptr<const pinflow::row_source>;

/// The pattern as an array of a file, behind `offset` other bytes.
array array_of_file(const temporary_folder& folder, const std::string& descr, shape_vector shape,
                    bool fortran_order = false, std::size_t offset = 13) {
    const dtype type = dtype::parse(descr);
    std::vector<std::byte> content(offset);
    const auto elements =
        pattern_bytes(static_cast<std::size_t>(pinflow::element_count(shape) * type.size_bytes()));
    content.insert(content.end(), elements.begin(), elements.end());
    write_bytes(folder / "data", content);
    return array::of_file(std::make_shared<const input_file>(folder / "data"), offset, type, std::move(shape),
                          fortran_order);
}

/// The pattern as an array in memory.
array array_of_memory(const std::string& descr, shape_vector shape) {
    const dtype type = dtype::parse(descr);
    const auto elements =
        pattern_bytes(static_cast<std::size_t>(pinflow::element_count(shape) * type.size_bytes()));
    auto memory = memory_region::anonymous(elements.size());
    std::ranges::copy(elements, memory.data());
    return {std::move(memory), type, std::move(shape)};
}

std::vector<std::byte> read(const rows_pointer& rows, const row_ids& ids) {
    std::vector<std::byte> destination(ids.size() * rows->row_size_bytes());
    rows->read_rows(ids, destination);
    return destination;
}

/// The bytes that `read` must deliver, with each number of `swap_size` bytes reversed.
std::vector<std::byte> expected(const rows_pointer& rows, const row_ids& ids, std::size_t swap_size = 1) {
    const auto size = static_cast<std::size_t>(rows->row_size_bytes());
    const auto elements = pattern_bytes(static_cast<std::size_t>(rows->row_count()) * size);
    std::vector<std::byte> result;
    for (const std::uint64_t id : ids) {
        for (std::size_t index = 0; index < size; ++index) {
            const std::size_t within = index % swap_size;
            result.push_back(
                elements[static_cast<std::size_t>(id) * size + index - within + (swap_size - 1 - within)]);
        }
    }
    return result;
}

/// Row numbers below `row_count`, with repetitions and with runs.
row_ids random_ids(std::uint64_t row_count, std::size_t count, std::uint32_t seed) {
    std::mt19937_64 random(seed);
    row_ids ids;
    while (ids.size() < count) {
        const std::uint64_t first = random() % row_count;
        const std::uint64_t run = 1 + random() % 5;
        for (std::uint64_t id = first; id < std::min(first + run, row_count) && ids.size() < count; ++id) {
            ids.push_back(id);
        }
    }
    return ids;
}

}  // namespace

TEST_CASE("array_rows: describes the rows of a file") {
    const temporary_folder folder;
    const array source = array_of_file(folder, "<i2", {10, 3, 4});
    const rows_pointer rows = source.rows();
    CHECK(rows->dtype() == dtype::of<std::int16_t>());
    CHECK(rows->row_shape() == shape_vector{3, 4});
    CHECK(rows->row_count() == 10);
    CHECK(rows->row_size_bytes() == 24);
    CHECK(rows->description() == "'" + (folder / "data").string() + "'");
    REQUIRE(rows->extents().size() == 1);
    const pinflow::row_extent& extent = rows->extents()[0];
    CHECK(extent.file == source.file());
    CHECK(extent.offset_bytes == 13);
    CHECK(extent.row_count == 10);
    CHECK(extent.data == source.view().data());
}

TEST_CASE("array_rows: describes the rows of an array in memory") {
    const array source = array_of_memory("<f4", {7});
    const rows_pointer rows = source;  // an array is taken wherever rows are
    CHECK(rows->row_shape().empty());
    CHECK(rows->row_size_bytes() == 4);
    CHECK(rows->description() == "an array in memory");
    REQUIRE(rows->extents().size() == 1);
    CHECK(rows->extents()[0].file == nullptr);
    CHECK(rows->extents()[0].data == source.view().data());
    CHECK(rows->extents()[0].row_count == 7);
    CHECK_NOTHROW(rows->check_unchanged());
}

TEST_CASE("array_rows: the description of a field has its name, that of a labelled array is the label") {
    const temporary_folder folder;
    const std::string path = (folder / "data").string();
    const dtype nested = dtype::structured({{"b", "", dtype::parse("<i2"), {}, 0}}, 2);
    const dtype record =
        dtype::structured({{"a", "", nested, {}, 0}, {"c", "", dtype::parse("<i4"), {}, 4}}, 8);
    write_bytes(folder / "data", pattern_bytes(32));
    const array source = array::of_file(std::make_shared<const input_file>(folder / "data"), 0, record, {4});
    CHECK(source.label() == path);
    CHECK(source.field("c").rows()->description() == "'" + path + ":c'");
    CHECK(source.field("a").field("b").label() == source.field("a.b").label());
    const array member = source.labelled("a.npz:x");
    CHECK(member.rows()->description() == "'a.npz:x'");
    CHECK(member.field("c").label() == "a.npz:x.c");
    CHECK(source.label() == path);

    const array in_memory = array_of_memory("<f4", {7});
    CHECK(in_memory.label().empty());
    CHECK(in_memory.labelled("weights").rows()->description() == "'weights'");
    CHECK(contains_all(
        message_of<pinflow::unsupported>([] { array_of_memory("<f4", {}).labelled("w").rows(); }),
        {"'w' has no axes, so it has no rows"}));
}

TEST_CASE("array_rows: delivers any rows in the order asked for, with repetitions") {
    const temporary_folder folder;
    for (const rows_pointer& rows :
         {array_of_file(folder, "<i4", {101, 9}).rows(), array_of_memory("<i4", {101, 9}).rows()}) {
        CAPTURE(rows->description());
        for (std::uint32_t seed = 0; seed < 50; ++seed) {
            const row_ids ids = random_ids(101, 1 + seed * 7, seed);
            CAPTURE(seed);
            CHECK((read(rows, ids) == expected(rows, ids)));
        }
        const row_ids repeated(20, 100);
        CHECK((read(rows, repeated) == expected(rows, repeated)));
        row_ids all(101);
        std::iota(all.begin(), all.end(), std::uint64_t{0});
        CHECK((read(rows, all) == pattern_bytes(3636)));
        std::ranges::reverse(all);
        CHECK((read(rows, all) == expected(rows, all)));
        CHECK(read(rows, {}).empty());
    }
}

TEST_CASE("array_rows: sliding windows and rows with gaps between them are delivered, from one extent") {
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

TEST_CASE("array_rows: there are no windows longer than the array, and a length or step of 0 is refused") {
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

TEST_CASE("array_rows: big-endian windows are converted when they are read") {
    const temporary_folder folder;
    const array big = array_of_file(folder, ">i4", {20});
    const rows_pointer rows = big.sliding_windows(3, 2);
    CHECK(rows->extents().empty());
    CHECK(contains(rows->no_extents_reason(), "big-endian"));
    const row_ids one{4}, elements{8, 9, 10};
    CHECK((read(rows, one) == read(big, elements)));
}

TEST_CASE("array_rows: strided rows in memory are read where they lie") {
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

TEST_CASE("array_rows: rows that follow each other are read at once") {
    const temporary_folder folder;
    const rows_pointer rows = array_of_file(folder, "<i4", {100, 8}).rows();
    int reads = 0;
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
        reads += what == seam::call::pread ? 1 : 0;
        return seam::injected_failure{};
    });
    const auto reads_of = [&](const row_ids& ids) {
        reads = 0;
        CHECK((read(rows, ids) == expected(rows, ids)));
        return reads;
    };
    CHECK(reads_of({}) == 0);
    CHECK(reads_of({5}) == 1);
    CHECK(reads_of({3, 4, 5, 6}) == 1);
    CHECK(reads_of({3, 4, 5, 9, 0, 1, 1, 2}) == 4);
    CHECK(reads_of({5, 4, 3}) == 3);
    CHECK(reads_of({7, 7, 7}) == 3);
    CHECK(reads_of({97, 98, 99, 0}) == 2);
}

TEST_CASE("array_rows: a row past the end is refused before anything is read") {
    const temporary_folder folder;
    const rows_pointer of_file = array_of_file(folder, "<i4", {10, 2}).rows();
    const rows_pointer of_memory = array_of_memory("<i4", {10, 2}).rows();
    int calls = 0;
    const seam::scoped_failure_hook hook([&](seam::call, std::string_view) {
        ++calls;
        return seam::injected_failure{};
    });
    for (const rows_pointer& rows : {of_file, of_memory}) {
        for (const std::uint64_t wrong : {std::uint64_t{10}, std::uint64_t{1} << 61, ~std::uint64_t{0}}) {
            std::vector<std::byte> destination(24, std::byte{0xEE});
            CHECK(contains_all(
                message_of<pinflow::invalid_argument>(
                    [&] { rows->read_rows(row_ids{0, 1, wrong}, destination); }),
                {"row " + std::to_string(wrong) + " ", "out of range", rows->description(), "has 10 rows"}));
            CHECK(std::ranges::count(destination, std::byte{0xEE}) == 24);
        }
    }
    CHECK(calls == 0);
}

TEST_CASE("array_rows: a destination of another size than the rows is refused") {
    const rows_pointer rows = array_of_memory("<i4", {10, 2}).rows();
    for (const std::size_t size : {0u, 15u, 17u, 24u}) {
        std::vector<std::byte> destination(size, std::byte{0xEE});
        CHECK(contains_all(
            message_of<pinflow::invalid_argument>([&] { rows->read_rows(row_ids{1, 2}, destination); }),
            {"2 rows of 8 bytes", "do not fit", "destination of " + std::to_string(size) + " bytes"}));
        CHECK(std::ranges::count(destination, std::byte{0xEE}) == static_cast<std::ptrdiff_t>(size));
    }
    std::vector<std::byte> destination(8);
    CHECK_THROWS_AS(rows->read_rows({}, destination), pinflow::invalid_argument);
}

TEST_CASE("array_rows: a size that overflows is not taken for an empty destination") {
    if (::access("/dev/shm", W_OK) != 0) {
        MESSAGE("skipped: /dev/shm, where a file can have 2^62 bytes, cannot be written");
        return;
    }
    constexpr std::uint64_t row_size = std::uint64_t{1} << 62;
    const std::filesystem::path path = "/dev/shm/pinflow-array-rows-test-" + std::to_string(::getpid());
    std::ofstream(path).flush();
    std::error_code refused;
    std::filesystem::resize_file(path, row_size, refused);
    const auto file = std::make_shared<const input_file>(path);
    std::filesystem::remove(path);
    if (refused) {
        MESSAGE("skipped: no file can be as large as 2^62 bytes here");
        return;
    }
    const rows_pointer rows = array::of_file(file, 0, dtype::of<std::uint8_t>(), {1, row_size}).rows();
    CHECK_THROWS_AS(rows->read_rows(row_ids{0, 0, 0, 0}, {}), pinflow::invalid_argument);
}

TEST_CASE("array_rows: big-endian elements are delivered little-endian, number by number") {
    struct expectation {
        std::string descr;
        std::string delivered;
        std::size_t swap_size;
    };
    const temporary_folder folder;
    for (const auto& [descr, delivered, swap_size] : std::vector<expectation>{
             {">i2", "<i2", 2},
             {">f4", "<f4", 4},
             {">f8", "<f8", 8},
             {">c8", "<c8", 4},
             {">c16", "<c16", 8},
             {">U3", "<U3", 4},
             {">M8[ns]", "<M8[ns]", 8},
             {">f16", "<f16", 16},
             {"|S5", "|S5", 1},
             {"|V3", "|V3", 1},
             {">i1", "|i1", 1},
             {"<U3", "<U3", 1},
         }) {
        CAPTURE(descr);
        for (const rows_pointer& rows :
             {array_of_file(folder, descr, {20, 3}).rows(), array_of_memory(descr, {20, 3}).rows()}) {
            CHECK(rows->dtype() == dtype::parse(delivered));
            const row_ids ids{3, 4, 5, 19, 0, 0};
            CHECK((read(rows, ids) == expected(rows, ids, swap_size)));
            // only elements that are stored as they are delivered have extents
            CHECK(rows->extents().empty() == (swap_size > 1));
        }
    }
}

TEST_CASE("array_rows: a big-endian number keeps its value") {
    const temporary_folder folder;
    const std::array<std::uint8_t, 8> one_and_minus_two{0x3F, 0x80, 0, 0, 0xC0, 0, 0, 0};
    write_bytes(folder / "data", std::as_bytes(std::span(one_and_minus_two)));
    const array source =
        array::of_file(std::make_shared<const input_file>(folder / "data"), 0, dtype::parse(">f4"), {2});
    std::array<float, 2> values{};
    source.rows()->read_rows(row_ids{1, 0}, std::as_writable_bytes(std::span(values)));
    CHECK(values[0] == -2.0F);
    CHECK(values[1] == 1.0F);
}

TEST_CASE("array_rows: rows without bytes can be read, and cost no call") {
    const temporary_folder folder;
    const rows_pointer of_file = array_of_file(folder, ">f4", {5, 0}).rows();
    const rows_pointer of_memory = array_of_memory("<f4", {5, 0, 3}).rows();
    int calls = 0;
    const seam::scoped_failure_hook hook([&](seam::call, std::string_view) {
        ++calls;
        return seam::injected_failure{};
    });
    for (const rows_pointer& rows : {of_file, of_memory}) {
        CHECK(rows->row_count() == 5);
        CHECK(rows->row_size_bytes() == 0);
        CHECK(read(rows, {0, 1, 2, 4, 4}).empty());
        CHECK_THROWS_AS(read(rows, {5}), pinflow::invalid_argument);
    }
    CHECK(calls == 0);
}

TEST_CASE("array_rows: an array without rows is a source, too") {
    const temporary_folder folder;
    const rows_pointer rows = array_of_file(folder, "<f4", {0, 6}).rows();
    CHECK(rows->row_count() == 0);
    CHECK(rows->row_size_bytes() == 24);
    CHECK(read(rows, {}).empty());
    CHECK_THROWS_AS(read(rows, {0}), pinflow::invalid_argument);
}

TEST_CASE("array_rows: an array without axes has no rows") {
    const temporary_folder folder;
    const array source = array_of_file(folder, "<f8", {});
    CHECK(contains_all(message_of<pinflow::unsupported>([&] { source.rows(); }),
                       {"'" + (folder / "data").string() + "'", "has no axes, so it has no rows"}));
    CHECK(message_of<pinflow::unsupported>([&] {
              array_of_memory("<f8", {}).rows();
          }).starts_with("an array in memory has no axes"));
}

TEST_CASE("array_rows: Fortran order is refused if rows are not contiguous, and taken if they are") {
    const temporary_folder folder;
    CHECK(contains_all(
        message_of<pinflow::unsupported>([&] { array_of_file(folder, "<f4", {4, 5}, true).rows(); }),
        {"'" + (folder / "data").string() + "'", "shape (4, 5)", "in Fortran order", "store it in C order"}));
    for (const shape_vector& shape :
         {shape_vector{20}, shape_vector{20, 1}, shape_vector{1, 20}, shape_vector{0, 3}}) {
        CAPTURE(pinflow::to_string(shape));
        const rows_pointer rows = array_of_file(folder, "<f4", shape, true).rows();
        row_ids all(static_cast<std::size_t>(rows->row_count()));
        std::iota(all.begin(), all.end(), std::uint64_t{0});
        CHECK((read(rows, all) == expected(rows, all)));
    }
}

TEST_CASE("array_rows: keep their source alive") {
    const temporary_folder folder;
    const rows_pointer of_file = array_of_file(folder, "<i4", {10, 2}).rows();
    const rows_pointer of_memory = array_of_memory("<i4", {10, 2}).rows();
    std::filesystem::remove(folder / "data");
    for (const rows_pointer& rows : {of_file, of_memory}) {
        const row_ids ids{9, 0, 5};
        CHECK((read(rows, ids) == expected(rows, ids)));
        CHECK_NOTHROW(rows->check_unchanged());
    }
}

TEST_CASE("array_rows: a truncated file is an error and not a signal") {
    const temporary_folder folder;
    const rows_pointer rows = array_of_file(folder, "<i4", {10'000, 2}, false, 0).rows();
    std::filesystem::resize_file(folder / "data", 40'000);
    const row_ids lost{9'999};
    CHECK(contains(message_of<pinflow::data_changed>([&] { read(rows, lost); }),
                   "the file has 40000 bytes now, it had 80000 when it was opened"));
    CHECK_THROWS_AS(read(rows, {4'998, 4'999, 5'000}), pinflow::data_changed);
    CHECK_THROWS_AS(rows->check_unchanged(), pinflow::data_changed);
    const row_ids kept{0, 4'999};
    CHECK((read(rows, kept) == expected(rows, kept)));
}

TEST_CASE("array_rows: a disk that fails is a system failure") {
    const temporary_folder folder;
    const rows_pointer rows = array_of_file(folder, "<i4", {10, 2}).rows();
    const seam::scoped_failure_hook hook(
        [](seam::call, std::string_view) { return seam::injected_failure{.error = EIO}; });
    CHECK_THROWS_AS(read(rows, {3}), pinflow::system_failure);
}

TEST_CASE("array_rows: a read that had to wait reports it") {
    const temporary_folder folder;
    const rows_pointer rows = array_of_file(folder, "<i4", {10, 2}).rows();
    const seam::scoped_failure_hook hook([](seam::call, std::string_view) {
        std::mutex mutex;  // a disk that takes its time, in which the thread does not compute
        std::unique_lock lock(mutex);
        std::condition_variable nothing;
        nothing.wait_for(lock, std::chrono::milliseconds(2), [] { return false; });
        return seam::injected_failure{};
    });
    std::vector<std::byte> destination(24);
    CHECK(rows->read_rows(row_ids{1, 5, 3}, destination) > std::chrono::milliseconds(1));
    const rows_pointer in_memory = array_of_memory("<i4", {10, 2}).rows();
    CHECK(in_memory->read_rows(row_ids{1, 5, 3}, destination) == std::chrono::nanoseconds::zero());
}

TEST_CASE("array_rows: several threads read at the same time") {
    const temporary_folder folder;
    const rows_pointer rows = array_of_file(folder, ">i4", {500, 4}).rows();
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    threads.reserve(4);
    for (std::uint32_t seed = 0; seed < 4; ++seed) {
        threads.emplace_back([&, seed] {
            for (std::uint32_t round = 0; round < 50; ++round) {
                const row_ids ids = random_ids(500, 40, seed * 100 + round);
                if (read(rows, ids) != expected(rows, ids, 4)) ++wrong;
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(wrong == 0);
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

TEST_CASE("array_rows: structured elements and fields of them are delivered little-endian and contiguous") {
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

TEST_CASE("array_rows: records that follow each other are read at once, up to a bound") {
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

TEST_CASE("array_rows: windows of a field are delivered without the gaps") {
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

TEST_CASE("array_rows: windows that overlap are read at once") {
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

TEST_CASE("array_rows: rows of a file are backed by the file, whatever their layout") {
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

TEST_CASE("array_rows: gives the reason if rows cannot be taken in place") {
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

TEST_CASE("array_rows: a file truncated under a field is an error and not a signal") {
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

TEST_CASE("array_rows: a field keeps its source alive") {
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

TEST_CASE("array_rows: fields in Fortran order are refused if rows are not contiguous") {
    const temporary_folder folder;
    random_engine random(5);
    const auto [source, expected] = make_array(random, folder / "data", record_type(), {4, 5}, true);
    CHECK(contains(message_of<pinflow::unsupported>([&] { source.field("b").rows(); }),
                   "has shape (4, 5, 2) in Fortran order"));
    const auto [vector, expected_vector] = make_array(random, folder / "data", record_type(), {20}, true);
    const row_ids ids{19, 3, 4};
    CHECK((read(vector.field("b").rows(), ids) == rows_of(expected_vector.field("b"), ids)));
}
