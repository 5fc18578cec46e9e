#include "src/cli/stop_request.hpp"

namespace pinflow::cli {

namespace {

volatile std::sig_atomic_t received = 0;

void note(int signal) {
    received = signal;
}

void install(int signal, struct sigaction& before) {
    struct sigaction noting = {};
    noting.sa_handler = note;
    noting.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) ::sigaction(signal, &noting, nullptr);
}

}  // namespace

stop_request::stop_request() {
    received = 0;
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
