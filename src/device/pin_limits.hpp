#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/pin.hpp"
#include "src/core/memory_limits.hpp"

namespace pinflow::detail {

struct pin_budget {
    std::uint64_t size_bytes = 0;
    std::string bound;  ///< what limits the budget: "RLIMIT_MEMLOCK", as the end of a sentence
};

/// Chooses how many bytes may be registered in place in total: `setting_bytes`, or, if that is 0, three
/// quarters of the memory that the machine and the cgroup have left. The budget never exceeds the memory
/// left. pin_limit::memlock also applies RLIMIT_MEMLOCK. CUDA's driver ignores that limit, which is 8 MiB on
/// most distributions: too little to be useful.
/// @param buffer_bytes the size of all pinned buffers. They count towards `setting_bytes` and RLIMIT_MEMLOCK.
/// The memory left does not contain them.
pin_budget choose_pin_budget(std::uint64_t setting_bytes, pin_limit limit, const memory_limits& limits,
                             std::uint64_t buffer_bytes = 0);

/// Whether pages can be registered in place, and how.
struct page_verdict {
    bool read_only = false;  ///< register with the read-only flag: a file mapped for reading
    bool shared = false;     ///< a mapping of a file or of shared memory: writes persist
    std::string refusal;     ///< why they must not be registered, as the end of a sentence; empty if they may
};

/// The mappings of this process, parsed once and searched by address. A data set of 10,000 files has 10,000
/// mappings.
class process_mappings {
 public:
    /// @param maps the text of /proc/self/maps; empty if it cannot be read
    explicit process_mappings(std::string_view maps);

    /// Decides whether `pages` can be registered. Refuses mappings whose registration fails, hangs or copies:
    /// see `verdict_of`. `pages` may span several mappings of one kind.
    page_verdict judge(std::span<const std::byte> pages) const;

    /// Whether another array of the process, such as the next one in the heap, may begin in the last page of
    /// `bytes`. glibc's malloc gives every allocation of 32 MiB or more a mapping of its own; other
    /// allocators do so from smaller sizes. A region of memory_region::anonymous has its pages to itself.
    bool may_share_last_page(std::span<const std::byte> bytes) const;

 private:
    struct mapping {
        std::uintptr_t begin = 0;
        std::uintptr_t end = 0;
        bool readable = false;
        bool writable = false;
        bool shared = false;
        bool of_file = false;
    };
    static std::optional<mapping> parse(std::string_view line);
    static page_verdict verdict_of(const mapping& pages);

    std::vector<mapping> mappings_;  // by their addresses
};

/// The text of /proc/self/maps; empty if it cannot be read.
std::string read_own_maps();

/// "3.1 GiB"
std::string in_binary_units(std::uint64_t size_bytes);

}  // namespace pinflow::detail
