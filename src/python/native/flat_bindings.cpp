#include "src/python/native/flat_bindings.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "pinflow/train/flat_parameters.hpp"
#include "src/python/native/file_name.hpp"
#include "src/python/native/optimizer_settings.hpp"
#include "src/python/native/python_owner.hpp"
#include "src/python/native/tensor.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

nonfinite_gradients policy_of(const std::string& name) {
    if (name == "update") return nonfinite_gradients::update;
    if (name == "skip") return nonfinite_gradients::skip;
    if (name == "refuse") return nonfinite_gradients::refuse;
    throw invalid_argument("nonfinite is 'update', 'skip' or 'refuse', not '" + name + "'");
}

/// Flat parameters. On the host device they own the stream that all calls use. On CUDA, a call without a
/// stream uses the legacy default stream.
class python_flat {
 public:
    using spec = std::tuple<std::string, std::string, std::vector<std::uint64_t>, std::size_t>;
    using group = std::pair<std::string, numbers_by_name>;

    python_flat(const std::vector<spec>& specs, const std::vector<group>& groups,
                const std::string& device_name, const std::string& nonfinite, bool master_copies,
                std::optional<std::int64_t> stream) {
        std::vector<parameter_spec> parameters;
        parameters.reserve(specs.size());
        for (const auto& [name, type, shape, group_index] : specs)
            parameters.push_back({name, dtype::parse(type), shape, group_index});
        std::vector<optimizer> settings;
        settings.reserve(groups.size());
        for (const auto& [rule, numbers] : groups)
            settings.push_back(optimizer_of(rule, numbers));
        const flat_options options{policy_of(nonfinite), master_copies};
        const gil_release released;
        const device device = device::parse(device_name);
        if (device.kind() == device_kind::host) own_.emplace(detail::synchronous_stream(device));
        flat_.emplace(std::move(parameters), std::move(settings), on(device, stream), options);
    }
    python_flat(const python_flat&) = delete;
    python_flat& operator=(const python_flat&) = delete;
    ~python_flat() {
        const gil_release released;
        flat_.reset();
        own_.reset();
    }

    const flat_parameters& flat() const noexcept { return *flat_; }
    flat_parameters& flat() noexcept { return *flat_; }
    stream_view stream(std::optional<std::int64_t> stream) const { return on(flat_->device(), stream); }

    /// Calls work(flat, stream). On the host it has finished when this returns.
    template <typename Work>
    void run(std::optional<std::int64_t> stream, Work work) {
        const stream_view view = this->stream(stream);
        const gil_release released;
        work(*flat_, view);
        if (own_) view.synchronize();
    }

 private:
    stream_view on(const device& device, std::optional<std::int64_t> stream) const {
        if (own_) return *own_;
        const auto view = dlpack::consumer_stream(device, stream);
        if (!view) throw invalid_argument("this call needs a stream, and stream -1 is none");
        return *view;
    }

    std::optional<pinflow::stream> own_;
    std::optional<flat_parameters> flat_;
};

nb::object export_view(const python_flat& self, std::size_t index, bool gradient, const nb::object& stream,
                       const nb::object& max_version, const nb::object& dl_device, const nb::object& copy) {
    const flat_parameters& flat = self.flat();
    const export_request request = request_of(flat.device(), stream, max_version, dl_device, copy);
    const flat_view view = gradient ? flat_view::gradient : flat_view::parameter;
    return request.versioned ? capsule_of(to_dlpack<dlpack::managed_tensor_versioned>(flat, index, view))
                             : capsule_of(to_dlpack<dlpack::managed_tensor>(flat, index, view));
}

void check_views(const python_flat& self, const std::vector<std::uintptr_t>& parameters,
                 const std::vector<std::uintptr_t>& gradients) {
    const auto pointers = [](const std::vector<std::uintptr_t>& addresses) {
        std::vector<const void*> result;
        result.reserve(addresses.size());
        for (const std::uintptr_t address : addresses)
            result.push_back(std::bit_cast<const void*>(address));
        return result;
    };
    self.flat().check_views(pointers(parameters), pointers(gradients));
}

}  // namespace

void bind_flat_parameters(nb::module_& module) {
    using stream_number = std::optional<std::int64_t>;
    nb::class_<python_flat>(module, "FlatParameters")
        .def(nb::init<const std::vector<python_flat::spec>&, const std::vector<python_flat::group>&,
                      const std::string&, const std::string&, bool, stream_number>(),
             nb::arg("specs"), nb::arg("groups"), nb::arg("device"), nb::arg("nonfinite"),
             nb::arg("master_copies"), nb::arg("stream").none())
        .def("export", &export_view, nb::arg("index"), nb::arg("gradient"), nb::arg("stream").none(),
             nb::arg("max_version").none(), nb::arg("dl_device").none(), nb::arg("copy").none())
        .def("dlpack_device", [](const python_flat& self) { return dlpack_device_of(self.flat().device()); })
        .def_prop_ro("device", [](const python_flat& self) { return self.flat().device().name(); })
        .def_prop_ro("gpu", [](const python_flat& self) { return gpu_of(self.flat().device()); })
        .def_prop_ro("rule",
                     [](const python_flat& self) { return std::string(rule_name(self.flat().group(0))); })
        .def(
            "rate",
            [](const python_flat& self, std::size_t group) { return rate_of(self.flat().group(group)); },
            nb::arg("group"))
        .def("check_views", &check_views, nb::arg("parameters"), nb::arg("gradients"))
        .def(
            "zero",
            [](python_flat& self, stream_number stream) {
                self.run(stream,
                         [](flat_parameters& flat, stream_view on) { flat.zero_gradients_async(on); });
            },
            nb::arg("stream").none())
        .def(
            "clip_norm", [](python_flat& self, double limit) { self.flat().clip_norm(limit); },
            nb::arg("limit"))
        .def(
            "clip_value", [](python_flat& self, double limit) { self.flat().clip_value(limit); },
            nb::arg("limit"))
        .def(
            "step",
            [](python_flat& self, stream_number stream) {
                self.run(stream, [](flat_parameters& flat, stream_view on) { flat.step_async(on); });
            },
            nb::arg("stream").none())
        .def(
            "set_rate",
            [](python_flat& self, std::size_t group, double rate, stream_number stream) {
                self.run(stream, [=](flat_parameters& flat, stream_view on) {
                    flat.set_rate_async(group, rate, on);
                });
            },
            nb::arg("group"), nb::arg("rate"), nb::arg("stream").none())
        .def(
            "use_scale",
            [](python_flat& self, std::uintptr_t scale, std::uintptr_t found) {
                self.flat().use_scale(std::bit_cast<const float*>(scale), std::bit_cast<const float*>(found));
            },
            nb::arg("scale"), nb::arg("found"))
        .def(
            "progress",
            [](const python_flat& self, stream_number stream) {
                const stream_view on = self.stream(stream);
                const auto now = [&] {
                    const gil_release released;
                    return self.flat().read_progress(on);
                }();
                return nb::make_tuple(now.steps, now.skipped, now.norm);
            },
            nb::arg("stream").none(),
            nb::sig("def progress(self, stream: int | None) -> tuple[int, int, float]"))
        .def(
            "check",
            [](const python_flat& self, stream_number stream) {
                const stream_view on = self.stream(stream);
                const gil_release released;
                self.flat().check(on);
            },
            nb::arg("stream").none())
        .def(
            "save",
            [](const python_flat& self, const file_name& path, stream_number stream) {
                const stream_view on = self.stream(stream);
                const gil_release released;
                self.flat().save(path.bytes, on);
            },
            nb::arg("path"), nb::arg("stream").none())
        .def(
            "load",
            [](python_flat& self, const file_name& path, stream_number stream) {
                const stream_view on = self.stream(stream);
                const gil_release released;
                self.flat().load(path.bytes, on);
            },
            nb::arg("path"), nb::arg("stream").none());
}

}  // namespace pinflow::python
