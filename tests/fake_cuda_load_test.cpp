#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/load.hpp"
#include "src/core/system.hpp"
#include "src/device/page_releaser.hpp"
#include "tests/load_backend.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

// Loads to a device that page-locks.

using namespace pinflow;

namespace {

/// Allocations that lie side by side.
class side_by_side final : public memory_resource {
 public:
    std::byte* allocate(std::uint64_t size_bytes, stream_view) override {
        allocations.push_back(std::span(memory_.data() + used_, size_bytes));
        used_ += (size_bytes + 255) / 256 * 256;
        REQUIRE(used_ <= memory_.size_bytes());
        return allocations.back().data();
    }
    void deallocate(std::byte*, std::uint64_t, stream_view) noexcept override {}

    std::vector<std::span<std::byte>> allocations;

 private:
    memory_region memory_ = memory_region::anonymous(std::uint64_t{80} << 20);
    std::uint64_t used_ = 0;
};

}  // namespace

TEST_CASE("load: pages that are locked are copied in place, and threads stage the rest") {
    const temporary_folder folder;
    const auto model = large_model();
    write_model(folder / "a.safetensors", model);
    load_backend& backend = new_backend();
    for (const load_route route : {load_route::both, load_route::automatic}) {
        load_options options;
        options.route = route;
        const loaded_tensors loaded = load_tensors(folder / "a.safetensors", backend.device(), options);
        check_equal(loaded, model);
        CHECK(loaded.report.copied_bytes + loaded.report.staged_bytes == loaded.report.size_bytes);
        CHECK(loaded.report.staged_bytes > 0);  // short tensors
        detail::wait_for_released_pages();
        CHECK(backend.lock.locked.empty());
    }
    CHECK(backend.max_pinned_bytes <= std::uint64_t{256} << 20);
}

TEST_CASE("load: pages that cannot be locked are staged, unless the route is required") {
    const temporary_folder folder;
    const auto model = large_model();
    write_model(folder / "a.safetensors", model);
    for (const bool at_once : {true, false}) {
        load_backend& backend = new_backend();
        std::atomic<int> calls = 0;
        backend.lock.refuse = [&](std::span<const std::byte>, bool) { return at_once || ++calls > 1; };
        load_options options;
        options.route = load_route::both;
        const loaded_tensors loaded = load_tensors(folder / "a.safetensors", backend.device(), options);
        check_equal(loaded, model);
        if (at_once) {
            CHECK(loaded.report.copied_bytes == 0);
            CHECK(loaded.report.reason.find("cudaErrorMemoryAllocation") != std::string::npos);
        }
        options.route = load_route::copy;
        options.names = {"w*"};
        CHECK_THROWS_AS(load_tensors(folder / "a.safetensors", backend.device(), options), unsupported);
        detail::wait_for_released_pages();
        CHECK(backend.lock.locked.empty());
    }
}

TEST_CASE("load: if pages in the middle are refused, the rest does not wait for the pages after them") {
    const temporary_folder folder;
    const auto model = large_model();
    write_model(folder / "a.safetensors", model);
    load_backend& backend = new_backend();
    backend.lock.permits = 2;
    backend.lock.fail_at_call = 2;
    load_options options;
    options.threads = 1;  // which only copies, while pages are registered
    options.pin_budget_bytes = std::uint64_t{96} << 20;
    options.progress = [&](std::uint64_t done_bytes, std::uint64_t total_bytes) {
        if (done_bytes == total_bytes) backend.lock.allow(1000);
    };
    const loaded_tensors loaded = load_tensors(folder / "a.safetensors", backend.device(), options);
    check_equal(loaded, model);
    CAPTURE(loaded.report.reason);
    CHECK(loaded.report.copied_bytes > 0);
    CHECK(loaded.report.reason.find("; the rest is staged: ") != std::string::npos);
    CHECK(loaded.report.reason.find("has not returned") == std::string::npos);  // until the deadline
    detail::wait_for_released_pages();
}

TEST_CASE("load: small tensors leave no run that is too short for the copy engine") {
    const temporary_folder folder;
    load_backend& backend = new_backend();
    // the last tensor does not fit into the units of 4 MiB before it
    for (const unsigned count : {2U, 26U, 102U, 103U, 104U, 205U, 206U}) {
        CAPTURE(count);
        std::vector<model_tensor> model;
        for (unsigned i = 0; i < count; ++i)
            model.push_back(random_tensor(fmt::format("w{:03}", i), dtype::of<float>(), {10, 1024}));
        write_model(folder / "a.safetensors", model);
        load_options options;
        options.route = load_route::copy;
        check_equal(load_tensors(folder / "a.safetensors", backend.device(), options), model);
    }
}

TEST_CASE("load: neighbours among small tensors are read by one call") {
    const temporary_folder folder;
    std::vector<model_tensor> model;
    for (unsigned i = 0; i < 1000; ++i)
        model.push_back(random_tensor(fmt::format("w{:03}", i), dtype::of<float>(), {4, 1024}));
    write_model(folder / "a.safetensors", model);
    load_backend& backend = new_backend();
    load_options options;
    options.route = load_route::staged;
    std::atomic<int> reads = 0;
    const detail::system::scoped_failure_hook hook([&](detail::system::call what, std::string_view) {
        if (what == detail::system::call::pread) ++reads;
        return detail::system::injected_failure{};
    });
    check_equal(load_tensors(folder / "a.safetensors", backend.device(), options), model);
    CHECK(reads > 0);
    CHECK(reads < 50);  // 16 MB in units of 4 MiB, and the header
}

TEST_CASE("load: no copy crosses two allocations that lie side by side") {
    const temporary_folder folder;
    std::vector<model_tensor> model;
    for (unsigned i = 0; i < 9; ++i)
        model.push_back(random_tensor("w" + std::to_string(i), dtype::of<float>(), {512, 4096}));
    write_model(folder / "a.safetensors", model);
    load_backend& backend = new_backend();
    const auto resource = std::make_shared<side_by_side>();
    load_options options;
    options.route = load_route::copy;
    options.resource = resource;
    check_equal(load_tensors(folder / "a.safetensors", backend.device(), options), model);
    CHECK(backend.batch_copies.size() >= model.size());
    CHECK(backend.batch_copies.size() < 2 * model.size());  // joined within each allocation
    for (const copy_range& copy : backend.batch_copies) {
        CHECK(std::ranges::any_of(resource->allocations, [&](std::span<std::byte> allocation) {
            return copy.destination >= allocation.data() &&
                   copy.destination + copy.size_bytes <= allocation.data() + allocation.size();
        }));
    }
}

TEST_CASE(
    "load: threads that begin with the last tensor wait for its memory, allocated after 600 MiB of others") {
    const temporary_folder folder;
    constexpr std::uint64_t large_bytes = std::uint64_t{200} << 20;
    std::string header = "{";
    std::uint64_t end = 0;
    for (const char* const name : {"a", "b", "c", "d"}) {
        header += fmt::format(R"({}"{}":{{"dtype":"F32","shape":[{}],"data_offsets":[{},{}]}})",
                              end == 0 ? "" : ",", name, large_bytes / 4, end, end + large_bytes);
        end += large_bytes;
    }
    header += "}";
    const std::uint64_t length = header.size();
    const std::string text = std::string(reinterpret_cast<const char*>(&length), sizeof length) + header;
    write_bytes(folder / "a.safetensors", std::as_bytes(std::span(text)));
    std::filesystem::resize_file(folder / "a.safetensors", 8 + header.size() + end);  // zeros without blocks
    const tensor_files files({folder / "a.safetensors"});
    std::vector<tensor_request> requests{{"a"}, {"b"}, {"c"}, {"d"}};
    requests.back().slice = tensor_slice{0, 0, 1 << 20};
    requests.back().dtype = dtype::of<double>();  // threads begin with what must be cast
    load_options options;
    options.route = load_route::staged;
    options.threads = 2;
    const loaded_tensors loaded = files.load(requests, new_backend().device(), options);
    CHECK(loaded.report.staged_bytes == loaded.report.size_bytes);
    CHECK(loaded.tensors[3].size_bytes() == std::uint64_t{8} << 20);
}

TEST_CASE(
    "load: without staging buffers, large tensors are still copied in place, and short ones are an error") {
    const temporary_folder folder;
    const auto model = large_model();
    write_model(folder / "a.safetensors", model);
    load_backend& backend = new_backend();
    backend.has_pinned_memory = false;
    load_options options;
    options.route = load_route::both;
    CHECK_THROWS_AS(load_tensors(folder / "a.safetensors", backend.device(), options), device_error);
    options.route = load_route::copy;
    options.names = {"w*"};
    const loaded_tensors loaded = load_tensors(folder / "a.safetensors", backend.device(), options);
    CHECK(loaded.report.copied_bytes == loaded.report.size_bytes);
    for (const device_tensor& each : loaded.tensors) {
        const auto expected = std::ranges::find(model, each.name(), &model_tensor::name);
        CHECK(bytes_of(each) == expected->bytes);
    }
}

TEST_CASE("load: neighbours in the file travel in at most two copies") {
    const temporary_folder folder;
    std::vector<model_tensor> model;
    for (unsigned i = 0; i < 64; ++i)
        model.push_back(random_tensor("m" + std::to_string(i), dtype::of<float>(), {16384}));
    write_model(folder / "a.safetensors", model);
    load_backend& backend = new_backend();
    load_options options;
    options.route = load_route::copy;
    const loaded_tensors loaded = load_tensors(folder / "a.safetensors", backend.device(), options);
    check_equal(loaded, model);
    CHECK(loaded.report.copied_bytes == loaded.report.size_bytes);
    CHECK(backend.copied_pieces <= 2);
}

TEST_CASE("load: a decoded tensor between raw ones in a block is not overwritten") {
    const temporary_folder folder;
    const float values[] = {1, 2, 3, 4, 5, 6};
    const auto* const data = reinterpret_cast<const std::byte*>(values);
    const array_view plain(data, dtype::of<float>(), {2, 3});
    const array_view fortran(data, dtype::of<float>(), {2, 3}, {4, 8});
    std::vector<std::filesystem::path> files;
    for (int i = 0; i < 9; ++i) {
        files.push_back(folder / (std::to_string(i) + ".npy"));
        write_npy(files.back(), i % 3 == 1 ? fortran : plain);
    }
    for (unsigned round = 0; round < 20; ++round) {
        load_options options;
        options.threads = 1 + round % 3;
        const loaded_tensors loaded = load_tensors(files, new_backend().device(), options);
        for (int i = 0; i < 9; ++i) {
            std::vector<float> expected{1, 2, 3, 4, 5, 6};
            if (i % 3 == 1) expected = {1, 3, 5, 2, 4, 6};
            const auto bytes = bytes_of(loaded[std::to_string(i)]);
            CHECK(std::memcmp(bytes.data(), expected.data(), sizeof values) == 0);
        }
    }
}

TEST_CASE("load: a small pin budget is kept, and all bytes arrive") {
    const temporary_folder folder;
    const auto model = large_model();
    write_model(folder / "a.safetensors", model);
    load_backend& backend = new_backend();
    load_options options;
    options.route = load_route::both;
    options.pin_budget_bytes = std::uint64_t{24} << 20;
    std::uint64_t max_locked = 0;
    backend.lock.refuse = [&](std::span<const std::byte> pages, bool) {
        std::uint64_t locked = pages.size();
        for (const auto& each : backend.lock.locked)
            locked += each.size();
        max_locked = std::max(max_locked, locked);
        return false;
    };
    for (int round = 0; round < 3; ++round)  // pages of the round before count until they are unlocked
        check_equal(load_tensors(folder / "a.safetensors", backend.device(), options), model);
    detail::wait_for_released_pages();
    CHECK(backend.lock.locked.empty());
    CHECK(max_locked > 0);
    CHECK(max_locked <= options.pin_budget_bytes);
}

TEST_CASE("load: elements of more than 4 MiB that must be decoded are refused on a GPU") {
    const temporary_folder folder;
    const std::vector<std::byte> text(std::size_t{6} << 20);
    write_npy(folder / "a.npy", {text.data(), dtype::parse(">U1572864"), {}});
    CHECK_THROWS_AS(load_tensors(folder / "a.npy", new_backend().device()), unsupported);
    const loaded_tensors loaded = load_tensors(folder / "a.npy", device::host());
    CHECK(loaded.tensors[0].size_bytes() == text.size());
}
