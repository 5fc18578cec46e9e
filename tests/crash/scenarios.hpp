#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

/// What fail_every_call runs: one short task each, of the tool or of the library.
namespace scenarios {

struct scenario {
    using step =
        std::function<void(const std::filesystem::path& inputs, const std::filesystem::path& outputs)>;
    std::string name;
    /// Reads the files of `inputs`, works in `outputs`, and prints to standard output.
    step run;
    /// Prepares `outputs`, without faults.
    step prepare = [](const std::filesystem::path&, const std::filesystem::path&) {};
    /// Whether a run may fail after it has printed its result: `stream` prints it even if the state cannot be
    /// saved, and the first command of "resume" prints before the second fails.
    bool prints_before_failing = false;
    /// Whether its result reports a failure that does not stop it: that an array cannot be mapped.
    bool prints_hidden_failures = false;
    /// Whether it ends before all is delivered. Failures of reads ahead of the consumer are then not
    /// reported.
    bool is_left_early = false;
};

/// On "host" or "cuda:N".
std::vector<scenario> all(const std::string& device);

/// Writes the files that the scenarios read.
void write_inputs(const std::filesystem::path& inputs);

/// The output of a run without parts that differ between runs, such as times.
std::string comparable(const std::string& printed);

}  // namespace scenarios
