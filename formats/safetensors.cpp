#include "pinflow/formats/safetensors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "formats/element_streams.hpp"
#include "formats/safetensors_header.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/checked.hpp"
#include "src/core/mapping_reason.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/output_file.hpp"
#include "src/core/quote.hpp"

namespace pinflow {

namespace {

using detail::quote;

/// Reads exactly the header: a long one a piece at a time.
detail::header_content read_text(const input_file& file, detail::safetensors_metadata wanted) {
    constexpr std::uint64_t max_piece_bytes = 1u << 20;
    std::array<std::byte, detail::safetensors_preamble_size_bytes> preamble{};
    const auto preamble_size = std::min<std::uint64_t>(preamble.size(), file.size_bytes());
    const auto first = std::span(preamble).first(static_cast<std::size_t>(preamble_size));
    file.read(0, first);
    const std::uint64_t data_offset = detail::safetensors_data_offset_bytes(first, file.size_bytes());
    constexpr std::uint64_t max_whole_bytes = 16u << 20;
    if (data_offset <= max_whole_bytes) {
        const auto memory =
            std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(data_offset));
        const std::span bytes(memory.get(), static_cast<std::size_t>(data_offset));
        file.read(0, bytes);
        return detail::parse_safetensors_bytes(bytes, file.size_bytes(), wanted);
    }
    std::uint64_t offset = preamble.size() - 1;  // after the length
    std::vector<std::byte> piece(
        static_cast<std::size_t>(std::min<std::uint64_t>(max_piece_bytes, data_offset - offset)));
    const auto next_piece = [&]() -> std::span<const std::byte> {
        const auto filled = std::span(piece).first(
            static_cast<std::size_t>(std::min<std::uint64_t>(piece.size(), data_offset - offset)));
        file.read(offset, filled);
        offset += filled.size();
        return filled;
    };
    return detail::parse_safetensors_text(next_piece, data_offset, file.size_bytes(), wanted);
}

}  // namespace

detail::header_content detail::read_safetensors_header(const input_file& file,
                                                       detail::safetensors_metadata wanted) {
    try {
        return read_text(file, wanted);
    } catch (const format_error& failure) {
        throw format_error(fmt::format("cannot open '{}': {}", file.path(), failure.what()));
    } catch (const system_failure& failure) {
        if (failure.code() != std::errc::not_enough_memory) throw;  // its message already names the file
        throw system_failure(fmt::format("cannot open '{}': {}", file.path(), failure.what()),
                             failure.code());
    }
}

namespace {

using detail::dtype_of;
using detail::safetensors_metadata;
using detail::unsupported_reason;

/// An open file and its header.
class tensor_file {
 public:
    explicit tensor_file(const std::filesystem::path& path);
    tensor_file(const tensor_file&) = delete;
    tensor_file& operator=(const tensor_file&) = delete;

    array open(std::string_view name) const;

 private:
    std::shared_ptr<const input_file> file_;
    detail::header_content header_;
    std::unordered_map<std::string_view, const detail::header_tensor*> by_name_;
};

tensor_file::tensor_file(const std::filesystem::path& path)
    : file_(std::make_shared<const input_file>(path)),
      header_(detail::read_safetensors_header(*file_, safetensors_metadata::checked)) {
    by_name_.reserve(header_.count());
    for (const detail::header_tensor& tensor : header_.tensors())
        by_name_.emplace(tensor.name, &tensor);
}

array tensor_file::open(std::string_view name) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) {
        throw invalid_argument(fmt::format("cannot open {} of '{}': none of its {} tensors has that name",
                                           quote(name), file_->path(), header_.count()));
    }
    const detail::header_tensor& tensor = *found->second;
    const dtype* const type = dtype_of(*tensor.type);
    if (type == nullptr) {
        throw unsupported(fmt::format("cannot open {} of '{}': {}", quote(name), file_->path(),
                                      unsupported_reason(tensor.type->name)));
    }
    return array::of_file(file_, tensor.offset_bytes, *type, {tensor.shape.begin(), tensor.shape.end()})
        .labelled(detail::array_label(file_->path(), name));
}

class tensor_elements final : public detail::element_file {
 public:
    explicit tensor_elements(const std::filesystem::path& path) : file_(path) {}

    std::unique_ptr<detail::element_stream> stream(std::string_view name,
                                                   std::uint64_t memory_bytes) const override {
        return detail::stream_elements(file_.open(name), memory_bytes);
    }

 private:
    tensor_file file_;
};

}  // namespace

std::vector<array_listing> list_safetensors(const std::filesystem::path& path) {
    const input_file file(path);
    const detail::header_content header =
        detail::read_safetensors_header(file, safetensors_metadata::checked);
    std::vector<array_listing> listings;
    listings.reserve(header.count());
    for (const detail::header_tensor& tensor : header.tensors()) {
        array_listing& listing = listings.emplace_back();
        const dtype* const type = dtype_of(*tensor.type);
        listing.mappable = type != nullptr;
        listing.reason = type != nullptr
                             ? detail::mapping_reason(*type, tensor.offset_bytes, tensor.size_bytes)
                             : unsupported_reason(tensor.type->name);
        listing.name = tensor.name;
        if (type != nullptr) listing.dtype = *type;
        listing.shape.assign(tensor.shape.begin(), tensor.shape.end());
        listing.offset_bytes = tensor.offset_bytes;
        listing.size_bytes = tensor.size_bytes;
    }
    return listings;
}

array open_safetensors(const std::filesystem::path& path, std::string_view name) {
    return tensor_file(path).open(name);
}

std::vector<array> open_safetensors(const std::filesystem::path& path, std::span<const std::string> names) {
    const tensor_file file(path);
    std::vector<array> arrays;
    arrays.reserve(names.size());
    for (const std::string& name : names)
        arrays.push_back(file.open(name));
    return arrays;
}

std::map<std::string, std::string> detail::read_safetensors_metadata(const std::filesystem::path& path) {
    return read_safetensors_header(input_file(path), safetensors_metadata::kept).metadata;
}

std::unique_ptr<detail::element_file> detail::open_safetensors_elements(const std::filesystem::path& path) {
    return std::make_unique<tensor_elements>(path);
}

// ---- writing ----------------------------------------------------------------------------------------------

namespace {

constexpr std::uint64_t min_alignment_bytes = 8;
constexpr std::uint64_t max_alignment_bytes = 2u << 20;

/// The format's name of a type.
/// @throws invalid_argument (a sentence without the path) if it has none.
std::string_view type_name_of(const safetensors_writer::tensor& tensor) {
    const pinflow::dtype& type = tensor.dtype;
    if (!type.is_little_endian()) {
        throw invalid_argument(fmt::format("the tensor {} is of {}, but safetensors files are little-endian",
                                           quote(tensor.name), type.descr()));
    }
    for (const detail::safetensors_type& known : detail::safetensors_types()) {
        if (known.kind == type.kind() && known.bits / 8 == type.size_bytes()) return known.name;
    }
    throw invalid_argument(fmt::format("safetensors has no type for {}, the type of the tensor {}",
                                       type.descr(), quote(tensor.name)));
}

std::uint64_t size_bytes_of(const safetensors_writer::tensor& tensor) {
    if (!detail::fits_strides(tensor.shape, tensor.dtype.size_bytes())) {
        throw invalid_argument(fmt::format("the tensor {} of {} and shape {} is too large",
                                           quote(tensor.name), tensor.dtype.descr(),
                                           to_string(tensor.shape)));
    }
    return element_count(tensor.shape) * tensor.dtype.size_bytes();
}

/// `text` as a JSON string. @throws invalid_argument when it is not UTF-8.
std::string json_text(const std::string& text) {
    try {
        return nlohmann::json(text).dump();
    } catch (const nlohmann::json::type_error&) {
        throw invalid_argument(fmt::format("the name or text {} is not UTF-8", quote(text)));
    }
}

}  // namespace

detail::safetensors_beginning detail::format_safetensors_header(
    std::span<const safetensors_writer::tensor> tensors, const std::map<std::string, std::string>& metadata,
    std::uint64_t alignment_bytes) {
    if (!std::has_single_bit(alignment_bytes) || alignment_bytes < min_alignment_bytes ||
        alignment_bytes > max_alignment_bytes) {
        throw invalid_argument(fmt::format("an alignment is a power of two from {} to {}, not {}",
                                           min_alignment_bytes, max_alignment_bytes, alignment_bytes));
    }
    constexpr std::size_t length_size = 8;
    safetensors_beginning header;
    std::string& json = header.bytes;  // the length, then the JSON
    json.append(length_size, '\0');
    json += '{';
    const auto begin_entry = [&json] { json += json.ends_with('{') ? "" : ","; };
    if (!metadata.empty()) {
        json += fmt::format("\"{}\":{{", detail::safetensors_metadata_name);
        for (const auto& [name, text] : metadata) {
            begin_entry();
            json += json_text(name);
            json += ':';
            json += json_text(text);
        }
        json += '}';
    }
    std::uint64_t offset_bytes = 0;
    for (const safetensors_writer::tensor& tensor : tensors) {
        if (tensor.name == detail::safetensors_metadata_name) {
            throw invalid_argument(fmt::format("no tensor can have the name {}", quote(tensor.name)));
        }
        const std::uint64_t begin = offset_bytes;
        if (!detail::add(begin, size_bytes_of(tensor), offset_bytes)) {
            throw invalid_argument("the tensors together take 2^64 bytes or more");
        }
        begin_entry();
        json +=
            fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", json_text(tensor.name),
                        type_name_of(tensor), fmt::join(tensor.shape, ","), begin, offset_bytes);
    }
    json += '}';

    json.append((alignment_bytes - json.size() % alignment_bytes) % alignment_bytes, ' ');
    for (std::size_t index = 0; index < length_size; ++index)
        json[index] = static_cast<char>((json.size() - length_size) >> (8 * index) & 0xFF);
    header.data_size_bytes = offset_bytes;

    std::uint64_t file_size_bytes = 0;
    if (!detail::add(header.bytes.size(), offset_bytes, file_size_bytes)) {
        throw invalid_argument("header and tensors together take 2^64 bytes or more");
    }
    // parse the header, so that no unreadable file is written: two tensors of one name, too many axes, a
    // header that is too long
    try {
        parse_safetensors_bytes(std::as_bytes(std::span(header.bytes)), file_size_bytes,
                                safetensors_metadata::checked);
    } catch (const format_error& failure) {
        throw invalid_argument(failure.what());
    }
    return header;
}

struct safetensors_writer::state {
    state(const std::filesystem::path& path, const detail::safetensors_beginning& header)
        : file(path), promised_bytes(header.data_size_bytes) {
        file.write(std::as_bytes(std::span(header.bytes)));
    }

    detail::output_file file;
    std::uint64_t promised_bytes;
    std::uint64_t written_bytes = 0;
    bool finished = false;
};

safetensors_writer::safetensors_writer(const std::filesystem::path& path, std::span<const tensor> tensors,
                                       const std::map<std::string, std::string>& metadata,
                                       std::uint64_t alignment_bytes) {
    try {
        state_ = std::make_unique<state>(
            path, detail::format_safetensors_header(tensors, metadata, alignment_bytes));
    } catch (const invalid_argument& failure) {
        throw invalid_argument(fmt::format("cannot write '{}': {}", path.string(), failure.what()));
    }
}

safetensors_writer::safetensors_writer(safetensors_writer&&) noexcept = default;
safetensors_writer& safetensors_writer::operator=(safetensors_writer&&) noexcept = default;
safetensors_writer::~safetensors_writer() = default;

safetensors_writer::state& safetensors_writer::valid_state() const {
    if (!state_) throw invalid_argument("cannot use a moved-from safetensors_writer");
    return *state_;
}

void safetensors_writer::write(std::span<const std::byte> bytes) {
    state& own = valid_state();
    if (bytes.size() > own.promised_bytes - own.written_bytes) {
        throw invalid_argument(fmt::format(
            "cannot write {} bytes after the first {} bytes of data of '{}': its tensors take {} bytes",
            bytes.size(), own.written_bytes, own.file.path(), own.promised_bytes));
    }
    own.file.write(bytes);
    own.written_bytes += bytes.size();
}

void safetensors_writer::finish() {
    state& own = valid_state();
    if (own.finished) {
        throw invalid_argument(fmt::format("cannot finish '{}' twice", own.file.path()));
    }
    if (own.written_bytes != own.promised_bytes) {
        throw invalid_argument(
            fmt::format("cannot finish '{}': its tensors take {} bytes, but {} were written", own.file.path(),
                        own.promised_bytes, own.written_bytes));
    }
    own.file.commit();
    own.finished = true;
}

}  // namespace pinflow
