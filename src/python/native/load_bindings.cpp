#include "src/python/native/load_bindings.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "pinflow/load.hpp"
#include "src/load/load_plan.hpp"
#include "src/python/native/file_name.hpp"
#include "src/python/native/python_owner.hpp"
#include "src/python/native/tensor.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

/// Once Python ends, a thread that asks for the GIL would be ended in a way that C++ cannot pass on.
void check_not_ending() {
    if (is_ending()) throw error("the load is ended, because Python ends");
}

/// Device memory that a Python function allocates: for a size in bytes it returns the object that owns the
/// memory, its address, and the CUDA stream in whose order it can be used.
class python_memory final : public memory_resource {
 public:
    explicit python_memory(nb::object allocate) : allocate_(std::move(allocate)) {}
    python_memory(const python_memory&) = delete;
    python_memory& operator=(const python_memory&) = delete;
    /// Needs the GIL.
    ~python_memory() override = default;

    std::byte* allocate(std::uint64_t size_bytes, stream_view stream) override {
        std::uintptr_t address = 0;
        std::int64_t made_on = 0;
        check_not_ending();
        {
            const nb::gil_scoped_acquire held;
            const nb::tuple made = nb::cast<nb::tuple>(allocate_(size_bytes));
            address = nb::cast<std::uintptr_t>(made[1]);
            made_on = nb::cast<std::int64_t>(made[2]);
            owners_.emplace(address, keep(made[0]));
        }
        if (const auto view = dlpack::consumer_stream(stream.device(), made_on)) {
            event usable(stream.device());
            usable.record(*view);
            stream.wait(usable);
        }
        return std::bit_cast<std::byte*>(address);
    }
    void deallocate(std::byte* data, std::uint64_t, stream_view) noexcept override {
        owners_.erase(std::bit_cast<std::uintptr_t>(data));  // references are dropped with the GIL, later
    }

    const std::shared_ptr<PyObject>& owner_of(const std::byte* data) const {
        return owners_.at(std::bit_cast<std::uintptr_t>(data));
    }

 private:
    nb::object allocate_;
    std::unordered_map<std::uintptr_t, std::shared_ptr<PyObject>> owners_;
};

/// The memory of a tensor's block.
std::span<std::byte> memory_of(const device_tensor& tensor) {
    return static_cast<const detail::loaded_block*>(tensor.share().get())->bytes();
}

std::function<void(std::uint64_t, std::uint64_t)> progress_of(const nb::object& function) {
    if (function.is_none()) return nullptr;
    return [&function](std::uint64_t done, std::uint64_t total) {
        check_not_ending();
        const nb::gil_scoped_acquire held;
        function(done, total);
    };
}

/// What Python makes tensors of: bytes in host memory that keep what `owner` keeps.
nb::object host_bytes(std::span<std::byte> bytes, std::shared_ptr<const void> owner) {
    auto kept = std::make_unique<std::shared_ptr<const void>>(std::move(owner));
    const nb::capsule capsule(
        kept.get(), [](void* held) noexcept { delete static_cast<std::shared_ptr<const void>*>(held); });
    static_cast<void>(kept.release());
    return nb::cast(
        nb::ndarray<nb::array_api, std::uint8_t, nb::ndim<1>>(bytes.data(), {bytes.size()}, capsule));
}

/// (name, slice axis, begin, end, type), of which an axis of -1 and an empty type mean all and none.
using python_request = std::tuple<std::string, std::int64_t, std::uint64_t, std::uint64_t, std::string>;

std::vector<tensor_request> requests_of(const std::vector<python_request>& wanted) {
    std::vector<tensor_request> requests;
    requests.reserve(wanted.size());
    for (const auto& [name, axis, begin, end, type] : wanted) {
        tensor_request& request = requests.emplace_back();
        request.name = name;
        if (axis >= 0) request.slice = tensor_slice{static_cast<std::size_t>(axis), begin, end};
        if (!type.empty()) request.dtype = dtype::parse(type);
    }
    return requests;
}

load_route route_of(const std::string& name) {
    for (const load_route each :
         {load_route::automatic, load_route::copy, load_route::staged, load_route::both}) {
        if (name == to_string(each)) return each;
    }
    throw invalid_argument("a route is auto, copy, staged or both, not '" + name + "'");
}

nb::dict dict_of(const load_report& report) {
    nb::dict made;
    made["bytes"] = report.size_bytes;
    made["copied_bytes"] = report.copied_bytes;
    made["staged_bytes"] = report.staged_bytes;
    made["mapped_bytes"] = report.mapped_bytes;
    made["threads"] = report.threads;
    made["seconds"] = std::chrono::duration<double>(report.duration).count();
    made["reason"] = report.reason;
    return made;
}

/// Loads tensors. @return (tensors, bases, report): a tensor is (name, type, shape, bytes, index of its base,
/// offset in it). A base is the owner that `allocate` has returned; without `allocate`, bytes of the host
/// device with their address and size.
nb::tuple load(const tensor_files& files, const std::vector<python_request>& wanted,
               const std::string& device_name, const std::string& route, unsigned threads,
               const nb::object& allocate, const nb::object& progress) {
    const std::vector<tensor_request> requests = requests_of(wanted);
    const device on = device::parse(device_name);
    load_options options;
    options.route = route_of(route);
    options.threads = threads;
    std::shared_ptr<python_memory> memory;
    if (!allocate.is_none()) options.resource = memory = std::make_shared<python_memory>(allocate);
    options.progress = progress_of(progress);
    loaded_tensors loaded = [&] {
        const gil_release released;
        return files.load(requests, on, options);
    }();
    nb::list tensors;
    nb::list bases;
    std::unordered_map<const std::byte*, std::size_t> base_of;
    for (const device_tensor& tensor : loaded.tensors) {
        std::size_t index = 0;
        std::uint64_t offset = 0;
        if (tensor.size_bytes() != 0) {
            const std::span<std::byte> base = memory_of(tensor);
            const auto [found, is_new] = base_of.emplace(base.data(), base_of.size());
            if (is_new) {
                if (memory) {
                    bases.append(nb::borrow(memory->owner_of(base.data()).get()));
                } else {
                    bases.append(nb::make_tuple(host_bytes(base, tensor.share()),
                                                std::bit_cast<std::uintptr_t>(base.data()), base.size()));
                }
            }
            index = found->second;
            offset = static_cast<std::uint64_t>(tensor.data() - base.data());
        }
        tensors.append(nb::make_tuple(tensor.name(), tensor.dtype().descr(), tuple_of(tensor.shape()),
                                      tensor.size_bytes(), index, offset));
    }
    return nb::make_tuple(tensors, bases, dict_of(loaded.report));
}

/// Loads tensors to memory of the device's own pool. @return (tensors, report).
nb::tuple load_own(const tensor_files& files, const std::vector<python_request>& wanted,
                   const std::string& device_name, const std::string& route, unsigned threads,
                   const nb::object& progress) {
    const std::vector<tensor_request> requests = requests_of(wanted);
    const device on = device::parse(device_name);
    load_options options;
    options.route = route_of(route);
    options.threads = threads;
    options.progress = progress_of(progress);
    loaded_tensors loaded = [&] {
        const gil_release released;
        return files.load(requests, on, options);
    }();
    nb::list tensors;
    for (device_tensor& tensor : loaded.tensors)
        tensors.append(nb::cast(std::make_shared<device_tensor>(std::move(tensor))));
    return nb::make_tuple(tensors, dict_of(loaded.report));
}

nb::object export_tensor(const device_tensor& tensor, const nb::object& stream, const nb::object& max_version,
                         const nb::object& dl_device, const nb::object& copy) {
    const export_request request = request_of(tensor.device(), stream, max_version, dl_device, copy);
    const auto view = dlpack::consumer_stream(tensor.device(), request.stream);
    const auto exported = [&]<typename Managed>(Managed*) {
        return capsule_of(view ? to_dlpack<Managed>(tensor, *view) : to_dlpack<Managed>(tensor));
    };
    return request.versioned ? exported(static_cast<dlpack::managed_tensor_versioned*>(nullptr))
                             : exported(static_cast<dlpack::managed_tensor*>(nullptr));
}

/// (name, type, shape, address); `owners` are alive as long as the call lasts.
using python_tensor = std::tuple<std::string, std::string, std::vector<std::uint64_t>, std::uintptr_t>;

void save(const file_name& path, const std::vector<python_tensor>& tensors,
          const std::vector<std::pair<std::string, std::string>>& metadata, const std::string& device_name,
          std::optional<std::int64_t> consumer) {
    std::vector<tensor_to_save> saved;
    saved.reserve(tensors.size());
    for (const auto& [name, type, shape, address] : tensors)
        saved.push_back({name, dtype::parse(type), shape, std::bit_cast<const std::byte*>(address)});
    const std::map<std::string, std::string> texts(metadata.begin(), metadata.end());
    const device on = device::parse(device_name);
    const gil_release released;
    if (const auto view =
            on.kind() == device_kind::host ? std::nullopt : dlpack::consumer_stream(on, consumer)) {
        save_tensors(path.bytes, saved, *view, texts);
    } else {
        save_tensors(path.bytes, saved, stream(on), texts);
    }
}

std::shared_ptr<tensor_files> open_files(const std::vector<file_name>& names) {
    std::vector<std::filesystem::path> paths;
    for (const file_name& each : names)
        paths.emplace_back(each.bytes);
    const gil_release released;
    return std::make_shared<tensor_files>(std::move(paths));
}

}  // namespace

void bind_loads(nb::module_& module) {
    nb::class_<device_tensor>(module, "DeviceTensor")
        .def_prop_ro("name", [](const device_tensor& self) { return self.name(); })
        .def_prop_ro("dtype", [](const device_tensor& self) { return self.dtype().descr(); })
        .def_prop_ro("shape", [](const device_tensor& self) { return tuple_of(self.shape()); })
        .def_prop_ro("nbytes", [](const device_tensor& self) { return self.size_bytes(); })
        .def_prop_ro("device", [](const device_tensor& self) { return self.device().name(); })
        .def_prop_ro("address",
                     [](const device_tensor& self) { return std::bit_cast<std::uintptr_t>(self.data()); })
        .def("dlpack_device", [](const device_tensor& self) { return dlpack_device_of(self.device()); })
        .def("export", &export_tensor, nb::arg("stream").none(), nb::arg("max_version").none(),
             nb::arg("dl_device").none(), nb::arg("copy").none());
    nb::class_<tensor_files>(module, "TensorFiles")
        .def("tensors",
             [](const tensor_files& self) {
                 nb::list all;
                 for (const tensor_description& each : self.tensors())
                     all.append(nb::make_tuple(each.name, each.dtype.descr(), tuple_of(each.shape),
                                               each.size_bytes));
                 return all;
             })
        .def("metadata",
             [](const tensor_files& self) {
                 nb::dict texts;
                 for (const auto& [key, text] : self.metadata())
                     texts[nb::str(key.data(), key.size())] = nb::str(text.data(), text.size());
                 return texts;
             })
        .def(
            "select",
            [](const tensor_files& self, const std::vector<std::string>& patterns) {
                return self.select(patterns);
            },
            nb::arg("patterns"))
        .def("require_all", &tensor_files::require_all)
        .def(
            "check", [](const tensor_files& self, const std::string& name) { self.tensor(name); },
            nb::arg("name"))
        .def("load", &load, nb::arg("requests"), nb::arg("device"), nb::arg("route"), nb::arg("threads"),
             nb::arg("allocate").none(), nb::arg("progress").none())
        .def("load_own", &load_own, nb::arg("requests"), nb::arg("device"), nb::arg("route"),
             nb::arg("threads"), nb::arg("progress").none());
    module.def("tensor_files", &open_files, nb::arg("paths"));
    module.def("save_tensors", &save, nb::arg("path"), nb::arg("tensors"), nb::arg("metadata"),
               nb::arg("device"), nb::arg("stream").none());
}

}  // namespace pinflow::python
