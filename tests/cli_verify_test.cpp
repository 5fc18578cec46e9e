#include <doctest/doctest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/cli_helpers.hpp"
#include "tests/support/temporary_folder.hpp"

// The checksum beside a file, which xxhsum reads as well.

namespace {

using npy_bytes::read_file;
using npy_bytes::write_file;

/// What xxhsum 0.8 prints for an empty file, and for a file that holds "hello".
constexpr const char* of_nothing = "99aa06d3014798d86001c324468d497f";
constexpr const char* of_hello = "b5e9c1ad071b3e7fc779cfaa5e523818";

void check_ok(const std::string& path) {
    CAPTURE(path);
    const tool_result result = run_tool({"verify", "--", path});
    CAPTURE(result.errors);
    CHECK(result.status == 0);
    CHECK(result.output.ends_with(": OK\n"));
    CHECK(result.errors.empty());
}

/// Runs xxhsum in a folder. @return its exit status; 127 when it is not installed.
int run_xxhsum(const temporary_folder& folder, const std::string& arguments) {
    const std::string command =
        "cd '" + folder.path().string() + "' && xxhsum " + arguments + " >xxhsum-says 2>/dev/null";
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("verify: writes the line that xxhsum prints, and accepts it") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    write_file(path, "hello");
    const tool_result written = run_tool({"verify", path, "--write"});
    CHECK(written.status == 0);
    CHECK(written.output == path + ".xxh3: written\n");
    CHECK(read_file(path + ".xxh3") == std::string(of_hello) + "  a.npy\n");
    check_ok(path);
    CHECK(cli::names_in(folder.path()) == std::set<std::string>{"a.npy", "a.npy.xxh3"});

    write_file(folder / "none", "");
    CHECK(run_tool({"verify", folder / "none", "--write"}).status == 0);
    CHECK(read_file(folder / "none.xxh3") == std::string(of_nothing) + "  none\n");
    check_ok(folder / "none");
}

TEST_CASE("verify: hashes the whole of a file of many pieces") {
    const temporary_folder folder;
    const std::string path = folder / "large";
    std::string content = cli::counting_bytes((std::size_t{5} << 20) + 12345);
    write_file(path, content);
    REQUIRE(run_tool({"verify", path, "--write"}).status == 0);
    check_ok(path);
    for (const std::size_t changed : {std::size_t{0}, content.size() / 2, content.size() - 1}) {
        CAPTURE(changed);
        content[changed] = static_cast<char>(content[changed] ^ 1);
        write_file(path, content);
        cli::check_fails(1, {"verify", path}, {path, "large.xxh3"});
        content[changed] = static_cast<char>(content[changed] ^ 1);
    }
    write_file(path, content);
    check_ok(path);
    write_file(path, content + " ");
    cli::check_fails(1, {"verify", path});
    write_file(path, content.substr(0, content.size() - 1));
    cli::check_fails(1, {"verify", path});
}

TEST_CASE("verify: refuses a checksum file that is absent, or not a line of xxhsum's") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    write_file(path, "hello");
    cli::check_fails(1, {"verify", path}, {"a.npy.xxh3", "--write"});

    const std::string good = of_hello;
    std::string upper = good;
    for (char& digit : upper)
        if (digit >= 'a') digit = static_cast<char>(digit - 'a' + 'A');
    for (const std::string& accepted :
         {good + "  a.npy\n", good + "  a.npy", good + " *a.npy\n", upper + "  a.npy\n",
          good + "  elsewhere/another name.npy\n", "\\" + good + "  new\\nline\n"}) {
        CAPTURE(accepted);
        write_file(path + ".xxh3", accepted);
        check_ok(path);
    }
    for (const std::string& refused :
         {std::string(), std::string("\n"), good, good + "\n", good + "  ", good + "  \n", good + " a.npy\n",
          good + "\ta.npy\n", good + "- a.npy\n", " " + good + "  a.npy\n", good.substr(1) + "  a.npy\n",
          good + "0  a.npy\n", "g" + good.substr(1) + "  a.npy\n", good + "  a.npy\n" + good + "  b.npy\n",
          good + "  a.npy\n\n", good + "  a" + std::string(1, '\0') + ".npy\n",
          "XXH128 (a.npy) = " + good + "\n", std::string(100'000, 'a') + "\n",
          good + "  " + std::string(20'000, 'a') + "\n"}) {
        CAPTURE(refused);
        write_file(path + ".xxh3", refused);
        cli::check_fails(1, {"verify", path}, {"a.npy.xxh3", "32 hexadecimal digits"});
    }
    write_file(path + ".xxh3", std::string(of_nothing) + "  a.npy\n");
    cli::check_fails(1, {"verify", path}, {of_nothing, of_hello});

    std::filesystem::remove(path + ".xxh3");
    REQUIRE(::mkfifo((path + ".xxh3").c_str(), 0600) == 0);
    cli::check_fails(1, {"verify", path}, {"named pipe"});
    cli::check_fails(1, {"verify", path, "--write"}, {"regular file"});
}

TEST_CASE("verify: refuses what is not a regular file, and wrong usage") {
    const temporary_folder folder;
    write_file(folder / "a", "hello");
    cli::check_fails(1, {"verify", folder / "absent"}, {"absent"});
    cli::check_fails(1, {"verify", folder / "absent", "--write"}, {"absent"});
    cli::check_fails(1, {"verify", folder / "b*"}, {"b*", "one file, not a pattern"});
    cli::check_fails(1, {"verify", folder / "a:x"}, {"a:x", "one file, not an array in a file"});
    cli::check_fails(1, {"verify", folder.path()}, {"it is a folder, and verify takes one file"});
    cli::check_fails(1, {"verify", ""});
    cli::check_fails(2, {"verify"}, {"required"});
    cli::check_fails(2, {"verify", folder / "a", folder / "a"});
    cli::check_fails(2, {"verify", folder / "a", "--json"}, {"--json"});
    cli::check_fails(2, {"verify", folder / "a", "--write=false"});
    CHECK(cli::names_in(folder.path()) == std::set<std::string>{"a"});
}

TEST_CASE("verify: a file that changes during the check is an error") {
    const temporary_folder folder;
    const std::string path = folder / "a";
    write_file(path, "");
    std::filesystem::resize_file(path, std::uint64_t{1} << 28);
    const cli::restless_file writer(path);
    cli::check_fails(1, {"verify", path, "--write"}, {path, "changed"});
    CHECK(cli::names_in(folder.path()) == std::set<std::string>{"a"});
}

TEST_CASE("verify: an existing checksum is replaced, and a folder in its place is an error") {
    const temporary_folder folder;
    const std::string path = folder / "a";
    write_file(path, "hello");
    write_file(path + ".xxh3", "old");
    REQUIRE(run_tool({"verify", path, "--write"}).status == 0);
    check_ok(path);
    std::filesystem::create_directory(folder / "b.xxh3");
    write_file(folder / "b", "hello");
    cli::check_fails(1, {"verify", folder / "b", "--write"}, {"b.xxh3"});
}

TEST_CASE("verify: no checksum is written beside the name of a descriptor") {
    const tool_result result = run_tool({"verify", "--write", "/proc/self/fd/0"});
    CHECK(result.status == 2);
    CHECK(result.one_error_line());
}

TEST_CASE("verify: odd names are written so that xxhsum finds the file") {
    const temporary_folder folder;
    // each name, and the rest of its line after the checksum; below, line ends in a name are escaped, as
    // xxhsum does from 0.8.2 on
    const std::vector<std::pair<std::string, std::string>> table{
        {"plain.npy", "  plain.npy\n"},
        {" two  blanks ", "   two  blanks \n"},
        {"back\\slash", "  back\\slash\n"},
        {"tab\tname", "  tab\tname\n"},
        {"*", "  *\n"},
        {"--write", "  --write\n"},
        {"\xff", "  \xff\n"},
        {"stdin", "  ./stdin\n"},
    };
    for (const auto& [name, written] : table) {
        CAPTURE(name);
        write_file(folder / name, "hello");
        REQUIRE(run_tool({"verify", "--write", "--", folder / name}).status == 0);
        CHECK(read_file(std::string(folder / name) + ".xxh3") == of_hello + written);
        check_ok(folder / name);
        const int status = run_xxhsum(folder, "-H2 -c -- './" + name + ".xxh3' </dev/null");
        if (status != 127) CHECK(status == 0);
    }
    write_file(folder / "two\nlines\\\r", "hello");
    REQUIRE(run_tool({"verify", "--write", folder / "two\nlines\\\r"}).status == 0);
    CHECK(read_file(std::string(folder / "two\nlines\\\r") + ".xxh3") ==
          "\\" + std::string(of_hello) + "  two\\nlines\\\\\\r\n");
    check_ok(folder / "two\nlines\\\r");
}

TEST_CASE("verify: accepts the lines that xxhsum writes") {
    const temporary_folder folder;
    write_file(folder / "a.npy", cli::counting_bytes(300'000));
    if (run_xxhsum(folder, "-H2 a.npy") == 127) {
        MESSAGE("skipped: there is no xxhsum");
        return;
    }
    std::filesystem::rename(folder / "xxhsum-says", folder / "a.npy.xxh3");
    check_ok(folder / "a.npy");
    const std::string theirs = read_file(folder / "a.npy.xxh3");
    REQUIRE(run_tool({"verify", folder / "a.npy", "--write"}).status == 0);
    CHECK(read_file(folder / "a.npy.xxh3") == theirs);
}
