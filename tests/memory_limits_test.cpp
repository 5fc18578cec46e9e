#include "src/core/memory_limits.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "tests/temporary_folder.hpp"

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
    write_text(root / "sys/fs/cgroup/user.slice/memory.stat", "anon 1\nfile 900\nfile_mapped 7\nshmem 100\n");
    memory_limits limits = read_memory_limits(root.path().string());
    CHECK(limits.locked_bytes == 8388608);
    CHECK(limits.cgroup_bytes == 5000 - (3000 - 800));
    CHECK(limits.available_bytes == 1000 * 1024);
    CHECK(limits.total_bytes == 100 * 1024);

    write_text(root / "proc/self/status", "CapEff:\t000001ffffffffff\n");
    CHECK_FALSE(read_memory_limits(root.path().string()).locked_bytes);
    write_text(root / "proc/self/status", "CapEff:\t0\n");
    write_text(root / "proc/self/limits", "Max locked memory   unlimited  unlimited bytes\n");
    CHECK_FALSE(read_memory_limits(root.path().string()).locked_bytes);
    limits = read_memory_limits(root.path().string() + "/nowhere");
    CHECK_FALSE(limits.cgroup_bytes);
    CHECK_FALSE(limits.available_bytes);
    CHECK_FALSE(limits.total_bytes);
}

TEST_CASE("memory limits: new memory is bound by the machine's, or by what the cgroup has left") {
    memory_limits limits;
    CHECK(most_new_memory(limits).size_bytes == std::numeric_limits<std::uint64_t>::max());
    limits.available_bytes = 10;  // pages of others can make room
    limits.total_bytes = 4000;
    CHECK(most_new_memory(limits).size_bytes == 4000);
    CHECK(most_new_memory(limits).in_words == "this machine's memory of 4000 bytes");
    limits.cgroup_bytes = 5000;
    CHECK(most_new_memory(limits).size_bytes == 4000);
    limits.cgroup_bytes = 3000;
    CHECK(most_new_memory(limits).size_bytes == 3000);
    CHECK(most_new_memory(limits).in_words == "the 3000 bytes that the cgroup has left");
}

TEST_CASE("memory limits: this machine tells its own") {
    const memory_limits limits = read_memory_limits();
    REQUIRE(limits.total_bytes);
    REQUIRE(limits.available_bytes);
    CHECK(*limits.available_bytes <= *limits.total_bytes);
    CHECK(most_new_memory(limits).size_bytes <= *limits.total_bytes);
}
