#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "arrays.hpp"
#include "file_bytes.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

namespace {

constexpr std::uint64_t file_rows = 333;
constexpr std::uint64_t file_width = 33;

/// Writes numbered rows as a .npy file whose data begin at a multiple of `alignment_bytes`.
void write_rows(const std::string& path, std::string_view descr, std::uint64_t alignment_bytes) {
    const array content = numbered_rows(file_rows, file_width);
    const dtype type = dtype::parse(descr);
    const std::string header = format_npy_header(type, content.shape(), false, alignment_bytes);
    std::vector<std::byte> file(header.size() + content.size_bytes());
    std::ranges::copy(std::as_bytes(std::span(header)), file.begin());
    const auto elements = std::span(file).subspan(header.size());
    std::ranges::copy(std::span(content.view().data(), content.size_bytes()), elements.begin());
    if (!type.is_little_endian()) {
        for (std::size_t at = 0; at < elements.size(); at += type.size_bytes())
            std::ranges::reverse(elements.subspan(at, type.size_bytes()));
    }
    write_bytes(path, file);
}

/// Streams the file of write_rows on the host by `asked`, and checks each batch and the report.
void check_route(const std::string& path, route asked) {
    CAPTURE(to_string(asked));
    loader loader({open_npy(path)}, {.device = device::host(), .batch_rows = 50, .route = asked});
    const stream stream(device::host());
    std::uint64_t rows = 0;
    while (const auto batch = loader.next(stream)) {
        CHECK(holds_its_rows(*batch, stream));
        rows += batch->row_count();
    }
    CHECK(rows == file_rows);
    const loader_report report = loader.report();
    CHECK(report.route == (asked == route::automatic ? route::copy : asked));
    CHECK_FALSE(report.reason.empty());
    CHECK(report.rows == file_rows);
    CHECK(report.bytes == file_rows * file_width * 8);
}

}  // namespace

TEST_CASE("loader: a .npy file is read by every route of the host, wherever its data begin") {
    const temporary_folder folder;
    const std::string path = folder / "rows.npy";
    for (const std::uint64_t alignment_bytes : {32U, 64U, 256U, 4096U}) {
        CAPTURE(alignment_bytes);
        write_rows(path, "<u8", alignment_bytes);
        // the header has 90 bytes before it is padded
        CHECK(open_npy(path).offset_bytes() == (90 / alignment_bytes + 1) * alignment_bytes);
        for (const route route : {route::automatic, route::direct, route::copy, route::staged, route::read})
            check_route(path, route);
    }
}

TEST_CASE("loader: a big-endian .npy file is converted on every route of the host, and direct is refused") {
    const temporary_folder folder;
    const std::string path = folder / "rows.npy";
    write_rows(path, ">u8", 64);
    for (const route route : {route::automatic, route::copy, route::staged, route::read})
        check_route(path, route);
    const auto directly = [&] {
        loader({open_npy(path)}, {.device = device::host(), .route = route::direct});
    };
    CHECK(
        contains_all(message_of<unsupported>(directly),
                     {"route direct", path, "is big-endian, so its rows are converted when they are read"}));
}

TEST_CASE(
    "loader: the direct route's batches are the mapping itself, and stay readable after everything else has "
    "gone") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(100).view());
    const stream stream(device::host());
    std::optional<batch> kept;
    {
        array mapped = open_npy(folder / "rows.npy");
        const std::byte* const data = mapped.view().data();
        loader loader({mapped}, {.device = device::host(), .batch_rows = 60, .route = route::direct});
        kept = loader.next(stream);
        REQUIRE(kept);
        CHECK((*kept)[0].data() == data);
    }
    CHECK(holds_its_rows(*kept, stream));
}

TEST_CASE("loader: a GPU gets the same rows from mapped pages, from staging buffers, and from both") {
    if (device::cuda_count() == 0) {
        MESSAGE("skipped: there is no CUDA device");
        return;
    }
    const device device = device::cuda(0);
    const temporary_folder folder;
    write_npy(folder / "large.npy", numbered_rows(300, 8192).view());  // rows of 64 KiB
    write_npy(folder / "small.npy", numbered_rows(300, 3).view());
    for (const order order : {order::sequential, order::shuffled}) {
        for (const route route : {route::automatic, route::direct, route::copy, route::staged, route::read}) {
            CAPTURE(to_string(route));
            loader loader({open_npy(folder / "large.npy"), open_npy(folder / "small.npy")},
                          {.device = device,
                           .batch_rows = 32,
                           .order = order,
                           .epochs = 3,
                           .route = route,
                           .pin_budget_bytes = generous_pin_budget});
            const stream stream(device);
            std::uint64_t rows = 0;
            while (const auto batch = loader.next(stream)) {
                CHECK(holds_its_rows(*batch, stream));
                const auto labels = elements_of<std::uint64_t>(*batch, 1, stream);
                for (std::size_t i = 0; i < batch->row_count(); ++i) {
                    CHECK(labels[i * 3 + 2] == batch->row_ids()[i]);
                }
                rows += batch->row_count();
            }
            CHECK(rows == 900);
            CHECK(loader.report().route == (route == route::automatic ? route::copy : route));
            if (loader.report().route == route::copy) {
                CHECK(loader.report().reason.find("registered") != std::string::npos);
                CHECK(loader.report().pin_time.count() > 0);
            }
        }
    }
    // the first epochs are staged until the pages are registered, then groups of batches come together
    loader small({open_npy(folder / "small.npy")}, {.device = device,
                                                    .batch_rows = 7,
                                                    .order = order::shuffled,
                                                    .epochs = 2000,
                                                    .pin_budget_bytes = generous_pin_budget});
    CHECK(small.report().route == route::direct);
    const stream stream(device);
    std::uint64_t rows = 0;
    while (const auto batch = small.next(stream)) {
        CHECK(holds_its_rows(*batch, stream));
        rows += batch->row_count();
        if (rows == 3000 && small.report().pin_time.count() == 0) rows = 0;  // not registered yet
        if (rows > 30000) break;
    }
    CHECK(rows > 30000);
    CHECK(small.report().reason.find("registered") != std::string::npos);
}

TEST_CASE("loader: on the direct route, a stream's task may release the last batch after all else is gone") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(100).view());
    const stream stream(device::host());
    gate gate;
    bool right = false;
    {
        loader loader({open_npy(folder / "rows.npy")},
                      {.device = device::host(), .batch_rows = 10, .route = route::direct});
        auto shared = std::make_shared<batch>(*loader.next(stream));
        stream.host_function_async([&gate, &right, shared] {
            gate.wait();
            right = (*shared)[0].as<std::uint64_t>()[39] == 9;
        });
    }
    gate.open();
    stream.synchronize();
    CHECK(right);
}

TEST_CASE(
    "loader: on the direct route, the mapping stays until the streams have passed, and no thread waits") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(100).view());
    const stream stream(device::host());
    gate gate;
    std::uint64_t seen = 0;
    {
        loader loader({open_npy(folder / "rows.npy")},
                      {.device = device::host(), .batch_rows = 10, .route = route::direct});
        const auto batch = loader.next(stream);
        REQUIRE(batch);
        hold(stream, gate);
        stream.host_function_async([&seen, rows = (*batch)[0].as<std::uint64_t>()] { seen = rows[39]; });
    }
    gate.open();
    stream.synchronize();
    CHECK(seen == 9);
}

TEST_CASE("loader: its destructor does not wait for a consumer's stream that is stuck" * blocks_a_stream) {
    const temporary_folder folder;
    constexpr std::uint64_t width = 8192;  // rows of 64 KiB, which a GPU can take from the mapped pages
    write_npy(folder / "rows.npy", numbered_rows(100, width).view());
    on_each_device([&](const device& device) {
        const stream stuck(device);
        gate gate;
        const pinned_buffer copy(10 * width * sizeof(std::uint64_t), device);
        const auto* const words = reinterpret_cast<const std::uint64_t*>(copy.data());
        {
            loader loader({open_npy(folder / "rows.npy")},
                          {.device = device,
                           .batch_rows = 10,
                           .slots = 2,
                           .threads = 2,  // few, so that one epoch is worth page-locking
                           .pin_budget_bytes = generous_pin_budget});
            for (int i = 0; i < 2; ++i) {
                const auto batch = loader.next(stuck);
                REQUIRE(batch);
                if (i == 0) hold(stuck, gate);
                copy_to_host_async(copy.bytes(), (*batch)[0].data(), stuck);
            }
        }
        gate.open();
        stuck.synchronize();
        CHECK(words[0] == 10);
        CHECK(words[10 * width - 1] == 19);
    });
}
