#include "pinflow/memory.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"
#include "tests/support/file_bytes.hpp"

using pinflow::memory_region;
namespace seam = pinflow::detail::system;

namespace {

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;

/// A region that counts how often it is given back.
struct counted_memory {
    std::array<std::byte, 8> bytes{};
    int releases = 0;

    memory_region region() {
        const auto release = [](std::byte*, std::uint64_t, void* context) noexcept {
            ++*static_cast<int*>(context);
        };
        return {bytes.data(), bytes.size(), release, &releases};
    }
};

/// Pages of this process's address space; asked without allocating any.
std::uint64_t mapped_pages() {
    std::array<char, 64> text{};
    const int descriptor = ::open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    REQUIRE(descriptor >= 0);
    const ::ssize_t count = ::read(descriptor, text.data(), text.size() - 1);
    ::close(descriptor);
    REQUIRE(count > 0);
    return std::strtoull(text.data(), nullptr, 10);
}

std::uintptr_t address_of(const memory_region& region) {
    return reinterpret_cast<std::uintptr_t>(region.data());
}

}  // namespace

TEST_CASE("memory: a region made from nothing is empty and gives nothing back") {
    const memory_region region;
    CHECK_FALSE(region);
    CHECK(region.data() == nullptr);
    CHECK(region.size_bytes() == 0);
    CHECK(region.bytes().empty());
}

TEST_CASE("memory: a region is released once, with its own data, size and context") {
    struct record {
        std::byte* data = nullptr;
        std::uint64_t size_bytes = 0;
        int calls = 0;
    } seen;
    std::byte byte{};
    {
        const memory_region region(
            &byte, 1,
            [](std::byte* data, std::uint64_t size_bytes, void* context) noexcept {
                auto& result = *static_cast<record*>(context);
                result = {data, size_bytes, result.calls + 1};
            },
            &seen);
        CHECK(static_cast<bool>(region));
        CHECK(seen.calls == 0);
    }
    CHECK(seen.calls == 1);
    CHECK(seen.data == &byte);
    CHECK(seen.size_bytes == 1);
}

TEST_CASE("memory: a region without bytes is given back as well") {
    int releases = 0;
    {
        const memory_region region(
            nullptr, 0,
            [](std::byte*, std::uint64_t, void* context) noexcept { ++*static_cast<int*>(context); },
            &releases);
    }
    CHECK(releases == 1);
}

TEST_CASE("memory: moving a region moves its release, and leaves nothing behind") {
    counted_memory memory;
    {
        memory_region first = memory.region();
        const memory_region second = std::move(first);
        CHECK(first.data() == nullptr);  // NOLINT(bugprone-use-after-move,clang-analyzer-cplusplus.Move)
        CHECK(first.size_bytes() == 0);
        CHECK_FALSE(first);
        CHECK(second.data() == memory.bytes.data());
        CHECK(second.size_bytes() == memory.bytes.size());
        CHECK(memory.releases == 0);
    }
    CHECK(memory.releases == 1);
}

TEST_CASE("memory: assigning gives back what was held before, once, and at once") {
    counted_memory held;
    counted_memory taken;
    {
        memory_region target = held.region();
        memory_region source = taken.region();
        target = std::move(source);
        CHECK(held.releases == 1);
        CHECK(taken.releases == 0);
        CHECK(target.data() == taken.bytes.data());
        CHECK_FALSE(source);  // NOLINT(bugprone-use-after-move,clang-analyzer-cplusplus.Move)
        target = memory_region();
        CHECK(taken.releases == 1);
    }
    CHECK(held.releases == 1);
    CHECK(taken.releases == 1);
}

TEST_CASE("memory: assigning a region to itself changes nothing") {
    counted_memory memory;
    {
        memory_region region = memory.region();
        memory_region& itself = region;
        region = std::move(itself);
        CHECK(memory.releases == 0);
        CHECK(region.data() == memory.bytes.data());
    }
    CHECK(memory.releases == 1);
}

TEST_CASE("memory: no bytes are an empty region") {
    CHECK_FALSE(memory_region::anonymous(0));
}

TEST_CASE("memory: anonymous pages are aligned, zero, as many as asked for and writable to the last byte") {
    for (const std::uint64_t size_bytes :
         {std::uint64_t{1}, std::uint64_t{4095}, std::uint64_t{4096}, std::uint64_t{4097}, 2 * mebibyte - 1,
          2 * mebibyte, 2 * mebibyte + 1, 3 * mebibyte, 4 * mebibyte - 1, 6 * mebibyte + 5}) {
        CAPTURE(size_bytes);
        const memory_region region = memory_region::anonymous(size_bytes);
        CHECK(region.size_bytes() == size_bytes);
        CHECK(address_of(region) % 4096 == 0);
        if (size_bytes >= 2 * mebibyte) CHECK(address_of(region) % (2 * mebibyte) == 0);
        CHECK(std::ranges::all_of(region.bytes(), [](std::byte byte) { return byte == std::byte{0}; }));
        std::ranges::fill(region.bytes(), std::byte{0x5A});
        CHECK(region.bytes().back() == std::byte{0x5A});
    }
}

TEST_CASE("memory: the excess of huge-page alignment is unmapped at once, the rest at the end") {
    const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    constexpr std::size_t count = 64;
    std::vector<memory_region> regions;
    regions.reserve(count);
    for (const std::uint64_t size_bytes :
         {2 * mebibyte, 2 * mebibyte + 1, 3 * mebibyte, 3 * mebibyte + 4095, 5 * mebibyte + 4097}) {
        CAPTURE(size_bytes);
        const std::uint64_t before = mapped_pages();
        for (std::size_t index = 0; index < count; ++index) {
            regions.push_back(memory_region::anonymous(size_bytes));
        }
        const std::uint64_t held = mapped_pages() - before;
        for (const memory_region& region : regions) {  // a neighbour's trimming must not have hit it
            region.bytes().front() = region.bytes().back() = std::byte{1};
        }
        regions.clear();
        const std::uint64_t left = mapped_pages() - before;
        CHECK(held == count * ((size_bytes + page_bytes - 1) / page_bytes));
        CHECK(left == 0);
    }
}

TEST_CASE("memory: impossible sizes fail with a message, also if they overflow with the alignment") {
    constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();
    for (const std::uint64_t size_bytes :
         {std::uint64_t{1} << 60, std::uint64_t{1} << 63, largest - 4 * mebibyte, largest - 2 * mebibyte,
          largest - 2 * mebibyte + 1, largest - mebibyte, largest - 4095, largest}) {
        CAPTURE(size_bytes);
        const std::uint64_t before = mapped_pages();
        std::string sentence;
        std::error_code code;
        try {
            memory_region::anonymous(size_bytes);
        } catch (const pinflow::system_failure& failure) {
            sentence = failure.what();
            code = failure.code();
        }
        CHECK(code == std::errc::not_enough_memory);
        CHECK(sentence.starts_with("cannot allocate "));
        CHECK(contains(sentence, " bytes of memory: "));
        CHECK(mapped_pages() - before < 64);  // the exception's own memory aside
    }
}

TEST_CASE("memory: a failed allocation gives a message with the size and the system's reason") {
    const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
        return what == seam::call::mmap ? seam::injected_failure{.error = ENOMEM} : seam::injected_failure{};
    });
    CHECK(contains(message_of<pinflow::system_failure>([] { memory_region::anonymous(4096); }),
                   "cannot allocate 4096 bytes of memory: Cannot allocate memory"));
}

TEST_CASE("memory: huge pages are optional, and regions work without them") {
    const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
        return what == seam::call::madvise ? seam::injected_failure{.error = EINVAL}
                                           : seam::injected_failure{};
    });
    const memory_region region = memory_region::anonymous(2 * mebibyte);
    CHECK(region.bytes().back() == std::byte{0});
}
