#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/device.hpp"
#include "pinflow/error.hpp"

namespace CLI {
class App;
}

namespace pinflow::cli {

/// The command line asks for something wrong, or for something that this build lacks: exit status 2.
class usage_error : public error {
 public:
    using error::error;
};

/// Parses the arguments after a command's name into the options of `app`. An argument that begins with "["
/// and is not the value of a flag is taken as the path "./[...". @return false if help was requested, which
/// has been printed. @throws usage_error.
bool parse(CLI::App& app, const std::vector<std::string>& arguments);

/// Reads a whole decimal number from `min` to `max`, without a sign. @throws usage_error for anything else.
/// The message names `flag`. If `word` is not empty, it also says that the flag takes `word`.
std::uint64_t parse_count(std::string_view flag, std::string_view text, std::uint64_t min = 0,
                          std::uint64_t max = std::numeric_limits<std::uint64_t>::max(),
                          std::string_view word = {});

/// Reads a positive number of bytes: "1048576", "1024KiB", "1MiB", also with GiB or TiB. @throws usage_error
/// as parse_count.
std::uint64_t parse_byte_count(std::string_view flag, std::string_view text, std::string_view word = {});

/// Reads "auto", "host", "cuda" or "cuda:N". @throws usage_error for other names, and for CUDA in a build
/// without it; device_error if the machine has no such device, or the build has no code for it.
device parse_device(const std::string& name);

}  // namespace pinflow::cli
