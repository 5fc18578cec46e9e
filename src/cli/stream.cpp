#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <filesystem>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "pinflow/loader/digest.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/json.hpp"
#include "src/cli/open.hpp"
#include "src/cli/output.hpp"

namespace pinflow::cli {

namespace {

using clock = std::chrono::steady_clock;

double seconds_between(clock::time_point from, clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

// ---- the command line -------------------------------------------------------------------------------------

struct stream_arguments {
    std::vector<std::string> files;
    loader_options options;
    bool json = false;
};

/// Flags that the interface names and this build does not have; each takes a value.
constexpr std::array missing_flags{"--window",      "--rank",       "--world",
                                   "--max-batches", "--save-state", "--load-state"};

order parse_order(const std::string& name) {
    if (name == "sequential") return order::sequential;
    if (name == "shuffled") return order::shuffled;
    if (name == "windowed") throw usage_error("this build of pinflow has no --order windowed");
    throw usage_error(fmt::format("--order takes sequential or shuffled, not '{}'", name));
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

/// Empty when help was asked for.
std::optional<stream_arguments> parse_stream_arguments(const argument_list& arguments) {
    CLI::App app(
        "Streams the rows of one array, or of several with equally many rows, to a device in batches,\n"
        "computes their digest there and says how fast, by which route, and where time was lost.",
        "pinflow stream");
    stream_arguments parsed;
    std::string device_name = "auto", batch = "64", order_name = "sequential", seed = "0", epochs = "1";
    std::string route_name = "auto", tail_name = "partial", memory, slots, threads, pin_budget;
    app.add_option("FILE", parsed.files,
                   "The arrays of a sample: a file each, or FILE:NAME for an array in it; a quoted pattern\n"
                   "stands for all files that match, one after the other")
        ->type_name("")
        ->required();
    const auto add = [&](const char* flag, std::string& value, const char* type, const char* help) {
        app.add_option(flag, value, help)->type_name(type)->capture_default_str();
    };
    add("--device", device_name, "auto|host|cuda:N", "Where batches go; auto: a GPU when there is one");
    add("--batch", batch, "ROWS", "Rows a batch");
    add("--order", order_name, "sequential|shuffled", "Order of rows within an epoch");
    add("--seed", seed, "N", "Seed of the shuffled order");
    add("--epochs", epochs, "N", "How often every row comes, at most 1000000 times");
    add("--route", route_name, "auto|direct|copy|staged|read",
        "How rows travel; one that cannot work is an error");
    add("--memory", memory, "BYTES",
        "Most memory of all slots, and of the chunks of HDF5 files that are decoded, which may take half of\n"
        "it; with KiB, MiB, GiB or TiB (default: 1GiB, and 512MiB for the chunks of each argument)");
    add("--pin-budget", pin_budget, "BYTES",
        "Most memory to lock for the GPU, which may pass `ulimit -l` (default: that, and 3/4 of what is "
        "free)");
    add("--slots", slots, "N", "Batches that can exist at once, from 2 on (default: by memory)");
    add("--threads", threads, "N", "Threads that gather rows (default: one a core)");
    add("--tail", tail_name, "partial|drop", "What becomes of rows that do not fill the last batch");
    app.add_flag("--json", parsed.json, "Print one JSON object")->disable_flag_override();
    std::string value_of_missing_flag;
    for (const char* const flag : missing_flags) {
        app.add_option(flag, value_of_missing_flag)->group("");
    }
    if (!parse(app, arguments)) return std::nullopt;

    for (const char* const flag : missing_flags) {
        if (app.count(flag) > 0) throw usage_error(fmt::format("this build of pinflow has no {}", flag));
    }
    loader_options& options = parsed.options;
    options.device = parse_device(device_name);
    options.batch_rows = parse_count("--batch", batch, 1);
    options.order = parse_order(order_name);
    options.seed = parse_count("--seed", seed);
    options.epochs = parse_count("--epochs", epochs, 1, 1'000'000);
    options.route = parse_route(route_name);
    options.tail = parse_tail(tail_name);
    if (app.count("--memory") > 0) options.memory_bytes = parse_byte_count("--memory", memory);
    if (app.count("--pin-budget") > 0) {
        options.pin_budget_bytes = parse_byte_count("--pin-budget", pin_budget);
    }
    if (app.count("--slots") > 0) {
        options.slots = static_cast<unsigned>(parse_count("--slots", slots, 2, 65536));
    }
    if (app.count("--threads") > 0) {
        options.threads = static_cast<unsigned>(parse_count("--threads", threads, 1, 1024));
    }
    return parsed;
}

// ---- opening ----------------------------------------------------------------------------------------------

void take_from_memory(const row_source& source, loader_options& options) {
    const std::uint64_t taken_bytes = source.memory_bytes();
    if (taken_bytes >= options.memory_bytes) {
        throw usage_error(
            fmt::format("--memory is too little: {} bytes are left of it when {} is decoded, which takes {}",
                        options.memory_bytes, source.description(), taken_bytes));
    }
    options.memory_bytes -= taken_bytes;
}

/// Opens the arrays of a sample. Where memory is limited, what decoding may take of it is taken from
/// `options`, that slots have the rest.
std::vector<std::shared_ptr<const row_source>> open_all(const std::vector<std::string>& files,
                                                        loader_options& options) {
    open_options opening;
    if (options.memory_bytes > 0) opening.memory_bytes = options.memory_bytes / 2 / files.size();
    std::vector<std::shared_ptr<const row_source>> sources;
    for (const std::string& file : files) {
        sources.push_back(open_source_rows(file, opening));
        if (options.memory_bytes > 0) take_from_memory(*sources.back(), options);
        if (sources.back()->row_count() != sources.front()->row_count()) {
            throw invalid_argument(
                fmt::format("'{}' has {} rows and '{}' has {}: the arrays of a sample need equally many",
                            files.front(), sources.front()->row_count(), file, sources.back()->row_count()));
        }
    }
    return sources;
}

loader make_loader(std::vector<std::shared_ptr<const row_source>> sources, const loader_options& options) {
    try {
        return loader(std::move(sources), options);
    } catch (const invalid_argument& failure) {  // the rows fit together, so these are flags that do not
        throw usage_error(failure.what());
    }
}

// ---- streaming --------------------------------------------------------------------------------------------

struct stream_result {
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;
    std::uint64_t batches = 0;
    double seconds = 0;
    std::vector<double> epoch_seconds;
    std::uint64_t digest = 0;

    double gbps() const { return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0; }
};

/// Notes when the device has consumed all that was enqueued on the consumer's streams so far, on a stream of
/// its own, so that neither they nor the calling thread wait for it.
class consumption_clock {
 public:
    explicit consumption_clock(const device& device) : mark_(device), stream_(device) {}

    /// Not to be called from several threads.
    template <typename Streams>
    void mark(const Streams& streams) {
        for (const stream& each : streams) {
            mark_.record(each);
            stream_.wait(mark_);
        }
        clock::time_point& time = times_.emplace_back();
        stream_.host_function_async([&time] { time = clock::now(); });
    }

    /// The times marked, once the last one has come.
    const std::deque<clock::time_point>& times() {
        stream_.synchronize();
        return times_;
    }

 private:
    std::deque<clock::time_point> times_;  // whose elements stay where they are
    event mark_;
    stream stream_;
};

/// Takes every batch that `batches` has, computing the digest in turns on two streams.
stream_result consume(loader& batches, std::uint64_t epochs, double total_bytes) {
    const device& device = batches.device();
    digest digest(device);
    consumption_clock consumption(device);
    // declared after what they work on: they wait for their work before it goes
    const std::array<stream, 2> streams{stream(device), stream(device)};
    progress_line progress;
    stream_result result;

    const clock::time_point start = clock::now();
    while (true) {
        const stream& consumer = streams[result.batches % streams.size()];
        std::optional<batch> batch = batches.next(consumer);
        if (!batch) break;
        digest.add_async(*batch, consumer);
        result.batches += 1;
        result.rows += batch->row_count();
        for (std::size_t i = 0; i < batch->array_count(); ++i)
            result.bytes += (*batch)[i].size_bytes();
        const bool epoch_ends = batch->index() + 1 == batches.batches_per_epoch();
        batch->release();
        if (epoch_ends) consumption.mark(streams);
        if (progress.due()) {
            const double bytes = static_cast<double>(result.bytes);
            progress.show(fmt::format("{:5.1f} %, {:.2f} GB/s", 100 * bytes / std::max(total_bytes, 1.0),
                                      bytes / seconds_between(start, clock::now()) / 1e9));
        }
    }
    clock::time_point previous = start;
    for (const clock::time_point& time : consumption.times()) {
        result.epoch_seconds.push_back(seconds_between(previous, time));
        previous = time;
    }
    result.seconds = seconds_between(start, previous);
    result.epoch_seconds.resize(epochs, 0.0);  // epochs without a batch take no time
    result.digest = digest.value();
    return result;
}

// ---- printing ---------------------------------------------------------------------------------------------

double as_seconds(std::chrono::nanoseconds time) {
    return std::chrono::duration<double>(time).count();
}

std::string as_json(const stream_result& result, const loader_report& report, const device& device,
                    double open_seconds) {
    return json_line({{"rows", result.rows},
                      {"bytes", result.bytes},
                      {"batches", result.batches},
                      {"epochs", result.epoch_seconds.size()},
                      {"seconds", result.seconds},
                      {"gbps", result.gbps()},
                      {"open_seconds", open_seconds},
                      {"pin_seconds", std::chrono::duration<double>(report.pin_time).count()},
                      {"epoch_seconds", result.epoch_seconds},
                      {"device", device.name()},
                      {"route", to_string(report.route)},
                      {"reason", report.reason},
                      {"digest", fmt::format("{:016x}", result.digest)},
                      {"wait_seconds",
                       {{"storage", as_seconds(report.storage_wait)},
                        {"cpu", as_seconds(report.cpu_wait)},
                        {"link", as_seconds(report.link_wait)},
                        {"consumer", as_seconds(report.consumer_wait)}}}});
}

std::string as_text(const stream_result& result, const loader_report& report, const device& device,
                    double open_seconds) {
    std::string text = fmt::format(
        "streamed  {} in {}, {}, {} to {}\n"
        "speed     {:.2f} GB/s: {:.3f} s, after {:.3f} s of opening\n",
        readable_size(result.bytes), readable_count(result.rows, "row", "rows"),
        readable_count(result.batches, "batch", "batches"),
        readable_count(result.epoch_seconds.size(), "epoch", "epochs"), device.name(), result.gbps(),
        result.seconds, open_seconds);
    if (result.epoch_seconds.size() > 1) {
        constexpr std::size_t most_shown = 8;
        const auto shown = std::min(result.epoch_seconds.size(), most_shown);
        text += fmt::format(
            "epochs    {:.3f} s{}\n",
            fmt::join(result.epoch_seconds.begin(),
                      std::next(result.epoch_seconds.begin(), static_cast<std::ptrdiff_t>(shown)), " s, "),
            shown < result.epoch_seconds.size() ? ", ..." : "");
    }
    text += fmt::format(
        "route     {}: {}\n"
        "waited    storage {:.3f} s, cpu {:.3f} s, link {:.3f} s; for the consumer {:.3f} s\n"
        "digest    {:016x}\n",
        to_string(report.route), escaped(report.reason), as_seconds(report.storage_wait),
        as_seconds(report.cpu_wait), as_seconds(report.link_wait), as_seconds(report.consumer_wait),
        result.digest);
    return text;
}

}  // namespace

void stream_files(const argument_list& arguments) {
    std::optional<stream_arguments> parsed = parse_stream_arguments(arguments);
    if (!parsed) return;

    const clock::time_point start = clock::now();
    auto sources = open_all(parsed->files, parsed->options);
    const double open_seconds = seconds_between(start, clock::now());

    double total_bytes = 0;
    for (const auto& source : sources) {
        total_bytes +=
            static_cast<double>(source->row_count()) * static_cast<double>(source->row_size_bytes());
    }
    total_bytes *= static_cast<double>(parsed->options.epochs);

    loader batches = make_loader(std::move(sources), parsed->options);
    const stream_result result = consume(batches, parsed->options.epochs, total_bytes);
    const loader_report report = batches.report();
    print(parsed->json ? as_json(result, report, batches.device(), open_seconds)
                       : as_text(result, report, batches.device(), open_seconds));
}

}  // namespace pinflow::cli
