#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>

#include "pinflow/error.hpp"
#include "tests/fake_cuda_backend.hpp"

/// A device that the planner measures, because it is not the host. Counts what is requested of it, and has as
/// much memory as a test allows.
class measured_backend final : public fake_cuda_backend {
 public:
    /// Larger requests for device memory, and for page-locked memory, fail.
    std::uint64_t max_allocated_bytes = ~std::uint64_t{0};
    std::uint64_t max_pinned_bytes = ~std::uint64_t{0};
    /// Called before device memory is allocated, the first step of a measurement.
    std::function<void()> before_allocating = [] {};
    unsigned refused = 0;          ///< allocations that failed
    unsigned gathers = 0;          ///< from the table itself
    unsigned staged_gathers = 0;   ///< from staging buffers
    std::uint64_t max_rows = 0;    ///< the largest row_transfer::end of the gathers from the table
    std::set<unsigned> blocks;     ///< every row_transfer::blocks of these gathers
    std::set<std::uint64_t> ends;  ///< every row_transfer::end of these gathers
    unsigned sorts = 0;
    std::set<unsigned> scatter_blocks;
    std::uint64_t rows_scattered_directly = 0;
    std::uint64_t rows_scattered_to_staging = 0;

    std::byte* allocate(std::uint64_t size_bytes, void* stream) override {
        before_allocating();
        if (size_bytes > max_allocated_bytes) {
            ++refused;
            throw pinflow::device_error("the device has no such memory");
        }
        return fake_cuda_backend::allocate(size_bytes, stream);
    }
    std::byte* allocate_pinned(std::uint64_t size_bytes) override {
        if (size_bytes > max_pinned_bytes) {
            ++refused;
            throw pinflow::device_error("so much cannot be page-locked");
        }
        return fake_cuda_backend::allocate_pinned(size_bytes);
    }
    void sort_rows(const pinflow::detail::row_sort& sort, void* stream) override {
        ++sorts;
        fake_cuda_backend::sort_rows(sort, stream);
    }
    void gather_rows(const pinflow::detail::row_transfer& transfer, void* stream) override {
        if (transfer.compact) {
            ++staged_gathers;
        } else {
            ++gathers;
            max_rows = std::max(max_rows, transfer.end);
            blocks.insert(transfer.blocks);
            ends.insert(transfer.end);
        }
        fake_cuda_backend::gather_rows(transfer, stream);
    }
    void scatter_rows(const pinflow::detail::row_transfer& transfer, pinflow::detail::repeated_rows repeated,
                      pinflow::detail::sum_type type, void* stream) override {
        scatter_blocks.insert(transfer.blocks);
        (transfer.compact ? rows_scattered_to_staging : rows_scattered_directly) +=
            transfer.end - transfer.begin;
        fake_cuda_backend::scatter_rows(transfer, repeated, type, stream);
    }
};
