#include "formats/zip_directory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "formats/throw_formatted.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/quote.hpp"
#include "src/core/utf8.hpp"

namespace pinflow::detail {

namespace {

constexpr std::string_view local_signature = "PK\3\4";
constexpr std::string_view entry_signature = "PK\1\2";
constexpr std::string_view end_signature = "PK\5\6";
constexpr std::string_view locator_signature = "PK\6\7";
constexpr std::string_view end64_signature = "PK\6\6";

constexpr std::size_t entry_size_bytes = 46;
constexpr std::size_t end_size_bytes = 22;
constexpr std::size_t locator_size_bytes = 20;
constexpr std::size_t end64_size_bytes = 56;
/// The maximum size of a name, an extra field or a comment.
constexpr std::size_t max_field_bytes = 0xFFFF;
constexpr std::size_t max_entry_bytes = entry_size_bytes + 3 * max_field_bytes;

/// The value of a field that is too narrow for the real value.
constexpr std::uint64_t saturated_16 = 0xFFFF;

/// A record of numbers, least significant byte first.
class record_reader {
 public:
    explicit record_reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

    bool begins_with(std::string_view signature) const noexcept {
        return bytes_.size() >= signature.size() &&
               std::memcmp(bytes_.data(), signature.data(), signature.size()) == 0;
    }
    std::uint16_t u16(std::size_t offset) const noexcept {
        return static_cast<std::uint16_t>(number(offset, 2));
    }
    std::uint32_t u32(std::size_t offset) const noexcept {
        return static_cast<std::uint32_t>(number(offset, 4));
    }
    std::uint64_t u64(std::size_t offset) const noexcept { return number(offset, 8); }

 private:
    std::uint64_t number(std::size_t offset, std::size_t size_bytes) const noexcept {
        std::uint64_t value = 0;
        for (std::size_t index = size_bytes; index-- > 0;) {
            value = value << 8 | std::to_integer<std::uint64_t>(bytes_[offset + index]);
        }
        return value;
    }

    std::span<const std::byte> bytes_;
};

// ---- the archive's end ------------------------------------------------------------------------------------

/// The location of the directory.
struct directory_location {
    std::uint64_t offset_bytes = 0;
    std::uint64_t size_bytes = 0;
    std::uint64_t entry_count = 0;
};

/// A value of the end record that zip64 also has in a wide form. If both are given, they must agree:
/// otherwise readers that trust different ones would see different archives.
std::uint64_t agreed(std::uint64_t narrow, std::uint64_t saturated, std::uint64_t wide,
                     std::string_view what) {
    if (narrow != saturated && narrow != wide) {
        throw_format_error("its end record and its zip64 end record disagree about {}: {} and {}", what,
                           narrow, wide);
    }
    return wide;
}

void check_one_disk(std::uint64_t disk, std::uint64_t directory_disk, std::uint64_t count_on_disk,
                    std::uint64_t count) {
    if (disk != 0 || directory_disk != 0 || count_on_disk != count) {
        throw_format_error("it is one part of an archive that spans several disks");
    }
}

/// Reads the end record at `position` of the file's last bytes, and the zip64 records right before it.
/// `tail_offset_bytes` is the offset of these bytes in the file.
directory_location parse_end(std::span<const std::byte> tail, std::size_t position,
                             std::uint64_t tail_offset_bytes) {
    const record_reader end(tail.subspan(position, end_size_bytes));
    std::uint64_t disk = end.u16(4);
    std::uint64_t directory_disk = end.u16(6);
    std::uint64_t count_on_disk = end.u16(8);
    directory_location directory{end.u32(16), end.u32(12), end.u16(10)};
    std::uint64_t end_bytes = tail_offset_bytes + position;

    const bool room_for_locator = position >= locator_size_bytes;
    const record_reader locator(room_for_locator
                                    ? tail.subspan(position - locator_size_bytes, locator_size_bytes)
                                    : std::span<const std::byte>());
    if (locator.begins_with(locator_signature)) {
        constexpr std::size_t both_bytes = locator_size_bytes + end64_size_bytes;
        const record_reader end64(position >= both_bytes
                                      ? tail.subspan(position - both_bytes, end64_size_bytes)
                                      : std::span<const std::byte>());
        if (!end64.begins_with(end64_signature)) {
            throw_format_error("its zip64 locator at byte {} does not follow a zip64 end record",
                               end_bytes - locator_size_bytes);
        }
        end_bytes -= both_bytes;
        if (locator.u32(4) != 0 || locator.u32(16) > 1) check_one_disk(1, 0, 0, 0);
        if (locator.u64(8) != end_bytes) {
            throw_format_error(
                "its zip64 end record is at byte {}, but its locator says {}: bytes were put before "
                "the "
                "archive",
                end_bytes, locator.u64(8));
        }
        if (end64.u64(4) != end64_size_bytes - 12) {
            throw_format_error("its zip64 end record declares a size of {} bytes, not 44", end64.u64(4));
        }
        disk = agreed(disk, saturated_16, end64.u32(16), "the disk");
        directory_disk = agreed(directory_disk, saturated_16, end64.u32(20), "the directory's disk");
        count_on_disk = agreed(count_on_disk, saturated_16, end64.u64(24), "the members on this disk");
        directory.entry_count =
            agreed(directory.entry_count, saturated_16, end64.u64(32), "the number of members");
        directory.size_bytes =
            agreed(directory.size_bytes, zip_saturated_32, end64.u64(40), "the directory's size");
        directory.offset_bytes =
            agreed(directory.offset_bytes, zip_saturated_32, end64.u64(48), "the directory's offset");
    }
    check_one_disk(disk, directory_disk, count_on_disk, directory.entry_count);

    std::uint64_t directory_end_bytes = 0;
    if (!add(directory.offset_bytes, directory.size_bytes, directory_end_bytes) ||
        directory_end_bytes > end_bytes) {
        throw_format_error(
            "its directory of {} bytes at offset {} does not fit before its end record at byte {}",
            directory.size_bytes, directory.offset_bytes, end_bytes);
    }
    if (directory_end_bytes < end_bytes) {
        throw_format_error(
            "its directory ends at byte {}, its end record begins at byte {}: bytes were put before "
            "the "
            "archive or into it",
            directory_end_bytes, end_bytes);
    }
    if (directory.entry_count > directory.size_bytes / entry_size_bytes) {
        throw_format_error("its directory of {} bytes has no room for {} members", directory.size_bytes,
                           directory.entry_count);
    }
    return directory;
}

/// Finds the end record: the last one whose comment ends at the end of the file.
directory_location find_directory(std::uint64_t file_size_bytes, const read_bytes& read) {
    constexpr std::uint64_t max_tail_bytes =
        end64_size_bytes + locator_size_bytes + end_size_bytes + max_field_bytes;
    std::vector<std::byte> tail(static_cast<std::size_t>(std::min(file_size_bytes, max_tail_bytes)));
    const std::uint64_t tail_offset_bytes = file_size_bytes - tail.size();
    read(tail_offset_bytes, tail);
    for (std::size_t comment_bytes = 0; comment_bytes + end_size_bytes <= tail.size(); ++comment_bytes) {
        const std::size_t position = tail.size() - end_size_bytes - comment_bytes;
        const record_reader end{std::span(tail).subspan(position, end_size_bytes)};
        if (end.begins_with(end_signature) && end.u16(20) == comment_bytes) {
            return parse_end(tail, position, tail_offset_bytes);
        }
    }
    throw_format_error(
        "the file does not end with a zip directory; it is truncated, or bytes follow the archive");
}

// ---- names ------------------------------------------------------------------------------------------------

/// The characters of code page 437 from 0x80 on. Names use code page 437 unless a flag says UTF-8.
constexpr std::array<std::uint16_t, 128> code_page_437 = {
    0x00C7, 0x00FC, 0x00E9, 0x00E2, 0x00E4, 0x00E0, 0x00E5, 0x00E7, 0x00EA, 0x00EB, 0x00E8, 0x00EF, 0x00EE,
    0x00EC, 0x00C4, 0x00C5, 0x00C9, 0x00E6, 0x00C6, 0x00F4, 0x00F6, 0x00F2, 0x00FB, 0x00F9, 0x00FF, 0x00D6,
    0x00DC, 0x00A2, 0x00A3, 0x00A5, 0x20A7, 0x0192, 0x00E1, 0x00ED, 0x00F3, 0x00FA, 0x00F1, 0x00D1, 0x00AA,
    0x00BA, 0x00BF, 0x2310, 0x00AC, 0x00BD, 0x00BC, 0x00A1, 0x00AB, 0x00BB, 0x2591, 0x2592, 0x2593, 0x2502,
    0x2524, 0x2561, 0x2562, 0x2556, 0x2555, 0x2563, 0x2551, 0x2557, 0x255D, 0x255C, 0x255B, 0x2510, 0x2514,
    0x2534, 0x252C, 0x251C, 0x2500, 0x253C, 0x255E, 0x255F, 0x255A, 0x2554, 0x2569, 0x2566, 0x2560, 0x2550,
    0x256C, 0x2567, 0x2568, 0x2564, 0x2565, 0x2559, 0x2558, 0x2552, 0x2553, 0x256B, 0x256A, 0x2518, 0x250C,
    0x2588, 0x2584, 0x258C, 0x2590, 0x2580, 0x03B1, 0x00DF, 0x0393, 0x03C0, 0x03A3, 0x03C3, 0x00B5, 0x03C4,
    0x03A6, 0x0398, 0x03A9, 0x03B4, 0x221E, 0x03C6, 0x03B5, 0x2229, 0x2261, 0x00B1, 0x2265, 0x2264, 0x2320,
    0x2321, 0x00F7, 0x2248, 0x00B0, 0x2219, 0x00B7, 0x221A, 0x207F, 0x00B2, 0x25A0, 0x00A0};

/// A name as UTF-8; empty if the flag says UTF-8 and the bytes are not.
std::optional<std::string> decode_name(std::span<const std::byte> bytes, std::uint16_t flags) {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if ((flags & zip_flag_utf8) != 0) {
        if (!count_code_points(text)) return std::nullopt;
        return std::string(text);
    }
    std::string name;
    for (const char character : text) {
        const auto code = static_cast<unsigned char>(character);
        append_utf8(name, code < 0x80 ? code : code_page_437[code - 0x80u]);
    }
    return name;
}

// ---- the directory ----------------------------------------------------------------------------------------

/// Replaces the saturated values of an entry by the values of its zip64 extra field. The field has only these
/// values, in the order: size, compressed size, offset of the header, disk.
void read_zip64_field(zip_entry& entry, std::uint32_t& disk, std::span<const std::byte> extra) {
    std::optional<std::span<const std::byte>> wide;
    while (extra.size() >= 4) {
        const std::uint16_t id = record_reader(extra).u16(0);
        const std::size_t size_bytes = record_reader(extra).u16(2);
        if (size_bytes > extra.size() - 4) {
            throw_format_error("the member {} has an extra field of {} bytes, but only {} are left",
                               quote(entry.name), size_bytes, extra.size() - 4);
        }
        if (id == 1) {
            if (wide) throw_format_error("the member {} has two zip64 fields", quote(entry.name));
            wide = extra.subspan(4, size_bytes);
        }
        extra = extra.subspan(4 + size_bytes);
    }
    const auto take = [&](std::size_t size_bytes) {
        if (!wide || wide->size() < size_bytes) {
            throw_format_error("the member {} refers to a zip64 field that it does not have",
                               quote(entry.name));
        }
        const record_reader field(wide->first(size_bytes));
        wide = wide->subspan(size_bytes);
        return size_bytes == 8 ? field.u64(0) : field.u32(0);
    };
    if (entry.size_bytes == zip_saturated_32) entry.size_bytes = take(8);
    if (entry.compressed_bytes == zip_saturated_32) entry.compressed_bytes = take(8);
    if (entry.header_offset_bytes == zip_saturated_32) entry.header_offset_bytes = take(8);
    if (disk == saturated_16) disk = static_cast<std::uint32_t>(take(4));
}

/// Parses the entry at the front of `bytes`, which hold the rest of the directory, or at least one entry of
/// the maximum size.
/// @return the size of the entry.
std::size_t parse_entry(std::span<const std::byte> bytes, const directory_location& directory,
                        std::vector<zip_entry>& entries) {
    const std::size_t number = entries.size();
    const record_reader fixed(bytes);
    if (bytes.size() < entry_size_bytes || !fixed.begins_with(entry_signature)) {
        throw_format_error("entry {} of its directory does not look like one", number);
    }
    const std::size_t name_bytes = fixed.u16(28);
    const std::size_t extra_bytes = fixed.u16(30);
    const std::size_t comment_bytes = fixed.u16(32);
    const std::size_t taken = entry_size_bytes + name_bytes + extra_bytes + comment_bytes;
    if (taken > bytes.size()) throw_format_error("entry {} of its directory ends past the directory", number);

    zip_entry entry;
    entry.version_needed = fixed.u16(6);
    entry.flags = fixed.u16(8);
    entry.method = fixed.u16(10);
    entry.crc32 = fixed.u32(16);
    entry.compressed_bytes = fixed.u32(20);
    entry.size_bytes = fixed.u32(24);
    entry.header_offset_bytes = fixed.u32(42);
    auto name = decode_name(bytes.subspan(entry_size_bytes, name_bytes), entry.flags);
    if (!name)
        throw_format_error("the name of entry {} of its directory is not the UTF-8 that it claims to be",
                           number);
    entry.name = std::move(*name);
    if (const auto defect = zip_name_defect(entry.name); !defect.empty()) {
        throw_format_error("the name {} of entry {} of its directory is {}", quote(entry.name), number,
                           defect);
    }
    std::uint32_t disk = fixed.u16(34);
    read_zip64_field(entry, disk, bytes.subspan(entry_size_bytes + name_bytes, extra_bytes));
    if (disk != 0) throw_format_error("the member {} is stored on another disk", quote(entry.name));

    std::uint64_t end_bytes = 0;
    if (!add(entry.header_offset_bytes, zip_local_size_bytes, end_bytes) ||
        !add(end_bytes, entry.compressed_bytes, end_bytes) || end_bytes > directory.offset_bytes) {
        throw_format_error(
            "the member {} of {} bytes at offset {} extends past byte {}, where the directory begins",
            quote(entry.name), entry.compressed_bytes, entry.header_offset_bytes, directory.offset_bytes);
    }
    entries.push_back(std::move(entry));
    return taken;
}

/// Sets the end of each member to the beginning of the next member, or of the directory.
/// @throws format_error if two overlap.
void separate(std::span<zip_entry> entries, const directory_location& directory) {
    std::vector<std::size_t> order(entries.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::sort(order, {}, [&](std::size_t index) { return entries[index].header_offset_bytes; });
    std::uint64_t next_bytes = directory.offset_bytes;
    const zip_entry* next = nullptr;
    for (std::size_t position = order.size(); position-- > 0;) {
        zip_entry& entry = entries[order[position]];
        if (zip_local_size_bytes + entry.compressed_bytes > next_bytes - entry.header_offset_bytes) {
            throw_format_error("the members {} and {} overlap", quote(entry.name), quote(next->name));
        }
        entry.end_bytes = next_bytes;
        next_bytes = entry.header_offset_bytes;
        next = &entry;
    }
}

void check_names_differ(std::span<const zip_entry> entries) {
    std::vector<std::string_view> names;
    names.reserve(entries.size());
    for (const zip_entry& entry : entries)
        names.push_back(entry.name);
    std::ranges::sort(names);
    const auto twice = std::ranges::adjacent_find(names);
    if (twice != names.end()) throw_format_error("two members are named {}", quote(*twice));
}

}  // namespace

std::string_view zip_name_defect(std::string_view name) noexcept {
    if (name.empty()) return "empty";
    if (name.find('\0') != name.npos) return "not text: it has a zero byte";
    // a backslash separates folders on Windows, though the format knows slashes only
    const auto is_separator = [](char character) { return character == '/' || character == '\\'; };
    if (is_separator(name[0]) || (name.size() > 2 && name[1] == ':' && is_separator(name[2]))) {
        return "absolute";
    }
    for (std::size_t begin = 0; begin <= name.size();) {
        const std::size_t end = std::min(name.find_first_of("/\\", begin), name.size());
        if (name.substr(begin, end - begin) == "..") return "relative to a parent folder ('..')";
        begin = end + 1;
    }
    return {};
}

std::vector<zip_entry> read_zip_directory(std::uint64_t file_size_bytes, const read_bytes& read) {
    // refuses a file that only ends like an archive: numpy does not read it as .npz, and other readers may
    // take it for another format
    std::array<std::byte, 4> begin{};
    if (file_size_bytes < end_size_bytes)
        throw_format_error("it has {} bytes, but a zip archive has at least 22 bytes", file_size_bytes);
    read(0, begin);
    if (!record_reader(begin).begins_with(local_signature) &&
        !record_reader(begin).begins_with(end_signature)) {
        throw_format_error("it does not begin as a zip archive does");
    }
    const directory_location directory = find_directory(file_size_bytes, read);
    const std::uint64_t end_bytes = directory.offset_bytes + directory.size_bytes;

    // a window that moves over the directory; it always holds one entry of the maximum size, or the rest
    constexpr std::uint64_t max_window_bytes = std::uint64_t{1} << 20;
    std::vector<zip_entry> entries;
    std::vector<std::byte> window;
    std::size_t taken = 0;
    for (std::uint64_t position = directory.offset_bytes; position < end_bytes;) {
        const std::size_t left = window.size() - taken;
        if (left < max_entry_bytes && left < end_bytes - position) {
            window.resize(static_cast<std::size_t>(std::min(max_window_bytes, end_bytes - position)));
            read(position, window);
            taken = 0;
            // for a member: its entry, its listing, and its place in the tables of names
            constexpr std::uint64_t member_bytes = 512;
            const std::uint64_t needed_bytes =
                entries.size() * member_bytes + window.size() / entry_size_bytes * member_bytes;
            require_memory(
                needed_bytes,
                fmt::format("its directory cannot be listed: up to {} members take {} bytes of memory",
                            needed_bytes / member_bytes, needed_bytes));
        }
        if (entries.size() == directory.entry_count) {
            throw_format_error("its directory continues after the {} members that its end record declares",
                               directory.entry_count);
        }
        const std::size_t entry_bytes = parse_entry(std::span(window).subspan(taken), directory, entries);
        taken += entry_bytes;
        position += entry_bytes;
    }
    if (entries.size() != directory.entry_count) {
        throw_format_error("its directory has {} members, but its end record declares {}", entries.size(),
                           directory.entry_count);
    }
    separate(entries, directory);
    check_names_differ(entries);
    return entries;
}

std::uint64_t zip_data_offset_bytes(const zip_entry& entry, const read_bytes& read) {
    const auto differs = [&](std::string_view what) {
        throw_format_error("the member {} has a different {} in its header at byte {} than in the directory",
                           quote(entry.name), what, entry.header_offset_bytes);
    };
    std::array<std::byte, zip_local_size_bytes> bytes{};
    read(entry.header_offset_bytes, bytes);
    const record_reader header(bytes);
    if (!header.begins_with(local_signature)) {
        throw_format_error("the member {} has no header at byte {}", quote(entry.name),
                           entry.header_offset_bytes);
    }
    const std::size_t name_bytes = header.u16(26);
    // the directory has been checked, so nothing here overflows
    const std::uint64_t data_offset_bytes =
        entry.header_offset_bytes + zip_local_size_bytes + name_bytes + header.u16(28);
    if (data_offset_bytes > entry.end_bytes || entry.compressed_bytes > entry.end_bytes - data_offset_bytes) {
        throw_format_error(
            "the member {} of {} bytes at offset {} extends past byte {}, where the next record "
            "begins",
            quote(entry.name), entry.compressed_bytes, data_offset_bytes, entry.end_bytes);
    }
    if (header.u16(8) != entry.method) differs("compression method");
    if (((header.u16(6) ^ entry.flags) & zip_flag_encrypted) != 0) differs("encryption flag");
    std::vector<std::byte> name(name_bytes);
    read(entry.header_offset_bytes + zip_local_size_bytes, name);
    if (decode_name(name, header.u16(6)) != entry.name) differs("name");
    return data_offset_bytes;
}

}  // namespace pinflow::detail
