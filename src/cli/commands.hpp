#pragma once

#include <string>
#include <vector>

/// The commands of the tool: each takes what follows its name on the command line, prints its result to
/// standard output and throws when it could not do its work: usage_error for what the user could have known
/// beforehand, format_not_built for a file that this build cannot read.
namespace pinflow::cli {

using argument_list = std::vector<std::string>;

void inspect(const argument_list& arguments);
void stream_files(const argument_list& arguments);
void convert(const argument_list& arguments);
void verify(const argument_list& arguments);
void list_devices(const argument_list& arguments);
void bench(const argument_list& arguments);

}  // namespace pinflow::cli
