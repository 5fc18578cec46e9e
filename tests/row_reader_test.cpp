#include "loader/row_reader.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/row_source.hpp"
#include "tests/support/arrays.hpp"

using namespace pinflow;

TEST_CASE("row reader: ascending rows are read right, with gaps and across arrays") {
    std::vector<std::uint64_t> words(200);
    for (std::size_t i = 0; i < words.size(); ++i)
        words[i] = i;
    const std::span first(words.data(), 100);
    const std::span second(words.data() + 100, 100);
    const auto part = [](std::span<std::uint64_t> of) {
        return array_of(std::vector(of.begin(), of.end()), {of.size()}).rows();
    };
    const std::shared_ptr<const row_source> rows = concatenate({part(first), part(second)});
    REQUIRE(rows->extents().size() == 2);
    const detail::row_reader reader(rows, detail::row_access::memory,
                                    detail::row_reader::list_order::ascending);
    const auto counted = [](std::uint64_t begin, std::uint64_t end) {
        std::vector<std::uint64_t> ids;
        for (std::uint64_t id = begin; id < end; ++id)
            ids.push_back(id);
        return ids;
    };
    std::vector<std::vector<std::uint64_t>> lists{counted(0, 200), counted(90, 110), counted(3, 4)};
    std::vector<std::uint64_t> gaps = counted(5, 20);
    for (const std::uint64_t id : std::initializer_list<std::uint64_t>{21, 40, 41, 99, 100, 101, 150, 199})
        gaps.push_back(id);
    lists.push_back(gaps);
    for (const std::vector<std::uint64_t>& ids : lists) {
        CAPTURE(ids.front());
        std::vector<std::uint64_t> copied(ids.size());
        detail::read_session session;
        static_cast<void>(reader.read(ids, reinterpret_cast<std::byte*>(copied.data()), session));
        CHECK(copied == ids);
    }
}
