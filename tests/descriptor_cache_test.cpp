#include "src/core/descriptor_cache.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/system.hpp"
#include "tests/support/child_process.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::input_file;
using pinflow::detail::scoped_descriptor_limit;
namespace fs = std::filesystem;
namespace seam = pinflow::detail::system;

namespace {

constexpr std::size_t size_bytes = 500;

/// The content of file number `index`: the pattern from byte `index` % 251 on.
std::vector<std::byte> content_of(std::size_t index) {
    const auto pattern = pattern_bytes(size_bytes + 251);
    const auto begin = pattern.begin() + static_cast<std::ptrdiff_t>(index % 251);
    return {begin, begin + size_bytes};
}

using file_list = std::vector<std::unique_ptr<const input_file>>;

/// Opens files 0, 1, ... of a folder, which are written first.
file_list open_files(const temporary_folder& folder, std::size_t count) {
    file_list files;
    for (std::size_t index = 0; index < count; ++index) {
        const fs::path path = folder / std::to_string(index);
        write_bytes(path, content_of(index));
        files.push_back(std::make_unique<const input_file>(path));
    }
    return files;
}

bool reads_right(const input_file& file, std::size_t index) {
    std::array<std::byte, size_bytes - 7> bytes{};
    file.read(7, bytes);
    return std::memcmp(bytes.data(), content_of(index).data() + 7, bytes.size()) == 0;
}

/// Counts the calls that open `path`.
seam::failure_hook counting_opens(std::string path, std::atomic<int>& count) {
    return [path = std::move(path), &count](seam::call what, std::string_view asked) {
        if (what == seam::call::open && asked == path) ++count;
        return seam::injected_failure{};
    };
}

/// Opens enough other files that every idle descriptor is closed.
void close_all_others(const temporary_folder& folder) {
    write_bytes(folder / "other", content_of(0));
    file_list files;
    for (std::size_t count = 2 * pinflow::detail::descriptor_cache::max_open(); count > 0; --count)
        files.push_back(std::make_unique<const input_file>(folder / "other"));
}

}  // namespace

// ---- the bound --------------------------------------------------------------------------------------------

TEST_CASE("descriptor_cache: any number of files keeps no more descriptors open than the bound") {
    const temporary_folder folder;
    const scoped_descriptor_limit limit(20);
    const std::size_t before = open_descriptors();
    std::size_t max_count = 0;
    const auto look = [&] { max_count = std::max(max_count, open_descriptors() - before); };
    {
        file_list files;
        for (std::size_t index = 0; index < 100; ++index) {
            const fs::path path = folder / std::to_string(index);
            write_bytes(path, content_of(index));
            files.push_back(std::make_unique<const input_file>(path));
            look();
        }
        CHECK(max_count == 20);
        std::mt19937 random(1);
        std::size_t wrong = 0;
        for (std::size_t round = 0; round < 1'000; ++round) {
            const std::size_t index = round < 300 ? round % files.size() : random() % files.size();
            if (!reads_right(*files[index], index)) ++wrong;
            look();
        }
        CHECK(wrong == 0);
        CHECK(max_count == 20);
    }
    CHECK(open_descriptors() == before);
}

TEST_CASE("descriptor_cache: the bound is half of what the process may open, and at least 16") {
    using pinflow::detail::descriptor_cache;
    ::rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
    if (limit.rlim_cur >= 32) CHECK(descriptor_cache::max_open() == limit.rlim_cur / 2);
    CHECK(holds_in_child_with_descriptors(64, [] { return descriptor_cache::max_open() == 32; }));
    CHECK(holds_in_child_with_descriptors(20, [] { return descriptor_cache::max_open() == 16; }));
}

TEST_CASE("descriptor_cache: the soft limit is raised when many files are opened, at most to the hard one") {
    const temporary_folder folder;
    static_cast<void>(open_files(folder, 100));
    const auto limit_with_files_open = [&] {
        const file_list files = open_files(folder, 100);
        return pinflow::detail::system::max_descriptors();
    };
    CHECK(holds_in_child_with_descriptors(32, [&] { return limit_with_files_open() >= 200; }, 1000));
    CHECK(holds_in_child_with_descriptors(32, [&] { return limit_with_files_open() == 50; }, 50));
    CHECK(holds_in_child_with_descriptors(600, [&] { return limit_with_files_open() == 600; }, 1000));
}

TEST_CASE("descriptor_cache: thousands of files work in a process that may open few") {
    const temporary_folder folder;
    static_cast<void>(open_files(folder, 2'000));
    // a process with 18 cannot open as many files as the bound of 16 allows: opening fails until others are
    // closed
    for (const std::size_t max_descriptors : {256u, 64u, 18u}) {
        CAPTURE(max_descriptors);
        if (sanitized && max_descriptors < 64) continue;  // a sanitizer needs descriptors of its own
        CHECK(holds_in_child_with_descriptors(max_descriptors, [&] {
            file_list files;
            for (std::size_t index = 0; index < 2'000; ++index)
                files.push_back(std::make_unique<const input_file>(folder / std::to_string(index)));
            for (std::size_t round = 0; round < 2; ++round) {
                for (std::size_t index = 0; index < files.size(); ++index) {
                    if (!reads_right(*files[index], index)) return false;
                    files[index]->check_unchanged();
                }
            }
            return true;
        }));
    }
}

TEST_CASE("descriptor_cache: files that are in use again and again stay open") {
    const temporary_folder folder;
    const scoped_descriptor_limit limit(16);
    const auto files = open_files(folder, 100);
    std::atomic<int> opened = 0;
    const seam::scoped_failure_hook hook(counting_opens(folder / "3", opened));
    for (std::size_t index = 0; index < files.size(); ++index) {
        CHECK(reads_right(*files[3], 3));
        CHECK(reads_right(*files[index], index));
    }
    CHECK(opened == 1);
}

TEST_CASE("descriptor_cache: a lease keeps its descriptor open") {
    const temporary_folder folder;
    const scoped_descriptor_limit limit(16);
    write_bytes(folder / "leased", content_of(200));
    const input_file leased(folder / "leased");
    std::atomic<int> opened = 0;
    const seam::scoped_failure_hook hook(counting_opens(folder / "leased", opened));
    {
        pinflow::descriptor_lease lease = leased.lease_descriptor();
        const int descriptor = lease.get();
        close_all_others(folder);
        CHECK(leased.lease_descriptor().get() == descriptor);
        std::array<std::byte, size_bytes> bytes{};
        CHECK(::pread(descriptor, bytes.data(), bytes.size(), 0) == size_bytes);
        CHECK(std::memcmp(bytes.data(), content_of(200).data(), bytes.size()) == 0);

        const pinflow::descriptor_lease moved = std::move(lease);
        CHECK(moved.get() == descriptor);
        CHECK(lease.get() == -1);  // NOLINT(bugprone-use-after-move,clang-analyzer-cplusplus.Move)
        close_all_others(folder);
        CHECK(opened == 0);
    }
    close_all_others(folder);
    CHECK(reads_right(leased, 200));
    CHECK(opened == 1);
}

TEST_CASE("descriptor_cache: when more files are in use than the bound allows, none of them is closed") {
    const temporary_folder folder;
    const scoped_descriptor_limit limit(16);
    const std::size_t before = open_descriptors();
    const auto files = open_files(folder, 40);
    {
        std::vector<pinflow::descriptor_lease> leases;
        for (const auto& file : files)
            leases.push_back(file->lease_descriptor());
        CHECK(open_descriptors() == before + 40);
        for (std::size_t index = 0; index < files.size(); ++index)
            CHECK(files[index]->lease_descriptor().get() == leases[index].get());
    }
    write_bytes(folder / "one more", content_of(0));
    const input_file one_more(folder / "one more");
    CHECK(open_descriptors() == before + 16);
}

// ---- opening again ----------------------------------------------------------------------------------------

TEST_CASE("descriptor_cache: opening a file again notices that it has changed") {
    const temporary_folder folder;
    const scoped_descriptor_limit limit(16);
    const fs::path path = folder / "data";
    struct change {
        std::string sentence;
        std::function<void()> make;
    };
    const std::vector<change> changes{
        {"another file has taken its place",
         [&] {
             write_bytes(folder / "new", content_of(1));
             fs::last_write_time(folder / "new", fs::last_write_time(path));
             fs::rename(folder / "new", path);
         }},
        {"it had 500 bytes then, and has 501 now", [&] { fs::resize_file(path, 501); }},
        {"it had 500 bytes then, and has 499 now", [&] { fs::resize_file(path, 499); }},
        {"it was modified",
         [&] { fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(1)); }},
    };
    for (const auto& [sentence, make] : changes) {
        CAPTURE(sentence);
        write_bytes(path, content_of(1));
        const input_file file(path);
        close_all_others(folder);
        make();
        const std::size_t before = open_descriptors();
        std::array<std::byte, 10> bytes{};
        const std::string expected = "'" + path.string() + "' has changed since it was opened: " + sentence;
        CHECK(message_of<pinflow::data_changed>([&] { file.read(0, bytes); }) == expected);
        CHECK(message_of<pinflow::data_changed>([&] { file.lease_descriptor(); }) == expected);
        CHECK(message_of<pinflow::data_changed>([&] { file.check_unchanged(); }) == expected);
        CHECK(open_descriptors() <= before);
    }
}

TEST_CASE("descriptor_cache: a failed reopening gives a message with the path, and the system's code") {
    const temporary_folder folder;
    const scoped_descriptor_limit limit(16);
    const fs::path path = folder / "data";
    write_bytes(path, content_of(1));
    const input_file file(path);
    close_all_others(folder);
    fs::rename(path, folder / "elsewhere");
    CHECK_NOTHROW(file.check_unchanged());  // nobody has changed it, as far as can be told
    std::array<std::byte, 10> bytes{};
    std::error_code code;
    try {
        file.read(0, bytes);
    } catch (const pinflow::system_failure& failure) {
        code = failure.code();
        CHECK(contains_all(failure.what(), {"cannot reopen '" + path.string() + "', which was closed",
                                            "too many files", "No such file"}));
    }
    CHECK(code == std::errc::no_such_file_or_directory);
    fs::rename(folder / "elsewhere", path);
    CHECK(reads_right(file, 1));
    fs::remove(path);
    CHECK(reads_right(file, 1));  // from the descriptor
}

TEST_CASE("descriptor_cache: a relative path is opened again where it was opened first") {
    const temporary_folder folder;
    const scoped_descriptor_limit limit(16);
    fs::create_directory(folder / "inner");
    write_bytes(folder / "data", content_of(1));
    write_bytes(folder / "inner" / "data", content_of(2));
    const fs::path before = fs::current_path();
    fs::current_path(folder.path());
    const input_file file("data");
    close_all_others(folder);
    fs::current_path(folder / "inner");
    CHECK(reads_right(file, 1));
    fs::current_path(before);
}

// ---- too many open files ----------------------------------------------------------------------------------

TEST_CASE("descriptor_cache: if the system has no descriptor left, idle descriptors are closed") {
    for (const int error : {EMFILE, ENFILE}) {
        const temporary_folder folder;
        const std::size_t before = open_descriptors();
        const auto files = open_files(folder, 10);
        write_bytes(folder / "new", content_of(0));
        int failures = 0;
        const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
            return what == seam::call::open && failures++ == 0 ? seam::injected_failure{.error = error}
                                                               : seam::injected_failure{};
        });
        const input_file file(folder / "new");
        CHECK(failures == 2);
        CHECK(open_descriptors() - before <= 6);
        for (std::size_t index = 0; index < files.size(); ++index)
            CHECK(reads_right(*files[index], index));
    }
}

TEST_CASE("descriptor_cache: if closing idle descriptors does not help, opening fails with the code") {
    const temporary_folder folder;
    const std::size_t before = open_descriptors();
    const auto files = open_files(folder, 10);
    const auto lease = files[4]->lease_descriptor();
    write_bytes(folder / "new", content_of(0));
    {
        const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
            return what == seam::call::open ? seam::injected_failure{.error = EMFILE}
                                            : seam::injected_failure{};
        });
        CHECK(contains(message_of<pinflow::system_failure>([&] { input_file(folder / "new"); }),
                       "cannot open '" + (folder / "new").string() + "': Too many open files"));
        std::array<std::byte, 10> bytes{};
        CHECK(contains(message_of<pinflow::system_failure>([&] { files[0]->read(0, bytes); }),
                       "because too many files were open: Too many open files"));
        CHECK(reads_right(*files[4], 4));
    }
    CHECK(open_descriptors() == before + 1);
    for (std::size_t index = 0; index < files.size(); ++index)
        CHECK(reads_right(*files[index], index));
}

TEST_CASE("descriptor_cache: other failures close nothing") {
    const temporary_folder folder;
    const auto files = open_files(folder, 10);
    const std::size_t before = open_descriptors();
    for (int time = 0; time < 100; ++time)
        CHECK_THROWS_AS(input_file(folder / "missing"), pinflow::system_failure);
    CHECK(open_descriptors() == before);
}

// ---- threads ----------------------------------------------------------------------------------------------

TEST_CASE("descriptor_cache: threads read files while descriptors are closed under the bound") {
    const temporary_folder folder;
    const scoped_descriptor_limit limit(20);
    const std::size_t before = open_descriptors();
    const auto files = open_files(folder, 100);
    constexpr std::size_t thread_count = 8;
    std::atomic<int> wrong = 0;
    std::atomic<std::size_t> running = thread_count;
    std::vector<std::thread> threads;
    threads.reserve(thread_count);
    for (std::size_t thread = 0; thread < thread_count; ++thread) {
        threads.emplace_back([&, thread] {
            std::mt19937 random(static_cast<unsigned>(thread));
            for (int round = 0; round < 2'000; ++round) {
                // half of the reads are of a few files that all threads share
                const std::size_t index = random() % (round % 2 == 0 ? 4 : files.size());
                try {
                    if (!reads_right(*files[index], index)) ++wrong;
                } catch (const std::exception&) {
                    ++wrong;
                }
            }
            --running;
        });
    }
    std::size_t max_count = 0;
    while (running > 0)
        max_count = std::max(max_count, open_descriptors() - before);
    for (std::thread& thread : threads)
        thread.join();
    CHECK(wrong == 0);
    CHECK(max_count <= 20);
}

TEST_CASE("descriptor_cache: threads that want the same closed file have it opened once") {
    const temporary_folder folder;
    const scoped_descriptor_limit limit(16);
    write_bytes(folder / "data", content_of(5));
    const input_file file(folder / "data");
    close_all_others(folder);
    std::atomic<int> opened = 0;
    const seam::scoped_failure_hook hook(counting_opens(folder / "data", opened));
    constexpr int thread_count = 8;
    std::latch all_there(thread_count);
    std::atomic<int> right = 0;
    std::vector<std::thread> threads;
    threads.reserve(thread_count);
    for (int thread = 0; thread < thread_count; ++thread) {
        threads.emplace_back([&] {
            all_there.arrive_and_wait();
            if (reads_right(file, 5)) ++right;
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(right == thread_count);
    CHECK(opened == 1);
}

TEST_CASE("descriptor_cache: several threads may open and close files") {
    const temporary_folder folder;
    const scoped_descriptor_limit limit(16);
    const std::size_t before = open_descriptors();
    static_cast<void>(open_files(folder, 30));
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    threads.reserve(4);
    for (unsigned thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
            std::mt19937 random(thread);
            std::array<std::unique_ptr<const input_file>, 10> files;
            std::array<std::size_t, 10> numbers{};
            for (int round = 0; round < 500; ++round) {
                const std::size_t place = random() % files.size();
                if (files[place] == nullptr || random() % 4 == 0) {
                    numbers[place] = random() % 30;
                    files[place] =
                        std::make_unique<const input_file>(folder / std::to_string(numbers[place]));
                }
                if (!reads_right(*files[place], numbers[place])) ++wrong;
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(wrong == 0);
    CHECK(open_descriptors() == before);
}

// ---- forked processes -------------------------------------------------------------------------------------

TEST_CASE("descriptor_cache: a forked process opens and closes any number of files") {
    const temporary_folder folder;
    const file_list of_parent = open_files(folder, 40);
    CHECK(holds_in_child_with_descriptors(64, [&] {
        for (std::size_t count = 0; count < 1'000; ++count) {
            const auto file = std::make_unique<const input_file>(folder / std::to_string(count % 40));
            if (!reads_right(*file, count % 40)) return false;
        }
        // its copies of the parent's descriptors are closed when it needs others
        file_list files;
        for (std::size_t index = 0; index < 40; ++index)
            files.push_back(std::make_unique<const input_file>(folder / std::to_string(index)));
        for (std::size_t index = 0; index < 40; ++index) {
            if (!reads_right(*files[index], index) || !reads_right(*of_parent[index], index)) return false;
        }
        return true;
    }));
    for (std::size_t index = 0; index < of_parent.size(); ++index)
        CHECK(reads_right(*of_parent[index], index));
}

TEST_CASE("descriptor_cache: a process can be forked while its threads open files") {
    const temporary_folder folder;
    static_cast<void>(open_files(folder, 2));
    std::atomic<bool> stopped = false;
    std::vector<std::thread> threads;
    for (std::size_t index = 0; index < 2; ++index) {
        threads.emplace_back([&, index] {
            while (!stopped)
                static_cast<void>(reads_right(input_file(folder / std::to_string(index)), index));
        });
    }
    int failures = 0;
    for (int count = 0; count < (sanitized ? 60 : 300); ++count) {
        const bool held = holds_in_child([&] {
            ::alarm(30);  // ends the child if it hangs
            return reads_right(input_file(folder / "0"), 0);
        });
        if (!held) ++failures;
    }
    stopped = true;
    for (std::thread& thread : threads)
        thread.join();
    CHECK(failures == 0);
}

TEST_CASE(
    "descriptor_cache: a forked process can use and destroy a file that a thread of its parent was opening") {
    const temporary_folder folder;
    file_list files = open_files(folder, 2);
    close_all_others(folder);
    const std::string path = (folder / "1").string();
    std::latch is_opening(1);
    std::latch may_open(1);
    const ::pid_t parent = ::getpid();
    std::thread thread;
    {
        const seam::scoped_failure_hook hook([&](seam::call what, std::string_view asked) {
            if (what == seam::call::open && asked == path && ::getpid() == parent) {
                is_opening.count_down();
                may_open.wait();
            }
            return seam::injected_failure{};
        });
        thread = std::thread([&] { CHECK(reads_right(*files[1], 1)); });
        is_opening.wait();
        CHECK(holds_in_child([&] {
            ::alarm(30);
            const bool is_right = reads_right(*files[1], 1);
            files.clear();
            close_all_others(folder);  // looks at every entry of the list
            return is_right;
        }));
        may_open.count_down();
        thread.join();
    }
}
