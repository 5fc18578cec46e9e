#include "src/shared/segment_trailer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"

namespace pinflow::detail {

namespace {

static_assert(std::endian::native == std::endian::little, "the numbers of a trailer are little-endian");

constexpr std::array<char, 8> magic{'p', 'i', 'n', 'f', 'l', 'o', 'w', 'S'};
constexpr std::uint32_t current_version = 1;
constexpr std::uint32_t writable_flag = 1;

/// The bytes of a trailer; the rest are zeros.
struct layout {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t flags;
    std::uint64_t data_offset_bytes;
    std::uint64_t data_size_bytes;
    std::array<char, 32> checksum;
    std::array<char, 40> boot_id;
    std::uint64_t pid;
    std::uint32_t uid;
    std::uint32_t zero;
    std::int64_t created_ns;
    std::array<char, 64> type;
};
static_assert(sizeof(layout) == 192 && sizeof(layout) <= trailer_size_bytes);

template <std::size_t Size>
void put(std::array<char, Size>& field, std::string_view text) {
    field = {};
    text.copy(field.data(), Size);
}

template <std::size_t Size>
std::string text_of(const std::array<char, Size>& field) {
    return {field.begin(), std::ranges::find(field, '\0')};
}

bool is_checksum(std::string_view text) {
    return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

void write_trailer(const segment_trailer& trailer, std::span<std::byte, trailer_size_bytes> bytes) {
    layout fields{};
    fields.magic = magic;
    fields.version = current_version;
    fields.flags = trailer.is_writable ? writable_flag : 0;
    fields.data_offset_bytes = trailer.data_offset_bytes;
    fields.data_size_bytes = trailer.data_size_bytes;
    put(fields.checksum, trailer.checksum);
    put(fields.boot_id, trailer.boot_id);
    fields.pid = trailer.pid;
    fields.uid = trailer.uid;
    fields.created_ns = trailer.created_ns;
    put(fields.type, trailer.type);
    std::ranges::fill(bytes, std::byte{});
    std::memcpy(bytes.data(), &fields, sizeof(fields));
}

segment_trailer read_trailer(std::span<const std::byte, trailer_size_bytes> bytes,
                             std::uint64_t file_size_bytes) {
    layout fields{};
    std::memcpy(&fields, bytes.data(), sizeof(fields));
    if (fields.magic != magic)
        throw format_error("its last 4096 bytes are not the trailer of a segment; it may be cut off");
    if (fields.version != current_version) {
        throw unsupported(fmt::format("its trailer has version {}, and this pinflow reads version {}",
                                      fields.version, current_version));
    }
    if ((fields.flags & ~writable_flag) != 0)
        throw unsupported(
            fmt::format("its trailer has flags that this pinflow does not know ({:#x})", fields.flags));
    std::uint64_t end = 0;
    if (!add(fields.data_offset_bytes, fields.data_size_bytes, end) || !add(end, trailer_size_bytes, end) ||
        end != file_size_bytes) {
        throw format_error(
            fmt::format("its trailer declares {} bytes of data at offset {}, but the file has {} bytes",
                        fields.data_size_bytes, fields.data_offset_bytes, file_size_bytes));
    }
    segment_trailer trailer{
        .data_offset_bytes = fields.data_offset_bytes,
        .data_size_bytes = fields.data_size_bytes,
        .is_writable = (fields.flags & writable_flag) != 0,
        .checksum = text_of(fields.checksum),
        .boot_id = text_of(fields.boot_id),
        .pid = fields.pid,
        .uid = fields.uid,
        .created_ns = fields.created_ns,
        .type = text_of(fields.type),
    };
    if (trailer.is_writable ? !trailer.checksum.empty() : !is_checksum(trailer.checksum))
        throw format_error("the checksum in its trailer is damaged");
    return trailer;
}

}  // namespace pinflow::detail
