#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pinflow::detail {

/// Bytes of a page of this machine.
std::uint64_t page_bytes() noexcept;

/// The whole pages that `bytes` lie on. They are mapped if `bytes` are.
std::span<const std::byte> pages_of(std::span<const std::byte> bytes) noexcept;

/// Whether `next` lies behind `bytes` with no page between the two, so that both together are on mapped
/// pages.
bool touches(std::span<const std::byte> bytes, std::span<const std::byte> next) noexcept;

}  // namespace pinflow::detail
