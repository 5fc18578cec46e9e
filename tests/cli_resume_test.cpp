#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/cli_helpers.hpp"
#include "tests/support/temporary_folder.hpp"

// Orders, shards and resuming from a saved state, by the tool.

namespace {

using cli::npy;
using cli::run_json;
using nlohmann::json;
using npy_bytes::read_file;
using npy_bytes::write_file;

constexpr std::uint64_t row_count = 1003;

/// A folder with a file of `row_count` different rows, and what streaming them once gives.
struct rows_in_file {
    rows_in_file() {
        write_file(file, npy("<f4", "(1003, 4)", cli::counting_bytes(row_count * 16)));
        digest = digest_of(run_json({"stream", "--device", "host", file}));
    }

    static std::uint64_t digest_of(const json& streamed) {
        return std::stoull(streamed["digest"].get<std::string>(), nullptr, 16);
    }

    temporary_folder folder;
    std::string file = folder / "a.npy";
    std::uint64_t digest;
};

cli::arguments with(cli::arguments command, const cli::arguments& more) {
    command.insert(command.end(), more.begin(), more.end());
    return command;
}

using variables = std::vector<std::pair<const char*, const char*>>;

/// Sets environment variables as a launcher of ranks does, during its lifetime.
class environment {
 public:
    explicit environment(const variables& set) {
        for (const auto& [name, value] : set) {
            ::setenv(name, value, 1);
            names_.push_back(name);
        }
    }
    ~environment() {
        for (const char* const name : names_)
            ::unsetenv(name);
    }
    environment(const environment&) = delete;
    environment& operator=(const environment&) = delete;

 private:
    std::vector<const char*> names_;
};

/// Whether the process is the tool and has its own handler for the signal, according to /proc.
bool catches(::pid_t process, int signal) {
    const std::string status = read_file("/proc/" + std::to_string(process) + "/status");
    const std::size_t at = status.find("SigCgt:");
    if (!status.starts_with("Name:\tpinflow\n") || at == std::string::npos) return false;
    const std::uint64_t mask = std::stoull(status.substr(at + 7), nullptr, 16);
    return (mask >> (signal - 1) & 1) != 0;
}

}  // namespace

TEST_CASE("cli resume: a state past the last epoch is reported, and nothing is streamed") {
    const rows_in_file rows;
    const std::string state = rows.folder / "s.json";
    run_json({"stream", "--device", "host", rows.file, "--epochs", "2", "--save-state", state});
    const json over =
        run_json({"stream", "--device", "host", rows.file, "--epochs", "2", "--load-state", state});
    CHECK(over["rows"] == 0);
    REQUIRE(over["notes"].size() == 1);
    CHECK(over["notes"][0].get<std::string>().find("2 epochs are done") != std::string::npos);
    const json more =
        run_json({"stream", "--device", "host", rows.file, "--epochs", "3", "--load-state", state});
    CHECK(more["rows"] == row_count);
    CHECK(more["notes"].empty());
}

TEST_CASE("cli: the ranks of a world stream every row once, in every order") {
    const rows_in_file rows;
    for (const cli::arguments& order : std::vector<cli::arguments>{{},
                                                                   {"--order", "shuffled", "--seed", "5"},
                                                                   {"--order", "windowed", "--window", "80"},
                                                                   {"--order", "windowed"}}) {
        CAPTURE(cli::joined(order));
        for (const unsigned world : {1U, 2U, 3U, 7U}) {
            CAPTURE(world);
            std::uint64_t sum = 0, count = 0, most = 0, least = 2 * row_count;
            for (unsigned rank = 0; rank < world; ++rank) {
                const json part =
                    run_json(with({"stream", "--device", "host", rows.file, "--batch", "60", "--rank",
                                   std::to_string(rank), "--world", std::to_string(world), "--epochs", "2"},
                                  order));
                sum += rows_in_file::digest_of(part);
                const std::uint64_t own = part["rows"];
                count += own;
                most = std::max(most, own);
                least = std::min(least, own);
            }
            CHECK(sum == 2 * rows.digest);
            CHECK(count == 2 * row_count);
            CHECK(most - least <= 2);
        }
    }
    // without the tail all ranks have the same number of rows
    for (const char* const rank : {"0", "1", "2"}) {
        const json part = run_json({"stream", "--device", "host", rows.file, "--batch", "60", "--rank", rank,
                                    "--world", "3", "--tail", "drop"});
        CHECK(part["rows"] == 300);
    }
}

TEST_CASE("cli: rank and world come from the environment only when asked for") {
    const rows_in_file rows;
    const cli::arguments command{"stream", "--device", "host", rows.file, "--batch", "60"};
    const environment surroundings(variables{{"RANK", "1"}, {"WORLD_SIZE", "2"}});
    const json all = run_json(command);
    const json given = run_json(with(command, {"--rank", "1", "--world", "2"}));
    const json asked = run_json(with(command, {"--world", "env"}));
    CHECK(all["rows"] == row_count);
    CHECK(asked["digest"] == given["digest"]);
    CHECK(asked["rows"] < all["rows"]);
    {
        const environment half(variables{{"WORLD_SIZE", ""}});
        cli::check_fails(2, with(command, {"--world", "env"}), {"--world env", "WORLD_SIZE"});
    }
    ::unsetenv("RANK");
    cli::check_fails(2, with(command, {"--world", "env"}), {"OMPI_COMM_WORLD_RANK", "SLURM_PROCID"});
}

TEST_CASE("cli: a run that continues from a saved state streams exactly the rows that are left") {
    const rows_in_file rows;
    const std::string state = rows.folder / "state.json";
    const cli::arguments command{"stream",   "--device", "host", rows.file,  "--order",
                                 "shuffled", "--seed",   "9",    "--epochs", "3"};
    // batch size, number of batches; ranks take the same number, and all save the same state
    struct run {
        std::string batch;
        std::string batches;
        unsigned world;
    };
    std::uint64_t sum = 0, count = 0;
    bool first = true;
    for (const run& each : std::vector<run>{{"64", "3", 1},
                                            {"10", "7", 3},
                                            {"1", "1", 2},
                                            {"450", "2", 2},
                                            {"33", "1", 5},
                                            {"100", "100000", 2}}) {
        CAPTURE(each.batch);
        std::set<std::string> saved;
        for (unsigned rank = 0; rank < each.world; ++rank) {
            cli::arguments part =
                with(command,
                     {"--batch", each.batch, "--max-batches", each.batches, "--rank", std::to_string(rank),
                      "--world", std::to_string(each.world), "--save-state", state + std::to_string(rank)});
            if (!first) part = with(part, {"--load-state", state});
            const json streamed = run_json(part);
            sum += rows_in_file::digest_of(streamed);
            count += streamed["rows"].get<std::uint64_t>();
            CHECK(streamed["stopped_by"] == (each.batches == "100000" ? json() : json("max-batches")));
            saved.insert(read_file(state + std::to_string(rank)));
        }
        CHECK(saved.size() == 1);
        write_file(state, *saved.begin());
        first = false;
    }
    CHECK(count == 3 * row_count);
    CHECK(sum == 3 * rows.digest);
    // nothing is left, and that is no error
    CHECK(run_json(with(command, {"--load-state", state}))["rows"] == 0);
    CHECK(run_json({"stream", "--device", "host", rows.file, "--load-state", state, "--epochs",
                    "4"})["rows"] == row_count);
}

TEST_CASE(
    "cli: ranks that end after --max-batches save the same state, even if a rank has no rows of the tail") {
    const temporary_folder folder;
    write_file(folder / "ten.npy", npy("<f4", "(10, 1)", cli::counting_bytes(40)));
    const json whole = run_json({"stream", "--device", "host", folder / "ten.npy", "--epochs", "3"});
    for (const char* const steps : {"1", "2", "3", "4", "5", "6", "7"}) {
        CAPTURE(steps);
        std::set<std::string> states;
        std::uint64_t sum = 0;
        const auto stream = [&](unsigned rank, const cli::arguments& more) {
            const json part =
                run_json(with({"stream", "--device", "host", folder / "ten.npy", "--epochs", "3", "--batch",
                               "3", "--world", "3", "--rank", std::to_string(rank)},
                              more));
            sum += rows_in_file::digest_of(part);
        };
        for (unsigned rank = 0; rank < 3; ++rank) {
            stream(rank, {"--max-batches", steps, "--save-state", folder / std::to_string(rank)});
            states.insert(read_file(folder / std::to_string(rank)));
        }
        CHECK(states.size() == 1);
        for (unsigned rank = 0; rank < 3; ++rank)
            stream(rank, {"--load-state", folder / "0"});
        CHECK(sum == rows_in_file::digest_of(whole));
    }
}

TEST_CASE("cli: a saved state restores its order, and refuses another order and other data") {
    const rows_in_file rows;
    const std::string state = rows.folder / "state.json";
    run_json({"stream", "--device", "host", rows.file, "--order", "windowed", "--window", "100", "--seed",
              "3", "--max-batches", "2", "--save-state", state});
    const json whole = run_json({"stream", "--device", "host", rows.file, "--load-state", state});
    CHECK(whole["rows"] == row_count - 128);
    CHECK(run_json({"stream", "--device", "host", rows.file, "--load-state", state, "--order", "windowed",
                    "--window", "100", "--seed", "3"})["digest"] == whole["digest"]);
    cli::check_fails(1, {"stream", "--device", "host", rows.file, "--load-state", state, "--seed", "4"},
                     {state, "seed 3", "seed 4"});
    cli::check_fails(1,
                     {"stream", "--device", "host", rows.file, "--load-state", state, "--order", "shuffled"},
                     {state, "windowed/1", "shuffled/1"});
    cli::check_fails(1, {"stream", "--device", "host", rows.file, "--load-state", state, "--window", "99"},
                     {state, "100 rows", "99 rows"});
    // with --load-state, too, a wrong value of an option is exit status 2
    cli::check_fails(2, {"stream", "--device", "host", rows.file, "--load-state", state, "--memory", "10"},
                     {"10 bytes"});

    // a copy is the same data; other rows of the same shape are not
    const std::string copy = rows.folder / "copy.npy", other = rows.folder / "other.npy";
    write_file(copy, read_file(rows.file));
    CHECK(run_json({"stream", "--device", "host", copy, "--load-state", state})["digest"] == whole["digest"]);
    write_file(other, npy("<f4", "(1003, 4)", std::string(row_count * 16, 'x')));
    cli::check_fails(1, {"stream", "--device", "host", other, "--load-state", state},
                     {state, "the data differs", "other.npy"});
    cli::check_fails(1, {"stream", "--device", "host", rows.file, rows.file, "--load-state", state},
                     {state, "the data differs"});
}

TEST_CASE("cli: a state that is absent, damaged or cannot be written is a one-line error") {
    const rows_in_file rows;
    const std::string state = rows.folder / "state.json";
    cli::check_fails(1, {"stream", "--device", "host", rows.file, "--load-state", state}, {state});
    run_json({"stream", "--device", "host", rows.file, "--max-batches", "2", "--save-state", state});
    const std::string good = read_file(state);
    for (const std::string& bad :
         {std::string(), std::string("{"), std::string("[]"), std::string("\0\xff", 2),
          good.substr(0, good.size() / 2), good + "{}", std::string("{\"pinflow_loader_state\": 999}"),
          std::string(100'000, '[')}) {
        write_file(state, bad);
        cli::check_fails(1, {"stream", "--device", "host", rows.file, "--load-state", state}, {state});
    }
    // reported before anything is streamed
    const std::string nowhere = rows.folder / "no/state.json";
    cli::check_fails(
        1, {"stream", "--device", "host", rows.file, "--save-state", nowhere, "--epochs", "1000000"},
        {nowhere});
    cli::check_fails(1,
                     {"stream", "--device", "host", rows.file, "--save-state", rows.folder.path().string(),
                      "--epochs", "1000000"},
                     {"directory"});
    // a file that is not a state is not overwritten
    const std::string rows_before = read_file(rows.file);
    cli::check_fails(1, {"stream", "--device", "host", rows.file, "--save-state", rows.file},
                     {"cannot be read as a state"});
    CHECK(read_file(rows.file) == rows_before);
    const std::string fifo = rows.folder / "fifo";
    REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
    cli::check_fails(1, {"stream", "--device", "host", rows.file, "--save-state", fifo}, {"regular"});
    cli::check_fails(1, {"stream", "--device", "host", rows.file, "--save-state", std::string(300, 'x')},
                     {"too long"});
    std::filesystem::remove(fifo);
    CHECK(cli::names_in(rows.folder.path()) == std::set<std::string>{"a.npy", "state.json"});
}

TEST_CASE(
    "cli: with --save-state, SIGINT and SIGTERM save the state, report what was streamed, and end the run") {
    const rows_in_file rows;
    for (const int signal : {SIGINT, SIGTERM}) {
        CAPTURE(signal);
        const std::string state = rows.folder / "state.json", output = rows.folder / "output";
        const cli::arguments command{"stream",       "--device", "host",     rows.file, "--epochs",
                                     "1000000",      "--order",  "shuffled", "--batch", "7",
                                     "--save-state", state,      "--json"};
        const ::pid_t child = ::fork();
        REQUIRE(child != -1);
        if (child == 0) {
            std::vector<char*> argv{const_cast<char*>(PINFLOW_TOOL)};
            for (const std::string& argument : command)
                argv.push_back(const_cast<char*>(argument.c_str()));
            argv.push_back(nullptr);
            std::signal(signal, SIG_DFL);  // it may be ignored here
            const int file = ::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
            if (::dup2(file, STDOUT_FILENO) == -1) ::_exit(126);
            ::execv(argv[0], argv.data());
            ::_exit(127);
        }
        int status = 0;
        while (!catches(child, signal) && ::waitpid(child, &status, WNOHANG) == 0) {
        }
        // twice, as `timeout` signals the process and at once its group
        REQUIRE(::kill(child, signal) == 0);
        REQUIRE(::kill(child, signal) == 0);
        REQUIRE(::waitpid(child, &status, 0) == child);
        REQUIRE(WIFSIGNALED(status));
        CHECK(WTERMSIG(status) == signal);
        const json streamed = json::parse(read_file(output), nullptr, false);
        REQUIRE(!streamed.is_discarded());
        CHECK(streamed["stopped_by"] == (signal == SIGINT ? "SIGINT" : "SIGTERM"));
        const json saved = json::parse(read_file(state), nullptr, false);
        REQUIRE(!saved.is_discarded());
        const std::uint64_t epoch = saved["epoch"], position = saved["position"];
        CHECK(streamed["rows"] == epoch * row_count + position);
        // the streamed part and the rest of that epoch are all rows
        const json rest = run_json({"stream", "--device", "host", rows.file, "--load-state", state,
                                    "--epochs", std::to_string(epoch + 1)});
        CHECK(rest["rows"] == row_count - position);
        CHECK(rows_in_file::digest_of(streamed) + rows_in_file::digest_of(rest) == (epoch + 1) * rows.digest);
    }
}
