#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cstdint>
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
#include "tests/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

// What others script against: commands, flags, exit statuses, JSON, the digest. tests/cli_bad_files_test.cpp
// has the files that the tool refuses.

namespace {

using cli::arguments;
using cli::counting_bytes;
using cli::keys_of;
using cli::npy;
using cli::run_json;
using nlohmann::json;
using npy_bytes::write_file;

std::string digest_of(arguments command) {
    command.insert(command.begin(), "stream");
    return run_json(std::move(command))["digest"];
}

// ---- the digest, once more from its definition ------------------------------------------------------------

constexpr std::uint64_t golden = 0x9E3779B97F4A7C15;

std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

std::uint64_t hash_of(const std::string& row) {
    std::uint64_t hash = row.size();
    for (std::size_t word = 0; word * 8 < row.size(); ++word) {
        std::uint64_t bits = 0;
        for (std::size_t i = word * 8; i < row.size() && i < word * 8 + 8; ++i) {
            bits |= std::uint64_t{static_cast<unsigned char>(row[i])} << (i % 8 * 8);
        }
        hash += mix(bits + (word + 1) * golden);
    }
    return hash;
}

/// Of `arrays`, each the rows' bytes one after the other, with `rows` rows each.
std::string expected_digest(const std::vector<std::string>& arrays, std::size_t rows) {
    std::uint64_t digest = 0;
    for (std::size_t row = 0; row < rows; ++row) {
        std::uint64_t sample = 0;
        for (std::size_t a = 0; a < arrays.size(); ++a) {
            const std::size_t size = arrays[a].size() / rows;
            sample += mix(hash_of(arrays[a].substr(row * size, size)) + (a + 1) * golden);
        }
        digest += mix(sample);
    }
    return fmt::format("{:016x}", digest);
}

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
        {{"--version", "please"}, "'please'"},
        // commands of the interface that come later
        {{"pin", file, "segment"}, "'pin'"},
        {{"unpin", "segment"}, "'unpin'"},
        {{"list", "--json"}, "'list'"},
        {{"clean"}, "'clean'"},
        // arguments
        {{"inspect"}, "required"},
        {{"inspect", file, file}, "a.npy"},
        {{"inspect", file, "--batch", "3"}, "--batch"},
        {{"inspect", file, "--json=false"}, "json"},
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
        // flags that do not fit together, or not to the rows
        {{"stream", file, "--memory", "5"}, "5 bytes"},
        {{"stream", file, "--memory", "1KiB", "--slots", "60000"}, "1024 bytes"},
        {{"stream", file, "--batch", "1", "--epochs", "18446744073709551615"}, "epochs"},
        // sources that come later
        {{"inspect", "shm:segment"}, "shm:segment"},
        {{"stream", "shm:segment"}, "shm:segment"},
        {{"stream", file, "--order", "weighted"}, "'weighted'"},
        {{"stream", file, "--window", "8"}, "--order windowed"},
        {{"stream", file, "--rank", "0"}, "--world is missing"},
        {{"stream", file, "--world", "2"}, "--rank is missing"},
        {{"stream", file, "--rank", "2", "--world", "2"}, "0 to 1"},
        {{"stream", file, "--rank", "0", "--world", "env"}, "--world env"},
        {{"stream", file, "--save-state", ""}, "--save-state"},
        {{"stream", file, "--load-state="}, "--load-state"},
    };
    if (!pinflow::has_hdf5()) {  // formats that a build lacks, told by content
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
    const std::string reason = devices["why_no_cuda"].is_null() ? "" : devices["why_no_cuda"];
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
        CHECK(result.status == 1);  // an .npy file has no named arrays
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
    named["name"] = "plain";
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

TEST_CASE("cli: inspect describes the one array of an archive as that of an npy file") {
    const temporary_folder folder;
    write_file(folder / "one.npz", zip_bytes::make({{"x.npy", npy("<f4", "(2,)", counting_bytes(8))}}).bytes);
    write_file(folder / "one.safetensors",
               cli::safetensors(R"({"x":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})", "abcd"));
    write_file(folder / "none.npz", zip_bytes::make({}).bytes);
    write_file(folder / "none.safetensors", cli::safetensors("{}", ""));
    const json archived = run_json({"inspect", folder / "one.npz"});
    CHECK(keys_of(archived) == keys_of(run_json({"inspect", folder / "one.npz:x"})));
    CHECK(archived["dtype"] == "<f4");
    const json tensor = run_json({"inspect", folder / "one.safetensors"});
    CHECK(tensor["format"] == "safetensors");
    CHECK(tensor["dtype"] == "bfloat16");
    CHECK(tensor["offset_bytes"] == std::filesystem::file_size(folder / "one.safetensors") - 4);
    for (const char* const none : {"none.npz", "none.safetensors"}) {
        CHECK(run_json({"inspect", folder / none})["arrays"] == json::array());
    }
}

TEST_CASE("cli: inspect tells structured types as numpy spells them, and describes their fields") {
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
    CHECK(keys_of(object) == std::set<std::string>{"devices", "why_no_cuda"});
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
    CHECK(object["why_no_cuda"].is_null() == (list.size() > 1));
    CHECK(run_tool({"devices"}).output.starts_with("host "));
}

// ---- stream -----------------------------------------------------------------------------------------------

TEST_CASE("cli: stream prints exactly the documented keys") {
    const temporary_folder folder;
    write_file(folder / "a.npy", npy("<f4", "(10, 4)", counting_bytes(160)));
    const json result =
        run_json({"stream", folder / "a.npy", "--device", "host", "--batch", "4", "--epochs", "3"});
    CHECK(keys_of(result) == std::set<std::string>{"rows", "bytes", "batches", "epochs", "seconds", "gbps",
                                                   "open_seconds", "pin_seconds", "epoch_seconds", "device",
                                                   "route", "reason", "digest", "stopped_by", "verdict",
                                                   "ready", "wait_seconds"});
    CHECK(result["stopped_by"].is_null());
    CHECK(result["verdict"].get<std::string>().size() > 0);
    CHECK(keys_of(result["ready"]) == std::set<std::string>{"mean", "most"});
    CHECK(keys_of(result["wait_seconds"]) == std::set<std::string>{"storage", "cpu", "link", "consumer"});
    CHECK(result["rows"] == 30);
    CHECK(result["bytes"] == 480);
    CHECK(result["batches"] == 9);
    CHECK(result["epochs"] == 3);
    CHECK(result["device"] == "host");
    CHECK(result["route"] == "copy");
    CHECK(result["reason"].get<std::string>().size() > 0);
    CHECK(result["digest"].get<std::string>().size() == 16);
    REQUIRE(result["epoch_seconds"].size() == 3);
    double sum = 0;
    for (const json& seconds : result["epoch_seconds"]) {
        CHECK(seconds > 0);
        sum += seconds.get<double>();
    }
    CHECK(result["seconds"].get<double>() == doctest::Approx(sum));
    CHECK(result["gbps"].get<double>() == doctest::Approx(480 / result["seconds"].get<double>() / 1e9));

    const json dropped = run_json({"stream", folder / "a.npy", "--batch", "4", "--tail", "drop"});
    CHECK(dropped["rows"] == 8);
    CHECK(dropped["batches"] == 2);

    const tool_result text = run_tool({"stream", folder / "a.npy", "--epochs", "2"});
    CHECK(text.status == 0);
    CHECK(text.errors.empty());  // progress is for terminals
    for (const char* const word : {"GB/s", "route", "waited", "verdict", "digest", "2 epochs", "20 rows"}) {
        CHECK(text.output.find(word) != std::string::npos);
    }
}

TEST_CASE("cli: the digest has the values of its definition") {
    const temporary_folder folder;
    write_file(folder / "six.npy", npy("|u1", "(2, 3)", std::string("\0\1\2\3\4\5", 6)));
    write_file(folder / "nine.npy", npy("|u1", "(1, 9)", std::string("\0\1\2\3\4\5\6\7\10", 9)));
    write_file(folder / "empty_row.npy", npy("|u1", "(1, 0)", ""));
    write_file(folder / "no_rows.npy", npy("|u1", "(0, 3)", ""));
    CHECK(digest_of({folder / "six.npy"}) == "c5121eb0e0166a0a");
    CHECK(digest_of({folder / "nine.npy"}) == "e87e5cfe1c1f92ad");
    CHECK(digest_of({folder / "empty_row.npy"}) == "48218226ff3cd4bf");
    CHECK(digest_of({folder / "no_rows.npy"}) == "0000000000000000");

    const std::string images = counting_bytes(std::size_t{50} * 17);
    const std::string labels = counting_bytes(std::size_t{50} * 4);
    std::string swapped = labels;
    for (std::size_t i = 0; i < swapped.size(); i += 4) {
        std::swap(swapped[i], swapped[i + 3]);
        std::swap(swapped[i + 1], swapped[i + 2]);
    }
    const std::string a = folder / "images.npy", b = folder / "labels.npy",
                      big = folder / "labels_big_endian.npy";
    write_file(a, npy("|u1", "(50, 17)", images));
    write_file(b, npy("<i4", "(50,)", labels));
    write_file(big, npy(">i4", "(50,)", swapped));
    CHECK(digest_of({a, b}) == expected_digest({images, labels}, 50));
    CHECK(digest_of({b, a}) == expected_digest({labels, images}, 50));
    CHECK(digest_of({a, big}) == expected_digest({images, labels}, 50));  // delivered little-endian
    CHECK(digest_of({b, b, b}) == expected_digest({labels, labels, labels}, 50));
}

TEST_CASE("cli: streams arrays out of archives, fields, and everything that a pattern matches") {
    const temporary_folder folder;
    const std::string rows = counting_bytes(std::size_t{24} * 7);
    const std::string file = folder / "whole.npy", archive = folder / "a.npz",
                      tensors = folder / "a.safetensors";
    write_file(file, npy("|u1", "(24, 7)", rows));
    write_file(archive, zip_bytes::make({{"x.npy", npy("|u1", "(24, 7)", rows)},
                                         {"y.npy", npy("|u1", "(24, 7)", rows), true}})
                            .bytes);
    write_file(tensors, cli::safetensors(R"({"x":{"dtype":"U8","shape":[24,7],"data_offsets":[0,168]},)"
                                         R"("y":{"dtype":"U8","shape":[1],"data_offsets":[168,169]}})",
                                         rows + "z"));
    write_file(folder / "structured.npy", npy("[('x', '|u1', (7,))]", "(24,)", rows));
    const std::string expected = expected_digest({rows}, 24);
    for (const std::string& argument : {file, archive + ":x", archive + ":x.npy", archive + ":y",
                                        tensors + ":x", std::string(folder / "structured.npy:x")}) {
        CHECK(digest_of({argument}) == expected);
        CHECK(digest_of({argument, "--order", "shuffled", "--batch", "5"}) == expected);
    }
    CHECK(digest_of({file, archive + ":y", tensors + ":x"}) == expected_digest({rows, rows, rows}, 24));
    for (const std::string& argument : {archive, tensors}) {
        cli::check_fails(1, {"stream", argument}, {"'x'", "'y'"});
        cli::check_fails(1, {"stream", argument + ":z"}, {"'z'"});
    }

    // "part-2" comes before "part-10", which shows beside an array in one piece
    std::size_t from = 0;
    for (const auto& [name, count] : {std::pair{"part-1.npy", 3}, {"part-2.npy", 8}, {"part-10.npy", 13}}) {
        const auto size = static_cast<std::size_t>(count) * 7;
        write_file(folder / name, npy("|u1", fmt::format("({}, 7)", count), rows.substr(from, size)));
        from += size;
    }
    for (const char* const pattern : {"part-*.npy", "part-?*.npy", "p[a-b]rt-*"}) {
        const json streamed = run_json({"stream", folder / pattern, "--batch", "5"});
        CHECK(streamed["digest"] == expected);
        CHECK(streamed["rows"] == 24);
        CHECK(digest_of({folder / pattern, file}) == expected_digest({rows, rows}, 24));
    }
    write_file(folder / "b.npz", zip_bytes::make({{"x.npy", npy("|u1", "(24, 7)", rows)}}).bytes);
    CHECK(run_json({"stream", std::string(folder / "[ab].npz") + ":x"})["rows"] == 48);
    cli::check_fails(1, {"stream", folder / "absent-*"}, {"absent-*"});
    write_file(folder / "part-3.npy", npy("<f4", "(1, 7)", counting_bytes(28)));
    cli::check_fails(1, {"stream", folder / "part-*.npy"}, {"part-3.npy", "<f4"});
}

TEST_CASE("cli: the digest is the same for every order, batch size, slot count, thread count and route") {
    const temporary_folder folder;
    const std::string rows = counting_bytes(std::size_t{1000} * 1003);
    const std::string file = folder / "a.npy";
    write_file(file, npy("|u1", "(1000, 1003)", rows));
    const std::string expected = expected_digest({rows}, 1000);
    for (const char* const order : {"sequential", "shuffled"}) {
        for (const char* const batch : {"1", "7", "64", "1000", "18446744073709551615"}) {
            for (const char* const slots : {"2", "3", "16"}) {
                for (const char* const threads : {"1", "2"}) {
                    CHECK(digest_of({file, "--order", order, "--batch", batch, "--slots", slots, "--threads",
                                     threads, "--seed", "7"}) == expected);
                }
            }
        }
    }
    for (const char* const route : {"auto", "direct", "copy", "staged", "read"}) {
        const json result = run_json({"stream", file, "--device", "host", "--route", route});
        CHECK(result["digest"] == expected);
        if (route != std::string("auto")) CHECK(result["route"] == route);
    }
    CHECK(digest_of({file, "--memory", "4MiB"}) == expected);
}

TEST_CASE("cli: the digest holds every batch, also one that takes longer than those after it") {
    const temporary_folder folder;
    const std::string rows =
        counting_bytes(std::size_t{65} << 18);  // 64 rows for one stream, one for the other
    write_file(folder / "a.npy", npy("|u1", "(65, 262144)", rows));
    const std::string expected = expected_digest({rows}, 65);
    for (int repetition = 0; repetition < 5; ++repetition) {
        CHECK(digest_of({folder / "a.npy"}) == expected);
    }
}

TEST_CASE("cli: an array without a batch to deliver streams in no time") {
    const temporary_folder folder;
    write_file(folder / "a.npy", npy("|u1", "(3,)", "123"));
    const json result = run_json({"stream", folder / "a.npy", "--tail", "drop", "--epochs", "2"});
    CHECK(result["rows"] == 0);
    CHECK(result["batches"] == 0);
    CHECK(result["epochs"] == 2);
    CHECK(result["gbps"] == 0.0);
    CHECK(result["epoch_seconds"] == json({0.0, 0.0}));
}

TEST_CASE("cli: stream refuses arrays that have no rows to take, or not equally many") {
    const temporary_folder folder;
    write_file(folder / "two.npy", npy("|u1", "(2, 3)", counting_bytes(6)));
    write_file(folder / "three.npy", npy("|u1", "(3,)", "123"));
    write_file(folder / "scalar.npy", npy("|u1", "()", "1"));
    write_file(folder / "fortran.npy", npy("|u1", "(2, 3)", counting_bytes(6), "True"));
    for (const arguments& command : {arguments{"stream", folder / "two.npy", folder / "three.npy"},
                                     {"stream", folder / "scalar.npy"},
                                     {"stream", folder / "fortran.npy"},
                                     {"stream", folder / "two.npy", folder / "absent.npy"}}) {
        const tool_result result = run_tool(command);
        CAPTURE(result.errors);
        CHECK(result.status == 1);
        CHECK(result.one_error_line());
        CHECK(result.output.empty());
    }
}
