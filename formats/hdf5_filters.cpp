#include "formats/hdf5_filters.hpp"

#include <fmt/format.h>
#ifdef PINFLOW_HAVE_LZF
#include <lzf.h>
#endif
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <string_view>
#include <utility>

#include "formats/libdeflate_handle.hpp"
#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"

namespace pinflow::detail {

namespace {

/// The maximum expansion by decompression. Deflate: 258 bytes for a length and a distance of one bit each.
/// LZF: 264 bytes for the longest reference, of three bytes.
constexpr std::uint64_t max_inflated = 1032;
constexpr std::uint64_t max_expanded = 88;

/// A generous bound on the compressed size of `size_bytes`: the formats need far less for incompressible
/// bytes.
/// @throws format_error if it is 2^64 or more.
std::uint64_t max_compressed_bytes(std::uint64_t size_bytes) {
    std::uint64_t result = 0;
    if (!add(size_bytes, size_bytes / 8 + 4096, result))
        throw format_error("has a size of 2^64 bytes or more");
    return result;
}

std::string name_of(const hdf5_filter& filter) {
    return filter.name.empty() ? fmt::format("number {}", filter.id)
                               : fmt::format("{} (number {})", quote(filter.name), filter.id);
}

bool is_known(const hdf5_filter& filter) noexcept {
    return filter.id == filter_id::deflate || filter.id == filter_id::shuffle ||
           filter.id == filter_id::fletcher32 || (knows_lzf() && filter.id == filter_id::lzf);
}

}  // namespace

bool knows_lzf() noexcept {
#ifdef PINFLOW_HAVE_LZF
    return true;
#else
    return false;
#endif
}

std::string not_decoded_reason(std::span<const hdf5_filter> filters) {
    for (const hdf5_filter& filter : filters) {
        if (!is_known(filter)) {
            return fmt::format(
                "its chunks went through the filter {}, which pinflow's own code does not know (it "
                "knows deflate, shuffle, {})",
                name_of(filter),
                knows_lzf() ? "fletcher32 and lzf" : "and fletcher32; it was built without liblzf");
        }
    }
    return {};
}

// ---- what was done --------------------------------------------------------------------------------------

hdf5_pipeline::hdf5_pipeline(std::span<const hdf5_filter> filters, std::uint64_t chunk_bytes)
    : chunk_bytes_(chunk_bytes) {
    if (const std::string why = not_decoded_reason(filters); !why.empty()) throw unsupported(why);
    if (filters.size() > max_filters) {
        throw format_error(fmt::format("its chunks have {} filters, but at most {} are possible",
                                       filters.size(), max_filters));
    }
    for (std::size_t index = 0; index < filters.size(); ++index) {
        const hdf5_filter& filter = filters[index];
        step now{method::deflate, std::uint32_t{1} << index, 1};
        if (filter.id == filter_id::lzf) now.how = method::lzf;
        if (filter.id == filter_id::fletcher32) now.how = method::fletcher32;
        if (filter.id == filter_id::shuffle) {
            now.how = method::shuffle;
            if (filter.parameters.size() != 1 || filter.parameters[0] == 0) {
                throw format_error("its shuffle filter does not say how large an element is");
            }
            now.element_bytes = filter.parameters[0];
        }
        steps_.push_back(now);
    }
}

bool hdf5_pipeline::stored_as_is(std::uint32_t filter_mask) const noexcept {
    return std::ranges::all_of(steps_, [&](const step& now) { return (filter_mask & now.mask_bit) != 0; });
}

std::uint64_t hdf5_pipeline::shuffle_element_bytes(std::uint32_t filter_mask) const noexcept {
    const auto first =
        std::ranges::find_if(steps_, [&](const step& now) { return (filter_mask & now.mask_bit) == 0; });
    if (first == steps_.end() || first->how != method::shuffle || first->element_bytes == 1 ||
        chunk_bytes_ % first->element_bytes != 0) {
        return 0;
    }
    return first->element_bytes;
}

hdf5_pipeline::stage_list hdf5_pipeline::stages_of(std::uint32_t filter_mask) const {
    stage_list list;
    list.stored_bytes = chunk_bytes_;
    for (const step& now : steps_) {
        if ((filter_mask & now.mask_bit) != 0) continue;
        list.stages[list.count++] = {now, list.stored_bytes, list.exact};
        if (now.how == method::deflate || now.how == method::lzf) {
            list.stored_bytes = max_compressed_bytes(list.stored_bytes);
            list.exact = false;
        } else if (now.how == method::fletcher32 &&
                   !add(list.stored_bytes, checksum_bytes, list.stored_bytes)) {
            throw format_error("has a size of 2^64 bytes or more");
        }
    }
    return list;
}

void hdf5_pipeline::check_size(const hdf5_chunk& chunk) const {
    const stage_list list = stages_of(chunk.filter_mask);
    if (list.exact && chunk.size_bytes != list.stored_bytes) {
        throw format_error(fmt::format("is given as {} bytes, but with its filters it must take {}",
                                       chunk.size_bytes, list.stored_bytes));
    }
    if (chunk.size_bytes > list.stored_bytes) {
        throw format_error(
            fmt::format("is said to take {} bytes, more than a chunk of {} bytes can take after its filters",
                        chunk.size_bytes, chunk_bytes_));
    }
    std::uint64_t max_bytes = chunk.size_bytes;
    for (std::size_t index = list.count; index-- > 0;) {
        switch (list.stages[index].what.how) {
            case method::deflate:
                max_bytes = saturated(max_bytes, max_inflated);
                break;
            case method::lzf:
                max_bytes = saturated(max_bytes, max_expanded);
                break;
            case method::fletcher32:
                max_bytes -= std::min(max_bytes, checksum_bytes);
                break;
            case method::shuffle:
                break;
        }
    }
    if (max_bytes < chunk_bytes_) {
        throw format_error(fmt::format("is said to take {} bytes, which cannot make a chunk of {} bytes",
                                       chunk.size_bytes, chunk_bytes_));
    }
}

// ---- undoing it -----------------------------------------------------------------------------------------

struct hdf5_chunk_decoder::decompressor : libdeflate_handle {};

hdf5_chunk_decoder::hdf5_chunk_decoder() = default;

hdf5_chunk_decoder::~hdf5_chunk_decoder() = default;

std::span<std::byte> hdf5_chunk_decoder::stored_memory(std::uint64_t size_bytes) {
    std::byte* const data = stored_.reserve(size_bytes);
    stored_bytes_ = std::max(stored_bytes_, size_bytes);
    return {data, size_bytes};
}

/// Undoes all stages from the last down to `first`.
void hdf5_chunk_decoder::decode_down_to(std::size_t first, const hdf5_pipeline& pipeline,
                                        std::uint32_t filter_mask, std::span<const std::byte> stored,
                                        std::span<std::byte> destination) {
    using method = hdf5_pipeline::method;
    const hdf5_pipeline::stage_list list = pipeline.stages_of(filter_mask);
    // Only fletcher32 needs no output. Of the other stages, the one undone last writes to the destination,
    // unless its output still has a checksum.
    std::size_t last_output = first;
    while (last_output < list.count && list.stages[last_output].what.how == method::fletcher32)
        ++last_output;
    std::size_t turn = 0;
    std::span<const std::byte> bytes = stored;
    for (std::size_t index = list.count; index-- > first;) {
        const hdf5_pipeline::stage& stage = list.stages[index];
        std::span<std::byte> output;
        if (index == last_output && stage.output_bytes == destination.size()) {
            output = destination;
        } else if (stage.what.how != method::fletcher32) {
            // unshuffling needs as many bytes as its input, decompression its maximum output
            const std::uint64_t size_bytes =
                stage.what.how == method::shuffle ? bytes.size() : stage.output_bytes;
            output = {spare_[turn].reserve(size_bytes), size_bytes};
            spare_bytes_[turn] = std::max(spare_bytes_[turn], size_bytes);
            turn = 1 - turn;
        }
        bytes = undo(stage, bytes, output);
    }
    if (bytes.size() != destination.size()) {
        throw format_error(fmt::format("is damaged: it decodes to {} bytes, but a chunk has {}", bytes.size(),
                                       destination.size()));
    }
    if (bytes.data() != destination.data() && !bytes.empty()) {
        std::memcpy(destination.data(), bytes.data(), bytes.size());
    }
}

/// Undoes one filter.
/// @return the result, in `output` or within `input`.
std::span<const std::byte> hdf5_chunk_decoder::undo(const hdf5_pipeline::stage& stage,
                                                    std::span<const std::byte> input,
                                                    std::span<std::byte> output) {
    switch (stage.what.how) {
        case hdf5_pipeline::method::shuffle:
            if (output.size() != input.size()) {
                throw format_error(
                    fmt::format("is damaged: {} bytes were shuffled, not {}", input.size(), output.size()));
            }
            hdf5_unshuffle(input, stage.what.element_bytes, output.data());
            return output;
        case hdf5_pipeline::method::fletcher32: {
            if (input.size() < checksum_bytes) throw format_error("is damaged: its checksum is truncated");
            const auto result = input.first(input.size() - checksum_bytes);
            std::uint32_t stored = 0;  // little-endian
            for (std::size_t index = checksum_bytes; index-- > 0;)
                stored = stored << 8 | std::to_integer<std::uint32_t>(input[result.size() + index]);
            const std::uint32_t sum = hdf5_fletcher32(result);
            // up to version 1.6.2, libhdf5 swapped the bytes of both halves
            const std::uint32_t turned = (sum & 0x00FF00FF) << 8 | (sum >> 8 & 0x00FF00FF);
            if (stored != sum && stored != turned) {
                throw format_error(
                    fmt::format("is damaged: its Fletcher checksum is {:08x}, but {:08x} is stored with it",
                                sum, stored));
            }
            return result;
        }
        case hdf5_pipeline::method::lzf:
        case hdf5_pipeline::method::deflate:
            return inflate(stage, input, output);
    }
    return input;
}

std::span<const std::byte> hdf5_chunk_decoder::inflate(const hdf5_pipeline::stage& stage,
                                                       std::span<const std::byte> input,
                                                       std::span<std::byte> output) {
    std::size_t count = 0;
    bool too_long = false;
    bool wrong = false;
    std::string_view method = "deflate";
    if (stage.what.how == hdf5_pipeline::method::deflate) {
        if (!decompressor_) decompressor_ = std::make_unique<decompressor>();
        const auto result = ::libdeflate_zlib_decompress(decompressor_->handle, input.data(), input.size(),
                                                         output.data(), output.size(), &count);
        too_long = result == LIBDEFLATE_INSUFFICIENT_SPACE;
        wrong = result != LIBDEFLATE_SUCCESS;
    } else {
        method = "lzf";
        // liblzf reads a byte before it looks at the size, and counts in ints
#ifdef PINFLOW_HAVE_LZF
        constexpr std::size_t max_bytes = std::numeric_limits<unsigned>::max();
        if (!input.empty() && input.size() <= max_bytes && output.size() <= max_bytes) {
            count = ::lzf_decompress(input.data(), static_cast<unsigned>(input.size()), output.data(),
                                     static_cast<unsigned>(output.size()));
            too_long = count == 0 && errno == E2BIG;
        }
#endif
        wrong = count == 0;
    }
    if (too_long) {
        throw format_error(
            fmt::format("is damaged: its {} data continues after the {} bytes that it should make", method,
                        output.size()));
    }
    if (wrong) throw format_error(fmt::format("is damaged: its {} data is wrong or truncated", method));
    if (stage.exact && count != output.size()) {
        throw format_error(fmt::format("is damaged: its {} data ends after {} bytes, but {} are expected",
                                       method, count, output.size()));
    }
    return output.first(count);
}

// ---- shuffle --------------------------------------------------------------------------------------------

namespace {

/// Planes of one byte of each element, `stride` bytes apart.
struct shuffled_planes {
    const std::byte* first;
    std::uint64_t stride;
};

/// Unshuffles the elements [begin, end).
void unshuffle_by_byte(shuffled_planes planes, std::uint64_t element_bytes, std::uint64_t begin,
                       std::uint64_t end, std::byte* destination) noexcept {
    // a block of elements that stays in the L1 cache during the pass over its planes
    const std::uint64_t block = std::max<std::uint64_t>((16 << 10) / element_bytes, 16);
    for (; begin < end; begin += block) {
        const std::uint64_t block_end = std::min(end, begin + block);
        for (std::uint64_t plane = 0; plane < element_bytes; ++plane) {
            const std::byte* from = planes.first + plane * planes.stride;
            std::byte* to = destination + plane;
            for (std::uint64_t index = begin; index < block_end; ++index)
                to[index * element_bytes] = from[index];
        }
    }
}

#ifdef __SSE2__
/// Unshuffles as many of `count` elements as fit whole vectors of 16.
/// @return how many were unshuffled.
template <std::size_t ElementBytes>
std::uint64_t unshuffle_by_vector(shuffled_planes planes, std::uint64_t count,
                                  std::byte* destination) noexcept {
    constexpr std::uint64_t at_once = 16;
    std::uint64_t first = 0;
    for (; count - first >= at_once; first += at_once) {
        __m128i now[ElementBytes];
        for (std::size_t plane = 0; plane < ElementBytes; ++plane) {
            now[plane] = _mm_loadu_si128(
                reinterpret_cast<const __m128i*>(planes.first + plane * planes.stride + first));
        }
        // Each pass interleaves the first half with the second: the bits of a byte's index rotate left by
        // one. After log2(ElementBytes) passes, the plane number is in the lowest bits.
        for (std::size_t pass = 1; pass < ElementBytes; pass *= 2) {
            __m128i next[ElementBytes];
            for (std::size_t index = 0; index < ElementBytes / 2; ++index) {
                next[2 * index] = _mm_unpacklo_epi8(now[index], now[index + ElementBytes / 2]);
                next[2 * index + 1] = _mm_unpackhi_epi8(now[index], now[index + ElementBytes / 2]);
            }
            std::copy(std::begin(next), std::end(next), std::begin(now));
        }
        auto* const to = reinterpret_cast<__m128i*>(destination + first * ElementBytes);
        for (std::size_t index = 0; index < ElementBytes; ++index)
            _mm_storeu_si128(to + index, now[index]);
    }
    return first;
}
#endif

}  // namespace

void hdf5_unshuffle(const std::byte* first_plane, std::uint64_t plane_bytes, std::uint64_t element_bytes,
                    std::uint64_t count, std::byte* destination) noexcept {
    const shuffled_planes planes{first_plane, plane_bytes};
    std::uint64_t done = 0;
#ifdef __SSE2__
    switch (element_bytes) {
        case 2:
            done = unshuffle_by_vector<2>(planes, count, destination);
            break;
        case 4:
            done = unshuffle_by_vector<4>(planes, count, destination);
            break;
        case 8:
            done = unshuffle_by_vector<8>(planes, count, destination);
            break;
        case 16:
            done = unshuffle_by_vector<16>(planes, count, destination);
            break;
        default:
            break;
    }
#endif
    unshuffle_by_byte(planes, element_bytes, done, count, destination);
}

void hdf5_unshuffle(std::span<const std::byte> shuffled, std::uint64_t element_bytes,
                    std::byte* destination) noexcept {
    if (shuffled.empty()) return;
    const std::uint64_t count = shuffled.size() / element_bytes;
    hdf5_unshuffle(shuffled.data(), count, element_bytes, count, destination);
    const std::uint64_t whole_bytes = count * element_bytes;
    if (whole_bytes < shuffled.size()) {
        std::memcpy(destination + whole_bytes, shuffled.data() + whole_bytes, shuffled.size() - whole_bytes);
    }
}

// ---- fletcher32 -----------------------------------------------------------------------------------------

std::uint32_t hdf5_fletcher32(std::span<const std::byte> bytes) noexcept {
    constexpr std::uint64_t modulus = 65535;
    constexpr std::size_t lanes = 16;
    // with this many steps a lane's sum of sums fits into 32 bits: 65535 (1 + 2 + ... + 360) < 2^32
    constexpr std::uint64_t max_steps = 360;
    const auto word_at = [&](std::uint64_t index) {
        return static_cast<std::uint32_t>(std::to_integer<std::uint32_t>(bytes[2 * index]) << 8 |
                                          std::to_integer<std::uint32_t>(bytes[2 * index + 1]));
    };
    std::uint64_t sum = 0;
    std::uint64_t sum_of_sums = 0;
    const std::uint64_t words = bytes.size() / 2;
    std::uint64_t done = 0;
    while (words - done >= lanes) {
        const std::uint64_t steps = std::min((words - done) / lanes, max_steps);
        std::array<std::uint32_t, lanes> lane_sum{};
        std::array<std::uint32_t, lanes> lane_sums{};
        const std::byte* at = bytes.data() + 2 * done;
        for (std::uint64_t step = 0; step < steps; ++step, at += 2 * lanes) {
            std::array<std::uint16_t, lanes> word;
            std::memcpy(word.data(), at, sizeof(word));
            for (std::size_t lane = 0; lane < lanes; ++lane) {
                const auto turned = static_cast<std::uint16_t>(word[lane] << 8 | word[lane] >> 8);
                lane_sum[lane] += std::endian::native == std::endian::little ? turned : word[lane];
                lane_sums[lane] += lane_sum[lane];
            }
        }
        // A lane's sum of sums counts a word once per step that is left. The exact factor is the number of
        // words that are left: `lanes` times the steps, minus l for lane l.
        sum_of_sums += steps * lanes * sum;
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            sum += lane_sum[lane];
            sum_of_sums += std::uint64_t{lane_sums[lane]} * lanes - std::uint64_t{lane_sum[lane]} * lane;
        }
        sum = sum > modulus ? (sum - 1) % modulus + 1 : sum;  // 0 only for words that are all 0
        sum_of_sums = sum_of_sums > modulus ? (sum_of_sums - 1) % modulus + 1 : sum_of_sums;
        done += steps * lanes;
    }
    for (; done < words; ++done) {
        sum += word_at(done);
        sum_of_sums += sum;
    }
    if (bytes.size() % 2 != 0) {
        sum += std::to_integer<std::uint32_t>(bytes.back()) << 8;
        sum_of_sums += sum;
    }
    if (sum > 0) sum = (sum - 1) % modulus + 1;
    if (sum_of_sums > 0) sum_of_sums = (sum_of_sums - 1) % modulus + 1;
    return static_cast<std::uint32_t>(sum_of_sums << 16 | sum);
}

}  // namespace pinflow::detail
