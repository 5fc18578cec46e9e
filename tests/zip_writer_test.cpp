#include "formats/zip_writer.hpp"

#include <doctest/doctest.h>

#include <cerrno>
#include <filesystem>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

namespace {

namespace sys = pinflow::detail::system;
using npy_bytes::as_bytes;
using npy_bytes::read_file;
using pinflow::detail::read_zip_directory;
using pinflow::detail::zip64_thresholds;
using pinflow::detail::zip_data_offset_bytes;
using pinflow::detail::zip_entry;
using pinflow::detail::zip_writer;
using zip_bytes::reader;

struct member {
    std::string name;
    std::string content;
    std::uint64_t aligned_byte;
    std::uint64_t alignment_bytes;
};

const std::vector<member> members = {{"a.npy", std::string(5, 'a'), 0, 4096},
                                     {"folder/b.npy", "", 0, 16},
                                     {"caf\xC3\xA9.npy", std::string(3'000'000, 'c'), 128, 4096},
                                     {"d", std::string(70, 'd'), 64, 64},
                                     {std::string(60'000, 'e'), "e", 0, 32768},
                                     {"f", "f", 0, 1}};

std::string write(const std::filesystem::path& path, zip64_thresholds thresholds = {}) {
    zip_writer writer(path, thresholds);
    for (const member& member : members) {
        writer.begin(member.name, member.content.size(), member.aligned_byte, member.alignment_bytes);
        writer.write(as_bytes(member.content).first(member.content.size() / 3));
        writer.write(as_bytes(member.content).subspan(member.content.size() / 3));
        writer.end();
    }
    writer.finish();
    return read_file(path);
}

std::uint64_t number_at(const std::string& bytes, std::size_t offset, unsigned size) {
    std::uint64_t value = 0;
    while (size-- > 0)
        value = value << 8 | static_cast<unsigned char>(bytes.at(offset + size));
    return value;
}

}  // namespace

TEST_CASE("zip writer: what it writes is read back, each member at its alignment") {
    const temporary_folder folder;
    // the thresholds of zip64, and such low ones that this archive needs it
    for (const zip64_thresholds thresholds : {zip64_thresholds{},
                                              {6, 0xFFFF},
                                              {0, 0xFFFF},
                                              {0xFFFFFFFF, 6},
                                              {0xFFFFFFFF, 7},
                                              {100'000, 3},
                                              {0, 0}}) {
        CAPTURE(thresholds.bytes);
        CAPTURE(thresholds.entries);
        const std::string bytes = write(folder / "a.zip", thresholds);
        const auto entries = read_zip_directory(bytes.size(), reader(bytes));
        REQUIRE(entries.size() == members.size());
        for (std::size_t index = 0; index < entries.size(); ++index) {
            const zip_entry& entry = entries[index];
            const member& member = members[index];
            CAPTURE(index);
            CHECK((entry.name == member.name));
            CHECK(entry.method == 0);
            CHECK(entry.crc32 == zip_bytes::crc32(member.content));
            const std::uint64_t data = zip_data_offset_bytes(entry, reader(bytes));
            CHECK((data + member.aligned_byte) % member.alignment_bytes == 0);
            CHECK((bytes.substr(data, entry.size_bytes) == member.content));
            CHECK(number_at(bytes, entry.header_offset_bytes + 14, 4) == entry.crc32);
            const bool wide = member.content.size() >= thresholds.bytes;
            CHECK(number_at(bytes, entry.header_offset_bytes + 18, 4) ==
                  (wide ? 0xFFFFFFFF : member.content.size()));
            CHECK(entry.flags == (index == 2 ? 1 << 11 : 0));
        }
        const bool wide_end = thresholds.bytes < 0xFFFFFFFF || thresholds.entries <= members.size();
        CHECK((number_at(bytes, bytes.size() - 42, 4) == 0x07064b50) == wide_end);
    }
}

TEST_CASE("zip writer: equal members make equal files") {
    const temporary_folder folder;
    CHECK((write(folder / "a.zip") == write(folder / "b.zip")));
}

TEST_CASE("zip writer: an empty archive is valid") {
    const temporary_folder folder;
    zip_writer(folder / "a.zip").finish();
    const std::string bytes = read_file(folder / "a.zip");
    CHECK(bytes.size() == 22);
    CHECK(read_zip_directory(bytes.size(), reader(bytes)).empty());
}

TEST_CASE("zip writer: refuses names that no archive should have") {
    const temporary_folder folder;
    zip_writer writer(folder / "a.zip");
    writer.begin("a", 0, 0, 1);
    writer.end();
    struct {
        std::string name;
        const char* sentence;
    } const cases[] = {{"", "the name is empty"},
                       {"/a", "the name is absolute"},
                       {"../a", "the name is relative to a parent folder ('..')"},
                       {"caf\xE9", "the name is not UTF-8"},
                       {std::string("a\0", 2), "it has a zero byte"},
                       {std::string(65536, 'a'), "the name has 65536 bytes"},
                       {"a", "there is one of that name already"}};
    for (const auto& c : cases) {
        CHECK_THROWS_WITH_AS(writer.begin(c.name, 0, 0, 1), doctest::Contains(c.sentence),
                             pinflow::invalid_argument);
    }
    writer.finish();
    const std::string bytes = read_file(folder / "a.zip");
    CHECK(read_zip_directory(bytes.size(), reader(bytes)).size() == 1);
}

TEST_CASE("zip writer: a failure in any step leaves what was there, and no temporary file") {
    const temporary_folder folder;
    const std::string path = folder / "a.zip";
    for (const sys::call failing :
         {sys::call::open_unnamed, sys::call::write, sys::call::fsync, sys::call::rename}) {
        npy_bytes::write_file(path, "before");
        const sys::scoped_failure_hook hook([&](sys::call what, std::string_view) {
            return sys::injected_failure{what == failing ? EIO : 0};
        });
        CHECK_THROWS_AS(write(path), pinflow::system_failure);
        CHECK(read_file(path) == "before");
        CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
    }
}
