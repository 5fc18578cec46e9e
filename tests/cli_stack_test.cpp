#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/cli_helpers.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_tool.hpp"
#include "tests/support/temporary_folder.hpp"

// `pinflow stream --stack`, and patterns of many files.

namespace {

using cli::arguments;
using cli::check_fails;
using cli::npy;
using cli::run_json;
using nlohmann::json;
using npy_bytes::write_file;

/// Files image-0.npy, ... of 2 by 3 bytes and label-0.npy, ... of one number, and the same in one file each.
void write_samples(const temporary_folder& folder, std::size_t count) {
    std::string images;
    std::string labels;
    for (std::size_t index = 0; index < count; ++index) {
        const std::string image = cli::counting_bytes(6 * index + 6).substr(6 * index);
        const std::string label{static_cast<char>(index), 0, 0, 0, 0, 0, 0, 0};
        write_file(folder / ("image-" + std::to_string(index) + ".npy"), npy("|u1", "(2, 3)", image));
        write_file(folder / ("label-" + std::to_string(index) + ".npy"), npy("<i8", "()", label));
        images += image;
        labels += label;
    }
    const std::string rows = std::to_string(count);
    write_file(folder / "images.npy", npy("|u1", "(" + rows + ", 2, 3)", images));
    write_file(folder / "labels.npy", npy("<i8", "(" + rows + ",)", labels));
}

json stream(arguments files) {
    files.insert(files.begin(), {"stream", "--device", "host"});
    return run_json(std::move(files));
}

}  // namespace

TEST_CASE("cli stack: files of one sample each are streamed as one file of all samples") {
    const temporary_folder folder;
    write_samples(folder, 20);
    const json whole = stream({folder / "images.npy", folder / "labels.npy", "--batch", "8"});
    const json stacked = stream({folder / "image-*.npy", folder / "label-*.npy", "--stack", "--batch", "8"});
    const json mixed = stream({folder / "image-*.npy", folder / "labels.npy", "--stack", "--batch", "8"});
    CHECK(whole["rows"] == 20);
    for (const json& each : {stacked, mixed}) {
        CHECK(each["rows"] == 20);
        CHECK(each["bytes"] == whole["bytes"]);
        CHECK(each["digest"] == whole["digest"]);
    }
    CHECK(stream({folder / "image-*.npy"})["rows"] == 40);
}

TEST_CASE("cli stack: --stack without a pattern is a usage error") {
    const temporary_folder folder;
    write_samples(folder, 2);
    check_fails(2, {"stream", folder / "images.npy", "--stack"}, {"--stack needs a pattern"});
    check_fails(2, {"stream", folder / "images.npy", folder / "labels.npy", "--stack"});
    check_fails(2, {"stream", folder / "image-*.npy", "--stack=false"});
    check_fails(2, {"stream", "--stack"});
}

TEST_CASE("cli stack: files that cannot be stacked are reported") {
    const temporary_folder folder;
    write_samples(folder, 3);
    write_file(folder / "image-3.npy", npy("|u1", "(3, 2)", "abcdef"));
    check_fails(1, {"stream", folder / "image-*.npy", "--stack"},
                {"image-0.npy", "image-3.npy", "cannot be stacked", "(2, 3)", "(3, 2)"});
    check_fails(1, {"stream", folder / "label-*.npy"}, {"label-0.npy", "has no axes"});
    check_fails(1, {"stream", folder / "nothing-*.npy", "--stack"}, {"nothing-*.npy"});
}

TEST_CASE("cli stack: more files are streamed than may be open") {
    const temporary_folder folder;
    write_samples(folder, 300);
    tool_surroundings surroundings;
    for (const std::uint64_t max_descriptors : {0u, 256u, 64u}) {
        surroundings.max_descriptors = max_descriptors;
        std::vector<json> results;
        for (const arguments& files :
             {arguments{folder / "images.npy"}, arguments{folder / "image-*.npy", "--stack"}}) {
            arguments command{"stream", "--device", "host", "--order", "shuffled", "--epochs", "2", "--json"};
            command.insert(command.end(), files.begin(), files.end());
            const tool_result result = run_tool(command, surroundings);
            CAPTURE(result.errors);
            REQUIRE(result.status == 0);
            results.push_back(json::parse(result.output));
        }
        CHECK(results[0]["digest"] == results[1]["digest"]);
        CHECK(results[1]["rows"] == 600);
    }
}
