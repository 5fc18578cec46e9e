#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pinflow/pinflow.hpp"
#include "temporary_folder.hpp"

// Objects that were moved from are empty: they refuse work with a typed error, and never touch what they had.
// NOLINTBEGIN(bugprone-use-after-move)
using namespace pinflow;

namespace {

constexpr std::uint64_t size_bytes = 4096;

array array_in_memory() {
    return {memory_region::anonymous(size_bytes), dtype::of<std::uint32_t>(), {64, 16}};
}

}  // namespace

TEST_CASE("moved from: a region, a buffer and a pinned buffer have no bytes") {
    const stream stream(device::host());
    memory_region region = memory_region::anonymous(size_bytes);
    device_buffer buffer(size_bytes, stream);
    pinned_buffer pinned(size_bytes, device::host());
    stream.synchronize();
    const memory_region region_now = std::move(region);
    device_buffer buffer_now = std::move(buffer);
    const pinned_buffer pinned_now = std::move(pinned);
    CHECK(region.data() == nullptr);
    CHECK(region.bytes().empty());
    CHECK_FALSE(region);
    CHECK(buffer.data() == nullptr);
    CHECK(buffer.size_bytes() == 0);
    buffer.release_after({});
    CHECK(pinned.data() == nullptr);
    CHECK(pinned.bytes().empty());
    CHECK(buffer_now.size_bytes() == size_bytes);
    // release_after skips an event that was moved from
    event gone(device::host());
    const event now = std::move(gone);
    buffer_now.release_after({&gone, 1});
    CHECK(buffer_now.data() == nullptr);
}

TEST_CASE("moved from: a stream refuses work until another one is moved to it") {
    stream gone(device::host());
    stream now = std::move(gone);
    event mark(device::host());
    CHECK(gone.device() == device::host());
    CHECK_THROWS_AS(gone.view(), invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(static_cast<stream_view>(gone)), invalid_argument);
    CHECK_THROWS_AS(gone.synchronize(), invalid_argument);
    CHECK_THROWS_AS(gone.done(), invalid_argument);
    CHECK_THROWS_AS(gone.wait(mark), invalid_argument);
    CHECK_THROWS_AS(gone.host_function_async([] {}), invalid_argument);
    CHECK_THROWS_AS(mark.record(gone), invalid_argument);
    CHECK_THROWS_AS(device_buffer(size_bytes, gone), invalid_argument);
    CHECK_THROWS_AS(copy_to_device_async(nullptr, {}, gone), invalid_argument);
    bool has_run = false;
    now.host_function_async([&] { has_run = true; });
    now.synchronize();
    CHECK(has_run);
    gone = std::move(now);
    CHECK(gone.done());
    CHECK_THROWS_AS(now.done(), invalid_argument);
}

TEST_CASE("moved from: an event refuses to be recorded and waited for") {
    const stream stream(device::host());
    event gone(device::host());
    gone.record(stream);
    event now = std::move(gone);
    CHECK(gone.native_handle() == nullptr);
    CHECK(gone.device() == device::host());
    CHECK_THROWS_AS(gone.record(stream), invalid_argument);
    CHECK_THROWS_AS(gone.synchronize(), invalid_argument);
    CHECK_THROWS_AS(gone.synchronize_for(std::chrono::microseconds(1)), invalid_argument);
    CHECK_THROWS_AS(gone.done(), invalid_argument);
    CHECK_THROWS_AS(stream.wait(gone), invalid_argument);
    now.synchronize();
    CHECK(now.done());
}

TEST_CASE("moved from: flat parameters have none, and refuse steps") {
    const stream stream(device::host());
    flat_parameters gone({{"weight", dtype::of<float>(), {10}}}, {sgd{}}, stream);
    const flat_parameters now = std::move(gone);
    CHECK(gone.device() == device::host());
    CHECK(gone.parameters().empty());
    CHECK(gone.state_names().empty());
    CHECK(gone.parameter_buffer() == nullptr);
    CHECK(gone.gradient_buffer() == nullptr);
    CHECK(gone.buffer_size_bytes() == 0);
    CHECK(gone.share() == nullptr);
    CHECK_THROWS_AS(gone.step_async(stream), invalid_argument);
    CHECK_THROWS_AS(gone.parameter(0), invalid_argument);
    CHECK_THROWS_AS(gone.gradient(0), invalid_argument);
    CHECK_THROWS_AS(gone.state(0, 0), invalid_argument);
    CHECK_THROWS_AS(gone.zero_gradients_async(stream), invalid_argument);
    CHECK_THROWS_AS(gone.check(stream), invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(gone.read_progress(stream)), invalid_argument);
    CHECK_THROWS_AS(gone.save("nothing", stream), invalid_argument);
    CHECK(now.parameters().size() == 1);
}

TEST_CASE("moved from: a null file makes no array and no mapping") {
    CHECK_THROWS_AS(array::of_file(nullptr, 0, dtype::of<float>(), {1}), invalid_argument);
    CHECK_THROWS_AS(array::of_file_unmapped(nullptr, 0, dtype::of<float>(), {1}), invalid_argument);
    CHECK_THROWS_AS(mapped_file(nullptr, 0, 1), invalid_argument);
}

TEST_CASE("moved from: a null handle is no stream of the host device") {
    CHECK_THROWS_AS(stream_view(device::host(), nullptr).synchronize(), invalid_argument);
}

TEST_CASE("moved from: pinned pages have nothing registered") {
    const array held = array_in_memory();
    pinned_pages gone(pin_ranges(held.rows()), device::host());
    const pinned_pages now = std::move(gone);
    const std::byte* const data = held.view().data();
    CHECK_FALSE(gone.covers(data, 1));
    CHECK_FALSE(gone.run_at(data, 1).registered);
    CHECK(gone.registered_prefix_bytes() == 0);
    gone.set_reader_position(data);
    CHECK(gone.finished());
    CHECK_FALSE(gone.all_registered());
    CHECK_THROWS_AS(gone.wait(), invalid_argument);
    CHECK_THROWS_AS(gone.wait_for(data, 1, std::chrono::nanoseconds(1)), invalid_argument);
    CHECK_THROWS_AS(gone.require(), invalid_argument);
    CHECK_THROWS_AS(gone.report(), invalid_argument);
    CHECK(now.report().finished);
    CHECK_THROWS_AS(pin_ranges(nullptr), invalid_argument);
}

TEST_CASE("moved from: an array, a view and a table have no elements") {
    array gone = array_in_memory();
    {
        const array now = std::move(gone);
        CHECK(now.view().size() == 1024);
    }
    CHECK_FALSE(gone.has_view());
    CHECK(gone.size_bytes() == 0);
    CHECK(gone.file() == nullptr);
    CHECK(gone.offset_bytes() == 0);
    CHECK_THROWS_AS(gone.view(), invalid_argument);
    CHECK_THROWS_AS(gone.rows(), invalid_argument);
    CHECK_THROWS_AS(gone.field("x"), invalid_argument);
    CHECK_THROWS_AS(gone.view_as(dtype::of<float>()).view(), invalid_argument);

    std::array<std::byte, 64> bytes{};
    array_view view(bytes.data(), dtype::of<std::byte>(), {64});
    const array_view view_now = std::move(view);
    CHECK(view.data() == nullptr);
    CHECK(view.size() == 0);
    CHECK(view.size_bytes() == 0);
    CHECK(view.as<std::byte>() == nullptr);
    CHECK(view_now.size() == 64);
    CHECK(view.is_moved_from());
    CHECK_FALSE(view_now.is_moved_from());
    CHECK_FALSE(array_view(bytes.data(), dtype::of<std::byte>(), {}).is_moved_from());
    CHECK_FALSE(array_view(nullptr, dtype::of<std::byte>(), {0}).is_moved_from());
    const temporary_folder folder;
    write_npy(folder / "a.npy", view_now);
    CHECK_THROWS_AS(write_npy(folder / "a.npy", view), invalid_argument);
    CHECK(open_npy(folder / "a.npy").shape() == shape_vector{64});
    foreign_tensor tensor(to_dlpack(array_in_memory()).release());
    const foreign_tensor tensor_now = std::move(tensor);
    CHECK_THROWS_AS(to_parameter("w", tensor), invalid_argument);
    CHECK(to_parameter("w", tensor_now).shape == shape_vector{64, 16});

    row_table table(bytes, 16);
    const row_table table_now = std::move(table);
    CHECK(table.data() == nullptr);
    CHECK(table.row_count() == 0);
    CHECK(table.size_bytes() == 0);
    CHECK_FALSE(table.writable());
    CHECK(table_now.row_count() == 4);
    row_exchange exchange(std::move(table), device::host());
    const std::vector<std::uint64_t> ids{0};
    CHECK_THROWS_AS(exchange.gather(ids, bytes.data()), invalid_argument);
}

TEST_CASE("moved from: a mapping and a descriptor lease are empty") {
    const temporary_folder folder;
    write_npy(folder / "a.npy", array_in_memory().view());
    const auto file = std::make_shared<const input_file>(folder / "a.npy");
    mapped_file gone(file, 0, size_bytes);
    const mapped_file now = std::move(gone);
    CHECK(gone.file() == nullptr);
    CHECK(gone.data() == nullptr);
    CHECK(gone.bytes().empty());
    gone.advise(access_advice::random);
    descriptor_lease lease = file->lease_descriptor();
    const descriptor_lease lease_now = std::move(lease);
    CHECK(lease.get() == -1);
    CHECK(lease_now.get() >= 0);
}

TEST_CASE("moved from: a row exchange refuses calls, and has an empty table") {
    std::array<std::byte, 64> bytes{};
    std::array<std::byte, 16> row{};
    const std::vector<std::uint64_t> ids{0};
    const stream stream(device::host());
    row_exchange gone(row_table(bytes, 16), device::host());
    row_exchange now = std::move(gone);
    const row_gather gather{ids, row.data()};
    const row_scatter scatter{ids, row.data()};
    CHECK(gone.table().row_count() == 0);
    CHECK(gone.device() == device::host());
    CHECK_THROWS_AS(gone.gather(ids, row.data()), invalid_argument);
    CHECK_THROWS_AS(gone.gather_async(ids, row.data(), stream), invalid_argument);
    CHECK_THROWS_AS(gone.gather_group_async({&gather, 1}, stream), invalid_argument);
    CHECK_THROWS_AS(gone.scatter(ids, row.data()), invalid_argument);
    CHECK_THROWS_AS(gone.scatter_async(ids, row.data(), duplicate_policy::last, stream), invalid_argument);
    CHECK_THROWS_AS(gone.scatter_group_async({&scatter, 1}, duplicate_policy::last, stream),
                    invalid_argument);
    CHECK_THROWS_AS(gone.check(), invalid_argument);
    CHECK_THROWS_AS(gone.plan_gather(1), invalid_argument);
    CHECK_THROWS_AS(gone.plan_scatter(1), invalid_argument);
    CHECK_THROWS_AS(gone.tune(1), invalid_argument);
    now.gather(ids, row.data());
}

TEST_CASE("moved from: a loader delivers nothing, and a batch holds nothing") {
    loader_options options;
    options.device = device::host();
    options.batch_rows = 8;
    loader gone({array_in_memory()}, options);
    loader now = std::move(gone);
    const stream stream(device::host());
    CHECK(gone.row_count() == 0);
    CHECK(gone.batches_per_epoch() == 0);
    CHECK(gone.batch_total() == 0);
    CHECK(gone.row_total() == 0);
    CHECK(gone.device() == device::host());
    CHECK_THROWS_AS(gone.next(), invalid_argument);
    CHECK_THROWS_AS(gone.next(stream), invalid_argument);
    CHECK_THROWS_AS(gone.report(), invalid_argument);
    CHECK_THROWS_AS(gone.state(), invalid_argument);

    std::optional<batch> taken = now.next();
    REQUIRE(taken);
    batch held = *std::move(taken);
    CHECK(taken->row_count() == 0);
    CHECK(taken->array_count() == 0);
    CHECK(taken->row_ids().empty());
    CHECK(taken->epoch() == 0);
    CHECK(taken->index() == 0);
    CHECK_FALSE(taken->last_of_epoch());
    CHECK_THROWS_AS((*taken)[0], invalid_argument);
    CHECK_THROWS_AS(taken->state(), invalid_argument);
    CHECK_THROWS_AS(taken->used_on(stream), invalid_argument);
    taken->release();
    CHECK(held.row_count() == 8);
    digest sum(device::host());
    CHECK_THROWS_AS(sum.add_async(*taken, stream), invalid_argument);
    CHECK(sum.value() == 0);
}

TEST_CASE("moved from: a sampler has no rows") {
    sampler gone = sampler::shuffled(10, 1);
    const sampler now = std::move(gone);
    std::array<std::uint64_t, 2> rows{};
    CHECK_THROWS_AS(gone.rows_at(0, 0, rows), invalid_argument);
    loader_options options;
    options.device = device::host();
    options.sampler = gone;
    CHECK_THROWS_AS(loader({array_in_memory()}, options), invalid_argument);
    now.rows_at(0, 0, rows);
}

TEST_CASE("moved from: a writer refuses more, and leaves no file") {
    const temporary_folder folder;
    const std::array<std::byte, 4> bytes{};
    npy_writer npy(folder / "a.npy", dtype::of<float>(), {1});
    npz_writer npz(folder / "a.npz");
    const safetensors_writer::tensor tensor{"a", dtype::of<float>(), {1}};
    safetensors_writer tensors(folder / "a.safetensors", {&tensor, 1});
    {
        const npy_writer npy_now = std::move(npy);
        const npz_writer npz_now = std::move(npz);
        const safetensors_writer tensors_now = std::move(tensors);
    }
    CHECK_THROWS_AS(npy.write(bytes), invalid_argument);
    CHECK_THROWS_AS(npy.finish(), invalid_argument);
    CHECK_THROWS_AS(npz.begin("a", dtype::of<float>(), {1}), invalid_argument);
    CHECK_THROWS_AS(npz.write(bytes), invalid_argument);
    CHECK_THROWS_AS(npz.finish(), invalid_argument);
    CHECK_THROWS_AS(tensors.write(bytes), invalid_argument);
    CHECK_THROWS_AS(tensors.finish(), invalid_argument);
    if (has_hdf5()) {
        const hdf5_writer::dataset dataset{.name = "a", .dtype = dtype::of<float>(), .shape = {1}};
        hdf5_writer gone(folder / "a.h5");
        {
            const hdf5_writer now = std::move(gone);
        }
        CHECK_THROWS_AS(gone.check({&dataset, 1}), invalid_argument);
        CHECK_THROWS_AS(gone.begin(dataset), invalid_argument);
        CHECK_THROWS_AS(gone.write(bytes), invalid_argument);
        CHECK_THROWS_AS(gone.finish(), invalid_argument);
    }
    CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("moved from: a loaded tensor has no memory, and opened files stay open") {
    const temporary_folder folder;
    const std::vector<float> numbers(1 << 19, 1.0F);  // more than 1 MiB, so that the tensor is a mapping
    write_npy(folder / "a.npy",
              array_view(reinterpret_cast<const std::byte*>(numbers.data()), dtype::of<float>(), {1 << 19}));
    tensor_files files({folder / "a.npy"});
    const tensor_files files_now = std::move(files);
    CHECK(files.tensors().size() == 1);
    device_tensor gone = files.load(files.select({}), device::host())["a"];
    {
        const device_tensor now = std::move(gone);
        CHECK(now.size_bytes() == numbers.size() * sizeof(float));
    }
    CHECK(gone.data() == nullptr);
    CHECK(gone.size_bytes() == 0);
    CHECK(gone.share() == nullptr);
    CHECK_THROWS_AS(to_dlpack(gone), invalid_argument);
}
// NOLINTEND(bugprone-use-after-move)
