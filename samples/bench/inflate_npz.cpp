// pinflow's half of inflate_npz.py: opens every array of a compressed .npz file at once, as often as asked,
// and prints the seconds of each round and the CRC-32 of each array.

#include <zlib.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "pinflow/formats/npz.hpp"

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fputs("usage: inflate_npz FILE.npz ROUNDS\n", stderr);
        return 2;
    }
    try {
        std::vector<std::string> names;
        for (const auto& listing : pinflow::list_npz(argv[1]))
            names.push_back(listing.name);
        std::vector<pinflow::array> arrays;
        for (int round = std::atoi(argv[2]); round > 0; --round) {
            arrays.clear();
            const auto begin = std::chrono::steady_clock::now();
            arrays = pinflow::open_npz(argv[1], names);
            const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
            std::printf("seconds %.4f\n", seconds.count());
        }
        for (std::size_t index = 0; index < arrays.size(); ++index) {
            const auto* const data = reinterpret_cast<const Bytef*>(arrays[index].view().data());
            std::printf("%s %08lx\n", names[index].c_str(), ::crc32_z(0, data, arrays[index].size_bytes()));
        }
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        return 1;
    }
    return 0;
}
