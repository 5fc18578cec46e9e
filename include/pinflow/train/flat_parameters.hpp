#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/stream.hpp"
#include "pinflow/train/optimizer.hpp"

namespace pinflow {

/// A parameter of a model: float16, bfloat16, float32 or float64, in C order.
struct parameter_spec {
    std::string name;
    pinflow::dtype dtype;
    shape_vector shape;
    std::size_t group = 0;  ///< the index of the settings that update it
    /// The first values: all elements in C order, in memory of the stream's device, written by the stream's
    /// earlier work. Null: zeros. Only the constructor reads them, and sets this to null.
    const std::byte* values = nullptr;
};

/// What happens to a step if a gradient is infinite or NaN. `skip` and `refuse` launch a second
/// kernel before the step: it reads all gradients, and always computes their norm (progress::norm).
enum class nonfinite_gradients {
    update,  ///< the step is made; with clip_norm, one NaN makes all parameters NaN
    skip,    ///< the step changes nothing, and is counted
    refuse,  ///< the same, and `check` throws from then on, until `load`
};

struct flat_options {
    nonfinite_gradients nonfinite = nonfinite_gradients::update;
    /// Keeps a float32 copy of every 16-bit parameter. Steps update the copy, and round it to the parameter.
    /// If a parameter does not have the value of its rounded copy, because others have written to it, the
    /// step starts from the parameter.
    bool master_copies = false;
    /// Where the buffers come from; null: the device's pool.
    std::shared_ptr<memory_resource> resource = nullptr;
};

/// All parameters of a model in one buffer, their gradients in a second one, and the optimizer's state in a
/// third one. A step is one kernel, or two with clip_norm, `skip` or `refuse`, whatever the number of
/// parameters, groups and types. Parameters and gradients are used through views, which begin at multiples of
/// 256 bytes. The model must keep them: see check_views.
///
/// Arithmetic and state are float32, or float64 for float64 parameters. All results except NaNs are the same
/// bits on every device, in every run. Functions that end in `_async` enqueue work on the stream that they
/// are given; none of them waits. All of them, and the model's own work, must come after each other: on one
/// stream, or with events between. Steps can be captured in a CUDA graph: the number of steps and the rates
/// lie in device memory.
///
/// One thread at a time may use an object. Move-only; a moved-from object has no parameters, null buffers and
/// an empty `share`, and its other members throw invalid_argument.
class flat_parameters {
 public:
    /// Makes parameters with their first values. Gradients and state begin as zeros. Loads the kernels.
    /// `groups[i]` has the settings of the parameters whose group is i; all are of one optimizer type. Which
    /// states are kept, such as for momentum and amsgrad, must be the same in all. Waits for `stream`.
    /// @throws invalid_argument for two parameters of one name, names that `save` cannot write (empty, not
    /// UTF-8, "__metadata__", that of another parameter's state), more than 64 axes or 2^61 bytes (a length
    /// of 0 counts as 1), groups that do not exist, no groups, and settings that check_settings refuses or
    /// that differ in rule or state.
    /// @throws unsupported for other types, and for rowwise_adagrad.
    /// @throws device_error or system_failure if memory is short; what options.resource throws.
    flat_parameters(std::vector<parameter_spec> parameters, std::vector<optimizer> groups, stream_view stream,
                    flat_options options = {});
    flat_parameters(flat_parameters&& other) noexcept;
    flat_parameters& operator=(flat_parameters&& other) noexcept;
    flat_parameters(const flat_parameters&) = delete;
    flat_parameters& operator=(const flat_parameters&) = delete;
    /// Gives up this object's share of the buffers. They are freed when the last result of `share` and the
    /// last DLPack tensor have gone, too, in the order of the last stream that a member was given. Does not
    /// wait.
    ~flat_parameters();

    const pinflow::device& device() const noexcept;
    const std::vector<parameter_spec>& parameters() const noexcept;
    /// The index of the parameter `name`.
    /// @throws invalid_argument if there is none of that name.
    std::size_t index_of(std::string_view name) const;
    /// The settings of a group, with the rate that was set last.
    /// @throws invalid_argument if there is no such group.
    const optimizer& group(std::size_t index) const;

    /// The first element of a parameter, and of its gradient, in device memory; not null for empty ones.
    /// @throws invalid_argument if there is no such parameter.
    std::byte* parameter(std::size_t index) const;
    std::byte* gradient(std::size_t index) const;
    /// The names of the states that have a number for each element, as torch.optim has them; asgd's is "ax".
    /// If there are master copies, "master" is the last.
    const std::vector<std::string>& state_names() const noexcept;
    /// The first element of a parameter's state, in device memory: float64 for float64 parameters, otherwise
    /// float32. A master copy exists for 16-bit types only: null for others.
    /// @throws invalid_argument if there is no such parameter or state.
    std::byte* state(std::size_t index, std::size_t state) const;
    /// The whole buffers: all parameters with the gaps between them. The gaps of the gradients must stay
    /// zero.
    std::byte* parameter_buffer() const noexcept;
    std::byte* gradient_buffer() const noexcept;
    std::uint64_t buffer_size_bytes() const noexcept;
    /// Keeps the buffers alive, also after this object has been destroyed.
    std::shared_ptr<const void> share() const;

    /// Compares the addresses that the model uses now with the views: frameworks replace tensors, for example
    /// `zero_grad(set_to_none=True)` in PyTorch. Empty lists are not compared; parameters without elements
    /// never differ.
    /// @throws invalid_argument for lists of another length, and for the first tensor that has left the
    /// buffer.
    void check_views(std::span<const void* const> parameters, std::span<const void* const> gradients) const;

    /// Sets all gradients to zero.
    /// @throws what all members below that take a stream throw: invalid_argument for a stream of another
    /// device; device_error.
    void zero_gradients_async(stream_view stream);
    /// Scales the gradients of the next step so that the Euclidean norm of all gradients together is at most
    /// `max_norm`, as torch.nn.utils.clip_grad_norm_. The step computes the norm, in a second kernel; the
    /// gradients in memory stay as they are. Enqueues nothing.
    /// @throws invalid_argument if max_norm is negative or NaN.
    void clip_norm(double max_norm);
    /// Limits each element of the gradients to [-max_magnitude, max_magnitude] in the next step, after
    /// clip_norm. The gradients in memory stay as they are. Enqueues nothing.
    /// @throws invalid_argument if max_magnitude is negative or NaN.
    void clip_value(double max_magnitude);
    /// Updates every parameter by one step of the rule. A parameter without a gradient has a gradient of
    /// zero, so that decay and momentum still change it; torch.optim skips it. On a GPU of compute
    /// capability 9.0 or higher, a kernel that is launched next with programmatic stream serialization may
    /// start before the step has ended: like every such kernel, it must call cudaGridDependencySynchronize
    /// first.
    void step_async(stream_view stream);
    /// The rate of a group from the next step on.
    /// @throws invalid_argument if there is no such group, or if the rate is negative or not finite.
    void set_rate_async(std::size_t index, double rate, stream_view stream);
    /// For mixed precision: later steps divide the gradients by *scale, before they are clipped, and change
    /// nothing if *found is not 0; such steps count as skipped. These are the two tensors of
    /// torch.amp.GradScaler: float32 in memory of this device, valid until the stream has passed the last
    /// step that reads them. A null `scale` counts as 1, a null `found` as 0.
    void use_scale(const float* scale, const float* found);

    struct progress {
        std::uint64_t steps = 0;    ///< that have been made
        std::uint64_t skipped = 0;  ///< because of gradients that were not finite
        double norm = 0;            ///< of all gradients, in the last step with clip_norm, `skip` or `refuse`
    };
    /// Waits for `stream`.
    progress read_progress(stream_view stream) const;
    /// Waits for `stream`.
    /// @throws error if a step was refused because of gradients that were not finite.
    void check(stream_view stream) const;

    /// Writes parameters and state with their names, the rule's name and the number of steps as safetensors,
    /// atomically. The state of parameter "w" is called "w.exp_avg", and so on. Waits for `stream`.
    /// @throws system_failure.
    void save(const std::filesystem::path& path, stream_view stream) const;
    /// Reads what `save` wrote, for parameters of the same names, types and shapes in any order. Settings are
    /// not saved. Later steps are bit-equal to those without the interruption. Forgets clipping that was
    /// asked for, and skipped steps. Waits for `stream`.
    /// @throws state_mismatch if parameters, the rule or its states differ, unsupported for tensors of a type
    /// that pinflow lacks, invalid_argument as `save`; then nothing has changed.
    /// @throws format_error, system_failure, data_changed; if reading fails midway, or the file has changed
    /// meanwhile, the parameters are part old, part new.
    void load(const std::filesystem::path& path, stream_view stream);

 private:
    struct state_type;
    state_type& valid_state() const;

    std::shared_ptr<state_type> state_;
};

}  // namespace pinflow
