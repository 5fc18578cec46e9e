// The elements of datasets that h5py wrote are streamed, all of them or those of a range of an axis. Exits
// with 77 (skipped) if the distribution's Python has no h5py.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "formats/hdf5_rows.hpp"
#include "pinflow/error.hpp"
#include "tests/hdf5_files.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using pinflow::detail::element_stream;
using pinflow::detail::hdf5_dataset;
using pinflow::detail::hdf5_storage;
using pinflow::detail::make_hdf5_elements;

unsigned cases_run = 0;

/// A range of an axis.
struct selection {
    std::size_t axis;
    std::uint64_t begin;
    std::uint64_t end;
};

/// The elements of `selected`, from all elements in C order.
std::vector<std::byte> part_of(std::span<const std::byte> all, const pinflow::shape_vector& shape,
                               std::uint64_t item_bytes, const selection& selected) {
    std::uint64_t index_bytes = item_bytes;
    for (std::size_t axis = selected.axis + 1; axis < shape.size(); ++axis)
        index_bytes *= shape[axis];
    const std::uint64_t stride = index_bytes * shape[selected.axis];
    std::vector<std::byte> part;
    for (std::uint64_t at = 0; stride > 0 && at < all.size(); at += stride) {
        const auto run =
            all.subspan(at + selected.begin * index_bytes, (selected.end - selected.begin) * index_bytes);
        part.insert(part.end(), run.begin(), run.end());
    }
    return part;
}

/// Whether a stream can be restricted along every axis, and not only along the first one.
bool selects_all_axes(const hdf5_file_entry& entry) {
    const hdf5_storage storage = entry.description->storage;
    return storage == hdf5_storage::chunked || storage == hdf5_storage::absent ||
           storage == hdf5_storage::contiguous;
}

/// Reads `count` elements, in pieces of random sizes.
std::vector<std::byte> read_elements(element_stream& stream, std::uint64_t count, std::mt19937_64& random) {
    const std::uint64_t item_bytes = stream.dtype().size_bytes();
    std::vector<std::byte> bytes(count * item_bytes);
    for (std::span<std::byte> rest = bytes; !rest.empty();) {
        const auto piece = rest.first(std::min<std::size_t>(rest.size(), (1 + random() % 5000) * item_bytes));
        stream.read(piece);
        rest = rest.subspan(piece.size());
    }
    return bytes;
}

}  // namespace

TEST_CASE("hdf5_elements: everything that h5py wrote is read back identical, with any limit of memory") {
    ++cases_run;
    std::mt19937_64 random(2);
    for (const hdf5_file_entry& entry : hdf5_entries()) {
        INFO(entry.file << ": " << entry.description->name);
        const std::uint64_t item_bytes = entry.description->dtype.size_bytes();
        const std::uint64_t memory_bytes = std::uint64_t{1} << random() % 24;
        const auto stream = make_hdf5_elements(dataset_of(entry), memory_bytes);
        CHECK(stream->dtype() == entry.description->dtype.little_endian());
        CHECK(stream->shape() == entry.description->shape);
        std::vector<std::byte> bytes(entry.little.size());
        for (std::size_t done = 0; done < bytes.size();) {
            const std::size_t count =
                std::min<std::size_t>(bytes.size() - done, (1 + random() % 5000) * item_bytes);
            stream->read(std::span(bytes).subspan(done, count));
            done += count;
        }
        CHECK((bytes == entry.little));
        stream->finish();
        std::vector<std::byte> more(item_bytes);
        CHECK_THROWS_AS(stream->read(more), pinflow::invalid_argument);
    }
}

TEST_CASE(
    "hdf5_elements: the elements of a range of an axis are read back identical, with any limit of memory") {
    ++cases_run;
    std::mt19937_64 random(5);
    unsigned inner_axes = 0;
    for (const hdf5_file_entry& entry : hdf5_entries()) {
        const pinflow::shape_vector& shape = entry.description->shape;
        if (shape.empty()) continue;
        INFO(entry.file << ": " << entry.description->name);
        const std::uint64_t item_bytes = entry.description->dtype.size_bytes();
        for (int repetition = 0; repetition < 3; ++repetition) {
            selection selected{random() % shape.size(), 0, 0};
            selected.begin = random() % (shape[selected.axis] + 1);
            selected.end = selected.begin + random() % (shape[selected.axis] - selected.begin + 1);
            CAPTURE(selected.axis);
            CAPTURE(selected.begin);
            CAPTURE(selected.end);
            const auto stream = make_hdf5_elements(dataset_of(entry), std::uint64_t{1} << random() % 24);
            const bool is_selected = stream->select(selected.axis, selected.begin, selected.end);
            CHECK(is_selected == (selected.axis == 0 || selects_all_axes(entry)));
            CHECK(stream->shape() == shape);
            if (!is_selected) continue;
            inner_axes += selected.axis != 0 ? 1U : 0U;
            const auto expected = part_of(entry.little, shape, item_bytes, selected);
            CHECK((read_elements(*stream, expected.size() / item_bytes, random) == expected));
            std::vector<std::byte> more(item_bytes);
            CHECK_THROWS_AS(stream->read(more), pinflow::invalid_argument);
            stream->finish();
        }
    }
    CHECK(inner_axes > 500);
}

TEST_CASE("hdf5_elements: one stream delivers one box of several axes after another") {
    ++cases_run;
    std::mt19937_64 random(7);
    unsigned boxes = 0;
    for (const hdf5_file_entry& entry : hdf5_entries()) {
        const pinflow::shape_vector& shape = entry.description->shape;
        if (shape.empty() || entry.little.empty()) continue;
        INFO(entry.file << ": " << entry.description->name);
        const std::uint64_t item_bytes = entry.description->dtype.size_bytes();
        const auto stream = make_hdf5_elements(dataset_of(entry), std::uint64_t{1} << random() % 24);
        for (int repetition = 0; repetition < 3; ++repetition) {
            std::vector<std::byte> expected = entry.little;
            pinflow::shape_vector box = shape;
            for (std::size_t axis = 0; axis < (selects_all_axes(entry) ? shape.size() : 1); ++axis) {
                selection selected{axis, random() % (shape[axis] + 1), 0};
                selected.end = selected.begin + random() % (shape[axis] - selected.begin + 1);
                REQUIRE(stream->select(axis, selected.begin, selected.end));
                expected = part_of(expected, box, item_bytes, selected);
                box[axis] = selected.end - selected.begin;
            }
            // not always to its end
            const std::uint64_t count = expected.size() / item_bytes;
            const std::uint64_t taken = repetition == 0 ? count / 2 : count;
            expected.resize(taken * item_bytes);
            CHECK((read_elements(*stream, taken, random) == expected));
            boxes += taken != 0 ? 1U : 0U;
        }
        stream->finish();
    }
    CHECK(boxes > 500);
}

TEST_CASE("hdf5_elements: chunks without selected elements are not read") {
    ++cases_run;
    std::mt19937_64 random(6);
    const hdf5_file_entry& entry = entry_named("grids/((37, 11), (5, 4))/gzip,fletcher32,gzip");
    const std::vector<std::byte> content = bytes_of_file(hdf5_folder() / entry.file);
    const std::uint64_t item_bytes = entry.description->dtype.size_bytes();
    constexpr std::size_t columns = 3;
    const auto& chunks = entry.description->chunks;
    REQUIRE(chunks.size() == 8 * columns);
    for (const auto& selected : {selection{1, 4, 8}, selection{1, 5, 7}, selection{1, 7, 8}}) {
        const temporary_folder folder;
        {
            std::ofstream file(folder / "a.h5", std::ios::binary);
            for (std::size_t index = 1; index < chunks.size();
                 index += columns) {  // the middle column; the others are zeros
                file.seekp(static_cast<std::streamoff>(chunks[index].offset_bytes));
                file.write(reinterpret_cast<const char*>(content.data() + chunks[index].offset_bytes),
                           static_cast<std::streamsize>(chunks[index].size_bytes));
            }
        }
        std::filesystem::resize_file(folder / "a.h5", content.size());
        const hdf5_dataset dataset{
            std::make_shared<const pinflow::input_file>(folder / "a.h5"), entry.description, {}};
        const auto expected = part_of(entry.little, entry.description->shape, item_bytes, selected);
        const auto stream = make_hdf5_elements(dataset, 1 << 20);
        REQUIRE(stream->select(selected.axis, selected.begin, selected.end));
        CHECK((read_elements(*stream, expected.size() / item_bytes, random) == expected));
        const auto wider = make_hdf5_elements(dataset, 1 << 20);
        REQUIRE(wider->select(1, selected.begin - 4, selected.end));
        std::vector<std::byte> bytes(item_bytes);
        CHECK_THROWS_AS(wider->read(bytes), pinflow::format_error);
    }
}

int main(int argc, char** argv) {
    return main_with_h5py(argc, argv, "hdf5_files.py", cases_run);
}
