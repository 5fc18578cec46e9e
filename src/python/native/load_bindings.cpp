#include "src/python/native/load_bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "pinflow/load.hpp"
#include "src/core/fault_guard.hpp"
#include "src/load/load_plan.hpp"
#include "src/python/native/file_name.hpp"
#include "src/python/native/python_owner.hpp"
#include "src/python/native/tensor.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

/// Throws if Python is ending. Taking the GIL would then block this thread forever, while other threads of
/// the load run on.
void check_not_ending() {
    if (may_not_take_gil()) throw error("the load or save was ended because Python is exiting");
}

/// Device memory that a Python function allocates: for a size in bytes it returns the object that owns the
/// memory, its address, and the CUDA stream in whose order it can be used. May be destroyed without the GIL.
class python_memory final : public memory_resource {
 public:
    explicit python_memory(nb::handle allocate) : allocate_(keep(allocate)) {}

    std::byte* allocate(std::uint64_t size_bytes, stream_view stream) override {
        std::uintptr_t address = 0;
        std::int64_t made_on = 0;
        std::unique_ptr<PyObject, decltype(&drop)> object(nullptr, &drop);
        check_not_ending();
        with_gil([&] {
            const nb::tuple made = nb::cast<nb::tuple>(nb::handle(allocate_.get())(size_bytes));
            address = nb::cast<std::uintptr_t>(made[1]);
            made_on = nb::cast<std::int64_t>(made[2]);
            object.reset(nb::object(made[0]).release().ptr());
        });
        // an idle stream has no work left that uses the memory
        if (const auto view = dlpack::consumer_stream(stream.device(), made_on); view && !view->done()) {
            event usable(stream.device());
            usable.record(*view);
            stream.wait(usable);
        }
        const std::scoped_lock lock(mutex_);
        owner& added = owners_[address];
        added = {object.release(), size_bytes};
        return std::bit_cast<std::byte*>(address);
    }
    void deallocate(std::byte* data, std::uint64_t, stream_view) noexcept override {
        PyObject* object = nullptr;
        {
            const std::scoped_lock lock(mutex_);
            const auto found = owners_.find(std::bit_cast<std::uintptr_t>(data));
            object = found->second.object;
            owners_.erase(found);
        }
        drop(object);
    }
    /// The object that owns exactly these bytes, borrowed; null if there is none.
    PyObject* owner_of(const std::byte* data, std::uint64_t size_bytes) {
        const std::scoped_lock lock(mutex_);
        const auto found = owners_.find(std::bit_cast<std::uintptr_t>(data));
        const bool is_whole = found != owners_.end() && found->second.size_bytes == size_bytes;
        return is_whole ? found->second.object : nullptr;
    }

 private:
    struct owner {
        PyObject* object = nullptr;  ///< an owned reference
        std::uint64_t size_bytes = 0;
    };
    std::shared_ptr<PyObject> allocate_;
    std::mutex mutex_;
    std::unordered_map<std::uintptr_t, owner> owners_;  ///< by address
};

std::function<void(std::uint64_t, std::uint64_t)> progress_of(const nb::object& function) {
    return [&function](std::uint64_t done, std::uint64_t total) {
        check_not_ending();
        with_gil([&] {
            if (PyErr_CheckSignals() != 0) throw nb::python_error();  // KeyboardInterrupt
            if (!function.is_none()) function(done, total);
        });
    };
}

/// (axis, begin, end)
using python_slice = std::tuple<std::size_t, std::uint64_t, std::uint64_t>;
/// (name, slices, type). An empty type means no cast.
using python_request = std::tuple<file_name, std::vector<python_slice>, std::string>;

/// @param destinations an address for each request, or none.
std::vector<tensor_request> requests_of(const std::vector<python_request>& wanted,
                                        const std::vector<std::uintptr_t>& destinations) {
    std::vector<tensor_request> requests;
    requests.reserve(wanted.size());
    for (const auto& [name, slices, type] : wanted) {
        tensor_request& request = requests.emplace_back();
        request.name = name.bytes;
        for (const auto& [axis, begin, end] : slices)
            request.further_slices.push_back({axis, begin, end});
        if (!type.empty()) request.dtype = dtype::parse(type);
        if (!destinations.empty())
            request.destination = std::bit_cast<std::byte*>(destinations.at(requests.size() - 1));
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

/// How a load is done, and what its tensors become.
struct python_options {
    std::string device;
    std::string route;
    unsigned threads = 0;
    bool as_capsules = false;
    nb::object allocate;
    nb::object progress;
};

/// Whether every version of PyTorch takes elements of this type from a capsule: old ones take no 8-bit
/// floats.
bool is_taken_by_any_torch(const dtype& type) {
    return dlpack::type_of(type).code < dlpack::type_code::float8_e4m3fn;
}

/// What PyTorch makes a tensor of. Returns one of:
/// (None, type, shape) if there are no elements;
/// (owner, type, shape) if the tensor takes a whole allocation of `memory`, which the owner has;
/// (capsule of bytes, type, None) for 8-bit floats;
/// otherwise a capsule.
nb::object for_torch(const device_tensor& tensor, python_memory* memory) {
    const auto tuple_with = [&](const nb::object& part, const nb::object& shape) {
        return nb::make_tuple(part, tensor.dtype().descr(), shape);
    };
    if (tensor.size_bytes() == 0) return tuple_with(nb::none(), tuple_of(tensor.shape()));
    PyObject* const owner =
        memory == nullptr ? nullptr : memory->owner_of(tensor.data(), tensor.size_bytes());
    if (owner != nullptr) return tuple_with(nb::borrow(owner), tuple_of(tensor.shape()));
    auto exported = to_dlpack<dlpack::managed_tensor>(tensor);
    if (is_taken_by_any_torch(tensor.dtype())) return capsule_of(std::move(exported));
    exported->dl_tensor.dtype = dlpack::type_of(dtype::parse("|u1"));
    return tuple_with(capsule_of(std::move(exported)), nb::none());
}

/// Checks that a tensor can become one of another library.
void check_type(const std::string& name, const dtype& type) {
    try {
        static_cast<void>(dlpack::type_of(type));
    } catch (const unsupported&) {
        throw unsupported("cannot make a PyTorch tensor of '" + name + "', which has elements of " +
                          type.descr() +
                          "; load it to the CPU with framework='np', or select the other tensors by `names`");
    }
}

load_options options_of(const python_options& wanted) {
    load_options options;
    options.route = route_of(wanted.route);
    options.threads = wanted.threads;
    if (!wanted.allocate.is_none()) options.resource = std::make_shared<python_memory>(wanted.allocate);
    options.progress = progress_of(wanted.progress);
    return options;
}

/// @return (names, tensors, report): the tensors are DeviceTensor objects, or what for_torch returns.
nb::tuple for_python(loaded_tensors loaded, const python_options& wanted, memory_resource* resource) {
    auto* const memory = dynamic_cast<python_memory*>(resource);
    if (wanted.as_capsules) {
        for (const device_tensor& tensor : loaded.tensors)
            check_type(tensor.name(), tensor.dtype());
    }
    nb::list names;
    nb::list tensors;
    for (device_tensor& tensor : loaded.tensors) {
        names.append(text_of(tensor.name()));
        if (wanted.as_capsules) {
            tensors.append(for_torch(tensor, memory));
        } else {
            tensors.append(nb::cast(std::make_shared<device_tensor>(std::move(tensor))));
        }
    }
    return nb::make_tuple(names, tensors, dict_of(loaded.report));
}

/// Drops the references that were given up, at its beginning and at its end. So their memory is free after an
/// error, too. Needs the GIL.
class drop_scope {
 public:
    drop_scope() noexcept { drop_given_up(); }
    drop_scope(const drop_scope&) = delete;
    drop_scope& operator=(const drop_scope&) = delete;
    ~drop_scope() { drop_given_up(); }
};

nb::tuple load(const tensor_files& files, const std::vector<tensor_request>& requests,
               const python_options& wanted) {
    const drop_scope around;
    if (wanted.as_capsules) {  // before anything is read
        for (const tensor_request& request : requests)
            check_type(request.name, request.dtype ? *request.dtype : files.tensor(request.name).dtype);
    }
    const device on = device::parse(wanted.device);
    const load_options options = options_of(wanted);
    loaded_tensors loaded = [&] {
        const gil_release released;
        return files.load(requests, on, options);
    }();
    return for_python(std::move(loaded), wanted, options.resource.get());
}

std::vector<std::filesystem::path> paths_of(const std::vector<file_name>& names) {
    std::vector<std::filesystem::path> paths;
    for (const file_name& each : names)
        paths.emplace_back(each.bytes);
    return paths;
}

/// Loads all tensors of the files, or those that names and patterns select. Needs no descriptions, which take
/// time for many small tensors.
nb::tuple load_all(const std::vector<file_name>& files, const std::optional<std::vector<file_name>>& names,
                   const std::string& type, const python_options& wanted) {
    const drop_scope around;
    const device on = device::parse(wanted.device);
    load_options options = options_of(wanted);
    if (!type.empty()) options.dtype = dtype::parse(type);
    if (names) {
        for (const file_name& each : *names)
            options.names.push_back(each.bytes);
    }
    const std::vector<std::filesystem::path> paths = paths_of(files);
    const bool selects_none = names && names->empty();  // in load_options, no names mean all
    loaded_tensors loaded = [&] {
        const gil_release released;
        return selects_none ? tensor_files(paths).load({}, on, options) : load_tensors(paths, on, options);
    }();
    return for_python(std::move(loaded), wanted, options.resource.get());
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

/// (name, type, shape, address). The caller keeps the memory alive during the call.
using python_tensor = std::tuple<std::string, std::string, std::vector<std::uint64_t>, std::uintptr_t>;

void save(const file_name& path, const std::vector<python_tensor>& tensors,
          const std::vector<std::pair<std::string, std::string>>& metadata, const std::string& device_name,
          std::optional<std::int64_t> consumer, const nb::object& progress) {
    std::vector<tensor_to_save> saved;
    saved.reserve(tensors.size());
    for (const auto& [name, type, shape, address] : tensors)
        saved.push_back({name, dtype::parse(type), shape, std::bit_cast<const std::byte*>(address)});
    const std::map<std::string, std::string> texts(metadata.begin(), metadata.end());
    const device on = device::parse(device_name);
    const gil_release released;
    if (const auto view =
            on.kind() == device_kind::host ? std::nullopt : dlpack::consumer_stream(on, consumer)) {
        save_tensors(path.bytes, saved, *view, texts, progress_of(progress));
    } else {
        save_tensors(path.bytes, saved, stream(on), texts, progress_of(progress));
    }
}

/// The elements of an array, for is_readable: axes of long strides, and the bytes that the others cover.
struct element_spans {
    static constexpr std::size_t max_axes = 64;
    std::size_t axis_count = 0;
    std::array<std::uint64_t, max_axes> lengths{};
    std::array<std::int64_t, max_axes> strides{};
    std::uint64_t span_bytes = 0;
};

/// Reads a byte of each page of each span.
void touch(const volatile std::byte* first, const element_spans& elements) noexcept {
    constexpr std::uint64_t step_bytes = 4096;  // the page size, or a divisor of it
    std::array<std::uint64_t, element_spans::max_axes> index{};
    for (;;) {
        for (std::uint64_t at = 0; at < elements.span_bytes; at += step_bytes)
            static_cast<void>(first[at]);
        static_cast<void>(first[elements.span_bytes - 1]);
        std::size_t axis = 0;
        for (; axis < elements.axis_count; ++axis) {
            first += elements.strides[axis];
            if (++index[axis] < elements.lengths[axis]) break;
            first -= elements.strides[axis] * static_cast<std::int64_t>(elements.lengths[axis]);
            index[axis] = 0;
        }
        if (axis == elements.axis_count) return;
    }
}

/// Whether all elements of an array can be read; those in a mapping of a truncated file cannot. Without the
/// fault guard, reading these ends the process.
bool is_readable(std::uintptr_t address, const std::vector<std::uint64_t>& shape,
                 const std::vector<std::int64_t>& strides, std::uint64_t element_bytes) {
    constexpr std::int64_t min_skipped_bytes = 8192;
    element_spans elements;
    elements.span_bytes = element_bytes;
    auto first = static_cast<std::int64_t>(address);
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        if (shape[axis] == 0) return true;
        if (shape[axis] == 1) continue;
        if (std::abs(strides[axis]) >= min_skipped_bytes && elements.axis_count < element_spans::max_axes) {
            elements.lengths[elements.axis_count] = shape[axis];
            elements.strides[elements.axis_count++] = strides[axis];
            continue;
        }
        const std::int64_t way = strides[axis] * static_cast<std::int64_t>(shape[axis] - 1);
        first += std::min<std::int64_t>(way, 0);
        elements.span_bytes += static_cast<std::uint64_t>(std::abs(way));
    }
    const auto* const bytes = std::bit_cast<const volatile std::byte*>(first);
    const element_spans* const spans = &elements;
    const gil_release released;
    return detail::run_guarded([=] { touch(bytes, *spans); });
}

std::shared_ptr<tensor_files> open_files(const std::vector<file_name>& names) {
    std::vector<std::filesystem::path> paths = paths_of(names);
    const gil_release released;
    return std::make_shared<tensor_files>(std::move(paths));
}

}  // namespace

void bind_loads(nb::module_& module) {
    nb::class_<device_tensor>(module, "DeviceTensor")
        .def_prop_ro(
            "name", [](const device_tensor& self) { return text_of(self.name()); },
            nb::sig("def name(self, /) -> str"))
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
                     all.append(nb::make_tuple(text_of(each.name), each.dtype.descr(), tuple_of(each.shape),
                                               each.size_bytes, each.is_mappable));
                 return all;
             })
        .def("refused_names",
             [](const tensor_files& self) {
                 nb::list names;
                 for (const std::string& each : self.refused_names())
                     names.append(text_of(each));
                 return names;
             })
        .def("metadata",
             [](const tensor_files& self) {
                 nb::dict texts;
                 for (const auto& [key, text] : self.metadata())
                     texts[nb::str(key.data(), key.size())] = nb::str(text.data(), text.size());
                 return texts;
             })
        .def(
            "check", [](const tensor_files& self, const file_name& name) { self.tensor(name.bytes); },
            nb::arg("name"))
        .def(
            "load",
            [](const tensor_files& self, const std::vector<python_request>& wanted, const std::string& device,
               const std::string& route, unsigned threads, bool as_capsules, const nb::object& allocate,
               const nb::object& progress, const std::vector<std::uintptr_t>& destinations) {
                return load(self, requests_of(wanted, destinations),
                            {device, route, threads, as_capsules, allocate, progress});
            },
            nb::arg("requests"), nb::arg("device"), nb::arg("route"), nb::arg("threads"),
            nb::arg("as_capsules"), nb::arg("allocate").none(), nb::arg("progress").none(),
            nb::arg("destinations") = std::vector<std::uintptr_t>());
    module.def("tensor_files", &open_files, nb::arg("paths"));
    module.def(
        "load_all",
        [](const std::vector<file_name>& paths, const std::optional<std::vector<file_name>>& names,
           const std::string& type, const std::string& device, const std::string& route, unsigned threads,
           bool as_capsules, const nb::object& allocate, const nb::object& progress) {
            return load_all(paths, names, type, {device, route, threads, as_capsules, allocate, progress});
        },
        nb::arg("paths"), nb::arg("names").none(), nb::arg("dtype"), nb::arg("device"), nb::arg("route"),
        nb::arg("threads"), nb::arg("as_capsules"), nb::arg("allocate").none(), nb::arg("progress").none());
    module.def("has_many_mappings", &detail::has_many_mappings);
    module.def("is_readable", &is_readable, nb::arg("address"), nb::arg("shape"), nb::arg("strides"),
               nb::arg("element_bytes"));
    module.def("save_tensors", &save, nb::arg("path"), nb::arg("tensors"), nb::arg("metadata"),
               nb::arg("device"), nb::arg("stream").none(), nb::arg("progress").none());
}

}  // namespace pinflow::python
