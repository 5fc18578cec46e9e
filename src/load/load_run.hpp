#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pinflow/memory.hpp"
#include "pinflow/stream.hpp"
#include "src/load/load_pages.hpp"
#include "src/load/load_plan.hpp"
#include "src/load/load_route.hpp"
#include "src/load/load_staging.hpp"
#include "src/load/load_streams.hpp"
#include "src/load/load_threads.hpp"
#include "src/load/tensor_reader.hpp"
#include "src/load/unit_queue.hpp"

namespace pinflow::detail {

/// Carries out a plan. The calling thread allocates memory and enqueues the copies from page-locked pages;
/// other threads read, decode and cast. The calling thread reads and decodes small loads, and what is left if
/// the system refuses threads.
class load_run {
 public:
    load_run(const opened_tensors& opened, const load_plan& plan, const pinflow::device& device,
             const load_options& options);
    load_run(const load_run&) = delete;
    load_run& operator=(const load_run&) = delete;
    /// Ends the threads, and waits for the copies.
    ~load_run();

    /// Allocates all blocks. On the route `staged` to a GPU, waits so that not much more memory is allocated
    /// than filled. Meanwhile it calls `work`, which does a little at a time, until it returns false. On the
    /// routes `copy` and `both`, afterwards starts the threads and begins to page-lock.
    void allocate(const std::function<bool()>& work);
    /// Waits until all is done.
    /// @throws the first error of any thread.
    void finish();

    std::byte* address_of(std::size_t block) const { return addresses_[block]; }
    const std::shared_ptr<loaded_block>& block(std::size_t index) const { return blocks_[index]; }
    load_report report() const;

 private:
    void announce_decoding() const;
    bool is_decoded_alone();
    void begin_pages();
    void start_threads(unsigned count) noexcept;
    void start_thread();
    void start_others() noexcept;
    void join_threads() noexcept;
    void run_thread() noexcept;
    void work_on_units(const std::function<void()>& after_each);
    void stage(const load_unit& unit, tensor_reader& reader, load_buffers& buffers);
    void stage_with_gaps(const load_piece& piece, tensor_reader& reader, load_buffers& buffers);
    void decode(const load_unit& unit, tensor_reader& reader, load_buffers& buffers);
    std::uint64_t decode_step_bytes(const load_job& job) const;
    void fill(const load_unit& unit, tensor_reader& reader);
    void copy_from_pages();
    bool has_short_runs(const load_unit& unit) const;
    std::vector<copy_range> ranges_of(const load_unit& unit) const;
    static bool has_short_pieces(std::span<const copy_range> ranges);
    void copy_short_runs(const load_unit& unit, const copy_range& span);
    void stage_here(const load_unit& unit);
    void stage_here(const load_piece& piece);
    load_buffers* own_buffers();
    std::size_t block_of(const load_piece& piece) const { return plan_.jobs[piece.job].block; }
    std::byte* start_of(const load_job& job);
    std::byte* target_of(const load_piece& piece);
    std::byte* wait_for_block(std::size_t block);
    void allocate_block(std::size_t index);
    std::shared_ptr<loaded_block> new_block(std::size_t index) const;
    void wait_until_filled(std::uint64_t allocated_bytes, const std::function<bool()>& work);
    std::shared_ptr<const memory_region> map_privately(std::size_t file);
    /// Calls options.progress, but not more often than every progress_interval.
    void say_progress();
    void call_progress() const;
    void fail(std::exception_ptr failure) noexcept;
    void rethrow_failure();
    void wait_for_threads();
    bool wants_pages() const { return way_.route == load_route::copy || way_.route == load_route::both; }
    bool is_on_host() const { return device_.kind() == device_kind::host; }

    const opened_tensors& opened_;
    const load_plan& plan_;
    pinflow::device device_;
    const load_options& options_;
    chosen_route way_;

    load_stream own_stream_;
    stream_view copies_;
    std::vector<std::shared_ptr<loaded_block>> blocks_;
    std::vector<std::atomic<std::byte*>> addresses_;                   ///< null until allocated
    std::vector<std::shared_ptr<const memory_region>> private_pages_;  ///< for each file, on the host
    std::optional<load_pages> pages_;
    std::string pages_reason_;     ///< why there are none
    bool rest_is_staged_ = false;  ///< because some pages cannot be registered
    // for the calling thread, which stages what is too short for the copy engine
    std::optional<load_buffers> own_buffers_;
    bool own_buffers_failed_ = false;
    tensor_reader own_reader_;
    std::atomic<std::uint64_t> copied_bytes_ = 0;
    std::atomic<std::uint64_t> staged_bytes_ = 0;

    unit_queue queue_;
    std::mutex mutex_;
    std::condition_variable changed_;  ///< blocks were allocated, a thread has ended, or `stopped_`
    std::exception_ptr failure_;
    std::exception_ptr buffer_failure_;  ///< of a thread that had no staging buffers
    std::atomic<bool> stopped_ = false;
    unsigned wanted_threads_ = 0;   ///< to start in all
    unsigned started_threads_ = 0;  ///< also those that have ended
    unsigned running_ = 0;
    unsigned max_running_ = 0;
    unsigned waiting_ = 0;  ///< threads that wait for a block
    std::chrono::steady_clock::time_point said_;
    std::deque<load_thread> threads_;  ///< an entry is empty if its thread could not start
};

}  // namespace pinflow::detail
