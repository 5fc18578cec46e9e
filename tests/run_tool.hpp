#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/npy_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

/// The result of one run of the tool.
struct tool_result {
    int status = -1;  ///< exit status; 128 + N after signal N
    std::string output;
    std::string errors;
    double seconds = 0;
    std::uint64_t peak_bytes = 0;  ///< the largest resident set size

    /// Whether the errors are one line as the tool promises it.
    bool one_error_line() const {
        return errors.starts_with("pinflow: error: ") && errors.find('\n') == errors.size() - 1;
    }
};

/// How the tool is run: its standard output and its limits.
struct tool_surroundings {
    std::string output_path;              ///< standard output goes there instead
    bool output_closed = false;           ///< standard output is not open at all
    bool output_pipe_closed = false;      ///< standard output is a pipe that nobody reads any more
    std::uint64_t max_address_bytes = 0;  ///< a limit on the address space, unless 0
    std::uint64_t max_file_bytes = 0;     ///< a limit on the size of each file it writes, unless 0
    std::uint64_t max_descriptors = 0;    ///< a limit on the files it has open, unless 0
};

/// Runs the built tool as a child process, for the tests of its interface.
inline tool_result run_tool(const std::vector<std::string>& arguments,
                            const tool_surroundings& surroundings = {}) {
    const temporary_folder folder;
    const std::string errors_path = folder / "errors";
    const std::string output_path =
        surroundings.output_path.empty() ? std::string(folder / "output") : surroundings.output_path;
    std::vector<char*> argv{const_cast<char*>(PINFLOW_TOOL)};
    for (const std::string& argument : arguments) {
        argv.push_back(const_cast<char*>(argument.c_str()));
    }
    argv.push_back(nullptr);
    int unread[2] = {-1, -1};
    if (surroundings.output_pipe_closed) {
        if (::pipe(unread) != 0) throw std::runtime_error("cannot make a pipe");
        ::close(unread[0]);
    }

    const auto before = std::chrono::steady_clock::now();
    const pid_t child = ::fork();
    if (child == -1) throw std::runtime_error("cannot fork");
    if (child == 0) {  // only async-signal-safe calls from here on
        const int flags = O_WRONLY | O_CREAT;
        const int output =
            surroundings.output_pipe_closed ? unread[1] : ::open(output_path.c_str(), flags, 0600);
        const int errors = ::open(errors_path.c_str(), flags, 0600);
        if (::dup2(output, STDOUT_FILENO) == -1 || ::dup2(errors, STDERR_FILENO) == -1) ::_exit(126);
        if (surroundings.output_closed) ::close(STDOUT_FILENO);
        ::close(errors);
        ::close(output);
        if (surroundings.max_address_bytes > 0) {
            const ::rlimit limit{surroundings.max_address_bytes, surroundings.max_address_bytes};
            if (::setrlimit(RLIMIT_AS, &limit) != 0) ::_exit(126);
        }
        if (surroundings.max_file_bytes > 0) {
            const ::rlimit limit{surroundings.max_file_bytes, surroundings.max_file_bytes};
            if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(126);
        }
        if (surroundings.max_descriptors > 0) {
            const ::rlimit limit{surroundings.max_descriptors, surroundings.max_descriptors};
            if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) ::_exit(126);
        }
        ::execv(argv[0], argv.data());
        ::_exit(127);
    }
    if (unread[1] != -1) ::close(unread[1]);
    int status = 0;
    ::rusage usage{};
    if (::wait4(child, &status, 0, &usage) != child) throw std::runtime_error("cannot wait for the tool");

    tool_result result;
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
    result.peak_bytes = static_cast<std::uint64_t>(usage.ru_maxrss) << 10;
    result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (surroundings.output_path.empty()) result.output = npy_bytes::read_file(output_path);
    result.errors = npy_bytes::read_file(errors_path);
    return result;
}
