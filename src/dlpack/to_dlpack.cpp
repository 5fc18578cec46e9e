#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "loader/slot_lease.hpp"
#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"

namespace pinflow {

namespace {

using namespace detail;

/// A tensor that others read, with all that its deleter destroys.
template <typename Managed>
struct exported {
    Managed managed{};
    std::vector<std::int64_t> lengths;  ///< shape, then strides
    std::shared_ptr<const void> owner;
};

template <typename Managed>
void destroy(Managed* tensor) {
    delete static_cast<exported<Managed>*>(tensor->manager_ctx);
}

dlpack::device place_of(const device& device) {
    if (device.kind() == device_kind::host) return {dlpack::device_type::cpu, 0};
    return {dlpack::device_type::cuda, device.index()};
}

/// The lengths and the strides in elements.
std::vector<std::int64_t> lengths_of(const array_view& view) {
    std::vector<std::int64_t> lengths;
    lengths.reserve(2 * view.shape().size());
    for (const std::uint64_t length : view.shape())
        lengths.push_back(static_cast<std::int64_t>(length));  // below 2^63, as in every array_view
    const auto item_bytes = static_cast<std::int64_t>(view.dtype().size_bytes());
    for (std::size_t axis = 0; axis < view.shape().size(); ++axis) {
        const std::int64_t stride = view.strides_bytes()[axis];
        if (stride % item_bytes != 0 && view.shape()[axis] > 1)
            throw unsupported(
                fmt::format("cannot make a tensor of elements of {} that are {} bytes apart: DLPack counts "
                            "strides in whole "
                            "elements; copy the array first",
                            view.dtype().descr(), stride));
        lengths.push_back(stride / item_bytes);
    }
    return lengths;
}

template <typename Managed>
dlpack::exported_tensor<Managed> make_tensor(const array_view& view, const device& device, bool read_only,
                                             std::shared_ptr<const void> owner) {
    constexpr bool is_versioned = std::is_same_v<Managed, dlpack::managed_tensor_versioned>;
    if (!is_versioned && read_only)
        throw unsupported(
            "the elements cannot be written, and DLPack's older structure, managed_tensor, cannot say so; "
            "use managed_tensor_versioned, or copy them");
    auto made = std::make_unique<exported<Managed>>();
    const dlpack::data_type type = dlpack::type_of(view.dtype());
    made->lengths = lengths_of(view);
    made->owner = std::move(owner);
    const std::size_t ndim = view.shape().size();
    auto* const elements = const_cast<std::byte*>(view.data());  // NOLINT: read_only says who may write
    made->managed.dl_tensor = {.data = view.size_bytes() == 0 ? nullptr : elements,
                               .device = place_of(device),
                               .ndim = static_cast<std::int32_t>(ndim),
                               .dtype = type,
                               .shape = made->lengths.data(),
                               .strides = made->lengths.data() + ndim,
                               .byte_offset = 0};
    if constexpr (is_versioned) {
        made->managed.version = dlpack::current_version;
        made->managed.flags = read_only ? dlpack::flag_read_only : 0;
    }
    made->managed.deleter = &destroy<Managed>;
    made->managed.manager_ctx = made.get();
    return dlpack::exported_tensor<Managed>(&made.release()->managed);
}

template <typename Managed>
dlpack::exported_tensor<Managed> tensor_of(const batch& batch, std::size_t index) {
    const array_view& view = batch[index];
    const auto& lease = lease_of(batch);
    const bool is_view = view.size_bytes() > 0 && !lease->pool().viewed_sources().empty();
    return make_tensor<Managed>(view, lease->pool().device(), is_view, lease);
}

}  // namespace

template <typename Managed>
dlpack::exported_tensor<Managed> to_dlpack(batch& batch, std::size_t index, stream_view stream) {
    auto tensor = tensor_of<Managed>(batch, index);
    batch.used_on(stream);
    return tensor;
}

template <typename Managed>
dlpack::exported_tensor<Managed> to_dlpack(const batch& batch, std::size_t index) {
    auto tensor = tensor_of<Managed>(batch, index);
    const auto& lease = lease_of(batch);
    if (!lease->is_used() && lease->pool().device().kind() != device_kind::host)
        throw invalid_argument(
            fmt::format("cannot make a tensor of a batch on {}: no stream uses the batch yet; give the "
                        "consumer's stream to to_dlpack, or call batch::used_on first",
                        lease->pool().device().name()));
    return tensor;
}

template <typename Managed>
dlpack::exported_tensor<Managed> to_dlpack(const array& array) {
    return make_tensor<Managed>(array.view(), device::host(), array.is_mapped(),
                                std::make_shared<pinflow::array>(array));
}

template <typename Managed>
dlpack::exported_tensor<Managed> to_dlpack(const device_tensor& tensor) {
    if (tensor.data() == nullptr && element_count(tensor.shape()) != 0)
        throw invalid_argument("cannot export a loaded tensor that was moved from");
    return make_tensor<Managed>(array_view(tensor.data(), tensor.dtype(), tensor.shape()), tensor.device(),
                                false, tensor.share());
}

template <typename Managed>
dlpack::exported_tensor<Managed> to_dlpack(const device_tensor& tensor, stream_view stream) {
    auto made = to_dlpack<Managed>(tensor);
    tensor.used_on(stream);
    return made;
}

template dlpack::exported_tensor<dlpack::managed_tensor> to_dlpack(const device_tensor&);
template dlpack::exported_tensor<dlpack::managed_tensor> to_dlpack(const device_tensor&, stream_view);
template dlpack::exported_tensor<dlpack::managed_tensor_versioned> to_dlpack(const device_tensor&);
template dlpack::exported_tensor<dlpack::managed_tensor_versioned> to_dlpack(const device_tensor&,
                                                                             stream_view);

template <typename Managed>
dlpack::exported_tensor<Managed> to_dlpack(const flat_parameters& flat, std::size_t index, flat_view view) {
    std::byte* const elements = view == flat_view::parameter ? flat.parameter(index) : flat.gradient(index);
    const parameter_spec& spec = flat.parameters()[index];
    return make_tensor<Managed>(array_view(elements, spec.dtype, spec.shape), flat.device(), false,
                                flat.share());
}

template dlpack::exported_tensor<dlpack::managed_tensor> to_dlpack(const flat_parameters&, std::size_t,
                                                                   flat_view);
template dlpack::exported_tensor<dlpack::managed_tensor_versioned> to_dlpack(const flat_parameters&,
                                                                             std::size_t, flat_view);
template dlpack::exported_tensor<dlpack::managed_tensor> to_dlpack(batch&, std::size_t, stream_view);
template dlpack::exported_tensor<dlpack::managed_tensor> to_dlpack(const batch&, std::size_t);
template dlpack::exported_tensor<dlpack::managed_tensor> to_dlpack(const array&);
template dlpack::exported_tensor<dlpack::managed_tensor_versioned> to_dlpack(batch&, std::size_t,
                                                                             stream_view);
template dlpack::exported_tensor<dlpack::managed_tensor_versioned> to_dlpack(const batch&, std::size_t);
template dlpack::exported_tensor<dlpack::managed_tensor_versioned> to_dlpack(const array&);

std::optional<stream_view> dlpack::consumer_stream(const pinflow::device& device,
                                                   std::optional<std::int64_t> stream) {
    constexpr std::int64_t no_stream = -1;
    constexpr std::int64_t legacy_default = 1;
    if (device.kind() == device_kind::host) {
        if (!stream || *stream == no_stream) return std::nullopt;
        throw invalid_argument(fmt::format("the host device has no stream {} for a consumer", *stream));
    }
    const std::int64_t handle = stream.value_or(legacy_default);
    if (handle == no_stream) return std::nullopt;
    if (handle <= 0)
        throw invalid_argument(
            handle == 0
                ? "stream 0 may mean two streams: 1 is the legacy default stream, 2 the per-thread one"
                : fmt::format("there is no stream {}", handle));
    // CUDA's own handles of its two default streams are 1 and 2
    return stream_view(device, reinterpret_cast<void*>(handle));  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace pinflow
