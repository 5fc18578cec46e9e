#include "pinflow/buffer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/support/devices.hpp"

using namespace pinflow;

namespace {

void count_up(std::span<std::byte> bytes, unsigned first) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<std::byte>((first + i * 7) & 0xFF);
    }
}

}  // namespace

TEST_CASE("buffer: bytes go to the device and come back") {
    on_each_device([](const device& device) {
        const stream stream(device);
        for (const std::size_t size :
             {std::size_t{1}, std::size_t{255}, std::size_t{4096}, std::size_t{3'000'001}}) {
            CAPTURE(size);
            const pinned_buffer source(size, device);
            CHECK(source.size_bytes() == size);
            CHECK(std::ranges::all_of(source.bytes(), [](std::byte b) { return b == std::byte{0}; }));
            CHECK(reinterpret_cast<std::uintptr_t>(source.data()) % 4096 == 0);
            count_up(source.bytes(), 3);
            const device_buffer there(size, stream);
            CHECK(there.size_bytes() == size);
            CHECK(reinterpret_cast<std::uintptr_t>(there.data()) % 256 == 0);
            copy_to_device_async(there.data(), source.bytes(), stream);
            const pinned_buffer back(size, device);
            copy_to_host_async(back.bytes(), there.data(), stream);
            stream.synchronize();
            CHECK(std::memcmp(back.data(), source.data(), size) == 0);
        }
    });
}

TEST_CASE("buffer: a copy happens in the stream's order, not when it is enqueued" * blocks_copies) {
    on_each_device([](const device& device) {
        const stream stream(device);
        const pinned_buffer source(4096, device);
        const pinned_buffer back(4096, device);
        const device_buffer there(4096, stream);
        gate gate;
        hold(stream, gate);
        copy_to_device_async(there.data(), source.bytes(), stream);
        copy_to_host_async(back.bytes(), there.data(), stream);
        count_up(source.bytes(), 9);  // before the copy can have begun
        gate.open();
        stream.synchronize();
        CHECK(std::memcmp(back.data(), source.data(), 4096) == 0);
    });
}

TEST_CASE("buffer: a batch of copies moves every piece, of any size and alignment") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const pinned_buffer source(1 << 20, device);
        count_up(source.bytes(), 5);
        const device_buffer there(1 << 20, stream);
        std::vector<copy_range> ranges;
        std::vector<std::byte> expected;
        std::uint64_t from = 700'001;
        for (const std::uint64_t size : {1U, 0U, 13U, 4096U, 65536U, 100'003U}) {
            ranges.push_back({there.data() + expected.size(), source.data() + from, size});
            const auto piece = source.bytes().subspan(from, size);
            expected.insert(expected.end(), piece.begin(), piece.end());
            from = (from * 3 + 77) % 900'000;
        }
        copy_batch_to_device_async(ranges, stream);
        std::ranges::fill(ranges, copy_range{});  // was read before the call returned
        CHECK(to_host(there.data(), expected.size(), stream) == expected);
        copy_batch_to_device_async({}, stream);
        stream.synchronize();
    });
}

TEST_CASE("buffer: memory given back after an event stays until the event has passed" * blocks_copies) {
    on_each_device([](const device& device) {
        const stream stream(device);
        const pinned_buffer source(1 << 20, device);
        count_up(source.bytes(), 1);
        const pinned_buffer back(1 << 20, device);
        std::vector<event> marks;
        marks.emplace_back(device);
        gate gate;
        {
            device_buffer there(1 << 20, stream);
            copy_to_device_async(there.data(), source.bytes(), stream);
            hold(stream, gate);
            copy_to_host_async(back.bytes(), there.data(), stream);  // reads after the buffer has gone
            marks[0].record(stream);
            there.release_after(marks);
            CHECK(there.data() == nullptr);
        }
        marks.clear();
        // memory that is free now would be handed out again, and overwritten
        const pinflow::stream other(device);
        const device_buffer next(1 << 20, other);
        const pinned_buffer zeros(1 << 20, device);
        copy_to_device_async(next.data(), zeros.bytes(), other);
        other.synchronize();
        gate.open();
        stream.synchronize();
        CHECK(std::memcmp(back.data(), source.data(), 1 << 20) == 0);
    });
}

TEST_CASE("buffer: empty and moved-from buffers hold nothing") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const device_buffer empty(0, stream);
        CHECK(empty.data() == nullptr);
        const pinned_buffer none(0, device);
        CHECK(none.data() == nullptr);
        device_buffer first(100, stream);
        std::byte* const data = first.data();
        device_buffer second(std::move(first));
        CHECK(second.data() == data);
        device_buffer third(50, stream);
        third = std::move(second);
        CHECK(third.data() == data);
        CHECK(third.size_bytes() == 100);
        copy_to_device_async(third.data(), {}, stream);
        stream.synchronize();
    });
}

TEST_CASE("buffer: a request for more memory than exists throws, and later requests work") {
    on_each_device([](const device& device) {
        const stream stream(device);
        CHECK_THROWS_AS(device_buffer(std::uint64_t{1} << 50, stream), error);
        CHECK_THROWS_AS(pinned_buffer(std::uint64_t{1} << 50, device), error);
        const device_buffer still_works(4096, stream);
        CHECK(still_works.data() != nullptr);
    });
}
