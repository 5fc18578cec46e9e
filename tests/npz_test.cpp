#include "pinflow/formats/npz.hpp"

#include <doctest/doctest.h>
#include <tbb/parallel_for.h>
#include <tbb/task_group.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "formats/element_streams.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/npy.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/system.hpp"
#include "tests/fuzz/zip_directory_invariants.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

namespace {

namespace fs = std::filesystem;
namespace sys = pinflow::detail::system;
using npy_bytes::header;
using npy_bytes::read_file;
using npy_bytes::text;
using npy_bytes::write_file;
using pinflow::array;
using pinflow::array_listing;
using pinflow::dtype;
using pinflow::list_npz;
using pinflow::open_npz;
using pinflow::shape_vector;
using zip_bytes::put;

/// 0, 1, 2, ... as bytes of int32.
std::string counted(std::int32_t count, std::int32_t first = 0) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(count));
    std::iota(values.begin(), values.end(), first);
    return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}

/// A .npy file; its data begins at a multiple of 64.
std::string npy(const dtype& type, const shape_vector& shape, std::string_view payload,
                bool fortran_order = false) {
    return pinflow::format_npy_header(type, shape, fortran_order) + std::string(payload);
}

std::string int_npy(const shape_vector& shape, std::string_view payload) {
    return npy(dtype::of<std::int32_t>(), shape, payload);
}

std::string bytes_of(const array& opened) {
    return {reinterpret_cast<const char*>(opened.view().data()), opened.size_bytes()};
}

std::int32_t first_of(const array& opened) {
    std::int32_t value = 0;
    std::memcpy(&value, opened.view().data(), sizeof value);
    return value;
}

/// Everything that the element stream of a member delivers, `step` bytes at a time.
std::string streamed(const fs::path& path, std::string_view name, std::size_t step) {
    const auto stream = pinflow::detail::open_npz_elements(path)->stream(name, 1 << 20);
    std::string content(pinflow::element_count(stream->shape()) * stream->dtype().size_bytes(), '?');
    const auto bytes = std::as_writable_bytes(std::span(content));
    for (std::size_t at = 0; at < bytes.size(); at += step)
        stream->read(bytes.subspan(at, std::min(step, bytes.size() - at)));
    stream->finish();
    return content;
}

/// The message of the Error that opening the member "a" throws. Streaming it must throw the same.
template <typename Error>
std::string refusal(const fs::path& path) {
    const std::string opening = message_of<Error>([&] { open_npz(path, "a"); });
    const std::string streaming = message_of<Error>([&] { streamed(path, "a", 1 << 20); });
    CHECK(opening == streaming);
    return opening;
}

std::vector<std::byte> vector_of(std::string_view text) {
    const auto bytes = npy_bytes::as_bytes(text);
    return {bytes.begin(), bytes.end()};
}

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
    REQUIRE(listings.size() == 13);

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
                                   "the member 'folder/': the file ends after 0 bytes",
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
        const bool is_unsupported = index == 6 || index == 7 || index == 8;
        const auto open = [&] { open_npz(folder / "a.npz", listing.name); };
        const std::string sentence =
            is_unsupported ? message_of<pinflow::unsupported>(open) : message_of<pinflow::format_error>(open);
        CHECK(sentence == "cannot open '" + (folder / "a.npz").string() + "': " + listing.reason);
    }
    CHECK(bytes_of(open_npz(folder / "a.npz", "stored")) == counted(6));
}

// ---- damage -----------------------------------------------------------------------------------------------

TEST_CASE("npz: refuses a deflated member that contradicts its directory entry") {
    const temporary_folder folder;
    const std::string content = int_npy({1000}, counted(1000));
    const zip_bytes::archive made =
        zip_bytes::make({{.name = "a.npy", .content = content, .deflated = true}});
    write_file(folder / "good.npz", made.bytes);
    CHECK(bytes_of(open_npz(folder / "good.npz", "a")) == counted(1000));
    struct {
        const char* what;
        std::size_t offset;
        std::uint64_t value;
        unsigned size;
        const char* sentence;
    } const cases[] = {
        {"CRC-32", made.entries[0] + 16, 1, 4, "the member 'a.npy' is damaged: its CRC-32 is "},
        {"content", made.datas[0] + 2000, 0xAAAA, 2, "the member 'a.npy' is damaged: its CRC-32 is "},
        {"size too large", made.entries[0] + 24, content.size() + 1, 4,
         "has 4129 bytes, but its .npy header declares 4128"},
        {"size too small", made.entries[0] + 24, content.size() - 1, 4, "the member 'a.npy': "},
        {"a bomb", made.entries[0] + 24, 0xFFFFFFFE, 4,
         "is said to have 4294967294 bytes, which 4133 compressed bytes cannot make"},
        {"a smaller bomb", made.entries[0] + 24, 4'000'000, 4,
         "has 4000000 bytes, but its .npy header declares 4128"},
        {"compressed size", made.entries[0] + 20, 2000, 4,
         "the member 'a.npy' is damaged: its compressed data"},
        {"no header there", made.entries[0] + 20, 3, 4, "is said to have 4128 bytes, which 3 compressed"},
        {"broken off in the header", made.entries[0] + 20, 100, 4,
         "is damaged: its compressed data is truncated after 95 of"},
        {"block", made.datas[0], 7, 1,
         "the member 'a.npy' is damaged: its compressed data is wrong after 0 of"},
        {"block length", made.datas[0] + 1, 100, 1, "is damaged: its compressed data is wrong after 0 of"},
    };
    for (const auto& c : cases) {
        CAPTURE(c.what);
        std::string bytes = made.bytes;
        put(bytes, c.offset, c.value, c.size);
        write_file(folder / "a.npz", bytes);
        const std::string opening =
            message_of<pinflow::format_error>([&] { open_npz(folder / "a.npz", "a"); });
        const std::string streaming =
            message_of<pinflow::format_error>([&] { streamed(folder / "a.npz", "a", 400); });
        CAPTURE(opening);
        CAPTURE(streaming);
        CHECK(contains(opening, c.sentence));
        CHECK(contains(streaming, c.sentence));
        CHECK(opening.starts_with("cannot open '" + (folder / "a.npz").string() + "': the member 'a.npy'"));
        CHECK(opening.find('\n') == std::string::npos);
    }
}

TEST_CASE("npz: a stored member with a wrong CRC-32 is mapped by open, and refused by an element stream") {
    const temporary_folder folder;
    for (const bool fortran_order : {false, true}) {
        zip_bytes::archive made = zip_bytes::make(
            {{.name = "a.npy",
              .content = npy(dtype::of<std::int32_t>(), {20, 50}, counted(1000), fortran_order)}});
        made.bytes[made.datas[0] + 3000] ^= 1;
        write_file(folder / "a.npz", made.bytes);
        CHECK(open_npz(folder / "a.npz", "a").size_bytes() == 4000);
        CHECK(contains(message_of<pinflow::format_error>([&] { streamed(folder / "a.npz", "a", 400); }),
                       "the member 'a.npy' is damaged: its CRC-32 is "));
    }
}

TEST_CASE("npz: names the path when the directory is wrong") {
    const temporary_folder folder;
    const std::string path = (folder / "a.npz").string();
    write_file(path, zip_bytes::make({{.name = "../a.npy", .content = int_npy({1}, counted(1))}}).bytes);
    CHECK(contains_all(refusal<pinflow::format_error>(path), {"cannot open '" + path + "'", "name '../a.npy'",
                                                              "of entry 0 ", "parent folder ('..')"}));
    CHECK_THROWS_AS(list_npz(path), pinflow::format_error);
    write_file(path, "");
    CHECK(contains_all(refusal<pinflow::format_error>(path),
                       {"cannot open '" + path + "'", "zip archive", "at least 22 bytes", "it has 0"}));
    CHECK_THROWS_AS(list_npz(folder / "absent.npz"), pinflow::system_failure);
    CHECK_THROWS_AS(list_npz(folder.path()), pinflow::format_error);
    CHECK_THROWS_AS(open_npz("/dev/zero", "a"), pinflow::format_error);
}

TEST_CASE("npz: a file truncated after any byte is refused") {
    const temporary_folder folder;
    const std::string bytes =
        zip_bytes::make({{.name = "a.npy", .content = int_npy({3}, counted(3)), .deflated = true}}).bytes;
    for (std::size_t size = 0; size < bytes.size(); ++size) {
        write_file(folder / "a.npz", bytes.substr(0, size));
        REQUIRE_THROWS_AS(list_npz(folder / "a.npz"), pinflow::format_error);
    }
}

TEST_CASE("npz: a file truncated while it is read is reported as changed, and does not crash") {
    const temporary_folder folder;
    const std::string path = (folder / "a.npz").string();
    const std::string content = int_npy({1'000'000}, counted(1'000'000));
    for (const bool deflated : {false, true}) {
        const std::string bytes =
            zip_bytes::make({{.name = "a.npy", .content = content, .deflated = deflated}}).bytes;
        const auto cut_at = [&](std::size_t nth_read, auto function) {
            write_file(path, bytes);
            std::size_t reads = 0;
            const sys::scoped_failure_hook hook([&](sys::call what, std::string_view) {
                if (what == sys::call::pread && ++reads == nth_read) {
                    CHECK(::truncate(path.c_str(), 3000) == 0);
                }
                return sys::injected_failure{};
            });
            return message_of<pinflow::data_changed>(function);
        };
        CHECK(contains(cut_at(2, [&] { list_npz(path); }), "the file has 3000 bytes now"));
        if (deflated) {
            // the header's reads come first, the whole member's last
            const std::string sentence = cut_at(6, [&] { open_npz(path, "a"); });
            CHECK(sentence.starts_with("cannot open '" + path + "': cannot read "));
        }
        CHECK(contains(cut_at(7, [&] { streamed(path, "a", 1 << 16); }), "3000 bytes now"));
    }
}

TEST_CASE("npz: a member larger than memory is refused at once") {
    const temporary_folder folder;
    // 64 GiB of a hole, taken for compressed data, could well be 64 TiB of zeros
    const std::uint64_t hole = std::uint64_t{1} << 36;
    const std::uint64_t payload = std::uint64_t{1} << 46;
    const std::string begin = header(text("'|u1'", "(" + std::to_string(payload) + ",)"));
    // a stored block that continues into the hole
    const std::string block = '\0' + zip_bytes::number(0xFFFF, 2) + zip_bytes::number(0, 2) + begin;
    const std::uint64_t compressed = block.size() + hole;
    const std::string sizes = zip_bytes::number(1, 2) + zip_bytes::number(16, 2) +
                              zip_bytes::number(begin.size() + payload, 8) + zip_bytes::number(compressed, 8);
    zip_bytes::archive made =
        zip_bytes::make({{.name = "a.npy", .deflated = true, .extra = sizes}}, {}, true);
    put(made.bytes, made.entries[0] + 20, 0xFFFFFFFF, 4);
    put(made.bytes, made.entries[0] + 24, 0xFFFFFFFF, 4);
    const std::uint64_t moved = made.datas[0] + compressed - made.directory;
    put(made.bytes, made.end + 16, 0xFFFFFFFF, 4);
    put(made.bytes, made.end64 + 48, made.directory + moved, 8);
    put(made.bytes, made.end - 20 + 8, made.end64 + moved, 8);
    {
        std::ofstream file(folder / "a.npz", std::ios::binary);
        file << made.bytes.substr(0, made.datas[0]) << block;
        file.seekp(static_cast<std::streamoff>(made.directory + moved));
        file << made.bytes.substr(made.directory);
        if (!file.flush()) {
            MESSAGE("skipped: this filesystem has no files of 64 GiB");
            return;
        }
    }
    const auto listings = list_npz(folder / "a.npz");
    REQUIRE(listings.size() == 1);
    CHECK(contains_all(listings[0].reason, {"member is compressed", "inflated into memory"}));
    CHECK(listings[0].size_bytes == payload);
    CHECK(contains(message_of<pinflow::system_failure>([&] { open_npz(folder / "a.npz", "a"); }),
                   "the member 'a.npy' of 70368744177"));
}

TEST_CASE("npz: members that together exceed the memory left are refused at once") {
    const temporary_folder folder;
    const auto member = [](const char* name, std::uint64_t mebibytes) {
        const std::string shape = "(" + std::to_string(mebibytes << 20) + ",)";
        return zip_bytes::member{.name = name,
                                 .content = header(text("'|u1'", shape)) + std::string(mebibytes << 20, '\0'),
                                 .deflated = true};
    };
    write_file(folder / "a.npz", zip_bytes::make({member("a.npy", 30), member("b.npy", 50)}).bytes);
    const std::vector<std::string> both{"a", "b"};
    const pinflow::detail::scoped_available_memory available(110 << 20);
    CHECK(open_npz(folder / "a.npz", "b").size_bytes() == 50 << 20);
    const std::string sentence =
        message_of<pinflow::system_failure>([&] { open_npz(folder / "a.npz", both); });
    CAPTURE(sentence);
    CHECK(contains(sentence, "cannot inflate the member 'b.npy' of 524288"));
    CHECK(contains(sentence, " bytes and 1 more: that takes 18876"));
    CHECK(contains(sentence, ", more than the 115343360 bytes that may be taken of the memory that "));
}

TEST_CASE("npz: memory that the system refuses is an error with the path") {
    const temporary_folder folder;
    write_file(
        folder / "a.npz",
        zip_bytes::make({{.name = "a.npy", .content = int_npy({1000}, counted(1000)), .deflated = true}})
            .bytes);
    const sys::scoped_failure_hook hook([](sys::call what, std::string_view) {
        return sys::injected_failure{what == sys::call::mmap ? ENOMEM : 0};
    });
    const std::string sentence =
        message_of<pinflow::system_failure>([&] { open_npz(folder / "a.npz", "a"); });
    CHECK(contains(sentence, "a.npz': cannot allocate "));
}

// ---- writing ----------------------------------------------------------------------------------------------

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

// ---- the fuzzer's findings --------------------------------------------------------------------------------

TEST_CASE("npz: the invariants hold for the fuzzer's seeds, findings and their mutations") {
    const auto folder = fs::path(__FILE__).parent_path() / "fuzz";
    std::size_t files = 0;
    for (const auto& inputs :
         {folder / "seeds" / "zip_directory", folder / "regressions" / "zip_directory"}) {
        if (!fs::exists(inputs)) continue;  // nothing found so far
        for (const auto& entry : fs::directory_iterator(inputs)) {
            CAPTURE(entry.path().filename().string());
            std::string bytes = read_file(entry.path().string());
            ++files;
            CHECK(zip_directory_invariants::broken_for(npy_bytes::as_bytes(bytes)) == "");
            constexpr std::size_t step = sanitized ? 5 : 1;  // the fuzz targets run under sanitizers, too
            for (std::size_t at = 0; at < bytes.size(); at += step) {
                const char original = bytes[at];
                for (const char replacement : {'\0', '\1', '\x08', '\x7F', '\xFF'}) {
                    bytes[at] = replacement;
                    const std::string broken =
                        zip_directory_invariants::broken_for(npy_bytes::as_bytes(bytes));
                    if (!broken.empty()) FAIL_CHECK("byte " << at << ": " << broken);
                }
                bytes[at] = original;
            }
        }
    }
    CHECK(files >= 8);
}
