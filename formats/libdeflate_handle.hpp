#pragma once

#include <libdeflate.h>

#include <new>

namespace pinflow::detail {

/// Owns libdeflate's decompressor: some kilobytes, which are worth reusing. For one thread at a time.
struct libdeflate_handle {
    /// @throws std::bad_alloc.
    libdeflate_handle() : handle(::libdeflate_alloc_decompressor()) {
        if (handle == nullptr) throw std::bad_alloc();
    }
    libdeflate_handle(const libdeflate_handle&) = delete;
    libdeflate_handle& operator=(const libdeflate_handle&) = delete;
    ~libdeflate_handle() { ::libdeflate_free_decompressor(handle); }

    ::libdeflate_decompressor* handle;
};

}  // namespace pinflow::detail
