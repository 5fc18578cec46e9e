#include "loader/staging_buffers.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <set>
#include <thread>
#include <vector>

#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;
using detail::staging_buffers;

TEST_CASE("staging buffers: a buffer is taken again only when the copies from it have finished") {
    const gate copying;
    std::atomic<bool> is_copied = false;
    const stream copies(device::host());
    staging_buffers buffers(device::host(), 2, 64);
    const std::byte* first = nullptr;
    {
        const staging_buffers::lease lease = buffers.take();
        first = lease.data();
        copies.view().host_function_async(copying.waiter());
        copies.view().host_function_async([&] { is_copied = true; });
        lease.record(copies);
    }
    CHECK(buffers.take().data() != first);  // its turn comes after that of the other buffer
    std::thread opener([&] { copying.open(); });
    CHECK(buffers.take().data() == first);
    CHECK(is_copied);
    opener.join();
}

TEST_CASE("staging buffers: no two threads have the same buffer, and a thread waits for one to be free") {
    staging_buffers buffers(device::host(), 3, 4096);
    std::atomic<int> clashes = 0;
    std::vector<std::thread> threads;
    for (int number = 0; number < 6; ++number) {
        threads.emplace_back([&, mark = static_cast<std::byte>(number)] {
            for (int turn = 0; turn < 2000; ++turn) {
                const staging_buffers::lease lease = buffers.take();
                std::byte* const data = lease.data();
                for (std::size_t i = 0; i < 64; ++i)
                    data[i * 64] = mark;
                for (std::size_t i = 0; i < 64; ++i)
                    clashes += data[i * 64] == mark ? 0 : 1;
            }
        });
    }
    for (std::thread& each : threads)
        each.join();
    CHECK(clashes == 0);
    std::set<const std::byte*> all;
    {
        const auto a = buffers.take();
        const auto b = buffers.take();
        const auto c = buffers.take();
        all = {a.data(), b.data(), c.data()};
    }
    CHECK(all.size() == 3);
}
