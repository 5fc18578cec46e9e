#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "pinflow/device.hpp"
#include "pinflow/rows.hpp"

/// What `pinflow bench` measures. Streamed and exchanged rows and the first load are checked. Each repetition
/// uses new indices. Rates are medians, but those of epoch 1 and of the first load are of one run, and those
/// of plans of scatters are estimated from gathers. Ratios are to the link's rate in the same run.
namespace pinflow::cli {

struct bench_options {
    pinflow::device device = device::best();
    std::vector<std::string> load_files;  ///< load: the files of a model
    std::string file;                     ///< empty: stream and shuffled make a temporary file, pin uses none
    std::uint64_t table_bytes = 0;        ///< size of tables, and of the file that is made; 0: the usual size
    std::uint64_t row_bytes = 0;          ///< 0: the usual value for the work
    std::uint64_t batch_rows = 0;         ///< 0: the usual value for the work
    std::uint64_t batches = 64;  ///< gather, scatter, duplex: per repetition; plan: bound on its group
    unsigned known = 8;          ///< batches that are known ahead, at least 2
    row_route route = row_route::automatic;
    bool tunes = false;       ///< measures the routes first, unless `route` is set
    unsigned blocks = 0;      ///< thread blocks on the routes direct and hybrid; 0 lets the planner choose
    double staged_share = 0;  ///< share of rows that the route hybrid stages; 0 lets the planner choose
    std::uint64_t epochs = 5;
    unsigned repetitions = 3;
};

/// A number of 0 was not measured.
struct bench_result {
    std::string work;
    double gbps = 0;
    double of_link = 0;  ///< the rate over that of the link in the same run
    double seconds = 0;
    std::string note;
};

/// Rates of page-locked copies of 256 MiB, in GB (1e9 bytes) per second.
struct link_rates {
    double to_device = 0;
    double to_host = 0;
};
link_rates measure_link(const device& device);

/// Called with each result as soon as it is measured.
using bench_report = std::function<void(const bench_result&)>;

void bench_copy(const bench_options& options, const link_rates& link, const bench_report& report);
void bench_pin(const bench_options& options, const link_rates& link, const bench_report& report);
/// Measures `stream`, or `shuffled` if that is set.
void bench_stream(const bench_options& options, bool shuffled, const link_rates& link,
                  const bench_report& report);
void bench_gather(const bench_options& options, const link_rates& link, const bench_report& report);
void bench_scatter(const bench_options& options, const link_rates& link, const bench_report& report);
void bench_duplex(const bench_options& options, const link_rates& link, const bench_report& report);
void bench_plan(const bench_options& options, const link_rates& link, const bench_report& report);
/// Measures load_tensors; the first load is compared with the files.
void bench_load(const bench_options& options, const link_rates& link, const bench_report& report);

/// Checks before any measurement that the headers of the files can be read.
/// @throws usage_error without files, invalid_argument if no file matches a pattern; what tensor_files
/// throws.
void check_load(const bench_options& options);

/// Checks before any measurement that stream and shuffled can make their file.
/// @throws system_failure if the folder for temporary files cannot be written to or has too little space.
void check_stream(const bench_options& options);
/// The directions in which rows travel in a benchmark.
struct row_ways {
    bool to_device = false;
    bool to_host = false;
};
inline constexpr row_ways ways_of_gather{.to_device = true, .to_host = false};
inline constexpr row_ways ways_of_scatter{.to_device = false, .to_host = true};
inline constexpr row_ways ways_of_duplex{.to_device = true, .to_host = true};
inline constexpr row_ways ways_of_plan{};
/// Checks before any measurement that the table and its batches fit.
/// @throws invalid_argument if the table has fewer rows than a batch (than two batches for duplex), or if
/// host or device memory is too small.
void check_rows(const bench_options& options, row_ways ways);

// ---- what they share -------------------------------------------------------------------------------------

/// @param values at least one. Of an even number, the mean of the two in the middle is returned.
double median(std::vector<double> values);

}  // namespace pinflow::cli
