#include "formats/safetensors_header.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <functional>
#include <istream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "formats/safetensors_plain.hpp"
#include "formats/throw_formatted.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "src/core/checked.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/quote.hpp"

namespace pinflow {

namespace {

using detail::quote;

constexpr std::size_t max_axes = 64;
// the reference implementation's: serde_json's limit of recursion
constexpr unsigned max_depth = 127;

// ---- one tensor -----------------------------------------------------------------------------------------

constexpr std::size_t max_unchecked_tensors = 4096;

/// Checks the memory for a list of tensors, and for as many listings.
void require_list_memory(std::size_t count) {
    constexpr std::uint64_t tensor_bytes = 1024;
    const std::uint64_t size_bytes = count * tensor_bytes;
    detail::require_memory(size_bytes, fmt::format("the header's list of {} tensors takes {} bytes of memory",
                                                   count, size_bytes));
}

[[noreturn]] void refuse_type(const safetensors_entry& tensor, std::string_view type_name) {
    detail::throw_format_error("the tensor {} is of the unknown type {}", quote(tensor.name),
                               quote(type_name));
}

/// Sets the type, the offset and the size of a tensor with a name, a type name and a shape.
void complete(safetensors_entry& tensor, std::uint64_t begin, std::uint64_t end) {
    const auto name = [&] { return quote(tensor.name); };  // for errors
    const auto types = detail::safetensors_types();
    const auto type = std::ranges::find(types, tensor.type_name, &detail::safetensors_type::name);
    if (type == types.end()) refuse_type(tensor, tensor.type_name);
    if (type->kind) tensor.dtype.emplace(*type->kind, type->bits / 8);

    // as in numpy, a length of 0 counts as 1, so that the result does not depend on the order of the axes
    std::uint64_t bits = type->bits;
    for (const std::uint64_t length : tensor.shape) {
        if (length != 0 && !detail::multiply(bits, length, bits)) {
            detail::throw_format_error("the tensor {} of {} and shape {} is too large", name(), type->name,
                                       to_string(tensor.shape));
        }
    }
    if (std::ranges::find(tensor.shape, 0u) != tensor.shape.end()) bits = 0;
    if (bits % 8 != 0) {
        detail::throw_format_error("the tensor {} of {} and shape {} ends within a byte", name(), type->name,
                                   to_string(tensor.shape));
    }
    if (end < begin)
        detail::throw_format_error("the data_offsets of the tensor {} run backwards, from {} to {}", name(),
                                   begin, end);
    if (end - begin != bits / 8) {
        detail::throw_format_error(
            "the tensor {} of {} and shape {} takes {} bytes, but its data_offsets [{}, {}] span {}", name(),
            type->name, to_string(tensor.shape), bits / 8, begin, end, end - begin);
    }
    tensor.offset_bytes = begin;
    tensor.size_bytes = bits / 8;
}

// ---- JSON -------------------------------------------------------------------------------------------------

/// Reads the header's JSON as a stream of events, so that nesting needs a counter and not a stack, and only
/// parts of the result are stored. Throws on errors.
class header_reader final : public nlohmann::json_sax<nlohmann::json> {
 public:
    header_reader(const detail::safetensors_text& text, detail::safetensors_metadata wanted)
        : text_(text), wanted_(wanted) {}

    /// Complete after the last event. Each tensor's offset is relative to the beginning of the data.
    safetensors_header header;

    /// Call it after the last event.
    void check_metadata_names();

    bool key(string_t& name) override {
        key_ = name;
        if (level_ == level::top && name != detail::safetensors_metadata_name) tensor_.name = name;
        return true;
    }
    bool string(string_t& value) override {
        if (level_ == level::metadata) {
            take_metadata(value);
        } else if (level_ == level::tensor && key_ == "dtype") {
            if (!tensor_.type_name.empty()) refuse_second();
            // an empty name would mean "not given" here, and is no valid type
            if (value.empty()) refuse_type(tensor_, value);
            tensor_.type_name = value;
        } else {
            take_ignored("a string");
        }
        return true;
    }
    bool number_unsigned(number_unsigned_t value) override {
        if (level_ == level::shape) {
            if (tensor_.shape.size() == max_axes) {
                detail::throw_format_error("the tensor {} has more than {} axes", quote(tensor_.name),
                                           max_axes);
            }
            tensor_.shape.push_back(value);
        } else if (level_ == level::offsets) {
            if (offset_count_ == offsets_.size()) refuse_offset_count();
            offsets_[offset_count_++] = value;
        } else {
            take_ignored("a number");
        }
        return true;
    }
    bool number_integer(number_integer_t value) override {
        take_ignored(value == 0 ? "-0" : "a negative number");
        return true;
    }
    bool number_float(number_float_t /*value*/, const string_t& /*text*/) override {
        take_ignored("a number with a fraction or an exponent, or of more than 64 bits,");
        return true;
    }
    bool boolean(bool /*value*/) override {
        take_ignored("a boolean");
        return true;
    }
    bool binary(binary_t& /*value*/) override {
        return false;  // JSON has none
    }
    bool null() override {
        if (level_ == level::top && key_ == detail::safetensors_metadata_name) {
            enter_metadata();
            level_ = level::top;
        } else {
            take_ignored("null");
        }
        return true;
    }

    bool start_object(std::size_t /*elements*/) override {
        deepen();
        if (level_ == level::start) {
            level_ = level::top;
        } else if (level_ == level::top && key_ == detail::safetensors_metadata_name) {
            enter_metadata();
        } else if (level_ == level::top) {
            level_ = level::tensor;
        } else {
            enter_ignored("an object");
        }
        return true;
    }
    bool end_object() override {
        if (level_ == level::tensor) complete_tensor();
        if (level_ == level::tensor || level_ == level::metadata) level_ = level::top;
        rise();
        return true;
    }
    bool start_array(std::size_t /*elements*/) override {
        deepen();
        if (level_ == level::tensor && key_ == "shape") {
            if (std::exchange(has_shape_, true)) refuse_second();
            level_ = level::shape;
        } else if (level_ == level::tensor && key_ == "data_offsets") {
            if (offset_count_ > 0) refuse_second();
            level_ = level::offsets;
        } else {
            enter_ignored("an array");
        }
        return true;
    }
    bool end_array() override {
        if (level_ == level::offsets && offset_count_ != offsets_.size()) refuse_offset_count();
        if (level_ == level::offsets || level_ == level::shape) level_ = level::tensor;
        rise();
        return true;
    }
    bool parse_error(std::size_t position, const std::string& /*token*/,
                     const nlohmann::json::exception& /*failure*/) override {
        // the JSON library's own message quotes the file's bytes unescaped
        detail::throw_format_error("its header is not valid JSON at byte {}",
                                   position + text_.skipped_bytes());
    }

 private:
    enum class level { start, top, metadata, tensor, shape, offsets, ignored };

    void deepen() {
        if (++depth_ > max_depth)
            detail::throw_format_error("the header's JSON is nested more than {} deep", max_depth);
    }
    void rise() {
        if (level_ == level::ignored && depth_ == ignored_depth_) level_ = level::tensor;
        --depth_;
    }
    void enter_metadata() {
        if (std::exchange(has_metadata_, true))
            detail::throw_format_error("the header has __metadata__ twice");
        level_ = level::metadata;
    }
    /// The reference implementation ignores unknown keys of a tensor.
    bool may_be_ignored() const {
        return level_ == level::ignored ||
               (level_ == level::tensor && key_ != "dtype" && key_ != "shape" && key_ != "data_offsets");
    }
    void enter_ignored(std::string_view what) {
        take_ignored(what);
        if (level_ != level::ignored) ignored_depth_ = depth_;
        level_ = level::ignored;
    }
    void take_ignored(std::string_view what) const {
        if (may_be_ignored()) return;
        switch (level_) {
            case level::top:
                detail::throw_format_error("the header has {} for {}, which should be an object", what,
                                           quote(key_));
            case level::metadata:
                detail::throw_format_error(
                    "the header's __metadata__ has {} for {}, which should be a string", what, quote(key_));
            case level::shape:
            case level::offsets:
            case level::tensor:
                detail::throw_format_error(
                    "the header has {} in the {} of the tensor {}, which should be {}", what, key_,
                    quote(tensor_.name),
                    key_ == "dtype" ? "a string" : "an array of whole numbers below 2^64");
            case level::start:
            case level::ignored:
                break;
        }
        detail::throw_format_error("its header is not a JSON object");
    }
    [[noreturn]] void refuse_second() const {
        detail::throw_format_error("the header gives the {} of the tensor {} twice", key_,
                                   quote(tensor_.name));
    }
    [[noreturn]] void refuse_offset_count() const {
        detail::throw_format_error("the data_offsets of the tensor {} are not two numbers",
                                   quote(tensor_.name));
    }
    void take_metadata(const std::string& value);
    void complete_tensor();

    const detail::safetensors_text& text_;
    detail::safetensors_metadata wanted_;
    /// Hashes of the names in __metadata__, if it is not kept. A deque, since a growing vector would copy
    /// them.
    std::deque<std::array<std::uint64_t, 2>> metadata_names_;
    level level_ = level::start;
    unsigned depth_ = 0;
    unsigned ignored_depth_ = 0;
    std::string key_;  // the last one
    bool has_metadata_ = false;
    std::uint64_t metadata_bytes_ = 0;  // kept
    // of the tensor that is being read
    safetensors_entry tensor_;
    bool has_shape_ = false;
    std::array<std::uint64_t, 2> offsets_{};
    std::size_t offset_count_ = 0;
};

void header_reader::take_metadata(const std::string& value) {
    if (wanted_ == detail::safetensors_metadata::checked) {
        const XXH128_hash_t hash = XXH3_128bits(key_.data(), key_.size());
        metadata_names_.push_back({hash.high64, hash.low64});
        return;
    }
    if (!header.metadata.try_emplace(key_, value).second)
        detail::throw_format_error("the header's __metadata__ has two strings named {}", quote(key_));
    // writing it to another file makes two more copies
    constexpr std::uint64_t max_unchecked_bytes = std::uint64_t{1} << 20;
    const std::uint64_t before = std::exchange(metadata_bytes_, metadata_bytes_ + key_.size() + value.size());
    if (before / max_unchecked_bytes == metadata_bytes_ / max_unchecked_bytes) return;
    detail::require_memory(2 * metadata_bytes_, fmt::format("the header's __metadata__ of more than {} bytes "
                                                            "takes {} bytes of memory",
                                                            metadata_bytes_, 2 * metadata_bytes_));
}

void header_reader::check_metadata_names() {
    std::ranges::sort(metadata_names_);
    if (std::ranges::adjacent_find(metadata_names_) != metadata_names_.end())
        detail::throw_format_error("the header's __metadata__ has two strings of one name");
}

void header_reader::complete_tensor() {
    const auto name = [&] { return quote(tensor_.name); };  // for errors
    if (tensor_.type_name.empty())
        detail::throw_format_error("the header lacks the dtype of the tensor {}", name());
    if (!has_shape_) detail::throw_format_error("the header lacks the shape of the tensor {}", name());
    if (offset_count_ == 0)
        detail::throw_format_error("the header lacks the data_offsets of the tensor {}", name());
    complete(tensor_, offsets_[0], offsets_[1]);
    const std::size_t count = header.tensors.size();
    if (count >= max_unchecked_tensors && count == header.tensors.capacity()) require_list_memory(2 * count);
    header.tensors.push_back(std::exchange(tensor_, {}));
    has_shape_ = false;
    offset_count_ = 0;
}

// ---- the tensors together ---------------------------------------------------------------------------------

void check_names(const std::vector<safetensors_entry>& tensors) {
    // most files have the names in order
    if (std::ranges::adjacent_find(tensors, std::greater_equal{}, &safetensors_entry::name) == tensors.end())
        return;
    // a hash table with linear probing: a place holds the hash of a name, and the tensor's index plus 1 (0:
    // the place is free)
    struct place {
        std::uint64_t hash = 0;
        std::size_t number = 0;
    };
    std::vector<place> places(std::bit_ceil(2 * tensors.size()));
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const std::string& name = tensors[i].name;
        const std::uint64_t hash = XXH3_64bits(name.data(), name.size());
        std::size_t at = hash & (places.size() - 1);
        for (; places[at].number != 0; at = (at + 1) & (places.size() - 1)) {
            if (places[at].hash == hash && tensors[places[at].number - 1].name == name)
                detail::throw_format_error("the header has two tensors named {}", quote(name));
        }
        places[at] = {hash, i + 1};
    }
}

/// Sorts the tensors by their data, and checks that they cover all of it.
void check_layout(std::vector<safetensors_entry>& tensors, std::uint64_t data_size_bytes) {
    const auto place_of = [](const safetensors_entry& tensor) {
        return std::tuple(tensor.offset_bytes, tensor.size_bytes, std::string_view(tensor.name));
    };
    if (!std::ranges::is_sorted(tensors, {}, place_of)) std::ranges::sort(tensors, {}, place_of);
    std::uint64_t end = 0;
    const safetensors_entry* before = nullptr;
    for (const safetensors_entry& tensor : tensors) {
        if (tensor.offset_bytes < end) {
            detail::throw_format_error(
                "the tensor {} begins at byte {} of the data, where the tensor {} has not ended yet",
                quote(tensor.name), tensor.offset_bytes, quote(before->name));
        }
        if (tensor.offset_bytes > end) {
            detail::throw_format_error(
                "the data has a hole: no tensor covers its bytes from {} to {}, where the tensor {} begins",
                end, tensor.offset_bytes, quote(tensor.name));
        }
        end += tensor.size_bytes;  // from data_offsets, so it cannot overflow
        before = &tensor;
    }
    if (end != data_size_bytes) {
        detail::throw_format_error("the tensors take {} bytes of data, but the file has {} after the header",
                                   end, data_size_bytes);
    }
}

/// Checks that concern all tensors, and makes their offsets those in the file.
safetensors_header checked(safetensors_header header, std::uint64_t data_offset_bytes,
                           std::uint64_t file_size_bytes) {
    check_names(header.tensors);
    check_layout(header.tensors, file_size_bytes - data_offset_bytes);
    for (safetensors_entry& tensor : header.tensors)
        tensor.offset_bytes += data_offset_bytes;
    return header;
}

}  // namespace

std::span<const detail::safetensors_type> detail::safetensors_types() noexcept {
    using enum dtype_kind;
    static constexpr std::array<safetensors_type, 22> types{{
        {"BOOL", 8, boolean},
        {"U8", 8, unsigned_integer},
        {"I8", 8, signed_integer},
        {"F8_E5M2", 8, float8_e5m2},
        {"F8_E4M3", 8, float8_e4m3fn},
        {"I16", 16, signed_integer},
        {"U16", 16, unsigned_integer},
        {"F16", 16, floating},
        {"BF16", 16, bfloat16},
        {"I32", 32, signed_integer},
        {"U32", 32, unsigned_integer},
        {"F32", 32, floating},
        {"C64", 64, complex},
        {"F64", 64, floating},
        {"I64", 64, signed_integer},
        {"U64", 64, unsigned_integer},
        // known to the reference implementation (0.8), but not to pinflow
        {"F4", 4, {}},
        {"F6_E2M3", 6, {}},
        {"F6_E3M2", 6, {}},
        {"F8_E8M0", 8, {}},
        {"F8_E4M3FNUZ", 8, {}},
        {"F8_E5M2FNUZ", 8, {}},
    }};
    return types;
}

std::uint64_t detail::safetensors_data_offset_bytes(std::span<const std::byte> bytes,
                                                    std::uint64_t file_size_bytes) {
    constexpr std::uint64_t length_size = 8;
    if (file_size_bytes < length_size || bytes.size() < length_size) {
        detail::throw_format_error(
            "the file ends after {} bytes, within the length of the safetensors header", file_size_bytes);
    }
    std::uint64_t header_size = 0;
    for (std::size_t index = 0; index < length_size; ++index) {
        header_size |= std::to_integer<std::uint64_t>(bytes[index]) << (8 * index);
    }
    if (header_size > file_size_bytes - length_size) {
        detail::throw_format_error("the header's length is given as {} bytes, but only {} follow in the file",
                                   header_size, file_size_bytes - length_size);
    }
    if (header_size > max_safetensors_header_bytes) {
        detail::throw_format_error("the header is {} bytes long; safetensors allows {}", header_size,
                                   max_safetensors_header_bytes);
    }
    if (header_size == 0 || bytes.size() <= length_size || bytes[length_size] != std::byte{'{'}) {
        detail::throw_format_error("its header does not begin with '{{', as that of a safetensors file does");
    }
    return length_size + header_size;
}

safetensors_header detail::parse_safetensors_text(safetensors_text::piece_source next_piece,
                                                  std::uint64_t data_offset_bytes,
                                                  std::uint64_t file_size_bytes,
                                                  safetensors_metadata wanted) {
    // a type name is shorter than the shown part of a string, and no other string value is kept
    safetensors_text text(std::move(next_piece),
                          wanted == safetensors_metadata::kept ? long_strings::whole : long_strings::cut);
    std::istream characters(&text);
    header_reader reader(text, wanted);
    if (!nlohmann::json::sax_parse(characters, &reader))
        detail::throw_format_error("its header is not valid JSON");
    reader.check_metadata_names();
    return checked(std::move(reader.header), data_offset_bytes, file_size_bytes);
}

safetensors_header detail::parse_safetensors_bytes(std::span<const std::byte> bytes,
                                                   std::uint64_t file_size_bytes, safetensors_metadata wanted,
                                                   std::size_t part_bytes) {
    const std::uint64_t data_offset = safetensors_data_offset_bytes(bytes, file_size_bytes);
    if (bytes.size() < data_offset) {
        detail::throw_format_error("the header ends at byte {}, but only {} bytes were read", data_offset,
                                   bytes.size());
    }
    auto text = bytes.first(static_cast<std::size_t>(data_offset)).subspan(8);
    const std::string_view json(reinterpret_cast<const char*>(text.data()), text.size());
    const auto complete_plain = [](safetensors_entry& tensor) {
        complete(tensor, tensor.offset_bytes, tensor.size_bytes);
    };
    if (auto plain = parse_plain_header(json, complete_plain, part_bytes)) {
        if (plain->tensors.size() > max_unchecked_tensors) require_list_memory(plain->tensors.size());
        if (wanted == safetensors_metadata::checked) plain->metadata.clear();
        return checked(std::move(*plain), data_offset, file_size_bytes);
    }
    const auto all_at_once = [&] { return std::exchange(text, {}); };
    return parse_safetensors_text(all_at_once, data_offset, file_size_bytes, wanted);
}

safetensors_header parse_safetensors_header(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
    return detail::parse_safetensors_bytes(bytes, file_size_bytes, detail::safetensors_metadata::kept);
}

}  // namespace pinflow
