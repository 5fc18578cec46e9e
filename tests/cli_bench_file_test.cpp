#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "tests/cli_helpers.hpp"
#include "tests/support/temporary_folder.hpp"

// The temporary file of `pinflow bench stream` has no name, so that no signal leaves it.

namespace {

namespace fs = std::filesystem;
using clock = std::chrono::steady_clock;

/// A running tool with its own folder for temporary files. The destructor kills it.
class running_bench {
 public:
    running_bench(const std::string& folder, const cli::arguments& more)
        : folder_(folder), errors_path_(errors_folder_ / "errors") {
        cli::arguments command{PINFLOW_TOOL, "bench", "stream", "--device", "host"};
        command.insert(command.end(), more.begin(), more.end());
        std::vector<char*> argv;
        for (std::string& argument : command)
            argv.push_back(argument.data());
        argv.push_back(nullptr);
        std::string temporary = "TMPDIR=" + folder;
        std::vector<char*> environment{temporary.data()};
        for (char** each = environ; *each != nullptr; ++each) {
            if (!std::string_view(*each).starts_with("TMPDIR=")) environment.push_back(*each);
        }
        environment.push_back(nullptr);
        child_ = ::fork();
        if (child_ == -1) throw std::runtime_error("cannot fork");
        if (child_ != 0) return;
        // only async-signal-safe calls from here on
        for (const int signal : {SIGINT, SIGTERM, SIGHUP})
            std::signal(signal, SIG_DFL);  // it may be ignored in this process
        const int output = ::open("/dev/null", O_WRONLY);
        const int errors = ::open(errors_path_.c_str(), O_WRONLY | O_CREAT, 0600);
        if (::dup2(output, STDOUT_FILENO) == -1 || ::dup2(errors, STDERR_FILENO) == -1) ::_exit(126);
        ::execve(argv[0], argv.data(), environment.data());
        ::_exit(127);
    }
    running_bench(const running_bench&) = delete;
    running_bench& operator=(const running_bench&) = delete;
    ~running_bench() {
        if (ended()) return;
        ::kill(child_, SIGKILL);
        ::waitpid(child_, &status_, 0);
    }

    /// Waits until `condition` holds. @throws runtime_error two minutes after the tool was started, or if the
    /// tool ends first.
    template <typename Condition>
    void wait_until(Condition condition) {
        while (!condition()) {
            if (ended()) throw std::runtime_error("the tool has ended: " + errors());
            wait_a_little();
        }
    }
    void send(int signal) const { REQUIRE(::kill(child_, signal) == 0); }
    /// Waits for its end. @return its status, 128 + N after signal N.
    int status() {
        while (!ended())
            wait_a_little();
        return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
    }
    std::string errors() const { return npy_bytes::read_file(errors_path_); }

    /// The size of the made file; 0 if there is none.
    std::uint64_t made_bytes() const {
        std::error_code failure;
        for (const auto& entry : fs::directory_iterator(process_folder() / "fd", failure)) {
            const std::string file = fs::read_symlink(entry.path(), failure).string();
            if (!file.starts_with(folder_ + "/pinflow-bench-")) continue;
            const std::uint64_t size_bytes = fs::file_size(entry.path(), failure);
            return failure ? 0 : size_bytes;
        }
        return 0;
    }
    /// Whether the made file is mapped, as it is while a loader streams it.
    bool streams() const {
        std::ifstream maps(process_folder() / "maps");
        for (std::string line; std::getline(maps, line);) {
            if (line.find("/pinflow-bench-") != std::string::npos) return true;
        }
        return false;
    }

 private:
    bool ended() {
        if (!ended_) ended_ = ::waitpid(child_, &status_, WNOHANG) == child_;
        return ended_;
    }
    void wait_a_little() const {
        if (clock::now() - start_ > std::chrono::minutes(2))
            throw std::runtime_error("the tool did not get that far within two minutes");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

    fs::path process_folder() const { return fs::path("/proc") / std::to_string(child_); }

    std::string folder_;
    temporary_folder errors_folder_;
    std::string errors_path_;
    clock::time_point start_ = clock::now();
    ::pid_t child_ = -1;
    int status_ = 0;
    bool ended_ = false;
};

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;

}  // namespace

TEST_CASE("bench: a signal while the file is being made ends the tool, and no file is left") {
    for (const int signal : {SIGINT, SIGTERM, SIGKILL}) {
        CAPTURE(signal);
        const temporary_folder folder;
        running_bench bench(folder.path(), {"--table", "2GiB"});
        bench.wait_until([&] { return bench.made_bytes() > mebibyte; });
        CHECK(cli::names_in(folder.path()).empty());
        bench.send(signal);
        CHECK(bench.status() == 128 + signal);
        CHECK(bench.errors().empty());
        CHECK(cli::names_in(folder.path()).empty());
    }
}

TEST_CASE("bench: a signal while the file is being streamed ends the tool, and no file is left") {
    const temporary_folder folder;
    running_bench bench(folder.path(), {"--table", "64MiB", "--epochs", "1000000"});
    bench.wait_until([&] { return bench.made_bytes() > 64 * mebibyte && bench.streams(); });
    bench.send(SIGKILL);
    CHECK(bench.status() == 128 + SIGKILL);
    CHECK(cli::names_in(folder.path()).empty());
}

TEST_CASE("bench: an unusable folder for temporary files is reported in one sentence that names it") {
    const temporary_folder folder;
    const std::string file = folder / "file", long_name = folder / std::string(1000, 'x');
    npy_bytes::write_file(file, "");
    for (const std::string& unusable : {std::string("/nowhere/at/all"), file, long_name}) {
        running_bench bench(unusable, {"--table", "1MiB"});
        CHECK(bench.status() == 1);
        const std::string errors = bench.errors();
        CAPTURE(errors);
        CHECK(
            errors.starts_with("pinflow: error: cannot make a file in '" + unusable + "', the folder for "));
        CHECK(errors.find("(TMPDIR)") != std::string::npos);
        CHECK(std::ranges::count(errors, '\n') == 1);
    }
}
