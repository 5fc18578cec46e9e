// What hdf5_writer writes is read back by h5py and by our own reader. Exits with 77 (skipped) if the
// distribution's Python has no h5py.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "formats/hdf5_write_chunks.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/npy.hpp"
#include "tests/hdf5_writing.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/run_h5py.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using npy_bytes::read_file;
using npy_bytes::write_file;
using pinflow::dtype;
using pinflow::hdf5_writer;
using pinflow::shape_vector;
using dataset = hdf5_writer::dataset;

unsigned cases_run = 0;

constexpr const char* script = "hdf5_writer_files.py";

/// Files, and what h5py is to find in them.
class expectations {
 public:
    explicit expectations(std::uint64_t alignment_bytes = 4096) : alignment_bytes_(alignment_bytes) {}

    fs::path operator/(const std::string& name) const { return folder_ / name; }
    std::uint64_t alignment_bytes() const { return alignment_bytes_; }

    /// h5py is to read `bytes` from the dataset, as elements of `read_as` if that is given.
    nlohmann::json& add(const std::string& file, const dataset& of, std::span<const std::byte> bytes,
                        const std::optional<dtype>& read_as = {}) {
        const std::string name = fmt::format("{}.npy", entries_.size());
        std::string expected = pinflow::format_npy_header(read_as.value_or(of.dtype), of.shape);
        for (const std::byte byte : bytes)
            expected += static_cast<char>(byte);
        write_file(folder_ / name, expected);
        nlohmann::json entry{
            {"file", file}, {"name", of.name}, {"expected", name}, {"alignment", alignment_bytes_}};
        entry["chunks"] = nullptr;
        if (of.deflate_level > 0 && !bytes.empty() && !of.shape.empty()) {
            entry["chunks"] = of.chunk_shape.empty()
                                  ? pinflow::detail::hdf5_default_chunk_shape(of.shape, of.dtype.size_bytes())
                                  : of.chunk_shape;
            entry["level"] = std::min(of.deflate_level, 9U);
        }
        entries_.push_back(std::move(entry));
        return entries_.back();
    }

    bool met() const {
        std::ofstream(folder_ / "manifest.json") << nlohmann::json(entries_);
        return run_h5py(script, {"verify", folder_.path().string()}) == 0;
    }

 private:
    temporary_folder folder_;
    std::uint64_t alignment_bytes_;
    std::vector<nlohmann::json> entries_;
};

const std::vector<dtype>& all_types() {
    static const std::vector<dtype> types = [] {
        std::vector<dtype> result;
        for (const char* const descr :
             {"|b1", "|i1",  "|u1", "<i2",  ">i2", "<u2", ">u2",     "<i4",    ">i4",
              "<u4", ">u4",  "<i8", ">i8",  "<u8", ">u8", "<f2",     ">f2",    "<f4",
              ">f4", "<f8",  ">f8", "<f16", "<c8", ">c8", "<c16",    ">c16",   "<c32",
              "|S1", "|S10", "|V1", "|V7",  "<M8", "<m8", "<M8[ns]", ">M8[D]", ">m8[25s]"})
            result.push_back(dtype::parse(descr));
        const auto field = [](std::string name, const dtype& type, std::uint64_t offset,
                              shape_vector shape = {}) {
            return pinflow::dtype_field{std::move(name), "", type, std::move(shape), offset};
        };
        const dtype f4 = dtype::parse("<f4");
        const dtype inner = dtype::structured({field("re", dtype::parse(">f8"), 0), field("im", f4, 8)}, 12);
        result.push_back(dtype::structured({field("x", f4, 0), field("y", dtype::parse("<i2"), 4)}, 6));
        result.push_back(dtype::structured(
            {field("flag", dtype::parse("|b1"), 3), field("inner", inner, 4, {2, 3}),
             field("c", dtype::parse("<c8"), 80), field("text \xc3\xa9", dtype::parse("|S5"), 90),
             field("half", dtype::parse("<f2"), 95), field("blob", dtype::parse("|V3"), 97)},
            101));
        // not a complex number, whose fields are r, i in this order
        result.push_back(dtype::structured({field("i", f4, 0), field("r", f4, 4)}, 8));
        return result;
    }();
    return types;
}

}  // namespace

TEST_CASE("hdf5 writer: h5py and our reader read every type, shape and layout back as it was written") {
    ++cases_run;
    random_engine random(1);
    expectations files;
    hdf5_writer writer(files / "a.h5");
    std::vector<std::pair<dataset, std::vector<std::byte>>> written;
    for (const dtype& type : all_types()) {
        for (const shape_vector& shape :
             {shape_vector{}, {0}, {1}, {5}, {0, 3}, {3, 0}, {17, 5}, {2, 3, 4}, {300, 70}}) {
            for (const unsigned level : {0u, 1u, 12u}) {
                dataset made{fmt::format("types/{}/{}", written.size() / 7, written.size()), type, shape,
                             level};
                if (level == 12 && pinflow::element_count(shape) > 10) {
                    for (const std::uint64_t length : shape)
                        made.chunk_shape.push_back(1 + random() % length);
                }
                auto bytes = sample(random, made);
                if (type.descr() == "<f16" || type.descr() == "<c32") {  // numbers, which h5py may convert
                    for (std::size_t at = 0; at < bytes.size(); at += 16) {
                        const auto number = static_cast<long double>(static_cast<int>(random() % 1000));
                        std::memset(&bytes[at], 0, 16);
                        std::memcpy(&bytes[at], &number, 10);
                    }
                }
                writer.begin(made);
                write_in_pieces(random, writer, bytes, 1 + made.dtype.size_bytes() * 1000);
                files.add("a.h5", made, bytes);
                written.emplace_back(std::move(made), std::move(bytes));
            }
        }
    }
    writer.finish();
    for (const auto& [made, bytes] : written)
        check_read_back(files / "a.h5", made, bytes);
    CHECK(written.size() > 500);
    CHECK(files.met());
}

TEST_CASE("hdf5 writer: h5py opens the floats that numpy lacks, and our reader finds their types") {
    ++cases_run;
    expectations files;
    hdf5_writer writer(files / "a.h5");
    // 1.5, -2, 0, infinity
    const std::vector<std::byte> bfloat16{std::byte{0xC0}, std::byte{0x3F}, std::byte{0},    std::byte{0xC0},
                                          std::byte{0},    std::byte{0},    std::byte{0x80}, std::byte{0x7F}};
    const std::vector<std::byte> float8{std::byte{0x3E}, std::byte{0xC0}, std::byte{0}, std::byte{0x7C}};
    const std::vector<float> single{1.5F, -2, 0, std::numeric_limits<float>::infinity()};
    const std::vector<std::uint16_t> half{0x3E00, 0xC000, 0, 0x7C00};
    for (const unsigned level : {0u, 6u}) {
        const dataset wide{fmt::format("bfloat16/{}", level), dtype::parse("bfloat16"), {4}, level};
        const dataset narrow{fmt::format("float8/{}", level), dtype::parse("float8_e5m2"), {2, 2}, level};
        writer.begin(wide);
        writer.write(bfloat16);
        writer.begin(narrow);
        writer.write(float8);
        files.add("a.h5", wide, std::as_bytes(std::span(single)), dtype::parse("<f4"));
        files.add("a.h5", narrow, std::as_bytes(std::span(half)), dtype::parse("<f2"));
    }
    const dataset big{"big", dtype::parse(">bfloat16"), {4}};
    writer.begin(big);
    writer.write(bfloat16);
    writer.finish();
    std::vector<std::byte> upper_halves(2 * bfloat16.size());
    for (std::size_t at = 0; at < bfloat16.size(); ++at)
        upper_halves[2 * at - at % 2] = bfloat16[at];
    files.add("a.h5", big, upper_halves, dtype::parse(">f4"));
    for (const unsigned level : {0u, 6u}) {
        check_read_back(files / "a.h5",
                        {fmt::format("bfloat16/{}", level), dtype::parse("bfloat16"), {4}, level}, bfloat16);
        check_read_back(files / "a.h5",
                        {fmt::format("float8/{}", level), dtype::parse("float8_e5m2"), {2, 2}, level},
                        float8);
    }
    check_read_back(files / "a.h5", big, bfloat16);
    CHECK(files.met());
}

TEST_CASE("hdf5 writer: chunks of any shape are right, also at the edges") {
    ++cases_run;
    random_engine random(2);
    expectations files;
    hdf5_writer writer(files / "a.h5");
    std::vector<std::pair<dataset, std::vector<std::byte>>> written;
    const auto add = [&](const char* type, shape_vector shape, shape_vector chunk_shape) {
        dataset made{fmt::format("{}", written.size()), dtype::parse(type), std::move(shape), 1,
                     std::move(chunk_shape)};
        auto bytes = sample(random, made);
        writer.begin(made);
        write_in_pieces(random, writer, bytes, random() % 2 == 0 ? 100 : 1'000'000);
        files.add("a.h5", made, bytes);
        written.emplace_back(std::move(made), std::move(bytes));
    };
    for (const char* const type : {"<f4", "|u1", "|S3"}) {
        add(type, {1000}, {100});
        add(type, {1003}, {64});
        add(type, {5}, {1});
        add(type, {5}, {5});
        add(type, {37, 5}, {8, 5});
        add(type, {37, 11}, {5, 4});
        add(type, {37, 11}, {1, 4});
        add(type, {7, 300}, {7, 1});
        add(type, {7, 300}, {1, 1});
        add(type, {9, 7, 5}, {2, 3, 5});
        add(type, {9, 7, 5}, {1, 3, 5});
        add(type, {9, 7, 5}, {1, 1, 2});
        add(type, {9, 7, 5}, {1, 3, 2});
        add(type, {9, 7, 5}, {9, 7, 5});
        add(type, {4, 3, 2, 5}, {1, 2, 2, 3});
        add(type, {1, 5000}, {1, 512});
        add(type, {20, 1, 4}, {3, 1, 4});
        add(type, {2, 1, 1, 1, 7, 1, 2}, {1, 1, 1, 1, 3, 1, 2});
    }
    // default chunk shapes, several batches of chunks
    add("<f4", {70'000, 100}, {});
    add("<f8", {9, 300'000}, {});
    add("<u2", {3, 5, 700'001}, {});
    add("|S600000", {5}, {});
    for (int round = 0; round < 30; ++round) {
        shape_vector shape, chunk_shape;
        for (std::uint64_t axes = 1 + random() % 5; axes > 0; --axes) {
            shape.push_back(1 + random() % 12);
            chunk_shape.push_back(1 + random() % shape.back());
        }
        add("<i2", shape, chunk_shape);
    }
    writer.finish();
    for (const auto& [made, bytes] : written)
        check_read_back(files / "a.h5", made, bytes);
    CHECK(files.met());
}

TEST_CASE("hdf5 writer: 32 axes are the most that HDF5 has") {
    ++cases_run;
    random_engine random(3);
    expectations files;
    hdf5_writer writer(files / "a.h5");
    shape_vector shape(32, 1);
    shape[0] = shape[20] = 2;
    shape[31] = 3;
    for (const unsigned level : {0u, 1u}) {
        const dataset made{fmt::format("{}", level), dtype::parse("<i4"), shape, level};
        const auto bytes = sample(random, made);
        writer.begin(made);
        writer.write(bytes);
        files.add("a.h5", made, bytes);
    }
    shape.push_back(1);
    CHECK_THROWS_WITH_AS(writer.begin({"more", dtype::parse("<i4"), shape}),
                         doctest::Contains("the dataset 'more' has 33 axes: HDF5 allows 32"),
                         pinflow::unsupported);
    writer.finish();
    CHECK(files.met());
}

TEST_CASE("hdf5 writer: chunks that do not shrink are stored as they are") {
    ++cases_run;
    random_engine random(4);
    expectations files;
    const dataset made{"noise", dtype::parse("<f4"), {1024, 1024}, 9};  // four whole chunks
    const auto bytes = random_bytes(random, payload_bytes(made));
    write_one(files / "a.h5", made, bytes);
    files.add("a.h5", made, bytes)["skipped"] = 3;
    const dataset one{"one", dtype::parse("|u1"), {1}, 9};
    write_one(files / "b.h5", one, std::span(bytes).first(1));
    files.add("b.h5", one, std::span(bytes).first(1))["skipped"] = 3;
    const dataset zeros{"zeros", dtype::parse("<f4"), {1000, 1000}, 9};
    const std::vector<std::byte> nothing(payload_bytes(zeros));
    write_one(files / "c.h5", zeros, nothing);
    files.add("c.h5", zeros, nothing)["skipped"] = 0;
    check_read_back(files / "a.h5", made, bytes);
    CHECK(files.met());
    CHECK(fs::file_size(files / "a.h5") < bytes.size() + 20'000);
    CHECK(fs::file_size(files / "c.h5") < 30'000);
}

TEST_CASE("hdf5 writer: elements that are contiguous begin at multiples of the alignment, and are mapped") {
    ++cases_run;
    random_engine random(5);
    for (const std::uint64_t alignment : {16u, 64u, 4096u, 8192u, 2u << 20}) {
        expectations files(alignment);
        hdf5_writer writer(files / "a.h5", alignment);
        std::vector<std::string> names;
        for (const std::uint64_t rows : {1u, 3u, 1000u, 70'000u}) {
            for (const unsigned level : {0u, 1u}) {  // chunks in between are not aligned
                const dataset made{fmt::format("d{}/{}", rows, level), dtype::parse("<f4"), {rows, 3}, level};
                const auto bytes = sample(random, made);
                writer.begin(made);
                writer.write(bytes);
                files.add("a.h5", made, bytes);
                if (level == 0) names.push_back(made.name);
            }
        }
        writer.finish();
        for (const std::string& name : names) {
            const auto listing = pinflow::list_hdf5(files / "a.h5", name);
            CHECK(listing.mappable);
            REQUIRE(listing.offset_bytes.has_value());
            CHECK(*listing.offset_bytes % alignment == 0);
        }
        CHECK(files.met());
    }
}

TEST_CASE("hdf5 writer: writes many datasets, many and deep groups, long names and names of all characters") {
    ++cases_run;
    random_engine random(6);
    expectations files;
    hdf5_writer writer(files / "a.h5");
    const auto add = [&](const std::string& name) {
        const dataset made{name, dtype::parse("<u2"), {3}, static_cast<unsigned>(random() % 2)};
        const auto bytes = sample(random, made);
        writer.begin(made);
        writer.write(bytes);
        files.add("a.h5", made, bytes);
    };
    for (int number = 0; number < 800; ++number)
        add(fmt::format("group {}/{}", number % 40, number));
    std::string deep;
    for (int level = 0; level < 100; ++level)
        deep += fmt::format("{}/", level);
    add(deep + "a");
    add(deep + "b");
    add(std::string(5000, 'n'));
    add("\xc3\xa9t\xc3\xa9/\xe6\x97\xa5\xe6\x9c\xac");
    add("a.npy");
    add("...");
    add(" :*?\n\"\\");
    writer.finish();
    CHECK(pinflow::list_hdf5(files / "a.h5").size() == 807);
    CHECK(files.met());
}

TEST_CASE(
    "hdf5 writer: equal arrays make equal files, however they are written, which old versions can read") {
    ++cases_run;
    random_engine random(7);
    const temporary_folder folder;
    const std::vector<dataset> datasets{{"together", dtype::parse("<f4"), {300, 1000}},
                                        {"group/chunks", dtype::parse("<f8"), {700, 500}, 4},
                                        {"group/edges", dtype::parse("<i2"), {101, 103}, 1, {10, 10}},
                                        {"scalar", dtype::parse("|S9"), {}}};
    std::vector<std::vector<std::byte>> contents;
    for (const dataset& each : datasets)
        contents.push_back(sample(random, each));
    std::string first;
    for (const std::uint64_t max_bytes :
         {std::uint64_t{1} << 30, std::uint64_t{50}, std::uint64_t{3'000'000}}) {
        const fs::path path = folder / fmt::format("{}.h5", max_bytes);
        hdf5_writer writer(path);
        for (std::size_t index = 0; index < datasets.size(); ++index) {
            writer.begin(datasets[index]);
            writer.write({});
            write_in_pieces(random, writer, contents[index], max_bytes);
        }
        writer.finish();
        const std::string content = read_file(path);
        if (first.empty()) first = content;
        CHECK((content == first));
    }
    CHECK(first[8] == 0);  // the superblock's version
    CHECK(names_in(folder.path()).size() == 3);
}

TEST_CASE("hdf5 writer: a file without datasets is valid") {
    ++cases_run;
    const temporary_folder folder;
    hdf5_writer(folder / "a.h5").finish();
    CHECK(pinflow::list_hdf5(folder / "a.h5").empty());
}

int main(int argc, char** argv) {
    return main_with_h5py(argc, argv, script, cases_run);
}
