#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "pinflow/dtype.hpp"
#include "src/core/element_stream.hpp"

namespace pinflow::cli {

/// Moves elements from a stream to a writer, in pieces: reading, casting and writing run side by side, in
/// memory that does not grow with the array. Not thread-safe.
class element_pipeline {
 public:
    /// Limits its read buffers to an eighth of the memory that is left, at most 64 MiB, but always holds one
    /// element. A cast doubles this.
    element_pipeline();

    /// Reads all of `source` as elements of the type `from`, whatever type the stream has, casts them to `to`
    /// and passes them on in order. `write` is called by one thread at a time, but not always by the same
    /// thread.
    /// @throws what reading, casting and writing throw; nothing runs any more then.
    void run(pinflow::detail::element_stream& source, const dtype& from, const dtype& to,
             const std::function<void(std::span<const std::byte>)>& write);

 private:
    /// One piece before and after the cast; kept for the next array.
    struct buffer {
        std::vector<std::byte> read;
        std::vector<std::byte> cast;
    };
    std::uint64_t memory_bytes_;
    std::vector<buffer> buffers_;
};

}  // namespace pinflow::cli
