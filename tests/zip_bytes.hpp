#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "formats/zip_directory.hpp"

/// Zip archives put together by hand, for the tests of readers.
namespace zip_bytes {

inline std::uint32_t crc32(std::string_view text) {
    std::uint32_t crc = 0xFFFFFFFF;
    for (const char character : text) {
        crc ^= static_cast<unsigned char>(character);
        for (int bit = 0; bit < 8; ++bit)
            crc = crc >> 1 ^ (0xEDB88320u & (0u - (crc & 1u)));
    }
    return ~crc;
}

/// Replaces the `size` bytes at `offset` by a number, least significant byte first.
inline void put(std::string& bytes, std::size_t offset, std::uint64_t value, unsigned size) {
    for (unsigned index = 0; index < size; ++index)
        bytes.at(offset + index) = static_cast<char>(value >> (8 * index) & 0xFF);
}

inline std::string number(std::uint64_t value, unsigned size) {
    std::string bytes(size, '\0');
    put(bytes, 0, value, size);
    return bytes;
}

/// Deflates without compressing: each piece is a stored block.
inline std::string deflate(std::string_view text, std::size_t block_size = 0xFFFF) {
    std::string result;
    do {
        const std::string_view block = text.substr(0, block_size);
        text.remove_prefix(block.size());
        result += static_cast<char>(text.empty() ? 1 : 0);
        result += number(block.size(), 2) + number(~block.size() & 0xFFFF, 2);
        result += block;
    } while (!text.empty());
    return result;
}

// NOLINTBEGIN(readability-redundant-member-init): g++ warns where a designated initialiser leaves out others
struct member {
    std::string name = {};
    std::string content = {};
    bool deflated = false;
    std::string local_extra = {};  // of its own header
    std::string extra = {};        // of its entry
    std::string comment = {};
    std::uint16_t flags = 0;
};
// NOLINTEND(readability-redundant-member-init)

/// An archive, and where its parts lie.
struct archive {
    std::string bytes;
    std::vector<std::size_t> locals;
    std::vector<std::size_t> datas;
    std::vector<std::size_t> entries;
    std::size_t directory = 0;
    std::size_t end64 = 0;  // 0 without zip64
    std::size_t end = 0;
};

inline archive make(const std::vector<member>& members, std::string_view comment = {}, bool zip64 = false) {
    archive result;
    std::string& bytes = result.bytes;
    std::string directory;
    for (const member& member : members) {
        const std::string data = member.deflated ? deflate(member.content) : member.content;
        const std::string both = number(member.flags, 2) + number(member.deflated ? 8 : 0, 2) + number(0, 2) +
                                 number(0x21, 2) + number(crc32(member.content), 4) + number(data.size(), 4) +
                                 number(member.content.size(), 4) + number(member.name.size(), 2);
        result.entries.push_back(directory.size());
        directory += "PK\1\2" + number(20, 2) + number(20, 2) + both + number(member.extra.size(), 2) +
                     number(member.comment.size(), 2) + number(0, 8) + number(bytes.size(), 4) + member.name +
                     member.extra + member.comment;
        result.locals.push_back(bytes.size());
        bytes += "PK\3\4" + number(20, 2) + both + number(member.local_extra.size(), 2) + member.name +
                 member.local_extra;
        result.datas.push_back(bytes.size());
        bytes += data;
    }
    result.directory = bytes.size();
    for (std::size_t& entry : result.entries)
        entry += result.directory;
    bytes += directory;
    if (zip64) {
        result.end64 = bytes.size();
        bytes += "PK\6\6" + number(44, 8) + number(45, 2) + number(45, 2) + number(0, 8) +
                 number(members.size(), 8) + number(members.size(), 8) + number(directory.size(), 8) +
                 number(result.directory, 8);
        bytes += "PK\6\7" + number(0, 4) + number(result.end64, 8) + number(1, 4);
    }
    result.end = bytes.size();
    bytes += "PK\5\6" + number(0, 4) + number(members.size(), 2) + number(members.size(), 2) +
             number(directory.size(), 4) + number(result.directory, 4) + number(comment.size(), 2);
    bytes += comment;
    return result;
}

/// Reads from `bytes`, which must live on; asking past their end is a mistake of the reader's.
inline pinflow::detail::read_bytes reader(std::string_view bytes) {
    return [bytes](std::uint64_t offset, std::span<std::byte> destination) {
        if (offset > bytes.size() || destination.size() > bytes.size() - offset) {
            throw std::logic_error("bytes past the end were asked for");
        }
        const auto from = std::as_bytes(std::span(bytes)).subspan(static_cast<std::size_t>(offset));
        std::copy_n(from.begin(), destination.size(), destination.begin());
    };
}

}  // namespace zip_bytes
