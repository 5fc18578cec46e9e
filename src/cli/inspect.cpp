#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "pinflow/formats/open.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/json.hpp"
#include "src/cli/open.hpp"
#include "src/cli/output.hpp"
#include "src/cli/pattern_array.hpp"

namespace pinflow::cli {

namespace {

using nlohmann::ordered_json;

/// Adds to the reason of an array, or of the files of a pattern, what its order means for streaming.
void explain_order(array_listing& listed, bool is_pattern) {
    if (!has_scattered_rows(listed)) return;
    listed.reason +=
        "; in Fortran order, so its rows are not contiguous: convert it to C order to stream its rows";
    if (is_pattern) listed.reason += ", or use --stack to make each file one row";
}

// ---- JSON -------------------------------------------------------------------------------------------------

/// Adds the keys that describe an array. If it cannot be opened, the values that are not known are null.
void describe(ordered_json& object, const array_listing& listed) {
    const bool known = listed.dtype.has_value();
    object["dtype"] = known ? ordered_json(listed.dtype->descr()) : ordered_json();
    object["shape"] = known ? ordered_json(listed.shape) : ordered_json();
    object["fortran_order"] = known ? ordered_json(listed.fortran_order) : ordered_json();
    object["offset_bytes"] = listed.offset_bytes ? ordered_json(*listed.offset_bytes) : ordered_json();
    object["size_bytes"] = known ? ordered_json(listed.size_bytes) : ordered_json();
    object["mappable"] = listed.mappable;
    object["reason"] = listed.reason;
}

/// @param has_name false for a whole .npy file and for a pattern, whose arrays have no name.
std::string one_as_json(file_format format, const array_listing& listed, bool has_name,
                        std::size_t file_count = 0) {
    ordered_json object{{"format", to_string(format)}};
    if (file_count > 0) object["files"] = file_count;
    if (has_name) object["name"] = listed.name;
    describe(object, listed);
    return json_line(object);
}

std::string all_as_json(file_format format, const std::vector<array_listing>& listed) {
    ordered_json arrays = ordered_json::array();
    for (const array_listing& each : listed) {
        ordered_json object{{"name", each.name}};
        describe(object, each);
        arrays.push_back(std::move(object));
    }
    return json_line({{"format", to_string(format)}, {"arrays", std::move(arrays)}});
}

// ---- text -------------------------------------------------------------------------------------------------

std::string one_as_text(const std::string& name, file_format format, const array_listing& listed,
                        std::size_t file_count = 0) {
    std::string text = fmt::format("{}\nformat    {}{}\n", escaped(name), to_string(format),
                                   file_count > 0 ? ", " + readable_count(file_count, "file", "files") : "");
    if (listed.dtype) {
        text += fmt::format(
            "dtype     {}\n"
            "shape     {}, in {} order\n"
            "data      {}{}\n",
            escaped(listed.dtype->descr()), to_string(listed.shape), listed.fortran_order ? "Fortran" : "C",
            readable_size(listed.size_bytes),
            listed.offset_bytes ? fmt::format(" at offset {}", *listed.offset_bytes) : "");
    }
    return text + fmt::format("mappable  {}: {}\n", listed.mappable ? "yes" : "no", escaped(listed.reason));
}

std::string all_as_text(const std::string& name, file_format format,
                        const std::vector<array_listing>& listed) {
    using table_row = std::array<std::string, 6>;
    std::vector<table_row> rows{{"name", "dtype", "shape", "data", "offset", "mappable"}};
    for (const array_listing& each : listed) {
        table_row row{escaped(each.name), "-", "-", "-", "-", each.mappable ? "yes: " : "no: "};
        if (each.dtype) {
            row[1] = escaped(each.dtype->descr());
            row[2] = to_string(each.shape);
            row[3] = readable_size(each.size_bytes);
        }
        if (each.offset_bytes) row[4] = fmt::format("{}", *each.offset_bytes);
        row[5] += escaped(each.reason);
        rows.push_back(std::move(row));
    }
    constexpr std::size_t max_width = 40;  // a longer entry pushes its own line only
    std::array<std::size_t, 5> widths{};
    for (const table_row& row : rows) {
        for (std::size_t column = 0; column < widths.size(); ++column) {
            widths[column] = std::max(widths[column], std::min(row[column].size(), max_width));
        }
    }
    std::string text = fmt::format("{}: {}, {}\n", escaped(name), to_string(format),
                                   readable_count(listed.size(), "array", "arrays"));
    for (const table_row& row : rows) {
        for (std::size_t column = 0; column < widths.size(); ++column) {
            text += fmt::format("{:<{}}  ", row[column], widths[column]);
        }
        text += row.back() + "\n";
    }
    return text;
}

// ---- patterns ---------------------------------------------------------------------------------------------

void inspect_pattern(const std::string& text, bool stack, bool json) {
    const pattern_array whole(text, stack);
    array_listing listed = whole.description();
    explain_order(listed, true);
    print(json ? one_as_json(whole.format(), listed, false, whole.file_count())
               : one_as_text(text, whole.format(), listed, whole.file_count()));
}

}  // namespace

void inspect(const argument_list& arguments) {
    CLI::App app("Lists the arrays of a file, and says whether each can be mapped. Reads headers only.",
                 "pinflow inspect");
    std::string file;
    bool json = false;
    bool stack = false;
    app.add_option(
           "FILE", file,
           "A file, or FILE:NAME for an array in it. A quoted pattern means all files that match, as one\n"
           "array")
        ->type_name("")
        ->required();
    app.add_flag("--stack", stack, "Each file that a pattern matches is one row")->disable_flag_override();
    app.add_flag("--json", json, "Print one JSON object")->disable_flag_override();
    if (!parse(app, arguments)) return;

    if (std::vector<array_listing> group = list_group(file); !group.empty()) {
        check_stacks(stack, {file, std::nullopt, file_format::npy, std::nullopt});
        return print(json ? all_as_json(file_format::npy, group)
                          : all_as_text(file, file_format::npy, group));
    }
    const source_argument source = find_source(file);
    check_stacks(stack, source);
    if (source.is_pattern()) return inspect_pattern(file, stack, json);
    const file_format format = *source.format;
    std::vector<array_listing> listed;
    if (source.name) {
        listed.push_back(find_array(source));
    } else {
        listed = list_arrays(source.path);
    }
    for (array_listing& each : listed) {
        if (source.type) each.dtype = source.type;
        explain_order(each, false);
    }
    if (listed.size() == 1) {
        const array_listing& only = listed.front();
        const bool has_name = source.name || format != file_format::npy;
        const std::string label = has_name && !source.name ? file + ":" + only.name : file;
        print(json ? one_as_json(format, only, has_name) : one_as_text(label, format, only));
    } else {
        print(json ? all_as_json(format, listed) : all_as_text(file, format, listed));
    }
}

}  // namespace pinflow::cli
