#include "formats/hdf5_chunk_reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "formats/hdf5_chunk_read.hpp"
#include "pinflow/error.hpp"
#include "src/core/quote.hpp"

namespace pinflow::detail {

namespace {

std::vector<std::byte> delivered_fill(const hdf5_description& dataset, const swap_plan& swap) {
    std::vector<std::byte> fill = dataset.fill;
    swap.apply(fill);
    if (std::ranges::all_of(fill, [](std::byte byte) { return byte == std::byte{}; })) fill.clear();
    return fill;
}

/// Puts file and dataset in front of error messages.
template <typename Function>
auto naming(const input_file& file, const hdf5_description& dataset, Function function)
    -> decltype(function()) {
    const auto sentence = [&](const error& failure) {
        return fmt::format("cannot open {} in '{}': {}", quote(dataset.name), file.path(), failure.what());
    };
    try {
        return function();
    } catch (const format_error& failure) {
        throw format_error(sentence(failure));
    } catch (const unsupported& failure) {
        throw unsupported(sentence(failure));
    }
}

}  // namespace

std::vector<hdf5_row_run> runs_of(std::span<const std::uint64_t> ids) {
    std::vector<hdf5_row_run> runs;
    for (std::size_t first = 0; first < ids.size();) {
        std::size_t last = first + 1;
        while (last < ids.size() && ids[last] == ids[last - 1] + 1)
            ++last;
        runs.push_back({ids[first], last - first, first});
        first = last;
    }
    return runs;
}

hdf5_chunk_reader::hdf5_chunk_reader(std::shared_ptr<const input_file> file,
                                     std::shared_ptr<const hdf5_description> dataset,
                                     const hdf5_reader_options& options)
    : file_(std::move(file)),
      dataset_(std::move(dataset)),
      grid_(naming(*file_, *dataset_,
                   [&] {
                       return hdf5_chunk_grid(dataset_->shape, dataset_->chunk_shape,
                                              dataset_->dtype.size_bytes());
                   })),
      pipeline_(
          naming(*file_, *dataset_, [&] { return hdf5_pipeline(dataset_->filters, grid_.chunk_bytes()); })),
      swap_(options.as_stored ? dataset_->dtype.little_endian() : dataset_->dtype),
      fill_(delivered_fill(*dataset_, swap_)),
      memory_(options.memory),
      number_(memory_->new_reader()),
      keeps_all_(grid_.chunk_count() <=
                 memory_->cache.max_bytes() / hdf5_chunk_cache::cost_bytes(grid_.chunk_bytes())),
      was_decoded_(keeps_all_ ? 0 : dataset_->chunks.size()) {
    naming(*file_, *dataset_, [&] { check_chunks(); });
}

hdf5_chunk_reader::~hdf5_chunk_reader() {
    memory_->cache.forget(number_);
}

void hdf5_chunk_reader::check_chunks() const {
    for (std::size_t index = 0; index < dataset_->chunks.size(); ++index) {
        const hdf5_chunk& chunk = dataset_->chunks[index];
        if (chunk.size_bytes == 0) continue;
        try {
            pipeline_.check_size(chunk);
        } catch (const format_error& failure) {
            throw format_error(fmt::format("the chunk at {}, at offset {}, {}",
                                           to_string(grid_.first_element(index)), chunk.offset_bytes,
                                           failure.what()));
        }
    }
}

std::chrono::nanoseconds hdf5_chunk_reader::read(std::span<const hdf5_row_run> runs, const hdf5_row_box& box,
                                                 std::span<std::byte> destination) const {
    if (destination.empty()) return {};
    hdf5_chunk_read call(*this, runs, box, destination);
    return call.run();
}

std::string hdf5_chunk_reader::sentence(std::uint64_t index, const std::string& what) const {
    const hdf5_chunk& chunk = dataset_->chunks[index];
    return fmt::format("cannot read '{}': the chunk at {} of {}, {} bytes at offset {}, {}", file_->path(),
                       to_string(grid_.first_element(index)), quote(dataset_->name), chunk.size_bytes,
                       chunk.offset_bytes, what);
}

}  // namespace pinflow::detail
