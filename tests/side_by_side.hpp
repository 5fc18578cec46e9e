#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "pinflow/file.hpp"
#include "pinflow/row_source.hpp"
#include "tests/support/file_bytes.hpp"

/// Rows of several files, each behind a header of 128 bytes, that are mapped one behind the other in one
/// reserved address range.
class side_by_side_rows final : public pinflow::row_source {
 public:
    static constexpr std::uint64_t header_bytes = 128;
    static constexpr std::uint64_t page_bytes = 4096;

    /// @param rows how many each file has
    side_by_side_rows(const std::filesystem::path& folder, const std::vector<std::uint64_t>& rows,
                      std::uint64_t row_bytes)
        : shape_{row_bytes} {
        for (const std::uint64_t count : rows)
            reserved_bytes_ += pages_bytes(count);
        void* const reserved =
            ::mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (reserved == MAP_FAILED) throw std::runtime_error("cannot reserve addresses");
        reserved_ = static_cast<std::byte*>(reserved);
        std::byte* at = reserved_;
        for (const std::uint64_t count : rows) {
            const std::filesystem::path path = folder / std::to_string(extents_.size());
            write_bytes(path, pattern_bytes(header_bytes + count * row_bytes));
            auto file = std::make_shared<const pinflow::input_file>(path.string());
            if (::mmap(at, pages_bytes(count), PROT_READ, MAP_SHARED | MAP_FIXED,
                       file->lease_descriptor().get(), 0) != at) {
                throw std::runtime_error("cannot map at a given address");
            }
            extents_.push_back({std::move(file), header_bytes, count, at + header_bytes});
            row_count_ += count;
            at += pages_bytes(count);
        }
    }
    ~side_by_side_rows() override { ::munmap(reserved_, reserved_bytes_); }

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const pinflow::shape_vector& row_shape() const noexcept override { return shape_; }
    std::uint64_t row_count() const noexcept override { return row_count_; }
    std::uint64_t row_size_bytes() const noexcept override { return shape_[0]; }
    std::string description() const override { return "'side by side'"; }
    std::span<const pinflow::row_extent> extents() const noexcept override { return extents_; }
    std::chrono::nanoseconds read_rows(std::span<const std::uint64_t>, std::span<std::byte>) const override {
        throw std::logic_error("these rows are not read");
    }
    void check_unchanged() const override {}

 private:
    std::uint64_t pages_bytes(std::uint64_t rows) const {
        return (header_bytes + rows * shape_[0] + page_bytes - 1) / page_bytes * page_bytes;
    }

    pinflow::dtype dtype_ = pinflow::dtype::of<std::uint8_t>();
    pinflow::shape_vector shape_;
    std::uint64_t row_count_ = 0;
    std::uint64_t reserved_bytes_ = 0;
    std::byte* reserved_ = nullptr;
    std::vector<pinflow::row_extent> extents_;
};
