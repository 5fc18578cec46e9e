#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "formats/element_streams.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "pinflow/row_source.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/safetensors_bytes.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using npy_bytes::write_file;
using pinflow::dtype;
using pinflow::file_format;
using pinflow::shape_vector;
using safetensors_bytes::eight_bytes;

/// first, first + 1, ...: the elements of a file.
std::vector<std::int32_t> counting(std::int32_t first, std::size_t count) {
    std::vector<std::int32_t> elements(count);
    std::iota(elements.begin(), elements.end(), first);
    return elements;
}

void write_npy(const fs::path& path, const std::vector<std::int32_t>& elements, const shape_vector& shape) {
    pinflow::write_npy(path, {std::as_bytes(std::span(elements)).data(), dtype::of<std::int32_t>(), shape});
}

/// Arrays of (2,) int32, one for each name, whose elements count on from array to array.
void write_npz(const fs::path& path, const std::vector<std::string>& names) {
    pinflow::npz_writer writer(path);
    std::int32_t first = 0;
    for (const std::string& name : names) {
        writer.begin(name, dtype::of<std::int32_t>(), {2});
        const auto elements = counting(first, 2);
        writer.write(std::as_bytes(std::span(elements)));
        first += 2;
    }
    writer.finish();
}

void write_safetensors(const fs::path& path, const std::vector<std::string>& names) {
    std::vector<pinflow::safetensors_writer::tensor> tensors;
    for (const std::string& name : names)
        tensors.push_back({name, dtype::of<std::int32_t>(), {2}});
    pinflow::safetensors_writer writer(path, tensors);
    const auto elements = counting(0, 2 * names.size());
    writer.write(std::as_bytes(std::span(elements)));
    writer.finish();
}

/// Points of an id and a position: what a structured .npy file may hold.
void write_points(const fs::path& path) {
    const std::string header =
        npy_bytes::header(npy_bytes::text("[('id', '<i4'), ('at', '<i4', (2,))]", "(2,)"));
    std::string data(24, '\0');
    for (std::size_t index = 0; index < 6; ++index)
        data[4 * index] = static_cast<char>(index);
    write_file(path, header + data);
}

std::vector<std::int32_t> elements_of(const pinflow::row_source& rows) {
    REQUIRE(rows.dtype() == dtype::of<std::int32_t>());
    std::vector<std::uint64_t> ids(rows.row_count());
    std::iota(ids.begin(), ids.end(), 0u);
    std::vector<std::int32_t> elements(rows.row_count() * rows.row_size_bytes() / sizeof(std::int32_t));
    rows.read_rows(ids, std::as_writable_bytes(std::span(elements)));
    return elements;
}

std::vector<std::int32_t> elements_of(const std::string& text) {
    return elements_of(*pinflow::open_rows(text));
}

std::vector<std::string> names_of(const std::vector<pinflow::array_listing>& listings) {
    std::vector<std::string> names;
    for (const auto& listing : listings)
        names.push_back(listing.name);
    return names;
}

using integers = std::vector<std::int32_t>;

}  // namespace

// ---- formats ----------------------------------------------------------------------------------------------

TEST_CASE("open: the content decides the format of a file, not its name") {
    const temporary_folder folder;
    write_npy(folder / "a.npz", counting(0, 3), {3});
    write_npz(folder / "b.npy", {"x"});
    write_npz(folder / "no_members.npy", {});
    write_safetensors(folder / "c.h5", {"x"});
    write_safetensors(folder / "no_tensors.npy", {});
    CHECK(pinflow::format_of(folder / "a.npz") == file_format::npy);
    CHECK(pinflow::format_of(folder / "b.npy") == file_format::npz);
    CHECK(pinflow::format_of(folder / "no_members.npy") == file_format::npz);
    CHECK(pinflow::format_of(folder / "c.h5") == file_format::safetensors);
    CHECK(pinflow::format_of(folder / "no_tensors.npy") == file_format::safetensors);
    CHECK(elements_of(folder / "a.npz") == integers{0, 1, 2});
    CHECK(elements_of(folder / "b.npy") == integers{0, 1});
    CHECK(elements_of(folder / "c.h5") == integers{0, 1});

    const std::string signature = "\x89HDF\r\n\x1a\n";
    for (const std::size_t offset : {0u, 512u, 1024u, 2048u, 65536u}) {
        write_file(folder / "hdf5.npy", std::string(offset, 'u') + signature + "rest");
        CHECK(pinflow::format_of(folder / "hdf5.npy") == file_format::hdf5);
        // damaged, which only a build that can read the format finds out
        const auto opened = [&] { pinflow::open(folder / "hdf5.npy"); };
        if (pinflow::has_hdf5()) {
            CHECK(contains(message_of<pinflow::format_error>(opened), "hdf5.npy"));
            CHECK_THROWS_AS(pinflow::open(folder / "hdf5.npy", "x"), pinflow::format_error);
            CHECK_THROWS_AS(pinflow::list_arrays(folder / "hdf5.npy"), pinflow::format_error);
            continue;
        }
        const std::string refusal = message_of<pinflow::format_not_built>(opened);
        CHECK(contains(refusal, "hdf5.npy': this build of pinflow cannot read HDF5 files"));
        CHECK(contains(refusal, "build pinflow with -DPINFLOW_HDF5=ON"));
        CHECK_THROWS_AS(pinflow::open(folder / "hdf5.npy", "x"), pinflow::format_not_built);
        CHECK_THROWS_AS(pinflow::list_arrays(folder / "hdf5.npy"), pinflow::format_not_built);
    }
    write_file(folder / "hdf5.npy", std::string(1000, 'u') + signature);
    CHECK_THROWS_AS(pinflow::format_of(folder / "hdf5.npy"), pinflow::format_error);

    CHECK(pinflow::to_string(file_format::npy) == "npy");
    CHECK(pinflow::to_string(file_format::npz) == "npz");
    CHECK(pinflow::to_string(file_format::safetensors) == "safetensors");
    CHECK(pinflow::to_string(file_format::hdf5) == "hdf5");
}

TEST_CASE("open: a damaged beginning is reported by the reader that knows most about it") {
    const temporary_folder folder;
    const std::string path = folder / "file";
    const std::vector<std::pair<std::string, std::string>> table{
        {"", "the file is empty"},
        {"\x93NUM", "within the .npy header"},
        {"\x93NUMPY\1", "within the .npy header"},
        {eight_bytes(100) + "{}", "the header's length is given as 100 bytes, but only 2 follow"},
        {eight_bytes(std::uint64_t{1} << 40) + "{}", "the header's length is given as 1099511627776"},
        {eight_bytes(2) + "[]",
         R"(it is no .npy, .npz, safetensors or HDF5 file; it begins with '\x02\x00\x00\x00\x00\x00\x00\x00')"},
        {"12345678{}", "it begins with '12345678'"},
        {"hello\n", R"(it begins with 'hello\n')"},
        {"\x93NUMPX\1", R"(it begins with '\x93NUMPX\x01')"},
        {"PK\x01\x02", R"(it begins with 'PK\x01\x02')"},
        {"version https://git-lfs.github.com/spec/v1\n", "begins with 'version '. It is a Git LFS pointer"},
        {R"({"metadata": {}, "weight_map": {}})", "open the files that it names"},
        {"\x80\x02}q", "It may be a Python pickle"},
        {"\x80", R"(it begins with '\x80')"},
    };
    for (const auto& [content, part] : table) {
        CAPTURE(content);
        write_file(path, content);
        const std::string sentence = message_of<pinflow::format_error>([&] { pinflow::open(path); });
        CAPTURE(sentence);
        CHECK(sentence.starts_with("cannot open '" + path + "': "));
        CHECK(contains(sentence, part));
        CHECK(message_of<pinflow::format_error>([&] { pinflow::list_arrays(path); }) == sentence);
        CHECK(message_of<pinflow::format_error>([&] { pinflow::open(path, "x"); }) == sentence);
        CHECK(message_of<pinflow::format_error>([&] { pinflow::open_rows(path); }) == sentence);
    }
}

TEST_CASE(
    "open: every function refuses anything but a readable file with the same message, and without waiting") {
    const temporary_folder folder;
    REQUIRE(::mkfifo((folder / "fifo").c_str(), 0600) == 0);
    fs::create_symlink("nowhere", folder / "dangling");
    const auto refusal = [&](const std::string& path) {
        const std::string sentence = message_of<pinflow::error>([&] { pinflow::open_rows(path); });
        CHECK(contains(sentence, "'" + path + "'"));
        CHECK(message_of<pinflow::error>([&] { pinflow::format_of(path); }) == sentence);
        CHECK(message_of<pinflow::error>([&] { pinflow::list_arrays(path); }) == sentence);
        CHECK(message_of<pinflow::error>([&] { pinflow::open(path, "x"); }) == sentence);
        return sentence;
    };
    CHECK(contains(refusal(folder.path()), "it is a folder"));
    CHECK(contains(refusal(folder / "fifo"), "it is a named pipe"));
    CHECK(contains(refusal("/dev/zero"), "it is a device"));
    CHECK(contains(refusal(folder / "absent.npy"), "No such file"));
    CHECK(contains(refusal(folder / "dangling"), "No such file"));
    CHECK(contains(refusal(""), "No such file"));
    write_file(folder / "secret.npy", "x");
    REQUIRE(::chmod((folder / "secret.npy").c_str(), 0) == 0);
    if (::access((folder / "secret.npy").c_str(), R_OK) == 0) {
        MESSAGE("skipped: this user reads every file");
        return;
    }
    CHECK(contains(refusal(folder / "secret.npy"), "Permission denied"));
    // the files that match a pattern are unknown if their folder cannot be read
    fs::create_directory(folder / "locked");
    fs::permissions(folder / "locked", fs::perms::none);
    const std::string pattern = folder / "locked/*.npy";
    CHECK(contains(message_of<pinflow::system_failure>([&] { pinflow::open_rows(pattern); }),
                   "cannot look for the files that match '" + pattern + "': Permission denied"));
    fs::permissions(folder / "locked", fs::perms::owner_all);
}

// ---- names ------------------------------------------------------------------------------------------------

TEST_CASE("open: takes the one array of a file, or the one that is named") {
    const temporary_folder folder;
    write_npz(folder / "one.npz", {"x"});
    write_npz(folder / "two.npz", {"x", "y"});
    write_safetensors(folder / "one.safetensors", {""});
    write_safetensors(folder / "two.safetensors", {"x", "y"});
    CHECK(elements_of(*pinflow::open(folder / "one.npz").rows()) == integers{0, 1});
    CHECK(elements_of(*pinflow::open(folder / "one.safetensors").rows()) == integers{0, 1});
    CHECK(elements_of(*pinflow::open(folder / "two.npz", "y").rows()) == integers{2, 3});
    CHECK(elements_of(*pinflow::open(folder / "two.npz", "y.npy").rows()) == integers{2, 3});
    CHECK(elements_of(*pinflow::open(folder / "two.safetensors", "y").rows()) == integers{2, 3});
    for (const std::string file : {"two.npz", "two.safetensors"}) {
        const std::string path = folder / file;
        CHECK(contains_all(message_of<pinflow::invalid_argument>([&] { pinflow::open(path); }),
                           {"cannot open '" + path + "'", "without a name", "2 arrays", "'x', 'y'"}));
        CHECK(contains(message_of<pinflow::invalid_argument>([&] { pinflow::open(path, "z"); }), path));
        CHECK(contains(message_of<pinflow::invalid_argument>([&] { pinflow::open(path, ""); }), path));
    }
    write_npz(folder / "none.npz", {});
    CHECK(contains(message_of<pinflow::invalid_argument>([&] { pinflow::open(folder / "none.npz"); }),
                   "there is no array in it"));

    std::vector<std::string> many;
    for (int index = 0; index < 100; ++index)
        many.push_back("tensor" + std::to_string(index));
    write_safetensors(folder / "many.safetensors", many);
    const std::string sentence =
        message_of<pinflow::invalid_argument>([&] { pinflow::open(folder / "many.safetensors"); });
    CHECK(contains(sentence, "there are 100 arrays in it, 'tensor0', "));
    CHECK(sentence.ends_with("'tensor9', ..."));
}

TEST_CASE("open: a structured .npy file is one array, and its fields answer to their names") {
    const temporary_folder folder;
    const std::string path = folder / "points.npy";
    write_points(path);
    const auto whole = pinflow::open(path);
    CHECK(whole.dtype().fields().size() == 2);
    CHECK(whole.shape() == shape_vector{2});
    const auto listings = pinflow::list_arrays(path);
    REQUIRE(listings.size() == 1);
    CHECK(listings[0].dtype == whole.dtype());

    CHECK(pinflow::open(path, "at").shape() == shape_vector{2, 2});
    CHECK(elements_of(path + ":id") == integers{0, 3});
    CHECK(elements_of(path + ":at") == integers{1, 2, 4, 5});
    const std::string sentence = message_of<pinflow::invalid_argument>([&] { pinflow::open(path, "name"); });
    CHECK(sentence.starts_with("cannot open 'name' of '" + path + "': "));
    CHECK(contains(sentence, "id"));

    write_npy(folder / "plain.npy", counting(0, 2), {2});
    CHECK(contains(message_of<pinflow::invalid_argument>([&] { pinflow::open(folder / "plain.npy", "id"); }),
                   "plain.npy': it is a .npy file, whose one array has no name and no fields"));
}

TEST_CASE("open: the error for a path with a colon and a name shows the call that takes the name") {
    const temporary_folder folder;
    write_npz(folder / "a.npz", {"labels", "images"});
    const std::string sentence =
        message_of<pinflow::invalid_argument>([&] { pinflow::open(folder / "a.npz:labels"); });
    CHECK(contains(sentence, "a.npz\", \"labels\")"));
    CHECK(pinflow::open(folder / "a.npz", "labels").size_bytes() == 8);
    CHECK_THROWS_AS(pinflow::open(folder / "none.npz:labels"), pinflow::system_failure);
}

TEST_CASE("open: lists the arrays of every format") {
    const temporary_folder folder;
    write_npz(folder / "two.npz", {"x", "y"});
    write_safetensors(folder / "two.safetensors", {"y", "x"});
    CHECK(names_of(pinflow::list_arrays(folder / "two.npz")) == std::vector<std::string>{"x", "y"});
    CHECK(names_of(pinflow::list_arrays(folder / "two.safetensors")) == std::vector<std::string>{"y", "x"});

    const std::string path = folder / "fortran.npy";
    write_file(path, npy_bytes::header(npy_bytes::text("'>i2'", "(3, 2)", "True")) + std::string(13, 'x'));
    const auto listings = pinflow::list_arrays(path);
    REQUIRE(listings.size() == 1);
    const auto& listing = listings[0];
    const auto opened = pinflow::open(path);
    CHECK(listing.name.empty());
    CHECK(listing.dtype == dtype::parse(">i2"));
    CHECK(listing.shape == shape_vector{3, 2});
    CHECK(listing.fortran_order);
    CHECK(listing.offset_bytes == fs::file_size(path) - 13);
    CHECK(listing.size_bytes == 12);
    CHECK(listing.mappable);
    CHECK(listing.reason == opened.reason());
    write_file(path, npy_bytes::header(npy_bytes::text("'|u1'", "(1, 1)", "True")) + "x");
    CHECK(pinflow::list_arrays(path)[0].fortran_order);
    write_file(path, npy_bytes::header(npy_bytes::text("'|O'", "(1,)")) + "x");
    CHECK(contains(message_of<pinflow::unsupported>([&] { pinflow::list_arrays(path); }), path));
}

TEST_CASE("open: FILE:NAME is cut at the longest prefix that exists") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_npz(folder / "a", {"x"});
    write_npz(folder / "a:b", {"x"});
    write_npz(folder / ":", {"x"});
    const auto split = [](const std::string& text) {
        const auto result = pinflow::split_file_and_name(text);
        return fmt::format("{}|{}|{}", fs::path(result.path).filename().string(), result.name, result.named);
    };
    CHECK(split(at + "/a") == "a||false");
    CHECK(split(at + "/a:x") == "a|x|true");
    CHECK(split(at + "/a:") == "a||true");
    CHECK(split(at + "/a::x") == "a|:x|true");
    CHECK(split(at + "/a:b") == "a:b||false");
    CHECK(split(at + "/a:b:x") == "a:b|x|true");
    CHECK(split(at + "/a:b:x:y") == "a:b|x:y|true");
    CHECK(split(at + "/a:c:x") == "a|c:x|true");
    CHECK(split(at + "/:") == ":||false");
    CHECK(split(at + "/::x") == ":|x|true");
    CHECK(split(at + "/absent:x") == "absent:x||false");
    CHECK(split(":x") == ":x||false");
    CHECK(split("") == "||false");
    CHECK(elements_of(at + "/a:b:x") == integers{0, 1});
    CHECK_THROWS_AS(pinflow::open_rows(at + "/a:"), pinflow::invalid_argument);
}

// ---- several files ----------------------------------------------------------------------------------------

TEST_CASE("open: a pattern stands for all files that match, in the order of the numbers in their names") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    const std::vector<std::string> in_order{"part-1",
                                            "part-2",
                                            "part-2b",
                                            "part-03",
                                            "part-10",
                                            "part-10a",
                                            "part-10b2",
                                            "part-10b12",
                                            "part-99999999999999999999999",
                                            "part-100000000000000000000000",
                                            "part-x"};
    for (std::size_t index = 0; index < in_order.size(); ++index) {
        write_npy(folder / (in_order[index] + ".npy"), counting(static_cast<std::int32_t>(index), 1), {1});
    }
    write_file(folder / "other.txt", "no array");
    write_file(folder / ".part-0.npy", "hidden, as from the shell");
    CHECK(elements_of(at + "/part-*.npy") == counting(0, in_order.size()));
    CHECK(elements_of(at + "/part-?.npy") == integers{0, 1, 10});
    CHECK(elements_of(at + "/part-[12].npy") == integers{0, 1});
    CHECK(elements_of(at + "/part-[!1x].npy") == integers{1});
    CHECK(elements_of(at + "/p*-1.npy") == integers{0});
    CHECK(pinflow::open_rows(at + "/part-*.npy")->extents().size() == in_order.size());

    fs::create_directory(folder / "run9");
    fs::create_directory(folder / "run10");
    write_npy(folder / "run10" / "1.npy", counting(1, 1), {1});
    write_npy(folder / "run9" / "2.npy", counting(0, 1), {1});
    CHECK(elements_of(at + "/run*/*.npy") == integers{0, 1});

    for (const std::string pattern : {"/absent-*.npy", "/*.npz", "/part-1*.npy/x", "/nowhere/*"}) {
        CAPTURE(pattern);
        CHECK(contains_all(message_of<pinflow::invalid_argument>([&] { pinflow::open_rows(at + pattern); }),
                           {"cannot open '" + at + pattern + "'", "no file has that"}));
    }
    CHECK(contains(message_of<pinflow::format_error>([&] { pinflow::open_rows(at + "/other*"); }),
                   "other.txt'"));
}

TEST_CASE("open: numbers that differ in leading zeros only still have one order") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_npy(folder / "1.npy", {1}, {1});
    write_npy(folder / "01.npy", {0}, {1});
    write_npy(folder / "001.npy", {-1}, {1});
    write_npy(folder / "0.npy", {-2}, {1});
    CHECK(elements_of(at + "/*.npy") == integers{-2, -1, 0, 1});
}

TEST_CASE("open: a path with wildcards is a file if a file has exactly that name") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_npy(folder / "a*.npy", counting(7, 1), {1});
    write_npy(folder / "ab.npy", counting(8, 1), {1});
    write_npy(folder / "[1].npy", counting(9, 1), {1});
    CHECK(elements_of(at + "/a*.npy") == integers{7});
    CHECK(elements_of(at + "/?b.npy") == integers{8});
    CHECK(elements_of(at + "/[1].npy") == integers{9});
    CHECK(elements_of(at + "/a\\**.npy") == integers{7});
}

TEST_CASE("open: a NAME after a pattern applies to every file") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_npz(folder / "part-2.npz", {"x", "y"});
    write_npz(folder / "part-10.npz", {"y"});
    write_safetensors(folder / "part-11.npz", {"a", "b", "y"});
    write_points(folder / "points-1.npy");
    write_points(folder / "points-2.npy");
    CHECK(elements_of(at + "/part-*.npz:y") == integers{2, 3, 0, 1, 4, 5});
    CHECK(elements_of(at + "/points-*:id") == integers{0, 3, 0, 3});
    CHECK(contains(message_of<pinflow::invalid_argument>([&] { pinflow::open_rows(at + "/part-*.npz:x"); }),
                   "part-10.npz"));
    CHECK(contains(message_of<pinflow::invalid_argument>([&] { pinflow::open_rows(at + "/part-*.npz"); }),
                   "part-2.npz' without a name"));
    CHECK(contains(message_of<pinflow::invalid_argument>([&] { pinflow::open_rows(at + "/no-*.npz:x"); }),
                   "no file has that name or matches it"));
}

TEST_CASE("open: files of a pattern must be alike, and each must have an axis") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_npy(folder / "a1.npy", counting(0, 6), {2, 3});
    write_npy(folder / "a2.npy", counting(6, 3), {1, 3});
    write_npy(folder / "a3.npy", {}, {0, 3});
    CHECK(elements_of(at + "/a*.npy") == counting(0, 9));
    write_npy(folder / "a4.npy", counting(0, 6), {3, 2});
    const std::string shapes =
        message_of<pinflow::invalid_argument>([&] { pinflow::open_rows(at + "/a*.npy"); });
    CHECK(contains(shapes, "a4.npy"));
    CHECK(contains(shapes, "(3,)"));
    CHECK(contains(shapes, "(2,)"));
    const std::vector<float> floats(3);
    pinflow::write_npy(folder / "a4.npy",
                       {std::as_bytes(std::span(floats)).data(), dtype::of<float>(), {1, 3}});
    const std::string types =
        message_of<pinflow::invalid_argument>([&] { pinflow::open_rows(at + "/a*.npy"); });
    CHECK(contains(types, "<i4"));
    CHECK(contains(types, "<f4"));
    write_npy(folder / "a4.npy", counting(0, 1), {});
    CHECK_THROWS_AS(pinflow::open_rows(at + "/a*.npy"), pinflow::unsupported);
    fs::create_directory(folder / "a5.npy");
    CHECK_THROWS_AS(pinflow::open_rows(at + "/a[25].npy"), pinflow::format_error);
}

// ---- streams of elements ----------------------------------------------------------------------------------

TEST_CASE("open: elements of any format can be streamed") {
    const temporary_folder folder;
    write_npy(folder / "a.npy", counting(0, 6), {2, 3});
    write_npz(folder / "b.npz", {"x", "y"});
    write_npz(folder / "one.npz", {"x"});
    write_safetensors(folder / "c.safetensors", {"x", "y"});
    write_points(folder / "d.npy");
    const auto streamed = [&](const std::string& file, const std::string& name) {
        const auto stream = pinflow::detail::open_elements(folder / file)->stream(name, 1 << 20);
        integers elements(pinflow::element_count(stream->shape()));
        REQUIRE(stream->dtype() == dtype::of<std::int32_t>());
        stream->read(std::as_writable_bytes(std::span(elements)));
        stream->finish();
        return elements;
    };
    CHECK(streamed("a.npy", "") == counting(0, 6));
    CHECK(streamed("b.npz", "y") == integers{2, 3});
    CHECK(streamed("one.npz", "x") == integers{0, 1});
    CHECK(streamed("c.safetensors", "x") == integers{0, 1});
    CHECK(streamed("d.npy", "at") == integers{1, 2, 4, 5});
    CHECK_THROWS_AS(streamed("b.npz", ""), pinflow::invalid_argument);
    CHECK_THROWS_AS(streamed("c.safetensors", ""), pinflow::invalid_argument);
    CHECK_THROWS_AS(streamed("a.npy", "x"), pinflow::invalid_argument);
}

TEST_CASE("open: the elements of several arrays come from the opened file, not from its replacement") {
    const temporary_folder folder;
    for (const std::string file : {"a.npz", "a.safetensors"}) {
        CAPTURE(file);
        const auto write = [&](const std::string& path, const std::vector<std::string>& names) {
            file == "a.npz" ? write_npz(path, names) : write_safetensors(path, names);
        };
        write(folder / file, {"x", "y"});
        const auto elements = pinflow::detail::open_elements(folder / file);
        write(folder / "other", {"z"});
        fs::rename(folder / "other", folder / file);
        for (const auto& [name, expected] :
             {std::pair{"y", integers{2, 3}}, std::pair{"x", integers{0, 1}}}) {
            const auto stream = elements->stream(name, 1 << 20);
            integers read(2);
            stream->read(std::as_writable_bytes(std::span(read)));
            CHECK(read == expected);
            CHECK_THROWS_AS(stream->finish(), pinflow::data_changed);
        }
        CHECK_THROWS_AS(elements->stream("z", 1 << 20), pinflow::invalid_argument);
    }
}
