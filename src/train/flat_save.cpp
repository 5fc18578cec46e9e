#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "formats/safetensors_header.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "src/core/element_stream.hpp"
#include "src/core/quote.hpp"
#include "src/device/backend.hpp"
#include "src/train/flat_state.hpp"

namespace pinflow {

namespace {

constexpr const char* rule_key = "pinflow.rule";
constexpr const char* steps_key = "pinflow.steps";

/// A tensor of the file, and where its elements lie on the device.
struct saved_tensor {
    safetensors_writer::tensor tensor;
    std::byte* data = nullptr;
    std::uint64_t size_bytes = 0;
};

/// All parameters, then all states of the first parameter, and so on.
std::vector<saved_tensor> tensors_of(const flat_parameters& flat) {
    std::vector<saved_tensor> tensors;
    const auto& parameters = flat.parameters();
    const auto& states = flat.state_names();
    tensors.reserve(parameters.size() * (1 + states.size()));
    for (std::size_t i = 0; i < parameters.size(); ++i)
        tensors.push_back({{parameters[i].name, parameters[i].dtype, parameters[i].shape},
                           flat.parameter(i),
                           detail::parameter_size_bytes(parameters[i])});
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const bool is_double = parameters[i].dtype == dtype::of<double>();
        const dtype type = is_double ? dtype::of<double>() : dtype::of<float>();
        const std::uint64_t elements = tensors[i].size_bytes / parameters[i].dtype.size_bytes();
        for (std::size_t k = 0; k < states.size(); ++k) {
            std::byte* const data = flat.state(i, k);
            if (data == nullptr) continue;
            tensors.push_back(
                {{fmt::format("{}.{}", parameters[i].name, states[k]), type, parameters[i].shape},
                 data,
                 elements * type.size_bytes()});
        }
    }
    return tensors;
}

/// The tensors of a file that belong to the parameters, in the same order.
/// @throws state_mismatch.
std::vector<array> opened(const std::filesystem::path& path, const std::vector<saved_tensor>& expected) {
    std::unordered_map<std::string, array_listing> found;
    for (array_listing& listing : list_safetensors(path))
        found.emplace(listing.name, std::move(listing));
    if (found.size() != expected.size())
        throw state_mismatch(fmt::format("{} has {} tensors, and these parameters with their state have {}",
                                         detail::quote(path.string()), found.size(), expected.size()));
    std::vector<std::string> names;
    for (const saved_tensor& each : expected) {
        const auto entry = found.find(each.tensor.name);
        if (entry == found.end())
            throw state_mismatch(
                fmt::format("{} has no tensor '{}'", detail::quote(path.string()), each.tensor.name));
        names.push_back(each.tensor.name);
    }
    std::vector<array> arrays = open_safetensors(path, names);
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        const safetensors_writer::tensor& tensor = expected[i].tensor;
        if (arrays[i].dtype() == tensor.dtype && arrays[i].shape() == tensor.shape) continue;
        throw state_mismatch(fmt::format("'{}' has the type {} and the shape {} in {}, and {} and {} here",
                                         tensor.name, arrays[i].dtype().descr(), to_string(arrays[i].shape()),
                                         detail::quote(path.string()), tensor.dtype.descr(),
                                         to_string(tensor.shape)));
    }
    return arrays;
}

}  // namespace

void flat_parameters::save(const std::filesystem::path& path, stream_view stream) const {
    const progress now = read_progress(stream);
    const std::vector<saved_tensor> tensors = tensors_of(*this);
    std::vector<safetensors_writer::tensor> headers;
    for (const saved_tensor& each : tensors)
        headers.push_back(each.tensor);
    const std::map<std::string, std::string> metadata{
        {rule_key, std::string(rule_name(state_->groups.front()))},
        {steps_key, fmt::format("{}", now.steps)}};
    safetensors_writer writer(path, headers, metadata);

    constexpr std::uint64_t piece_bytes = std::uint64_t{16} << 20;
    const pinned_buffer piece(piece_bytes, state_->device);
    for (const saved_tensor& each : tensors) {
        for (std::uint64_t done = 0; done < each.size_bytes; done += piece_bytes) {
            const auto bytes = piece.bytes().first(std::min(piece_bytes, each.size_bytes - done));
            copy_to_host_async(bytes, each.data + done, stream);
            stream.synchronize();
            writer.write(bytes);
        }
    }
    writer.finish();
}

void flat_parameters::load(const std::filesystem::path& path, stream_view stream) {
    state_type& own = valid_state();
    own.use(stream);
    const std::map<std::string, std::string> metadata = detail::read_safetensors_metadata(path);
    const auto text_of = [&](const char* key) -> std::string {
        const auto entry = metadata.find(key);
        return entry == metadata.end() ? std::string() : entry->second;
    };
    const std::string rule = text_of(rule_key);
    if (rule != rule_name(own.groups.front()))
        throw state_mismatch(fmt::format(
            "{} was saved with {}, and these parameters are updated by the rule {}",
            detail::quote(path.string()), rule.empty() ? "no rule" : fmt::format("the rule '{}'", rule),
            rule_name(own.groups.front())));
    const std::string steps_text = text_of(steps_key);
    if (steps_text.empty())
        throw state_mismatch(fmt::format("{} is no file of flat parameters: it lacks the metadata '{}'",
                                         detail::quote(path.string()), steps_key));
    detail::flat_control control;
    const char* const end = steps_text.data() + steps_text.size();
    const auto [rest, code] = std::from_chars(steps_text.data(), end, control.steps);
    if (code != std::errc{} || rest != end)
        throw format_error(fmt::format("{}: the metadata '{}' is not a number of steps: '{}'",
                                       detail::quote(path.string()), steps_key, steps_text));
    const std::vector<saved_tensor> tensors = tensors_of(*this);
    const std::vector<array> arrays = opened(path, tensors);

    constexpr std::uint64_t piece_bytes = std::uint64_t{16} << 20;
    const pinned_buffer piece(piece_bytes, own.device);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const auto elements = detail::stream_elements(arrays[i], piece_bytes);
        for (std::uint64_t done = 0; done < tensors[i].size_bytes; done += piece_bytes) {
            const auto bytes = piece.bytes().first(std::min(piece_bytes, tensors[i].size_bytes - done));
            elements->read(bytes);
            copy_to_device_async(tensors[i].data + done, bytes, stream);
            stream.synchronize();
        }
        elements->finish();
    }
    own.device.backend().copy_to_device(reinterpret_cast<std::byte*>(own.buffers.control),
                                        std::as_bytes(std::span(&control, 1)), stream.native_handle());
    stream.synchronize();
    own.clipping = {};
}

}  // namespace pinflow
