#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "formats/patterns.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/load.hpp"
#include "pinflow/stream.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/bench.hpp"
#include "src/cli/open.hpp"
#include "src/core/quote.hpp"
#include "src/device/page_releaser.hpp"

namespace pinflow::cli {

namespace {

constexpr std::uint64_t piece_bytes = std::uint64_t{16} << 20;

/// Compares loaded tensors with the files, as the host device reads them.
/// @throws error for the first that differs.
void compare(const loaded_tensors& loaded, const loaded_tensors& expected, const device& device) {
    const stream stream(device);
    const pinned_buffer piece(piece_bytes, device);
    for (std::size_t i = 0; i < loaded.tensors.size(); ++i) {
        const device_tensor& tensor = loaded.tensors[i];
        for (std::uint64_t done = 0; done < tensor.size_bytes(); done += piece_bytes) {
            const auto bytes = piece.bytes().first(std::min(piece_bytes, tensor.size_bytes() - done));
            copy_to_host_async(bytes, tensor.data() + done, stream);
            stream.synchronize();
            if (std::memcmp(bytes.data(), expected.tensors[i].data() + done, bytes.size()) != 0)
                throw error(fmt::format("the tensor {} differs from its file after loading",
                                        pinflow::detail::quote(tensor.name())));
        }
    }
}

/// The files, and those that match quoted patterns.
std::vector<std::filesystem::path> paths_of(const bench_options& options) {
    std::vector<std::filesystem::path> paths;
    for (const std::string& text : options.load_files) {
        const std::vector<std::string> matches =
            is_pattern(text) ? pinflow::detail::matches_of(text) : std::vector<std::string>{text};
        if (matches.empty())
            throw invalid_argument(fmt::format("no file matches {}", pinflow::detail::quote(text)));
        paths.insert(paths.end(), matches.begin(), matches.end());
    }
    return paths;
}

}  // namespace

void check_load(const bench_options& options) {
    if (options.load_files.empty())
        throw usage_error("bench load takes the files of a model: pinflow bench load FILES");
    for (const std::string& each : options.load_files) {
        if (each.starts_with(segment_prefix))
            throw usage_error(fmt::format("bench load takes paths of files, not the segment '{}'", each));
        if (!is_pattern(each) && !pinflow::detail::exists(each) && find_source(each).name)
            throw usage_error(fmt::format("bench load takes whole files, not single arrays: '{}'", each));
    }
    static_cast<void>(tensor_files(paths_of(options)));
}

void bench_load(const bench_options& options, const link_rates& link, const bench_report& report) {
    const std::vector<std::filesystem::path> files = paths_of(options);
    std::vector<double> seconds;
    load_report first, last;
    for (unsigned i = 0; i <= options.repetitions; ++i) {
        // every load is measured by itself: the pages of the one before are unlocked in the background
        pinflow::detail::wait_for_released_pages();
        const loaded_tensors loaded = load_tensors(files, options.device);
        last = loaded.report;
        if (i == 0) {
            first = last;
            compare(loaded, load_tensors(files, device::host()), options.device);
        } else {
            seconds.push_back(std::chrono::duration<double>(last.duration).count());
        }
    }
    // a load that maps tensors has no rate: nothing is read until they are used
    const bool is_moved = last.mapped_bytes == 0;
    const auto rate = [&](double of) {
        return is_moved ? static_cast<double>(last.size_bytes) / of / 1e9 : 0.0;
    };
    const double of_first = std::chrono::duration<double>(first.duration).count();
    const double usual = median(seconds);
    report({"load, first call of the process", rate(of_first), rate(of_first) / link.to_device, of_first,
            fmt::format("{:.3f} GB, files: {}", static_cast<double>(last.size_bytes) / 1e9, files.size())});
    report({fmt::format("load, median of {}", options.repetitions), rate(usual), rate(usual) / link.to_device,
            usual, last.reason});
}

}  // namespace pinflow::cli
