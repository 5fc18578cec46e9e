#include "src/core/memory_limits.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/temporary_folder.hpp"

using namespace pinflow::detail;

namespace {

void write_text(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
}

}  // namespace

TEST_CASE("memory limits: what the machine has is read from proc and sys") {
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
    CHECK(limits.cgroup_limit_bytes == 5000);
    CHECK(limits.available_bytes == 1000 * 1024);

    write_text(root / "proc/self/status", "CapEff:\t000001ffffffffff\n");
    CHECK_FALSE(read_memory_limits(root.path().string()).locked_bytes);
    write_text(root / "proc/self/status", "CapEff:\t0\n");
    write_text(root / "proc/self/limits", "Max locked memory   unlimited  unlimited bytes\n");
    CHECK_FALSE(read_memory_limits(root.path().string()).locked_bytes);
    limits = read_memory_limits(root.path().string() + "/nowhere");
    CHECK_FALSE(limits.cgroup_bytes);
    CHECK_FALSE(limits.available_bytes);
    CHECK_FALSE(limits.cgroup_limit_bytes);
}

TEST_CASE("memory limits: cgroups of version 1 bind as well, in a container too") {
    const temporary_folder root;
    write_text(root / "proc/self/cgroup",
               "12:pids:/x\n9:cpu,memory:/docker/job\n1:name=systemd:/memory\n0::/\n");
    // a container sees its own group as the root, and not by the name that it is told
    const std::string group = "sys/fs/cgroup/memory/";
    write_text(root / (group + "memory.limit_in_bytes"), "5000\n");
    write_text(root / (group + "memory.usage_in_bytes"), "3000\n");
    write_text(root / (group + "memory.stat"),
               "cache 1\nrss 2\ntotal_cache 900\ntotal_rss 3\ntotal_shmem 100\n");
    memory_limits limits = read_memory_limits(root.path().string());
    CHECK(limits.cgroup_bytes == 5000 - (3000 - 800));
    CHECK(limits.cgroup_limit_bytes == 5000);
    write_text(root / (group + "docker/job/memory.limit_in_bytes"), "4000\n");
    write_text(root / (group + "docker/job/memory.usage_in_bytes"), "1000\n");
    limits = read_memory_limits(root.path().string());
    CHECK(limits.cgroup_bytes == 2800);
    CHECK(limits.cgroup_limit_bytes == 4000);
    write_text(root / (group + "memory.limit_in_bytes"), "9223372036854771712\n");  // none
    write_text(root / (group + "docker/job/memory.limit_in_bytes"), "9223372036854771712\n");
    limits = read_memory_limits(root.path().string());
    CHECK_FALSE(limits.cgroup_bytes);
    CHECK_FALSE(limits.cgroup_limit_bytes);
}

TEST_CASE(
    "memory limits: new memory is bound by the machine's, and by the cgroup's limit, but what is small by "
    "none") {
    const std::uint64_t machine = machine_memory_bytes();
    CHECK(machine > std::uint64_t{1} << 28);
    {
        const scoped_cgroup_limit wide(machine + 1);
        CHECK(why_beyond_memory(machine).empty());
        CHECK(why_beyond_memory(machine + 1) ==
              "more than this machine's memory of " + std::to_string(machine) + " bytes");
    }
    {
        const scoped_cgroup_limit narrow(100'000'000);
        CHECK(why_beyond_memory(100'000'000).empty());
        CHECK(why_beyond_memory(100'000'001) ==
              "more than the 100000000 bytes of memory that the cgroup may have");
    }
    const scoped_cgroup_limit tiny(1000);
    CHECK(why_beyond_memory(1 << 20).empty());
}

TEST_CASE("memory limits: this machine tells its own") {
    const memory_limits limits = read_memory_limits();
    REQUIRE(limits.available_bytes);
    CHECK(*limits.available_bytes <= machine_memory_bytes());
    CHECK(why_beyond_memory(std::uint64_t{1} << 60) != "");
}
