// Feeds arbitrary bytes to read_trailer. Run it with the folder of seeds and the dictionary beside this file:
//   segment_trailer_fuzz -dict=segment_trailer.dict -max_len=256 CORPUS seeds/segment_trailer
// Copy every input that fails to regressions/segment_trailer: tests/segment_trailer_test.cpp replays them.

#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/segment_trailer_invariants.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string broken = segment_trailer_invariants::broken_for(std::as_bytes(std::span(data, size)));
    if (!broken.empty()) {
        std::fprintf(stderr, "%s\n", broken.c_str());
        std::abort();
    }
    return 0;
}
