#include "formats/safetensors_plain.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "formats/safetensors_header.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::detail {

namespace {

/// Larger metadata is left to the parser that bounds its memory.
constexpr std::size_t max_metadata_bytes = 1 << 16;

/// The characters of a plain string: ASCII without control characters, quotes and backslashes.
constexpr std::array<bool, 256> is_plain_character = [] {
    std::array<bool, 256> is_plain{};
    for (unsigned byte = 0x20; byte < 0x80; ++byte)
        is_plain[byte] = byte != '"' && byte != '\\';
    return is_plain;
}();

/// Takes tokens off the front of a text. Each function returns false if the text is not plain; the position
/// is unspecified after that.
class plain_text {
 public:
    explicit plain_text(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

    bool take(char wanted) {
        skip_spaces();
        if (at_ == end_ || *at_ != wanted) return false;
        ++at_;
        return true;
    }
    bool string(std::string_view& value) {
        if (!take('"')) return false;
        const char* const begin = at_;
        while (at_ != end_ && is_plain_character[static_cast<unsigned char>(*at_)])
            ++at_;
        if (at_ == end_ || *at_ != '"') return false;
        value = {begin, static_cast<std::size_t>(at_ - begin)};
        ++at_;
        return true;
    }
    bool key(std::string_view& value) { return string(value) && take(':'); }
    bool number(std::uint64_t& value) {
        skip_spaces();
        constexpr int max_digits = 19;  // below 2^64
        const char* const begin = at_;
        value = 0;
        while (at_ != end_ && *at_ >= '0' && *at_ <= '9' && at_ - begin < max_digits)
            value = value * 10 + static_cast<std::uint64_t>(*at_++ - '0');
        const bool has_more = at_ != end_ && *at_ >= '0' && *at_ <= '9';
        return at_ != begin && !has_more && (*begin != '0' || at_ - begin == 1);
    }
    /// [1,2,3]: calls take_number for each; it returns false if there are too many.
    template <typename TakeNumber>
    bool numbers(TakeNumber take_number) {
        if (!take('[')) return false;
        if (take(']')) return true;
        std::uint64_t value = 0;
        do {
            if (!number(value) || !take_number(value)) return false;
        } while (take(','));
        return take(']');
    }
    bool ends() {
        skip_spaces();
        return at_ == end_;
    }

 private:
    void skip_spaces() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r'))
            ++at_;
    }

    const char* at_;
    const char* end_;
};

bool read_metadata(plain_text& text, std::map<std::string, std::string>& metadata) {
    if (!text.take('{')) return false;
    if (text.take('}')) return true;
    std::size_t size_bytes = 0;
    do {
        std::string_view key, value;
        if (!text.key(key) || !text.string(value)) return false;
        size_bytes += key.size() + value.size();
        if (size_bytes > max_metadata_bytes) return false;
        if (!metadata.emplace(key, value).second) return false;
    } while (text.take(','));
    return text.take('}');
}

using axis_lengths = std::array<std::uint64_t, max_safetensors_axes>;

/// Reads a tensor after its name. @param lengths memory for its shape.
bool read_tensor(plain_text& text, described_tensor& tensor, axis_lengths& lengths) {
    if (!text.take('{')) return false;
    bool has_type = false, has_shape = false, has_offsets = false;
    do {
        std::string_view key;
        if (!text.key(key)) return false;
        if (key == "dtype") {
            if (std::exchange(has_type, true) || !text.string(tensor.type_name)) return false;
        } else if (key == "shape") {
            if (std::exchange(has_shape, true)) return false;
            std::size_t count = 0;
            const bool is_read = text.numbers([&](std::uint64_t length) {
                if (count == lengths.size()) return false;
                lengths[count++] = length;
                return true;
            });
            if (!is_read) return false;
            tensor.shape = std::span(lengths).first(count);
        } else if (key == "data_offsets") {
            if (std::exchange(has_offsets, true)) return false;
            if (!text.take('[') || !text.number(tensor.begin_bytes) || !text.take(',') ||
                !text.number(tensor.end_bytes) || !text.take(']'))
                return false;
        } else {
            return false;
        }
    } while (text.take(','));
    return has_type && has_shape && has_offsets && !tensor.type_name.empty() && text.take('}');
}

// ---- parts of a header ------------------------------------------------------------------------------------

/// Whether a text begins with a tensor, or with metadata that is not empty.
bool begins_with_entry(std::string_view json) {
    plain_text text(json);
    std::string_view name, key;
    return text.key(name) && text.take('{') && text.key(key);
}

/// Cuts the text behind commas between tensors, into parts of some `part_bytes`. Looks only at the text where
/// it cuts. If strings of the metadata, or a text that is not plain, look like the end of a tensor and the
/// beginning of another one, it may be cut there. Then read_part refuses the part before.
std::vector<std::string_view> parts_of(std::string_view json, std::size_t part_bytes) {
    std::vector<std::string_view> parts;
    // starting the worker threads takes longer than parsing a header of 1 MiB
    constexpr std::size_t min_parts = 16;
    if (json.size() / part_bytes < min_parts) return {json};
    constexpr std::string_view end_of_tensor = "},";
    while (json.size() > part_bytes) {
        std::size_t at = json.find(end_of_tensor, part_bytes);
        while (at != json.npos && !begins_with_entry(json.substr(at + end_of_tensor.size())))
            at = json.find(end_of_tensor, at + 1);
        if (at == json.npos) break;
        parts.push_back(json.substr(0, at + end_of_tensor.size()));
        json.remove_prefix(at + end_of_tensor.size());
    }
    parts.push_back(json);
    return parts;
}

struct plain_part {
    bool is_plain = false;
    std::vector<header_tensor> tensors;
    tensor_memory memory;
    std::optional<std::map<std::string, std::string>> metadata;
    std::exception_ptr failure;  ///< of the first tensor that is wrong
};

/// Reads tensors, and the metadata, up to the end of the part.
bool read_part(plain_text& text, bool is_last, plain_part& part) {
    axis_lengths lengths;
    while (true) {
        std::string_view name;
        if (!text.key(name)) return false;
        if (name == safetensors_metadata_name) {
            if (part.metadata || !read_metadata(text, part.metadata.emplace())) return false;
        } else {
            described_tensor described;
            described.name = name;
            if (!read_tensor(text, described, lengths)) return false;
            try {
                if (!part.failure) {
                    header_tensor& tensor = part.tensors.emplace_back(checked_tensor(described));
                    part.memory.keep(tensor);
                }
            } catch (...) {
                part.failure = std::current_exception();
            }
        }
        if (!text.take(',')) return is_last && text.take('}') && text.ends();
        if (!is_last && text.ends()) return true;
    }
}

/// The parts one after the other; nothing if one is not plain.
std::optional<header_content> joined(std::vector<plain_part> parts) {
    if (!std::ranges::all_of(parts, &plain_part::is_plain)) return std::nullopt;
    header_content content;
    bool has_metadata = false;
    for (plain_part& part : parts) {
        if (!part.metadata) continue;
        if (std::exchange(has_metadata, true)) return std::nullopt;
        content.metadata = std::move(*part.metadata);
    }
    for (const plain_part& part : parts) {
        if (part.failure) std::rethrow_exception(part.failure);
    }
    for (plain_part& part : parts) {
        content.lists.push_back(std::move(part.tensors));
        content.memory.push_back(std::move(part.memory));
    }
    return content;
}

}  // namespace

std::optional<header_content> parse_plain_header(std::string_view json, std::size_t part_bytes) {
    if (plain_text whole(json); whole.take('{') && whole.take('}') && whole.ends()) return header_content();
    const std::vector<std::string_view> texts = parts_of(json, part_bytes);
    std::vector<plain_part> parts(texts.size());
    const auto read = [&](std::size_t i) {
        constexpr std::size_t usual_tensor_bytes = 96;
        plain_text text(texts[i]);
        parts[i].tensors.reserve(texts[i].size() / usual_tensor_bytes);
        parts[i].is_plain = (i != 0 || text.take('{')) && read_part(text, i + 1 == texts.size(), parts[i]);
    };
    run_in_parallel(texts.size(), read);
    return joined(std::move(parts));
}

}  // namespace pinflow::detail
