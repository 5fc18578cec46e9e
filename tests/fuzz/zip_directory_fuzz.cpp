// Feeds arbitrary bytes to the readers of .npz files: the directory, each member's headers, and inflating.
// Run it with the folder of seeds and the dictionary beside this file:
//   zip_directory_fuzz -dict=zip_directory.dict -max_len=2048 CORPUS seeds/zip_directory
// Copy every input that fails to regressions/zip_directory: tests/npz_damage_test.cpp replays them.

#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/zip_directory_invariants.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string broken = zip_directory_invariants::broken_for(std::as_bytes(std::span(data, size)));
    if (!broken.empty()) {
        std::fprintf(stderr, "%s\n", broken.c_str());
        std::abort();
    }
    return 0;
}
