#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "formats/npz_member.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npz.hpp"

/// What must hold for the readers of .npz files and any bytes: shared by the fuzz target and the test that
/// replays its findings.

namespace zip_directory_invariants {

/// Runs `function`.
/// @return its result; an empty string if it throws format_error or unsupported with a one-line message;
/// otherwise what was wrong with the exception.
template <typename Function>
std::string broken_in(Function function) {
    const auto broken_sentence = [](const std::string& sentence) {
        return sentence.find('\n') == sentence.npos ? std::string() : "the sentence has several lines";
    };
    try {
        return function();
    } catch (const pinflow::format_error& failure) {
        return broken_sentence(failure.what());
    } catch (const pinflow::unsupported& failure) {
        return broken_sentence(failure.what());
    } catch (const std::exception& failure) {
        return std::string("an exception of another type: ") + failure.what();
    }
}

/// Members are inflated up to this size.
inline constexpr std::uint64_t max_bytes = std::uint64_t{1} << 18;

/// One member: both ways of reading it give the same.
inline std::string broken_for(const pinflow::detail::zip_entry& entry,
                              const pinflow::detail::read_bytes& read) {
    const auto member = pinflow::detail::begin_npz_member(entry, read, 16);
    if (member.data_offset_bytes > entry.end_bytes ||
        entry.compressed_bytes > entry.end_bytes - member.data_offset_bytes) {
        return "the data reaches into what follows it";
    }
    if (member.header.data_offset_bytes > entry.size_bytes ||
        member.payload_bytes != entry.size_bytes - member.header.data_offset_bytes) {
        return "the elements are not all that follows the header";
    }
    if (entry.size_bytes > max_bytes) return "";
    std::vector<std::byte> elements(member.payload_bytes);
    for (std::size_t at = 0; at < elements.size(); at += 999)
        member.reader->read(
            std::span(elements).subspan(at, std::min<std::size_t>(999, elements.size() - at)));
    member.reader->finish();
    if (!entry.deflated()) return "";
    std::vector<std::byte> whole(entry.size_bytes);
    pinflow::detail::zip_inflater().inflate(entry, member.data_offset_bytes, read, whole);
    return std::ranges::equal(elements, std::span(whole).last(elements.size()))
               ? ""
               : "inflating whole gives other bytes";
}

/// The public functions, on a file of these bytes in memory.
inline std::string broken_for_file(std::span<const std::byte> bytes, std::size_t members) {
    const int descriptor = ::memfd_create("npz", MFD_CLOEXEC);
    if (descriptor == -1 ||
        ::write(descriptor, bytes.data(), bytes.size()) != static_cast<::ssize_t>(bytes.size())) {
        throw std::runtime_error("there is no file in memory");
    }
    const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
    const std::string broken = broken_in([&]() -> std::string {
        const auto listings = pinflow::list_npz(path);
        if (listings.size() != members) return "not every member is listed";
        for (const auto& listing : listings) {
            if (listing.reason.empty()) return "a listing has no reason";
            if (!listing.dtype || listing.size_bytes > max_bytes) continue;
            const std::string broken_array = broken_in([&]() -> std::string {
                const auto array = pinflow::open_npz(path, listing.name);
                return array.size_bytes() == listing.size_bytes ? ""
                                                                : "an array has another size than listed";
            });
            if (!broken_array.empty()) return broken_array;
        }
        return "";
    });
    ::close(descriptor);
    return broken;
}

/// @return an empty string, or what does not hold.
inline std::string broken_for(std::span<const std::byte> bytes) {
    const pinflow::detail::read_bytes read = [bytes](std::uint64_t offset, std::span<std::byte> destination) {
        if (offset > bytes.size() || destination.size() > bytes.size() - offset) {
            throw std::logic_error("bytes past the end were asked for");
        }
        std::ranges::copy(bytes.subspan(static_cast<std::size_t>(offset), destination.size()),
                          destination.begin());
    };
    return broken_in([&]() -> std::string {
        const auto entries = pinflow::detail::read_zip_directory(bytes.size(), read);
        for (const auto& entry : entries) {
            if (entry.end_bytes > bytes.size() || entry.header_offset_bytes > entry.end_bytes ||
                entry.compressed_bytes > entry.end_bytes - entry.header_offset_bytes) {
                return "a member is outside the file";
            }
            const std::string broken = broken_in([&] { return broken_for(entry, read); });
            if (!broken.empty()) return broken;
        }
        // folders are not listed
        const auto members = std::ranges::count_if(
            entries, [](const auto& entry) { return !entry.name.ends_with('/') || entry.size_bytes != 0; });
        return broken_for_file(bytes, static_cast<std::size_t>(members));
    });
}

}  // namespace zip_directory_invariants
