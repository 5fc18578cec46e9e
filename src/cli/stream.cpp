#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/loader/digest.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/json.hpp"
#include "src/cli/open.hpp"
#include "src/cli/output.hpp"
#include "src/cli/stop_request.hpp"
#include "src/cli/stream_arguments.hpp"
#include "src/core/memory_limits.hpp"

namespace pinflow::cli {

namespace {

using clock = std::chrono::steady_clock;

double seconds_between(clock::time_point from, clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

// ---- opening ----------------------------------------------------------------------------------------------

/// Whether the files are probably a pattern that the shell has expanded: many, or some whose names differ in
/// numbers only.
bool are_probably_parts(const std::vector<std::string>& files) {
    constexpr std::size_t many = 16;
    constexpr std::size_t some = 3;
    const auto without_digits = [](std::string name) {
        std::erase_if(name, [](char character) { return character >= '0' && character <= '9'; });
        return name;
    };
    const std::string first = without_digits(files.front());
    return files.size() >= many ||
           (files.size() >= some && std::ranges::all_of(files, [&](const std::string& file) {
                return without_digits(file) == first;
            }));
}

void take_from_memory(const row_source& source, loader_options& options) {
    const std::uint64_t taken_bytes = source.memory_bytes();
    if (taken_bytes >= options.memory_bytes) {
        throw usage_error(
            fmt::format("--memory is too small: decoding {} takes {} bytes, and {} are available for it "
                        "and the slots",
                        source.description(), taken_bytes, options.memory_bytes));
    }
    options.memory_bytes -= taken_bytes;
}

/// Opens the arrays of a sample. If --memory is given, the memory for decoding is subtracted from
/// `options.memory_bytes`, so that the slots get the rest.
std::vector<std::shared_ptr<const row_source>> open_all(const std::vector<std::string>& files, bool stack,
                                                        loader_options& options) {
    open_options opening;
    opening.stack = stack;
    const std::uint64_t whole_bytes =
        options.memory_bytes > 0 ? options.memory_bytes : pinflow::detail::read_available_memory().size_bytes;
    const std::uint64_t part_bytes = whole_bytes / 2 / files.size();
    opening.memory_bytes = options.memory_bytes > 0 ? part_bytes : std::min(opening.memory_bytes, part_bytes);
    std::vector<std::shared_ptr<const row_source>> sources;
    for (const std::string& file : files) {
        sources.push_back(open_source_rows(file, opening));
        if (options.memory_bytes > 0) take_from_memory(*sources.back(), options);
        if (sources.back()->row_count() != sources.front()->row_count()) {
            const std::string hint =
                are_probably_parts(files) || are_probably_parts({files.begin(), files.end() - 1})
                    ? fmt::format("; {}", quote_pattern)
                    : "";
            throw invalid_argument(fmt::format(
                "the arrays of a sample need the same number of rows: '{}' has {}, but '{}' has {}{}",
                files.front(), sources.front()->row_count(), file, sources.back()->row_count(), hint));
        }
    }
    return sources;
}

loader make_loader(const std::vector<std::shared_ptr<const row_source>>& sources,
                   const stream_arguments& arguments) {
    try {
        return loader(sources, arguments.options);
    } catch (const state_mismatch& failure) {
        throw state_mismatch(fmt::format("'{}': {}", arguments.load_state, failure.what()));
    } catch (const invalid_argument& failure) {  // the sources were checked above: an option is wrong
        throw usage_error(failure.what());
    }
}

// ---- streaming --------------------------------------------------------------------------------------------

struct stream_result {
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;
    std::uint64_t batches = 0;
    double seconds = 0;
    std::vector<double> epoch_seconds;  ///< of each epoch that this run streamed, also in part
    std::uint64_t digest = 0;
    std::string stopped_by;  ///< "max-batches", "SIGINT", "SIGTERM"; empty if all epochs ended

    double rows_per_second() const { return seconds > 0 ? static_cast<double>(rows) / seconds : 0; }
    double gbps() const { return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0; }
};

/// Records on its own stream when the device has consumed everything enqueued on the consumer's streams so
/// far. Neither they nor the calling thread wait for it.
class consumption_clock {
 public:
    explicit consumption_clock(const device& device) : mark_(device), stream_(device) {}

    /// Not to be called from several threads.
    template <typename Streams>
    void mark(const Streams& streams, std::uint64_t epoch) {
        for (const stream& each : streams) {
            mark_.record(each);
            stream_.wait(mark_);
        }
        epoch_end& end = ends_.emplace_back(epoch_end{epoch, {}});
        stream_.host_function_async([&end] { end.time = clock::now(); });
    }

    struct epoch_end {
        std::uint64_t epoch;
        clock::time_point time;
    };
    /// Waits until the device has passed all marks, then returns them.
    const std::deque<epoch_end>& times() {
        stream_.synchronize();
        return ends_;
    }

 private:
    std::deque<epoch_end> ends_;  // whose elements stay where they are
    event mark_;
    stream stream_;
};

/// How much of the work is done, how fast, and how long the rest will take.
class progress {
 public:
    explicit progress(std::uint64_t total_rows) : total_rows_(static_cast<double>(total_rows)) {}

    void show(std::uint64_t rows, std::uint64_t bytes) {
        if (!line_.due()) return;
        constexpr int width = 20;
        const double done = static_cast<double>(rows) / total_rows_;
        const double seconds = seconds_between(start_, clock::now());
        const auto left = static_cast<std::uint64_t>(seconds * (1 - done) / done);
        line_.show(fmt::format("{:5.1f} %  {:.2f} GB/s  {}:{:02}:{:02} left  [{:<{}}]", 100 * done,
                               static_cast<double>(bytes) / seconds / 1e9, left / 3600, left / 60 % 60,
                               left % 60, std::string(static_cast<std::size_t>(done * width), '='), width));
    }

 private:
    double total_rows_;
    clock::time_point start_ = clock::now();
    progress_line line_;
};

/// Takes all batches of `batches`, from `first_epoch` on, and computes the digest on two streams in turns.
stream_result consume(loader& batches, std::uint64_t first_epoch, const loader_options& options) {
    const device& device = batches.device();
    digest digest(device);
    consumption_clock consumption(device);
    // declared after the data they work on: their destructors wait before it is freed
    const std::array<stream, 2> streams{stream(device), stream(device)};
    progress progress(batches.row_total());
    stream_result result;
    bool within_epoch = false;

    const clock::time_point start = clock::now();
    while (result.stopped_by.empty()) {
        if (const int signal = stop_request::signal(); signal != 0) {
            result.stopped_by = signal == SIGINT ? "SIGINT" : "SIGTERM";
            break;
        }
        const stream& consumer = streams[result.batches % streams.size()];
        std::optional<batch> batch = batches.next(consumer);
        if (!batch) {
            if (options.max_batches && batches.state().epoch < options.epochs)
                result.stopped_by = "max-batches";
            break;
        }
        digest.add_async(*batch, consumer);
        result.batches += 1;
        result.rows += batch->row_count();
        for (std::size_t i = 0; i < batch->array_count(); ++i)
            result.bytes += (*batch)[i].size_bytes();
        const std::uint64_t epoch = batch->epoch() - first_epoch;
        result.epoch_seconds.resize(epoch + 1, 0.0);
        within_epoch = !batch->last_of_epoch();
        batch->release();
        if (!within_epoch) consumption.mark(streams, epoch);
        progress.show(result.rows, result.bytes);
    }
    if (within_epoch) consumption.mark(streams, result.epoch_seconds.size() - 1);
    // epochs without a batch take no time
    if (result.stopped_by.empty())
        result.epoch_seconds.resize(options.epochs - std::min(first_epoch, options.epochs), 0.0);
    clock::time_point previous = start;
    for (const auto& [epoch, time] : consumption.times()) {
        result.epoch_seconds[epoch] = seconds_between(previous, time);
        previous = time;
    }
    result.seconds = seconds_between(start, previous);
    result.digest = digest.value();
    return result;
}

// ---- printing ---------------------------------------------------------------------------------------------

double as_seconds(std::chrono::nanoseconds time) {
    return std::chrono::duration<double>(time).count();
}

nlohmann::ordered_json arrays_as_json(const loader_report& report) {
    nlohmann::ordered_json arrays = nlohmann::ordered_json::array();
    for (const array_report& each : report.arrays) {
        arrays.push_back({{"name", each.name},
                          {"transfer", each.transfer},
                          {"reason", each.reason},
                          {"bytes", each.bytes}});
    }
    return arrays;
}

/// Notes about likely mistakes of the user.
std::vector<std::string> notes_on(const stream_result& result, const stream_arguments& arguments,
                                  std::uint64_t row_count) {
    std::vector<std::string> notes;
    if (are_probably_parts(arguments.files)) {
        notes.push_back(fmt::format("each of the {} files is an array of its own in every sample: {}",
                                    arguments.files.size(), quote_pattern));
    }
    const auto& resumed = arguments.options.resume_from;
    if (resumed && result.batches == 0 && resumed->epoch >= arguments.options.epochs) {
        notes.push_back(fmt::format(
            "'{}' says that {} done, and --epochs is {}: there was nothing left", arguments.load_state,
            readable_count(resumed->epoch, "epoch is", "epochs are"), arguments.options.epochs));
    }
    if (arguments.is_seed_unused) notes.emplace_back("--seed has no effect on the sequential order");
    const loader_options& options = arguments.options;
    const bool has_no_full_batch = row_count / options.batch_rows < options.shard.world;
    if (options.tail == tail::drop && has_no_full_batch && row_count != 0) {
        notes.push_back(fmt::format("--tail drop skips all rows of an epoch: {} not fill a batch of {} on {}",
                                    readable_count(row_count, "row does", "rows do"), options.batch_rows,
                                    readable_count(options.shard.world, "rank", "ranks")));
    } else if (result.batches == 0 && !resumed && row_count != 0 && result.stopped_by.empty()) {
        notes.push_back(fmt::format("rank {} gets no rows: there are {} for {}", options.shard.rank,
                                    readable_count(row_count, "row", "rows"),
                                    readable_count(options.shard.world, "rank", "ranks")));
    }
    return notes;
}

std::string as_json(const stream_result& result, const loader_report& report, const device& device,
                    double open_seconds, const std::vector<std::string>& notes) {
    return json_line({{"rows", result.rows},
                      {"bytes", result.bytes},
                      {"batches", result.batches},
                      {"epochs", result.epoch_seconds.size()},
                      {"seconds", result.seconds},
                      {"gbps", result.gbps()},
                      {"open_seconds", open_seconds},
                      {"pin_seconds", std::chrono::duration<double>(report.pin_time).count()},
                      {"epoch_seconds", result.epoch_seconds},
                      {"device", device.name()},
                      {"route", to_string(report.route)},
                      {"reason", report.reason},
                      {"arrays", arrays_as_json(report)},
                      {"pinned_bytes", report.pinned_bytes},
                      {"threads", report.threads},
                      {"threads_reason", report.threads_reason},
                      {"slots_reason", report.slots_reason},
                      {"notes", notes},
                      {"digest", fmt::format("{:016x}", result.digest)},
                      {"stopped_by", result.stopped_by.empty() ? nlohmann::ordered_json()
                                                               : nlohmann::ordered_json(result.stopped_by)},
                      {"verdict", report.verdict()},
                      {"ready", {{"mean", report.mean_ready}, {"most", report.max_ready}}},
                      {"wait_seconds",
                       {{"storage", as_seconds(report.storage_wait)},
                        {"files", as_seconds(report.file_wait)},
                        {"cpu", as_seconds(report.cpu_wait)},
                        {"link", as_seconds(report.link_wait)},
                        {"consumer", as_seconds(report.consumer_wait)}}}});
}

std::string as_text(const stream_result& result, const loader_report& report, const device& device,
                    double open_seconds, const std::vector<std::string>& notes) {
    std::string text = fmt::format(
        "streamed  {} in {}, {}, {} to {}\n"
        "speed     {:.2f} GB/s, {} rows/s: {:.3f} s, after {:.3f} s of opening\n",
        readable_size(result.bytes), readable_count(result.rows, "row", "rows"),
        readable_count(result.batches, "batch", "batches"),
        readable_count(result.epoch_seconds.size(), "epoch", "epochs"), device.name(), result.gbps(),
        fmt::format("{:.{}f}", result.rows_per_second(), result.rows_per_second() < 100 ? 2 : 0),
        result.seconds, open_seconds);
    if (result.epoch_seconds.size() > 1) {
        constexpr std::size_t max_shown = 8;
        const auto shown = std::min(result.epoch_seconds.size(), max_shown);
        text += fmt::format(
            "epochs    {:.3f} s{}\n",
            fmt::join(result.epoch_seconds.begin(),
                      std::next(result.epoch_seconds.begin(), static_cast<std::ptrdiff_t>(shown)), " s, "),
            shown < result.epoch_seconds.size() ? ", ..." : "");
    }
    text += fmt::format("route     {}: {}\n", to_string(report.route), escaped(report.reason));
    if (report.arrays.size() > 1) {
        for (const array_report& each : report.arrays)
            text += fmt::format("array     {}: {}: {}\n", escaped(each.name), each.transfer,
                                escaped(each.reason));
    }
    text += fmt::format(
        "ready     {:.1f} batches when one was asked for, {} at most, of {} slots\n"
        "waited    consumer: for storage {:.3f} s, opening and checking files {:.3f} s, cpu {:.3f} s, "
        "link {:.3f} s\n"
        "          loader: for the consumer {:.3f} s\n"
        "verdict   {}\n"
        "digest    {:016x}\n",
        report.mean_ready, report.max_ready, report.slots, as_seconds(report.storage_wait),
        as_seconds(report.file_wait), as_seconds(report.cpu_wait), as_seconds(report.link_wait),
        as_seconds(report.consumer_wait), escaped(report.verdict()), result.digest);
    if (!report.threads_reason.empty()) text += fmt::format("threads   {}\n", report.threads_reason);
    if (!result.stopped_by.empty()) text += fmt::format("stopped   by {}\n", result.stopped_by);
    for (const std::string& note : notes)
        text += fmt::format("note      {}\n", escaped(note));
    return text;
}

}  // namespace

void stream_files(const argument_list& arguments) {
    std::optional<stream_arguments> parsed = parse_stream_arguments(arguments);
    if (!parsed) return;
    const bool saves = !parsed->save_state.empty();
    std::optional<stop_request> stop;
    if (saves) stop.emplace();

    const clock::time_point start = clock::now();
    const auto sources = open_all(parsed->files, parsed->stack, parsed->options);
    const double open_seconds = seconds_between(start, clock::now());

    const loader_options& options = parsed->options;
    loader batches = make_loader(sources, *parsed);
    const std::uint64_t first_epoch = options.resume_from ? options.resume_from->epoch : 0;
    const stream_result result = consume(batches, first_epoch, options);
    std::exception_ptr not_saved;
    try {
        if (saves) batches.state().save(parsed->save_state);
    } catch (...) {
        not_saved = std::current_exception();  // what was streamed is reported all the same
    }
    const loader_report report = batches.report();
    const std::vector<std::string> notes = notes_on(result, *parsed, sources.front()->row_count());
    print(parsed->json ? as_json(result, report, batches.device(), open_seconds, notes)
                       : as_text(result, report, batches.device(), open_seconds, notes));
    if (not_saved) std::rethrow_exception(not_saved);
    if (const int signal = saves ? stop_request::signal() : 0; signal != 0) {
        stop.reset();
        std::raise(signal);  // the parent process learns which signal ended it
    }
}

}  // namespace pinflow::cli
