#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <numeric>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/loader/digest.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/cli/bench.hpp"

namespace pinflow::cli {

namespace {

using clock = std::chrono::steady_clock;

/// A .npy file of random bytes, in the folder for temporary files, for as long as this lives.
class made_file {
 public:
    made_file(std::uint64_t size_bytes, std::uint64_t row_bytes)
        : path_(std::filesystem::temp_directory_path() / fmt::format("pinflow-bench-{}.npy", ::getpid())) {
        const std::uint64_t rows = std::max<std::uint64_t>(size_bytes / row_bytes, 1);
        npy_writer writer(path_, dtype::of<std::uint8_t>(), {rows, row_bytes}, 4096);
        std::vector<std::byte> piece(std::size_t{64} << 20);
        for (std::uint64_t done = 0; done < rows * row_bytes; done += piece.size()) {
            fill_with_words(piece, done);
            writer.write(
                std::span(piece).first(std::min<std::uint64_t>(piece.size(), rows * row_bytes - done)));
        }
        writer.finish();
    }
    made_file(const made_file&) = delete;
    made_file& operator=(const made_file&) = delete;
    ~made_file() {
        std::error_code ignored;
        std::filesystem::remove(path_, ignored);
    }
    std::string path() const { return path_.string(); }

 private:
    std::filesystem::path path_;
};

struct streamed {
    std::vector<double> epoch_seconds;
    std::vector<std::uint64_t> digests;  ///< of each epoch
    double first_batch_seconds = 0;
    std::uint64_t epoch_bytes = 0;
    loader_report report;
};

/// Streams all epochs; each ends when the device has consumed its last batch.
streamed stream_epochs(const std::string& file, const loader_options& options) {
    streamed result;
    const auto start = clock::now();
    const auto rows = open_rows(file);
    loader batches({rows}, options);
    result.epoch_bytes = rows->row_count() * rows->row_size_bytes();
    std::vector<std::unique_ptr<digest>> digests;
    const stream consumer(options.device);
    auto epoch_start = start;
    for (std::uint64_t epoch = 0; epoch < options.epochs; ++epoch) {
        digest& sum = *digests.emplace_back(std::make_unique<digest>(options.device));
        for (std::uint64_t i = 0; i < batches.batches_per_epoch(); ++i) {
            auto batch = batches.next(consumer);
            if (!batch) throw system_failure("the loader ended before its last epoch", {});
            sum.add_async(*batch, consumer);
            batch->release();
            if (result.first_batch_seconds == 0) {
                consumer.synchronize();
                result.first_batch_seconds = seconds_since(start);
            }
        }
        consumer.synchronize();
        result.epoch_seconds.push_back(seconds_since(epoch_start));
        epoch_start = clock::now();
    }
    for (const auto& sum : digests)
        result.digests.push_back(sum->value());
    result.report = batches.report();
    return result;
}

}  // namespace

void bench_stream(const bench_options& options, bool shuffled, const link_rates& link,
                  const bench_report& report) {
    constexpr std::uint64_t usual_bytes = std::uint64_t{8} << 30;
    constexpr std::uint64_t usual_row_bytes = 256 << 10;
    std::unique_ptr<const made_file> made;
    if (options.file.empty()) {
        made =
            std::make_unique<const made_file>(options.table_bytes == 0 ? usual_bytes : options.table_bytes,
                                              options.row_bytes == 0 ? usual_row_bytes : options.row_bytes);
    }
    const std::string file = made ? made->path() : options.file;
    loader_options how;
    how.device = device::host();
    how.batch_rows = options.batch_rows == 0 ? 64 : options.batch_rows;
    // the digest of all rows, by another way; this also brings the file into the page cache
    const std::uint64_t expected = stream_epochs(file, how).digests[0];

    how.device = options.device;
    how.order = shuffled ? order::shuffled : order::sequential;
    how.epochs = options.epochs;
    const streamed result = stream_epochs(file, how);
    for (const std::uint64_t digest : result.digests) {
        if (digest == expected) continue;
        throw format_error(
            fmt::format("what was streamed from '{}' has the digest {:016x}, the file's rows have {:016x}",
                        file, digest, expected));
    }
    const std::string name = shuffled ? "shuffled" : "stream";
    const auto rate = [&](double seconds) { return static_cast<double>(result.epoch_bytes) / seconds / 1e9; };
    const double first = result.epoch_seconds.front();
    const double later = median({result.epoch_seconds.begin() + 1, result.epoch_seconds.end()});
    report({name + ", epoch 1, opening and registering included", rate(first), rate(first) / link.to_device,
            first, fmt::format("first batch after {:.3f} s", result.first_batch_seconds)});
    report({name + ", later epochs", rate(later), rate(later) / link.to_device, later,
            fmt::format("{}: {}", to_string(result.report.route), result.report.reason)});
}

}  // namespace pinflow::cli
