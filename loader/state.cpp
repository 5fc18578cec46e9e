#include "pinflow/loader/state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/output_file.hpp"
#include "src/core/quote.hpp"

namespace pinflow {

namespace {

using nlohmann::json;

constexpr const char* version_key = "pinflow_loader_state";
constexpr std::uint64_t max_file_bytes = std::uint64_t{16} << 20;  // larger files are not parsed

[[noreturn]] void fail(const std::string& why) {
    throw format_error(fmt::format("cannot read the state of a loader: {}", why));
}

const json& member(const json& object, const char* key) {
    const auto found = object.find(key);
    if (found == object.end()) fail(fmt::format("\"{}\" is missing", key));
    return *found;
}

const json& object_of(const json& object, const char* key) {
    const json& value = member(object, key);
    if (!value.is_object()) fail(fmt::format("\"{}\" is not an object", key));
    return value;
}

const json& list_of(const json& object, const char* key) {
    const json& value = member(object, key);
    if (!value.is_array()) fail(fmt::format("\"{}\" is not an array", key));
    return value;
}

std::uint64_t number_from(const json& value, const char* key) {
    if (!value.is_number_unsigned()) {
        fail(fmt::format("\"{}\" is not a whole number from 0 to 18446744073709551615", key));
    }
    return value.get<std::uint64_t>();
}

std::uint64_t number_of(const json& object, const char* key) {
    return number_from(member(object, key), key);
}

const std::string& text_of(const json& object, const char* key) {
    const json& value = member(object, key);
    if (!value.is_string()) fail(fmt::format("\"{}\" is not a string", key));
    return value.get_ref<const std::string&>();
}

std::uint64_t hash_of(const json& object, const char* key) {
    const std::string& digits = text_of(object, key);
    std::uint64_t hash = 0;
    const char* const end = digits.data() + digits.size();
    const auto [stopped, error] = std::from_chars(digits.data(), end, hash, 16);
    if (digits.size() != 16 || error != std::errc() || stopped != end) {
        fail(fmt::format("\"{}\" is not 16 hexadecimal digits", key));
    }
    return hash;
}

std::string spelled(std::uint64_t hash) {
    return fmt::format("{:016x}", hash);
}

order_identity order_from(const json& object) {
    order_identity order;
    order.name = text_of(object, "name");
    const auto is_printable = [](char character) { return character >= ' ' && character <= '~'; };
    if (!std::ranges::all_of(order.name, is_printable)) {
        fail(fmt::format("the name of the order, {}, has characters that are not printable ASCII",
                         detail::quote(order.name)));
    }
    order.seed = number_of(object, "seed");
    order.window_rows = number_of(object, "window_rows");
    order.position_count = number_of(object, "position_count");
    order.content = hash_of(object, "content");
    return order;
}

array_fingerprint array_from(const json& object) {
    if (!object.is_object()) fail("an array is not described by an object");
    array_fingerprint array;
    array.description = text_of(object, "description");
    array.dtype = text_of(object, "dtype");
    for (const json& length : list_of(object, "row_shape"))
        array.row_shape.push_back(number_from(length, "row_shape"));
    array.hash = hash_of(object, "hash");
    return array;
}

void check_version(const json& object) {
    const std::uint64_t version = number_of(object, version_key);
    if (version == loader_state::format_version) return;
    throw unsupported(fmt::format(
        "cannot read the state of a loader: it has version {}, and this build of pinflow reads version {}",
        version, loader_state::format_version));
}

/// Parses the JSON of a state. Refuses repeated keys, because they are ambiguous.
json parse_without_repeated_keys(std::string_view text) {
    std::vector<std::set<std::string>> keys;  // keys of the open objects
    const auto check = [&](int /*depth*/, json::parse_event_t event, const json& value) {
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
        if (event == json::parse_event_t::key) {
            const auto& key = value.get_ref<const std::string&>();
            if (!keys.back().insert(key).second)
                fail(fmt::format("it has the key {} twice", detail::quote(key)));
        }
        return true;
    };
    return json::parse(text, check, false);
}

std::string read_whole(const std::filesystem::path& path) {
    std::error_code no_status;
    if (std::filesystem::is_directory(path, no_status)) fail("it is a folder, not a file");
    const input_file file(path);
    if (file.size_bytes() > max_file_bytes) {
        fail(fmt::format("it has {} bytes, and a state has at most {}", file.size_bytes(), max_file_bytes));
    }
    std::string text(file.size_bytes(), '\0');
    static_cast<void>(file.read(0, std::as_writable_bytes(std::span(text))));
    return text;
}

}  // namespace

std::string loader_state::to_json() const {
    using nlohmann::ordered_json;
    ordered_json arrays = ordered_json::array();
    for (const array_fingerprint& array : data.arrays) {
        arrays.push_back({{"description", array.description},
                          {"dtype", array.dtype},
                          {"row_shape", array.row_shape},
                          {"hash", spelled(array.hash)}});
    }
    const ordered_json whole{{version_key, format_version},
                             {"order",
                              {{"name", order.name},
                               {"seed", order.seed},
                               {"window_rows", order.window_rows},
                               {"position_count", order.position_count},
                               {"content", spelled(order.content)}}},
                             {"epoch", epoch},
                             {"position", position},
                             {"data", {{"row_count", data.row_count}, {"arrays", std::move(arrays)}}}};
    // paths are not always UTF-8, and are only used in messages
    return whole.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

loader_state loader_state::from_json(std::string_view text) {
    const json whole = parse_without_repeated_keys(text);
    if (whole.is_discarded()) fail("it is not JSON");
    if (!whole.is_object()) fail("it is not a JSON object");
    check_version(whole);
    loader_state state;
    state.order = order_from(object_of(whole, "order"));
    state.epoch = number_of(whole, "epoch");
    state.position = number_of(whole, "position");
    const json& data = object_of(whole, "data");
    state.data.row_count = number_of(data, "row_count");
    for (const json& array : list_of(data, "arrays"))
        state.data.arrays.push_back(array_from(array));
    if (state.position > 0 && state.position >= state.order.position_count) {
        fail(fmt::format("\"position\" is {}, which is not below the {} positions of an epoch",
                         state.position, state.order.position_count));
    }
    return state;
}

void loader_state::save(const std::filesystem::path& path) const {
    const std::string text = to_json();
    detail::output_file file(path);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
}

loader_state loader_state::load(const std::filesystem::path& path) {
    const auto named = [&](const error& failure) {
        return fmt::format("'{}': {}", path.string(), failure.what());
    };
    try {
        return from_json(read_whole(path));
    } catch (const format_error& failure) {
        throw format_error(named(failure));
    } catch (const unsupported& failure) {
        throw unsupported(named(failure));
    }
}

}  // namespace pinflow
