// Elements are cast as numpy casts them, if numpy's result is defined, and as ml_dtypes does, if that is
// installed. Exits with 77 (skipped) if the distribution's Python has no numpy.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include <doctest/doctest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "pinflow/dtype.hpp"
#include "src/core/cast.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using pinflow::dtype;

unsigned cases_run = 0;

/// Runs tests/numpy_casts.py. @return its exit status; 127 when there is no Python.
int run_numpy(std::vector<std::string> arguments) {
    const std::string script = (fs::path(__FILE__).parent_path() / "numpy_casts.py").string();
    arguments.insert(arguments.begin(), {"/usr/bin/python3", script});
    std::vector<char*> pointers;
    pointers.reserve(arguments.size() + 1);
    for (std::string& argument : arguments)
        pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    ::pid_t child = 0;
    if (::posix_spawn(&child, pointers[0], nullptr, nullptr, pointers.data(), environ) != 0) return 127;
    int status = 0;
    if (::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 126;
    return WEXITSTATUS(status);
}

}  // namespace

TEST_CASE("cast and numpy: elements become what numpy's astype makes of them") {
    ++cases_run;
    const temporary_folder folder;
    REQUIRE(run_numpy({"write", folder.path().string()}) == 0);
    std::ifstream cases(folder / "cases.txt");
    std::set<std::string> types;
    unsigned pairs = 0;
    std::uint64_t elements = 0;
    for (std::string name, before, after; cases >> name >> before >> after; ++pairs) {
        CAPTURE(before);
        CAPTURE(after);
        types.insert(before);
        const dtype from = dtype::parse(before);
        const dtype to = dtype::parse(after);
        const std::string source = npy_bytes::read_file(folder / (name + ".before"));
        const std::string expected = npy_bytes::read_file(folder / (name + ".after"));
        const std::uint64_t count = source.size() / from.size_bytes();
        REQUIRE(count > 10);
        REQUIRE(expected.size() == count * to.size_bytes());
        std::vector<std::byte> result(expected.size());
        pinflow::detail::cast_elements(from, npy_bytes::as_bytes(source).data(), to, result.data(), count);
        CHECK(std::memcmp(result.data(), expected.data(), result.size()) == 0);
        elements += count;
    }
    CHECK(pairs >= 132);
    MESSAGE(pairs << " pairs of types, " << elements << " elements");
    if (!types.contains("bfloat16")) MESSAGE("skipped: bfloat16 and fp8, ml_dtypes is not installed");
}

int main(int argc, char** argv) {
    doctest::Context context(argc, argv);
    if (const int status = run_numpy({"check"}); status == 77 || status == 127) {
        std::puts("skipped: /usr/bin/python3 with numpy is not installed");
        return 77;
    }
    const int status = context.run();
    if (context.shouldExit()) return status;
    if (cases_run == 0) {
        std::fputs("no test case was run: the filters match none\n", stderr);
        return 1;
    }
    return status;
}
