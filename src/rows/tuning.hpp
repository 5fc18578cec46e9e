#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "pinflow/stream.hpp"
#include "src/rows/transfer_planner.hpp"

/// Measures which plan is fastest for the calls of a row exchange, and remembers it for the process. It does
/// not know the exchange. Thread-safe.
namespace pinflow::detail {

/// The gathers that a measurement runs: rows of one table, by the indices that the measurement chooses
/// (random or contiguous).
struct timed_gathers {
    std::uint64_t row_count;
    stream_view stream;
    /// Enqueues a gather by a plan on `stream`, from the rows at `ids` to `rows` in device memory.
    std::function<void(const transfer_plan& plan, std::span<const std::uint64_t> ids, std::byte* rows)>
        gather_async;
    /// Waits for all of them. @throws their errors.
    std::function<void()> finish;
};

/// The number of rows that calls of `count` rows are measured with; at least 1.
std::uint64_t measured_rows(std::uint64_t row_bytes, std::uint64_t count) noexcept;

/// Measures plans for calls like this one, unless that was done before in this process. Calls are alike if
/// all of their facts are equal. Of row counts (as limited by measured_rows), table sizes and `staging_bytes`
/// only the bit widths are compared. Only one thread measures at a time; others wait.
/// Takes tenths of a second, and device memory for up to 512 MiB of rows.
/// @throws device_error, or system_failure on the host device, if memory is short; the errors of `gathers`.
void tune_call(const call_facts& call, const timed_gathers& gathers);

/// The plan that was measured for calls like this one on `device`; nothing if none was. Does not wait for a
/// measurement.
std::optional<rated_plan> tuned_plan(const call_facts& call, const device& device);

/// Whether any plan that was measured on `device` uses staging buffers. Compares all facts of `call` except
/// its direction, its number of rows, and where its indices are.
bool has_tuned_staged_plan(const call_facts& call, const device& device);

}  // namespace pinflow::detail
