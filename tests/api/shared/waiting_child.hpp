#pragma once

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

/// A child process that calls `function`, says whether it returned true, and then waits to be killed.
class waiting_child {
 public:
    template <typename Function>
    explicit waiting_child(Function function) {
        int ends[2] = {-1, -1};
        REQUIRE(::pipe(ends) == 0);
        process_ = ::fork();
        REQUIRE(process_ != -1);
        if (process_ == 0) {
            ::close(ends[0]);
            bool held = false;
            try {
                held = function();
            } catch (...) {
                ::_exit(1);
            }
            if (::write(ends[1], held ? "y" : "n", 1) != 1) ::_exit(1);
            for (;;)
                ::pause();
        }
        ::close(ends[1]);
        char byte = 0;
        is_ready_ = ::read(ends[0], &byte, 1) == 1 && byte == 'y';
        ::close(ends[0]);
    }
    waiting_child(const waiting_child&) = delete;
    waiting_child& operator=(const waiting_child&) = delete;
    ~waiting_child() { kill(); }

    /// Whether `function` returned true.
    bool is_ready() const { return is_ready_; }
    void kill() {
        if (process_ == -1) return;
        ::kill(process_, SIGKILL);
        ::waitpid(process_, nullptr, 0);
        process_ = -1;
    }

 private:
    ::pid_t process_ = -1;
    bool is_ready_ = false;
};
