// Datasets that h5py wrote are read back identical: whole, by random rows, and by many threads at once. Exits
// with 77 (skipped) if the distribution's Python has no h5py.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "formats/hdf5_chunk_reader.hpp"
#include "formats/hdf5_rows.hpp"
#include "pinflow/error.hpp"
#include "tests/hdf5_files.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using pinflow::detail::hdf5_chunk_cache;
using pinflow::detail::hdf5_chunk_reader;
using pinflow::detail::hdf5_dataset;
using pinflow::detail::hdf5_description;
using pinflow::detail::hdf5_memory;
using pinflow::detail::hdf5_row_box;
using pinflow::detail::hdf5_row_run;
using pinflow::detail::hdf5_storage;
using pinflow::detail::make_hdf5_array;
using pinflow::detail::make_hdf5_elements;

unsigned cases_run = 0;

std::shared_ptr<hdf5_memory> memory_of(std::uint64_t cache_bytes) {
    return std::make_shared<hdf5_memory>(cache_bytes, 1 << 20);
}

/// Rows in any order, some twice, some that follow each other.
row_ids random_rows(std::mt19937_64& random, std::uint64_t count) {
    row_ids ids;
    for (std::uint64_t wanted = random() % 40; ids.size() < wanted;) {
        const std::uint64_t first = random() % count;
        const std::uint64_t last = std::min(count, first + 1 + (random() % 3 == 0 ? random() % 20 : 0));
        for (std::uint64_t id = first; id < last; ++id)
            ids.push_back(id);
    }
    if (random() % 2 == 0) std::ranges::sort(ids);
    return ids;
}

/// Checks that the extents contain all rows, in the file and in its mapping.
void check_extents(const pinflow::row_source& rows, std::span<const std::byte> expected) {
    std::uint64_t done = 0;
    for (const pinflow::row_extent& extent : rows.extents()) {
        const std::uint64_t size = extent.row_count * rows.row_size_bytes();
        REQUIRE(done + size <= expected.size());
        const auto here = expected.subspan(done, size);
        std::vector<std::byte> from_file(size);
        extent.file->read(extent.offset_bytes, from_file);
        CHECK(std::ranges::equal(from_file, here));
        if (size > 0) REQUIRE(extent.data != nullptr);
        CHECK(std::equal(here.begin(), here.end(), extent.data));
        done += size;
    }
    CHECK(done == expected.size());
}

}  // namespace

TEST_CASE("hdf5_rows: everything that h5py wrote is read back identical, whole and by random rows") {
    ++cases_run;
    std::mt19937_64 random(1);
    std::map<hdf5_storage, unsigned> storages;
    unsigned with_extents = 0;
    unsigned masks = 0;
    for (const hdf5_file_entry& entry : hdf5_entries()) {
        const hdf5_description& description = *entry.description;
        INFO(entry.file << ": " << description.name);
        ++storages[description.storage];
        for (const auto& chunk : description.chunks)
            masks += chunk.filter_mask != 0 ? 1u : 0u;
        const pinflow::array array = make_hdf5_array(dataset_of(entry));
        CHECK(array.dtype() == description.dtype);
        CHECK(array.shape() == description.shape);
        CHECK(!array.reason().empty());
        REQUIRE(array.size_bytes() == entry.stored.size());
        CHECK((array.size_bytes() == 0 ||
               std::equal(entry.stored.begin(), entry.stored.end(), array.view().data())));
        if (description.shape.empty()) {
            CHECK(contains(message_of<pinflow::unsupported>([&] { rows_with_cache(dataset_of(entry), 0); }),
                           "one element without axes"));
            continue;
        }
        const auto rows = rows_with_cache(dataset_of(entry), random() % 3 == 0 ? 0 : random() % 100000);
        REQUIRE(rows->row_count() == description.shape[0]);
        CHECK(rows->dtype() == description.dtype.little_endian());
        CHECK(rows->file_backed());
        CHECK(rows->extents().empty() != rows->no_extents_reason().empty());
        CHECK((read(*rows, all_rows(rows->row_count())) == entry.little));
        for (int repetition = 0; rows->row_count() > 0 && repetition < 6; ++repetition) {
            const row_ids ids = random_rows(random, rows->row_count());
            CHECK((read(*rows, ids) == rows_of(entry.little, rows->row_size_bytes(), ids)));
        }
        if (!rows->extents().empty()) {
            check_extents(*rows, entry.little);
            ++with_extents;
        }
        const std::uint64_t past[] = {0, rows->row_count()};
        std::vector<std::byte> two(std::max<std::uint64_t>(2 * rows->row_size_bytes(), 1));
        const auto of_two = std::span(two).first(2 * rows->row_size_bytes());
        CHECK_THROWS_AS(rows->read_rows(past, of_two), pinflow::invalid_argument);
        CHECK_THROWS_AS(rows->read_rows({}, std::span(two.data(), 1)), pinflow::invalid_argument);
        rows->check_unchanged();
    }
    CHECK(storages[hdf5_storage::chunked] > 800);
    CHECK(storages[hdf5_storage::contiguous] > 200);
    CHECK(storages[hdf5_storage::compact] == 12);
    CHECK(storages[hdf5_storage::absent] > 10);
    CHECK(with_extents > 150);
    CHECK(masks > 40);
}

TEST_CASE("hdf5_rows: parts of rows are read back identical from every corner of the grid") {
    ++cases_run;
    std::mt19937_64 random(3);
    for (const hdf5_file_entry& entry : hdf5_entries()) {
        const hdf5_description& description = *entry.description;
        const pinflow::shape_vector& shape = description.shape;
        const bool shuffled = description.name.starts_with("shuffled/");
        if (!(shuffled || description.name.starts_with("grids/")) || shape.size() < 2) continue;
        INFO(entry.file << ": " << description.name);
        const hdf5_dataset dataset = dataset_of(entry);
        const hdf5_chunk_reader reader(dataset.file, dataset.description,
                                       {memory_of(random() % (shuffled ? 60000 : 10000)), false});
        const std::uint64_t item_bytes = description.dtype.size_bytes();
        for (int repetition = 0; repetition < (shuffled ? 30 : 10); ++repetition) {
            pinflow::shape_vector begin;
            pinflow::shape_vector end;
            for (std::size_t axis = 1; axis < shape.size(); ++axis) {
                begin.push_back(random() % shape[axis]);
                end.push_back(begin.back() + 1 + random() % (shape[axis] - begin.back()));
            }
            const hdf5_row_box box(reader.grid(), begin, end);
            const std::uint64_t first = random() % shape[0];
            const hdf5_row_run run{first, 1 + random() % (shape[0] - first), 0};
            std::vector<std::byte> bytes(run.row_count * box.row_bytes());
            reader.read({&run, 1}, box, bytes);
            std::vector<std::byte> expected;
            const std::uint64_t row_elements = entry.little.size() / item_bytes / shape[0];
            for (std::uint64_t element = 0; element < run.row_count * row_elements; ++element) {
                std::uint64_t rest = element % row_elements;
                bool within = true;
                for (std::size_t axis = shape.size(); --axis > 0; rest /= shape[axis]) {
                    within =
                        within && rest % shape[axis] >= begin[axis - 1] && rest % shape[axis] < end[axis - 1];
                }
                if (!within) continue;
                const auto from =
                    std::span(entry.little)
                        .subspan((run.first_row * row_elements + element) * item_bytes, item_bytes);
                expected.insert(expected.end(), from.begin(), from.end());
            }
            CHECK((bytes == expected));
        }
    }
}

TEST_CASE("hdf5_rows: chunks without filters that hold whole rows are extents, and neighbours are one") {
    ++cases_run;
    const auto extents_of = [](const std::string& name) {
        return rows_with_cache(dataset_of(entry_named(name)), 0)->extents().size();
    };
    CHECK(extents_of("grids/((40, 6), (10, 6))/none") >= 1);
    CHECK(extents_of("grids/((3, 2), (3, 2))/none") == 1);
    CHECK(extents_of("grids/((37, 11), (5, 4))/none") == 0);
    CHECK(extents_of("grids/((40, 6), (10, 6))/gzip") == 0);
    CHECK(extents_of("partly/1/none/29some") == 0);
    const auto why = [](const std::string& name) {
        return rows_with_cache(dataset_of(entry_named(name)), 0)->no_extents_reason();
    };
    CHECK(contains(why("grids/((37, 11), (5, 4))/none"), "chunks that hold parts of rows"));
    CHECK(contains(why("grids/((40, 6), (10, 6))/shuffle,gzip"), "filtered chunks (shuffle, deflate)"));
    const auto& chunks = entry_named("partly/1/none/29some").description->chunks;
    const auto missing = std::ranges::count(chunks, 0u, &pinflow::detail::hdf5_chunk::size_bytes);
    CHECK(contains_all(why("partly/1/none/29some"),
                       {"never written", fmt::format("({} of {})", missing, chunks.size()), "not mapped"}));
    // h5py writes the chunks of a new dataset one after the other, except where its own tables lie between
    const hdf5_file_entry& entry = entry_named("grids/((1000,), (100,))/none");
    std::vector<std::uint64_t> offsets;
    for (const auto& chunk : entry.description->chunks)
        offsets.push_back(chunk.offset_bytes);
    const std::uint64_t chunk_bytes = 100 * entry.description->dtype.size_bytes();
    std::size_t pieces = 1;
    for (std::size_t index = 1; index < offsets.size(); ++index)
        pieces += offsets[index] == offsets[index - 1] + chunk_bytes ? 0u : 1u;
    const auto rows = rows_with_cache(dataset_of(entry), 0);
    CHECK(rows->extents().size() == pieces);
    CHECK(pieces < offsets.size());
}

TEST_CASE("hdf5_rows: each chunk is decoded once for the rows of a call, and kept as far as the cache goes") {
    ++cases_run;
    const hdf5_file_entry& entry = entry_named("grids/((37, 11), (5, 4))/shuffle,gzip");
    const hdf5_dataset dataset = dataset_of(entry);
    const std::uint64_t cost_bytes = hdf5_chunk_cache::cost_bytes(20 * entry.description->dtype.size_bytes());
    const row_ids ids{36, 0, 7, 1, 0, 35, 8, 2};  // three bands of three chunks each
    const auto runs = pinflow::detail::runs_of(ids);
    const auto decoded = [&](std::uint64_t cache_bytes, unsigned calls) {
        const hdf5_chunk_reader reader(dataset.file, dataset.description, {memory_of(cache_bytes), false});
        const hdf5_row_box box(reader.grid());
        std::vector<std::byte> bytes(ids.size() * box.row_bytes());
        for (; calls > 0; --calls) {
            reader.read(runs, box, bytes);
            CHECK((bytes == rows_of(entry.little, box.row_bytes(), ids)));
        }
        return reader.decoded_count();
    };
    CHECK(decoded(0, 1) == 9);
    CHECK(decoded(0, 3) == 27);
    // room for all 24 chunks of the dataset
    CHECK(decoded(24 * cost_bytes, 3) == 9);
    CHECK(decoded(1 << 20, 5) == 9);
    // less: chunks decoded for the first time share an eighth of the cache, so most are decoded a second
    // time, and then kept
    const std::uint64_t twice = decoded(12 * cost_bytes, 2);
    CHECK(twice > 9);
    CHECK(twice <= 18);
    CHECK(decoded(12 * cost_bytes, 5) == twice);
    CHECK(decoded(6 * cost_bytes, 5) > twice);
    // chunks without filters are read, not decoded
    const hdf5_dataset plain = dataset_of(entry_named("grids/((37, 11), (5, 4))/none"));
    const hdf5_chunk_reader reader(plain.file, plain.description, {memory_of(1 << 20), false});
    const hdf5_row_box box(reader.grid());
    std::vector<std::byte> bytes(ids.size() * box.row_bytes());
    reader.read(runs, box, bytes);
    CHECK(reader.decoded_count() == 0);
}

TEST_CASE("hdf5_rows: many threads read the same chunks at once, with a cache of any size or none") {
    ++cases_run;
    for (const char* const name :
         {"grids/((37, 11), (5, 4))/shuffle,gzip,fletcher32", "checksums/1048576/shuffle,gzip,fletcher32",
          "grids/((1003,), (64,))/lzf", "types/17/shuffle,lzf,fletcher32/1"}) {
        const hdf5_file_entry& entry = entry_named(name);
        INFO(entry.description->name);
        for (const std::uint64_t cache_bytes : {0u, 200u, 3000u, 1u << 22}) {
            const auto rows = rows_with_cache(dataset_of(entry), cache_bytes);
            std::atomic<unsigned> wrong = 0;
            std::vector<std::thread> threads;
            for (unsigned number = 0; number < 6; ++number) {
                threads.emplace_back([&, number] {
                    std::mt19937_64 random(number);
                    const bool is_large = entry.little.size() > 100000;
                    const int repetitions = sanitized ? (is_large ? 1 : 15) : (is_large ? 4 : 60);
                    for (int repetition = 0; repetition < repetitions; ++repetition) {
                        const bool all = is_large || random() % 8 == 0;
                        const row_ids ids =
                            all ? all_rows(rows->row_count()) : random_rows(random, rows->row_count());
                        if (read(*rows, ids) != rows_of(entry.little, rows->row_size_bytes(), ids)) ++wrong;
                    }
                });
            }
            for (std::thread& thread : threads)
                thread.join();
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("hdf5_rows: pieces of a batch are read inside TBB tasks, even with a single thread") {
    ++cases_run;
    const tbb::global_control threads(tbb::global_control::max_allowed_parallelism, 8);
    for (const int concurrency : {1, 2, 8}) {
        tbb::task_arena arena(concurrency);
        for (const char* const name :
             {"grids/((37, 11), (5, 4))/shuffle,gzip,fletcher32", "grids/((9, 7, 5), (2, 3, 5))/lzf",
              "partly/1/shuffle,gzip,fletcher32/29some", "checksums/5760/shuffle,gzip,fletcher32"}) {
            const hdf5_file_entry& entry = entry_named(name);
            const auto rows = rows_with_cache(dataset_of(entry), concurrency == 2 ? 0 : 1000);
            const std::uint64_t row_bytes = rows->row_size_bytes();
            std::mt19937_64 random(5);
            for (int repetition = 0; repetition < 20; ++repetition) {
                row_ids ids(400);
                for (std::uint64_t& id : ids)
                    id = random() % rows->row_count();
                std::vector<std::byte> bytes(ids.size() * row_bytes);
                // as a loader does
                arena.execute([&] {
                    tbb::this_task_arena::isolate([&] {
                        tbb::parallel_for(
                            std::size_t{0}, std::size_t{20},
                            [&](std::size_t piece) {
                                rows->read_rows(
                                    std::span(ids).subspan(piece * 20, 20),
                                    std::span(bytes).subspan(piece * 20 * row_bytes, 20 * row_bytes));
                            },
                            tbb::simple_partitioner());
                    });
                });
                CHECK((bytes == rows_of(entry.little, row_bytes, ids)));
            }
        }
    }
}

TEST_CASE("hdf5_rows: threads that want the same chunk at the same time decode it once") {
    ++cases_run;
    const hdf5_file_entry& entry = entry_named("checksums/1048576/shuffle,gzip,fletcher32");
    const hdf5_dataset dataset = dataset_of(entry);
    const hdf5_chunk_reader reader(dataset.file, dataset.description,
                                   {std::make_shared<hdf5_memory>(8 << 20, 64 << 20), false});
    const hdf5_row_box box(reader.grid());
    std::atomic<unsigned> ready = 0;
    std::atomic<unsigned> wrong = 0;
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 8; ++number) {
        threads.emplace_back([&, number] {
            const hdf5_row_run run{number * 1000, 500000, 0};
            std::vector<std::byte> bytes(run.row_count);
            ++ready;
            while (ready < 8)
                std::this_thread::yield();
            reader.read({&run, 1}, box, bytes);
            const auto expected = std::span(entry.little).subspan(run.first_row, run.row_count);
            if (!std::ranges::equal(bytes, expected)) ++wrong;
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(wrong == 0);
    CHECK(reader.decoded_count() == 1);
}

TEST_CASE("hdf5_rows: a dataset that only libhdf5 can read is read by the function given") {
    ++cases_run;
    const hdf5_file_entry& entry = entry_named("contiguous/6/of17x5");  // big-endian
    hdf5_description description = *entry.description;
    description.storage = hdf5_storage::library;
    description.offset_bytes = 0;
    description.library_reason = "it is virtual";
    hdf5_dataset dataset{dataset_of(entry).file, std::make_shared<const hdf5_description>(description), {}};
    CHECK(contains(message_of<pinflow::unsupported>([&] { rows_with_cache(dataset, 0); }),
                   "only libhdf5 can read it: it is virtual"));
    const std::uint64_t row_bytes = 5 * description.dtype.size_bytes();
    unsigned calls = 0;
    dataset.library = [&](std::uint64_t first_row, std::uint64_t count, std::span<std::byte> destination) {
        ++calls;
        const auto rows = std::span(entry.stored).subspan(first_row * row_bytes, count * row_bytes);
        REQUIRE(destination.size() == rows.size());
        std::ranges::copy(rows, destination.begin());
    };
    const auto rows = rows_with_cache(dataset, 0);
    const row_ids ids{3, 4, 5, 16, 0};
    CHECK((read(*rows, ids) == rows_of(entry.little, row_bytes, ids)));
    CHECK(calls == 3);
    CHECK(rows->extents().empty());
    CHECK(contains_all(rows->no_extents_reason(), {"read by libhdf5", "it is virtual"}));
    CHECK(std::ranges::equal(entry.stored,
                             std::span(make_hdf5_array(dataset).view().data(), entry.stored.size())));
    std::vector<std::byte> bytes(entry.little.size());
    const auto stream = make_hdf5_elements(dataset, 2 * row_bytes);
    stream->read(std::span(bytes).first(8));
    stream->read(std::span(bytes).subspan(8));
    CHECK((bytes == entry.little));
}

int main(int argc, char** argv) {
    return main_with_h5py(argc, argv, "hdf5_files.py", cases_run);
}
