#pragma once

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

/// Whether `function` returns true in a child process.
template <typename Function>
bool holds_in_child(Function function) {
    const ::pid_t child = ::fork();
    REQUIRE(child != -1);
    if (child == 0) {
        bool held = false;
        try {
            held = function();
        } catch (const std::exception& failure) {
            std::fputs(failure.what(), stderr);
        }
        ::_exit(held ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Whether `function` returns true in a child process that may have `max_descriptors` open, and can raise
/// that to `max_hard_limit` if it is given.
template <typename Function>
bool holds_in_child_with_descriptors(::rlim_t max_descriptors, Function function,
                                     ::rlim_t max_hard_limit = 0) {
    return holds_in_child([&] {
        const ::rlimit limit{max_descriptors, max_hard_limit == 0 ? max_descriptors : max_hard_limit};
        return ::setrlimit(RLIMIT_NOFILE, &limit) == 0 && function();
    });
}
