#include "src/cli/arguments.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <system_error>
#include <utility>

#include "src/cli/open.hpp"
#include "src/cli/output.hpp"

namespace pinflow::cli {

namespace {

std::optional<std::uint64_t> decimal(std::string_view text) {
    std::uint64_t number = 0;
    const char* const end = text.data() + text.size();
    const auto [stopped, status] = std::from_chars(text.data(), end, number);
    if (status != std::errc{} || stopped != end) return std::nullopt;
    return number;
}

/// The word that a flag takes besides a number, for a message; empty if there is none.
std::string or_else(std::string_view word) {
    return word.empty() ? std::string() : fmt::format("`{}` or ", word);
}

}  // namespace

bool parse(CLI::App& app, const std::vector<std::string>& arguments) {
    // CLI11 splits "[a,b]" in two if several files are taken. The value of a flag stays as it is.
    std::vector<std::string> reversed(arguments);
    for (std::size_t i = 0; i < reversed.size(); ++i) {
        const CLI::Option* const flag = i == 0 ? nullptr : app.get_option_no_throw(arguments[i - 1]);
        const bool is_value = flag != nullptr && flag->nonpositional() && flag->get_items_expected_max() > 0;
        if (reversed[i].starts_with('[') && !is_value) reversed[i].insert(0, "./");
    }
    std::ranges::reverse(reversed);  // the order in which CLI11 takes them
    try {
        app.parse(std::move(reversed));
        return true;
    } catch (const CLI::CallForHelp&) {
        print(app.help());
        return false;
    } catch (const CLI::ExtrasError& failure) {
        const std::vector<std::string> extras = app.remaining();
        const bool takes_files =
            app.get_option_no_throw("FILE") != nullptr || app.get_option_no_throw("IN") != nullptr;
        const auto is_flag = [](const std::string& extra) { return extra.starts_with('-'); };
        if (!takes_files || extras.empty() || std::ranges::any_of(extras, is_flag))
            throw usage_error(fmt::format("{} (see {} --help)", failure.what(), app.get_name()));
        const std::string_view hint =
            app.get_name().ends_with("verify") ? "verify takes one file at a time" : quote_pattern;
        throw usage_error(fmt::format("'{}' is one file too many: {} (see {} --help)", extras.front(), hint,
                                      app.get_name()));
    } catch (const CLI::ArgumentMismatch& failure) {
        constexpr std::string_view flag_suffix = " was given a disallowed flag override";
        std::string sentence = failure.what();
        if (sentence.ends_with(flag_suffix))
            sentence =
                fmt::format("--{} takes no value", sentence.substr(0, sentence.size() - flag_suffix.size()));
        throw usage_error(fmt::format("{} (see {} --help)", sentence, app.get_name()));
    } catch (const CLI::RequiredError& failure) {
        const std::vector<std::string> extras = app.remaining();
        const auto option = std::ranges::find_if(
            extras, [](const std::string& extra) { return extra.starts_with('-') && extra != "--"; });
        if (option == extras.end())
            throw usage_error(fmt::format("{} (see {} --help)", failure.what(), app.get_name()));
        throw usage_error(
            fmt::format("{} has no option '{}'; a file of that name is given as './{}' (see {} --help)",
                        app.get_name(), *option, *option, app.get_name()));
    } catch (const CLI::ParseError& failure) {
        throw usage_error(fmt::format("{} (see {} --help)", failure.what(), app.get_name()));
    }
}

std::uint64_t parse_count(std::string_view flag, std::string_view text, std::uint64_t min, std::uint64_t max,
                          std::string_view word) {
    const auto number = decimal(text);
    if (!number || *number < min || *number > max) {
        const std::string last =
            max == std::numeric_limits<std::uint64_t>::max() ? "2^64 - 1" : fmt::format("{}", max);
        throw usage_error(fmt::format("{} takes {}a whole number from {} to {}, not '{}'", flag,
                                      or_else(word), min, last, text));
    }
    return *number;
}

std::uint64_t parse_byte_count(std::string_view flag, std::string_view text, std::string_view word) {
    constexpr std::array<std::pair<std::string_view, unsigned>, 4> units{
        {{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}};
    std::string_view digits = text;
    unsigned shift = 0;
    for (const auto& [suffix, bits] : units) {
        if (digits.ends_with(suffix)) {
            digits.remove_suffix(suffix.size());
            shift = bits;
            break;
        }
    }
    const auto number = decimal(digits);
    if (!number || *number == 0 || *number > std::numeric_limits<std::uint64_t>::max() >> shift) {
        throw usage_error(
            fmt::format("{} takes {}a positive number of bytes below 2^64, such as 1048576 or 512MiB (KiB, "
                        "MiB, GiB, TiB), not '{}'",
                        flag, or_else(word), text));
    }
    return *number << shift;
}

device parse_device(const std::string& name) {
    try {
        return device::parse(name);
    } catch (const invalid_argument& failure) {
        throw usage_error(failure.what());
    } catch (const unsupported& failure) {  // a build without CUDA; a machine without it is a device_error
        throw usage_error(failure.what());
    }
}

}  // namespace pinflow::cli
