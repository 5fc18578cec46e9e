#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "temporary_folder.hpp"

// Arrays as tensors: what the structures say, who keeps the bytes, and what is refused.
using namespace pinflow;

// the layout that https://dmlc.github.io/dlpack/latest/c_api.html publishes, on a machine of 64 bits
static_assert(sizeof(dlpack::version) == 8);
static_assert(sizeof(dlpack::device) == 8 && offsetof(dlpack::device, device_id) == 4);
static_assert(sizeof(dlpack::data_type) == 4 && offsetof(dlpack::data_type, bits) == 1 &&
              offsetof(dlpack::data_type, lanes) == 2);
static_assert(sizeof(dlpack::tensor) == 48 && offsetof(dlpack::tensor, data) == 0 &&
              offsetof(dlpack::tensor, device) == 8 && offsetof(dlpack::tensor, ndim) == 16 &&
              offsetof(dlpack::tensor, dtype) == 20 && offsetof(dlpack::tensor, shape) == 24 &&
              offsetof(dlpack::tensor, strides) == 32 && offsetof(dlpack::tensor, byte_offset) == 40);
static_assert(sizeof(dlpack::managed_tensor) == 64 && offsetof(dlpack::managed_tensor, dl_tensor) == 0 &&
              offsetof(dlpack::managed_tensor, manager_ctx) == 48 &&
              offsetof(dlpack::managed_tensor, deleter) == 56);
static_assert(sizeof(dlpack::managed_tensor_versioned) == 80 &&
              offsetof(dlpack::managed_tensor_versioned, version) == 0 &&
              offsetof(dlpack::managed_tensor_versioned, manager_ctx) == 8 &&
              offsetof(dlpack::managed_tensor_versioned, deleter) == 16 &&
              offsetof(dlpack::managed_tensor_versioned, flags) == 24 &&
              offsetof(dlpack::managed_tensor_versioned, dl_tensor) == 32);

namespace {

std::vector<std::int64_t> shape_of(const dlpack::tensor& tensor) {
    return {tensor.shape, tensor.shape + tensor.ndim};
}

std::vector<std::int64_t> strides_of(const dlpack::tensor& tensor) {
    return {tensor.strides, tensor.strides + tensor.ndim};
}

array array_of_type(const dtype& type) {
    return {memory_region::anonymous(4 * std::max<std::uint64_t>(1, type.size_bytes())), type, {4}};
}

}  // namespace

TEST_CASE("dlpack: an array in memory is a tensor at the same address, in host memory, that can be written") {
    const array numbers = array_of<float>({1, 2, 3, 4, 5, 6}, {2, 3});
    const auto tensor = to_dlpack(numbers);
    CHECK(tensor->version.major == 1);
    CHECK(tensor->version.minor == 1);
    CHECK(tensor->flags == 0);
    const dlpack::tensor& elements = tensor->dl_tensor;
    CHECK(elements.data == static_cast<const void*>(numbers.view().data()));
    CHECK(elements.device.device_type == dlpack::device_type::cpu);
    CHECK(elements.device.device_id == 0);
    CHECK(elements.byte_offset == 0);
    CHECK(shape_of(elements) == std::vector<std::int64_t>{2, 3});
    CHECK(strides_of(elements) == std::vector<std::int64_t>{3, 1});
    CHECK(elements.dtype.code == dlpack::type_code::floating);
    CHECK(elements.dtype.bits == 32);
    CHECK(elements.dtype.lanes == 1);
    const auto older = to_dlpack<dlpack::managed_tensor>(numbers);
    CHECK(older->dl_tensor.data == elements.data);
    CHECK(shape_of(older->dl_tensor) == std::vector<std::int64_t>{2, 3});
}

TEST_CASE("dlpack: a tensor of a mapped file is read-only, and refused in the structure that cannot say so") {
    const temporary_folder folder;
    write_npy(folder / "numbers.npy", numbered_rows(100).view());
    const array mapped = open_npy(folder / "numbers.npy");
    REQUIRE(mapped.is_mapped());
    CHECK(to_dlpack(mapped)->flags == dlpack::flag_read_only);
    CHECK_THROWS_AS(to_dlpack<dlpack::managed_tensor>(mapped), unsupported);
}

TEST_CASE("dlpack: a tensor keeps the bytes of its array") {
    const temporary_folder folder;
    write_npy(folder / "numbers.npy", numbered_rows(100, 2).view());
    auto in_memory = std::make_optional(numbered_rows(100, 2));
    auto mapped = std::make_optional(open_npy(folder / "numbers.npy"));
    auto first = to_dlpack(*in_memory);
    auto second = to_dlpack(*mapped);
    in_memory.reset();
    mapped.reset();
    for (auto* tensor : {&first, &second}) {
        const auto* const elements = static_cast<const std::uint64_t*>((*tensor)->dl_tensor.data);
        for (std::uint64_t i = 0; i < 200; ++i)
            REQUIRE(elements[i] == i / 2);
    }
}

TEST_CASE("dlpack: a consumer that took a tensor deletes it") {
    const array numbers = numbered_rows(10);
    auto tensor = to_dlpack(numbers);
    dlpack::managed_tensor_versioned* const taken = tensor.release();
    taken->deleter(taken);  // AddressSanitizer sees a leak, or a second deletion
    auto older = to_dlpack<dlpack::managed_tensor>(numbers);
    dlpack::managed_tensor* const taken_older = older.release();
    taken_older->deleter(taken_older);
}

TEST_CASE("dlpack: strides count elements, in any order of the axes") {
    const auto fortran = [] {
        auto memory = memory_region::anonymous(6 * sizeof(double));
        return array::of_memory(std::move(memory), dtype::of<double>(), {2, 3}, true, "");
    }();
    CHECK(strides_of(to_dlpack(fortran)->dl_tensor) == std::vector<std::int64_t>{1, 2});
    const auto pairs = dtype::structured(
        {{"a", "", dtype::of<std::int32_t>(), {}, 0}, {"b", "", dtype::of<float>(), {}, 4}}, 8);
    const auto field = array_of_type(pairs).field("b");
    const auto tensor = to_dlpack(field);
    CHECK(strides_of(tensor->dl_tensor) == std::vector<std::int64_t>{2});
    CHECK(tensor->dl_tensor.data == static_cast<const void*>(field.view().data()));
    const auto odd = dtype::structured(
        {{"a", "", dtype::of<std::int32_t>(), {}, 0}, {"b", "", dtype::of<bool>(), {}, 4}}, 5);
    CHECK_THROWS_AS(to_dlpack(array_of_type(odd).field("a")), unsupported);
    CHECK_NOTHROW(to_dlpack(array_of_type(odd).field("b")));
}

TEST_CASE("dlpack: arrays without axes or without elements are tensors, too") {
    const auto scalar = to_dlpack(array_of<float>({3}, {}));
    CHECK(scalar->dl_tensor.ndim == 0);
    CHECK(*static_cast<const float*>(scalar->dl_tensor.data) == 3);
    const auto empty = to_dlpack(array_of<float>({}, {0, 5}));
    CHECK(empty->dl_tensor.data == nullptr);
    CHECK(shape_of(empty->dl_tensor) == std::vector<std::int64_t>{0, 5});
}

TEST_CASE("dlpack: every type with a code has it") {
    const auto is = [](const char* descr, dlpack::type_code code, int bits) {
        CAPTURE(descr);
        const auto tensor = to_dlpack(array_of_type(dtype::parse(descr)));
        CHECK(tensor->dl_tensor.dtype.code == code);
        CHECK(tensor->dl_tensor.dtype.bits == bits);
        CHECK(tensor->dl_tensor.dtype.lanes == 1);
    };
    using enum dlpack::type_code;
    is("|b1", boolean, 8);
    is("|i1", signed_integer, 8);
    is("<i2", signed_integer, 16);
    is("<i4", signed_integer, 32);
    is("<i8", signed_integer, 64);
    is("|u1", unsigned_integer, 8);
    is("<u2", unsigned_integer, 16);
    is("<u4", unsigned_integer, 32);
    is("<u8", unsigned_integer, 64);
    is("<f2", floating, 16);
    is("<f4", floating, 32);
    is("<f8", floating, 64);
    is("<c8", complex, 64);
    is("<c16", complex, 128);
    is("bfloat16", bfloat, 16);
    is("float8_e4m3fn", float8_e4m3fn, 8);
    is("float8_e5m2", float8_e5m2, 8);
    is("float8_e8m0fnu", float8_e8m0fnu, 8);
    is("float8_e4m3fnuz", float8_e4m3fnuz, 8);
    is("float8_e5m2fnuz", float8_e5m2fnuz, 8);
}

TEST_CASE("dlpack: the error for a type without a code names the type, the reason or what helps") {
    const auto message_of = [](const dtype& type) -> std::string {
        try {
            to_dlpack(array_of_type(type));
        } catch (const unsupported& error) {
            return error.what();
        }
        return "";
    };
    for (const char* descr : {"<M8[ns]", "<m8[s]", "|V2", "|S4", "<U1"}) {
        CAPTURE(descr);
        const std::string message = message_of(dtype::parse(descr));
        CHECK(message.find(descr) != std::string::npos);
        CHECK(message.find("view_as") != std::string::npos);
    }
    CHECK(message_of(dtype::parse("|S3")).find("|S3") != std::string::npos);
    for (const char* descr : {">i4", ">f8", ">c8", ">bfloat16"}) {
        CAPTURE(descr);
        CHECK(message_of(dtype::parse(descr)).find("big-endian") != std::string::npos);
    }
    CHECK(message_of(dtype::parse("<f16")).find("<f16") != std::string::npos);
    const auto pair = dtype::structured(
        {{"a", "", dtype::of<std::int32_t>(), {}, 0}, {"b", "", dtype::of<float>(), {}, 4}}, 8);
    CHECK(message_of(pair).find("field") != std::string::npos);
    // what the message names works
    CHECK_NOTHROW(to_dlpack(array_of_type(dtype::parse("<M8[ns]")).view_as(dtype::parse("<i8"))));
}

TEST_CASE("dlpack: the consumer's stream is what the array API standard says") {
    const device host = device::host();
    CHECK_FALSE(dlpack::consumer_stream(host));
    CHECK_FALSE(dlpack::consumer_stream(host, -1));
    CHECK_THROWS_AS(dlpack::consumer_stream(host, 0), invalid_argument);
    CHECK_THROWS_AS(dlpack::consumer_stream(host, 1), invalid_argument);
    if (device::cuda_count() == 0) return;
    const device cuda = device::cuda(0);
    const auto handle_of = [&](std::optional<std::int64_t> stream) {
        return std::bit_cast<std::int64_t>(dlpack::consumer_stream(cuda, stream).value().native_handle());
    };
    CHECK(handle_of(std::nullopt) == 1);
    CHECK(handle_of(1) == 1);
    CHECK(handle_of(2) == 2);
    const stream own(cuda);
    const auto own_handle = std::bit_cast<std::int64_t>(own.view().native_handle());
    CHECK(handle_of(own_handle) == own_handle);
    CHECK_FALSE(dlpack::consumer_stream(cuda, -1));
    CHECK_THROWS_AS(dlpack::consumer_stream(cuda, 0), invalid_argument);
    CHECK_THROWS_AS(dlpack::consumer_stream(cuda, -2), invalid_argument);
}
