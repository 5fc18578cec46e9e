#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/npy.hpp"
#include "src/core/system.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
namespace sys = pinflow::detail::system;
using npy_bytes::counted;
using npy_bytes::payload;
using npy_bytes::read_file;
using npy_bytes::write_file;
using pinflow::array_view;
using pinflow::dtype;
using pinflow::open_npy;
using pinflow::shape_vector;

const std::byte* bytes_of(const std::vector<std::int32_t>& values) {
    return reinterpret_cast<const std::byte*>(values.data());
}

std::span<const std::byte> as_bytes(const std::vector<std::int32_t>& values) {
    return std::as_bytes(std::span(values));
}

std::size_t files_in(const fs::path& folder) {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

}  // namespace

// ---- writing views ----------------------------------------------------------------------------------------

TEST_CASE("npy: writes C-order and Fortran-order views as they are") {
    const temporary_folder folder;
    const auto values = counted(24);
    for (const bool fortran_order : {false, true}) {
        const shape_vector shape = {2, 3, 4};
        const auto strides =
            fortran_order ? pinflow::fortran_strides_bytes(shape, 4) : pinflow::c_strides_bytes(shape, 4);
        pinflow::write_npy(folder / "a.npy", {bytes_of(values), dtype::of<std::int32_t>(), shape, strides});
        const pinflow::array opened = open_npy(folder / "a.npy");
        CHECK(opened.shape() == shape);
        CHECK(opened.view().strides_bytes() == strides);
        CHECK(opened.offset_bytes() % 64 == 0);
        CHECK(payload(opened) == values);
    }
    CHECK(files_in(folder.path()) == 1);
}

TEST_CASE("npy: writes views without either order in C order") {
    const temporary_folder folder;
    const auto values = counted(1000);
    struct {
        const char* what;
        std::size_t first;
        shape_vector shape;
        std::vector<std::int64_t> strides;  // in elements
    } const cases[] = {
        {"a step of two", 0, {500}, {2}},
        {"reversed", 999, {1000}, {-1}},
        {"columns of a matrix", 3, {10, 5}, {100, 1}},
        {"a row repeated", 5, {4, 10}, {0, 1}},
        {"one element repeated", 5, {4, 10}, {0, 0}},
        {"axes in the order 1, 0, 2", 0, {10, 10, 10}, {10, 100, 1}},
        {"axes in the order 0, 2, 1", 0, {10, 10, 10}, {100, 1, 10}},
        {"every axis stepped", 7, {3, 4, 2}, {-2, 200, 50}},
        {"an axis of one", 0, {5, 1, 3}, {200, 7777, 2}},
    };
    for (const auto& c : cases) {
        CAPTURE(c.what);
        const std::size_t axes = c.shape.size();
        std::vector<std::int64_t> strides_bytes;
        strides_bytes.reserve(axes);
        for (const std::int64_t stride : c.strides)
            strides_bytes.push_back(stride * 4);

        std::vector<std::int32_t> expected;
        for (std::uint64_t element = 0; element < pinflow::element_count(c.shape); ++element) {
            std::uint64_t rest = element;
            auto position = static_cast<std::int64_t>(c.first);
            for (std::size_t axis = axes; axis-- > 0; rest /= c.shape[axis]) {
                position += static_cast<std::int64_t>(rest % c.shape[axis]) * c.strides[axis];
            }
            expected.push_back(values[static_cast<std::size_t>(position)]);
        }

        pinflow::write_npy(folder / "a.npy", {bytes_of(values) + 4 * c.first, dtype::of<std::int32_t>(),
                                              c.shape, strides_bytes});
        const pinflow::array opened = open_npy(folder / "a.npy");
        CHECK(opened.shape() == c.shape);
        CHECK(opened.view().c_contiguous());
        CHECK(payload(opened) == expected);
    }
}

TEST_CASE("npy: writes a strided view larger than the buffer that collects its elements") {
    const temporary_folder folder;
    const auto values = counted(1 << 20);
    pinflow::write_npy(folder / "a.npy",
                       {bytes_of(values), dtype::of<std::int32_t>(), {1 << 10, 1 << 10}, {4, 4096}});
    // columns of a matrix are that matrix transposed: Fortran order, written as it lies
    CHECK(open_npy(folder / "a.npy").view().fortran_contiguous());
    pinflow::write_npy(folder / "a.npy",
                       {bytes_of(values), dtype::of<std::int32_t>(), {1000, 1 << 10}, {4, 4096}});
    const auto written = payload(open_npy(folder / "a.npy"));
    REQUIRE(written.size() == 1000 << 10);
    bool equal = true;
    for (std::size_t index = 0; index < written.size(); ++index) {
        equal = equal && static_cast<std::size_t>(written[index]) == index % 1024 * 1024 + index / 1024;
    }
    CHECK(equal);
}

TEST_CASE("npy: a path with a zero byte names no file") {
    const temporary_folder folder;
    const float value = 1;
    const array_view view(reinterpret_cast<const std::byte*>(&value), dtype::of<float>(), {1});
    const auto path = folder / "a.npy";
    pinflow::write_npy(path, view);
    const std::filesystem::path longer = path.string() + std::string("\0.old", 5);
    CHECK(contains_all(message_of<pinflow::invalid_argument>([&] { open_npy(longer); }),
                       {"a.npy", "zero byte"}));
    std::filesystem::remove(path);
    CHECK_THROWS_AS(pinflow::write_npy(longer, view), pinflow::invalid_argument);
    CHECK(std::filesystem::is_empty(path.parent_path()));
}

TEST_CASE("npy: an array whose data is null is not written, unless it has no elements") {
    const temporary_folder folder;
    const auto path = folder / "null.npy";
    CHECK_THROWS_AS(pinflow::write_npy(path, {nullptr, dtype::of<float>(), {3}}), pinflow::invalid_argument);
    CHECK_FALSE(std::filesystem::exists(path));
    pinflow::write_npy(path, {nullptr, dtype::of<float>(), {3, 0}});
    CHECK(open_npy(path).shape() == shape_vector{3, 0});
}

TEST_CASE("npy: writes arrays without axes, without elements, and big-endian ones") {
    const temporary_folder folder;
    const auto values = counted(4);
    pinflow::write_npy(folder / "scalar.npy", {bytes_of(values) + 4, dtype::of<std::int32_t>(), {}});
    CHECK(payload(open_npy(folder / "scalar.npy")) == std::vector<std::int32_t>{1});
    CHECK(open_npy(folder / "scalar.npy").shape().empty());

    pinflow::write_npy(folder / "empty.npy", {nullptr, dtype::of<std::int32_t>(), {0, 5}});
    CHECK(open_npy(folder / "empty.npy").shape() == shape_vector{0, 5});
    pinflow::write_npy(folder / "empty.npy", {nullptr, dtype::of<std::int32_t>(), {5, 0}, {400, 800}});
    CHECK(open_npy(folder / "empty.npy").size_bytes() == 0);

    pinflow::write_npy(folder / "big.npy", {bytes_of(values), dtype::parse(">i4"), {2, 2}});
    CHECK(open_npy(folder / "big.npy").dtype().descr() == ">i4");
    CHECK(payload(open_npy(folder / "big.npy")) == values);
}

TEST_CASE("npy: a file can be written over the one that the view is mapped from") {
    const temporary_folder folder;
    const auto values = counted(6);
    pinflow::write_npy(folder / "a.npy", {bytes_of(values), dtype::of<std::int32_t>(), {2, 3}});
    const pinflow::array opened = open_npy(folder / "a.npy");
    pinflow::write_npy(folder / "a.npy", array_view(opened.view().data(), opened.dtype(), {3, 2}, {4, 12}));
    CHECK(payload(open_npy(folder / "a.npy")) == values);
    CHECK(open_npy(folder / "a.npy").view().fortran_contiguous());
    CHECK_THROWS_AS(opened.file()->check_unchanged(), pinflow::data_changed);
}

// ---- writing in pieces ------------------------------------------------------------------------------------

TEST_CASE("npy writer: pieces may be cut anywhere") {
    const temporary_folder folder;
    const auto values = counted(1'000'000);
    const auto all = as_bytes(values);
    for (const std::size_t step :
         {std::size_t{999}, std::size_t{1} << 20, std::size_t{1'500'001}, all.size()}) {
        CAPTURE(step);
        pinflow::npy_writer writer(folder / "a.npy", dtype::of<std::int32_t>(), {1000, 1000}, 4096);
        for (std::size_t at = 0; at < all.size(); at += step) {
            writer.write(all.subspan(at, std::min(step, all.size() - at)));
        }
        writer.write({});
        writer.finish();
        const pinflow::array opened = open_npy(folder / "a.npy");
        CHECK(opened.offset_bytes() == 4096);
        CHECK((payload(opened) == values));
        CHECK(files_in(folder.path()) == 1);
    }
}

TEST_CASE("npy writer: takes exactly the bytes of its shape") {
    const temporary_folder folder;
    const auto values = counted(5);
    const auto all = as_bytes(values);
    pinflow::npy_writer writer(folder / "a.npy", dtype::of<std::int32_t>(), {4});
    CHECK_THROWS_AS(writer.write(all), pinflow::invalid_argument);
    writer.write(all.first(15));
    CHECK_THROWS_WITH_AS(writer.finish(), doctest::Contains("declares 16 bytes, but 15 were written"),
                         pinflow::invalid_argument);
    CHECK_FALSE(fs::exists(folder / "a.npy"));
    writer.write(all.subspan(15, 1));
    writer.finish();
    CHECK(payload(open_npy(folder / "a.npy")) == counted(4));
    CHECK_THROWS_AS(writer.write(all.first(1)), pinflow::invalid_argument);
    CHECK_THROWS_AS(writer.finish(), pinflow::invalid_argument);
}

TEST_CASE("npy writer: without finish the old file stays, and no other file is left") {
    const temporary_folder folder;
    write_file(folder / "a.npy", "before");
    {
        pinflow::npy_writer writer(folder / "a.npy", dtype::of<std::int32_t>(), {4});
        writer.write(as_bytes(counted(2)));
        pinflow::npy_writer moved = std::move(writer);
        CHECK(read_file(folder / "a.npy") == "before");
    }
    CHECK(files_in(folder.path()) == 1);
    CHECK(read_file(folder / "a.npy") == "before");
}

TEST_CASE("npy writer: two writers of the same file do not mix") {
    const temporary_folder folder;
    const auto one = counted(4);
    const std::vector<std::int32_t> two = {7, 7, 7, 7};
    pinflow::npy_writer first(folder / "a.npy", dtype::of<std::int32_t>(), {4});
    pinflow::npy_writer second(folder / "a.npy", dtype::of<std::int32_t>(), {4});
    first.write(as_bytes(one));
    second.write(as_bytes(two));
    second.finish();
    CHECK(payload(open_npy(folder / "a.npy")) == two);
    first.finish();
    CHECK(payload(open_npy(folder / "a.npy")) == one);
}

TEST_CASE("npy writer: refuses shapes that no file can have") {
    const temporary_folder folder;
    const auto type = dtype::of<std::int32_t>();
    for (const shape_vector& shape : {shape_vector{1ull << 62, 2}, shape_vector{1ull << 32, 1ull << 32},
                                      shape_vector(65, 1), shape_vector{1ull << 63}}) {
        CHECK_THROWS_WITH_AS(pinflow::npy_writer(folder / "a.npy", type, shape),
                             doctest::Contains("cannot write '"), pinflow::invalid_argument);
    }
    CHECK(files_in(folder.path()) == 0);
}

// ---- rows that are counted --------------------------------------------------------------------------------

TEST_CASE("npy writer: counted rows give the same file as a known number of rows") {
    const temporary_folder folder;
    const auto type = dtype::of<std::int32_t>();
    for (const std::size_t rows : {0u, 1u, 9u, 10u, 12345u}) {
        for (const std::uint64_t alignment : {16u, 64u, 4096u}) {
            CAPTURE(rows);
            const auto values = counted(rows * 6);
            const auto all = as_bytes(values);
            auto counting = pinflow::npy_writer::of_rows(folder / "counted.npy", type, {3, 2}, alignment);
            for (std::size_t at = 0; at < all.size(); at += 1001) {
                counting.write(all.subspan(at, std::min<std::size_t>(1001, all.size() - at)));
            }
            counting.finish();
            pinflow::npy_writer known(folder / "known.npy", type, {rows, 3, 2}, alignment);
            known.write(all);
            known.finish();
            CHECK((read_file(folder / "counted.npy") == read_file(folder / "known.npy")));
            CHECK(open_npy(folder / "counted.npy").shape() == shape_vector{rows, 3, 2});
        }
    }
    CHECK(files_in(folder.path()) == 2);
}

TEST_CASE("npy writer: a row may be one element, or larger than the buffer") {
    const temporary_folder folder;
    const auto values = counted(1 << 20);
    auto elements = pinflow::npy_writer::of_rows(folder / "a.npy", dtype::of<std::int32_t>(), {});
    elements.write(as_bytes(values));
    elements.finish();
    CHECK(open_npy(folder / "a.npy").shape() == shape_vector{1 << 20});
    CHECK((payload(open_npy(folder / "a.npy")) == values));
    auto rows = pinflow::npy_writer::of_rows(folder / "a.npy", dtype::of<std::int32_t>(), {1 << 19});
    rows.write(as_bytes(values));
    rows.finish();
    CHECK(open_npy(folder / "a.npy").shape() == shape_vector{2, 1 << 19});
    CHECK((payload(open_npy(folder / "a.npy")) == values));
}

TEST_CASE("npy writer: finish refuses a row that is not whole") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    const auto values = counted(6);
    const auto all = as_bytes(values);
    auto writer = pinflow::npy_writer::of_rows(path, dtype::of<std::int32_t>(), {3});
    writer.write(all.first(13));
    CHECK_THROWS_WITH_AS(
        writer.finish(),
        doctest::Contains("whole rows of shape (3,) of <i4 have 12 bytes each, but 13 were written"),
        pinflow::invalid_argument);
    CHECK_FALSE(fs::exists(path));
    writer.write(all.subspan(13));
    writer.finish();
    CHECK(payload(open_npy(path)) == values);
    CHECK_THROWS_AS(writer.write(all), pinflow::invalid_argument);
    CHECK_THROWS_AS(writer.finish(), pinflow::invalid_argument);
    CHECK(payload(open_npy(path)) == values);
}

TEST_CASE("npy writer: refuses rows that cannot be counted, or that no file can have") {
    const temporary_folder folder;
    const auto refuse = [&](const shape_vector& row_shape, const char* sentence) {
        CHECK_THROWS_WITH_AS(
            pinflow::npy_writer::of_rows(folder / "a.npy", dtype::of<std::int32_t>(), row_shape),
            doctest::Contains(sentence), pinflow::invalid_argument);
    };
    refuse({3, 0}, "rows of shape (3, 0) have no bytes by which they could be counted");
    refuse({1ull << 62, 2}, "is too large");
    refuse(shape_vector(64, 1), "cannot have 65 axes");
    CHECK(files_in(folder.path()) == 0);
}

TEST_CASE("npy writer: counted rows appear complete or not at all") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    const auto values = counted(1 << 20);
    {
        write_file(path, "before");
        auto writer = pinflow::npy_writer::of_rows(path, dtype::of<std::int32_t>(), {});
        writer.write(as_bytes(values));
    }
    CHECK(read_file(path) == "before");
    // the header and the data's beginning, the data, the header again
    for (const unsigned failing : {1u, 2u, 3u}) {
        unsigned writes = 0;
        {
            const sys::scoped_failure_hook hook([&](sys::call what, std::string_view) {
                return sys::injected_failure{what == sys::call::write && ++writes == failing ? ENOSPC : 0};
            });
            auto writer = pinflow::npy_writer::of_rows(path, dtype::of<std::int32_t>(), {});
            const auto write_all = [&] {
                writer.write(as_bytes(values).first(1000));
                writer.write(as_bytes(values).subspan(1000));
                writer.finish();
            };
            CHECK_THROWS_AS(write_all(), pinflow::system_failure);
            CHECK_THROWS_AS(writer.finish(), pinflow::error);
        }
        CHECK(writes == failing);
        CHECK(read_file(path) == "before");
        CHECK(files_in(folder.path()) == 1);
    }
}

TEST_CASE("npy writer: the last header is written before the file is made durable, in short writes too") {
    const temporary_folder folder;
    std::vector<sys::call> calls;
    const auto values = counted(3);
    const auto write = [&] {
        auto writer = pinflow::npy_writer::of_rows(folder / "a.npy", dtype::of<std::int32_t>(), {});
        writer.write(as_bytes(values));
        writer.finish();
    };
    {
        const sys::scoped_failure_hook hook([&](sys::call what, std::string_view) {
            if (what == sys::call::write || what == sys::call::fsync) calls.push_back(what);
            return sys::injected_failure{};
        });
        write();
    }
    const std::vector<sys::call> expected = {sys::call::write, sys::call::write, sys::call::fsync,
                                             sys::call::fsync};
    CHECK((calls == expected));
    const sys::scoped_failure_hook hook(
        [](sys::call, std::string_view) { return sys::injected_failure{0, 7}; });
    write();
    CHECK(payload(open_npy(folder / "a.npy")) == values);
}

// ---- writing when something fails -------------------------------------------------------------------------

TEST_CASE("npy writer: a failure in any step leaves what was there, and nothing beside it") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    const auto values = counted(1 << 20);
    struct {
        sys::call what;
        int error;
    } const cases[] = {{sys::call::open_unnamed, EROFS},
                       {sys::call::write, ENOSPC},
                       {sys::call::write, EIO},
                       {sys::call::fsync, EIO},
                       {sys::call::rename, EIO}};
    for (const auto& [failing, error] : cases) {
        write_file(path, "before");
        const sys::scoped_failure_hook hook([&](sys::call what, std::string_view) {
            return sys::injected_failure{what == failing ? error : 0};
        });
        try {
            pinflow::write_npy(path, {bytes_of(values), dtype::of<std::int32_t>(), {1 << 20}});
            FAIL("it was written");
        } catch (const pinflow::system_failure& failure) {
            CHECK(failure.code().value() == error);
            CHECK(std::string(failure.what()).find(path) != std::string::npos);
        }
        CHECK(read_file(path) == "before");
        CHECK(files_in(folder.path()) == 1);
    }
}
