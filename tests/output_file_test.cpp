#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/output_file.hpp"
#include "src/core/system.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
namespace sys = pinflow::detail::system;
using npy_bytes::read_file;
using npy_bytes::write_file;
using pinflow::detail::output_file;
using sys::call;

/// Whether the file has no name until it is complete, or a temporary name, as on file systems without
/// O_TMPFILE.
enum class until_complete { unnamed, temporary_name };
constexpr std::array both{until_complete::unnamed, until_complete::temporary_name};

/// Makes open_unnamed fail if the file is to have a temporary name. Passes all other calls to `other`.
sys::failure_hook hook_for(until_complete kind, sys::failure_hook other = {}) {
    return [kind, other](call what, std::string_view path) {
        if (what == call::open_unnamed && kind == until_complete::temporary_name) {
            return sys::injected_failure{.error = EOPNOTSUPP};
        }
        return other ? other(what, path) : sys::injected_failure{};
    };
}

std::vector<std::string> names_in(const fs::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
        names.push_back(entry.path().filename().string());
    std::ranges::sort(names);
    return names;
}

using names = std::vector<std::string>;

void write(const fs::path& path, std::string_view text) {
    output_file file(path);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
}

::mode_t mode_of(const fs::path& path) {
    struct ::stat status{};
    REQUIRE(::stat(path.c_str(), &status) == 0);
    return status.st_mode & 07777U;
}

}  // namespace

TEST_CASE("output file: appears complete, and replaces what was there") {
    for (const until_complete kind : both) {
        const temporary_folder folder;
        const fs::path path = folder / "a";
        const sys::scoped_failure_hook hook(hook_for(kind));
        write(path, "first");
        CHECK(read_file(path) == "first");
        write(path, "second");
        CHECK(read_file(path) == "second");
        CHECK(names_in(folder.path()) == names{"a"});
    }
}

TEST_CASE("output file: has no name until it is complete, so that nothing is left of a killed process") {
    const temporary_folder folder;
    if (!folder.has_unnamed_files()) {
        MESSAGE("skipped: this file system has no files without names");
        return;
    }
    write_file(folder / "a", "before");
    output_file file(folder / "a");
    file.write(std::vector<std::byte>(3 << 20));
    CHECK(names_in(folder.path()) == names{"a"});
    CHECK(read_file(folder / "a") == "before");
    file.commit();
    CHECK(read_file(folder / "a").size() == 3 << 20);
}

TEST_CASE("output file: is discarded without a commit") {
    for (const until_complete kind : both) {
        const temporary_folder folder;
        const sys::scoped_failure_hook hook(hook_for(kind));
        write_file(folder / "a", "before");
        {
            output_file file(folder / "a");
            file.write(std::vector<std::byte>(3 << 20));
        }
        CHECK(names_in(folder.path()) == names{"a"});
        CHECK(read_file(folder / "a") == "before");
    }
}

TEST_CASE("output file: a failure in any step leaves what was there, and nothing beside it") {
    for (const until_complete kind : both) {
        const temporary_folder folder;
        if (kind == until_complete::unnamed && !folder.has_unnamed_files()) continue;
        const std::string path = folder / "a";
        std::vector<std::pair<call, int>> cases{{call::write, ENOSPC},
                                                {call::write, EIO},
                                                {call::fsync, EIO},
                                                {call::rename, EIO},
                                                {call::chmod, EPERM}};
        if (kind == until_complete::temporary_name) {
            cases.emplace_back(call::open, EROFS);
        } else {
            cases.emplace_back(call::open_unnamed, EROFS);
            cases.emplace_back(call::link, EPERM);
        }
        for (const auto& [failing, error] : cases) {
            CAPTURE(static_cast<int>(failing));
            write_file(path, "before");
            const sys::scoped_failure_hook hook(hook_for(kind, [&](call what, std::string_view) {
                return sys::injected_failure{what == failing ? error : 0};
            }));
            try {
                write(path, "after");
                FAIL("it was written");
            } catch (const pinflow::system_failure& failure) {
                CHECK(failure.code().value() == error);
                CHECK(std::string(failure.what()).find("'" + path + "'") != std::string::npos);
            }
            CHECK(read_file(path) == "before");
            CHECK(names_in(folder.path()) == names{"a"});
        }
    }
}

TEST_CASE("output file: a failed fsync is final") {
    for (const until_complete kind : both) {
        const temporary_folder folder;
        write_file(folder / "a", "before");
        unsigned syncs = 0;
        const sys::scoped_failure_hook hook(hook_for(kind, [&](call what, std::string_view) {
            return sys::injected_failure{what == call::fsync && ++syncs == 1 ? EIO : 0};
        }));
        output_file file(folder / "a");
        file.write(std::vector<std::byte>(3));
        CHECK_THROWS_AS(file.commit(), pinflow::system_failure);
        CHECK_THROWS_WITH_AS(file.commit(), doctest::Contains("an earlier step"), pinflow::system_failure);
        CHECK(syncs == 1);
        CHECK(read_file(folder / "a") == "before");
        CHECK(names_in(folder.path()) == names{"a"});
    }
}

TEST_CASE("output file: a folder that cannot be made durable is an error, with the file complete") {
    for (const call failing : {call::open, call::fsync}) {
        const temporary_folder folder;
        const sys::scoped_failure_hook hook([&](call what, std::string_view path) {
            return sys::injected_failure{what == failing && path == folder.path().string() ? EIO : 0};
        });
        CHECK_THROWS_AS(write(folder / "a", "after"), pinflow::system_failure);
        CHECK(read_file(folder / "a") == "after");
        CHECK(names_in(folder.path()) == names{"a"});
    }
}

TEST_CASE("output file: the data is synced before the rename, and the folder after it") {
    for (const until_complete kind : both) {
        const temporary_folder folder;
        if (kind == until_complete::unnamed && !folder.has_unnamed_files()) continue;
        std::vector<call> calls;
        {
            const sys::scoped_failure_hook hook(hook_for(kind, [&](call what, std::string_view) {
                if (what != call::stat && what != call::close) calls.push_back(what);
                return sys::injected_failure{};
            }));
            write(folder / "a", "after");
        }
        using enum sys::call;
        const std::vector<sys::call> expected =
            kind == until_complete::unnamed
                ? std::vector{open_unnamed,      sys::call::write, fsync, sys::call::link,
                              sys::call::rename, sys::call::open,  fsync}
                : std::vector{sys::call::open,   sys::call::write, fsync,
                              sys::call::rename, sys::call::open,  fsync};
        CHECK((calls == expected));
    }
}

TEST_CASE("output file: a temporary name that a killed process left is passed over, but not for ever") {
    for (const until_complete kind : both) {
        const temporary_folder folder;
        if (kind == until_complete::unnamed && !folder.has_unnamed_files()) continue;
        const call naming = kind == until_complete::unnamed ? call::link : call::open;
        unsigned taken = 0;
        {
            const sys::scoped_failure_hook hook(hook_for(kind, [&](call what, std::string_view) {
                return sys::injected_failure{what == naming && ++taken <= 3 ? EEXIST : 0};
            }));
            write(folder / "a", "after");
        }
        CHECK(taken >= 4);
        CHECK(read_file(folder / "a") == "after");
        const sys::scoped_failure_hook hook(hook_for(kind, [&](call what, std::string_view) {
            return sys::injected_failure{what == naming ? EEXIST : 0};
        }));
        CHECK_THROWS_AS(write(folder / "b", "after"), pinflow::system_failure);
        CHECK(names_in(folder.path()) == names{"a"});
    }
}

TEST_CASE("output file: short writes are continued") {
    const temporary_folder folder;
    const sys::scoped_failure_hook hook([](call, std::string_view) { return sys::injected_failure{0, 7}; });
    const std::string text(1000, 'x');
    write(folder / "a", text);
    CHECK(read_file(folder / "a") == text);
}

TEST_CASE("output file: takes the permissions of the old file, or the usual permissions if there is none") {
    const ::mode_t before = ::umask(027);
    for (const until_complete kind : both) {
        const temporary_folder folder;
        const sys::scoped_failure_hook hook(hook_for(kind));
        write(folder / "new", "");
        CHECK(mode_of(folder / "new") == 0640);
        write_file(folder / "old", "before");
        REQUIRE(::chmod((folder / "old").c_str(), 0604) == 0);
        write(folder / "old", "after");
        CHECK(mode_of(folder / "old") == 0604);
    }
    ::umask(before);
}

TEST_CASE("output file: a temporary file is no more readable than the file that it replaces") {
    const temporary_folder folder;
    write_file(folder / "a", "before");
    REQUIRE(::chmod((folder / "a").c_str(), 0600) == 0);
    ::mode_t while_written = 0;
    const sys::scoped_failure_hook hook(
        hook_for(until_complete::temporary_name, [&](call what, std::string_view) {
            if (what == call::chmod) while_written = mode_of(folder / names_in(folder.path()).front());
            return sys::injected_failure{};
        }));
    write(folder / "a", "after");
    CHECK(while_written == 0600);
}

TEST_CASE("output file: a symbolic link is replaced, not followed") {
    for (const until_complete kind : both) {
        const temporary_folder folder;
        const sys::scoped_failure_hook hook(hook_for(kind));
        write_file(folder / "target", "before");
        fs::create_symlink("target", folder / "link");
        write(folder / "link", "after");
        CHECK(read_file(folder / "target") == "before");
        CHECK_FALSE(fs::is_symlink(folder / "link"));
        CHECK(read_file(folder / "link") == "after");
    }
}

TEST_CASE("output file: refuses to replace what is not a regular file") {
    const temporary_folder folder;
    const std::string pipe = folder / "pipe";
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    fs::create_symlink("/dev/null", folder / "link");
    fs::create_directory(folder / "inner");
    for (const std::string& path :
         {pipe, std::string("/dev/null"), (folder / "link").string(), (folder / "inner").string(),
          (folder / "inner/").string(), (folder / "absent/").string(), (folder / "absent/a").string(),
          std::string()}) {
        CAPTURE(path);
        CHECK_THROWS_WITH_AS(output_file{path}, doctest::Contains(("cannot write '" + path + "': ").c_str()),
                             pinflow::system_failure);
    }
    CHECK(names_in(folder.path()) == names{"inner", "link", "pipe"});
    CHECK(fs::is_empty(folder / "inner"));
}
