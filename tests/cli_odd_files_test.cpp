#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "pinflow/formats/hdf5.hpp"
#include "tests/cli_helpers.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_tool.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

// Unusual but valid files: the tool's results, or its reasons for refusing them.

namespace {

using npy_bytes::write_file;

/// A tensor of three bytes and 90 MB of metadata: one text, or many. Frees its memory before it returns,
/// because a child's peak memory includes this process's memory at the fork.
void write_large_metadata(const std::string& path, bool one_text) {
    constexpr std::size_t metadata_bytes = 90'000'000;
    std::string json = R"({"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"__metadata__":{)";
    if (one_text) json += "\"a\":\"" + std::string(metadata_bytes, 'x') + '"';
    for (unsigned number = 0; json.size() < metadata_bytes; ++number)
        json += fmt::format("{}\"{:07}\":\"{:77}\"", number == 0 ? "" : ",", number, 'y');
    write_file(path, cli::safetensors(json + "}}", "abc"));
}

}  // namespace

TEST_CASE("cli: opening a safetensors file with 90 MB of metadata takes little memory") {
    const temporary_folder folder;
    const std::string path = folder / "large.safetensors";
    for (const bool one_text : {true, false}) {
        write_large_metadata(path, one_text);
        for (const auto& arguments :
             std::vector<cli::arguments>{{"inspect", path}, {"stream", path, "--device", "host"}}) {
            const tool_result result = run_tool(arguments);
            CAPTURE(result.errors);
            CHECK(result.status == 0);
            if (!sanitized) CHECK(result.peak_bytes < std::uint64_t{64} << 20);
        }
    }
}

TEST_CASE("cli: arrays and fields of no bytes are inspected, streamed, and converted to .npy and .npz") {
    const temporary_folder folder;
    // the digest of one empty row, three times
    const std::string three_empty_rows = fmt::format("{:016x}", 3 * std::uint64_t{0x48218226ff3cd4bf});
    for (const std::string descr : {"|V0", "|S0", "<U0", "[]", "[('a', '|V0')]", "[('a', '<f4', (0,))]"}) {
        CAPTURE(descr);
        const std::string path = folder / "empty.npy";
        write_file(path, cli::npy(descr, "(3,)", ""));
        const auto inspected = cli::run_json({"inspect", path});
        CHECK(inspected["dtype"] == descr);
        CHECK(inspected["shape"] == std::vector<std::uint64_t>{3});
        CHECK(inspected["size_bytes"] == 0);
        for (const char* const order : {"sequential", "shuffled"}) {
            const auto streamed = cli::run_json({"stream", path, "--device", "host", "--order", order});
            CHECK(streamed["rows"] == 3);
            CHECK(streamed["digest"] == three_empty_rows);
        }
        for (const char* const target : {"out.npy", "out.npz"}) {
            const std::string out = folder / target;
            CHECK(run_tool({"convert", path, out}).status == 0);
            CHECK(cli::run_json({"inspect", out})["dtype"] == descr);
        }
        const std::string tensors = folder / "out.safetensors";
        cli::check_fails(1, {"convert", path, tensors}, {"safetensors has no type"});
    }
    for (const std::string descr : {"[('a', '|S0'), ('b', '<i4')]", "[('b', '<i4'), ('a', '|V0')]"}) {
        CAPTURE(descr);
        const std::string path = folder / "field.npy";
        write_file(path, cli::npy(descr, "(2,)", "12345678"));
        CHECK(cli::run_json({"inspect", path})["dtype"] == descr);
        CHECK(cli::run_json({"stream", path, "--device", "host"})["bytes"] == 8);
        CHECK(cli::run_json({"stream", path + ":b", "--device", "host"})["bytes"] == 8);
        CHECK(cli::run_json({"stream", path + ":a", "--device", "host"})["bytes"] == 0);
        CHECK(cli::run_json({"inspect", path + ":a"})["size_bytes"] == 0);
        CHECK(run_tool({"convert", path + ":b", folder / "b.npy"}).status == 0);
        CHECK(run_tool({"convert", path, folder / "both.npz"}).status == 0);
    }
    if (pinflow::has_hdf5()) {
        const std::string path = folder / "void.npy";
        write_file(path, cli::npy("|V0", "(3,)", ""));
        cli::check_fails(1, {"convert", path, folder / "out.h5"}, {"|V0", "HDF5"});
        CHECK_FALSE(std::filesystem::exists(folder / "out.h5"));
    }
}

TEST_CASE("cli: more than 2^30 rows of 0 bytes are refused, a million are not") {
    const temporary_folder folder;
    const std::string path = folder / "rows.npy";
    write_file(path, cli::npy("<f4", "(1099511627776, 0)", ""));
    for (const cli::arguments& more :
         std::vector<cli::arguments>{{}, {"--order", "shuffled"}, {"--batch", "1000000000"}}) {
        cli::arguments command{"stream", path, "--device", "host"};
        command.insert(command.end(), more.begin(), more.end());
        cli::check_fails(1, command, {path, "1099511627776 rows of 0 bytes", "1073741824"});
    }
    CHECK(cli::run_json({"inspect", path})["size_bytes"] == 0);
    write_file(path, cli::npy("<f4", "(1000000, 0)", ""));
    CHECK(cli::run_json({"stream", path, "--device", "host"})["rows"] == 1'000'000);
}

TEST_CASE("cli: convert checks the free space before it writes") {
    const temporary_folder folder;
    const std::string path = folder / "large.npy";
    const std::string out = folder / "out.npz";
    const std::uintmax_t bytes = std::filesystem::space(folder.path()).free + (std::uintmax_t{1} << 30);
    write_file(path, cli::npy("|u1", fmt::format("({},)", bytes), ""));
    std::error_code too_large;
    std::filesystem::resize_file(path, std::filesystem::file_size(path) + bytes, too_large);
    if (too_large) {
        MESSAGE("skipped: this filesystem has no sparse files that are larger than its free space");
        return;
    }
    cli::check_fails(1, {"convert", path, out}, {out, fmt::format("at least {} bytes", bytes), " free"});
    CHECK(cli::names_in(folder.path()) == std::set<std::string>{"large.npy"});
}

TEST_CASE("cli: control characters of a terminal are escaped in text, in errors and in JSON") {
    const temporary_folder folder;
    const std::string path = folder / "names.safetensors";
    // CSI, a direction override, an isolate, two direction marks, and two harmless letters
    const std::string name = "a\u009b31m\u202eb\u2066c\u200f\u061cd\u00e9\u6570";
    const std::string spelled = "a\\u009b31m\\u202eb\\u2066c\\u200f\\u061cd\u00e9\u6570";
    write_file(path, cli::safetensors("{\"" + name + R"(":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)" +
                                          R"("x":{"dtype":"U8","shape":[0],"data_offsets":[3,3]}})",
                                      "abc"));
    const tool_result text = run_tool({"inspect", path});
    CHECK(text.output.find(spelled) != std::string::npos);
    CHECK(text.output.find(name) == std::string::npos);
    const tool_result printed = run_tool({"inspect", path, "--json"});
    CHECK(printed.output.find(spelled) != std::string::npos);
    CHECK(printed.output.find("\u202e") == std::string::npos);
    CHECK(nlohmann::json::parse(printed.output)["arrays"][0]["name"] == name);
    const tool_result failed = run_tool({"inspect", path + ":" + "\u202e" + name});
    CHECK(failed.status == 1);
    CHECK(failed.errors.find("\\u202e" + spelled) != std::string::npos);
    CHECK(failed.errors.find("\u009b") == std::string::npos);
    const tool_result ambiguous = run_tool({"stream", path});
    CHECK(ambiguous.status == 1);
    CHECK(ambiguous.errors.find(spelled) != std::string::npos);
    // a byte that is no UTF-8 is a control character to a terminal of 8 bits
    CHECK(run_tool({"inspect", folder / "a\x9b"
                                        "31m"})
              .errors.find("a\\x9b31m") != std::string::npos);
}

TEST_CASE("cli: an error line is cut after some 2,000 characters, between two characters, and says so") {
    for (const std::string& part : std::vector<std::string>{"x", "\u6570", "\u202e", "\n"}) {
        CAPTURE(part);
        std::string name = "f";
        while (name.size() < 30'000)
            name += part;
        const tool_result result = run_tool({"inspect", name});
        CHECK(result.status == 1);
        CHECK(result.one_error_line());
        CHECK(result.errors.size() < 6200);
        CHECK(result.errors.size() > 1900);
        CHECK(result.errors.find("cut here") != std::string::npos);
        CHECK(nlohmann::json::accept(nlohmann::json(result.errors).dump()));  // UTF-8, or dump throws
    }
}
