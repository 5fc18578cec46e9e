#pragma once

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "tests/npy_bytes.hpp"
#include "tests/run_tool.hpp"

/// What the tests of the tool share: small files, and running a command that prints JSON.
namespace cli {

using arguments = std::vector<std::string>;

inline std::string joined(const arguments& command) {
    return fmt::format("{}", fmt::join(command, " "));
}

inline std::string npy(const std::string& descr, const std::string& shape, const std::string& payload,
                       const std::string& fortran_order = "False") {
    const std::string quoted = descr.starts_with('[') ? descr : "'" + descr + "'";
    return npy_bytes::header(npy_bytes::text(quoted, shape, fortran_order)) + payload;
}

/// A file from the JSON of its header.
inline std::string safetensors(const std::string& json, const std::string& data) {
    std::string length(8, '\0');
    for (unsigned index = 0; index < 8; ++index)
        length[index] = static_cast<char>(json.size() >> (8 * index) & 0xFF);
    return length + json + data;
}

inline std::string counting_bytes(std::size_t count) {
    std::string bytes(count, '\0');
    for (std::size_t i = 0; i < count; ++i) {
        bytes[i] = static_cast<char>(i * 131 + i / 251);
    }
    return bytes;
}

inline std::set<std::string> keys_of(const nlohmann::json& object) {
    std::set<std::string> keys;
    for (const auto& [key, value] : object.items()) {
        keys.insert(key);
    }
    return keys;
}

/// Runs a command that has to succeed and to print JSON and nothing else.
inline nlohmann::json run_json(arguments command) {
    command.emplace_back("--json");
    CAPTURE(joined(command));
    const tool_result result = run_tool(command);
    CAPTURE(result.errors);
    REQUIRE(result.status == 0);
    CHECK(result.errors.empty());
    nlohmann::json parsed = nlohmann::json::parse(result.output, nullptr, false);
    REQUIRE(!parsed.is_discarded());
    return parsed;
}

/// Runs a command that has to fail with that status and one line, which says all of `says`.
inline void check_fails(int status, const arguments& command, const std::vector<std::string>& says = {}) {
    CAPTURE(joined(command));
    const tool_result result = run_tool(command);
    CAPTURE(result.errors);
    CHECK(result.status == status);
    CHECK(result.one_error_line());
    CHECK(result.output.empty());
    for (const std::string& part : says) {
        CAPTURE(part);
        CHECK(result.errors.find(part) != std::string::npos);
    }
}

/// The names in a folder, hidden ones too.
inline std::set<std::string> names_in(const std::filesystem::path& folder) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
        names.insert(entry.path().filename().string());
    return names;
}

/// Appends to a file again and again during its lifetime: a concurrent writer.
class restless_file {
 public:
    explicit restless_file(const std::string& path)
        : writer_([path](const std::stop_token& stop) {
              while (!stop.stop_requested()) {
                  std::ofstream(path, std::ios::app | std::ios::binary) << 'x';
                  std::this_thread::sleep_for(std::chrono::milliseconds(1));
              }
          }) {}

 private:
    std::jthread writer_;
};

}  // namespace cli
