#include "formats/hdf5_library_filters.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <new>
#include <string_view>
#include <utility>

#include "formats/libdeflate_handle.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"

namespace pinflow::detail {

namespace {

constexpr std::uint64_t unknown = 0;

template <typename... Arguments>
[[noreturn]] void damaged(fmt::format_string<Arguments...> what, Arguments&&... arguments) {
    throw format_error("is damaged: " + fmt::format(what, std::forward<Arguments>(arguments)...));
}

bool only_library_knows(const hdf5_filter* filter) noexcept {
    return filter->id != filter_id::deflate && filter->id != filter_id::shuffle &&
           filter->id != filter_id::fletcher32 && (filter->id != filter_id::lzf || !knows_lzf());
}

std::uint32_t little_endian(std::span<const std::byte> bytes) noexcept {
    std::uint32_t number = 0;
    for (std::size_t index = 4; index-- > 0;)
        number = number << 8 | std::to_integer<std::uint32_t>(bytes[index]);
    return number;
}

/// Checks that `size_bytes` bytes hold `bits` bits.
void check_bits(std::string_view filter, std::uint64_t bits, std::uint64_t size_bytes) {
    if (bits / 8 + (bits % 8 == 0 ? 0 : 1) > size_bytes) {
        damaged("its {} data has {} bytes, which do not hold {} bits", filter, size_bytes, bits);
    }
}

// ---- scale-offset ----------------------------------------------------------------------------------------

/// The source of the layout is H5Zscaleoffset.c in libhdf5: 4 bytes with the number of bits that an element
/// takes, 17 bytes with the smallest element, and the bits of all elements.
void check_scaleoffset(const hdf5_filter& filter, std::uint64_t chunk_bytes,
                       std::span<const std::byte> input) {
    constexpr std::size_t parameter_count = 20;
    constexpr std::uint64_t head_bytes = 21;
    constexpr std::uint32_t integers = 2;  // the way to scale
    if (filter.parameters.size() != parameter_count) {
        damaged("its scale-offset filter has {} parameters, not {}", filter.parameters.size(),
                parameter_count);
    }
    const std::uint32_t way = filter.parameters[0];
    const std::uint32_t factor = filter.parameters[1];
    const std::uint64_t count = filter.parameters[2];
    const std::uint64_t element_bytes = filter.parameters[4];
    if (element_bytes == 0 || element_bytes > 8 || count * element_bytes != chunk_bytes) {
        damaged("its scale-offset filter is for {} elements of {} bytes, but a chunk has {} bytes", count,
                element_bytes, chunk_bytes);
    }
    if (way == integers && factor == 8 * element_bytes) {  // nothing was done
        if (input.size() != chunk_bytes) {
            damaged("{} bytes are stored, but a chunk has {}", input.size(), chunk_bytes);
        }
        return;
    }
    if (input.size() < head_bytes) damaged("its scale-offset data is truncated after {} bytes", input.size());
    const std::uint32_t bits = little_endian(input);
    if (bits > 8 * element_bytes) {
        damaged("its scale-offset data is said to have {} bits for elements of {} bytes", bits,
                element_bytes);
    }
    check_bits("scale-offset", count * bits, input.size() - head_bytes);
}

// ---- n-bit -----------------------------------------------------------------------------------------------

/// A type as the parameters of n-bit describe it (the source is H5Znbit.c in libhdf5): its size in memory and
/// in the file.
class nbit_type {
 public:
    struct sizes {
        std::uint64_t bytes;
        std::uint64_t bits;
    };

    explicit nbit_type(std::span<const std::uint32_t> parameters) : left_(parameters) {}

    sizes read() {
        switch (const std::uint32_t kind = next()) {
            case 1:
                return read_number();
            case 2:
                return read_array();
            case 3:
                return read_structure();
            case 4: {
                const std::uint64_t bytes = next();
                return {bytes, saturated(bytes, 8)};
            }
            default:
                damaged("its n-bit filter does not know types of kind {}", kind);
        }
    }

 private:
    std::uint32_t next() {
        if (left_.empty()) damaged("the parameters of its n-bit filter are truncated");
        const std::uint32_t number = left_.front();
        left_ = left_.subspan(1);
        return number;
    }

    sizes read_number() {
        const std::uint64_t bytes = next();
        const std::uint32_t order = next();
        const std::uint64_t precision = next();
        const std::uint64_t offset = next();
        if (order > 1 || precision == 0 || precision + offset > 8 * bytes) {
            damaged("its n-bit filter is for {} bits from bit {} on in {} bytes", precision, offset, bytes);
        }
        return {bytes, precision};
    }

    sizes read_array() {
        const std::uint64_t bytes = next();
        const sizes element = read();
        if (element.bytes == 0 || bytes % element.bytes != 0) {
            damaged("its n-bit filter is for arrays of {} bytes with elements of {}", bytes, element.bytes);
        }
        return {bytes, saturated(bytes / element.bytes, element.bits)};
    }

    sizes read_structure() {
        const std::uint64_t bytes = next();
        const std::uint32_t count = next();
        std::uint64_t bits = 0;
        for (std::uint32_t field = 0; field < count; ++field) {
            const std::uint64_t offset = next();
            const sizes of_field = read();
            if (offset + of_field.bytes > bytes) {
                damaged("its n-bit filter is for a field of {} bytes at byte {} of {}", of_field.bytes,
                        offset, bytes);
            }
            bits = saturated(1, bits, of_field.bits);
        }
        return {bytes, bits};
    }

    std::span<const std::uint32_t> left_;
};

/// Checks a chunk against the parameters of its n-bit filter.
/// @return false, without checking, if there are 256 parameters: pinflow reads no more of them, so the list
/// may be truncated.
bool check_nbit(const hdf5_filter& filter, std::uint64_t chunk_bytes, std::span<const std::byte> input) {
    constexpr std::size_t max_parameters = 256;
    const std::vector<std::uint32_t>& parameters = filter.parameters;
    if (parameters.size() >= max_parameters) return false;
    if (parameters.size() < 3)
        damaged("its n-bit filter has {} parameters, and needs at least 3", parameters.size());
    if (parameters[0] != parameters.size()) {
        damaged("its n-bit filter has {} parameters, but the first one declares {}", parameters.size(),
                parameters[0]);
    }
    if (parameters[1] != 0) {  // nothing was done
        if (input.size() != chunk_bytes) {
            damaged("{} bytes are stored, but a chunk has {}", input.size(), chunk_bytes);
        }
        return true;
    }
    const std::uint64_t count = parameters[2];
    const nbit_type::sizes element = nbit_type(std::span(parameters).subspan(3)).read();
    if (saturated(count, element.bytes) != chunk_bytes) {
        damaged("its n-bit filter is for {} elements of {} bytes, but a chunk has {} bytes", count,
                element.bytes, chunk_bytes);
    }
    check_bits("n-bit", saturated(count, element.bits), input.size());
    return true;
}

// ---- szip ------------------------------------------------------------------------------------------------

/// An szip chunk begins with the size of its output.
void check_szip(std::uint64_t output_bytes, std::span<const std::byte> input) {
    if (input.size() < 4) damaged("its szip data is truncated after {} bytes", input.size());
    const std::uint32_t promised = little_endian(input);
    if (promised != output_bytes && output_bytes != unknown) {
        damaged("its szip data declares {} decompressed bytes, but {} are expected", promised, output_bytes);
    }
}

}  // namespace

// ---- a chunk ---------------------------------------------------------------------------------------------

struct hdf5_library_filters::decompressor : libdeflate_handle {};

hdf5_library_filters::hdf5_library_filters(std::span<const hdf5_filter> filters, std::uint64_t chunk_bytes)
    : filters_(filters.begin(), filters.end()), chunk_bytes_(chunk_bytes) {}

hdf5_library_filters::~hdf5_library_filters() = default;

bool hdf5_library_filters::check(std::uint32_t filter_mask, std::span<const std::byte> stored) {
    std::vector<const hdf5_filter*> applied;
    for (std::size_t index = 0; index < filters_.size(); ++index) {
        if ((filter_mask >> index & 1) == 0) applied.push_back(&filters_[index]);
    }
    const auto last = std::ranges::find_if(applied.rbegin(), applied.rend(), only_library_knows);
    if (last == applied.rend()) {
        check_without_library(applied, stored);
        return true;
    }
    // libhdf5 has no lzf: it must be an application's filter
    if (std::any_of(applied.rbegin(), last, [](auto* filter) { return filter->id == filter_id::lzf; }))
        return false;
    std::span<const std::byte> bytes = stored;
    for (auto filter = applied.rbegin(); filter != last; ++filter)
        bytes = undo(**filter, bytes, between_[bytes.data() == between_[0].data() ? 1 : 0]);

    const std::span<const hdf5_filter* const> before(applied.begin(), last.base() - 1);
    const bool fills_chunk =
        std::ranges::all_of(before, [](auto* filter) { return filter->id == filter_id::shuffle; });
    const hdf5_filter& filter = **last;
    switch (filter.id) {
        case filter_id::scaleoffset:
            check_scaleoffset(filter, chunk_bytes_, bytes);
            return fills_chunk;
        case filter_id::nbit:
            return check_nbit(filter, chunk_bytes_, bytes) && fills_chunk;
        case filter_id::szip:
            check_szip(fills_chunk ? chunk_bytes_ : unknown, bytes);
            return false;
        default:
            return false;
    }
}

void hdf5_library_filters::check_without_library(std::span<const hdf5_filter* const> applied,
                                                 std::span<const std::byte> stored) {
    std::vector<hdf5_filter> filters;
    filters.reserve(applied.size());
    for (const hdf5_filter* const filter : applied)
        filters.push_back(*filter);
    const hdf5_pipeline pipeline(filters, chunk_bytes_);
    pipeline.check_size({0, stored.size(), 0});
    if (pipeline.stored_as_is(0)) return;
    chunk_.resize(chunk_bytes_);
    decoder_.decode(pipeline, 0, stored, chunk_);
}

/// Undoes deflate, shuffle or fletcher32, with an unknown output size.
std::span<const std::byte> hdf5_library_filters::undo(const hdf5_filter& filter,
                                                      std::span<const std::byte> input,
                                                      std::vector<std::byte>& output) {
    if (filter.id == filter_id::shuffle) {
        if (filter.parameters.size() != 1 || filter.parameters[0] == 0) {
            damaged("its shuffle filter does not say how large an element is");
        }
        output.resize(input.size());
        hdf5_unshuffle(input, filter.parameters[0], output.data());
        return output;
    }
    if (filter.id == filter_id::fletcher32) {
        if (input.size() < checksum_bytes) damaged("its checksum is truncated");
        return input.first(input.size() - checksum_bytes);  // libhdf5 checks the sum
    }
    if (!decompressor_) decompressor_ = std::make_unique<decompressor>();
    output.resize(2 * chunk_bytes_ + 4096);  // no filter enlarges a chunk by much
    std::size_t count = 0;
    const auto result = ::libdeflate_zlib_decompress(decompressor_->handle, input.data(), input.size(),
                                                     output.data(), output.size(), &count);
    if (result != LIBDEFLATE_SUCCESS) damaged("its deflate data is wrong or truncated");
    return std::span<const std::byte>(output).first(count);
}

}  // namespace pinflow::detail
