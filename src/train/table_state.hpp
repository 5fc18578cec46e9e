#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pinflow/train/embedding_table.hpp"
#include "src/device/row_work.hpp"
#include "src/train/device_grouper.hpp"
#include "src/train/prefetch_threads.hpp"
#include "src/train/rule_setup.hpp"
#include "src/train/table_step.hpp"

namespace pinflow::detail {
enum class row_direction : std::uint8_t;
}

namespace pinflow {

/// What a table owns; leases share it. Each member except `drop` and `count_rows` is called with call_mutex
/// locked, by one thread at a time. Any thread may call these two.
///
/// A GPU that reaches the storage in place groups many ids itself. Otherwise, prefetched steps with many ids
/// are prepared by other threads: they group the ids, then lock call_mutex while they enqueue the gather.
///
/// Ids are grouped on one stream, gathers run on another and writes on a third, so that the rows of a
/// prefetched step may be gathered while an earlier step is computed or written. The gather then reads old
/// records, and on a GPU half-written ones. Each fetch replaces them with the records of the commits that its
/// gather may have missed. Until then, these stay in device memory. Each commit does the same with the
/// records that other leases have committed since its fetch.
struct embedding_table::state {
    state(embedding_options chosen, const pinflow::device& where);
    ~state();

    void prefetch(row_ids ids);
    detail::table_step& fetch(row_ids ids, stream_view stream);
    void cancel_prefetches();
    void commit(detail::table_step& step, const std::byte* gradients, const pinflow::dtype& type,
                stream_view stream);
    void write_back(detail::table_step& step, stream_view stream);
    void drop(detail::table_step& step, stream_view stream) noexcept;
    void set_rate(double rate, stream_view stream);
    void read_weights(row_ids ids, std::span<std::byte> destination);
    void write_weights(row_ids ids, std::span<const std::byte> weights);
    void grow(std::uint64_t row_count);
    void export_weights(const std::filesystem::path& path);
    void import_weights(const std::filesystem::path& path);
    void save(const std::filesystem::path& path);
    void load(const std::filesystem::path& path);
    void check_stream(stream_view stream) const;
    void check_gradients(const detail::table_step& step, const std::byte* gradients,
                         const pinflow::dtype& type) const;
    /// The number of rows of a lease. May wait until the device has grouped the ids.
    static std::uint64_t count_rows(const detail::table_step& step);
    void copy_ids_to_host(detail::table_step& step);
    void synchronize();

    embedding_options options;
    pinflow::device device;
    detail::record_layout layout;
    detail::rule_layout rule;
    std::mutex call_mutex;
    const ::pid_t process = ::getpid();

 private:
    /// A GPU groups this number of ids and more. From Python, the CPU is faster with 1024 if nothing is
    /// prefetched (samples/bench/NOTEBOOK.md, 2026-11-28).
    static constexpr std::uint64_t min_device_grouped_ids = 2048;
    /// Otherwise, from this number of ids on, prefetch leaves the grouping to other threads. Not tuned.
    static constexpr std::uint64_t min_threaded_ids = 8192;

    void make_storage();
    void initialise();
    void fill(std::uint64_t first_row, std::span<std::byte> records) const;
    void upload_rule();
    void exchange_rows(row_table rows);
    void check_in_host_memory(row_ids ids) const;
    void check_inside(row_ids ids) const;
    void throw_wrong_ids(detail::table_step& step);
    void throw_wrong_ids();
    void check_ids(row_ids ids) const;
    void check_weights(row_ids ids, std::span<const std::byte> weights) const;
    void begin_change();
    std::span<std::byte> host_records() noexcept;
    template <typename Work>
    void for_records(bool changes, Work work);
    detail::table_step::phase phase_of(const detail::table_step& step) const;
    void set_phase(detail::table_step& step, detail::table_step::phase phase) noexcept;
    void free_dropped();
    std::string uses_of_steps() const;
    detail::table_step& take_step();
    detail::table_step& begin_step(row_ids ids);
    void group(detail::table_step& step, detail::row_grouper& grouper) const;
    void enqueue_groups(detail::table_step& step);
    void gather(detail::table_step& step);
    void prepare(detail::table_step& step, detail::row_grouper& grouper) noexcept;
    void wait_for_grouping();
    void patch(detail::table_step& step, stream_view stream);
    void write(detail::table_step& step, stream_view stream);
    void scatter(const detail::table_step& step);
    void forget_newer(detail::table_step& step) noexcept;
    unsigned step_count() const noexcept { return 2 + 2 * options.look_ahead; }
    bool is_on_host() const { return device.kind() == device_kind::host; }
    /// How many rows of a step lie in device memory: the first ones.
    std::uint64_t device_count(const detail::table_step& step) const;
    /// The ids of the other rows, counted from the first row of the exchange.
    std::span<const std::uint64_t> exchanged_ids(const detail::table_step& step);
    detail::row_transfer transfer_of(const detail::table_step& step, std::uint64_t count) const;
    // for ids that the device groups
    void check_device_ids(row_ids ids) const;
    bool can_group_on_device() const;
    void make_grouper();
    void group_on_device(const detail::table_step& step);
    template <typename Move>
    void move_ranges(const detail::table_step& step, detail::row_direction direction, Move move);
    void gather_ranges(const detail::table_step& step);
    void scatter_ranges(const detail::table_step& step);

    mutable std::mutex mutex_;  ///< of the phases
    stream groupings_, gathers_, writes_;
    stream lists_;  ///< copies ids to host memory
    event rate_set_;
    device_buffer first_rows_;
    device_buffer rule_memory_;
    const detail::rule_numbers* numbers_ = nullptr;  ///< in rule_memory_
    std::optional<row_exchange> exchange_;           ///< of the rows from device_rows on
    bool groups_on_device_ = false;                  ///< whether the device groups many ids in host memory
    /// Made by the first fetch of ids in device memory, unless groups_on_device_ is set.
    std::optional<detail::device_grouper> device_grouper_;
    std::vector<std::uint64_t> exchanged_;
    detail::row_grouper grouper_;  ///< of the caller's thread
    std::vector<std::unique_ptr<detail::table_step>> steps_;
    std::vector<detail::table_step*> prefetched_;
    std::vector<detail::table_step*> leased_;     ///< also those that were dropped meanwhile
    std::vector<detail::table_step*> committed_;  ///< oldest first
    std::condition_variable_any grouped_;         ///< a step is not being grouped any more
    std::optional<detail::prefetch_threads> threads_;
};

struct embedding_lease::state {
    state(std::shared_ptr<embedding_table::state> owner, detail::table_step& leased, stream_view from)
        : table(std::move(owner)), step(&leased), stream(from) {}
    state(const state&) = delete;
    state& operator=(const state&) = delete;
    ~state() {
        if (step != nullptr) table->drop(*step, stream);
    }

    std::shared_ptr<embedding_table::state> table;
    detail::table_step* step;  ///< null once committed or written back
    stream_view stream;
};

}  // namespace pinflow
