#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

/// Files of known bytes, and the sentences of errors.

/// 0, 1, ..., 250, 0, ...: the period is prime, so that any 251 consecutive pages differ.
inline std::vector<std::byte> pattern_bytes(std::size_t size) {
    std::vector<std::byte> bytes(size);
    for (std::size_t index = 0; index < size; ++index)
        bytes[index] = static_cast<std::byte>(index % 251);
    return bytes;
}

/// Writes `bytes` over whatever was at `path`, in place.
inline void write_bytes(const std::filesystem::path& path, std::span<const std::byte> bytes) {
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

/// How many descriptors this process has open.
inline std::size_t open_descriptors() {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
        ++count;
    return count;
}

/// The message of the Error that `function` throws; empty if it throws none. Other exceptions pass.
template <typename Error, typename Function>
std::string message_of(Function function) {
    try {
        function();
    } catch (const Error& failure) {
        return failure.what();
    }
    return {};
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

/// Whether `text` has each of `parts` somewhere, in any order.
inline bool contains_all(std::string_view text, std::initializer_list<std::string_view> parts) {
    return std::ranges::all_of(
        parts, [&](std::string_view part) { return text.find(part) != std::string_view::npos; });
}
