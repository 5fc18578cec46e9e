#include <doctest/doctest.h>
#include <tbb/parallel_for.h>
#include <tbb/task_group.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "formats/element_streams.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/npz.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/npz_contents.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

namespace {

using npy_bytes::header;
using npy_bytes::text;
using npy_bytes::write_file;
using pinflow::array;
using pinflow::array_listing;
using pinflow::dtype;
using pinflow::list_npz;
using pinflow::open_npz;
using pinflow::shape_vector;
using zip_bytes::put;

}  // namespace

// ---- opening ----------------------------------------------------------------------------------------------

TEST_CASE("npz: a stored member is mapped in place") {
    const temporary_folder folder;
    const zip_bytes::archive made =
        zip_bytes::make({{.name = "before.npy", .content = int_npy({1}, counted(1))},
                         {.name = "a.npy", .content = int_npy({2, 3}, counted(6))}});
    write_file(folder / "a.npz", made.bytes);
    const array opened = open_npz(folder / "a.npz", "a");
    CHECK(opened.has_view());
    CHECK(opened.dtype() == dtype::of<std::int32_t>());
    CHECK(opened.shape() == shape_vector{2, 3});
    CHECK(opened.offset_bytes() == made.datas[1] + 128);
    CHECK(opened.file()->path() == (folder / "a.npz").string());
    CHECK(opened.view().c_contiguous());
    CHECK(bytes_of(opened) == counted(6));
    CHECK(contains_all(opened.reason(), {"mapped in place", "no multiple of 4"}));
    CHECK(streamed(folder / "a.npz", "a", 8) == counted(6));
}

TEST_CASE("npz: the reason tells whether a mapped member is aligned") {
    const temporary_folder folder;
    for (std::size_t size = 0; size < 8; ++size) {
        const zip_bytes::archive made = zip_bytes::make(
            {{.name = "a.npy", .content = int_npy({1}, counted(1)), .local_extra = std::string(size, '\0')}});
        write_file(folder / "a.npz", made.bytes);
        CHECK(contains(open_npz(folder / "a.npz", "a").reason(), "no multiple of 4") ==
              (made.datas[0] % 4 != 0));
        CHECK(list_npz(folder / "a.npz")[0].reason == open_npz(folder / "a.npz", "a").reason());
    }
}

TEST_CASE("npz: a deflated member is inflated into memory, and its elements begin at a page boundary") {
    const temporary_folder folder;
    for (const std::int32_t count : {1, 1000, 1'000'000}) {
        const shape_vector shape = {static_cast<std::uint64_t>(count)};
        write_file(
            folder / "a.npz",
            zip_bytes::make({{.name = "a.npy", .content = int_npy(shape, counted(count)), .deflated = true}})
                .bytes);
        const array opened = open_npz(folder / "a.npz", "a");
        CHECK(opened.has_view());
        CHECK(opened.file() == nullptr);
        CHECK(contains_all(opened.reason(), {"inflated into memory", "member is compressed"}));
        CHECK((bytes_of(opened) == counted(count)));
        CHECK(reinterpret_cast<std::uintptr_t>(opened.view().data()) % 4096 == 0);
        CHECK((streamed(folder / "a.npz", "a", 44'444) == counted(count)));
    }
}

TEST_CASE("npz: a member is inflated even if a cancelled task of oneTBB opens it") {
    const temporary_folder folder;
    write_file(
        folder / "a.npz",
        zip_bytes::make({{.name = "a.npy", .content = int_npy({1000}, counted(1000)), .deflated = true}})
            .bytes);
    tbb::task_group_context cancelled;
    tbb::parallel_for(
        0, 1,
        [&](int) {
            cancelled.cancel_group_execution();
            CHECK((bytes_of(open_npz(folder / "a.npz", "a")) == counted(1000)));
        },
        cancelled);
}

TEST_CASE("npz: arrays without axes and without elements open, stored and deflated") {
    const temporary_folder folder;
    for (const bool deflated : {false, true}) {
        write_file(folder / "a.npz",
                   zip_bytes::make(
                       {{.name = "scalar.npy", .content = int_npy({}, counted(1, 7)), .deflated = deflated},
                        {.name = "empty.npy", .content = int_npy({3, 0, 2}, ""), .deflated = deflated}})
                       .bytes);
        const array scalar = open_npz(folder / "a.npz", "scalar");
        CHECK(scalar.shape().empty());
        CHECK(first_of(scalar) == 7);
        CHECK(streamed(folder / "a.npz", "scalar", 4) == counted(1, 7));
        const array empty = open_npz(folder / "a.npz", "empty");
        CHECK(empty.shape() == shape_vector{3, 0, 2});
        CHECK(empty.size_bytes() == 0);
        CHECK(empty.view().data() == nullptr);
        CHECK(streamed(folder / "a.npz", "empty", 4).empty());
    }
    write_file(folder / "none.npz", zip_bytes::make({}).bytes);
    CHECK(list_npz(folder / "none.npz").empty());
    CHECK(contains(message_of<pinflow::invalid_argument>([&] { open_npz(folder / "none.npz", "a"); }),
                   "none.npz': there is no array 'a' in it; it has no arrays"));
    CHECK(open_npz(folder / "none.npz", std::vector<std::string>{}).empty());
}

TEST_CASE("npz: Fortran order stays as it is when opened, and is put in C order when streamed") {
    const temporary_folder folder;
    // column by column 0, 1, 2, ...: row by row 0, 2, 4, 1, 3, 5
    const std::string rows =
        counted(1, 0) + counted(1, 2) + counted(1, 4) + counted(1, 1) + counted(1, 3) + counted(1, 5);
    for (const bool deflated : {false, true}) {
        write_file(folder / "a.npz",
                   zip_bytes::make({{.name = "a.npy",
                                     .content = npy(dtype::of<std::int32_t>(), {2, 3}, counted(6), true),
                                     .deflated = deflated}})
                       .bytes);
        const array opened = open_npz(folder / "a.npz", "a");
        CHECK(opened.view().strides_bytes() == std::vector<std::int64_t>{4, 8});
        CHECK(bytes_of(opened) == counted(6));
        CHECK(streamed(folder / "a.npz", "a", 4) == rows);
        CHECK(list_npz(folder / "a.npz")[0].fortran_order);
    }
}

TEST_CASE("npz: big-endian elements are streamed little-endian") {
    const temporary_folder folder;
    const dtype type = dtype::structured(
        {{"a", "", dtype::parse(">i4"), {}, 0}, {"b", "", dtype::parse(">u2"), {2}, 5}}, 10);
    for (const bool deflated : {false, true}) {
        write_file(
            folder / "a.npz",
            zip_bytes::make(
                {{.name = "a.npy",
                  .content = npy(dtype::parse(">i4"), {2}, "abcdefgh"),
                  .deflated = deflated},
                 {.name = "b.npy", .content = npy(type, {2}, "abcd-efgh-ABCD+EFGH+"), .deflated = deflated}})
                .bytes);
        CHECK(streamed(folder / "a.npz", "a", 4) == "dcbahgfe");
        CHECK(streamed(folder / "a.npz", "b", 10) == "dcba-fehg-DCBA+FEHG+");
        CHECK(open_npz(folder / "a.npz", "a").dtype().descr() == ">i4");
        const auto stream = pinflow::detail::open_npz_elements(folder / "a.npz")->stream("b", 1 << 20);
        CHECK(stream->dtype() == type.little_endian());
        std::vector<std::byte> piece(30);
        CHECK_THROWS_AS(stream->read(std::span(piece).first(5)), pinflow::invalid_argument);
        CHECK_THROWS_AS(stream->read(piece), pinflow::invalid_argument);
        stream->finish();
    }
}

TEST_CASE("npz: a member answers to its name with and without .npy") {
    const temporary_folder folder;
    write_file(folder / "a.npz",
               zip_bytes::make({{.name = "a.npy", .content = int_npy({1}, counted(1, 1))},
                                {.name = "b", .content = int_npy({1}, counted(1, 2))},
                                {.name = "a.npy.npy", .content = int_npy({1}, counted(1, 3))},
                                {.name = "folder/c.npy", .content = int_npy({1}, counted(1, 4))}})
                   .bytes);
    std::vector<std::string> names;
    for (const array_listing& listing : list_npz(folder / "a.npz"))
        names.push_back(listing.name);
    CHECK(names == std::vector<std::string>{"a", "b", "a.npy", "folder/c"});
    const auto value = [&](const char* name) { return first_of(open_npz(folder / "a.npz", name)); };
    CHECK(value("a") == 1);
    CHECK(value("b") == 2);
    CHECK(value("b.npy") == 2);
    CHECK(value("a.npy") == 3);
    CHECK(value("a.npy.npy") == 3);
    CHECK(value("folder/c") == 4);
    CHECK(value("folder/c.npy") == 4);
    CHECK(contains(message_of<pinflow::invalid_argument>([&] { open_npz(folder / "a.npz", "c"); }),
                   "a.npz': there is no array 'c' in it; it has 'a', 'b', 'a.npy', 'folder/c'"));
    write_file(folder / "two.npz", zip_bytes::make({{.name = "a.npy"}, {.name = "a"}}).bytes);
    CHECK(contains(message_of<pinflow::format_error>([&] { list_npz(folder / "two.npz"); }),
                   "two members are arrays named 'a'"));
}

TEST_CASE("npz: several members are opened in the order asked for, stored and deflated") {
    const temporary_folder folder;
    std::vector<zip_bytes::member> members;
    std::vector<std::string> names;
    for (std::int32_t index = 0; index < 40; ++index) {
        const std::int32_t count = 1000 * (index % 7) + 1;
        members.push_back({.name = std::to_string(index) + ".npy",
                           .content = int_npy({static_cast<std::uint64_t>(count)}, counted(count, index)),
                           .deflated = index % 3 != 0});
        names.insert(names.begin(), std::to_string(index));
    }
    names.emplace_back("7");  // once more
    zip_bytes::archive made = zip_bytes::make(members);
    write_file(folder / "a.npz", made.bytes);
    const std::vector<array> opened = open_npz(folder / "a.npz", names);
    REQUIRE(opened.size() == names.size());
    for (std::size_t index = 0; index < names.size(); ++index) {
        CHECK(first_of(opened[index]) == std::stoi(names[index]));
        CHECK(opened[index].shape()[0] ==
              static_cast<std::uint64_t>(1000 * (std::stoi(names[index]) % 7) + 1));
    }
    names[5] = "absent";
    CHECK(contains(message_of<pinflow::invalid_argument>([&] { open_npz(folder / "a.npz", names); }),
                   "there is no array 'absent' in it; it has '0', '1',"));
    names[5] = "8";
    made.bytes[made.datas[20] + 1000] ^= 1;
    write_file(folder / "a.npz", made.bytes);
    CHECK(contains(message_of<pinflow::format_error>([&] { open_npz(folder / "a.npz", names); }),
                   "the member '20.npy' is damaged: its CRC-32 is "));
}

// ---- listing ----------------------------------------------------------------------------------------------

TEST_CASE("npz: lists what every member is, or why it cannot be opened") {
    const temporary_folder folder;
    zip_bytes::archive made =
        zip_bytes::make({{.name = "stored.npy", .content = int_npy({2, 3}, counted(6))},
                         {.name = "deflated.npy", .content = int_npy({6}, counted(6)), .deflated = true},
                         {.name = "empty.npy", .content = int_npy({0}, "")},
                         {.name = "notes.txt", .content = "not an array"},
                         {.name = "nothing.npy"},
                         {.name = "folder/"},
                         {.name = "encrypted.npy", .content = int_npy({1}, counted(1)), .flags = 1},
                         {.name = "lzma.npy", .content = int_npy({1}, counted(1))},
                         {.name = "pickle.npy", .content = header(text("'|O'", "(1,)"))},
                         {.name = "short.npy", .content = int_npy({2}, counted(1))},
                         {.name = "long.npy", .content = int_npy({2}, counted(3))},
                         {.name = "damaged.npy", .content = int_npy({2}, counted(2)), .deflated = true},
                         {.name = "moved.npy", .content = int_npy({2}, counted(2))}});
    put(made.bytes, made.locals[7] + 8, 14, 2);
    put(made.bytes, made.entries[7] + 10, 14, 2);
    made.bytes[made.datas[11]] = 7;
    made.bytes[made.locals[12]] = 'x';
    write_file(folder / "a.npz", made.bytes);
    const std::vector<array_listing> listings = list_npz(folder / "a.npz");
    REQUIRE(listings.size() == 12);  // not the folder

    CHECK(listings[0].name == "stored");
    CHECK(listings[0].dtype == dtype::of<std::int32_t>());
    CHECK(listings[0].shape == shape_vector{2, 3});
    CHECK_FALSE(listings[0].fortran_order);
    CHECK(listings[0].offset_bytes == made.datas[0] + 128);
    CHECK(listings[0].size_bytes == 24);
    CHECK(listings[0].mappable);
    CHECK(contains(listings[0].reason, "the file's pages are mapped in place"));

    CHECK(listings[1].shape == shape_vector{6});
    CHECK_FALSE(listings[1].offset_bytes.has_value());
    CHECK(listings[1].size_bytes == 24);
    CHECK_FALSE(listings[1].mappable);
    CHECK(contains_all(listings[1].reason, {"member is compressed", "inflated into memory"}));
    CHECK(contains(listings[2].reason, "no bytes to map"));

    const char* const reasons[] = {"the member 'notes.txt': it is not a .npy file",
                                   "the member 'nothing.npy': the file ends after 0 bytes",
                                   "the member 'encrypted.npy' is encrypted",
                                   "the member 'lzma.npy' is compressed by method 14",
                                   "the member 'pickle.npy': ",
                                   "the member 'short.npy': ",
                                   "the member 'long.npy' has 140 bytes, but its .npy header declares 136",
                                   "the member 'damaged.npy' is damaged: its compressed data is wrong",
                                   "the member 'moved.npy' has no header at byte "};
    for (std::size_t index = 3; index < listings.size(); ++index) {
        const array_listing& listing = listings[index];
        CAPTURE(listing.name);
        CAPTURE(listing.reason);
        CHECK(contains(listing.reason, reasons[index - 3]));
        CHECK_FALSE(listing.dtype.has_value());
        CHECK_FALSE(listing.mappable);
        const bool is_unsupported = index == 5 || index == 6 || index == 7;
        const auto open = [&] { open_npz(folder / "a.npz", listing.name); };
        const std::string sentence =
            is_unsupported ? message_of<pinflow::unsupported>(open) : message_of<pinflow::format_error>(open);
        CHECK(sentence == "cannot open '" + (folder / "a.npz").string() + "': " + listing.reason);
    }
    CHECK(bytes_of(open_npz(folder / "a.npz", "stored")) == counted(6));
}
