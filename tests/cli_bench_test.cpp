#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tests/cli_helpers.hpp"
#include "tests/temporary_folder.hpp"

// What `pinflow bench` prints, of little work on the host device: its figures are not looked at.

namespace {

cli::arguments small_bench(const cli::arguments& more) {
    cli::arguments command{"bench", "--device", "host", "--table",       "4MiB", "--row-bytes",
                           "512",   "--batch",  "500",  "--batches",     "4",    "--known",
                           "2",     "--epochs", "2",    "--repetitions", "1"};
    command.insert(command.end(), more.begin(), more.end());
    return command;
}

nlohmann::json bench(const cli::arguments& more) {
    cli::arguments command = small_bench(more);
    command.emplace_back("--json");
    CAPTURE(cli::joined(command));
    const tool_result result = run_tool(command);
    CAPTURE(result.errors);
    REQUIRE(result.status == 0);
    return nlohmann::json::parse(result.output);
}

}  // namespace

TEST_CASE("bench: measures every kind of work where none is named, and the link of the same run") {
    const temporary_folder folder;
    ::setenv("TMPDIR", folder.path().c_str(), 1);
    const nlohmann::json all = bench({});
    ::unsetenv("TMPDIR");
    CHECK(cli::names_in(folder.path()).empty());  // the file that was made is gone
    CHECK(all["device"] == "host");
    CHECK(all["link_gbps"] > 0);
    CHECK(all["link_to_host_gbps"] > 0);
    std::set<std::string> begun;
    for (const nlohmann::json& result : all["results"]) {
        CAPTURE(result.dump());
        const std::string work = result["work"];
        begun.insert(work.substr(0, work.find_first_of(", ")));
        CHECK_FALSE(result["note"].is_null());
        if (work.starts_with("plan") || work.starts_with("pin")) {
            CHECK(result["gbps"].is_null());
            continue;
        }
        const double rate = result["gbps"];
        CHECK(rate > 0);
        CHECK(result["seconds"] > 0);
        const double link = all[work.starts_with("scatter") ? "link_to_host_gbps" : "link_gbps"];
        CHECK(std::abs(result["of_link"].get<double>() - rate / link) < 1e-9);
    }
    CHECK(begun ==
          std::set<std::string>{"copy", "pin", "stream", "shuffled", "gather", "scatter", "duplex", "plan"});
}

TEST_CASE("bench: streams the file that is named, and leaves it") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    npy_bytes::write_file(path, cli::npy("<u2", "(1000, 8)", cli::counting_bytes(16000)));
    const nlohmann::json shuffled = bench({"shuffled", "--file", path});
    REQUIRE(shuffled["results"].size() == 2);
    CHECK(shuffled["results"][0]["work"] == "shuffled, epoch 1, opening and registering included");
    CHECK(cli::names_in(folder.path()) == std::set<std::string>{"a.npy"});
}

TEST_CASE("bench: one work by a route that is named, in words") {
    const tool_result result = run_tool(small_bench({"gather", "--route", "staged"}));
    CHECK(result.status == 0);
    CHECK(result.errors.empty());
    CHECK(result.output.find("LINK, to the device") != std::string::npos);
    CHECK(result.output.find("4 x 500 rows of 512 B from 0.00 GiB, 2 known; staged") != std::string::npos);
    CHECK(result.output.find("scatter") == std::string::npos);
}

TEST_CASE("bench: a table smaller than a batch, and a file that is not there, are one line") {
    for (const auto& [command, words] : std::vector<std::pair<cli::arguments, std::string>>{
             {{"bench", "gather", "--device", "host", "--table", "512", "--batch", "2"},
              "fewer than a batch"},
             {{"bench", "duplex", "--device", "host", "--table", "1024", "--batch", "2"}, "two batches"},
             {{"bench", "stream", "--device", "host", "--file", "/nowhere/a.npy"}, "/nowhere/a.npy"}}) {
        const tool_result result = run_tool(command);
        CAPTURE(result.errors);
        CHECK(result.status == 1);
        CHECK(result.errors.starts_with("pinflow: error: "));
        CHECK(result.errors.find(words) != std::string::npos);
        CHECK(std::ranges::count(result.errors, '\n') == 1);
    }
}
