#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

/// Makes calls and allocations of this process fail, for fail_every_call.
namespace injection {

inline constexpr unsigned max_threads = 64;
inline constexpr unsigned max_stacks = 1U << 15;
inline constexpr unsigned max_depth = 40;

/// Where something was called: return addresses, the innermost first; the unused ones are null.
using call_stack = std::array<void*, max_depth>;

/// What is to fail. Calls are numbered from 1 on each thread, so that calls of one thread do not change the
/// numbers of another's. Threads are numbered from 0 in the order of their first calls.
struct target {
    enum class kind : std::uint8_t { nothing, call, allocation };
    kind what = kind::nothing;
    unsigned thread = 0;
    unsigned number = 0;
    std::uint64_t stack = 0;  ///< of the allocation: a hash of its call stack
    /// Later calls fail as well, on every thread; after a failed allocation, later allocations too.
    bool is_onward = false;
    bool cuda_only = false;  ///< calls of the system are neither counted nor made to fail
};

/// The events of a process, in memory shared with the process that judges it.
struct record {
    std::array<std::atomic<unsigned>, max_threads> calls{};  ///< of each thread
    std::atomic<unsigned> thread_count = 0;
    std::atomic<unsigned> injected_count = 0;
    std::array<char, 256> first_injected{};  ///< "pread (EIO) of 'a.npy'"
    call_stack injected_stack{};
    std::atomic<unsigned> stack_count = 0;  ///< different call stacks of allocations
    std::array<std::uint64_t, max_stacks> stacks{};
};

/// Records the calls and allocations of this process and makes `what` fail, during its lifetime. Only one
/// object may exist at a time.
class scope {
 public:
    scope(record& shared, const target& what);
    ~scope();
    scope(const scope&) = delete;
    scope& operator=(const scope&) = delete;

 private:
    struct hooks;
    hooks* hooks_;
};

/// A line "function at file:line" for each function of a call stack, inlined ones too, as addr2line gives
/// them; of this program's functions only.
std::string describe(const call_stack& stack);
/// Whether `describe` finds the names of functions. It does not if this program is stripped, or if addr2line
/// is missing.
bool has_symbols();

}  // namespace injection
