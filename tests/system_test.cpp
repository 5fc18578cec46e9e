#include "src/core/system.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace seam = pinflow::detail::system;
namespace fs = std::filesystem;

namespace {

/// Calls, counted by kind and path.
using call_counts = std::map<std::pair<seam::call, std::string>, int>;

seam::failure_hook counting(call_counts& counts) {
    return [&counts](seam::call what, std::string_view path) {
        ++counts[{what, std::string(path)}];
        return seam::injected_failure{};
    };
}

/// Fails the calls `what` with `error`.
seam::failure_hook failing(seam::call what, int error) {
    return [what, error](seam::call asked, std::string_view) {
        return asked == what ? seam::injected_failure{.error = error} : seam::injected_failure{};
    };
}

std::string content_of(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::span<const std::byte> bytes_of(std::string_view text) {
    return std::as_bytes(std::span(text));
}

/// A descriptor that is closed at the end.
struct open_file {
    explicit open_file(int opened) : descriptor(opened) {}
    open_file(const open_file&) = delete;
    open_file& operator=(const open_file&) = delete;
    ~open_file() { seam::close(descriptor); }
    int descriptor;
};

/// Whether programs that this process starts do not inherit the descriptor.
bool closed_on_exec(int descriptor) {
    return (::fcntl(descriptor, F_GETFD) & FD_CLOEXEC) != 0;
}

template <typename Function>
std::error_code code_of(Function function) {
    try {
        function();
    } catch (const pinflow::system_failure& failure) {
        return failure.code();
    }
    return {};
}

}  // namespace

TEST_CASE("system: calls pass the seam, with the paths that they know") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    const std::string renamed = folder / "renamed";
    call_counts counts;
    {
        const seam::scoped_failure_hook hook(counting(counts));
        {
            const open_file file(seam::create_for_writing(path, 0600));
            seam::write_all(file.descriptor, path, bytes_of("pinflow"));
            seam::sync(file.descriptor, path);
        }
        {
            const open_file file(seam::open_for_reading(path));
            static_cast<void>(seam::status(file.descriptor, path));
            std::array<std::byte, 7> bytes{};
            CHECK(seam::read_at(file.descriptor, path, 0, bytes) == 7);
        }
        CHECK(seam::status_of_path(path).has_value());
        seam::rename(path, renamed);
        seam::sync_folder(folder.path().string());
        seam::remove(renamed);
        std::byte* const data = seam::map_anonymous(4'096);
        seam::advise(data, 4'096, 0);
        seam::unmap(data, 4'096);
        write_bytes(path, pattern_bytes(10));
        const open_file file(seam::open_for_reading(path));
        std::byte* const addresses = seam::reserve_addresses(4'096);
        seam::map_over(addresses, 4'096, file.descriptor, path, 0);
        seam::unmap(addresses, 4'096);
        seam::fail_if_injected(seam::call::mmap, path, "cannot map");
    }
    using enum seam::call;
    const std::string folder_path = folder.path().string();
    const call_counts expected{
        {{seam::call::open, path}, 3},
        {{seam::call::open, folder_path}, 1},
        {{seam::call::close, ""}, 4},
        {{fstat, path}, 1},
        {{seam::call::stat, path}, 1},
        {{seam::call::pread, path}, 1},
        {{seam::call::write, path}, 1},
        {{fsync, path}, 1},
        {{fsync, folder_path}, 1},
        {{seam::call::rename, renamed}, 1},
        {{seam::call::unlink, renamed}, 1},
        {{mmap, ""}, 2},
        {{mmap, path}, 2},
        {{madvise, ""}, 1},
    };
    CHECK((counts == expected));
}

TEST_CASE("system: a hook is not called after its destruction") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    write_bytes(path, pattern_bytes(10));
    call_counts counts;
    {
        const seam::scoped_failure_hook hook(counting(counts));
    }
    const open_file file(seam::open_for_reading(path));
    CHECK(counts.empty());
    {
        const seam::scoped_failure_hook hook(failing(seam::call::fstat, EIO));
        CHECK_THROWS_AS(seam::status(file.descriptor, path), pinflow::system_failure);
    }
    CHECK(seam::status(file.descriptor, path).st_size == 10);
}

TEST_CASE("system: injected errors become messages with the attempted call and the code") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    const std::string other = folder / "other";
    write_bytes(path, pattern_bytes(10));
    const open_file file(seam::open_for_reading(path));
    std::array<std::byte, 10> bytes{};
    const std::string in_quotes = "'" + path + "'";
    const auto sentence = [&](seam::call what, auto function) {
        const seam::scoped_failure_hook hook(failing(what, EIO));
        CHECK(code_of(function) == std::errc::io_error);
        std::string message = message_of<pinflow::system_failure>(function);
        CHECK(message.ends_with(": Input/output error"));
        return message;
    };
    using seam::call;
    CHECK(contains(sentence(call::open, [&] { seam::open_for_reading(path); }), "cannot open " + in_quotes));
    CHECK(contains(sentence(call::open, [&] { seam::create_for_writing(path, 0600); }),
                   "cannot create " + in_quotes));
    CHECK(contains(sentence(call::fstat, [&] { static_cast<void>(seam::status(file.descriptor, path)); }),
                   "cannot read the status of " + in_quotes));
    CHECK(contains_all(sentence(call::pread, [&] { seam::read_at(file.descriptor, path, 3, bytes); }),
                       {"cannot read 10 bytes", "at offset 3 ", in_quotes}));
    CHECK(contains_all(sentence(call::write, [&] { seam::write_all(file.descriptor, path, bytes); }),
                       {"cannot write 10 bytes", in_quotes}));
    CHECK(contains_all(sentence(call::fsync, [&] { seam::sync(file.descriptor, path); }),
                       {in_quotes, "durable"}));
    CHECK(contains_all(sentence(call::rename, [&] { seam::rename(path, other); }),
                       {"cannot rename " + in_quotes, "to '" + other + "'"}));
    CHECK(contains(sentence(call::mmap, [&] { seam::map_anonymous(4'096); }), "cannot allocate 4096 bytes"));
    CHECK(contains_all(sentence(call::mmap, [&] { seam::reserve_addresses(4'096); }),
                       {"cannot reserve 4096 bytes", "address space"}));
    std::byte* const addresses = seam::reserve_addresses(4'096);
    CHECK(contains_all(
        sentence(call::mmap, [&] { seam::map_over(addresses, 4'096, file.descriptor, path, 8'192); }),
        {"cannot map 4096 bytes", "at offset 8192 ", in_quotes}));
    seam::unmap(addresses, 4'096);
    CHECK(contains(sentence(call::mmap, [&] { seam::fail_if_injected(call::mmap, path, "cannot {map} it"); }),
                   "cannot {map} it"));
    CHECK(contains(sentence(call::open, [&] { seam::sync_folder(folder.path().string()); }),
                   "the folder '" + folder.path().string() + "'"));
    CHECK(fs::exists(path));
    CHECK_FALSE(fs::exists(other));
}

TEST_CASE("system: cleaning up ignores errors") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    seam::remove(path);
    write_bytes(path, pattern_bytes(10));
    {
        const seam::scoped_failure_hook hook(failing(seam::call::unlink, EPERM));
        seam::remove(path);
    }
    CHECK(fs::exists(path));
    seam::remove(path);
    CHECK_FALSE(fs::exists(path));
}

TEST_CASE("system: calls that a signal interrupts are made again") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    // each kind of call is interrupted twice before it happens
    std::map<seam::call, int> asked;
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
        return seam::injected_failure{.error = ++asked[what] % 3 != 0 ? EINTR : 0};
    });
    std::array<std::byte, 7> bytes{};
    {
        const open_file file(seam::create_for_writing(path, 0600));
        seam::write_all(file.descriptor, path, bytes_of("pinflow"));
        seam::sync(file.descriptor, path);
    }
    {
        const open_file file(seam::open_for_reading(path));
        CHECK(seam::status(file.descriptor, path).st_size == 7);
        CHECK(seam::read_at(file.descriptor, path, 0, bytes) == 7);
    }
    CHECK(std::memcmp(bytes.data(), "pinflow", 7) == 0);
    CHECK(seam::status_of_path(path).has_value());
    seam::rename(path, folder / "renamed");
    seam::remove(folder / "renamed");
    CHECK(fs::is_empty(folder.path()));
    using seam::call;
    for (const call what :
         {call::fstat, call::pread, call::write, call::fsync, call::stat, call::rename, call::unlink}) {
        CHECK(asked[what] == 3);
    }
    CHECK(asked[call::open] == 6);
}

TEST_CASE("system: short writes are continued to the last byte") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    const open_file file(seam::create_for_writing(path, 0600));
    int writes = 0;
    const seam::scoped_failure_hook hook([&](seam::call, std::string_view) {
        ++writes;
        return seam::injected_failure{.max_bytes = 3};
    });
    seam::write_all(file.descriptor, path, bytes_of("keeps a GPU fed"));
    CHECK(writes == 5);
    CHECK(content_of(path) == "keeps a GPU fed");
}

TEST_CASE("system: a file to be written must be new, and no link is followed to make it") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    write_bytes(path, pattern_bytes(10));
    CHECK(code_of([&] { seam::create_for_writing(path, 0600); }) == std::errc::file_exists);
    fs::create_symlink(folder / "elsewhere", folder / "link");
    CHECK(code_of([&] { seam::create_for_writing(folder / "link", 0600); }) == std::errc::file_exists);
    CHECK_FALSE(fs::exists(folder / "elsewhere"));
}

TEST_CASE("system: a file without a name is gone when it is closed, or gets one that is not taken") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    const auto create = [&] { return seam::create_unnamed(folder.path().string(), 0600); };
    if (!folder.has_unnamed_files()) {
        CHECK_FALSE(create());
        MESSAGE("skipped: this file system has no files without names");
        return;
    }
    {
        const open_file gone(create().value());
        CHECK(closed_on_exec(gone.descriptor));
        seam::write_all(gone.descriptor, path, bytes_of("pinflow"));
        CHECK(fs::is_empty(folder.path()));
    }
    CHECK(fs::is_empty(folder.path()));

    const open_file file(create().value());
    seam::write_all(file.descriptor, path, bytes_of("pinflow"));
    write_bytes(path, pattern_bytes(10));
    CHECK(contains_all(message_of<pinflow::system_failure>([&] { seam::give_name(file.descriptor, path); }),
                       {"cannot create '" + path + "'", "File exists"}));
    const std::string free = folder / "free";
    int asked = 0;
    {
        const seam::scoped_failure_hook hook([&](seam::call, std::string_view) {
            return seam::injected_failure{.error = ++asked < 3 ? EINTR : 0};
        });
        seam::give_name(file.descriptor, free);
    }
    CHECK(asked == 3);
    CHECK(content_of(free) == "pinflow");
}

TEST_CASE("system: a file gets its name from a thread that does not share the main thread's descriptors") {
    const temporary_folder folder;
    if (!folder.has_unnamed_files()) {
        MESSAGE("skipped: this file system has no files without names");
        return;
    }
    const open_file of_main(seam::create_for_writing(folder / "of main", 0600));
    bool unshared = false;
    std::thread([&] {
        unshared = ::unshare(CLONE_FILES) == 0;
        if (!unshared) return;
        seam::close(of_main.descriptor);
        const open_file file(seam::create_unnamed(folder.path().string(), 0600).value());
        seam::write_all(file.descriptor, folder / "named", bytes_of("pinflow"));
        seam::give_name(file.descriptor, folder / "named");
    }).join();
    if (!unshared) {
        MESSAGE("skipped: a thread cannot have descriptors of its own here");
        return;
    }
    CHECK(content_of(folder / "named") == "pinflow");
}

TEST_CASE(
    "system: a filesystem without unnamed files is distinguished from a folder that cannot be written to") {
    const temporary_folder folder;
    const std::string path = folder.path().string();
    for (const int error : {EOPNOTSUPP, EISDIR}) {
        const seam::scoped_failure_hook hook(failing(seam::call::open_unnamed, error));
        CHECK(seam::create_unnamed(path, 0600) == std::nullopt);
    }
    CHECK(code_of([&] { seam::create_unnamed(path + "/absent", 0600); }) ==
          std::errc::no_such_file_or_directory);
    const seam::scoped_failure_hook hook(failing(seam::call::open_unnamed, EACCES));
    CHECK(contains(message_of<pinflow::system_failure>([&] { seam::create_unnamed(path, 0600); }),
                   "cannot create a file in '" + path + "': Permission denied"));
}

TEST_CASE("system: the message of a failure names the remedy, if one is known") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    for (const auto& [error, help] : std::map<int, std::string>{{EMFILE, "ulimit -n"},
                                                                {ENFILE, "fs.file-max"},
                                                                {ENOSPC, "free space"},
                                                                {EDQUOT, "quota"},
                                                                {EACCES, "permissions"},
                                                                {EROFS, "read-only"},
                                                                {ENOTDIR, "folder is a file"},
                                                                {ELOOP, "symbolic link"},
                                                                {ENOMEM, "ulimit -v"},
                                                                {EFBIG, "ulimit -f"}}) {
        CAPTURE(error);
        const seam::scoped_failure_hook hook(failing(seam::call::open, error));
        const std::string sentence =
            message_of<pinflow::system_failure>([&] { seam::create_for_writing(path, 0600); });
        CAPTURE(sentence);
        CHECK(contains(sentence, "cannot create '" + path + "'"));
        CHECK(contains(sentence, help));
        CHECK(sentence.back() != '.');
    }
}

TEST_CASE("system: free_bytes gives the free space of a folder, or nothing if it is unknown") {
    const temporary_folder folder;
    const std::string path = folder.path().string();
    const auto free_bytes = seam::free_bytes(path);
    if (free_bytes) CHECK(*free_bytes <= fs::space(path).capacity);
    CHECK(!seam::free_bytes(path + "/absent").has_value());
    const seam::scoped_failure_hook hook(failing(seam::call::statfs, ENOSYS));
    CHECK(!seam::free_bytes(path).has_value());
}

TEST_CASE("system: descriptors are not handed to programs that are started") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    const open_file written(seam::create_for_writing(path, 0600));
    const open_file read(seam::open_for_reading(path));
    CHECK(closed_on_exec(written.descriptor));
    CHECK(closed_on_exec(read.descriptor));
}

TEST_CASE("system: a folder's entries are made durable, and no descriptor is lost when that fails") {
    const temporary_folder folder;
    const std::size_t before = open_descriptors();
    CHECK_NOTHROW(seam::sync_folder(folder.path().string()));
    {
        const seam::scoped_failure_hook hook(failing(seam::call::fsync, EIO));
        CHECK_THROWS_AS(seam::sync_folder(folder.path().string()), pinflow::system_failure);
    }
    CHECK_THROWS_AS(seam::sync_folder(folder / "missing"), pinflow::system_failure);
    write_bytes(folder / "data", {});
    CHECK(code_of([&] { seam::sync_folder(folder / "data"); }) == std::errc::not_a_directory);
    CHECK(open_descriptors() == before);
}

TEST_CASE("system: a path without a file has no status") {
    const temporary_folder folder;
    CHECK_FALSE(seam::status_of_path(folder / "missing").has_value());
    const seam::scoped_failure_hook hook(failing(seam::call::stat, EACCES));
    CHECK_FALSE(seam::status_of_path(folder.path().string()).has_value());
}

TEST_CASE("system: reading ends at the end of the file, at any offset that a number can hold") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    write_bytes(path, pattern_bytes(10));
    const open_file file(seam::open_for_reading(path));
    std::array<std::byte, 20> bytes{};
    CHECK(seam::read_at(file.descriptor, path, 4, bytes) == 6);
    CHECK(bytes[0] == std::byte{4});
    constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();
    for (const std::uint64_t offset : {std::uint64_t{10}, largest / 2 - 20, largest / 2 - 1, largest / 2,
                                       largest / 2 + 1, largest - 1, largest}) {
        CAPTURE(offset);
        bool supported = true;
        CHECK(seam::read_at(file.descriptor, path, offset, bytes) == 0);
        CHECK(seam::read_cached_at(file.descriptor, offset, bytes, supported).value_or(0) == 0);
    }
    CHECK(::lseek(file.descriptor, 0, SEEK_CUR) == 0);
}

TEST_CASE("system: with a hook in place no read bypasses it through the page cache") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    write_bytes(path, pattern_bytes(10));
    const open_file file(seam::open_for_reading(path));
    std::array<std::byte, 10> bytes{};
    bool supported = true;
    call_counts counts;
    const seam::scoped_failure_hook hook(counting(counts));
    CHECK_FALSE(seam::read_cached_at(file.descriptor, 0, bytes, supported).has_value());
    CHECK(supported);
    CHECK(counts.empty());
}

TEST_CASE("system: files are mapped side by side over reserved addresses") {
    const temporary_folder folder;
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::string path = folder / "data";
    const auto content = pattern_bytes(2 * page + 100);
    write_bytes(path, content);
    const open_file file(seam::open_for_reading(path));
    std::byte* const addresses = seam::reserve_addresses(3 * page);
    REQUIRE(addresses != nullptr);
    seam::map_over(addresses, page, file.descriptor, path, page);
    seam::map_over(addresses + page, 2 * page, file.descriptor, path, page);
    CHECK(std::memcmp(addresses, content.data() + page, page) == 0);
    CHECK(std::memcmp(addresses + page, content.data() + page, page + 100) == 0);
    seam::unmap(addresses, 3 * page);
}

TEST_CASE("system: knows the limit on open descriptors") {
    ::rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(seam::max_descriptors() == limit.rlim_cur);
}

TEST_CASE("system: one hook hears the calls of every thread") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    write_bytes(path, pattern_bytes(100));
    const open_file file(seam::open_for_reading(path));
    std::atomic<int> calls = 0;
    std::atomic<int> failures = 0;
    {
        const seam::scoped_failure_hook hook([&](seam::call, std::string_view) {
            return seam::injected_failure{.error = ++calls % 2 == 0 ? EIO : 0};
        });
        std::vector<std::thread> threads;
        threads.reserve(4);
        for (int index = 0; index < 4; ++index) {
            threads.emplace_back([&] {
                std::array<std::byte, 100> bytes{};
                for (int round = 0; round < 250; ++round) {
                    const auto read = [&] { seam::read_at(file.descriptor, path, 0, bytes); };
                    if (code_of(read) == std::errc::io_error) ++failures;
                }
            });
        }
        for (std::thread& thread : threads)
            thread.join();
    }
    CHECK(calls == 1'000);
    CHECK(failures == 500);
}

TEST_CASE("system: hooks come and go while other threads make calls") {
    const temporary_folder folder;
    const std::string path = folder / "data";
    write_bytes(path, pattern_bytes(100));
    const open_file file(seam::open_for_reading(path));
    std::atomic<int> calls = 0;  // outlives the threads, so that a hook may still run when it is taken away
    std::atomic<bool> stop = false;
    std::vector<std::thread> threads;
    threads.reserve(3);
    for (int index = 0; index < 3; ++index) {
        threads.emplace_back([&] {
            std::array<std::byte, 100> bytes{};
            while (!stop)
                seam::read_at(file.descriptor, path, 0, bytes);
        });
    }
    for (int round = 0; round < 20; ++round) {
        const int before = calls;
        const seam::scoped_failure_hook hook([&](seam::call, std::string_view) {
            ++calls;
            return seam::injected_failure{};
        });
        while (calls < before + 10)
            std::this_thread::yield();
    }
    stop = true;
    for (std::thread& thread : threads)
        thread.join();
    CHECK(calls >= 200);
}
