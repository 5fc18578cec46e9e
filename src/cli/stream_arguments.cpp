#include "src/cli/stream_arguments.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <string_view>
#include <system_error>

#include "pinflow/error.hpp"
#include "pinflow/formats/open.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/open.hpp"
#include "src/core/error_advice.hpp"

namespace pinflow::cli {

namespace {

/// The orders that flags can name; the others need lists, weights, or code.
constexpr std::array orders{order::sequential, order::shuffled, order::windowed};

std::optional<order> order_named(std::string_view name) {
    for (const order each : orders) {
        if (name == to_string(each)) return each;
    }
    return std::nullopt;
}

order parse_order(const std::string& name) {
    if (const auto found = order_named(name)) return *found;
    throw usage_error(fmt::format("--order takes sequential, shuffled or windowed, not '{}'", name));
}

route parse_route(const std::string& name) {
    for (const route each : {route::automatic, route::direct, route::copy, route::staged, route::read}) {
        if (name == to_string(each)) return each;
    }
    throw usage_error(fmt::format("--route takes auto, direct, copy, staged or read, not '{}'", name));
}

tail parse_tail(const std::string& name) {
    if (name == "partial") return tail::partial;
    if (name == "drop") return tail::drop;
    throw usage_error(fmt::format("--tail takes partial or drop, not '{}'", name));
}

shard parse_shard(const std::string& rank, const std::string& world) {
    if (world == "env") {
        if (!rank.empty())
            throw usage_error("--rank cannot be combined with --world env, which sets the rank");
        try {
            return shard_from_environment();
        } catch (const invalid_argument& failure) {
            throw usage_error(fmt::format("--world env: {}", failure.what()));
        }
    }
    if (rank.empty() != world.empty())
        throw usage_error(fmt::format("{} is missing: --rank R and --world W belong together",
                                      rank.empty() ? "--rank" : "--world"));
    if (rank.empty()) return {};
    constexpr std::uint64_t max_ranks = std::numeric_limits<unsigned>::max();
    const std::uint64_t ranks = parse_count("--world", world, 1, max_ranks, "env");
    const std::uint64_t own = parse_count("--rank", rank, 0, max_ranks);
    if (own >= ranks) {
        throw usage_error(fmt::format("--rank {} is out of range: a --world of {} has ranks 0 to {}", own,
                                      ranks, ranks - 1));
    }
    return {static_cast<unsigned>(own), static_cast<unsigned>(ranks)};
}

/// Checks before streaming that the state can be saved. A state overwrites only a state or an empty file.
void check_can_be_saved(const std::string& path) {
    const auto refuse = [&](std::error_code code) {
        throw system_failure(
            fmt::format("cannot save the state to '{}': {}", path, pinflow::detail::described(code)), code);
    };
    std::error_code code;
    const auto status = std::filesystem::status(path, code);
    if (code && code != std::errc::no_such_file_or_directory) refuse(code);
    const std::filesystem::path parent = std::filesystem::path(path).parent_path();
    const std::string folder = parent.empty() ? "." : parent.string();
    if (::access(folder.c_str(), W_OK | X_OK) != 0) refuse(std::error_code(errno, std::generic_category()));
    if (!std::filesystem::exists(status)) return;
    if (std::filesystem::is_directory(status)) refuse(std::make_error_code(std::errc::is_a_directory));
    try {
        if (!std::filesystem::is_regular_file(status)) throw format_error("it is no regular file");
        if (std::filesystem::file_size(path) > 0) static_cast<void>(loader_state::load(path));
    } catch (const error& failure) {
        throw invalid_argument(fmt::format(
            "cannot save the state to '{}': the existing file cannot be read as a state, so it is not "
            "overwritten ({})",
            path, failure.what()));
    }
}

/// Takes order, seed and window from a saved state unless flags set them.
void take_order(const CLI::App& app, const loader_state& state, const std::string& path,
                loader_options& options) {
    const std::string name = state.order.name.substr(0, state.order.name.find('/'));
    const auto saved = order_named(name);
    if (!saved) {
        throw unsupported(
            fmt::format("cannot resume from '{}': its order is {}, which the tool does not have; resume it "
                        "with the library",
                        path, to_string(state.order)));
    }
    if (app.count("--order") == 0) options.order = *saved;
    if (app.count("--seed") == 0) options.seed = state.order.seed;
    if (app.count("--window") == 0 && options.order == order::windowed)
        options.window_rows = state.order.window_rows;
}

}  // namespace

std::optional<stream_arguments> parse_stream_arguments(const argument_list& arguments) {
    CLI::App app(
        "Streams the rows of one array, or of several with the same number of rows, to a device in batches,\n"
        "computes their digest there, and reports the rate, the route, and what the stream waited for.",
        "pinflow stream");
    stream_arguments parsed;
    std::string device_name = "auto", batch = "64", order_name = "sequential", seed = "0", epochs = "1";
    std::string route_name = "auto", tail_name = "partial", memory, slots, threads, pin_budget;
    std::string window, rank, world, max_batches;
    app.add_option("FILE", parsed.files,
                   "The arrays of a sample: a file each, or FILE:NAME for an array in it. A quoted pattern\n"
                   "means all files that match, one after the other")
        ->type_name("")
        ->required();
    app.add_flag("--stack", parsed.stack,
                 "Each file that a pattern matches is one row\n"
                 "(default: its rows follow those of the file before)")
        ->disable_flag_override();
    const auto add = [&](const char* flag, std::string& value, const char* type, const char* help) {
        app.add_option(flag, value, help)->type_name(type)->capture_default_str();
    };
    add("--device", device_name, "auto|host|cuda:N", "Where batches go; auto: a GPU when there is one");
    add("--batch", batch, "ROWS", "Rows per batch");
    add("--order", order_name, "sequential|shuffled|windowed", "Order of rows within an epoch");
    add("--window", window, "ROWS",
        "windowed: number of rows that are shuffled together (default: as many as take 64MiB)");
    add("--seed", seed, "N", "Seed of the shuffled and the windowed order");
    add("--epochs", epochs, "N", "Number of epochs, including those before --load-state; at most 1000000");
    add("--route", route_name, "auto|direct|copy|staged|read",
        "How rows travel to the device: from page-locked pages by kernels (direct) or by the copy engine\n"
        "(copy), from page-locked buffers that the CPU fills from the mapped file (staged) or by reading it\n"
        "(read); auto: the fastest that works. On the host, direct delivers views of the file. A route that\n"
        "cannot work is an error");
    add("--memory", memory, "BYTES",
        "Memory limit for slots, staging buffers, arrays held on the device, and decoded HDF5 chunks. Up to\n"
        "half goes to chunks, divided equally among the FILEs, or more if a dataset needs it. BYTES may end\n"
        "in KiB, MiB, GiB or TiB (default: 1GiB for all but chunks, or what --slots needs, and up to 512MiB\n"
        "of chunks for each FILE; less if memory is short)");
    add("--pin-budget", pin_budget, "BYTES|ulimit",
        "Limit on the memory that pinflow page-locks. Pinned buffers are allocated in any case, and count;\n"
        "pages of files get the rest. Default: pages of files get 3/4 of the memory that the machine and "
        "the\n"
        "cgroup have left, whatever the buffers take. ulimit: as the default, but no more than `ulimit -l`\n"
        "minus the pinned buffers, unless the process has CAP_IPC_LOCK");
    add("--slots", slots, "N",
        "Batches that can exist at once (being filled, ready or in use), from 2 on (default: 8, or more if\n"
        "batches are small or the CPU stages them, at most 256; fewer if memory is short)");
    add("--threads", threads, "N",
        "The most threads that gather rows at the same time (default: one per core)");
    add("--rank", rank, "R", "Rank of this process, from 0 to W - 1; ranks take batches in turn");
    add("--world", world, "W|env",
        "Number of processes; env: take rank and number from torchrun, MPI or Slurm");
    add("--tail", tail_name, "partial|drop",
        "Rows at the end of an epoch that do not fill a batch on every rank; partial: split them, drop: skip "
        "them");
    add("--max-batches", max_batches, "N",
        "End this run after N steps, all ranks at the same position; a step is one batch for each rank");
    add("--save-state", parsed.save_state, "FILE",
        "Save the position to FILE at the end of the run, or on SIGINT or SIGTERM, which end the run");
    add("--load-state", parsed.load_state, "FILE",
        "Resume from FILE with its order, seed and window; batch size and number of ranks may differ");
    app.add_flag("--json", parsed.json, "Print one JSON object")->disable_flag_override();
    app.footer(
        "Examples:\n"
        "  pinflow stream images.npy labels.npy --order shuffled --epochs 3\n"
        "  pinflow stream data.h5:images --batch 256\n"
        "  pinflow stream 'part-*.npy'                        many files, as one array\n"
        "  pinflow stream 'scan-*.npy' --stack --batch 4      one sample per file\n"
        "  pinflow stream a.npy --save-state s.json           and later: --load-state s.json");
    if (!parse(app, arguments)) return std::nullopt;

    if (parsed.stack && std::ranges::none_of(parsed.files, is_pattern)) {
        throw usage_error(fmt::format("--stack needs a pattern: {}", quote_pattern));
    }
    loader_options& options = parsed.options;
    options.device = parse_device(device_name);
    options.batch_rows = parse_count("--batch", batch, 1);
    options.order = parse_order(order_name);
    options.seed = parse_count("--seed", seed);
    options.epochs = parse_count("--epochs", epochs, 1, 1'000'000);
    options.route = parse_route(route_name);
    options.shard = parse_shard(rank, world);
    options.tail = parse_tail(tail_name);
    if (app.count("--memory") > 0) options.memory_bytes = parse_byte_count("--memory", memory);
    if (pin_budget == "ulimit") {
        options.pin_limit = pin_limit::memlock;
    } else if (app.count("--pin-budget") > 0) {
        options.pin_budget_bytes = parse_byte_count("--pin-budget", pin_budget, "ulimit");
    }
    if (app.count("--slots") > 0) {
        options.slots = static_cast<unsigned>(parse_count("--slots", slots, 2, 65536));
    }
    if (app.count("--threads") > 0) {
        options.threads = static_cast<unsigned>(parse_count("--threads", threads, 1, 1024));
    }
    if (app.count("--window") > 0) options.window_rows = parse_count("--window", window, 1);
    if (app.count("--max-batches") > 0) options.max_batches = parse_count("--max-batches", max_batches, 1);
    for (const auto& [flag, path] :
         {std::pair("--save-state", &parsed.save_state), {"--load-state", &parsed.load_state}}) {
        if (app.count(flag) > 0 && path->empty()) throw usage_error(fmt::format("{} needs a file", flag));
    }
    if (!parsed.load_state.empty()) {
        options.resume_from = loader_state::load(parsed.load_state);
        take_order(app, *options.resume_from, parsed.load_state, options);
    }
    if (options.window_rows > 0 && options.order != order::windowed)
        throw usage_error("--window belongs to --order windowed");
    parsed.is_seed_unused = app.count("--seed") > 0 && options.order == order::sequential;
    if (!parsed.save_state.empty()) check_can_be_saved(parsed.save_state);
    return parsed;
}

}  // namespace pinflow::cli
