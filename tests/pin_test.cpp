#include "pinflow/pin.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/mapped_file.hpp"
#include "pinflow/memory.hpp"
#include "src/device/pin_limits.hpp"
#include "src/device/pin_registry.hpp"
#include "src/device/pin_worker.hpp"
#include "tests/file_bytes.hpp"
#include "tests/temporary_folder.hpp"

using namespace pinflow;
using namespace pinflow::detail;

namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;

/// Stands in for CUDA: remembers what is locked, refuses to lock a page twice, and fails or waits when a test
/// wants it.
class fake_locker final : public page_locker {
 public:
    std::string lock(std::span<const std::byte> pages, bool read_only) override {
        std::unique_lock guard(mutex);
        ++calls;
        ++waiting;
        changed.notify_all();
        changed.wait(guard, [&] { return permits > 0; });
        --permits;
        --waiting;
        if (calls == fail_at_call) return "cudaErrorMemoryAllocation (out of memory)";
        for (const auto& other : locked) {
            if (other.data() < pages.data() + pages.size() && pages.data() < other.data() + other.size()) {
                return "cudaErrorHostMemoryAlreadyRegistered";
            }
        }
        locked.push_back(pages);
        all_read_only = all_read_only && read_only;
        return {};
    }
    bool unlock(std::span<const std::byte> pages) noexcept override {
        const std::lock_guard guard(mutex);
        const auto found = std::find_if(locked.begin(), locked.end(), [&](const auto& there) {
            return there.data() == pages.data() && there.size() == pages.size();
        });
        if (found == locked.end()) {
            ++strays;
        } else {
            if (unlocks) locked.erase(found);
        }
        return unlocks;
    }

    void give_way() noexcept override { ++ways_given; }

    std::uint64_t locked_bytes() {
        const std::lock_guard guard(mutex);
        std::uint64_t sum = 0;
        for (const auto& pages : locked)
            sum += pages.size();
        return sum;
    }
    void allow(std::size_t calls_more) {
        {
            const std::lock_guard guard(mutex);
            permits += calls_more;
        }
        changed.notify_all();
    }
    void await_waiting() {
        std::unique_lock guard(mutex);
        changed.wait(guard, [&] { return waiting > 0; });
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::span<const std::byte>> locked;
    std::size_t calls = 0;
    std::size_t waiting = 0;
    std::size_t permits = std::numeric_limits<std::size_t>::max() / 2;
    std::size_t fail_at_call = 0;
    std::size_t strays = 0;
    std::size_t ways_given = 0;  // read after the worker has ended
    bool all_read_only = true;
    bool unlocks = true;
};

std::span<const std::byte> pages_at(const memory_region& memory, std::uint64_t first, std::uint64_t count) {
    return memory.bytes().subspan(first * page, count * page);
}

std::string acquire(pin_registry& registry, fake_locker& locker, std::span<const std::byte> pages,
                    pin_registry::holds& held) {
    return registry.acquire(locker, pages, true, nullptr, held);
}

/// A machine without limits, whose mappings are the real ones.
pin_worker::machine_answers generous() {
    return {{}, read_own_maps()};
}

pin_worker::machine_answers with_a_mebibyte() {
    memory_limits limits;
    limits.locked_bytes = mebibyte;
    return {limits, read_own_maps()};
}

/// A mapped file of pattern bytes.
std::shared_ptr<const mapped_file> map_pattern(const std::filesystem::path& path, std::uint64_t size_bytes,
                                               std::uint64_t offset_bytes = 0) {
    write_bytes(path, pattern_bytes(size_bytes));
    return std::make_shared<mapped_file>(std::make_shared<input_file>(path), offset_bytes,
                                         size_bytes - offset_bytes);
}

pin_range range_of(const std::shared_ptr<const mapped_file>& file) {
    return {file->bytes(), "'x.bin'", file};
}

void write_text(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
}

}  // namespace

// ---- the registry -------------------------------------------------------------------------------

TEST_CASE("pin: pages that two holders share are registered once, and until the last one lets go") {
    const auto memory = memory_region::anonymous(16 * page);
    fake_locker locker;
    pin_registry registry;
    pin_registry::holds first;
    pin_registry::holds second;
    REQUIRE(acquire(registry, locker, pages_at(memory, 0, 8), first).empty());
    REQUIRE(acquire(registry, locker, pages_at(memory, 4, 8), second).empty());
    CHECK(locker.calls == 2);
    CHECK(locker.locked_bytes() == 12 * page);
    SUBCASE("the first goes first") {
        registry.release(first);
        CHECK(locker.locked_bytes() == 12 * page);  // whole, as the second counts on the end of it
        registry.release(second);
    }
    SUBCASE("the second goes first") {
        registry.release(second);
        CHECK(locker.locked_bytes() == 8 * page);
        registry.release(first);
    }
    CHECK(locker.locked_bytes() == 0);
    CHECK(registry.size() == 0);
    CHECK(locker.strays == 0);
}

TEST_CASE("pin: a request that bridges registered pages registers only the gaps") {
    const auto memory = memory_region::anonymous(16 * page);
    fake_locker locker;
    pin_registry registry;
    pin_registry::holds held;
    REQUIRE(acquire(registry, locker, pages_at(memory, 2, 2), held).empty());
    REQUIRE(acquire(registry, locker, pages_at(memory, 6, 2), held).empty());
    pin_registry::holds all;
    REQUIRE(acquire(registry, locker, pages_at(memory, 0, 16), all).empty());
    CHECK(locker.locked_bytes() == 16 * page);
    CHECK(locker.calls == 5);
    CHECK(all.size() == 5);
    registry.release(all);
    CHECK(locker.locked_bytes() == 4 * page);
    registry.release(held);
    CHECK(locker.locked_bytes() == 0);
}

TEST_CASE("pin: a failed request leaves nothing behind") {
    const auto memory = memory_region::anonymous(16 * page);
    fake_locker locker;
    pin_registry registry;
    pin_registry::holds held;
    REQUIRE(acquire(registry, locker, pages_at(memory, 4, 2), held).empty());
    locker.fail_at_call = 3;  // the gap behind the pages held
    pin_registry::holds failed;
    CHECK(contains(acquire(registry, locker, pages_at(memory, 0, 16), failed), "out of memory"));
    CHECK(failed.empty());
    CHECK(locker.locked_bytes() == 2 * page);
    registry.release(held);
    CHECK(registry.size() == 0);
}

TEST_CASE(
    "pin: the owner is kept until its pages are unregistered, also when somebody else holds them last") {
    auto memory = std::make_shared<memory_region>(memory_region::anonymous(4 * page));
    const std::weak_ptr<memory_region> watched = memory;
    const std::span<const std::byte> pages = memory->bytes();
    fake_locker locker;
    pin_registry registry;
    pin_registry::holds first;
    pin_registry::holds second;
    REQUIRE(registry.acquire(locker, pages, true, memory, first).empty());
    REQUIRE(registry.acquire(locker, pages.first(page), true, nullptr, second).empty());
    memory.reset();
    registry.release(first);
    CHECK_FALSE(watched.expired());
    registry.release(second);
    CHECK(watched.expired());
    CHECK(locker.locked_bytes() == 0);
}

TEST_CASE("pin: threads that ask for the same pages at the same time register each once") {
    const auto memory = memory_region::anonymous(64 * page);
    fake_locker locker;
    pin_registry registry;
    std::atomic<unsigned> failures = 0;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            for (unsigned round = 0; round < 200; ++round) {
                pin_registry::holds held;
                if (!acquire(registry, locker, pages_at(memory, (t * 7 + round) % 32, 24), held).empty())
                    ++failures;
                registry.release(held);
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(failures == 0);
    CHECK(locker.locked_bytes() == 0);
    CHECK(locker.strays == 0);
    CHECK(registry.size() == 0);
}

TEST_CASE("pin: the budget is shared by all holders") {
    pin_registry registry;
    const memory_region memory = memory_region::anonymous(32 * page);
    const auto pages = [&](std::uint64_t first, std::uint64_t count) {
        return pin_registry::page_spans{pages_at(memory, first, count)};
    };
    CHECK(registry.reserve(pages(0, 6), 10 * page));
    CHECK_FALSE(registry.reserve(pages(6, 5), 10 * page));
    CHECK(registry.reserve(pages(6, 4), 10 * page));
    CHECK_FALSE(registry.reserve(pages(10, 1), 5 * page));  // below what is set aside already
    registry.give_back(pages(0, 6));
    CHECK(registry.reserved_bytes() == 4 * page);
    CHECK(registry.reserve(pages(0, 6), 10 * page));
}

TEST_CASE("pin: pages that several holders set aside count once, until the last has given them back") {
    pin_registry registry;
    const memory_region memory = memory_region::anonymous(32 * page);
    const auto pages = [&](std::uint64_t first, std::uint64_t count) {
        return pin_registry::page_spans{pages_at(memory, first, count)};
    };
    CHECK(registry.reserve(pages(0, 8), 10 * page));
    CHECK(registry.reserve(pages(0, 8), 10 * page));
    CHECK(registry.reserve(pages(2, 3), page));  // nothing new, whatever the budget
    CHECK(registry.reserved_bytes() == 8 * page);
    CHECK_FALSE(registry.reserve(pages(6, 5), 10 * page));
    CHECK(registry.reserve(pages(6, 4), 10 * page));
    CHECK(registry.reserved_bytes() == 10 * page);
    registry.give_back(pages(0, 8));
    CHECK(registry.reserved_bytes() == 10 * page);
    registry.give_back(pages(0, 8));
    CHECK(registry.reserved_bytes() == 7 * page);
    registry.give_back(pages(2, 3));
    registry.give_back(pages(6, 4));
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: the registry knows what overlaps something registered") {
    fake_locker locker;
    pin_registry registry;
    const memory_region memory = memory_region::anonymous(32 * page);
    pin_registry::holds held;
    REQUIRE(acquire(registry, locker, pages_at(memory, 4, 2), held).empty());
    CHECK(registry.knows(pages_at(memory, 0, 5)));
    CHECK(registry.knows(pages_at(memory, 5, 10)));
    CHECK(registry.knows(pages_at(memory, 0, 20)));
    CHECK(registry.knows(pages_at(memory, 4, 1)));
    CHECK_FALSE(registry.knows(pages_at(memory, 0, 4)));
    CHECK_FALSE(registry.knows(pages_at(memory, 6, 4)));
    registry.release(held);
    CHECK_FALSE(registry.knows(pages_at(memory, 0, 20)));
}

TEST_CASE("pin: copies are joined with their neighbours and cut where one registration ends") {
    const auto memory = memory_region::anonymous(8 * page);
    auto device_memory = memory_region::anonymous(8 * page);
    std::byte* const to = device_memory.data();
    const std::byte* const from = memory.data();
    fake_locker locker;
    pin_registry registry;
    std::vector<copy_range> pieces;
    const std::vector<copy_range> rows{{to, from + 100, 1000},
                                       {to + 1000, from + 1100, 3000},
                                       {to + 4000, from, 0},
                                       {to + 4000, from + 4100, 5000},
                                       {to + 9000, from, 100}};
    SUBCASE("nothing registered") {
        registry.cut(rows, pieces);
        REQUIRE(pieces.size() == 2);
        CHECK(pieces[0].size_bytes == 9000);
        CHECK(pieces[1].source == from);
    }
    SUBCASE("two registrations, and pages that are in neither") {
        pin_registry::holds held;
        REQUIRE(acquire(registry, locker, pages_at(memory, 0, 1), held).empty());
        REQUIRE(acquire(registry, locker, pages_at(memory, 1, 1), held).empty());
        registry.cut(rows, pieces);
        REQUIRE(pieces.size() == 4);
        CHECK(pieces[0].size_bytes == page - 100);
        CHECK(pieces[1].source == from + page);
        CHECK(pieces[1].destination == to + page - 100);
        CHECK(pieces[1].size_bytes == page);
        CHECK(pieces[2].source == from + 2 * page);
        CHECK(pieces[2].size_bytes == 9100 - 2 * page);
        CHECK(pieces[3].size_bytes == 100);
        registry.release(held);
    }
}

// ---- the machine --------------------------------------------------------------------------------

TEST_CASE("pin: the limits of the machine are read from proc and sys") {
    const temporary_folder root;
    write_text(root / "proc/self/status", "Name:\tx\nCapEff:\t0000000000000000\n");
    write_text(root / "proc/self/limits",
               "Limit   Soft Limit  Hard Limit  Units\nMax locked memory  8388608  9 bytes\n");
    write_text(root / "proc/self/cgroup", "0::/user.slice/job\n");
    write_text(root / "proc/meminfo", "MemTotal:  100 kB\nMemAvailable:   1000 kB\n");
    write_text(root / "sys/fs/cgroup/user.slice/job/memory.max", "max\n");
    write_text(root / "sys/fs/cgroup/user.slice/job/memory.current", "500\n");
    write_text(root / "sys/fs/cgroup/user.slice/memory.max", "5000\n");
    write_text(root / "sys/fs/cgroup/user.slice/memory.current", "3000\n");
    write_text(root / "sys/fs/cgroup/user.slice/memory.stat", "anon 1\nfile 900\nfile_mapped 7\nshmem 100\n");
    memory_limits limits = read_memory_limits(root.path().string());
    CHECK(limits.locked_bytes == 8388608);
    CHECK(limits.cgroup_bytes == 5000 - (3000 - 800));
    CHECK(limits.available_bytes == 1000 * 1024);

    write_text(root / "proc/self/status", "CapEff:\t000001ffffffffff\n");
    CHECK_FALSE(read_memory_limits(root.path().string()).locked_bytes);
    write_text(root / "proc/self/status", "CapEff:\t0\n");
    write_text(root / "proc/self/limits", "Max locked memory   unlimited  unlimited bytes\n");
    CHECK_FALSE(read_memory_limits(root.path().string()).locked_bytes);
    limits = read_memory_limits(root.path().string() + "/nowhere");
    CHECK_FALSE(limits.cgroup_bytes);
    CHECK_FALSE(limits.available_bytes);
}

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
    void* const mapped = ::mmap(nullptr, page, PROT_READ, MAP_PRIVATE, file->file()->descriptor(), 0);
    REQUIRE(mapped != MAP_FAILED);
    CHECK_FALSE(judge_pages(read_own_maps(), {static_cast<const std::byte*>(mapped), page}).refusal.empty());
    ::munmap(mapped, page);
}

TEST_CASE("pin: a file that is mapped for writing is as it was when its pages cannot be locked") {
    const temporary_folder folder;
    const std::filesystem::path path = folder / "sparse.bin";
    constexpr std::uint64_t size_bytes = 8 * mebibyte;
    write_bytes(path, {});
    std::filesystem::resize_file(path, size_bytes);
    const auto blocks_and_time = [&] {
        struct stat now = {};
        REQUIRE(::stat(path.c_str(), &now) == 0);
        return std::tuple(now.st_blocks, now.st_mtim.tv_sec, now.st_mtim.tv_nsec);
    };
    const auto before = blocks_and_time();
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(descriptor >= 0);
    void* const mapped = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    ::close(descriptor);
    REQUIRE(mapped != MAP_FAILED);
    pin_registry registry;
    fake_locker locker;
    locker.fail_at_call = 1;
    {
        const pin_worker worker({{{static_cast<const std::byte*>(mapped), size_bytes}, "'sparse.bin'", {}}},
                                locker, registry, {.piece_bytes = mebibyte}, &generous);
        CHECK_FALSE(worker.wait());
        CHECK(locker.calls == 1);
    }
    CHECK(::msync(mapped, size_bytes, MS_SYNC) == 0);
    CHECK(blocks_and_time() == before);
    ::munmap(mapped, size_bytes);
}

TEST_CASE("pin: pages that cannot be unlocked stay mapped for good") {
    pin_registry registry;
    fake_locker locker;
    locker.unlocks = false;
    auto memory = std::make_shared<const memory_region>(memory_region::anonymous(page));
    pin_registry::holds held;
    REQUIRE(registry.acquire(locker, memory->bytes(), false, memory, held).empty());
    const std::weak_ptr<const memory_region> still_there = memory;
    memory.reset();
    registry.release(held);
    CHECK_FALSE(still_there.expired());
    // who asks for them again has them, and may have more luck
    locker.unlocks = true;
    held.clear();
    const auto again = still_there.lock()->bytes();
    REQUIRE(registry.acquire(locker, again, false, nullptr, held).empty());
    registry.release(held);
    CHECK(still_there.expired());
    CHECK(locker.calls == 1);
}

TEST_CASE("pin: a locker that throws is a reason, and leaves nothing busy") {
    struct throwing_locker final : page_locker {
        std::string lock(std::span<const std::byte>, bool) override { throw device_error("it went away"); }
        bool unlock(std::span<const std::byte>) noexcept override { return true; }
        void give_way() noexcept override {}
    };
    pin_registry registry;
    throwing_locker throwing;
    fake_locker locker;
    const auto memory = memory_region::anonymous(4 * page);
    pin_registry::holds held;
    CHECK(registry.acquire(throwing, memory.bytes(), false, nullptr, held) == "it went away");
    CHECK(held.empty());
    CHECK(registry.size() == 0);
    CHECK(acquire(registry, locker, memory.bytes(), held).empty());
    registry.release(held);
}

// ---- registering in the background --------------------------------------------------------------

TEST_CASE("pin: what is registered so far can be asked for while the rest is waited for") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 10 * page + 17, 100);
    fake_locker locker;
    locker.permits = 0;
    pin_registry registry;
    {
        const pin_worker worker({range_of(file)}, locker, registry,
                                {.budget_bytes = 0, .piece_bytes = 4 * page}, &generous);
        const std::byte* const data = file->data();
        locker.await_waiting();
        CHECK_FALSE(worker.covers(data, 1));
        CHECK_FALSE(worker.finished());
        CHECK(worker.report().reason.empty());
        locker.allow(1);
        while (worker.registered_prefix_bytes() == 0)
            std::this_thread::yield();
        // the first piece ends at a page's edge, the data begins 100 bytes into its first page
        CHECK(worker.registered_prefix_bytes() == 4 * page - 100);
        CHECK(worker.covers(data, 4 * page - 100));
        CHECK(worker.covers(data + 4 * page - 101, 1));
        CHECK_FALSE(worker.covers(data, 4 * page - 99));
        CHECK_FALSE(worker.covers(data - 1, 1));
        CHECK_FALSE(worker.covers(nullptr, 0));
        locker.allow(100);
        REQUIRE(worker.wait());
        const pin_report report = worker.report();
        CHECK(report.complete);
        CHECK(report.registered_bytes == file->size_bytes());
        CHECK(report.total_bytes == file->size_bytes());
        CHECK(contains(report.reason, "registered read-only"));
        CHECK(worker.covers(data, file->size_bytes()));
        CHECK_FALSE(worker.covers(data, file->size_bytes() + 1));
        CHECK(locker.locked_bytes() == 11 * page);
        CHECK(locker.all_read_only);
        CHECK(registry.reserved_bytes() == 11 * page);
    }
    CHECK(locker.locked_bytes() == 0);
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: every second piece can be registered first, and the others from the back") {
    const temporary_folder folder;
    // 5 pieces of 2 pages, and a sixth of one; the bytes begin within the first page
    const auto file = map_pattern(folder / "x.bin", 11 * page, 100);
    const std::byte* const data = file->data();
    const auto piece_at = [&](std::uint64_t index) { return data - 100 + index * 2 * page; };
    pin_registry registry;
    fake_locker locker;
    locker.permits = 2;
    pin_worker worker({range_of(file)}, locker, registry,
                      {.budget_bytes = 0, .piece_bytes = 2 * page, .alongside_reader = true}, &generous);
    while (worker.report().registered_bytes < 4 * page)
        std::this_thread::yield();
    CHECK(worker.covers(piece_at(1), 2 * page));
    CHECK(worker.covers(piece_at(3), 2 * page));
    CHECK_FALSE(worker.covers(data, 1));
    CHECK_FALSE(worker.covers(piece_at(1) - 1, 2));
    CHECK_FALSE(worker.covers(piece_at(1), 2 * page + 1));
    const pin_stretch before = worker.stretch_at(data, 3 * page);
    CHECK_FALSE(before.registered);
    CHECK(before.size_bytes == 2 * page - 100);
    const pin_stretch within = worker.stretch_at(piece_at(1) + 1, 6 * page);
    CHECK(within.registered);
    CHECK(within.size_bytes == 2 * page - 1);
    const pin_stretch last = worker.stretch_at(piece_at(4), 100 * page);
    CHECK_FALSE(last.registered);
    CHECK(last.size_bytes == 3 * page);
    CHECK(worker.registered_prefix_bytes() == 0);
    locker.allow(4);
    CHECK(worker.wait());
    std::vector<std::ptrdiff_t> order;
    for (const auto& pages : locker.locked)
        order.push_back((pages.data() - piece_at(0)) / static_cast<std::ptrdiff_t>(2 * page));
    CHECK(order == std::vector<std::ptrdiff_t>{1, 3, 5, 4, 2, 0});
    CHECK(locker.ways_given == 6);
    CHECK(worker.covers(data, 11 * page - 100));
    CHECK(worker.registered_prefix_bytes() == 11 * page - 100);
    CHECK(worker.report().registered_bytes == 11 * page - 100);
}

TEST_CASE("pin: stopping takes one piece, and unregisters what was registered") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 64 * page);
    fake_locker locker;
    locker.permits = 0;
    pin_registry registry;
    auto worker =
        std::make_unique<pin_worker>(std::vector{range_of(file)}, locker, registry,
                                     pin_options{.budget_bytes = 0, .piece_bytes = page}, &generous);
    locker.await_waiting();
    std::thread end([&] { worker.reset(); });
    locker.allow(1000);
    end.join();
    CHECK(locker.locked_bytes() == 0);
    CHECK(registry.size() == 0);
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: arrays of one mapping and the same file mapped twice are each registered once") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 16 * page);
    const auto again = std::make_shared<mapped_file>(file->file(), 0, 16 * page);
    fake_locker locker;
    pin_registry registry;
    {
        const pin_range front{file->bytes().first(7 * page + 9), "'x.bin:a'", file};
        const pin_range back{file->bytes().subspan(7 * page + 9), "'x.bin:b'", file};
        const pin_worker arrays({front, back}, locker, registry, {}, &generous);
        const pin_worker other_mapping({range_of(again)}, locker, registry, {}, &generous);
        CHECK(arrays.wait());
        CHECK(other_mapping.wait());
        CHECK(locker.locked_bytes() == 32 * page);
        CHECK(arrays.covers(file->data() + 8 * page, page));
        CHECK(arrays.covers(file->data() + 7 * page, 9));
        CHECK(arrays.registered_prefix_bytes() == 16 * page);
        CHECK(other_mapping.covers(again->data(), 16 * page));
    }
    CHECK(locker.locked_bytes() == 0);
}

TEST_CASE("pin: the prefix ends where the first range is not finished") {
    const temporary_folder folder;
    const auto first = map_pattern(folder / "a.bin", 4 * page);
    const auto second = map_pattern(folder / "b.bin", 4 * page);
    fake_locker locker;
    locker.fail_at_call = 2;
    pin_registry registry;
    const pin_worker worker({range_of(first), range_of(second)}, locker, registry, {}, &generous);
    CHECK_FALSE(worker.wait());
    CHECK(worker.registered_prefix_bytes() == 4 * page);
    CHECK(worker.covers(first->data(), 4 * page));
    CHECK_FALSE(worker.covers(second->data(), 1));
    const pin_report report = worker.report();
    CHECK_FALSE(report.complete);
    CHECK(report.registered_bytes == 4 * page);
    CHECK(contains(report.reason, "cannot register 16384 bytes, 0 bytes into 'x.bin'"));
    CHECK(contains(report.reason, "out of memory"));
}

TEST_CASE("pin: a file beyond the budget is a reason, and registers nothing") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 2 * mebibyte);
    fake_locker locker;
    pin_registry registry;
    const pin_worker worker({range_of(file)}, locker, registry, {}, &with_a_mebibyte);
    CHECK_FALSE(worker.wait());
    CHECK(locker.calls == 0);
    CHECK(registry.reserved_bytes() == 0);
    CHECK(contains(worker.report().reason, "2.0 MiB"));
    CHECK(contains(worker.report().reason, "pin budget of 1.0 MiB (RLIMIT_MEMLOCK"));
    const pin_worker allowed({range_of(file)}, locker, registry, {.budget_bytes = 4 * mebibyte},
                             &with_a_mebibyte);
    CHECK(allowed.wait());
    const pin_worker same({range_of(file)}, locker, registry, {}, &with_a_mebibyte);
    CHECK(same.wait());  // its pages are registered already, and cost nothing
    const auto other = map_pattern(folder / "y.bin", 2 * mebibyte);
    const pin_worker second({range_of(other)}, locker, registry, {.budget_bytes = 3 * mebibyte},
                            &with_a_mebibyte);
    CHECK_FALSE(second.wait());
    CHECK(contains(second.report().reason, "of which 2.0 MiB are in use"));
}

TEST_CASE("pin: memory of the process's own is registered for writing, a private file mapping never") {
    fake_locker locker;
    pin_registry registry;
    const auto memory = std::make_shared<memory_region>(memory_region::anonymous(8 * page));
    {
        const pin_worker worker({{memory->bytes(), "an array in memory", memory}}, locker, registry, {},
                                &generous);
        CHECK(worker.wait());
        CHECK_FALSE(locker.all_read_only);
        CHECK(contains(worker.report().reason, "registered, 32.0 KiB"));
    }
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", page);
    void* const mapped =
        ::mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE, file->file()->descriptor(), 0);
    REQUIRE(mapped != MAP_FAILED);
    const std::size_t calls = locker.calls;
    const pin_worker refused({{{static_cast<const std::byte*>(mapped), page}, "'x.bin'", file}}, locker,
                             registry, {}, &generous);
    CHECK_FALSE(refused.wait());
    CHECK(locker.calls == calls);
    CHECK(contains(refused.report().reason, "cannot register 'x.bin': it is a private mapping"));
    ::munmap(mapped, page);
}

TEST_CASE("pin: a file that was truncated under its mapping raises no signal") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 8 * page);
    std::filesystem::resize_file(folder / "x.bin", page);
    fake_locker locker;
    pin_registry registry;
    const pin_worker worker({range_of(file)}, locker, registry, {}, &generous);
    CHECK(worker.wait());  // CUDA would refuse here, which the stand-in cannot know
}

TEST_CASE("pin: nothing to register is complete at once") {
    fake_locker locker;
    pin_registry registry;
    const pin_worker worker({pin_range{}}, locker, registry, {}, &generous);
    CHECK(worker.wait());
    CHECK(worker.report().total_bytes == 0);
    CHECK_FALSE(worker.covers(nullptr, 1));
}

TEST_CASE("pin: the host device registers nothing and says so") {
    const auto memory = std::make_shared<memory_region>(memory_region::anonymous(page));
    pinned_pages pages({{memory->bytes(), "an array in memory", memory}}, device::host());
    CHECK(pages.finished());
    CHECK_FALSE(pages.wait());
    CHECK_FALSE(pages.covers(memory->data(), 1));
    CHECK(pages.registered_prefix_bytes() == 0);
    CHECK(pages.report().total_bytes == page);
    CHECK(contains(sentence_of<unsupported>([&] { pages.require(); }),
                   "the host device reads memory where it lies"));
    const pinned_pages moved = std::move(pages);
    CHECK(moved.finished());
}

TEST_CASE("pin: sizes are written as people read them") {
    CHECK(in_binary_units(0) == "0 bytes");
    CHECK(in_binary_units(1023) == "1023 bytes");
    CHECK(in_binary_units(1536) == "1.5 KiB");
    CHECK(in_binary_units(std::uint64_t{3328} << 20) == "3.2 GiB");
}
