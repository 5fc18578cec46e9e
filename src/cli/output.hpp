#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace pinflow::cli {

/// Escapes the characters of `text` that a terminal obeys instead of showing (`\n`, `\x1b`, `\u202e`), and
/// bytes that are not UTF-8 (`\xff`). The result has none of them, so it stays on one line.
std::string escaped(std::string_view text);

/// Escapes the characters of JSON text that a terminal obeys. They can only be part of a string, where
/// `\u202e` means the same. Bytes that are not UTF-8 stay.
std::string escaped_json(std::string_view json);

/// Writes all of `text` to standard output and flushes it. @throws system_failure when that fails.
void print(std::string_view text);

/// Writes the line "pinflow: error: SENTENCE" to standard error, escaped, and cut after some 2,000 characters
/// with a note. Never throws: if memory is exhausted, the line says only that.
void print_error(std::string_view sentence) noexcept;

/// "48 bytes", "3.1 GiB".
std::string readable_size(std::uint64_t size_bytes);

/// "1 batch", "2 batches".
std::string readable_count(std::uint64_t count, std::string_view singular, std::string_view plural);

/// A progress line on standard error, replaced as the work advances. Call `show` only if `due` returns true.
class progress_line {
 public:
    progress_line();
    /// Removes the line.
    ~progress_line();
    progress_line(const progress_line&) = delete;
    progress_line& operator=(const progress_line&) = delete;

    /// Whether it is time for an update; always false unless standard error is a terminal.
    bool due() const;
    void show(std::string_view text);

 private:
    bool on_terminal_;
    std::int64_t next_ms_;
    std::size_t width_ = 0;
};

}  // namespace pinflow::cli
