#include "src/rows/device_scratch.hpp"

#include <doctest/doctest.h>

#include "tests/support/devices.hpp"

using namespace pinflow;
using detail::device_scratch;

TEST_CASE("device_scratch: parts of device memory are aligned, and do not overlap") {
    on_each_device([](const device& device) {
        const stream stream(device);
        device_scratch scratch;
        const std::size_t none = scratch.add(0);
        const std::size_t odd = scratch.add(1001);
        const std::size_t words = scratch.add(24);
        const std::size_t last = scratch.add(256);
        CHECK(scratch.size_bytes() == 1024 + 256 + 256);
        scratch.allocate({}, stream, nullptr);
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

TEST_CASE("device_scratch: parts lie in reserved memory, unless it is too small") {
    on_each_device([](const device& device) {
        const stream stream(device);
        const device_buffer reserved(1024, stream);
        for (const std::size_t size_bytes : {std::size_t{1024}, std::size_t{1025}}) {
            device_scratch scratch;
            const std::size_t part = scratch.add(size_bytes);
            scratch.allocate({reserved.data(), reserved.size_bytes()}, stream, nullptr);
            CHECK((scratch.part(part) == reserved.data()) == (size_bytes == 1024));
            scratch.release(stream);
        }
        stream.synchronize();
    });
}
