#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "pinflow/device.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/json.hpp"
#include "src/cli/output.hpp"

namespace pinflow::cli {

void list_devices(const argument_list& arguments) {
    CLI::App app("Lists the devices that batches can be streamed to.", "pinflow devices");
    bool json = false;
    app.add_flag("--json", json, "Print one JSON object")->disable_flag_override();
    if (!parse(app, arguments)) return;

    std::string text;
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (const device& each : device::all()) {
        const device::memory_sizes memory = each.memory();
        text += fmt::format("{:<8} {}, {} of memory, {} free\n", each.name(), escaped(each.model()),
                            readable_size(memory.total_bytes), readable_size(memory.free_bytes));
        list.push_back({{"name", each.name()},
                        {"kind", each.kind() == device_kind::host ? "host" : "cuda"},
                        {"model", each.model()},
                        {"memory_total_bytes", memory.total_bytes},
                        {"memory_free_bytes", memory.free_bytes}});
    }
    const std::string no_cuda_reason = device::no_cuda_reason();
    if (!no_cuda_reason.empty()) text += fmt::format("no CUDA: {}\n", escaped(no_cuda_reason));
    nlohmann::ordered_json object{{"devices", std::move(list)}, {"no_cuda_reason", nullptr}};
    if (!no_cuda_reason.empty()) object["no_cuda_reason"] = no_cuda_reason;
    print(json ? json_line(object) : text);
}

}  // namespace pinflow::cli
