#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/pinflow.hpp"
#include "tests/cli_helpers.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

// Rewriting arrays: the output, and the files left after failures.

namespace {

using cli::check_fails;
using cli::counting_bytes;
using cli::names_in;
using cli::npy;
using npy_bytes::read_file;
using npy_bytes::write_file;

void convert(cli::arguments arguments) {
    arguments.insert(arguments.begin(), "convert");
    CAPTURE(cli::joined(arguments));
    const tool_result result = run_tool(arguments);
    CAPTURE(result.errors);
    REQUIRE(result.status == 0);
    CHECK(result.errors.empty());  // progress is for terminals
    CHECK(result.output.find("GB/s") != std::string::npos);
}

struct content {
    std::string descr;
    std::string shape;
    std::string bytes;
};

/// What FILE or FILE:NAME holds, which is in C order, little-endian and at a multiple of the alignment.
content read_back(const std::string& file, const std::string& name = "", std::uint64_t alignment = 4096) {
    CAPTURE(file);
    const pinflow::array array = name.empty() ? pinflow::open(file) : pinflow::open(file, name);
    CHECK(array.view().c_contiguous());
    CHECK(array.dtype().is_little_endian());
    CHECK(array.offset_bytes() % alignment == 0);
    const auto* const data = reinterpret_cast<const char*>(array.view().data());
    return {array.dtype().descr(), pinflow::to_string(array.shape()),
            array.size_bytes() == 0 ? "" : std::string(data, array.size_bytes())};
}

void check_content(const content& found, const content& expected) {
    CHECK(found.descr == expected.descr);
    CHECK(found.shape == expected.shape);
    CHECK((found.bytes == expected.bytes));  // in brackets: too long to print
}

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string reversed(std::string text, std::size_t size) {
    for (std::size_t begin = 0; begin < text.size(); begin += size) {
        std::reverse(text.begin() + static_cast<std::ptrdiff_t>(begin),
                     text.begin() + static_cast<std::ptrdiff_t>(begin + size));
    }
    return text;
}

}  // namespace

// ---- what comes out ---------------------------------------------------------------------------------------

TEST_CASE("convert: any order and byte order becomes C order, little-endian and aligned, in every format") {
    const temporary_folder folder;
    const std::vector<std::int32_t> values{1, 2, 3, 4, 5, 6};
    const std::string plain = bytes_of(values);
    write_file(folder / "plain.npy", npy("<i4", "(2, 3)", plain + "trailing"));
    write_file(folder / "big.npy", npy(">i4", "(2, 3)", reversed(plain, 4)));
    write_file(folder / "fortran.npy",
               npy("<i4", "(2, 3)", bytes_of<std::int32_t>({1, 4, 2, 5, 3, 6}), "True"));
    write_file(folder / "none.npy", npy("<i4", "(0, 3)", ""));
    write_file(folder / "scalar.npy", npy(">i4", "()", reversed(plain.substr(0, 4), 4)));
    write_file(folder / "stored.npz", zip_bytes::make({{"data.npy", npy("<i4", "(2, 3)", plain)}}).bytes);
    write_file(folder / "deflated.npz",
               zip_bytes::make({{"data.npy", npy(">i4", "(2, 3)", reversed(plain, 4)), true}}).bytes);
    write_file(folder / "one.safetensors",
               cli::safetensors(R"({"x":{"dtype":"I32","shape":[2,3],"data_offsets":[0,24]}})", plain));
    for (const char* const extension : {"npy", "npz", "safetensors"}) {
        const std::string out = folder / fmt::format("out.{}", extension);
        for (const char* const in :
             {"plain.npy", "big.npy", "fortran.npy", "stored.npz", "deflated.npz", "one.safetensors"}) {
            CAPTURE(in);
            convert({folder / in, out});
            check_content(read_back(out), {"<i4", "(2, 3)", plain});
        }
        convert({folder / "none.npy", out});
        CHECK(pinflow::open(out).shape() == pinflow::shape_vector{0, 3});
        convert({folder / "scalar.npy", out});
        check_content(read_back(out), {"<i4", "()", plain.substr(0, 4)});
    }
    CHECK(names_in(folder.path()).size() == 11);  // nothing temporary is left
}

TEST_CASE("convert: structured types stay whole in .npy, and their fields can be taken out") {
    const temporary_folder folder;
    const std::string in = folder / "in.npy", out = folder / "out.npy";
    // two elements of 5 bytes
    write_file(in, npy("[('x', '>i2'), ('y', '|u1', (3,))]", "(2,)", std::string("\0\1abc\0\2def", 10)));
    convert({in, out});
    check_content(read_back(out),
                  {"[('x', '<i2'), ('y', '|u1', (3,))]", "(2,)", std::string("\1\0abc\2\0def", 10)});
    convert({in + ":x", out});
    check_content(read_back(out), {"<i2", "(2,)", std::string("\1\0\2\0", 4)});
    convert({in + ":y", out});
    check_content(read_back(out), {"|u1", "(2, 3)", "abcdef"});
    check_fails(1, {"convert", in, folder / "out.safetensors"}, {"safetensors", "--view-as"});
    check_fails(1, {"convert", in + ":z", out}, {"'z'", "'x'"});
}

TEST_CASE("convert: the arrays of an archive keep their names, a single array is called data") {
    const temporary_folder folder;
    const std::string in = folder / "in.npz";
    write_file(in, zip_bytes::make({{"small.npy", npy("|u1", "(3,)", "123")},
                                    {"large.npy", npy("<f8", "(2,)", counting_bytes(16)), true},
                                    {"dir/two.npy", npy("<i2", "()", "ab")}})
                       .bytes);
    const std::string archive = folder / "out.npz", tensors = folder / "out.safetensors";
    for (const std::string& out : {archive, tensors}) {
        convert({in, out});
        CHECK(pinflow::list_arrays(out).size() == 3);
        check_content(read_back(out, "large"), {"<f8", "(2,)", counting_bytes(16)});
        check_content(read_back(out, "small", 1), {"|u1", "(3,)", "123"});
        check_content(read_back(out, "dir/two", 2), {"<i2", "()", "ab"});
    }
    // all members of a .npz begin on a page; tensors have no gaps, so the largest elements go first
    for (const pinflow::array_listing& each : pinflow::list_arrays(archive)) {
        CHECK(each.mappable);
        CHECK(*each.offset_bytes % 4096 == 0);
    }
    const auto listed = pinflow::list_arrays(tensors);
    CHECK(listed[0].name == "large");
    CHECK(listed[1].name == "dir/two");
    CHECK(listed[2].name == "small");

    for (const std::string& out : {archive, tensors}) {
        convert({in + ":small", out});
        check_content(read_back(out, "data"), {"|u1", "(3,)", "123"});
        std::filesystem::remove(out);
        convert({in + ":small.npy", out + ":renamed:so"});
        check_content(read_back(out, "renamed:so"), {"|u1", "(3,)", "123"});
        convert({in + ":large", out + ":renamed:so"});  // the only array there may be replaced
        check_content(read_back(out, "renamed:so"), {"<f8", "(2,)", counting_bytes(16)});
        CHECK(pinflow::list_arrays(out).size() == 1);
    }
}

TEST_CASE("convert: an archive of 300 arrays keeps them all, and an empty one cannot become a .npy file") {
    const temporary_folder folder;
    const std::string in = folder / "in.npz", out = folder / "out.safetensors", back = folder / "back.npz";
    std::vector<zip_bytes::member> members;
    for (int i = 0; i < 300; ++i) {
        members.push_back(
            {fmt::format("layer.{}.npy", i), npy("<i2", "(2,)", counting_bytes(4)), i % 2 == 0});
    }
    write_file(in, zip_bytes::make(members).bytes);
    convert({in, out});
    convert({out, back});
    CHECK(pinflow::list_arrays(back).size() == 300);
    check_content(read_back(back, "layer.17"), {"<i2", "(2,)", counting_bytes(4)});

    write_file(in, zip_bytes::make({}).bytes);
    convert({in, out});
    CHECK(pinflow::list_arrays(out).empty());
    check_fails(1, {"convert", in, folder / "out.npy"}, {"no array"});
    check_fails(1, {"convert", in, folder / "named.npz:x"}, {"no array"});
}

TEST_CASE("convert: the metadata of a safetensors file is kept") {
    const temporary_folder folder;
    const std::string in = folder / "in.safetensors", out = folder / "out.safetensors";
    write_file(in, cli::safetensors(R"({"__metadata__":{"format":"pt","by \"x\"":"\u00e9"},)"
                                    R"("a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})",
                                    "abcd"));
    convert({in, out});
    const std::string bytes = read_file(out);
    const auto header = pinflow::parse_safetensors_header(npy_bytes::as_bytes(bytes), bytes.size());
    CHECK(header.metadata == std::map<std::string, std::string>{{"format", "pt"}, {"by \"x\"", "\xc3\xa9"}});
    check_content(read_back(out), {"bfloat16", "(2,)", "abcd"});
}

TEST_CASE("convert: a tensor with an empty name is kept in safetensors, and refused in .npz") {
    const temporary_folder folder;
    const std::string in = folder / "in.safetensors", out = folder / "out.safetensors";
    write_file(in, cli::safetensors(R"({"":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                                    R"("a":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}})",
                                    "12abc"));
    convert({in, out});
    REQUIRE(pinflow::list_arrays(out).size() == 2);
    CHECK(read_back(out, "a", 1).bytes == "abc");
    const pinflow::array nameless = pinflow::open(out, "");
    CHECK(std::string(reinterpret_cast<const char*>(nameless.view().data()), nameless.size_bytes()) == "12");
    check_fails(1, {"convert", in, folder / "out.npz"}, {"empty"});
}

TEST_CASE("convert: reinterprets bytes as another type, then casts numbers") {
    const temporary_folder folder;
    const std::string in = folder / "in.npy", out = folder / "out.npy";
    write_file(in, npy("<f4", "(4,)", bytes_of<float>({1.5F, -1e9F, 300.5F, 65504.F})));
    convert({in, out, "--dtype", "int16"});
    check_content(read_back(out), {"<i2", "(4,)", bytes_of<std::int16_t>({1, -32768, 300, 32767})});
    convert({in, out, "--dtype=<f8"});
    check_content(read_back(out), {"<f8", "(4,)", bytes_of<double>({1.5, -1e9, 300.5, 65504.})});
    convert({in, out, "--view-as", "<u4"});
    CHECK(read_back(out).descr == "<u4");
    CHECK((read_back(out).bytes == bytes_of<float>({1.5F, -1e9F, 300.5F, 65504.F})));

    // the types that numpy lacks: named in safetensors, anonymous in .npy
    convert({in, folder / "out.safetensors", "--dtype", "bfloat16"});
    const content half = read_back(folder / "out.safetensors");
    CHECK(half.descr == "bfloat16");
    CHECK(half.bytes.substr(0, 2) == std::string("\xc0\x3f", 2));
    const tool_result result = run_tool({"convert", in, out, "--dtype", "bfloat16"});
    CHECK(result.output.find("note: numpy has no bfloat16: it is written as |V2") != std::string::npos);
    const std::string floats = folder / "floats.safetensors";
    write_file(floats, cli::safetensors(R"({"a":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]},)"
                                        R"("b":{"dtype":"F8_E5M2","shape":[2],"data_offsets":[2,4]},)"
                                        R"("c":{"dtype":"F8_E5M2","shape":[2],"data_offsets":[4,6]},)"
                                        R"("d":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[6,7]}})",
                                        "abcdefg"));
    const std::string said = run_tool({"convert", floats, folder / "floats.npz"}).output;
    CHECK(said.find("no float8_e4m3fn: 'a' is written as |V1") != std::string::npos);
    CHECK(said.find("no float8_e5m2: 'b', 'c' are written as |V1") != std::string::npos);
    CHECK(said.find("no float8_e8m0fnu: 'd' is written as |V1") != std::string::npos);
    check_content(read_back(out), {"|V2", "(4,)", half.bytes});
    convert({out, folder / "back.npy", "--view-as", "bfloat16", "--dtype", "float32"});
    CHECK(read_back(folder / "back.npy").bytes.substr(0, 4) == bytes_of<float>({1.5F}));

    write_file(in, npy("<M8[ns]", "(2,)", bytes_of<std::int64_t>({7, -1})));
    convert({in, folder / "out.safetensors", "--view-as", "int64"});
    check_content(read_back(folder / "out.safetensors"), {"<i8", "(2,)", bytes_of<std::int64_t>({7, -1})});
}

TEST_CASE("convert: --align chooses where the data begins") {
    const temporary_folder folder;
    const std::string in = folder / "in.npy";
    write_file(in, npy("<i2", "(2, 3)", counting_bytes(12)));
    for (const char* const extension : {"npy", "npz", "safetensors"}) {
        const std::string out = folder / fmt::format("out.{}", extension);
        for (const std::uint64_t alignment : {16u, 64u, 4096u, 8192u}) {
            convert({in, out, "--align", fmt::format("{}", alignment)});
            check_content(read_back(out, "", alignment), {"<i2", "(2, 3)", counting_bytes(12)});
        }
    }
    convert({in, folder / "out.safetensors", "--align", "2MiB"});
    check_content(read_back(folder / "out.safetensors", "", 2 << 20), {"<i2", "(2, 3)", counting_bytes(12)});
}

TEST_CASE("convert: a file of many pieces comes out whole, in bounded memory") {
    const temporary_folder folder;
    const std::string in = folder / "in.npy", out = folder / "out.npy";
    const std::size_t rows = 25'000, columns = 1003;  // pieces end within rows
    const std::string bytes = counting_bytes(rows * columns);
    write_file(in, npy("|u1", fmt::format("({}, {})", rows, columns), bytes));
    convert({in, out});
    check_content(read_back(out), {"|u1", "(25000, 1003)", bytes});
    convert({in, out, "--dtype", "<u4"});
    const pinflow::array wide = pinflow::open(out);
    const auto* const elements = wide.view().as<std::uint32_t>();
    std::uint64_t wrong = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i)
        wrong += elements[i] != static_cast<unsigned char>(bytes[i]) ? 1u : 0u;
    CHECK(wrong == 0);
    convert({in, folder / "out.npz"});
    check_content(read_back(folder / "out.npz"), {"|u1", "(25000, 1003)", bytes});

    if (sanitized) return;
    write_file(in, npy("|u1", "(262144, 1024)", ""));
    std::filesystem::resize_file(in, std::filesystem::file_size(in) + (std::uint64_t{1} << 28));
    const tool_result result = run_tool({"convert", in, out});
    CHECK(result.status == 0);
    CHECK(result.peak_bytes < (std::uint64_t{128} << 20));
    CHECK(std::filesystem::file_size(out) == 4096 + (std::uint64_t{1} << 28));
}

// ---- what is left -----------------------------------------------------------------------------------------

TEST_CASE("convert: onto its own input, under any of its names, writes the new file and loses no array") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy", hard = folder / "hard.npy", soft = folder / "soft.npy";
    const std::string old = npy(">i4", "(2, 3)", reversed(counting_bytes(24), 4));
    const content expected{"<i4", "(2, 3)", counting_bytes(24)};

    write_file(path, old);
    convert({path, path});
    check_content(read_back(path), expected);
    convert({path, path});
    check_content(read_back(path), expected);

    write_file(path, old);
    std::filesystem::create_hard_link(path, hard);
    convert({path, hard});
    check_content(read_back(hard), expected);
    CHECK(read_file(path) == old);

    std::filesystem::create_symlink("a.npy", soft);
    convert({path, soft});  // replaces the link, not its target
    check_content(read_back(soft), expected);
    CHECK(read_file(path) == old);
    std::filesystem::remove(soft);
    std::filesystem::create_symlink("a.npy", soft);
    convert({soft, path});
    check_content(read_back(path), expected);
    check_content(read_back(soft), expected);

    const std::string archive = folder / "a.npz";
    write_file(archive, zip_bytes::make({{"x.npy", npy("|u1", "(3,)", "123"), true},
                                         {"y.npy", npy("<i2", "(1,)", "ab"), true}})
                            .bytes);
    convert({archive, archive});
    check_content(read_back(archive, "x"), {"|u1", "(3,)", "123"});
    check_content(read_back(archive, "y"), {"<i2", "(1,)", "ab"});
}

TEST_CASE("convert: the new file has the permissions of the one that it replaces") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    write_file(path, npy(">i4", "(2, 3)", counting_bytes(24)));
    using std::filesystem::perms;
    for (const perms mode : {perms::owner_read | perms::owner_write, perms(0640), perms(0666)}) {
        std::filesystem::permissions(path, mode);
        convert({path, path});
        CHECK(std::filesystem::status(path).permissions() == mode);
    }
}

TEST_CASE("convert: a member is named with and without .npy, and folders in an archive do not matter") {
    const temporary_folder folder;
    const std::string in = folder / "in.npz", out = folder / "out.npz";
    write_file(
        in, zip_bytes::make(
                {{"sub/", ""}, {"sub/x.npy", npy("|u1", "(3,)", "123")}, {"y.npy", npy("|u1", "(1,)", "4")}})
                .bytes);
    convert({in, out});
    check_content(read_back(out, "sub/x"), {"|u1", "(3,)", "123"});
    check_content(read_back(out, "y"), {"|u1", "(1,)", "4"});
    std::filesystem::remove(out);
    convert({in + ":y", out + ":w.npy"});
    check_content(read_back(out, "w"), {"|u1", "(1,)", "4"});
    CHECK(pinflow::list_arrays(out).front().name == "w");
}

TEST_CASE("convert: arrays that cannot be converted are exit status 1, add no file, and change none") {
    const temporary_folder folder;
    const auto path = [&](const char* name) { return std::string(folder / name); };
    write_file(path("a.npy"), npy("<f4", "(2, 3)", counting_bytes(24)));
    write_file(path("text.npy"), npy("<U2", "(3,)", counting_bytes(24)));
    write_file(path("time.npy"), npy("<M8[ns]", "(3,)", counting_bytes(24)));
    write_file(
        path("two.npz"),
        zip_bytes::make({{"x.npy", npy("|u1", "(3,)", "123")}, {"y.npy", npy("|u1", "(3,)", "123")}}).bytes);
    write_file(
        path("pickled.npz"),
        zip_bytes::make({{"x.npy", npy("|u1", "(3,)", "123")}, {"o.npy", npy("|O", "(3,)", "123")}}).bytes);
    auto wrong = zip_bytes::make({{"x.npy", npy("|u1", "(3,)", "123")}});
    wrong.bytes[wrong.datas[0] + npy("|u1", "(3,)", "").size()] = 'x';  // does not match its CRC-32
    write_file(path("crc.npz"), wrong.bytes);
    std::filesystem::create_symlink("two.npz", path("link.npz"));
    write_file(path("fields.npy"),
               npy_bytes::header(npy_bytes::text("[('a', '|u1'), ('b', '|u1')]", "(2,)")) + "1234");
    write_file(path("cut.npz"), read_file(path("two.npz")).substr(0, 100));
    write_file(path("other.npz"), std::string("\x89HDF\r\n\x1a\n") + std::string(100, '0'));
    std::filesystem::create_directory(path("folder.npy"));
    write_file(path("file"), "no folder");
    for (const char* const out : {"out.npy", "out.npz", "out.safetensors"})
        write_file(path(out), "old");
    const auto contents = [&] {
        std::map<std::string, std::string> all;
        for (const std::string& name : names_in(folder.path()))
            all[name] = std::filesystem::is_regular_file(folder / name) ? read_file(folder / name) : "";
        return all;
    };
    const auto contents_before = contents();

    const std::vector<std::pair<cli::arguments, std::vector<std::string>>> table{
        {{path("absent.npy"), path("out.npy")}, {"absent.npy"}},
        {{path("a.npy"), path("absent/out.npy")}, {"absent/out.npy"}},
        {{path("a.npy"), path("file/out.npy")}, {"file/out.npy"}},
        {{path("a.npy"), path("folder.npy")}, {"folder.npy"}},
        {{path("file"), path("out.npy")}, {"file"}},
        {{path("a.npy:x"), path("out.npy")}, {"'x'"}},
        {{path("two.npz:z"), path("out.npy")}, {"'z'", "'x'", "'y'"}},
        {{path("two.npz"), path("out.npy")}, {"'x'", "'y'"}},
        {{path("two.npz"), path("out.npz:x")}, {"'x'", "'y'"}},
        {{path("pickled.npz"), path("out.npz")},
         {"o", "pickle", "choose one array as '", "pickled.npz:NAME"}},
        {{path("crc.npz"), path("out.npy")}, {"CRC"}},
        {{path("crc.npz"), path("crc.npz")}, {"CRC"}},
        {{path("crc.npz"), path("out.safetensors")}, {"CRC"}},
        {{path("a.npy"), path("out.npy"), "--dtype", "<U2"}, {"<f4", "<U2", "--view-as"}},
        {{path("text.npy"), path("out.npy"), "--dtype", "<f4"}, {"<U2", "<f4"}},
        {{path("time.npy"), path("out.npy"), "--dtype", "<i8"}, {"<M8[ns]", "--view-as"}},
        {{path("time.npy"), path("out.safetensors")}, {"<M8[ns]", "--view-as"}},
        {{path("text.npy"), path("out.safetensors")}, {"<U2", "--view-as"}},
        {{path("a.npy"), path("out.npy"), "--view-as", "<f8"}, {"4 bytes", "<f8 takes 8"}},
        // would lose what else is there
        {{path("a.npy"), path("two.npz:x")}, {"two.npz", "'y'", "lost"}},
        {{path("a.npy"), path("two.npz:z")}, {"'x'", "'y'", "lost"}},
        {{path("two.npz:x"), path("two.npz")}, {"'y'", "lost"}},
        {{path("two.npz:x.npy"), path("two.npz")}, {"'y'", "lost"}},
        {{path("two.npz:x"), path("link.npz")}, {"'y'", "lost"}},
        {{path("fields.npy:a"), path("fields.npy")}, {"field", "lost"}},
        {{path("a.npy"), path("cut.npz:x")}, {"cut.npz", "cannot be listed"}},
        {{path("a.npy"), path("other.npz:x")}, {"other.npz", "cannot be listed"}},
    };
    for (const auto& [arguments, says] : table) {
        cli::arguments command = arguments;
        command.insert(command.begin(), "convert");
        check_fails(1, command, says);
        CHECK(contents() == contents_before);
    }
}

TEST_CASE("arguments: a type in brackets is shown as it was given, and a file in brackets is a path") {
    const temporary_folder folder;
    write_file(folder / "[a].npy", npy("<f4", "(2,)", counting_bytes(8)));
    const tool_result result =
        run_tool({"convert", folder / "[a].npy", folder / "out.npy", "--dtype", "[('a', '<i8')]"});
    CHECK(result.status != 0);
    CHECK(contains(result.errors, "'[('a', '<i8')]'"));
    const auto home = std::filesystem::current_path();
    std::filesystem::current_path(folder.path());
    CHECK(run_tool({"convert", "[a].npy", "[b].npy"}).status == 0);
    write_file("[a,b].npy", npy("<f4", "(2,)", counting_bytes(8)));
    CHECK(run_tool({"stream", "--device", "host", "--json", "[a,b].npy"}).status == 0);
    std::filesystem::current_path(home);
    CHECK(std::filesystem::exists(folder / "[b].npy"));
}

TEST_CASE("convert: an input that changes during conversion is an error, and keeps the old output") {
    const temporary_folder folder;
    const std::string in = folder / "in.npy", out = folder / "out.npy";
    write_file(in, npy("|u1", "(16777216,)", counting_bytes(16'777'216)));
    write_file(out, "old");
    const cli::restless_file writer(in);
    check_fails(1, {"convert", in, out}, {"in.npy", "changed"});
    CHECK(read_file(out) == "old");
    CHECK(names_in(folder.path()) == std::set<std::string>{"in.npy", "out.npy"});
}

TEST_CASE("convert: a file above the limit on file sizes is an error, and leaves nothing behind") {
    const temporary_folder folder;
    const std::string in = folder / "in.npy";
    write_file(in, npy("|u1", "(3000000,)", counting_bytes(3'000'000)));
    tool_surroundings narrow;
    narrow.max_file_bytes = 1 << 20;
    for (const char* const extension : {"npy", "npz", "safetensors"}) {
        const std::string out = folder / fmt::format("out.{}", extension);
        write_file(out, "old");
        const tool_result result = run_tool({"convert", in, out}, narrow);
        CAPTURE(result.errors);
        CHECK(result.status == 1);
        CHECK(result.one_error_line());
        CHECK(read_file(out) == "old");
    }
    CHECK(names_in(folder.path()) ==
          std::set<std::string>{"in.npy", "out.npy", "out.npz", "out.safetensors"});
}

TEST_CASE("convert: answers wrong usage with exit status 2, and touches nothing") {
    const temporary_folder folder;
    const std::string in = folder / "in.npy", out = folder / "out.npy";
    write_file(in, npy("<f4", "(2, 3)", counting_bytes(24)));
    write_file(folder / "a.h5", "\x89HDF\r\n\x1a\n" + std::string(60, '\0'));
    const std::vector<std::pair<cli::arguments, std::vector<std::string>>> table{
        {{}, {"required"}},
        {{in}, {"required"}},
        {{in, out, out}, {}},
        {{in, out, "--json"}, {"--json"}},
        {{in, out, "--dtype"}, {"--dtype"}},
        {{in, out, "--dtype", "q7"}, {"--dtype", "q7"}},
        {{in, out, "--dtype", ""}, {"--dtype"}},
        {{in, out, "--dtype", "|O"}, {"--dtype"}},
        {{in, out, "--dtype", ">f4"}, {"--dtype", ">f4"}},
        {{in, out, "--view-as", ">f4"}, {"--view-as", ">f4"}},
        {{in, out, "--view-as", "float"}, {"--view-as"}},
        {{in, out, "--align", "0"}, {"--align"}},
        {{in, out, "--align", "8"}, {"--align"}},
        {{in, out, "--align", "100"}, {"--align"}},
        {{in, out, "--align", "16384"}, {"--align"}},
        {{in, folder / "out.safetensors", "--align", "4MiB"}, {"--align"}},
        {{in, out, "--align", "-16"}, {"--align"}},
        {{in, out, "--align", "1KB"}, {"--align"}},
        {{in, folder / "out"}, {".npy", ".npz", ".safetensors"}},
        {{in, "shm:out.npy"}, {"shm:out.npy", "pinflow pin", "./shm:out.npy"}},
        {{in, folder / "out.hdf"}, {".npy", ".npz", ".safetensors", ".h5"}},
        {{in, out, "--deflate", "1"}, {"--deflate"}},
        {{in, folder / "out.NPY"}, {".npy", ".npz", ".safetensors"}},
        {{in, folder / ".npy"}, {".npy", ".npz", ".safetensors"}},
        {{in, out + ":data"}, {"out.npy", "data"}},
        {{in, std::string(folder / "out.npz") + ":"}, {"out.npz:"}},
        {{in, ""}, {}},
        {{"absent.npy", folder / "out.txt"}, {".npy", ".npz", ".safetensors"}},
    };
    for (const auto& [arguments, says] : table) {
        cli::arguments command = arguments;
        command.insert(command.begin(), "convert");
        check_fails(2, command, says);
    }
    if (!pinflow::has_hdf5()) {
        check_fails(2, {"convert", folder / "a.h5", out}, {"a.h5", "HDF5"});
        check_fails(2, {"convert", in, folder / "out.h5"}, {"out.h5", "HDF5"});
        check_fails(2, {"convert", in, folder / "out.h5:x", "--deflate", "1"}, {"HDF5"});
    }
    CHECK(names_in(folder.path()) == std::set<std::string>{"a.h5", "in.npy"});
}

TEST_CASE("convert: names with colons, of files and of arrays, are told apart by what exists") {
    const temporary_folder folder;
    const std::string in = folder / "in.npy";
    write_file(in, npy("|u1", "(3,)", "123"));
    convert({in, folder / "out.npz:b.npy"});  // no file of that name: a member of out.npz
    check_content(read_back(folder / "out.npz", "b.npy"), {"|u1", "(3,)", "123"});
    convert({in, folder / "out.npz:b.npy"});
    CHECK(names_in(folder.path()) == std::set<std::string>{"in.npy", "out.npz"});
    write_file(folder / "a:b.npy", "old");
    convert({in, folder / "a:b.npy"});
    check_content(read_back(folder / "a:b.npy"), {"|u1", "(3,)", "123"});
    convert({in, folder / "new:b.npy"});
    check_content(read_back(folder / "new:b.npy"), {"|u1", "(3,)", "123"});
}
