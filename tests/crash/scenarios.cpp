#include "tests/crash/scenarios.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/loader/digest.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/loader/sampler.hpp"
#include "pinflow/rows.hpp"
#include "pinflow/stream.hpp"
#include "src/cli/commands.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/zip_bytes.hpp"

namespace scenarios {

namespace {

namespace fs = std::filesystem;
namespace cli = pinflow::cli;
using pinflow::device;

constexpr std::uint64_t row_count = 96;
constexpr std::uint64_t columns = 24;

std::string npy_of(std::uint64_t first_row, std::uint64_t rows) {
    std::string bytes = npy_bytes::header(npy_bytes::text("'<u4'", fmt::format("({}, {})", rows, columns)));
    for (std::uint64_t i = 0; i < rows * columns; ++i)
        bytes += zip_bytes::number((first_row * columns + i) * 2654435761U % 4294967296U, 4);
    return bytes;
}

std::string labels() {
    std::string bytes = npy_bytes::header(npy_bytes::text("'<i8'", fmt::format("({},)", row_count)));
    for (std::uint64_t row = 0; row < row_count; ++row)
        bytes += zip_bytes::number(row % 10, 8);
    return bytes;
}

// ---- the library ------------------------------------------------------------------------------------------

std::vector<std::shared_ptr<const pinflow::row_source>> images_and_labels(const fs::path& inputs) {
    return {pinflow::open_rows((inputs / "images.npy").string()),
            pinflow::open_rows((inputs / "labels.npy").string())};
}

/// Holds some batches on a stream of its own, and leaves before the end.
void start_and_stop(const device& on, const fs::path& inputs) {
    pinflow::loader batches(
        images_and_labels(inputs),
        {.device = on, .batch_rows = 8, .order = pinflow::order::shuffled, .epochs = 3, .threads = 3});
    const pinflow::stream consumer(on);
    pinflow::digest digest(on);
    std::vector<pinflow::batch> held;
    for (int i = 0; i < 14; ++i) {
        auto batch = batches.next(consumer);
        if (!batch) throw std::logic_error("a loader ended before its last batch");
        digest.add_async(*batch, consumer);
        if (i % 5 == 0) held.push_back(std::move(*batch));
    }
    consumer.synchronize();
    fmt::print("{:016x}\n", digest.value());
    std::fflush(stdout);
}

/// Streams in an order that the tool does not have.
void stream_in_order(const device& on, const fs::path& inputs, pinflow::sampler sampler) {
    pinflow::loader batches(
        images_and_labels(inputs),
        {.device = on, .batch_rows = 16, .sampler = std::move(sampler), .epochs = 2, .threads = 3});
    const pinflow::stream consumer(on);
    pinflow::digest digest(on);
    while (const auto batch = batches.next(consumer))
        digest.add_async(*batch, consumer);
    fmt::print("{:016x}\n", digest.value());
    std::fflush(stdout);
}

/// The rows from the last to the first.
class backwards : public pinflow::row_sequence {
 public:
    std::uint64_t position_count() const override { return row_count; }
    void rows_at(std::uint64_t /*epoch*/, std::uint64_t position,
                 std::span<std::uint64_t> rows) const override {
        for (std::uint64_t& row : rows)
            row = row_count - 1 - position++;
    }
    std::string name() const override { return "backwards/1"; }
};

pinflow::sampler sampler_of(pinflow::order order) {
    switch (order) {
        case pinflow::order::listed:
            return pinflow::sampler::listed(row_count, {5, 90, 17, 5, 0, 44});
        case pinflow::order::weighted: {
            std::vector<double> weights(row_count, 1.0);
            weights[7] = 40;
            return pinflow::sampler::weighted(weights, row_count, 1);
        }
        default:
            return pinflow::sampler::custom(row_count, std::make_shared<backwards>());
    }
}

/// Gathers rows of a table, scatters them to other rows of it, and gathers rows of a file.
void exchange_rows(const device& on, const fs::path& inputs, pinflow::row_route route) {
    std::vector<std::uint32_t> numbers(1024 * 8);
    std::iota(numbers.begin(), numbers.end(), 0U);
    const pinflow::row_table table(std::as_writable_bytes(std::span(numbers)), 32);
    pinflow::row_exchange exchange(table, on, {.route = route, .threads = 3});
    const std::vector<std::uint64_t> ids{5, 1000, 17, 5, 0};
    const pinflow::stream allocating(on);
    const pinflow::device_buffer rows(ids.size() * 32, allocating);
    const pinflow::device_buffer images(2 * columns * 4, allocating);
    allocating.synchronize();
    const pinflow::stream stream(on);  // waits for its work before the memory goes
    exchange.tune(ids.size());
    exchange.gather_async(ids, rows.data(), stream);
    stream.synchronize();
    const std::vector<std::uint64_t> targets{1, 2, 3, 4, 5};
    exchange.scatter_async(targets, rows.data(), pinflow::duplicate_policy::last, stream);
    stream.synchronize();
    exchange.check();
    pinflow::row_exchange of_file(pinflow::row_table(pinflow::open_rows((inputs / "images.npy").string())),
                                  on, {.route = route});
    const std::vector<std::uint64_t> image_ids{95, 3};
    of_file.gather(image_ids, images.data());
    fmt::print("{}\n", std::accumulate(numbers.begin(), numbers.end(), std::uint64_t{0}));
    std::fflush(stdout);
}

// ---- the tool ---------------------------------------------------------------------------------------------

using command = void (*)(const cli::argument_list&);

/// A command of the tool; IN/ and OUT/ in its arguments stand for the folders.
scenario tool(const std::string& name, command run, cli::argument_list arguments) {
    return {name, [run, arguments](const fs::path& inputs, const fs::path& outputs) {
                cli::argument_list all = arguments;
                for (std::string& argument : all) {
                    if (argument.starts_with("IN/")) argument = (inputs / argument.substr(3)).string();
                    if (argument.starts_with("OUT/")) argument = (outputs / argument.substr(4)).string();
                }
                run(all);
            }};
}

void copy_images(const fs::path& inputs, const fs::path& outputs) {
    fs::copy_file(inputs / "images.npy", outputs / "images.npy");
}

}  // namespace

std::string comparable(const std::string& printed) {
    std::string text;
    std::istringstream lines(printed);
    for (std::string line; std::getline(lines, line); text += '\n') {
        const auto object = nlohmann::json::parse(line, nullptr, false);
        if (object.is_object() && object.contains("digest")) {
            text += fmt::format("{} rows, digest {}", object.at("rows").dump(), object.at("digest").dump());
        } else {
            text += line.substr(0, line.find(" in 0."));  // seconds, and bytes a second
        }
    }
    return text;
}

void write_inputs(const fs::path& inputs) {
    const auto write = [&](const std::string& name, const std::string& bytes) {
        npy_bytes::write_file((inputs / name).string(), bytes);
    };
    write("images.npy", npy_of(0, row_count));
    write("labels.npy", labels());
    for (std::uint64_t part = 0; part < 4; ++part)
        write(fmt::format("part-{}.npy", part), npy_of(part * 24, 24));
    write("deflated.npz",
          zip_bytes::make({{.name = "images.npy", .content = npy_of(0, row_count), .deflated = true},
                           {.name = "labels.npy", .content = labels(), .deflated = true}})
              .bytes);
    const std::string images = (inputs / "images.npy").string();
    for (const char* const name : {"stored.npz", "some.safetensors"})
        cli::convert({images, (inputs / name).string()});
#ifdef PINFLOW_HAVE_HDF5
    cli::convert({images, (inputs / "whole.h5").string()});
    cli::convert({images, (inputs / "chunked.h5").string(), "--deflate", "1"});
#endif
}

std::vector<scenario> all(const std::string& device_name) {
    std::vector<std::string> files{"images.npy", "stored.npz", "deflated.npz", "some.safetensors"};
    std::vector<std::string> targets{"new.npy", "new.npz", "new.safetensors"};
#ifdef PINFLOW_HAVE_HDF5
    files.insert(files.end(), {"whole.h5", "chunked.h5"});
    targets.emplace_back("new.h5");
#endif
    std::vector<scenario> found;
    for (const std::string& file : files) {
        found.push_back(tool("inspect " + file, cli::inspect, {"IN/" + file, "--json"}));
        found.back().prints_hidden_failures = true;
        for (const std::string& target : targets) {
            const std::string source = file == "deflated.npz" ? file + ":images" : file;
            found.push_back(
                tool("convert " + file + " " + target, cli::convert, {"IN/" + source, "OUT/" + target}));
        }
    }
    found.push_back(
        tool("convert with a cast", cli::convert, {"IN/images.npy", "OUT/new.npy", "--dtype", "float32"}));
    found.push_back(tool("inspect a pattern", cli::inspect, {"IN/part-*.npy", "--json"}));
    found.back().prints_hidden_failures = true;
    found.push_back(tool("convert a pattern", cli::convert, {"IN/part-*.npy", "OUT/new.npz"}));
    found.push_back(tool("verify --write", cli::verify, {"OUT/images.npy", "--write"}));
    found.back().prepare = copy_images;
    found.push_back(tool("verify", cli::verify, {"OUT/images.npy"}));
    found.back().prepare = [](const fs::path& inputs, const fs::path& outputs) {
        copy_images(inputs, outputs);
        cli::verify({(outputs / "images.npy").string(), "--write"});
    };
    const auto stream = [&](const std::string& name, cli::argument_list arguments) {
        arguments.insert(arguments.end(),
                         {"--device", device_name, "--batch", "16", "--threads", "3", "--json"});
        found.push_back(tool("stream " + name, cli::stream_files, std::move(arguments)));
    };
    for (const char* const order : {"sequential", "shuffled", "windowed"})
        stream(order, {"IN/images.npy", "IN/labels.npy", "--order", order, "--epochs", "2"});
    for (const char* const route : {"copy", "staged", "read"})
        stream(fmt::format("--route {}", route), {"IN/images.npy", "--route", route});
    stream("--route direct", {"IN/images.npy", "--route", "direct"});
    stream("of parts", {"IN/part-*.npy", "--order", "shuffled"});
    stream("--stack", {"IN/part-*.npy", "--stack"});
    stream("of a deflated .npz", {"IN/deflated.npz:images", "IN/deflated.npz:labels"});
#ifdef PINFLOW_HAVE_HDF5
    stream("of chunks", {"IN/chunked.h5", "--order", "shuffled"});
#endif
    stream("--save-state", {"IN/images.npy", "--max-batches", "2", "--save-state", "OUT/state.json"});
    found.back().prints_before_failing = true;
    found.push_back(
        {"resume", [device_name](const fs::path& inputs, const fs::path& outputs) {
             const std::string images = (inputs / "images.npy").string();
             const std::string state = (outputs / "state.json").string();
             cli::stream_files(
                 {images, "--device", device_name, "--max-batches", "1", "--save-state", state, "--json"});
             cli::stream_files({images, "--device", device_name, "--load-state", state, "--json"});
         }});
    found.back().prints_before_failing = true;
    found.push_back({"loader that stops", [device_name](const fs::path& inputs, const fs::path&) {
                         start_and_stop(device::parse(device_name), inputs);
                     }});
    found.back().is_left_early = true;
    for (const auto order : {pinflow::order::listed, pinflow::order::weighted, pinflow::order::custom}) {
        found.push_back({fmt::format("loader in {} order", pinflow::to_string(order)),
                         [device_name, order](const fs::path& inputs, const fs::path&) {
                             stream_in_order(device::parse(device_name), inputs, sampler_of(order));
                         }});
    }
    for (const auto& [name, route] : {std::pair{"exchange", pinflow::row_route::automatic},
                                      std::pair{"exchange direct", pinflow::row_route::direct},
                                      std::pair{"exchange staged", pinflow::row_route::staged}}) {
        found.push_back({name, [device_name, by = route](const fs::path& inputs, const fs::path&) {
                             exchange_rows(device::parse(device_name), inputs, by);
                         }});
    }
    return found;
}

}  // namespace scenarios
