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

/// Parses the arguments after a command's name into the options of `app`. @return false if help was
/// requested, which has been printed. @throws usage_error.
bool parse(CLI::App& app, const std::vector<std::string>& arguments);

/// Reads a whole decimal number without a sign. @throws usage_error for anything else. It names `flag`, and
/// `word` as what the flag takes, too, if there is one.
std::uint64_t parse_count(std::string_view flag, std::string_view text, std::uint64_t min = 0,
                          std::uint64_t max = std::numeric_limits<std::uint64_t>::max(),
                          std::string_view word = {});

/// Reads a positive number of bytes: "1048576", "1024KiB", "1MiB", also with GiB or TiB. @throws usage_error
/// as parse_count.
std::uint64_t parse_byte_count(std::string_view flag, std::string_view text, std::string_view word = {});

/// "auto", "host", "cuda:N". @throws usage_error for other names, and if the build has no such device;
/// device_error if the machine has none.
device parse_device(const std::string& name);

}  // namespace pinflow::cli
