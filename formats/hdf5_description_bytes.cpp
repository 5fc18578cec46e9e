#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "formats/hdf5_description.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"

/// Serialises descriptions: little-endian numbers of 8 bytes, and a length before each sequence.
namespace pinflow::detail {

namespace {

/// The first bytes: a magic number, and the version of the layout.
constexpr std::uint64_t description_magic = 0x0001'3548'666e'6970;  // "pinfH5", 1
constexpr std::uint64_t listings_magic = 0x0002'354c'666e'6970;     // "pinfL5", 2
/// Limit on nested structures; the libhdf5 side stops earlier.
constexpr unsigned max_depth = 64;
/// Stands for the kind of a structured type.
constexpr std::uint64_t structured_kind = 0;

// ---- writing ---------------------------------------------------------------------------------------------

class writer {
 public:
    void number(std::uint64_t value) {
        std::array<std::byte, 8> bytes{};
        for (std::size_t index = 0; index < bytes.size(); ++index) {
            bytes[index] = static_cast<std::byte>(value >> (8 * index));
        }
        bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    }
    void bytes(std::span<const std::byte> content) {
        number(content.size());
        bytes_.insert(bytes_.end(), content.begin(), content.end());
    }
    void text(std::string_view content) { bytes(std::as_bytes(std::span(content))); }
    void numbers(std::span<const std::uint64_t> values) {
        number(values.size());
        for (const std::uint64_t value : values) {
            number(value);
        }
    }
    void type(const dtype& type) {
        if (!type.is_structured()) {
            number(static_cast<unsigned char>(type.kind()));
            number(type.size_bytes());
            number(type.order() == std::endian::big ? 1 : 0);
            text(type.unit());
            return;
        }
        number(structured_kind);
        number(type.size_bytes());
        number(type.fields().size());
        for (const dtype_field& field : type.fields()) {
            text(field.name);
            text(field.title);
            this->type(field.type);
            numbers(field.shape);
            number(field.offset_bytes);
        }
    }
    void reserve(std::size_t size_bytes) { bytes_.reserve(bytes_.size() + size_bytes); }
    std::vector<std::byte> take() { return std::move(bytes_); }

 private:
    std::vector<std::byte> bytes_;
};

// ---- reading ---------------------------------------------------------------------------------------------

[[noreturn]] void fail(std::string_view what) {
    throw format_error(fmt::format("a description of HDF5 datasets is damaged: {}", what));
}

class reader {
 public:
    explicit reader(std::span<const std::byte> bytes) : rest_(bytes) {}

    std::uint64_t number() {
        if (rest_.size() < 8) fail("it is truncated");
        std::uint64_t value = 0;
        for (std::size_t index = 8; index-- > 0;) {
            value = value << 8 | std::to_integer<std::uint64_t>(rest_[index]);
        }
        rest_ = rest_.subspan(8);
        return value;
    }
    /// How many items follow, each of `min_bytes` or more.
    std::size_t count(std::uint64_t min_bytes) {
        const std::uint64_t value = number();
        if (value > rest_.size() / min_bytes) fail("it declares more items or bytes than follow");
        return static_cast<std::size_t>(value);
    }
    template <std::unsigned_integral Narrow>
    Narrow narrow() {
        const std::uint64_t value = number();
        if (value > std::numeric_limits<Narrow>::max()) fail("a number is too large");
        return static_cast<Narrow>(value);
    }
    bool flag() {
        const std::uint64_t value = number();
        if (value > 1) fail("a number is too large");
        return value == 1;
    }
    std::span<const std::byte> bytes() {
        const std::size_t size = count(1);
        const auto content = rest_.first(size);
        rest_ = rest_.subspan(size);
        return content;
    }
    std::string text() {
        const auto content = bytes();
        return {reinterpret_cast<const char*>(content.data()), content.size()};
    }
    /// Text for an error message.
    std::string words() {
        std::string result = text();
        const auto is_control = [](char character) {
            const auto code = static_cast<unsigned char>(character);
            return code < ' ' || code == 0x7F;
        };
        if (std::ranges::any_of(result, is_control)) fail("a text has a control character");
        return result;
    }
    std::vector<std::byte> owned_bytes() {
        const auto content = bytes();
        return {content.begin(), content.end()};
    }
    std::vector<std::uint64_t> numbers() {
        std::vector<std::uint64_t> values(count(8));
        for (std::uint64_t& value : values) {
            value = number();
        }
        return values;
    }
    dtype type(unsigned depth = 0) {
        if (depth > max_depth) fail("its types are nested too deeply");
        const auto kind = narrow<unsigned char>();
        const std::uint64_t size_bytes = number();
        constexpr std::string_view kinds("\0biufcmMSUVBEF", 14);
        if (kinds.find(static_cast<char>(kind)) == kinds.npos) fail("a type is of an unknown kind");
        try {
            if (kind != structured_kind) {
                const std::endian order = flag() ? std::endian::big : std::endian::little;
                return {static_cast<dtype_kind>(kind), size_bytes, order, text()};
            }
            std::vector<dtype_field> fields;
            for (std::size_t left = count(8); left > 0; --left) {
                std::string name = text();
                std::string title = text();
                dtype field_type = type(depth + 1);
                shape_vector shape = numbers();
                fields.push_back(
                    {std::move(name), std::move(title), std::move(field_type), std::move(shape), number()});
            }
            return dtype::structured(std::move(fields), size_bytes);
        } catch (const invalid_argument& failure) {
            fail(failure.what());
        }
    }
    void expect(std::uint64_t magic) {
        if (number() != magic) fail("it does not begin with a known magic number");
    }
    void finish() const {
        if (!rest_.empty()) fail("bytes follow its end");
    }

 private:
    std::span<const std::byte> rest_;
};

}  // namespace

// ---- one dataset -----------------------------------------------------------------------------------------

std::vector<std::byte> serialize(const hdf5_description& description) {
    writer to;
    to.reserve(24 * description.chunks.size() + description.compact_data.size() + 1024);
    to.number(description_magic);
    to.text(description.name);
    to.type(description.dtype);
    to.numbers(description.shape);
    to.number(static_cast<std::uint64_t>(description.storage));
    to.text(description.library_reason);
    to.number(description.offset_bytes);
    to.bytes(description.compact_data);
    to.bytes(description.fill);
    to.numbers(description.chunk_shape);
    to.number(description.filters.size());
    for (const hdf5_filter& filter : description.filters) {
        to.number(static_cast<std::uint32_t>(filter.id));
        to.text(filter.name);
        to.number(filter.parameters.size());
        for (const std::uint32_t parameter : filter.parameters) {
            to.number(parameter);
        }
    }
    to.number(description.chunks.size());
    for (const hdf5_chunk& chunk : description.chunks) {
        to.number(chunk.offset_bytes);
        to.number(chunk.size_bytes);
        to.number(chunk.filter_mask);
    }
    return to.take();
}

hdf5_description parse_hdf5_description(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
    reader from(bytes);
    hdf5_description description;
    from.expect(description_magic);
    description.name = from.text();
    description.dtype = from.type();
    description.shape = from.numbers();
    const auto storage = from.narrow<std::uint8_t>();
    if (storage > static_cast<std::uint8_t>(hdf5_storage::library)) fail("its kind of storage is unknown");
    description.storage = static_cast<hdf5_storage>(storage);
    description.library_reason = from.words();
    description.offset_bytes = from.number();
    description.compact_data = from.owned_bytes();
    description.fill = from.owned_bytes();
    description.chunk_shape = from.numbers();
    description.filters.resize(from.count(24));
    for (hdf5_filter& filter : description.filters) {
        filter.id = static_cast<std::int32_t>(from.narrow<std::uint32_t>());
        filter.name = from.text();
        filter.parameters.resize(from.count(8));
        for (std::uint32_t& parameter : filter.parameters) {
            parameter = from.narrow<std::uint32_t>();
        }
    }
    description.chunks.resize(from.count(24));
    for (hdf5_chunk& chunk : description.chunks) {
        chunk.offset_bytes = from.number();
        chunk.size_bytes = from.number();
        chunk.filter_mask = from.narrow<std::uint32_t>();
    }
    from.finish();
    check_hdf5_description(description, file_size_bytes);
    return description;
}

// ---- what inspect lists ----------------------------------------------------------------------------------

std::vector<std::byte> serialize(std::span<const array_listing> listings) {
    writer to;
    to.number(listings_magic);
    to.number(listings.size());
    for (const array_listing& listing : listings) {
        to.text(listing.name);
        to.number(listing.dtype ? 1 : 0);
        if (listing.dtype) to.type(*listing.dtype);
        to.numbers(listing.shape);
        to.number(listing.fortran_order ? 1 : 0);
        to.number(listing.offset_bytes ? 1 : 0);
        to.number(listing.offset_bytes.value_or(0));
        to.number(listing.size_bytes);
        to.number(listing.mappable ? 1 : 0);
        to.numbers(listing.chunk_shape);
        to.text(listing.reason);
    }
    return to.take();
}

namespace {

/// Checks that type, shape, size and chunk shape agree, because loads divide by them.
/// @throws format_error.
void check_listing(const array_listing& listing) {
    std::uint64_t size_bytes = listing.dtype->size_bytes();
    bool is_consistent = true;
    for (const std::uint64_t length : listing.shape)
        is_consistent = is_consistent && multiply(size_bytes, length, size_bytes);
    const shape_vector& chunk = listing.chunk_shape;
    constexpr std::uint64_t max_chunk_bytes = (std::uint64_t{1} << 32) - 1;  // a limit of HDF5
    std::uint64_t chunk_bytes = listing.dtype->size_bytes();
    for (const std::uint64_t length : chunk)
        is_consistent = is_consistent && multiply(chunk_bytes, length, chunk_bytes);
    is_consistent =
        is_consistent && (chunk.empty() || (chunk_bytes <= max_chunk_bytes && !listing.offset_bytes));
    if (!is_consistent || size_bytes != listing.size_bytes ||
        (!chunk.empty() && chunk.size() != listing.shape.size()) ||
        std::ranges::find(chunk, 0U) != chunk.end())
        fail(fmt::format("inconsistent listing of {}: shape {}, {} bytes, chunk shape {}",
                         quote(listing.name), to_string(listing.shape), listing.size_bytes,
                         to_string(chunk)));
}

}  // namespace

std::vector<array_listing> parse_array_listings(std::span<const std::byte> bytes) {
    reader from(bytes);
    from.expect(listings_magic);
    // grows while reading, since a listing in memory is larger than its bytes
    std::vector<array_listing> listings;
    for (std::size_t left = from.count(80); left > 0; --left) {
        array_listing& listing = listings.emplace_back();
        listing.name = from.text();
        if (from.flag()) listing.dtype = from.type();
        listing.shape = from.numbers();
        listing.fortran_order = from.flag();
        const bool has_offset = from.flag();
        const std::uint64_t offset_bytes = from.number();
        if (has_offset) listing.offset_bytes = offset_bytes;
        listing.size_bytes = from.number();
        listing.mappable = from.flag();
        listing.chunk_shape = from.numbers();
        listing.reason = from.words();
        if (listing.dtype) check_listing(listing);
    }
    from.finish();
    return listings;
}

}  // namespace pinflow::detail
