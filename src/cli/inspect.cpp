#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/json.hpp"
#include "src/cli/open.hpp"
#include "src/cli/output.hpp"

namespace pinflow::cli {

namespace {

/// Why the array can or cannot be mapped, and what its order means for streaming.
std::string reason_for(const opened_array& opened) {
    std::string reason = opened.array.reason();
    if (opened.fortran_order && opened.array.shape().size() > 1) {
        reason += "; in Fortran order, so that its rows do not lie together and cannot be streamed";
    }
    return reason;
}

std::string as_json(const opened_array& opened) {
    const array& array = opened.array;
    return json_line({{"format", opened.format},
                      {"dtype", array.dtype().descr()},
                      {"shape", array.shape()},
                      {"fortran_order", opened.fortran_order},
                      {"offset_bytes", array.offset_bytes()},
                      {"size_bytes", array.size_bytes()},
                      {"mappable", array.mapped()},
                      {"reason", reason_for(opened)}});
}

std::string as_text(const std::string& name, const opened_array& opened) {
    const array& array = opened.array;
    return fmt::format(
        "{}\n"
        "format    {}\n"
        "dtype     {}\n"
        "shape     {}, in {} order\n"
        "data      {} at offset {}\n"
        "mappable  {}: {}\n",
        escaped(name), opened.format, array.dtype().descr(), to_string(array.shape()),
        opened.fortran_order ? "Fortran" : "C", readable_size(array.size_bytes()), array.offset_bytes(),
        array.mapped() ? "yes" : "no", escaped(reason_for(opened)));
}

}  // namespace

void inspect(const argument_list& arguments) {
    CLI::App app("Says what lies in a file, and whether it can be mapped. Reads the header only.",
                 "pinflow inspect");
    std::string file;
    bool json = false;
    app.add_option("FILE", file, "A file, or FILE:NAME for an array in it")->type_name("")->required();
    app.add_flag("--json", json, "Print one JSON object")->disable_flag_override();
    if (!parse(app, arguments)) return;

    const opened_array opened = open_argument(file);
    print(json ? as_json(opened) : as_text(file, opened));
}

}  // namespace pinflow::cli
