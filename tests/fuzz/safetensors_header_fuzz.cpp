// Feeds arbitrary bytes to parse_safetensors_header, as a file and as the JSON in one. Run it with the folder
// of seeds and the dictionary beside this file:
//   safetensors_header_fuzz -dict=safetensors_header.dict -max_len=2048 CORPUS seeds/safetensors_header
// Copy every input that fails to regressions/safetensors_header: tests/safetensors_header_test.cpp replays
// them.

#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/safetensors_header_invariants.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view bytes(reinterpret_cast<const char*>(data), size);
    const std::string broken = safetensors_header_invariants::broken_for(bytes);
    if (!broken.empty()) {
        std::fprintf(stderr, "%s\n", broken.c_str());
        std::abort();
    }
    return 0;
}
