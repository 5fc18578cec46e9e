#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace pinflow::cli {

/// `text` with its control characters spelled out (`\n`, `\x1b`), so that it stays on one line of a terminal.
std::string escaped(std::string_view text);

/// Writes all of `text` to standard output and flushes it. @throws system_failure when that fails.
void print(std::string_view text);

/// Writes the line "pinflow: error: SENTENCE" to standard error, escaped. Never throws: without the memory
/// for it the sentence is left out.
void print_error(std::string_view sentence) noexcept;

/// "48 bytes", "3.1 GiB".
std::string readable_size(std::uint64_t size_bytes);

/// "1 batch", "2 batches".
std::string readable_count(std::uint64_t count, std::string_view singular, std::string_view plural);

/// A line on standard error that says how far long work is, replaced as it advances; nothing unless that is a
/// terminal.
class progress_line {
 public:
    progress_line();
    /// Removes the line.
    ~progress_line();
    progress_line(const progress_line&) = delete;
    progress_line& operator=(const progress_line&) = delete;

    /// Whether it is time to say something new.
    bool due() const;
    void show(std::string_view text);

 private:
    bool on_terminal_;
    std::int64_t next_ms_;
    std::size_t width_ = 0;
};

}  // namespace pinflow::cli
