#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"
#include "src/load/load_run.hpp"

// The part of a load that makes the memory of its tensors.

namespace pinflow::detail {

namespace {

/// If more of the allocated memory than this is not filled yet, the next allocation waits for the threads.
/// While CUDA allocates, threads cannot enqueue copies, so making all allocations at once would leave the
/// link idle.
constexpr std::uint64_t max_ahead_bytes = std::uint64_t{512} << 20;
constexpr std::chrono::microseconds allocation_interval{200};

}  // namespace

void load_run::allocate(const std::function<bool()>& work) {
    std::uint64_t allocated_bytes = 0;
    for (std::size_t index = 0; index < blocks_.size() && !stopped_; ++index) {
        allocate_block(index);
        allocated_bytes += plan_.blocks[index].size_bytes;
        if (!wants_pages() && !is_on_host()) wait_until_filled(allocated_bytes, work);
    }
    if (is_on_host()) start_threads(way_.threads);
    if (!wants_pages()) return;
    // After all allocations: each takes five times as long beside copies, and waits during registrations.
    start_threads(way_.threads);
    begin_pages();  // takes long in the first load of a process
}

/// Works or waits while more than max_ahead_bytes of the allocated memory are not filled. Returns at once if
/// a thread waits for a block, or if the load is stopped or all threads have ended.
void load_run::wait_until_filled(std::uint64_t allocated_bytes, const std::function<bool()>& work) {
    bool has_work = true;
    while (allocated_bytes > staged_bytes_ + max_ahead_bytes) {
        say_progress();
        if (has_work) has_work = work();
        std::unique_lock lock(mutex_);
        if (stopped_ || running_ == 0 || waiting_ > 0) return;
        if (!has_work) changed_.wait_for(lock, allocation_interval);
    }
}

void load_run::allocate_block(std::size_t index) {
    const load_block& planned = plan_.blocks[index];
    std::byte* address = planned.destination;
    if (planned.mapped) {
        const std::size_t file = planned.mapped->file;
        const auto pages = map_privately(file);
        blocks_[index] = std::make_shared<loaded_block>(pages);
        address = pages->data() + (planned.mapped->offset_bytes - plan_.mapped[file].begin_bytes);
    } else if (address == nullptr) {
        blocks_[index] = new_block(index);
        address = blocks_[index]->bytes().data();
    }
    {
        const std::scoped_lock lock(mutex_);
        addresses_[index] = address;
    }
    changed_.notify_all();
}

/// @throws system_failure, naming the first tensor of the block; what the device or options.resource throws.
std::shared_ptr<loaded_block> load_run::new_block(std::size_t index) const {
    try {
        return std::make_shared<loaded_block>(
            device_buffer(plan_.blocks[index].size_bytes, copies_, options_.resource));
    } catch (const system_failure& failure) {
        const auto first = std::ranges::find(plan_.jobs, index, &load_job::block);
        throw system_failure(
            fmt::format("cannot load {}: {}", label_of(opened_, first->tensor), failure.what()),
            failure.code());
    }
}

std::shared_ptr<const memory_region> load_run::map_privately(std::size_t file) {
    auto& pages = private_pages_[file];
    if (!pages) {
        const input_file& opened = *opened_.files[file];
        const descriptor_lease lease = opened.lease_descriptor();
        const load_plan::mapped_range& range = plan_.mapped[file];
        const std::uint64_t size_bytes = range.end_bytes - range.begin_bytes;
        pages = std::make_shared<const memory_region>(
            system::map_privately(lease.get(), opened.path(), range.begin_bytes, size_bytes), size_bytes,
            [](std::byte* data, std::uint64_t bytes, void*) noexcept {
                system::unmap(data, bytes);
                uncount_mapping();
            });
        count_mapping();
    }
    return pages;
}

std::byte* load_run::wait_for_block(std::size_t block) {
    if (std::byte* const address = addresses_[block]) return address;
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.wait(lock, [&] { return addresses_[block] != nullptr || stopped_; });
    --waiting_;
    return addresses_[block];
}

/// Where a job begins in memory, once it has been allocated. Null if the load is stopped.
std::byte* load_run::start_of(const load_job& job) {
    std::byte* const address = wait_for_block(job.block);
    return address == nullptr ? nullptr : address + job.block_offset_bytes;
}

std::byte* load_run::target_of(const load_piece& piece) {
    std::byte* const start = start_of(plan_.jobs[piece.job]);
    return start == nullptr ? nullptr : start + piece.begin_bytes;
}

}  // namespace pinflow::detail
