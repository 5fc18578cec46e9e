#include "src/core/element_stream.hpp"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/memory.hpp"
#include "src/core/system.hpp"
#include "tests/random_arrays.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::array;
using pinflow::dtype;
using pinflow::input_file;
using pinflow::shape_vector;
using pinflow::detail::element_stream;
using pinflow::detail::stream_elements;
namespace seam = pinflow::detail::system;

namespace {

constexpr std::uint64_t mebibyte = 1 << 20;

/// All elements, read in pieces of random sizes.
std::vector<std::byte> read_all(element_stream& stream, random_engine& random, std::uint64_t max_elements) {
    const std::uint64_t item_bytes = stream.dtype().size_bytes();
    std::vector<std::byte> elements(pinflow::element_count(stream.shape()) * item_bytes);
    for (std::span<std::byte> rest = elements; !rest.empty();) {
        const auto piece = rest.first(std::min(rest.size(), random() % (max_elements + 1) * item_bytes));
        stream.read(piece);
        rest = rest.subspan(piece.size());
    }
    stream.finish();
    return elements;
}

std::vector<std::byte> read_all(const array& source, std::uint64_t memory_bytes = mebibyte) {
    const auto stream = stream_elements(source, memory_bytes);
    std::vector<std::byte> elements(source.size_bytes());
    stream->read(elements);
    stream->finish();
    return elements;
}

shape_vector random_shape(random_engine& random, std::uint64_t max_elements) {
    shape_vector shape;
    for (std::uint64_t axes = random() % 5; axes > 0; --axes) {
        shape.push_back(std::min(random() % 3 == 0 ? random() % 3 : random() % 40 + 1, max_elements));
        max_elements /= std::max<std::uint64_t>(shape.back(), 1);
    }
    return shape;
}

/// Selects a random range of each axis, and compares what is read in pieces of random sizes.
void check_box(element_stream& stream, const expected_elements& elements,
               std::span<const std::byte> delivered, random_engine& random) {
    const shape_vector& shape = elements.shape;
    shape_vector first(shape.size()), lengths(shape.size());
    for (std::size_t axis = shape.size(); axis-- > 0;) {
        first[axis] = random() % (shape[axis] + 1);
        lengths[axis] = random() % (shape[axis] - first[axis] + 1);
        REQUIRE(stream.select(axis, first[axis], first[axis] + lengths[axis]));
    }
    const std::uint64_t item_bytes = stream.dtype().size_bytes();
    std::vector<std::byte> read(pinflow::element_count(lengths) * item_bytes);
    std::vector<std::byte> expected;
    for (std::span<std::byte> rest = read; !rest.empty();) {
        const auto piece = rest.first(std::min(rest.size(), (1 + random() % 2'000) * item_bytes));
        stream.read(piece);
        rest = rest.subspan(piece.size());
    }
    for (std::uint64_t index = 0; index * item_bytes < read.size(); ++index) {
        std::uint64_t place = 0, item = 1, left = index;
        for (std::size_t axis = shape.size(); axis-- > 0;) {
            place += (first[axis] + left % lengths[axis]) * item;
            left /= lengths[axis];
            item *= shape[axis];
        }
        const auto element = delivered.subspan(place * item_bytes, item_bytes);
        expected.insert(expected.end(), element.begin(), element.end());
    }
    CHECK((read == expected));
    if (item_bytes == 0) return;
    std::vector<std::byte> another(item_bytes);
    CHECK_THROWS_AS(stream.read(another), pinflow::invalid_argument);
}

/// Counts the reads of files during its lifetime.
class read_counter {
 public:
    int count() const { return count_; }

 private:
    int count_ = 0;
    seam::scoped_failure_hook hook_{[this](seam::call what, std::string_view) {
        count_ += what == seam::call::pread ? 1 : 0;
        return seam::injected_failure{};
    }};
};

}  // namespace

TEST_CASE("element_stream: delivers any type, shape and order, in C order and little-endian") {
    const temporary_folder folder;
    for (std::uint32_t seed = 0; seed < 400; ++seed) {
        CAPTURE(seed);
        random_engine random(seed);
        const dtype type = random_type(random, 2);
        const shape_vector shape = random_shape(random, seed % 10 == 0 ? 20'000 : 500);
        const bool fortran_order = random() % 2 == 0;
        CAPTURE(type.descr());
        CAPTURE(pinflow::to_string(shape));
        CAPTURE(fortran_order);
        const auto [source, expected] = make_array(random, folder / "data", type, shape, fortran_order);

        auto names = field_names(type);
        names.resize(std::min<std::size_t>(names.size(), 6));
        names.emplace_back();  // for the whole
        for (const std::string& name : names) {
            CAPTURE(name);
            const auto& elements = name.empty() ? expected : expected.field(name);
            const auto delivered = elements.little_endian();
            for (const array& whole : {source, in_memory(source, fortran_order)}) {
                const array part = name.empty() ? whole : whole.field(name);
                const auto stream = stream_elements(part, random() % (2 * mebibyte));
                CHECK(stream->dtype() == elements.type.little_endian());
                CHECK(stream->shape() == elements.shape);
                CHECK((read_all(*stream, random, 1 + random() % 2'000) == delivered));
                if (elements.shape.empty()) continue;
                // a range of the first axis
                const std::uint64_t begin = random() % (elements.shape[0] + 1);
                const std::uint64_t end = begin + random() % (elements.shape[0] - begin + 1);
                const std::uint64_t row_bytes =
                    elements.shape[0] == 0 ? 0 : delivered.size() / elements.shape[0];
                const auto selecting = stream_elements(part, random() % (2 * mebibyte));
                REQUIRE(selecting->select(0, begin, end));
                std::vector<std::byte> selected((end - begin) * row_bytes);
                selecting->read(selected);
                CHECK(std::ranges::equal(selected,
                                         std::span(delivered).subspan(begin * row_bytes, selected.size())));
                check_box(*selecting, elements, delivered, random);
            }
        }
    }
}

TEST_CASE("element_stream: reads arrays that are not mapped, too") {
    const temporary_folder folder;
    random_engine random(1);
    const dtype type = dtype::structured(
        {{"a", "", dtype::parse(">i2"), {}, 1}, {"b", "", dtype::parse("<f4"), {2}, 3}}, 12);
    for (const bool fortran_order : {false, true}) {
        const auto [source, expected] = [&] {
            const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
                return what == seam::call::mmap ? seam::injected_failure{.error = ENOMEM}
                                                : seam::injected_failure{};
            });
            return make_array(random, folder / "data", type, {30, 40}, fortran_order);
        }();
        REQUIRE_FALSE(source.has_view());
        CHECK((read_all(source) == expected.little_endian()));
        CHECK((read_all(source.field("b")) == expected.field("b").little_endian()));
    }
}

TEST_CASE("element_stream: blocks, runs and tiles that are cut off anywhere fit together") {
    const temporary_folder folder;
    random_engine random(7);
    struct layout {
        std::string descr;
        shape_vector shape;
    };
    for (const auto& [descr, shape] : std::vector<layout>{
             {"|u1", {2'111, 1'003}},  // short runs of many rows
             {"|u1", {7, 300'007}},    // rows larger than some of the memory below
             {"|u1", {300'007, 7}},    // whole columns at once
             {">i2", {1'031, 1'033}},  // cache lines shared between tiles
             {"<f4", {91, 83, 71}},    // neighbours along two axes
             {">f8", {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}},
             {"|S300", {97, 89}},  // units larger than a cache line
             {"|S70000", {5, 6}},  // units that are read one by one, not in blocks
         }) {
        const auto [source, expected] =
            make_array(random, folder / "data", dtype::parse(descr), shape, true, random() % 5'000);
        const auto delivered = expected.little_endian();
        for (const std::uint64_t memory_bytes : {0 * mebibyte, mebibyte * 5 / 8, mebibyte, 64 * mebibyte}) {
            CAPTURE(descr);
            CAPTURE(pinflow::to_string(shape));
            CAPTURE(memory_bytes);
            for (const array& layout : {source, in_memory(source, true)}) {
                const auto stream = stream_elements(layout, memory_bytes);
                CHECK((read_all(*stream, random, 20'000) == delivered));
            }
        }
    }
}

TEST_CASE("element_stream: records are read in pieces, whatever the size of one of their fields") {
    const temporary_folder folder;
    random_engine random(8);
    // more records than are read at once, fields larger than that, and gaps too wide to read across
    for (const auto& [field_length, gap_bytes, count] : std::vector<std::array<std::uint64_t, 3>>{
             {1, 20, 40'000}, {10'000, 1, 20}, {200'000, 3, 3}, {2, 9'000, 200}}) {
        const dtype type = dtype::structured({{"a", "", dtype::parse(">i4"), {field_length}, gap_bytes / 2}},
                                             gap_bytes + 4 * field_length);
        for (const bool fortran_order : {false, true}) {
            CAPTURE(field_length);
            CAPTURE(fortran_order);
            const auto [source, expected] =
                make_array(random, folder / "data", type, {count, 2}, fortran_order);
            const auto stream = stream_elements(source.field("a"), mebibyte);
            CHECK((read_all(*stream, random, 50'000) == expected.field("a").little_endian()));
            CHECK((read_all(in_memory(source, fortran_order).field("a")) ==
                   expected.field("a").little_endian()));
        }
    }
}

TEST_CASE("element_stream: contiguous elements are read at once, in any order") {
    const temporary_folder folder;
    random_engine random(2);
    const auto reads = [&](const dtype& type, const shape_vector& shape, bool fortran_order,
                           std::uint64_t memory_bytes, std::uint64_t calls = 1) {
        const auto [source, expected] = make_array(random, folder / "data", type, shape, fortran_order);
        const read_counter counter;
        const auto stream = stream_elements(source, memory_bytes);
        std::vector<std::byte> elements(source.size_bytes());
        for (std::uint64_t call = 0; call < calls; ++call)
            stream->read(
                std::span(elements).subspan(call * (elements.size() / calls), elements.size() / calls));
        CHECK((elements == expected.little_endian()));
        return counter.count();
    };
    const dtype f4 = dtype::parse("<f4");
    CHECK(reads(f4, {100, 80}, false, 0) == 1);
    CHECK(reads(f4, {}, true, 0) == 1);
    CHECK(reads(f4, {0, 80}, true, 0) == 0);
    CHECK(reads(f4, {100, 80}, true, mebibyte) == 1);
    // half of the rows at a time: the other half of each column is a short gap, which is read too
    CHECK(reads(f4, {256, 100}, true, 0, 4) == 2);
    // columns of 64 KiB, of which a block holds an eighth: 2 KiB at a time would be 32 * 8 reads
    CHECK(reads(f4, {16'384, 8}, true, (512 << 10) + (64 << 10), 32) == 8 * 8);
    // a call for all that is left needs no block
    CHECK(reads(f4, {256, 100}, true, 0) == 1);
    CHECK(reads(f4, {65'536, 8}, true, 0) == reads(f4, {65'536, 8}, true, 16 * mebibyte));
}

TEST_CASE("element_stream: memory stays within bounds for a larger file in Fortran order") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(4'096));
    constexpr std::uint64_t rows = 1 << 14;
    constexpr std::uint64_t columns = 1 << 12;
    std::filesystem::resize_file(folder / "data", rows * columns * 4);  // 256 MiB, most of it sparse
    const ::pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        std::uint64_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        const ::rlim_t limit = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + 128 * mebibyte;
        const ::rlimit limits{limit, limit};
        if (::setrlimit(RLIMIT_AS, &limits) != 0) ::_exit(1);
        const auto file = std::make_shared<const input_file>(folder / "data");
        const array source = array::of_file(file, 0, dtype::parse("<u4"), {rows, columns}, true);
        if (source.has_view()) ::_exit(2);
        const auto stream = stream_elements(source, 16 * mebibyte);
        std::vector<std::uint32_t> row(columns);
        std::uint64_t sum = 0;
        for (std::uint64_t index = 0; index < rows; ++index) {
            stream->read(std::as_writable_bytes(std::span(row)));
            for (const std::uint32_t element : row)
                sum += element;
        }
        std::vector<std::uint32_t> words(1'024);
        std::memcpy(words.data(), pattern_bytes(4'096).data(), 4'096);
        for (const std::uint32_t element : words)
            sum -= element;
        ::_exit(sum == 0 ? 0 : 3);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("element_stream: large reads in the middle bypass the block, and small ones after them do not") {
    const temporary_folder folder;
    constexpr std::uint64_t rows = 3'000'000, columns = 3;
    std::vector<std::uint32_t> stored(rows * columns), expected(rows * columns);
    for (std::uint64_t i = 0; i < stored.size(); ++i) {
        stored[i] = static_cast<std::uint32_t>(i);
        expected[i % rows * columns + i / rows] = stored[i];
    }
    write_bytes(folder / "data", std::as_bytes(std::span(stored)));
    const auto file = std::make_shared<const input_file>(folder / "data");
    const auto stream =
        stream_elements(array::of_file(file, 0, dtype::of<std::uint32_t>(), {rows, columns}, true), mebibyte);
    std::vector<std::uint32_t> read(stored.size());
    std::span<std::byte> rest = std::as_writable_bytes(std::span(read));
    for (const std::uint64_t size_bytes : {std::uint64_t{8'004}, 33 * mebibyte, std::uint64_t{40'000}}) {
        stream->read(rest.first(size_bytes));
        rest = rest.subspan(size_bytes);
    }
    stream->read(rest);
    CHECK((read == expected));
}

TEST_CASE("element_stream: a read past the end, or of half an element, is refused") {
    const temporary_folder folder;
    random_engine random(3);
    for (const bool fortran_order : {false, true}) {
        const auto [source, expected] =
            make_array(random, folder / "data", dtype::parse("<f4"), {2, 3}, fortran_order);
        const auto stream = stream_elements(source, 0);
        std::vector<std::byte> elements(28);
        CHECK(contains_all(
            message_of<pinflow::invalid_argument>([&] { stream->read(std::span(elements).first(6)); }),
            {"6 bytes are", "not a whole number", "elements of 4 bytes"}));
        CHECK_THROWS_AS(stream->read(elements), pinflow::invalid_argument);
        stream->read(std::span(elements).first(16));
        CHECK(contains_all(
            message_of<pinflow::invalid_argument>([&] { stream->read(std::span(elements).first(12)); }),
            {"cannot read 12 bytes", "at byte 16 ", "shape (2, 3)", "ends at byte 24"}));
        // what was refused has moved nothing
        stream->read(std::span(elements).subspan(16, 8));
        elements.resize(24);
        CHECK((elements == expected.bytes));
        CHECK_NOTHROW(stream->read({}));
    }
}

TEST_CASE("element_stream: a file truncated while it is read is an error and not a signal") {
    const temporary_folder folder;
    random_engine random(4);
    const dtype type =
        dtype::structured({{"a", "", dtype::parse(">i2"), {}, 0}, {"b", "", dtype::parse("<f4"), {}, 4}}, 8);
    for (const bool fortran_order : {false, true}) {
        for (const bool of_field : {false, true}) {
            CAPTURE(fortran_order);
            CAPTURE(of_field);
            const auto [source, expected] =
                make_array(random, folder / "data", type, {500, 400}, fortran_order, 0);
            const auto stream = stream_elements(of_field ? source.field("b") : source, 0);
            std::vector<std::byte> elements((of_field ? 4 : 8) * 400);  // a row
            stream->read(elements);
            std::filesystem::resize_file(folder / "data", 500 * 400 * 4);
            const auto read_on = [&] {
                for (int row = 1; row < 500; ++row)
                    stream->read(elements);
            };
            CHECK(contains(message_of<pinflow::data_changed>(read_on),
                           "the file has 800000 bytes now, it had 160000"));
            CHECK_THROWS_AS(stream->finish(), pinflow::data_changed);
        }
    }
}

TEST_CASE("element_stream: a file changed while it is read is detected at the end") {
    const temporary_folder folder;
    random_engine random(5);
    const auto [source, expected] = make_array(random, folder / "data", dtype::parse("<f4"), {2, 3}, false);
    const auto stream = stream_elements(source, 0);
    std::vector<std::byte> elements(24);
    stream->read(elements);
    CHECK_NOTHROW(stream->finish());
    std::filesystem::last_write_time(folder / "data",
                                     std::filesystem::file_time_type::clock::now() + std::chrono::seconds(5));
    CHECK_THROWS_AS(stream->finish(), pinflow::data_changed);
    CHECK_NOTHROW(stream_elements(in_memory(expected), 0)->finish());
}

TEST_CASE("element_stream: keeps its source alive") {
    const temporary_folder folder;
    random_engine random(6);
    auto [source, expected] = make_array(random, folder / "data", dtype::parse("<f4"), {20, 30}, true);
    auto of_file = stream_elements(source, 0);
    auto of_memory = stream_elements(in_memory(expected), 0);
    source = in_memory(expected);
    std::filesystem::remove(folder / "data");
    CHECK((read_all(*of_file, random, 100) == expected.bytes));
    CHECK((read_all(*of_memory, random, 100) == expected.bytes));
}

TEST_CASE("element_stream: a disk that fails is a system failure") {
    const temporary_folder folder;
    random_engine random(9);
    for (const bool fortran_order : {false, true}) {
        const auto [source, expected] =
            make_array(random, folder / "data", dtype::parse("<f4"), {20, 30}, fortran_order);
        const auto stream = stream_elements(source, 0);
        std::vector<std::byte> elements(40);
        {
            const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
                return what == seam::call::pread ? seam::injected_failure{.error = EIO}
                                                 : seam::injected_failure{};
            });
            CHECK_THROWS_AS(stream->read(elements), pinflow::system_failure);
        }
        CHECK_NOTHROW(stream->read(elements));  // and nothing was lost
        CHECK(std::ranges::equal(elements, std::span(expected.bytes).first(40)));
    }
}
