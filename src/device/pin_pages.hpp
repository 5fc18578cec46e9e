#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pinflow::detail {

/// The page size in bytes.
std::uint64_t page_bytes() noexcept;

/// The whole pages that contain `bytes`. They are mapped if `bytes` are.
std::span<const std::byte> pages_of(std::span<const std::byte> bytes) noexcept;

/// Whether `next` follows `bytes` with no page between them, so that their union lies on mapped pages.
bool touches(std::span<const std::byte> bytes, std::span<const std::byte> next) noexcept;

}  // namespace pinflow::detail
