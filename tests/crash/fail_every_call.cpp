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
#define PINFLOW_CHECKS_LEAKS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PINFLOW_CHECKS_LEAKS 1
#endif
#endif
#ifdef PINFLOW_CHECKS_LEAKS
#include <sanitizer/lsan_interface.h>
#endif

/// fail_every_call [--device host|cuda:N] [--scenario TEXT] [--seconds N] [--seed N] [--jobs N] [--part I/N]
/// [--calls | --cuda-calls | --allocations]
///
/// Runs each scenario in a child process and counts its calls and the call stacks of its allocations. Then it
/// runs the scenario with each of them failing: in one run only that one, in another all later ones too. Each
/// run must end in time, without a signal and (under ASan) without a leak. It must give the right result, or
/// throw an error of one sentence and leave nothing half done. Then the scenario must succeed without faults
/// in the same process.
/// --scenario TEXT runs only the scenario of that name. If there is none, it runs those whose names contain
/// TEXT. With --seconds, runs are drawn at random for that long. With --jobs, N processes share the runs.
/// With --part, only every Nth run is made, from the Ith on: parts 1/N to N/N together are all runs.
namespace {

namespace fs = std::filesystem;
using scenarios::scenario;
using clock_type = std::chrono::steady_clock;

constexpr unsigned seconds_of_run = 60;

/// The result of one run, in memory shared with the child process.
struct run_result {
    injection::record record;
    bool has_failed = false;           ///< the scenario threw
    std::array<char, 4096> finding{};  ///< empty if all is as it should be
    std::array<char, 2048> sentence{};

    void add_finding(const std::string& what) {
        if (finding[0] == '\0') std::strncpy(finding.data(), what.c_str(), finding.size() - 1);
    }
};

using file_map = std::map<std::string, std::string>;

/// The contents of all files of a folder, by name.
file_map contents_of(const fs::path& folder) {
    file_map contents;
    for (const auto& entry : fs::directory_iterator(folder))
        contents[entry.path().filename()] = npy_bytes::read_file(entry.path());
    return contents;
}

/// Failures that pinflow hides on purpose, as the run continues without what it asked for.
struct hidden_failure {
    std::string_view call;   ///< the beginning of its description
    std::string_view place;  ///< in the call stack: a function, or a file; empty: any
    std::string_view reason;
};
constexpr std::array hidden_failures{
    hidden_failure{"close", "", "written data is already durable, and reading has ended"},
    hidden_failure{"madvise", "", "a hint to the kernel"},
    hidden_failure{"mmap", "", "the file is read instead, or memory is asked for in another way"},
    hidden_failure{"open (EMFILE)", "", "idle descriptors are closed, and the file is opened again"},
    hidden_failure{"statfs", "", "free space that is not known does not hinder a conversion"},
    hidden_failure{"start_thread", "",
                   "parallel work has fewer threads, and pages are not registered, but read"},
    hidden_failure{"cu", "cuda_device_count", "a machine without a driver has no CUDA device"},
    hidden_failure{"cudaEventDestroy", "", "a destructor does not throw"},
    hidden_failure{"cudaStreamDestroy", "", "a destructor does not throw"},
    hidden_failure{"cu", "finish_stream", "a destructor does not throw"},
    hidden_failure{"cu", "destroy_stream", "a destructor does not throw"},
    hidden_failure{"cu", "destroy_event", "a destructor does not throw"},
    hidden_failure{"cu", "backend::release", "a destructor does not throw: the memory is lost"},
    hidden_failure{"cu", "calls_in_flight::close", "a device that cannot be waited for reads nothing more"},
    hidden_failure{"cu", "digest::~digest", "a device that cannot be waited for reads nothing more"},
    hidden_failure{"cu", "pinned_memory::release", "a destructor does not throw: the memory is lost"},
    hidden_failure{"cu", "locker::unlock", "pages stay registered"},
    hidden_failure{"cu", "locker::lock", "pages that cannot be registered are read"},
    hidden_failure{"cu", "context::for_host_memory", "the primary context is used"},
    hidden_failure{"cu", "slot_lease::~slot_lease", "its slot is lost, and not filled again"},
    hidden_failure{"cu", "runs_in_pairs", "kernels run without clusters"},
    hidden_failure{"cu", "backend::reaches", "memory that the device may not read is staged"},
    hidden_failure{"cu", "pinned_memory::allocate", "memory that cannot be registered is allocated by CUDA"},
};

/// Creates an object in memory shared with children forked later. It is never unmapped.
template <typename Object>
Object& make_shared_object() {
    void* const memory =
        ::mmap(nullptr, sizeof(Object), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory to share");
    return *::new (memory) Object;
}

/// Counts over all runs of all processes.
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
                fmt::print("    {} with {}{}{}: {}\n", hidden_counts[i].load(), hidden_failures[i].call,
                           hidden_failures[i].place.empty() ? "" : " in ", hidden_failures[i].place,
                           hidden_failures[i].reason);
        }
    }
};

class campaign {
 public:
    campaign(const std::string& device, fs::path folder)
        : folder_(std::move(folder)), inputs_(folder_ / "in"), all_(scenarios::all(device)) {
        fs::create_directories(inputs_);
        work_in("measuring");
        const run_result& result = in_child([&](run_result&) { scenarios::write_inputs(inputs_); });
        if (result.finding[0] != '\0') throw std::runtime_error(result.finding.data());
    }

    const std::vector<scenario>& all() const noexcept { return all_; }

    /// From here on outputs are in a folder of this name. Printed paths stay the same.
    void work_in(const std::string& name) {
        fs::create_directories(folder_ / name);
        fs::current_path(folder_ / name);
        result_ = &make_shared_object<run_result>();
    }

    /// What runs without faults gave: the right result, the number of calls that can fail, and the call
    /// stacks of allocations.
    struct baseline {
        file_map files;
        std::string printed;
        std::vector<unsigned> calls;  ///< of each thread
        std::vector<std::uint64_t> stacks;
    };
    baseline measure(const scenario& what, bool cuda_only) {
        baseline found;
        for (int run = 0; run < 2; ++run) {  // threads differ from run to run
            make_outputs(what);
            const run_result& result = in_child([&](run_result& own) {
                run_and_catch(what, {.cuda_only = cuda_only}, own);
                if (own.has_failed) own.add_finding(own.sentence.data());
            });
            if (result.finding[0] != '\0')
                throw std::runtime_error(fmt::format("{}: {}", what.name, result.finding.data()));
            found.files = contents_of(outputs());
            found.printed = scenarios::comparable(npy_bytes::read_file(printed_path()));
            const unsigned threads = std::min(result.record.thread_count.load(), injection::max_threads);
            found.calls.resize(std::max<std::size_t>(found.calls.size(), threads));
            for (unsigned thread = 0; thread < threads; ++thread)
                found.calls[thread] = std::max(found.calls[thread], result.record.calls[thread].load());
            found.stacks.insert(found.stacks.end(), result.record.stacks.begin(),
                                result.record.stacks.begin() + result.record.stack_count);
        }
        std::ranges::sort(found.stacks);
        found.stacks.erase(std::ranges::unique(found.stacks).begin(), found.stacks.end());
        return found;
    }

    /// @return whether anything was made to fail.
    bool run(const scenario& what, const baseline& right, const injection::target& target, tally& sums) {
        make_outputs(what);
        const file_map before = contents_of(outputs());
        run_result& result = in_child([&](run_result& own) { judge(what, right, before, target, own); });
        ++sums.run_count;
        if (result.record.injected_count == 0) return false;
        if (!result.has_failed && !what.is_left_early) check_hidden(result);
        ++sums.injected_count;
        if (result.has_failed) {
            ++sums.failed_count;
        } else if (const std::size_t index = index_of_hidden(result); index < hidden_failures.size()) {
            ++sums.hidden_counts[index];
        }
        if (result.finding[0] != '\0') {
            ++sums.finding_count;
            report(what, target, result);
        }
        return true;
    }

    /// The call that was made to fail first in the last run.
    std::string injected_call() const { return result_->record.first_injected.data(); }

 private:
    // in the current folder
    static fs::path outputs() { return "out"; }
    static fs::path printed_path() { return "printed"; }
    static fs::path errors_path() { return "errors"; }

    void make_outputs(const scenario& what) {
        fs::remove_all(outputs());
        fs::create_directories(outputs());
        in_child([&](run_result&) { what.prepare(inputs_, outputs()); });
    }

    /// Runs `work` in a child process. @return its result, with a finding if it did not end well.
    template <typename Work>
    run_result& in_child(Work work) {
        ::new (static_cast<void*>(result_)) run_result;
        std::fflush(stdout);
        const ::pid_t child = ::fork();
        if (child == -1) throw std::runtime_error("cannot fork");
        if (child == 0) work_in_child(work);
        int status = 0;
        ::waitpid(child, &status, 0);
        if (WIFSIGNALED(status)) {
            result_->add_finding(
                fmt::format("signal {} ({})", WTERMSIG(status),
                            WTERMSIG(status) == SIGALRM ? "it hangs" : ::sigdescr_np(WTERMSIG(status))));
        } else if (constexpr int status_of_leaks = 23; WEXITSTATUS(status) == status_of_leaks) {
            result_->add_finding("it leaks");
        } else if (WEXITSTATUS(status) != 0) {
            result_->add_finding(fmt::format("exit status {}", WEXITSTATUS(status)));
        }
        return *result_;
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
            pinflow::cli::use_hdf5_child();
            pinflow::install_fault_guard();
            work(*result_);
        } catch (const std::exception& failure) {
            result_->add_finding(fmt::format("without a fault: {}", failure.what()));
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
               const injection::target& target, run_result& result) {
        run_and_catch(what, target, result);
        const std::string printed = printed_so_far();
        const file_map files = contents_of(outputs());
        if (result.has_failed) {
            check_failed(what, right, before, target, files, printed, result);
        } else {
            if (files != right.files) result.add_finding("it succeeded, and its files are wrong");
            const bool is_same = scenarios::comparable(printed) == right.printed;
            const bool may_differ =
                !is_same && what.prints_hidden_failures && index_of_hidden(result) < hidden_failures.size();
            if (!is_same && !may_differ)
                result.add_finding(fmt::format("it succeeded, and printed {}", printed));
        }
        for (const auto& entry : fs::directory_iterator(outputs()))
            fs::remove(entry.path());
        for (const auto& [name, bytes] : before)
            npy_bytes::write_file((outputs() / name).string(), bytes);
        forget_printed();
        try {
            what.run(inputs_, outputs());
        } catch (const std::exception& failure) {
            result.add_finding(fmt::format("the run after it failed: {}", failure.what()));
            return;
        }
        if (contents_of(outputs()) != right.files)
            result.add_finding("the files of the run after it are wrong");
        if (const std::string after = printed_so_far(); scenarios::comparable(after) != right.printed)
            result.add_finding(fmt::format("the run after it printed {}", after));
#ifdef PINFLOW_CHECKS_LEAKS
        __lsan_do_leak_check();  // ends the process if there is a leak
#endif
    }

    void run_and_catch(const scenario& what, const injection::target& target, run_result& result) const {
        const auto fail = [&](const char* sentence) {
            result.has_failed = true;
            std::strncpy(result.sentence.data(), sentence, result.sentence.size() - 1);
        };
        try {
            const injection::scope scope(result.record, target);
            what.run(inputs_, outputs());
        } catch (const std::bad_alloc&) {
            fail("memory is exhausted");
        } catch (const pinflow::error& failure) {
            fail(failure.what());
        } catch (const std::exception& failure) {
            fail(failure.what());
            result.add_finding(fmt::format("an exception that is not pinflow's: {}", failure.what()));
        }
    }

    static void check_failed(const scenario& what, const baseline& right, const file_map& before,
                             const injection::target& target, const file_map& files,
                             const std::string& printed, run_result& result) {
        const std::string_view sentence = result.sentence.data();
        constexpr std::size_t min_length = 10;
        if (sentence.size() < min_length || sentence.find('\n') != std::string_view::npos)
            result.add_finding(fmt::format("no sentence: '{}'", sentence));
        if (!printed.empty() &&
            !(what.prints_before_failing && right.printed.starts_with(scenarios::comparable(printed))))
            result.add_finding(fmt::format("it failed, and printed {}", printed));
        for (const auto& [name, bytes] : files) {
            // unlink fails too, so a temporary file may stay
            if (target.is_onward && name.starts_with(".pinflow-")) continue;
            const auto old = before.find(name);
            const auto whole = right.files.find(name);
            if (old != before.end() && old->second == bytes) continue;
            if (whole != right.files.end() && whole->second == bytes)
                continue;  // it failed after that was complete
            result.add_finding(fmt::format("it failed, and left a partial file: {}", name));
        }
        for (const auto& [name, bytes] : before) {
            if (!files.contains(name)) result.add_finding(fmt::format("it failed, and removed {}", name));
        }
    }

    /// The index of the failure in `hidden_failures`; their number if it is none of these.
    static std::size_t index_of_hidden(const run_result& result) {
        // kept, because describing takes a second
        static std::map<decltype(result.record.injected_stack), std::string> described;
        const std::string_view call = result.record.first_injected.data();
        const auto is_it = [&](const hidden_failure& hidden) {
            if (!call.starts_with(hidden.call)) return false;
            if (hidden.place.empty()) return true;
            std::string& functions = described[result.record.injected_stack];
            if (functions.empty()) functions = injection::describe(result.record.injected_stack);
            return functions.find(hidden.place) != std::string::npos;
        };
        return static_cast<std::size_t>(std::ranges::find_if(hidden_failures, is_it) -
                                        hidden_failures.begin());
    }

    static void check_hidden(run_result& result) {
        const std::string_view call = result.record.first_injected.data();
        if (call.starts_with("an allocation")) return;
        if (index_of_hidden(result) == hidden_failures.size())
            result.add_finding("it succeeded, though this failure is not declared as one that is hidden");
    }

    /// Prints in one piece, because other processes print, too.
    static void report(const scenario& what, const injection::target& target, const run_result& result) {
        std::string text = fmt::format(
            "FINDING {}: {}\n    {}{}{}, thread {}, number {}\n", what.name, result.finding.data(),
            result.record.first_injected.data(), target.is_onward ? " and all after it" : "",
            result.sentence[0] == '\0' ? "" : fmt::format(": {}", result.sentence.data()), target.thread,
            target.number);
        text += injection::describe(result.record.injected_stack);
        text += npy_bytes::read_file(errors_path().string()).substr(0, 4000);
        fmt::print("{}", text);
        std::fflush(stdout);
    }

    fs::path folder_;
    fs::path inputs_;
    std::vector<scenario> all_;
    run_result* result_ = nullptr;
};

struct settings {
    std::string device = "host";
    std::string scenario;
    unsigned seconds = 0;  ///< 0: all runs
    unsigned seed = 1;
    unsigned jobs = 1;
    unsigned part = 1;
    unsigned part_count = 1;
    bool calls = true;
    bool cuda_only = false;
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
        } else if (flag == "--part") {
            const std::string part = value();
            const std::size_t slash = part.find('/');
            if (slash == std::string::npos) throw std::invalid_argument("--part takes I/N");
            asked.part = static_cast<unsigned>(std::stoul(part.substr(0, slash)));
            asked.part_count = static_cast<unsigned>(std::stoul(part.substr(slash + 1)));
            if (asked.part < 1 || asked.part > asked.part_count)
                throw std::invalid_argument(fmt::format("there is no part {}", part));
        } else if (flag == "--calls") {
            asked.allocations = false;
        } else if (flag == "--cuda-calls") {
            asked.cuda_only = true;
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
                runs.push_back({&what, &right, {kind::call, thread, number, 0, is_onward, asked.cuda_only}});
        }
        for (const std::uint64_t stack : right.stacks) {
            if (asked.allocations && !known.contains(stack))
                runs.push_back({&what, &right, {kind::allocation, 0, 0, stack, is_onward, false}});
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
    clock_type::time_point shown = begin;
    for (std::size_t i = job; i < runs.size(); i += asked.jobs) {
        if (asked.seconds > 0 && clock_type::now() - begin > std::chrono::seconds(asked.seconds)) break;
        const planned_run& each = runs[i];
        const bool is_injected = all.run(*each.what, *each.right, each.target, sums);
        if (job == 0 && clock_type::now() - shown > std::chrono::minutes(1)) {
            shown = clock_type::now();
            fmt::print("about {} of {} runs\n", i, runs.size());
            std::fflush(stdout);
        }
        // There may be more calls than were counted, so further ones fail too, until 8 in a row are
        // repetitions: a waiting thread repeats its calls.
        constexpr unsigned max_repeated = 8;
        injection::target further = each.target;
        const bool is_last = further.what == injection::target::kind::call &&
                             further.number == each.right->calls[further.thread];
        std::set<std::string> known_calls;
        unsigned repeated = 0;
        while (asked.seconds == 0 && is_injected && is_last && repeated < max_repeated) {
            ++further.number;
            if (!all.run(*each.what, *each.right, further, sums)) break;
            repeated = known_calls.insert(all.injected_call()).second ? 0 : repeated + 1;
        }
    }
}

int run_campaign(const settings& asked, const fs::path& folder) {
    campaign all(asked.device, folder);
    std::map<const scenario*, campaign::baseline> baselines;
    std::vector<planned_run> runs;
    std::set<std::uint64_t> known_stacks;
    const bool is_name =
        std::ranges::any_of(all.all(), [&](const scenario& what) { return what.name == asked.scenario; });
    for (const scenario& what : all.all()) {
        if (is_name ? what.name != asked.scenario : what.name.find(asked.scenario) == std::string::npos)
            continue;
        const campaign::baseline& right = baselines[&what] = all.measure(what, asked.cuda_only);
        const std::vector<planned_run> some = plan(what, right, asked, known_stacks);
        runs.insert(runs.end(), some.begin(), some.end());
    }
    if (asked.part_count > 1) {
        std::vector<planned_run> part;
        for (std::size_t i = asked.part - 1; i < runs.size(); i += asked.part_count)
            part.push_back(runs[i]);
        runs = std::move(part);
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
        if (!injection::has_symbols())
            throw std::runtime_error(
                "functions cannot be named, so failures that the library hides cannot be told from others: "
                "use a program that is not stripped, and install addr2line");
        status = run_campaign(parse(count, arguments), folder);
    } catch (const std::exception& failure) {
        fmt::print(stderr, "fail_every_call: {}\n", failure.what());
    }
    fs::current_path(fs::temp_directory_path());
    fs::remove_all(folder);
    return status;
}
