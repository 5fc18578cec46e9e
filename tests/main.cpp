// main for every doctest executable: doctest's own, except that a run without a single case has failed (a
// filter that matches nothing must not look like success).
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>

namespace {

unsigned cases_run = 0;

struct case_counter : doctest::IReporter {
    explicit case_counter(const doctest::ContextOptions&) {}
    void report_query(const doctest::QueryData&) override {}
    void test_run_start() override {}
    void test_run_end(const doctest::TestRunStats&) override {}
    void test_case_start(const doctest::TestCaseData&) override { ++cases_run; }
    void test_case_reenter(const doctest::TestCaseData&) override {}
    void test_case_end(const doctest::CurrentTestCaseStats&) override {}
    void test_case_exception(const doctest::TestCaseException&) override {}
    void subcase_start(const doctest::SubcaseSignature&) override {}
    void subcase_end() override {}
    void log_assert(const doctest::AssertData&) override {}
    void log_message(const doctest::MessageData&) override {}
    void test_case_skipped(const doctest::TestCaseData&) override {}
};

}  // namespace

DOCTEST_REGISTER_LISTENER("case_counter", 1, case_counter);

int main(int argc, char** argv) {
    // CUDA has all streams share 8 queues unless told otherwise, so that one that a test holds up would hold
    // up others
    ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    doctest::Context context(argc, argv);
    const int status = context.run();
    if (context.shouldExit()) {  // --list-test-cases, --help
        return status;
    }
    if (cases_run == 0) {
        std::fputs("no test case was run: the filters match none\n", stderr);
        return 1;
    }
    return status;
}
