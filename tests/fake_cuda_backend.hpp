#pragma once

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "pinflow/device.hpp"
#include "src/device/backend.hpp"

/// A fake CUDA device: the host backend under a device index of its own that no machine has, so that no
/// plan has been measured for it. Tests override the functions that they observe.
class fake_cuda_backend : public pinflow::detail::device_backend {
 public:
    /// `device` has no public constructor from a backend, but it is only a reference to one.
    pinflow::device device() { return std::bit_cast<pinflow::device>(static_cast<device_backend*>(this)); }

    /// The stream that counts as one that is being captured into a graph.
    void* captured = nullptr;

    pinflow::device_kind kind() const noexcept override { return pinflow::device_kind::cuda; }
    int index() const noexcept override { return index_; }
    std::string model() const override { return host_.model(); }
    pinflow::device::memory_sizes memory() const override { return host_.memory(); }

    void* create_stream() override { return host_.create_stream(); }
    void finish_stream(void* stream) noexcept override { host_.finish_stream(stream); }
    void destroy_stream(void* stream) noexcept override { host_.destroy_stream(stream); }
    void synchronize_stream(void* stream) override { host_.synchronize_stream(stream); }
    bool stream_done(void* stream) override { return host_.stream_done(stream); }
    bool is_capturing(void* stream) override { return stream == captured; }
    void enqueue_host_function(void* stream, std::function<void()> work) override {
        host_.enqueue_host_function(stream, std::move(work));
    }
    void* create_event() override { return host_.create_event(); }
    void destroy_event(void* event) noexcept override { host_.destroy_event(event); }
    void record_event(void* event, void* stream) override { host_.record_event(event, stream); }
    void stream_wait_event(void* stream, void* event) override { host_.stream_wait_event(stream, event); }
    bool synchronize_event_for(void* event, std::chrono::microseconds timeout) override {
        return host_.synchronize_event_for(event, timeout);
    }
    void synchronize_event(void* event) override { host_.synchronize_event(event); }
    bool event_done(void* event) override { return host_.event_done(event); }

    std::byte* allocate(std::uint64_t size_bytes, void* stream) override {
        return host_.allocate(size_bytes, stream);
    }
    void release(std::byte* data, std::uint64_t size_bytes, void* stream,
                 std::span<const pinflow::event> events) noexcept override {
        host_.release(data, size_bytes, stream, events);
    }
    std::byte* allocate_pinned(std::uint64_t size_bytes) override {
        return host_.allocate_pinned(size_bytes);
    }
    void release_pinned(std::byte* data, std::uint64_t size_bytes) noexcept override {
        host_.release_pinned(data, size_bytes);
    }

    void copy_to_device(std::byte* destination, std::span<const std::byte> source, void* stream) override {
        host_.copy_to_device(destination, source, stream);
    }
    void copy_to_host(std::span<std::byte> destination, const std::byte* source, void* stream) override {
        host_.copy_to_host(destination, source, stream);
    }
    void copy_batch_to_device(std::span<const pinflow::copy_range> ranges, void* stream) override {
        host_.copy_batch_to_device(ranges, stream);
    }
    void copy_strided_to_device(const pinflow::detail::strided_copy& runs, void* stream) override {
        host_.copy_strided_to_device(runs, stream);
    }
    void convert_to_device(const pinflow::detail::device_conversion& work, void* stream) override {
        host_.convert_to_device(work, stream);
    }
    void add_digest(std::span<const pinflow::detail::digest_array> arrays, std::uint64_t row_count,
                    std::uint64_t* sum, void* stream) override {
        host_.add_digest(arrays, row_count, sum, stream);
    }
    void copy_batch_to_host(std::span<const pinflow::host_copy_range> ranges, void* stream) override {
        host_.copy_batch_to_host(ranges, stream);
    }
    void copy_on_device(std::byte* destination, const std::byte* source, std::uint64_t size_bytes,
                        void* stream) override {
        host_.copy_on_device(destination, source, size_bytes, stream);
    }
    void fill_zero(std::byte* data, std::uint64_t size_bytes, void* stream) override {
        host_.fill_zero(data, size_bytes, stream);
    }
    pinflow::detail::page_locker* locker() override { return host_.locker(); }
    bool reaches(const std::byte* data, std::uint64_t size_bytes) override {
        return host_.reaches(data, size_bytes);
    }

    void prepare_rows() override { host_.prepare_rows(); }
    void check_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                    const pinflow::detail::error_memory& errors, void* stream) override {
        host_.check_rows(ids, count, row_count, errors, stream);
    }
    std::uint64_t sort_scratch_bytes(std::uint64_t count, std::uint64_t row_count,
                                     pinflow::detail::sort_kernels kernels) override {
        return host_.sort_scratch_bytes(count, row_count, kernels) + 12 * count + 1;
    }
    void sort_rows(const pinflow::detail::row_sort& sort, void* stream) override {
        host_.fill_zero(sort.scratch, sort.scratch_bytes, stream);  // as CUDA does, it writes all of it
        host_.sort_rows(sort, stream);
    }
    void refuse_repeated_rows(const pinflow::detail::row_order& order, const std::uint64_t* ids,
                              const pinflow::detail::error_memory& errors, void* stream) override {
        host_.refuse_repeated_rows(order, ids, errors, stream);
    }
    void gather_rows(const pinflow::detail::row_transfer& transfer, void* stream) override {
        host_.gather_rows(transfer, stream);
    }
    void group_rows(const pinflow::detail::row_grouping& grouping, void* stream) override {
        host_.group_rows(grouping, stream);
    }
    void gather_held(const pinflow::detail::held_gather& gather, void* stream) override {
        host_.gather_held(gather, stream);
    }
    void repeat_rows(const pinflow::detail::row_transfer& transfer, void* stream) override {
        host_.repeat_rows(transfer, stream);
    }
    void scatter_rows(const pinflow::detail::row_transfer& transfer, pinflow::detail::repeated_rows repeated,
                      pinflow::detail::sum_type type, void* stream) override {
        host_.scatter_rows(transfer, repeated, type, stream);
    }
    void prepare_updates(pinflow::detail::rule_kind rule) override { host_.prepare_updates(rule); }
    void check_gradients(const pinflow::detail::gradient_check& work, void* stream) override {
        host_.check_gradients(work, stream);
    }
    void update_parameters(const pinflow::detail::flat_step& work, void* stream) override {
        host_.update_parameters(work, stream);
    }
    void prepare_records(pinflow::detail::rule_kind rule) override { host_.prepare_records(rule); }
    void patch_records(const pinflow::detail::record_patch& work, void* stream) override {
        host_.patch_records(work, stream);
    }
    void update_records(const pinflow::detail::record_update& work, void* stream) override {
        host_.update_records(work, stream);
    }
    void set_number(double* destination, double value, void* stream) override {
        host_.set_number(destination, value, stream);
    }

 private:
    static int next_index() {
        static int last = 1000;
        return ++last;
    }

    pinflow::detail::device_backend& host_ = pinflow::detail::host_backend();
    int index_ = next_index();
};
