#include "pinflow/loader/shard.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "pinflow/error.hpp"
#include "src/core/quote.hpp"

namespace pinflow {

namespace {

/// The environment variables that a launcher sets for its processes.
struct variable_pair {
    const char* rank;
    const char* world;
};

// the innermost launcher first: torchrun may run within an MPI job, and both within a Slurm allocation
constexpr std::array known_pairs{
    variable_pair{"RANK", "WORLD_SIZE"}, variable_pair{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    variable_pair{"PMI_RANK", "PMI_SIZE"}, variable_pair{"SLURM_PROCID", "SLURM_NTASKS"}};

unsigned parse(const char* variable, std::string_view value) {
    unsigned number = 0;
    const char* const end = value.data() + value.size();
    const auto [stopped, error] = std::from_chars(value.data(), end, number);
    if (error != std::errc() || stopped != end) {
        throw invalid_argument(
            fmt::format("the environment variable {} is {}, which is not a whole number from 0 to 4294967295",
                        variable, detail::quote(value)));
    }
    return number;
}

shard parse(const variable_pair& names, const char* rank, const char* world) {
    if (rank == nullptr || world == nullptr) {
        throw invalid_argument(fmt::format(
            "the environment variable {} is {}, but {} is not set: both are needed to know this process's "
            "rank",
            rank == nullptr ? names.world : names.rank, detail::quote(rank == nullptr ? world : rank),
            rank == nullptr ? names.rank : names.world));
    }
    const shard parsed{parse(names.rank, rank), parse(names.world, world)};
    if (parsed.rank >= parsed.world) {
        throw invalid_argument(
            fmt::format("the environment variable {} is {} and {} is {}: a rank is less than the number of "
                        "processes",
                        names.rank, parsed.rank, names.world, parsed.world));
    }
    return parsed;
}

}  // namespace

shard shard_from_environment() {
    for (const variable_pair& names : known_pairs) {
        // NOLINTNEXTLINE(concurrency-mt-unsafe): callers must not change the environment meanwhile
        const char* const rank = std::getenv(names.rank);
        const char* const world = std::getenv(names.world);  // NOLINT(concurrency-mt-unsafe)
        if (rank != nullptr || world != nullptr) return parse(names, rank, world);
    }
    std::string looked_for;
    for (const variable_pair& names : known_pairs)
        looked_for += fmt::format("{}{} and {}", looked_for.empty() ? "" : ", ", names.rank, names.world);
    throw invalid_argument(fmt::format(
        "the environment does not say which rank this process has: none of {} is set", looked_for));
}

}  // namespace pinflow
