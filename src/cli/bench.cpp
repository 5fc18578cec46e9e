#include "src/cli/bench.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>

#include "pinflow/version.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/json.hpp"
#include "src/cli/output.hpp"

namespace pinflow::cli {

namespace {

struct work {
    std::string_view name;
    void (*run)(const bench_options&, const link_rates&, const bench_report&);
};

constexpr std::array works{
    work{"copy", bench_copy},
    work{"pin", bench_pin},
    work{"stream", [](const bench_options& options, const link_rates& link,
                      const bench_report& report) { bench_stream(options, false, link, report); }},
    work{"shuffled", [](const bench_options& options, const link_rates& link,
                        const bench_report& report) { bench_stream(options, true, link, report); }},
    work{"gather", bench_gather},
    work{"scatter", bench_scatter},
    work{"duplex", bench_duplex},
    work{"plan", bench_plan},
};

std::string names_of_works() {
    std::string names;
    for (const work& each : works)
        names += fmt::format("{}{}", names.empty() ? "" : "|", each.name);
    return names;
}

struct bench_arguments {
    bench_options options;
    std::string work;
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
        "Measures this machine: how fast bytes travel to the device and back, and how near to that rate\n"
        "streams, shuffled batches, and rows by index come. Contents are checked, indices are fresh for\n"
        "every repetition, figures are medians, and ratios are to the link of the same run.",
        "pinflow bench");
    bench_arguments parsed;
    std::string device_name = "auto", table, row_bytes, batch, batches = "64", known = "8", route = "auto";
    std::string blocks, staged_share;
    std::string epochs = "5", repetitions = "3";
    app.add_option("WORK", parsed.work, "One of " + names_of_works() + " (default: all)")->type_name("");
    const auto add = [&](const char* flag, std::string& value, const char* type, const char* help) {
        app.add_option(flag, value, help)->type_name(type)->capture_default_str();
    };
    add("--device", device_name, "auto|host|cuda:N", "What to measure");
    add("--file", parsed.options.file, "FILE", "stream, shuffled, pin: this file (default: one is made)");
    add("--table", table, "BYTES", "Size of tables, and of the file that is made (default: 5000MiB, 8GiB)");
    add("--row-bytes", row_bytes, "BYTES", "Of a row (default: 512; of files that are made 256KiB)");
    add("--batch", batch, "ROWS", "Rows a batch (default: 131072; of files 64)");
    add("--batches", batches, "N", "gather, scatter, duplex: batches a repetition");
    add("--known", known, "N", "The same: batches known ahead, 1 to 64; half of them travel together");
    add("--route", route, "auto|direct|copy|staged|hybrid", "The same: how rows travel");
    add("--blocks", blocks, "N", "The same: thread blocks of direct and hybrid (default: the planner's)");
    add("--staged-share", staged_share, "X", "The same: of the rows on hybrid (default: the planner's)");
    add("--epochs", epochs, "N", "stream, shuffled: epochs, of which the first is reported alone");
    add("--repetitions", repetitions, "N", "gather, scatter, duplex: of which the median counts");
    app.add_flag("--json", parsed.json, "Print one JSON object")->disable_flag_override();
    if (!parse(app, arguments)) return std::nullopt;

    if (!parsed.work.empty() && std::ranges::find(works, parsed.work, &work::name) == works.end()) {
        throw usage_error(fmt::format("bench measures {}, not '{}'", names_of_works(), parsed.work));
    }
    bench_options& options = parsed.options;
    options.device = parse_device(device_name);
    if (!table.empty()) options.table_bytes = parse_byte_count("--table", table);
    if (!row_bytes.empty()) options.row_bytes = parse_byte_count("--row-bytes", row_bytes);
    if (!batch.empty()) options.batch_rows = parse_count("--batch", batch, 1);
    options.batches = parse_count("--batches", batches, 1);
    options.known = static_cast<unsigned>(parse_count("--known", known, 1, 64));
    options.route = parse_row_route(route);
    constexpr std::uint64_t most_blocks = std::numeric_limits<unsigned>::max();
    if (!blocks.empty()) {
        options.blocks = static_cast<unsigned>(parse_count("--blocks", blocks, 1, most_blocks));
    }
    if (!staged_share.empty()) options.staged_share = parse_staged_share(staged_share);
    options.epochs = parse_count("--epochs", epochs, 2, 1'000'000);
    options.repetitions = static_cast<unsigned>(parse_count("--repetitions", repetitions, 1, 1000));
    return parsed;
}

}  // namespace

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
}

void fill_with_words(std::span<std::byte> bytes, std::uint64_t seed) {
    constexpr std::uint64_t piece_bytes = std::uint64_t{1} << 20;
    const auto word_at = [seed](std::uint64_t place) {  // splitmix64's finaliser
        std::uint64_t z = seed * 0xD1342543DE82EF95 + (place + 1) * 0x9E3779B97F4A7C15;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    };
    const std::uint64_t pieces = (bytes.size() + piece_bytes - 1) / piece_bytes;
    tbb::parallel_for(std::uint64_t{0}, pieces, [=](std::uint64_t piece) {
        const std::uint64_t end = std::min<std::uint64_t>((piece + 1) * piece_bytes, bytes.size());
        for (std::uint64_t at = piece * piece_bytes; at < end; at += sizeof(std::uint64_t)) {
            const std::uint64_t word = word_at(at);
            std::memcpy(bytes.data() + at, &word, std::min<std::uint64_t>(sizeof word, end - at));
        }
    });
}

void bench(const argument_list& arguments) {
    const std::optional<bench_arguments> parsed = parse_bench_arguments(arguments);
    if (!parsed) return;
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
    for (const work& each : works) {
        if (parsed->work.empty() || parsed->work == each.name) each.run(parsed->options, link, report);
    }
    if (parsed->json) {
        print(json_line({{"device", device.name()},
                         {"model", device.model()},
                         {"version", version},
                         {"link_gbps", link.to_device},
                         {"link_to_host_gbps", link.to_host},
                         {"results", std::move(results)}}));
    }
}

}  // namespace pinflow::cli
