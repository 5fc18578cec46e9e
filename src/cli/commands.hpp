#pragma once

#include <string>
#include <vector>

/// The commands of the tool. Each takes the arguments after its name and prints its result to standard
/// output.
/// @throws usage_error for wrong arguments; format_not_built for a file that this build cannot read; other
/// errors if the data or the machine fails.
namespace pinflow::cli {

using argument_list = std::vector<std::string>;

void inspect(const argument_list& arguments);
void stream_files(const argument_list& arguments);
void convert(const argument_list& arguments);
void verify(const argument_list& arguments);
void pin(const argument_list& arguments);
void unpin(const argument_list& arguments);
void list(const argument_list& arguments);
void clean(const argument_list& arguments);
void list_devices(const argument_list& arguments);
void bench(const argument_list& arguments);

}  // namespace pinflow::cli
