#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "pinflow/file.hpp"
#include "segments.hpp"

using namespace pinflow;

namespace {

std::vector<std::byte> read_all(const std::filesystem::path& path) {
    const input_file file(path);
    std::vector<std::byte> bytes(file.size_bytes());
    file.read(0, bytes);
    return bytes;
}

/// Writes a file that only this user can read, as segments are.
void plant(const std::filesystem::path& path, std::span<const std::byte> bytes) {
    write_bytes(path, bytes);
    REQUIRE(::chmod(path.c_str(), 0600) == 0);
}

std::size_t mapping_count() {
    std::ifstream maps("/proc/self/maps");
    std::size_t count = 0;
    for (std::string line; std::getline(maps, line);)
        ++count;
    return count;
}

}  // namespace

TEST_CASE("open_segment: a missing folder, segment or array is no_such_file_or_directory") {
    const test_segments segments;
    CHECK(fails_with(std::errc::no_such_file_or_directory, [&] { segments.open("a"); }));  // no folder yet
    CHECK(segments.list().empty());
    CHECK(clean_segments(segments.folder()).empty());
    segments.publish("a", numbered_rows(3));
    CHECK(fails_with(std::errc::no_such_file_or_directory, [&] { segments.open("b"); }));
    CHECK(fails_with(std::errc::no_such_file_or_directory, [&] { segments.open("a/b"); }));
    CHECK(fails_with(std::errc::no_such_file_or_directory, [&] { remove_segment("b", segments.folder()); }));
}

TEST_CASE("open_segment: a folder that others can use, and one that is a link, are refused") {
    const test_segments segments;
    segments.publish("a", numbered_rows(3));
    const auto refuses_all = [&](const std::filesystem::path& folder) {
        const auto denied = std::errc::permission_denied;
        return fails_with(denied, [&] { open_segment("a", folder); }) &&
               fails_with(denied, [&] { list_segments(folder); }) &&
               fails_with(denied, [&] { remove_segment("a", folder); }) &&
               fails_with(denied, [&] { clean_segments(folder); }) &&
               fails_with(denied, [&] { publish("b", *numbered_rows(3).rows(), {.folder = folder}); }) &&
               fails_with(denied, [&] { writable_segment::create("c", dtype::of<int>(), {1}, folder); });
    };
    for (const ::mode_t mode : {::mode_t{0755}, ::mode_t{0710}, ::mode_t{0701}, ::mode_t{01777}}) {
        CAPTURE(mode);
        REQUIRE(::chmod(segments.folder().c_str(), mode) == 0);
        CHECK(refuses_all(segments.folder()));
    }
    REQUIRE(::chmod(segments.folder().c_str(), 0700) == 0);
    const std::filesystem::path link = segments.root() / "link";
    std::filesystem::create_directory_symlink(segments.folder(), link);
    CHECK(refuses_all(link));
    const std::filesystem::path file = segments.root() / "file";
    plant(file, {});
    CHECK(refuses_all(file));
    if (::geteuid() == 0) {
        REQUIRE(::chown(segments.folder().c_str(), 12345, 12345) == 0);
        CHECK(refuses_all(segments.folder()));
    }
}

TEST_CASE("open_segment: a file that others can use, a link and a pipe are refused") {
    const test_segments segments;
    segments.publish("a", numbered_rows(3));
    const auto denied = [&](const char* name) {
        return fails_with(std::errc::permission_denied, [&] { segments.open(name); });
    };
    std::filesystem::create_symlink("a.npy", segments / "link.npy");
    CHECK(denied("link"));
    REQUIRE(::mkfifo((segments / "pipe.npy").c_str(), 0600) == 0);
    CHECK(denied("pipe"));
    std::filesystem::create_directory(segments / "folder.npy");
    CHECK(denied("folder"));
    std::filesystem::create_directory_symlink(segments.folder(), segments / "group");
    CHECK(denied("group/a"));
    REQUIRE(::chmod((segments / "a.npy").c_str(), 0644) == 0);
    CHECK(denied("a"));
    if (::geteuid() == 0) {
        REQUIRE(::chmod((segments / "a.npy").c_str(), 0600) == 0);
        REQUIRE(::chown((segments / "a.npy").c_str(), 12345, 12345) == 0);
        CHECK(denied("a"));
    }
}

TEST_CASE("open_segment: damaged and planted files are refused, whatever their sizes claim") {
    const test_segments segments;
    const array numbers = numbered_rows(100);
    const std::vector<std::byte> whole = read_all(segments.publish("whole", numbers).path);
    const std::filesystem::path path = segments / "planted.npy";
    const auto refused = [&](std::span<const std::byte> bytes) {
        plant(path, bytes);
        try {
            segments.open("planted");
        } catch (const format_error& failure) {
            return contains(failure.what(), path.string());
        } catch (const unsupported& failure) {
            return contains(failure.what(), path.string());
        }
        return false;
    };
    for (const std::size_t size : {std::size_t{0}, std::size_t{10}, std::size_t{4096}, whole.size() - 4096,
                                   whole.size() - 1, whole.size() - 4095}) {
        CAPTURE(size);
        CHECK(refused(std::span(whole).first(size)));
    }
    std::vector<std::byte> longer = whole;
    longer.resize(whole.size() + 8);
    CHECK(refused(longer));
    // magic, version, data offset, the first and the last byte of the data size, a digit of the checksum
    const std::size_t trailer = whole.size() - 4096;
    for (const std::size_t offset : {0U, 8U, 16U, 24U, 31U, 40U}) {
        CAPTURE(offset);
        std::vector<std::byte> changed = whole;
        changed[trailer + offset] ^= std::byte{0x80};
        CHECK(refused(changed));
    }
    // a header that declares more rows than the file has, and one that declares fewer
    for (const char* const shape : {"(999, 4)", "(10, 4) "}) {
        CAPTURE(shape);
        std::string text(reinterpret_cast<const char*>(whole.data()), 4096);
        const std::size_t at = text.find("(100, 4)");
        REQUIRE(at != std::string::npos);
        text.replace(at, 8, shape);
        std::vector<std::byte> changed = whole;
        std::ranges::copy(std::as_bytes(std::span(text)), changed.begin());
        CHECK(refused(changed));
    }
    plant(path, whole);
    CHECK(segments.open("planted").shape() == numbers.shape());
}

TEST_CASE("verify_segment: one changed bit of the data is found") {
    const test_segments segments;
    const auto path = segments.publish("a", numbered_rows(100'000)).path;
    std::vector<std::byte> bytes = read_all(path);
    bytes[bytes.size() / 2] ^= std::byte{1};
    plant(path, bytes);
    CHECK_THROWS_AS(verify_segment("a", segments.folder()), format_error);
    CHECK(segments.open("a").shape()[0] == 100'000);  // opening does not read the data
}

TEST_CASE("list_segments: lists all segments in order, and files that are no segments with the reason") {
    const test_segments segments;
    segments.publish("b", numbered_rows(5, 2));
    segments.publish("a", numbered_rows(3));
    const named_rows members[] = {{"x", numbered_rows(1).rows()}};
    publish_group("g", members, segments.options());
    plant(segments / "damaged.npy", std::as_bytes(std::span("nothing")));
    plant(segments / "notes.txt", {});
    plant(segments / ".left.npy", {});
    const auto listed = segments.list();
    std::vector<std::string> names;
    for (const segment_info& each : listed) {
        names.push_back(each.name);
        CHECK(each.problem.empty() ==
              (each.name != "damaged" && each.name != "notes.txt" && each.name != ".left.npy"));
    }
    CHECK(names == std::vector<std::string>{".left.npy", "a", "b", "damaged", "g/x", "notes.txt"});
    CHECK(listed[2].shape == shape_vector{5, 2});
    CHECK(listed[2].dtype == dtype::of<std::uint64_t>());
    CHECK(listed[2].creator_pid == static_cast<std::uint64_t>(::getpid()));
    CHECK(std::chrono::system_clock::now() - listed[2].created < std::chrono::minutes(10));
    CHECK(listed[2].checksum.size() == 32);

    std::filesystem::create_directories(segments / "empty/inner");
    const auto removed = clean_segments(segments.folder());
    CHECK(removed.size() == 4);
    CHECK(segments.files() == std::vector<std::string>{"a.npy", "b.npy", "g", "g/x.npy", "notes.txt"});
}

TEST_CASE("clean_segments: a complete segment stays, even if it cannot be opened") {
    const test_segments segments;
    const auto path = segments.publish("a", numbered_rows(5)).path;
    REQUIRE(::chmod(path.c_str(), 0644) == 0);
    CHECK(clean_segments(segments.folder()).empty());
    REQUIRE(::chmod(path.c_str(), 0600) == 0);
    std::vector<std::byte> later = read_all(path);
    later[later.size() - 4096 + 8] = std::byte{2};  // the version
    plant(path, later);
    CHECK(clean_segments(segments.folder()).empty());
    CHECK(std::filesystem::exists(path));
}

TEST_CASE("list_segments: links, pipes and loops are listed with a problem") {
    const test_segments segments;
    segments.publish("a", numbered_rows(5));
    std::filesystem::create_symlink("/etc", segments / "etc");
    std::filesystem::create_symlink("loop", segments / "loop");
    std::filesystem::create_symlink("nothing", segments / "dangling.npy");
    REQUIRE(::mkfifo((segments / "pipe.npy").c_str(), 0600) == 0);
    std::vector<std::string> names;
    for (const segment_info& each : segments.list()) {
        names.push_back(each.name);
        CHECK(each.problem.empty() == (each.name == "a"));
        CHECK(each.file_size_bytes < 100'000);
    }
    CHECK(names == std::vector<std::string>{"a", "dangling", "etc", "loop", "pipe"});
    CHECK(clean_segments(segments.folder()).empty());
}

TEST_CASE("remove_segment: follows no link out of the folder, and does not remove the folder itself") {
    const test_segments segments;
    const std::filesystem::path outside = segments.root() / "outside";
    std::filesystem::create_directory(outside);
    REQUIRE(::chmod(outside.c_str(), 0700) == 0);
    plant(outside / "v.npy", std::as_bytes(std::span("precious")));
    segments.publish("a", numbered_rows(5));
    std::filesystem::create_directory_symlink(outside, segments / "link");
    CHECK(fails_with(std::errc::permission_denied, [&] { remove_segment("link/v", segments.folder()); }));
    CHECK(std::filesystem::exists(outside / "v.npy"));

    const named_rows members[] = {{"x", numbered_rows(1).rows()}};
    publish_group("g", members, segments.options());
    const std::filesystem::path with_slash = segments.folder().string() + "/";
    remove_segment("g/x", with_slash);
    CHECK(std::filesystem::exists(segments.folder()));
    CHECK_FALSE(std::filesystem::exists(segments / "g"));
    std::filesystem::create_directory_symlink(segments.folder(), segments.root() / "alias");
    CHECK(fails_with(std::errc::permission_denied,
                     [&] { open_segment("a", (segments.root() / "alias").string() + "/"); }));
}

TEST_CASE("remove_segment: removes one, one of a group, or a group; an array that is open stays valid") {
    const test_segments segments;
    const array numbers = numbered_rows(10);
    segments.publish("a", numbers);
    const named_rows members[] = {{"x/y", numbers.rows()}, {"z", numbers.rows()}};
    publish_group("g", members, segments.options());
    const array opened = segments.open("g/z");
    remove_segment("a", segments.folder());
    remove_segment("g/x/y", segments.folder());
    CHECK(segments.files() == std::vector<std::string>{"g", "g/z.npy"});
    remove_segment("g", segments.folder());
    CHECK(segments.files().empty());
    CHECK(same_bytes(bytes_of(opened), bytes_of(numbers)));
}

TEST_CASE("publish: what a killed process has left is removed by the next publisher") {
    const test_segments segments;
    segments.publish("a", numbered_rows(10));
    plant(segments / ".a.npy", {});
    std::filesystem::create_directory(segments / ".g");
    plant(segments / ".g/x.npy", {});
    segments.publish("b", numbered_rows(10));
    CHECK(segments.files() == std::vector<std::string>{"a.npy", "b.npy"});
}

TEST_CASE("open_segment: ten thousand calls leave no descriptor, mapping or file behind") {
    const test_segments segments;
    segments.publish("a", numbered_rows(1000));
    segments.open("a");
    const std::size_t descriptors = open_descriptors();
    const std::size_t mappings = mapping_count();
    for (int i = 0; i < 10'000; ++i)
        segments.open("a");
    CHECK(open_descriptors() == descriptors);
    CHECK(mapping_count() <= mappings + 2);  // the allocator may have grown
    for (int i = 0; i < 100; ++i) {
        segments.publish("b", numbered_rows(100));
        remove_segment("b", segments.folder());
    }
    CHECK(open_descriptors() == descriptors);
    CHECK(segments.files() == std::vector<std::string>{"a.npy"});
}
