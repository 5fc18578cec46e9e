#include "formats/hdf5_write_chunks.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "formats/hdf5_filters.hpp"
#include "tests/random_arrays.hpp"

using pinflow::shape_vector;

TEST_CASE(
    "hdf5 chunks: by default a chunk is up to 1 MiB of whole rows, or part of a row that exceeds 1 MiB") {
    using pinflow::detail::hdf5_default_chunk_shape;
    CHECK(hdf5_default_chunk_shape({10, 3}, 4) == shape_vector{10, 3});
    CHECK(hdf5_default_chunk_shape({1'000'000}, 4) == shape_vector{262'144});
    CHECK(hdf5_default_chunk_shape({60'000, 28, 28}, 1) == shape_vector{1337, 28, 28});
    CHECK(hdf5_default_chunk_shape({1000, 1024, 1024}, 1) == shape_vector{1, 1024, 1024});
    CHECK(hdf5_default_chunk_shape({1000, 1024, 1024}, 4) == shape_vector{1, 256, 1024});
    CHECK(hdf5_default_chunk_shape({5, 7, 1'000'000}, 8) == shape_vector{1, 1, 131'072});
    CHECK(hdf5_default_chunk_shape({5, 3}, 4 << 20) == shape_vector{1, 1});
    CHECK(hdf5_default_chunk_shape({1, 1}, 3) == shape_vector{1, 1});
}

TEST_CASE("hdf5 chunks: elements outside of the dataset are zeros, even after another chunk was encoded") {
    using namespace pinflow::detail;
    const shape_vector shape{7, 10, 9}, chunk_shape{3, 4, 5};
    const std::vector<std::byte> ones(7 * 10 * 9 * 2, std::byte{1});
    const std::vector<hdf5_filter> filters{{2, "shuffle", {2}}, {1, "deflate", {1}}};
    const hdf5_pipeline pipeline(filters, 3 * 4 * 5 * 2);
    hdf5_chunk_decoder decoder;
    std::vector<shape_vector> stored_at;
    const auto store = [&](std::span<const std::uint64_t> first, std::uint32_t mask,
                           std::span<const std::byte> stored) {
        stored_at.emplace_back(first.begin(), first.end());
        std::vector<std::byte> chunk(pipeline.chunk_bytes());
        decoder.decode(pipeline, mask, stored, chunk);
        std::size_t wrong = 0;
        for (std::uint64_t at = 0; at < chunk.size(); ++at) {
            const std::uint64_t element = at / 2;
            const bool within =
                first[0] + element / 20 < 7 && first[1] + element / 5 % 4 < 10 && first[2] + element % 5 < 9;
            wrong += chunk[at] != std::byte{within} ? 1u : 0u;
        }
        CHECK(wrong == 0);
    };
    hdf5_chunk_writer writer(shape, chunk_shape, 2, 1, store);
    writer.write(ones);
    CHECK(stored_at.size() == 3 * 3 * 2);
    CHECK(std::ranges::is_sorted(stored_at));
}

TEST_CASE("hdf5 chunks: shuffling is undone by the reader, for elements of any size") {
    random_engine random(11);
    for (std::uint64_t element_bytes = 1; element_bytes <= 20; ++element_bytes) {
        for (const std::uint64_t count : {0u, 1u, 2u, 15u, 16u, 17u, 100u, 4097u}) {
            const auto bytes = random_bytes(random, count * element_bytes);
            std::vector<std::byte> shuffled(bytes.size()), back(bytes.size());
            pinflow::detail::hdf5_shuffle(bytes, element_bytes, shuffled.data());
            pinflow::detail::hdf5_unshuffle(shuffled, element_bytes, back.data());
            CHECK(back == bytes);
        }
    }
}
