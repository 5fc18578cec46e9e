// Damaged and forged HDF5 files are errors that name the place. Exits with 77 (skipped) if the distribution's
// Python has no h5py.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "formats/hdf5_rows.hpp"
#include "pinflow/error.hpp"
#include "src/core/memory_limits.hpp"
#include "tests/hdf5_files.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using pinflow::detail::hdf5_dataset;
using pinflow::detail::hdf5_description;
using pinflow::detail::make_hdf5_array;
using pinflow::detail::make_hdf5_elements;

unsigned cases_run = 0;

}  // namespace

TEST_CASE("hdf5_rows: damaged chunks are errors that name the chunk and its address") {
    ++cases_run;
    std::mt19937_64 random(4);
    for (const char* const name :
         {"grids/((37, 11), (5, 4))/gzip", "grids/((37, 11), (5, 4))/shuffle,gzip,fletcher32",
          "grids/((37, 11), (5, 4))/shuffle,lzf,fletcher32", "grids/((37, 11), (5, 4))/fletcher32",
          "grids/((37, 11), (5, 4))/gzip,fletcher32,gzip", "incompressible/lzf",
          "grids/((1003,), (64,))/lzf"}) {
        const hdf5_file_entry& entry = entry_named(name);
        const bool checked = entry.description->name.find("lzf") == std::string::npos ||
                             entry.description->name.find("fletcher32") != std::string::npos;
        const std::vector<std::byte> content = bytes_of_file(hdf5_folder() / entry.file);
        const temporary_folder damaged;
        for (int repetition = 0; repetition < 60; ++repetition) {
            const std::size_t index = random() % entry.description->chunks.size();
            const auto& chunk = entry.description->chunks[index];
            // a hole everywhere but in the chunks: the file is large
            const fs::path path = damaged / fmt::format("{}.h5", repetition);
            {
                std::ofstream file(path, std::ios::binary);
                for (const auto& place : entry.description->chunks) {
                    file.seekp(static_cast<std::streamoff>(place.offset_bytes));
                    file.write(reinterpret_cast<const char*>(content.data() + place.offset_bytes),
                               static_cast<std::streamsize>(place.size_bytes));
                }
                const std::size_t at = chunk.offset_bytes + random() % chunk.size_bytes;
                const auto flipped = content[at] ^ static_cast<std::byte>(1 << random() % 8);
                file.seekp(static_cast<std::streamoff>(at));
                file.put(std::to_integer<char>(flipped));
            }
            const hdf5_dataset dataset{
                std::make_shared<const pinflow::input_file>(path), entry.description, {}};
            const auto rows = rows_with_cache(dataset, 1 << 20);
            const row_ids ids = all_rows(rows->row_count());
            INFO(entry.description->name);
            const auto sentence = message_of<pinflow::format_error>([&] {
                const auto bytes = read(*rows, ids);
                if (checked) CHECK((bytes == entry.little));  // a bit that means nothing
            });
            if (!sentence.empty()) {
                CHECK(contains(sentence, fmt::format("cannot read '{}': the chunk at (", path.string())));
                CHECK(contains(sentence,
                               fmt::format("{} bytes at offset {}, ", chunk.size_bytes, chunk.offset_bytes)));
                // the same rows fail again
                CHECK(!message_of<pinflow::format_error>([&] { read(*rows, ids); }).empty());
            }
        }
    }
}

TEST_CASE("hdf5_rows: false sizes and addresses are refused before anything is read or allocated") {
    ++cases_run;
    const hdf5_file_entry& entry = entry_named("grids/((37, 11), (5, 4))/shuffle,gzip");
    const hdf5_file_entry& plain = entry_named("grids/((37, 11), (5, 4))/none");
    const auto refusal = [](const hdf5_file_entry& base, auto change) {
        hdf5_description description = *base.description;
        change(description);
        const hdf5_dataset dataset{
            dataset_of(base).file, std::make_shared<const hdf5_description>(description), {}};
        std::string sentence = message_of<pinflow::error>([&] { rows_with_cache(dataset, 1 << 20); });
        CHECK(message_of<pinflow::error>([&] { make_hdf5_array(dataset); }) == sentence);
        CHECK(message_of<pinflow::error>([&] { make_hdf5_elements(dataset, 1 << 20); }) == sentence);
        return sentence;
    };
    const std::uint64_t file_bytes = dataset_of(entry).file->size_bytes();
    CHECK(contains(refusal(entry, [&](auto& it) { it.chunks[4].offset_bytes = file_bytes; }),
                   "but the file has"));
    CHECK(contains(refusal(entry, [&](auto& it) { it.chunks[4].size_bytes = ~std::uint64_t{0}; }),
                   "but the file has"));
    CHECK(contains(refusal(entry, [&](auto& it) { it.chunks[4].size_bytes = 40000; }),
                   "the chunk at (5, 4), at offset"));
    CHECK(contains(refusal(plain, [&](auto& it) { it.chunks[4].size_bytes += 1; }), "without filters"));
    CHECK(contains(refusal(plain, [&](auto& it) { it.chunks[4].size_bytes -= 1; }), "without filters"));
    CHECK(contains(refusal(entry, [&](auto& it) { it.chunks.pop_back(); }), "cannot have 23 chunks"));
    CHECK(contains(refusal(entry, [&](auto& it) { it.chunk_shape = {5}; }),
                   "cannot be stored in chunks of shape (5,)"));
    CHECK(contains(refusal(entry, [&](auto& it) { it.chunk_shape = {5, 0}; }),
                   "cannot be stored in chunks of shape (5, 0)"));
    CHECK(
        contains(refusal(entry, [&](auto& it) { it.chunk_shape = {~std::uint64_t{0}, 4}; }), "larger than"));
    CHECK(contains(refusal(entry, [&](auto& it) { it.fill.resize(1); }), "fill value of 1 bytes"));
    CHECK(contains(refusal(entry, [&](auto& it) { it.filters[0].parameters.clear(); }),
                   "how large an element is"));
    CHECK(contains(refusal(entry, [&](auto& it) { it.filters[1] = {4, "szip", {}}; }),
                   "the filter 'szip' (number 4)"));
    CHECK(contains(refusal(entry, [&](auto& it) { it.shape = {std::uint64_t{1} << 62, 1 << 20}; }),
                   "is too large"));
    // few stored bytes cannot decode to a large chunk
    CHECK(contains(refusal(entry,
                           [&](auto& it) {
                               it.shape = it.chunk_shape = {1 << 14, 1 << 14};
                               it.chunks.resize(1);
                           }),
                   "which cannot make a chunk of"));
    const hdf5_file_entry& contiguous = entry_named("contiguous/8/of17x5");
    CHECK(!refusal(contiguous, [&](auto& it) { it.offset_bytes = file_bytes; }).empty());
    CHECK(!refusal(contiguous, [&](auto& it) { it.shape[0] = std::uint64_t{1} << 40; }).empty());
    hdf5_description vast;
    vast.name = "vast";
    vast.dtype = pinflow::dtype::of<double>();
    vast.shape = {1 << 10, std::uint64_t{1} << 40};
    const hdf5_dataset dataset{dataset_of(entry).file, std::make_shared<const hdf5_description>(vast), {}};
    CHECK(contains(message_of<pinflow::system_failure>([&] { make_hdf5_array(dataset); }),
                   "it takes 9007199254740992 bytes of memory, more than "));
    vast.shape = {1 << 10, 1 << 16};
    const hdf5_dataset large{dataset.file, std::make_shared<const hdf5_description>(vast), {}};
    {
        const pinflow::detail::scoped_available_memory available(100'000'000);
        CHECK(contains(message_of<pinflow::system_failure>([&] { make_hdf5_array(large); }),
                       "it takes 536870912 bytes of memory, more than the 100000000 bytes that may be taken "
                       "of the memory that "));
    }
    std::vector<std::byte> some(80, std::byte{1});
    make_hdf5_elements(dataset, 1 << 20)->read(some);
    CHECK((some == std::vector<std::byte>(80)));
}

TEST_CASE("hdf5_rows: a file that became shorter is an error, also through a cache") {
    ++cases_run;
    const hdf5_file_entry& entry = entry_named("checksums/5760/shuffle,gzip,fletcher32");
    const temporary_folder copies;
    fs::copy_file(hdf5_folder() / entry.file, copies / "a.h5");
    const hdf5_dataset dataset{
        std::make_shared<const pinflow::input_file>(copies / "a.h5"), entry.description, {}};
    const auto rows = rows_with_cache(dataset, 1 << 20);
    fs::resize_file(copies / "a.h5", entry.description->chunks[0].offset_bytes + 1);
    CHECK_THROWS_AS(read(*rows, {1, 2, 3}), pinflow::data_changed);
    CHECK_THROWS_AS(rows->check_unchanged(), pinflow::data_changed);
    CHECK_THROWS_AS(read(*rows, {1, 2, 3}), pinflow::data_changed);
}

int main(int argc, char** argv) {
    return main_with_h5py(argc, argv, "hdf5_files.py", cases_run);
}
