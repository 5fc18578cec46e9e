#include "src/cli/bench.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <exception>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "pinflow/version.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/json.hpp"
#include "src/cli/output.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::cli {

namespace {

struct benchmark {
    std::string_view name;
    void (*run)(const bench_options&, const link_rates&, const bench_report&);
    /// Refuses impossible options before any work.
    void (*check)(const bench_options&) = [](const bench_options&) {};
};

constexpr std::array benchmarks{
    benchmark{"copy", bench_copy},
    benchmark{"pin", bench_pin},
    benchmark{"stream",
              [](const bench_options& options, const link_rates& link, const bench_report& report) {
                  bench_stream(options, false, link, report);
              },
              check_stream},
    benchmark{"shuffled",
              [](const bench_options& options, const link_rates& link, const bench_report& report) {
                  bench_stream(options, true, link, report);
              },
              check_stream},
    benchmark{"gather", bench_gather,
              [](const bench_options& options) { check_rows(options, ways_of_gather); }},
    benchmark{"scatter", bench_scatter,
              [](const bench_options& options) { check_rows(options, ways_of_scatter); }},
    benchmark{"duplex", bench_duplex,
              [](const bench_options& options) { check_rows(options, ways_of_duplex); }},
    benchmark{"plan", bench_plan, [](const bench_options& options) { check_rows(options, ways_of_plan); }},
    benchmark{"load", bench_load, check_load},
};

std::string benchmark_names() {
    std::string names;
    for (const benchmark& each : benchmarks)
        names += fmt::format("{}{}", names.empty() ? "" : "|", each.name);
    return names;
}

/// The options that not all work uses, and the work that uses them.
struct option_use {
    std::string_view flag;
    std::vector<std::string_view> works;
};

std::vector<option_use> option_uses() {
    const std::vector<std::string_view> rows{"gather", "scatter", "duplex", "plan"};
    const std::vector<std::string_view> streams{"stream", "shuffled"};
    std::vector<std::string_view> sized = rows;
    sized.insert(sized.end(), streams.begin(), streams.end());
    return {{"--file", {"stream", "shuffled", "pin"}},
            {"--table", sized},
            {"--row-bytes", sized},
            {"--batch", sized},
            {"--batches", rows},
            {"--known", rows},
            {"--route", rows},
            {"--tune", {"gather", "scatter", "duplex"}},
            {"--blocks", rows},
            {"--staged-share", rows},
            {"--epochs", streams},
            {"--repetitions", {"gather", "scatter", "duplex", "pin", "load"}}};
}

/// A note about the options that `work` does not use; empty if there are none.
std::string note_on_unused(const CLI::App& app, const std::string& work) {
    std::string unused;
    const bool reads_file = (work == "stream" || work == "shuffled") && app.count("--file") > 0;
    for (const option_use& each : option_uses()) {
        const bool is_size_of_made_file = each.flag == "--table" || each.flag == "--row-bytes";
        const bool is_used =
            std::ranges::find(each.works, work) != each.works.end() && !(reads_file && is_size_of_made_file);
        if (app.count(std::string(each.flag)) == 0 || is_used) continue;
        unused += fmt::format("{}{}", unused.empty() ? "" : ", ", each.flag);
    }
    if (unused.empty()) return {};
    return fmt::format("{}{} does not use {}", work, reads_file ? " with --file" : "", unused);
}

struct bench_arguments {
    bench_options options;
    std::string work;
    std::string note;  ///< about a likely mistake of the user
    bool json = false;
};

row_route parse_row_route(const std::string& name) {
    for (const row_route each :
         {row_route::automatic, row_route::direct, row_route::copy, row_route::staged, row_route::hybrid}) {
        if (name == to_string(each)) return each;
    }
    throw usage_error(fmt::format("--route takes auto, direct, copy, staged or hybrid, not '{}'", name));
}

double parse_staged_share(const std::string& text) {
    double share = 0;
    const char* const end = text.data() + text.size();
    const auto [stopped, status] = std::from_chars(text.data(), end, share);
    const bool is_part = share > 0 && share < 1;
    if (status != std::errc{} || stopped != end || !is_part) {
        throw usage_error(
            fmt::format("--staged-share takes a number above 0 and below 1, such as 0.4, not '{}'", text));
    }
    return share;
}

/// Empty when help was asked for.
std::optional<bench_arguments> parse_bench_arguments(const argument_list& arguments) {
    CLI::App app(
        "Measures the link to the device and back, and the rates of streams, of shuffled batches, of rows\n"
        "gathered and scattered by index, and of loading a model. Streamed and exchanged data and the first\n"
        "load are checked. Each repetition uses new indices. Rates are medians, but those of epoch 1 and of\n"
        "the first load are of one run, and plan estimates the rates of scatters from gathers. Ratios are\n"
        "to the link's rate in the same run.\n"
        "By default the table takes 4.8 GiB of page-locked memory, and the batches take "
        "up to 4 GiB of device "
        "memory\n"
        "for each direction. stream and shuffled write an unnamed file of 8 GiB to TMPDIR (/tmp if it is "
        "not\n"
        "set). Copies take 0.5 GiB each of host and device memory, pin takes 4 GiB.",
        "pinflow bench");
    bench_arguments parsed;
    std::string device_name = "auto", table, row_bytes, batch, batches = "64", known = "8", route = "auto";
    std::string blocks, staged_share;
    std::string epochs = "5", repetitions = "3";
    app.add_option("WORK", parsed.work, "One of " + benchmark_names() + " (default: all but load)")
        ->type_name("");
    app.add_option("FILES", parsed.options.load_files, "load: the files whose tensors are loaded")
        ->type_name("");
    const auto add = [&](const char* flag, std::string& value, const char* type, const char* help) {
        app.add_option(flag, value, help)->type_name(type)->capture_default_str();
    };
    add("--device", device_name, "auto|host|cuda:N", "What to measure");
    add("--file", parsed.options.file, "FILE",
        "stream, shuffled, pin: the file to use (default: stream and shuffled make one, pin uses none)");
    add("--table", table, "BYTES",
        "Size of the table (default: 10 million rows), and of the file that stream and shuffled make "
        "(default: 8GiB)");
    add("--row-bytes", row_bytes, "BYTES",
        "Size of a row (default: 512; 256KiB in the file that stream and shuffled make)");
    add("--batch", batch, "ROWS", "Rows per batch (default: 131072; stream, shuffled: 64)");
    add("--batches", batches, "N",
        "gather, scatter, duplex: batches per repetition (duplex: at most half as many as the table holds);\n"
        "plan: size of the group whose plan is shown beside that of one batch, lowered to half of --known");
    add("--known", known, "N",
        "gather, scatter, duplex, plan: number of batches whose row indices are known in advance, 2 to 64;\n"
        "half of them are moved by one call");
    add("--route", route, "auto|direct|copy|staged|hybrid",
        "gather, scatter, duplex, plan: how rows are moved");
    app.add_flag(
           "--tune", parsed.options.tunes,
           "gather, scatter, duplex: measure the routes first, and take the fastest (plan always does);\n"
           "nothing is measured on the host, or if --route is not auto")
        ->disable_flag_override();
    add("--blocks", blocks, "N",
        "gather, scatter, duplex, plan: thread blocks on the routes direct and hybrid. Gather blocks have "
        "1024\n"
        "threads (512 if not aligned), scatter blocks 256 (default: the planner chooses)");
    add("--staged-share", staged_share, "X",
        "gather, scatter, duplex, plan: share of the rows that the route hybrid stages (default: the planner "
        "chooses)");
    add("--epochs", epochs, "N", "stream, shuffled: number of epochs; the first is reported separately");
    add("--repetitions", repetitions, "N",
        "gather, scatter, duplex, pin, load: number of repetitions; the median is reported");
    app.add_flag("--json", parsed.json, "Print one JSON object")->disable_flag_override();
    if (!parse(app, arguments)) return std::nullopt;

    if (app.count("WORK") > 0 &&
        std::ranges::find(benchmarks, parsed.work, &benchmark::name) == benchmarks.end()) {
        throw usage_error(fmt::format("bench measures {}, not '{}'", benchmark_names(), parsed.work));
    }
    if (!parsed.work.empty()) parsed.note = note_on_unused(app, parsed.work);
    bench_options& options = parsed.options;
    if (!options.load_files.empty() && parsed.work != "load")
        throw usage_error(fmt::format("only bench load takes FILES, not '{}'", options.load_files.front()));
    options.device = parse_device(device_name);
    if (app.count("--file") > 0 && options.file.empty())
        throw usage_error("--file takes the path of a file, not ''");
    if (app.count("--table") > 0) options.table_bytes = parse_byte_count("--table", table);
    if (app.count("--row-bytes") > 0) options.row_bytes = parse_byte_count("--row-bytes", row_bytes);
    if (app.count("--batch") > 0) options.batch_rows = parse_count("--batch", batch, 1);
    options.batches = parse_count("--batches", batches, 1);
    options.known = static_cast<unsigned>(parse_count("--known", known, 2, 64));
    options.route = parse_row_route(route);
    constexpr std::uint64_t max_blocks = std::numeric_limits<unsigned>::max();
    if (app.count("--blocks") > 0) {
        options.blocks = static_cast<unsigned>(parse_count("--blocks", blocks, 1, max_blocks));
    }
    if (app.count("--staged-share") > 0) options.staged_share = parse_staged_share(staged_share);
    options.epochs = parse_count("--epochs", epochs, 2, 1'000'000);
    options.repetitions = static_cast<unsigned>(parse_count("--repetitions", repetitions, 1, 1000));
    return parsed;
}

/// Runs all of `chosen`. @return the failure that ended it early, with its sentence; empty if there was none.
std::pair<std::exception_ptr, std::string> run_all(const std::vector<const benchmark*>& chosen,
                                                   const bench_options& options, const link_rates& link,
                                                   const bench_report& report) {
    try {
        for (const benchmark* each : chosen)
            each->run(options, link, report);
        return {};
    } catch (const std::bad_alloc&) {
        return {std::current_exception(), "memory is exhausted"};
    } catch (const std::exception& failure) {
        return {std::current_exception(), failure.what()};
    }
}

}  // namespace

double median(std::vector<double> values) {
    std::ranges::sort(values);
    const std::size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

void bench(const argument_list& arguments) {
    const std::optional<bench_arguments> parsed = parse_bench_arguments(arguments);
    if (!parsed) return;
    std::vector<const benchmark*> chosen;
    for (const benchmark& each : benchmarks) {
        if (parsed->work.empty() ? each.name != "load" : parsed->work == each.name) chosen.push_back(&each);
    }
    for (const benchmark* each : chosen)
        each->check(parsed->options);
    pinflow::detail::start_worker_threads();
    const device& device = parsed->options.device;
    const link_rates link = measure_link(device);
    nlohmann::ordered_json results = nlohmann::ordered_json::array();
    if (!parsed->json) {
        print(fmt::format("{}: {}\n{:<44} {:8.2f} GB/s\n{:<44} {:8.2f} GB/s\n", device.name(),
                          escaped(device.model()), "LINK, to the device, page-locked, 256 MiB",
                          link.to_device, "the same to the host", link.to_host));
    }
    const bench_report report = [&](const bench_result& result) {
        if (parsed->json) {
            nlohmann::ordered_json object{{"work", result.work}};
            const auto add = [&](const char* key, double value) {
                object[key] = value > 0 ? nlohmann::ordered_json(value) : nullptr;
            };
            add("gbps", result.gbps);
            add("of_link", result.of_link);
            add("seconds", result.seconds);
            object["note"] = result.note;
            results.push_back(std::move(object));
            return;
        }
        const auto measured = [](double value, const char* unit, int width) {
            return value > 0 ? fmt::format("{:{}.2f} {}", value, width, unit) : std::string();
        };
        print(fmt::format("{:<44} {:13}  {:9}  {}\n", result.work, measured(result.gbps, "GB/s", 8),
                          measured(result.of_link, "LINK", 4), escaped(result.note)));
    };
    // what was measured before something failed is reported all the same
    const auto [failure, sentence] = run_all(chosen, parsed->options, link, report);
    if (parsed->json) {
        nlohmann::ordered_json object{{"device", device.name()},
                                      {"model", device.model()},
                                      {"version", version},
                                      {"link_gbps", link.to_device},
                                      {"link_to_host_gbps", link.to_host},
                                      {"results", std::move(results)},
                                      {"notes", nlohmann::ordered_json::array()}};
        if (!parsed->note.empty()) object["notes"].push_back(parsed->note);
        if (failure) object["error"] = sentence;
        print(json_line(object));
    }
    if (failure) std::rethrow_exception(failure);
    if (!parsed->json && !parsed->note.empty()) print(fmt::format("note: {}\n", parsed->note));
}

}  // namespace pinflow::cli
