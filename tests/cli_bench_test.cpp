#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/cli_helpers.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

// What `pinflow bench` prints for little work on the host device. How fast that is does not matter.

namespace {

cli::arguments small_bench(const cli::arguments& more, const std::string& batches = "4",
                           const std::string& known = "2") {
    cli::arguments command{"bench", "--device", "host", "--table",       "4MiB",  "--row-bytes",
                           "512",   "--batch",  "500",  "--batches",     batches, "--known",
                           known,   "--epochs", "2",    "--repetitions", "1"};
    command.insert(command.end(), more.begin(), more.end());
    return command;
}

nlohmann::json bench(const cli::arguments& more, const std::string& batches = "4",
                     const std::string& known = "2") {
    cli::arguments command = small_bench(more, batches, known);
    command.emplace_back("--json");
    CAPTURE(cli::joined(command));
    const tool_result result = run_tool(command);
    CAPTURE(result.errors);
    REQUIRE(result.status == 0);
    return nlohmann::json::parse(result.output);
}

}  // namespace

TEST_CASE("bench: measures all work but load if none is named, and the link of the same run") {
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

TEST_CASE("bench: streams a named file, and does not remove it") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    npy_bytes::write_file(path, cli::npy("<u2", "(1000, 8)", cli::counting_bytes(16000)));
    const nlohmann::json shuffled = bench({"shuffled", "--file", path});
    REQUIRE(shuffled["results"].size() == 2);
    CHECK(shuffled["results"][0]["work"] == "shuffled, epoch 1, opening and registering included");
    CHECK(cli::names_in(folder.path()) == std::set<std::string>{"a.npy"});
}

TEST_CASE("bench: loads the tensors of files, and refuses files for other work") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    npy_bytes::write_file(path, cli::npy("<f4", "(3, 4)", cli::counting_bytes(48)));
    const nlohmann::json loaded = bench({"load", path});
    REQUIRE(loaded["results"].size() == 2);
    CHECK(loaded["results"][0]["work"] == "load, first call of the process");
    CHECK(loaded["results"][1]["gbps"] > 0);
    for (const cli::arguments& wrong : {cli::arguments{"load"}, cli::arguments{"copy", path}}) {
        const tool_result result = run_tool(small_bench(wrong));
        CHECK(result.status == 2);
        CHECK(result.one_error_line());
    }
    const tool_result missing = run_tool(small_bench({"load", folder / "none"}));
    CHECK(missing.status == 1);
    CHECK(missing.one_error_line());
}

TEST_CASE("bench: prints the result of one work by a named route as text") {
    const tool_result result = run_tool(small_bench({"gather", "--route", "staged"}));
    CHECK(result.status == 0);
    CHECK(result.errors.empty());
    CHECK(result.output.find("LINK, to the device") != std::string::npos);
    CHECK(result.output.find("4 x 500 rows of 512 B from 0.00 GiB, 2 known, 1 together; staged") !=
          std::string::npos);
    CHECK(result.output.find("scatter") == std::string::npos);
}

TEST_CASE("bench: half of the batches of --known travel together, at most as many as there are") {
    for (const auto& [work, batches, known, words] : std::vector<std::array<std::string, 4>>{
             {"gather", "5", "3", "5 x 500 rows of 512 B from 0.00 GiB, 3 known, 1 together"},
             {"scatter", "5", "7", "5 x 500 rows of 512 B from 0.00 GiB, 5 known, 3 together"},
             {"duplex", "1", "8", "1 x 500 rows of 512 B from 0.00 GiB, 1 known, 1 together"}}) {
        const nlohmann::json results = bench({work}, batches, known)["results"];
        REQUIRE_FALSE(results.empty());
        const std::string note = results[0]["note"];
        CAPTURE(note);
        CHECK(note.starts_with(words));
    }
}

TEST_CASE("bench: fewer than 2 or more than 64 batches known ahead are refused") {
    for (const std::string known : {"0", "1", "65"}) {
        cli::check_fails(2, small_bench({"gather"}, "4", known),
                         {"--known takes a whole number from 2 to 64, not '" + known + "'"});
    }
}

TEST_CASE("bench: the plans of a batch and of a group are reported, once if they are the same") {
    for (const auto& [known, plans] : {std::pair("2", 2U), std::pair("3", 2U), std::pair("4", 4U)}) {
        CAPTURE(known);
        std::set<std::string> told;
        const nlohmann::json results = bench({"plan"}, "4", known)["results"];
        for (const nlohmann::json& plan : results)
            told.insert(plan["work"]);
        for (const nlohmann::json& plan : results) {  // no claim about rates that were not measured
            const bool compares = plan["note"].get<std::string>().find("best rate") != std::string::npos;
            CHECK(compares == !plan["gbps"].is_null());
        }
        CHECK(results.size() == plans);
        CHECK(told.size() == plans);
    }
}

TEST_CASE("bench: uses the blocks and the staged share of the flags") {
    const nlohmann::json plans =
        bench({"plan", "--route", "hybrid", "--blocks", "24", "--staged-share", "0.25"})["results"];
    REQUIRE(plans.size() >= 2);
    CHECK(plans[0]["work"] == "plan, gather, 1 at a time: hybrid, sorted, 24 blocks, 25 % staged");
    const std::string gather = plans[0]["note"];
    CHECK(gather.starts_with(
        "requested in the options; 24 thread blocks, as set; 0.25 of the rows staged, as set"));
    const std::string scatter = plans[1]["note"];
    CHECK(scatter.starts_with(
        "requested in the options; 24 thread blocks, as set; 0.25 of the rows staged, as set"));
    // bench itself checks the rows
    for (const char* work : {"gather", "scatter", "duplex"})
        CHECK_FALSE(bench({work, "--route", "hybrid", "--blocks", "3", "--staged-share", "0.9"}).empty());
}

TEST_CASE("bench: impossible blocks and staged shares are refused") {
    for (const auto& [flag, value, words] : std::vector<std::array<std::string, 3>>{
             {"--blocks", "0", "--blocks takes a whole number from 1 to 4294967295, not '0'"},
             {"--blocks", "4294967296", "whole number from 1 to 4294967295, not '4294967296'"},
             {"--blocks", "-1", "not '-1'"},
             {"--blocks", "many", "not 'many'"},
             {"--staged-share", "0", "takes a number above 0 and below 1, such as 0.4, not '0'"},
             {"--staged-share", "1", "below 1, such as 0.4, not '1'"},
             {"--staged-share", "-0.5", "not '-0.5'"},
             {"--staged-share", "40%", "not '40%'"},
             {"--staged-share", "nan", "not 'nan'"},
             {"--staged-share", "1e999", "not '1e999'"},
             {"--staged-share", "0,4", "not '0,4'"}}) {
        const tool_result result = run_tool({"bench", "gather", "--device", "host", flag, value});
        CAPTURE(result.errors);
        CHECK(result.status == 2);
        CHECK(result.errors.find(flag) != std::string::npos);
        CHECK(result.errors.find(words) != std::string::npos);
        CHECK(std::ranges::count(result.errors, '\n') == 1);
    }
}

TEST_CASE("bench: a table smaller than a batch, and a missing file, are reported in one line") {
    for (const auto& [command, words] : std::vector<std::pair<cli::arguments, std::string>>{
             {{"bench", "gather", "--device", "host", "--table", "512", "--batch", "2"}, "but a batch needs"},
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

TEST_CASE("bench: empty or 0 values of files, sizes and kinds of work are refused") {
    for (const auto& [more, words] : std::vector<std::pair<cli::arguments, std::string>>{
             {{"stream", "--file", ""}, "--file takes the path of a file, not ''"},
             {{"gather", "--table", ""}, "--table takes a positive number of bytes"},
             {{"gather", "--table", "0"}, "--table takes a positive number of bytes"},
             {{"gather", "--row-bytes", ""}, "--row-bytes takes a positive number of bytes"},
             {{"gather", "--row-bytes", "0"}, "--row-bytes takes a positive number of bytes"},
             {{"gather", "--batch", ""}, "--batch takes a whole number from 1"},
             {{"gather", "--blocks", ""}, "--blocks takes a whole number from 1"},
             {{"gather", "--staged-share", ""}, "--staged-share takes a number above 0"},
             {{""}, "not ''"}}) {
        cli::arguments command{"bench", "--device", "host"};
        command.insert(command.end(), more.begin(), more.end());
        cli::check_fails(2, command, {words});
    }
}

TEST_CASE("bench: too little memory or disk space is reported before anything is measured") {
    for (const auto& [more, words] : std::vector<std::pair<cli::arguments, std::string>>{
             {{"gather", "--row-bytes", "8388608TiB"},
              "has 1 row of 9223372036854775808 bytes, but a batch needs"},
             {{"gather", "--row-bytes", "8388608TiB", "--batch", "1"}, "GiB free; --table, --row-bytes"},
             {{"gather", "--table", "16777215TiB"}, "the table with its batches would take 1.7"},
             {{"plan", "--table", "16777215TiB"}, "GiB free; --table, --row-bytes, --batch and --batches"},
             {{"gather", "--batch", "18446744073709551615"}, "a batch needs 18446744073709551615"},
             {{"gather", "--batches", "1000000000000000"}, "GiB free; --table, --row-bytes, --batch and"},
             {{"scatter", "--row-bytes", "1", "--batches", "18446744073709551615"}, "GiB free; --table"},
             {{"duplex", "--row-bytes", "1", "--table", "16777215TiB", "--batch", "9223372036854775808"},
              "two batches"},
             {{"--table", "16777215TiB"}, "--table"},
             {{"stream", "--row-bytes", "8388608TiB"}, "it would have 8 EiB"},
             {{"shuffled", "--table", "16777215TiB"}, "--table and --row-bytes set its size"}}) {
        cli::arguments command{"bench", "--device", "host"};
        command.insert(command.end(), more.begin(), more.end());
        cli::check_fails(1, command, {words});  // checks that nothing is printed, not even the link's rate
    }
}

TEST_CASE("bench: the largest --batches and --batch are accepted, and limited to what there is") {
    // in `plan` --known limits the group, `duplex` limits --batches so that no row is both read and written,
    // and `stream` takes at most the rows of the file
    const std::string most = "18446744073709551615";
    CHECK_FALSE(bench({"plan"}, most)["results"].empty());
    const std::string note = bench({"duplex"}, most)["results"][0]["note"];
    CHECK(note.starts_with("8 x 500 rows of 512 B"));
    const nlohmann::json streamed =
        cli::run_json({"bench", "stream", "--device", "host", "--table", "4MiB", "--batch", most});
    CHECK(streamed["results"].size() == 2);
}

TEST_CASE("bench: results measured before a failure are reported, and then the failure") {
    cli::arguments command = small_bench({"--file", "/nowhere/a.npy", "--json"});
    const tool_result result = run_tool(command);
    CHECK(result.status == 1);
    CHECK(result.one_error_line());
    const nlohmann::json told = nlohmann::json::parse(result.output, nullptr, false);
    REQUIRE_FALSE(told.is_discarded());
    CHECK(result.errors == "pinflow: error: " + told["error"].get<std::string>() + "\n");
    CHECK(told["error"].get<std::string>().find("/nowhere/a.npy") != std::string::npos);
    CHECK(told["link_gbps"] > 0);
    std::set<std::string> works;
    for (const nlohmann::json& each : told["results"])
        works.insert(each["work"]);
    CHECK(works.contains("copy, both directions at once, in total"));
    CHECK(works.contains("pin"));
    CHECK_FALSE(bench({"copy"}).contains("error"));
}

TEST_CASE("bench: rows of any length are scattered to where they belong, and no others change") {
    // rows of which some or all begin at a multiple of 8 bytes
    for (const char* row_bytes : {"7", "4097", "1", "13", "24"}) {
        if (sanitized && std::string_view(row_bytes) == "1") break;  // each run measures the link first
        for (const char* work : {"scatter", "duplex"}) {
            CAPTURE(row_bytes);
            const nlohmann::json told =
                cli::run_json({"bench", work, "--device", "host", "--table", "1MiB", "--row-bytes", row_bytes,
                               "--batch", "50", "--batches", "3", "--repetitions", "2"});
            CHECK(told["results"].size() == 1);
        }
    }
}

TEST_CASE("bench: a file that is missing, and a segment instead of a file, are refused") {
    const tool_result missing = run_tool({"bench", "pin", "--device", "host", "--file", "/nowhere/a.npy"});
    CHECK(missing.status == 1);
    CHECK(missing.one_error_line());
    CHECK(missing.errors.find("/nowhere/a.npy") != std::string::npos);
    cli::check_fails(2, {"bench", "load", "--device", "host", "shm:model"},
                     {"bench load takes paths of files, not the segment 'shm:model'"});
    const temporary_folder folder;
    const std::string file = folder / "a.npy";
    npy_bytes::write_file(file, cli::npy("<f4", "(10, 4)", cli::counting_bytes(160)));
    cli::check_fails(2, {"bench", "load", "--device", "host", file + ":data"},
                     {"bench load takes whole files, not single arrays", file + ":data"});
}

TEST_CASE("bench: options that the named work does not use are noted") {
    const temporary_folder folder;
    const std::string file = folder / "a.npy";
    npy_bytes::write_file(file, cli::npy("<f4", "(1000, 4)", cli::counting_bytes(16000)));
    const auto notes_of = [](const cli::arguments& more) {
        cli::arguments command{"bench", "--device", "host"};
        command.insert(command.end(), more.begin(), more.end());
        return cli::run_json(command)["notes"];
    };
    CHECK(notes_of({"copy", "--epochs", "3", "--table", "4MiB"}) ==
          nlohmann::json{"copy does not use --table, --epochs"});
    CHECK(notes_of({"gather", "--table", "4MiB", "--batch", "500", "--batches", "2", "--file", "a.npy"}) ==
          nlohmann::json{"gather does not use --file"});
    CHECK(notes_of({"scatter", "--table", "4MiB", "--batch", "500", "--batches", "2"}).empty());
    CHECK(notes_of({"stream", "--file", file, "--row-bytes", "512", "--epochs", "2"}) ==
          nlohmann::json{"stream with --file does not use --row-bytes"});
    const tool_result text = run_tool({"bench", "copy", "--device", "host", "--known", "4"});
    CHECK(text.output.ends_with("\nnote: copy does not use --known\n"));
}
