#include "src/cli/output.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <system_error>

#include "pinflow/error.hpp"

namespace pinflow::cli {

namespace {

constexpr std::int64_t interval_ms = 200;

std::int64_t now_ms() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

}  // namespace

std::string escaped(std::string_view text) {
    std::string result;
    result.reserve(text.size());
    for (const char character : text) {
        const auto code = static_cast<unsigned char>(character);
        if (character == '\n') {
            result += "\\n";
        } else if (code < 0x20 || code == 0x7f) {
            result += fmt::format("\\x{:02x}", code);
        } else {
            result += character;
        }
    }
    return result;
}

void print(std::string_view text) {
    errno = 0;
    const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
    if (std::fflush(stdout) != 0 || !written) {
        const std::error_code code(errno, std::generic_category());
        throw system_failure(fmt::format("cannot write to standard output: {}", code.message()), code);
    }
}

void print_error(std::string_view sentence) noexcept {
    constexpr std::string_view prefix = "pinflow: error: ";
    try {
        // in one piece, so that lines of several processes do not mix
        const std::string line = fmt::format("{}{}\n", prefix, escaped(sentence));
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
    // what does not fit would begin a new line each time
    ::winsize size{};
    if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1)
        text = text.substr(0, size.ws_col - 1U);
    // a shorter text must cover all of the one before
    const std::string line = fmt::format("\r{:<{}}", text, width_);
    width_ = text.size();
    std::fwrite(line.data(), 1, line.size(), stderr);
    next_ms_ = now_ms() + interval_ms;
}

}  // namespace pinflow::cli
