// Feeds arbitrary bytes to the readers of descriptions of HDF5 datasets. Run it with the folder of seeds and
// the dictionary beside this file:
//   hdf5_description_fuzz -max_len=4096 -dict=hdf5_description.dict CORPUS seeds/hdf5_description
// The seeds are those of tests/hdf5_description_test.cpp, which writes them when it is run with
// PINFLOW_WRITE_SEEDS set.
// Copy every input that fails to regressions/hdf5_description: tests/hdf5_description_test.cpp replays them.

#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/hdf5_description_invariants.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string broken = hdf5_description_invariants::broken_for(std::as_bytes(std::span(data, size)));
    if (!broken.empty()) {
        std::fprintf(stderr, "%s\n", broken.c_str());
        std::abort();
    }
    return 0;
}
