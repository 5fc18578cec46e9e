#include "src/device/pin_limits.hpp"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "pinflow/memory.hpp"
#include "tests/fake_locker.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;
using namespace pinflow::detail;

TEST_CASE("pin: the budget is a part of what the smallest limit leaves, and never more than that") {
    memory_limits limits;
    const auto budget = [&](std::uint64_t setting_bytes) {
        return choose_pin_budget(setting_bytes, pin_limit::memory, limits);
    };
    CHECK(budget(0).size_bytes == std::numeric_limits<std::uint64_t>::max());
    limits.available_bytes = 4000;
    CHECK(budget(0).size_bytes == 3000);
    CHECK(budget(3500).size_bytes == 3500);
    CHECK(contains(budget(3500).bound, "that was set"));
    CHECK(budget(9000).size_bytes == 4000);
    limits.cgroup_bytes = 2000;
    CHECK(budget(0).size_bytes == 1500);
    CHECK(contains(budget(0).bound, "cgroup"));
    limits.locked_bytes = 100;
    CHECK(budget(0).size_bytes == 1500);
    CHECK(budget(1800).size_bytes == 1800);
}

TEST_CASE("pin: RLIMIT_MEMLOCK bounds the budget only on request") {
    memory_limits limits;
    limits.available_bytes = 4000;
    limits.locked_bytes = 100;
    CHECK(choose_pin_budget(0, pin_limit::memory, limits).size_bytes == 3000);
    CHECK(choose_pin_budget(0, pin_limit::memlock, limits).size_bytes == 100);
    CHECK(contains(choose_pin_budget(0, pin_limit::memlock, limits).bound, "RLIMIT_MEMLOCK"));
    CHECK(choose_pin_budget(2000, pin_limit::memlock, limits).size_bytes == 100);
    CHECK(choose_pin_budget(50, pin_limit::memlock, limits).size_bytes == 50);
    limits.locked_bytes.reset();  // unlimited, or CAP_IPC_LOCK
    CHECK(choose_pin_budget(0, pin_limit::memlock, limits).size_bytes == 3000);
}

TEST_CASE("pin: pinned buffers count towards a budget that was set, and towards RLIMIT_MEMLOCK") {
    memory_limits limits;
    limits.available_bytes = 4000;
    limits.locked_bytes = 1000;
    const pin_budget rest = choose_pin_budget(3000, pin_limit::memory, limits, 512);
    CHECK(rest.size_bytes == 2488);
    CHECK(contains(rest.bound, "512 bytes of pinned buffers"));
    CHECK(choose_pin_budget(3000, pin_limit::memory, limits, 3001).size_bytes == 0);
    CHECK(choose_pin_budget(3000, pin_limit::memlock, limits, 512).size_bytes == 488);
    // the memory left does not contain them
    CHECK(choose_pin_budget(0, pin_limit::memory, limits, 512).size_bytes == 3000);
    CHECK(choose_pin_budget(4400, pin_limit::memory, limits, 512).size_bytes == 3888);
    CHECK(choose_pin_budget(9000, pin_limit::memory, limits, 512).size_bytes == 4000);
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
    const process_mappings mappings(maps);
    const auto judged = [&](std::uintptr_t begin, std::uintptr_t end) {
        return mappings.judge({reinterpret_cast<const std::byte*>(begin), end - begin});
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
    CHECK(contains(judged(0x500, 0x1500).refusal, "not all of it is mapped"));
    CHECK(contains(judged(0xc000, 0xd000).refusal, "not all of it is mapped"));
    CHECK(contains(process_mappings("").judge({}).refusal, "/proc/self/maps"));
}

TEST_CASE("pin: a real file mapping is judged read-only, a real private one is refused") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 3 * page);
    const page_verdict shared = process_mappings(read_own_maps()).judge(file->bytes());
    CHECK(shared.refusal.empty());
    CHECK(shared.read_only);
    void* const mapped =
        ::mmap(nullptr, page, PROT_READ, MAP_PRIVATE, file->file()->lease_descriptor().get(), 0);
    REQUIRE(mapped != MAP_FAILED);
    const page_verdict copied =
        process_mappings(read_own_maps()).judge({static_cast<const std::byte*>(mapped), page});
    CHECK(contains(copied.refusal, "private mapping of a file"));
    ::munmap(mapped, page);
}

TEST_CASE(
    "pin: other memory may begin in the last page of an array in the heap, but not of anonymous pages") {
    // the system puts them side by side, so that all are one line of /proc/self/maps
    std::vector<memory_region> regions(16);
    for (memory_region& region : regions)
        region = memory_region::anonymous(page + 1000);
    const std::vector<std::byte> in_heap(1000);
    const process_mappings mappings(read_own_maps());
    for (const memory_region& region : regions) {
        CHECK_FALSE(mappings.may_share_last_page(region.bytes()));
        // a part of it, behind which the rest follows
        CHECK(mappings.may_share_last_page(region.bytes().first(100)));
    }
    CHECK(mappings.may_share_last_page(in_heap));
}

TEST_CASE("pin: sizes are written as people read them") {
    CHECK(in_binary_units(0) == "0 bytes");
    CHECK(in_binary_units(1023) == "1023 bytes");
    CHECK(in_binary_units(1536) == "1.5 KiB");
    CHECK(in_binary_units(std::uint64_t{3328} << 20) == "3.2 GiB");
}
