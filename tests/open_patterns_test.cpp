#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "pinflow/row_source.hpp"
#include "src/core/descriptor_cache.hpp"
#include "src/core/system.hpp"
#include "tests/mapped_files.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/child_process.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

// Patterns of many files, concatenated and stacked.

namespace {

namespace fs = std::filesystem;
namespace seam = pinflow::detail::system;
using npy_bytes::write_file;
using pinflow::dtype;
using pinflow::open_rows;
using pinflow::shape_vector;
using integers = std::vector<std::int32_t>;
using rows_pointer = std::shared_ptr<const pinflow::row_source>;

integers counting(std::int32_t first, std::size_t count) {
    integers elements(count);
    std::iota(elements.begin(), elements.end(), first);
    return elements;
}

std::string name_of(std::size_t index, const std::string& ending) {
    return fmt::format("part-{}.{}", index, ending);
}

/// The bytes of elements as a file has them.
std::string bytes_of(const integers& elements) {
    return {reinterpret_cast<const char*>(elements.data()), elements.size() * sizeof(std::int32_t)};
}

void write_npy(const fs::path& path, const integers& elements, const shape_vector& shape) {
    pinflow::write_npy(path, {std::as_bytes(std::span(elements)).data(), dtype::of<std::int32_t>(), shape});
}

/// Files part-0.npy, part-1.npy, ... of one shape, whose elements count on from file to file. Not written by
/// npy_writer, whose fsyncs take time.
void write_parts(const temporary_folder& folder, std::size_t count, const std::string& shape,
                 std::size_t elements) {
    const std::string header = npy_bytes::header(npy_bytes::text("'<i4'", shape));
    for (std::size_t index = 0; index < count; ++index) {
        write_file(folder / name_of(index, "npy"),
                   header + bytes_of(counting(static_cast<std::int32_t>(index * elements), elements)));
    }
}

integers elements_of(const pinflow::row_source& rows) {
    REQUIRE(rows.dtype() == dtype::of<std::int32_t>());
    std::vector<std::uint64_t> ids(rows.row_count());
    std::iota(ids.begin(), ids.end(), 0u);
    integers elements(rows.row_count() * rows.row_size_bytes() / sizeof(std::int32_t));
    rows.read_rows(ids, std::as_writable_bytes(std::span(elements)));
    return elements;
}

rows_pointer open_stacked(const std::string& text) {
    pinflow::open_options options;
    options.stack = true;
    return open_rows(text, options);
}

}  // namespace

// ---- many files -------------------------------------------------------------------------------------------

// Must be the first case: it forks, and a forked child lacks the threads that other cases start.
TEST_CASE("open patterns: a thousand files open in a process that may open few") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_parts(folder, 1'000, "(3, 2)", 6);
    for (const ::rlim_t max_descriptors : {256u, 64u}) {
        CAPTURE(max_descriptors);
        CHECK(holds_in_child_with_descriptors(max_descriptors, [&] {
            const rows_pointer rows = open_rows(at + "/part-*.npy");
            rows->check_unchanged();
            const rows_pointer stacked = open_stacked(at + "/part-*.npy");
            stacked->check_unchanged();
            return elements_of(*rows) == counting(0, 6'000) && elements_of(*stacked) == counting(0, 6'000);
        }));
    }
}

TEST_CASE("open patterns: each .npy file is opened once, and mapped once beside the others") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_parts(folder, 20, "(3, 2)", 6);
    for (const bool stack : {false, true}) {
        std::mutex mutex;
        std::map<std::string, int> opened;
        std::map<std::string, int> mapped;
        const seam::scoped_failure_hook hook([&](seam::call what, std::string_view path) {
            const std::lock_guard lock(mutex);
            if (what == seam::call::open) ++opened[std::string(path)];
            if (what == seam::call::mmap) ++mapped[std::string(path)];
            return seam::injected_failure{};
        });
        const rows_pointer rows = stack ? open_stacked(at + "/*.npy") : open_rows(at + "/*.npy");
        CHECK(rows->row_count() == (stack ? 20 : 60));
        CHECK(rows->file_backed());
        std::map<std::string, int> once;
        for (std::size_t index = 0; index < 20; ++index)
            once[folder / name_of(index, "npy")] = 1;
        CHECK(opened == once);
        once[""] = 1;  // the reserved addresses
        CHECK(mapped == once);
        const auto mappings = mappings_of(at);
        REQUIRE(mappings.size() == 20);
        for (std::size_t index = 0; index < 20; ++index) {
            CHECK(mappings[index].path == folder / name_of(index, "npy"));
            if (index > 0) CHECK(mappings[index].begin == mappings[index - 1].end);
        }
    }
}

TEST_CASE("open patterns: open refuses a pattern, and names open_rows") {
    const temporary_folder folder;
    const auto refuses = [](const auto& open_pattern) {
        const std::string sentence = message_of<pinflow::system_failure>(open_pattern);
        return sentence.find("open_rows") != std::string::npos;
    };
    CHECK(refuses([&] { pinflow::open(folder / "part-*.npy"); }));
    CHECK(refuses([&] { pinflow::open(folder / "part-*.npz", "x"); }));
    write_npy(folder / "part-[0].npy", {7}, {1});
    CHECK(pinflow::open(folder / "part-[0].npy").shape() == shape_vector{1});
}

TEST_CASE("open patterns: one file that matches is mapped as if it were named") {
    const temporary_folder folder;
    write_parts(folder, 1, "(3, 2)", 6);
    const rows_pointer rows = open_rows(folder / "part-*.npy");
    REQUIRE(rows->extents().size() == 1);
    CHECK(rows->extents()[0].data != nullptr);
    CHECK(rows->description() == "'" + (folder / "part-0.npy").string() + "'");
    const rows_pointer row = open_stacked(folder / "part-*.npy");
    CHECK(row->row_shape() == shape_vector{3, 2});
    CHECK(row->extents()[0].data != nullptr);
}

TEST_CASE("open patterns: the first bad file in the order of the paths is reported") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_parts(folder, 200, "(3,)", 3);
    // one for each step at which a bad file is found
    write_file(folder / "part-191.npy", "no array");
    write_file(folder / "part-57.npy", "");
    write_file(folder / "part-120.npy", npy_bytes::header(npy_bytes::text("'<i4'", "(4,)")) + "short");
    fs::remove(folder / "part-90.npy");
    fs::create_directory(folder / "part-90.npy");
    pinflow::npz_writer(folder / "part-58.npy").finish();
    const auto first_bad = [&] { return message_of<pinflow::error>([&] { open_rows(at + "/part-*.npy"); }); };
    for (const auto& [bad, part] :
         std::vector<std::pair<std::string, std::string>>{{"part-57.npy", "the file is empty"},
                                                          {"part-58.npy", "there is no array in it"},
                                                          {"part-90.npy", "it is a folder"},
                                                          {"part-120.npy", "cannot open"},
                                                          {"part-191.npy", "it begins with 'no array'"}}) {
        for (int time = 0; time < 20; ++time) {
            const std::string sentence = first_bad();
            CAPTURE(sentence);
            CHECK(contains(sentence, bad));
            CHECK(contains(sentence, part));
        }
        fs::remove(folder / bad);
    }
    CHECK(first_bad().empty());
}

TEST_CASE("open patterns: .npy and .npz files can be mixed, and stay mapped") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_npy(folder / "a1", counting(0, 2), {2});
    const integers stored_elements = counting(2, 2);
    pinflow::npz_writer stored(folder / "a2");
    stored.begin("x", dtype::of<std::int32_t>(), {2});
    stored.write(std::as_bytes(std::span(stored_elements)));
    stored.finish();
    write_npy(folder / "a4", counting(4, 2), {2});
    const rows_pointer rows = open_rows(at + "/a*");
    CHECK(elements_of(*rows) == integers{0, 1, 2, 3, 4, 5});
    REQUIRE(rows->extents().size() == 3);
    for (const pinflow::row_extent& extent : rows->extents())
        CHECK(extent.data != nullptr);
    CHECK(mappings_of(at).size() == 3);
}

// ---- stacks -----------------------------------------------------------------------------------------------

TEST_CASE("open patterns: files of one number each become a vector") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_parts(folder, 12, "()", 1);
    const rows_pointer rows = open_stacked(at + "/part-*.npy");
    CHECK(rows->row_shape().empty());
    CHECK(rows->row_count() == 12);
    CHECK(elements_of(*rows) == counting(0, 12));
    CHECK(rows->extents().size() == 12);
    CHECK_THROWS_AS(open_rows(at + "/part-*.npy"), pinflow::unsupported);
    // a path without wildcards is not stacked
    CHECK_THROWS_AS(open_stacked(at + "/part-0.npy"), pinflow::unsupported);
}

TEST_CASE("open patterns: stacking does not apply to a file that is named") {
    const temporary_folder folder;
    write_parts(folder, 2, "(3, 2)", 6);
    const rows_pointer rows = open_stacked(folder / "part-1.npy");
    CHECK(rows->row_count() == 3);
    CHECK(rows->row_shape() == shape_vector{2});
}

TEST_CASE("open patterns: files that cannot be stacked are refused, and named") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_parts(folder, 3, "(3, 2)", 6);
    const auto refusal = [&] {
        return message_of<pinflow::invalid_argument>([&] { open_stacked(at + "/part-*.npy"); });
    };
    const auto names_both = [&](const std::string& sentence, const std::string& other) {
        return contains_all(sentence,
                            {"'" + at + "/part-0.npy' and '" + at + "/part-3.npy'", "cannot be stacked",
                             "the first is <i4 of shape (3, 2)", "the second " + other});
    };
    write_npy(folder / "part-3.npy", counting(0, 4), {2, 2});
    CHECK(names_both(refusal(), "<i4 of shape (2, 2)"));
    write_npy(folder / "part-3.npy", counting(0, 1), {});
    CHECK(names_both(refusal(), "<i4 of shape ()"));
    write_file(folder / "part-3.npy",
               npy_bytes::header(npy_bytes::text("'<f4'", "(3, 2)")) + std::string(24, 'x'));
    CHECK(names_both(refusal(), "<f4 of shape (3, 2)"));
    CHECK(contains(message_of<pinflow::invalid_argument>([&] { open_stacked(at + "/none-*.npy"); }),
                   "no file has that name or matches it"));
}

TEST_CASE("open patterns: big-endian files and files in Fortran order are stacked in C order") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    // columns of (0, 1, 2) and (3, 4, 5), then the same 10 higher
    for (const bool big_endian : {false, true}) {
        for (std::int32_t file = 0; file < 2; ++file) {
            integers elements{0, 1, 2, 3, 4, 5};
            for (std::int32_t& element : elements) {
                element += 10 * file;
                if (big_endian)
                    element =
                        static_cast<std::int32_t>(__builtin_bswap32(static_cast<std::uint32_t>(element)));
            }
            write_file(folder / name_of(static_cast<std::size_t>(file), "npy"),
                       npy_bytes::header(npy_bytes::text(big_endian ? "'>i4'" : "'<i4'", "(3, 2)", "True")) +
                           bytes_of(elements));
        }
        const rows_pointer rows = open_stacked(at + "/part-*.npy");
        CHECK(rows->row_shape() == shape_vector{3, 2});
        CHECK(elements_of(*rows) == integers{0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15});
        CHECK(rows->file_backed());
        CHECK(rows->extents().empty());
        CHECK(contains(rows->no_extents_reason(), "is in Fortran order"));
        CHECK_THROWS_AS(open_rows(at + "/part-*.npy"), pinflow::unsupported);
        CHECK(mappings_of(at).empty());
    }
}

TEST_CASE("open patterns: members of archives, tensors and fields are stacked by their names") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    for (std::size_t index = 0; index < 3; ++index) {
        const integers elements = counting(static_cast<std::int32_t>(6 * index), 6);
        pinflow::npz_writer npz(folder / name_of(index, "npz"));
        npz.begin("x", dtype::of<std::int32_t>(), {3, 2});
        npz.write(std::as_bytes(std::span(elements)));
        npz.begin("label", dtype::of<std::int32_t>(), {});
        npz.write(std::as_bytes(std::span(elements).first(1)));
        npz.finish();
        const std::vector<pinflow::safetensors_writer::tensor> tensors{
            {"x", dtype::of<std::int32_t>(), {3, 2}}};
        pinflow::safetensors_writer safetensors(folder / name_of(index, "safetensors"), tensors);
        safetensors.write(std::as_bytes(std::span(elements)));
        safetensors.finish();
        write_file(folder / name_of(index, "npy"),
                   npy_bytes::header(npy_bytes::text("[('id', '<i4'), ('at', '<i4', (2,))]", "(2,)")) +
                       bytes_of(elements));
    }
    for (const std::string pattern : {"/part-*.npz:x", "/part-*.safetensors", "/part-*.safetensors:x"}) {
        CAPTURE(pattern);
        const rows_pointer rows = open_stacked(at + pattern);
        CHECK(rows->row_shape() == shape_vector{3, 2});
        CHECK(elements_of(*rows) == counting(0, 18));
        REQUIRE(rows->extents().size() == 3);
        CHECK(rows->extents()[2].data != nullptr);
        CHECK(mappings_of(at).size() == 3);
    }
    const rows_pointer labels = open_stacked(at + "/part-*.npz:label");
    CHECK(labels->row_shape().empty());
    CHECK(elements_of(*labels) == integers{0, 6, 12});
    const rows_pointer fields = open_stacked(at + "/part-*.npy:at");
    CHECK(fields->row_shape() == shape_vector{2, 2});
    CHECK(elements_of(*fields) == integers{1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17});
}

TEST_CASE("open patterns: datasets of HDF5 files are stacked, however they are stored") {
    if (!pinflow::has_hdf5()) {
        MESSAGE("skipped: this build has no HDF5");
        return;
    }
    const temporary_folder folder;
    const std::string at = folder.path().string();
    for (std::size_t index = 0; index < 3; ++index) {
        const integers elements = counting(static_cast<std::int32_t>(6 * index), 6);
        pinflow::hdf5_writer writer(folder / name_of(index, "h5"));
        const auto write = [&](const pinflow::hdf5_writer::dataset& dataset, std::size_t count) {
            writer.begin(dataset);
            writer.write(std::as_bytes(std::span(elements).first(count)));
        };
        write({"plain", dtype::of<std::int32_t>(), {3, 2}}, 6);
        write({"deflated", dtype::of<std::int32_t>(), {3, 2}, 5, {2, 2}}, 6);
        write({"label", dtype::of<std::int32_t>(), {}}, 1);
        writer.finish();
    }
    const rows_pointer plain = open_stacked(at + "/part-*.h5:plain");
    CHECK(plain->row_shape() == shape_vector{3, 2});
    CHECK(elements_of(*plain) == counting(0, 18));
    CHECK(plain->extents().size() == 3);
    const rows_pointer deflated = open_stacked(at + "/part-*.h5:deflated");
    CHECK(deflated->row_shape() == shape_vector{3, 2});
    CHECK(elements_of(*deflated) == counting(0, 18));
    CHECK(deflated->extents().empty());
    CHECK(deflated->file_backed());
    CHECK(deflated->memory_bytes() > 0);
    CHECK(contains(deflated->no_extents_reason(), "is stored in filtered chunks"));
    const rows_pointer labels = open_stacked(at + "/part-*.h5:label");
    CHECK(labels->row_shape().empty());
    CHECK(elements_of(*labels) == integers{0, 6, 12});
    CHECK_THROWS_AS(open_rows(at + "/part-*.h5:label"), pinflow::unsupported);
}

TEST_CASE("open patterns: files of other formats, too, keep no more descriptors open than the bound") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    const pinflow::detail::scoped_descriptor_limit limit(16);
    for (std::size_t index = 0; index < 50; ++index) {
        const integers elements = counting(static_cast<std::int32_t>(index), 1);
        pinflow::npz_writer npz(folder / name_of(index, "npz"));
        npz.begin("x", dtype::of<std::int32_t>(), {1});
        npz.write(std::as_bytes(std::span(elements)));
        npz.finish();
        if (!pinflow::has_hdf5()) continue;
        pinflow::hdf5_writer hdf5(folder / name_of(index, "h5"));
        hdf5.begin({"x", dtype::of<std::int32_t>(), {1}});
        hdf5.write(std::as_bytes(std::span(elements)));
        hdf5.finish();
    }
    const std::size_t before = open_descriptors();
    for (const std::string ending : {"npz", "h5"}) {
        if (ending == "h5" && !pinflow::has_hdf5()) continue;
        for (const bool stack : {false, true}) {
            const std::string pattern = at + "/part-*." + ending;
            const rows_pointer rows = stack ? open_stacked(pattern) : open_rows(pattern);
            CHECK(elements_of(*rows) == counting(0, 50));
            CHECK(open_descriptors() <= before + 16);
        }
    }
}

// ---- what a pattern is ------------------------------------------------------------------------------------

TEST_CASE("open patterns: a path with wildcards is a pattern unless a file has that name") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_parts(folder, 2, "(1,)", 1);
    write_npy(folder / "part-?.npy", {7}, {1});
    CHECK(pinflow::is_pattern(at + "/part-*.npy"));
    CHECK(pinflow::is_pattern(at + "/part-[01].npy"));
    CHECK(pinflow::is_pattern(at + "/part-*.npy:name"));
    CHECK(pinflow::is_pattern(at + "/nothing-*.npy"));
    CHECK_FALSE(pinflow::is_pattern(at + "/part-0.npy"));
    CHECK_FALSE(pinflow::is_pattern(at + "/part-?.npy"));
    CHECK_FALSE(pinflow::is_pattern(at + "/part-?.npy:name"));
    CHECK_FALSE(pinflow::is_pattern(at + "/missing.npy"));
    CHECK_FALSE(pinflow::is_pattern(""));
}

TEST_CASE("open patterns: files that change after they were opened are noticed") {
    const temporary_folder folder;
    const std::string at = folder.path().string();
    write_parts(folder, 40, "(3, 2)", 6);
    const pinflow::detail::scoped_descriptor_limit limit(16);
    const rows_pointer rows = open_rows(at + "/part-*.npy");
    fs::resize_file(folder / "part-20.npy", fs::file_size(folder / "part-20.npy") - 1);
    CHECK(contains(message_of<pinflow::data_changed>([&] { rows->check_unchanged(); }), "part-20.npy"));
    CHECK(contains(message_of<pinflow::data_changed>([&] { elements_of(*rows); }), "part-20.npy"));
}
