#include "pinflow/mapped_file.hpp"

#include <doctest/doctest.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::input_file;
using pinflow::mapped_file;
namespace seam = pinflow::detail::system;

namespace {

constexpr std::size_t content_size = 20'001;  // ends within a page

std::shared_ptr<const input_file> make_file(const temporary_folder& folder) {
    write_bytes(folder / "data", pattern_bytes(content_size));
    return std::make_shared<const input_file>(folder / "data");
}

/// How many mappings of files below `folder` this process has.
int mappings_below(const temporary_folder& folder) {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);)
        count += contains(line, folder.path().string()) ? 1 : 0;
    return count;
}

}  // namespace

TEST_CASE("mapped_file: maps any part, at any offset, byte for byte") {
    const temporary_folder folder;
    const auto file = make_file(folder);
    const auto content = pattern_bytes(content_size);
    for (const std::size_t offset : {0u, 1u, 7u, 4'095u, 4'096u, 4'097u, 12'289u, 20'000u}) {
        for (const std::size_t size : {std::size_t{1}, std::size_t{4'096}, content_size - offset}) {
            if (offset + size > content_size) continue;
            CAPTURE(offset);
            CAPTURE(size);
            const mapped_file mapping(file, offset, size);
            CHECK(mapping.file() == file);
            CHECK(mapping.offset_bytes() == offset);
            REQUIRE(mapping.size_bytes() == size);
            CHECK(mapping.bytes().data() == mapping.data());
            CHECK(std::memcmp(mapping.data(), content.data() + offset, size) == 0);
        }
    }
}

TEST_CASE("mapped_file: a size of zero maps nothing, also at the end of the file") {
    const temporary_folder folder;
    const auto file = make_file(folder);
    for (const std::size_t offset : {std::size_t{0}, std::size_t{5}, content_size}) {
        const mapped_file mapping(file, offset, 0);
        CHECK(mapping.data() == nullptr);
        CHECK(mapping.size_bytes() == 0);
        CHECK(mapping.bytes().empty());
        mapping.advise(pinflow::access_advice::will_need);
    }
    CHECK(mappings_below(folder) == 0);
}

TEST_CASE("mapped_file: an empty file can be mapped as nothing") {
    const temporary_folder folder;
    write_bytes(folder / "empty", {});
    const mapped_file mapping(std::make_shared<const input_file>(folder / "empty"), 0, 0);
    CHECK(mapping.size_bytes() == 0);
}

TEST_CASE("mapped_file: refuses ranges that pass the end of the file, with path, offset and sizes") {
    const temporary_folder folder;
    const auto file = make_file(folder);
    constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();
    struct range {
        std::uint64_t offset_bytes;
        std::uint64_t size_bytes;
    };
    for (const auto& [offset, size] :
         {range{0, content_size + 1}, range{content_size, 1}, range{content_size + 1, 0},
          range{4'096, content_size}, range{largest, 1}, range{1, largest}, range{largest, largest},
          range{largest - 3, 8}}) {
        CAPTURE(offset);
        CAPTURE(size);
        CHECK(contains_all(
            message_of<pinflow::format_error>([&] { mapped_file(file, offset, size); }),
            {"cannot map " + std::to_string(size) + " bytes", "at offset " + std::to_string(offset) + " ",
             "'" + file->path() + "'", "the file has 20001 bytes"}));
    }
}

TEST_CASE(
    "mapped_file: keeps its bytes after the file is deleted and the caller has dropped its input_file") {
    const temporary_folder folder;
    const std::size_t descriptors = open_descriptors();
    {
        const mapped_file mapping(make_file(folder), 3, 15'000);
        std::filesystem::remove(folder / "data");
        CHECK(std::memcmp(mapping.data(), pattern_bytes(content_size).data() + 3, 15'000) == 0);
        CHECK(mappings_below(folder) == 1);
    }
    CHECK(mappings_below(folder) == 0);
    CHECK(open_descriptors() == descriptors);
}

TEST_CASE("mapped_file: is the page cache itself, and shows what is written to the file") {
    const temporary_folder folder;
    const mapped_file mapping(make_file(folder), 5'000, 10);
    {
        std::fstream file(folder / "data", std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(5'000);
        file.write("pinflow", 7);
    }
    CHECK(std::memcmp(mapping.data(), "pinflow", 7) == 0);
}

TEST_CASE("mapped_file: a failed mapping is reported with a message and the system's code") {
    const temporary_folder folder;
    const auto file = make_file(folder);
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view path) {
        CHECK(what == seam::call::mmap);
        CHECK(path == file->path());
        return seam::injected_failure{.error = ENOMEM};
    });
    std::string sentence;
    std::error_code code;
    try {
        mapped_file(file, 8, 16);
    } catch (const pinflow::system_failure& failure) {
        sentence = failure.what();
        code = failure.code();
    }
    CHECK(code == std::errc::not_enough_memory);
    CHECK(contains(sentence,
                   "cannot map 16 bytes at offset 8 of '" + file->path() + "': Cannot allocate memory"));
}

TEST_CASE("mapped_file: an error of the mapping call reaches the caller as a system failure") {
    const temporary_folder folder;
    // larger than the address space that mmap uses, and sparse
    std::ofstream(folder / "data").flush();
    std::error_code too_large_for_filesystem;
    std::uintmax_t size = std::uintmax_t{1} << 50;
    std::filesystem::path path = folder / "data";
    std::filesystem::resize_file(path, size, too_large_for_filesystem);
    if (too_large_for_filesystem) {
        path = "/dev/shm/pinflow-mapped-file-test-" + folder.path().filename().string();
        std::ofstream(path).flush();
        std::filesystem::resize_file(path, size, too_large_for_filesystem);
    }
    if (too_large_for_filesystem) {
        MESSAGE("skipped: no filesystem here takes a sparse file of 1 PiB");
        return;
    }
    const auto file = std::make_shared<const input_file>(path);
    std::filesystem::remove(path);
    CHECK(contains(
        message_of<pinflow::system_failure>([&] { mapped_file(file, 0, size); }),
        "cannot map 1125899906842624 bytes at offset 0 of '" + path.string() + "': Cannot allocate memory"));
}

TEST_CASE("mapped_file: advice is a hint that never fails and changes no byte") {
    using pinflow::access_advice;
    const temporary_folder folder;
    const mapped_file mapping(make_file(folder), 4'097, 10'000);
    int advised = 0;
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
        CHECK(what == seam::call::madvise);
        return seam::injected_failure{.error = advised++ % 2 == 0 ? 0 : EAGAIN};
    });
    for (const auto advice : {access_advice::normal, access_advice::sequential, access_advice::random,
                              access_advice::will_need, access_advice::normal}) {
        mapping.advise(advice);
        mapping.advise(advice);
        CHECK(std::memcmp(mapping.data(), pattern_bytes(content_size).data() + 4'097, 10'000) == 0);
    }
    CHECK(advised == 10);
}
