#include "pinflow/loader/shard.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"

using namespace pinflow;

namespace {

constexpr const char* every_variable[] = {"RANK",         "WORLD_SIZE",  "OMPI_COMM_WORLD_RANK",
                                          "PMI_RANK",     "PMI_SIZE",    "OMPI_COMM_WORLD_SIZE",
                                          "SLURM_PROCID", "SLURM_NTASKS"};

/// Sets these variables and unsets all others of `every_variable`. The destructor restores what was there
/// before.
class environment {
 public:
    explicit environment(const std::map<std::string, std::string>& variables) {
        for (const char* const name : every_variable) {
            if (const char* const value = std::getenv(name)) before_[name] = value;
            ::unsetenv(name);
        }
        for (const auto& [name, value] : variables)
            ::setenv(name.c_str(), value.c_str(), 1);
    }
    environment(const environment&) = delete;
    environment& operator=(const environment&) = delete;
    ~environment() {
        for (const char* const name : every_variable)
            ::unsetenv(name);
        for (const auto& [name, value] : before_)
            ::setenv(name.c_str(), value.c_str(), 1);
    }

 private:
    std::map<std::string, std::string> before_;
};

std::string refusal(const std::map<std::string, std::string>& variables) {
    const environment environment(variables);
    try {
        static_cast<void>(shard_from_environment());
    } catch (const invalid_argument& failure) {
        return failure.what();
    }
    return "it was not refused";
}

shard shard_in(const std::map<std::string, std::string>& variables) {
    const environment environment(variables);
    return shard_from_environment();
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("shard: is read from the variables of torchrun, MPI or Slurm") {
    CHECK(shard_in({{"RANK", "3"}, {"WORLD_SIZE", "8"}}) == shard{3, 8});
    CHECK(shard_in({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}) == shard{0, 1});
    CHECK(shard_in({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}) == shard{1, 2});
    CHECK(shard_in({{"SLURM_PROCID", "127"}, {"SLURM_NTASKS", "128"}}) == shard{127, 128});
}

TEST_CASE("shard: the innermost launcher counts") {
    CHECK(shard_in({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}}) ==
          shard{3, 8});
    CHECK(shard_in({{"PMI_RANK", "3"}, {"PMI_SIZE", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}}) ==
          shard{3, 8});
}

TEST_CASE("shard: an environment without a launcher's variables is an error that names the variables") {
    const std::string sentence = refusal({});
    for (const char* const name : every_variable)
        CHECK(contains(sentence, name));
}

TEST_CASE("shard: one variable without the other is an error that names both") {
    const std::string no_world = refusal({{"RANK", "2"}});
    CHECK(contains(no_world, "RANK is '2', but WORLD_SIZE is not set"));
    // and no other launcher is asked then
    const std::string no_rank = refusal({{"WORLD_SIZE", "4"}, {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
    CHECK(contains(no_rank, "WORLD_SIZE is '4', but RANK is not set"));
    CHECK(contains(refusal({{"SLURM_PROCID", "0"}}), "SLURM_NTASKS is not set"));
}

TEST_CASE("shard: a value that is no number, or no rank of the world, is an error that says so") {
    for (const char* const value : {"", " 1", "1 ", "-1", "+1", "1.0", "0x1", "one", "4294967296", "1\n"}) {
        CAPTURE(value);
        CHECK(contains(refusal({{"RANK", value}, {"WORLD_SIZE", "8"}}), "RANK is '"));
        CHECK(contains(refusal({{"RANK", "0"}, {"WORLD_SIZE", value}}), "WORLD_SIZE is"));
    }
    CHECK(contains(refusal({{"RANK", "8"}, {"WORLD_SIZE", "8"}}), "RANK is 8 and WORLD_SIZE is 8"));
    CHECK(contains(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), "RANK is 0 and WORLD_SIZE is 0"));
}
