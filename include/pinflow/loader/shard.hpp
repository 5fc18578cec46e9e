#pragma once

namespace pinflow {

/// How to deliver the samples at the end of an epoch that do not fill a batch for every rank.
enum class tail {
    partial,  ///< split evenly among the ranks, as smaller batches: every position once
    drop,     ///< left out: all batches are full, and all ranks have the same number of them
};

/// The part of every epoch that one of several processes delivers: ranks take batches in turn. Ranks with
/// equal options (data, order, seed, batch size, tail) never deliver the same position of an epoch. Together
/// they deliver every position, except those that `tail::drop` leaves out.
///
/// With batches of B samples and W ranks, step s of an epoch covers the next W*B positions of the order: rank
/// r takes [(sW+r)B, (sW+r+1)B). The T < W*B remaining positions are one more step, of which rank r takes
/// [T*r/W, T*(r+1)/W): at most B each. A rank whose part is empty has no batch in that step.
struct shard {
    unsigned rank = 0;   ///< below `world`
    unsigned world = 1;  ///< processes that share the work

    friend bool operator==(const shard&, const shard&) = default;
};

/// Reads the shard of this process from the launcher's environment variables. Uses the first of these pairs
/// of which a variable is set: torchrun's RANK and WORLD_SIZE, Open MPI's OMPI_COMM_WORLD_RANK and _SIZE,
/// MPICH's and Intel MPI's PMI_RANK and PMI_SIZE, Slurm's SLURM_PROCID and SLURM_NTASKS. Do not call it while
/// another thread changes the environment.
/// @throws invalid_argument if none is set, if one of the pair is missing, if they are not numbers, or if the
/// rank is not below the world size.
shard shard_from_environment();

}  // namespace pinflow
