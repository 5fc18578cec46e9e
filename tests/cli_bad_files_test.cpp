#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/npy_bytes.hpp"
#include "tests/run_tool.hpp"
#include "tests/temporary_folder.hpp"

// Files that the tool must refuse with exit status 1 and one line, at once and without allocating what they
// claim.

namespace {

using npy_bytes::header;
using npy_bytes::text;
using npy_bytes::write_file;

// sanitizers reserve terabytes of address space and take their time
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PINFLOW_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PINFLOW_TEST_SANITIZED 1
#endif
#endif
#ifdef PINFLOW_TEST_SANITIZED
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif
#ifdef NDEBUG
constexpr double most_seconds = sanitized ? 20 : 1;
#else
constexpr double most_seconds = 20;
#endif

void check_refused(const std::string& path) {
    for (const char* const command : {"inspect", "stream"}) {
        tool_surroundings surroundings;
        if (!sanitized) surroundings.most_address_bytes = std::uint64_t{4} << 30;
        const tool_result result = run_tool({command, path}, surroundings);
        CAPTURE(command);
        CAPTURE(path);
        CAPTURE(result.errors);
        CHECK(result.status == 1);
        CHECK(result.one_error_line());
        CHECK(result.errors.size() < 1000);
        CHECK(result.errors.find(std::filesystem::path(path).filename()) != std::string::npos);
        CHECK(result.errors.find("memory is exhausted") == std::string::npos);
        CHECK(result.output.empty());
        CHECK(result.seconds < most_seconds);
    }
}

std::string repeated(const std::string& part, std::size_t count) {
    std::string result;
    for (std::size_t i = 0; i < count; ++i) {
        result += part;
    }
    return result;
}

/// A header with this shape, and type, and some data behind it.
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
        {"V0", shaped("(1,)", "'|V0'")},
        {"long bytes", shaped("(1,)", "'|S99999999999999999999'")},
        {"long text", shaped("(1,)", "'<U1073741824'")},
        {"pickle", shaped("(1,)", "'|O'")},
        {"structured", shaped("(1,)", "[('x', '<f4')]")},
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

TEST_CASE("cli: refuses a npy file that was cut after any byte") {
    const temporary_folder folder;
    const std::string whole = header(text("'<f4'", "(2, 3)")) + std::string(24, '\0');
    const std::string path = folder / "cut.npy";
    for (std::size_t size = 0; size < whole.size(); ++size) {
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

TEST_CASE("cli: refuses what is not a regular file, and never waits for it") {
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

TEST_CASE("cli: names with line ends still make one line") {
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

TEST_CASE("cli: opens a sparse file of 1 TiB at once, mapped or not") {
    const temporary_folder folder;
    const std::string path = folder / "sparse.npy";
    write_file(path, header(text("'|u1'", "(1048576, 1048576)")));
    std::error_code refused;
    std::filesystem::resize_file(path, std::filesystem::file_size(path) + (std::uint64_t{1} << 40), refused);
    if (refused) {
        MESSAGE("skipped: this file system has no sparse files of 1 TiB");
        return;
    }
    const tool_result mapped = run_tool({"inspect", path, "--json"});
    CHECK(mapped.status == 0);
    CHECK(mapped.seconds < most_seconds);
    CHECK(nlohmann::json::parse(mapped.output)["size_bytes"] == std::uint64_t{1} << 40);
    if (sanitized) return;

    tool_surroundings narrow;
    narrow.most_address_bytes = std::uint64_t{4} << 30;
    const tool_result unmapped = run_tool({"inspect", path, "--json"}, narrow);
    CAPTURE(unmapped.errors);
    REQUIRE(unmapped.status == 0);
    const auto object = nlohmann::json::parse(unmapped.output);
    CHECK(object["mappable"] == false);
    CHECK(object["reason"].get<std::string>().size() > 0);
}
