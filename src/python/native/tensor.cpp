#include "src/python/native/tensor.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <bit>
#include <cstdint>
#include <string>
#include <utility>

#include "loader/slot_lease.hpp"
#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "src/python/native/python_owner.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

template <typename Managed>
constexpr const char* capsule_name = "dltensor";
template <>
constexpr const char* capsule_name<dlpack::managed_tensor_versioned> = "dltensor_versioned";

/// Deletes a tensor that no consumer took: a consumer renames the capsule.
template <typename Managed>
void delete_untaken(PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, capsule_name<Managed>) == 0) return;
    auto* const managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, capsule_name<Managed>));
    managed->deleter(managed);
}

template <typename Managed>
nb::object new_capsule(dlpack::exported_tensor<Managed> exported) {
    PyObject* const capsule = PyCapsule_New(exported.get(), capsule_name<Managed>, &delete_untaken<Managed>);
    if (capsule == nullptr) throw nb::python_error();
    exported.release();  // NOLINT(bugprone-unused-return-value): the capsule owns it
    return nb::steal(capsule);
}

template <typename Managed>
nb::object export_as(const tensor& exported, const export_request& request) {
    const auto stream = dlpack::consumer_stream(exported.device(), request.stream);
    return capsule_of(stream ? to_dlpack<Managed>(exported.of(), exported.index(), *stream)
                             : to_dlpack<Managed>(std::as_const(exported.of()), exported.index()));
}

nb::object export_tensor(const tensor& exported, nb::handle stream, nb::handle max_version,
                         nb::handle dl_device, nb::handle copy) {
    drop_given_up();
    const export_request request = request_of(exported.device(), stream, max_version, dl_device, copy);
    return request.versioned ? export_as<dlpack::managed_tensor_versioned>(exported, request)
                             : export_as<dlpack::managed_tensor>(exported, request);
}

std::uintptr_t address_of(const array_view& view) {
    return view.size_bytes() == 0 ? 0 : std::bit_cast<std::uintptr_t>(view.data());
}

/// The list that describes the fields of a structured type in an array interface.
nb::list fields_of(const dtype& type) {
    nb::list fields;
    std::uint64_t end = 0;
    const auto add_gap = [&](std::uint64_t until) {
        if (until > end)
            fields.append(nb::make_tuple("", nb::str(("|V" + std::to_string(until - end)).c_str())));
    };
    for (const dtype_field& field : type.fields()) {
        add_gap(field.offset_bytes);
        nb::object kind;
        if (field.type.is_structured()) {
            kind = fields_of(field.type);
        } else {
            kind = typestr_of(field.type);
        }
        if (field.shape.empty()) {
            fields.append(nb::make_tuple(nb::str(field.name.c_str()), kind));
        } else {
            fields.append(nb::make_tuple(nb::str(field.name.c_str()), kind, tuple_of(field.shape)));
        }
        end = field.offset_bytes + field.size_bytes();
    }
    add_gap(type.size_bytes());
    return fields;
}

/// Whether there is padding between or behind the fields of a structured type. numpy would take it for
/// fields.
bool has_padding(const dtype& type) {
    std::uint64_t end = 0;
    for (const dtype_field& field : type.fields()) {
        if (field.offset_bytes != end || has_padding(field.type)) return true;
        end += field.size_bytes();
    }
    return type.is_structured() && end != type.size_bytes();
}

/// What both array interfaces have. Elements of a type with padding are opaque bytes.
nb::dict interface_of(const array_view& view, bool read_only) {
    nb::dict interface;
    interface["version"] = 3;
    interface["shape"] = tuple_of(view.shape());
    interface["typestr"] = typestr_of(view.dtype());
    interface["data"] = nb::make_tuple(address_of(view), read_only);
    if (view.c_contiguous()) {
        interface["strides"] = nb::none();
    } else {
        nb::list strides;
        for (const std::int64_t stride : view.strides_bytes())
            strides.append(stride);
        interface["strides"] = nb::tuple(strides);
    }
    if (view.dtype().is_structured() && !has_padding(view.dtype()))
        interface["descr"] = fields_of(view.dtype());
    return interface;
}

/// Whether it is a view of the source's memory. Empty tensors are not: PyTorch warns of read-only ones.
bool is_read_only(const tensor& self) {
    return self.view().size_bytes() > 0 && !detail::lease_of(self.of())->pool().viewed_sources().empty();
}

/// The interface of a tensor in host memory, also for types with padding.
nb::dict host_interface(const tensor& self) {
    if (self.device().kind() != device_kind::host)
        throw nb::attribute_error("__array_interface__: the tensor is on a GPU");
    return array_interface_of(self.view(), is_read_only(self));
}

/// The interface by which numpy reads a tensor in host memory. Types with padding are refused: use
/// `Tensor.numpy`.
nb::dict public_interface(const tensor& self) {
    if (has_padding(self.view().dtype()))
        throw nb::attribute_error("__array_interface__: the elements have padding between their fields");
    return host_interface(self);
}

/// Numba's interface, version 3: the data is ready for work on the stream that it names.
nb::dict cuda_interface(const tensor& self) {
    if (self.device().kind() == device_kind::host)
        throw nb::attribute_error("__cuda_array_interface__: the tensor is in host memory");
    nb::dict interface = interface_of(self.view(), false);
    constexpr int legacy_default = 1;
    self.of().used_on(*dlpack::consumer_stream(self.device(), legacy_default));
    interface["stream"] = legacy_default;
    return interface;
}

}  // namespace

tensor::~tensor() {
    release_without_gil(batch_);
}

void release_without_gil(std::shared_ptr<batch>& held) noexcept {
    // Other owners end the lease. Once Python is ending, a thread that gives the GIL back may never get it
    // again.
    if (!held || held.use_count() > 1 || is_ending()) {
        held.reset();
        return;
    }
    std::shared_ptr<batch> last = std::move(held);
    // the end of the lease may take locks, and CUDA may block on a full stream
    const gil_release released;
    last.reset();
}

void use_on(std::shared_ptr<batch> held, const device& device, std::int64_t stream, nb::handle owner) {
    const auto used = dlpack::consumer_stream(device, stream);
    if (!used) return;
    std::shared_ptr<PyObject> kept = owner.is_none() ? nullptr : keep(owner);
    const gil_release released;
    held->used_on(*used, std::move(kept));
    held.reset();
}

nb::tuple tuple_of(const shape_vector& lengths) {
    nb::list list;
    for (const std::uint64_t length : lengths)
        list.append(length);
    return nb::tuple(list);
}

nb::str typestr_of(const dtype& type) {
    const bool is_raw = type.kind() == dtype_kind::opaque || !type.is_known_to_numpy();
    return nb::str((is_raw ? "|V" + std::to_string(type.size_bytes()) : type.descr()).c_str());
}

nb::dict array_interface_of(const array_view& view, bool read_only) {
    return interface_of(view, read_only);
}

export_request request_of(const device& device, nb::handle stream, nb::handle max_version,
                          nb::handle dl_device, nb::handle copy) {
    const int wants_copy = PyObject_IsTrue(copy.ptr());
    if (wants_copy < 0) throw nb::python_error();
    if (wants_copy > 0) throw unsupported("pinflow exports no copies: take the tensor, and copy it");
    if (!dl_device.is_none() && !nb::object(dlpack_device_of(device)).equal(nb::tuple(dl_device)))
        throw unsupported("pinflow exports a tensor on its own device only: take it, and copy it to another");
    export_request request;
    if (!stream.is_none()) {
        std::int64_t number = 0;
        if (!nb::try_cast(stream, number))
            throw invalid_argument("the argument stream of __dlpack__ is a whole number or None");
        request.stream = number;
    }
    if (!max_version.is_none()) {
        int major = 0;
        if (!nb::isinstance<nb::sequence>(max_version) || nb::len(max_version) == 0 ||
            !nb::try_cast(max_version[0], major))
            throw invalid_argument("the argument max_version of __dlpack__ is two whole numbers or None");
        request.versioned = major >= 1;
    }
    return request;
}

nb::object capsule_of(dlpack::exported_tensor<dlpack::managed_tensor> exported) {
    return new_capsule(std::move(exported));
}
nb::object capsule_of(dlpack::exported_tensor<dlpack::managed_tensor_versioned> exported) {
    return new_capsule(std::move(exported));
}

nb::object capsule_of(const array& array, const export_request& request) {
    // on the host, only "no stream" is allowed
    static_cast<void>(dlpack::consumer_stream(device::host(), request.stream));
    return request.versioned ? capsule_of(to_dlpack<dlpack::managed_tensor_versioned>(array))
                             : capsule_of(to_dlpack<dlpack::managed_tensor>(array));
}

nb::tuple dlpack_device_of(const device& device) {
    const auto type =
        device.kind() == device_kind::host ? dlpack::device_type::cpu : dlpack::device_type::cuda;
    return nb::make_tuple(static_cast<int>(type), device.index());
}

std::optional<int> gpu_of(const device& device) {
    if (device.kind() == device_kind::host) return std::nullopt;
    return device.index();
}

void bind_tensors(nb::module_& module) {
    nb::class_<tensor>(module, "Tensor")
        .def_prop_ro(
            "shape", [](const tensor& self) { return tuple_of(self.view().shape()); },
            nb::sig("def shape(self, /) -> tuple[int, ...]"),
            "The number of rows of the batch, and the shape of a row.")
        .def_prop_ro("_dtype", [](const tensor& self) { return self.view().dtype().descr(); })
        .def_prop_ro(
            "nbytes", [](const tensor& self) { return self.view().size_bytes(); }, "Bytes of all elements.")
        .def_prop_ro(
            "device", [](const tensor& self) { return self.device().name(); }, "'host' or 'cuda:N'.")
        .def_prop_ro("_gpu", [](const tensor& self) { return gpu_of(self.device()); })
        .def_prop_ro("_address", [](const tensor& self) { return address_of(self.view()); })
        .def("__len__",
             [](const tensor& self) {
                 if (self.view().shape().empty()) throw nb::type_error("a tensor without axes has no length");
                 return self.view().shape()[0];
             })
        .def("__dlpack_device__", [](const tensor& self) { return dlpack_device_of(self.device()); })
        .def("__dlpack__", &export_tensor, nb::kw_only(), nb::arg("stream") = nb::none(),
             nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
             nb::arg("copy") = nb::none(),
             "A DLPack capsule, by the array API standard: `stream` (None or 1: CUDA's legacy default "
             "stream, 2: "
             "the\nper-thread one, -1: none) is made to wait for the data. No copies are made.")
        .def(
            "_used_on",
            [](const tensor& self, std::int64_t stream, const nb::object& owner) {
                use_on(self.shared(), self.device(), stream, owner);
            },
            nb::arg("stream"), nb::arg("owner") = nb::none())
        .def_prop_ro("_interface", &host_interface)
        .def_prop_ro("_is_read_only", [](const tensor& self) { return is_read_only(self); })
        .def_prop_ro("__array_interface__", &public_interface)
        .def_prop_ro("__cuda_array_interface__", &cuda_interface);
}

}  // namespace pinflow::python
