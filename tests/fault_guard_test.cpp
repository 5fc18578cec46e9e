#include "pinflow/fault_guard.hpp"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "loader/row_reader.hpp"
#include "loader/stage_seam.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/core/fault_guard.hpp"
#include "src/core/system.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;

namespace {

/// The exit status of a successful child process. Each test runs in a child, because the handler belongs to
/// the process, and a fault may end it.
constexpr int as_expected = 0;

/// The wait status of a child process that runs `body`.
int status_of_child(const std::function<int()>& body) {
    const ::pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        ::alarm(60);
        ::signal(SIGBUS, SIG_DFL);  // a sanitizer has a handler of its own
        int result = 100;
        try {
            result = body();
        } catch (...) {
            result = 101;
        }
        ::_exit(result);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    return status;
}

void check_child(const std::function<int()>& body) {
    const int status = status_of_child(body);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == as_expected);
}

/// A page of a file that is not there any more: touching it is a SIGBUS.
const volatile std::byte* lost_page() {
    const int file = ::memfd_create("pinflow-test", MFD_CLOEXEC);
    if (file == -1 || ::ftruncate(file, 4096) != 0) throw std::runtime_error("no memfd");
    void* const page = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED || ::ftruncate(file, 0) != 0) throw std::runtime_error("no mapping");
    ::close(file);
    return static_cast<const volatile std::byte*>(page);
}

bool touch_guarded(const volatile std::byte* page) {
    return detail::run_guarded([page] { static_cast<void>(*page); });
}

volatile ::sig_atomic_t users_calls = 0;
::sigjmp_buf users_end;

void users_handler(int) {
    users_calls = users_calls + 1;
    ::siglongjmp(users_end, 1);
}

void users_handler_with_info(int, ::siginfo_t* info, void*) {
    users_calls = users_calls + (info->si_code > 0 && info->si_addr != nullptr ? 1 : 100);
    ::siglongjmp(users_end, 1);
}

void install(void (*handler)(int)) {
    struct ::sigaction action{};
    action.sa_handler = handler;
    ::sigaction(SIGBUS, &action, nullptr);
}

/// Whether the user's handler is called for a fault outside of guarded copies.
bool users_handler_gets(const volatile std::byte* page) {
    const int before = users_calls;
    if (sigsetjmp(users_end, 1) == 0) static_cast<void>(*page);
    return users_calls == before + 1;
}

}  // namespace

TEST_CASE("fault guard: a lost page ends the copy that touches it, as often as that happens") {
    check_child([] {
        if (fault_guard_active()) return 1;
        install_fault_guard();
        install_fault_guard();
        if (!fault_guard_active()) return 2;
        const auto* const page = lost_page();
        for (int i = 0; i < 1000; ++i) {
            if (touch_guarded(page)) return 3;
        }
        bool ran = false;
        if (!detail::run_guarded([&] { ran = true; }) || !ran) return 4;
        return as_expected;
    });
}

TEST_CASE("fault guard: several threads fault side by side, each by itself") {
    check_child([] {
        install_fault_guard();
        const auto* const page = lost_page();
        std::array<int, 8> failed{};
        {
            std::vector<std::jthread> threads;
            for (int& count : failed) {
                threads.emplace_back([&count, page] {
                    for (int i = 0; i < 500; ++i)
                        count += touch_guarded(page) ? 0 : 1;
                });
            }
        }
        for (const int count : failed) {
            if (count != 500) return 1;
        }
        return as_expected;
    });
}

TEST_CASE("fault guard: a fault outside of a copy ends the process, as without it") {
    const int status = status_of_child([] {
        install_fault_guard();
        static_cast<void>(*lost_page());
        return as_expected;
    });
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGBUS);
}

TEST_CASE("fault guard: a SIGBUS that a process sends acts as without the guard") {
    int status = status_of_child([] {
        install_fault_guard();
        ::raise(SIGBUS);
        return as_expected;
    });
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGBUS);
    status = status_of_child([] {
        install(SIG_IGN);
        install_fault_guard();
        ::raise(SIGBUS);
        return as_expected;
    });
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == as_expected);
}

TEST_CASE("fault guard: an earlier handler gets all faults but those of guarded copies") {
    check_child([] {
        install(users_handler);
        install_fault_guard();
        const auto* const page = lost_page();
        for (int i = 0; i < 10; ++i) {
            if (touch_guarded(page) || users_calls != i) return 1;
            if (!users_handler_gets(page)) return 2;
        }
        return as_expected;
    });
    check_child([] {
        struct ::sigaction action{};
        action.sa_sigaction = users_handler_with_info;
        action.sa_flags = SA_SIGINFO;
        ::sigaction(SIGBUS, &action, nullptr);
        install_fault_guard();
        const auto* const page = lost_page();
        if (touch_guarded(page) || users_calls != 0) return 1;
        return users_handler_gets(page) ? as_expected : 2;
    });
}

namespace {

struct ::sigaction wrapped_action;

/// Calls the guard's handler, as a runtime does that takes signals first.
void call_wrapped(int signal, ::siginfo_t* info, void* context) {
    wrapped_action.sa_sigaction(signal, info, context);
}

}  // namespace

TEST_CASE("fault guard: a thread that faulted can fault again, although a wrapper blocks all signals") {
    check_child([] {
        install_fault_guard();
        struct ::sigaction wrapper{};
        wrapper.sa_sigaction = call_wrapped;
        wrapper.sa_flags = SA_SIGINFO;
        ::sigfillset(&wrapper.sa_mask);
        if (::sigaction(SIGBUS, &wrapper, &wrapped_action) != 0) return 1;
        const volatile std::byte* const page = lost_page();
        for (int i = 0; i < 3; ++i) {
            if (touch_guarded(page)) return 2;
        }
        return as_expected;
    });
}

TEST_CASE("fault guard: a handler that is installed later is detected") {
    check_child([] {
        install_fault_guard();
        install(users_handler);
        if (fault_guard_active()) return 1;
        install_fault_guard();  // does not take it away
        if (fault_guard_active()) return 2;
        return users_handler_gets(lost_page()) ? as_expected : 3;
    });
}

TEST_CASE("fault guard: a failure to install the handler is an error") {
    check_child([] {
        const detail::system::scoped_failure_hook hook([](detail::system::call what, std::string_view) {
            return detail::system::injected_failure{.error =
                                                        what == detail::system::call::sigaction ? EINVAL : 0};
        });
        try {
            install_fault_guard();
        } catch (const system_failure& failure) {
            return failure.code().value() == EINVAL && !fault_guard_active() ? as_expected : 1;
        }
        return 2;
    });
}

TEST_CASE("fault guard: rows are read right with any handler, and a truncated file is an error") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(4096, 64).view());
    // the user's handler: 0: none, 1: installed before the guard's, 2: installed after it
    for (const int handler : {0, 1, 2}) {
        CAPTURE(handler);
        check_child([&] {
            if (handler == 1) install(users_handler);
            install_fault_guard();
            if (handler == 2) install(users_handler);
            const auto path = folder / "copy.npy";
            std::filesystem::copy_file(folder / "rows.npy", path,
                                       std::filesystem::copy_options::overwrite_existing);
            const detail::row_reader reader(open_npy(path), detail::row_access::memory);
            std::vector<std::uint64_t> ids(4096);
            std::iota(ids.rbegin(), ids.rend(), 0);
            std::vector<std::uint64_t> rows(ids.size() * 64);
            auto* const target = reinterpret_cast<std::byte*>(rows.data());
            detail::read_session session;
            reader.read(ids, target, session);
            for (std::size_t i = 0; i < rows.size(); ++i) {
                if (rows[i] != ids[i / 64]) return 1;
            }
            for (const std::uint64_t size : {1'500'000U, 4096U, 100U, 0U}) {
                std::filesystem::resize_file(path, size);
                try {
                    reader.read(ids, target, session);
                    return 2;
                } catch (const data_changed&) {
                }
            }
            return users_calls == 0 ? as_expected : 3;
        });
    }
}

TEST_CASE("fault guard: a file that is truncated or replaced in any stage of a loader is a typed error") {
    const temporary_folder folder;
    const array rows = numbered_rows(4096, 64);
    const auto path = folder / "rows.npy";
    struct change {
        detail::stage where;
        bool replaces;
        int handler;  // the user's: 0: none, 1: installed before the guard's, 2: installed after it
    };
    std::vector<change> changes;
    for (const auto where : {detail::stage::sample, detail::stage::fill, detail::stage::deliver}) {
        for (const bool replaces : {false, true}) {
            for (const int handler : {0, 1, 2})
                changes.push_back({where, replaces, handler});
        }
    }
    for (const change& change : changes) {
        CAPTURE(static_cast<int>(change.where));
        CAPTURE(change.replaces);
        CAPTURE(change.handler);
        write_npy(path, rows.view());
        write_npy(folder / "other.npy", rows.view());
        check_child([&] {
            if (change.handler == 1) install(users_handler);
            install_fault_guard();
            if (change.handler == 2) install(users_handler);
            std::atomic<bool> changed = false;
            const detail::scoped_stage_hook hook([&](detail::stage where, std::uint64_t batch) {
                if (where != change.where || batch != 5 || changed.exchange(true)) return;
                if (change.replaces) {
                    std::filesystem::rename(folder / "other.npy", path);
                } else {
                    std::filesystem::resize_file(path, 4096);
                }
            });
            loader batches({open_npy(path)}, {.device = device::host(),
                                              .batch_rows = 64,
                                              .order = order::shuffled,
                                              .epochs = 3,
                                              .threads = 1});
            try {
                while (batches.next()) {
                }
                return 1;
            } catch (const data_changed& error) {
                if (std::string(error.what()).find("rows.npy") == std::string::npos) return 2;
            }
            if (!changed) return 3;
            return users_calls == 0 ? as_expected : 4;
        });
    }
}
