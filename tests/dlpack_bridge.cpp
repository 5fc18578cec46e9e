// Loaders for dlpack_frameworks.py, which calls these functions through ctypes. After an error, a function
// returns null or false, and bridge_error returns its text. Functions that only read or delete catch nothing.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "pinflow/dlpack.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"

using namespace pinflow;

namespace {

thread_local std::string last_error;

/// Stands for Python's None as a stream: ctypes passes a number.
constexpr std::int64_t none = std::numeric_limits<std::int64_t>::min();

template <typename Function>
auto caught(Function function) -> decltype(function()) {
    try {
        last_error.clear();
        return function();
    } catch (const std::exception& error) {
        last_error = error.what();
        return {};
    }
}

std::optional<stream_view> stream_of(const device& device, std::int64_t stream) {
    return dlpack::consumer_stream(device, stream == none ? std::nullopt : std::optional(stream));
}

template <typename Managed>
void* exported(batch& batch, std::size_t index, const std::optional<stream_view>& stream) {
    return stream ? to_dlpack<Managed>(batch, index, *stream).release()
                  : to_dlpack<Managed>(batch, index).release();
}

}  // namespace

// the names are for Python, and nothing else calls them
extern "C" {

const char* bridge_error() {
    return last_error.c_str();
}

/// Makes a loader. If `in_order`, rows come in the order of the file, and batches are views of its mapping.
/// Otherwise, rows are shuffled.
void* bridge_open(const char* path, const char* device, bool in_order, std::uint64_t batch_rows,
                  std::uint64_t epochs, unsigned slots) {
    return caught([&]() -> void* {
        loader_options options{.device = device::parse(device),
                               .batch_rows = batch_rows,
                               .order = in_order ? order::sequential : order::shuffled,
                               .epochs = epochs,
                               .slots = slots};
        if (in_order) options.route = route::direct;
        return std::make_unique<loader>(std::vector<std::shared_ptr<const row_source>>{open_npy(path)},
                                        options)
            .release();
    });
}

void bridge_close(loader* loader) {
    delete loader;
}

/// The next batch; null at the end, too, without an error. `stream` as in __dlpack__; -1 for next() without
/// one.
void* bridge_next(loader* loader, std::int64_t stream) {
    return caught([&]() -> void* {
        const auto consumer = stream_of(loader->device(), stream);
        auto next = consumer ? loader->next(*consumer) : loader->next();
        return next ? new batch(std::move(*next)) : nullptr;
    });
}

std::uint64_t bridge_row_count(const batch* batch) {
    return batch->row_count();
}

void bridge_row_ids(const batch* batch, std::uint64_t* ids) {
    std::memcpy(ids, batch->row_ids().data(), batch->row_ids().size_bytes());
}

const void* bridge_data(const batch* batch, std::size_t index) {
    return (*batch)[index].data();
}

bool bridge_used_on(batch* batch, const loader* loader, std::int64_t stream) {
    return caught([&] {
        batch->used_on(stream_of(loader->device(), stream).value());
        return true;
    });
}

void* bridge_export(batch* batch, const loader* loader, std::size_t index, std::int64_t stream,
                    bool versioned) {
    return caught([&] {
        const auto consumer = stream_of(loader->device(), stream);
        return versioned ? exported<dlpack::managed_tensor_versioned>(*batch, index, consumer)
                         : exported<dlpack::managed_tensor>(*batch, index, consumer);
    });
}

void bridge_release(batch* batch) {
    delete batch;
}

void* bridge_export_array(const char* path, bool versioned) {
    return caught([&]() -> void* {
        const array opened = open_npy(path);
        if (versioned) return to_dlpack<dlpack::managed_tensor_versioned>(opened).release();
        return to_dlpack<dlpack::managed_tensor>(opened).release();
    });
}

/// Deletes a tensor that no consumer took.
void bridge_delete(void* tensor, bool versioned) {
    if (versioned) {
        auto* const managed = static_cast<dlpack::managed_tensor_versioned*>(tensor);
        managed->deleter(managed);
    } else {
        auto* const managed = static_cast<dlpack::managed_tensor*>(tensor);
        managed->deleter(managed);
    }
}

}  // extern "C"
