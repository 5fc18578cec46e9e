#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/fault_guard.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/digest.hpp"
#include "pinflow/loader/loader.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

// The digest of batches that are views of mapped files, which may be truncated before they are read.
using namespace pinflow;

namespace {

/// Zeros, which take no space.
void write_zeros(const std::string& path, const shape_vector& shape) {
    const std::string header = format_npy_header(dtype::of<std::uint8_t>(), shape, false);
    write_bytes(path, std::as_bytes(std::span(header)));
    std::filesystem::resize_file(path, header.size() + element_count(shape));
}

loader_options views_of(std::uint64_t batch_rows) {
    loader_options options;
    options.device = device::host();
    options.route = route::direct;
    options.batch_rows = batch_rows;
    return options;
}

}  // namespace

TEST_CASE("digest: a view of a truncated file throws data_changed with the file's path") {
    install_fault_guard();
    const temporary_folder folder;
    // short rows, rows that several cores share, and rows that end within a page
    for (const shape_vector& shape : {shape_vector{4096, 1024}, {4, 8 << 20}, {5000, 1003}}) {
        const std::string whole = folder / "whole.npy";
        const std::string cut = folder / "cut.npy";
        for (const std::string& path : {whole, cut}) {
            std::filesystem::remove(path);
            write_zeros(path, shape);
        }
        loader loader({open_npy(whole).rows(), open_npy(cut).rows()}, views_of(shape[0]));
        const stream stream(device::host());
        digest digest(device::host());
        std::optional<batch> batch = loader.next(stream);
        REQUIRE(batch);
        stream.synchronize();
        std::filesystem::resize_file(cut, 4096);
        digest.add_async(*batch, stream);
        const std::string sentence = message_of<data_changed>([&] { digest.value(); });
        CAPTURE(sentence);
        CHECK(sentence.find("'" + cut + "'") != std::string::npos);
        CHECK(sentence.find(whole) == std::string::npos);
        CHECK_THROWS_AS(digest.add_async(*batch, stream), data_changed);
        batch.reset();
    }
}

TEST_CASE("digest: a view has the digest of a copy of it") {
    const temporary_folder folder;
    const std::string path = folder / "data.npy";
    write_zeros(path, {10, 1003});
    std::vector<std::uint64_t> values;
    for (const route asked : {route::direct, route::copy}) {
        loader_options options = views_of(4);
        options.route = asked;
        loader loader({open_npy(path).rows()}, options);
        const stream stream(device::host());
        digest digest(device::host());
        while (const auto batch = loader.next(stream))
            digest.add_async(*batch, stream);
        values.push_back(digest.value());
    }
    CHECK(values[0] == values[1]);
}
