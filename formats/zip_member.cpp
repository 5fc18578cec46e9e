#include "formats/zip_member.hpp"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "formats/libdeflate_handle.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"

namespace pinflow::detail {

namespace {

/// Throws format_error; the message begins with the member's name.
template <typename... Arguments>
[[noreturn]] void fail(const zip_entry& entry, fmt::format_string<Arguments...> sentence,
                       Arguments&&... arguments) {
    throw format_error(fmt::format("the member {} {}", quote(entry.name),
                                   fmt::format(sentence, std::forward<Arguments>(arguments)...)));
}

std::uint32_t crc32_of(std::uint32_t before, std::span<const std::byte> bytes) {
    return libdeflate_crc32(before, bytes.data(), bytes.size());
}

void check_crc32(const zip_entry& entry, std::uint32_t crc32) {
    if (crc32 != entry.crc32) {
        fail(entry, "is damaged: its CRC-32 is {:08x}, the directory declares {:08x}", crc32, entry.crc32);
    }
}

}  // namespace

void check_zip_member_readable(const zip_entry& entry) {
    const auto refuse = [&](const std::string& why) {
        throw unsupported(fmt::format("the member {} {}", quote(entry.name), why));
    };
    if ((entry.flags & zip_flag_encrypted) != 0) refuse("is encrypted");
    if ((entry.flags & zip_flag_patched) != 0) refuse("is a patch of other data");
    if (entry.method != 0 && !entry.deflated()) {
        refuse(
            fmt::format("is compressed by method {}; 0 (stored) and 8 (deflated) are known", entry.method));
    }
    constexpr unsigned known_version = 63;
    if (const unsigned version = entry.version_needed & 0xFFu; version > known_version) {
        refuse(
            fmt::format("needs version {}.{} of the zip format; 6.3 is known", version / 10, version % 10));
    }
    if (!entry.deflated() && entry.compressed_bytes != entry.size_bytes) {
        fail(entry, "is stored uncompressed, but its size is given as {} bytes and its compressed size as {}",
             entry.size_bytes, entry.compressed_bytes);
    }
    // Deflate's maximum ratio: 258 bytes for a length and a distance of one bit each.
    constexpr std::uint64_t max_times = 1032;
    std::uint64_t max_bytes = 0;
    if (entry.deflated() && multiply(entry.compressed_bytes, max_times, max_bytes) &&
        entry.size_bytes > max_bytes) {
        fail(entry, "is said to have {} bytes, which {} compressed bytes cannot make", entry.size_bytes,
             entry.compressed_bytes);
    }
}

// ---- piece by piece ---------------------------------------------------------------------------------------

struct zip_member_reader::inflation {
    explicit inflation(std::size_t piece_bytes) : piece(piece_bytes) {
        if (::inflateInit2(&stream, -MAX_WBITS) != Z_OK) throw std::bad_alloc();
    }
    inflation(const inflation&) = delete;
    inflation& operator=(const inflation&) = delete;
    ~inflation() { ::inflateEnd(&stream); }

    ::z_stream stream{};
    std::vector<std::byte> piece;
    std::uint64_t compressed_left_bytes = 0;  // not read from the file yet
    bool ended = false;

    /// Inflates into `destination` until it is full or the compressed data ends. @return the bytes written.
    std::size_t inflate(std::span<std::byte> destination, const zip_entry& entry, const read_bytes& read,
                        std::uint64_t& position_bytes);
};

std::size_t zip_member_reader::inflation::inflate(std::span<std::byte> destination, const zip_entry& entry,
                                                  const read_bytes& read, std::uint64_t& position_bytes) {
    // zlib counts in 32 bits
    constexpr std::size_t max_at_once = std::size_t{1} << 30;
    std::size_t written = 0;
    while (written < destination.size() && !ended) {
        // if no input is left, zlib may still hold symbols of what it has taken
        if (stream.avail_in == 0 && compressed_left_bytes > 0) {
            const auto next = std::span(piece).first(
                static_cast<std::size_t>(std::min<std::uint64_t>(piece.size(), compressed_left_bytes)));
            read(position_bytes, next);
            position_bytes += next.size();
            compressed_left_bytes -= next.size();
            stream.next_in = reinterpret_cast<::Bytef*>(next.data());
            stream.avail_in = static_cast<::uInt>(next.size());
        }
        const auto room = destination.subspan(written, std::min(destination.size() - written, max_at_once));
        stream.next_out = reinterpret_cast<::Bytef*>(room.data());
        stream.avail_out = static_cast<::uInt>(room.size());
        const int status = ::inflate(&stream, Z_NO_FLUSH);
        written += room.size() - stream.avail_out;
        ended = status == Z_STREAM_END;
        if (status == Z_MEM_ERROR) throw std::bad_alloc();
        if (status == Z_BUF_ERROR && stream.avail_in == 0 && compressed_left_bytes == 0) {
            fail(entry, "is damaged: its compressed data is truncated after {} of {} inflated bytes",
                 stream.total_out, entry.size_bytes);
        }
        if (!ended && status != Z_OK && status != Z_BUF_ERROR) {
            fail(entry, "is damaged: its compressed data is wrong after {} of {} inflated bytes",
                 stream.total_out, entry.size_bytes);
        }
    }
    return written;
}

zip_member_reader::zip_member_reader(zip_entry entry, std::uint64_t data_offset_bytes, read_bytes read,
                                     std::size_t piece_bytes)
    : entry_(std::move(entry)),
      read_(std::move(read)),
      position_bytes_(data_offset_bytes),
      left_bytes_(entry_.size_bytes) {
    check_zip_member_readable(entry_);
    if (entry_.deflated()) {
        inflation_ = std::make_unique<inflation>(static_cast<std::size_t>(
            std::min<std::uint64_t>(piece_bytes, std::max<std::uint64_t>(entry_.compressed_bytes, 1))));
        inflation_->compressed_left_bytes = entry_.compressed_bytes;
    }
}

zip_member_reader::~zip_member_reader() = default;

void zip_member_reader::read(std::span<std::byte> destination) {
    if (destination.size() > left_bytes_) {
        throw invalid_argument(fmt::format("cannot read {} bytes of the member {}, which has {} left",
                                           destination.size(), quote(entry_.name), left_bytes_));
    }
    if (inflation_) {
        const std::size_t count = inflation_->inflate(destination, entry_, read_, position_bytes_);
        if (count < destination.size()) {
            fail(entry_, "is damaged: its compressed data ends after {} bytes, but the directory declares {}",
                 entry_.size_bytes - left_bytes_ + count, entry_.size_bytes);
        }
    } else {
        read_(position_bytes_, destination);
        position_bytes_ += destination.size();
    }
    left_bytes_ -= destination.size();
    crc32_ = crc32_of(crc32_, destination);
}

void zip_member_reader::finish() {
    std::vector<std::byte> rest(static_cast<std::size_t>(std::min<std::uint64_t>(left_bytes_, 1u << 18)));
    while (left_bytes_ > 0) {
        read(std::span(rest).first(
            static_cast<std::size_t>(std::min<std::uint64_t>(rest.size(), left_bytes_))));
    }
    if (inflation_) {
        std::byte one_more{};
        if (inflation_->inflate({&one_more, 1}, entry_, read_, position_bytes_) > 0) {
            fail(entry_,
                 "is damaged: its compressed data continues after the {} bytes that the directory declares",
                 entry_.size_bytes);
        }
        const std::uint64_t unused = inflation_->compressed_left_bytes + inflation_->stream.avail_in;
        if (unused > 0) fail(entry_, "is damaged: {} bytes follow its compressed data", unused);
    }
    check_crc32(entry_, crc32_);
}

// ---- as a whole -------------------------------------------------------------------------------------------

struct zip_inflater::decompressor : libdeflate_handle {};

zip_inflater::zip_inflater() : decompressor_(std::make_unique<decompressor>()) {}

zip_inflater::~zip_inflater() = default;

void zip_inflater::inflate(const zip_entry& entry, std::uint64_t data_offset_bytes, const read_bytes& read,
                           std::span<std::byte> destination) {
    if (destination.size() != entry.size_bytes) {
        throw invalid_argument(fmt::format("the member {} does not fit {} bytes of memory", quote(entry.name),
                                           destination.size()));
    }
    if (compressed_.size_bytes() < entry.compressed_bytes) {
        compressed_ = {};  // release it before allocating the larger one
        compressed_ = memory_region::anonymous(entry.compressed_bytes);
    }
    // read into memory: a mapping would raise SIGBUS if the file were truncated meanwhile
    const auto compressed = compressed_.bytes().first(static_cast<std::size_t>(entry.compressed_bytes));
    read(data_offset_bytes, compressed);

    std::size_t taken = 0;
    std::size_t written = 0;
    switch (::libdeflate_deflate_decompress_ex(decompressor_->handle, compressed.data(), compressed.size(),
                                               destination.data(), destination.size(), &taken, &written)) {
        case LIBDEFLATE_SUCCESS:
            break;
        case LIBDEFLATE_INSUFFICIENT_SPACE:
            fail(entry,
                 "is damaged: its compressed data continues after the {} bytes that the directory declares",
                 entry.size_bytes);
        default:
            fail(entry, "is damaged: its compressed data is wrong or truncated");
    }
    if (written < destination.size()) {
        fail(entry, "is damaged: its compressed data ends after {} bytes, but the directory declares {}",
             written, entry.size_bytes);
    }
    if (taken < compressed.size()) {
        fail(entry, "is damaged: {} bytes follow its compressed data", compressed.size() - taken);
    }
    check_crc32(entry, crc32_of(0, destination));
}

}  // namespace pinflow::detail
