#include <fmt/format.h>
#include <xxhash.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/patterns.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/shared/segment.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/open.hpp"
#include "src/cli/output.hpp"
#include "src/core/output_file.hpp"

namespace pinflow::cli {

namespace {

constexpr std::size_t checksum_digits = 32;

// ---- the checksum -----------------------------------------------------------------------------------------

struct state_deleter {
    void operator()(XXH3_state_t* state) const { static_cast<void>(XXH3_freeState(state)); }
};

/// XXH128 of the whole file as 32 hexadecimal digits, in the order in which xxhsum prints them.
std::string checksum_of(const input_file& file) {
    const std::unique_ptr<XXH3_state_t, state_deleter> state(XXH3_createState());
    if (!state) throw std::bad_alloc();
    XXH3_128bits_reset(state.get());
    // small enough to be hashed while it is in the CPU's cache
    std::vector<std::byte> buffer(std::min<std::uint64_t>(file.size_bytes(), std::uint64_t{1} << 20));
    progress_line progress;
    for (std::uint64_t offset = 0; offset < file.size_bytes(); offset += buffer.size()) {
        const auto piece =
            std::span(buffer).first(std::min<std::uint64_t>(buffer.size(), file.size_bytes() - offset));
        file.read(offset, piece);
        XXH3_128bits_update(state.get(), piece.data(), piece.size());
        if (progress.due()) {
            progress.show(fmt::format(
                "{:5.1f} %", 100 * static_cast<double>(offset) / static_cast<double>(file.size_bytes())));
        }
    }
    file.check_unchanged();
    const XXH128_hash_t hash = XXH3_128bits_digest(state.get());
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

// ---- the line beside the file -----------------------------------------------------------------------------

/// A line that `xxhsum -H2 -c` reads in the file's own folder. A name with a line end is escaped as by
/// xxhsum 0.8.2 and later. Other names stay unescaped, so that older versions read them, too.
std::string line_for(const std::string& path, std::string_view checksum) {
    std::string name = std::filesystem::path(path).filename().string();
    if (name == "stdin") name = "./stdin";  // which xxhsum takes for standard input
    if (name.find('\n') == std::string::npos) return fmt::format("{}  {}\n", checksum, name);
    std::string escaped_name;
    for (const char character : name) {
        switch (character) {
            case '\n':
                escaped_name += "\\n";
                break;
            case '\r':
                escaped_name += "\\r";
                break;
            case '\\':
                escaped_name += "\\\\";
                break;
            default:
                escaped_name += character;
        }
    }
    return fmt::format("\\{}  {}\n", checksum, escaped_name);
}

/// The checksum in a line of xxhsum; empty if the line has another format. The name in it is ignored: both
/// files may have been moved together.
std::optional<std::string> checksum_in(std::string_view text) {
    if (text.ends_with('\n')) text.remove_suffix(1);
    if (text.starts_with('\\')) text.remove_prefix(1);
    constexpr std::size_t name_begins = checksum_digits + 2;
    if (text.size() <= name_begins || text.find_first_of(std::string_view("\n\0", 2)) != text.npos) return {};
    std::string checksum(text.substr(0, checksum_digits));
    for (char& digit : checksum) {
        if (digit >= 'A' && digit <= 'F') digit = static_cast<char>(digit - 'A' + 'a');
        if ((digit < '0' || digit > '9') && (digit < 'a' || digit > 'f')) return {};
    }
    // two characters are between the digits and the name: a blank, and a blank or '*', xxhsum's mark for
    // binary
    const std::string_view mark = text.substr(checksum_digits, 2);
    if (mark != "  " && mark != " *") return {};
    return checksum;
}

std::string read_checksum(const std::string& path, const std::string& checksum_path) {
    if (!pinflow::detail::exists(checksum_path)) {
        throw invalid_argument(fmt::format(
            "cannot verify '{}': there is no '{}' (pinflow verify --write makes it)", path, checksum_path));
    }
    const input_file file(checksum_path);
    constexpr std::uint64_t max_bytes = 16384;  // a name, all of it escaped, is shorter
    std::string text(std::min(file.size_bytes(), max_bytes), '\0');
    file.read(0, std::as_writable_bytes(std::span(text)));
    const auto checksum = file.size_bytes() <= max_bytes ? checksum_in(text) : std::nullopt;
    if (!checksum) {
        throw format_error(fmt::format(
            "cannot verify '{}': '{}' is not one line of 32 hexadecimal digits, two blanks and a name, as "
            "xxhsum -H2 prints it",
            path, checksum_path));
    }
    return *checksum;
}

input_file open_one_file(const std::string& path) {
    std::error_code no_status;
    if (std::filesystem::is_directory(path, no_status))
        throw invalid_argument(
            fmt::format("cannot verify '{}': it is a folder, and verify takes one file", path));
    try {
        return input_file(path);
    } catch (const system_failure& failure) {
        if (failure.code() != std::errc::no_such_file_or_directory) throw;
        std::string_view what;
        if (pinflow::detail::has_wildcards(path)) {
            what = "a pattern";
        } else if (split_file_and_name(path).named) {
            what = "an array in a file";
        }
        if (what.empty()) throw;
        throw system_failure(fmt::format("{}; verify takes one file, not {}", failure.what(), what),
                             failure.code());
    }
}

}  // namespace

void verify(const argument_list& arguments) {
    CLI::App app(
        "Compares the XXH128 checksum of a whole file, of any format, with the line in FILE.xxh3.\n"
        "`xxhsum -H2 -c FILE.xxh3`, run in the file's folder, reads the same line. The name in it is not\n"
        "compared, because both files may have been renamed. The checksum of a segment (shm:NAME) is stored\n"
        "with it.",
        "pinflow verify");
    std::string path;
    bool write = false;
    app.add_option("FILE", path, "A file, or shm:NAME")->type_name("")->required();
    app.add_flag("--write", write, "Write FILE.xxh3 instead")->disable_flag_override();
    if (!parse(app, arguments)) return;

    if (path.starts_with(segment_prefix)) {
        if (write) throw usage_error(fmt::format("--write is for files, and '{}' is a segment", path));
        progress_line line;
        verify_segment(path.substr(segment_prefix.size()), segment_folder(),
                       [&](std::uint64_t read_bytes, std::uint64_t total_bytes) {
                           if (line.due())
                               line.show(fmt::format("{:5.1f} %", 100 * static_cast<double>(read_bytes) /
                                                                      static_cast<double>(total_bytes)));
                       });
        return print(fmt::format("{}: OK\n", escaped(path)));
    }
    if (write && names_descriptor(path))
        throw usage_error(
            fmt::format("--write writes beside the file, and '{}' is the name of a descriptor: give "
                        "the file's own path",
                        path));
    const input_file file = open_one_file(path);
    const std::string checksum_path = path + ".xxh3";
    if (write) {
        const std::string line = line_for(path, checksum_of(file));
        pinflow::detail::output_file output(checksum_path);
        output.write(std::as_bytes(std::span(line)));
        output.commit();
        return print(fmt::format("{}: written\n", escaped(checksum_path)));
    }
    const std::string expected = read_checksum(path, checksum_path);
    const std::string found = checksum_of(file);
    if (found != expected) {
        throw format_error(fmt::format("'{}' has changed: its checksum is {}, but '{}' says {}", path, found,
                                       checksum_path, expected));
    }
    print(fmt::format("{}: OK\n", escaped(path)));
}

}  // namespace pinflow::cli
