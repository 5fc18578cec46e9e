#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/loader/sampler.hpp"
#include "tests/chi_square.hpp"

using namespace pinflow;

TEST_CASE("permutation: visits every element once, for every size") {
    std::vector<std::uint64_t> sizes(300);
    std::iota(sizes.begin(), sizes.end(), 1);
    for (const std::uint64_t size : {4095U, 4096U, 4097U, 65535U, 65536U, 65537U, 1'000'003U}) {
        sizes.push_back(size);
    }
    for (const std::uint64_t size : sizes) {
        CAPTURE(size);
        const permutation shuffled(size, size * 31);
        std::vector<bool> seen(size);
        std::uint64_t misplaced = 0;
        for (std::uint64_t position = 0; position < size; ++position) {
            const std::uint64_t element = shuffled(position);
            if (element >= size || seen[element]) {
                ++misplaced;
            } else {
                seen[element] = true;
            }
        }
        CHECK(misplaced == 0);
    }
}

TEST_CASE("permutation: finds the position of every element, at any size up to 2^62") {
    std::mt19937_64 random(20);
    std::vector<std::uint64_t> sizes{1,
                                     2,
                                     3,
                                     1'000'000'000,
                                     (std::uint64_t{1} << 40) - 1,
                                     std::uint64_t{1} << 40,
                                     (std::uint64_t{1} << 40) + 1,
                                     permutation::max_size - 1,
                                     permutation::max_size};
    for (unsigned i = 0; i < 200; ++i) {
        sizes.push_back(1 + (random() >> (2 + random() % 62)));
    }
    for (const std::uint64_t size : sizes) {
        CAPTURE(size);
        const permutation shuffled(size, random());
        std::uint64_t wrong = 0;
        for (unsigned i = 0; i < 3000; ++i) {
            // what has an inverse everywhere, on both sides, is a bijection
            const std::uint64_t number = i == 0 ? 0 : i == 1 ? size - 1 : random() % size;
            const std::uint64_t element = shuffled(number);
            const std::uint64_t position = shuffled.position_of(number);
            wrong += element >= size || shuffled.position_of(element) != number ? 1U : 0U;
            wrong += position >= size || shuffled(position) != number ? 1U : 0U;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("permutation: several elements at once are those of single positions") {
    std::mt19937_64 random(4);
    for (const std::uint64_t size :
         {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3}, std::uint64_t{17}, std::uint64_t{257},
          std::uint64_t{65'537}, (std::uint64_t{1} << 33) + 1, permutation::max_size}) {
        const permutation shuffled(size, random());
        for (const std::uint64_t count : {0U, 1U, 7U, 8U, 9U, 16U, 300U}) {
            CAPTURE(size);
            CAPTURE(count);
            std::vector<std::uint64_t> elements(std::min(count, size));
            const std::uint64_t last = size - elements.size();
            for (const std::uint64_t first : {std::uint64_t{0}, last, random() % (last + 1)}) {
                shuffled.elements_at(first, elements);
                std::vector<std::uint64_t> expected(elements.size());
                for (std::size_t i = 0; i < expected.size(); ++i)
                    expected[i] = shuffled(first + i);
                CHECK(elements == expected);
            }
        }
    }
}

TEST_CASE("permutation: consecutive and strided positions among 2^40 are spread evenly and at random") {
    constexpr std::uint64_t cells = 1024;
    constexpr std::uint64_t per_cell = 1000;
    for (const std::uint64_t size : {std::uint64_t{1} << 40, (std::uint64_t{1} << 40) + 1}) {
        for (const std::uint64_t stride : {std::uint64_t{1}, std::uint64_t{1} << 20}) {
            CAPTURE(size);
            CAPTURE(stride);
            const permutation shuffled(size, 7);
            const std::uint64_t cell_size = size / cells + 1;
            std::vector<std::uint64_t> elements(cells);
            std::vector<std::uint64_t> distances(cells);
            std::uint64_t before = shuffled(size - 1);
            for (std::uint64_t i = 0; i < cells * per_cell; ++i) {
                const std::uint64_t element = shuffled(i * stride % size);
                ++elements[element / cell_size];
                ++distances[(element >= before ? element - before : element + (size - before)) / cell_size];
                before = element;
            }
            CHECK(deviations(elements, per_cell) < 5);
            CHECK(deviations(distances, per_cell) < 5);
        }
    }
    CHECK_THROWS_AS(permutation(permutation::max_size + 1, 7), invalid_argument);
}

TEST_CASE("permutation: all orders of a few elements are equally likely") {
    for (const std::uint64_t size : {2U, 3U, 4U, 5U}) {
        CAPTURE(size);
        std::uint64_t orders = 1;
        for (std::uint64_t i = 2; i <= size; ++i) {
            orders *= i;
        }
        std::map<std::uint64_t, std::uint64_t> counts;
        for (std::uint64_t key = 0; key < orders * 1000; ++key) {
            const permutation shuffled(size, key);
            std::uint64_t order = 0;
            for (std::uint64_t position = 0; position < size; ++position) {
                order = order * size + shuffled(position);
            }
            ++counts[order];
        }
        REQUIRE(counts.size() == orders);
        std::vector<std::uint64_t> flat;
        for (const auto& [order, count] : counts) {
            flat.push_back(count);
        }
        CHECK(deviations(flat, 1000) < 5);
    }
}

TEST_CASE("permutation: neighbouring positions have unrelated elements") {
    for (const std::uint64_t size : {16U, 100U, 256U, 257U}) {
        CAPTURE(size);
        const std::uint64_t keys = 400 * size;
        std::vector<std::uint64_t> distances(size);
        for (std::uint64_t key = 0; key < keys; ++key) {
            const permutation shuffled(size, key);
            ++distances[(shuffled(size / 3) + size - shuffled(size / 3 + 1)) % size];
        }
        CHECK(distances[0] == 0);
        distances.erase(distances.begin());
        CHECK(deviations(distances, static_cast<double>(keys) / static_cast<double>(size - 1)) < 5);
    }
    const permutation large(50'000'000, 11);
    std::vector<std::uint64_t> distances(1000);
    for (std::uint64_t position = 0; position < 1'000'000; ++position) {
        const std::uint64_t distance = (large(position) + large.size() - large(position + 1)) % large.size();
        ++distances[distance / 50'000];
    }
    CHECK(deviations(distances, 1000) < 5);
}

TEST_CASE("permutation: version 1 gives these elements for ever") {
    const auto first_of = [](std::uint64_t size, std::uint64_t key) {
        const permutation shuffled(size, key);
        return std::vector<std::uint64_t>{shuffled(0), shuffled(1), shuffled(2)};
    };
    CHECK(permutation(1'000'000'000, 7).position_of(0) == 497999342);
    CHECK(permutation(std::uint64_t{1} << 40, 7).position_of(0) == 798596396212);
    CHECK(first_of(10, 0) == std::vector<std::uint64_t>{2, 4, 5});
    CHECK(first_of(1797, 42) == std::vector<std::uint64_t>{1783, 1046, 1195});
    CHECK(first_of(1'000'000'000, 7) == std::vector<std::uint64_t>{845127310, 343232229, 235260584});
    CHECK(first_of(std::uint64_t{1} << 40, 7) ==
          std::vector<std::uint64_t>{783617830196, 261077239262, 431539983470});
}
