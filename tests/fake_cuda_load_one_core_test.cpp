#include <doctest/doctest.h>
#include <sched.h>

#include <atomic>
#include <string>

#include "pinflow/load.hpp"
#include "src/device/page_releaser.hpp"
#include "tests/load_backend.hpp"
#include "tests/support/temporary_folder.hpp"

// Loads to a device that page-locks, in a process with one core.

using namespace pinflow;

namespace {

/// Leaves the process one core, before oneTBB counts them.
const bool has_one_core = [] {
    ::cpu_set_t cores;
    if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return false;
    std::size_t first = 0;
    while (!CPU_ISSET(first, &cores))
        ++first;
    CPU_ZERO(&cores);
    CPU_SET(first, &cores);
    return ::sched_setaffinity(0, sizeof cores, &cores) == 0;
}();

}  // namespace

TEST_CASE("load: with one core, threads only take what the copy engine cannot") {
    REQUIRE(has_one_core);
    const temporary_folder folder;
    const auto model = large_model();
    write_model(folder / "a.safetensors", model);
    load_backend& backend = new_backend();
    const loaded_tensors loaded = load_tensors(folder / "a.safetensors", backend.device());
    check_equal(loaded, model);
    CHECK(loaded.report.reason.starts_with("copy: "));
    CHECK(loaded.report.threads == 1);
    CHECK(loaded.report.copied_bytes > loaded.report.size_bytes * 9 / 10);
    CHECK(loaded.report.copied_bytes + loaded.report.staged_bytes == loaded.report.size_bytes);
    load_options whole;
    whole.names = {"w*"};
    CHECK(load_tensors(folder / "a.safetensors", backend.device(), whole).report.threads == 0);
    detail::wait_for_released_pages();
}

TEST_CASE("load: with one core, what cannot be page-locked is staged") {
    REQUIRE(has_one_core);
    const temporary_folder folder;
    const auto model = large_model();
    write_model(folder / "a.safetensors", model);
    for (const int allowed : {0, 1}) {  // of two pieces
        for (int round = 0; round < 6; ++round) {
            load_backend& backend = new_backend();
            std::atomic<int> calls = 0;
            backend.lock.refuse = [&](std::span<const std::byte>, bool) { return ++calls > allowed; };
            load_options options;
            options.threads = static_cast<unsigned>(round % 3);
            if (round % 2 == 1) options.names = {"w*"};
            const loaded_tensors loaded = load_tensors(folder / "a.safetensors", backend.device(), options);
            if (options.names.empty()) check_equal(loaded, model);
            CHECK(loaded.report.copied_bytes + loaded.report.staged_bytes == loaded.report.size_bytes);
            CHECK((loaded.report.copied_bytes == 0) == (allowed == 0));
            CHECK(loaded.report.reason.find("; the rest is staged: ") != std::string::npos);
            CHECK(loaded.report.threads <= 2);
            detail::wait_for_released_pages();
        }
    }
}
