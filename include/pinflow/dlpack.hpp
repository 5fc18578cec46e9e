#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "pinflow/array.hpp"
#include "pinflow/device.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/load.hpp"
#include "pinflow/loader/batch.hpp"
#include "pinflow/stream.hpp"
#include "pinflow/train/flat_parameters.hpp"

namespace pinflow {

/// The structures of DLPack 1.1, by which libraries hand each other tensors without a copy. Members have the
/// names and the layout of the published C header (https://dmlc.github.io/dlpack/latest/c_api.html), so a
/// pointer to one of these structures can be cast to a pointer to that header's.
namespace dlpack {

struct version {
    std::uint32_t major;
    std::uint32_t minor;
};

/// The version that `to_dlpack` writes.
inline constexpr version current_version{1, 1};

/// Where the elements lie. DLPack defines further values, whose tensors pinflow refuses.
enum class device_type : std::int32_t {
    cpu = 1,
    cuda = 2,
    cuda_host = 3,  ///< page-locked host memory of CUDA
};

struct device {
    dlpack::device_type device_type;
    std::int32_t device_id;  ///< the ordinal of a CUDA device; 0 for host memory
};

/// The kind of an element. DLPack defines further values, for types that pinflow lacks.
enum class type_code : std::uint8_t {
    signed_integer = 0,
    unsigned_integer = 1,
    floating = 2,
    bfloat = 4,
    complex = 5,
    boolean = 6,
    float8_e4m3fn = 10,
    float8_e4m3fnuz = 11,
    float8_e5m2 = 12,
    float8_e5m2fnuz = 13,
    float8_e8m0fnu = 14,
};

struct data_type {
    type_code code;
    std::uint8_t bits;
    std::uint16_t lanes;  ///< 1 unless an element is a vector
};

struct tensor {
    void* data;  ///< null if there are no elements
    dlpack::device device;
    std::int32_t ndim;
    data_type dtype;
    std::int64_t* shape;
    std::int64_t* strides;  ///< in elements; null: C order. pinflow always sets them.
    std::uint64_t byte_offset;
};

/// The older structure, which says neither its version nor whether the elements may be written.
struct managed_tensor {
    tensor dl_tensor;
    void* manager_ctx;
    void (*deleter)(managed_tensor* self);
};

/// Bits of managed_tensor_versioned::flags.
inline constexpr std::uint64_t flag_read_only = 1;
inline constexpr std::uint64_t flag_is_copied = 2;

struct managed_tensor_versioned {
    dlpack::version version;
    void* manager_ctx;
    void (*deleter)(managed_tensor_versioned* self);
    std::uint64_t flags;
    tensor dl_tensor;
};

/// Calls the tensor's own deleter.
struct call_deleter {
    template <typename Managed>
    void operator()(Managed* tensor) const noexcept {
        if (tensor->deleter != nullptr) tensor->deleter(tensor);
    }
};

/// A tensor that no consumer has taken yet. `release()` hands it over: the consumer calls its deleter.
template <typename Managed = managed_tensor_versioned>
using exported_tensor = std::unique_ptr<Managed, call_deleter>;

/// The type of elements in DLPack's terms.
/// @throws unsupported for types without a code in DLPack: times, strings, structured and opaque types,
/// floats of more than 64 bits, complex numbers of more than 128 bits, big-endian numbers. The message names
/// `view_as` if it helps.
data_type type_of(const dtype& type);

/// The stream that the argument `stream` of Python's `__dlpack__` means on `device`, by the array API
/// standard. On CUDA, none and 1 are the legacy default stream, 2 is the per-thread default stream, -1 is no
/// stream, and greater numbers are handles. On the host, none and -1 are no stream.
/// @throws invalid_argument for all other numbers.
std::optional<stream_view> consumer_stream(const pinflow::device& device,
                                           std::optional<std::int64_t> stream = std::nullopt);

}  // namespace dlpack

/// Array `index` of a batch as a tensor, without a copy. The consumer may read and write the elements on
/// `stream`, which counts as `batch.used_on(stream)` and must live until the lease ends. Name all other
/// streams by `used_on` before the batch is released, even if its tensors live longer: DLPack cannot report
/// them.
///
/// Tensors share the lease of the batch: the slot is reused once the batch and all its tensors have gone. So
/// tensors that are kept for long leave the loader fewer slots. They may outlive the batch and the loader.
/// A tensor's deleter may be called by any thread, at any time: when the process ends, after CUDA has
/// unloaded, and in a forked process, where it does nothing. It does not wait for a stream, with the two
/// exceptions that class batch names for the end of a lease.
///
/// The elements can be written, except in views of a source (route::direct on the host device): these are
/// marked read-only.
///
/// `Managed` is dlpack::managed_tensor_versioned or, for older consumers, dlpack::managed_tensor.
/// @throws as batch::operator[] and batch::used_on.
/// @throws unsupported also for types without a code (dlpack::type_of), and for read-only elements in the
/// older structure, which cannot say so.
template <typename Managed = dlpack::managed_tensor_versioned>
dlpack::exported_tensor<Managed> to_dlpack(batch& batch, std::size_t index, stream_view stream);

/// The same for a consumer that names no stream. Run its work on a stream that was given to `next` or
/// `used_on`. Work on any other stream must first wait for one of these streams, and one of these must wait
/// for that work before the lease ends. On the host device, a batch of `next()` needs neither.
/// @throws as above, and invalid_argument for a batch on a GPU that knows no stream: call `used_on` first.
template <typename Managed = dlpack::managed_tensor_versioned>
dlpack::exported_tensor<Managed> to_dlpack(const batch& batch, std::size_t index);

/// An array as a tensor in host memory, without a copy. The tensor keeps the bytes alive. A tensor of a
/// mapped file is marked read-only. Whoever writes to a tensor of an array in memory changes the array.
///
/// `Managed` is as above.
/// @throws unsupported if the elements are not in the address space (array::has_view), for types without a
/// code (dlpack::type_of), for strides that are no multiple of the element, and for read-only elements in the
/// older structure.
template <typename Managed = dlpack::managed_tensor_versioned>
dlpack::exported_tensor<Managed> to_dlpack(const array& array);

/// A loaded tensor, without a copy. Both share the memory, which is freed after the last of them. The
/// consumer may use it on `stream`, which counts as `tensor.used_on(stream)`.
///
/// `Managed` is as above.
/// @throws invalid_argument for a stream of another device; unsupported for types without a code
/// (dlpack::type_of).
template <typename Managed = dlpack::managed_tensor_versioned>
dlpack::exported_tensor<Managed> to_dlpack(const device_tensor& tensor, stream_view stream);

/// The same for a consumer that names no stream: its work must have finished when the last tensor goes.
template <typename Managed = dlpack::managed_tensor_versioned>
dlpack::exported_tensor<Managed> to_dlpack(const device_tensor& tensor);

/// Which elements of flat parameters a tensor is to have.
enum class flat_view { parameter, gradient };

/// The elements of parameter `index`, or of its gradient, as a tensor on their device, without a copy. The
/// tensor keeps the buffers alive, also after `flat` has been destroyed. Order its use with the stream of
/// `flat`'s calls.
///
/// `Managed` is as above.
/// @throws invalid_argument if there is no such parameter.
template <typename Managed = dlpack::managed_tensor_versioned>
dlpack::exported_tensor<Managed> to_dlpack(const flat_parameters& flat, std::size_t index, flat_view view);

/// A tensor of another library, for example as the destination of a gather or the source of a scatter. Owns
/// the tensor: calls its deleter when destroyed. Move-only. A moved-from tensor has no elements.
///
/// pinflow does not order its work with the stream that writes the tensor: pass that stream to the calls that
/// use it, or wait for it.
class foreign_tensor {
 public:
    /// Takes over a tensor. If the constructor throws, the tensor's deleter has been called.
    /// @throws invalid_argument for null pointers, lengths below 0, more than 64 axes, and strides or sizes
    /// of 2^63 bytes or more.
    /// @throws unsupported for another major version of DLPack, for memory that is neither host memory nor a
    /// CUDA device's, and for element types that pinflow does not have.
    /// @throws as device::cuda, if the memory is a CUDA device's.
    explicit foreign_tensor(dlpack::managed_tensor_versioned* tensor);
    explicit foreign_tensor(dlpack::managed_tensor* tensor);
    foreign_tensor(foreign_tensor&& other) noexcept = default;
    foreign_tensor& operator=(foreign_tensor&& other) noexcept = default;
    foreign_tensor(const foreign_tensor&) = delete;
    foreign_tensor& operator=(const foreign_tensor&) = delete;
    ~foreign_tensor() = default;

    /// The device of the elements; the host device for page-locked host memory.
    const pinflow::device& device() const noexcept { return device_; }
    /// The elements, at addresses of `device`. Valid while this object lives.
    const array_view& view() const noexcept { return view_; }
    /// Whether the owner forbids writing. Only the newer structure can say so.
    bool is_read_only() const noexcept { return read_only_; }
    /// The address of the first element, for functions that take contiguous rows, such as
    /// row_exchange::scatter. Null if there are no elements.
    /// @throws invalid_argument if the tensor is not in C order.
    const std::byte* contiguous_data() const;
    /// The same, to write to, for example as the destination of row_exchange::gather.
    /// @throws invalid_argument if the tensor is read-only, or not in C order.
    std::byte* writable_data() const;

 private:
    foreign_tensor(std::shared_ptr<const void> owner, const dlpack::tensor& tensor, bool read_only);

    std::shared_ptr<const void> owner_;
    pinflow::device device_;
    array_view view_;
    bool read_only_;
};

/// A parameter with the type, the shape and the values of a tensor, for flat_parameters: its constructor
/// copies the values, so the tensor must live until then. On a GPU, the work that writes the tensor must come
/// earlier on the constructor's stream.
/// @throws invalid_argument if the tensor is not in C order, or was moved from.
parameter_spec to_parameter(std::string name, const foreign_tensor& tensor, std::size_t group = 0);

}  // namespace pinflow
