#include "formats/safetensors_plain.hpp"

#include <cstdint>
#include <utility>

#include "formats/safetensors_header.hpp"

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

bool read_metadata(plain_text& text, safetensors_header& header) {
    if (!text.take('{')) return false;
    if (text.take('}')) return true;
    std::size_t size_bytes = 0;
    do {
        std::string_view key, value;
        if (!text.key(key) || !text.string(value)) return false;
        size_bytes += key.size() + value.size();
        if (size_bytes > max_metadata_bytes) return false;
        if (!header.metadata.emplace(key, value).second) return false;
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

}  // namespace

std::optional<safetensors_header> parse_plain_header(std::string_view json) {
    plain_text text(json);
    safetensors_header header;
    constexpr std::size_t usual_tensor_bytes = 96;
    header.tensors.reserve(json.size() / usual_tensor_bytes);
    bool has_metadata = false;
    if (!text.take('{')) return std::nullopt;
    if (text.take('}')) return text.ends() ? std::optional(std::move(header)) : std::nullopt;
    do {
        std::string_view name;
        if (!text.key(name)) return std::nullopt;
        if (name == safetensors_metadata_name) {
            if (std::exchange(has_metadata, true) || !read_metadata(text, header)) return std::nullopt;
            continue;
        }
        safetensors_entry& tensor = header.tensors.emplace_back();
        tensor.name = name;
        if (!read_tensor(text, tensor)) return std::nullopt;
    } while (text.take(','));
    if (!text.take('}') || !text.ends()) return std::nullopt;
    return header;
}

}  // namespace pinflow::detail
