#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/cli_helpers.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_tool.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

// Patterns of many files in `pinflow convert` and `inspect`, and what is said when the shell has expanded
// one.

namespace {

using cli::arguments;
using cli::check_fails;
using cli::npy;
using cli::run_json;
using nlohmann::json;
using npy_bytes::read_file;
using npy_bytes::write_file;

/// Files part-0.npy, ... of index + 1 rows of 3 numbers of 2 bytes. @return all rows.
std::string write_parts(const temporary_folder& folder, std::size_t count) {
    std::string rows;
    for (std::size_t index = 0; index < count; ++index) {
        const std::size_t begin = rows.size();
        rows = cli::counting_bytes(begin + 6 * (index + 1));
        write_file(folder / ("part-" + std::to_string(index) + ".npy"),
                   npy("<i2", "(" + std::to_string(index + 1) + ", 3)", rows.substr(begin)));
    }
    return rows;
}

/// The last bytes of a file, as many as `payload` has.
std::string payload_of(const std::string& path, const std::string& payload) {
    const std::string bytes = read_file(path);
    REQUIRE(bytes.size() >= payload.size());
    return bytes.substr(bytes.size() - payload.size());
}

}  // namespace

TEST_CASE("cli patterns: convert writes the rows of all files into one, in the order of the numbers") {
    const temporary_folder folder;
    const std::string rows = write_parts(folder, 12);  // part-10 comes after part-9
    const std::string whole = folder / "whole.npy";
    CHECK(run_tool({"convert", folder / "part-*.npy", whole}).status == 0);
    const json inspected = run_json({"inspect", whole});
    CHECK(inspected["shape"] == json({78, 3}));
    CHECK(inspected["dtype"] == "<i2");
    CHECK(payload_of(whole, rows) == rows);
    const std::string cast = folder / "whole.safetensors:rows";
    CHECK(run_tool({"convert", folder / "part-*.npy", cast, "--dtype", "int32"}).status == 0);
    CHECK(run_json({"inspect", cast})["dtype"] == "<i4");
}

TEST_CASE("cli patterns: NAME behind a pattern is the member of each archive") {
    const temporary_folder folder;
    const std::string rows = write_parts(folder, 3);
    for (const char* const number : {"0", "1", "2"}) {
        const std::string part = folder / ("part-" + std::string(number));
        CHECK(run_tool({"convert", part + ".npy", part + ".npz:rows"}).status == 0);
    }
    const std::string whole = folder / "whole.npy";
    CHECK(run_tool({"convert", folder / "part-*.npz:rows", whole}).status == 0);
    CHECK(payload_of(whole, rows) == rows);
}

TEST_CASE(
    "cli patterns: files of several formats, byte orders and orders of axes are joined, also empty ones") {
    const temporary_folder folder;
    const std::string plain("\1\0\2\0\3\0\4\0", 8), big("\0\1\0\2\0\3\0\4", 8);
    const std::string fortran("\1\0\3\0\2\0\4\0", 8);
    write_file(folder / "p0.npy", npy("<i2", "(2, 2)", plain));
    write_file(folder / "p1.npz", zip_bytes::make({{"x.npy", npy(">i2", "(2, 2)", big), true}}).bytes);
    write_file(folder / "p2.npy", npy("<i2", "(0, 2)", ""));
    write_file(folder / "p3.npy", npy("<i2", "(2, 2)", fortran, "True"));
    write_file(folder / "p4.safetensors",
               cli::safetensors(R"({"x":{"dtype":"I16","shape":[2,2],"data_offsets":[0,8]}})", plain));
    CHECK(run_tool({"convert", folder / "p*", folder / "whole.npy"}).status == 0);
    CHECK(run_json({"inspect", folder / "whole.npy"})["shape"] == json({8, 2}));
    CHECK(payload_of(folder / "whole.npy", plain + plain + plain + plain) == plain + plain + plain + plain);
    const json inspected = run_json({"inspect", folder / "p*"});
    CHECK(inspected["shape"] == json({8, 2}));
    CHECK(inspected["mappable"] == false);
    CHECK(inspected["reason"].get<std::string>().find("p1.npz") != std::string::npos);
    write_file(folder / "p5.npy", npy("<i2", "()", plain.substr(0, 2)));
    check_fails(1, {"convert", folder / "p*", folder / "new.npy"}, {"p5.npy", "--stack"});
    check_fails(1, {"convert", folder / "p*", folder / "new.npy", "--stack"}, {"p0.npy", "p2.npy"});
    write_file(folder / "p5.npy", "");
    check_fails(1, {"convert", folder / "p*", folder / "new.npy"}, {"p5.npy"});
}

TEST_CASE("cli patterns: deflated members are inflated piece by piece, and a damaged one is an error") {
    const temporary_folder folder;
    constexpr std::size_t member_bytes = std::size_t{64} << 20;
    const std::string content = npy("|u1", "(16384, 4096)", std::string(member_bytes, '\0'));
    std::string archive = zip_bytes::make({{"x.npy", content, true}}).bytes;
    for (const char* const name : {"0.npz", "1.npz", "2.npz", "3.npz", "4.npz", "5.npz"})
        write_file(folder / name, archive);
    const tool_result converted = run_tool({"convert", folder / "?.npz:x", folder / "whole.npy"});
    CHECK(converted.status == 0);
    CHECK(run_json({"inspect", folder / "whole.npy"})["shape"] == json({6 * 16384, 4096}));
    if (!sanitized) CHECK(converted.peak_bytes < 4 * member_bytes);
    archive[200] = static_cast<char>(archive[200] ^ 1);
    write_file(folder / "3.npz", archive);
    check_fails(1, {"convert", folder / "?.npz", folder / "new.npy"}, {"3.npz"});
    CHECK(!std::filesystem::exists(folder / "new.npy"));
}

TEST_CASE("cli patterns: with --stack each file is a row of what convert writes and inspect describes") {
    const temporary_folder folder;
    std::string rows;
    for (const char* const number : {"0", "1", "2"}) {
        const std::string row = cli::counting_bytes(rows.size() + 6).substr(rows.size());
        write_file(folder / ("row-" + std::string(number) + ".npy"), npy("|u1", "(2, 3)", row));
        rows += row;
    }
    CHECK(run_tool({"convert", folder / "row-*.npy", folder / "whole.npy", "--stack"}).status == 0);
    CHECK(run_json({"inspect", folder / "whole.npy"})["shape"] == json({3, 2, 3}));
    CHECK(payload_of(folder / "whole.npy", rows) == rows);
    CHECK(run_json({"inspect", folder / "row-*.npy", "--stack"})["shape"] == json({3, 2, 3}));
    write_file(folder / "f0.npy", npy(">i2", "(2, 2)", std::string(8, 'x')));
    write_file(folder / "f1.npy", npy("<i2", "(2, 2)", std::string(8, 'x'), "True"));
    const json converted = run_json({"inspect", folder / "f?.npy", "--stack"});
    CHECK(converted["dtype"] == "<i2");
    CHECK(converted["fortran_order"] == false);
    CHECK(converted["mappable"] == false);
    CHECK(converted["reason"].get<std::string>().find("big-endian") != std::string::npos);
    const json joined = run_json({"inspect", folder / "f?.npy"});
    CHECK(joined["fortran_order"] == true);
    CHECK(joined["reason"].get<std::string>().find("--stack") != std::string::npos);
    check_fails(2, {"inspect", folder / "whole.npy", "--stack"}, {"--stack needs a pattern"});
    check_fails(2, {"convert", folder / "whole.npy", folder / "b.npy", "--stack"},
                {"--stack needs a pattern"});
}

TEST_CASE("cli patterns: inspect describes all files as one array, and says how many there are") {
    const temporary_folder folder;
    write_parts(folder, 12);
    const json inspected = run_json({"inspect", folder / "part-*.npy"});
    CHECK(inspected["format"] == "npy");
    CHECK(inspected["files"] == 12);
    CHECK(inspected["dtype"] == "<i2");
    CHECK(inspected["shape"] == json({78, 3}));
    CHECK(inspected["size_bytes"] == 468);
    CHECK(inspected["mappable"] == true);
    CHECK(run_json({"inspect", folder / "part-11*.npy"})["files"] == 1);
    const tool_result text = run_tool({"inspect", folder / "part-*.npy"});
    CHECK(text.status == 0);
    CHECK(text.output.find("npy, 12 files") != std::string::npos);
}

TEST_CASE("cli patterns: mismatched and missing files are a one-line error, and nothing is written") {
    const temporary_folder folder;
    write_parts(folder, 2);
    write_file(folder / "part-2.npy", npy("<i2", "(2, 4)", std::string(16, 'x')));
    for (const char* const command : {"inspect", "convert"}) {
        arguments wrong{command, folder / "part-*.npy"};
        arguments missing{command, folder / "nothing-*.npy"};
        if (std::string(command) == "convert") {
            wrong.push_back(folder / "whole.npy");
            missing.push_back(folder / "whole.npy");
        }
        check_fails(1, wrong, {"part-0.npy", "part-2.npy"});
        check_fails(1, missing, {"nothing-*.npy"});
    }
    CHECK(!std::filesystem::exists(folder / "whole.npy"));
}

TEST_CASE("cli patterns: convert refuses to write a file that another run would read") {
    const temporary_folder folder;
    write_parts(folder, 2);
    check_fails(1, {"convert", folder / "part-*.npy", folder / "part-all.npy"},
                {"part-all.npy", "part-*.npy"});
    CHECK(!std::filesystem::exists(folder / "part-all.npy"));
    const std::string dotted = folder / "./part-all.npy";
    check_fails(1, {"convert", folder / "part-*.npy", dotted}, {"part-*.npy"});
    for (const char* const number : {"0", "1"}) {
        const std::string part = folder / ("part-" + std::string(number));
        CHECK(run_tool({"convert", part + ".npy", part + ".npz:rows"}).status == 0);
    }
    check_fails(1, {"convert", folder / "part-*.npz:rows", folder / "part-all.npz"}, {"part-all.npz"});
    CHECK(run_tool({"convert", folder / "part-*.npz:rows", folder / "all.npz"}).status == 0);
}

TEST_CASE("cli patterns: a pattern that the shell has expanded is reported with a hint") {
    const temporary_folder folder;
    write_parts(folder, 20);
    arguments same{"stream", "--device", "host"};
    arguments different{"stream", "--device", "host"};
    for (int index = 0; index < 20; ++index) {
        same.push_back(folder / "part-3.npy");
        different.push_back(folder / ("part-" + std::to_string(index) + ".npy"));
    }
    const json streamed = run_json(same);
    REQUIRE(streamed["notes"].size() == 1);
    CHECK(streamed["notes"][0].get<std::string>().find("quote a pattern") != std::string::npos);
    check_fails(1, different, {"part-0.npy", "part-1.npy", "quote a pattern"});
    check_fails(2, {"convert", folder / "part-0.npy", folder / "part-1.npy", folder / "whole.npy"},
                {"one file too many", "quote a pattern"});
    check_fails(2, {"inspect", folder / "part-0.npy", folder / "part-1.npy"}, {"quote a pattern"});
    check_fails(2, {"verify", folder / "part-0.npy", folder / "part-1.npy"}, {"one file at a time"});
    const arguments few{
        "stream", "--device", "host", folder / "part-0.npy", folder / "part-1.npy", folder / "part-2.npy"};
    check_fails(1, few, {"part-0.npy", "part-1.npy", "quote a pattern"});
    CHECK(run_json({"stream", "--device", "host", folder / "part-3.npy", folder / "part-3.npy"})["notes"]
              .empty());
    check_fails(2, {"inspect", folder / "part-0.npy", "--no-such-flag"}, {"--no-such-flag"});
    CHECK(run_json({"stream", "--device", "host", folder / "part-3.npy"})["notes"].empty());
}

TEST_CASE("cli patterns: the error for a folder names the pattern of its files") {
    const temporary_folder folder;
    write_parts(folder, 2);
    const std::string path = folder / "";
    check_fails(1, {"stream", path}, {"it is a folder", "*.npy"});
    check_fails(1, {"inspect", path}, {"it is a folder", "*.npy"});
}

TEST_CASE("cli patterns: a folder whose files cannot be looked for is an error, and not left out") {
    const temporary_folder folder;
    for (const char* const name : {"a", "b"}) {
        std::filesystem::create_directory(folder / name);
        write_file(folder / (std::string(name) + "/part.npy"), npy("<i2", "(1, 3)", cli::counting_bytes(6)));
    }
    CHECK(run_json({"stream", "--device", "host", folder / "*/part.npy"})["rows"] == 2);
    std::filesystem::create_symlink("loop", folder / "loop");
    for (const char* const pattern : {"*/part.npy", "*/part*.npy"})
        check_fails(1, {"stream", "--device", "host", folder / pattern},
                    {"Too many levels of symbolic links"});
    std::filesystem::remove(folder / "loop");
    std::filesystem::create_symlink("missing", folder / "dangling");
    CHECK(run_json({"stream", "--device", "host", folder / "*/part.npy"})["rows"] == 2);
}

TEST_CASE("cli patterns: an output that the pattern matches through a linked folder is refused") {
    const temporary_folder folder;
    std::filesystem::create_directory(folder / "parts");
    write_file(folder / "parts/part.npy", npy("<i2", "(1, 3)", cli::counting_bytes(6)));
    std::filesystem::create_directory_symlink("parts", folder / "link");
    for (const char* const out : {"link/part.npy", "link/part-new.npy", "parts/part-new.npy"}) {
        CAPTURE(out);
        check_fails(1, {"convert", folder / "parts/part*.npy", folder / out}, {"matches it"});
        check_fails(1, {"convert", folder / "link/part*.npy", folder / out}, {"matches it"});
    }
    CHECK(run_tool({"convert", folder / "link/part*.npy", folder / "link/whole.npy"}).status == 0);
}
