#include "pinflow/train/flat_parameters.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "formats/safetensors_tensor.hpp"
#include "pinflow/error.hpp"
#include "src/core/enumerators.hpp"
#include "src/core/quote.hpp"
#include "src/core/utf8.hpp"
#include "src/device/backend.hpp"
#include "src/train/flat_layout.hpp"
#include "src/train/flat_state.hpp"
#include "src/train/small_buffer.hpp"

namespace pinflow {

namespace {

using detail::flat_layout;

/// Gradients of at most this size leave room in the L2 cache of an A100 or H100 (40 and 50 MB).
constexpr std::uint64_t max_cached_bytes = std::uint64_t{20} << 20;

std::vector<optimizer> checked_groups(std::vector<optimizer> groups) {
    if (groups.empty()) throw invalid_argument("flat parameters need the settings of at least one group");
    for (const optimizer& group : groups) {
        check_settings(group);
        const detail::rule_layout first = detail::layout_of(groups.front());
        const detail::rule_layout layout = detail::layout_of(group);
        if (layout.is_rowwise)
            throw unsupported(
                fmt::format("{} is a rule for the rows of an embedding table", rule_name(group)));
        if (group.index() == groups.front().index() && layout.kind == first.kind) continue;
        throw invalid_argument(
            fmt::format("all groups must have one rule, and momentum, centered and amsgrad must be on or off "
                        "in all: one has "
                        "{} with the states [{}], another one {} with [{}]",
                        rule_name(groups.front()), fmt::join(first.states, ", "), rule_name(group),
                        fmt::join(layout.states, ", ")));
    }
    return groups;
}

void check_parameters(std::span<const parameter_spec> parameters, std::size_t group_count) {
    std::unordered_map<std::string_view, std::size_t> names;
    for (const parameter_spec& parameter : parameters) {
        if (parameter.name.empty()) throw invalid_argument("a parameter has an empty name");
        // a name that no file can have would fail only when the parameters are saved
        if (parameter.name == "__metadata__")
            throw invalid_argument("a parameter cannot be called '__metadata__': no tensor in a file can");
        if (!detail::count_code_points(parameter.name))
            throw invalid_argument(fmt::format("the name {} of a parameter is not UTF-8",
                                               detail::quote(parameter.name, detail::max_label_name)));
        if (parameter.shape.size() > detail::max_safetensors_axes)
            throw invalid_argument(
                fmt::format("parameter '{}' has {} axes; a safetensors file allows at most {}",
                            parameter.name, parameter.shape.size(), detail::max_safetensors_axes));
        if (!names.emplace(parameter.name, names.size()).second)
            throw invalid_argument(fmt::format("two parameters are called '{}'", parameter.name));
        if (parameter.group >= group_count)
            throw invalid_argument(fmt::format("parameter '{}' is in group {}, and there are {}",
                                               parameter.name, parameter.group, group_count));
    }
}

/// @throws invalid_argument if a state, which is saved as PARAMETER.STATE, would have the name of a
/// parameter.
void check_state_names(std::span<const parameter_spec> parameters, std::span<const std::string> state_names) {
    std::unordered_set<std::string_view> names;
    for (const parameter_spec& parameter : parameters)
        names.insert(parameter.name);
    for (const parameter_spec& parameter : parameters) {
        for (const std::string& state : state_names) {
            // only 16-bit parameters have a master copy
            if (state == "master" && parameter.dtype.size_bytes() != 2) continue;
            if (names.contains(fmt::format("{}.{}", parameter.name, state)))
                throw invalid_argument(
                    fmt::format("a parameter cannot be called '{}.{}': the state {} of '{}' is saved under "
                                "that name",
                                parameter.name, state, state, parameter.name));
        }
    }
}

void check_limit(std::string_view name, double limit) {
    if (!(limit >= 0))
        throw invalid_argument(fmt::format("{} must be a number from 0 on, not {}", name, limit));
}

}  // namespace

// ---- making ----------------------------------------------------------------------------------------------

flat_parameters::state_type::state_type(std::vector<parameter_spec> specs, std::vector<optimizer> settings,
                                        stream_view stream, flat_options flat)
    : device(stream.device()),
      parameters(std::move(specs)),
      groups(std::move(settings)),
      options(std::move(flat)),
      layout(detail::lay_out(parameters)) {
    detail::device_backend& backend = device.backend();
    const detail::rule_layout rule = detail::layout_of(groups.front());
    backend.prepare_updates(rule.kind);
    for (const std::string_view name : rule.states)
        state_names.emplace_back(name);
    const bool has_masters = options.master_copies && layout.has_small_types;
    if (has_masters) state_names.emplace_back("master");
    check_state_names(parameters, state_names);
    detail::check_enumerator(options.nonfinite, nonfinite_gradients::refuse, "nonfinite_gradients");

    // Parameters and gradients share one allocation, so that one call zeroes both. Each has 256 bytes at
    // least, so that no address is null.
    buffer_bytes = std::max(layout.buffer_bytes, detail::view_alignment);
    state_bytes = std::max(layout.state_bytes, detail::view_alignment);
    values = device_buffer(2 * buffer_bytes, stream, options.resource);
    if (!state_names.empty())
        states = device_buffer(state_names.size() * state_bytes, stream, options.resource);
    const detail::small_buffer rest(layout, groups);
    small = device_buffer(rest.size_bytes(), stream, options.resource);

    backend.fill_zero(values.data(), values.size_bytes(), stream.native_handle());
    if (!state_names.empty()) backend.fill_zero(states.data(), states.size_bytes(), stream.native_handle());
    const std::vector<std::byte> contents = rest.contents(small.data());
    backend.copy_to_device(small.data(), contents, stream.native_handle());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const std::byte* const source = std::exchange(parameters[i].values, nullptr);
        const std::uint64_t size_bytes = detail::parameter_size_bytes(parameters[i]);
        if (source == nullptr || size_bytes == 0) continue;
        backend.copy_on_device(values.data() + layout.places[i].parameter_bytes, source, size_bytes,
                               stream.native_handle());
    }
    stream.synchronize();

    rest.point(buffers, small.data());
    buffers.parameters = values.data();
    buffers.gradients = values.data() + buffer_bytes;
    for (std::size_t i = 0; i < state_names.size(); ++i)
        buffers.states[i] = states.data() + i * state_bytes;
    buffers.has_masters = has_masters;
}

void flat_parameters::state_type::use(stream_view stream) {
    if (!(stream.device() == device))
        throw invalid_argument(fmt::format("the parameters are on {}, and the stream is one of {}",
                                           device.name(), stream.device().name()));
    values.set_stream(stream);
    states.set_stream(stream);
    small.set_stream(stream);
}

flat_parameters::flat_parameters(std::vector<parameter_spec> parameters, std::vector<optimizer> groups,
                                 stream_view stream, flat_options options) {
    groups = checked_groups(std::move(groups));
    check_parameters(parameters, groups.size());
    state_ =
        std::make_shared<state_type>(std::move(parameters), std::move(groups), stream, std::move(options));
}

flat_parameters::flat_parameters(flat_parameters&& other) noexcept = default;
flat_parameters& flat_parameters::operator=(flat_parameters&& other) noexcept = default;
flat_parameters::~flat_parameters() = default;

flat_parameters::state_type& flat_parameters::valid_state() const {
    if (!state_) throw invalid_argument("these flat parameters have been moved from");
    return *state_;
}

// ---- views -----------------------------------------------------------------------------------------------

const device& flat_parameters::device() const noexcept {
    static const pinflow::device host = pinflow::device::host();
    return state_ ? state_->device : host;
}
const std::vector<parameter_spec>& flat_parameters::parameters() const noexcept {
    static const std::vector<parameter_spec> none;
    return state_ ? state_->parameters : none;
}
const std::vector<std::string>& flat_parameters::state_names() const noexcept {
    static const std::vector<std::string> none;
    return state_ ? state_->state_names : none;
}
std::byte* flat_parameters::parameter_buffer() const noexcept {
    return state_ ? state_->buffers.parameters : nullptr;
}
std::byte* flat_parameters::gradient_buffer() const noexcept {
    return state_ ? state_->values.data() + state_->buffer_bytes : nullptr;
}
std::uint64_t flat_parameters::buffer_size_bytes() const noexcept {
    return state_ ? state_->layout.buffer_bytes : 0;
}
std::shared_ptr<const void> flat_parameters::share() const {
    return state_;
}

std::size_t flat_parameters::index_of(std::string_view name) const {
    const auto& parameters = valid_state().parameters;
    const auto found = std::ranges::find(parameters, name, &parameter_spec::name);
    if (found == parameters.end()) throw invalid_argument(fmt::format("there is no parameter '{}'", name));
    return static_cast<std::size_t>(found - parameters.begin());
}

const optimizer& flat_parameters::group(std::size_t index) const {
    const auto& groups = valid_state().groups;
    if (index >= groups.size())
        throw invalid_argument(fmt::format("there is no group {}: there are {}", index, groups.size()));
    return groups[index];
}

const flat_layout::place& flat_parameters::state_type::place_of(std::size_t index) const {
    if (index >= parameters.size())
        throw invalid_argument(
            fmt::format("there is no parameter {}: there are {}", index, parameters.size()));
    return layout.places[index];
}

std::byte* flat_parameters::parameter(std::size_t index) const {
    return valid_state().buffers.parameters + valid_state().place_of(index).parameter_bytes;
}
std::byte* flat_parameters::gradient(std::size_t index) const {
    return parameter(index) + state_->buffer_bytes;
}

std::byte* flat_parameters::state(std::size_t index, std::size_t state) const {
    state_type& own = valid_state();
    const flat_layout::place& place = own.place_of(index);
    if (state >= own.state_names.size())
        throw invalid_argument(fmt::format("there is no state {}: the rule {} has {}", state,
                                           rule_name(own.groups.front()), own.state_names.size()));
    if (own.is_master(state) && own.parameters[index].dtype.size_bytes() != 2) return nullptr;
    return own.buffers.states[state] + place.state_bytes;
}

void flat_parameters::check_views(std::span<const void* const> parameters,
                                  std::span<const void* const> gradients) const {
    const state_type& own = valid_state();
    for (const auto& [addresses, what, begin] : {std::tuple(parameters, "parameter", std::uint64_t{0}),
                                                 {gradients, "gradient of parameter", own.buffer_bytes}}) {
        if (addresses.empty()) continue;
        if (addresses.size() != own.parameters.size())
            throw invalid_argument(fmt::format("{} addresses of {} were given for {} parameters",
                                               addresses.size(), begin == 0 ? "parameters" : "gradients",
                                               own.parameters.size()));
        for (std::size_t i = 0; i < addresses.size(); ++i) {
            const parameter_spec& spec = own.parameters[i];
            if (addresses[i] == parameter(i) + begin || detail::parameter_size_bytes(spec) == 0) continue;
            throw invalid_argument(
                fmt::format("the {} '{}' has left the flat buffer: it lies at {}, and its view at {}", what,
                            spec.name, addresses[i], static_cast<const void*>(parameter(i) + begin)));
        }
    }
}

// ---- steps -----------------------------------------------------------------------------------------------

void flat_parameters::zero_gradients_async(stream_view stream) {
    state_type& own = valid_state();
    own.use(stream);
    own.device.backend().fill_zero(gradient_buffer(), own.buffer_bytes, stream.native_handle());
}

void flat_parameters::clip_norm(double max_norm) {
    check_limit("max_norm", max_norm);
    valid_state().clipping.max_norm = max_norm;
}

void flat_parameters::clip_value(double max_magnitude) {
    check_limit("max_magnitude", max_magnitude);
    valid_state().clipping.max_magnitude = max_magnitude;
}

void flat_parameters::step_async(stream_view stream) {
    state_type& own = valid_state();
    own.use(stream);
    const bool skips = own.options.nonfinite != nonfinite_gradients::update;
    const auto [max_norm, max_magnitude] = own.clipping;
    detail::device_backend& backend = own.device.backend();
    const bool checks = (skips || max_norm) && own.buffers.pack_count != 0;
    if (checks) {
        backend.check_gradients({own.buffers, own.backwards}, stream.native_handle());
        // after a check of few gradients the cache still has what the step before it left there
        if (own.buffer_bytes > max_cached_bytes) own.backwards = !own.backwards;
    }
    detail::flat_step step{own.buffers, detail::layout_of(own.groups.front()).kind};
    step.backwards = own.backwards;
    step.follows_check = checks;
    step.skips = checks && skips;
    step.clips = checks && max_norm.has_value();
    step.max_norm = max_norm.value_or(0);
    step.clamps = max_magnitude.has_value();
    step.max_magnitude = max_magnitude.value_or(0);
    backend.update_parameters(step, stream.native_handle());
    own.backwards = !own.backwards;
    own.clipping = {};
}

void flat_parameters::set_rate_async(std::size_t index, double rate, stream_view stream) {
    const optimizer settings = with_rate(group(index), rate);
    check_settings(settings);
    state_type& own = valid_state();
    own.use(stream);
    double* const place = const_cast<double*>(&own.buffers.groups[index].rate);  // in a buffer of ours
    own.device.backend().set_number(place, rate, stream.native_handle());
    own.groups[index] = settings;
}

void flat_parameters::use_scale(const float* scale, const float* found) {
    state_type& own = valid_state();
    own.buffers.scale = scale;
    own.buffers.found = found;
}

flat_parameters::progress flat_parameters::read_progress(stream_view stream) const {
    state_type& own = valid_state();
    own.use(stream);
    detail::flat_control control;
    own.device.backend().copy_to_host(std::as_writable_bytes(std::span(&control, 1)),
                                      reinterpret_cast<const std::byte*>(own.buffers.control),
                                      stream.native_handle());
    stream.synchronize();
    return {control.steps, control.skipped, control.norm};
}

void flat_parameters::check(stream_view stream) const {
    const progress now = read_progress(stream);
    if (valid_state().options.nonfinite != nonfinite_gradients::refuse || now.skipped == 0) return;
    throw error(fmt::format("{} of {} steps changed nothing, because some gradients were infinite or NaN",
                            now.skipped, now.steps + now.skipped));
}

}  // namespace pinflow
