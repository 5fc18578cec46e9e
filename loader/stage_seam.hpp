#pragma once

#include <cstdint>
#include <functional>

/// A seam in the loader's pipeline where tests make a stage fail or wait.
namespace pinflow::detail {

enum class stage : std::uint8_t { sample, fill, deliver };

/// Called at the beginning of each stage of each batch (numbered from 0 over all epochs); may throw or wait.
/// May be called from several threads at once.
using stage_hook = std::function<void(stage where, std::uint64_t batch)>;

/// Installs a hook for its lifetime, which must contain those of the loaders it is meant for. One at a time.
class scoped_stage_hook {
 public:
    explicit scoped_stage_hook(stage_hook hook);
    ~scoped_stage_hook();
    scoped_stage_hook(const scoped_stage_hook&) = delete;
    scoped_stage_hook& operator=(const scoped_stage_hook&) = delete;
};

/// Calls the hook, if there is one.
void pass_stage_seam(stage where, std::uint64_t batch);

}  // namespace pinflow::detail
