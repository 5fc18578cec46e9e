#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <exception>
#include <string>
#include <string_view>

#include "pinflow/fault_guard.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/version.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/hdf5_child.hpp"
#include "src/cli/output.hpp"
#include "src/core/error_advice.hpp"
#include "src/core/system.hpp"

namespace {

using namespace pinflow::cli;

enum exit_status : int { done = 0, failed = 1, wrong_usage = 2 };

struct command {
    std::string_view name;
    void (*run)(const argument_list& arguments);
    std::string_view summary;
};

constexpr std::array commands{
    command{"inspect", inspect, "lists the arrays of a file, and says whether each can be mapped"},
    command{"stream", stream_files, "streams rows to a device, and reports the rate and the route"},
    command{"convert", convert, "rewrites arrays of any format so that they can be mapped"},
    command{"verify", verify, "checks a file against its checksum, or writes the checksum"},
    command{"pin", pin, "copies arrays into shared memory, for all processes of the user"},
    command{"unpin", unpin, "removes a copy that `pin` made"},
    command{"list", list, "lists the copies in shared memory"},
    command{"clean", clean,
            "removes what killed processes left in shared memory, and .npy files that are no segments"},
    command{"devices", list_devices, "lists the devices that batches can be streamed to"},
    command{"bench", bench, "measures this machine: the link, streams, rows by index, loading a model"},
};

std::string help() {
    std::string text =
        "Streams arrays from files (.npy, .npz, HDF5, safetensors) to a GPU or to host memory.\n"
        "\n"
        "Usage: pinflow COMMAND [OPTIONS]\n"
        "\n";
    for (const command& each : commands)
        text += fmt::format("  {:<10} {}\n", each.name, each.summary);
    text +=
        "\n"
        "  --version  prints the version\n"
        "  --help     prints this text; after a command, the command's own help\n"
        "\n"
        "FILE:NAME means the array NAME in FILE, and shm:NAME a copy that `pin` made.\n"
        "Exit status: 0 done, 1 the work failed, 2 the command line is wrong or needs something that this\n"
        "build lacks; for 1 and 2 one line on standard error says why.\n";
    return text;
}

void run(const argument_list& arguments) {
    if (arguments.empty()) throw usage_error("no command is given (see pinflow --help)");
    const std::string& name = arguments.front();
    const argument_list rest(arguments.begin() + 1, arguments.end());
    if (name == "--help" || name == "-h" || name == "--version") {
        if (!rest.empty())
            throw usage_error(fmt::format("{} takes no arguments, but '{}' was given", name, rest.front()));
        return print(name == "--version" ? fmt::format("pinflow {}\n", pinflow::version) : help());
    }
    if (name == hdf5_child_command) serve_as_hdf5_child();
    const auto* const found = std::ranges::find(commands, name, &command::name);
    if (found != commands.end()) return found->run(rest);
    throw usage_error(fmt::format("there is no command '{}' (see pinflow --help)", name));
}

/// A file opened while a standard descriptor is closed would get its number, and output would go there.
void occupy_standard_descriptors() {
    for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        // read-only: writing must still fail
        if (::fcntl(descriptor, F_GETFD) == -1 && ::open("/dev/null", O_RDONLY) == -1) std::_Exit(failed);
    }
}

/// glibc reserves 64 to 128 MiB of address space for each arena. Under a limit, slots and stacks need it.
void limit_malloc_arenas() {
    if (pinflow::detail::system::max_address_bytes()) ::mallopt(M_ARENA_MAX, 1);
}

}  // namespace

int main(int argument_count, char** arguments) {
    occupy_standard_descriptors();
    limit_malloc_arenas();
    // ignored, so that writes to a closed pipe, or past RLIMIT_FSIZE, fail with an error message
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);
    // an ignored SIGCHLD is inherited from the parent: then waitpid could not tell how a child ended
    std::signal(SIGCHLD, SIG_DFL);
    try {
        use_hdf5_child();
        pinflow::install_fault_guard();
        run(argument_list(arguments + std::min(argument_count, 1), arguments + argument_count));
        return done;
    } catch (const usage_error& failure) {
        print_error(failure.what());
        return wrong_usage;
    } catch (const pinflow::format_not_built& failure) {
        print_error(failure.what());
        return wrong_usage;
    } catch (const std::bad_alloc&) {
        print_error(fmt::format("memory is exhausted; {}", pinflow::detail::advice_for(ENOMEM)));
    } catch (const std::exception& failure) {
        print_error(failure.what());
    } catch (...) {
        print_error("something failed without saying what");
    }
    return failed;
}
