#include "src/core/side_by_side_mapping.hpp"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/descriptor_cache.hpp"
#include "src/core/system.hpp"
#include "tests/mapped_files.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::input_file;
using pinflow::detail::file_part;
using pinflow::detail::scoped_mapping_limit;
using pinflow::detail::side_by_side_mapping;
namespace fs = std::filesystem;
namespace seam = pinflow::detail::system;

namespace {

const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));

/// What file number `index` holds, of any size.
std::vector<std::byte> content_of(std::size_t index, std::uint64_t size_bytes) {
    auto content = pattern_bytes(static_cast<std::size_t>(size_bytes) + index % 251);
    content.erase(content.begin(), content.begin() + static_cast<std::ptrdiff_t>(index % 251));
    return content;
}

/// A part of a new file, which is `file_bytes` long.
file_part make_part(const temporary_folder& folder, std::size_t index, std::uint64_t file_bytes,
                    std::uint64_t begin_bytes, std::uint64_t end_bytes) {
    const fs::path path = folder / std::to_string(index);
    write_bytes(path, content_of(index, file_bytes));
    return {std::make_shared<const input_file>(path), begin_bytes, end_bytes};
}

/// Whole files of `file_bytes` each.
std::vector<file_part> make_parts(const temporary_folder& folder, std::size_t count,
                                  std::uint64_t file_bytes) {
    std::vector<file_part> parts;
    for (std::size_t index = 0; index < count; ++index)
        parts.push_back(make_part(folder, index, file_bytes, 0, file_bytes));
    return parts;
}

bool holds(const std::byte* data, std::size_t index, const file_part& part) {
    const auto content = content_of(index, part.end_bytes);
    return data != nullptr && std::memcmp(data, content.data() + part.begin_bytes,
                                          static_cast<std::size_t>(part.end_bytes - part.begin_bytes)) == 0;
}

/// How many parts are mapped; checks that these are the first ones, and hold what they should.
std::size_t count_mapped(const side_by_side_mapping& mapping, std::span<const file_part> parts) {
    std::size_t count = 0;
    while (count < parts.size() && mapping.data(count) != nullptr) {
        CHECK(holds(mapping.data(count), count, parts[count]));
        ++count;
    }
    for (std::size_t index = count; index < parts.size(); ++index)
        CHECK(mapping.data(index) == nullptr);
    return count;
}

}  // namespace

TEST_CASE("side_by_side_mapping: parts of all sizes follow each other without a gap") {
    const temporary_folder folder;
    const std::vector<file_part> parts{
        make_part(folder, 0, 3 * page, 0, 3 * page),
        make_part(folder, 1, 10, 3, 9),
        make_part(folder, 2, page, 0, page),
        make_part(folder, 3, 5 * page + 7, 2 * page + 1, 5 * page + 7),
        make_part(folder, 4, 3 * page, page - 1, page + 1),
        make_part(folder, 5, 1, 0, 1),
    };
    const std::vector<std::uint64_t> pages{3, 1, 1, 4, 2, 1};
    {
        const side_by_side_mapping mapping(parts);
        CHECK(count_mapped(mapping, parts) == parts.size());
        const auto mappings = mappings_of(folder.path().string());
        REQUIRE(mappings.size() == parts.size());
        for (std::size_t index = 0; index < parts.size(); ++index) {
            CAPTURE(index);
            CHECK(mappings[index].path == parts[index].file->path());
            CHECK(mappings[index].end - mappings[index].begin == pages[index] * page);
            if (index > 0) CHECK(mappings[index].begin == mappings[index - 1].end);
            const auto range =
                pages_of(mapping.data(index), parts[index].end_bytes - parts[index].begin_bytes);
            CHECK(range.begin == mappings[index].begin);
            CHECK(range.end == mappings[index].end);
        }
    }
    CHECK(mappings_of(folder.path().string()).empty());
}

TEST_CASE("side_by_side_mapping: equal parts are mapped at a constant distance") {
    const temporary_folder folder;
    std::vector<file_part> parts;
    for (std::size_t index = 0; index < 20; ++index)
        parts.push_back(make_part(folder, index, 2 * page + 128, 128, 2 * page + 128));
    const side_by_side_mapping mapping(parts);
    for (std::size_t index = 0; index < parts.size(); ++index) {
        CHECK(mapping.data(index) == mapping.data(0) + index * 3 * page);
    }
}

TEST_CASE("side_by_side_mapping: without parts nothing is mapped") {
    int calls = 0;
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
        if (what == seam::call::mmap) ++calls;
        return seam::injected_failure{};
    });
    const side_by_side_mapping of_nothing;
    const side_by_side_mapping of_no_parts(std::vector<file_part>{});
    CHECK(calls == 0);
    const temporary_folder folder;
    const side_by_side_mapping of_one(make_parts(folder, 1, page));
    CHECK(calls > 0);
}

TEST_CASE("side_by_side_mapping: a moved mapping keeps its pages, and what it replaces is unmapped") {
    const temporary_folder folder;
    const auto parts = make_parts(folder, 4, page);
    const std::span all(parts);
    side_by_side_mapping first(all.first(3));
    const std::byte* const data = first.data(2);
    side_by_side_mapping second(all.last(1));
    CHECK(mappings_of(folder.path().string()).size() == 4);
    second = std::move(first);
    CHECK(mappings_of(folder.path().string()).size() == 3);
    CHECK(second.data(2) == data);
    CHECK(holds(data, 2, parts[2]));
    second = side_by_side_mapping();
    CHECK(mappings_of(folder.path().string()).empty());
}

TEST_CASE("side_by_side_mapping: keeps its pages when files lose their names and are closed") {
    const temporary_folder folder;
    const std::size_t descriptors = open_descriptors();
    auto parts = make_parts(folder, 5, page + 100);
    const side_by_side_mapping mapping(parts);
    for (file_part& part : parts) {
        fs::remove(part.file->path());
        part.file.reset();
    }
    CHECK(open_descriptors() == descriptors);
    for (std::size_t index = 0; index < parts.size(); ++index)
        CHECK(holds(mapping.data(index), index, parts[index]));
}

TEST_CASE("side_by_side_mapping: maps more files than descriptors may be open") {
    const temporary_folder folder;
    const pinflow::detail::scoped_descriptor_limit limit(16);
    const std::size_t before = open_descriptors();
    const auto parts = make_parts(folder, 100, 200);
    const side_by_side_mapping mapping(parts);
    CHECK(count_mapped(mapping, parts) == parts.size());
    CHECK(open_descriptors() == before + 16);
}

// ---- the limit --------------------------------------------------------------------------------------------

TEST_CASE("side_by_side_mapping: the limit is half of what the system allows a process") {
    std::ifstream file("/proc/sys/vm/max_map_count");
    std::uint64_t count = 0;
    if (file >> count) CHECK(pinflow::detail::max_side_by_side_mappings() == count / 2);
    const scoped_mapping_limit limit(5);
    CHECK(pinflow::detail::max_side_by_side_mappings() == 5);
}

TEST_CASE("side_by_side_mapping: all mappings of the process share the limit, and give back what they took") {
    const temporary_folder folder;
    const auto parts = make_parts(folder, 8, page + 1);
    const std::span all(parts);
    const scoped_mapping_limit limit(10);
    for (int round = 0; round < 3; ++round) {
        const side_by_side_mapping first(all.first(6));
        CHECK(count_mapped(first, all.first(6)) == 6);
        {
            const side_by_side_mapping second(all);
            CHECK(count_mapped(second, all) == 4);
            CHECK(mappings_of(folder.path().string()).size() == 10);
            const side_by_side_mapping third(all);
            CHECK(count_mapped(third, all) == 0);
        }
        const side_by_side_mapping fourth(all.first(3));
        CHECK(count_mapped(fourth, all.first(3)) == 3);
    }
    CHECK(mappings_of(folder.path().string()).empty());
    const scoped_mapping_limit lower(0);
    CHECK(count_mapped(side_by_side_mapping(all), all) == 0);
}

// ---- failures ---------------------------------------------------------------------------------------------

TEST_CASE("side_by_side_mapping: files are mapped up to the first one that cannot be mapped") {
    const temporary_folder folder;
    const auto parts = make_parts(folder, 8, 2 * page);
    const scoped_mapping_limit limit(8);
    for (std::size_t failing = 0; failing < parts.size(); ++failing) {
        CAPTURE(failing);
        {
            std::unique_ptr<const side_by_side_mapping> mapping;
            {
                const seam::scoped_failure_hook hook([&](seam::call what, std::string_view path) {
                    return what == seam::call::mmap && path == parts[failing].file->path()
                               ? seam::injected_failure{.error = ENOMEM}
                               : seam::injected_failure{};
                });
                mapping = std::make_unique<const side_by_side_mapping>(parts);
            }
            CHECK(count_mapped(*mapping, parts) == failing);
            CHECK(mappings_of(folder.path().string()).size() == failing);
            // what was not used of the limit is there for others
            const side_by_side_mapping others(parts);
            CHECK(count_mapped(others, parts) == parts.size() - failing);
        }
        CHECK(mappings_of(folder.path().string()).empty());
    }
}

TEST_CASE("side_by_side_mapping: without addresses to reserve, nothing is mapped") {
    const temporary_folder folder;
    const auto parts = make_parts(folder, 3, page);
    const scoped_mapping_limit limit(3);
    std::unique_ptr<const side_by_side_mapping> mapping;
    {
        const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
            return what == seam::call::mmap ? seam::injected_failure{.error = ENOMEM}
                                            : seam::injected_failure{};
        });
        mapping = std::make_unique<const side_by_side_mapping>(parts);
    }
    CHECK(count_mapped(*mapping, parts) == 0);
    CHECK(count_mapped(side_by_side_mapping(parts), parts) == 3);
}

TEST_CASE("side_by_side_mapping: a part that its file never held is refused") {
    const temporary_folder folder;
    const std::vector<file_part> parts{make_part(folder, 0, page, 0, page),
                                       make_part(folder, 1, 100, 60, 101)};
    CHECK(contains_all(message_of<pinflow::format_error>([&] { side_by_side_mapping{parts}; }),
                       {"cannot map 41 bytes", "at offset 60 ", "'" + parts[1].file->path() + "'",
                        "the file has 100 bytes"}));
    const std::vector<file_part> endless{
        {parts[0].file, 0, ~std::uint64_t{0}},
    };
    CHECK_THROWS_AS(side_by_side_mapping{endless}, pinflow::format_error);
    CHECK(mappings_of(folder.path().string()).empty());
}

TEST_CASE(
    "side_by_side_mapping: a file that became shorter than its part is noticed, and nothing stays mapped") {
    const temporary_folder folder;
    const auto parts = make_parts(folder, 5, 100);
    fs::resize_file(parts[2].file->path(), 99);
    CHECK(contains_all(message_of<pinflow::data_changed>([&] { side_by_side_mapping{parts}; }),
                       {"cannot map 100 bytes", "at offset 0 ", "'" + parts[2].file->path() + "'",
                        "has 99 bytes now", "it had 100 "}));
    CHECK(mappings_of(folder.path().string()).empty());
}

TEST_CASE("side_by_side_mapping: a file that was closed meanwhile and is gone is a system failure") {
    const temporary_folder folder;
    const pinflow::detail::scoped_descriptor_limit limit(16);
    const auto parts = make_parts(folder, 40, 100);
    fs::remove(parts[1].file->path());
    CHECK(contains(message_of<pinflow::system_failure>([&] { side_by_side_mapping{parts}; }),
                   parts[1].file->path()));
    CHECK(mappings_of(folder.path().string()).empty());
}
