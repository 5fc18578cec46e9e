#include "formats/safetensors_plain.hpp"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "formats/safetensors_header.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::detail {

namespace {

constexpr std::size_t max_axes = 64;
/// Larger metadata is left to the parser that bounds its memory.
constexpr std::size_t max_metadata_bytes = 1 << 16;

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
        while (at_ != end_ && *at_ != '"') {
            const auto byte = static_cast<unsigned char>(*at_);
            if (byte < 0x20 || byte >= 0x80 || byte == '\\') return false;
            ++at_;
        }
        if (at_ == end_) return false;
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

/// Reads a tensor after its name.
bool read_tensor(plain_text& text, safetensors_entry& tensor) {
    if (!text.take('{')) return false;
    bool has_type = false, has_shape = false, has_offsets = false;
    do {
        std::string_view key;
        if (!text.key(key)) return false;
        if (key == "dtype") {
            std::string_view type;
            if (std::exchange(has_type, true) || !text.string(type)) return false;
            tensor.type_name = type;
        } else if (key == "shape") {
            if (std::exchange(has_shape, true)) return false;
            const bool is_read = text.numbers([&](std::uint64_t length) {
                tensor.shape.push_back(length);
                return tensor.shape.size() <= max_axes;
            });
            if (!is_read) return false;
        } else if (key == "data_offsets") {
            if (std::exchange(has_offsets, true)) return false;
            if (!text.take('[') || !text.number(tensor.offset_bytes) || !text.take(',') ||
                !text.number(tensor.size_bytes) || !text.take(']'))
                return false;
        } else {
            return false;
        }
    } while (text.take(','));
    return has_type && has_shape && has_offsets && !tensor.type_name.empty() && text.take('}');
}

// ---- parts of a header ------------------------------------------------------------------------------------

/// Cuts the text behind commas between tensors, into parts of some `part_bytes`. Finds these commas only if
/// the text is plain. If it is not, it may be cut elsewhere; then read_part refuses at least one part.
std::vector<std::string_view> parts_of(std::string_view json, std::size_t part_bytes) {
    std::vector<std::string_view> parts;
    // starting the worker threads takes longer than parsing a header of 1 MiB
    constexpr std::size_t min_parts = 16;
    if (json.size() / part_bytes < min_parts) return {json};
    while (json.size() > part_bytes) {
        bool is_quoted =
            std::count(json.begin(), json.begin() + static_cast<std::ptrdiff_t>(part_bytes), '"') % 2 != 0;
        std::size_t at = part_bytes;
        for (; at + 1 < json.size(); ++at) {
            if (json[at] == '"') is_quoted = !is_quoted;
            if (!is_quoted && json[at] == '}' && json[at + 1] == ',') break;
        }
        if (at + 1 >= json.size()) break;
        parts.push_back(json.substr(0, at + 2));
        json.remove_prefix(at + 2);
    }
    parts.push_back(json);
    return parts;
}

struct plain_part {
    bool is_plain = false;
    std::vector<safetensors_entry> tensors;
    std::optional<std::map<std::string, std::string>> metadata;
    std::exception_ptr failure;  ///< what `complete` has thrown first
};

/// Reads tensors, and the metadata, up to the end of the part.
bool read_part(plain_text& text, bool is_last, void (*complete)(safetensors_entry&), plain_part& part) {
    while (true) {
        std::string_view name;
        if (!text.key(name)) return false;
        if (name == safetensors_metadata_name) {
            if (part.metadata || !read_metadata(text, part.metadata.emplace())) return false;
        } else {
            safetensors_entry& tensor = part.tensors.emplace_back();
            tensor.name = name;
            if (!read_tensor(text, tensor)) return false;
            try {
                if (!part.failure) complete(tensor);
            } catch (...) {
                part.failure = std::current_exception();
            }
        }
        if (!text.take(',')) return is_last && text.take('}') && text.ends();
        if (!is_last && text.ends()) return true;
    }
}

/// The parts one after the other; nothing if one is not plain.
std::optional<safetensors_header> joined(std::vector<plain_part> parts) {
    std::size_t count = 0;
    for (const plain_part& part : parts) {
        if (!part.is_plain) return std::nullopt;
        count += part.tensors.size();
    }
    safetensors_header header;
    bool has_metadata = false;
    for (plain_part& part : parts) {
        if (!part.metadata) continue;
        if (std::exchange(has_metadata, true)) return std::nullopt;
        header.metadata = std::move(*part.metadata);
    }
    for (const plain_part& part : parts) {
        if (part.failure) std::rethrow_exception(part.failure);
    }
    header.tensors = std::move(parts.front().tensors);
    header.tensors.reserve(count);
    for (plain_part& part : std::span(parts).subspan(1)) {
        std::ranges::move(part.tensors, std::back_inserter(header.tensors));
        part.tensors = {};  // frees the memory
    }
    return header;
}

}  // namespace

std::optional<safetensors_header> parse_plain_header(std::string_view json,
                                                     void (*complete)(safetensors_entry& tensor),
                                                     std::size_t part_bytes) {
    if (plain_text whole(json); whole.take('{') && whole.take('}') && whole.ends())
        return safetensors_header();
    const std::vector<std::string_view> texts = parts_of(json, part_bytes);
    std::vector<plain_part> parts(texts.size());
    const auto read = [&](std::size_t i) {
        constexpr std::size_t usual_tensor_bytes = 96;
        plain_text text(texts[i]);
        parts[i].tensors.reserve(texts[i].size() / usual_tensor_bytes);
        parts[i].is_plain =
            (i != 0 || text.take('{')) && read_part(text, i + 1 == texts.size(), complete, parts[i]);
    };
    run_in_parallel(texts.size(), read);
    return joined(std::move(parts));
}

}  // namespace pinflow::detail
