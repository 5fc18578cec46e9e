#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <thread>
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
using pinflow::dtype;
using pinflow::input_file;
using pinflow::shape_vector;
namespace seam = pinflow::detail::system;

namespace {

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
