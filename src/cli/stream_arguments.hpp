#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pinflow/loader/loader.hpp"
#include "src/cli/commands.hpp"

namespace pinflow::cli {

/// What `pinflow stream` is asked for.
struct stream_arguments {
    std::vector<std::string> files;
    bool stack = false;  ///< whether each file that a pattern matches is one row
    /// With the state of --load-state, and its order, seed and window where no flags say other ones.
    loader_options options;
    std::string save_state;  ///< a path; empty: nowhere
    std::string load_state;  ///< the same, of options.resume_from
    bool json = false;
};

/// Empty when help was asked for. @throws usage_error; what reading the state throws.
std::optional<stream_arguments> parse_stream_arguments(const argument_list& arguments);

}  // namespace pinflow::cli
