#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/digest.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/row_source.hpp"
#include "src/device/cuda/api.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;

namespace {

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;
constexpr std::uint64_t row_bytes = 256 * 1024;

/// The number `name` of /proc/self/status, converted from KiB to bytes.
std::uint64_t own_status_bytes(const std::string& name) {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with(name + ":")) return std::stoull(line.substr(name.size() + 1)) * 1024;
    }
    throw std::runtime_error("/proc/self/status has no " + name);
}

/// Rows of 256 KiB, mostly a hole: each begins with its number.
void make_rows(const std::filesystem::path& path, std::uint64_t rows) {
    const std::string header =
        format_npy_header(dtype::of<std::uint64_t>(), std::vector<std::uint64_t>{rows, row_bytes / 8});
    std::ofstream file(path, std::ios::binary);
    file << header;
    file.close();
    std::filesystem::resize_file(path, header.size() + rows * row_bytes);
    std::fstream numbers(path, std::ios::binary | std::ios::in | std::ios::out);
    for (std::uint64_t row = 0; row < rows; ++row) {
        numbers.seekp(static_cast<std::streamoff>(header.size() + row * row_bytes));
        numbers.write(reinterpret_cast<const char*>(&row), sizeof(row));
    }
}

/// Whether every row of the batch begins with its number; `numbers` has room for them.
bool numbers_are_right(const batch& batch, stream_view stream, const pinned_buffer& numbers) {
    const std::uint64_t size_bytes = batch[0].size_bytes() / batch.row_count();
    for (std::size_t i = 0; i < batch.row_count(); ++i) {
        copy_to_host_async(numbers.bytes().subspan(i * 8, 8), batch[0].data() + i * size_bytes, stream);
    }
    stream.synchronize();
    const auto* const found = reinterpret_cast<const std::uint64_t*>(numbers.data());
    return std::equal(batch.row_ids().begin(), batch.row_ids().end(), found);
}

/// The rows of another source, with the same extents. Records which rows the CPU gathered.
class counted_rows final : public row_source {
 public:
    explicit counted_rows(std::shared_ptr<const row_source> source)
        : source_(std::move(source)), gathered_(source_->row_count()), looked_at_(source_->row_count()) {}

    /// Whether only some rows of the batch were gathered by the CPU. Must be called in the order of batches.
    bool mixed(const batch& batch) {
        std::size_t from_slot = 0;
        for (const std::uint64_t row : batch.row_ids()) {
            const unsigned times = gathered_[row];
            if (times > looked_at_[row]) ++from_slot;
            looked_at_[row] = times;
        }
        return from_slot > 0 && from_slot < batch.row_count();
    }

    const pinflow::dtype& dtype() const noexcept override { return source_->dtype(); }
    const shape_vector& row_shape() const noexcept override { return source_->row_shape(); }
    std::uint64_t row_count() const noexcept override { return source_->row_count(); }
    std::uint64_t row_size_bytes() const noexcept override { return source_->row_size_bytes(); }
    std::string description() const override { return source_->description(); }
    std::span<const row_extent> extents() const noexcept override { return source_->extents(); }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override {
        for (const std::uint64_t id : ids)
            ++gathered_[id];
        return source_->read_rows(ids, destination);
    }
    void check_unchanged() const override { source_->check_unchanged(); }

 private:
    std::shared_ptr<const row_source> source_;
    mutable std::vector<std::atomic<unsigned>> gathered_;
    std::vector<unsigned> looked_at_;
};

/// Waits until nothing more will be registered, because of a refusal.
bool registering_was_refused(const loader& loader) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (loader.report().reason.find("cannot register") == std::string::npos) {
        if (std::chrono::steady_clock::now() > until) return false;
        std::this_thread::yield();
    }
    return true;
}

}  // namespace

TEST_CASE("cuda loader: a batch may hold rows of registered pages and others, and every byte is right") {
    const temporary_folder folder;
    // pages are registered in pieces whose edges fall into rows: 11 of 32 MiB in the order of the file, 6 of
    // 64 MiB otherwise
    constexpr std::uint64_t rows = 3300;
    write_random_rows(folder / "rows.npy", rows, (100 * 1024 + 8) / 8, 1);
    write_random_rows(folder / "labels.npy", rows, 3, 2);
    loader on_host({open_npy(folder / "rows.npy"), open_npy(folder / "labels.npy")},
                   {.device = device::host()});
    const std::uint64_t expected = digest_of(on_host);
    const device gpu = device::cuda(0);
    const pinned_buffer numbers(mebibyte, gpu);
    for (const order order : {order::sequential, order::shuffled}) {
        CAPTURE(static_cast<int>(order));
        // one call for all slots, then two pieces of the file; the others are refused. Small pinned memory
        // comes from a slab, which `numbers` has made
        constexpr unsigned slots = 3;
        std::atomic<int> registered_pieces = -1;
        std::atomic<unsigned> batched_copies = 0;
        const detail::cuda::scoped_failure_hook refuse([&](std::string_view call) {
            if (call == "cudaMemcpyBatchAsync") ++batched_copies;
            return call == "cudaHostRegister" && ++registered_pieces > 2 ? cudaErrorMemoryAllocation
                                                                         : cudaSuccess;
        });
        const auto large = std::make_shared<counted_rows>(open_npy(folder / "rows.npy").rows());
        const stream stream(gpu);
        digest digest(gpu);
        loader loader({large, open_npy(folder / "labels.npy")}, {.device = gpu,
                                                                 .batch_rows = 61,
                                                                 .order = order,
                                                                 .epochs = 2,
                                                                 .slots = slots,
                                                                 .threads = 16,
                                                                 .pin_budget_bytes = generous_pin_budget});
        std::uint64_t seen = 0;
        unsigned mixed_batches = 0;
        while (const auto batch = loader.next(stream)) {
            digest.add_async(*batch, stream);
            CHECK(numbers_are_right(*batch, stream, numbers));
            if (large->mixed(*batch)) ++mixed_batches;
            // from here on, what is registered is known
            if (seen == 0) REQUIRE(registering_was_refused(loader));
            seen += batch->row_count();
        }
        CHECK(seen == 2 * rows);
        CHECK(digest.value() == 2 * expected);
        // in the order of the file, at least one batch in each epoch is mixed, at the edges of the two
        // pieces; shuffled, nearly every batch is mixed
        INFO(mixed_batches << " batches were mixed, " << batched_copies.load() << " copied at once");
        CHECK(mixed_batches >= (order == order::sequential ? 2U : 50U));
        CHECK(batched_copies.load() >= mixed_batches);
        const loader_report report = loader.report();
        // read with 10 threads or more; staged if the system starts fewer
        CHECK((report.route == route::staged || report.route == route::read));
        CHECK(report.reason.find("cannot register") != std::string::npos);
        CHECK(registered_pieces.load() == (order == order::sequential ? 11 : 6));
    }
}

TEST_CASE("cuda loader: a batch whose data cannot be waited for comes the next time") {
    const device gpu = device::cuda(0);
    loader loader({numbered_rows(600, 8192)}, {.device = gpu, .batch_rows = 200, .slots = 2});
    const stream stream(gpu);
    {
        const detail::cuda::scoped_failure_hook hook(
            [consumer = std::this_thread::get_id()](std::string_view call) {
                const bool refused = call == "cudaEventQuery" && std::this_thread::get_id() == consumer;
                return refused ? cudaErrorMemoryAllocation : cudaSuccess;
            });
        CHECK_THROWS_AS(loader.next(stream), device_error);
        CHECK_THROWS_AS(loader.next(), device_error);
    }
    for (std::uint64_t index = 0; index < 3; ++index) {
        const auto batch = loader.next(stream);
        REQUIRE(batch);
        CHECK(batch->index() == index);
        CHECK(holds_its_rows(*batch, stream));
    }
    CHECK_FALSE(loader.next(stream).has_value());
}

TEST_CASE("cuda loader: a hundred loaders, made and destroyed, leave no memory behind") {
    const temporary_folder folder;
    make_rows(folder / "rows.npy", 512);
    const device gpu = device::cuda(0);
    const pinned_buffer numbers(mebibyte, gpu);
    const auto stream_a_little = [&](int batches) {
        const stream stream(gpu);
        loader loader({open_npy(folder / "rows.npy")}, {.device = gpu,
                                                        .batch_rows = 16,
                                                        .order = order::shuffled,
                                                        .epochs = 1000,
                                                        .pin_budget_bytes = generous_pin_budget});
        for (int i = 0; i < batches; ++i) {
            const auto batch = loader.next(stream);
            REQUIRE(batch);
            CHECK(numbers_are_right(*batch, stream, numbers));
        }
    };
    for (int i = 0; i < 10; ++i)
        stream_a_little(i);
    const std::uint64_t free_before = gpu.memory().free_bytes;
    const std::uint64_t anonymous_before = own_status_bytes("RssAnon");
    const std::uint64_t mapped_before = own_status_bytes("VmSize");
    for (int i = 0; i < 100; ++i)
        stream_a_little(i % 40);
    // compute-sanitizer's initcheck takes some of the device's memory as well
    const bool initcheck = std::getenv("PINFLOW_TEST_SINGLE_COPIES") != nullptr;
    if (!initcheck) CHECK(gpu.memory().free_bytes + 32 * mebibyte >= free_before);
    CHECK(own_status_bytes("RssAnon") <= anonymous_before + 32 * mebibyte);
    // the slots alone would be over 3 GiB
    CHECK(own_status_bytes("VmSize") <= mapped_before + 1024 * mebibyte);
}

TEST_CASE("cuda loader: anonymous memory does not grow with the size of the file") {
    const temporary_folder folder;
    make_rows(folder / "small.npy", 1024);
    make_rows(folder / "large.npy", 16 * 1024);
    const auto peak_while_streaming = [&](const std::string& name, order order) {
        const stream stream(device::cuda(0));
        loader loader({open_npy(folder / name)}, {.device = device::cuda(0),
                                                  .order = order,
                                                  .epochs = 3,
                                                  .pin_budget_bytes = generous_pin_budget});
        std::uint64_t peak = 0;
        while (loader.next(stream))
            peak = std::max(peak, own_status_bytes("RssAnon"));
        CHECK(loader.report().route == route::copy);
        return peak;
    };
    for (const order order : {order::sequential, order::shuffled}) {
        const std::uint64_t small = peak_while_streaming("small.npy", order);
        const std::uint64_t large = peak_while_streaming("large.npy", order);
        INFO("256 MiB: " << small << " bytes, 4 GiB: " << large << " bytes");
        CHECK(small > 0);
        CHECK(large < small + 16 * mebibyte);
    }
}
