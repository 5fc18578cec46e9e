#include "src/train/row_groups.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <random>
#include <vector>

using pinflow::detail::row_grouper;

namespace {

/// Compares the groups of ids with those of a map.
void check(row_grouper& grouper, const std::vector<std::uint64_t>& ids, std::uint64_t row_count) {
    std::vector<std::uint64_t> different(ids.size());
    std::vector<std::int64_t> groups(ids.size());
    std::vector<std::uint32_t> starts(ids.size() + 1), positions(ids.size());
    const std::uint64_t count =
        grouper.group(ids, row_count, {different.data(), groups.data(), starts.data(), positions.data()});
    std::map<std::uint64_t, std::vector<std::uint32_t>> expected;
    for (std::size_t i = 0; i < ids.size(); ++i)
        expected[ids[i]].push_back(static_cast<std::uint32_t>(i));
    REQUIRE(count == expected.size());
    CHECK(starts[count] == ids.size());
    std::size_t group = 0;
    bool are_right = true;
    for (const auto& [id, of_id] : expected) {
        are_right = are_right && different[group] == id && starts[group + 1] - starts[group] == of_id.size();
        for (std::size_t k = 0; k < of_id.size() && are_right; ++k)
            are_right = positions[starts[group] + k] == of_id[k] &&
                        groups[of_id[k]] == static_cast<std::int64_t>(group);
        ++group;
    }
    CHECK(are_right);
}

}  // namespace

TEST_CASE("row groups: ids of any number and range are grouped as by a map, with one thread and several") {
    row_grouper grouper;
    std::mt19937_64 random(3);
    for (const std::uint64_t row_count : {1ULL, 2ULL, 1000ULL, 4096ULL, 4097ULL, 10'000'000ULL, 1ULL << 40}) {
        for (const std::size_t id_count : {0U, 1U, 2U, 100U, 8192U, 16'384U, 16'385U, 100'000U}) {
            CAPTURE(row_count);
            CAPTURE(id_count);
            std::vector<std::uint64_t> ids(id_count);
            for (std::uint64_t& id : ids)
                id = random() % row_count;
            check(grouper, ids, row_count);
        }
    }
    // groups that end where a part of the list ends, and groups that cross parts
    for (const std::size_t repeated : {1U, 8192U, 50'000U}) {
        std::vector<std::uint64_t> ids(100'000);
        for (std::size_t i = 0; i < ids.size(); ++i)
            ids[i] = (ids.size() - 1 - i) / repeated;
        check(grouper, ids, 100'000);
    }
}

TEST_CASE("row groups: an id and its position must fit into 64 bits") {
    CHECK(row_grouper::can_group((1ULL << 24) - 1, (1ULL << 40) - 1));
    CHECK_FALSE(row_grouper::can_group(1ULL << 24, (1ULL << 40) - 1));
    CHECK_FALSE(row_grouper::can_group((1ULL << 24) - 1, 1ULL << 40));
}
