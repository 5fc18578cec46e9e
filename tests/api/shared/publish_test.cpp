#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "devices.hpp"
#include "pinflow/loader/loader.hpp"
#include "segments.hpp"
#include "temporary_folder.hpp"
#include "waiting_child.hpp"

using namespace pinflow;

namespace {

/// Rows that only `read_rows` gives; the row `broken` cannot be read.
class unmapped_rows final : public row_source {
 public:
    explicit unmapped_rows(const array& whole,
                           std::uint64_t broken = std::numeric_limits<std::uint64_t>::max())
        : rows_(whole.rows()), broken_(broken) {}
    const pinflow::dtype& dtype() const noexcept override { return rows_->dtype(); }
    const shape_vector& row_shape() const noexcept override { return rows_->row_shape(); }
    std::uint64_t row_count() const noexcept override { return rows_->row_count(); }
    std::uint64_t row_size_bytes() const noexcept override { return rows_->row_size_bytes(); }
    std::string description() const override { return "rows of a test"; }
    std::span<const row_extent> extents() const noexcept override { return {}; }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t> ids,
                                       std::span<std::byte> destination) const override {
        if (std::ranges::find(ids, broken_) != ids.end()) throw format_error("a row is damaged");
        return rows_->read_rows(ids, destination);
    }
    void check_unchanged() const override {}

 private:
    std::shared_ptr<const row_source> rows_;
    std::uint64_t broken_;
};

::mode_t mode_of(const std::filesystem::path& path) {
    struct ::stat status{};
    REQUIRE(::stat(path.c_str(), &status) == 0);
    return status.st_mode & 07777;
}

/// Sets the umask while it lives.
struct scoped_umask {
    explicit scoped_umask(::mode_t mask) : before(::umask(mask)) {}
    scoped_umask(const scoped_umask&) = delete;
    scoped_umask& operator=(const scoped_umask&) = delete;
    ~scoped_umask() { ::umask(before); }
    ::mode_t before;
};

}  // namespace

TEST_CASE("publish: a segment holds the rows of its source, whatever gives them") {
    const temporary_folder files;
    const test_segments segments;
    // longer than several pieces, and no multiple of one
    const array numbers = numbered_rows(20'001, 32);
    write_npy(files / "numbers.npy", numbers.view());
    const array in_file = open_npy(files / "numbers.npy");
    const array first = open_npy(files / "numbers.npy");
    std::vector<std::shared_ptr<const row_source>> parts{in_file.rows(), first.rows(), in_file.rows()};
    const auto concatenated = concatenate(parts);
    publish("memory", *numbers.rows(), segments.options());
    publish("file", *in_file.rows(), segments.options());
    publish("unmapped", unmapped_rows(numbers), segments.options());
    publish("several", *concatenated, segments.options());
    for (const char* name : {"memory", "file", "unmapped"}) {
        CAPTURE(name);
        const array copy = segments.open(name);
        CHECK(copy.dtype() == numbers.dtype());
        CHECK(copy.shape() == numbers.shape());
        CHECK(copy.is_mapped());
        CHECK(copy.label() == "shm:" + std::string(name));
        CHECK(same_bytes(bytes_of(copy), bytes_of(numbers)));
        CHECK_NOTHROW(verify_segment(name, segments.folder()));
    }
    const array three = segments.open("several");
    REQUIRE(three.size_bytes() == 3 * numbers.size_bytes());
    for (std::size_t i = 0; i < 3; ++i)
        CHECK(same_bytes(bytes_of(three).subspan(i * numbers.size_bytes(), numbers.size_bytes()),
                         bytes_of(numbers)));
    const auto listed = segments.list();
    REQUIRE(listed.size() == 4);
    CHECK(listed[0].checksum == listed[1].checksum);
    CHECK(listed[0].checksum == listed[3].checksum);
    CHECK(listed[2].checksum != listed[0].checksum);
}

TEST_CASE("publish: overlapping windows are written one after the other") {
    const test_segments segments;
    const array numbers = numbered_rows(3000, 32);
    publish("windows", *numbers.sliding_windows(3, 1).rows(), segments.options());
    const array windows = segments.open("windows");
    REQUIRE(windows.shape() == shape_vector{2998, 3, 32});
    const auto words = std::span(windows.view().as<std::uint64_t>(), windows.view().size());
    bool right = true;
    for (std::size_t i = 0; i < words.size(); ++i)
        right = right && words[i] == i / 96 + i / 32 % 3;
    CHECK(right);
}

TEST_CASE("publish: a segment is a .npy file whose data begins at byte 4096") {
    const test_segments segments;
    const array numbers = numbered_rows(10, 3);
    const segment_info info = segments.publish("numbers", numbers);
    CHECK(info.path == segments / "numbers.npy");
    CHECK(info.size_bytes == numbers.size_bytes());
    CHECK(info.file_size_bytes == 4096 + numbers.size_bytes() + 4096);
    const array as_npy = open_npy(info.path);
    CHECK(as_npy.offset_bytes() == 4096);
    CHECK(as_npy.shape() == numbers.shape());
    CHECK(same_bytes(bytes_of(as_npy), bytes_of(numbers)));
    CHECK(find_segment("numbers", segments.folder()) == info.path);
}

TEST_CASE("publish: arrays without rows or bytes, and types that .npy has no name for, come back") {
    const test_segments segments;
    segments.publish("empty", array_of<double>({}, {0, 3}));
    CHECK(segments.open("empty").shape() == shape_vector{0, 3});
    segments.publish("rows of nothing", array_of<double>({}, {5, 0}));
    CHECK(segments.open("rows of nothing").shape() == shape_vector{5, 0});
    const array halves = array_of<std::uint16_t>({1, 2, 3, 4}, {2, 2}).view_as(dtype::parse("bfloat16"));
    segments.publish("brain floats", halves);
    CHECK(segments.open("brain floats").dtype() == dtype::parse("bfloat16"));
    // a field of such a type would come back as bytes
    const dtype pair = dtype::structured({{"a", "", dtype::parse("bfloat16"), {}, 0}}, 2);
    CHECK_THROWS_AS(segments.publish("fields", halves.view_as(pair)), unsupported);
}

TEST_CASE("publish: rows larger than a piece are copied whole") {
    const test_segments segments;
    std::mt19937_64 random(1);
    const auto bytes = random_bytes(std::size_t{3} * ((5 << 20) + 13), random);
    std::vector<std::uint8_t> elements(bytes.size());
    std::memcpy(elements.data(), bytes.data(), bytes.size());
    const array large = array_of(elements, {3, (5 << 20) + 13});
    segments.publish("large", large);
    publish("unmapped", unmapped_rows(large), segments.options());
    CHECK(same_bytes(bytes_of(segments.open("large")), bytes));
    CHECK(same_bytes(bytes_of(segments.open("unmapped")), bytes));
}

TEST_CASE("publish: a name that is in use is refused, unless it is replaced") {
    const test_segments segments;
    const array before = numbered_rows(10);
    const array after = numbered_rows(20);
    segments.publish("a", before);
    const array opened = segments.open("a");
    CHECK(fails_with(std::errc::file_exists, [&] { segments.publish("a", after); }));
    CHECK(segments.open("a").shape()[0] == 10);
    segments.publish("a", after, true);
    CHECK(segments.open("a").shape()[0] == 20);
    CHECK(same_bytes(bytes_of(opened), bytes_of(before)));  // those who have it keep it
    CHECK(segments.files() == std::vector<std::string>{"a.npy"});
    segments.publish("new", after, true);  // nothing to replace
    CHECK(segments.open("new").shape()[0] == 20);
}

TEST_CASE("publish: of several publishers of one name exactly one succeeds, and nothing else is left") {
    const test_segments segments;
    const array numbers = numbered_rows(1000);
    for (int round = 0; round < 20; ++round) {
        std::atomic<int> published = 0;
        std::atomic<int> refused = 0;
        std::vector<std::thread> threads;
        for (int i = 0; i < 4; ++i) {
            threads.emplace_back([&] {
                try {
                    segments.publish("one", numbers);
                    ++published;
                } catch (const system_failure& failure) {
                    if (failure.code() == std::errc::file_exists) ++refused;
                }
            });
        }
        for (std::thread& each : threads)
            each.join();
        CHECK(published == 1);
        CHECK(refused == 3);
        CHECK(segments.files() == std::vector<std::string>{"one.npy"});
        remove_segment("one", segments.folder());
    }
}

TEST_CASE("publish: invalid names of segments are refused") {
    const test_segments segments;
    const array numbers = numbered_rows(1);
    for (const std::string& name :
         {std::string(), std::string("."), std::string(".."), std::string(".hidden"), std::string("a\nb"),
          std::string("a\x1b[31m"), std::string("\xff"), std::string("a\0b", 3), std::string(300, 'x'),
          std::string("a/b"), std::string("/"), std::string("../x"), std::string("a//b"),
          std::string("/dev/shm/x"), std::string("a.npy"), std::string(201, 'x')}) {
        CAPTURE(name);
        CHECK_THROWS_AS(segments.publish(name, numbers), invalid_argument);
        CHECK_THROWS_AS(writable_segment::create(name, dtype::of<int>(), {1}, segments.folder()),
                        invalid_argument);
    }
    for (const std::string& name : {std::string(".."), std::string("a\nb"), std::string("x/../../y")})
        CHECK_THROWS_AS(segments.open(name), invalid_argument);
    CHECK_NOTHROW(segments.publish(std::string(200, 'x'), numbers));
    CHECK_NOTHROW(segments.publish("Größe 1:2", numbers));
    CHECK(segments.open("Größe 1:2").size_bytes() == numbers.size_bytes());
}

TEST_CASE("publish: whatever the umask is, only the user has access") {
    for (const ::mode_t mask : {::mode_t{0}, ::mode_t{0777}, ::mode_t{077}}) {
        CAPTURE(mask);
        const test_segments segments;
        {
            const scoped_umask set(mask);
            segments.publish("a", numbered_rows(3));
            const named_rows members[] = {{"x/y", numbered_rows(3).rows()}};
            publish_group("g", members, segments.options());
        }
        CHECK(mode_of(segments.folder()) == 0700);
        CHECK(mode_of(segments / "a.npy") == 0600);
        CHECK(mode_of(segments / "g") == 0700);
        CHECK(mode_of(segments / "g/x") == 0700);
        CHECK(mode_of(segments / "g/x/y.npy") == 0600);
    }
}

TEST_CASE("publish: a source that fails, or changes meanwhile, leaves nothing") {
    const temporary_folder files;
    const test_segments segments;
    const array numbers = numbered_rows(300'000);
    CHECK_THROWS_AS(publish("a", unmapped_rows(numbers, 250'000), segments.options()), format_error);
    CHECK(segments.files().empty());

    write_npy(files / "a.npy", numbers.view());
    const array in_file = open_npy(files / "a.npy");
    publish_options options = segments.options();
    options.progress = [&](std::uint64_t, std::uint64_t) {
        std::ofstream(files / "a.npy", std::ios::app) << "more";
    };
    CHECK_THROWS_AS(publish("a", *in_file.rows(), options), data_changed);
    CHECK(segments.files().empty());
}

TEST_CASE("publish: a truncated source is an error, not a signal") {
    const temporary_folder files;
    const test_segments segments;
    write_npy(files / "a.npy", numbered_rows(300'000).view());
    const array in_file = open_npy(files / "a.npy");
    std::filesystem::resize_file(files / "a.npy", 5000);
    CHECK_THROWS_AS(publish("a", *in_file.rows(), segments.options()), data_changed);
    CHECK(segments.files().empty());
}

TEST_CASE("publish: progress counts every byte once") {
    const test_segments segments;
    const array numbers = numbered_rows(400'000);
    publish_options options = segments.options();
    std::vector<std::uint64_t> copied;
    options.progress = [&](std::uint64_t copied_bytes, std::uint64_t total_bytes) {
        CHECK(total_bytes == numbers.size_bytes());
        copied.push_back(copied_bytes);
    };
    publish("a", *numbers.rows(), options);
    REQUIRE(copied.size() > 1);
    CHECK(std::ranges::is_sorted(copied));
    CHECK(copied.back() == numbers.size_bytes());
}

TEST_CASE("publish: a loader of a segment continues when the segment is replaced or removed") {
    on_each_device([](const device& device) {
        const test_segments segments;
        segments.publish("a", numbered_rows(1000));
        loader batches({segments.open("a")}, {.device = device, .batch_rows = 10, .epochs = 3});
        const stream stream(device);
        std::uint64_t rows = 0;
        while (const auto batch = batches.next(stream)) {
            rows += batch->row_count();
            CHECK(holds_its_rows(*batch, stream));
            if (rows == 500) segments.publish("a", numbered_rows(7), true);
            if (rows == 1500) remove_segment("a", segments.folder());
            if (rows == 2000) segments.publish("a", numbered_rows(8));
        }
        CHECK(rows == 3000);
        batches.report();
    });
}

TEST_CASE("publish: a child made by fork meanwhile keeps neither the memory nor the lock") {
    const test_segments segments;
    std::vector<std::unique_ptr<waiting_child>> children;
    publish_options options = segments.options();
    options.progress = [&](std::uint64_t, std::uint64_t) {
        if (!children.empty()) return;
        children.push_back(std::make_unique<waiting_child>([] {
            // no file of the segment is open, and none is mapped
            for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
                std::error_code closed;
                const std::string target = std::filesystem::read_symlink(entry.path(), closed).string();
                if (target.find("/segments/") != std::string::npos) return false;
            }
            std::ifstream maps("/proc/self/maps");
            for (std::string line; std::getline(maps, line);) {
                if (line.find("/segments/") != std::string::npos) return false;
            }
            return true;
        }));
    };
    publish("a", *numbered_rows(300'000).rows(), options);
    REQUIRE(children.size() == 1);
    CHECK(children[0]->is_ready());
    segments.publish("b", numbered_rows(10));
}

TEST_CASE("segments: listing, opening and changing at once gives no other error than the expected ones") {
    const test_segments segments;
    const array numbers = numbered_rows(100);
    segments.publish("a", numbers);
    const named_rows members[] = {{"x", numbers.rows()}, {"y/z", numbers.rows()}};
    std::atomic<bool> stop = false;
    std::atomic<int> opened = 0;
    const auto repeat = [&](auto work) {
        return std::thread([&stop, work] {
            while (!stop) {
                try {
                    work();
                } catch (const system_failure& failure) {
                    if (failure.code() != std::errc::no_such_file_or_directory &&
                        failure.code() != std::errc::file_exists)
                        FAIL_CHECK(failure.what());
                } catch (const std::exception& failure) {
                    FAIL_CHECK(failure.what());
                }
            }
        });
    };
    std::vector<std::thread> threads;
    threads.push_back(repeat([&] { segments.publish("a", numbers, true); }));
    threads.push_back(repeat([&] {
        publish_group("g", members, segments.options(true));
        remove_segment("g", segments.folder());
    }));
    threads.push_back(repeat([&] { segments.list(); }));
    threads.push_back(repeat([&] { segments.open("g/y/z"); }));
    for (int i = 0; i < 500; ++i) {
        CHECK(same_bytes(bytes_of(segments.open("a")), bytes_of(numbers)));
        ++opened;
    }
    stop = true;
    for (std::thread& each : threads)
        each.join();
    CHECK(opened == 500);
}

// ---- groups -----------------------------------------------------------------------------------------------

TEST_CASE("publish_group: several arrays appear together, under names in folders") {
    const test_segments segments;
    const array images = numbered_rows(100, 7);
    const array labels = numbered_rows(100, 1);
    const named_rows members[] = {{"train/images", images.rows()}, {"labels", labels.rows()}};
    const auto published = publish_group("set", members, segments.options());
    REQUIRE(published.size() == 2);
    CHECK(published[0].name == "set/train/images");
    CHECK(same_bytes(bytes_of(segments.open("set/train/images")), bytes_of(images)));
    CHECK(same_bytes(bytes_of(segments.open("set/labels")), bytes_of(labels)));
    CHECK(fails_with(std::errc::no_such_file_or_directory, [&] { segments.open("set"); }));
    CHECK(fails_with(std::errc::file_exists, [&] { publish_group("set", members, segments.options()); }));
    CHECK(fails_with(std::errc::file_exists, [&] { segments.publish("set", images, true); }));

    const named_rows others[] = {{"only", labels.rows()}};
    publish_group("set", others, segments.options(true));
    CHECK(segments.files() == std::vector<std::string>{"set", "set/only.npy"});

    segments.publish("single", images);
    CHECK(fails_with(std::errc::file_exists,
                     [&] { publish_group("single", members, segments.options(true)); }));
}

TEST_CASE("publish_group: an array that fails leaves nothing of the others") {
    const test_segments segments;
    const array numbers = numbered_rows(100);
    const named_rows members[] = {{"good", numbers.rows()},
                                  {"bad", std::make_shared<unmapped_rows>(numbers, 50)}};
    CHECK_THROWS_AS(publish_group("set", members, segments.options()), format_error);
    CHECK(segments.files().empty());
}

TEST_CASE("publish_group: names that collide, and no arrays at all, are refused") {
    const test_segments segments;
    const auto rows = numbered_rows(3).rows();
    const std::vector<std::vector<named_rows>> wrong{{},
                                                     {{"a", rows}, {"a", rows}},
                                                     {{"a", rows}, {"a/b", rows}},
                                                     {{"", rows}},
                                                     {{"../a", rows}},
                                                     {{"a", rows}, {"a.npy/b", rows}},
                                                     {{"a", nullptr}}};
    for (const auto& members : wrong)
        CHECK_THROWS_AS(publish_group("set", members, segments.options()), invalid_argument);
    CHECK(segments.files().empty());
}
