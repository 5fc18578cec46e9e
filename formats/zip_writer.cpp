#include "formats/zip_writer.hpp"

#include <fmt/format.h>
#include <libdeflate.h>

#include <algorithm>

#include "pinflow/error.hpp"
#include "src/core/quote.hpp"
#include "src/core/utf8.hpp"

namespace pinflow::detail {

namespace {

constexpr std::size_t local_crc32_offset_bytes = 14;
/// The zip64 extra field of a member's own header: its id and size, then the sizes before and after
/// compression.
constexpr std::size_t local_zip64_bytes = 4 + 16;
constexpr std::uint16_t version_plain = 20;
constexpr std::uint16_t version_zip64 = 45;
constexpr std::uint16_t made_on_unix = 3 << 8;
/// 1980-01-01, the earliest date of the format, as numpy writes it, so that equal arrays give equal files.
constexpr std::uint16_t earliest_date = 1 << 5 | 1;
/// The permissions of an unzipped file: rw-r--r--.
constexpr std::uint32_t unix_mode = 0100644u << 16;
/// zipalign's id of a padding field, which holds the alignment and then zeros.
constexpr std::uint16_t padding_id = 0xD935;
constexpr std::size_t min_padding_bytes = 6;

/// A record of numbers, least significant byte first.
class record_writer {
 public:
    record_writer& text(std::string_view text) {
        const auto bytes = std::as_bytes(std::span(text));
        bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
        return *this;
    }
    record_writer& u16(std::uint64_t value) { return number(value, 2); }
    record_writer& u32(std::uint64_t value) { return number(value, 4); }
    record_writer& u64(std::uint64_t value) { return number(value, 8); }
    record_writer& zeros(std::size_t count) {
        bytes_.resize(bytes_.size() + count);
        return *this;
    }

    std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
    record_writer& number(std::uint64_t value, unsigned size_bytes) {
        for (unsigned index = 0; index < size_bytes; ++index)
            bytes_.push_back(static_cast<std::byte>(value >> (8 * index) & 0xFF));
        return *this;
    }

    std::vector<std::byte> bytes_;
};

/// The size of the padding field that aligns the bytes after it; 0 if they are aligned without it.
std::size_t padding_bytes_at(std::uint64_t aligned_offset_bytes, std::uint64_t alignment_bytes) {
    std::uint64_t bytes = (alignment_bytes - aligned_offset_bytes % alignment_bytes) % alignment_bytes;
    while (bytes != 0 && bytes < min_padding_bytes)
        bytes += alignment_bytes;
    return static_cast<std::size_t>(bytes);
}

}  // namespace

zip_writer::zip_writer(const std::filesystem::path& path, zip64_thresholds thresholds)
    : thresholds_(thresholds), file_(path) {}

void zip_writer::begin(std::string_view name, std::uint64_t size_bytes, std::uint64_t aligned_byte,
                       std::uint64_t alignment_bytes) {
    const auto refuse = [&](const std::string& why) {
        throw invalid_argument(
            fmt::format("cannot write the member {} to '{}': {}", quote(name), path(), why));
    };
    constexpr std::size_t max_name_bytes = 0xFFFF;
    if (const auto defect = zip_name_defect(name); !defect.empty()) {
        refuse(fmt::format("the name is {}", defect));
    }
    const auto characters = count_code_points(name);
    if (!characters) refuse("the name is not UTF-8");
    if (name.size() > max_name_bytes) refuse(fmt::format("the name has {} bytes", name.size()));
    if (names_.contains(name)) refuse("there is one of that name already");

    const bool zip64 = needs_zip64(size_bytes);
    const std::uint64_t padding_at =
        position_bytes_ + zip_local_size_bytes + name.size() + (zip64 ? local_zip64_bytes : 0);
    const std::size_t padding_bytes = padding_bytes_at(padding_at + aligned_byte, alignment_bytes);

    zip_entry entry;
    entry.name = name;
    entry.version_needed = zip64 ? version_zip64 : version_plain;
    entry.flags = *characters == name.size() ? 0 : zip_flag_utf8;
    entry.compressed_bytes = entry.size_bytes = size_bytes;
    entry.header_offset_bytes = position_bytes_;

    record_writer header;
    const std::uint64_t narrow_size = zip64 ? zip_saturated_32 : size_bytes;
    header.text("PK\3\4").u16(entry.version_needed).u16(entry.flags).u16(0).u16(0).u16(earliest_date);
    header.u32(0).u32(narrow_size).u32(narrow_size);  // the CRC-32 is known at the end
    header.u16(name.size()).u16((zip64 ? local_zip64_bytes : 0) + padding_bytes).text(name);
    if (zip64) header.u16(1).u16(16).u64(size_bytes).u64(size_bytes);
    if (padding_bytes > 0) {
        header.u16(padding_id).u16(padding_bytes - 4).u16(alignment_bytes).zeros(padding_bytes - 6);
    }
    append(header.bytes());
    names_.emplace(name);
    entries_.push_back(std::move(entry));
}

void zip_writer::write(std::span<const std::byte> bytes) {
    append(bytes);
    zip_entry& entry = entries_.back();
    entry.crc32 = ::libdeflate_crc32(entry.crc32, bytes.data(), bytes.size());
}

void zip_writer::end() {
    const zip_entry& entry = entries_.back();
    file_.write_at(entry.header_offset_bytes + local_crc32_offset_bytes,
                   record_writer().u32(entry.crc32).bytes());
}

void zip_writer::finish() {
    const std::uint64_t directory_offset_bytes = position_bytes_;
    for (const zip_entry& entry : entries_) {
        const bool wide_size = needs_zip64(entry.size_bytes);
        const bool wide_offset = needs_zip64(entry.header_offset_bytes);
        const std::uint64_t extra_bytes =
            wide_size || wide_offset ? 4u + (wide_size ? 16u : 0u) + (wide_offset ? 8u : 0u) : 0u;
        const std::uint64_t version = extra_bytes > 0 ? version_zip64 : version_plain;
        const std::uint64_t narrow_size = wide_size ? zip_saturated_32 : entry.size_bytes;
        record_writer fixed;
        fixed.text("PK\1\2").u16(made_on_unix | version).u16(version).u16(entry.flags);
        fixed.u16(0).u16(0).u16(earliest_date).u32(entry.crc32).u32(narrow_size).u32(narrow_size);
        fixed.u16(entry.name.size()).u16(extra_bytes).u16(0).u16(0).u16(0).u32(unix_mode);
        fixed.u32(wide_offset ? zip_saturated_32 : entry.header_offset_bytes).text(entry.name);
        if (extra_bytes > 0) fixed.u16(1).u16(extra_bytes - 4);
        if (wide_size) fixed.u64(entry.size_bytes).u64(entry.size_bytes);
        if (wide_offset) fixed.u64(entry.header_offset_bytes);
        append(fixed.bytes());
    }

    const std::uint64_t directory_bytes = position_bytes_ - directory_offset_bytes;
    const bool wide_count = entries_.size() >= thresholds_.entries;
    const bool wide_bytes = needs_zip64(directory_bytes);
    const bool wide_offset = needs_zip64(directory_offset_bytes);
    record_writer end;
    if (wide_count || wide_bytes || wide_offset) {
        end.text("PK\6\6").u64(44).u16(made_on_unix | version_zip64).u16(version_zip64).u32(0).u32(0);
        end.u64(entries_.size()).u64(entries_.size()).u64(directory_bytes).u64(directory_offset_bytes);
        end.text("PK\6\7").u32(0).u64(position_bytes_).u32(1);
    }
    const std::uint64_t narrow_count = wide_count ? 0xFFFF : entries_.size();
    end.text("PK\5\6").u16(0).u16(0).u16(narrow_count).u16(narrow_count);
    end.u32(wide_bytes ? zip_saturated_32 : directory_bytes);
    end.u32(wide_offset ? zip_saturated_32 : directory_offset_bytes).u16(0);
    append(end.bytes());
    file_.commit();
}

void zip_writer::append(std::span<const std::byte> bytes) {
    file_.write(bytes);
    position_bytes_ += bytes.size();
}

}  // namespace pinflow::detail
