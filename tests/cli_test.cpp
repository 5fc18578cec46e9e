#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "pinflow/formats/hdf5.hpp"
#include "pinflow/version.hpp"
#include "tests/cli_helpers.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_tool.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

// What others script against: commands, flags, exit statuses, JSON. tests/cli_stream_test.cpp has what
// streaming prints, tests/cli_bad_files_test.cpp the files that the tool refuses.

namespace {

using cli::arguments;
using cli::counting_bytes;
using cli::keys_of;
using cli::npy;
using cli::run_json;
using nlohmann::json;
using npy_bytes::write_file;

}  // namespace

// ---- the command line -------------------------------------------------------------------------------------

TEST_CASE("cli: prints its version and help with exit status 0") {
    const tool_result version = run_tool({"--version"});
    CHECK(version.status == 0);
    CHECK(version.output == fmt::format("pinflow {}\n", pinflow::version));
    CHECK(version.errors.empty());
    for (const arguments& command : {arguments{"--help"},
                                     {"-h"},
                                     {"inspect", "--help"},
                                     {"stream", "-h"},
                                     {"convert", "--help"},
                                     {"verify", "-h"},
                                     {"devices", "--help"}}) {
        const tool_result help = run_tool(command);
        CAPTURE(cli::joined(command));
        CHECK(help.status == 0);
        CHECK(help.output.find("Usage: pinflow") != std::string::npos);
        CHECK(help.errors.empty());
    }
}

TEST_CASE("cli: answers wrong usage and what this build lacks with exit status 2 and one line") {
    const temporary_folder folder;
    const std::string file = folder / "a.npy";
    write_file(file, npy("|u1", "(2, 3)", counting_bytes(6)));
    write_file(folder / "a.h5", "\x89HDF\r\n\x1a\n" + std::string(60, '\0'));
    write_file(folder / "user_block.h5",
               std::string(1024, '\0') + "\x89HDF\r\n\x1a\n" + std::string(60, '\0'));

    struct wrong {
        arguments command;
        std::string says;
    };
    std::vector<wrong> table{
        {{}, "no command"},
        {{""}, "no command ''"},
        {{"frobnicate", file}, "'frobnicate'"},
        {{"two\nlines"}, "two\\nlines"},
        {{"--json"}, "'--json'"},
        {{"inspect", "-a.npy"}, "no option '-a.npy'; a file of that name is given as './-a.npy'"},
        {{"convert", "-a.npy", "b.npy"}, "no option '-a.npy'"},
        {{"inspect"}, "FILE is required"},
        {{"convert", "--", "-a.npy"}, "OUT is required"},
        {{"--version", "please"}, "'please'"},
        // arguments
        {{"inspect"}, "required"},
        {{"inspect", file, file}, "a.npy"},
        {{"inspect", file, "--batch", "3"}, "--batch"},
        {{"inspect", file, "--json=false"}, "--json takes no value"},
        {{"devices", file}, "a.npy"},
        {{"bench", "juggle"}, "'juggle'"},
        {{"bench", "gather", "--known", "0"}, "--known"},
        {{"bench", "gather", "--known", "65"}, "--known"},
        {{"bench", "gather", "--route", "read"}, "'read'"},
        {{"bench", "stream", "--epochs", "1"}, "--epochs"},
        {{"bench", "gather", "--table", "many"}, "'many'"},
        {{"stream"}, "required"},
        {{"stream", file, "--no-such-flag"}, "--no-such-flag"},
        {{"stream", file, "-x"}, "-x"},
        {{"stream", file, "--batch"}, "--batch"},
        {{"stream", file, "--batch", "3", "--batch", "4"}, "--batch"},
        {{"stream", file, "--order", "random"}, "'random'"},
        {{"stream", file, "--order", "Shuffled"}, "'Shuffled'"},
        {{"stream", file, "--route", "automatic"}, "'automatic'"},
        {{"stream", file, "--tail", "keep"}, "'keep'"},
        {{"stream", file, "--device", "gpu"}, "'gpu'"},
        {{"stream", file, "--device", "cuda:-1"}, "cuda:-1"},
        {{"stream", file, "--device", "cuda:x"}, "cuda:x"},
        {{"stream", file, "--device", ""}, ""},
        // flags that contradict each other or do not fit the rows
        {{"stream", file, "--memory", "5"}, "5 bytes"},
        {{"stream", file, "--memory", "1KiB", "--slots", "60000"}, "1024 bytes"},
        {{"stream", file, "--batch", "1", "--epochs", "18446744073709551615"}, "epochs"},
        {{"stream", file, "--order", "weighted"}, "'weighted'"},
        {{"stream", file, "--window", "8"}, "--order windowed"},
        {{"stream", file, "--rank", "0"}, "--world is missing"},
        {{"stream", file, "--world", "2"}, "--rank is missing"},
        {{"stream", file, "--rank", "2", "--world", "2"}, "0 to 1"},
        {{"stream", file, "--rank", "0", "--world", "env"}, "--world env"},
        {{"stream", file, "--save-state", ""}, "--save-state"},
        {{"stream", file, "--load-state="}, "--load-state"},
    };
    if (!pinflow::has_hdf5()) {  // a format that this build lacks, detected by content
        table.push_back({{"stream", folder / "a.h5"}, "HDF5"});
        table.push_back({{"stream", folder / "*.h5"}, "HDF5"});
        table.push_back({{"stream", std::string(folder / "*.h5") + ":name"}, "HDF5"});
        table.push_back({{"inspect", folder / "user_block.h5"}, "HDF5"});
        table.push_back({{"inspect", std::string(folder / "a.h5") + ":name"}, "HDF5"});
    }
    for (const char* const flag :
         {"--batch", "--epochs", "--slots", "--threads", "--memory", "--pin-budget", "--seed"}) {
        for (const char* const value :
             {"-1", "-0", "+1", "x", "1x", "0x10", "1.0", "1e3", " 1", "1 ", "18446744073709551616",
              "99999999999999999999999999999", "1KB", "KiB"}) {
            table.push_back({{"stream", file, flag, value}, flag});
        }
        if (flag != std::string("--seed")) table.push_back({{"stream", file, flag, "0"}, flag});
    }
    for (const char* const value : {"0", "-1", "x", "18446744073709551616"}) {
        table.push_back({{"stream", file, "--order", "windowed", "--window", value}, "--window"});
        table.push_back({{"stream", file, "--max-batches", value}, "--max-batches"});
        table.push_back({{"stream", file, "--rank", "0", "--world", value}, "--world"});
    }
    table.push_back({{"stream", file, "--pin-budget", "ULIMIT"}, "--pin-budget"});
    table.push_back({{"stream", file, "--slots", "1"}, "--slots"});
    table.push_back({{"stream", file, "--memory", "0GiB"}, "--memory"});
    table.push_back({{"stream", file, "--memory", "16777216TiB"}, "--memory"});
    table.push_back({{"stream", file, "--batch", "1KiB"}, "--batch"});

    for (const auto& [command, says] : table) {
        CAPTURE(cli::joined(command));
        const tool_result result = run_tool(command);
        CAPTURE(result.errors);
        CHECK(result.status == 2);
        CHECK(result.one_error_line());
        CHECK(result.errors.find(says) != std::string::npos);
        CHECK(result.output.empty());
    }
}

TEST_CASE("cli: a CUDA device that is not there is exit status 2 without CUDA in the build and 1 with it") {
    const temporary_folder folder;
    write_file(folder / "a.npy", npy("|u1", "(2, 3)", counting_bytes(6)));
    const json devices = run_json({"devices"});
    const std::string reason = devices["no_cuda_reason"].is_null() ? "" : devices["no_cuda_reason"];
    const tool_result result = run_tool({"stream", folder / "a.npy", "--device", "cuda:4096"});
    CAPTURE(result.errors);
    CHECK(result.status == (reason.find("build") != std::string::npos ? 2 : 1));
    CHECK(result.one_error_line());
}

TEST_CASE("cli: a result that cannot be written is exit status 1") {
    const temporary_folder folder;
    const std::string file = folder / "a.npy";
    write_file(file, npy("|u1", "(2, 3)", counting_bytes(6)));
    tool_surroundings full;
    full.output_path = "/dev/full";
    tool_surroundings closed;
    closed.output_closed = true;
    tool_surroundings unread;
    unread.output_pipe_closed = true;
    for (const arguments& command : {arguments{"--version"},
                                     {"--help"},
                                     {"stream", "--help"},
                                     {"devices"},
                                     {"inspect", file},
                                     {"stream", file}}) {
        for (const tool_surroundings& surroundings : {full, closed, unread}) {
            CAPTURE(command[0]);
            const tool_result result = run_tool(command, surroundings);
            CAPTURE(result.errors);
            CHECK(result.status == 1);
            CHECK(result.one_error_line());
            CHECK(result.errors.find("standard output") != std::string::npos);
        }
    }
}

TEST_CASE("cli: takes the longest existing prefix that ends at a colon as the file") {
    const temporary_folder folder;
    write_file(folder / "a", npy("|u1", "(1,)", "1"));
    write_file(folder / "a:b", npy("|u1", "(2,)", "12"));
    write_file(folder / "a:b:c", npy("|u1", "(3,)", "123"));
    CHECK(run_json({"inspect", folder / "a:b:c"})["shape"] == json({3}));
    CHECK(run_json({"inspect", folder / "a:b"})["shape"] == json({2}));
    for (const auto& [argument, file, name] :
         std::vector<std::array<std::string, 3>>{{"a:x", "a'", "'x'"},
                                                 {"a:b:x", "a:b'", "'x'"},
                                                 {"a:b:c:x:y", "a:b:c'", "'x:y'"},
                                                 {"a:", "a'", "''"}}) {
        const tool_result result = run_tool({"inspect", folder / argument});
        CAPTURE(result.errors);
        CHECK(result.status == 1);  // a .npy file has no named arrays
        CHECK(result.one_error_line());
        CHECK(result.errors.find(file) != std::string::npos);
        CHECK(result.errors.find(name) != std::string::npos);
    }
}

TEST_CASE("cli: file names may look like flags, commands, lists or globs") {
    const temporary_folder folder;
    const auto home = std::filesystem::current_path();
    std::filesystem::current_path(folder.path());
    for (const char* const name : {"--json", "inspect", "[a,b]", "*", "two\nlines", " "}) {
        write_file(name, npy("|u1", "(3,)", "123"));
        CAPTURE(name);
        const tool_result inspected = run_tool({"inspect", "--json", "--", name});
        CHECK(inspected.status == 0);
        const tool_result streamed = run_tool({"stream", "--json", "--", name});
        CAPTURE(streamed.errors);
        CHECK(streamed.status == 0);
        CHECK(json::parse(streamed.output, nullptr, false)["rows"] == 3);
    }
    std::filesystem::current_path(home);
}

// ---- inspect ----------------------------------------------------------------------------------------------

TEST_CASE("cli: inspect prints exactly the documented keys") {
    const temporary_folder folder;
    write_file(folder / "a.npy", npy("<f4", "(3, 4)", counting_bytes(48) + "trailing"));
    write_file(folder / "big.npy", npy(">M8[25s]", "(2, 3)", counting_bytes(48), "True"));
    write_file(folder / "scalar.npy", npy("|b1", "()", "1"));
    write_file(folder / "none.npy", npy("<U5", "(0, 3)", ""));
    const std::size_t header = npy("<f4", "(3, 4)", "").size();

    const json plain = run_json({"inspect", folder / "a.npy"});
    CHECK(keys_of(plain) == std::set<std::string>{"format", "dtype", "shape", "fortran_order", "offset_bytes",
                                                  "size_bytes", "mappable", "reason"});
    CHECK(plain["format"] == "npy");
    CHECK(plain["dtype"] == "<f4");
    CHECK(plain["shape"] == json({3, 4}));
    CHECK(plain["fortran_order"] == false);
    CHECK(plain["offset_bytes"] == header);
    CHECK(plain["size_bytes"] == 48);
    CHECK(plain["mappable"] == true);
    CHECK(plain["reason"].get<std::string>().size() > 0);

    const json fortran = run_json({"inspect", folder / "big.npy"});
    CHECK(fortran["dtype"] == ">M8[25s]");
    CHECK(fortran["fortran_order"] == true);
    CHECK(fortran["reason"].get<std::string>().find("Fortran") != std::string::npos);
    CHECK(fortran["reason"].get<std::string>().find("convert it") != std::string::npos);
    CHECK(fortran["reason"].get<std::string>().find("--stack") == std::string::npos);  // is for patterns
    // in these shapes, rows are contiguous in either order
    for (const char* const shape : {"(6, 1)", "(1, 6)", "(0, 2, 3)"}) {
        CAPTURE(shape);
        const bool is_empty = shape[1] == '0';
        write_file(folder / "rows.npy", npy("<i8", shape, is_empty ? "" : counting_bytes(48), "True"));
        const json rows = run_json({"inspect", folder / "rows.npy"});
        CHECK(rows["fortran_order"] == true);
        CHECK(rows["reason"].get<std::string>().find("Fortran") == std::string::npos);
        if (!is_empty) CHECK(run_tool({"stream", folder / "rows.npy", "--device", "host"}).status == 0);
        const json joined = run_json({"inspect", folder / "row[s].npy"});
        CHECK(joined["fortran_order"] == false);
        CHECK(joined["reason"].get<std::string>().find("Fortran") == std::string::npos);
    }
    const json scalar = run_json({"inspect", folder / "scalar.npy"});
    CHECK(scalar["shape"] == json::array());
    CHECK(scalar["size_bytes"] == 1);
    const json none = run_json({"inspect", folder / "none.npy"});
    CHECK(none["shape"] == json({0, 3}));
    CHECK(none["size_bytes"] == 0);

    const tool_result text = run_tool({"inspect", folder / "a.npy"});
    CHECK(text.status == 0);
    for (const char* const word : {"npy", "<f4", "(3, 4)", "48 bytes"}) {
        CHECK(text.output.find(word) != std::string::npos);
    }
}

TEST_CASE("cli: inspect lists the arrays of a file, also those that cannot be opened") {
    const temporary_folder folder;
    const std::string archive = folder / "a.npz";
    write_file(archive, zip_bytes::make({{"plain.npy", npy("<f4", "(3, 4)", counting_bytes(48))},
                                         {"deflated.npy", npy("<i8", "(2,)", counting_bytes(16)), true},
                                         {"pickled.npy", npy("|O", "(1,)", "x")},
                                         {"text", "hello"}})
                            .bytes);
    const std::set<std::string> keys{"name",         "dtype",      "shape",    "fortran_order",
                                     "offset_bytes", "size_bytes", "mappable", "reason"};
    const json listed = run_json({"inspect", archive});
    CHECK(keys_of(listed) == std::set<std::string>{"format", "arrays"});
    CHECK(listed["format"] == "npz");
    REQUIRE(listed["arrays"].size() == 4);
    for (const json& array : listed["arrays"]) {
        CHECK(keys_of(array) == keys);
        CHECK(array["reason"].get<std::string>().size() > 0);
    }
    const json& plain = listed["arrays"][0];
    CHECK(plain["name"] == "plain");
    CHECK(plain["dtype"] == "<f4");
    CHECK(plain["shape"] == json({3, 4}));
    CHECK(plain["size_bytes"] == 48);
    CHECK(plain["mappable"] == true);
    CHECK(npy_bytes::read_file(archive).substr(plain["offset_bytes"], 48) == counting_bytes(48));
    const json& deflated = listed["arrays"][1];
    CHECK(deflated["dtype"] == "<i8");
    CHECK(deflated["offset_bytes"].is_null());
    CHECK(deflated["size_bytes"] == 16);
    CHECK(deflated["mappable"] == false);
    for (const std::size_t index : {2u, 3u}) {
        CHECK(listed["arrays"][index]["dtype"].is_null());
        CHECK(listed["arrays"][index]["mappable"] == false);
    }

    json named = run_json({"inspect", archive + ":plain"});
    CHECK(run_json({"inspect", archive + ":plain.npy"}) == named);
    CHECK(named["format"] == "npz");
    named.erase("format");
    CHECK(named == plain);
    cli::check_fails(1, {"inspect", archive + ":pickled"}, {"pickled", "pickle"});
    cli::check_fails(1, {"inspect", archive + ":absent"}, {"absent", "'plain'", "'deflated'"});

    const tool_result text = run_tool({"inspect", archive});
    CHECK(text.status == 0);
    for (const char* const word : {"npz", "4 arrays", "deflated", "<f4", "(3, 4)", "48 bytes", "pickle"}) {
        CHECK(text.output.find(word) != std::string::npos);
    }
    CHECK(std::ranges::count(text.output, '\n') == 6);
}

TEST_CASE("cli: inspect describes the only array of an archive as if it had been named") {
    const temporary_folder folder;
    write_file(folder / "one.npz", zip_bytes::make({{"x.npy", npy("<f4", "(2,)", counting_bytes(8))}}).bytes);
    write_file(folder / "one.safetensors",
               cli::safetensors(R"({"x":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})", "abcd"));
    write_file(folder / "none.npz", zip_bytes::make({}).bytes);
    write_file(folder / "none.safetensors", cli::safetensors("{}", ""));
    const json archived = run_json({"inspect", folder / "one.npz"});
    CHECK(keys_of(archived) == keys_of(run_json({"inspect", folder / "one.npz:x"})));
    CHECK(archived["dtype"] == "<f4");
    CHECK(archived["name"] == "x");
    CHECK(run_tool({"inspect", folder / "one.npz"}).output.starts_with((folder / "one.npz:x\n").string()));
    const json tensor = run_json({"inspect", folder / "one.safetensors"});
    CHECK(tensor["format"] == "safetensors");
    CHECK(tensor["dtype"] == "bfloat16");
    CHECK(tensor["offset_bytes"] == std::filesystem::file_size(folder / "one.safetensors") - 4);
    for (const char* const none : {"none.npz", "none.safetensors"}) {
        CHECK(run_json({"inspect", folder / none})["arrays"] == json::array());
    }
}

TEST_CASE("cli: inspect prints structured types as numpy spells them, and describes their fields") {
    const temporary_folder folder;
    const std::string file = folder / "a.npy";
    const std::string header = npy("[('x', '>i2'), ('y', '|u1', (3,))]", "(2,)", "");
    write_file(file, header + counting_bytes(10));
    const json whole = run_json({"inspect", file});
    CHECK(whole["dtype"] == "[('x', '>i2'), ('y', '|u1', (3,))]");
    CHECK(whole["shape"] == json({2}));
    const json field = run_json({"inspect", file + ":y"});
    CHECK(field["dtype"] == "|u1");
    CHECK(field["shape"] == json({2, 3}));
    CHECK(field["offset_bytes"] == header.size() + 2);
    CHECK(field["size_bytes"] == 6);
    cli::check_fails(1, {"inspect", file + ":z"}, {"'z'", "'x'", "'y'"});
}

TEST_CASE("cli: names that are no UTF-8 do not break the JSON") {
    const temporary_folder folder;
    const std::string name = folder / "\xff\n.npy";
    write_file(name, npy("|u1", "(3,)", "123"));
    CHECK(run_json({"inspect", name})["shape"] == json({3}));
    CHECK(run_json({"stream", name})["rows"] == 3);
    const tool_result text = run_tool({"inspect", name});
    CHECK(text.output.find("\\n.npy") != std::string::npos);
}

// ---- devices ----------------------------------------------------------------------------------------------

TEST_CASE("cli: devices lists the host first") {
    const json object = run_json({"devices"});
    CHECK(keys_of(object) == std::set<std::string>{"devices", "no_cuda_reason"});
    const json& list = object["devices"];
    REQUIRE(list.size() >= 1);
    for (const json& device : list) {
        CHECK(keys_of(device) ==
              std::set<std::string>{"name", "kind", "model", "memory_total_bytes", "memory_free_bytes"});
        CHECK(device["memory_total_bytes"] >= device["memory_free_bytes"]);
        CHECK(device["memory_total_bytes"] > 0);
    }
    CHECK(list[0]["name"] == "host");
    CHECK(list[0]["kind"] == "host");
    CHECK(object["no_cuda_reason"].is_null() == (list.size() > 1));
    CHECK(run_tool({"devices"}).output.starts_with("host "));
}
