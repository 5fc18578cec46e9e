#include "src/device/pin_pages.hpp"

#include <unistd.h>

#include "src/core/checked.hpp"

namespace pinflow::detail {

namespace {

std::uintptr_t begin_of(std::span<const std::byte> bytes) noexcept {
    return reinterpret_cast<std::uintptr_t>(bytes.data());
}

std::uintptr_t end_of(std::span<const std::byte> bytes) noexcept {
    return begin_of(bytes) + bytes.size();
}

}  // namespace

std::uint64_t page_bytes() noexcept {
    static const auto size = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    return size;
}

std::span<const std::byte> pages_of(std::span<const std::byte> bytes) noexcept {
    const std::uintptr_t begin = begin_of(bytes) / page_bytes() * page_bytes();
    const std::uintptr_t end = rounded_up(end_of(bytes), page_bytes());
    return {reinterpret_cast<const std::byte*>(begin), end - begin};
}

bool touches(std::span<const std::byte> bytes, std::span<const std::byte> next) noexcept {
    return begin_of(next) >= end_of(bytes) && begin_of(pages_of(next)) <= end_of(pages_of(bytes));
}

}  // namespace pinflow::detail
