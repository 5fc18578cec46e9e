// For files written by h5py, the tool's HDF5 child process must report the same as libhdf5 in this process.
// Exits with 77 (skipped) if the distribution's Python has no h5py.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "formats/hdf5_library.hpp"
#include "pinflow/error.hpp"
#include "src/cli/hdf5_child.hpp"
#include "src/core/memory_limits.hpp"
#include "tests/cli_helpers.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_h5py.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using namespace pinflow::cli;
using npy_bytes::read_file;
using pinflow::input_file;
using pinflow::detail::hdf5_description;
using pinflow::detail::hdf5_storage;

unsigned cases_run = 0;

int run_program(std::vector<std::string> arguments) {
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

constexpr const char* script = "hdf5_metadata_files.py";

/// The files, written once for all tests. One has a million chunks, of which one was written; libhdf5 takes
/// more than half a second for it.
const temporary_folder& files() {
    static const temporary_folder folder;
    static const int status = run_h5py(script, {"write", folder.path().string()});
    static const int slow_status =
        run_program({"/usr/bin/python3", "-c",
                     "import h5py, sys\n"
                     "with h5py.File(sys.argv[1], 'w') as file:\n"
                     "    file.create_dataset('slow', (1 << 20,), 'u1', chunks=(1,))[5] = 1\n",
                     folder / "slow.h5"});
    REQUIRE(status == 0);
    REQUIRE(slow_status == 0);
    return folder;
}

std::vector<std::vector<std::string>> lines_of(const std::string& name) {
    std::vector<std::vector<std::string>> lines;
    std::ifstream file(files() / name);
    for (std::string line; std::getline(file, line);) {
        std::vector<std::string>& parts = lines.emplace_back(1);
        for (const char character : line) {
            if (character == '\t')
                parts.emplace_back();
            else
                parts.back() += character;
        }
    }
    return lines;
}

hdf5_child_options tool() {
    hdf5_child_options options;
    options.program = PINFLOW_TOOL;
    return options;
}

/// What `ask` throws: its type and its sentence.
template <typename Ask>
std::string thrown(Ask ask) {
    try {
        ask();
    } catch (const pinflow::system_failure& failure) {
        return fmt::format("system_failure {}: {}", failure.code().value(), failure.what());
    } catch (const pinflow::format_error& failure) {
        return fmt::format("format_error: {}", failure.what());
    } catch (const pinflow::unsupported& failure) {
        return fmt::format("unsupported: {}", failure.what());
    } catch (const pinflow::invalid_argument& failure) {
        return fmt::format("invalid_argument: {}", failure.what());
    } catch (const pinflow::data_changed& failure) {
        return fmt::format("data_changed: {}", failure.what());
    }
    return "nothing";
}

// ---- other processes --------------------------------------------------------------------------------------

/// The fields of a process in /proc after its name: state, parent, ...; empty if it is gone.
std::vector<std::string> status_of(::pid_t process) {
    const std::string path = fmt::format("/proc/{}/stat", process);
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    std::istringstream words(line.substr(std::min(line.rfind(')') + 2, line.size())));
    return {std::istream_iterator<std::string>(words), {}};
}

/// The first child of a process; -1 when it has none.
::pid_t child_of(::pid_t parent) {
    for (const auto& entry : fs::directory_iterator("/proc")) {
        const std::string name = entry.path().filename().string();
        if (name.find_first_not_of("0123456789") != name.npos) continue;
        const auto status = status_of(std::stoi(name));
        if (status.size() > 1 && status[1] == std::to_string(parent)) return std::stoi(name);
    }
    return -1;
}

/// The CPU time of a process in clock ticks.
long computed(::pid_t process) {
    const auto status = status_of(process);
    return status.size() > 12 ? std::stol(status[11]) + std::stol(status[12]) : 0;
}

/// Waits until `condition` holds. @return false when it does not within a minute.
template <typename Condition>
bool comes_true(Condition condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!condition()) {
        if (std::chrono::steady_clock::now() > until) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

}  // namespace

// ---- the same answers -------------------------------------------------------------------------------------

TEST_CASE("cli hdf5: a child describes every dataset as libhdf5 does in this process, and reads its rows") {
    ++cases_run;
    hdf5_in_child access(tool());
    std::map<std::string, std::shared_ptr<const input_file>> opened;
    unsigned compared = 0;
    unsigned read = 0;
    for (const auto& line : lines_of("datasets.txt")) {
        REQUIRE(line.size() == 9);
        CAPTURE(line[0]);
        CAPTURE(line[1]);
        auto& file = opened[line[0]];
        if (!file) file = std::make_shared<const input_file>(files() / line[0]);
        const hdf5_description description = access.describe(*file, line[1]);
        CHECK((description == pinflow::detail::describe_hdf5_dataset(*file, line[1])));
        ++compared;
        if (description.storage != hdf5_storage::library) continue;
        const auto reader = access.reader(file, description);
        std::string rows(payload_bytes(description), '?');
        const std::uint64_t row_count = description.shape.empty() ? 1 : description.shape.front();
        reader(0, row_count, std::as_writable_bytes(std::span(rows)));
        CHECK((rows == read_file(files() / (line[8] + ".raw"))));
        const std::size_t row_bytes = rows.size() / row_count;
        std::string last(row_bytes, '?');
        reader(row_count - 1, 1, std::as_writable_bytes(std::span(last)));
        CHECK((last == rows.substr(rows.size() - row_bytes)));
        const auto past_end = [&] { reader(row_count, 1, std::as_writable_bytes(std::span(last))); };
        CHECK_THROWS_AS(past_end(), pinflow::invalid_argument);
        ++read;
    }
    CHECK(compared > 50);
    CHECK(read > 2);
}

TEST_CASE("cli hdf5: a child refuses the same datasets as libhdf5 in this process, in the same words") {
    ++cases_run;
    hdf5_in_child access(tool());
    unsigned compared = 0;
    for (const auto& line : lines_of("refused.txt")) {
        CAPTURE(line[0]);
        CAPTURE(line[1]);
        const input_file file(files() / line[0]);
        const std::string sentence = thrown([&] { access.describe(file, line[1]); });
        CHECK(sentence == thrown([&] { pinflow::detail::describe_hdf5_dataset(file, line[1]); }));
        CHECK(sentence != "nothing");
        ++compared;
    }
    CHECK(compared > 10);
    const std::string none = files() / "datasets.txt";
    CHECK(thrown([&] { access.list(input_file(none)); }) ==
          thrown([&] { pinflow::detail::list_hdf5_datasets(input_file(none)); }));
}

TEST_CASE("cli hdf5: a child lists the same datasets as libhdf5 in this process") {
    ++cases_run;
    hdf5_in_child access(tool());
    for (const auto& line : lines_of("listed.txt")) {
        CAPTURE(line[0]);
        const input_file file(files() / line[0]);
        const auto listed = access.list(file);
        const auto expected = pinflow::detail::list_hdf5_datasets(file);
        CHECK((pinflow::detail::serialize(listed) == pinflow::detail::serialize(expected)));
        CHECK(listed.size() == line.size() - 1);
    }
}

TEST_CASE("cli hdf5: threads share a child, and the reader of a dataset") {
    ++cases_run;
    hdf5_in_child access(tool());
    const auto file = std::make_shared<const input_file>(files() / "library.h5");
    const hdf5_description description = access.describe(*file, "scaleoffset");
    REQUIRE(description.storage == hdf5_storage::library);
    const auto reader = access.reader(file, description);
    const std::uint64_t row_count = description.shape.front();
    std::string rows(payload_bytes(description), '?');
    reader(0, row_count, std::as_writable_bytes(std::span(rows)));
    const std::size_t row_bytes = rows.size() / row_count;
    std::atomic<unsigned> wrong = 0;
    {
        std::vector<std::jthread> threads;
        for (unsigned thread = 0; thread < 4; ++thread) {
            threads.emplace_back([&, thread] {
                for (unsigned time = 0; time < 50; ++time) {
                    const std::uint64_t row = (time * 7 + thread) % row_count;
                    std::string one(row_bytes, '?');
                    reader(row, 1, std::as_writable_bytes(std::span(one)));
                    if (one != rows.substr(row * row_bytes, row_bytes)) ++wrong;
                    if (access.describe(*file, "scaleoffset") != description) ++wrong;
                }
            });
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE("cli hdf5: a child opens a file by the name of a descriptor, which it does not have") {
    ++cases_run;
    const int descriptor = ::open((files() / "library.h5").c_str(), O_RDONLY | O_CLOEXEC);
    REQUIRE(descriptor != -1);
    const input_file by_descriptor(fmt::format("/proc/self/fd/{}", descriptor));
    hdf5_in_child access(tool());
    CHECK(access.describe(by_descriptor, "scaleoffset") ==
          access.describe(input_file(files() / "library.h5"), "scaleoffset"));
    ::close(descriptor);
}

TEST_CASE("cli hdf5: a child refuses a file that is not the one that was opened") {
    ++cases_run;
    const temporary_folder folder;
    const std::string path = folder / "a.h5";
    fs::copy_file(files() / "library.h5", path);
    const auto opened = std::make_shared<const input_file>(path);
    hdf5_in_child access(tool());
    const hdf5_description description = access.describe(*opened, "scaleoffset");
    // the same bytes, but another file
    fs::copy_file(files() / "library.h5", folder / "b.h5");
    fs::rename(folder / "b.h5", path);
    const std::string quoted = "'" + path + "'";
    for (const std::string& sentence :
         {thrown([&] { access.list(*opened); }), thrown([&] { access.describe(*opened, "scaleoffset"); }),
          thrown([&] { access.reader(opened, description); })}) {
        CAPTURE(sentence);
        CHECK(contains_all(sentence, {"data_changed: ", quoted, "while it was opened"}));
    }
    fs::remove(path);
    CHECK(contains_all(thrown([&] { access.list(*opened); }),
                       {"system_failure 2: ", "cannot open " + quoted, "No such file"}));
}

// ---- the process ------------------------------------------------------------------------------------------

TEST_CASE("cli hdf5: a child runs under limits, and has only the descriptors that it needs") {
    ++cases_run;
    // more descriptors than the child may have open: it inherits them from this process, and must close them
    std::vector<int> inherited(40);
    for (int& descriptor : inherited)
        descriptor = ::open("/dev/null", O_RDONLY);
    hdf5_child child(tool());
    for (const int descriptor : inherited)
        ::close(descriptor);
    const input_file file(files() / "library.h5");
    CHECK(!child.ask({hdf5_question::list, file.path(), file.identity(), {}}).empty());
    std::map<std::string, std::string> limits;
    std::ifstream lines(fmt::format("/proc/{}/limits", child.process()));
    for (std::string line; std::getline(lines, line);)
        limits[line.substr(0, line.find("  "))] = line.substr(std::min<std::size_t>(26, line.size()));
    const auto soft = [&](const std::string& name) { return limits[name].substr(0, limits[name].find(' ')); };
    CHECK(soft("Max core file size") == "0");
    CHECK(soft("Max file size") == "0");
    CHECK(soft("Max open files") == "32");
    if (sanitized) {
        CHECK(soft("Max address space") == "unlimited");
    } else {
        const std::uint64_t limit = std::stoull(soft("Max address space"));
        CHECK(limit <= max_hdf5_memory_bytes);
        CHECK(limit >= max_hdf5_memory_bytes / 128);
        // three quarters of the available memory if that is less than the maximum
        if (pinflow::detail::read_available_memory().size_bytes > max_hdf5_memory_bytes * 2)
            CHECK(limit == max_hdf5_memory_bytes);
    }
    const auto seconds = soft("Max cpu time");
    REQUIRE(seconds.find_first_not_of("0123456789") == seconds.npos);
    CHECK(std::stol(seconds) >= max_hdf5_cpu_time.count());
    CHECK(std::stol(seconds) <= max_hdf5_cpu_time.count() + 10);
    // the limit is raised for each request
    const input_file slow(files() / "slow.h5");
    std::string now = seconds;
    for (int time = 0; time < 1000 && now == seconds;
         ++time) {  // until the child has used a second of CPU time
        child.ask({hdf5_question::describe, slow.path(), slow.identity(), "slow"});
        std::ifstream again(fmt::format("/proc/{}/limits", child.process()));
        std::string line;
        while (std::getline(again, line) && !line.starts_with("Max cpu time")) {
        }
        now = line.substr(26, line.find(' ', 26) - 26);
    }
    CHECK(std::stol(now) > std::stol(seconds));
}

TEST_CASE("cli hdf5: a child that computes ends when the tool is killed") {
    ++cases_run;
    REQUIRE(::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);  // orphans become our children
    const std::string slow = (files() / "slow.h5").string() + ":slow";
    for (const int signal : {SIGKILL, SIGINT, SIGTERM}) {
        CAPTURE(signal);
        const char* const arguments[] = {PINFLOW_TOOL, "inspect", slow.c_str(), nullptr};
        ::pid_t process = -1;
        REQUIRE(::posix_spawn(&process, PINFLOW_TOOL, nullptr, nullptr, const_cast<char**>(arguments),
                              environ) == 0);
        ::pid_t child = -1;
        REQUIRE(comes_true([&] { return (child = child_of(process)) != -1; }));
        REQUIRE(comes_true([&] { return computed(child) >= 10; }));
        REQUIRE(::kill(process, signal) == 0);
        int status = 0;
        REQUIRE(::waitpid(process, &status, 0) == process);
        REQUIRE(WIFSIGNALED(status));
        REQUIRE(::waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 2);  // not 0: it has sent no answer
    }
    ::prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0);
}

TEST_CASE("cli hdf5: the hidden command of the child works only for the tool") {
    ++cases_run;
    cli::check_fails(2, {"hdf5-child"}, {"there is no command 'hdf5-child'"});
    cli::check_fails(2, {"hdf5-child", "--help"});
    CHECK(run_tool({"--help"}).output.find("hdf5") == std::string::npos);
    // descriptor 3 is not a socket
    CHECK(run_program({"/bin/sh", "-c", "exec \"$0\" hdf5-child 3</dev/null 2>/dev/null", PINFLOW_TOOL}) ==
          2);
    // descriptor 3 is a socket, but its other side sends bytes that are no request
    CHECK(run_program({"/usr/bin/python3", "-c",
                       "import os, socket, subprocess, sys\n"
                       "os.dup2(0, 3)\n"  // so that neither end of the pair becomes 3
                       "ours, its = socket.socketpair()\n"
                       "os.dup2(its.fileno(), 3)\n"
                       "its.close()\n"
                       "child = subprocess.Popen([sys.argv[1], 'hdf5-child'], pass_fds=[3])\n"
                       "ours.sendall(b'x' * 200)\n"
                       "sys.exit(child.wait())\n",
                       PINFLOW_TOOL}) == 0);
}

// ---- the tool ---------------------------------------------------------------------------------------------

TEST_CASE("cli hdf5: inspects and streams datasets of HDF5 files") {
    ++cases_run;
    const std::string library = files() / "library.h5";
    const auto named = cli::run_json({"inspect", library + ":scaleoffset"});
    CHECK(named["format"] == "hdf5");
    CHECK(named["dtype"] == "<i4");
    CHECK(named["mappable"] == false);
    CHECK(named["reason"].get<std::string>().starts_with("it is read by libhdf5: "));
    const auto streamed = cli::run_json({"stream", library + ":scaleoffset", "--batch", "3"});
    CHECK(streamed["bytes"] == named["size_bytes"]);
    cli::check_fails(1, {"inspect", library + ":nothing"},
                     {"there is nothing called 'nothing' in it; it has '"});
    cli::check_fails(1, {"stream", library}, {"without a name"});
    // errors give a relative path as it was given
    const auto sentence = [&](const std::string& path) {
        return run_tool({"inspect", path + ":nothing"}).errors;
    };
    const fs::path before = fs::current_path();
    fs::current_path(files().path());
    CHECK(sentence("library.h5").find("cannot open 'library.h5': ") != std::string::npos);
    CHECK(sentence("./library.h5").find("cannot open './library.h5': ") != std::string::npos);
    fs::current_path(before);
}

TEST_CASE("cli hdf5: damaged chunks for which libhdf5 would invent elements are a one-line error") {
    ++cases_run;
    const auto lines = lines_of("damaged.txt");
    CHECK(lines.size() > 6);
    for (const auto& line : lines) {
        CAPTURE(line[1]);
        if (line[3] == "twice" && sanitized) continue;
        const std::string dataset = fmt::format("{}:{}", (files() / line[0]).string(), line[1]);
        cli::check_fails(1, {"stream", dataset}, {"cannot read the dataset", "its chunk at (0, 0)", line[2]});
        cli::check_fails(1, {"stream", dataset, "--batch", "1", "--order", "shuffled"}, {line[2]});
    }
}

TEST_CASE("cli hdf5: works with standard descriptors closed, SIGCHLD ignored and signals blocked") {
    ++cases_run;
    const std::string library = (files() / "library.h5").string() + ":scaleoffset";
    CHECK(run_program({"/bin/sh", "-c", "exec \"$0\" inspect \"$1\" <&- 2>&- >/dev/null", PINFLOW_TOOL,
                       library}) == 0);
    // the tool inherits an ignored SIGCHLD from such a parent
    CHECK(run_program({"/usr/bin/python3", "-c",
                       "import os, signal, sys\n"
                       "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
                       "signal.pthread_sigmask(signal.SIG_SETMASK, range(1, 32))\n"
                       "os.dup2(os.open('/dev/null', os.O_WRONLY), 1)\n"
                       "os.execv(sys.argv[1], ['pinflow', 'stream', sys.argv[2]])\n",
                       PINFLOW_TOOL, library}) == 0);
}

int main(int argc, char** argv) {
    return main_with_h5py(argc, argv, script, cases_run);
}
