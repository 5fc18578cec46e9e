#include "src/core/memory_limits.hpp"

#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "pinflow/error.hpp"
#include "pinflow/memory.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow::detail;

namespace {

void write_text(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
}

}  // namespace

TEST_CASE("memory limits: the machine's memory is read from proc and sys") {
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
    write_text(root / "sys/fs/cgroup/user.slice/memory.stat",
               "anon 1\nfile 900\nfile_mapped 7\nshmem 100\nslab_reclaimable 50\n");
    memory_limits limits = read_memory_limits(root.path().string());
    CHECK(limits.locked_bytes == 8388608);
    CHECK(limits.cgroup_bytes == 5000 - (3000 - 800 - 50));
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

TEST_CASE("memory limits: cgroups of version 1 bind as well, in a container too") {
    const temporary_folder root;
    write_text(root / "proc/self/cgroup",
               "12:pids:/x\n9:cpu,memory:/docker/job\n1:name=systemd:/memory\n0::/\n");
    // a container finds its own group at the root, not under the name in /proc/self/cgroup
    const std::string group = "sys/fs/cgroup/memory/";
    write_text(root / (group + "memory.limit_in_bytes"), "5000\n");
    write_text(root / (group + "memory.usage_in_bytes"), "3000\n");
    write_text(root / (group + "memory.stat"),
               "cache 1\nrss 2\ntotal_cache 900\ntotal_rss 3\ntotal_shmem 100\n");
    memory_limits limits = read_memory_limits(root.path().string());
    CHECK(limits.cgroup_bytes == 5000 - (3000 - 800));
    write_text(root / (group + "docker/job/memory.limit_in_bytes"), "4000\n");
    write_text(root / (group + "docker/job/memory.usage_in_bytes"), "1000\n");
    limits = read_memory_limits(root.path().string());
    CHECK(limits.cgroup_bytes == 2800);
    write_text(root / (group + "memory.limit_in_bytes"), "9223372036854771712\n");  // none
    write_text(root / (group + "docker/job/memory.limit_in_bytes"), "9223372036854771712\n");
    limits = read_memory_limits(root.path().string());
    CHECK_FALSE(limits.cgroup_bytes);
}

TEST_CASE("memory limits: a shortage names what is left; sizes below 1 MiB are not checked") {
    {
        const scoped_available_memory narrow(100'000'000);
        CHECK(read_available_memory().size_bytes == 100'000'000);
        CHECK(memory_shortage(100'000'000).empty());
        CHECK(memory_shortage(100'000'001).find("100000000 bytes") != std::string::npos);
        CHECK_NOTHROW(require_memory(100'000'000, "it takes 100000000 bytes"));
        CHECK_THROWS_AS(require_memory(100'000'001, "it takes 100000001 bytes"), pinflow::system_failure);
    }
    const scoped_available_memory tiny(1000);
    CHECK(memory_shortage((1 << 20) - 1).empty());
    CHECK_FALSE(memory_shortage(1 << 20).empty());
}

TEST_CASE("memory limits: the tightest bound decides how much memory is available") {
    const temporary_folder root;
    constexpr std::uint64_t gib = std::uint64_t{1} << 30;
    const auto cgroup = [&](const std::string& folder, std::uint64_t max, std::uint64_t current,
                            std::uint64_t file) {
        write_text(root / (folder + "memory.max"), std::to_string(max) + "\n");
        write_text(root / (folder + "memory.current"), std::to_string(current) + "\n");
        write_text(root / (folder + "memory.stat"), "anon 1\nfile " + std::to_string(file) + "\nshmem 0\n");
    };
    const std::string path = root.path().string();
    write_text(root / "proc/meminfo",
               "MemTotal: 9 kB\nMemAvailable: " + std::to_string(8 * gib / 1024) + " kB\n");
    write_text(root / "proc/self/cgroup", "0::/outer/inner\n");
    constexpr std::uint64_t max_reserve = 64 << 20;
    CHECK(read_available_memory(path).size_bytes == 8 * gib - max_reserve);
    // used memory counts, reclaimable memory does not
    cgroup("sys/fs/cgroup/outer/inner/", 4 * gib, 2 * gib, gib);
    CHECK(read_available_memory(path).size_bytes == 3 * gib - max_reserve);
    CHECK(read_available_memory(path).bound == "the cgroup has left");
    // an outer group binds as well
    cgroup("sys/fs/cgroup/outer/", 3 * gib, 3 * gib - (256 << 20), 0);
    CHECK(read_available_memory(path).size_bytes == (256 << 20) / 8 * 7);
    cgroup("sys/fs/cgroup/outer/", gib, 2 * gib, 0);
    CHECK(read_available_memory(path).size_bytes == 0);
}

TEST_CASE("memory limits: regions count from when they are made, and not only once they are touched") {
    const temporary_folder root;
    constexpr std::uint64_t gib = std::uint64_t{1} << 30;
    const std::string path = root.path().string();
    write_text(root / "proc/meminfo", "MemAvailable: " + std::to_string(8 * gib / 1024) + " kB\n");
    write_text(root / "proc/self/statm", "100000 2000 2000 1 0 1 0\n");
    const std::uint64_t before = read_available_memory(path).size_bytes;
    {
        const auto region = pinflow::memory_region::anonymous(gib);
        CHECK(read_available_memory(path).size_bytes == before - gib);
        const auto small = pinflow::memory_region::anonymous(4096);
        CHECK(read_available_memory(path).size_bytes == before - gib - 4096);
        // a quarter of it has been touched, which the system already counts
        const std::uint64_t pages = (gib / 4) / static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
        write_text(root / "proc/self/statm", "100000 " + std::to_string(pages) + " 0 1 0 1 0\n");
        CHECK(read_available_memory(path).size_bytes == before - gib - 4096 + gib / 4);
    }
    CHECK(read_available_memory(path).size_bytes == before);
}

TEST_CASE("memory limits: threads are bounded by memory") {
    const scoped_available_memory available(64 << 20);
    CHECK(threads_within_memory(0, 4).count == 4);
    CHECK(threads_within_memory(0, 4).reason.empty());
    CHECK(threads_within_memory(0, 1000).count == 32);
    CHECK(contains_all(
        threads_within_memory(0, 1000).reason,
        {"32 of 1000 threads", "an eighth of the 67108864 bytes", "a test leaves", "256 KiB each"}));
    CHECK(threads_within_memory(256, 4).count == 256);
    CHECK_THROWS_AS(threads_within_memory(257, 4), pinflow::system_failure);
    const scoped_available_memory tiny(1000);
    CHECK(threads_within_memory(0, 4).count == 1);
}

TEST_CASE("memory limits: the limits of this machine can be read") {
    const memory_limits limits = read_memory_limits();
    REQUIRE(limits.available_bytes);
    CHECK(*limits.available_bytes <= machine_memory_bytes());
    CHECK(read_available_memory().size_bytes > 0);
    CHECK(read_available_memory().size_bytes < machine_memory_bytes());
    CHECK(memory_shortage(std::uint64_t{1} << 60) != "");
}
