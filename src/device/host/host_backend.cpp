#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/memory.hpp"
#include "src/core/error_advice.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/worker_threads.hpp"
#include "src/device/backend.hpp"
#include "src/device/digest_host.hpp"
#include "src/device/host/host_conversions.hpp"
#include "src/device/host/host_flat.hpp"
#include "src/device/host/host_records.hpp"
#include "src/device/host/host_rows.hpp"
#include "src/device/host/host_stream.hpp"

namespace pinflow::detail {

namespace {

host_stream& stream_of(void* handle) {
    if (handle == nullptr) throw invalid_argument("a null handle is no stream of the host device");
    return *static_cast<host_stream*>(handle);
}
host_event& event_of(void* handle) {
    return *static_cast<host_event*>(handle);
}

/// The text after the colon in a line of a /proc file that begins with `key`: the first such line that has
/// any text there. Empty if there is none.
std::string proc_value(const char* path, std::string_view key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (!line.starts_with(key)) continue;
        const std::size_t colon = line.find(':');
        const std::size_t value = line.find_first_not_of(" \t", colon + 1);
        if (colon != std::string::npos && value != std::string::npos) return line.substr(value);
    }
    return {};
}

/// Calls `work` with the last mark of each event that has one.
template <typename Work>
void for_marks(std::span<const event> events, Work work) {
    for (const event& each : events) {
        if (each.native_handle() == nullptr) continue;
        if (const auto mark = event_of(each.native_handle()).last_mark()) work(*mark);
    }
}

class host final : public device_backend {
 public:
    device_kind kind() const noexcept override { return device_kind::host; }
    int index() const noexcept override { return 0; }

    std::string model() const override {
        const std::string name = proc_value("/proc/cpuinfo", "model name");
        return fmt::format("{}, {} cores", name.empty() ? "processor" : name,
                           ::sysconf(_SC_NPROCESSORS_ONLN));
    }

    device::memory_sizes memory() const override {
        const memory_limits limits = read_memory_limits();
        const std::uint64_t available = limits.available_bytes.value_or(0);
        return {machine_memory_bytes(), std::min(available, limits.cgroup_bytes.value_or(available))};
    }

    void* create_stream() override { return new host_stream(host_stream::runs_on::own_thread); }
    void* create_synchronous_stream() override { return new host_stream(host_stream::runs_on::caller); }
    void finish_stream(void* stream) noexcept override {
        if (!stream_of(stream).forked()) stream_of(stream).synchronize();
    }
    void destroy_stream(void* stream) noexcept override {
        // in a forked process its locks may be held for ever, so it is leaked
        if (!stream_of(stream).forked()) host_stream::end(&stream_of(stream));
    }
    void synchronize_stream(void* stream) override { stream_of(stream).synchronize(); }
    bool stream_done(void* stream) override { return stream_of(stream).done(); }
    bool is_capturing(void*) override { return false; }
    void enqueue_host_function(void* stream, std::function<void()> work) override {
        stream_of(stream).enqueue(std::move(work));
    }

    void* create_event() override { return new host_event; }
    void destroy_event(void* event) noexcept override { delete &event_of(event); }
    void record_event(void* event, void* stream) override {
        auto mark = std::make_shared<host_mark>();
        stream_of(stream).record(mark);  // may throw: then the event keeps its last mark
        event_of(event).set_last_mark(std::move(mark));
    }
    void stream_wait_event(void* stream, void* event) override {
        auto mark = event_of(event).last_mark();
        if (!mark || mark->passed()) return;
        stream_of(stream).enqueue([mark = std::move(mark)] { mark->wait(); });
    }
    bool synchronize_event_for(void* event, std::chrono::microseconds timeout) override {
        const auto mark = event_of(event).last_mark();
        return !mark || mark->wait_for(timeout);
    }
    void synchronize_event(void* event) override {
        if (const auto mark = event_of(event).last_mark()) mark->wait();
    }
    bool event_done(void* event) override {
        const auto mark = event_of(event).last_mark();
        return !mark || mark->passed();
    }

    std::byte* allocate(std::uint64_t size_bytes, void*) override {
        // the heap reuses pages that are mapped already; from 2 MiB on, mappings have huge pages
        constexpr std::uint64_t max_heap_bytes = std::uint64_t{2} << 20;
        return keep(size_bytes < max_heap_bytes ? of_heap(size_bytes) : of_pages(size_bytes));
    }
    void release(std::byte* data, std::uint64_t, void* stream,
                 std::span<const event> events) noexcept override {
        memory_region region = take(data);
        std::shared_ptr<memory_region> kept;
        const bool is_over = stream == nullptr || stream_of(stream).forked() || stream_of(stream).done();
        try {
            kept = std::make_shared<memory_region>();
            std::swap(*kept, region);
            for_marks(events, [&](host_mark& mark) { mark.keep_until_passed(kept); });
            if (is_over) return;
            const auto mark = std::make_shared<host_mark>();
            mark->keep_until_passed(kept);
            stream_of(stream).record(mark);
        } catch (const std::bad_alloc&) {
            for_marks(events, [](const host_mark& mark) { mark.wait(); });
            if (!is_over) stream_of(stream).synchronize();
        }
    }
    std::byte* allocate_pinned(std::uint64_t size_bytes) override { return keep(of_pages(size_bytes)); }
    void release_pinned(std::byte* data, std::uint64_t) noexcept override { static_cast<void>(take(data)); }

    page_locker* locker() override { return nullptr; }

    void copy_to_device(std::byte* destination, std::span<const std::byte> source, void* stream) override {
        copy(destination, source.data(), source.size(), stream);
    }
    void copy_to_host(std::span<std::byte> destination, const std::byte* source, void* stream) override {
        copy(destination.data(), source, destination.size(), stream);
    }
    void copy_batch_to_device(std::span<const copy_range> ranges, void* stream) override {
        stream_of(stream).enqueue([copies = std::vector<copy_range>(ranges.begin(), ranges.end())] {
            for (const copy_range& range : copies) {
                if (range.size_bytes != 0) std::memcpy(range.destination, range.source, range.size_bytes);
            }
        });
    }
    void copy_strided_to_device(const strided_copy& runs, void* stream) override {
        stream_of(stream).enqueue([runs] {
            for (std::uint64_t i = 0; i < runs.run_count; ++i)
                std::memcpy(runs.destination + i * runs.run_bytes, runs.source + i * runs.stride_bytes,
                            runs.run_bytes);
        });
    }

    void convert_to_device(const device_conversion& work, void* stream) override {
        stream_of(stream).enqueue([work] { convert_on_host(work); });
    }

    void add_digest(std::span<const digest_array> arrays, std::uint64_t row_count, std::uint64_t* sum,
                    void* stream) override {
        stream_of(stream).enqueue(
            [copy = std::vector<digest_array>(arrays.begin(), arrays.end()), row_count, sum] {
                // pinflow::digest handles mapped rows itself, because it can name their file
                const std::uint64_t added = digest_of_rows(copy, row_count).value_or(0);
                std::atomic_ref(*sum).fetch_add(added, std::memory_order_relaxed);
            });
    }

    void copy_batch_to_host(std::span<const host_copy_range> ranges, void* stream) override {
        stream_of(stream).enqueue([copies = std::vector<host_copy_range>(ranges.begin(), ranges.end())] {
            for (const host_copy_range& range : copies) {
                if (range.size_bytes != 0) std::memcpy(range.destination, range.source, range.size_bytes);
            }
        });
    }
    void copy_on_device(std::byte* destination, const std::byte* source, std::uint64_t size_bytes,
                        void* stream) override {
        copy(destination, source, size_bytes, stream);
    }
    void fill_zero(std::byte* data, std::uint64_t size_bytes, void* stream) override {
        if (size_bytes == 0) return;
        stream_of(stream).enqueue([=] { std::memset(data, 0, size_bytes); });
    }
    bool reaches(const std::byte*, std::uint64_t) override { return true; }

    void prepare_rows() override { start_worker_threads(); }
    void check_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                    const error_memory& errors, void* stream) override {
        stream_of(stream).enqueue([=] { host_rows::check(ids, count, row_count, errors); });
    }
    std::uint64_t sort_scratch_bytes(std::uint64_t count, std::uint64_t, sort_kernels) override {
        return host_rows::sort_scratch_bytes(count);
    }
    void sort_rows(const row_sort& sort, void* stream) override {
        stream_of(stream).enqueue([=] { host_rows::sort(sort); });
    }
    void refuse_repeated_rows(const row_order& order, const std::uint64_t* ids, const error_memory& errors,
                              void* stream) override {
        stream_of(stream).enqueue([=] { host_rows::refuse_repeated(order, ids, errors); });
    }
    void gather_rows(const row_transfer& transfer, void* stream) override {
        stream_of(stream).enqueue([=] { host_rows::gather(transfer); });
    }
    void gather_held(const held_gather& gather, void* stream) override {
        stream_of(stream).enqueue([=] { host_rows::gather_held(gather); });
    }
    void repeat_rows(const row_transfer& transfer, void* stream) override {
        stream_of(stream).enqueue([=] { host_rows::repeat(transfer); });
    }
    void scatter_rows(const row_transfer& transfer, repeated_rows repeated, sum_type type,
                      void* stream) override {
        stream_of(stream).enqueue([=] { host_rows::scatter(transfer, repeated, type); });
    }

    void prepare_updates(rule_kind) override { start_worker_threads(); }
    void check_gradients(const gradient_check& work, void* stream) override {
        stream_of(stream).enqueue([=] { host_flat::check(work); });
    }
    void update_parameters(const flat_step& work, void* stream) override {
        stream_of(stream).enqueue([=] { host_flat::step(work); });
    }
    void prepare_records(rule_kind) override { start_worker_threads(); }
    void group_rows(const row_grouping& grouping, void* stream) override {
        stream_of(stream).enqueue([=] { host_rows::group(grouping); });
    }
    void patch_records(const record_patch& work, void* stream) override {
        stream_of(stream).enqueue([=] { host_records::patch(work); });
    }
    void update_records(const record_update& work, void* stream) override {
        stream_of(stream).enqueue([=] { host_records::update(work); });
    }
    void set_number(double* destination, double value, void* stream) override {
        stream_of(stream).enqueue([=] { *destination = value; });
    }

 private:
    static void copy(std::byte* destination, const std::byte* source, std::size_t size_bytes, void* stream) {
        if (size_bytes == 0) return;
        stream_of(stream).enqueue([=] { std::memcpy(destination, source, size_bytes); });
    }

    static memory_region of_heap(std::uint64_t size_bytes) {
        constexpr std::align_val_t alignment{256};
        void* const data = ::operator new(size_bytes, alignment, std::nothrow);
        if (data == nullptr) {
            const auto code = std::make_error_code(std::errc::not_enough_memory);
            throw system_failure(
                fmt::format("cannot allocate {} bytes of memory: {}", size_bytes, described(code)), code);
        }
        return {static_cast<std::byte*>(data), size_bytes,
                [](std::byte* begin, std::uint64_t, void*) noexcept { ::operator delete(begin, alignment); },
                nullptr};
    }

    static memory_region of_pages(std::uint64_t size_bytes) {
        // smaller allocations, such as those of a row exchange's calls, skip the check because of its cost
        constexpr std::uint64_t min_checked_bytes = std::uint64_t{8} << 20;
        if (size_bytes >= min_checked_bytes)
            require_memory(size_bytes, fmt::format("cannot allocate a buffer of {} bytes", size_bytes),
                           "use smaller batches, buffers or tables, or load fewer tensors at a time");
        return memory_region::anonymous(size_bytes);
    }

    std::byte* keep(memory_region region) {
        std::byte* const data = region.data();
        const std::lock_guard lock(mutex_);
        regions_.emplace(data, std::move(region));
        return data;
    }

    memory_region take(std::byte* data) noexcept {
        const std::lock_guard lock(mutex_);
        auto node = regions_.extract(data);
        return std::move(node.mapped());
    }

    std::mutex mutex_;
    std::unordered_map<std::byte*, memory_region> regions_;
};

}  // namespace

device_backend& host_backend() {
    static host& backend = *new host;  // never destroyed: static buffers may be destroyed later
    return backend;
}

}  // namespace pinflow::detail
