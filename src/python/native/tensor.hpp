#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "pinflow/array.hpp"
#include "pinflow/device.hpp"
#include "pinflow/dlpack.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/loader/batch.hpp"

namespace pinflow::python {

/// One array of a batch, for libraries that take tensors. Keeps the batch.
class tensor {
 public:
    tensor(std::shared_ptr<batch> held, const device& device, std::size_t index)
        : batch_(std::move(held)), device_(device), index_(index) {}
    tensor(tensor&&) noexcept = default;
    tensor& operator=(tensor&&) = delete;
    tensor(const tensor&) = delete;
    tensor& operator=(const tensor&) = delete;
    ~tensor();

    const array_view& view() const { return (*batch_)[index_]; }
    const pinflow::device& device() const noexcept { return device_; }
    batch& of() const noexcept { return *batch_; }
    const std::shared_ptr<batch>& shared() const noexcept { return batch_; }
    std::size_t index() const noexcept { return index_; }

 private:
    std::shared_ptr<batch> batch_;
    pinflow::device device_;
    std::size_t index_;
};

/// Gives up a share of a batch. Releases the GIL if that ends the lease. Needs the GIL.
void release_without_gil(std::shared_ptr<batch>& held) noexcept;

/// batch::used_on for a stream as `__dlpack__` numbers them; -1 does nothing. `owner` keeps the stream alive,
/// unless it is None.
void use_on(std::shared_ptr<batch> held, const device& device, std::int64_t stream, nanobind::handle owner);

/// A tuple of lengths.
nanobind::tuple tuple_of(const shape_vector& lengths);
/// numpy's name of a type, as the typestr of its array interface: "<f4". Structured types, and those that
/// numpy lacks, are "|V" and their size in bytes.
nanobind::str typestr_of(const dtype& type);
/// The array interface of elements in host memory (version 3), for numpy.
nanobind::dict array_interface_of(const array_view& view, bool read_only);

/// What Python's `__dlpack__` is given.
struct export_request {
    bool versioned = false;
    std::optional<std::int64_t> stream;
};
/// @throws unsupported for a copy, and for another device than `device`; invalid_argument for a `stream` or
/// `max_version` of another type.
export_request request_of(const device& device, nanobind::handle stream, nanobind::handle max_version,
                          nanobind::handle dl_device, nanobind::handle copy);
/// A capsule that owns a tensor until a consumer takes it.
nanobind::object capsule_of(dlpack::exported_tensor<dlpack::managed_tensor> exported);
nanobind::object capsule_of(dlpack::exported_tensor<dlpack::managed_tensor_versioned> exported);
/// An array of host memory as a capsule.
nanobind::object capsule_of(const array& array, const export_request& request);

nanobind::tuple dlpack_device_of(const device& device);
/// The number of a GPU, or nothing for the host.
std::optional<int> gpu_of(const device& device);

void bind_tensors(nanobind::module_& module);

}  // namespace pinflow::python
