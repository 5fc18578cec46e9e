// Feeds arbitrary bytes to parse_npy_header. Run it with the folder of seeds and the dictionary beside this
// file:
//   npy_header_fuzz -dict=npy_header.dict -max_len=2048 CORPUS seeds/npy_header
// Copy every input that fails to regressions/npy_header: tests/npy_header_hostile_test.cpp replays them.

#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/npy_header_invariants.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string broken = npy_header_invariants::broken_for(std::as_bytes(std::span(data, size)));
    if (!broken.empty()) {
        std::fprintf(stderr, "%s\n", broken.c_str());
        std::abort();
    }
    return 0;
}
