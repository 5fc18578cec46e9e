#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/descriptor_cache.hpp"
#include "src/core/side_by_side_mapping.hpp"
#include "src/core/system.hpp"
#include "tests/mapped_files.hpp"
#include "tests/random_arrays.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

// Rows of many files, as concatenate makes them from sources in files.

using pinflow::array;
using pinflow::concatenate;
using pinflow::dtype;
using pinflow::row_extent;
namespace fs = std::filesystem;
namespace seam = pinflow::detail::system;

namespace {

using row_ids = std::vector<std::uint64_t>;
using rows_pointer = std::shared_ptr<const pinflow::row_source>;

std::vector<std::byte> read(const pinflow::row_source& rows, const row_ids& ids) {
    std::vector<std::byte> destination(ids.size() * rows.row_size_bytes());
    rows.read_rows(ids, destination);
    return destination;
}

/// Files of rows of 12 bytes, and what all of them hold.
struct dataset {
    std::vector<rows_pointer> sources;
    std::vector<std::byte> content;
};

constexpr std::uint64_t row_bytes = 12;

/// One file for each number of rows; data begins at any offset.
dataset make_dataset(const temporary_folder& folder, const std::vector<std::uint64_t>& row_counts) {
    random_engine random(row_counts.size());
    dataset made;
    for (std::size_t index = 0; index < row_counts.size(); ++index) {
        const auto [source, elements] =
            make_array(random, folder / std::to_string(index), dtype::parse("<f4"), {row_counts[index], 3},
                       false, random() % 5'000);
        made.sources.push_back(source);
        made.content.insert(made.content.end(), elements.bytes.begin(), elements.bytes.end());
    }
    return made;
}

std::vector<std::byte> rows_of(const std::vector<std::byte>& content, const row_ids& ids) {
    std::vector<std::byte> rows;
    for (const std::uint64_t id : ids) {
        const auto begin = content.begin() + static_cast<std::ptrdiff_t>(id * row_bytes);
        rows.insert(rows.end(), begin, begin + row_bytes);
    }
    return rows;
}

row_ids all_ids(const pinflow::row_source& rows) {
    row_ids ids(rows.row_count());
    for (std::size_t id = 0; id < ids.size(); ++id)
        ids[id] = id;
    return ids;
}

/// The bytes of all extents if they are mapped; empty if one is not.
std::vector<std::byte> mapped_content(const pinflow::row_source& rows) {
    std::vector<std::byte> content;
    for (const row_extent& extent : rows.extents()) {
        if (extent.data == nullptr) return {};
        content.insert(content.end(), extent.data, extent.data + extent.row_count * rows.row_size_bytes());
    }
    return content;
}

std::size_t count_mapped(const pinflow::row_source& rows) {
    return static_cast<std::size_t>(std::ranges::count_if(
        rows.extents(), [](const row_extent& extent) { return extent.data != nullptr; }));
}

}  // namespace

TEST_CASE("extent_rows: deliver any rows of files of any number of rows") {
    const temporary_folder folder;
    const std::vector<std::vector<std::uint64_t>> datasets{{5, 5, 5, 5},
                                                           {5, 5, 5, 2},
                                                           {1, 1, 1},
                                                           {1, 700, 3, 64, 1},
                                                           {0, 4, 0, 0, 9, 1, 0},
                                                           {3, 3, 0, 3},
                                                           {2'000, 1},
                                                           {64, 64, 64, 640},
                                                           {0, 1},
                                                           {7, 0},
                                                           {64, 64, 63, 64, 64}};
    random_engine random(1);
    for (const auto& row_counts : datasets) {
        CAPTURE(row_counts.size());
        const auto [sources, content] = make_dataset(folder, row_counts);
        const rows_pointer rows = concatenate(sources);
        REQUIRE(rows->row_count() == content.size() / row_bytes);
        CHECK(rows->row_size_bytes() == row_bytes);
        CHECK(rows->file_backed());
        CHECK((read(*rows, all_ids(*rows)) == content));
        CHECK((mapped_content(*rows) == content));
        row_ids ids;
        while (ids.size() < 300) {
            std::uint64_t id = random() % rows->row_count();
            for (std::uint64_t run = random() % 20; run > 0 && id < rows->row_count(); --run)
                ids.push_back(id++);
        }
        CHECK((read(*rows, ids) == rows_of(content, ids)));
        std::ranges::shuffle(ids, random);
        CHECK((read(*rows, ids) == rows_of(content, ids)));
        CHECK_NOTHROW(rows->check_unchanged());
    }
}

TEST_CASE("extent_rows: files are mapped side by side, and the sources are not kept") {
    const temporary_folder folder;
    auto [sources, content] = make_dataset(folder, {5, 1'000, 1, 0, 64, 64});
    std::vector<std::weak_ptr<const pinflow::row_source>> watched(sources.begin(), sources.end());
    const rows_pointer rows = concatenate(std::move(sources));
    for (const auto& source : watched)
        CHECK(source.expired());
    const auto extents = rows->extents();
    REQUIRE(extents.size() == 5);
    const auto mappings = mappings_of(folder.path().string());
    REQUIRE(mappings.size() == 5);
    for (std::size_t index = 0; index < extents.size(); ++index) {
        const auto pages = pages_of(extents[index].data, extents[index].row_count * row_bytes);
        CHECK(pages.begin == mappings[index].begin);
        CHECK(pages.end == mappings[index].end);
        CHECK(mappings[index].path == extents[index].file->path());
        if (index > 0) CHECK(mappings[index].begin == mappings[index - 1].end);
    }
}

TEST_CASE("extent_rows: neighbours in one file are read at once") {
    const temporary_folder folder;
    const auto [sources, content] = make_dataset(folder, {10, 10, 10});
    const rows_pointer rows = concatenate(sources);
    int reads = 0;
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
        if (what == seam::call::pread) ++reads;
        return seam::injected_failure{};
    });
    const auto reads_of = [&](const row_ids& ids) {
        reads = 0;
        CHECK((read(*rows, ids) == rows_of(content, ids)));
        return reads;
    };
    CHECK(reads_of({2, 3, 4, 5}) == 1);
    CHECK(reads_of(all_ids(*rows)) == 3);
    CHECK(reads_of({8, 9, 10, 11}) == 2);
    CHECK(reads_of({5, 4, 3}) == 3);
    CHECK(reads_of({7, 7, 8}) == 2);
    CHECK(reads_of({}) == 0);
}

TEST_CASE("extent_rows: files beyond the limit on mappings are read") {
    const temporary_folder folder;
    const auto [sources, content] = make_dataset(folder, {10, 20, 0, 30, 40, 50});
    const pinflow::detail::scoped_mapping_limit limit(3);
    const rows_pointer rows = concatenate(sources);
    REQUIRE(rows->extents().size() == 5);
    CHECK(count_mapped(*rows) == 3);
    for (std::size_t index = 0; index < 5; ++index) {
        CHECK((rows->extents()[index].data != nullptr) == (index < 3));
        CHECK(rows->extents()[index].file != nullptr);
    }
    CHECK(rows->no_extents_reason().empty());
    CHECK((read(*rows, all_ids(*rows)) == content));
}

TEST_CASE("extent_rows: files that the system refuses to map are read") {
    const temporary_folder folder;
    const auto [sources, content] = make_dataset(folder, {10, 20, 30});
    rows_pointer rows;
    {
        const seam::scoped_failure_hook hook([&](seam::call what, std::string_view path) {
            return what == seam::call::mmap && path == (folder / "1").string()
                       ? seam::injected_failure{.error = EACCES}
                       : seam::injected_failure{};
        });
        rows = concatenate(sources);
    }
    CHECK(count_mapped(*rows) == 1);
    CHECK((read(*rows, all_ids(*rows)) == content));
}

TEST_CASE("extent_rows: arrays that were opened without a mapping are mapped together") {
    const temporary_folder folder;
    auto [sources, content] = make_dataset(folder, {10, 20, 30});
    std::vector<rows_pointer> unmapped;
    for (const rows_pointer& source : sources) {
        const row_extent& extent = source->extents()[0];
        const array opened =
            array::of_file_unmapped(extent.file, extent.offset_bytes, source->dtype(), {extent.row_count, 3});
        CHECK_FALSE(opened.has_view());
        CHECK_THROWS_AS(opened.view(), pinflow::unsupported);
        unmapped.push_back(opened);
        CHECK(unmapped.back()->extents()[0].data == nullptr);
    }
    sources.clear();
    CHECK(mappings_of(folder.path().string()).empty());
    const rows_pointer rows = concatenate(unmapped);
    CHECK((mapped_content(*rows) == content));
    CHECK(mappings_of(folder.path().string()).size() == 3);
}

TEST_CASE("extent_rows: rows in memory between files leave the files mapped") {
    const temporary_folder folder;
    random_engine random(3);
    auto [sources, content] = make_dataset(folder, {10, 20});
    const row_extent& extent = sources[1]->extents()[0];
    sources[1] = array::of_file_unmapped(extent.file, extent.offset_bytes, sources[1]->dtype(), {20, 3});
    const auto [source, elements] = make_array(random, folder / "more", dtype::parse("<f4"), {5, 3}, false);
    sources.push_back(in_memory(elements));
    content.insert(content.end(), elements.bytes.begin(), elements.bytes.end());
    const rows_pointer rows = concatenate(sources);
    CHECK_FALSE(rows->file_backed());
    REQUIRE(rows->extents().size() == 3);
    CHECK(rows->extents()[2].file == nullptr);
    CHECK((mapped_content(*rows) == content));
    CHECK((read(*rows, all_ids(*rows)) == content));
}

TEST_CASE("extent_rows: can be concatenated again") {
    const temporary_folder folder;
    const auto [sources, content] = make_dataset(folder, {10, 20, 30, 40});
    const rows_pointer rows =
        concatenate({concatenate({sources[0], sources[1]}), concatenate({sources[2], sources[3]})});
    CHECK(rows->extents().size() == 4);
    CHECK((mapped_content(*rows) == content));
    CHECK((read(*rows, all_ids(*rows)) == content));
    const rows_pointer twice = concatenate({rows, rows});
    CHECK(twice->extents().size() == 8);
    CHECK(twice->row_count() == 200);
    CHECK((read(*twice, {0, 99, 100, 199}) == rows_of(content, {0, 99, 0, 99})));
}

TEST_CASE("extent_rows: neighbouring extents of one file are one") {
    const temporary_folder folder;
    const auto content = pattern_bytes(10 + 20 * row_bytes + 4);
    write_bytes(folder / "data", content);
    const auto file = std::make_shared<const pinflow::input_file>(folder / "data");
    const auto part = [&](std::uint64_t first, std::uint64_t count) {
        return array::of_file(file, 10 + first * row_bytes, dtype::parse("<f4"), {count, 3}).rows();
    };
    const rows_pointer rows = concatenate({part(0, 5), part(5, 5), part(12, 3), part(1, 2)});
    REQUIRE(rows->extents().size() == 3);
    CHECK(rows->extents()[0].row_count == 10);
    CHECK(mappings_of(folder.path().string()).size() == 1);
    const std::vector<std::byte> all(content.begin() + 10, content.end());
    const row_ids in_file{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14, 1, 2};
    CHECK((mapped_content(*rows) == rows_of(all, in_file)));
    CHECK((read(*rows, all_ids(*rows)) == rows_of(all, in_file)));
}

TEST_CASE("extent_rows: rows without bytes can be counted and read") {
    const temporary_folder folder;
    random_engine random(4);
    std::vector<rows_pointer> sources;
    for (const char* name : {"a", "b"})
        sources.push_back(make_array(random, folder / name, dtype::parse("<f4"), {4, 0}, false).first);
    const rows_pointer rows = concatenate(sources);
    CHECK(rows->row_count() == 8);
    CHECK(rows->row_size_bytes() == 0);
    CHECK(read(*rows, {0, 7, 3}).empty());
    CHECK_THROWS_AS(read(*rows, {8}), pinflow::invalid_argument);
}

TEST_CASE("extent_rows: files without rows make one source without rows, which notices a changed file") {
    const temporary_folder folder;
    auto [sources, content] = make_dataset(folder, {0, 0});
    random_engine random(5);
    sources.push_back(make_array(random, folder / "big", dtype::parse(">f4"), {0, 3}, false).first);
    const rows_pointer rows = concatenate(sources);
    CHECK(rows->row_count() == 0);
    CHECK(rows->extents().size() == 1);
    CHECK(read(*rows, {}).empty());
    CHECK_THROWS_AS(read(*rows, {0}), pinflow::invalid_argument);
    CHECK_NOTHROW(rows->check_unchanged());
    fs::resize_file(folder / "big", 0);
    CHECK_THROWS_AS(rows->check_unchanged(), pinflow::data_changed);
}

// ---- changes ----------------------------------------------------------------------------------------------

TEST_CASE("extent_rows: each file is checked once") {
    const temporary_folder folder;
    const auto [sources, content] = make_dataset(folder, {3, 0, 3});
    const rows_pointer rows = concatenate({sources[0], sources[1], sources[2], sources[0], sources[2]});
    std::map<std::string, int> checks;
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view path) {
        if (what == seam::call::stat) ++checks[std::string(path)];
        return seam::injected_failure{};
    });
    rows->check_unchanged();
    CHECK(checks == std::map<std::string, int>{{folder / "0", 1}, {folder / "1", 1}, {folder / "2", 1}});
}

TEST_CASE("extent_rows: a truncated file between others is noticed by checking and by reading past its end") {
    const temporary_folder folder;
    const auto [sources, content] = make_dataset(folder, {50, 50, 50});
    const rows_pointer rows = concatenate(sources);
    const std::uint64_t begin = rows->extents()[1].offset_bytes;
    fs::resize_file(folder / "1", begin + 10 * row_bytes);
    CHECK(contains(message_of<pinflow::data_changed>([&] { rows->check_unchanged(); }), folder / "1"));
    CHECK((read(*rows, {49, 50, 59, 100}) == rows_of(content, {49, 50, 59, 100})));
    CHECK(contains(message_of<pinflow::data_changed>([&] { read(*rows, {0, 60, 100}); }), folder / "1"));
}

TEST_CASE("extent_rows: a file truncated before mapping is detected") {
    const temporary_folder folder;
    const auto [sources, content] = make_dataset(folder, {50, 50, 50});
    fs::resize_file(folder / "2", 20);
    CHECK(contains(message_of<pinflow::data_changed>([&] { concatenate(sources); }), folder / "2"));
    // changes of unmapped files are detected when they are read
    const pinflow::detail::scoped_mapping_limit limit(2);
    const rows_pointer rows = concatenate(sources);
    CHECK((read(*rows, {99}) == rows_of(content, {99})));
    CHECK_THROWS_AS(read(*rows, {149}), pinflow::data_changed);
}

TEST_CASE("extent_rows: a row past the end, or another size, is refused") {
    const temporary_folder folder;
    const auto [sources, content] = make_dataset(folder, {1, 1});
    const rows_pointer rows = concatenate(sources);
    const std::string sentence = message_of<pinflow::invalid_argument>([&] { read(*rows, {0, 2}); });
    for (const std::string& fact :
         {std::string("row 2 "), (folder / "0").string(), (folder / "1").string(), std::string("has 2 rows")})
        CHECK(contains(sentence, fact));
    std::vector<std::byte> destination(13);
    CHECK_THROWS_AS(rows->read_rows(row_ids{0}, destination), pinflow::invalid_argument);
}

// ---- many files -------------------------------------------------------------------------------------------

TEST_CASE("extent_rows: threads read more files than may be open or mapped") {
    const temporary_folder folder;
    const pinflow::detail::scoped_descriptor_limit descriptors(20);
    const pinflow::detail::scoped_mapping_limit mappings(50);
    const std::size_t before = open_descriptors();
    const auto [sources, content] = make_dataset(folder, std::vector<std::uint64_t>(150, 6));
    const rows_pointer rows = concatenate(sources);
    CHECK(count_mapped(*rows) == 50);
    std::vector<std::thread> threads;
    std::vector<int> wrong(8);
    threads.reserve(wrong.size());
    for (std::size_t thread = 0; thread < wrong.size(); ++thread) {
        threads.emplace_back([&, thread] {
            random_engine random(thread);
            for (int round = 0; round < 50; ++round) {
                row_ids ids(64);
                for (std::uint64_t& id : ids)
                    id = random() % rows->row_count();
                if (read(*rows, ids) != rows_of(content, ids)) ++wrong[thread];
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK((wrong == std::vector<int>(wrong.size())));
    rows->check_unchanged();
    CHECK(open_descriptors() <= before + 20);
}
