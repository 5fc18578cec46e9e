// One copy of a file's rows for four processes: publishes them as a segment, starts four readers, and prints
// what memory the machine and each reader take.
//
//     share_between_processes FILE
//
// Each reader streams all rows. "of the segment" is the reader's share of the segment's pages (Pss: a page
// that n processes map counts as 1/n), so the shares add up to one copy. "own" is memory that belongs to
// that reader alone.

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/pinflow.hpp"

namespace {

constexpr int reader_count = 4;

/// The sum of all "LABEL: N kB" lines of a file of /proc, in KiB. With `part`, only of mappings whose path
/// contains it.
double kibibytes(const std::string& path, const std::string& label, const std::string& part = {}) {
    std::ifstream file(path);
    double sum = 0;
    bool counts = part.empty();
    for (std::string line; std::getline(file, line);) {
        if (!part.empty() && line.find('-') < line.find(' ')) counts = line.find(part) != std::string::npos;
        if (counts && line.starts_with(label + ":")) sum += std::stod(line.substr(label.size() + 1));
    }
    return sum;
}

/// A reader: streams the segment, then writes one byte. Waits for a byte, prints its digest and its memory,
/// and waits for the end of its input.
int read_segment(const std::string& name) {
    pinflow::install_fault_guard();
    const pinflow::device device = pinflow::device::best();
    const pinflow::array rows = pinflow::open_segment(name);
    pinflow::loader loader({rows}, {.device = device, .batch_rows = 64, .route = pinflow::route::direct});
    pinflow::digest digest(device);
    const pinflow::stream stream(device);
    while (const auto batch = loader.next(stream))
        digest.add_async(*batch, stream);
    const std::uint64_t value = digest.value();
    char byte = 'r';
    if (::write(STDOUT_FILENO, &byte, 1) != 1 || ::read(STDIN_FILENO, &byte, 1) != 1) return 1;
    std::printf("%016llx %.0f %.0f\n", static_cast<unsigned long long>(value),
                kibibytes("/proc/self/smaps", "Pss", name), kibibytes("/proc/self/status", "RssAnon"));
    std::fflush(stdout);
    return static_cast<int>(::read(STDIN_FILENO, &byte, 1));
}

struct reader {
    int to = -1;
    int from = -1;
};

/// Removes the segment in the end, also after an error.
struct published {
    explicit published(std::string segment) : name(std::move(segment)) {}
    published(const published&) = delete;
    published& operator=(const published&) = delete;
    ~published() {
        try {
            pinflow::remove_segment(name);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "%s\n", error.what());
        }
    }
    std::string name;
};

/// Starts this program again, with pipes as its standard input and output.
reader start_reader(const char* program, const std::string& name) {
    int in[2] = {-1, -1};
    int out[2] = {-1, -1};
    if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0) throw std::runtime_error("no pipes");
    const ::pid_t child = ::fork();
    if (child == -1) throw std::runtime_error("cannot fork");
    if (child == 0) {
        ::dup2(in[0], STDIN_FILENO);
        ::dup2(out[1], STDOUT_FILENO);
        ::execl(program, program, "--read", name.c_str(), nullptr);
        ::_exit(127);
    }
    ::close(in[0]);
    ::close(out[1]);
    return {in[1], out[0]};
}

}  // namespace

int main(int argc, char** argv) try {
    if (argc == 3 && std::string(argv[1]) == "--read") return read_segment(argv[2]);
    if (argc != 2) {
        std::fprintf(stderr, "usage: share_between_processes FILE\n");
        return 2;
    }
    const std::string name = "sample-" + std::to_string(::getpid());
    const double before = kibibytes("/proc/meminfo", "Shmem");
    const pinflow::segment_info info = pinflow::publish_file(name, argv[1]).front();
    const published until_the_end(name);
    std::printf("published %.1f MiB; shared memory of the machine: %.1f MiB before, %.1f after\n",
                static_cast<double>(info.size_bytes) / 1048576, before / 1024,
                kibibytes("/proc/meminfo", "Shmem") / 1024);
    std::vector<reader> readers;
    for (int i = 0; i < reader_count; ++i)
        readers.push_back(start_reader("/proc/self/exe", name));
    char byte = 0;
    for (const reader& each : readers)
        if (::read(each.from, &byte, 1) != 1) throw std::runtime_error("a reader has failed");
    std::printf("with %d readers: %.1f MiB\n\nreader  digest           of the segment          own\n",
                reader_count, kibibytes("/proc/meminfo", "Shmem") / 1024);
    double shares = 0;
    std::set<std::string> digests;
    for (const reader& each : readers) {
        if (::write(each.to, "m", 1) != 1) throw std::runtime_error("a reader has ended");
        char line[128] = {};
        char digest[17] = {};
        double share = 0;
        double own = 0;
        if (::read(each.from, line, sizeof line - 1) <= 0 ||
            std::sscanf(line, "%16s %lf %lf", digest, &share, &own) != 3)
            throw std::runtime_error("a reader has failed");
        std::printf("%-7td %s %10.2f MiB %8.2f MiB\n", &each - readers.data() + 1, digest, share / 1024,
                    own / 1024);
        digests.insert(digest);
        shares += share;
    }
    for (const reader& each : readers)
        ::close(each.to);
    while (::wait(nullptr) > 0) {
    }
    const double total = 100 * shares * 1024 / static_cast<double>(info.size_bytes);
    std::printf("distinct digests: %zu, the readers' shares of memory add up to %.1f %% of the data\n",
                digests.size(), total);
    if (digests.size() != 1) throw std::runtime_error("the readers have read different data");
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "share_between_processes: %s\n", error.what());
    return 1;
}
