// With PINFLOW_TEST_SINGLE_COPIES set, tests run as with a driver that has no batch copies:
// compute-sanitizer's initcheck does not see what those write, and takes it for never written.
#include <doctest/doctest.h>

#include <cstdlib>
#include <optional>
#include <string_view>

#include "src/device/cuda/api.hpp"
#include "tests/listener.hpp"

namespace {

using namespace pinflow::detail;

struct single_copies : listener {
    using listener::listener;
    void test_run_start() override {
        if (std::getenv("PINFLOW_TEST_SINGLE_COPIES") == nullptr) return;
        hook_.emplace([](std::string_view call) {
            return call == "cudaMemcpyBatchAsync" ? cudaErrorNotSupported : cudaSuccess;
        });
    }
    void test_run_end(const doctest::TestRunStats&) override { hook_.reset(); }

 private:
    std::optional<cuda::scoped_failure_hook> hook_;
};

}  // namespace

DOCTEST_REGISTER_LISTENER("single_copies", 1, single_copies);
