#include <fmt/chrono.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/device.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/shared/segment.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/elapsed.hpp"
#include "src/cli/json.hpp"
#include "src/cli/open.hpp"
#include "src/cli/output.hpp"
#include "src/shared/segment_folder.hpp"

namespace pinflow::cli {

namespace {

using clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

/// The name of a segment. SEGMENT may be NAME or `shm:NAME`, which is how a FILE names a segment.
/// @throws usage_error if no segment can have that name.
std::string checked_name(std::string text) {
    if (text.starts_with("./[")) text.erase(0, 2);  // see `parse`
    if (text.starts_with(segment_prefix)) text.erase(0, segment_prefix.size());
    try {
        static_cast<void>(pinflow::detail::parse_segment_name(text));
    } catch (const invalid_argument& failure) {
        throw usage_error(failure.what());
    }
    return text;
}

/// How long a process takes to register these segments with a GPU, as a line of text.
std::string registering_text(const std::vector<segment_info>& segments) {
    if (device::cuda_count() == 0) return "no GPU here, so registering it was not timed\n";
    try {
        std::vector<pin_range> ranges;
        std::uint64_t total_bytes = 0;
        for (const segment_info& each : segments) {
            const array opened = open_segment(each.name);
            if (opened.shape().empty()) continue;
            total_bytes += opened.size_bytes();
            for (pin_range& range : pin_ranges(opened.rows()))
                ranges.push_back(std::move(range));
        }
        const pinned_pages first({}, device::cuda(0));  // makes the context, which is not counted
        first.wait();
        const clock::time_point start = clock::now();
        const pinned_pages pages(std::move(ranges), device::cuda(0));
        if (!pages.wait()) return fmt::format("registering: {}\n", pages.report().reason);
        const double seconds = seconds_since(start);
        return fmt::format("registering takes each process {:.3f} s, {:.1f} GB/s\n", seconds,
                           static_cast<double>(total_bytes) / seconds / 1e9);
    } catch (const error& failure) {
        return fmt::format("registering was not timed: {}\n", failure.what());
    }
}

std::string state_of(const segment_info& info) {
    if (!info.problem.empty()) return info.problem;
    return info.is_writable ? "writable" : info.checksum;
}

ordered_json as_json(const segment_info& info) {
    const bool known = info.problem.empty();
    const auto or_null = [&](auto value) { return known ? ordered_json(value) : ordered_json(); };
    const double created = std::chrono::duration<double>(info.created.time_since_epoch()).count();
    return {{"name", info.name},
            {"path", info.path.string()},
            {"dtype", known ? ordered_json(info.dtype->descr()) : ordered_json()},
            {"shape", or_null(info.shape)},
            {"size_bytes", or_null(info.size_bytes)},
            {"file_size_bytes", info.file_size_bytes},
            {"writable", or_null(info.is_writable)},
            {"checksum", known && !info.is_writable ? ordered_json(info.checksum) : ordered_json()},
            {"pid", or_null(info.creator_pid)},
            {"created", or_null(created)},
            {"problem", known ? ordered_json() : ordered_json(info.problem)}};
}

std::string as_text(const std::vector<segment_info>& listed) {
    using table_row = std::array<std::string, 6>;
    std::vector<table_row> rows{{"name", "dtype", "shape", "data", "created (UTC)", "checksum"}};
    std::uint64_t total_bytes = 0;
    for (const segment_info& each : listed) {
        total_bytes += each.file_size_bytes;
        table_row row{escaped(each.name), "-", "-", "-", "-", escaped(state_of(each))};
        if (each.problem.empty()) {
            row[1] = escaped(each.dtype->descr());
            row[2] = to_string(each.shape);
            row[3] = readable_size(each.size_bytes);
            row[4] = fmt::format("{:%F %T}", fmt::gmtime(std::chrono::system_clock::to_time_t(each.created)));
        }
        rows.push_back(std::move(row));
    }
    const std::size_t problems = listed.size() - static_cast<std::size_t>(std::ranges::count_if(
                                                     listed, &std::string::empty, &segment_info::problem));
    std::string counts = readable_count(listed.size() - problems, "segment", "segments");
    if (problems > 0)
        counts += ", " + readable_count(problems, "file with a problem", "files with a problem");
    std::string text =
        fmt::format("{}: {}, {}\n", segment_folder().string(), counts, readable_size(total_bytes));
    if (listed.empty()) return text;
    std::array<std::size_t, 5> widths{};
    for (const table_row& row : rows) {
        for (std::size_t column = 0; column < widths.size(); ++column)
            widths[column] = std::max(widths[column], row[column].size());
    }
    for (const table_row& row : rows) {
        for (std::size_t column = 0; column < widths.size(); ++column)
            text += fmt::format("{:<{}}  ", row[column], widths[column]);
        text += row.back() + "\n";
    }
    return text;
}

}  // namespace

void pin(const argument_list& arguments) {
    CLI::App app(
        "Copies arrays into shared memory, once for all processes of this user, until `unpin SEGMENT`.\n"
        "shm:SEGMENT then opens the copy wherever a FILE is taken, except by `bench load`. Several arrays\n"
        "of a file become a group, whose arrays are opened as shm:SEGMENT/NAME. Compressed arrays are\n"
        "decoded. The segment appears complete or not at all.",
        "pinflow pin");
    std::string file, segment;
    publish_options options;
    app.add_option(
           "FILE", file,
           "A file, or FILE:NAME for an array in it. A quoted pattern means all files that match, as\n"
           "one array")
        ->type_name("")
        ->required();
    app.add_option("SEGMENT", segment, "The name of the segment: 1 to 200 bytes, without slashes")
        ->type_name("")
        ->required();
    app.add_flag(
           "--replace", options.replace,
           "Replace a segment of that name, or a group by a group; processes that have it open keep the\n"
           "old one")
        ->disable_flag_override();
    app.add_flag("--stack", options.stack, "Each file that a pattern matches is one row")
        ->disable_flag_override();
    app.footer(
        "Examples:\n"
        "  pinflow pin data.h5 train\n"
        "  pinflow stream shm:train/images shm:train/labels --order shuffled");
    if (!parse(app, arguments)) return;

    const std::string name = checked_name(segment);
    if (name.find('/') != std::string::npos)
        throw usage_error(fmt::format("SEGMENT takes a name without slashes, not '{}'", name));
    check_stacks(options.stack, find_source(file));
    const clock::time_point start = clock::now();
    std::vector<segment_info> published;
    {
        progress_line line;
        options.progress = [&](std::uint64_t copied_bytes, std::uint64_t total_bytes) {
            if (!line.due()) return;
            const auto copied = static_cast<double>(copied_bytes);
            line.show(fmt::format("{:5.1f} %, {:.2f} GB/s", 100 * copied / static_cast<double>(total_bytes),
                                  copied / seconds_since(start) / 1e9));
        };
        if (file.starts_with(segment_prefix)) {
            published.push_back(publish(name, *open_source_rows(file, {}), options));
        } else {
            published = publish_file(name, file, options);
        }
    }
    const double seconds = seconds_since(start);
    std::uint64_t size_bytes = 0;
    std::string text;
    for (const segment_info& each : published) {
        size_bytes += each.size_bytes;
        text += fmt::format("shm:{}: {} {}, {}\n", escaped(each.name), escaped(each.dtype->descr()),
                            to_string(each.shape), each.path.string());
    }
    text += fmt::format("copied {} in {:.3f} s, {:.2f} GB/s\n", readable_size(size_bytes), seconds,
                        static_cast<double>(size_bytes) / seconds / 1e9);
    print(text);
    print(registering_text(published));
}

void unpin(const argument_list& arguments) {
    CLI::App app(
        "Removes a segment. Processes that have it open keep it until they close it or end; then its memory\n"
        "is free.",
        "pinflow unpin");
    std::string segment;
    app.add_option("SEGMENT", segment,
                   "A segment, a group of segments with all of its arrays, or SEGMENT/NAME for one of these")
        ->type_name("")
        ->required();
    if (!parse(app, arguments)) return;
    remove_segment(checked_name(segment));
}

void list(const argument_list& arguments) {
    CLI::App app("Lists the segments of this user, and files in their folder that are not segments.",
                 "pinflow list");
    bool json = false;
    app.add_flag("--json", json, "Print one JSON object")->disable_flag_override();
    if (!parse(app, arguments)) return;
    const std::vector<segment_info> listed = list_segments();
    if (!json) return print(as_text(listed));
    ordered_json segments = ordered_json::array();
    for (const segment_info& each : listed)
        segments.push_back(as_json(each));
    print(json_line({{"folder", segment_folder().string()}, {"segments", std::move(segments)}}));
}

void clean(const argument_list& arguments) {
    CLI::App app(
        "Removes from the folder of segments what killed processes left, and .npy files that are not\n"
        "complete segments. Segments stay: `pinflow unpin` removes them. Files that other users may\n"
        "access stay, too: `pinflow list` names them.",
        "pinflow clean");
    if (!parse(app, arguments)) return;
    std::string text;
    for (const std::filesystem::path& each : clean_segments())
        text += fmt::format("{}: removed\n", escaped(each.string()));
    print(text.empty() ? "nothing to remove\n" : text);
}

}  // namespace pinflow::cli
