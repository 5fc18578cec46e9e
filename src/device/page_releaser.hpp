#pragma once

#include "pinflow/pin.hpp"

namespace pinflow::detail {

/// Unregisters the pages on a thread of its own, because it is slow: it takes half as long as registering
/// them. Copies from them must have finished. If no thread can be started, it unregisters them before it
/// returns. The process waits for such threads before it exits.
void release_in_background(pinned_pages pages) noexcept;

/// Whether pages given to release_in_background are still registered. Thread-safe.
bool is_releasing_pages() noexcept;

/// Waits until all pages given to release_in_background are unregistered. Thread-safe.
void wait_for_released_pages() noexcept;

}  // namespace pinflow::detail
