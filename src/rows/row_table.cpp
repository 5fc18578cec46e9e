#include <fmt/format.h>

#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "src/core/extent_stride.hpp"
#include "src/core/source_check.hpp"

namespace pinflow {

namespace {

const row_source& required(const std::shared_ptr<const row_source>& source) {
    if (!source) throw invalid_argument("cannot make a row_table of a null pointer to a source");
    detail::check_row_source(*source);
    return *source;
}

}  // namespace

std::string_view to_string(row_route route) noexcept {
    switch (route) {
        case row_route::automatic:
            return "auto";
        case row_route::direct:
            return "direct";
        case row_route::copy:
            return "copy";
        case row_route::staged:
            return "staged";
        case row_route::hybrid:
            return "hybrid";
    }
    return "unknown";
}

row_table::row_table(std::shared_ptr<const row_source> source)
    : row_count_(required(source).row_count()),
      row_size_bytes_(source->row_size_bytes()),
      element_(source->dtype()),
      description_(source->description()),
      source_(source),
      owner_(source) {
    const auto extents = source->extents();
    if (size_bytes() == 0) return;
    if (extents.size() != 1 || extents[0].data == nullptr) {
        const std::string reason = source->no_extents_reason();
        throw unsupported(fmt::format("cannot make a row_table of {}: it {}", description_,
                                      reason.empty() ? "is not mapped in one piece" : reason));
    }
    if (!detail::has_contiguous_extents(*source)) {
        throw unsupported(
            fmt::format("cannot make a row_table of {}: its rows, of {} bytes, begin every {} bytes, and "
                        "rows of a table are contiguous",
                        description_, row_size_bytes_, extents[0].stride_bytes));
    }
    data_ = const_cast<std::byte*>(extents[0].data);  // not writable: nothing writes through this
}

row_table::row_table(std::span<std::byte> rows, std::uint64_t row_size_bytes, pinflow::dtype element,
                     std::shared_ptr<const void> owner)
    : data_(rows.data()),
      row_size_bytes_(row_size_bytes),
      element_(std::move(element)),
      writable_(true),
      description_("a table in memory"),
      owner_(std::move(owner)) {
    if (rows.data() == nullptr && !rows.empty())
        throw invalid_argument(fmt::format("a table of {} bytes cannot lie at a null pointer", rows.size()));
    if (row_size_bytes == 0 || rows.size() % row_size_bytes != 0) {
        throw invalid_argument(
            fmt::format("a table of {} bytes cannot have rows of {} bytes", rows.size(), row_size_bytes));
    }
    if (element_.size_bytes() == 0 || row_size_bytes % element_.size_bytes() != 0) {
        throw invalid_argument(fmt::format("rows of {} bytes cannot be made of elements of {}, of {} bytes",
                                           row_size_bytes, element_.descr(), element_.size_bytes()));
    }
    row_count_ = rows.size() / row_size_bytes;
}

}  // namespace pinflow
