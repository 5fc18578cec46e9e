#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/cli_helpers.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_tool.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

// Files that the tool must refuse with exit status 1 and one line, at once and without allocating what they
// claim.

namespace {

using npy_bytes::header;
using npy_bytes::text;
using npy_bytes::write_file;

/// The names of the tests say "within a second", which is checked in optimized builds without sanitizers.
#ifdef NDEBUG
constexpr double max_seconds = sanitized ? 20 : 1;
#else
constexpr double max_seconds = 20;
#endif

/// Runs a command on a file, or on the array NAME in it. The command must refuse it, and leave no file
/// behind.
void check_refused(const std::string& command, const std::string& path, const std::string& name = "") {
    const std::string argument = name.empty() ? path : path + ":" + name;
    const temporary_folder folder;
    cli::arguments arguments{command, argument};
    if (command == "convert") arguments.push_back(folder / "out.npz");
    tool_surroundings surroundings;
    if (!sanitized) surroundings.max_address_bytes = std::uint64_t{4} << 30;
    const tool_result result = run_tool(arguments, surroundings);
    CAPTURE(command);
    CAPTURE(argument);
    CAPTURE(result.errors);
    CHECK(result.status == 1);
    CHECK(result.one_error_line());
    CHECK(result.errors.size() < 1000);
    CHECK(result.errors.find(std::filesystem::path(path).filename()) != std::string::npos);
    CHECK(result.errors.find("memory is exhausted") == std::string::npos);
    CHECK(result.output.empty());
    CHECK(result.seconds < max_seconds);
    if (!sanitized) CHECK(result.peak_bytes < std::uint64_t{64} << 20);
    CHECK(std::filesystem::is_empty(folder.path()));
}

/// Runs inspect, stream and convert; under a sanitizer, where a process takes long to start, one of them in
/// turn.
void check_refused(const std::string& path) {
    static constexpr std::array commands{"inspect", "stream", "convert"};
    static std::size_t turn = 0;
    if (sanitized) {
        check_refused(commands[turn++ % commands.size()], path);
        return;
    }
    for (const char* const command : commands) {
        check_refused(command, path);
    }
}

/// Checks that inspect refuses the file cut after every STEP bytes (under a sanitizer after every fifth of
/// these), but accepts the whole file.
void check_refused_when_cut(const std::string& path, const std::string& whole, std::size_t step) {
    if (sanitized) step *= 5;
    for (std::size_t size = 0; size < whole.size(); size += step) {
        CAPTURE(size);
        write_file(path, whole.substr(0, size));
        const tool_result result = run_tool({"inspect", path});
        CAPTURE(result.errors);
        CHECK(result.status == 1);
        CHECK(result.one_error_line());
    }
    write_file(path, whole);
    CHECK(run_tool({"inspect", path}).status == 0);
}

std::string repeated(const std::string& part, std::size_t count) {
    std::string result;
    for (std::size_t i = 0; i < count; ++i) {
        result += part;
    }
    return result;
}

/// A header with this shape and type, and 64 bytes of data.
std::string shaped(const std::string& shape, const std::string& descr = "'<f4'", unsigned version = 1) {
    return header(text(descr, shape), version) + std::string(64, '\0');
}

}  // namespace

TEST_CASE("cli: refuses every bad npy file with one line, within a second") {
    const std::string good = shaped("(2, 3)");
    const std::string nul("\0", 1);
    const std::vector<std::pair<std::string, std::string>> table{
        {"empty file", ""},
        {"text file", "hello\n"},
        {"magic 92", "\x92NUMPY\1" + nul + good.substr(8)},
        {"magic NUL", nul + "NUMPY\1" + nul + good.substr(8)},
        {"magic lower case", "\x93numpy\1" + nul + good.substr(8)},
        {"magic MATLB", "\x93MATLB\1" + nul + good.substr(8)},
        {"version 0.0", good.substr(0, 6) + nul + nul + good.substr(8)},
        {"version 0.1", good.substr(0, 6) + nul + "\1" + good.substr(8)},
        {"version 1.1", good.substr(0, 6) + "\1\1" + good.substr(8)},
        {"version 2.2", good.substr(0, 6) + "\2\2" + good.substr(8)},
        {"version 255.255", good.substr(0, 6) + "\xff\xff" + good.substr(8)},
        {"v2 huge length", "\x93NUMPY\2" + nul + "\xf0\xff\xff\xff"},
        {"v1 long length", "\x93NUMPY\1" + nul + "\xff\xff" + "{'descr'"},
        {"length 0", "\x93NUMPY\1" + nul + nul + nul + std::string(64, ' ')},
        {"no shape", header("{'descr': '<f4', 'fortran_order': False}") + std::string(64, '\0')},
        {"no descr", header("{'shape': (1,), 'fortran_order': False}") + std::string(64, '\0')},
        {"extra key", header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}") + "data"},
        {"twice the shape",
         header("{'descr': '<f4', 'shape': (1,), 'fortran_order': False, 'shape': (2,)}") + "datadata"},
        {"many brackets", shaped(repeated("(", 10'000), "'<f4'", 2)},
        {"some brackets", shaped(repeated("(", 9'000) + repeated(")", 900))},
        {"many minus signs", shaped("(" + repeated("-", 10'000) + "1,)", "'<f4'", 2)},
        {"some minus signs", shaped("(" + repeated("-", 9'000) + "1,)")},
        {"many digits", shaped("(" + repeated("9", 100'000) + ",)", "'<f4'", 2)},
        {"some digits", shaped("(" + repeated("9", 9'000) + ",)")},
        {"shape -1", shaped("(-1,)")},
        {"shape 2^65", shaped("(2, 18446744073709551614)")},
        {"shape 2^64", shaped("(4294967296, 4294967296)")},
        {"shape 0 2^63", shaped("(0, 9223372036854775808)")},
        {"product fits", shaped("(4611686018427387904,)")},
        {"offset overflows", shaped("(9223372036854775807,)", "'|u1'")},
        {"65 axes", shaped("(" + repeated("1, ", 65) + ")")},
        {"no tuple", shaped("(3)")},
        {"list", shaped("[2, 3]")},
        {"float length", shaped("(1.0,)")},
        {"bool length", shaped("(True, 2)")},
        {"order 1", header(text("'<f4'", "(1,)", "1")) + "data"},
        {"ixy", shaped("(1,)", "'<ixy'")},
        {"no type", shaped("(1,)", "''")},
        {"f3", shaped("(1,)", "'<f3'")},
        {"uncountable V0", shaped("(4294967296, 4294967296)", "'|V0'")},
        {"long bytes", shaped("(1,)", "'|S99999999999999999999'")},
        {"long text", shaped("(1,)", "'<U1073741824'")},
        {"pickle", shaped("(1,)", "'|O'")},
        {"nested", shaped("(1,)", repeated("[('a', ", 1000) + "'<f4'" + repeated(")]", 1000))},
        {"NUL in the header", shaped("(1" + nul + ",)")},
        {"no UTF-8",
         header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), '\xff': 1}", 3) + "data"},
        {"control characters",
         header("{'descr': '\n\x1b[31m', 'fortran_order': False, 'shape': (1,)}") + "data"},
        {"one byte short", header(text("'<f4'", "(2, 3)")) + std::string(23, '\0')},
    };
    const temporary_folder folder;
    for (const auto& [name, content] : table) {
        write_file(folder / name, content);
        check_refused(folder / name);
    }
}

TEST_CASE("cli: refuses a .npy file that was truncated after any byte") {
    const temporary_folder folder;
    const std::string whole = header(text("'<f4'", "(2, 3)")) + std::string(24, '\0');
    check_refused_when_cut(folder / "cut.npy", whole, 1);
}

// ---- .npz -------------------------------------------------------------------------------------------------

TEST_CASE("cli: refuses every npz file whose directory is bad with one line, within a second") {
    const std::string array = header(text("'|u1'", "(100,)")) + std::string(100, 'x');
    const auto good = zip_bytes::make({{"a.npy", array, true}, {"b.npy", array}});
    const auto changed = [&](std::size_t offset, std::uint64_t value, unsigned size) {
        std::string bytes = good.bytes;
        zip_bytes::put(bytes, offset, value, size);
        return bytes;
    };
    const auto named = [&](const std::string& name) { return zip_bytes::make({{name, array}}).bytes; };
    const auto wide = zip_bytes::make({{"a.npy", array}}, "", true);
    const auto widened = [&](std::size_t offset, std::uint64_t value, unsigned size) {
        std::string bytes = wide.bytes;
        zip_bytes::put(bytes, wide.end + 8, 0xFFFF, 2);  // counts, size and offset are in the zip64 record
        zip_bytes::put(bytes, wide.end + 10, 0xFFFF, 2);
        zip_bytes::put(bytes, wide.end + 12, 0xFFFFFFFF, 4);
        zip_bytes::put(bytes, wide.end + 16, 0xFFFFFFFF, 4);
        zip_bytes::put(bytes, offset, value, size);
        return bytes;
    };
    const std::vector<std::pair<std::string, std::string>> table{
        {"no directory", good.bytes.substr(0, good.directory)},
        {"no end", good.bytes.substr(0, good.end)},
        {"half an end", good.bytes.substr(0, good.end + 11)},
        {"magic alone", "PK\3\4"},
        {"end alone, with members", std::string("PK\5\6\0\0\0\0\1\0\1\0", 12) + std::string(10, '\0')},
        {"directory past the end", changed(good.end + 16, 0x7FFFFFFF, 4)},
        {"directory too large", changed(good.end + 12, 0x7FFFFFFF, 4)},
        {"more members than entries", changed(good.end + 10, 60'000, 2)},
        {"several disks", changed(good.end + 4, 1, 2)},
        {"member past the end", changed(good.entries[1] + 42, 0x7FFFFFFF, 4)},
        {"stored size past the end", changed(good.entries[1] + 20, 0x7FFFFFFF, 4)},
        {"inside the other member", changed(good.entries[1] + 42, good.locals[0] + 10, 4)},
        {"the other member", changed(good.entries[1] + 42, good.locals[0], 4)},
        {"name past the end", changed(good.entries[1] + 28, 0xFFFF, 2)},
        {"extra past the end", changed(good.entries[1] + 30, 0xFFFF, 2)},
        {"zip64 field lacking", changed(good.entries[1] + 24, 0xFFFFFFFF, 4)},
        {"zip64 record past the end", widened(wide.end - 12, std::uint64_t{1} << 62, 8)},
        {"zip64 directory huge", widened(wide.end64 + 40, 0xFFFFFFFFFFFFFFF0, 8)},
        {"zip64 offset huge", widened(wide.end64 + 48, 0xFFFFFFFFFFFFFFF0, 8)},
        {"zip64 count huge", widened(wide.end64 + 32, 0xFFFFFFFFFFFFFFF0, 8)},
        {"absolute name", named("/a.npy")},
        {"name upwards", named("../a.npy")},
        {"name upwards inside", named("b/../../a.npy")},
        {"two of one name", zip_bytes::make({{"a.npy", array}, {"a.npy", array}}).bytes},
        {"two arrays of one name", zip_bytes::make({{"a.npy", array}, {"a", array}}).bytes},
    };
    const temporary_folder folder;
    for (const auto& [name, content] : table) {
        write_file(folder / name, content);
        check_refused(folder / name);
    }
}

TEST_CASE("cli: refuses every bad member of a .npz file with one line, within a second") {
    const std::string array = header(text("'|u1'", "(100,)")) + std::string(100, 'x');
    const auto deflated = zip_bytes::make({{"a.npy", array, true}});
    const auto changed = [](const zip_bytes::archive& archive, std::size_t offset, std::uint64_t value,
                            unsigned size) {
        std::string bytes = archive.bytes;
        zip_bytes::put(bytes, offset, value, size);
        return bytes;
    };
    const auto only = [](const std::string& content, bool is_deflated) {
        return zip_bytes::make({{"a.npy", content, is_deflated}}).bytes;
    };
    /// Both in the local header and in the directory.
    const auto everywhere = [&](std::size_t local, std::size_t entry, std::uint64_t value, unsigned size) {
        std::string bytes = changed(deflated, deflated.locals[0] + local, value, size);
        zip_bytes::put(bytes, deflated.entries[0] + entry, value, size);
        return bytes;
    };
    const std::string bomb = header(text("'|u1'", "(100,)")) + std::string(3'000'000, '\0');
    auto lying_bomb = zip_bytes::make({{"a.npy", bomb, true}});
    const std::size_t promised = header(text("'|u1'", "(100,)")).size() + 100;
    zip_bytes::put(lying_bomb.bytes, lying_bomb.locals[0] + 22, promised, 4);
    zip_bytes::put(lying_bomb.bytes, lying_bomb.entries[0] + 24, promised, 4);

    // inspect reads only the header; stream and convert also read the data
    enum class shows { in_header, in_data };
    struct bad_member {
        std::string name;
        std::string content;
        shows where;
    };
    const std::vector<bad_member> table{
        {"encrypted", everywhere(6, 8, 1, 2), shows::in_header},
        {"unknown method", everywhere(8, 10, 14, 2), shows::in_header},
        {"no npy", only("hello", false), shows::in_header},
        {"empty", only("", false), shows::in_header},
        {"pickle", only(header(text("'|O'", "(1,)")) + "x", false), shows::in_header},
        {"deflated pickle", only(header(text("'|O'", "(1,)")) + "x", true), shows::in_header},
        {"huge shape", only(header(text("'|u1'", "(4611686018427387904,)")), true), shows::in_header},
        {"a little too short", only(array.substr(0, array.size() - 1), true), shows::in_header},
        {"a little too long", only(array + "x", true), shows::in_header},
        {"bomb", only(bomb, true), shows::in_header},
        {"bomb that lies", lying_bomb.bytes, shows::in_data},
        {"size lies", everywhere(22, 24, array.size() - 1, 4), shows::in_header},
        {"huge size", everywhere(22, 24, 0xFFFFFFF0, 4), shows::in_header},
        {"another name", changed(deflated, deflated.locals[0] + 30, 'b', 1), shows::in_header},
        {"damaged stream", changed(deflated, deflated.datas[0], 0xFF, 1), shows::in_header},
        {"wrong CRC", everywhere(14, 16, 12345, 4), shows::in_data},
        {"damaged data", changed(deflated, deflated.datas[0] + array.size(), 'y', 1), shows::in_data},
    };
    const temporary_folder folder;
    for (const auto& [name, content, where] : table) {
        const std::string path = folder / name;
        write_file(path, content);
        check_refused("stream", path, "a");
        check_refused("convert", path, "a");
        if (!sanitized) {
            check_refused("stream", path);
            check_refused("convert", path);
        }
        if (where == shows::in_header) check_refused("inspect", path, "a");
        // without a name it is listed, with the reason
        const auto listed = cli::run_json({"inspect", path});
        CHECK(listed["mappable"] == false);
        CHECK(listed["dtype"].is_null() == (where == shows::in_header));
        CHECK(listed["reason"].get<std::string>().size() > 0);
    }

    // the data of a stored member is mapped; convert reads all of it and verifies its checksum
    auto stored = zip_bytes::make({{"a.npy", array}});
    stored.bytes[stored.datas[0] + array.size() - 1] = 'y';
    write_file(folder / "stored with a wrong CRC", stored.bytes);
    check_refused("convert", folder / "stored with a wrong CRC");
}

TEST_CASE("cli: refuses a truncated .npz file, tried at every third length") {
    const temporary_folder folder;
    const std::string array = header(text("'<f4'", "(2, 3)")) + std::string(24, '\0');
    const std::string whole = zip_bytes::make({{"a.npy", array}, {"b.npy", array, true}}).bytes;
    check_refused_when_cut(folder / "cut.npz", whole, 3);
}

// ---- safetensors ------------------------------------------------------------------------------------------

TEST_CASE("cli: refuses every bad safetensors file with one line, within a second") {
    const auto tensor = [](const std::string& name, const std::string& type, const std::string& shape,
                           const std::string& offsets) {
        return "\"" + name + R"(":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":)" +
               offsets + "}";
    };
    const auto only = [&](const std::string& type, const std::string& shape, const std::string& offsets) {
        return cli::safetensors("{" + tensor("a", type, shape, offsets) + "}", std::string(24, 'x'));
    };
    const auto both = [&](const std::string& first, const std::string& second, std::size_t data) {
        return cli::safetensors(
            "{" + tensor("a", "F32", "[3]", first) + "," + tensor("b", "F32", "[3]", second) + "}",
            std::string(data, 'x'));
    };
    const std::string length_only("\2\0\0\0\0\0\0\0", 8);
    const std::vector<std::pair<std::string, std::string>> table{
        {"no header", length_only},
        {"N past the end", std::string("\x63\0\0\0\0\0\0\0{}", 10)},
        {"N huge", std::string("\xff\xff\xff\xff\xff\x7f\0\0{}", 10)},
        {"N above the cap", std::string("\1\xe1\xf5\5\0\0\0\0{}", 10)},
        {"N zero", std::string("\0\0\0\0\0\0\0\0{}", 10)},
        {"overlap", both("[0,12]", "[8,20]", 20)},
        {"the same bytes", both("[0,12]", "[0,12]", 12)},
        {"hole", both("[0,12]", "[16,28]", 28)},
        {"hole in front", both("[4,16]", "[16,28]", 28)},
        {"bytes after", both("[0,12]", "[12,24]", 25)},
        {"data lacking", both("[0,12]", "[12,24]", 23)},
        {"offsets reversed", only("F32", "[6]", "[24,0]")},
        {"offsets huge", only("F32", "[6]", "[18446744073709551592,18446744073709551615]")},
        {"offsets negative", only("F32", "[6]", "[-24,0]")},
        {"offsets no integers", only("F32", "[6]", "[0,24.0]")},
        {"one offset", only("F32", "[6]", "[24]")},
        {"size lies", only("F32", "[7]", "[0,24]")},
        {"shape overflows", only("F32", "[4294967296,4294967296,6]", "[0,24]")},
        {"shape overflows with a zero", only("F32", "[18446744073709551615,2,0]", "[0,0]")},
        {"shape negative", only("F32", "[-6]", "[0,24]")},
        {"65 axes", only("F32", "[" + repeated("1,", 64) + "6]", "[0,24]")},
        {"type unknown", only("F31", "[6]", "[0,24]")},
        {"type lower case", only("f32", "[6]", "[0,24]")},
        {"no JSON", cli::safetensors("{]", "")},
        {"JSON cut short", cli::safetensors(R"({"a":{"dtype":"F32")", "")},
        {"JSON and more", cli::safetensors("{}{}", "")},
        {"deep JSON", cli::safetensors("{\"a\":" + repeated("[", 50'000) + repeated("]", 50'000) + "}", "")},
        {"deep objects", cli::safetensors(repeated("{\"a\":", 50'000) + "1" + repeated("}", 50'000), "")},
        {"unclosed brackets", cli::safetensors("{\"a\":" + repeated("[", 100'000), "")},
        {"twice a name",
         cli::safetensors(
             "{" + tensor("a", "U8", "[1]", "[0,1]") + "," + tensor("a", "U8", "[1]", "[1,2]") + "}", "xx")},
        {"no shape", cli::safetensors(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", "x")},
        {"tensor no object", cli::safetensors(R"({"a":1})", "x")},
        {"metadata no text", cli::safetensors(R"({"__metadata__":{"a":1}})", "")},
        {"no UTF-8", cli::safetensors("{\"\xff\":1}", "")},
        {"long number", cli::safetensors("{\"a\":" + repeated("9", 100'000) + "}", "")},
        {"control characters", cli::safetensors("{\"\\u001b[31m\\n\":1}", "")},
    };
    const temporary_folder folder;
    for (const auto& [name, content] : table) {
        write_file(folder / name, content);
        check_refused(folder / name);
        if (!sanitized) check_refused("inspect", folder / name, "a");
    }
}

// ---- not a regular file -----------------------------------------------------------------------------------

TEST_CASE("cli: refuses anything but a regular file, and never waits for it") {
    const temporary_folder folder;
    const std::string fifo = folder / "fifo";
    REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
    std::filesystem::create_directory(folder / "folder");
    std::filesystem::create_symlink(folder / "loop", folder / "loop");
    std::filesystem::create_symlink("nowhere", folder / "dangling");
    check_refused(fifo);
    check_refused(folder / "folder");
    check_refused(folder / "loop");
    check_refused(folder / "dangling");
    check_refused(folder / "absent.npy");
    check_refused(folder / "absent.npy:name");
    check_refused("/dev/zero");
    const tool_result nameless = run_tool({"inspect", ""});
    CHECK(nameless.status == 1);
    CHECK(nameless.one_error_line());
}

TEST_CASE("cli: the error for a file name with line ends is still one line") {
    const temporary_folder folder;
    const tool_result result = run_tool({"inspect", folder / "two\nlines\r\x1b[31m"});
    CHECK(result.status == 1);
    CHECK(result.one_error_line());
    CHECK(result.errors.find("two\\nlines") != std::string::npos);
    CHECK(result.errors.find('\x1b') == std::string::npos);
}

TEST_CASE("cli: refuses a file without permission to read it") {
    const temporary_folder folder;
    const std::string path = folder / "secret.npy";
    write_file(path, shaped("(1,)"));
    REQUIRE(::chmod(path.c_str(), 0) == 0);
    if (::access(path.c_str(), R_OK) == 0) {
        MESSAGE("skipped: this user reads every file");
        return;
    }
    check_refused(path);
}

TEST_CASE("cli: opens a sparse file of 1 TiB at once, and also if it cannot be mapped") {
    const temporary_folder folder;
    const std::string path = folder / "sparse.npy";
    write_file(path, header(text("'|u1'", "(1048576, 1048576)")));
    std::error_code refused;
    std::filesystem::resize_file(path, std::filesystem::file_size(path) + (std::uint64_t{1} << 40), refused);
    if (refused) {
        MESSAGE("skipped: this filesystem has no sparse files of 1 TiB");
        return;
    }
    const tool_result mapped = run_tool({"inspect", path, "--json"});
    CHECK(mapped.status == 0);
    CHECK(mapped.seconds < max_seconds);
    CHECK(nlohmann::json::parse(mapped.output)["size_bytes"] == std::uint64_t{1} << 40);
    if (sanitized) return;

    tool_surroundings narrow;
    narrow.max_address_bytes = std::uint64_t{4} << 30;
    const tool_result unmapped = run_tool({"inspect", path, "--json"}, narrow);
    CAPTURE(unmapped.errors);
    REQUIRE(unmapped.status == 0);
    const auto object = nlohmann::json::parse(unmapped.output);
    CHECK(object["mappable"] == false);
    CHECK(object["reason"].get<std::string>().size() > 0);
}
