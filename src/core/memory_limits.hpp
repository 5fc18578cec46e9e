#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pinflow::detail {

/// What the machine says about memory that this process could take or lock; empty where it says nothing.
struct memory_limits {
    std::optional<std::uint64_t> locked_bytes;  ///< RLIMIT_MEMLOCK; empty when unlimited or not binding
    /// Left in the tightest cgroup (version 1 or 2), what the kernel can drop counted as free.
    std::optional<std::uint64_t> cgroup_bytes;
    std::optional<std::uint64_t> available_bytes;  ///< MemAvailable
};

/// Reads /proc and /sys, below `root` in tests.
memory_limits read_memory_limits(const std::string& root = {});

/// All the memory of this machine.
std::uint64_t machine_memory_bytes();

// ---- memory that is about to be taken ---------------------------------------------------------------------

/// The memory that this process can still fill.
struct available_memory {
    std::uint64_t size_bytes = 0;
    std::string_view bound;  ///< what leaves no more, as the end of a sentence: "the cgroup has left"
};

/// The least of MemAvailable, what each cgroup has left and what RLIMIT_AS leaves. Page cache counts as free.
/// Regions of memory_region::anonymous and promises count as filled, also where they are not touched yet. An
/// eighth of the rest, at most 64 MiB, is set aside for what is never asked about: stacks, page tables, small
/// allocations. Takes some 100 us: ask when an object is made, not for each batch.
available_memory read_available_memory(const std::string& root = {});

/// The addresses that this process has taken, as RLIMIT_AS counts them.
std::uint64_t own_address_bytes();

/// Why `size_bytes` more of memory cannot be taken, as the end of a sentence ("more than the 8 bytes of
/// memory that the cgroup has left"). Empty when they can, and for less than 1 MiB. Ask before memory is
/// filled: the system grants it without having it, and kills the process that fills it.
std::string memory_shortage(std::uint64_t size_bytes);

/// @throws system_failure, `subject` followed by the shortage, if there is one, and by `help` behind a
/// semicolon unless that is empty: "the member 'a' takes 9 bytes of memory, more than ...; ...".
void require_memory(std::uint64_t size_bytes, std::string_view subject, std::string_view help = {});

/// How many threads may be asked for: 0 stands for `default_count`, or fewer when memory is short.
/// @throws system_failure when memory does not suffice for as many as `asked`.
unsigned thread_count_within_memory(unsigned asked, unsigned default_count);

/// Bytes that this process will fill, or has filled, of anonymous regions and of promises.
inline std::atomic<std::uint64_t> promised_memory_bytes = 0;

/// Memory that is taken bit by bit later, such as a cache's: counts as filled while this lives.
class memory_promise {
 public:
    explicit memory_promise(std::uint64_t size_bytes) noexcept : size_bytes_(size_bytes) {
        promised_memory_bytes += size_bytes_;
    }
    ~memory_promise() { promised_memory_bytes -= size_bytes_; }
    memory_promise(const memory_promise&) = delete;
    memory_promise& operator=(const memory_promise&) = delete;

 private:
    std::uint64_t size_bytes_;
};

/// For tests: this much is available, for its lifetime; one at a time.
class scoped_available_memory {
 public:
    explicit scoped_available_memory(std::uint64_t size_bytes);
    ~scoped_available_memory();
    scoped_available_memory(const scoped_available_memory&) = delete;
    scoped_available_memory& operator=(const scoped_available_memory&) = delete;
};

}  // namespace pinflow::detail
