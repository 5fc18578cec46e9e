#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "pinflow/array.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/element_stream.hpp"

namespace pinflow::detail {

/// XXH3-128 of bytes that are added piece by piece.
class checksum {
 public:
    checksum();
    checksum(const checksum&) = delete;
    checksum& operator=(const checksum&) = delete;
    ~checksum();

    void add(std::span<const std::byte> bytes);
    /// 32 hexadecimal digits, in the order of xxhsum.
    std::string text() const;

 private:
    struct state;
    std::unique_ptr<state> state_;
};

/// Where content is copied to.
struct copy_target {
    std::span<std::byte> bytes;  ///< of the size of the content
    /// Allocates the pages of a part of `bytes`; to be called before writing there. Thread-safe.
    std::function<void(std::span<std::byte> part)> allocate_pages;
    /// Unmaps the whole pages of a part that has been copied. The file keeps their content. Thread-safe.
    std::function<void(std::span<std::byte> part)> unmap_pages;
    /// Is told, by one thread at a time, how many bytes were copied since it was last called.
    std::function<void(std::uint64_t size_bytes)> progress;
};

/// What is copied into a segment.
class segment_content {
 public:
    segment_content() = default;
    segment_content(const segment_content&) = delete;
    segment_content& operator=(const segment_content&) = delete;
    virtual ~segment_content() = default;

    virtual const pinflow::dtype& dtype() const noexcept = 0;
    virtual shape_vector shape() const = 0;
    /// Copies all elements.
    /// @return their checksum.
    /// @throws data_changed if a file changes meanwhile; what the source and `to` throw.
    virtual std::string copy(const copy_target& to) = 0;
};

/// The rows of `source`, copied or decoded by all cores. The source must outlive the content.
std::unique_ptr<segment_content> content_of(const row_source& source);
/// The elements of a stream, decoded by one thread.
std::unique_ptr<segment_content> content_of(std::unique_ptr<element_stream> stream);

}  // namespace pinflow::detail
