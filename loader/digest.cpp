#include "pinflow/loader/digest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <span>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"

namespace pinflow {

digest::digest(const pinflow::device& device) : stream_(device), sum_(sizeof(std::uint64_t), stream_) {
    constexpr std::array<std::byte, sizeof(std::uint64_t)> zero{};
    copy_to_device_async(sum_.data(), zero, stream_);
    stream_.synchronize();  // `zero` is about to go
}

digest::~digest() {
    try {
        for (const added_stream& each : added_)
            each.last.synchronize();
    } catch (...) {
        return;  // a failed device adds nothing any more
    }
}

void digest::add_async(const batch& batch, stream_view stream) {
    if (stream.device() != stream_.device()) {
        throw invalid_argument(fmt::format("a digest on {} cannot be computed on a stream of {}",
                                           stream_.device().name(), stream.device().name()));
    }
    arrays_.clear();
    for (std::size_t index = 0; index < batch.array_count(); ++index) {
        const array_view& rows = batch[index];
        arrays_.push_back({rows.data(), batch.row_count() == 0 ? 0 : rows.size_bytes() / batch.row_count()});
    }
    auto known = std::ranges::find(added_, stream.native_handle(), &added_stream::handle);
    if (known == added_.end()) {
        added_.push_back({stream.native_handle(), event(stream_.device())});
        known = std::prev(added_.end());
    }
    stream.device().backend().add_digest(
        arrays_, batch.row_count(), reinterpret_cast<std::uint64_t*>(sum_.data()), stream.native_handle());
    known->last.record(stream);
}

std::uint64_t digest::value() {
    for (const added_stream& each : added_)
        stream_.wait(each.last);
    std::uint64_t sum = 0;
    copy_to_host_async(std::as_writable_bytes(std::span(&sum, 1)), sum_.data(), stream_);
    stream_.synchronize();
    return sum;
}

}  // namespace pinflow
