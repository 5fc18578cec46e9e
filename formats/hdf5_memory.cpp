#include "formats/hdf5_memory.hpp"

#include <algorithm>
#include <new>
#include <utility>

namespace pinflow::detail {

// ---- chunks ----------------------------------------------------------------------------------------------

namespace {

/// Chunks of this size or more get pages of their own; smaller ones are left to the allocator. Released pages
/// are kept for reuse up to a limit, and unmapped beyond it. Huge pages are requested from 2 MiB on.
constexpr std::uint64_t min_pages_bytes = 256 << 10;

}  // namespace

struct hdf5_chunk_pool::spare_memory {
    std::mutex mutex;
    std::vector<memory_region> regions;
    std::uint64_t size_bytes = 0;
    std::uint64_t max_bytes = 0;

    memory_region take(std::uint64_t wanted_bytes) {
        const std::lock_guard lock(mutex);
        const auto found = std::ranges::find(regions.rbegin(), regions.rend(), wanted_bytes,
                                             [](const memory_region& region) { return region.size_bytes(); });
        if (found == regions.rend()) return {};
        memory_region region = std::exchange(*found, std::move(regions.back()));
        regions.pop_back();
        size_bytes -= wanted_bytes;
        return region;
    }
    void give_back(memory_region region) noexcept {
        const std::lock_guard lock(mutex);
        if (region.size_bytes() > max_bytes - size_bytes || regions.size() == regions.capacity()) return;
        size_bytes += region.size_bytes();
        regions.push_back(std::move(region));
    }
};

hdf5_chunk_pool::hdf5_chunk_pool(std::uint64_t max_spare_bytes) : spare_(std::make_shared<spare_memory>()) {
    constexpr std::uint64_t max_regions = 256;
    spare_->max_bytes = max_spare_bytes;
    spare_->regions.reserve(max_regions);
}

hdf5_chunk_memory hdf5_chunk_pool::take(std::uint64_t size_bytes) const {
    if (size_bytes < min_pages_bytes) return {new std::byte[size_bytes], std::default_delete<std::byte[]>()};
    memory_region region = spare_->take(size_bytes);
    if (!region) region = memory_region::anonymous(size_bytes);
    std::byte* const data = region.data();
    const auto shared = std::make_shared<memory_region>(std::move(region));
    return {data, [spare = spare_, shared](std::byte*) noexcept { spare->give_back(std::move(*shared)); }};
}

// ---- all together ----------------------------------------------------------------------------------------

hdf5_memory::hdf5_memory(std::uint64_t cache_bytes, std::uint64_t decoding_bytes)
    : cache(cache_bytes), chunks(decoding_bytes / 3), decoding_bytes_(decoding_bytes) {
    // at most this many decoders are kept; further threads create their own
    constexpr std::size_t max_decoders = 1024;
    decoders_.reserve(max_decoders);
}

std::uint64_t hdf5_memory::new_reader() noexcept {
    const std::lock_guard lock(mutex_);
    return ++readers_;
}

bool hdf5_memory::has_room_for(std::uint64_t size_bytes) const noexcept {
    return taken_bytes_ == 0 ||
           (taken_bytes_ <= decoding_bytes_ && size_bytes <= decoding_bytes_ - taken_bytes_);
}

void hdf5_memory::begin_decoding(std::uint64_t size_bytes) {
    std::unique_lock lock(mutex_);
    const std::uint64_t ticket = next_ticket_++;
    changed_.wait(lock, [&] { return ticket == now_served_ && has_room_for(size_bytes); });
    ++now_served_;
    taken_bytes_ += size_bytes;
    changed_.notify_all();
}

bool hdf5_memory::try_begin_decoding(std::uint64_t size_bytes) {
    const std::lock_guard lock(mutex_);
    if (next_ticket_ != now_served_ || !has_room_for(size_bytes)) return false;
    taken_bytes_ += size_bytes;
    return true;
}

void hdf5_memory::end_decoding(std::uint64_t size_bytes) noexcept {
    const std::lock_guard lock(mutex_);
    taken_bytes_ -= size_bytes;
    changed_.notify_all();
}

std::unique_ptr<hdf5_chunk_decoder> hdf5_memory::take_decoder() {
    {
        const std::lock_guard lock(mutex_);
        if (!decoders_.empty()) {
            auto decoder = std::move(decoders_.back());
            decoders_.pop_back();
            decoder_bytes_ -= decoder->memory_bytes();
            return decoder;
        }
    }
    return std::make_unique<hdf5_chunk_decoder>();
}

void hdf5_memory::give_back(std::unique_ptr<hdf5_chunk_decoder> decoder) noexcept {
    if (!decoder) return;
    const std::uint64_t size_bytes = decoder->memory_bytes();
    const std::lock_guard lock(mutex_);
    const std::uint64_t max_bytes = decoding_bytes_ - decoding_bytes_ / 3;
    if (decoder_bytes_ + size_bytes > max_bytes || decoders_.size() == decoders_.capacity()) return;
    decoder_bytes_ += size_bytes;
    decoders_.push_back(std::move(decoder));
}

}  // namespace pinflow::detail
