#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pinflow/pinflow.hpp"
#include "temporary_folder.hpp"

// A user's own source whose members contradict each other is refused before memory is allocated by its sizes.
using namespace pinflow;

namespace {

constexpr std::uint64_t huge = ~std::uint64_t{0};

/// 1000 rows of four numbers, unless a test says something else.
struct claimed_rows final : row_source {
    pinflow::dtype type = pinflow::dtype::of<std::uint32_t>();
    shape_vector shape{4};
    std::uint64_t count = 1000;
    std::uint64_t row_bytes = 16;
    std::vector<row_extent> places;

    const pinflow::dtype& dtype() const noexcept override { return type; }
    const shape_vector& row_shape() const noexcept override { return shape; }
    std::uint64_t row_count() const noexcept override { return count; }
    std::uint64_t row_size_bytes() const noexcept override { return row_bytes; }
    std::string description() const override { return "a claim"; }
    std::span<const row_extent> extents() const noexcept override { return places; }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t>,
                                       std::span<std::byte> destination) const override {
        std::ranges::fill(destination, std::byte{1});
        return {};
    }
    void check_unchanged() const override {}
};

struct claim {
    std::string name;
    std::function<void(claimed_rows&)> make;
    std::vector<std::string> expected;  ///< parts that the message must contain
};

const std::vector<std::byte> memory(16'000);

const std::vector<claim> contradictions{
    {"a row of more bytes than its elements", [](auto& it) { it.row_bytes = 1000; }, {"16", "1000"}},
    {"a row of fewer bytes", [](auto& it) { it.row_bytes = 7; }, {"16", "7"}},
    {"a row without bytes", [](auto& it) { it.row_bytes = 0; }, {"16", "0"}},
    {"a row of 2^63 - 1 bytes", [](auto& it) { it.row_bytes = huge / 2; }, {"16", std::to_string(huge / 2)}},
    {"a shape that overflows", [](auto& it) { it.shape = {huge, huge}; }, {std::to_string(huge)}},
    {"rows that overflow", [](auto& it) { it.count = huge / 8; }, {std::to_string(huge / 8)}},
    {"big-endian elements", [](auto& it) { it.type = dtype::parse(">u4"); }, {">u4", "little-endian"}},
    {"extents of fewer rows",
     [](auto& it) { it.places = {{nullptr, 0, 400, memory.data()}}; },
     {"1000", "400"}},
    {"extents of more rows",
     [](auto& it) { it.places = {{nullptr, 0, 600, memory.data()}, {nullptr, 0, 600, memory.data()}}; },
     {"1000", "2"}},
    {"extents whose row counts overflow",
     [](auto& it) { it.places = {{nullptr, 0, 1001, memory.data()}, {nullptr, 0, huge, memory.data()}}; },
     {"1000"}},
    {"rows so far apart that they overflow",
     [](auto& it) { it.places = {{nullptr, 0, 1000, memory.data(), huge / 4}}; },
     {"1000", std::to_string(huge / 4)}},
    {"an extent that lies nowhere", [](auto& it) { it.places = {{nullptr, 0, 1000, nullptr}}; }, {"1000"}},
};

loader_options on_host() {
    loader_options options;
    options.device = device::host();
    return options;
}

void check_refused(const std::shared_ptr<claimed_rows>& source, const std::vector<std::string>& told) {
    const auto check = [&](const std::function<void()>& work) {
        try {
            work();
            FAIL_CHECK("it was accepted");
        } catch (const invalid_argument& failure) {
            const std::string sentence = failure.what();
            CAPTURE(sentence);
            CHECK(sentence.find("a claim") != std::string::npos);
            for (const std::string& fact : told)
                CHECK(sentence.find(fact) != std::string::npos);
        }
    };
    check([&] { loader({source}, on_host()); });
    check([&] { row_table{source}; });
}

}  // namespace

TEST_CASE("contradicting sources: a loader and a table refuse them, with the numbers") {
    for (const claim& each : contradictions) {
        INFO(each.name);
        const auto source = std::make_shared<claimed_rows>();
        each.make(*source);
        check_refused(source, each.expected);
    }
}

TEST_CASE("contradicting sources: an extent past the end of its file is refused") {
    const temporary_folder folder;
    write_npy(folder / "a.npy", array_view(memory.data(), dtype::of<std::byte>(), {16'000}));
    const auto file = std::make_shared<const input_file>(folder / "a.npy");
    const auto source = std::make_shared<claimed_rows>();
    source->places = {{file, file->size_bytes() - 16'000, 1000, nullptr}};
    CHECK_NOTHROW(loader({source}, on_host()));
    source->places[0].offset_bytes += 1;
    check_refused(source, {"16000", std::to_string(file->size_bytes()), "a.npy"});
    source->places[0].offset_bytes = huge;
    check_refused(source, {"16000", std::to_string(huge)});
    // one row every 32 bytes, then overlapping ones
    const std::uint64_t offset_bytes = file->size_bytes() - 16'000;
    source->places = {{file, offset_bytes, 500, nullptr, 32}, {file, offset_bytes, 500, nullptr, 4}};
    CHECK_NOTHROW(loader({source}, on_host()));
    source->places = {{file, offset_bytes, 501, nullptr, 32}, {file, offset_bytes, 499, nullptr, 4}};
    check_refused(source, {"16016", std::to_string(offset_bytes)});
}

TEST_CASE("contradicting sources: a table at a null pointer is refused unless it is empty") {
    std::byte* const nothing = nullptr;
    CHECK_THROWS_AS(row_table(std::span(nothing, 64), 16), invalid_argument);
    CHECK_NOTHROW(row_table(std::span(nothing, 0), 16));
}

TEST_CASE("contradicting sources: consistent sources are accepted") {
    const auto source = std::make_shared<claimed_rows>();
    loader rows({source}, on_host());
    const auto first = rows.next();
    REQUIRE(first);
    CHECK((*first)[0].size_bytes() == 64 * 16);
    const auto extents = std::make_shared<claimed_rows>();
    extents->places = {{nullptr, 0, 0, nullptr}, {nullptr, 0, 1000, memory.data()}};
    CHECK_NOTHROW(loader({extents}, on_host()));
    // rows of 0 bytes need no address, and a source without rows needs no extents
    const auto without_bytes = std::make_shared<claimed_rows>();
    without_bytes->shape = {huge, huge, 0};
    without_bytes->row_bytes = 0;
    without_bytes->places = {{nullptr, 0, 1000, nullptr}};
    CHECK_NOTHROW(loader({without_bytes}, on_host()));
    const auto without_rows = std::make_shared<claimed_rows>();
    without_rows->count = 0;
    CHECK_NOTHROW(loader({without_rows}, on_host()));
}
