#include "src/python/native/embedding_bindings.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "pinflow/train/embedding_table.hpp"
#include "src/python/native/file_name.hpp"
#include "src/python/native/optimizer_settings.hpp"
#include "src/python/native/python_owner.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

using stream_number = std::optional<std::int64_t>;

/// (kind, first number, second number, seed)
using weights_spec = std::tuple<std::string, float, float, std::uint64_t>;

weight_function weights_of(const weights_spec& spec) {
    const auto& [kind, first, second, seed] = spec;
    if (kind == "zeros") return nullptr;
    if (kind == "uniform") return uniform_weights(first, second, seed);
    if (kind == "normal") return normal_weights(first, second, seed);
    throw invalid_argument(
        "weights begin as 'zeros', ('uniform', LOW, HIGH) or ('normal', MEAN, DEVIATION), not '" + kind +
        "'");
}

std::span<const std::int64_t> ids_at(std::uintptr_t address, std::uint64_t count) {
    return {std::bit_cast<const std::int64_t*>(address), count};
}

/// A lease that Python may drop at any time, also on another thread.
class python_lease {
 public:
    /// @param row_count if it is known
    python_lease(embedding_lease lease, std::optional<std::uint64_t> row_count)
        : row_count_(row_count), lease_(std::move(lease)) {}
    python_lease(const python_lease&) = delete;
    python_lease& operator=(const python_lease&) = delete;
    ~python_lease() {
        const gil_release released;
        const embedding_lease ended = std::move(lease_);
    }

    const embedding_lease& get() const {
        if (!is_valid()) throw invalid_argument("the rows were committed or released already");
        return lease_;
    }
    bool is_valid() const noexcept { return lease_.is_valid(); }
    std::uint64_t row_count() const {
        const embedding_lease& lease = get();
        return row_count_ ? *row_count_ : lease.row_count();
    }
    /// Needs the GIL, so that one thread gets it.
    embedding_lease take() {
        static_cast<void>(get());
        return std::move(lease_);
    }
    /// Calls work(lease), which may give up the GIL. If it throws and has left the lease valid, that is kept.
    template <typename Work>
    void use_up(Work work) {
        embedding_lease taken = take();
        try {
            work(std::move(taken));
        } catch (...) {
            if (taken.is_valid()) lease_ = std::move(taken);
            throw;
        }
    }

 private:
    std::optional<std::uint64_t> row_count_;
    embedding_lease lease_;
};

/// A table. On the host device it owns the stream that all calls use. On CUDA, a call without a stream uses
/// the legacy default stream.
class python_embeddings {
 public:
    python_embeddings(embedding_options options, const std::string& device_name) {
        const gil_release released;
        const device device = device::parse(device_name);
        if (device.kind() == device_kind::host) own_.emplace(device);
        table_.emplace(std::move(options), device);
    }
    python_embeddings(const python_embeddings&) = delete;
    python_embeddings& operator=(const python_embeddings&) = delete;
    ~python_embeddings() {
        const gil_release released;
        table_.reset();
        own_.reset();
    }

    embedding_table& table() noexcept { return *table_; }

    /// Calls work(table, stream). On the host it has finished when this returns.
    template <typename Work>
    auto run(stream_number stream, Work work) {
        const gil_release released;
        const stream_view view = on(stream);
        if constexpr (std::is_void_v<decltype(work(*table_, view))>) {
            work(*table_, view);
            if (own_) view.synchronize();
        } else {
            auto result = work(*table_, view);
            if (own_) view.synchronize();
            return result;
        }
    }

 private:
    stream_view on(stream_number stream) const {
        if (own_) return *own_;
        const auto view = dlpack::consumer_stream(table_->device(), stream);
        if (!view) throw invalid_argument("this call needs a stream, and stream -1 is none");
        return *view;
    }

    std::optional<pinflow::stream> own_;
    std::optional<embedding_table> table_;
};

/// Calls a function of the table that takes a path, without the GIL.
template <auto Function>
void with_path(python_embeddings& self, const file_name& path) {
    const gil_release released;
    (self.table().*Function)(path.bytes);
}

}  // namespace

void bind_embedding_tables(nb::module_& module) {
    nb::class_<python_lease>(module, "EmbeddingLease")
        .def_prop_ro(
            "weights_address",
            [](const python_lease& self) { return std::bit_cast<std::uintptr_t>(self.get().weights()); })
        .def_prop_ro("row_count", &python_lease::row_count)
        .def_prop_ro("stride_bytes", [](const python_lease& self) { return self.get().stride_bytes(); })
        .def_prop_ro(
            "positions_address",
            [](const python_lease& self) { return std::bit_cast<std::uintptr_t>(self.get().positions()); })
        .def_prop_ro("position_count", [](const python_lease& self) { return self.get().position_count(); })
        .def_prop_ro("device_row_count_address",
                     [](const python_lease& self) {
                         return std::bit_cast<std::uintptr_t>(self.get().device_row_count());
                     })
        .def_prop_ro(
            "device_ids_address",
            [](const python_lease& self) { return std::bit_cast<std::uintptr_t>(self.get().device_ids()); })
        .def("ids",
             [](const python_lease& self) {
                 const auto ids = self.get().ids();
                 return nb::bytes(ids.data(), ids.size_bytes());
             })
        .def("is_valid", [](const python_lease& self) { return self.is_valid(); })
        .def("release", [](python_lease& self) {
            std::optional<embedding_lease> taken = self.take();
            const gil_release released;
            taken.reset();
        });
    nb::class_<python_embeddings>(module, "EmbeddingTable")
        .def(
            "__init__",
            [](python_embeddings* self, std::uint64_t rows, std::uint64_t columns, const std::string& type,
               const std::string& rule, const numbers_by_name& numbers, const weights_spec& weights,
               std::uint64_t max_batch_ids, unsigned look_ahead, std::uint64_t device_rows,
               const std::string& device) {
                embedding_options options;
                options.row_count = rows;
                options.columns = columns;
                options.type = dtype::parse(type);
                options.rule = optimizer_of(rule, numbers);
                options.weights = weights_of(weights);
                options.max_batch_ids = max_batch_ids;
                options.look_ahead = look_ahead;
                options.device_rows = device_rows;
                new (self) python_embeddings(std::move(options), device);
            },
            nb::arg("rows"), nb::arg("columns"), nb::arg("type"), nb::arg("rule"), nb::arg("numbers"),
            nb::arg("weights"), nb::arg("max_batch_ids"), nb::arg("look_ahead"), nb::arg("device_rows"),
            nb::arg("device"))
        .def("cancel_prefetches",
             [](python_embeddings& self) {
                 const gil_release released;
                 self.table().cancel_prefetches();
             })
        .def_prop_ro("device", [](python_embeddings& self) { return self.table().device().name(); })
        .def_prop_ro("rate", [](python_embeddings& self) { return rate_of(self.table().options().rule); })
        .def_prop_ro("gpu",
                     [](python_embeddings& self) -> std::optional<int> {
                         const device& device = self.table().device();
                         if (device.kind() == device_kind::host) return std::nullopt;
                         return device.index();
                     })
        .def(
            "prefetch",
            [](python_embeddings& self, std::uintptr_t ids, std::uint64_t count) {
                const gil_release released;
                self.table().prefetch(ids_at(ids, count));
            },
            nb::arg("ids"), nb::arg("count"))
        .def(
            "fetch",
            [](python_embeddings& self, std::uintptr_t ids, std::uint64_t count, bool on_device, bool counts,
               stream_number stream) {
                const row_ids wanted = on_device ? row_ids::on_device(std::bit_cast<const void*>(ids), count)
                                                 : row_ids(ids_at(ids, count));
                std::optional<std::uint64_t> row_count;
                embedding_lease lease = self.run(stream, [&](embedding_table& table, stream_view on) {
                    embedding_lease made = table.fetch(wanted, on);
                    if (counts) row_count = made.row_count();  // here, because it may wait: without the GIL
                    return made;
                });
                return new python_lease(std::move(lease), row_count);  // Python takes it over
            },
            nb::arg("ids"), nb::arg("count"), nb::kw_only(), nb::arg("on_device"), nb::arg("counts"),
            nb::arg("stream").none(), nb::keep_alive<0, 1>())
        .def(
            "commit",
            [](python_embeddings& self, python_lease& lease, std::uintptr_t gradients,
               const std::string& type, stream_number stream) {
                const dtype of_gradients = dtype::parse(type);
                lease.use_up([&](embedding_lease&& held) {
                    self.run(stream, [&](embedding_table& table, stream_view on) {
                        table.commit(std::move(held), std::bit_cast<const std::byte*>(gradients),
                                     of_gradients, on);
                    });
                });
            },
            nb::arg("lease"), nb::arg("gradients"), nb::arg("type"), nb::arg("stream").none())
        .def(
            "write_back",
            [](python_embeddings& self, python_lease& lease, stream_number stream) {
                lease.use_up([&](embedding_lease&& held) {
                    self.run(stream, [&](embedding_table& table, stream_view on) {
                        table.write_back(std::move(held), on);
                    });
                });
            },
            nb::arg("lease"), nb::arg("stream").none())
        .def(
            "set_rate",
            [](python_embeddings& self, double rate, stream_number stream) {
                self.run(stream, [&](embedding_table& table, stream_view on) { table.set_rate(rate, on); });
            },
            nb::arg("rate"), nb::arg("stream").none())
        .def(
            "read_weights",
            [](python_embeddings& self, std::uintptr_t ids, std::uint64_t count, std::uintptr_t to,
               std::uint64_t size_bytes) {
                const gil_release released;
                self.table().read_weights(ids_at(ids, count), {std::bit_cast<std::byte*>(to), size_bytes});
            },
            nb::arg("ids"), nb::arg("count"), nb::arg("to"), nb::arg("size_bytes"))
        .def(
            "write_weights",
            [](python_embeddings& self, std::uintptr_t ids, std::uint64_t count, std::uintptr_t from,
               std::uint64_t size_bytes) {
                const gil_release released;
                self.table().write_weights(ids_at(ids, count),
                                           {std::bit_cast<const std::byte*>(from), size_bytes});
            },
            nb::arg("ids"), nb::arg("count"), nb::arg("from_address"), nb::arg("size_bytes"))
        .def(
            "grow",
            [](python_embeddings& self, std::uint64_t rows) {
                const gil_release released;
                self.table().grow(rows);
            },
            nb::arg("rows"))
        .def("save", &with_path<&embedding_table::save>, nb::arg("path"))
        .def("load", &with_path<&embedding_table::load>, nb::arg("path"))
        .def("export_weights", &with_path<&embedding_table::export_weights>, nb::arg("path"))
        .def("import_weights", &with_path<&embedding_table::import_weights>, nb::arg("path"))
        .def("synchronize", [](python_embeddings& self) {
            const gil_release released;
            self.table().synchronize();
        });
}

}  // namespace pinflow::python
