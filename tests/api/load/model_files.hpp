#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "pinflow/load.hpp"

/// A tensor with its elements, for files of tests.
struct model_tensor {
    std::string name;
    pinflow::dtype dtype;
    pinflow::shape_vector shape;
    std::vector<std::byte> bytes;
};

/// Random bytes; floats may be NaNs.
inline model_tensor random_tensor(std::string name, const pinflow::dtype& type, pinflow::shape_vector shape,
                                  unsigned seed = 0) {
    std::mt19937_64 random(seed + std::hash<std::string>()(name));
    model_tensor tensor{std::move(name), type, std::move(shape), {}};
    tensor.bytes.resize(pinflow::element_count(tensor.shape) * type.size_bytes());
    for (std::size_t i = 0; i < tensor.bytes.size(); i += sizeof(std::uint64_t)) {
        const std::uint64_t word = random();
        std::memcpy(&tensor.bytes[i], &word, std::min(sizeof word, tensor.bytes.size() - i));
    }
    return tensor;
}

/// Whole floats from -100 to 155, which float16, bfloat16 and float64 hold exactly.
inline model_tensor counting_tensor(std::string name, pinflow::shape_vector shape) {
    model_tensor tensor{std::move(name), pinflow::dtype::of<float>(), std::move(shape), {}};
    std::vector<float> values(pinflow::element_count(tensor.shape));
    for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<float>(i % 256) - 100;
    tensor.bytes.resize(values.size() * sizeof(float));
    std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
    return tensor;
}

inline void write_model(const std::filesystem::path& path, std::span<const model_tensor> tensors,
                        const std::map<std::string, std::string>& metadata = {}) {
    std::vector<pinflow::safetensors_writer::tensor> headers;
    for (const model_tensor& each : tensors)
        headers.push_back({each.name, each.dtype, each.shape});
    pinflow::safetensors_writer writer(path, headers, metadata);
    for (const model_tensor& each : tensors)
        writer.write(each.bytes);
    writer.finish();
}

/// The elements of a loaded tensor, from its device.
inline std::vector<std::byte> bytes_of(const pinflow::device_tensor& tensor) {
    std::vector<std::byte> bytes(tensor.size_bytes());
    if (bytes.empty()) return bytes;
    const pinflow::stream stream(tensor.device());
    pinflow::copy_to_host_async(bytes, tensor.data(), stream);
    stream.synchronize();
    return bytes;
}

/// The bytes of a slice.
inline std::vector<std::byte> sliced(const model_tensor& tensor, const pinflow::tensor_slice& slice) {
    std::uint64_t outer = 1, inner = tensor.dtype.size_bytes();
    for (std::size_t axis = 0; axis < slice.axis; ++axis)
        outer *= tensor.shape[axis];
    for (std::size_t axis = slice.axis + 1; axis < tensor.shape.size(); ++axis)
        inner *= tensor.shape[axis];
    std::vector<std::byte> bytes;
    for (std::uint64_t i = 0; i < outer; ++i) {
        const auto first =
            tensor.bytes.begin() + static_cast<std::ptrdiff_t>(i * tensor.shape[slice.axis] * inner);
        bytes.insert(bytes.end(), first + static_cast<std::ptrdiff_t>(slice.begin * inner),
                     first + static_cast<std::ptrdiff_t>(slice.end * inner));
    }
    return bytes;
}

/// The elements that a request selects.
inline std::vector<std::byte> part_of(model_tensor tensor, const pinflow::tensor_request& request) {
    std::vector<pinflow::tensor_slice> slices = request.further_slices;
    if (request.slice) slices.push_back(*request.slice);
    for (const pinflow::tensor_slice& slice : slices) {
        tensor.bytes = sliced(tensor, slice);
        tensor.shape[slice.axis] = slice.end - slice.begin;
    }
    return tensor.bytes;
}
