#include "src/rows/scratch.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <optional>
#include <thread>

#include "tests/support/devices.hpp"

using namespace pinflow;
using detail::device_scratch;
using detail::pinned_scratch;

TEST_CASE("scratch: a block is used again once its stream has passed, and not before") {
    on_each_device([](const device& device) {
        pinned_scratch scratch(device);
        const stream stream(device);
        pinned_scratch::block& first = scratch.take(100);
        pinned_scratch::block& second = scratch.take(100);
        CHECK(&first != &second);
        gate gate;
        hold(stream, gate);
        first.give_back(stream);
        CHECK(&scratch.take(100) != &first);
        gate.open();
        stream.synchronize();
        CHECK(&scratch.take(5000) != &first);  // which is too small
        CHECK(&scratch.take(4096) == &first);
        second.give_back();
        CHECK(&scratch.take(1) == &second);
        pinned_scratch::block& large = scratch.take(1'000'000);
        large.data()[999'999] = std::byte{1};
    });
}

TEST_CASE("scratch: the smallest block that is large enough is taken") {
    on_each_device([](const device& device) {
        pinned_scratch scratch(device);
        pinned_scratch::block& large = scratch.take(1'000'000);
        pinned_scratch::block& small = scratch.take(100);
        large.give_back();
        small.give_back();
        CHECK(&scratch.take(100) == &small);
        CHECK(&scratch.take(100) == &large);
    });
}

TEST_CASE("scratch: blocks stay until their streams have passed") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const device_buffer memory(4096, stream);
        std::optional<pinned_scratch> scratch(std::in_place, device);
        pinned_scratch::block& block = scratch->take(4096);
        for (std::size_t i = 0; i < 4096; ++i)
            block.data()[i] = std::byte{7};
        gate gate;
        std::atomic<bool> opened = false;
        hold(stream, gate);
        copy_to_device_async(memory.data(), {block.data(), 4096}, stream);
        block.give_back(stream);
        std::thread opener([&] {
            for (int i = 0; i < 50; ++i)
                std::this_thread::yield();
            opened = true;
            gate.open();
        });
        scratch.reset();
        CHECK(opened);
        opener.join();
        CHECK(to_host(memory.data(), 4096, stream) == std::vector<std::byte>(4096, std::byte{7}));
    });
}

TEST_CASE("scratch: parts of device memory are aligned, and do not overlap") {
    on_each_device([](const device& device) {
        const stream stream(device);
        device_scratch scratch;
        const std::size_t none = scratch.add(0);
        const std::size_t odd = scratch.add(1001);
        const std::size_t words = scratch.add(24);
        const std::size_t last = scratch.add(256);
        scratch.allocate(stream);
        for (const std::size_t part : {none, odd, words, last})
            CHECK(reinterpret_cast<std::uintptr_t>(scratch.part(part)) % 256 == 0);
        CHECK(scratch.part(odd) + 1001 <= scratch.part(words));
        CHECK(scratch.part(words) + 24 <= scratch.part(last));
        CHECK(scratch.part_as<std::uint64_t>(words) == static_cast<void*>(scratch.part(words)));
        scratch.release(stream);
        scratch.release(stream);  // there is nothing left to release
        stream.synchronize();
        device_scratch nothing;
        nothing.release(stream);
    });
}
