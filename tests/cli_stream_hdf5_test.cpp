// Streaming compressed datasets through the tool: the digest is that of the array, and memory stays within
// what was allowed.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/npy.hpp"
#include "tests/cli_helpers.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_tool.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;
constexpr std::uint64_t row_elements = 1024;  // 4 KiB
constexpr std::uint64_t row_bytes = row_elements * sizeof(std::uint32_t);
/// Other memory of the tool, which varies between runs: the allocator's caches, threads' stacks, the list of
/// chunks.
constexpr std::uint64_t slack_bytes = 16 * mebibyte;

/// Rows of which no two are alike, but that compress well.
std::vector<std::uint32_t> rows_from(std::uint64_t first, std::uint64_t count) {
    std::vector<std::uint32_t> elements(count * row_elements);
    std::iota(elements.begin(), elements.end(), static_cast<std::uint32_t>(first * row_elements));
    return elements;
}

template <typename Writer>
void write_rows(Writer& writer, std::uint64_t first, std::uint64_t count) {
    constexpr std::uint64_t at_once = 256;
    for (std::uint64_t row = first; row < first + count; row += at_once) {
        const auto elements = rows_from(row, std::min(at_once, first + count - row));
        writer.write(std::as_bytes(std::span(elements)));
    }
    writer.finish();
}

void write_hdf5(const fs::path& path, std::uint64_t first, std::uint64_t count, std::uint64_t chunk_rows) {
    pinflow::hdf5_writer writer(path);
    writer.begin({.name = "data",
                  .dtype = pinflow::dtype::of<std::uint32_t>(),
                  .shape = {count, row_elements},
                  .deflate_level = 1,
                  .chunk_shape = {chunk_rows, row_elements}});
    write_rows(writer, first, count);
}

struct streamed {
    std::string digest;
    std::uint64_t peak_bytes = 0;
};

streamed stream(const std::string& what, const std::vector<std::string>& flags) {
    std::vector<std::string> arguments{"stream", what, "--device", "host", "--json"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const tool_result result = run_tool(arguments);
    CAPTURE(result.errors);
    REQUIRE(result.status == 0);
    return {nlohmann::json::parse(result.output)["digest"], result.peak_bytes};
}

void check_memory(std::uint64_t peak_bytes, std::uint64_t idle_bytes, std::uint64_t budget_bytes) {
    INFO("peak " << peak_bytes / mebibyte << " MiB, " << idle_bytes / mebibyte << " MiB of it for any file");
    if (!sanitized) CHECK(peak_bytes <= idle_bytes + budget_bytes + slack_bytes);
}

}  // namespace

TEST_CASE("cli: a compressed dataset is streamed within the memory allowed, with the digest of its array") {
    const temporary_folder folder;
    constexpr std::uint64_t rows = 400 * mebibyte / row_bytes;
    {
        pinflow::npy_writer writer(folder / "a.npy", pinflow::dtype::of<std::uint32_t>(),
                                   {rows, row_elements});
        write_rows(writer, 0, rows);
    }
    write_hdf5(folder / "small.h5", 0, rows, 16);    // chunks of 64 KiB
    write_hdf5(folder / "large.h5", 0, rows, 4096);  // of 16 MiB
    for (std::uint64_t part = 0; part < 4; ++part)   // of 1 MiB
        write_hdf5(folder / fmt::format("part-{}.h5", part), part * rows / 4, rows / 4, 256);
    CHECK(fs::file_size(folder / "small.h5") < 40 * mebibyte);
    write_hdf5(folder / "idle.h5", 0, 64, 16);
    const std::string digest = stream(folder / "a.npy", {}).digest;
    const std::uint64_t idle_bytes = stream(folder / "idle.h5", {}).peak_bytes;

    for (const std::string order : {"sequential", "shuffled"}) {
        CAPTURE(order);
        const auto small = stream(folder / "small.h5", {"--memory", "64MiB", "--order", order});
        CHECK(small.digest == digest);
        check_memory(small.peak_bytes, idle_bytes, 64 * mebibyte);
    }
    const auto parts = stream(folder / "part-*.h5:data", {"--memory", "64MiB", "--batch", "1000"});
    CHECK(parts.digest == digest);
    check_memory(parts.peak_bytes, idle_bytes, 64 * mebibyte);
    const auto large = stream(folder / "large.h5", {"--memory", "128MiB"});
    CHECK(large.digest == digest);
    check_memory(large.peak_bytes, idle_bytes, 128 * mebibyte);
    // without --memory, chunks may take 512 MiB; half of that caches decoded chunks
    const auto unlimited = stream(folder / "small.h5", {"--order", "shuffled"});
    CHECK(unlimited.digest == digest);
    check_memory(unlimited.peak_bytes, idle_bytes, 512 * mebibyte);
    CHECK(unlimited.peak_bytes > 256 * mebibyte);
}

TEST_CASE(
    "cli: too little memory for a dataset's chunks is refused, and the error names the dataset and what it "
    "takes") {
    const temporary_folder folder;
    write_hdf5(folder / "a.h5", 0, 4096, 4096);  // one chunk of 16 MiB
    const auto result = run_tool({"stream", folder / "a.h5", "--memory", "64MiB"});
    CHECK(result.status == 2);
    CHECK(contains(result.errors, "--memory"));
    CHECK(contains(result.errors, fmt::format("'{}:data'", (folder / "a.h5").string())));
    const std::string before = " takes ";
    REQUIRE(contains(result.errors, before));
    const auto taken = std::stoull(result.errors.substr(result.errors.find(before) + before.size()));
    CHECK(taken >= 64 * mebibyte);
    // the slots get the other 2 MiB
    const std::string enough = std::to_string(taken + 2 * mebibyte);
    CHECK(run_tool({"stream", folder / "a.h5", "--memory", enough}).status == 0);
}

TEST_CASE("cli: the report tells the datasets of one file apart, mapped or decoded") {
    const temporary_folder folder;
    const std::string archive = folder / "a.npz", mapped = folder / "mapped.h5",
                      decoded = folder / "decoded.h5";
    npy_bytes::write_file(archive,
                          zip_bytes::make({{"x.npy", cli::npy("|u1", "(24,)", cli::counting_bytes(24))},
                                           {"y.npy", cli::npy("|u1", "(24,)", cli::counting_bytes(24))}})
                              .bytes);
    REQUIRE(run_tool({"convert", archive, mapped}).status == 0);
    REQUIRE(run_tool({"convert", archive, decoded, "--deflate", "1"}).status == 0);
    const cli::arguments named{mapped + ":x", mapped + ":y", decoded + ":x", decoded + ":y"};
    cli::arguments command{"stream", "--device", "host"};
    command.insert(command.end(), named.begin(), named.end());
    const auto arrays = cli::run_json(command)["arrays"];
    REQUIRE(arrays.size() == named.size());
    for (std::size_t i = 0; i < named.size(); ++i)
        CHECK(arrays[i]["name"] == "'" + named[i] + "'");
}
