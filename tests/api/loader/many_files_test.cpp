#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/formats/open.hpp"
#include "pinflow/loader/loader.hpp"
#include "samples.hpp"
#include "sanitized.hpp"
#include "temporary_folder.hpp"

// One array out of many files, which a pattern names.
using namespace pinflow;

namespace {

constexpr std::uint64_t file_count = sanitized ? 60 : 300;

/// Writes random rows to .npy files: `rows_of_each[i]` rows, which may be 0, to file i. The order of the
/// files is that of the numbers in their names.
known_array files_of(const temporary_folder& folder, const std::string& name, std::string_view descr,
                     const shape_vector& row_shape, const std::vector<std::uint64_t>& rows_of_each,
                     std::mt19937_64& random) {
    const dtype type = dtype::parse(descr);
    known_array all;
    for (std::size_t number = 0; number < rows_of_each.size(); ++number) {
        shape_vector shape = row_shape;
        shape.insert(shape.begin(), rows_of_each[number]);
        auto elements = random_bytes(element_count(shape) * type.size_bytes(), random);
        write_npy_bytes(folder / (name + "-" + std::to_string(number) + ".npy"), type, shape, elements);
        make_little_endian(type, elements);
        all.content.insert(all.content.end(), elements.begin(), elements.end());
    }
    all.source = open_rows((folder / (name + "-*.npy")).string());
    return all;
}

/// From 0 to 10 rows for each of `file_count` files.
std::vector<std::uint64_t> draw_row_counts(std::mt19937_64& random) {
    std::vector<std::uint64_t> counts(file_count);
    for (std::uint64_t& count : counts)
        count = random() % 11;
    return counts;
}

std::uint64_t sum(const std::vector<std::uint64_t>& numbers) {
    std::uint64_t sum = 0;
    for (const std::uint64_t number : numbers)
        sum += number;
    return sum;
}

/// Checks loaders of `sample` in every order, in large batches by every route, in small ones by `automatic`.
void check_loaders_of(const known_sample& sample) {
    on_each_device([&](const device& device) {
        for (const order order : every_plain_order) {
            for (const route route : routes_of(sample, device, order)) {
                for (const std::uint64_t batch_rows : {7U, 100U, 1000U}) {
                    // many small batches take long
                    if (batch_rows == 7 && route != route::automatic) continue;
                    loader_options options = options_for(device, order);
                    options.batch_rows = batch_rows;
                    options.route = route;
                    options.slots = 4;
                    check_every_batch(sample, options);
                }
            }
        }
    });
}

}  // namespace

TEST_CASE("many files: rows of files of any length follow each other, in the order of the files' numbers") {
    std::mt19937_64 random(2);
    for (const std::uint64_t row_bytes : {24U, 3000U}) {
        CAPTURE(row_bytes);
        const temporary_folder folder;
        const auto counts = draw_row_counts(random);
        const known_sample sample{files_of(folder, "part", "|u1", {row_bytes}, counts, random)};
        REQUIRE(sample[0].source->row_count() == sum(counts));
        check_loaders_of(sample);
    }
}

TEST_CASE("many files: rows come with labels from one file, and from files split at other rows") {
    std::mt19937_64 random(3);
    const temporary_folder folder;
    const auto counts = draw_row_counts(random);
    const std::uint64_t row_count = sum(counts);
    const known_array rows = files_of(folder, "part", "<f4", {5, 20}, counts, random);
    check_loaders_of({rows, npy_file(folder / "labels.npy", "|u1", {row_count}, random)});

    const std::vector<std::uint64_t> other_counts{1, 0, row_count / 2, row_count - row_count / 2 - 1};
    check_loaders_of({files_of(folder, "label", "<i4", {}, other_counts, random), rows});
}

TEST_CASE("many files: big-endian elements and fields are converted, whichever file they are in") {
    std::mt19937_64 random(4);
    const temporary_folder folder;
    const auto counts = draw_row_counts(random);
    check_loaders_of({files_of(folder, "part", ">f8", {3}, counts, random),
                      npy_label_field(folder / "labels.npy", sum(counts), random)});
}

TEST_CASE("many files: rows in many mappings are delivered as from one mapping") {
    // rows of 64 KiB, which a GPU can take from the mapped pages
    std::mt19937_64 random(5);
    const temporary_folder folder;
    std::vector<std::uint64_t> counts(20);
    for (std::uint64_t& count : counts)
        count = random() % 9;
    check_loaders_of({files_of(folder, "part", "<f4", {16, 1024}, counts, random),
                      npy_file(folder / "labels.npy", "<i8", {sum(counts)}, random)});
}
