#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "loader/row_reader.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/listing.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/open.hpp"
#include "src/core/extent_index.hpp"
#include "src/core/source_check.hpp"
#include "src/core/stack.hpp"
#include "src/python/native/buffer.hpp"
#include "src/python/native/file_name.hpp"
#include "src/python/native/opened_array.hpp"
#include "src/python/native/python_order.hpp"
#include "src/python/native/python_owner.hpp"
#include "src/python/native/python_rows.hpp"
#include "src/python/native/tensor.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

using shared_array = std::shared_ptr<opened_array>;

template <typename Function>
auto without_gil(Function function) {
    const gil_release released;
    return function();
}

/// Checks that the files of these rows have not been truncated, by reading the last byte of each. After a
/// truncation, the rest of the last page reads as zeros, without a fault.
/// @throws data_changed.
void check_sizes(const row_source& rows, std::span<const std::uint64_t> ids) {
    if (rows.extents().empty() || rows.row_size_bytes() == 0) return;
    const detail::extent_index extents(rows.extents());
    std::unordered_set<const input_file*> seen;
    std::array<std::byte, 1> last{};
    for (const std::uint64_t id : ids) {
        const auto& file = extents.find(id).extent->file;
        if (file && seen.insert(file.get()).second)
            static_cast<void>(file->read(file->size_bytes() - 1, last));
    }
}

/// Copies the rows of `ids`, a buffer of 64-bit numbers, to `out`, which must have exactly
/// their size.
void read_rows(const opened_array& self, const nb::object& ids, const nb::object& out) {
    std::shared_ptr<const row_source> rows;
    without_gil([&] { rows = self.rows(); });
    const buffer numbers(ids, false);
    const buffer memory(out, true);
    const auto bytes = numbers.bytes();
    const std::span<const std::uint64_t> list(reinterpret_cast<const std::uint64_t*>(bytes.data()),
                                              bytes.size() / sizeof(std::uint64_t));
    const std::vector<std::uint64_t> row_ids(list.begin(), list.end());  // which no other thread changes
    without_gil([&] {
        detail::check_row_request(*rows, row_ids, memory.bytes());
        detail::read_session session;
        const detail::row_reader reader(rows, detail::row_access::memory);
        try {
            static_cast<void>(reader.read(row_ids, memory.bytes().data(), session));
        } catch (const format_error&) {
            rows->check_unchanged();  // other contents look like damage
            throw;
        }
        check_sizes(*rows, row_ids);
    });
}

/// Reads a box of the elements to `out`, which must have exactly their size.
/// @return whether it could be read: see opened_array::read_box.
bool read_box(const opened_array& self, const shape_vector& first, const shape_vector& lengths,
              const nb::object& out) {
    const buffer memory(out, true);
    return without_gil([&] { return self.read_box(first, lengths, memory.bytes()); });
}

/// Whether rows can be read. A compressed .npz member is decoded for that.
bool has_rows(const opened_array& self) {
    try {
        without_gil([&] { static_cast<void>(self.rows()); });
        return true;
    } catch (const unsupported&) {
        return false;
    }
}

nb::dict listing_of(const array_listing& each) {
    nb::dict listed;
    listed["name"] = name_text(each.name);
    listed["dtype"] = each.dtype ? nb::object(nb::str(each.dtype->descr().c_str())) : nb::none();
    listed["shape"] = tuple_of(each.shape);
    listed["nbytes"] = each.size_bytes;
    listed["mappable"] = each.mappable;
    listed["reason"] = readable(each.reason);
    return listed;
}

}  // namespace

void bind_arrays(nb::module_& module) {
    nb::class_<opened_array>(module, "Array", nb::type_slots(collected_slots<opened_array>))
        .def_prop_ro("shape", [](const opened_array& self) { return tuple_of(self.shape()); })
        .def_prop_ro("dtype", [](const opened_array& self) { return self.type().descr(); })
        .def_prop_ro("nbytes", &opened_array::size_bytes)
        .def_prop_ro("mapped", &opened_array::is_mapped)
        .def_prop_ro(
            "reason", [](const opened_array& self) { return readable(self.reason()); },
            nb::sig("def reason(self) -> str"))
        .def_prop_ro(
            "label", [](const opened_array& self) { return text_of(self.label()); },
            nb::sig("def label(self) -> str"))
        .def_prop_ro("in_memory", [](const opened_array& self) { return self.elements_at_hand() != nullptr; })
        .def("interface",
             [](const opened_array& self) {
                 const array* elements = nullptr;
                 without_gil([&] { elements = &self.elements(); });
                 return array_interface_of(elements->view(), true);
             })
        .def("sliding_windows",
             [](const opened_array& self, std::uint64_t length, std::uint64_t step) {
                 return without_gil([&] { return self.sliding_windows(length, step); });
             })
        .def_prop_ro("has_rows", &has_rows)
        .def("read_rows", &read_rows, nb::arg("ids"), nb::arg("out"))
        .def_prop_ro("has_boxes", &opened_array::has_boxes)
        .def("read_box", &read_box, nb::arg("first"), nb::arg("lengths"), nb::arg("out"))
        .def("__dlpack_device__", [](const opened_array&) { return dlpack_device_of(device::host()); })
        .def(
            "__dlpack__",
            [](const opened_array& self, nb::handle stream, nb::handle max_version, nb::handle dl_device,
               nb::handle copy) {
                drop_given_up();
                const export_request request =
                    request_of(device::host(), stream, max_version, dl_device, copy);
                const array* elements = nullptr;
                without_gil([&] { elements = &self.elements(); });
                return capsule_of(*elements, request);
            },
            nb::kw_only(), nb::arg("stream") = nb::none(), nb::arg("max_version") = nb::none(),
            nb::arg("dl_device") = nb::none(), nb::arg("copy") = nb::none());

    module.def(
        "open_array",
        [](const file_name& text, bool stack) {
            drop_given_up();
            return without_gil([&] { return opened_array::open(text.bytes, stack); });
        },
        nb::arg("text"), nb::arg("stack") = false);
    module.def("open_named", [](const file_name& path, const std::string& name) {
        drop_given_up();
        return without_gil([&] { return opened_array::of_name(path.bytes, name); });
    });
    module.def("list_arrays", [](const file_name& path) {
        const std::vector<array_listing> listed = without_gil([&] { return list_arrays(path.bytes); });
        nb::list list;
        for (const array_listing& each : listed)
            list.append(listing_of(each));
        return list;
    });
    module.def("array_of_buffer", &array_of_buffer, nb::arg("object"), nb::arg("dtype"), nb::arg("shape"),
               nb::arg("stride_bytes"), nb::arg("label"));
    module.def("array_of_source", &array_of_source, nb::arg("source"), nb::arg("dtype"), nb::arg("shape"),
               nb::arg("label"));
    module.def("is_pattern", [](const file_name& text) { return is_pattern(text.bytes); });
    nb::class_<python_order>(module, "Order", nb::type_slots(collected_slots<python_order>))
        .def("__init__",
             [](python_order* self, const nb::object& order) { new (self) python_order{keep(order)}; });
    module.def("concatenate", [](const std::vector<shared_array>& parts, bool stacked) {
        return without_gil([&] {
            std::vector<std::shared_ptr<const row_source>> sources;
            sources.reserve(parts.size());
            for (const shared_array& each : parts)
                sources.push_back(stacked ? each->as_one_row() : each->rows());
            auto made = opened_array::of_rows(stacked ? detail::stack_rows(std::move(sources))
                                                      : concatenate(std::move(sources)));
            for (const shared_array& each : parts)
                made->readers.insert(made->readers.end(), each->readers.begin(), each->readers.end());
            return made;
        });
    });
    module.def("save_npy", [](const file_name& path, const nb::object& elements, const std::string& type,
                              const shape_vector& shape, std::int64_t stride_bytes) {
        const buffer memory(elements, false);
        const auto view_type = dtype::parse(type);
        without_gil([&] {
            auto strides = c_strides_bytes(shape, view_type.size_bytes());
            if (stride_bytes != 0) strides.at(0) = stride_bytes;
            write_npy(path.bytes, array_view(memory.bytes().data(), view_type, shape, std::move(strides)));
        });
    });
}

}  // namespace pinflow::python
