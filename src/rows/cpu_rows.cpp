#include "src/rows/cpu_rows.hpp"

#include "src/core/row_copy.hpp"

namespace pinflow::detail {

namespace {

bool counts(const row_piece& rows, std::uint64_t index, kept_duplicate which) noexcept {
    switch (which) {
        case kept_duplicate::all:
            return true;
        case kept_duplicate::first:
            return index == 0 || rows.ids[index - 1] != rows.ids[index];
        case kept_duplicate::last:
            return index + 1 == rows.ids.size() || rows.ids[index + 1] != rows.ids[index];
    }
    return true;
}

}  // namespace

void gather_on_cpu(const std::byte* table, const row_piece& rows, kept_duplicate which,
                   std::byte* buffer) noexcept {
    const std::uint64_t size_bytes = rows.row_size_bytes;
    for (std::uint64_t index = rows.begin; index < rows.end; ++index) {
        if (index + prefetched_rows < rows.end)
            prefetch_row(table + rows.ids[index + prefetched_rows] * size_bytes, size_bytes);
        if (!counts(rows, index, which)) continue;
        stream_copy(buffer + (index - rows.begin) * size_bytes, table + rows.ids[index] * size_bytes,
                    size_bytes);
    }
    finish_streaming();
}

void scatter_on_cpu(std::byte* table, const row_piece& rows, kept_duplicate which,
                    const std::byte* buffer) noexcept {
    const std::uint64_t size_bytes = rows.row_size_bytes;
    for (std::uint64_t index = rows.begin; index < rows.end; ++index) {
        if (!counts(rows, index, which)) continue;
        stream_copy(table + rows.ids[index] * size_bytes, buffer + (index - rows.begin) * size_bytes,
                    size_bytes);
    }
    finish_streaming();
}

}  // namespace pinflow::detail
