#pragma once

#include <doctest/doctest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

/// Runs one of the scripts in tests with the distribution's Python. @return its exit status; 127 when there
/// is no Python.
inline int run_h5py(const char* script, std::vector<std::string> arguments) {
    const std::string path = (std::filesystem::path(__FILE__).parent_path() / script).string();
    arguments.insert(arguments.begin(), {"/usr/bin/python3", path});
    std::vector<char*> pointers;
    pointers.reserve(arguments.size() + 1);
    for (std::string& argument : arguments)
        pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    ::pid_t child = 0;
    if (::posix_spawn(&child, pointers[0], nullptr, nullptr, pointers.data(), environ) != 0) return 127;
    int status = 0;
    if (::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 126;
    return WEXITSTATUS(status);
}

/// What main returns of a test that needs h5py: 77 (skipped) if `script` finds no h5py, or if there is no
/// Python. Each case that runs increments `cases_run`.
inline int main_with_h5py(int argc, char** argv, const char* script, const unsigned& cases_run) {
    doctest::Context context(argc, argv);
    if (const int status = run_h5py(script, {"check"}); status == 77 || status == 127) {
        std::puts("skipped: /usr/bin/python3 with h5py is not installed");
        return 77;
    }
    const int status = context.run();
    if (context.shouldExit()) return status;
    if (cases_run == 0) {
        std::fputs("no test case was run: the filters match none\n", stderr);
        return 1;
    }
    return status;
}
