// main for the doctest executables that have none of their own: doctest's own, except that a run without any
// case fails, so that a filter that matches nothing is no success.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>

#include "tests/listener.hpp"

namespace {

unsigned cases_run = 0;

struct case_counter : listener {
    using listener::listener;
    void test_case_start(const doctest::TestCaseData&) override { ++cases_run; }
};

}  // namespace

DOCTEST_REGISTER_LISTENER("case_counter", 1, case_counter);

int main(int argc, char** argv) {
    // by default all CUDA streams share 8 queues, so a stream blocked by a test would block others
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
