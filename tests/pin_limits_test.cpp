#include "src/device/pin_limits.hpp"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <limits>
#include <string>

#include "tests/fake_locker.hpp"
#include "tests/temporary_folder.hpp"

using namespace pinflow;
using namespace pinflow::detail;

TEST_CASE("pin: the smallest limit is the budget, and a setting passes RLIMIT_MEMLOCK alone") {
    memory_limits limits;
    CHECK(choose_pin_budget(0, limits).size_bytes == std::numeric_limits<std::uint64_t>::max());
    limits.available_bytes = 4000;
    CHECK(choose_pin_budget(0, limits).size_bytes == 3000);
    CHECK(choose_pin_budget(3500, limits).size_bytes == 3500);
    CHECK(choose_pin_budget(9000, limits).size_bytes == 4000);
    limits.cgroup_bytes = 2000;
    CHECK(choose_pin_budget(0, limits).size_bytes == 1500);
    CHECK(contains(choose_pin_budget(0, limits).source, "cgroup"));
    limits.locked_bytes = 100;
    CHECK(choose_pin_budget(0, limits).size_bytes == 100);
    CHECK(contains(choose_pin_budget(0, limits).source, "RLIMIT_MEMLOCK"));
    CHECK(choose_pin_budget(1800, limits).size_bytes == 1800);
}

TEST_CASE("pin: only mappings that the driver registers in place are offered to it") {
    const std::string maps =
        "1000-3000 r--s 00000000 fe:01 42    /data/x.npy\n"
        "3000-4000 r--s 00002000 fe:01 42    /data/x.npy\n"
        "4000-5000 rw-s 00000000 00:19 7     /dev/shm/table\n"
        "5000-6000 r--p 00000000 fe:01 42    /data/x.npy\n"
        "6000-7000 rw-p 00000000 fe:01 42    /data/x.npy\n"
        "7000-8000 rw-p 00000000 00:00 0 \n"
        "8000-9000 r--p 00000000 00:00 0 \n"
        "9000-a000 ---p 00000000 00:00 0 \n"
        "b000-c000 rw-p 00000000 00:00 0     [heap]\n";
    const auto judged = [&](std::uintptr_t begin, std::uintptr_t end) {
        return judge_pages(maps, {reinterpret_cast<const std::byte*>(begin), end - begin});
    };
    CHECK(judged(0x1000, 0x4000).refusal.empty());
    CHECK(judged(0x1000, 0x4000).read_only);
    CHECK(judged(0x2000, 0x3000).read_only);
    CHECK(judged(0x4000, 0x5000).refusal.empty());
    CHECK_FALSE(judged(0x4000, 0x5000).read_only);
    CHECK(contains(judged(0x3000, 0x5000).refusal, "different kinds"));
    CHECK(contains(judged(0x5000, 0x6000).refusal, "private mapping of a file"));
    CHECK(contains(judged(0x6000, 0x7000).refusal, "private mapping of a file"));
    CHECK(judged(0x7000, 0x8000).refusal.empty());
    CHECK_FALSE(judged(0x7000, 0x8000).read_only);
    CHECK(contains(judged(0x8000, 0x9000).refusal, "reading only"));
    CHECK(contains(judged(0x9000, 0xa000).refusal, "right to read"));
    CHECK(contains(judged(0x7000, 0x9000).refusal, "reading only"));
    CHECK(contains(judged(0xa000, 0xb000).refusal, "not all of it is mapped"));
    CHECK(contains(judged(0xb000, 0xd000).refusal, "not all of it is mapped"));
    CHECK(contains(judge_pages({}, {}).refusal, "/proc/self/maps"));
}

TEST_CASE("pin: a real file mapping is judged read-only, a real private one is refused") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 3 * page);
    const page_verdict shared = judge_pages(read_own_maps(), file->bytes());
    CHECK(shared.refusal.empty());
    CHECK(shared.read_only);
    void* const mapped =
        ::mmap(nullptr, page, PROT_READ, MAP_PRIVATE, file->file()->lease_descriptor().get(), 0);
    REQUIRE(mapped != MAP_FAILED);
    CHECK_FALSE(judge_pages(read_own_maps(), {static_cast<const std::byte*>(mapped), page}).refusal.empty());
    ::munmap(mapped, page);
}

TEST_CASE("pin: sizes are written as people read them") {
    CHECK(in_binary_units(0) == "0 bytes");
    CHECK(in_binary_units(1023) == "1023 bytes");
    CHECK(in_binary_units(1536) == "1.5 KiB");
    CHECK(in_binary_units(std::uint64_t{3328} << 20) == "3.2 GiB");
}
