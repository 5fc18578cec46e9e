#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pinflow/train/flat_parameters.hpp"
#include "src/train/flat_layout.hpp"
#include "src/train/rule_setup.hpp"

namespace pinflow {

/// What flat parameters own. Frameworks' tensors share it.
struct flat_parameters::state_type {
    state_type(std::vector<parameter_spec> specs, std::vector<optimizer> settings, stream_view stream,
               flat_options flat);

    /// Checks the stream of a call. From now on the buffers are freed in the order of this stream.
    void use(stream_view stream);
    const detail::flat_layout::place& place_of(std::size_t index) const;
    bool is_master(std::size_t state) const noexcept {
        return buffers.has_masters && state + 1 == state_names.size();
    }

    pinflow::device device;
    std::vector<parameter_spec> parameters;
    std::vector<optimizer> groups;
    flat_options options;
    std::vector<std::string> state_names;
    detail::flat_layout layout;
    std::uint64_t buffer_bytes = 0;  ///< of the parameters, and of the gradients behind them
    std::uint64_t state_bytes = 0;   ///< of each state
    device_buffer values;            ///< parameters, then gradients
    device_buffer states;
    device_buffer small;  ///< as class small_buffer lays it out
    detail::flat_buffers buffers;
    /// What the next step does to the gradients.
    struct clip {
        std::optional<double> max_norm;
        std::optional<double> max_magnitude;
    };
    clip clipping;
    /// Whether the next pass through the buffers begins at their end. It begins where the last one ended, so
    /// that it finds elements in the GPU's cache; but a step goes the way of its check if gradients are few
    /// (see step_async). A pass that is captured in a CUDA graph keeps its direction in every launch.
    bool backwards = false;
};

}  // namespace pinflow
