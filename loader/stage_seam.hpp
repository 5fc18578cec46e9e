#pragma once

#include <cstdint>
#include <functional>

#include "src/core/hooks.hpp"

/// A seam in the loader's pipeline where tests make a stage fail or wait.
namespace pinflow::detail {

enum class stage : std::uint8_t { sample, fill, deliver };

/// Called at the beginning of each stage of each batch, numbered from 0 over all epochs. Not called for a
/// batch that has an error, nor, in `deliver`, for batches of its group after one that failed in an earlier
/// stage. May throw or wait. May be called from several threads at once.
using stage_hook = std::function<void(stage where, std::uint64_t batch)>;

/// Installs a hook for its lifetime. For tests.
class scoped_stage_hook {
 public:
    explicit scoped_stage_hook(stage_hook hook);

 private:
    hooks<stage_hook>::scope scope_;
};

/// Calls the hooks, the last installed first.
void pass_stage_seam(stage where, std::uint64_t batch);

}  // namespace pinflow::detail
