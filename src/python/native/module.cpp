// pinflow._native: what the Python package is made of. Its users import pinflow.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "pinflow/device.hpp"
#include "pinflow/fault_guard.hpp"
#include "pinflow/loader/shard.hpp"
#include "pinflow/version.hpp"
#include "src/core/memory_limits.hpp"
#include "src/python/native/embedding_bindings.hpp"
#include "src/python/native/errors.hpp"
#include "src/python/native/flat_bindings.hpp"
#include "src/python/native/load_bindings.hpp"
#include "src/python/native/loader_bindings.hpp"
#include "src/python/native/opened_array.hpp"
#include "src/python/native/python_owner.hpp"
#include "src/python/native/table_bindings.hpp"
#include "src/python/native/tensor.hpp"

namespace nb = nanobind;

NB_MODULE(_native, module) {
    using namespace pinflow;
    // batches and loaders may live until the process ends
    nb::set_leak_warnings(false);
    python::register_errors(nb::module_::import_("pinflow._errors"));
    python::bind_tensors(module);
    python::bind_arrays(module);
    python::bind_loaders(module);
    python::bind_tables(module);
    python::bind_flat_parameters(module);
    python::bind_loads(module);
    python::bind_embedding_tables(module);
    module.attr("version") = std::string(version);
    module.def("install_fault_guard", &install_fault_guard);
    module.def("shard_from_environment", [] {
        const shard found = shard_from_environment();
        return nb::make_tuple(found.rank, found.world);
    });
    module.def("no_cuda_reason", &device::no_cuda_reason, nb::call_guard<python::gil_release>());
    module.def("require_memory",
               [](std::uint64_t size_bytes, const std::string& subject, const std::string& help) {
                   const python::gil_release released;
                   detail::require_memory(size_bytes, subject, help);
               });
    module.def("devices", [] {
        nb::list found;
        const auto all = [] {
            const python::gil_release released;
            return device::all();
        }();
        for (const device& each : all) {
            const device::memory_sizes memory = each.memory();
            nb::dict one;
            one["name"] = each.name();
            one["model"] = each.model();
            one["total_bytes"] = memory.total_bytes;
            one["free_bytes"] = memory.free_bytes;
            found.append(one);
        }
        return found;
    });
}
