#include "src/cli/element_pipeline.hpp"

#include <fmt/format.h>
#include <tbb/parallel_pipeline.h>

#include <algorithm>

#include "pinflow/array.hpp"
#include "src/core/cast.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::cli {

namespace {

/// The maximum number of pieces in flight. There are fewer if memory is short, elements are larger than a
/// piece, or the array has fewer pieces. A cast takes as much memory again.
constexpr std::uint64_t max_buffers = 16;
/// Large enough for the system to read ahead in large requests.
constexpr std::uint64_t default_piece_bytes = std::uint64_t{4} << 20;
/// The size of pieces if memory is short.
constexpr std::uint64_t min_piece_bytes = std::uint64_t{64} << 10;

}  // namespace

// an eighth for what is read, so that reads and casts together take at most a quarter
element_pipeline::element_pipeline()
    : memory_bytes_(std::min(max_buffers * default_piece_bytes,
                             pinflow::detail::read_available_memory().size_bytes / 8)) {}

void element_pipeline::run(pinflow::detail::element_stream& source, const dtype& from, const dtype& to,
                           const std::function<void(std::span<const std::byte>)>& write) {
    const std::uint64_t elements = element_count(source.shape());
    const std::uint64_t element_bytes = std::max(from.size_bytes(), to.size_bytes());
    if (elements == 0 || element_bytes == 0) return;
    const bool casts = from != to;
    // four pieces let the stages run side by side
    const std::uint64_t piece_bytes = std::clamp(memory_bytes_ / 4, min_piece_bytes, default_piece_bytes);
    const std::uint64_t piece_elements = std::clamp<std::uint64_t>(piece_bytes / element_bytes, 1, elements);
    const std::uint64_t pieces = (elements - 1) / piece_elements + 1;
    const std::uint64_t buffer_count = std::clamp<std::uint64_t>(
        memory_bytes_ / (piece_elements * element_bytes), 1, std::min(max_buffers, pieces));
    const std::uint64_t needed_bytes = buffer_count * piece_elements * element_bytes * (casts ? 2 : 1);
    // a cast doubles the buffers, and a single element may be larger than a piece: check the memory
    if (needed_bytes > memory_bytes_) {
        pinflow::detail::require_memory(
            needed_bytes,
            fmt::format("cannot convert: the buffers take {} bytes of memory (elements of {} bytes)",
                        needed_bytes, element_bytes),
            "free memory, or raise the limits on it");
    }
    buffers_.resize(std::max<std::size_t>(buffers_.size(), buffer_count));

    const auto elements_of = [&](std::uint64_t piece) {
        return std::min(piece_elements, elements - piece * piece_elements);
    };
    // At most `buffer_count` pieces are in flight, and they are written in order. So the previous piece of a
    // buffer has been written before the next piece is read into it.
    const auto buffer_of = [&](std::uint64_t piece) -> buffer& { return buffers_[piece % buffer_count]; };

    std::uint64_t next = 0;
    const auto read = [&](tbb::flow_control& control) -> std::uint64_t {
        if (next == pieces) {
            control.stop();
            return 0;
        }
        std::vector<std::byte>& bytes = buffer_of(next).read;
        bytes.resize(elements_of(next) * from.size_bytes());
        source.read(bytes);
        return next++;
    };
    const auto cast = [&](std::uint64_t piece) {
        if (casts) {
            buffer& current = buffer_of(piece);
            current.cast.resize(elements_of(piece) * to.size_bytes());
            pinflow::detail::cast_elements(from, current.read.data(), to, current.cast.data(),
                                           elements_of(piece));
        }
        return piece;
    };
    const auto pass_on = [&](std::uint64_t piece) {
        const buffer& current = buffer_of(piece);
        write(casts ? current.cast : current.read);
    };
    pinflow::detail::start_worker_threads();
    tbb::parallel_pipeline(
        buffer_count, tbb::make_filter<void, std::uint64_t>(tbb::filter_mode::serial_in_order, read) &
                          tbb::make_filter<std::uint64_t, std::uint64_t>(tbb::filter_mode::parallel, cast) &
                          tbb::make_filter<std::uint64_t, void>(tbb::filter_mode::serial_in_order, pass_on));
}

}  // namespace pinflow::cli
