// Files that libhdf5 and h5py wrote are described correctly. Exits with 77 (skipped) if the distribution's
// Python has no h5py.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include "formats/hdf5_library.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <hdf5.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "formats/hdf5_filters.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/load.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_h5py.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using npy_bytes::read_file;
using npy_bytes::write_file;
using pinflow::input_file;
using pinflow::shape_vector;
using pinflow::detail::describe_hdf5_dataset;
using pinflow::detail::hdf5_description;
using pinflow::detail::hdf5_storage;

unsigned cases_run = 0;

/// The files, written once for all tests.
const temporary_folder& files() {
    static const temporary_folder folder;
    static const int status = run_h5py("hdf5_metadata_files.py", {"write", folder.path().string()});
    REQUIRE(status == 0);
    return folder;
}

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::size_t begin = 0;
    for (std::size_t end; (end = text.find(separator, begin)) != text.npos; begin = end + 1)
        parts.push_back(text.substr(begin, end - begin));
    parts.push_back(text.substr(begin));
    return parts;
}

std::vector<std::vector<std::string>> lines_of(const std::string& name) {
    std::vector<std::vector<std::string>> lines;
    std::ifstream file(files() / name);
    for (std::string line; std::getline(file, line);)
        lines.push_back(split(line, '\t'));
    return lines;
}

template <typename Numbers>
std::string spelled(const Numbers& numbers) {
    std::string result;
    for (const auto number : numbers)
        result += (result.empty() ? "" : ",") + std::to_string(number);
    return result;
}

std::string spelled_filters(const hdf5_description& description) {
    std::vector<int> ids;
    for (const auto& filter : description.filters)
        ids.push_back(filter.id);
    return spelled(ids);
}

std::string spelled_fill(const hdf5_description& description) {
    std::string result;
    for (const std::byte byte : description.fill)
        result += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
    return result;
}

std::string spelled(hdf5_storage storage) {
    constexpr const char* names[] = {"contiguous", "chunked", "inline", "absent", "library"};
    return names[static_cast<std::size_t>(storage)];
}

// ---- elements, as a description says where they are ------------------------------------------------------

std::string fill_of(const hdf5_description& description) {
    std::string fill(description.dtype.size_bytes(), '\0');
    if (!description.fill.empty())
        std::transform(description.fill.begin(), description.fill.end(), fill.begin(),
                       [](std::byte byte) { return static_cast<char>(byte); });
    return fill;
}

/// The elements of a chunk, decoded; the fill value if it was never written.
std::string chunk_of(const hdf5_description& description, const input_file& file, std::size_t index) {
    using namespace pinflow::detail;
    const hdf5_chunk& chunk = description.chunks[index];
    const std::uint64_t count = pinflow::element_count(description.chunk_shape);
    std::string content;
    if (chunk.size_bytes == 0) {
        for (std::uint64_t element = 0; element < count; ++element)
            content += fill_of(description);
        return content;
    }
    std::string stored(chunk.size_bytes, '?');
    file.read(chunk.offset_bytes, std::as_writable_bytes(std::span(stored)));
    content.resize(count * description.dtype.size_bytes());
    const hdf5_pipeline pipeline(description.filters, content.size());
    pipeline.check_size(chunk);
    hdf5_chunk_decoder decoder;
    decoder.decode(pipeline, chunk.filter_mask, std::as_bytes(std::span(stored)),
                   std::as_writable_bytes(std::span(content)));
    return content;
}

std::string chunked_elements(const hdf5_description& description, const input_file& file) {
    std::vector<std::string> chunks;
    for (std::size_t index = 0; index < description.chunks.size(); ++index)
        chunks.push_back(chunk_of(description, file, index));
    const shape_vector& shape = description.shape;
    const shape_vector& chunk_shape = description.chunk_shape;
    const std::uint64_t size = description.dtype.size_bytes();
    std::string result;
    for (std::uint64_t element = 0; element < pinflow::element_count(shape); ++element) {
        std::uint64_t rest = element;
        std::uint64_t chunk = 0;
        std::uint64_t within = 0;
        std::uint64_t grid_step = 1;
        std::uint64_t chunk_step = 1;
        for (std::size_t axis = shape.size(); axis-- > 0; rest /= shape[axis]) {
            const std::uint64_t index = rest % shape[axis];
            chunk += grid_step * (index / chunk_shape[axis]);
            within += chunk_step * (index % chunk_shape[axis]);
            grid_step *= (shape[axis] + chunk_shape[axis] - 1) / chunk_shape[axis];
            chunk_step *= chunk_shape[axis];
        }
        result += chunks.at(chunk).substr(within * size, size);
    }
    return result;
}

std::string elements_of(const hdf5_description& description, const std::shared_ptr<const input_file>& file) {
    const std::uint64_t size_bytes = payload_bytes(description);
    std::string result(size_bytes, '?');
    const auto destination = std::as_writable_bytes(std::span(result));
    switch (description.storage) {
        case hdf5_storage::contiguous:
            file->read(description.offset_bytes, destination);
            return result;
        case hdf5_storage::chunked:
            return chunked_elements(description, *file);
        case hdf5_storage::compact:
            std::ranges::copy(description.compact_data, destination.begin());
            return result;
        case hdf5_storage::absent:
            result.clear();
            for (std::uint64_t element = 0; element < pinflow::element_count(description.shape); ++element)
                result += fill_of(description);
            return result;
        case hdf5_storage::library: {
            const pinflow::detail::hdf5_library_reader reader(file, description);
            reader.read(0, description.shape.empty() ? 1 : description.shape.front(), destination);
            return result;
        }
    }
    return result;
}

}  // namespace

TEST_CASE("hdf5: every dataset of every layout, index, filter and type is described as h5py wrote it") {
    ++cases_run;
    std::map<std::string, unsigned> storages;
    for (const auto& line : lines_of("datasets.txt")) {
        REQUIRE(line.size() == 9);
        const auto file = std::make_shared<const input_file>(files() / line[0]);
        CAPTURE(line[0]);
        CAPTURE(line[1]);
        const hdf5_description description = describe_hdf5_dataset(*file, line[1]);
        CHECK(description.name == line[1]);
        CHECK(description.dtype.descr() == line[2]);
        CHECK(spelled(description.shape) == line[3]);
        CHECK(spelled(description.storage) == line[4]);
        CHECK(spelled(description.chunk_shape) == line[5]);
        CHECK(spelled_filters(description) == line[6]);
        CHECK(spelled_fill(description) == line[7]);
        const bool equal = elements_of(description, file) == read_file(files() / (line[8] + ".raw"));
        CHECK(equal);
        CHECK(pinflow::detail::parse_hdf5_description(serialize(description), file->size_bytes()) ==
              description);
        ++storages[line[4]];
    }
    for (const char* storage : {"contiguous", "chunked", "inline", "absent", "library"})
        CHECK(storages[storage] > 2);
    CHECK(storages["chunked"] > 400);
}

TEST_CASE(
    "hdf5: what cannot be opened is refused in a sentence with path and name, and leaves nothing open") {
    ++cases_run;
    const auto lines = lines_of("refused.txt");
    CHECK(lines.size() > 25);
    const std::size_t open_before = open_descriptors();
    for (const auto& line : lines) {
        REQUIRE(line.size() == 3);
        CAPTURE(line[0]);
        CAPTURE(line[1]);
        const fs::path path = files() / line[0];
        const std::string sentence =
            message_of<pinflow::error>([&] { describe_hdf5_dataset(input_file(path), line[1]); });
        CAPTURE(sentence);
        CHECK(sentence.starts_with(fmt::format("cannot open '{}': ", path.string())));
        CHECK(contains(sentence + '$', line[2]));
        CHECK(sentence.find('\n') == sentence.npos);
    }
    CHECK(open_descriptors() == open_before);
}

TEST_CASE("hdf5: the listing agrees with the descriptions, and gives the reason of each refusal") {
    ++cases_run;
    std::map<std::string, std::map<std::string, pinflow::array_listing>> listings;
    std::map<std::string, std::vector<std::string>> orders;
    const auto list = [&](const std::string& file) {
        if (orders.contains(file)) return;
        for (const auto& listing : pinflow::detail::list_hdf5_datasets(input_file(files() / file))) {
            orders[file].push_back(listing.name);
            CHECK(listings[file].emplace(listing.name, listing).second);
        }
    };
    for (const auto& line : lines_of("datasets.txt")) {
        if (line[0] == "links.h5" || line[0] == "deep.h5") continue;
        list(line[0]);
        CAPTURE(line[0]);
        CAPTURE(line[1]);
        REQUIRE(listings[line[0]].contains(line[1]));
        const auto& listing = listings[line[0]][line[1]];
        const hdf5_description description = describe_hdf5_dataset(input_file(files() / line[0]), line[1]);
        REQUIRE(listing.dtype.has_value());
        CHECK(*listing.dtype == description.dtype);
        CHECK(listing.shape == description.shape);
        CHECK(listing.size_bytes == payload_bytes(description));
        const bool in_place = description.storage == hdf5_storage::contiguous;
        CHECK(listing.mappable == (in_place || listing.size_bytes == 0));
        CHECK(listing.offset_bytes.has_value() == in_place);
        CHECK(listing.offset_bytes.value_or(0) == description.offset_bytes);
        CHECK(!listing.reason.empty());
    }
    for (const auto& line : lines_of("refused.txt")) {
        if (line[0] == "links.h5" || line[0] == "wrong_link_count.h5") continue;  // names that are not there
        CAPTURE(line[1]);
        REQUIRE(listings[line[0]].contains(line[1]));
        CHECK(!listings[line[0]][line[1]].dtype.has_value());
        CHECK(contains(listings[line[0]][line[1]].reason, line[2]));
    }
    for (const auto& line : lines_of("listed.txt")) {
        list(line[0]);
        CAPTURE(line[0]);
        CHECK(orders[line[0]] == std::vector<std::string>(line.begin() + 1, line.end()));
    }
    const auto& links = listings["links.h5"];
    CHECK(contains(links.at("outside").reason, "leads to '/inside/data' in another file, 'other.h5'"));
    CHECK(contains(links.at("soft_outside").reason, "another file, 'other.h5'"));
    CHECK(contains(links.at("dangling").reason, "leads to '/b/nothing', where there is nothing"));
    CHECK(contains(links.at("endless").reason, "leads to '/endless', which cannot be opened: libhdf5 says"));
    CHECK(contains(links.at("virtual").reason, "is virtual"));
    CHECK(contains(links.at("external").reason, "external storage"));
    for (const auto& [file, by_name] : listings) {
        const auto listed = pinflow::detail::list_hdf5_datasets(input_file(files() / file));
        const auto bytes = pinflow::detail::serialize(listed);
        const auto parsed = pinflow::detail::parse_array_listings(bytes);
        CHECK(pinflow::detail::serialize(parsed) == bytes);
        CHECK(parsed.size() == listed.size());
    }
}

TEST_CASE("hdf5 library: further links to a dataset are listed, and each group is searched once") {
    ++cases_run;
    std::vector<std::pair<std::string, std::string>> aliases;
    for (const auto& alias : pinflow::detail::list_hdf5_aliases(input_file(files() / "links.h5")))
        aliases.emplace_back(alias.name, alias.dataset);
    CHECK(aliases ==
          std::vector<std::pair<std::string, std::string>>{{"b/data", "b/again"}, {"soft", "b/again"}});
    CHECK(pinflow::detail::list_hdf5_aliases(input_file(files() / "other.h5")).empty());
}

TEST_CASE("hdf5 library: a link with the name of a tensor in another file is left out of loads") {
    ++cases_run;
    const temporary_folder folder;
    {
        pinflow::hdf5_writer writer(folder / "other.h5");
        writer.begin({.name = "soft", .dtype = pinflow::dtype::of<std::byte>(), .shape = {3}});
        writer.write(std::array<std::byte, 3>{});
        writer.finish();
    }
    for (const auto& paths : {std::vector{files() / "links.h5", folder / "other.h5"},
                              std::vector{folder / "other.h5", files() / "links.h5"}}) {
        const pinflow::tensor_files model(paths);
        CHECK(model.tensor("soft").size_bytes == 3);
        CHECK(model.tensor("b/data").size_bytes == 16);
    }
}

TEST_CASE("hdf5 library: hard links of a dataset are loaded once, and share memory") {
    ++cases_run;
    const pinflow::tensor_files model({files() / "links.h5"});
    const auto load = [&](const std::vector<pinflow::tensor_request>& requests) {
        return model.load(requests, pinflow::device::host());
    };
    const auto loaded = load({{.name = "b/data"}, {.name = "a/b"}, {.name = "soft"}, {.name = "b/again"}});
    REQUIRE(loaded.tensors.size() == 4);
    CHECK(loaded.tensors[3].name() == "b/again");
    CHECK(loaded["soft"].data() == loaded["b/again"].data());
    CHECK(loaded["b/data"].data() == loaded["b/again"].data());
    CHECK(loaded["b/data"].data() != loaded["a/b"].data());
    CHECK(loaded["b/data"].size_bytes() == 16);
    CHECK(loaded.report.size_bytes == 17);
    const std::int32_t expected[] = {0, 1, 2, 3};
    CHECK(std::memcmp(loaded["b/data"].data(), expected, sizeof expected) == 0);

    CHECK_THROWS_AS(static_cast<void>(model.tensor("dangling")), pinflow::unsupported);
    CHECK_THROWS_AS(model.require_all(), pinflow::unsupported);

    const auto other_part =
        load({{.name = "b/data"}, {.name = "b/again", .slice = pinflow::tensor_slice{0, 1, 3}}});
    CHECK(other_part["b/again"].size_bytes() == 8);
    CHECK(std::memcmp(other_part["b/again"].data(), expected + 1, 8) == 0);
    std::array<std::int32_t, 4> own{};
    const auto apart = load(
        {{.name = "b/again"}, {.name = "b/data", .destination = reinterpret_cast<std::byte*>(own.data())}});
    CHECK(own[3] == 3);
    CHECK(std::memcmp(apart["b/again"].data(), expected, sizeof expected) == 0);
}

TEST_CASE("hdf5: data with an address and a size of 0 is refused, not read as the fill value") {
    ++cases_run;
    const input_file file(files() / "zero_sizes.h5");
    for (const auto& [name, part] :
         std::map<std::string, std::string>{{"contiguous", "takes 128 bytes, but has 0 in the file"},
                                            {"chunked", "at (16,)"},
                                            {"deflated", "of no bytes at (16,)"}}) {
        CAPTURE(name);
        const std::string sentence =
            message_of<pinflow::format_error>([&] { describe_hdf5_dataset(file, name); });
        CAPTURE(sentence);
        CHECK(contains(sentence, fmt::format("'{}'", file.path())));
        CHECK(contains(sentence, fmt::format("the dataset '{}'", name)));
        CHECK(contains(sentence, part));
    }
    const auto listed = pinflow::detail::list_hdf5_datasets(file);
    REQUIRE(listed.size() == 3);
    for (const auto& listing : listed)
        CHECK(listing.dtype.has_value() == (listing.name != "contiguous"));
}

TEST_CASE("hdf5: chunks that cannot be found by their coordinates are refused, not read as the fill value") {
    ++cases_run;
    const input_file file(files() / "lost_chunks.h5");
    for (const char* name : {"repeated", "outside"}) {
        CAPTURE(name);
        const std::string sentence =
            message_of<pinflow::format_error>([&] { describe_hdf5_dataset(file, name); });
        CAPTURE(sentence);
        CHECK(
            contains(sentence, fmt::format("the dataset '{}' has 4 chunks in its index, but only 3", name)));
    }
}

TEST_CASE("hdf5: slashes before, within and after a path change nothing") {
    ++cases_run;
    const input_file file(files() / "links.h5");
    const auto description = describe_hdf5_dataset(file, "b/data");
    for (const char* name : {"/b/data", "//b///data", "b/data/", "/b//data//"})
        CHECK(describe_hdf5_dataset(file, name) == description);
}

TEST_CASE("hdf5: rows that only the library can read are read in any part, and wrong ranges are refused") {
    ++cases_run;
    const auto file = std::make_shared<const input_file>(files() / "library.h5");
    const auto description = describe_hdf5_dataset(*file, "scaleoffset");
    const pinflow::detail::hdf5_library_reader reader(file, description);
    const auto read = [&](std::uint64_t first, std::uint64_t count, std::size_t size) {
        std::string rows(size, '?');
        reader.read(first, count, std::as_writable_bytes(std::span(rows)));
        return rows;
    };
    const std::string all = read(0, 7, 280);
    CHECK(read(2, 3, 120) == all.substr(80, 120));
    CHECK(read(6, 1, 40) == all.substr(240));
    CHECK(read(7, 0, 0).empty());
    CHECK_THROWS_AS(read(5, 3, 120), pinflow::invalid_argument);
    CHECK_THROWS_AS(read(8, 0, 0), pinflow::invalid_argument);
    CHECK_THROWS_AS(read(0, 1, 41), pinflow::invalid_argument);
    CHECK_THROWS_AS(read(1, std::uint64_t(-1), 40), pinflow::invalid_argument);

    auto other = description;
    other.shape.front() = 8;
    CHECK_THROWS_AS(pinflow::detail::hdf5_library_reader(file, other), pinflow::data_changed);
    other = description;
    other.name = "nothing";
    CHECK_THROWS_AS(pinflow::detail::hdf5_library_reader(file, other), pinflow::invalid_argument);
}

TEST_CASE("hdf5: damaged chunks for which the library would invent elements are refused") {
    ++cases_run;
    const auto lines = lines_of("damaged.txt");
    CHECK(lines.size() > 6);
    for (const auto& line : lines) {
        REQUIRE(line.size() == 4);
        CAPTURE(line[1]);
        const auto file = std::make_shared<const input_file>(files() / line[0]);
        const auto description = describe_hdf5_dataset(*file, line[1]);
        REQUIRE(description.storage == hdf5_storage::library);
        const bool twice = line[3] == "twice";
        if (twice && sanitized) continue;  // a sanitizer's allocator fills memory in its own way
        const pinflow::detail::hdf5_library_reader reader(
            file, description,
            twice ? pinflow::detail::hdf5_unverified_chunks::decoded_twice
                  : pinflow::detail::hdf5_unverified_chunks::accepted);
        const auto read = [&](std::uint64_t first, std::uint64_t count) {
            std::string rows(payload_bytes(description) / description.shape[0] * count, '?');
            reader.read(first, count, std::as_writable_bytes(std::span(rows)));
        };
        const std::string sentence = message_of<pinflow::format_error>([&] { read(3, 2); });
        CAPTURE(sentence);
        CHECK(sentence.starts_with(fmt::format("cannot read the dataset '{}' of '{}': its chunk at (0, 0), ",
                                               line[1], file->path())));
        CHECK(contains(sentence, line[2]));
        CHECK(sentence.find('\n') == sentence.npos);
        CHECK_THROWS_AS(read(3, 2), pinflow::format_error);  // and again
        const std::uint64_t rows = description.shape[0];
        const std::uint64_t chunk_rows = description.chunk_shape[0];
        if (line[0] == "damaged.h5" && rows > chunk_rows) CHECK_NOTHROW(read(chunk_rows, rows - chunk_rows));
    }
}

TEST_CASE("hdf5: an element that is an array is read by the library row by row, as other datasets are") {
    ++cases_run;
    const auto file = std::make_shared<const input_file>(files() / "types.h5");
    auto description = describe_hdf5_dataset(*file, "one_matrix");
    const std::string all = elements_of(description, file);
    const pinflow::detail::hdf5_library_reader reader(file, description);
    std::string row(6, '?');
    reader.read(1, 1, std::as_writable_bytes(std::span(row)));
    CHECK(row == all.substr(6));
}

TEST_CASE("hdf5: a file that is locked for writing is not opened, and the sentence names what helps") {
    ++cases_run;
    if (std::getenv("HDF5_USE_FILE_LOCKING") != nullptr) return;  // the user has set the locking
    const fs::path path = files() / "library.h5";
    const int writer = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(writer != -1);
    REQUIRE(::flock(writer, LOCK_EX | LOCK_NB) == 0);
    const std::string sentence =
        message_of<pinflow::system_failure>([&] { describe_hdf5_dataset(input_file(path), "scaleoffset"); });
    CHECK(contains(sentence, path.string()));
    CHECK(contains(sentence, "HDF5_USE_FILE_LOCKING=FALSE"));
    ::close(writer);
    CHECK_NOTHROW(describe_hdf5_dataset(input_file(path), "scaleoffset"));
}

TEST_CASE("hdf5: a file whose writer did not close it is refused with what helps") {
    ++cases_run;
    const std::string sentence = message_of<pinflow::format_error>(
        [&] { describe_hdf5_dataset(input_file(files() / "unclosed.h5"), "data"); });
    CAPTURE(sentence);
    CHECK(contains(sentence, "h5clear"));
}

TEST_CASE("hdf5: a truncated file, or a file that is not HDF5, is refused in one line") {
    ++cases_run;
    const temporary_folder folder;
    const std::string content = read_file(files() / "library.h5");
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{7}, std::size_t{100}, content.size() / 2, content.size() - 1}) {
        write_file(folder / "cut.h5", content.substr(0, size));
        const input_file file(folder / "cut.h5");
        CAPTURE(size);
        for (const bool listing : {true, false}) {
            const std::string sentence = message_of<pinflow::format_error>([&] {
                if (listing)
                    pinflow::detail::list_hdf5_datasets(file);
                else
                    describe_hdf5_dataset(file, "scaleoffset");
            });
            CHECK(sentence.starts_with(fmt::format("cannot open '{}': ", file.path())));
            CHECK(sentence.find('\n') == sentence.npos);
        }
    }
}

TEST_CASE("hdf5: if libhdf5 does not know a version in the file, the sentence has its own") {
    ++cases_run;
    const temporary_folder folder;
    fs::copy_file(files() / "links.h5", folder / "newer.h5");
    constexpr std::streamoff superblock_version = 8;
    std::fstream bytes(folder / "newer.h5", std::ios::binary | std::ios::in | std::ios::out);
    bytes.seekp(superblock_version);
    bytes.put(99);
    bytes.close();
    const std::string sentence = message_of<pinflow::format_error>(
        [&] { pinflow::detail::list_hdf5_datasets(input_file(folder / "newer.h5")); });
    CAPTURE(sentence);
    CHECK(contains(sentence, "version"));
    CHECK(contains(sentence, fmt::format("{}.{}.{}, and a newer one may have written the file", H5_VERS_MAJOR,
                                         H5_VERS_MINOR, H5_VERS_RELEASE)));
}

TEST_CASE("hdf5: a file that was replaced after opening is not described") {
    ++cases_run;
    const temporary_folder folder;
    fs::copy_file(files() / "library.h5", folder / "file.h5");
    const input_file file(folder / "file.h5");
    CHECK_NOTHROW(describe_hdf5_dataset(file, "scaleoffset"));
    fs::copy_file(files() / "library.h5", folder / "new.h5");
    fs::rename(folder / "new.h5", folder / "file.h5");
    CHECK_THROWS_AS(describe_hdf5_dataset(file, "scaleoffset"), pinflow::data_changed);
    CHECK_THROWS_AS(pinflow::detail::list_hdf5_datasets(file), pinflow::data_changed);
}

TEST_CASE("hdf5: threads describe, list and read at the same time") {
    ++cases_run;
    const auto file = std::make_shared<const input_file>(files() / "library.h5");
    const auto expected = describe_hdf5_dataset(*file, "scaleoffset");
    const pinflow::detail::hdf5_library_reader reader(file, expected);
    std::string all(280, '?');
    reader.read(0, 7, std::as_writable_bytes(std::span(all)));
    std::atomic<unsigned> wrong = 0;
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&] {
            for (unsigned round = 0; round < 25; ++round) {
                if (describe_hdf5_dataset(*file, "scaleoffset") != expected) ++wrong;
                if (pinflow::detail::list_hdf5_datasets(*file).size() < 4) ++wrong;
                std::string row(40, '?');
                reader.read(round % 7, 1, std::as_writable_bytes(std::span(row)));
                if (row != all.substr(round % 7 * 40, 40)) ++wrong;
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(wrong == 0);
}

int main(int argc, char** argv) {
    return main_with_h5py(argc, argv, "hdf5_metadata_files.py", cases_run);
}
