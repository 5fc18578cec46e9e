#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <new>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/fault_guard.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/hdf5_child.hpp"
#include "src/cli/output.hpp"
#include "tests/crash/injection.hpp"
#include "tests/crash/scenarios.hpp"
#include "tests/npy_bytes.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

/// fail_every_call [--device host|cuda:N] [--scenario TEXT] [--seconds N] [--seed N] [--jobs N] [--calls |
/// --allocations]
///
/// Runs each scenario in a child process and counts its calls and the call stacks of its allocations. Then it
/// runs the scenario again with one of them failing: once, and from there on. Each run must end in time, by
/// no signal, without a leak; it must succeed with the right result or throw one sentence and leave nothing
/// half done; and the same scenario without faults must be right afterwards, in the same process. With
/// --seconds, runs are drawn at random for that long. With --jobs, N processes share the runs.
namespace {

namespace fs = std::filesystem;
using scenarios::scenario;
using clock_type = std::chrono::steady_clock;

constexpr unsigned seconds_of_run = 60;

/// What a child tells about its run.
struct verdict {
    injection::record record;
    bool has_failed = false;           ///< the scenario threw
    std::array<char, 4096> finding{};  ///< empty if all is as it should be
    std::array<char, 2048> sentence{};

    void find(const std::string& what) {
        if (finding[0] == '\0') std::strncpy(finding.data(), what.c_str(), finding.size() - 1);
    }
};

using file_map = std::map<std::string, std::string>;

/// The files of a folder by name, without what a failed unlink leaves.
file_map contents_of(const fs::path& folder) {
    file_map contents;
    for (const auto& entry : fs::directory_iterator(folder))
        contents[entry.path().filename()] = npy_bytes::read_file(entry.path());
    return contents;
}

/// Failures that pinflow hides on purpose, as the run goes on without what it asked for.
struct hidden_failure {
    std::string_view call;  ///< the beginning of its description
    std::string_view reason;
};
constexpr std::array hidden_failures{
    hidden_failure{"close", "what was written is durable before, and reading has ended"},
    hidden_failure{"madvise", "a hint to the kernel"},
    hidden_failure{"mmap", "the file is read instead, or memory is asked for in another way"},
    hidden_failure{"open (EMFILE)", "idle descriptors are closed, and the file is opened again"},
    hidden_failure{"cudaGetDeviceCount", "a machine without a driver has no CUDA device"},
    hidden_failure{"statfs", "free space that is not known does not hinder a conversion"},
    hidden_failure{"start_thread", "parallel work has fewer threads, pages are registered by others"},
};

/// An object that the child processes made from here on share with this one. It lives as long as they do.
template <typename Object>
Object& make_shared_object() {
    void* const memory =
        ::mmap(nullptr, sizeof(Object), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory to share");
    return *::new (memory) Object;
}

/// What all runs came to, of every process.
struct tally {
    std::atomic<std::size_t> run_count = 0;
    std::atomic<std::size_t> injected_count = 0;
    std::atomic<std::size_t> failed_count = 0;
    std::atomic<std::size_t> finding_count = 0;
    std::array<std::atomic<std::size_t>, hidden_failures.size()> hidden_counts{};

    void print() const {
        fmt::print("{} runs with a failure: {} ended with a sentence, {} went on without what failed\n",
                   injected_count.load(), failed_count.load(), injected_count.load() - failed_count.load());
        for (std::size_t i = 0; i < hidden_failures.size(); ++i) {
            if (hidden_counts[i] > 0)
                fmt::print("    {} with {}\n", hidden_counts[i].load(), hidden_failures[i].call);
        }
    }
};

class campaign {
 public:
    campaign(const std::string& device, fs::path folder)
        : folder_(std::move(folder)), inputs_(folder_ / "in"), all_(scenarios::all(device)) {
        fs::create_directories(inputs_);
        work_in("measuring");
        const verdict& told = in_child([&](verdict&) { scenarios::write_inputs(inputs_); });
        if (told.finding[0] != '\0') throw std::runtime_error(told.finding.data());
    }

    const std::vector<scenario>& all() const noexcept { return all_; }

    /// From here on outputs lie in a folder of this name. Printed paths stay the same.
    void work_in(const std::string& name) {
        fs::create_directories(folder_ / name);
        fs::current_path(folder_ / name);
        told_ = &make_shared_object<verdict>();
    }

    /// Runs without faults: what a right run gives, and how many calls there are to fail.
    struct baseline {
        file_map files;
        std::string printed;
        std::vector<unsigned> calls;  ///< of each thread
        std::vector<std::uint64_t> stacks;
    };
    baseline measure(const scenario& what) {
        baseline found;
        for (int run = 0; run < 2; ++run) {  // threads differ from run to run
            make_outputs(what);
            const verdict& told = in_child([&](verdict& own) {
                run_and_catch(what, {}, own);
                if (own.has_failed) own.find(own.sentence.data());
            });
            if (told.finding[0] != '\0')
                throw std::runtime_error(fmt::format("{}: {}", what.name, told.finding.data()));
            found.files = contents_of(outputs());
            found.printed = scenarios::comparable(npy_bytes::read_file(printed_path()));
            const unsigned threads = std::min(told.record.thread_count.load(), injection::max_threads);
            found.calls.resize(std::max<std::size_t>(found.calls.size(), threads));
            for (unsigned thread = 0; thread < threads; ++thread)
                found.calls[thread] = std::max(found.calls[thread], told.record.calls[thread].load());
            found.stacks.assign(told.record.stacks.begin(),
                                told.record.stacks.begin() + told.record.stack_count);
        }
        return found;
    }

    /// @return whether anything was made to fail.
    bool run(const scenario& what, const baseline& right, const injection::target& target, tally& sums) {
        make_outputs(what);
        const file_map before = contents_of(outputs());
        const verdict& told = in_child([&](verdict& own) { judge(what, right, before, target, own); });
        ++sums.run_count;
        if (told.record.injected_count == 0) return false;
        ++sums.injected_count;
        if (told.has_failed) {
            ++sums.failed_count;
        } else if (const std::size_t index = index_of_hidden(told); index < hidden_failures.size()) {
            ++sums.hidden_counts[index];
        }
        if (told.finding[0] != '\0') {
            ++sums.finding_count;
            report(what, target, told);
        }
        return true;
    }

 private:
    // in the current folder
    static fs::path outputs() { return "out"; }
    static fs::path printed_path() { return "printed"; }
    static fs::path errors_path() { return "errors"; }

    void make_outputs(const scenario& what) {
        fs::remove_all(outputs());
        fs::create_directories(outputs());
        in_child([&](verdict&) { what.prepare(inputs_, outputs()); });
    }

    /// Runs `work` in a child process. @return what it told; a finding if it did not end well.
    template <typename Work>
    const verdict& in_child(Work work) {
        ::new (static_cast<void*>(told_)) verdict;
        std::fflush(stdout);
        const ::pid_t child = ::fork();
        if (child == -1) throw std::runtime_error("cannot fork");
        if (child == 0) work_in_child(work);
        int status = 0;
        ::waitpid(child, &status, 0);
        if (WIFSIGNALED(status)) {
            told_->find(
                fmt::format("signal {} ({})", WTERMSIG(status),
                            WTERMSIG(status) == SIGALRM ? "it hangs" : ::sigdescr_np(WTERMSIG(status))));
        } else if (constexpr int status_of_leaks = 23; WEXITSTATUS(status) == status_of_leaks) {
            told_->find("it leaks");
        } else if (WEXITSTATUS(status) != 0) {
            told_->find(fmt::format("exit status {}", WEXITSTATUS(status)));
        }
        return *told_;
    }

    template <typename Work>
    [[noreturn]] void work_in_child(Work work) {
        ::alarm(seconds_of_run);
        const int printed = ::open(printed_path().c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        const int errors = ::open(errors_path().c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        ::dup2(printed, STDOUT_FILENO);
        ::dup2(errors, STDERR_FILENO);
        ::close(printed);
        ::close(errors);
        try {
            pinflow::cli::open_hdf5_in_child();
            pinflow::install_fault_guard();
            work(*told_);
        } catch (const std::exception& failure) {
            told_->find(fmt::format("without a fault: {}", failure.what()));
        }
        std::exit(0);  // the destructors of objects of static lifetime run as well
    }

    std::string printed_so_far() const {
        std::fflush(stdout);
        return npy_bytes::read_file(printed_path());
    }
    void forget_printed() const {
        static_cast<void>(::ftruncate(STDOUT_FILENO, 0));
        ::lseek(STDOUT_FILENO, 0, SEEK_SET);
    }

    /// In the child: the run with a fault, then one without.
    void judge(const scenario& what, const baseline& right, const file_map& before,
               const injection::target& target, verdict& told) {
        run_and_catch(what, target, told);
        const std::string printed = printed_so_far();
        const file_map files = contents_of(outputs());
        if (told.has_failed) {
            check_failed(what, right, before, target, files, printed, told);
        } else {
            if (files != right.files) told.find("it succeeded, and its files are wrong");
            const bool is_hidden = index_of_hidden(told) < hidden_failures.size();
            if (scenarios::comparable(printed) != right.printed &&
                !(what.prints_hidden_failures && is_hidden))
                told.find(fmt::format("it succeeded, and printed {}", printed));
            if (!what.is_left_early) check_hidden(told);
        }
        for (const auto& entry : fs::directory_iterator(outputs()))
            fs::remove(entry.path());
        for (const auto& [name, bytes] : before)
            npy_bytes::write_file((outputs() / name).string(), bytes);
        forget_printed();
        try {
            what.run(inputs_, outputs());
        } catch (const std::exception& failure) {
            told.find(fmt::format("the run after it failed: {}", failure.what()));
            return;
        }
        if (contents_of(outputs()) != right.files) told.find("the files of the run after it are wrong");
        if (const std::string after = printed_so_far(); scenarios::comparable(after) != right.printed)
            told.find(fmt::format("the run after it printed {}", after));
#if defined(__SANITIZE_ADDRESS__)
        __lsan_do_leak_check();  // ends the process if there is a leak
#endif
    }

    void run_and_catch(const scenario& what, const injection::target& target, verdict& told) const {
        const auto fail = [&](const char* sentence) {
            told.has_failed = true;
            std::strncpy(told.sentence.data(), sentence, told.sentence.size() - 1);
        };
        try {
            const injection::scope scope(told.record, target);
            what.run(inputs_, outputs());
        } catch (const std::bad_alloc&) {
            fail("memory is exhausted");
        } catch (const pinflow::error& failure) {
            fail(failure.what());
        } catch (const std::exception& failure) {
            fail(failure.what());
            told.find(fmt::format("an exception that is not pinflow's: {}", failure.what()));
        }
    }

    static void check_failed(const scenario& what, const baseline& right, const file_map& before,
                             const injection::target& target, const file_map& files,
                             const std::string& printed, verdict& told) {
        const std::string_view sentence = told.sentence.data();
        constexpr std::size_t min_length = 10;
        if (sentence.size() < min_length || sentence.find('\n') != std::string_view::npos)
            told.find(fmt::format("no sentence: '{}'", sentence));
        if (!printed.empty() &&
            !(what.prints_before_failing && right.printed.starts_with(scenarios::comparable(printed))))
            told.find(fmt::format("it failed, and printed {}", printed));
        for (const auto& [name, bytes] : files) {
            // where unlink fails, a temporary file stays
            if (target.is_onward && name.starts_with(".pinflow-")) continue;
            const auto old = before.find(name);
            const auto whole = right.files.find(name);
            if (old != before.end() && old->second == bytes) continue;
            if (whole != right.files.end() && whole->second == bytes)
                continue;  // it failed after that was complete
            told.find(fmt::format("it failed, and left a partial file: {}", name));
        }
        for (const auto& [name, bytes] : before) {
            if (!files.contains(name)) told.find(fmt::format("it failed, and removed {}", name));
        }
    }

    /// @return the number of `hidden_failures` if it is none of these.
    static std::size_t index_of_hidden(const verdict& told) {
        const std::string_view call = told.record.first_injected.data();
        return static_cast<std::size_t>(std::ranges::find_if(hidden_failures,
                                                             [&](const hidden_failure& hidden) {
                                                                 return call.starts_with(hidden.call);
                                                             }) -
                                        hidden_failures.begin());
    }

    static void check_hidden(verdict& told) {
        const std::string_view call = told.record.first_injected.data();
        if (told.record.injected_count == 0 || call.starts_with("an allocation")) return;
        if (index_of_hidden(told) == hidden_failures.size())
            told.find("it succeeded, though this failure is not declared as one that is hidden");
    }

    /// In one piece, as other processes print too.
    static void report(const scenario& what, const injection::target& target, const verdict& told) {
        std::string text =
            fmt::format("FINDING {}: {}\n    {}{}{}, thread {}, number {}\n", what.name, told.finding.data(),
                        told.record.first_injected.data(), target.is_onward ? " and all after it" : "",
                        told.sentence[0] == '\0' ? "" : fmt::format(": {}", told.sentence.data()),
                        target.thread, target.number);
        if (target.what == injection::target::kind::allocation)
            text += injection::describe(told.record.injected_stack);
        text += npy_bytes::read_file(errors_path().string()).substr(0, 4000);
        fmt::print("{}", text);
        std::fflush(stdout);
    }

    fs::path folder_;
    fs::path inputs_;
    std::vector<scenario> all_;
    verdict* told_ = nullptr;
};

struct settings {
    std::string device = "host";
    std::string scenario;
    unsigned seconds = 0;  ///< 0: all runs
    unsigned seed = 1;
    unsigned jobs = 1;
    bool calls = true;
    bool allocations = true;
};

settings parse(int count, char** arguments) {
    settings asked;
    for (int i = 1; i < count; ++i) {
        const std::string_view flag = arguments[i];
        const auto value = [&]() -> std::string {
            if (i + 1 == count) throw std::invalid_argument(fmt::format("{} needs a value", flag));
            return arguments[++i];
        };
        if (flag == "--device") {
            asked.device = value();
        } else if (flag == "--scenario") {
            asked.scenario = value();
        } else if (flag == "--seconds") {
            asked.seconds = static_cast<unsigned>(std::stoul(value()));
        } else if (flag == "--seed") {
            asked.seed = static_cast<unsigned>(std::stoul(value()));
        } else if (flag == "--jobs") {
            asked.jobs = std::max(1U, static_cast<unsigned>(std::stoul(value())));
        } else if (flag == "--calls") {
            asked.allocations = false;
        } else if (flag == "--allocations") {
            asked.calls = false;
        } else {
            throw std::invalid_argument(fmt::format("there is no option {}", flag));
        }
    }
    return asked;
}

/// One run: a scenario and what is to fail in it.
struct planned_run {
    const scenario* what;
    const campaign::baseline* right;
    injection::target target;
};

/// Allocations whose call stack is in `known`, that is in the plan of another scenario, are left out.
std::vector<planned_run> plan(const scenario& what, const campaign::baseline& right, const settings& asked,
                              std::set<std::uint64_t>& known) {
    using kind = injection::target::kind;
    std::vector<planned_run> runs;
    for (const bool is_onward : {false, true}) {
        for (unsigned thread = 0; asked.calls && thread < right.calls.size(); ++thread) {
            for (unsigned number = 1; number <= right.calls[thread]; ++number)
                runs.push_back({&what, &right, {kind::call, thread, number, 0, is_onward}});
        }
        for (const std::uint64_t stack : right.stacks) {
            if (asked.allocations && !known.contains(stack))
                runs.push_back({&what, &right, {kind::allocation, 0, 0, stack, is_onward}});
        }
    }
    known.insert(right.stacks.begin(), right.stacks.end());
    return runs;
}

/// Every `jobs`th run, beginning with run `job`.
void run_some(campaign& all, const std::vector<planned_run>& runs, unsigned job, const settings& asked,
              tally& sums) {
    all.work_in(fmt::format("job-{}", job));
    const clock_type::time_point begin = clock_type::now();
    for (std::size_t i = job; i < runs.size(); i += asked.jobs) {
        if (asked.seconds > 0 && clock_type::now() - begin > std::chrono::seconds(asked.seconds)) break;
        const planned_run& each = runs[i];
        const bool is_injected = all.run(*each.what, *each.right, each.target, sums);
        // more calls than were counted
        injection::target further = each.target;
        const bool is_last = further.what == injection::target::kind::call &&
                             further.number == each.right->calls[further.thread];
        while (asked.seconds == 0 && is_injected && is_last) {
            ++further.number;
            if (!all.run(*each.what, *each.right, further, sums)) break;
        }
    }
}

int run_campaign(const settings& asked, const fs::path& folder) {
    campaign all(asked.device, folder);
    std::map<const scenario*, campaign::baseline> baselines;
    std::vector<planned_run> runs;
    std::set<std::uint64_t> known_stacks;
    for (const scenario& what : all.all()) {
        if (what.name.find(asked.scenario) == std::string::npos) continue;
        const campaign::baseline& right = baselines[&what] = all.measure(what);
        const std::vector<planned_run> some = plan(what, right, asked, known_stacks);
        runs.insert(runs.end(), some.begin(), some.end());
    }
    fmt::print("{} scenarios, {} runs\n", baselines.size(), runs.size());
    std::fflush(stdout);
    if (runs.empty()) return 1;
    const clock_type::time_point begin = clock_type::now();
    if (asked.seconds > 0) std::ranges::shuffle(runs, std::mt19937(asked.seed));
    tally& sums = make_shared_object<tally>();
    std::vector<::pid_t> children;
    for (unsigned job = 0; job < asked.jobs; ++job) {
        const ::pid_t child = ::fork();
        if (child == -1) throw std::runtime_error("cannot fork");
        if (child == 0) {
            int status = 0;
            try {
                run_some(all, runs, job, asked, sums);
            } catch (const std::exception& failure) {
                fmt::print(stderr, "fail_every_call: {}\n", failure.what());
                status = 2;
            }
            std::fflush(stdout);
            ::_exit(status);
        }
        children.push_back(child);
    }
    bool has_ended_well = true;
    for (const ::pid_t child : children) {
        int status = 0;
        ::waitpid(child, &status, 0);
        has_ended_well = has_ended_well && status == 0;
    }
    sums.print();
    fmt::print("{} runs in {} s (seed {}), {} findings\n", sums.run_count.load(),
               std::chrono::duration_cast<std::chrono::seconds>(clock_type::now() - begin).count(),
               asked.seed, sums.finding_count.load());
    return has_ended_well && sums.finding_count == 0 && sums.injected_count > 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
    if (count == 2 && arguments[1] == pinflow::cli::hdf5_child_command) pinflow::cli::serve_as_hdf5_child();
    const fs::path folder = fs::temp_directory_path() / fmt::format("fail-every-call-{}", ::getpid());
    int status = 2;
    try {
        status = run_campaign(parse(count, arguments), folder);
    } catch (const std::exception& failure) {
        fmt::print(stderr, "fail_every_call: {}\n", failure.what());
    }
    fs::current_path(fs::temp_directory_path());
    fs::remove_all(folder);
    return status;
}
