#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/device.hpp"
#include "pinflow/loader/batch.hpp"
#include "pinflow/loader/sampler.hpp"
#include "pinflow/row_source.hpp"
#include "pinflow/stream.hpp"

namespace pinflow {

/// How rows travel from the file to the device.
enum class route {
    automatic,  ///< the fastest that this machine allows
    direct,     ///< no copy: on the host a view of the mapping (sequential order only; truncation can then
                ///< fault)
    copy,       ///< the copy engine reads registered pages; on the host: read from the file into the slot
    staged,     ///< gathered by the CPU into a pinned slot, then copied by the device's stream
    read,       ///< read from the file into a pinned slot, whether or not it is mapped
};

/// "auto", "direct", "copy", "staged", "read".
std::string_view to_string(route route) noexcept;

/// What happens to the samples that do not fill a batch at the end of an epoch.
enum class tail {
    partial,  ///< delivered as a smaller batch
    drop,
};

struct loader_options {
    pinflow::device device = pinflow::device::best();
    std::uint64_t batch_rows = 64;
    pinflow::order order = order::sequential;
    std::uint64_t seed = 0;
    std::uint64_t epochs = 1;
    pinflow::tail tail = tail::partial;
    pinflow::route route = route::automatic;
    /// Upper bound on the memory of all slots, in bytes. 0: 1 GiB, or two slots where that is more; where
    /// `slots` is given, what those take.
    std::uint64_t memory_bytes = 0;
    /// Batches that can exist at once, being filled, waiting or leased; at least 2. 0: from 2 to 8, by
    /// memory.
    unsigned slots = 0;
    /// Threads that gather rows; 0: one for each core. More than there are cores raise oneTBB's limit for the
    /// process while the loader lives.
    unsigned threads = 0;
    /// Upper bound on the memory that pinflow registers with CUDA in this process, as
    /// pin_options::budget_bytes. What does not fit takes the staged route.
    std::uint64_t pin_budget_bytes = 0;
};

/// Where a loader's time went, so far.
struct loader_report {
    pinflow::route route = route::automatic;
    /// One sentence: why this route.
    std::string reason;
    unsigned slots = 0;
    std::uint64_t slot_bytes = 0;
    std::uint64_t batches = 0;
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;
    /// Time spent registering mapped pages, beside the first batches; zero where none are.
    std::chrono::nanoseconds pin_time{};
    /// Time that `next` made its caller wait, by what it waited for (in the proportion in which the awaited
    /// batch spent its own time): storage, the CPU's gathering, the link to the device.
    std::chrono::nanoseconds storage_wait{};
    std::chrono::nanoseconds cpu_wait{};
    std::chrono::nanoseconds link_wait{};
    /// Time the loader stood still because the consumer, or its streams, held every slot.
    std::chrono::nanoseconds consumer_wait{};
};

/// Delivers the rows of one or several sources as batches on a device, ahead of the consumer, in memory that
/// is bounded by the slots. A pipeline (sample, gather, copy, deliver) runs on threads of its own from
/// construction on.
///
/// `next` may be called from several threads. The destructor stops the pipeline wherever it is;
/// leased batches stay valid. It does not wait for the consumer's streams (on a GPU of less than 10 GiB,
/// where pinflow has no CUDA context of its own for page-locked memory, CUDA does). In a process forked
/// later, a loader cannot be used: `next` says so, and the destructor leaves everything as it is.
class loader {
 public:
    /// A sample is the same row of every source; row counts must be equal.
    /// @throws invalid_argument for options that contradict each other or the sources; unsupported for a
    /// route that cannot work here; device_error.
    explicit loader(std::vector<std::shared_ptr<const row_source>> sources,
                    const loader_options& options = {});
    loader(loader&&) noexcept;
    loader& operator=(loader&&) noexcept;
    ~loader();

    /// The next batch, or nothing when all epochs are over. `stream` is made to wait for the data, and the
    /// slot will wait for what the stream holds when the lease ends; the calling thread waits only until the
    /// batch is on its way. An error in the pipeline is thrown here, once, after the batches before it; from
    /// then on nothing comes.
    /// @throws all_slots_leased when the consumer holds every slot; what the pipeline met: data_changed, ...
    std::optional<batch> next(stream_view stream);
    /// The same for a consumer without a stream: the data is there when it returns.
    std::optional<batch> next();

    /// The samples of one epoch. Thread-safe, as all members below.
    std::uint64_t row_count() const noexcept;
    std::uint64_t batches_per_epoch() const noexcept;
    const pinflow::device& device() const noexcept;
    loader_report report() const;

 private:
    class pipeline;
    std::unique_ptr<pipeline> pipeline_;
};

}  // namespace pinflow
