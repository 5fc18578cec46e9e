#include "pinflow/array.hpp"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <complex>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/memory.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/system.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::array;
using pinflow::array_view;
using pinflow::dtype;
using pinflow::input_file;
using pinflow::invalid_argument;
using pinflow::memory_region;
using pinflow::shape_vector;
namespace seam = pinflow::detail::system;

namespace {

using strides = std::vector<std::int64_t>;

constexpr std::uint64_t power_of_two(int exponent) {
    return std::uint64_t{1} << exponent;
}

/// A view that is never read: only its shape and strides matter.
array_view shaped(shape_vector shape, strides strides_bytes) {
    return {nullptr, dtype::of<float>(), std::move(shape), std::move(strides_bytes)};
}

std::shared_ptr<const input_file> make_file(const temporary_folder& folder, std::size_t size_bytes) {
    write_bytes(folder / "data", pattern_bytes(size_bytes));
    return std::make_shared<const input_file>(folder / "data");
}

/// Runs `function` in a child process and returns its exit status, or -1 when it did not exit.
template <typename Function>
int status_of_child(Function function) {
    const ::pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) ::_exit(function());
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

// ---- shapes and strides -----------------------------------------------------------------------------------

TEST_CASE("array: shapes are spelled as numpy spells them") {
    CHECK(pinflow::to_string(shape_vector{}) == "()");
    CHECK(pinflow::to_string(shape_vector{3}) == "(3,)");
    CHECK(pinflow::to_string(shape_vector{3, 4}) == "(3, 4)");
    CHECK(pinflow::to_string(shape_vector{0, 1, 18'446'744'073'709'551'615u}) ==
          "(0, 1, 18446744073709551615)");
}

TEST_CASE("array: the elements of a shape are the product of its lengths") {
    CHECK(pinflow::element_count(shape_vector{}) == 1);
    CHECK(pinflow::element_count(shape_vector{7}) == 7);
    CHECK(pinflow::element_count(shape_vector{2, 3, 4}) == 24);
    CHECK(pinflow::element_count(shape_vector{2, 0, 4}) == 0);
    CHECK(pinflow::element_count(shape_vector{power_of_two(32), power_of_two(31)}) == power_of_two(63));
}

TEST_CASE(
    "array: too many elements are refused, in each order of the axes, also beside an axis of length 0") {
    CHECK(contains_all(message_of<invalid_argument>(
                           [] { pinflow::element_count(shape_vector{power_of_two(32), power_of_two(32)}); }),
                       {"(4294967296, 4294967296)", "is too large", "2^64 or more"}));
    CHECK_THROWS_AS(pinflow::element_count(shape_vector{power_of_two(40), power_of_two(40), 0}),
                    invalid_argument);
    CHECK_THROWS_AS(pinflow::element_count(shape_vector{power_of_two(40), 0, power_of_two(40)}),
                    invalid_argument);
    CHECK_THROWS_AS(pinflow::element_count(shape_vector{0, power_of_two(40), power_of_two(40)}),
                    invalid_argument);
}

TEST_CASE("array: strides of C order and of Fortran order") {
    CHECK(pinflow::c_strides_bytes(shape_vector{}, 8) == strides{});
    CHECK(pinflow::c_strides_bytes(shape_vector{5}, 8) == strides{8});
    CHECK(pinflow::c_strides_bytes(shape_vector{2, 3, 4}, 8) == strides{96, 32, 8});
    CHECK(pinflow::fortran_strides_bytes(shape_vector{2, 3, 4}, 8) == strides{8, 16, 48});
    CHECK(pinflow::fortran_strides_bytes(shape_vector{5}, 8) == strides{8});
    CHECK(pinflow::c_strides_bytes(shape_vector{2, 0, 4}, 2) == strides{8, 8, 2});
    CHECK(pinflow::fortran_strides_bytes(shape_vector{2, 0, 4}, 2) == strides{2, 4, 4});
}

TEST_CASE("array: strides of a shape with 2^63 bytes or more are refused, with the shape") {
    CHECK_NOTHROW(pinflow::c_strides_bytes(shape_vector{power_of_two(31), power_of_two(31)}, 1));
    for (const std::uint64_t item_size : {2u, 4u, 8u}) {
        CHECK(contains_all(message_of<invalid_argument>([&] {
                               pinflow::c_strides_bytes(shape_vector{power_of_two(31), power_of_two(31)},
                                                        item_size);
                           }),
                           {"shape (2147483648, 2147483648)",
                            "elements of " + std::to_string(item_size) + " bytes", "too large"}));
    }
    CHECK_THROWS_AS(pinflow::fortran_strides_bytes(shape_vector{0, power_of_two(62), 2}, 1),
                    invalid_argument);
    CHECK_THROWS_AS(pinflow::c_strides_bytes(shape_vector{power_of_two(63)}, 1), invalid_argument);
}

// ---- views ------------------------------------------------------------------------------------------------

TEST_CASE("array_view: knows its type, shape, strides and sizes") {
    const std::array<float, 6> elements{};
    const array_view view(reinterpret_cast<const std::byte*>(elements.data()), dtype::of<float>(), {2, 3});
    CHECK(static_cast<const void*>(view.data()) == elements.data());
    CHECK(view.dtype() == dtype::of<float>());
    CHECK(view.shape() == shape_vector{2, 3});
    CHECK(view.strides_bytes() == strides{12, 4});
    CHECK(view.size() == 6);
    CHECK(view.size_bytes() == 24);
}

TEST_CASE("array_view: tells C order from Fortran order and from neither") {
    struct expectation {
        shape_vector shape;
        strides strides_bytes;
        bool c;
        bool fortran;
    };
    for (const auto& [shape, strides_bytes, c, fortran] : std::vector<expectation>{
             {{}, {}, true, true},
             {{5}, {4}, true, true},
             {{5}, {8}, false, false},
             {{5}, {-4}, false, false},
             {{5}, {0}, false, false},
             {{2, 3}, {12, 4}, true, false},
             {{2, 3}, {4, 8}, false, true},
             {{2, 3}, {16, 4}, false, false},  // rows with gaps
             {{2, 3, 4}, {48, 16, 4}, true, false},
             {{2, 3, 4}, {4, 8, 24}, false, true},
             {{2, 3, 4}, {48, 4, 12}, false, false},  // inner axes swapped
             // the stride of an axis of length 1 is never used
             {{1}, {1'000}, true, true},
             {{1, 5}, {7, 4}, true, true},
             {{5, 1}, {4, -9}, true, true},
             {{2, 1, 3}, {12, 999, 4}, true, false},
             {{2, 1, 3}, {4, 999, 8}, false, true},
             {{1, 1, 1}, {1, 2, 3}, true, true},
             // in an array without elements, no stride is used
             {{0}, {1'000}, true, true},
             {{3, 0}, {1, 1}, true, true},
             {{0, 3}, {-5, 100}, true, true},
         }) {
        CAPTURE(pinflow::to_string(shape));
        const array_view view = shaped(shape, strides_bytes);
        CHECK(view.c_contiguous() == c);
        CHECK(view.fortran_contiguous() == fortran);
    }
}

TEST_CASE("array_view: refuses a number of strides that differs from the number of axes") {
    CHECK(contains_all(message_of<invalid_argument>([] { shaped({2, 3}, {4}); }),
                       {"shape (2, 3)", "needs 2 strides", "not 1"}));
    CHECK_THROWS_AS(shaped({}, {4}), invalid_argument);
    CHECK_THROWS_AS(shaped({2}, {4, 4}), invalid_argument);
}

TEST_CASE("array_view: refuses a shape whose bytes cannot be counted, whatever its strides") {
    CHECK_THROWS_AS(array_view(nullptr, dtype::of<double>(), {power_of_two(61)}), invalid_argument);
    CHECK_THROWS_AS(shaped({power_of_two(62)}, {0}), invalid_argument);
    CHECK_THROWS_AS(shaped({power_of_two(32), power_of_two(31)}, {0, 0}), invalid_argument);
    CHECK_THROWS_AS(shaped({0, power_of_two(40), power_of_two(40)}, {0, 0, 0}), invalid_argument);
    const array_view broadcast = shaped({power_of_two(30), power_of_two(30)}, {0, 0});
    CHECK(broadcast.size_bytes() == power_of_two(62));
    CHECK_FALSE(broadcast.c_contiguous());
}

TEST_CASE("array_view: gives typed access to elements in C order") {
    const std::array<std::int16_t, 4> numbers{1, -2, 3, 4};
    const array_view view(reinterpret_cast<const std::byte*>(numbers.data()), dtype::of<std::int16_t>(),
                          {2, 2});
    CHECK(view.as<std::int16_t>() == numbers.data());
    CHECK(view.as<std::int16_t>()[1] == -2);
    const array_view nothing(nullptr, dtype::of<double>(), {0});
    CHECK(nothing.as<double>() == nullptr);
    const std::array<std::complex<float>, 1> complex{};
    CHECK(array_view(reinterpret_cast<const std::byte*>(complex.data()), dtype::parse("<c8"), {1})
              .as<std::complex<float>>() == complex.data());
}

TEST_CASE("array_view: refuses typed access that would misread, and says why") {
    alignas(8) const std::array<std::byte, 64> bytes{};
    const auto refusal = [&](const std::string& descr, std::size_t offset, strides strides_bytes) {
        const array_view view(bytes.data() + offset, dtype::parse(descr), {2, 2}, std::move(strides_bytes));
        return message_of<invalid_argument>([&] { static_cast<void>(view.as<float>()); });
    };
    CHECK(refusal("<f4", 0, {8, 4}).empty());
    CHECK(contains_all(refusal("<i4", 0, {8, 4}),
                       {"array of <i4", "shape (2, 2)", "as <f4", "types differ", "std::int32_t"}));
    CHECK(
        contains_all(refusal("<f8", 0, {16, 8}), {"array of <f8", "shape (2, 2)", "as <f4", "types differ"}));
    CHECK(contains_all(refusal(">f4", 0, {8, 4}), {"array of >f4", "shape (2, 2)", "as <f4", "byte order"}));
    CHECK(contains_all(refusal("<f4", 0, {4, 8}),
                       {"array of <f4", "shape (2, 2)", "as <f4", "not in C order"}));
    CHECK(contains_all(refusal("<f4", 1, {8, 4}),
                       {"array of <f4", "shape (2, 2)", "as <f4", "address", "multiple of 4"}));
}

// ---- arrays in memory -------------------------------------------------------------------------------------

TEST_CASE("array: takes memory over and keeps it as long as a copy lives") {
    int releases = 0;
    std::array<std::uint16_t, 6> elements{1, 2, 3, 4, 5, 6};
    {
        memory_region region(
            reinterpret_cast<std::byte*>(elements.data()), sizeof elements,
            [](std::byte*, std::uint64_t, void* context) noexcept { ++*static_cast<int*>(context); },
            &releases);
        auto first =
            std::make_unique<const array>(std::move(region), dtype::of<std::uint16_t>(), shape_vector{2, 3});
        const array second = *first;
        first.reset();
        CHECK(releases == 0);
        CHECK(second.has_view());
        CHECK(contains(second.reason(), "in host memory"));
        CHECK(second.file() == nullptr);
        CHECK(second.offset_bytes() == 0);
        CHECK(second.dtype() == dtype::of<std::uint16_t>());
        CHECK(second.shape() == shape_vector{2, 3});
        CHECK(second.size_bytes() == 12);
        CHECK(second.view().as<std::uint16_t>()[5] == 6);
    }
    CHECK(releases == 1);
}

TEST_CASE("array: memory may be larger than the array, but not smaller") {
    const array enough(memory_region::anonymous(100), dtype::of<double>(), {3, 4});
    CHECK(enough.size_bytes() == 96);
    CHECK(contains_all(message_of<invalid_argument>(
                           [] { array(memory_region::anonymous(95), dtype::of<double>(), {3, 4}); }),
                       {"<f8", "shape (3, 4)", "needs 96 bytes", "has 95"}));
    CHECK_THROWS_AS(array(memory_region::anonymous(8), dtype::of<double>(), {power_of_two(61)}),
                    invalid_argument);
    CHECK(array(memory_region(), dtype::of<double>(), {3, 0}).size_bytes() == 0);
}

// ---- arrays of a file -------------------------------------------------------------------------------------

TEST_CASE("array: a file's elements are viewed in place, from any offset") {
    const temporary_folder folder;
    const auto content = pattern_bytes(5'000);
    const auto file = make_file(folder, 5'000);
    const array source = array::of_file(file, 4'100, dtype::of<std::uint8_t>(), {30, 30});
    CHECK(source.has_view());
    CHECK(contains(source.reason(), "mapped in place"));
    CHECK_FALSE(contains(source.reason(), "no multiple of"));
    CHECK(source.file() == file);
    CHECK(source.offset_bytes() == 4'100);
    CHECK(source.size_bytes() == 900);
    CHECK(source.view().strides_bytes() == strides{30, 1});
    CHECK(std::memcmp(source.view().data(), content.data() + 4'100, 900) == 0);
}

TEST_CASE("array: outlives the file's name and the caller's handle on the file") {
    const temporary_folder folder;
    const array source = array::of_file(make_file(folder, 1'000), 0, dtype::of<std::uint8_t>(), {1'000});
    std::filesystem::remove(folder / "data");
    CHECK(std::memcmp(source.view().data(), pattern_bytes(1'000).data(), 1'000) == 0);
}

TEST_CASE("array: a file in Fortran order is viewed with its strides") {
    const temporary_folder folder;
    const array source = array::of_file(make_file(folder, 24), 0, dtype::of<float>(), {2, 3}, true);
    CHECK(source.view().strides_bytes() == strides{4, 8});
    CHECK(source.view().fortran_contiguous());
    CHECK_FALSE(source.view().c_contiguous());
}

TEST_CASE("array: may end at the last byte of its file, and not beyond it") {
    const temporary_folder folder;
    const auto file = make_file(folder, 100);
    CHECK_NOTHROW(array::of_file(file, 20, dtype::of<double>(), {10}));
    CHECK(contains_all(
        message_of<pinflow::format_error>([&] { array::of_file(file, 21, dtype::of<double>(), {10}); }),
        {"<f8", "shape (10,)", "at offset 21", "does not fit", "'" + file->path() + "'", "has 100 bytes"}));
    CHECK_THROWS_AS(array::of_file(file, 20, dtype::of<double>(), {11}), pinflow::format_error);
    CHECK_THROWS_AS(array::of_file(file, 101, dtype::of<double>(), {0}), pinflow::format_error);
    CHECK_THROWS_AS(array::of_file(file, ~std::uint64_t{0}, dtype::of<double>(), {1}), pinflow::format_error);
}

TEST_CASE("array: a shape that overflows does not fit into a file either") {
    const temporary_folder folder;
    const auto file = make_file(folder, 100);
    for (const shape_vector& shape : {shape_vector{power_of_two(61)}, shape_vector{power_of_two(63)},
                                      shape_vector{power_of_two(40), power_of_two(40)},
                                      shape_vector{0, power_of_two(40), power_of_two(40)},
                                      shape_vector{power_of_two(40), power_of_two(40), 0}}) {
        CAPTURE(pinflow::to_string(shape));
        CHECK_THROWS_AS(array::of_file(file, 0, dtype::of<double>(), shape), pinflow::format_error);
        CHECK_THROWS_AS(array::of_file(file, 0, dtype::of<double>(), shape, true), pinflow::format_error);
    }
}

TEST_CASE("array: an array in a file can be viewed, even without elements or without axes") {
    const temporary_folder folder;
    const auto file = make_file(folder, 16);
    const array empty = array::of_file(file, 16, dtype::of<double>(), {0, 3});
    CHECK(empty.has_view());
    CHECK(contains(empty.reason(), "no bytes to map"));
    CHECK(empty.view().data() == nullptr);
    CHECK(empty.view().size() == 0);
    const array scalar = array::of_file(file, 8, dtype::of<double>(), {});
    CHECK(scalar.view().size() == 1);
    CHECK(scalar.view().size_bytes() == 8);
}

TEST_CASE("array: if mapping is refused, the array gives the reason, and its rows can be read") {
    const temporary_folder folder;
    const auto content = pattern_bytes(1'000);
    const auto file = make_file(folder, 1'000);
    const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
        return what == seam::call::mmap ? seam::injected_failure{.error = ENOMEM} : seam::injected_failure{};
    });
    const array source = array::of_file(file, 10, dtype::of<std::uint8_t>(), {9, 100});
    CHECK_FALSE(source.has_view());
    const std::string& reason = source.reason();
    CHECK(contains(reason,
                   "cannot map 900 bytes at offset 10 of '" + file->path() + "': Cannot allocate memory"));
    CHECK(contains_all(message_of<pinflow::unsupported>([&] { static_cast<void>(source.view()); }),
                       {"array in '" + file->path() + "'", "cannot be viewed", reason}));
    CHECK(source.size_bytes() == 900);

    const auto rows = source.rows();
    REQUIRE(rows->extents().size() == 1);
    CHECK(rows->extents()[0].data == nullptr);
    std::vector<std::byte> row(100);
    rows->read_rows(std::array<std::uint64_t, 1>{4}, row);
    CHECK(std::memcmp(row.data(), content.data() + 410, 100) == 0);
}

TEST_CASE("array: a file too large for the address space can be read by rows") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(4'096));
    constexpr std::uint64_t row_count = power_of_two(28);  // of 4096 bytes: a sparse TiB
    std::filesystem::resize_file(folder / "data", row_count * 4'096);
    const int status = status_of_child([&] {
        std::uint64_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        // room for work, but not for the file
        const ::rlim_t limit = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + power_of_two(28);
        const ::rlimit limits{limit, limit};
        if (::setrlimit(RLIMIT_AS, &limits) != 0) return 1;
        const auto file = std::make_shared<const input_file>(folder / "data");
        const array source = array::of_file(file, 0, dtype::of<std::uint8_t>(), {row_count, 4'096});
        if (source.has_view()) return 2;
        if (!contains(source.reason(), "`ulimit -v` leaves")) return 3;
        std::vector<std::byte> rows(8'192);
        source.rows()->read_rows(std::array<std::uint64_t, 2>{row_count - 1, 0}, rows);
        if (std::memcmp(rows.data(), std::vector<std::byte>(4'096).data(), 4'096) != 0) return 4;
        if (std::memcmp(rows.data() + 4'096, pattern_bytes(4'096).data(), 4'096) != 0) return 5;
        // threads and memory keep 128 MiB
        const auto is_mapped = [&](std::uint64_t mebibytes) {
            return array::of_file(file, 0, dtype::of<std::uint8_t>(), {mebibytes << 20}).has_view();
        };
        if (is_mapped(180) || !is_mapped(100)) return 6;
        return 0;
    });
    CHECK(status == 0);
}

// ---- other views of the same bytes ------------------------------------------------------------------------

namespace {

/// 24 bytes: a `>i2` at 1, a contiguous array of two records at 4, an `<f4` at 18.
dtype record_type() {
    const dtype point = dtype::structured(
        {{"x", "", dtype::parse("<i2"), {}, 0}, {"y.z", "", dtype::parse(">i4"), {}, 2}}, 6);
    return dtype::structured({{"id", "", dtype::parse(">i2"), {}, 1},
                              {"points", "", point, {2}, 4},
                              {"weight", "", dtype::parse("<f4"), {}, 18}},
                             24);
}

}  // namespace

TEST_CASE("array: view_as reinterprets elements as another type of the same size, and refuses other sizes") {
    const temporary_folder folder;
    const array source = array::of_file(make_file(folder, 100), 4, dtype::parse("|V2"), {3, 4}, true);
    const array half = source.view_as(dtype::parse("bfloat16"));
    CHECK(half.dtype() == dtype::parse("bfloat16"));
    CHECK(half.shape() == source.shape());
    CHECK(half.strides_bytes() == source.strides_bytes());
    CHECK(half.view().data() == source.view().data());
    CHECK(half.file() == source.file());
    CHECK(half.offset_bytes() == 4);
    CHECK(half.reason() == source.reason());
    CHECK(contains_all(
        array::of_file(source.file(), 5, dtype::parse("|V2"), {3}).view_as(half.dtype()).reason(),
        {"mapped in place", "no multiple of 2"}));
    CHECK(contains_all(message_of<invalid_argument>([&] { source.view_as(dtype::parse("<f4")); }),
                       {"array of |V2 as <f4", "elements have 2 bytes, not 4"}));
}

TEST_CASE("array: memory lives as long as any view of it under another type") {
    int releases = 0;
    std::array<std::int64_t, 3> elements{1, 2, 3};
    {
        memory_region region(
            reinterpret_cast<std::byte*>(elements.data()), sizeof elements,
            [](std::byte*, std::uint64_t, void* context) noexcept { ++*static_cast<int*>(context); },
            &releases);
        const array times =
            array(std::move(region), dtype::of<std::int64_t>(), {3}).view_as(dtype::parse("<M8[ns]"));
        CHECK(releases == 0);
        CHECK(times.view_as(dtype::of<std::int64_t>()).view().as<std::int64_t>()[2] == 3);
    }
    CHECK(releases == 1);
}

TEST_CASE("array: a field is a strided view of the same bytes, its own axes last") {
    const temporary_folder folder;
    const array source = array::of_file(make_file(folder, 1'000), 40, record_type(), {5, 3});
    CHECK(contains(source.reason(), "mapped in place"));
    CHECK_FALSE(contains(source.reason(), "a field of"));
    struct expectation {
        std::string name;
        std::string descr;
        shape_vector shape;
        strides strides_bytes;
        std::uint64_t offset_bytes;
    };
    for (const auto& [name, descr, shape, strides_bytes, offset_bytes] : std::vector<expectation>{
             {"id", ">i2", {5, 3}, {72, 24}, 1},
             {"weight", "<f4", {5, 3}, {72, 24}, 18},
             {"points", "[('x', '<i2'), ('y.z', '>i4')]", {5, 3, 2}, {72, 24, 6}, 4},
             {"points.x", "<i2", {5, 3, 2}, {72, 24, 6}, 4},
             {"points.y.z", ">i4", {5, 3, 2}, {72, 24, 6}, 6},
         }) {
        CAPTURE(name);
        const array field = source.field(name);
        CHECK(field.dtype().descr() == descr);
        CHECK(field.shape() == shape);
        CHECK(field.strides_bytes() == strides_bytes);
        CHECK(field.offset_bytes() == 40 + offset_bytes);
        CHECK(field.view().data() == source.view().data() + offset_bytes);
        CHECK(field.file() == source.file());
        CHECK(contains_all(field.reason(), {"mapped in place", "a field of", "one every 24 bytes"}));
    }
    // step by step it is the same
    const array nested = source.field("points").field("y.z");
    CHECK(nested.strides_bytes() == strides{72, 24, 6});
    CHECK(nested.offset_bytes() == 46);
    CHECK(nested.reason() == source.field("points.y.z").reason());
}

TEST_CASE("array: a field of an array in Fortran order keeps its strides") {
    const temporary_folder folder;
    const array source = array::of_file(make_file(folder, 1'000), 0, record_type(), {5, 3}, true);
    CHECK(source.field("points.x").strides_bytes() == strides{24, 120, 6});
}

TEST_CASE(
    "array: a field is found in arrays that are unmapped, in memory, without axes or without elements") {
    const temporary_folder folder;
    const auto file = make_file(folder, 24);
    {
        const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
            return what == seam::call::mmap ? seam::injected_failure{.error = ENOMEM}
                                            : seam::injected_failure{};
        });
        const array field = array::of_file(file, 0, record_type(), {1}).field("weight");
        CHECK_FALSE(field.has_view());
        CHECK(contains(field.reason(), "cannot map 24 bytes"));
        CHECK(field.offset_bytes() == 18);
        CHECK_THROWS_AS(static_cast<void>(field.view()), pinflow::unsupported);
        std::vector<std::byte> row(4);
        field.rows()->read_rows(std::array<std::uint64_t, 1>{0}, row);
        CHECK(std::memcmp(row.data(), pattern_bytes(24).data() + 18, 4) == 0);
    }
    const array in_memory(memory_region::anonymous(240), record_type(), {10});
    CHECK(in_memory.field("weight").view().data() == in_memory.view().data() + 18);
    CHECK(in_memory.field("weight").offset_bytes() == 0);
    CHECK(contains_all(in_memory.field("weight").reason(),
                       {"in host memory", "a field of", "one every 24 bytes"}));

    const array scalar = array::of_file(file, 0, record_type(), {}).field("points.x");
    CHECK(scalar.shape() == shape_vector{2});
    CHECK(scalar.strides_bytes() == strides{6});

    const array empty = array::of_file(file, 24, record_type(), {0, 2}).field("weight");
    CHECK(empty.view().data() == nullptr);
    CHECK(empty.offset_bytes() == 24);
    CHECK(contains(empty.reason(), "no bytes to map"));
    CHECK(empty.rows()->row_count() == 0);
}

TEST_CASE(
    "array: the only field of a structured array is contiguous, and its reason does not call it a field") {
    const array source(memory_region::anonymous(40),
                       dtype::structured({{"only", "", dtype::parse("<f4"), {}, 0}}, 4), {10});
    CHECK(source.field("only").view().c_contiguous());
    CHECK(contains(source.field("only").reason(), "in host memory"));
    CHECK_FALSE(contains(source.field("only").reason(), "a field of"));
}

TEST_CASE("array: an unknown field is refused, and the error names the existing fields") {
    const array source(memory_region::anonymous(24), record_type(), {1});
    const auto refusal = [&](const std::string& name) {
        return message_of<invalid_argument>([&] { source.field(name); });
    };
    const std::string outer = "among 'id', 'points', 'weight'";
    for (const std::string name : {"nothing", "", ".", ".id", "id2"}) {
        CAPTURE(name);
        CHECK(contains_all(refusal(name), {"no field '" + name + "'", outer}));
    }
    CHECK(contains_all(refusal("points.y"), {"no field 'points.y'", "among 'x', 'y.z'"}));
    CHECK(contains_all(refusal("points."), {"no field 'points.'", "among 'x', 'y.z'"}));
    CHECK(contains_all(refusal("id.x"), {"no field 'id.x'", "elements of >i2", "have no fields"}));
    CHECK(contains_all(message_of<invalid_argument>([&] { source.field("weight").field("x"); }),
                       {"no field 'x'", "elements of <f4", "have no fields"}));

    std::vector<pinflow::dtype_field> many;
    for (std::uint64_t index = 0; index < 1'000; ++index)
        many.push_back({"f" + std::to_string(index), "", dtype::parse("|u1"), {}, index});
    const array wide(memory_region::anonymous(1'000), dtype::structured(many, 1'000), {1});
    CHECK(contains(message_of<invalid_argument>([&] { wide.field("f"); }), "'f19' and 980 more"));
}
