#include "formats/safetensors_header.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <functional>
#include <istream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <ranges>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "formats/safetensors_plain.hpp"
#include "formats/safetensors_tensor.hpp"
#include "formats/throw_formatted.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/quote.hpp"

namespace pinflow {

namespace {

using detail::quote;

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

// ---- JSON -------------------------------------------------------------------------------------------------

/// Reads the header's JSON as a stream of events, so that nesting needs a counter and not a stack, and only
/// parts of the result are stored. Throws on errors.
class header_reader final : public nlohmann::json_sax<nlohmann::json> {
 public:
    header_reader(const detail::safetensors_text& text, detail::safetensors_metadata wanted)
        : text_(text), wanted_(wanted) {
        content.lists.emplace_back();
        content.memory.emplace_back();
    }

    /// Complete after the last event. Each tensor's offset is relative to the beginning of the data.
    detail::header_content content;

    /// Call it after the last event.
    void check_metadata_names();

    bool key(string_t& name) override {
        key_ = name;
        if (level_ == level::top && name != detail::safetensors_metadata_name) name_ = name;
        return true;
    }
    bool string(string_t& value) override {
        if (level_ == level::metadata) {
            take_metadata(value);
        } else if (level_ == level::tensor && key_ == "dtype") {
            if (!type_name_.empty()) refuse_second();
            // an empty name would mean "not given" here, and is no valid type
            if (value.empty()) detail::refuse_type(name_, value);
            type_name_ = value;
        } else {
            take_ignored("a string");
        }
        return true;
    }
    bool number_unsigned(number_unsigned_t value) override {
        if (level_ == level::shape) {
            if (shape_.size() == detail::max_safetensors_axes) {
                detail::throw_format_error("the tensor {} has more than {} axes", quote(name_),
                                           detail::max_safetensors_axes);
            }
            shape_.push_back(value);
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
                    quote(name_), key_ == "dtype" ? "a string" : "an array of whole numbers below 2^64");
            case level::start:
            case level::ignored:
                break;
        }
        detail::throw_format_error("its header is not a JSON object");
    }
    [[noreturn]] void refuse_second() const {
        detail::throw_format_error("the header gives the {} of the tensor {} twice", key_, quote(name_));
    }
    [[noreturn]] void refuse_offset_count() const {
        detail::throw_format_error("the data_offsets of the tensor {} are not two numbers", quote(name_));
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
    std::string name_;
    std::string type_name_;
    shape_vector shape_;
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
    if (!content.metadata.try_emplace(key_, value).second)
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
    const auto name = [&] { return quote(name_); };  // for errors
    if (type_name_.empty()) detail::throw_format_error("the header lacks the dtype of the tensor {}", name());
    if (!has_shape_) detail::throw_format_error("the header lacks the shape of the tensor {}", name());
    if (offset_count_ == 0)
        detail::throw_format_error("the header lacks the data_offsets of the tensor {}", name());
    detail::header_tensor tensor = detail::checked_tensor({.name = name_,
                                                           .type_name = type_name_,
                                                           .shape = shape_,
                                                           .begin_bytes = offsets_[0],
                                                           .end_bytes = offsets_[1]});
    content.memory.front().keep(tensor);
    std::vector<detail::header_tensor>& tensors = content.lists.front();
    const std::size_t count = tensors.size();
    if (count >= max_unchecked_tensors && count == tensors.capacity()) require_list_memory(2 * count);
    tensors.push_back(tensor);
    shape_.clear();
    type_name_.clear();
    has_shape_ = false;
    offset_count_ = 0;
}

// ---- the tensors together ---------------------------------------------------------------------------------

void check_names(const detail::header_content& content) {
    // most files have the names in order
    const auto tensors = content.tensors();
    if (std::ranges::adjacent_find(tensors, std::greater_equal{}, &detail::header_tensor::name) ==
        tensors.end())
        return;
    // a hash table with linear probing: a place holds a tensor and the hash of its name
    struct place {
        std::uint64_t hash = 0;
        const detail::header_tensor* tensor = nullptr;
    };
    std::vector<place> places(std::bit_ceil(2 * content.count()));
    for (const detail::header_tensor& tensor : tensors) {
        const std::uint64_t hash = XXH3_64bits(tensor.name.data(), tensor.name.size());
        std::size_t at = hash & (places.size() - 1);
        for (; places[at].tensor != nullptr; at = (at + 1) & (places.size() - 1)) {
            if (places[at].hash == hash && places[at].tensor->name == tensor.name)
                detail::throw_format_error("the header has two tensors named {}", quote(tensor.name));
        }
        places[at] = {hash, &tensor};
    }
}

/// Sorts the tensors by their data, and checks that they cover all of it.
void check_layout(detail::header_content& content, std::uint64_t data_size_bytes) {
    const auto place_of = [](const detail::header_tensor& tensor) {
        return std::tuple(tensor.offset_bytes, tensor.size_bytes, tensor.name);
    };
    if (!std::ranges::is_sorted(content.tensors(), {}, place_of)) {
        std::vector<detail::header_tensor> sorted;
        sorted.reserve(content.count());
        std::ranges::copy(content.tensors(), std::back_inserter(sorted));
        std::ranges::sort(sorted, {}, place_of);
        content.lists.clear();
        content.lists.push_back(std::move(sorted));
    }
    std::uint64_t end = 0;
    const detail::header_tensor* before = nullptr;
    for (const detail::header_tensor& tensor : content.tensors()) {
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
detail::header_content checked(detail::header_content content, std::uint64_t data_offset_bytes,
                               std::uint64_t file_size_bytes) {
    check_names(content);
    check_layout(content, file_size_bytes - data_offset_bytes);
    for (detail::header_tensor& tensor : std::views::join(content.lists))
        tensor.offset_bytes += data_offset_bytes;
    return content;
}

}  // namespace

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
        detail::throw_format_error(
            "the header's length is given as {} bytes, but only {} follow in the file: it is truncated, or "
            "not a safetensors file",
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

detail::header_content detail::parse_safetensors_text(safetensors_text::piece_source next_piece,
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
    return checked(std::move(reader.content), data_offset_bytes, file_size_bytes);
}

detail::header_content detail::parse_safetensors_bytes(std::span<const std::byte> bytes,
                                                       std::uint64_t file_size_bytes,
                                                       safetensors_metadata wanted, std::size_t part_bytes) {
    const std::uint64_t data_offset = safetensors_data_offset_bytes(bytes, file_size_bytes);
    if (bytes.size() < data_offset) {
        detail::throw_format_error("the header ends at byte {}, but only {} bytes were read", data_offset,
                                   bytes.size());
    }
    auto text = bytes.first(static_cast<std::size_t>(data_offset)).subspan(8);
    const std::string_view json(reinterpret_cast<const char*>(text.data()), text.size());
    if (auto plain = parse_plain_header(json, part_bytes)) {
        if (plain->count() > max_unchecked_tensors) require_list_memory(plain->count());
        if (wanted == safetensors_metadata::checked) plain->metadata.clear();
        return checked(std::move(*plain), data_offset, file_size_bytes);
    }
    const auto all_at_once = [&] { return std::exchange(text, {}); };
    return parse_safetensors_text(all_at_once, data_offset, file_size_bytes, wanted);
}

safetensors_header parse_safetensors_header(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
    return detail::to_safetensors_header(
        detail::parse_safetensors_bytes(bytes, file_size_bytes, detail::safetensors_metadata::kept));
}

}  // namespace pinflow
