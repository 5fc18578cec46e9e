#include "pinflow/file.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::input_file;
namespace fs = std::filesystem;
namespace seam = pinflow::detail::system;

namespace {

/// Makes a file look as if it had been written long ago: clocks of filesystems are too coarse to tell two
/// writes of one test apart.
void make_old(const fs::path& path) {
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(1));
}

std::string change_of(const input_file& file) {
    return message_of<pinflow::data_changed>([&] { file.check_unchanged(); });
}

/// Drops root's rights during its lifetime, if this process is root.
class without_root {
 public:
    without_root() : was_root_(::geteuid() == 0) {
        if (was_root_) REQUIRE(::seteuid(65534) == 0);
    }
    without_root(const without_root&) = delete;
    without_root& operator=(const without_root&) = delete;
    ~without_root() {
        if (was_root_ && ::seteuid(0) != 0) std::abort();
    }

 private:
    bool was_root_;
};

/// Whether the file's filesystem supports reading without waiting.
bool cache_can_be_asked(const input_file& file) {
    std::byte byte{};
    const ::iovec piece{&byte, 1};
    return ::preadv2(file.lease_descriptor().get(), &piece, 1, 0, RWF_NOWAIT) == 1;
}

}  // namespace

TEST_CASE("file: opens a regular file and knows its path and size") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(1000));
    const input_file file(folder / "data");
    CHECK(file.path() == (folder / "data").string());
    CHECK(file.size_bytes() == 1000);
    CHECK((::fcntl(file.lease_descriptor().get(), F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_NOTHROW(file.check_unchanged());
}

TEST_CASE("file: closes its descriptor at the end, and when opening is refused") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(10));
    const std::size_t before = open_descriptors();
    {
        const input_file file(folder / "data");
        CHECK(open_descriptors() == before + 1);
    }
    CHECK_THROWS_AS(input_file(folder.path()), pinflow::format_error);
    {
        const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
            return what == seam::call::fstat ? seam::injected_failure{.error = EIO}
                                             : seam::injected_failure{};
        });
        CHECK_THROWS_AS(input_file(folder / "data"), pinflow::system_failure);
    }
    CHECK(open_descriptors() == before);
}

TEST_CASE("file: refuses what is not a regular file, and says what it is") {
    const temporary_folder folder;
    const auto refusal = [](const fs::path& path) {
        return message_of<pinflow::format_error>([&] { input_file{path}; });
    };
    CHECK(refusal(folder.path()).starts_with("cannot open '" + folder.path().string() + "': it is a folder"));
    CHECK(contains_all(refusal("/dev/zero"), {"cannot open '/dev/zero'", "it is a device"}));
    fs::create_symlink("/dev/zero", folder / "link");
    CHECK(contains(refusal(folder / "link"), "it is a device, not a regular file"));
}

TEST_CASE("file: refuses a named pipe at once, although nobody writes to it") {
    const temporary_folder folder;
    REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
    CHECK(contains_all(message_of<pinflow::format_error>([&] { input_file(folder / "pipe"); }),
                       {"cannot open '" + (folder / "pipe").string() + "'", "it is a named pipe"}));
}

TEST_CASE("file: a socket cannot be opened") {
    const temporary_folder folder;
    ::sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string path = (folder / "socket").string();
    REQUIRE(path.size() < sizeof address.sun_path);
    std::memcpy(address.sun_path, path.c_str(), path.size());
    const int descriptor = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(descriptor >= 0);
    CHECK(::bind(descriptor, reinterpret_cast<const ::sockaddr*>(&address), sizeof address) == 0);
    CHECK_THROWS_AS(input_file{path}, pinflow::system_failure);
    ::close(descriptor);
}

TEST_CASE("file: opening fails with a message that has the path, and the system's code") {
    const temporary_folder folder;
    const auto code_of = [](const fs::path& path) {
        try {
            input_file{path};
        } catch (const pinflow::system_failure& failure) {
            CHECK(std::string(failure.what()).starts_with("cannot open '" + path.string() + "': "));
            return failure.code();
        }
        return std::error_code();
    };
    CHECK(code_of(folder / "missing") == std::errc::no_such_file_or_directory);
    CHECK(code_of("") == std::errc::no_such_file_or_directory);
    fs::create_symlink("loop", folder / "loop");
    CHECK(code_of(folder / "loop") == std::errc::too_many_symbolic_link_levels);
    write_bytes(folder / "data", pattern_bytes(10));
    CHECK(code_of(folder / "data" / "below") == std::errc::not_a_directory);
    CHECK(code_of(folder / std::string(300, 'x')) == std::errc::filename_too_long);
}

TEST_CASE("file: a file that may not be read is refused with the system's reason") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(10));
    fs::permissions(folder.path(), fs::perms::owner_all | fs::perms::others_exec);
    fs::permissions(folder / "data", fs::perms::none);
    const without_root nobody;
    CHECK(contains(message_of<pinflow::system_failure>([&] { input_file(folder / "data"); }),
                   "cannot open '" + (folder / "data").string() + "': Permission denied; check"));
}

TEST_CASE("file: reads any part of the file") {
    const temporary_folder folder;
    const auto content = pattern_bytes(10'000);
    write_bytes(folder / "data", content);
    const input_file file(folder / "data");
    for (const std::size_t offset : {0u, 1u, 4095u, 4096u, 9'999u}) {
        for (const std::size_t size : {1u, 100u, 5'000u, 10'000u}) {
            if (offset + size > content.size()) continue;
            CAPTURE(offset);
            CAPTURE(size);
            std::vector<std::byte> bytes(size);
            file.read(offset, bytes);
            CHECK(std::memcmp(bytes.data(), content.data() + offset, size) == 0);
        }
    }
}

TEST_CASE("file: reading nothing succeeds anywhere and asks nothing of the system") {
    const temporary_folder folder;
    write_bytes(folder / "data", {});
    const input_file file(folder / "data");
    const seam::scoped_failure_hook hook(
        [](seam::call, std::string_view) { return seam::injected_failure{.error = EIO}; });
    CHECK(file.read(0, {}) == std::chrono::nanoseconds::zero());
    CHECK(file.read(1'000, {}) == std::chrono::nanoseconds::zero());
}

TEST_CASE("file: short reads are continued until the destination is full") {
    const temporary_folder folder;
    const auto content = pattern_bytes(1'000);
    write_bytes(folder / "data", content);
    const input_file file(folder / "data");
    int reads = 0;
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view path) {
        CHECK(what == seam::call::pread);
        CHECK(path == file.path());
        ++reads;
        return seam::injected_failure{.max_bytes = 7};
    });
    std::vector<std::byte> bytes(990);
    file.read(10, bytes);
    CHECK(reads == (990 + 6) / 7);
    CHECK(std::memcmp(bytes.data(), content.data() + 10, bytes.size()) == 0);
}

TEST_CASE("file: a read that a signal interrupts is made again") {
    const temporary_folder folder;
    const auto content = pattern_bytes(100);
    write_bytes(folder / "data", content);
    const input_file file(folder / "data");
    int reads = 0;
    const seam::scoped_failure_hook hook([&](seam::call, std::string_view) {
        return seam::injected_failure{.error = ++reads < 4 ? EINTR : 0};
    });
    std::vector<std::byte> bytes(100);
    file.read(0, bytes);
    CHECK(reads == 4);
    CHECK((bytes == content));
}

TEST_CASE("file: a failing disk gives a message with path and offset, also after a partial read") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    const input_file file(folder / "data");
    int reads = 0;
    const seam::scoped_failure_hook hook([&](seam::call, std::string_view) {
        return ++reads == 1 ? seam::injected_failure{.max_bytes = 30} : seam::injected_failure{.error = EIO};
    });
    std::vector<std::byte> bytes(80);
    std::error_code code;
    std::string sentence;
    try {
        file.read(20, bytes);
    } catch (const pinflow::system_failure& failure) {
        code = failure.code();
        sentence = failure.what();
    }
    CHECK(code == std::errc::io_error);
    CHECK(contains_all(
        sentence, {"cannot read 50 bytes", "at offset 50 ", "'" + file.path() + "'", "Input/output error"}));
}

TEST_CASE("file: a file that shrinks is noticed by reading, with both sizes") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(10'000));
    const input_file file(folder / "data");
    fs::resize_file(folder / "data", 4'000);
    std::vector<std::byte> bytes(5'000);
    for (const std::uint64_t offset : {0u, 4'000u, 5'000u}) {
        CAPTURE(offset);
        const std::string sentence = message_of<pinflow::data_changed>([&] { file.read(offset, bytes); });
        CHECK(contains(sentence, "'" + file.path() + "'"));
        CHECK(contains(sentence, "the file has 4000 bytes now, it had 10000 when it was opened"));
    }
    CHECK_NOTHROW(file.read(0, std::span(bytes).first(4'000)));
}

TEST_CASE("file: the largest offsets do not overflow") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    const input_file file(folder / "data");
    constexpr auto largest = std::uint64_t{std::numeric_limits<std::int64_t>::max()};
    std::array<std::byte, 4> bytes{};
    for (const std::uint64_t offset :
         {std::uint64_t{100}, largest - 4, largest - 1, largest, largest + 1,
          std::numeric_limits<std::uint64_t>::max() - 3, std::numeric_limits<std::uint64_t>::max()}) {
        CAPTURE(offset);
        const std::string sentence = message_of<pinflow::invalid_argument>([&] { file.read(offset, bytes); });
        CHECK(sentence.ends_with("the file has 100 bytes"));
        CHECK((bytes == std::array<std::byte, 4>{}));
    }
    CHECK(::lseek(file.lease_descriptor().get(), 0, SEEK_CUR) == 0);
}

TEST_CASE("file: checking notices a file that shrank or grew, with both sizes") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    make_old(folder / "data");
    const input_file file(folder / "data");
    CHECK(change_of(file).empty());
    for (const std::uintmax_t size : {40u, 0u, 101u}) {
        fs::resize_file(folder / "data", size);
        const std::string sentence = change_of(file);
        CAPTURE(sentence);
        CHECK(contains_all(sentence, {"'" + file.path() + "'", "has changed", "it had 100 bytes"}));
        CHECK(sentence.ends_with("and has " + std::to_string(size) + " now"));
    }
}

TEST_CASE("file: checking notices other content of the same size") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    make_old(folder / "data");
    const input_file file(folder / "data");
    write_bytes(folder / "data", std::vector<std::byte>(100));
    CHECK(contains(change_of(file), "has changed since it was opened: it was modified"));
}

TEST_CASE("file: checking notices a file that was cut and grown again") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    make_old(folder / "data");
    const input_file file(folder / "data");
    fs::resize_file(folder / "data", 0);
    fs::resize_file(folder / "data", 100);
    CHECK_FALSE(change_of(file).empty());
}

TEST_CASE("file: checking notices another file in its place, even an equal one") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    const input_file file(folder / "data");
    write_bytes(folder / "other", pattern_bytes(100));
    fs::last_write_time(folder / "other", fs::last_write_time(folder / "data"));
    fs::rename(folder / "other", folder / "data");
    CHECK(contains(change_of(file), "another file has taken its place"));
}

TEST_CASE("file: a file that lost its name passes the check and is still read") {
    const temporary_folder folder;
    const auto content = pattern_bytes(100);
    write_bytes(folder / "data", content);
    const input_file file(folder / "data");
    fs::remove(folder / "data");
    CHECK_NOTHROW(file.check_unchanged());
    std::vector<std::byte> bytes(100);
    file.read(0, bytes);
    CHECK((bytes == content));
}

TEST_CASE("file: a file that lost its name and was written to does not pass the check") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    const input_file file(folder / "data");
    fs::rename(folder / "data", folder / "elsewhere");
    CHECK(change_of(file).empty());
    fs::resize_file(folder / "elsewhere", 99);
    CHECK(contains(change_of(file), "it had 100 bytes then, and has 99 now"));
}

TEST_CASE("file: a check is one call on the path, and a second call only if the path is gone") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    const input_file file(folder / "data");
    std::vector<seam::call> calls;
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
        calls.push_back(what);
        return seam::injected_failure{};
    });
    file.check_unchanged();
    CHECK((calls == std::vector{seam::call::stat}));
    calls.clear();
    fs::remove(folder / "data");
    file.check_unchanged();
    CHECK((calls == std::vector{seam::call::stat, seam::call::fstat}));
}

TEST_CASE("file: a check is not repeated before the last one has the given age") {
    using clock = std::chrono::steady_clock;
    using std::chrono::seconds;
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    const input_file file(folder / "data");
    int checks = 0;
    const seam::scoped_failure_hook hook([&](seam::call, std::string_view) {
        ++checks;
        return seam::injected_failure{};
    });
    const clock::time_point start = clock::now() + seconds(1'000);
    const auto checks_at = [&](clock::duration since_start, clock::duration max_age) {
        checks = 0;
        file.check_unchanged(max_age, start + since_start);
        return checks;
    };
    CHECK(checks_at(seconds(0), seconds(10)) == 1);  // opening does not count as a check
    CHECK(checks_at(seconds(0), seconds(10)) == 0);
    CHECK(checks_at(seconds(9), seconds(10)) == 0);
    CHECK(checks_at(seconds(-5), seconds(1)) == 0);  // another thread was faster
    CHECK(checks_at(seconds(10), seconds(10)) == 1);
    CHECK(checks_at(seconds(19), seconds(10)) == 0);
    CHECK(checks_at(seconds(19), seconds(0)) == 1);
    CHECK(checks_at(seconds(28), clock::duration::max()) == 0);

    make_old(folder / "data");
    CHECK(checks_at(seconds(20), seconds(10)) == 0);
    // a failed check does not count as a passed check
    for (int time = 0; time < 2; ++time)
        CHECK_THROWS_AS(checks_at(seconds(100), seconds(10)), pinflow::data_changed);
}

TEST_CASE("file: every check without an age is made") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    const input_file file(folder / "data");
    file.check_unchanged();
    make_old(folder / "data");
    CHECK(contains(change_of(file), "has changed since it was opened: it was modified"));
}

TEST_CASE("file: a relative path means the same file after the working folder changed") {
    const temporary_folder folder;
    fs::create_directory(folder / "inner");
    write_bytes(folder / "data", pattern_bytes(100));
    write_bytes(folder / "inner" / "data", pattern_bytes(100));
    const fs::path before = fs::current_path();
    fs::current_path(folder.path());
    const input_file file("data");
    fs::current_path(folder / "inner");
    CHECK(file.path() == "data");
    CHECK(change_of(file).empty());
    fs::current_path(before);
}

TEST_CASE("file: reading what the page cache holds waits for no storage") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(1 << 20));
    const input_file file(folder / "data");
    if (!cache_can_be_asked(file)) {
        MESSAGE("skipped: this filesystem cannot be asked what the page cache holds");
        return;
    }
    std::vector<std::byte> bytes(1 << 20);
    // the cache may refuse to answer at once: then some scheduling time is counted, but no disk time
    CHECK(file.read(0, bytes) < std::chrono::milliseconds(5));
}

TEST_CASE("file: reads on filesystems where the page cache cannot be queried") {
    // tmpfs keeps all its files in the page cache, but does not support such reads
    const fs::path path = "/dev/shm/pinflow-file-test-" + std::to_string(::getpid());
    if (::access("/dev/shm", W_OK) != 0) {
        MESSAGE("skipped: /dev/shm cannot be written");
        return;
    }
    const auto content = pattern_bytes(1 << 20);
    write_bytes(path, content);
    const input_file file(path);
    fs::remove(path);
    std::vector<std::byte> bytes(content.size());
    const auto before = std::chrono::steady_clock::now();
    const auto waited = file.read(0, bytes);
    CHECK(waited >= std::chrono::nanoseconds::zero());
    CHECK(waited <= std::chrono::steady_clock::now() - before);
    CHECK((bytes == content));
}

TEST_CASE("file: the time that a slow disk takes is reported as waited for") {
    using clock = std::chrono::steady_clock;
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(100));
    const input_file file(folder / "data");
    std::mutex mutex;
    std::condition_variable changed;
    bool entered = false;
    bool released = false;
    const seam::scoped_failure_hook hook([&](seam::call, std::string_view) {
        std::unique_lock lock(mutex);
        entered = true;
        changed.notify_all();
        changed.wait(lock, [&] { return released; });
        return seam::injected_failure{};
    });
    std::chrono::nanoseconds waited{};
    std::thread reader([&] {
        std::array<std::byte, 100> bytes{};
        waited = file.read(0, bytes);
    });
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return entered; });
    const auto begin = clock::now();
    // the read hangs between these two times, however the threads are scheduled
    while (clock::now() - begin < std::chrono::milliseconds(1)) {
    }
    const auto end = clock::now();
    released = true;
    lock.unlock();
    changed.notify_all();
    reader.join();
    CHECK(waited > (end - begin) / 2);  // the thread's CPU time, by another clock, does not count
}

TEST_CASE("file: several threads read one file at the same time") {
    const temporary_folder folder;
    const auto content = pattern_bytes(100'000);
    write_bytes(folder / "data", content);
    const input_file file(folder / "data");
    std::array<bool, 4> equal{};
    std::vector<std::thread> threads;
    threads.reserve(equal.size());
    for (std::size_t index = 0; index < equal.size(); ++index) {
        threads.emplace_back([&, index] {
            bool all = true;
            std::array<std::byte, 1'000> bytes{};
            for (std::size_t offset = index; offset + bytes.size() <= content.size(); offset += 999) {
                file.read(offset, bytes);
                all = all && std::memcmp(bytes.data(), content.data() + offset, bytes.size()) == 0;
                file.check_unchanged();
                file.check_unchanged(std::chrono::microseconds(1), std::chrono::steady_clock::now());
            }
            equal[index] = all;
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    for (const bool all : equal)
        CHECK(all);
}
