#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "devices.hpp"
#include "file_bytes.hpp"
#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "row_tables.hpp"

// Destinations and sources that overlap the table.
using namespace pinflow;

namespace {

constexpr std::uint64_t row_bytes = 64;
constexpr std::uint64_t row_count = 60;

/// The address as the sentence spells it.
std::string spelled(const std::byte* address) {
    std::ostringstream text;
    text << "0x" << std::hex << reinterpret_cast<std::uintptr_t>(address);
    return text.str();
}

void check_refused(const std::vector<const std::byte*>& addresses, const std::function<void()>& call) {
    try {
        call();
        FAIL_CHECK("it was accepted");
    } catch (const invalid_argument& failure) {
        const std::string sentence = failure.what();
        CAPTURE(sentence);
        for (const std::byte* const each : addresses)
            CHECK(sentence.find(spelled(each)) != std::string::npos);
    }
}

}  // namespace

TEST_CASE("overlap: rows cannot be gathered into their table, or scattered from it") {
    on_each_device([](const device& device) {
        for (const row_route route : {row_route::automatic, row_route::staged}) {
            std::mt19937_64 random(7);
            const auto content = random_bytes(row_count * row_bytes, random);
            guarded_table table(device, content);
            row_exchange exchange(row_table(table.bytes(), row_bytes), device, {.route = route});
            const stream stream(device);
            const std::vector<std::uint64_t> ids{3, 5, 7};
            std::byte* const begin = table.bytes().data();
            std::byte* const end = begin + content.size();
            for (std::byte* const overlapping :
                 {begin, begin + 1, end - 1, begin - 3 * row_bytes + 1, end - 3 * row_bytes}) {
                const std::vector<const std::byte*> told{overlapping, begin, end};
                check_refused(told, [&] { exchange.gather(ids, overlapping); });
                check_refused(told, [&] { exchange.gather_async(ids, overlapping, stream); });
                check_refused(told, [&] { exchange.scatter(ids, overlapping); });
                check_refused(
                    told, [&] { exchange.scatter_async(ids, overlapping, duplicate_policy::sum, stream); });
                const std::vector<row_gather> group{{ids, overlapping}};
                check_refused(told, [&] { exchange.gather_group_async(group, stream); });
            }
            // a batch without rows does not overlap the table
            const std::vector<std::uint64_t> none;
            exchange.gather(none, begin);
            stream.synchronize();
            CHECK(table.holds(content));
        }
    });
}

TEST_CASE("overlap: rows cannot be gathered over their indices in device memory") {
    on_each_device([](const device& device) {
        const guarded_table table(device, std::vector<std::byte>(row_count * row_bytes));
        row_exchange exchange(row_table(table.bytes(), row_bytes), device);
        const stream stream(device);
        constexpr std::size_t count = 16;
        const device_buffer memory(3 * count * row_bytes, stream);
        stream.synchronize();
        std::byte* const begin = memory.data() + count * row_bytes;
        const row_ids ids = row_ids::on_device(begin, count);
        for (std::byte* const overlapping :
             {begin, begin + 8, begin + (count - 1) * 8, begin - count * row_bytes + 8}) {
            check_refused({overlapping, begin}, [&] { exchange.gather(ids, overlapping); });
            check_refused({overlapping, begin}, [&] { exchange.gather_async(ids, overlapping, stream); });
        }
        id_vector zeros(count, 0);
        copy_to_device_async(begin, std::as_bytes(std::span(zeros)), stream);
        stream.synchronize();
        exchange.gather(ids, begin - count * row_bytes);
        exchange.gather(ids, begin + count * 8);
    });
}

TEST_CASE("overlap: rows beside the table are no overlap") {
    std::vector<std::byte> memory(12 * row_bytes);
    const auto table = std::span(memory).subspan(3 * row_bytes, 6 * row_bytes);
    row_exchange exchange(row_table(table, row_bytes), device::host());
    const std::vector<std::uint64_t> ids{0, 1, 2};
    exchange.gather(ids, memory.data());
    exchange.scatter(ids, memory.data() + 9 * row_bytes);
}
