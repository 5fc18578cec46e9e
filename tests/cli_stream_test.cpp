#include <doctest/doctest.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "tests/cli_helpers.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_tool.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

// The output of `pinflow stream`, above all the digest, which users compare.

namespace {

using cli::arguments;
using cli::counting_bytes;
using cli::keys_of;
using cli::npy;
using cli::run_json;
using nlohmann::json;
using npy_bytes::write_file;

/// Whether a process has the file mapped, and has computed for 0.3 s.
bool is_streamed_by_a_process(const std::string& path) {
    std::error_code code;
    const std::string mapped = std::filesystem::canonical(path, code).string();
    for (const auto& process : std::filesystem::directory_iterator("/proc", code)) {
        std::ifstream maps(process.path() / "maps");
        std::string line;
        bool is_mapped = false;
        while (!is_mapped && std::getline(maps, line))
            is_mapped = line.ends_with(mapped);
        std::ifstream stat(process.path() / "stat");
        if (!is_mapped || !std::getline(stat, line)) continue;
        std::istringstream fields(line.substr(line.rfind(')') + 1));
        const std::vector<std::string> words{std::istream_iterator<std::string>(fields), {}};
        if (words.size() < 13) continue;
        const auto ticks = std::stoul(words[11]) + std::stoul(words[12]);  // utime, stime of proc(5)
        if (ticks * 10 >= 3 * static_cast<unsigned long>(::sysconf(_SC_CLK_TCK))) return true;
    }
    return false;
}

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

/// The digest of `arrays`, each of which holds the bytes of `rows` rows.
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

TEST_CASE("cli: stream prints exactly the documented keys") {
    const temporary_folder folder;
    write_file(folder / "a.npy", npy("<f4", "(10, 4)", counting_bytes(160)));
    const json result =
        run_json({"stream", folder / "a.npy", "--device", "host", "--batch", "4", "--epochs", "3"});
    CHECK(keys_of(result) ==
          std::set<std::string>{"rows",           "bytes",        "batches",     "epochs",        "seconds",
                                "gbps",           "open_seconds", "pin_seconds", "epoch_seconds", "device",
                                "route",          "reason",       "digest",      "stopped_by",    "verdict",
                                "ready",          "wait_seconds", "arrays",      "pinned_bytes",  "threads",
                                "threads_reason", "slots_reason", "notes"});
    CHECK(result["stopped_by"].is_null());
    CHECK(result["verdict"].get<std::string>().size() > 0);
    CHECK(keys_of(result["ready"]) == std::set<std::string>{"mean", "most"});
    CHECK(keys_of(result["wait_seconds"]) ==
          std::set<std::string>{"storage", "files", "cpu", "link", "consumer"});
    REQUIRE(result["arrays"].size() == 1);
    CHECK(keys_of(result["arrays"][0]) == std::set<std::string>{"name", "transfer", "reason", "bytes"});
    CHECK(result["arrays"][0]["transfer"] == "slot copy");
    CHECK(result["arrays"][0]["bytes"] == 480);
    CHECK(result["pinned_bytes"] == 0);
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

    // "part-2" must come before "part-10", or the digest differs from that of the array in one piece
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

TEST_CASE("cli: the report tells the arrays of one file apart") {
    const temporary_folder folder;
    const std::string numbers = counting_bytes(24);
    const std::string archive = folder / "a.npz", tensors = folder / "a.safetensors",
                      fields = folder / "a.npy";
    write_file(archive, zip_bytes::make({{"x.npy", npy("|u1", "(24,)", numbers)},
                                         {"y.npy", npy("|u1", "(24,)", numbers)},
                                         {"z.npy", npy("|u1", "(24,)", numbers), true}})
                            .bytes);
    write_file(tensors, cli::safetensors(R"({"x":{"dtype":"U8","shape":[24],"data_offsets":[0,24]},)"
                                         R"("y":{"dtype":"U8","shape":[24],"data_offsets":[24,48]}})",
                                         numbers + numbers));
    write_file(fields, npy("[('x', '|u1'), ('y', '|u1')]", "(24,)", numbers + numbers));
    const arguments named{archive + ":x", archive + ":y.npy", archive + ":z", tensors + ":x",
                          tensors + ":y", fields + ":x",      fields + ":y"};
    arguments command{"stream", "--device", "host"};
    command.insert(command.end(), named.begin(), named.end());
    const json arrays = run_json(command)["arrays"];
    REQUIRE(arrays.size() == named.size());
    for (std::size_t i = 0; i < named.size(); ++i) {
        const std::string label = i == 1 ? archive + ":y" : named[i];
        CHECK(arrays[i]["name"] == "'" + label + "'");
    }
    const tool_result text = run_tool(command);
    CHECK(text.status == 0);
    CHECK(text.output.find("'" + archive + ":y'") != std::string::npos);

    // files with one array are named by their paths
    write_file(folder / "b-1.npy", npy("|u1", "(24,)", numbers));
    const json whole = run_json({"stream", folder / "b-1.npy", "--device", "host"})["arrays"];
    CHECK(whole[0]["name"] == "'" + (folder / "b-1.npy").string() + "'");
    // members that a pattern joins are named by path and member
    write_file(folder / "b.npz", zip_bytes::make({{"x.npy", npy("|u1", "(24,)", numbers)}}).bytes);
    const json joined =
        run_json({"stream", std::string(folder / "[ab].npz") + ":x", "--device", "host"})["arrays"];
    CHECK(joined[0]["name"] ==
          "'" + archive + ":x' to '" + std::string(folder / "b.npz") + ":x' (2 sources)");
}

TEST_CASE(
    "cli: the digest is the same sequential and shuffled, for any batch size, slots, threads and route") {
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
    CHECK(digest_of({file, "--pin-budget", "4MiB"}) == expected);
    CHECK(digest_of({file, "--pin-budget", "ulimit"}) == expected);
}

TEST_CASE("cli: the digest includes every batch, even a batch that takes longer than the next ones") {
    const temporary_folder folder;
    // two batches, of 64 rows and of one; the digest of each is computed on a stream of its own
    const std::string rows = counting_bytes(std::size_t{65} << 18);
    write_file(folder / "a.npy", npy("|u1", "(65, 262144)", rows));
    const std::string expected = expected_digest({rows}, 65);
    for (int repetition = 0; repetition < 5; ++repetition) {
        CHECK(digest_of({folder / "a.npy"}) == expected);
    }
}

TEST_CASE("cli: an array without a batch to deliver is streamed at once") {
    const temporary_folder folder;
    write_file(folder / "a.npy", npy("|u1", "(3,)", "123"));
    const json result = run_json({"stream", folder / "a.npy", "--tail", "drop", "--epochs", "2"});
    CHECK(result["rows"] == 0);
    CHECK(result["batches"] == 0);
    CHECK(result["epochs"] == 2);
    CHECK(result["gbps"] == 0.0);
    CHECK(result["epoch_seconds"] == json({0.0, 0.0}));
}

TEST_CASE("cli: a file that is truncated while its mapped rows are streamed is an error, not a signal") {
    for (const arguments& route : {arguments{}, arguments{"--route", "direct"}}) {
        const temporary_folder folder;
        const std::string path = folder / "a.npy";
        write_file(path, npy("|u1", "(2048, 4096)", counting_bytes(std::size_t{8} << 20)));
        const std::jthread writer([&path](const std::stop_token& stop) {
            const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
            while (!is_streamed_by_a_process(path) && std::chrono::steady_clock::now() < deadline) {
                if (stop.stop_requested()) return;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));  // leave the cores to the tool
            }
            std::error_code code;
            std::filesystem::resize_file(path, 1 << 20, code);
        });
        // so many epochs that the file is truncated in one of them
        arguments command{"stream", path, "--device", "host", "--epochs", "1000000"};
        command.insert(command.end(), route.begin(), route.end());
        cli::check_fails(1, command, {path});
    }
}

TEST_CASE("cli: stream refuses arrays without rows to take, or with different numbers of rows") {
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

TEST_CASE("cli: stream notes that --tail drop skips all rows") {
    const temporary_folder folder;
    write_file(folder / "a.npy", npy("<f4", "(10, 4)", counting_bytes(160)));
    const auto notes_of = [&](const char* batch, const char* world) {
        return run_json({"stream", folder / "a.npy", "--device", "host", "--tail", "drop", "--batch", batch,
                         "--rank", "0", "--world", world})["notes"];
    };
    CHECK(notes_of("10", "1").empty());
    CHECK(notes_of("5", "2").empty());
    CHECK(notes_of("11", "1") ==
          json{"--tail drop skips all rows of an epoch: 10 rows do not fill a batch of 11 on 1 rank"});
    CHECK(notes_of("5", "3") ==
          json{"--tail drop skips all rows of an epoch: 10 rows do not fill a batch of 5 on 3 ranks"});
}

TEST_CASE("cli: stream notes that a rank gets no rows") {
    const temporary_folder folder;
    write_file(folder / "a.npy", npy("<f4", "(2, 4)", counting_bytes(32)));
    const auto stream = [&](const char* rank) {
        return run_json({"stream", folder / "a.npy", "--device", "host", "--rank", rank, "--world", "3"});
    };
    std::uint64_t idle = 0;
    for (const char* const rank : {"0", "1", "2"}) {
        const json result = stream(rank);
        const bool has_rows = result["rows"] != 0;
        idle += has_rows ? 0 : 1;
        CHECK(result["notes"] ==
              (has_rows ? json::array()
                        : json{fmt::format("rank {} gets no rows: there are 2 rows for 3 ranks", rank)}));
    }
    CHECK(idle == 1);
}

TEST_CASE("cli: stream notes a seed that has no effect") {
    const temporary_folder folder;
    write_file(folder / "a.npy", npy("<f4", "(10, 4)", counting_bytes(160)));
    const auto notes_of = [&](const char* order) {
        return run_json(
            {"stream", folder / "a.npy", "--device", "host", "--seed", "4", "--order", order})["notes"];
    };
    CHECK(notes_of("shuffled").empty());
    CHECK(notes_of("sequential") == json{"--seed has no effect on the sequential order"});
}
