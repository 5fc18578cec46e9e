#pragma once

#include <cstdint>
#include <functional>

namespace pinflow::detail {

/// A descriptor that children made by fork do not have: a child closes its copy. Otherwise the child would
/// keep the file's memory, and its locks, when this process has let go of them or has ended.
class own_descriptor {
 public:
    /// Calls `open` and takes the descriptor that it returns. No fork of this process happens in between.
    /// @throws what `open` throws.
    explicit own_descriptor(const std::function<int()>& open);
    own_descriptor(own_descriptor&& other) noexcept;
    own_descriptor& operator=(own_descriptor&&) = delete;
    ~own_descriptor();

    int get() const noexcept { return descriptor_; }

 private:
    int descriptor_ = -1;
    std::uint64_t fork_count_ = 0;  ///< when it was opened
};

}  // namespace pinflow::detail
