#include "formats/zip_member.hpp"

#include <doctest/doctest.h>
#include <zlib.h>

#include <limits>

#include "pinflow/error.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/zip_bytes.hpp"

namespace {

using pinflow::detail::check_zip_member_readable;
using pinflow::detail::zip_entry;
using pinflow::detail::zip_inflater;
using pinflow::detail::zip_member_reader;
using zip_bytes::reader;

/// "abcabcabcabcabc", compressed by zlib with fixed Huffman codes: zip_bytes::deflate makes stored blocks
/// only.
constexpr std::string_view fixed_codes("\x4b\x4c\x4a\x4e\x44\x42\x00", 7);
constexpr std::string_view fixed_codes_content = "abcabcabcabcabc";

/// A member whose data is the whole file.
zip_entry entry_of(std::string_view data, std::string_view content, bool deflated = true) {
    return {.name = "a.npy",
            .method = static_cast<std::uint16_t>(deflated ? 8 : 0),
            .crc32 = zip_bytes::crc32(content),
            .compressed_bytes = data.size(),
            .size_bytes = content.size(),
            .end_bytes = data.size()};
}

/// The content as it is read in pieces.
std::string read_in_pieces(const zip_entry& entry, std::string_view data, std::size_t step,
                           std::size_t piece_bytes) {
    zip_member_reader member(entry, 0, reader(data), piece_bytes);
    std::string content(entry.size_bytes, '?');
    const auto bytes = std::as_writable_bytes(std::span(content));
    for (std::size_t at = 0; at < bytes.size(); at += step)
        member.read(bytes.subspan(at, std::min(step, bytes.size() - at)));
    member.finish();
    return content;
}

std::string inflate(const zip_entry& entry, std::string_view data) {
    std::string content(entry.size_bytes, '?');
    zip_inflater().inflate(entry, 0, reader(data), std::as_writable_bytes(std::span(content)));
    return content;
}

/// The error of reading the member in pieces; empty if there is none. Inflating it at once must fail too,
/// perhaps in other words.
std::string refusal(const zip_entry& entry, std::string_view data) {
    const std::string piecewise =
        message_of<pinflow::format_error>([&] { read_in_pieces(entry, data, 1000, 4096); });
    const std::string whole = message_of<pinflow::format_error>([&] { inflate(entry, data); });
    CHECK(piecewise.empty() == whole.empty());
    return piecewise;
}

/// The content as zlib compresses it, where codes do not end at the edges of bytes.
std::string deflate_with_zlib(const std::string& content, int level) {
    ::z_stream stream{};
    REQUIRE(::deflateInit2(&stream, level, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK);
    std::string data(::deflateBound(&stream, static_cast<::uLong>(content.size())), '\0');
    std::string input = content;
    stream.next_in = reinterpret_cast<::Bytef*>(input.data());
    stream.avail_in = static_cast<::uInt>(input.size());
    stream.next_out = reinterpret_cast<::Bytef*>(data.data());
    stream.avail_out = static_cast<::uInt>(data.size());
    REQUIRE(::deflate(&stream, Z_FINISH) == Z_STREAM_END);
    data.resize(stream.total_out);
    ::deflateEnd(&stream);
    return data;
}

std::string letters(std::size_t size) {
    std::string text(size, '\0');
    for (std::size_t index = 0; index < size; ++index)
        text[index] = static_cast<char>('a' + index % 23);
    return text;
}

}  // namespace

TEST_CASE("zip member: the content is the same however it is cut") {
    const std::string content = letters(200'000);
    const std::string deflated = zip_bytes::deflate(content, 10'000);
    for (const std::size_t step : {std::size_t{1}, std::size_t{777}, content.size()}) {
        for (const std::size_t piece : {std::size_t{1}, std::size_t{4096}, std::size_t{1} << 20}) {
            CHECK((read_in_pieces(entry_of(deflated, content), deflated, step, piece) == content));
            CHECK((read_in_pieces(entry_of(content, content, false), content, step, piece) == content));
        }
    }
    CHECK((inflate(entry_of(deflated, content), deflated) == content));
    CHECK(read_in_pieces(entry_of(fixed_codes, fixed_codes_content), fixed_codes, 4, 2) ==
          fixed_codes_content);
    CHECK(inflate(entry_of(fixed_codes, fixed_codes_content), fixed_codes) == fixed_codes_content);
}

TEST_CASE("zip member: data that zlib has compressed is the same however it is cut") {
    std::string numbers;
    for (unsigned i = 0; i < 3000; ++i)
        numbers.push_back(static_cast<char>(i * i * 2654435761U >> (i % 3 + 16)));
    for (const std::string& content :
         {std::string(5000, '\0'), letters(2000), numbers, numbers.substr(0, 3)}) {
        for (const int level : {1, 6, 9}) {
            const std::string data = deflate_with_zlib(content, level);
            const zip_entry entry = entry_of(data, content);
            for (const std::size_t step : {1U, 2U, 3U, 7U, 257U, 1000U}) {
                for (const std::size_t piece : {1U, 2U, 16U, 4096U}) {
                    CAPTURE(step);
                    CAPTURE(piece);
                    CHECK((read_in_pieces(entry, data, step, piece) == content));
                }
            }
            for (std::size_t size = 0; size < data.size(); size += 1 + data.size() / 50) {
                const std::string truncated = data.substr(0, size);
                const zip_entry cut = entry_of(truncated, content);
                CHECK_FALSE(refusal(cut, truncated).empty());
                for (const std::size_t step : {1U, 100U})
                    CHECK_THROWS_AS(read_in_pieces(cut, truncated, step, 2), pinflow::format_error);
            }
        }
    }
}

TEST_CASE("zip member: one inflater does several members, larger and smaller") {
    zip_inflater inflater;
    for (const std::size_t size : {1000u, 5u, 300'000u, 0u, 70'000u}) {
        const std::string content = letters(size);
        const std::string data = zip_bytes::deflate(content);
        std::string inflated(size, '?');
        inflater.inflate(entry_of(data, content), 0, reader(data),
                         std::as_writable_bytes(std::span(inflated)));
        CHECK((inflated == content));
    }
}

TEST_CASE("zip member: an empty member is read") {
    const std::string data = zip_bytes::deflate("");
    CHECK(read_in_pieces(entry_of(data, ""), data, 1, 1).empty());
    CHECK(read_in_pieces(entry_of("", "", false), "", 1, 1).empty());
}

TEST_CASE("zip member: finish reads what is left, so that the CRC-32 is checked") {
    const std::string content = letters(1'000'000);
    zip_entry entry = entry_of(content, content, false);
    std::vector<std::byte> begin(10);
    zip_member_reader good(entry, 0, reader(content), 4096);
    good.read(begin);
    good.finish();
    entry.crc32 ^= 1;
    zip_member_reader bad(entry, 0, reader(content), 4096);
    bad.read(begin);
    CHECK_THROWS_WITH_AS(bad.finish(), doctest::Contains("is damaged: its CRC-32 is "),
                         pinflow::format_error);
    CHECK_THROWS_AS(bad.read(begin), pinflow::invalid_argument);
}

TEST_CASE("zip member: refuses data that contradicts the directory") {
    const std::string content = letters(50'000);
    const std::string data = zip_bytes::deflate(content, 20'000);
    const zip_entry entry = entry_of(data, content);
    CHECK(refusal(entry, data).empty());

    zip_entry changed = entry;
    changed.crc32 ^= 0x80000000;
    CHECK(contains(refusal(changed, data), "the member 'a.npy' is damaged: its CRC-32 is "));

    changed = entry;
    changed.size_bytes += 1;
    CHECK(contains(refusal(changed, data), "ends after 50000 bytes, but the directory declares 50001"));
    CHECK(contains(message_of<pinflow::format_error>([&] { inflate(changed, data); }),
                   "ends after 50000 bytes, but the directory declares 50001"));
    changed.size_bytes = content.size() - 1;
    CHECK(contains(refusal(changed, data), "continues after the 49999 bytes that the directory declares"));

    changed = entry;
    changed.compressed_bytes = data.size() + 3;
    CHECK(contains(refusal(changed, data + "xyz"), "3 bytes follow its compressed data"));
    CHECK(contains(refusal(entry_of(data + "xyz", content), data + "xyz"), "3 bytes follow"));

    std::string wrong = data;
    wrong[20'005] = '\x07';  // the second block's type, which does not exist
    CHECK(contains(refusal(entry, wrong), "compressed data is wrong after 20000 of 50000 inflated bytes"));

    for (std::size_t size = 50; size < data.size(); size += 997) {
        changed = entry;
        changed.compressed_bytes = size;
        CHECK(contains(refusal(changed, data.substr(0, size)), "its compressed data is truncated"));
    }
    for (std::size_t size = 0; size < fixed_codes.size(); ++size) {
        zip_entry cut = entry_of(fixed_codes, fixed_codes_content);
        cut.compressed_bytes = size;
        CHECK_FALSE(refusal(cut, fixed_codes.substr(0, size)).empty());
    }
}

TEST_CASE("zip member: a flipped bit before the last byte is noticed, by the CRC-32 or by inflating") {
    for (std::size_t offset = 0; offset < fixed_codes.size(); ++offset) {
        for (unsigned bit = 0; bit < 8; ++bit) {
            std::string wrong(fixed_codes);
            wrong[offset] = static_cast<char>(wrong[offset] ^ static_cast<char>(1u << bit));
            CAPTURE(offset);
            CAPTURE(bit);
            // the unused bits of the last byte may have any value
            if (const std::string sentence = refusal(entry_of(fixed_codes, fixed_codes_content), wrong);
                offset + 1 < fixed_codes.size()) {
                CHECK_FALSE(sentence.empty());
            }
        }
    }
}

TEST_CASE("zip member: refuses sizes that cannot both be true") {
    zip_entry entry = entry_of(fixed_codes, fixed_codes_content);
    entry.size_bytes = 1032 * fixed_codes.size();
    check_zip_member_readable(entry);
    for (const std::uint64_t size : {std::uint64_t{1032} * fixed_codes.size() + 1, std::uint64_t{1} << 42,
                                     std::numeric_limits<std::uint64_t>::max()}) {
        entry.size_bytes = size;
        CHECK_THROWS_WITH_AS(check_zip_member_readable(entry),
                             doctest::Contains("which 7 compressed bytes cannot make"),
                             pinflow::format_error);
        CHECK_THROWS_AS(zip_member_reader(entry, 0, reader(fixed_codes), 4096), pinflow::format_error);
    }
    // the largest possible size overflows 64 bits, so every size is accepted
    entry.compressed_bytes = std::numeric_limits<std::uint64_t>::max() / 2;
    check_zip_member_readable(entry);

    entry = entry_of("abc", "abc", false);
    check_zip_member_readable(entry);
    entry.size_bytes = 4;
    CHECK(contains_all(message_of<pinflow::format_error>([&] { check_zip_member_readable(entry); }),
                       {"member 'a.npy'", "is stored", "4 bytes", "compressed size as 3"}));
}

TEST_CASE("zip member: the most compressible data is read") {
    // eight million zeros as zlib deflates them, 1029.7 times shorter
    const std::string content(8'000'000, '\0');
    const std::string data = std::string("\xed\xc1\x01\x0d\x00\x00\x00\xc2\xa0\xf7\x4f\x6d\x0e\x37\xa0", 15) +
                             std::string(7751, '\0') + "\x80\x77\x03";
    REQUIRE(data.size() == 7769);
    CHECK((read_in_pieces(entry_of(data, content), data, 1'000'000, 4096) == content));
    CHECK((inflate(entry_of(data, content), data) == content));
}

TEST_CASE("zip member: names the features that it does not support") {
    struct {
        std::uint16_t version;
        std::uint16_t flags;
        std::uint16_t method;
        const char* sentence;
    } const cases[] = {
        {20, 1, 0, "the member 'a.npy' is encrypted"},
        {20, 1, 8, "the member 'a.npy' is encrypted"},
        {20, 1 << 6, 8, "the member 'a.npy' is encrypted"},
        {20, 1 << 13, 8, "the member 'a.npy' is encrypted"},
        {20, 1 << 5, 8, "the member 'a.npy' is a patch of other data"},
        {20, 0, 12, "the member 'a.npy' is compressed by method 12; 0 (stored) and 8 (deflated) are known"},
        {20, 0, 65535,
         "the member 'a.npy' is compressed by method 65535; 0 (stored) and 8 (deflated) are known"},
        {64, 0, 8, "the member 'a.npy' needs version 6.4 of the zip format; 6.3 is known"},
    };
    for (const auto& c : cases) {
        zip_entry entry = entry_of("abc", "abc", false);
        entry.version_needed = c.version;
        entry.flags = c.flags;
        entry.method = c.method;
        CHECK_THROWS_WITH_AS(check_zip_member_readable(entry), c.sentence, pinflow::unsupported);
    }
    zip_entry entry = entry_of("abc", "abc", false);
    for (const int bit : {1, 2, 3, 11}) {
        entry.flags = static_cast<std::uint16_t>(1 << bit);
        entry.version_needed = 63 | 3 << 8;  // the upper byte names a system
        check_zip_member_readable(entry);
    }
}
