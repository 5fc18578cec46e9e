#include "loader/stages.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "loader/settings.hpp"
#include "loader/slot_lease.hpp"
#include "pinflow/error.hpp"
#include "src/rows/transfer_planner.hpp"
#include "tests/support/arrays.hpp"

// The loader's stages, run by one thread: no thread of their own, no TBB pipeline.

using namespace pinflow;
using detail::slot_group;

namespace {

/// What a loader's stages work on, for sources on the host device.
struct fixture {
    fixture(std::vector<std::shared_ptr<const row_source>> given, const loader_options& asked,
            unsigned slot_count, std::size_t max_groups = 4)
        : sources(std::move(given)),
          options(detail::resolved(asked, sources)),
          order({.position_count = options.sampler->position_count(),
                 .batch_rows = options.batch_rows,
                 .epochs = options.epochs}),
          checks(sources) {
        std::vector<detail::sample_array> planned = detail::arrays_of(sources, order.row_count());
        const detail::slot_layout layout = detail::lay_out(planned, options);
        detail::plan_sample(detail::facts_of_sample(options, layout, detail::find_budget(options), 1),
                            planned);
        const detail::slot_sizes sizes{.count = slot_count,
                                       .host_side_bytes = layout.side_bytes,
                                       .device_side_bytes = layout.side_bytes};
        const stream allocation_stream(options.device);
        pool =
            std::make_shared<detail::slot_pool>(sizes, sources, detail::device_allocator{allocation_stream});
        const detail::loader_setup setup{.device = options.device,
                                         .allocator = {allocation_stream},
                                         .slot_count = sizes.count,
                                         .max_slot_rows = layout.row_count,
                                         .is_in_order = options.order == order::sequential,
                                         .pinning = {},
                                         .is_stopped = [] { return false; }};
        for (detail::sample_array& each : planned)
            arrays.push_back(detail::make_transfer(std::move(each), setup));
        allocation_stream.synchronize();
        work.emplace(detail::stages::parts{*pool, order, *options.sampler, arrays, checks, nullptr, nullptr},
                     max_groups);
        work->begin();
    }

    /// Takes and samples a group; null if there is none.
    slot_group* sample(std::size_t count) {
        slot_group* const group = work->take(count);
        if (group != nullptr) work->sample(*group);
        return group;
    }
    /// Leases the next batch, which must already have been delivered.
    std::unique_ptr<detail::slot_lease> take() {
        return std::make_unique<detail::slot_lease>(pool, *pool->lease());
    }
    std::vector<std::shared_ptr<const row_source>> sources;
    loader_options options;
    detail::schedule order;
    std::shared_ptr<detail::slot_pool> pool;
    std::vector<std::unique_ptr<detail::array_transfer>> arrays;
    detail::file_checks checks;
    std::optional<detail::stages> work;
};

/// Whether a leased slot of numbered rows holds what it says, in its first array.
bool holds_its_rows(const detail::slot& slot) {
    const auto* const words = reinterpret_cast<const std::uint64_t*>(slot.arrays[0].data());
    const std::size_t width = slot.arrays[0].size() / slot.row_ids.size();
    for (std::size_t i = 0; i < slot.arrays[0].size(); ++i) {
        if (words[i] != slot.row_ids[i / width]) return false;
    }
    return true;
}

}  // namespace

TEST_CASE("stages: a group passes sample, fill and deliver, and is announced as a whole at the end") {
    fixture loader({numbered_rows(100)},
                   {.device = device::host(), .batch_rows = 10, .order = order::shuffled}, 4);
    slot_group* const group = loader.sample(3);
    REQUIRE(group != nullptr);
    CHECK(group->reached == slot_group::state::sampled);
    REQUIRE(group->slots.size() == 3);
    for (std::uint64_t number = 0; number < 3; ++number) {
        CHECK(group->slots[number]->number == number);
        CHECK(group->slots[number]->row_ids.size() == 10);
    }
    CHECK(loader.sample(2) == nullptr);  // one slot is left
    loader.work->fill(*group);
    CHECK(group->reached == slot_group::state::filled);
    CHECK_FALSE(loader.pool->failed());
    loader.work->deliver(*group);
    CHECK(group->reached == slot_group::state::idle);
    for (std::uint64_t number = 0; number < 3; ++number) {
        const auto lease = loader.take();
        CHECK(lease->leased_slot().number == number);
        CHECK(holds_its_rows(lease->leased_slot()));
    }
}

TEST_CASE("stages: one thread runs all batches of several epochs, in groups of any size") {
    for (const std::size_t together : {1U, 2U, 3U}) {
        CAPTURE(together);
        fixture loader({numbered_rows(95)},
                       {.device = device::host(), .batch_rows = 10, .order = order::shuffled, .epochs = 3},
                       3);
        std::vector<unsigned> seen(95, 0);
        std::uint64_t batches = 0;
        while (batches < 30) {
            // runs until only the consumer can continue: groups of `together` slots, then single slots
            while (loader.work->run_one(together)) {
            }
            while (loader.work->run_one(1)) {
            }
            const std::uint64_t before = batches;
            for (std::uint64_t i = 0; i < 3 && batches < 30; ++i) {
                const auto lease = loader.take();
                CHECK(lease->leased_slot().number == batches++);
                CHECK(holds_its_rows(lease->leased_slot()));
                for (const std::uint64_t row : lease->leased_slot().row_ids)
                    ++seen[row];
            }
            REQUIRE(batches > before);
        }
        CHECK_FALSE(loader.work->more_batches());
        CHECK_FALSE(loader.work->run_one(together));
        CHECK(loader.pool->lease() == nullptr);
        for (const unsigned count : seen)
            CHECK(count == 3);
    }
}

TEST_CASE("stages: an exception in any stage stays with its batch, and earlier batches are delivered") {
    for (const auto where : {detail::stage::sample, detail::stage::fill, detail::stage::deliver}) {
        CAPTURE(static_cast<int>(where));
        const detail::scoped_stage_hook hook([=](detail::stage at, std::uint64_t batch) {
            if (at == where && batch == 1) throw std::runtime_error("broken");
        });
        fixture loader({numbered_rows(40)}, {.device = device::host(), .batch_rows = 10}, 4);
        while (loader.work->run_one(4)) {
        }
        CHECK(loader.pool->failed());
        {
            const auto first = loader.take();
            CHECK(first->leased_slot().number == 0);
            CHECK(holds_its_rows(first->leased_slot()));
        }
        CHECK_THROWS_WITH_AS(loader.pool->lease(), "broken", std::runtime_error);
        CHECK(loader.pool->lease() == nullptr);
        CHECK_FALSE(loader.work->run_one(1));  // nothing more is begun
    }
}

TEST_CASE(
    "stages: if rows of a batch cannot be read, the earlier batches of its group are delivered, and no later "
    "batch") {
    const auto rows = std::make_shared<scripted_rows>(40);
    rows->before_read = [](std::uint64_t first) {
        if (first == 20) throw data_changed("row 20 is gone");
    };
    fixture loader({rows}, {.device = device::host(), .batch_rows = 10}, 4);
    slot_group* const group = loader.sample(4);
    REQUIRE(group != nullptr);
    REQUIRE(group->slots.size() == 4);
    loader.work->fill(*group);
    loader.work->deliver(*group);
    for (std::uint64_t number = 0; number < 2; ++number) {
        const auto lease = loader.take();
        CHECK(lease->leased_slot().number == number);
        CHECK(holds_its_rows(lease->leased_slot()));
    }
    CHECK_THROWS_AS(loader.pool->lease(), data_changed);
    CHECK(loader.pool->lease() == nullptr);
}

TEST_CASE("stages: no group is taken while max_groups groups are in flight") {
    fixture loader({numbered_rows(100)}, {.device = device::host(), .batch_rows = 10}, 6, 2);
    slot_group* const first = loader.sample(1);
    slot_group* const second = loader.sample(1);
    REQUIRE(first != nullptr);
    REQUIRE(second != nullptr);
    CHECK(loader.sample(1) == nullptr);
    for (slot_group* const group : {first, second}) {
        loader.work->fill(*group);
        loader.work->deliver(*group);
    }
    CHECK(loader.sample(1) != nullptr);
}
