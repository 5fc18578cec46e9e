// take_batches FILE[:NAME]... [--device D] [--batch N] [--order O] [--epochs N] [--threads N] [--route R]
//              [--leased N] [--digest] [--legacy] [--stack]
//
// A consumer that only takes batches, as a training loop does; everyday.py runs it. Prints one JSON object:
// seconds of opening the files and of making the loader, seconds and CPU seconds of each epoch, rows and
// batches of an epoch, bytes of a sample, the route, the transfer and reason of each array, and the verdict.
//
// --digest reads every batch on the device, and prints the digest of all. --leased N keeps N batches leased
// at a time. --legacy consumes on CUDA's legacy default stream.

#include <sys/resource.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/pinflow.hpp"

namespace {

struct settings {
    std::vector<std::string> files;
    pinflow::loader_options options;
    pinflow::open_options opening;
    std::size_t leased = 0;
    bool digest = false;
    bool legacy = false;
};

pinflow::order order_named(std::string_view name) {
    for (const auto each : {pinflow::order::sequential, pinflow::order::shuffled, pinflow::order::windowed}) {
        if (name == to_string(each)) return each;
    }
    throw pinflow::invalid_argument("--order takes sequential, shuffled or windowed");
}

pinflow::route route_named(std::string_view name) {
    using pinflow::route;
    for (const auto each : {route::automatic, route::direct, route::copy, route::staged, route::read}) {
        if (name == to_string(each)) return each;
    }
    throw pinflow::invalid_argument("--route takes auto, direct, copy, staged or read");
}

settings parse(int argc, char** argv) {
    settings parsed;
    parsed.options.order = pinflow::order::sequential;
    for (int i = 1; i < argc; ++i) {
        const std::string_view flag = argv[i];
        const auto value = [&]() -> std::string {
            if (i + 1 == argc) throw pinflow::invalid_argument(std::string(flag) + " needs a value");
            return argv[++i];
        };
        if (flag == "--device") {
            parsed.options.device = pinflow::device::parse(value());
        } else if (flag == "--batch") {
            parsed.options.batch_rows = std::stoull(value());
        } else if (flag == "--order") {
            parsed.options.order = order_named(value());
        } else if (flag == "--epochs") {
            parsed.options.epochs = std::stoull(value());
        } else if (flag == "--threads") {
            parsed.options.threads = static_cast<unsigned>(std::stoul(value()));
        } else if (flag == "--route") {
            parsed.options.route = route_named(value());
        } else if (flag == "--leased") {
            parsed.leased = std::stoul(value());
        } else if (flag == "--digest") {
            parsed.digest = true;
        } else if (flag == "--legacy") {
            parsed.legacy = true;
        } else if (flag == "--stack") {
            parsed.opening.stack = true;
        } else {
            parsed.files.emplace_back(flag);
        }
    }
    if (parsed.files.empty()) throw pinflow::invalid_argument("take_batches needs a file");
    return parsed;
}

/// The CPU seconds of all threads of the process.
double cpu_seconds() {
    ::rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const ::timeval& time) {
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char character : text) {
        if (character == '"' || character == '\\') result += '\\';
        result += character < ' ' ? ' ' : character;
    }
    return result + "\"";
}

std::string listed(const std::vector<double>& values) {
    std::string result = "[";
    for (const double value : values)
        result += (result.size() > 1 ? ", " : "") + std::to_string(value);
    return result + "]";
}

void consume(const settings& what) {
    using clock = std::chrono::steady_clock;
    const auto seconds_since = [](clock::time_point start) {
        return std::chrono::duration<double>(clock::now() - start).count();
    };
    const auto opened = clock::now();
    std::vector<std::shared_ptr<const pinflow::row_source>> sources;
    for (const std::string& file : what.files)
        sources.push_back(pinflow::open_rows(file, what.opening));
    const double open_seconds = seconds_since(opened);

    const auto made = clock::now();
    pinflow::loader loader(sources, what.options);
    const double make_seconds = seconds_since(made);
    const pinflow::stream own_stream(loader.device());
    const pinflow::stream_view stream =
        what.legacy ? pinflow::stream_view(loader.device(), nullptr) : own_stream.view();
    std::optional<pinflow::digest> digest;
    if (what.digest) digest.emplace(loader.device());
    const bool on_host = loader.device().kind() == pinflow::device_kind::host;

    std::vector<double> seconds;
    std::vector<double> cpu;
    std::deque<pinflow::batch> leased;
    auto start = clock::now();
    double cpu_start = cpu_seconds();
    for (;;) {
        // a consumer on the host that reads the batch itself needs no stream
        auto batch = on_host && !digest ? loader.next() : loader.next(stream);
        if (!batch) break;
        if (digest) digest->add_async(*batch, stream);
        const bool last = batch->last_of_epoch();
        leased.push_back(std::move(*batch));
        if (leased.size() > what.leased) leased.pop_front();
        if (!last) continue;
        if (!on_host || digest) stream.synchronize();
        seconds.push_back(seconds_since(start));
        cpu.push_back(cpu_seconds() - cpu_start);
        start = clock::now();
        cpu_start = cpu_seconds();
    }
    leased.clear();

    const pinflow::loader_report report = loader.report();
    std::uint64_t sample_bytes = 0;
    std::string arrays;
    for (std::size_t i = 0; i < sources.size(); ++i) {
        sample_bytes += sources[i]->row_size_bytes();
        arrays += (i == 0 ? "" : ", ") +
                  ("{\"transfer\": " + quoted(report.arrays[i].transfer) + ", \"reason\": ") +
                  quoted(report.arrays[i].reason) + "}";
    }
    std::cout << "{\"open_seconds\": " << open_seconds << ", \"make_seconds\": " << make_seconds
              << ", \"seconds\": " << listed(seconds) << ", \"cpu_seconds\": " << listed(cpu)
              << ", \"rows\": " << loader.row_count() << ", \"sample_bytes\": " << sample_bytes
              << ", \"batches\": " << loader.batches_per_epoch()
              << ", \"route\": " << quoted(std::string(to_string(report.route))) << ", \"arrays\": ["
              << arrays << "], \"verdict\": " << quoted(report.verdict());
    if (digest) std::cout << R"(, "digest": ")" << std::hex << digest->value() << std::dec << '"';
    std::cout << "}\n";
}

}  // namespace

int main(int argc, char** argv) try {
    pinflow::install_fault_guard();
    consume(parse(argc, argv));
} catch (const std::exception& failure) {
    std::cerr << "take_batches: " << failure.what() << '\n';
    return 1;
}
