// What a process can go through: sticky errors, fork, exit with everything still held, objects that are made
// and destroyed a hundred times.
#include "tests/cuda_process_test.hpp"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/cuda.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/mapped_file.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/train/flat_parameters.hpp"
#include "src/device/cuda/api.hpp"
#include "src/device/cuda/context.hpp"
#include "tests/cuda_kernels.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;

namespace {

constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;

/// One of each kind of CUDA object.
struct holdings {
    explicit holdings(const device& gpu) : mark(gpu), staging(8 * mebibyte, gpu), queue(gpu) {
        memory = device_buffer(8 * mebibyte, queue);
    }

    event mark;
    device_buffer memory;
    pinned_buffer staging;
    stream queue;  // the first to go: it waits for the copies from and to the memory above
};

pin_options generous() {
    pin_options options;
    options.budget_bytes = generous_pin_budget;
    return options;
}

/// A kernel faults. Waiting for its stream, and recording an event after that, must be fatal errors, and the
/// process must exit without a signal.
int meet_sticky_error() {
    const device gpu = device::cuda(0);
    holdings held(gpu);
    launch_fault(to_cuda(held.queue));
    std::string first;
    try {
        held.queue.synchronize();
    } catch (const fatal_device_error& failure) {
        first = failure.what();
    }
    std::printf("first: %s\n", first.c_str());
    std::string later;
    try {
        held.mark.record(held.queue);
    } catch (const fatal_device_error& failure) {
        later = failure.what();
    }
    std::printf("later: %s\n", later.c_str());
    return !first.empty() && !later.empty() ? 0 : 1;
}

/// Static objects may outlive CUDA's runtime, or the runtime may outlive them: both must work.
int end_with_static_objects() {
    static holdings held(device::cuda(0));
    static auto memory = std::make_shared<memory_region>(memory_region::anonymous(mebibyte));
    static pinned_pages pages({{memory->bytes(), "an array in memory", memory}}, device::cuda(0), generous());
    pages.require();
    copy_to_device_async(held.memory.data(), held.staging.bytes(), held.queue);
    held.mark.record(held.queue);
    std::printf("ending\n");
    return 0;
}

/// Calls std::exit while copies are in flight.
int end_in_flight() {
    holdings held(device::cuda(0));
    for (int i = 0; i < 20; ++i)
        copy_to_device_async(held.memory.data(), held.staging.bytes(), held.queue);
    std::printf("ending\n");
    std::fflush(stdout);
    std::exit(0);
}

/// If the device is too small for a second context, or it cannot be created, host memory is registered in the
/// primary context. Unregistering then waits for all work in it.
int stream_in_primary_context() {
    const detail::cuda::scoped_failure_hook refuse([](std::string_view call) {
        return call == "cuCtxCreate" ? cudaErrorMemoryAllocation : cudaSuccess;
    });
    const temporary_folder folder;
    const std::filesystem::path path = folder / "rows.npy";
    write_random_rows(path, 2048, 12'801, 8);  // 200 MiB, in rows that divide no piece of the registration
    loader on_host({open_npy(path)}, {.device = device::host()});
    const std::uint64_t expected = digest_of(on_host);
    const device gpu = device::cuda(0);
    bool right = detail::cuda::context::for_host_memory(0).is_primary();
    std::printf("in the primary context: %d\n", right ? 1 : 0);
    for (const order order : {order::sequential, order::shuffled}) {
        const loader_options options{.device = gpu,
                                     .batch_rows = 50,
                                     .order = order,
                                     .epochs = 3,
                                     .pin_budget_bytes = generous_pin_budget};
        loader whole({open_npy(path)}, options);
        const std::uint64_t found = digest_of(whole);
        const loader_report report = whole.report();
        const std::string route(to_string(report.route));
        std::printf("%s: digest %s, route %s, %s\n", order == order::sequential ? "sequential" : "shuffled",
                    found == 3 * expected ? "right" : "WRONG", route.c_str(), report.reason.c_str());
        right = right && found == 3 * expected && report.route == route::copy;
        // ends in the middle: with copies on their way, and pages registered or about to be
        for (const int batches : {0, 1, 20}) {
            const stream stream(gpu);
            loader begun({open_npy(path)}, options);
            for (int i = 0; i < batches; ++i)
                right = begun.next(stream).has_value() && right;
        }
    }
    std::printf("ending\n");
    return right ? 0 : 1;
}

/// The first loader of a process begins to gather on the device while a consumer's stream is blocked, and
/// the consumer asks for further batches before it unblocks the stream.
int stream_beside_a_blocked_stream() {
    const device gpu = device::cuda(0);
    loader loader({numbered_rows(400, 512)}, {.device = gpu,
                                              .batch_rows = 10,
                                              .order = order::shuffled,
                                              .epochs = 10,
                                              .slots = 3,
                                              .pin_budget_bytes = generous_pin_budget});
    const stream blocked(gpu);
    const stream other(gpu);
    gate gate;
    hold(blocked, gate);
    bool right = loader.next(blocked).has_value();
    for (int i = 1; i < 400; ++i) {
        const auto batch = loader.next(other);
        right = right && batch && holds_its_rows(*batch, other);
    }
    gate.open();
    blocked.synchronize();
    const std::string route(to_string(loader.report().route));
    std::printf("rows %s, route %s\n", right ? "right" : "WRONG", route.c_str());
    return right ? 0 : 1;
}

/// The first step of flat parameters, and the first change of their rate, while a stream is blocked.
int step_beside_a_blocked_stream() {
    const device gpu = device::cuda(0);
    const stream stream(gpu);
    flat_parameters flat({{"w", dtype::of<float>(), {1000}}}, {adam{}}, stream,
                         {.nonfinite = nonfinite_gradients::skip});
    const pinflow::stream blocked(gpu);
    gate gate;
    hold(blocked, gate);
    flat.set_rate_async(0, 0.5, stream);
    flat.step_async(stream);
    const std::uint64_t steps = flat.read_progress(stream).steps;
    gate.open();
    blocked.synchronize();
    std::printf("%llu step\n", static_cast<unsigned long long>(steps));
    return 0;
}

/// On a device without clusters, rows are gathered by single thread blocks.
int gather_without_clusters() {
    std::atomic<int> pairs = 0;
    std::atomic<int> asked = 0;
    const detail::cuda::scoped_failure_hook hook([&](std::string_view call) {
        if (call == "cudaLaunchKernelExC") ++pairs;
        if (call == "cudaOccupancyMaxActiveClusters") ++asked;
        return call == "cudaOccupancyMaxActiveClusters" ? cudaErrorNotSupported : cudaSuccess;
    });
    const device gpu = device::cuda(0);
    loader loader({numbered_rows(400, 512)}, {.device = gpu,
                                              .batch_rows = 10,
                                              .order = order::shuffled,
                                              .route = route::direct,
                                              .pin_budget_bytes = generous_pin_budget});
    const stream stream(gpu);
    int batches = 0;
    bool right = true;
    while (const auto batch = loader.next(stream)) {
        right = holds_its_rows(*batch, stream) && right;
        ++batches;
    }
    const std::string route(to_string(loader.report().route));
    std::printf("asked %d, %d batches %s, route %s, %d launched in pairs\n", asked.load(), batches,
                right ? "right" : "WRONG", route.c_str(), pairs.load());
    return right ? 0 : 1;
}

/// Kernels cannot be loaded: prints the error if the build has no code for the GPU, and the error of another
/// failure.
int fail_to_load_kernels() {
    for (const cudaError_t status : {cudaErrorNoKernelImageForDevice, cudaErrorMemoryAllocation}) {
        const detail::cuda::scoped_failure_hook hook([status](std::string_view call) {
            return call == "cudaFuncGetAttributes" ? status : cudaSuccess;
        });
        std::printf("%s\n", message_of<device_error>([] { device::cuda(0); }).c_str());
    }
    return 0;
}

struct outcome {
    int status = -1;
    std::string output;
};

/// Runs this program as a new process in which kernels are loaded at their first launch, which is CUDA's
/// default.
outcome run_child(const std::string& name) {
    const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
    std::FILE* const pipe = ::popen(
        ("CUDA_MODULE_LOADING=LAZY timeout 60 '" + self + "' --child " + name + " 2>&1").c_str(), "r");
    REQUIRE(pipe != nullptr);
    outcome result;
    std::array<char, 4096> block{};
    while (const std::size_t size = std::fread(block.data(), 1, block.size(), pipe)) {
        result.output.append(block.data(), size);
    }
    const int status = ::pclose(pipe);
    result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return result;
}

/// Resident memory of this process, in bytes.
std::uint64_t resident_bytes() {
    std::ifstream statm("/proc/self/statm");
    std::uint64_t total = 0;
    std::uint64_t resident = 0;
    statm >> total >> resident;
    return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

void begin_and_end(const std::shared_ptr<const mapped_file>& file) {
    const device gpu = device::cuda(0);
    holdings held(gpu);
    const pinned_pages pages({{file->bytes(), "'x.bin'", file}}, gpu, generous());
    pages.require();
    copy_to_device_async(held.memory.data(), file->bytes(), held.queue);
    copy_to_host_async(held.staging.bytes(), held.memory.data(), held.queue);
    held.queue.host_function_async([] {});
    held.mark.record(held.queue);
    held.memory.release_after({&held.mark, 1});
    held.queue.synchronize();
}

}  // namespace

int run_as_child(std::string_view name) {
    if (name == "sticky") return meet_sticky_error();
    if (name == "static") return end_with_static_objects();
    if (name == "flight") return end_in_flight();
    if (name == "primary") return stream_in_primary_context();
    if (name == "blocked") return stream_beside_a_blocked_stream();
    if (name == "step") return step_beside_a_blocked_stream();
    if (name == "clusterless") return gather_without_clusters();
    if (name == "unloadable") return fail_to_load_kernels();
    std::fprintf(stderr, "no child of that name\n");
    return 2;
}

TEST_CASE("cuda process: after a kernel's fault, waiting and recording an event are fatal errors") {
    const outcome child = run_child("sticky");
    INFO(child.output);
    CHECK(child.status == 0);
    CHECK(contains(child.output,
                   "first: cannot finish the work of a stream on cuda:0: cudaErrorIllegalAddress"));
    CHECK(contains(child.output, "later: cannot record an event on cuda:0: cudaErrorIllegalAddress"));
    CHECK(contains(child.output, "CUDA cannot be used any more in this process"));
}

TEST_CASE("cuda process: a sticky error is fatal for later calls, too, and destructors stay silent") {
    const device gpu = device::cuda(0);
    const stream outside(gpu);
    {
        const detail::cuda::scoped_failure_hook hook([](std::string_view call) {
            return call == "cudaEventRecord" ? cudaErrorLaunchFailure : cudaSuccess;
        });
        const stream inside(gpu);
        event mark(gpu);
        CHECK_THROWS_AS(mark.record(inside), fatal_device_error);
        CHECK_THROWS_AS(outside.synchronize(), fatal_device_error);
        CHECK_THROWS_AS(stream{gpu}, fatal_device_error);
        CHECK(contains(message_of<fatal_device_error>([&] { outside.done(); }), "cudaErrorLaunchFailure"));
    }
    outside.synchronize();  // the sticky error was injected, and is cleared with the hook
}

TEST_CASE("cuda process: an error that is not sticky leaves the device usable") {
    const device gpu = device::cuda(0);
    const stream queue(gpu);
    event mark(gpu);
    {
        const detail::cuda::scoped_failure_hook hook([](std::string_view call) {
            return call == "cudaEventRecord" ? cudaErrorInvalidResourceHandle : cudaSuccess;
        });
        const std::string reason = message_of<device_error>([&] { mark.record(queue); });
        CHECK(contains(reason, "cannot record an event on cuda:0: cudaErrorInvalidResourceHandle ("));
        CHECK_FALSE(contains(reason, "any more"));
    }
    mark.record(queue);
    mark.synchronize();
}

TEST_CASE("cuda process: destructors stay silent while CUDA is unloading") {
    const device gpu = device::cuda(0);
    bool unloading = false;
    const detail::cuda::scoped_failure_hook hook(
        [&](std::string_view) { return unloading ? cudaErrorCudartUnloading : cudaSuccess; });
    {
        const stream queue(gpu);
        const event mark(gpu);
        unloading = true;
    }
    unloading = false;
    const stream next(gpu);
    next.synchronize();
}

TEST_CASE("cuda process: a forked child gets an error, and the parent continues") {
    const device gpu = device::cuda(0);
    holdings held(gpu);
    const ::pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        const std::string stream_error = message_of<device_error>([&] { const stream in_child(gpu); });
        const std::string event_error = message_of<device_error>([&] { held.mark.record(held.queue); });
        const bool told = contains(stream_error, "before this process was forked") &&
                          contains(event_error, "before this process was forked");
        {
            const holdings ends_quietly = std::move(held);
        }
        ::_exit(told && device::cuda_count() == 0 ? 0 : 1);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    held.mark.record(held.queue);
    held.mark.synchronize();
}

TEST_CASE("cuda process: a process ends well with static objects, and with work in flight") {
    for (const char* const name : {"static", "flight"}) {
        const outcome child = run_child(name);
        INFO(child.output);
        CHECK(child.status == 0);
        CHECK(child.output == "ending\n");
    }
}

TEST_CASE("cuda process: if no second context can be created, everything runs in the primary context") {
    const outcome child = run_child("primary");
    INFO(child.output);
    CHECK(child.status == 0);
    CHECK(contains(child.output, "in the primary context: 1\n"));
    CHECK(contains(child.output, "sequential: digest right, route copy, "));
    CHECK(contains(child.output, "shuffled: digest right, route copy, "));
    CHECK(child.output.ends_with("ending\n"));
}

TEST_CASE("cuda process: the first loader of a process gathers on the device beside a blocked stream") {
    const outcome child = run_child("blocked");
    INFO(child.output);
    CHECK(child.status == 0);
    CHECK(child.output == "rows right, route direct\n");
}

TEST_CASE("cuda process: flat parameters make their first step beside a blocked stream") {
    const outcome child = run_child("step");
    INFO(child.output);
    CHECK(child.status == 0);
    CHECK(child.output == "1 step\n");
}

TEST_CASE("cuda process: without clusters, rows are gathered by single thread blocks") {
    const outcome child = run_child("clusterless");
    INFO(child.output);
    CHECK(child.status == 0);
    CHECK(child.output == "asked 1, 40 batches right, route direct, 0 launched in pairs\n");
}

TEST_CASE("cuda process: only a build without code for the GPU is reported as such") {
    const outcome child = run_child("unloadable");
    INFO(child.output);
    CHECK(child.status == 0);
    const std::size_t second = child.output.find('\n') + 1;
    CHECK(contains_all(
        child.output.substr(0, second),
        {"cannot use cuda:0", "no code for its compute capability", "cudaErrorNoKernelImageForDevice"}));
    CHECK(contains_all(child.output.substr(second),
                       {"cannot load kernels on cuda:0", "cudaErrorMemoryAllocation"}));
    CHECK_FALSE(contains(child.output.substr(second), "no code"));
}

TEST_CASE(
    "cuda process: objects made and destroyed a hundred times leave no device memory or pinned memory "
    "behind") {
    const temporary_folder folder;
    write_bytes(folder / "x.bin", pattern_bytes(8 * mebibyte));
    const auto file =
        std::make_shared<mapped_file>(std::make_shared<input_file>(folder / "x.bin"), 0, 8 * mebibyte);
    for (int i = 0; i < 10; ++i)
        begin_and_end(file);
    const std::uint64_t free_before = device::cuda(0).memory().free_bytes;
    const std::uint64_t resident_before = resident_bytes();
    const std::size_t descriptors_before = open_descriptors();
    for (int i = 0; i < 100; ++i)
        begin_and_end(file);
    CHECK(device::cuda(0).memory().free_bytes + 32 * mebibyte >= free_before);
    CHECK(resident_bytes() <= resident_before + 16 * mebibyte);
    CHECK(open_descriptors() <= descriptors_before + 2);
}
