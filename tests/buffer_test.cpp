#include "pinflow/buffer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
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

TEST_CASE("buffer: memory released after an event is not reused before the event has passed" *
          blocks_copies) {
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

TEST_CASE("buffer: memory is released in the order of its stream, so work enqueued before may still use it" *
          blocks_copies) {
    on_each_device([](const device& device) {
        const pinned_buffer source(1 << 20, device);
        count_up(source.bytes(), 1);
        const pinned_buffer back(1 << 20, device);
        const pinned_buffer zeros(1 << 20, device);
        const pinflow::stream other(device);
        const auto overwrite_free_memory = [&] {
            const device_buffer next(1 << 20, other);
            copy_to_device_async(next.data(), zeros.bytes(), other);
            other.synchronize();
        };
        gate first;
        const stream user(device);
        {
            const device_buffer there(1 << 20, user);
            copy_to_device_async(there.data(), source.bytes(), user);
            hold(user, first);
            copy_to_host_async(back.bytes(), there.data(), user);
        }
        overwrite_free_memory();  // neither waits for `user` nor gets its memory
        first.open();
        user.synchronize();
        CHECK(std::memcmp(back.data(), source.data(), 1 << 20) == 0);

        gate second;
        {
            device_buffer there(1 << 20, other);
            copy_to_device_async(there.data(), source.bytes(), other);
            other.synchronize();
            hold(user, second);
            copy_to_host_async(back.bytes(), there.data(), user);
            there.set_stream(user);
        }
        std::memset(back.data(), 0, 1 << 20);
        overwrite_free_memory();
        second.open();
        user.synchronize();
        CHECK(std::memcmp(back.data(), source.data(), 1 << 20) == 0);
    });
}

TEST_CASE("buffer: a buffer may outlive its stream") {
    on_each_device([](const device& device) {
        const pinned_buffer source(4096, device);
        const pinned_buffer back(4096, device);
        count_up(source.bytes(), 1);
        device_buffer there;
        device_buffer unused;
        {
            const stream brief(device);
            there = device_buffer(4096, brief);
            unused = device_buffer(4096, brief);
            copy_to_device_async(there.data(), source.bytes(), brief);
        }
        const stream later(device);
        copy_to_host_async(back.bytes(), there.data(), later);
        event copied(device);
        copied.record(later);
        there.release_after({&copied, 1});
        later.synchronize();
        CHECK(std::memcmp(back.data(), source.data(), 4096) == 0);
    });
}

namespace {

/// Allocates through a device_buffer, and notes the handles of the streams.
class noting_resource final : public memory_resource {
 public:
    std::byte* allocate(std::uint64_t size_bytes, stream_view stream) override {
        allocated_on = stream.native_handle();
        if (size_bytes > 4096) throw device_error("the resource is exhausted");
        memory.emplace(size_bytes, stream);
        return memory->data();
    }
    void deallocate(std::byte* data, std::uint64_t size_bytes, stream_view stream) noexcept override {
        CHECK(data == memory->data());
        CHECK(size_bytes == memory->size_bytes());
        deallocated_on = stream.native_handle();
        memory->set_stream(stream);
        memory.reset();
    }

    std::optional<device_buffer> memory;
    void* allocated_on = nullptr;
    void* deallocated_on = nullptr;
};

}  // namespace

TEST_CASE("buffer: a caller's memory resource allocates and releases, in the order of the buffer's stream") {
    on_each_device([](const device& device) {
        const auto resource = std::make_shared<noting_resource>();
        const stream first(device);
        const stream second(device);
        const stream busy(device);
        gate gate;
        std::atomic<bool> has_passed = false;
        {
            device_buffer buffer(4096, first, resource);
            CHECK(resource->allocated_on == first.view().native_handle());
            hold(busy, gate);
            busy.host_function_async([&] { has_passed = true; });
            event used(device);
            used.record(busy);
            buffer.set_stream(second);
            CHECK(resource->deallocated_on == nullptr);
            buffer.release_after({&used, 1});
        }
        CHECK(resource->deallocated_on == second.view().native_handle());
        CHECK_FALSE(resource->memory);
        CHECK_FALSE(second.done());  // joined to `busy`, whose work used the memory
        gate.open();
        second.synchronize();
        CHECK(has_passed);
        CHECK_THROWS_AS(device_buffer(8192, first, resource), device_error);
        const device_buffer empty(0, first, resource);
        CHECK(empty.data() == nullptr);
    });
}

TEST_CASE("buffer: a memory resource that returns a null pointer is a device_error") {
    struct empty_resource final : memory_resource {
        std::byte* allocate(std::uint64_t /*size_bytes*/, stream_view /*stream*/) override { return nullptr; }
        void deallocate(std::byte* /*data*/, std::uint64_t /*size_bytes*/,
                        stream_view /*stream*/) noexcept override {
            FAIL_CHECK("nothing was allocated");
        }
    };
    on_each_device([](const device& device) {
        const stream stream(device);
        const auto allocate = [&] { device_buffer(100, stream, std::make_shared<empty_resource>()); };
        CHECK_THROWS_WITH_AS(allocate(),
                             "cannot allocate 100 bytes: the memory_resource returned a null pointer",
                             device_error);
    });
}

TEST_CASE("buffer: an empty buffer has no memory, and a move takes the memory along") {
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
