#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <system_error>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/loader/digest.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/cli/bench.hpp"
#include "src/cli/bench_words.hpp"
#include "src/cli/elapsed.hpp"
#include "src/cli/open.hpp"
#include "src/cli/output.hpp"
#include "src/core/system.hpp"

namespace pinflow::cli {

namespace {

using clock = std::chrono::steady_clock;

// ---- a file that is made ----------------------------------------------------------------------------------

std::string temporary_folder() {
    const char* const named = std::getenv("TMPDIR");  // NOLINT(concurrency-mt-unsafe): nothing writes it
    return named == nullptr || *named == '\0' ? "/tmp" : named;
}

[[noreturn]] void fail_to_make(const std::string& why, std::error_code code) {
    throw system_failure(
        fmt::format("cannot make a file in '{}', the folder for temporary files (TMPDIR): {}",
                    temporary_folder(), why),
        code);
}

/// A new file in the folder for temporary files. It has a name only while it is made: the system removes it
/// when this object or the process ends.
class temporary_file {
 public:
    temporary_file() : descriptor_(create()), path_(fmt::format("/proc/self/fd/{}", descriptor_)) {}
    temporary_file(const temporary_file&) = delete;
    temporary_file& operator=(const temporary_file&) = delete;
    ~temporary_file() { detail::system::close(descriptor_); }

    /// For this process.
    const std::string& path() const { return path_; }

    /// Appends `bytes`, and waits until they are on storage. So measuring does not compete with writing, and
    /// a signal waits for at most one piece.
    void write(std::span<const std::byte> bytes) const {
        detail::system::write_all(descriptor_, path_, bytes);
        detail::system::sync(descriptor_, path_);
    }

 private:
    static int create() {
        std::random_device random;
        const std::string name =
            fmt::format("{}/pinflow-bench-{:08x}{:08x}.npy", temporary_folder(), random(), random());
        try {
            const int descriptor = detail::system::create_for_writing(name, 0600);
            detail::system::remove(name);
            return descriptor;
        } catch (const system_failure& failure) {
            fail_to_make(failure.code().message(), failure.code());
        }
    }

    int descriptor_;
    std::string path_;
};

/// The shape of the file that is made.
struct made_shape {
    explicit made_shape(const bench_options& options) {
        constexpr std::uint64_t default_bytes = std::uint64_t{8} << 30;
        constexpr std::uint64_t default_row_bytes = std::uint64_t{256} << 10;
        row_bytes = options.row_bytes == 0 ? default_row_bytes : options.row_bytes;
        const std::uint64_t requested_bytes = options.table_bytes == 0 ? default_bytes : options.table_bytes;
        rows = std::max<std::uint64_t>(requested_bytes / row_bytes, 1);
    }

    std::uint64_t size_bytes() const { return rows * row_bytes; }

    std::uint64_t rows = 0;
    std::uint64_t row_bytes = 0;
};

/// A .npy file of random bytes, for as long as this lives.
class made_file {
 public:
    explicit made_file(const made_shape& shape) {
        const std::string header = format_npy_header(dtype::of<std::uint8_t>(),
                                                     std::array{shape.rows, shape.row_bytes}, false, 4096);
        file_.write(std::as_bytes(std::span(header)));
        constexpr std::uint64_t piece_bytes = std::uint64_t{64} << 20;
        std::vector<std::byte> piece(std::min(piece_bytes, shape.size_bytes()));
        for (std::uint64_t done = 0; done < shape.size_bytes(); done += piece.size()) {
            fill_with_words(piece, done);
            file_.write(std::span(piece).first(std::min(piece.size(), shape.size_bytes() - done)));
        }
    }
    const std::string& path() const { return file_.path(); }

 private:
    temporary_file file_;
};

// ---- streaming --------------------------------------------------------------------------------------------

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
    const auto rows = open_source_rows(file, {});
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

void check_stream(const bench_options& options) {
    if (!options.file.empty()) return;
    const std::string folder = temporary_folder();
    std::error_code code;
    const std::filesystem::space_info space = std::filesystem::space(folder, code);
    // with "/." at the end, access also fails if the path is not a folder
    if (!code && ::access((folder + "/.").c_str(), W_OK | X_OK) != 0)
        code = std::error_code(errno, std::generic_category());
    if (code) fail_to_make(code.message(), code);
    const std::uint64_t size_bytes = made_shape(options).size_bytes();
    if (size_bytes > space.available) {
        const std::string sizes =
            fmt::format("it would have {}, {} are free; --table and --row-bytes set its size",
                        readable_size(size_bytes), readable_size(space.available));
        fail_to_make(sizes, std::make_error_code(std::errc::no_space_on_device));
    }
}

void bench_stream(const bench_options& options, bool shuffled, const link_rates& link,
                  const bench_report& report) {
    std::optional<const made_file> made;
    if (options.file.empty()) made.emplace(made_shape(options));
    const std::string file = made ? made->path() : options.file;
    loader_options how;
    how.device = device::host();
    how.batch_rows = options.batch_rows == 0 ? 64 : options.batch_rows;
    // the digest of all rows, computed separately; this also reads the file into the page cache
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
