// One of many processes that share a file: each streams its own part of every epoch, in one shuffled order
// that all of them agree on. Rank and world size come from the launcher: torchrun, MPI, Slurm, or a shell:
//
//     for rank in 0 1 2 3; do RANK=$rank WORLD_SIZE=4 many_ranks FILE EPOCHS & done; wait
//
// Each prints its rows and their digest. Digests add up: their sum is EPOCHS times the file's digest (printed
// by `pinflow stream FILE`), modulo 2^64, because every row comes once an epoch.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "pinflow/pinflow.hpp"

int main(int argc, char** argv) try {
    if (argc != 3) {
        std::fprintf(stderr, "usage: many_ranks FILE EPOCHS\n");
        return 2;
    }
    pinflow::install_fault_guard();  // lets the CPU copy rows from mappings; otherwise it uses pread
    const pinflow::shard mine = pinflow::shard_from_environment();
    // on a machine with several GPUs each rank would take its own: pinflow::device::cuda(local rank)
    const pinflow::device device = pinflow::device::best();
    pinflow::loader loader({pinflow::open_rows(argv[1])}, {.device = device,
                                                           .batch_rows = 32,
                                                           .order = pinflow::order::shuffled,
                                                           .seed = 42,  // the same on all ranks
                                                           .epochs = std::strtoull(argv[2], nullptr, 10),
                                                           .shard = mine});

    pinflow::digest digest(device);
    const pinflow::stream stream(device);
    std::uint64_t rows = 0;
    while (const auto batch = loader.next(stream)) {
        digest.add_async(*batch, stream);  // a training step goes here
        rows += batch->row_count();
    }
    std::printf("rank %u of %u: %llu rows, digest %016llx\n", mine.rank, mine.world,
                static_cast<unsigned long long>(rows), static_cast<unsigned long long>(digest.value()));
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "many_ranks: %s\n", error.what());
    return 1;
}
