// With PINFLOW_TEST_SINGLE_COPIES set, tests run as with a driver that has no batch copies:
// compute-sanitizer's initcheck does not see what those write, and takes it for never written.
#include <doctest/doctest.h>

#include <cstdlib>
#include <optional>
#include <string_view>

#include "src/device/cuda/api.hpp"

namespace {

using namespace pinflow::detail;

struct single_copies : doctest::IReporter {
    explicit single_copies(const doctest::ContextOptions&) {}
    void report_query(const doctest::QueryData&) override {}
    void test_run_start() override {
        if (std::getenv("PINFLOW_TEST_SINGLE_COPIES") == nullptr) return;
        hook_.emplace([](std::string_view call) {
            return call == "cudaMemcpyBatchAsync" ? cudaErrorNotSupported : cudaSuccess;
        });
    }
    void test_run_end(const doctest::TestRunStats&) override { hook_.reset(); }
    void test_case_start(const doctest::TestCaseData&) override {}
    void test_case_reenter(const doctest::TestCaseData&) override {}
    void test_case_end(const doctest::CurrentTestCaseStats&) override {}
    void test_case_exception(const doctest::TestCaseException&) override {}
    void subcase_start(const doctest::SubcaseSignature&) override {}
    void subcase_end() override {}
    void log_assert(const doctest::AssertData&) override {}
    void log_message(const doctest::MessageData&) override {}
    void test_case_skipped(const doctest::TestCaseData&) override {}

 private:
    std::optional<cuda::scoped_fault_hook> hook_;
};

}  // namespace

DOCTEST_REGISTER_LISTENER("single_copies", 1, single_copies);
