#include "src/cli/stop_request.hpp"

#include <ctime>

#include <atomic>
#include <cstdint>

namespace pinflow::cli {

namespace {

// written by a handler that runs on any thread
std::atomic<int> received = 0;
std::atomic<std::int64_t> received_ms = 0;
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free);

std::int64_t monotonic_ms() {
    ::timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

void note(int signal) {
    constexpr std::int64_t same_request_ms = 1000;
    int none = 0;
    if (received.compare_exchange_strong(none, signal)) {
        received_ms = monotonic_ms();
    } else if (received_ms != 0 && monotonic_ms() - received_ms > same_request_ms) {
        std::signal(signal, SIG_DFL);
        std::raise(signal);
    }
}

void install(int signal, struct sigaction& before) {
    struct sigaction noting = {};
    noting.sa_handler = note;
    noting.sa_flags = SA_RESTART;
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) ::sigaction(signal, &noting, nullptr);
}

}  // namespace

stop_request::stop_request() {
    received = 0;
    received_ms = 0;
    install(SIGINT, interrupted_before_);
    install(SIGTERM, terminated_before_);
}

stop_request::~stop_request() {
    ::sigaction(SIGINT, &interrupted_before_, nullptr);
    ::sigaction(SIGTERM, &terminated_before_, nullptr);
}

int stop_request::signal() noexcept {
    return received;
}

}  // namespace pinflow::cli
