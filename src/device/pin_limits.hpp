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
    std::string source;  ///< "RLIMIT_MEMLOCK", as the end of a sentence
};

/// How much may be pinned in all: `setting_bytes`, or if that is 0 three quarters of what the machine and the
/// cgroup have left; never more than they have left. pin_limit::memlock also applies RLIMIT_MEMLOCK, which
/// CUDA's driver ignores: on most distributions it is 8 MiB, too little for anything worth pinning.
pin_budget choose_pin_budget(std::uint64_t setting_bytes, pin_limit limit, const memory_limits& limits);

/// Whether pages can be registered in place, and how.
struct page_verdict {
    bool read_only = false;  ///< to be registered with the read-only flag: a file mapped for reading
    bool shared = false;     ///< a mapping of a file, or of shared memory: what is written to it is kept
    std::string refusal;     ///< empty, or why they must not be registered, as the end of a sentence
};

/// The mappings of this process, parsed once and searched by address: a data set of 10,000 files has as many.
class process_mappings {
 public:
    /// @param maps the text of /proc/self/maps; empty if it cannot be read
    explicit process_mappings(std::string_view maps);

    /// Refuses the combinations that fail, hang or copy: see `verdict_of`. `pages` may span several mappings
    /// of one kind.
    page_verdict judge(std::span<const std::byte> pages) const;

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

/// The text of /proc/self/maps; empty when it cannot be read.
std::string read_own_maps();

/// "3.1 GiB"
std::string in_binary_units(std::uint64_t size_bytes);

}  // namespace pinflow::detail
