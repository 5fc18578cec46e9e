// Datasets that h5py wrote, in all layouts, filters, types and chunk shapes, and after user blocks, are read
// back identical through the public interface, and listings are correct. Exits with 77 (skipped) if the
// distribution's Python has no h5py.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "formats/element_streams.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/open.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_h5py.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using pinflow::array_listing;
using bytes_view = std::span<const std::byte>;

unsigned cases_run = 0;

/// A dataset as h5py has it.
struct written_dataset {
    fs::path path;
    std::string name;
    std::string dtype;  ///< as numpy spells it
    pinflow::shape_vector shape;
    bool together = false;         ///< its elements are contiguous in the file
    std::uint64_t whole_rows = 0;  ///< whole rows per chunk, if they are stored as they are delivered; or 0
    bytes_view stored;             ///< its elements, in the byte order of the file
    bytes_view little;             ///< and little-endian

    std::uint64_t row_bytes() const { return shape[0] == 0 ? 0 : little.size() / shape[0]; }
};

struct refused_dataset {
    fs::path path;
    std::string name;
    std::string says;  ///< part of the sentence
};

/// What tests/hdf5_matrix.py wrote, once for all cases.
struct matrix {
    matrix() {
        REQUIRE(run_h5py("hdf5_matrix.py", {"write", folder.path().string()}) == 0);
        expected = npy_bytes::read_file((folder / "expected.bin").string());
        const auto bytes = std::as_bytes(std::span(expected));
        const auto manifest = nlohmann::json::parse(std::ifstream(folder / "manifest.json"));
        for (const auto& item : manifest["datasets"]) {
            const std::size_t offset = item["offset"];
            const std::size_t size = item["size"];
            datasets.push_back({folder / item["file"].get<std::string>(), item["name"], item["dtype"],
                                item["shape"].get<pinflow::shape_vector>(), item["together"],
                                item["whole_rows"], bytes.subspan(offset, size),
                                bytes.subspan(offset + size, size)});
        }
        for (const auto& item : manifest["refused"])
            refused.push_back({folder / item["file"].get<std::string>(), item["name"], item["says"]});
    }

    temporary_folder folder;
    std::string expected;
    std::vector<written_dataset> datasets;
    std::vector<refused_dataset> refused;
};

const matrix& written() {
    static const matrix written;
    return written;
}

bytes_view bytes_of(const pinflow::array& array) {
    return {array.view().data(), array.size_bytes()};
}

/// Rows in any order, some twice, some that follow each other.
std::vector<std::uint64_t> random_rows(std::mt19937_64& random, std::uint64_t count) {
    std::vector<std::uint64_t> ids;
    for (std::uint64_t wanted = random() % 30; ids.size() < wanted;) {
        const std::uint64_t first = random() % count;
        for (std::uint64_t id = first; id < std::min(count, first + 1 + random() % 4); ++id)
            ids.push_back(id);
    }
    return ids;
}

void check_rows(const pinflow::row_source& rows, const written_dataset& dataset, std::mt19937_64& random) {
    REQUIRE(rows.row_count() == dataset.shape[0]);
    const std::uint64_t row_bytes = rows.row_size_bytes();
    if (rows.row_count() > 0) REQUIRE(row_bytes == dataset.row_bytes());
    for (int repetition = 0; rows.row_count() > 0 && repetition < 3; ++repetition) {
        const auto ids = random_rows(random, rows.row_count());
        std::vector<std::byte> bytes(ids.size() * row_bytes, std::byte{0xAA});
        rows.read_rows(ids, bytes);
        bool equal = true;
        for (std::size_t position = 0; position < ids.size(); ++position) {
            equal = equal && std::ranges::equal(std::span(bytes).subspan(position * row_bytes, row_bytes),
                                                dataset.little.subspan(ids[position] * row_bytes, row_bytes));
        }
        CHECK(equal);
    }
    rows.check_unchanged();
}

/// Checks that the extents contain all rows, in the file and in its mapping.
void check_extents(const pinflow::row_source& rows, bytes_view expected) {
    std::uint64_t done = 0;
    for (const pinflow::row_extent& extent : rows.extents()) {
        const std::uint64_t size = extent.row_count * rows.row_size_bytes();
        REQUIRE(done + size <= expected.size());
        const bytes_view here = expected.subspan(done, size);
        std::vector<std::byte> from_file(size);
        extent.file->read(extent.offset_bytes, from_file);
        CHECK(std::ranges::equal(from_file, here));
        if (size > 0) CHECK(std::ranges::equal(bytes_view(extent.data, size), here));
        done += size;
    }
    CHECK(done == expected.size());
}

}  // namespace

TEST_CASE("hdf5 matrix: every dataset is listed as h5py wrote it, and mappable is right") {
    ++cases_run;
    std::map<fs::path, std::map<std::string, array_listing>> listings;
    unsigned mappable = 0;
    for (const written_dataset& dataset : written().datasets) {
        INFO(dataset.path.filename() << ": " << dataset.name);
        auto& listed = listings[dataset.path];
        if (listed.empty()) {
            for (const array_listing& listing : pinflow::list_hdf5(dataset.path))
                listed[listing.name] = listing;
        }
        REQUIRE(listed.contains(dataset.name));
        const array_listing& listing = listed[dataset.name];
        REQUIRE(listing.dtype.has_value());
        CHECK(listing.dtype->descr() == dataset.dtype);
        CHECK(listing.shape == dataset.shape);
        CHECK(listing.size_bytes == dataset.stored.size());
        CHECK(!listing.fortran_order);
        CHECK(!listing.reason.empty());
        // alone, it is listed the same
        const array_listing alone = pinflow::list_hdf5(dataset.path, dataset.name);
        CHECK(alone.dtype == listing.dtype);
        CHECK(alone.shape == listing.shape);
        CHECK(alone.offset_bytes == listing.offset_bytes);
        CHECK(alone.size_bytes == listing.size_bytes);
        CHECK(alone.mappable == listing.mappable);

        // what is mappable is mapped, at the listed offset; everything else is read into memory
        CHECK(listing.mappable == (dataset.together || dataset.stored.empty()));
        CHECK(listing.offset_bytes.has_value() == dataset.together);
        const pinflow::array array = pinflow::open_hdf5(dataset.path, dataset.name);
        CHECK(array.has_view());
        CHECK((array.file() != nullptr) == dataset.together);
        if (!dataset.together) continue;
        ++mappable;
        REQUIRE(array.offset_bytes() == listing.offset_bytes);
        std::vector<std::byte> in_file(dataset.stored.size());
        array.file()->read(*listing.offset_bytes, in_file);
        CHECK(std::ranges::equal(in_file, dataset.stored));
    }
    CHECK(listings.size() == 4);
    CHECK(mappable > 500);
}

TEST_CASE("hdf5 matrix: every dataset is read back identical as a whole, in the byte order of the file") {
    ++cases_run;
    for (const written_dataset& dataset : written().datasets) {
        INFO(dataset.path.filename() << ": " << dataset.name);
        const pinflow::array array = pinflow::open_hdf5(dataset.path, dataset.name);
        CHECK(array.dtype().descr() == dataset.dtype);
        CHECK(array.shape() == dataset.shape);
        CHECK(!array.reason().empty());
        CHECK(std::ranges::equal(bytes_of(array), dataset.stored));
    }
    CHECK(written().datasets.size() > 2500);
}

TEST_CASE("hdf5 matrix: every dataset is read back identical by random rows, in little-endian order") {
    ++cases_run;
    std::mt19937_64 random(1);
    unsigned with_extents = 0;
    for (const written_dataset& dataset : written().datasets) {
        INFO(dataset.path.filename() << ": " << dataset.name);
        const std::string spelled = dataset.path.string() + ":" + dataset.name;
        if (dataset.shape.empty()) {
            for (const bool by_name : {true, false}) {
                CHECK(contains(message_of<pinflow::unsupported>([&] {
                                   if (by_name)
                                       pinflow::open_hdf5_rows(dataset.path, dataset.name);
                                   else
                                       pinflow::open_rows(spelled);
                               }),
                               "without axes"));
            }
            continue;
        }
        const auto rows = pinflow::open_hdf5_rows(dataset.path, dataset.name, {random() % 5000});
        CHECK(rows->dtype() == pinflow::list_hdf5(dataset.path, dataset.name).dtype->little_endian());
        check_rows(*rows, dataset, random);
        check_rows(*pinflow::open_rows(spelled), dataset, random);
        // rows that are stored as they are delivered have extents
        const bool in_place =
            (dataset.together || dataset.whole_rows > 0) && rows->dtype().descr() == dataset.dtype;
        if (!dataset.stored.empty()) CHECK(rows->extents().empty() == !in_place);
        CHECK(rows->extents().empty() == !rows->no_extents_reason().empty());
        if (rows->extents().empty()) continue;
        ++with_extents;
        check_extents(*rows, dataset.little);
        CHECK(rows->memory_bytes() == 0);
    }
    CHECK(with_extents > 400);
}

TEST_CASE("hdf5 matrix: every dataset is read back identical sequentially, in any memory") {
    ++cases_run;
    std::mt19937_64 random(2);
    for (const written_dataset& dataset : written().datasets) {
        INFO(dataset.path.filename() << ": " << dataset.name);
        const auto elements = pinflow::detail::open_hdf5_elements(dataset.path)
                                  ->stream(dataset.name, std::uint64_t{1} << random() % 20);
        CHECK(elements->shape() == dataset.shape);
        const std::uint64_t item_bytes = elements->dtype().size_bytes();
        std::vector<std::byte> bytes(dataset.little.size());
        for (std::size_t done = 0; done < bytes.size();) {
            const std::size_t count =
                std::min<std::size_t>(bytes.size() - done, (1 + random() % 300) * item_bytes);
            elements->read(std::span(bytes).subspan(done, count));
            done += count;
        }
        CHECK(std::ranges::equal(bytes, dataset.little));
        elements->finish();
    }
}

TEST_CASE("hdf5 matrix: what is refused is listed with the reason, and named in the sentence") {
    ++cases_run;
    CHECK(written().refused.size() == 44);
    for (const refused_dataset& dataset : written().refused) {
        INFO(dataset.path.filename() << ": " << dataset.name);
        const std::vector<array_listing> listed = pinflow::list_hdf5(dataset.path);
        const auto listing = std::ranges::find(listed, dataset.name, &array_listing::name);
        REQUIRE(listing != listed.end());
        CHECK(!listing->dtype.has_value());
        CHECK(!listing->mappable);
        CHECK(contains(listing->reason, dataset.says));
        CHECK(contains(listing->reason, "'" + dataset.name + "'"));
        const auto check = [&](auto open) {
            const std::string sentence = message_of<pinflow::error>(open);
            CAPTURE(sentence);
            CHECK(sentence.starts_with(fmt::format("cannot open '{}': ", dataset.path.string())));
            CHECK(contains(sentence, "'" + dataset.name + "'"));
            CHECK((contains(sentence, dataset.says) || dataset.says == "nothing"));
            CHECK(sentence.find('\n') == sentence.npos);
        };
        check([&] { pinflow::list_hdf5(dataset.path, dataset.name); });
        check([&] { pinflow::open_hdf5(dataset.path, dataset.name); });
        check([&] { pinflow::open_hdf5_rows(dataset.path, dataset.name); });
        check([&] { pinflow::open(dataset.path, dataset.name); });
        check([&] { pinflow::open_rows(dataset.path.string() + ":" + dataset.name); });
        check([&] { pinflow::detail::open_hdf5_elements(dataset.path)->stream(dataset.name, 1 << 20); });
    }
}

int main(int argc, char** argv) {
    return main_with_h5py(argc, argv, "hdf5_matrix.py", cases_run);
}
