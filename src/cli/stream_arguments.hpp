#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pinflow/loader/loader.hpp"
#include "src/cli/commands.hpp"

namespace pinflow::cli {

/// The parsed arguments of `pinflow stream`.
struct stream_arguments {
    std::vector<std::string> files;
    bool stack = false;           ///< whether each file that a pattern matches is one row
    bool is_seed_unused = false;  ///< --seed was given, but the order is sequential
    /// Includes the state of --load-state. Its order, seed and window apply unless flags set others.
    loader_options options;
    std::string save_state;  ///< a path; empty: the state is not saved
    std::string load_state;  ///< the path of options.resume_from; empty: there is none
    bool json = false;
};

/// Empty when help was asked for. @throws usage_error; what parse_device and reading the state throw;
/// unsupported for a state whose order the tool lacks; system_failure or invalid_argument if the state cannot
/// be saved.
std::optional<stream_arguments> parse_stream_arguments(const argument_list& arguments);

}  // namespace pinflow::cli
