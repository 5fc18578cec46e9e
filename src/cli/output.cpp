#include "src/cli/output.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <optional>
#include <system_error>

#include "pinflow/error.hpp"
#include "src/core/error_advice.hpp"
#include "src/core/quote.hpp"
#include "src/core/utf8.hpp"

namespace pinflow::cli {

namespace {

constexpr std::int64_t interval_ms = 200;

std::int64_t now_ms() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

/// A sentence, escaped and cut.
std::string readable_error(std::string_view sentence) {
    constexpr std::size_t max_characters = 2000;
    std::string result;
    std::size_t characters = 0;
    for (std::size_t position = 0; position < sentence.size();) {
        const std::string next = pinflow::detail::next_escaped(sentence, position);
        characters += next.starts_with('\\') ? next.size() : 1;
        if (characters > max_characters) {
            return result + fmt::format(" ... (cut here: the message has {} bytes)", sentence.size());
        }
        result += next;
    }
    return result;
}

}  // namespace

std::string escaped(std::string_view text) {
    std::string result;
    result.reserve(text.size());
    for (std::size_t position = 0; position < text.size();)
        result += pinflow::detail::next_escaped(text, position);
    return result;
}

std::string escaped_json(std::string_view json) {
    std::string result;
    result.reserve(json.size());
    for (std::size_t position = 0; position < json.size();) {
        const std::size_t begin = position;
        const std::optional<std::uint32_t> code = pinflow::detail::next_code_point(json, position);
        if (!code) position = begin + 1;
        // the JSON writer has already escaped those below 0x20
        if (code && *code >= 0x7F && pinflow::detail::is_terminal_control(*code)) {
            result += fmt::format("\\u{:04x}", *code);
        } else {
            result += json.substr(begin, position - begin);
        }
    }
    return result;
}

void print(std::string_view text) {
    errno = 0;
    const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
    if (std::fflush(stdout) != 0 || !written) {
        const std::error_code code(errno, std::generic_category());
        throw system_failure(
            fmt::format("cannot write to standard output: {}", pinflow::detail::described(code)), code);
    }
}

void print_error(std::string_view sentence) noexcept {
    constexpr std::string_view prefix = "pinflow: error: ";
    try {
        // in one piece, so that lines of several processes do not mix
        const std::string line = fmt::format("{}{}\n", prefix, readable_error(sentence));
        std::fwrite(line.data(), 1, line.size(), stderr);
    } catch (...) {
        std::fputs("pinflow: error: memory is exhausted\n", stderr);
    }
}

std::string readable_size(std::uint64_t size_bytes) {
    constexpr std::array<std::string_view, 6> units{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (size_bytes < 1024) return readable_count(size_bytes, "byte", "bytes");
    double size = static_cast<double>(size_bytes) / 1024;
    std::size_t unit = 0;
    while (size >= 1024 && unit + 1 < units.size()) {
        size /= 1024;
        ++unit;
    }
    return fmt::format("{:.4g} {}", size, units[unit]);
}

std::string readable_count(std::uint64_t count, std::string_view singular, std::string_view plural) {
    return fmt::format("{} {}", count, count == 1 ? singular : plural);
}

progress_line::progress_line()
    : on_terminal_(::isatty(STDERR_FILENO) == 1), next_ms_(now_ms() + interval_ms) {}

progress_line::~progress_line() {
    if (width_ > 0) std::fprintf(stderr, "\r%*s\r", static_cast<int>(width_), "");
}

bool progress_line::due() const {
    return on_terminal_ && now_ms() >= next_ms_;
}

void progress_line::show(std::string_view text) {
    // a line that does not fit would wrap to a new line each time
    ::winsize size{};
    if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1)
        text = text.substr(0, size.ws_col - 1U);
    // a shorter text must overwrite all of the previous text
    const std::string line = fmt::format("\r{:<{}}", text, width_);
    width_ = text.size();
    std::fwrite(line.data(), 1, line.size(), stderr);
    next_ms_ = now_ms() + interval_ms;
}

}  // namespace pinflow::cli
