#pragma once

// `sanitized`: whether tests run under a sanitizer, which needs much address space, memory and time. No macro
// announces compute-sanitizer: builds for it define PINFLOW_TEST_SANITIZED.
#if defined(PINFLOW_TEST_SANITIZED)
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PINFLOW_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PINFLOW_TEST_SANITIZED 1
#endif
#endif
#ifdef PINFLOW_TEST_SANITIZED
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif
