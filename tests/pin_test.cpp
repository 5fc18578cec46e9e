#include "pinflow/pin.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <memory>
#include <thread>
#include <tuple>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/mapped_file.hpp"
#include "pinflow/memory.hpp"
#include "src/device/pin_limits.hpp"
#include "src/device/pin_registry.hpp"
#include "src/device/pin_worker.hpp"
#include "tests/fake_locker.hpp"
#include "tests/side_by_side.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;
using namespace pinflow::detail;

namespace {

/// A source that has only extents: its rows are never read.
class extents_only final : public row_source {
 public:
    extents_only(std::vector<row_extent> extents, std::uint64_t row_bytes)
        : extents_(std::move(extents)), shape_{row_bytes} {}
    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const shape_vector& row_shape() const noexcept override { return shape_; }
    std::uint64_t row_count() const noexcept override { return 0; }
    std::uint64_t row_size_bytes() const noexcept override { return shape_[0]; }
    std::string description() const override { return "extents"; }
    std::span<const row_extent> extents() const noexcept override { return extents_; }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t>, std::span<std::byte>) const override {
        return {};
    }
    void check_unchanged() const override {}

 private:
    std::vector<row_extent> extents_;
    shape_vector shape_;
    pinflow::dtype dtype_ = pinflow::dtype::of<std::uint8_t>();
};

}  // namespace

TEST_CASE("pin: the registered bytes can be queried during a wait for the rest") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 10 * page + 17, 100);
    fake_locker locker;
    locker.permits = 0;
    pin_registry registry;
    {
        const pin_worker worker({range_of(file)}, locker, registry,
                                {.budget_bytes = 0, .piece_bytes = 4 * page}, &generous);
        const std::byte* const data = file->data();
        locker.await_waiting();
        CHECK_FALSE(worker.covers(data, 1));
        CHECK_FALSE(worker.finished());
        CHECK_FALSE(worker.all_registered());
        CHECK(worker.report().reason.empty());
        locker.allow(1);
        while (worker.registered_prefix_bytes() == 0)
            std::this_thread::yield();
        // the first piece ends at a page's edge, the data begins 100 bytes into its first page
        CHECK(worker.registered_prefix_bytes() == 4 * page - 100);
        CHECK(worker.covers(data, 4 * page - 100));
        CHECK(worker.covers(data + 4 * page - 101, 1));
        CHECK_FALSE(worker.covers(data, 4 * page - 99));
        CHECK_FALSE(worker.covers(data - 1, 1));
        CHECK_FALSE(worker.covers(nullptr, 0));
        locker.allow(100);
        REQUIRE(worker.wait());
        const pin_report report = worker.report();
        CHECK(report.complete);
        CHECK_FALSE(report.failed);
        CHECK(worker.all_registered());
        CHECK(report.registered_bytes == file->size_bytes());
        CHECK(report.total_bytes == file->size_bytes());
        CHECK(contains(report.reason, "registered read-only"));
        CHECK(worker.covers(data, file->size_bytes()));
        CHECK_FALSE(worker.covers(data, file->size_bytes() + 1));
        CHECK(locker.locked_bytes() == 11 * page);
        CHECK(locker.all_read_only);
        CHECK(registry.reserved_bytes() == 11 * page);
    }
    CHECK(locker.locked_bytes() == 0);
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: stopping in the middle unregisters what was registered") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 64 * page);
    fake_locker locker;
    locker.permits = 0;
    pin_registry registry;
    auto worker =
        std::make_unique<pin_worker>(std::vector{range_of(file)}, locker, registry,
                                     pin_options{.budget_bytes = 0, .piece_bytes = page}, &generous);
    locker.await_waiting();
    std::thread end([&] { worker.reset(); });
    locker.allow(1000);
    end.join();
    CHECK(locker.locked_bytes() == 0);
    CHECK(registry.size() == 0);
    CHECK(registry.reserved_bytes() == 0);
}

TEST_CASE("pin: arrays of one mapping and the same file mapped twice are each registered once") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 16 * page);
    const auto again = std::make_shared<mapped_file>(file->file(), 0, 16 * page);
    fake_locker locker;
    pin_registry registry;
    {
        const pin_range front{file->bytes().first(7 * page + 9), "'x.bin:a'", file};
        const pin_range back{file->bytes().subspan(7 * page + 9), "'x.bin:b'", file};
        const pin_worker arrays({front, back}, locker, registry, {}, &generous);
        const pin_worker other_mapping({range_of(again)}, locker, registry, {}, &generous);
        CHECK(arrays.wait());
        CHECK(other_mapping.wait());
        CHECK(locker.locked_bytes() == 32 * page);
        CHECK(arrays.covers(file->data() + 8 * page, page));
        CHECK(arrays.covers(file->data() + 7 * page, 9));
        CHECK(arrays.registered_prefix_bytes() == 16 * page);
        CHECK(other_mapping.covers(again->data(), 16 * page));
    }
    CHECK(locker.locked_bytes() == 0);
}

TEST_CASE("pin: extents whose pages touch are one range, which is registered across its files") {
    const temporary_folder folder;
    constexpr std::uint64_t row = 992;
    // 1, 1, 1 and 2 pages; the second file ends at a page's edge
    const std::vector<std::uint64_t> rows{3, 4, 2, 8};
    const auto source = std::make_shared<const side_by_side_rows>(folder.path(), rows, row);
    const std::span<const row_extent> extents = source->extents();
    const std::vector<pin_range> ranges = pin_ranges(source);
    REQUIRE(ranges.size() == 1);
    CHECK(ranges[0].bytes.data() == extents[0].data);
    CHECK(ranges[0].bytes.data() + ranges[0].bytes.size() == extents[3].data + 8 * row);
    CHECK(ranges[0].owner == source);
    fake_locker locker;
    pin_registry registry;
    const pin_worker worker(ranges, locker, registry, {.piece_bytes = 4 * page}, &generous);
    REQUIRE(worker.wait());
    CHECK(locker.calls == 2);
    CHECK(locker.locked_bytes() == 5 * page);
    CHECK(locker.all_read_only);
    for (const row_extent& extent : extents)
        CHECK(worker.covers(extent.data, extent.row_count * row));
}

TEST_CASE("pin: extents that do not follow each other in the address space are ranges of their own") {
    const temporary_folder folder;
    const auto source =
        std::make_shared<const side_by_side_rows>(folder.path(), std::vector<std::uint64_t>{4, 4, 4}, page);
    const auto row_of = [&](std::size_t file) { return source->extents()[file]; };
    const auto ranges_of = [](std::vector<row_extent> extents) {
        return pin_ranges(std::make_shared<const extents_only>(std::move(extents), page)).size();
    };
    CHECK(ranges_of({row_of(0), row_of(1), row_of(2)}) == 1);
    CHECK(ranges_of({row_of(0), row_of(2)}) == 2);             // pages between them
    CHECK(ranges_of({row_of(1), row_of(0), row_of(2)}) == 3);  // the order of the rows is another one
    CHECK(ranges_of({row_of(0), row_of(0)}) == 1);             // the same twice
    row_extent shifted = row_of(0);
    shifted.data += 100;
    CHECK(ranges_of({row_of(0), shifted, row_of(2)}) == 2);  // as two fields of one array
    CHECK(ranges_of({shifted, row_of(0), row_of(1)}) == 1);
    row_extent in_memory = row_of(1);
    in_memory.file = nullptr;
    CHECK(ranges_of({row_of(0), in_memory, row_of(2)}) == 3);
    row_extent unmapped = row_of(1);
    unmapped.data = nullptr;
    CHECK(ranges_of({row_of(0), unmapped, row_of(2)}) == 2);
    CHECK(ranges_of({}) == 0);
}

TEST_CASE("pin: memory of the process's own is registered for writing, a private file mapping never") {
    fake_locker locker;
    pin_registry registry;
    const auto memory = std::make_shared<memory_region>(memory_region::anonymous(8 * page));
    {
        const pin_worker worker({{memory->bytes(), "an array in memory", memory}}, locker, registry, {},
                                &generous);
        CHECK(worker.wait());
        CHECK_FALSE(locker.all_read_only);
        CHECK(contains(worker.report().reason, "registered, 32.0 KiB"));
    }
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", page);
    void* const mapped =
        ::mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE, file->file()->lease_descriptor().get(), 0);
    REQUIRE(mapped != MAP_FAILED);
    const std::size_t calls = locker.calls;
    const pin_worker refused({{{static_cast<const std::byte*>(mapped), page}, "'x.bin'", file}}, locker,
                             registry, {}, &generous);
    CHECK_FALSE(refused.wait());
    CHECK(locker.calls == calls);
    CHECK(contains(refused.report().reason,
                   "registered nothing of 4.0 KiB: cannot register 'x.bin': it is a private mapping"));
    ::munmap(mapped, page);
}

TEST_CASE("pin: a file that was truncated under its mapping raises no signal") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 8 * page);
    std::filesystem::resize_file(folder / "x.bin", page);
    fake_locker locker;
    pin_registry registry;
    const pin_worker worker({range_of(file)}, locker, registry, {}, &generous);
    CHECK(worker.wait());  // CUDA would refuse here, which the stand-in cannot know
}

TEST_CASE("pin: bytes of several ranges that follow each other can be asked for at once") {
    const temporary_folder folder;
    const auto file = map_pattern(folder / "x.bin", 8 * page);
    const auto part = [&](std::uint64_t begin, std::uint64_t end) {
        return pin_range{file->bytes().subspan(begin, end - begin), "'x.bin'", file};
    };
    fake_locker locker;
    pin_registry registry;
    SUBCASE("one behind the other") {
        const pin_worker worker({part(4 * page + 7, 8 * page), part(0, 4 * page + 7)}, locker, registry, {},
                                &generous);
        CHECK(worker.wait());
        CHECK(worker.covers(file->data(), 8 * page));
        CHECK(worker.run_at(file->data(), 8 * page).size_bytes == 4 * page + 7);
        CHECK_FALSE(worker.covers(file->data(), 8 * page + 1));
    }
    SUBCASE("one within another, and the same twice") {
        const pin_worker worker({part(2 * page, 3 * page), part(0, 8 * page), part(0, 2 * page),
                                 part(0, 8 * page), part(6 * page, 8 * page)},
                                locker, registry, {}, &generous);
        CHECK(worker.wait());
        CHECK(worker.covers(file->data(), 8 * page));
        CHECK(worker.run_at(file->data() + 2 * page + 1, 100 * page).size_bytes == 6 * page - 1);
        CHECK(locker.locked_bytes() == 8 * page);
    }
    CHECK(locker.locked_bytes() == 0);
}

TEST_CASE("pin: nothing to register is complete at once") {
    fake_locker locker;
    pin_registry registry;
    const pin_worker worker({pin_range{}}, locker, registry, {}, &generous);
    CHECK(worker.wait());
    CHECK(worker.all_registered());
    CHECK(worker.report().total_bytes == 0);
    CHECK_FALSE(worker.covers(nullptr, 1));
}

TEST_CASE("pin: the host device registers nothing and says so") {
    const auto memory = std::make_shared<memory_region>(memory_region::anonymous(page));
    pinned_pages pages({{memory->bytes(), "an array in memory", memory}}, device::host());
    CHECK(pages.finished());
    CHECK_FALSE(pages.wait());
    CHECK_FALSE(pages.wait_for(memory->data(), 1, std::chrono::hours(1)));
    CHECK_FALSE(pages.covers(memory->data(), 1));
    CHECK_FALSE(pages.all_registered());
    CHECK(pages.registered_prefix_bytes() == 0);
    pages.set_reader_position(memory->data());
    CHECK(pages.report().total_bytes == page);
    CHECK(
        contains(message_of<unsupported>([&] { pages.require(); }), "the host device reads memory in place"));
    const pinned_pages moved = std::move(pages);
    CHECK(moved.finished());
}

TEST_CASE("pin: a deadline out of range is refused") {
    const auto refuse = [](const pin_options& options) {
        return message_of<invalid_argument>([&] { pinned_pages({}, device::host(), options); });
    };
    CHECK(contains(refuse({.piece_deadline = std::chrono::nanoseconds(0)}), "deadline"));
    CHECK(refuse({.piece_deadline = std::chrono::nanoseconds::max()}).empty());
}

TEST_CASE("pin: if pages cannot be registered, a file mapped for writing keeps its blocks and its time") {
    const temporary_folder folder;
    const std::filesystem::path path = folder / "sparse.bin";
    constexpr std::uint64_t size_bytes = 8 * mebibyte;
    write_bytes(path, {});
    std::filesystem::resize_file(path, size_bytes);
    struct statfs filesystem = {};
    REQUIRE(::statfs(path.c_str(), &filesystem) == 0);
    // on tmpfs, reading a mapped hole allocates a page, which st_blocks counts
    const bool in_memory = filesystem.f_type == TMPFS_MAGIC;
    const auto blocks_and_time = [&] {
        struct stat now = {};
        REQUIRE(::stat(path.c_str(), &now) == 0);
        return std::tuple(in_memory ? 0 : now.st_blocks, now.st_mtim.tv_sec, now.st_mtim.tv_nsec);
    };
    const auto before = blocks_and_time();
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(descriptor >= 0);
    void* const mapped = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    ::close(descriptor);
    REQUIRE(mapped != MAP_FAILED);
    pin_registry registry;
    fake_locker locker;
    locker.fail_at_call = 1;
    {
        const pin_worker worker({{{static_cast<const std::byte*>(mapped), size_bytes}, "'sparse.bin'", {}}},
                                locker, registry, {.piece_bytes = mebibyte}, &generous);
        CHECK_FALSE(worker.wait());
        CHECK(locker.calls == 8);  // the other pieces are tried
    }
    CHECK(::msync(mapped, size_bytes, MS_SYNC) == 0);
    CHECK(blocks_and_time() == before);
    ::munmap(mapped, size_bytes);
}
