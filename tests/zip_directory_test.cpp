#include "formats/zip_directory.hpp"

#include <doctest/doctest.h>

#include <limits>

#include "pinflow/error.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/zip_bytes.hpp"

namespace {

using pinflow::detail::read_zip_directory;
using pinflow::detail::zip_data_offset_bytes;
using pinflow::detail::zip_entry;
using zip_bytes::archive;
using zip_bytes::number;
using zip_bytes::put;
using zip_bytes::reader;

std::vector<zip_entry> read(std::string_view bytes) {
    return read_zip_directory(bytes.size(), reader(bytes));
}

/// The format_error of reading the directory and each member's header; "read" if there is none. Other
/// exceptions propagate.
std::string refusal(std::string_view bytes) {
    try {
        for (const zip_entry& entry : read(bytes))
            zip_data_offset_bytes(entry, reader(bytes));
        return "read";
    } catch (const pinflow::format_error& failure) {
        return failure.what();
    }
}

archive two_members() {
    return zip_bytes::make(
        {{.name = "one", .content = "first"}, {.name = "two", .content = "second", .deflated = true}});
}

}  // namespace

// ---- what is read -----------------------------------------------------------------------------------------

TEST_CASE("zip directory: lists members as they are") {
    const archive made = two_members();
    const auto entries = read(made.bytes);
    REQUIRE(entries.size() == 2);
    CHECK(entries[0].name == "one");
    CHECK_FALSE(entries[0].deflated());
    CHECK(entries[0].size_bytes == 5);
    CHECK(entries[0].compressed_bytes == 5);
    CHECK(entries[0].crc32 == zip_bytes::crc32("first"));
    CHECK(entries[0].header_offset_bytes == made.locals[0]);
    CHECK(entries[0].end_bytes == made.locals[1]);
    CHECK(zip_data_offset_bytes(entries[0], reader(made.bytes)) == made.datas[0]);
    CHECK(entries[1].deflated());
    CHECK(entries[1].size_bytes == 6);
    CHECK(entries[1].compressed_bytes == 11);
    CHECK(entries[1].end_bytes == made.directory);
    CHECK(zip_data_offset_bytes(entries[1], reader(made.bytes)) == made.datas[1]);
}

TEST_CASE("zip directory: an empty archive lists no members") {
    CHECK(read(zip_bytes::make({}).bytes).empty());
    CHECK(read(zip_bytes::make({}, "nothing in it").bytes).empty());
}

TEST_CASE("zip directory: a comment may be as long as its length can say, and look like an end") {
    for (const std::string& comment :
         {std::string(65535, 'x'), std::string("PK\5\6"), std::string(30, '\0'),
          "PK\5\6" + std::string(100, '\xFF'), std::string("PK\6\7 PK\5\6 PK\1\2")}) {
        CHECK(read(zip_bytes::make({{.name = "a", .content = "b"}}, comment).bytes).size() == 1);
        CHECK(read(zip_bytes::make({{.name = "a", .content = "b"}}, comment, true).bytes).size() == 1);
    }
    // a whole archive in the comment: every reader finds its end record first
    const archive inner = zip_bytes::make({});
    const std::string outer = zip_bytes::make({{.name = "a", .content = "b"}}, inner.bytes).bytes;
    CHECK(contains(refusal(outer), "were put before"));
}

TEST_CASE("zip directory: members are stored in any order, with gaps, and have extra fields and comments") {
    archive made =
        zip_bytes::make({{.name = "one",
                          .content = "first",
                          .local_extra = number(0xD935, 2) + number(100, 2) + std::string(100, '\0'),
                          .extra = number(0x5455, 2) + number(5, 2) + "12345" + "abc",
                          .comment = "a comment"},
                         {.name = "gap", .content = std::string(1000, 'x')},
                         {.name = "two", .content = "second"}});
    put(made.bytes, made.entries[0] + 42, made.locals[2], 4);
    put(made.bytes, made.entries[2] + 42, made.locals[0], 4);
    std::swap(made.bytes[made.entries[0] + 46], made.bytes[made.entries[2] + 46]);
    made.bytes.replace(made.entries[0] + 46, 3, "two");
    made.bytes.replace(made.entries[2] + 46, 3, "one");
    put(made.bytes, made.entries[0] + 20, 6, 4);
    put(made.bytes, made.entries[2] + 20, 5, 4);
    const auto entries = read(made.bytes);
    REQUIRE(entries.size() == 3);
    CHECK(zip_data_offset_bytes(entries[0], reader(made.bytes)) == made.datas[2]);
    CHECK(zip_data_offset_bytes(entries[2], reader(made.bytes)) == made.datas[0]);
    CHECK(entries[2].end_bytes == made.locals[1]);
}

TEST_CASE("zip directory: wide values come from the zip64 field, in the format's order") {
    const std::uint64_t size = 5;
    archive made =
        zip_bytes::make({{.name = "before", .content = "x"},
                         {.name = "one",
                          .content = "first",
                          .extra = number(0x5455, 2) + number(1, 2) + "t" + number(1, 2) + number(28, 2) +
                                   number(size, 8) + number(size, 8) + std::string(8, '?') + number(0, 4)}},
                        {}, true);
    const std::size_t entry = made.entries[1];
    put(made.bytes, entry + 46 + 3 + 5 + 4 + 16, made.locals[1], 8);
    put(made.bytes, entry + 20, 0xFFFFFFFF, 4);
    put(made.bytes, entry + 24, 0xFFFFFFFF, 4);
    put(made.bytes, entry + 34, 0xFFFF, 2);
    put(made.bytes, entry + 42, 0xFFFFFFFF, 4);
    put(made.bytes, made.end + 8, 0xFFFF, 2);
    put(made.bytes, made.end + 10, 0xFFFF, 2);
    put(made.bytes, made.end + 12, 0xFFFFFFFF, 4);
    put(made.bytes, made.end + 16, 0xFFFFFFFF, 4);
    const auto entries = read(made.bytes);
    REQUIRE(entries.size() == 2);
    CHECK(entries[1].size_bytes == size);
    CHECK(entries[1].compressed_bytes == size);
    CHECK(entries[1].header_offset_bytes == made.locals[1]);
    CHECK(zip_data_offset_bytes(entries[1], reader(made.bytes)) == made.datas[1]);

    // a writer that does not know the sizes in advance leaves them out of the member's own header
    put(made.bytes, made.locals[1] + 14, 0, 4);
    put(made.bytes, made.locals[1] + 18, 0xFFFFFFFF, 4);
    put(made.bytes, made.locals[1] + 22, 0, 4);
    CHECK(refusal(made.bytes) == "read");
}

TEST_CASE("zip directory: names are UTF-8 or of code page 437, as a flag says") {
    const auto name_of = [](const std::string& bytes, bool utf8) {
        return read(
                   zip_bytes::make({{.name = bytes, .flags = static_cast<std::uint16_t>(utf8 ? 1 << 11 : 0)}})
                       .bytes)[0]
            .name;
    };
    CHECK(name_of("caf\xC3\xA9", true) == "caf\xC3\xA9");
    CHECK(name_of("caf\x82", false) == "caf\xC3\xA9");
    CHECK(name_of("\xE0\xFF", false) == "\xCE\xB1\xC2\xA0");
    CHECK(contains_all(message_of<pinflow::format_error>([&] { name_of("caf\xE9", true); }),
                       {"the name of entry 0 ", "is not the UTF-8"}));
}

TEST_CASE("zip directory: is read in pieces, whatever its size") {
    std::vector<zip_bytes::member> members;
    for (unsigned index = 0; index < 70'000; ++index) {
        members.push_back(
            {.name = std::to_string(index), .content = "x", .comment = std::string(index % 64 * 8, 'c')});
    }
    members[60'000].comment = std::string(65535, 'c');
    members[60'001].extra = number(0x5455, 2) + number(65531, 2) + std::string(65531, 'e');
    archive made = zip_bytes::make(members, {}, true);
    put(made.bytes, made.end + 8, 0xFFFF, 2);
    put(made.bytes, made.end + 10, 0xFFFF, 2);
    const auto entries = read(made.bytes);
    REQUIRE(entries.size() == members.size());
    bool equal = true;
    for (std::size_t index = 0; index < entries.size(); ++index)
        equal = equal && entries[index].name == members[index].name &&
                entries[index].header_offset_bytes == made.locals[index];
    CHECK(equal);
}

// ---- what is refused --------------------------------------------------------------------------------------

TEST_CASE("zip directory: refuses an archive truncated after any byte, and bytes after it") {
    const archive plain = two_members();
    const archive wide = zip_bytes::make({{.name = "one", .content = "first"}}, "comment", true);
    for (const archive* made : {&plain, &wide}) {
        for (std::size_t size = 0; size < made->bytes.size(); ++size) {
            CAPTURE(size);
            REQUIRE_THROWS_AS(read(std::string_view(made->bytes).substr(0, size)), pinflow::format_error);
        }
        CHECK(contains(refusal(made->bytes + "x"), "or bytes follow the archive"));
    }
}

TEST_CASE("zip directory: refuses bytes before the archive") {
    const std::string made = two_members().bytes;
    CHECK(contains(refusal("#!/bin/sh\n" + made), "does not begin as"));
    CHECK(contains(refusal("PK\3\4" + made), "were put before"));
    const std::string wide = zip_bytes::make({{.name = "a", .content = "b"}}, {}, true).bytes;
    CHECK(contains(refusal("PK\3\4" + wide), "were put before"));
    CHECK(contains_all(refusal(""), {"zip archive", "at least 22 bytes", "it has 0"}));
    CHECK(contains(refusal(std::string(100, '\0')), "does not begin as"));
    CHECK(contains(refusal("PK\3\4" + std::string(100, '\0')), "is truncated"));
}

TEST_CASE("zip directory: refuses bytes that cannot be an archive") {
    // part of an archive, offset in it, value, size of the field, and what the error says ("read": accepted)
    enum class part : std::uint8_t { local, entry, end64, locator, end };
    struct {
        part where;
        std::size_t offset;
        std::uint64_t value;
        unsigned size;
        const char* sentence;
    } const cases[] = {
        {part::local, 0, 0, 4, "does not begin as a zip"},
        {part::local, 6, 1, 2, "has a different encryption flag in its header at byte 0"},
        {part::local, 8, 8, 2, "has a different compression method"},
        {part::local, 26, 2, 2, "has a different name"},
        {part::local, 26, 0, 2, "has a different name"},
        {part::local, 26, 0xFFFF, 2, "where the next record begins"},
        {part::local, 28, 1, 2, "where the next record begins"},
        {part::local, 30, 'O', 1, "has a different name"},
        {part::local, 6, 1 << 11, 2, "read"},
        {part::local, 14, 0, 4, "read"},
        {part::local, 18, 0xFFFFFFFF, 4, "read"},
        {part::local, 22, 0, 4, "read"},
        {part::entry, 0, 0, 4, "entry 0 of its directory does not look like one"},
        {part::entry, 10, 8, 2, "has a different compression method"},
        {part::entry, 8, 1, 2, "has a different encryption flag"},
        {part::entry, 20, 6, 4, "the member 'one' of 6 bytes at offset 33 extends past byte 38"},
        {part::entry, 20, 9, 4, "the members 'one' and 'two' overlap"},
        {part::entry, 20, 1'000, 4, "the member 'one' of 1000 bytes at offset 0 extends past byte"},
        {part::entry, 20, 0xFFFFFFFE, 4, "extends past byte"},
        {part::entry, 20, 0xFFFFFFFF, 4, "refers to a zip64 field that it does not have"},
        {part::entry, 24, 0xFFFFFFFF, 4, "refers to a zip64 field that it does not have"},
        {part::entry, 28, 0, 2, "is empty"},
        {part::entry, 28, 4, 2, "entry 1 of its directory does not look like one"},
        {part::entry, 28, 0xFFFF, 2, "entry 0 of its directory ends past the directory"},
        {part::entry, 30, 0xFFFF, 2, "entry 0 of its directory ends past the directory"},
        {part::entry, 32, 0xFFFF, 2, "entry 0 of its directory ends past the directory"},
        {part::entry, 32, 1, 2, "entry 1 of its directory does not look like one"},
        {part::entry, 34, 1, 2, "the member 'one' is stored on another disk"},
        {part::entry, 34, 0xFFFF, 2, "refers to a zip64 field"},
        {part::entry, 42, 1, 4, "'one'"},
        {part::entry, 42, 38, 4, "overlap"},
        {part::entry, 42, 0xFFFFFFFE, 4, "extends past byte"},
        {part::entry, 42, 0xFFFFFFFF, 4, "refers to a zip64 field"},
        {part::entry, 46, '/', 1, "is absolute"},
        {part::entry, 46, 0, 1, "is not text: it has a zero byte"},
        {part::end, 0, 0, 4, "does not end with a zip directory"},
        {part::end, 4, 1, 2, "disagree about the disk: 1 and 0"},
        {part::end, 6, 1, 2, "disagree about the directory's disk"},
        {part::end, 8, 1, 2, "disagree about the members on this disk: 1 and 2"},
        {part::end, 10, 1, 2, "disagree about the number of members"},
        {part::end, 12, 1, 4, "disagree about the directory's size"},
        {part::end, 16, 1, 4, "disagree about the directory's offset"},
        {part::end, 20, 1, 2, "does not end with a zip directory"},
        {part::locator, 4, 1, 4, "spans several disks"},
        {part::locator, 8, 0, 8, "but its locator says 0: bytes were put before"},
        {part::locator, 8, std::numeric_limits<std::uint64_t>::max(), 8,
         "but its locator says 18446744073709551615: bytes were put before"},
        {part::locator, 16, 2, 4, "spans several disks"},
        {part::locator, 16, 0, 4, "read"},
        {part::locator, 0, 0, 4, "were put before the archive or into it"},
        {part::end64, 0, 0, 4, "does not follow a zip64 end record"},
        {part::end64, 4, 45, 8, "declares a size of 45 bytes, not 44"},
        {part::end64, 16, 1, 4, "disagree about the disk"},
        {part::end64, 20, 1, 4, "disagree about the directory's disk"},
        {part::end64, 24, 3, 8, "disagree about the members on this disk: 2 and 3"},
        {part::end64, 32, 3, 8, "disagree about the number of members"},
        {part::end64, 40, 1, 8, "disagree about the directory's size"},
        {part::end64, 48, 1, 8, "disagree about the directory's offset"},
    };
    for (const auto& c : cases) {
        archive made = zip_bytes::make(
            {{.name = "one", .content = "first"}, {.name = "two", .content = "second"}}, {}, true);
        const std::size_t begin = c.where == part::local     ? made.locals[0]
                                  : c.where == part::entry   ? made.entries[0]
                                  : c.where == part::end64   ? made.end64
                                  : c.where == part::locator ? made.end - 20
                                                             : made.end;
        put(made.bytes, begin + c.offset, c.value, c.size);
        CAPTURE(static_cast<int>(c.where));
        CAPTURE(c.offset);
        CAPTURE(c.value);
        CAPTURE(refusal(made.bytes));
        CHECK(contains(refusal(made.bytes), c.sentence));
    }
}

TEST_CASE("zip directory: refuses a false end record") {
    struct {
        std::size_t offset;
        std::uint64_t value;
        unsigned size;
        const char* sentence;
    } const cases[] = {
        {4, 1, 2, "spans several disks"},
        {6, 1, 2, "spans several disks"},
        {8, 1, 2, "spans several disks"},
        {8, 0x0001'0001, 4, "continues after the 1 members that its end record declares"},
        {8, 0, 4, "continues after the 0 members"},
        {8, 0x0003'0003, 4, "its directory of 98 bytes has no room for 3 members"},
        {8, 0xFFFF'FFFF, 4, "has no room for 65535 members"},
        {12, 97, 4, "were put before the archive or into it"},
        {12, 0, 4, "were put before the archive or into it"},
        {12, 99, 4, "does not fit before its end record"},
        {12, 0xFFFFFFFF, 4, "does not fit before its end record"},
        {16, 0, 4, "were put before"},
        {16, 0xFFFFFFFE, 4, "does not fit before its end record"},
        {16, 0xFFFFFFFF, 4, "does not fit before its end record"},
    };
    for (const auto& c : cases) {
        archive made = two_members();
        REQUIRE(made.end - made.directory == 98);
        put(made.bytes, made.end + c.offset, c.value, c.size);
        CAPTURE(c.offset);
        CAPTURE(c.value);
        CHECK(contains(refusal(made.bytes), c.sentence));
    }
    // the directory has one member, and the bytes for two
    archive made = zip_bytes::make({{.name = std::string(60, 'a'), .content = "b"}});
    put(made.bytes, made.end + 8, 0x0002'0002, 4);
    CHECK(contains_all(refusal(made.bytes), {"directory has 1 members", "end record declares 2"}));
    // one whose offset and size overflow when they are added
    made = zip_bytes::make({{.name = "a", .content = "b"}}, {}, true);
    put(made.bytes, made.end + 12, 0xFFFFFFFF, 4);
    put(made.bytes, made.end + 16, 0xFFFFFFFF, 4);
    put(made.bytes, made.end64 + 40, std::numeric_limits<std::uint64_t>::max(), 8);
    CHECK(contains(refusal(made.bytes), "does not fit before its end record"));
    put(made.bytes, made.end64 + 48, std::numeric_limits<std::uint64_t>::max() - 5, 8);
    CHECK(contains(refusal(made.bytes), "does not fit before its end record"));
}

TEST_CASE("zip directory: refuses false zip64 fields") {
    const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
    struct {
        std::string extra;
        const char* sentence;
    } const cases[] = {
        {number(1, 2) + number(8, 2) + number(5, 8), "refers to a zip64 field that it does not have"},
        {number(1, 2) + number(16, 2) + number(5, 8), "has an extra field of 16 bytes, but only 8 are left"},
        {number(1, 2) + number(0, 2), "refers to a zip64 field that it does not have"},
        {number(2, 2) + number(16, 2) + number(5, 8) + number(5, 8), "refers to a zip64 field"},
        {number(1, 2) + number(16, 2) + number(5, 8) + number(most, 8), "extends past byte"},
        {number(1, 2) + number(16, 2) + number(5, 8) + number(most - 29, 8), "extends past byte"},
        {number(1, 2) + number(16, 2) + number(5, 8) + number(5, 8) + number(1, 2) + number(0, 2),
         "has two zip64 fields"},
    };
    for (const auto& c : cases) {
        archive made = zip_bytes::make({{.name = "one", .content = "first", .extra = c.extra}});
        put(made.bytes, made.entries[0] + 20, 0xFFFFFFFF, 4);
        put(made.bytes, made.entries[0] + 24, 0xFFFFFFFF, 4);
        CHECK(contains(refusal(made.bytes), c.sentence));
    }
    archive made = zip_bytes::make(
        {{.name = "one", .content = "first", .extra = number(1, 2) + number(8, 2) + number(most, 8)}});
    put(made.bytes, made.entries[0] + 42, 0xFFFFFFFF, 4);
    CHECK(contains(refusal(made.bytes), "extends past byte"));
}

TEST_CASE("zip directory: refuses names that lead out of a folder, and two of one name") {
    for (const char* const name :
         {"/a", "\\a", "..", "../a", "a/..", "a/../b", "..\\a", "a\\..\\b", "C:/a", "c:\\a"}) {
        CAPTURE(name);
        CHECK(contains(refusal(zip_bytes::make({{.name = name, .content = "x"}}).bytes),
                       name[0] == '/' || name[0] == '\\' || name[1] == ':'
                           ? "is absolute"
                           : "is relative to a parent folder ('..')"));
    }
    for (const char* const name :
         {"a", "a/b", "a\\b", "a..b", "..a", "a..", "...", "a:b", "C:", ".", "a//b", "a/"}) {
        CAPTURE(name);
        CHECK(refusal(zip_bytes::make({{.name = name, .content = "x"}}).bytes) == "read");
    }
    CHECK(contains_all(refusal(zip_bytes::make({{.name = "a"}, {.name = "b"}, {.name = "a"}}).bytes),
                       {"two members", "named 'a'"}));
    CHECK(contains_all(
        refusal(zip_bytes::make({{.name = "\x82"}, {.name = "\xC3\xA9", .flags = 1 << 11}}).bytes),
        {"two members", "named '\xC3\xA9'"}));
}

TEST_CASE("zip directory: does not allocate a size that only a record claims") {
    // a file of 4 EiB, all zeros but its ends, that claims to be one directory
    const std::uint64_t file_size = std::uint64_t{1} << 62;
    const std::uint64_t end64_offset = file_size - 98;
    const std::uint64_t directory = 100;
    const std::uint64_t size = end64_offset - directory;
    const std::string tail = "PK\6\6" + number(44, 8) + number(45, 4) + number(0, 8) + number(size / 46, 8) +
                             number(size / 46, 8) + number(size, 8) + number(directory, 8) + "PK\6\7" +
                             number(0, 4) + number(end64_offset, 8) + number(1, 4) + "PK\5\6" + number(0, 4) +
                             std::string(12, '\xFF') + number(0, 2);
    REQUIRE(tail.size() == 98);
    std::size_t largest = 0;
    const auto read = [&](std::uint64_t offset, std::span<std::byte> destination) {
        largest = std::max(largest, destination.size());
        for (std::size_t index = 0; index < destination.size(); ++index) {
            const std::uint64_t at = offset + index;
            destination[index] = at >= end64_offset ? static_cast<std::byte>(tail.at(at - end64_offset))
                                 : at < 4           ? static_cast<std::byte>("PK\3\4"[at])
                                                    : std::byte{};
        }
    };
    CHECK(contains_all(message_of<pinflow::format_error>([&] { read_zip_directory(file_size, read); }),
                       {"entry 0 of its directory", "does not look like"}));
    CHECK(largest <= std::size_t{1} << 20);
}

TEST_CASE("zip directory: whatever byte is changed, the rest is read or refused in one sentence") {
    const archive made = zip_bytes::make(
        {{.name = "one",
          .content = "first",
          .local_extra = number(1, 2) + number(16, 2) + number(5, 8) + number(5, 8)},
         {.name = "two", .content = "second", .deflated = true, .extra = number(7, 2) + number(2, 2) + "ab"}},
        "comment", true);
    unsigned refused = 0;
    for (std::size_t offset = 0; offset < made.bytes.size(); ++offset) {
        for (const unsigned value : {0x00u, 0x01u, 0x7Fu, 0x80u, 0xFFu}) {
            std::string bytes = made.bytes;
            bytes[offset] = static_cast<char>(value);
            const std::string sentence = refusal(bytes);
            REQUIRE(sentence.find('\n') == std::string::npos);
            refused += sentence != "read" ? 1u : 0u;
        }
    }
    CHECK(refused > made.bytes.size());
}
