#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bytes.hpp"
#include "devices.hpp"
#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "tensors.hpp"

// Tensors of other libraries, as sources and destinations of rows.
using namespace pinflow;

namespace {

constexpr dlpack::device in_host_memory{dlpack::device_type::cpu, 0};
constexpr dlpack::data_type float32{dlpack::type_code::floating, 32, 1};

dlpack::device place_of(const device& device) {
    return device.kind() == device_kind::host ? in_host_memory
                                              : dlpack::device{dlpack::device_type::cuda, device.index()};
}

template <typename Error>
void check_refused(counted_tensor<>& tensor) {
    CHECK_THROWS_AS(foreign_tensor(&tensor.managed), Error);
    CHECK(tensor.deletions == 1);
}

}  // namespace

TEST_CASE("foreign tensor: shows the elements, and deletes the tensor once") {
    std::array<float, 6> elements{1, 2, 3, 4, 5, 6};
    counted_tensor<> tensor(elements.data(), in_host_memory, float32, {2, 3});
    counted_tensor<dlpack::managed_tensor> older(elements.data(), in_host_memory, float32, {3, 2}, {1, 3});
    {
        foreign_tensor first(&tensor.managed);
        CHECK(first.device() == device::host());
        CHECK(first.view().shape() == shape_vector{2, 3});
        CHECK(first.view().as<float>() == elements.data());
        CHECK_FALSE(first.is_read_only());
        CHECK(first.writable_data() == static_cast<const void*>(elements.data()));
        const foreign_tensor moved = std::move(first);
        CHECK(moved.view().size() == 6);
        CHECK(tensor.deletions == 0);
        const foreign_tensor second(&older.managed);
        CHECK(second.view().strides_bytes() == std::vector<std::int64_t>{4, 12});
        CHECK(second.view().fortran_contiguous());
        CHECK_THROWS_AS(second.writable_data(), invalid_argument);
        CHECK_THROWS_AS(second.contiguous_data(), invalid_argument);
    }
    CHECK(tensor.deletions == 1);
    CHECK(older.deletions == 1);
}

TEST_CASE("foreign tensor: byte_offset is applied, and a tensor without elements may have a null address") {
    std::array<float, 4> elements{};
    counted_tensor<> tensor(elements.data(), in_host_memory, float32, {2});
    tensor.managed.dl_tensor.byte_offset = 2 * sizeof(float);
    CHECK(foreign_tensor(&tensor.managed).view().as<float>() == elements.data() + 2);
    counted_tensor<> empty(nullptr, in_host_memory, float32, {0, 3});
    const foreign_tensor nothing(&empty.managed);
    CHECK(nothing.view().size() == 0);
    CHECK(nothing.writable_data() == nullptr);
}

TEST_CASE("foreign tensor: what is exported comes back") {
    const array numbers = numbered_rows(10, 3);
    const foreign_tensor same(to_dlpack(numbers).release());
    CHECK(same.view().data() == numbers.view().data());
    CHECK(same.view().dtype() == numbers.dtype());
    CHECK(same.view().shape() == numbers.shape());
    for (const char* descr : {"|b1", "|i1", "<i2", "<u8", "<f2", "<f8", "<c8", "bfloat16", "float8_e4m3fn",
                              "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"}) {
        CAPTURE(descr);
        const dtype type = dtype::parse(descr);
        const array elements(memory_region::anonymous(64), type, {4});
        CHECK(foreign_tensor(to_dlpack(elements).release()).view().dtype() == type);
    }
}

TEST_CASE(
    "foreign tensor: a tensor that pinflow cannot read is refused and deleted, but a later minor "
    "version can be read") {
    std::array<float, 8> elements{};
    const auto made = [&](dlpack::data_type type, std::vector<std::int64_t> shape,
                          std::vector<std::int64_t> strides = {}) {
        return std::make_unique<counted_tensor<>>(elements.data(), in_host_memory, type, std::move(shape),
                                                  std::move(strides));
    };
    SUBCASE("a null pointer") {
        CHECK_THROWS_AS(foreign_tensor(static_cast<dlpack::managed_tensor*>(nullptr)), invalid_argument);
    }
    SUBCASE("another major version, of which only the deleter may be touched") {
        const auto tensor = made(float32, {2});
        tensor->managed.version = {2, 0};
        tensor->managed.dl_tensor.ndim = -1;
        check_refused<unsupported>(*tensor);
    }
    SUBCASE("a later minor version is taken") {
        const auto tensor = made(float32, {2});
        tensor->managed.version = {1, 9};
        CHECK_NOTHROW(foreign_tensor(&tensor->managed));
    }
    SUBCASE("vectors") {
        check_refused<unsupported>(*made({dlpack::type_code::floating, 32, 4}, {2}));
    }
    SUBCASE("4 bits") {
        check_refused<unsupported>(*made({dlpack::type_code::signed_integer, 4, 1}, {2}));
    }
    SUBCASE("24 bits") {
        check_refused<unsupported>(*made({dlpack::type_code::floating, 24, 1}, {2}));
    }
    SUBCASE("an unknown code") {
        check_refused<unsupported>(*made({static_cast<dlpack::type_code>(3), 64, 1}, {1}));
    }
    SUBCASE("an unknown device") {
        const auto tensor = made(float32, {2});
        tensor->managed.dl_tensor.device = {static_cast<dlpack::device_type>(10), 0};
        check_refused<unsupported>(*tensor);
    }
    SUBCASE("a CUDA device that is not there") {
        const auto tensor = made(float32, {2});
        tensor->managed.dl_tensor.device = {dlpack::device_type::cuda, 1000};
        check_refused<error>(*tensor);
    }
    SUBCASE("lengths below 0") {
        check_refused<invalid_argument>(*made(float32, {2, -1}));
    }
    SUBCASE("a negative number of axes") {
        const auto tensor = made(float32, {2});
        tensor->managed.dl_tensor.ndim = -1;
        check_refused<invalid_argument>(*tensor);
    }
    SUBCASE("65 axes, one more than is accepted") {
        check_refused<invalid_argument>(*made(float32, std::vector<std::int64_t>(65, 1)));
    }
    SUBCASE("no shape") {
        const auto tensor = made(float32, {2});
        tensor->managed.dl_tensor.shape = nullptr;
        check_refused<invalid_argument>(*tensor);
    }
    SUBCASE("elements without an address") {
        const auto tensor = made(float32, {2});
        tensor->managed.dl_tensor.data = nullptr;
        check_refused<invalid_argument>(*tensor);
    }
    SUBCASE("floats of 128 bits, whose format depends on the platform") {
        check_refused<unsupported>(*made({dlpack::type_code::floating, 128, 1}, {1}));
    }
    SUBCASE("sizes and strides of 2^63 bytes or more") {
        constexpr std::int64_t large = std::int64_t{1} << 61;
        check_refused<invalid_argument>(*made(float32, {large, 4}));
        check_refused<invalid_argument>(*made(float32, {2}, {large}));
        check_refused<invalid_argument>(*made(float32, {2}, {std::numeric_limits<std::int64_t>::min()}));
    }
}

TEST_CASE("foreign tensor: read-only elements are not given to a writer") {
    std::array<float, 2> elements{};
    counted_tensor<> tensor(elements.data(), in_host_memory, float32, {2});
    tensor.managed.flags = dlpack::flag_read_only;
    const foreign_tensor read_only(&tensor.managed);
    CHECK(read_only.is_read_only());
    CHECK_THROWS_AS(read_only.writable_data(), invalid_argument);
}

TEST_CASE("foreign tensor: rows are gathered into it and scattered from it") {
    constexpr std::uint64_t width = 8;
    on_each_device([&](const device& device) {
        const stream stream(device);
        std::vector<std::uint64_t> table(100 * width);
        for (std::size_t i = 0; i < table.size(); ++i)
            table[i] = i / width;
        row_exchange exchange(
            row_table(std::as_writable_bytes(std::span(table)), width * sizeof(std::uint64_t)), device);
        const std::vector<std::uint64_t> ids{7, 3, 99, 0};
        device_buffer buffer(ids.size() * width * sizeof(std::uint64_t), stream);
        counted_tensor<> tensor(buffer.data(), place_of(device), {dlpack::type_code::unsigned_integer, 64, 1},
                                {4, width});
        const foreign_tensor rows(&tensor.managed);
        CHECK(rows.device() == device);
        exchange.gather_async(ids, rows.writable_data(), stream).check();
        const auto gathered = to_host(rows.view().data(), rows.view().size_bytes(), stream);
        for (std::size_t i = 0; i < ids.size(); ++i) {
            std::uint64_t first = 0;
            std::memcpy(&first, gathered.data() + i * width * sizeof first, sizeof first);
            CHECK(first == ids[i]);
        }
        const std::vector<std::uint64_t> others{10, 11, 12, 13};
        exchange.scatter_async(others, rows.contiguous_data(), duplicate_policy::last, stream).check();
        stream.synchronize();
        for (std::size_t i = 0; i < others.size(); ++i)
            CHECK(table[others[i] * width] == ids[i]);
    });
}
