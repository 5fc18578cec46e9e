#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/npz.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/npz_contents.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

namespace {

namespace fs = std::filesystem;
using npy_bytes::read_file;
using npy_bytes::write_file;
using pinflow::dtype;
using pinflow::list_npz;
using pinflow::open_npz;
using pinflow::shape_vector;

}  // namespace

TEST_CASE("npz writer: what it writes is mapped at a multiple of the alignment") {
    const temporary_folder folder;
    const std::string ints = counted(1'000'000);
    for (const std::uint64_t alignment : {4096u, 16u, 64u, 8192u}) {
        pinflow::npz_writer writer(folder / "a.npz", alignment);
        writer.begin("ints", dtype::of<std::int32_t>(), {1000, 1000});
        for (std::size_t at = 0; at < ints.size(); at += 777'777)
            writer.write(
                npy_bytes::as_bytes(ints).subspan(at, std::min<std::size_t>(777'777, ints.size() - at)));
        writer.begin("folder/scalar", dtype::of<double>(), {});
        writer.write(vector_of("12345678"));
        writer.begin("empty", dtype::of<float>(), {0, 3});
        writer.write({});
        writer.begin("caf\xC3\xA9", dtype::parse("<U2"), {1});
        writer.write(vector_of(std::string(8, '\0')));
        writer.finish();

        const auto listings = list_npz(folder / "a.npz");
        REQUIRE(listings.size() == 4);
        const char* const names[] = {"ints", "folder/scalar", "empty", "caf\xC3\xA9"};
        for (std::size_t index = 0; index < 4; ++index) {
            CHECK(listings[index].name == names[index]);
            CHECK(listings[index].mappable);
            CHECK(listings[index].offset_bytes.value_or(1) % alignment == 0);
        }
        CHECK((bytes_of(open_npz(folder / "a.npz", "ints")) == ints));
        CHECK((streamed(folder / "a.npz", "ints", 1 << 20) == ints));
        CHECK(bytes_of(open_npz(folder / "a.npz", "folder/scalar")) == "12345678");
        CHECK(streamed(folder / "a.npz", "empty", 4).empty());
        CHECK(open_npz(folder / "a.npz", "empty").shape() == shape_vector{0, 3});
    }
    CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 1);
}

TEST_CASE("npz writer: takes exactly the bytes of its shapes") {
    const temporary_folder folder;
    pinflow::npz_writer writer(folder / "a.npz");
    const auto bytes = vector_of("0123456789");
    CHECK_THROWS_WITH_AS(writer.write(bytes), doctest::Contains("a file in which no member was begun"),
                         pinflow::invalid_argument);
    writer.begin("a", dtype::of<std::uint8_t>(), {8});
    CHECK_THROWS_AS(writer.write(bytes), pinflow::invalid_argument);
    writer.write(std::span(bytes).first(7));
    for (int step = 0; step < 2; ++step) {
        const auto next = [&] { step == 0 ? writer.finish() : writer.begin("b", dtype::of<float>(), {}); };
        CHECK(contains(message_of<pinflow::invalid_argument>(next), "declares 8 bytes, but 7 were written"));
    }
    writer.write(std::span(bytes).first(1));
    for (const char* const name : {"", "a", "/b", "../b", "b\xFF"}) {
        CAPTURE(name);
        CHECK_THROWS_AS(writer.begin(name, dtype::of<float>(), {}), pinflow::invalid_argument);
    }
    CHECK_THROWS_AS(writer.begin("b", dtype::of<float>(), {std::uint64_t{1} << 62}),
                    pinflow::invalid_argument);
    CHECK_FALSE(fs::exists(folder / "a.npz"));
    writer.finish();
    CHECK_THROWS_AS(writer.finish(), pinflow::invalid_argument);
    CHECK_THROWS_AS(writer.begin("b", dtype::of<float>(), {}), pinflow::invalid_argument);
    CHECK(bytes_of(open_npz(folder / "a.npz", "a")) == "01234560");
    CHECK(list_npz(folder / "a.npz").size() == 1);
    for (const std::uint64_t alignment : {0u, 8u, 100u, 16384u})
        CHECK_THROWS_AS(pinflow::npz_writer(folder / "b.npz", alignment), pinflow::invalid_argument);
}

TEST_CASE("npz writer: without finish the old file stays, and no other file is left") {
    const temporary_folder folder;
    write_file(folder / "a.npz", "before");
    {
        pinflow::npz_writer writer(folder / "a.npz");
        writer.begin("a", dtype::of<std::uint8_t>(), {4});
        pinflow::npz_writer moved = std::move(writer);
        moved.write(vector_of("0123"));
    }
    CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 1);
    CHECK(read_file(folder / "a.npz") == "before");
}
