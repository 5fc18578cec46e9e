#include "src/python/native/table_bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "src/python/native/buffer.hpp"
#include "src/python/native/file_name.hpp"
#include "src/python/native/opened_array.hpp"
#include "src/python/native/python_owner.hpp"
#include "src/python/native/tensor.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

/// Takes over the tensor in a capsule, as a consumer does.
foreign_tensor tensor_in(const nb::object& capsule) {
    PyObject* const object = capsule.ptr();
    if (PyCapsule_IsValid(object, "dltensor_versioned") != 0) {
        auto* const managed = static_cast<dlpack::managed_tensor_versioned*>(
            PyCapsule_GetPointer(object, "dltensor_versioned"));
        PyCapsule_SetName(object, "used_dltensor_versioned");
        return foreign_tensor(managed);
    }
    if (PyCapsule_IsValid(object, "dltensor") != 0) {
        auto* const managed = static_cast<dlpack::managed_tensor*>(PyCapsule_GetPointer(object, "dltensor"));
        PyCapsule_SetName(object, "used_dltensor");
        return foreign_tensor(managed);
    }
    throw invalid_argument("this is no capsule with a DLPack tensor that can still be taken");
}

duplicate_policy policy_of(const std::string& name) {
    if (name == "last") return duplicate_policy::last;
    if (name == "sum") return duplicate_policy::sum;
    if (name == "error") return duplicate_policy::error;
    throw invalid_argument("duplicates are 'last', 'sum' or 'error', not '" + name + "'");
}

/// The row numbers in a tensor, on the host or on the exchange's device.
row_ids ids_of(const foreign_tensor& ids, const device& device) {
    const array_view& view = ids.view();
    const bool is_number =
        view.dtype() == dtype::of<std::int64_t>() || view.dtype() == dtype::of<std::uint64_t>();
    if (!is_number || view.shape().size() != 1 || !view.c_contiguous())
        throw invalid_argument("row numbers are one axis of contiguous int64 or uint64 elements");
    if (ids.device().kind() == device_kind::host)
        return row_ids(std::span(reinterpret_cast<const std::uint64_t*>(view.data()), view.size()));
    if (ids.device() != device) throw invalid_argument("the row numbers are on another GPU than the table's");
    return row_ids::on_device(view.data(), view.size());
}

device parsed(const std::string& name) {
    const gil_release released;
    return device::parse(name);
}

/// Rows of a table in host memory, page-locked in place, for one device.
class python_table {
 public:
    /// @param writable the object with the memory of `array`, which is kept and may be written. None: rows
    /// are only gathered.
    python_table(const std::shared_ptr<opened_array>& array, const nb::object& writable,
                 const std::string& device_name)
        : device_(parsed(device_name)), type_(array->type()), row_shape_(array->shape()) {
        if (row_shape_.empty()) throw invalid_argument("a table needs rows, and a single number has none");
        row_shape_.erase(row_shape_.begin());
        const std::uint64_t row_bytes = array->rows()->row_size_bytes();
        std::optional<row_table> table;
        if (writable.is_none()) {
            table.emplace(array->rows());
        } else {
            const buffer memory(writable, true);
            table.emplace(memory.bytes(), row_bytes, type_, keep(writable));
        }
        const gil_release released;
        exchange_ = std::make_unique<row_exchange>(std::move(*table), device_);
    }
    python_table(const python_table&) = delete;
    python_table& operator=(const python_table&) = delete;
    ~python_table() {
        const gil_release released;
        exchange_.reset();
    }

    void gather(const nb::object& ids, const nb::object& out, std::optional<std::int64_t> stream) {
        drop_given_up();
        const foreign_tensor numbers = tensor_in(ids);
        const foreign_tensor rows = tensor_in(out);
        check_rows(rows, numbers.view().size());
        const row_ids list = ids_of(numbers, device_);
        std::byte* const to = rows.writable_data();
        run(stream, [&](const std::optional<stream_view>& on) {
            if (on) {
                exchange_->gather_async(list, to, *on);
            } else {
                exchange_->gather(list, to);
            }
        });
    }

    void scatter(const nb::object& ids, const nb::object& from, const std::string& duplicates,
                 std::optional<std::int64_t> stream) {
        drop_given_up();
        const foreign_tensor numbers = tensor_in(ids);
        const foreign_tensor rows = tensor_in(from);
        check_rows(rows, numbers.view().size());
        if (!rows.view().c_contiguous()) throw invalid_argument("the rows are not contiguous");
        const row_ids list = ids_of(numbers, device_);
        const duplicate_policy policy = policy_of(duplicates);
        const std::byte* const source = rows.view().data();
        run(stream, [&](const std::optional<stream_view>& on) {
            if (on) {
                exchange_->scatter_async(list, source, policy, *on);
            } else {
                exchange_->scatter(list, source, policy);
            }
        });
    }

    void check() {
        const gil_release released;
        exchange_->check();
    }
    void tune(std::uint64_t batch_rows) {
        const gil_release released;
        exchange_->tune(batch_rows);
    }
    nb::object reason(std::uint64_t batch_rows) const {
        return readable(exchange_->plan_gather(batch_rows).reason);
    }
    std::string device_name() const { return device_.name(); }
    std::optional<int> gpu() const { return gpu_of(device_); }
    std::uint64_t row_count() const { return exchange_->table().row_count(); }
    const shape_vector& row_shape() const noexcept { return row_shape_; }
    std::string type() const { return type_.descr(); }

 private:
    void check_rows(const foreign_tensor& rows, std::uint64_t count) const {
        shape_vector shape = row_shape_;
        shape.insert(shape.begin(), count);
        if (rows.view().dtype() != type_ || rows.view().shape() != shape)
            throw invalid_argument("the rows are of " + rows.view().dtype().descr() + " and shape " +
                                   to_string(rows.view().shape()) + ", not of " + type_.descr() +
                                   " and shape " + to_string(shape));
        if (rows.device() != device_)
            throw invalid_argument("the rows are on " + rows.device().name() + ", and the table works with " +
                                   device_.name());
    }

    /// On the host, or with stream -1, the call has finished when this returns. On a GPU, no stream means the
    /// legacy default stream, as in __dlpack__.
    template <typename Call>
    void run(std::optional<std::int64_t> stream, const Call& call) {
        std::optional<stream_view> on;
        if (device_.kind() != device_kind::host) on = dlpack::consumer_stream(device_, stream);
        const gil_release released;
        call(on);
    }

    pinflow::device device_;
    dtype type_;
    shape_vector row_shape_;
    std::unique_ptr<row_exchange> exchange_;
};

}  // namespace

void bind_tables(nb::module_& module) {
    nb::class_<python_table>(module, "RowTable")
        .def(nb::init<const std::shared_ptr<opened_array>&, const nb::object&, const std::string&>(),
             nb::arg("array"), nb::arg("writable").none(), nb::arg("device"))
        .def("gather", &python_table::gather, nb::arg("ids"), nb::arg("out"), nb::arg("stream").none())
        .def("scatter", &python_table::scatter, nb::arg("ids"), nb::arg("rows"), nb::arg("duplicates"),
             nb::arg("stream").none())
        .def("check", &python_table::check)
        .def("tune", &python_table::tune, nb::arg("batch_rows"))
        .def("reason", &python_table::reason, nb::arg("batch_rows"),
             nb::sig("def reason(self, batch_rows: int) -> str"))
        .def_prop_ro("device", &python_table::device_name)
        .def_prop_ro("gpu", &python_table::gpu)
        .def_prop_ro("row_count", &python_table::row_count)
        .def_prop_ro("dtype", &python_table::type)
        .def_prop_ro("row_shape", [](const python_table& self) {
            nb::list list;
            for (const std::uint64_t length : self.row_shape())
                list.append(length);
            return nb::tuple(list);
        });
}

}  // namespace pinflow::python
