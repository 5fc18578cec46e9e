#include "src/rows/exchange_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/enumerators.hpp"
#include "src/core/memory_limits.hpp"
#include "src/device/backend.hpp"
#include "src/rows/exchange_checks.hpp"

namespace pinflow::detail {

namespace {

/// The maximum size of a staging buffer, unless a row is longer: large enough for the copy engine, small
/// enough to overlap work.
constexpr std::uint64_t max_piece_bytes = std::uint64_t{8} << 20;
constexpr std::uint64_t min_buffers = 2;
constexpr std::uint64_t max_buffers = 16;

/// Positions of rows in a call have 32 bits.
constexpr std::uint64_t max_rows_of_call = std::numeric_limits<std::uint32_t>::max();

/// Returns the options.
/// @throws invalid_argument for values that are out of range.
row_exchange_options checked(const row_exchange_options& options) {
    check_enumerator(options.route, row_route::hybrid, "row_route");
    const bool is_share = options.staged_share >= 0 && options.staged_share < 1;
    if (!is_share) {
        throw invalid_argument(fmt::format(
            "staged_share of a row_exchange must be at least 0 and below 1, not {}; 0 lets the planner "
            "choose",
            options.staged_share));
    }
    if (options.max_batch_rows == 0 || options.max_batch_rows > max_rows_of_call) {
        throw invalid_argument(fmt::format("max_batch_rows of a row_exchange must be from 1 to {}, not {}",
                                           max_rows_of_call, options.max_batch_rows));
    }
    constexpr unsigned max_calls = 4096;
    if (options.max_calls_in_flight == 0 || options.max_calls_in_flight > max_calls) {
        throw invalid_argument(
            fmt::format("max_calls_in_flight of a row_exchange must be from 1 to {}, not {}", max_calls,
                        options.max_calls_in_flight));
    }
    return options;
}

/// Limits `staging_bytes` to an eighth of the available memory. On the host device, the two staging rings
/// together take up to four times the result, and more only if a row is longer than half of it.
std::uint64_t within_memory(std::uint64_t staging_bytes) {
    return std::min(staging_bytes, read_available_memory().size_bytes / 8);
}

/// The number of calls in flight, whose memory is limited to an eighth of the available memory. If fewer than
/// two fit, it is two, or less if the options say so.
unsigned calls_within_memory(const row_exchange_options& options) {
    constexpr std::uint64_t min_calls = 2;
    const std::uint64_t fitting =
        within_memory(~std::uint64_t{0}) / call_memory::size_bytes(options.max_batch_rows);
    return static_cast<unsigned>(
        std::min<std::uint64_t>(options.max_calls_in_flight, std::max(fitting, min_calls)));
}

/// The device memory to reserve for the order of a call's rows. On the host device, calls allocate it.
std::uint64_t reserved_scratch_bytes(const exchange_setup& setup) {
    if (setup.device.kind() == device_kind::host) return 0;
    return row_call::max_scratch_bytes(setup, setup.options.max_batch_rows);
}

void wait_quietly(stream_view stream) noexcept {
    try {
        stream.synchronize();
    } catch (...) {
        return;  // a failed device runs nothing any more
    }
}

}  // namespace

std::uint64_t exchange_setup::staging_buffer_bytes() const noexcept {
    const std::uint64_t row_bytes = std::max<std::uint64_t>(table.row_size_bytes(), 1);
    const std::uint64_t wanted_bytes = std::min(max_piece_bytes, staging_bytes / min_buffers);
    return std::max(wanted_bytes / row_bytes, std::uint64_t{1}) * row_bytes;
}

exchange_state::exchange_state(row_table table, pinflow::device device, const row_exchange_options& options)
    : setup_(std::move(table), device, checked(options), within_memory(options.staging_bytes)),
      calls_(std::make_shared<calls_in_flight>(device, options.max_batch_rows, calls_within_memory(options),
                                               reserved_scratch_bytes(setup_), options.device_memory)),
      workers_(options.threads),
      arena_(static_cast<int>(workers_.count())),
      own_stream_(synchronous_stream(device)),
      preparing_(device),
      direct_(setup_.is_file_on_host() ? make_file_transfer(setup_, arena_) : make_kernel_transfer(setup_)),
      engine_(make_engine_transfer(setup_)),
      staged_(make_staged_transfer(setup_, rings_, arena_)) {
    setup_.threads = static_cast<unsigned>(arena_.max_concurrency());
    device.backend().prepare_rows();
    page_lock();
    const bool needs_reach = options.route == row_route::direct || options.route == row_route::copy ||
                             options.route == row_route::hybrid;
    if (needs_reach && !setup_.not_reached_reason.empty()) {
        throw unsupported(fmt::format("the route {} cannot be taken: {}", to_string(options.route),
                                      setup_.not_reached_reason));
    }
    if (may_stage()) reserve_staging();
}

void exchange_state::page_lock() {
    const row_table& table = setup_.table;
    const row_exchange_options& options = setup_.options;
    // a registration of a file's pages by other code does not count: it may end
    const bool may_go = setup_.is_file_backed() && setup_.device.kind() != device_kind::host;
    if (!may_go && setup_.device.backend().reaches(table.data(), table.size_bytes())) return;
    if (options.route == row_route::staged) {
        setup_.not_reached_reason = "the staged route was requested";
        return;
    }
    pages_.emplace(
        std::vector<pin_range>{{{table.data(), table.size_bytes()}, table.description(), table.owner()}},
        setup_.device,
        pin_options{
            .budget_bytes = options.pin_budget_bytes, .limit = options.pin_limit, .allow_partial = false});
    if (!pages_->wait()) {
        setup_.not_reached_reason =
            fmt::format("{} is not page-locked: {}", table.description(), pages_->report().reason);
        pages_.reset();  // registering a part of the table is useless
    }
}

void exchange_state::reserve_staging() {
    const std::uint64_t buffers = setup_.staging_bytes / setup_.staging_buffer_bytes();
    rings_.reserve(setup_.device, setup_.staging_buffer_bytes(),
                   static_cast<unsigned>(std::clamp(buffers, min_buffers, max_buffers)),
                   setup_.options.device_memory);
}

void exchange_state::check_source() const {
    if (setup_.table.source()) setup_.table.source()->check_unchanged();
}

void exchange_state::check() {
    calls_->check();
    check_source();
}

// ---- a call ----------------------------------------------------------------------------------------------

void exchange_state::run(row_direction direction, const row_batch& only, duplicate_policy policy) {
    const call_request request{.direction = direction,
                               .batches = {&only, 1},
                               .policy = policy,
                               .stream = own_stream_,
                               .is_listed = false};
    const std::uint64_t count = only.ids.size();
    std::shared_ptr<calls_in_flight> calls = calls_;
    if (count > max_rows_of_call)
        throw invalid_argument(
            fmt::format("a batch of {} rows is too large: a call takes up to {}", count, max_rows_of_call));
    if (count > calls_->max_rows()) {
        check_request(setup_, request);
        calls = std::make_shared<calls_in_flight>(setup_.device, count, 1, 0, setup_.options.device_memory);
    }
    try {
        const pending_calls pending = enqueue(request, *calls);
        own_stream_.synchronize();
        for (const std::shared_ptr<pending_call>& call : pending)
            calls->check(*call);
    } catch (...) {
        wait_quietly(own_stream_);  // the caller may free its memory when the call throws
        throw;
    }
    check_source();
}

exchange_state::pending_calls exchange_state::enqueue(const call_request& request) {
    return enqueue(request, *calls_);
}

/// Enqueues batches by `plan`, or by the planner's plan if it is null.
exchange_state::pending_calls exchange_state::enqueue(const call_request& request, calls_in_flight& calls,
                                                      const transfer_plan* plan) {
    check_source();
    const std::vector<call_request> requests = split(request, calls);
    check_request(setup_, request);
    if (requests.empty()) return {};
    std::vector<taken_memory> memory = calls.take(request.stream, requests.size());
    std::vector<row_call> row_calls;
    row_calls.reserve(requests.size());
    for (std::size_t i = 0; i < requests.size(); ++i)
        row_calls.emplace_back(setup_, preparing_, calls, requests[i], std::move(memory[i]));
    check_ids(setup_.table, row_calls);  // of all calls, before any row is touched
    pending_calls pending;
    pending.reserve(row_calls.size());
    if (setup_.table.row_size_bytes() == 0) return pending;
    const std::unique_lock lock = locks_.lock(request.stream);
    for (row_call& call : row_calls) {
        enqueue(call, plan != nullptr
                          ? *plan
                          : plan_of({request.direction, call.count(),
                                     call.has_device_ids() ? ids_in::device_memory : ids_in::host_memory})
                                .plan);
        if (call.has_errors()) pending.push_back(call.errors());
    }
    return pending;
}

/// Divides batches into requests that each fit into one call.
std::vector<call_request> exchange_state::split(const call_request& request,
                                                const calls_in_flight& calls) const {
    std::vector<call_request> requests;
    std::uint64_t count = 0;
    for (std::size_t i = 0; i < request.batches.size(); ++i) {
        const std::uint64_t added = request.batches[i].ids.size();
        if (added > calls.max_rows()) {
            throw invalid_argument(fmt::format(
                "a batch of {} rows is too large for this exchange, which takes up to {}: exchange "
                "fewer at a time, or raise row_exchange_options::max_batch_rows in C++",
                added, calls.max_rows()));
        }
        const bool is_full = requests.empty() || requests.back().batches.size() == row_parts::max ||
                             added > calls.max_rows() - count;
        if (is_full) {
            if (added == 0) continue;
            requests.push_back(request);
            requests.back().batches = request.batches.subspan(i, 0);
            count = 0;
        }
        call_request& last = requests.back();
        last.batches = {last.batches.data(), last.batches.size() + 1};
        count += added;
    }
    if (requests.size() > 1 && request.direction == row_direction::scatter &&
        request.policy != duplicate_policy::last) {
        throw unsupported(fmt::format(
            "{} batches make {} calls, which a scatter allows only with duplicate_policy::last: a call takes "
            "up to {} batches and {} rows (row_exchange_options::max_batch_rows)",
            request.batches.size(), requests.size(), row_parts::max, calls.max_rows()));
    }
    if (requests.size() > calls.max_together()) {
        throw invalid_argument(fmt::format(
            "a group of {} batches makes {} calls, but this exchange takes up to {} at once: raise "
            "max_batch_rows ({} now) or max_calls_in_flight in row_exchange_options, or pass fewer batches",
            request.batches.size(), requests.size(), calls.max_together(), calls.max_rows()));
    }
    return requests;
}

call_transfer& exchange_state::transfer_of(const transfer_part& part) const {
    if (part.how == transfer::copy_engine) return *engine_;
    return part.how == transfer::staged ? *staged_ : *direct_;
}

void exchange_state::enqueue(row_call& call, transfer_plan plan) {
    call.begin(std::move(plan));
    const std::vector<transfer_part>& parts = call.plan().parts;
    const auto needs_order = [&](const transfer_part& part) { return transfer_of(part).needs_order(call); };
    const bool has_order = std::ranges::any_of(parts, needs_order);
    if (has_order) call.prepare_order();
    for (const transfer_part& part : parts)
        transfer_of(part).begin(call);
    std::uint64_t begin = 0;
    for (const transfer_part& part : parts) {
        const bool is_last = &part == &parts.back();
        const auto rows = static_cast<std::uint64_t>(part.share * static_cast<double>(call.count()));
        const std::uint64_t end = is_last ? call.count() : std::min(begin + rows, call.count());
        if (begin < end) transfer_of(part).move(call, begin, end);
        begin = end;
    }
    if (has_order && call.is_gather() && call.transfer().order.sorted)
        setup_.device.backend().repeat_rows(call.transfer(), call.stream().native_handle());
    call.finish();
}

}  // namespace pinflow::detail
