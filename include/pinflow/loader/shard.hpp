#pragma once

namespace pinflow {

/// What becomes of the samples at the end of an epoch that do not fill a batch for every rank.
enum class tail {
    partial,  ///< split evenly among the ranks, as smaller batches: every sample once
    drop,     ///< left out: all batches are full, and every rank has equally many
};

/// The part of every epoch that one of several processes takes: batches in turns. Ranks of equal options
/// (data, order, seed, batch size, tail) never deliver the same sample in an epoch, and together deliver all
/// of it.
///
/// With batches of B samples, step s of an epoch stands for the next W*B positions of the order: rank r takes
/// [(sW+r)B, (sW+r+1)B). The T < W*B positions that are left are one more step, of which rank r takes
/// [T*r/W, T*(r+1)/W): at most B each. A rank that gets none of them has no batch in that step.
struct shard {
    unsigned rank = 0;   ///< below `world`
    unsigned world = 1;  ///< processes that share the work

    friend bool operator==(const shard&, const shard&) = default;
};

/// The shard that this process has been given by what started it: torchrun's RANK and WORLD_SIZE, or else
/// Open MPI's OMPI_COMM_WORLD_RANK and _SIZE, MPICH's and Intel MPI's PMI_RANK and PMI_SIZE, Slurm's
/// SLURM_PROCID and SLURM_NTASKS: the first of these pairs of which a variable is set. Not to be called while
/// another thread changes the environment.
/// @throws invalid_argument when none is set, when one of the pair is missing, and when they are not numbers
/// or no rank of that world.
shard shard_from_environment();

}  // namespace pinflow
