#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "sanitized.hpp"
#include "temporary_folder.hpp"

using namespace pinflow;

namespace {

/// Runs in a forked child. @return 0, or the number of the failed step.
int use_in_child(std::unique_ptr<loader>& parents, std::optional<batch>& leased, const stream& stream,
                 const array& rows) {
    const auto refused = [](auto function) {
        try {
            function();
        } catch (const device_error& error) {
            return std::string(error.what()).find("forked") != std::string::npos;
        } catch (...) {  // nothing must get out of the child
            return false;
        }
        return false;
    };
    if (!refused([&] { parents->next(); })) return 1;
    if (!refused([&] { parents->next(stream); })) return 2;
    if (!refused([&] { static_cast<void>(parents->state()); })) return 5;
    if (!refused([&] { static_cast<void>(leased->state()); })) return 6;
    if (!refused([&] { stream.synchronize(); })) return 3;
    if (!refused([&] { static_cast<void>(stream.done()); })) return 7;
    if (stream.device().kind() == device_kind::cuda) {
        // no call reaches CUDA, where it might hang
        if (!refused([&] { loader({rows}, {.device = stream.device()}); })) return 4;
    }
    leased.reset();
    parents.reset();
    return 0;
}

}  // namespace

TEST_CASE("loader: a forked child is refused and exits, and the parent continues") {
    const temporary_folder folder;
    // rows that a GPU takes from the mapped pages, and rows that are staged in the parent's private memory
    write_npy(folder / "large.npy", numbered_rows(100, 8192).view());
    const array large = open_npy(folder / "large.npy");
    const array small = numbered_rows(100);
    on_each_device([&](const device& device) {
        for (const array& rows : {large, small}) {
            const stream stream(device);
            auto parents = std::make_unique<loader>(std::vector<std::shared_ptr<const row_source>>{rows},
                                                    loader_options{.device = device,
                                                                   .batch_rows = 10,
                                                                   .order = order::shuffled,
                                                                   .epochs = 3,
                                                                   .slots = 3,
                                                                   .pin_budget_bytes = generous_pin_budget});
            auto leased = parents->next(stream);
            REQUIRE(leased);
            int parent_lives[2] = {-1, -1};
            REQUIRE(::pipe(parent_lives) == 0);
            const ::pid_t child = ::fork();
            REQUIRE(child >= 0);
            if (child == 0) {
                ::alarm(60);  // ends the child if a call hangs, which fails the test
                ::close(parent_lives[1]);
                const int wrong_step = use_in_child(parents, leased, stream, rows);
                char nothing = 0;
                [[maybe_unused]] const auto end = ::read(parent_lives[0], &nothing, 1);  // the parent is done
                ::_exit(wrong_step);
            }
            ::close(parent_lives[0]);
            CHECK(holds_its_rows(*leased, stream));
            leased.reset();
            std::uint64_t seen = 0;
            // fork makes private pages copy-on-write: locked pages must stay with the parent
            while (const auto batch = parents->next(stream)) {
                CHECK(holds_its_rows(*batch, stream));
                seen += batch->row_count();
            }
            CHECK(seen == 290);
            ::close(parent_lives[1]);
            int status = -1;
            REQUIRE(::waitpid(child, &status, 0) == child);
            CHECK(WIFEXITED(status));
            CHECK(WEXITSTATUS(status) == 0);
        }
    });
}

TEST_CASE("loader: a child that is forked while loaders begin can use a loader of its own") {
    if (sanitized) return;  // ThreadSanitizer ends children that start threads
    const array rows = numbered_rows(2000, 100);
    const auto make = [&] {
        return std::make_unique<loader>(std::vector<std::shared_ptr<const row_source>>{rows},
                                        loader_options{.batch_rows = 16, .order = order::shuffled});
    };
    for (int round = 0; round < 20; ++round) {
        const auto parents = make();
        const ::pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            ::alarm(30);  // ends the child if a call hangs, which fails the test
            std::uint64_t seen = 0;
            const auto own = make();
            while (const auto batch = own->next())
                seen += batch->row_count();
            ::_exit(seen == 2000 ? 0 : 1);
        }
        int status = -1;
        REQUIRE(::waitpid(child, &status, 0) == child);
        REQUIRE(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 0);
    }
}
