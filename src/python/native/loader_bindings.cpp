#include "src/python/native/loader_bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/python/native/buffer.hpp"
#include "src/python/native/file_name.hpp"
#include "src/python/native/opened_array.hpp"
#include "src/python/native/python_order.hpp"
#include "src/python/native/python_owner.hpp"
#include "src/python/native/tensor.hpp"

namespace nb = nanobind;

namespace pinflow::python {

namespace {

class python_loader;

/// How long a call waits for a batch before it lets Python handle signals.
constexpr std::chrono::milliseconds signal_interval{50};

/// Throws that the loader is closed. While Python ends, throws SystemExit instead, so that the thread prints
/// no traceback.
[[noreturn]] void throw_closed() {
    if (!may_not_take_gil()) throw invalid_argument("the loader has been closed");
    PyErr_SetNone(PyExc_SystemExit);
    throw nb::python_error();
}

/// The loaders that exist. end_all_loaders ends them before Python ends. Guarded by the GIL.
std::vector<python_loader*>& live_loaders() {
    static auto& all = *new std::vector<python_loader*>;
    return all;
}

/// The loaders that destroy_elsewhere is destroying. end_all_loaders waits for them.
std::atomic<unsigned>& ending_elsewhere() {
    static auto& count = *new std::atomic<unsigned>(0);
    return count;
}

/// Destroys a loader on a new thread.
template <typename Destroy>
void destroy_elsewhere(Destroy destroy) noexcept {
    ++ending_elsewhere();
    try {
        std::thread([destroy] {
            destroy();
            --ending_elsewhere();
            ending_elsewhere().notify_all();
        }).detach();
    } catch (...) {
        // without memory or a thread, the stopped loader is kept for ever
        --ending_elsewhere();
    }
}

/// A batch that Python holds. Its tensors hold it, too.
class python_batch {
 public:
    python_batch(batch taken, const device& device)
        : batch_(std::make_shared<batch>(std::move(taken))), device_(device) {}
    python_batch(python_batch&&) noexcept = default;
    python_batch& operator=(python_batch&&) = delete;
    python_batch(const python_batch&) = delete;
    python_batch& operator=(const python_batch&) = delete;
    ~python_batch() { release(); }

    void release() noexcept { release_without_gil(batch_); }
    batch& held() const {
        if (!batch_) throw invalid_argument("the batch has been released");
        return *batch_;
    }
    std::shared_ptr<batch> shared() const {
        held();
        return batch_;
    }
    /// One tensor for each array, as objects of `type`, a Python subclass of the class of `tensor`.
    nb::tuple tensors(nb::type_object_t<tensor> type) const {
        const std::size_t count = held().array_count();
        nb::list list;
        for (std::size_t index = 0; index < count; ++index) {
            nb::object made = nb::inst_alloc(type);
            new (nb::inst_ptr<tensor>(made)) tensor(batch_, device_, index);
            nb::inst_mark_ready(made);
            list.append(std::move(made));
        }
        return nb::tuple(list);
    }

 private:
    std::shared_ptr<batch> batch_;
    pinflow::device device_;
};

class python_loader {
 public:
    /// @param callback_objects Python objects that the loader calls, kept by its sources and its order
    python_loader(std::vector<std::shared_ptr<const row_source>> sources, const loader_options& options,
                  std::vector<const PyObject*> callback_objects)
        : callback_objects_(std::move(callback_objects)) {
        {
            const gil_release released;
            loader_ = {new loader(std::move(sources), options), [has_ended = has_ended_](const loader* last) {
                           const auto destroy = [=] {
                               delete last;
                               *has_ended = true;
                               has_ended->notify_all();
                           };
                           // a callback may run on a thread of the loader, which its destructor waits for
                           if (python_callback::is_running()) return destroy_elsewhere(destroy);
                           destroy();
                       }};
        }
        live_loaders().push_back(this);
    }
    python_loader(const python_loader&) = delete;
    python_loader& operator=(const python_loader&) = delete;
    ~python_loader() {
        end();
        std::erase(live_loaders(), this);
    }

    /// Stops the loader, also for other threads that wait in `next`, and waits for the threads of the loader,
    /// which may wait for the GIL. In a callback, which may run on such a thread, it does not wait.
    void end() {
        std::shared_ptr<loader> last = std::move(loader_);
        if (!last) return;
        last->stop();
        if (python_callback::is_running()) return;
        // another thread may destroy this object once the GIL is given up
        const std::shared_ptr<std::atomic<bool>> has_ended = has_ended_;
        const gil_release released;
        last.reset();
        has_ended->wait(false);  // another thread may be the last owner
    }
    /// A share, because another thread may call `end` meanwhile.
    std::shared_ptr<loader> valid() const {
        if (!loader_) throw_closed();
        return loader_;
    }

    /// @param stream as in __dlpack__: none is the legacy default stream; -1: the data has arrived when this
    /// returns
    /// @param owner keeps the stream alive
    std::optional<python_batch> next(std::optional<std::int64_t> stream, const nb::object& owner) {
        drop_given_up();
        if (std::ranges::any_of(callback_objects_, &python_callback::is_running_of))
            throw invalid_argument(
                "a source of rows or an order cannot take batches of the loader that calls it");
        const device on = valid()->device();
        std::optional<stream_view> consumer;
        if (on.kind() != device_kind::host) consumer = dlpack::consumer_stream(on, stream);
        std::shared_ptr<PyObject> kept = owner.is_none() || !consumer ? nullptr : keep(owner);
        std::optional<batch> taken;
        for (bool is_over = false; !is_over;) {
            // dropped before the GIL is taken back: the last owner waits for threads that may need the GIL
            std::shared_ptr<loader> share = loader_;
            if (!share) return end_of_closed();
            {
                const gil_release released;
                const std::shared_ptr<loader> own = std::move(share);
                is_over = own->wait_for(signal_interval);
            }
            // such as Ctrl-C
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            share = loader_;
            if (!share) return end_of_closed();
            if (is_over) {
                const gil_release released;
                const std::shared_ptr<loader> own = std::move(share);
                taken = consumer ? own->next(*consumer) : own->next();
                if (taken && kept) taken->used_on(*consumer, std::move(kept));
            }
        }
        if (!taken) return std::nullopt;
        if (PyErr_CheckSignals() != 0) {  // Python will not see this batch: the next call returns it
            if (loader_) {
                loader_->take_back(std::move(*taken));
            } else {  // closed by the signal's handler
                python_batch(std::move(*taken), on).release();
            }
            throw nb::python_error();
        }
        return python_batch(std::move(*taken), on);
    }

 private:
    /// Returns no batch: a signal handler or another thread has closed the loader. While Python ends, throws
    /// as throw_closed.
    static std::optional<python_batch> end_of_closed() {
        if (may_not_take_gil()) throw_closed();
        return std::nullopt;
    }

    std::vector<const PyObject*> callback_objects_;
    std::shared_ptr<std::atomic<bool>> has_ended_ = std::make_shared<std::atomic<bool>>(false);
    std::shared_ptr<loader> loader_;
};

order order_of(const std::string& name) {
    for (const order each : {order::sequential, order::shuffled, order::windowed}) {
        if (to_string(each) == name) return each;
    }
    throw invalid_argument(
        "an order is 'sequential', 'shuffled', 'windowed' or 'weighted', a list of row numbers, or an object "
        "with name, position_count and rows_at, not '" +
        name + "'");
}

tail tail_of(const std::string& name) {
    if (name == "partial") return tail::partial;
    if (name == "drop") return tail::drop;
    throw invalid_argument("a tail is 'partial' or 'drop', not '" + name + "'");
}

route route_of(const std::string& name) {
    for (const route each : {route::automatic, route::direct, route::copy, route::staged, route::read}) {
        if (to_string(each) == name) return each;
    }
    throw invalid_argument("a route is 'auto', 'direct', 'copy', 'staged' or 'read', not '" + name + "'");
}

/// A value of `options`, or nothing if it is None.
template <typename Value>
std::optional<Value> value_of(const nb::dict& options, const char* key) {
    if (!options.contains(key) || nb::object(options[key]).is_none()) return std::nullopt;
    return nb::cast<Value>(options[key]);
}

std::unique_ptr<python_loader> make_loader(const std::vector<std::shared_ptr<opened_array>>& arrays,
                                           const nb::dict& given) {
    drop_given_up();
    if (may_not_take_gil()) throw_closed();
    if (is_ending()) throw invalid_argument("a loader cannot be made while Python ends");
    if (arrays.empty()) throw invalid_argument("a loader needs at least one source");
    std::vector<std::shared_ptr<const row_source>> sources;
    std::vector<const PyObject*> callback_objects;
    for (const auto& each : arrays)
        callback_objects.insert(callback_objects.end(), each->readers.begin(), each->readers.end());
    const std::string device_name = nb::cast<std::string>(given["device"]);
    std::optional<device> on;
    {
        const gil_release released;
        for (const auto& each : arrays)
            sources.push_back(each->rows());
        on = device::parse(device_name);
    }
    loader_options options{.device = *on};
    options.batch_rows = nb::cast<std::uint64_t>(given["batch"]);
    options.epochs = nb::cast<std::uint64_t>(given["epochs"]);
    options.tail = tail_of(nb::cast<std::string>(given["tail"]));
    options.route = route_of(nb::cast<std::string>(given["route"]));
    options.memory_bytes = value_of<std::uint64_t>(given, "memory").value_or(0);
    // Python's rows are slow: with few slots, few batches are filled together, and the first one is ready
    // sooner
    constexpr unsigned slots_of_python_rows = 8;
    const bool is_python = !callback_objects.empty();
    options.slots = value_of<unsigned>(given, "slots").value_or(is_python ? slots_of_python_rows : 0);
    options.first_epoch = nb::cast<std::uint64_t>(given["first_epoch"]);
    options.threads = value_of<unsigned>(given, "threads").value_or(0);
    if (const auto rank = value_of<unsigned>(given, "rank"))
        options.shard = {*rank, value_of<unsigned>(given, "world").value()};
    if (const auto state = value_of<std::string>(given, "state"))
        options.resume_from = loader_state::from_json(*state);
    const nb::object order = given["order"];
    const std::uint64_t row_count = sources.front()->row_count();
    if (const nb::object weights = given["weights"]; !weights.is_none()) {
        const buffer memory(weights, false);
        const std::span all(reinterpret_cast<const double*>(memory.bytes().data()),
                            memory.bytes().size() / sizeof(double));
        const auto draws = nb::cast<std::uint64_t>(given["draws"]);
        const auto seed = nb::cast<std::uint64_t>(given["seed"]);
        const gil_release released;
        options.sampler = sampler::weighted(all, draws, seed);
    } else if (nb::isinstance<nb::str>(order)) {
        options.order = order_of(nb::cast<std::string>(order));
        options.seed = nb::cast<std::uint64_t>(given["seed"]);
        options.window_rows = value_of<std::uint64_t>(given, "window").value_or(0);
    } else {
        const auto& given_order = nb::cast<const python_order&>(order);
        options.sampler = given_order.for_rows(row_count);
        callback_objects.push_back(given_order.kept.get());
    }
    return std::make_unique<python_loader>(std::move(sources), options, std::move(callback_objects));
}

nb::dict report_of(const loader_report& report) {
    const auto seconds = [](std::chrono::nanoseconds time) {
        return std::chrono::duration<double>(time).count();
    };
    nb::list arrays;
    for (const array_report& each : report.arrays) {
        nb::dict one;
        one["name"] = name_text(each.name);
        one["transfer"] = each.transfer;
        one["reason"] = readable(each.reason);
        one["bytes"] = each.bytes;
        arrays.append(one);
    }
    nb::dict result;
    result["verdict"] = readable(report.verdict());
    result["route"] = std::string(to_string(report.route));
    result["reason"] = readable(report.reason);
    result["arrays"] = arrays;
    result["threads"] = report.threads;
    result["threads_reason"] = readable(report.threads_reason);
    result["slots"] = report.slots;
    result["slots_reason"] = readable(report.slots_reason);
    result["lost_slots"] = report.lost_slots;
    result["slot_bytes"] = report.slot_bytes;
    result["batches"] = report.batches;
    result["rows"] = report.rows;
    result["bytes"] = report.bytes;
    result["seconds"] = seconds(report.wall_time);
    result["pinned_bytes"] = report.pinned_bytes;
    result["storage_wait"] = seconds(report.storage_wait);
    result["file_wait"] = seconds(report.file_wait);
    result["cpu_wait"] = seconds(report.cpu_wait);
    result["link_wait"] = seconds(report.link_wait);
    result["consumer_wait"] = seconds(report.consumer_wait);
    return result;
}

}  // namespace

void bind_loaders(nb::module_& module) {
    nb::class_<python_batch>(module, "Batch")
        .def("tensors", &python_batch::tensors, nb::arg("type"))
        .def_prop_ro("row_ids",
                     [](const python_batch& self) {
                         const auto ids = self.held().row_ids();
                         return nb::bytes(ids.data(), ids.size_bytes());
                     })
        .def_prop_ro("row_count", [](const python_batch& self) { return self.held().row_count(); })
        .def_prop_ro("epoch", [](const python_batch& self) { return self.held().epoch(); })
        .def_prop_ro("index", [](const python_batch& self) { return self.held().index(); })
        .def_prop_ro("last_of_epoch", [](const python_batch& self) { return self.held().last_of_epoch(); })
        .def("state",
             [](const python_batch& self) {
                 std::shared_ptr<batch> held = self.shared();
                 const gil_release released;
                 std::string text = held->state().to_json();
                 held.reset();
                 return text;
             })
        .def("release", &python_batch::release);

    nb::class_<python_loader>(module, "Loader")
        .def("next", &python_loader::next, nb::arg("stream") = nb::none(), nb::arg("owner") = nb::none())
        .def("close", &python_loader::end)
        .def("state",
             [](const python_loader& self) {
                 std::shared_ptr<loader> share = self.valid();
                 const gil_release released;
                 // if this is the last owner, the loader ends without the GIL, also after an exception
                 const std::shared_ptr<loader> own = std::move(share);
                 return own->state().to_json();
             })
        .def("report", [](const python_loader& self) { return report_of(self.valid()->report()); })
        .def_prop_ro("device", [](const python_loader& self) { return self.valid()->device().name(); })
        .def_prop_ro("gpu", [](const python_loader& self) { return gpu_of(self.valid()->device()); })
        .def_prop_ro("row_count", [](const python_loader& self) { return self.valid()->row_count(); })
        .def_prop_ro("has_delivered_all",
                     [](const python_loader& self) {
                         const std::shared_ptr<loader> own = self.valid();
                         return own->report().batches == own->batch_total();
                     })
        .def_prop_ro("batches_per_epoch",
                     [](const python_loader& self) { return self.valid()->batches_per_epoch(); });
    module.def("make_loader", &make_loader, nb::arg("arrays"), nb::arg("options"));
    module.def("end_all_loaders", [] {
        begin_ending();
        // other threads may end some of them meanwhile
        while (!live_loaders().empty()) {
            python_loader* const last = live_loaders().back();
            live_loaders().pop_back();
            last->end();
        }
        {
            const gil_release released;
            while (const unsigned count = ending_elsewhere().load())
                ending_elsewhere().wait(count);
        }
        stop_dropping();
    });
}

}  // namespace pinflow::python
