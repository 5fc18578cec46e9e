// Converts HDF5 files that h5py wrote, and writes HDF5 files that h5py reads. Exits with 77 (skipped) if the
// distribution's Python has no h5py.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "formats/hdf5_library.hpp"
#include "pinflow/pinflow.hpp"
#include "tests/cli_helpers.hpp"
#include "tests/hdf5_files.hpp"
#include "tests/run_h5py.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

namespace {

namespace fs = std::filesystem;
using cli::check_fails;
using cli::counting_bytes;
using cli::names_in;
using cli::npy;
using npy_bytes::read_file;
using npy_bytes::write_file;
using pinflow::detail::hdf5_storage;

unsigned cases_run = 0;

std::string convert(cli::arguments arguments) {
    arguments.insert(arguments.begin(), "convert");
    CAPTURE(cli::joined(arguments));
    const tool_result result = run_tool(arguments);
    CAPTURE(result.errors);
    REQUIRE(result.status == 0);
    CHECK(result.errors.empty());
    return result.output;
}

struct content {
    std::string descr;
    std::string shape;
    std::string bytes;
};

std::string text_of(std::span<const std::byte> bytes) {
    std::string text(bytes.size(), '\0');
    std::ranges::transform(bytes, text.begin(), [](std::byte byte) { return static_cast<char>(byte); });
    return text;
}

content read_back(const fs::path& file, const std::string& name) {
    const pinflow::array array = name.empty() ? pinflow::open(file) : pinflow::open(file, name);
    CHECK(array.view().c_contiguous());
    CHECK(array.dtype().is_little_endian());
    return {array.dtype().descr(), pinflow::to_string(array.shape()),
            text_of({array.view().data(), array.size_bytes()})};
}

void check_content(const content& found, const content& expected) {
    CHECK(found.descr == expected.descr);
    CHECK(found.shape == expected.shape);
    CHECK((found.bytes == expected.bytes));  // in brackets: too long to print
}

/// Checks with h5py (tests/hdf5_writer_files.py) the elements, chunks, deflate level and alignment of the
/// only dataset in a file.
void check_with_h5py(const fs::path& file, const std::string& name, const content& expected,
                     const nlohmann::json& chunks = nullptr, unsigned level = 0,
                     std::uint64_t alignment = 4096) {
    const temporary_folder folder;
    fs::copy_file(file, folder / "a.h5");
    write_file(folder / "expected.npy", npy(expected.descr, expected.shape, expected.bytes));
    const nlohmann::json entry{{"file", "a.h5"},   {"name", name},   {"expected", "expected.npy"},
                               {"chunks", chunks}, {"level", level}, {"alignment", alignment}};
    std::ofstream(folder / "manifest.json") << nlohmann::json::array({entry});
    CHECK(run_h5py("hdf5_writer_files.py", {"verify", folder.path().string()}) == 0);
}

std::string source_path(const std::string& file) {
    static_cast<void>(hdf5_entries());  // makes the files first
    return hdf5_folder() / file;
}

/// The first dataset whose description meets `condition`.
template <typename Condition>
const hdf5_file_entry& find_entry(Condition condition) {
    const auto found = std::ranges::find_if(
        hdf5_entries(), [&](const hdf5_file_entry& entry) { return condition(*entry.description); });
    REQUIRE(found != hdf5_entries().end());
    return *found;
}

std::string expected_descr(const hdf5_file_entry& entry) {
    return entry.description->dtype.little_endian().descr();
}

}  // namespace

// ---- from HDF5 -------------------------------------------------------------------------------------------

TEST_CASE(
    "convert: all datasets of an HDF5 file, of whatever storage, become arrays of .npz and HDF5 files") {
    ++cases_run;
    const temporary_folder folder;
    for (const char* const file : {"0.h5", "1024.h5"}) {
        const std::string archive = folder / "out.npz", mapped = folder / "out.h5",
                          deflated = folder / "out.hdf5";
        convert({source_path(file), archive});
        convert({source_path(file), mapped});
        convert({archive, deflated, "--deflate", "1"});
        std::size_t count = 0;
        std::vector<std::string> names;
        for (const hdf5_file_entry& entry : hdf5_entries()) {
            if (entry.file == file) names.push_back(entry.description->name);
        }
        const std::vector<pinflow::array> members = pinflow::open_npz(archive, names);
        for (const hdf5_file_entry& entry : hdf5_entries()) {
            if (entry.file != file) continue;
            CAPTURE(entry.description->name);
            const content expected{expected_descr(entry), pinflow::to_string(entry.description->shape),
                                   text_of(entry.little)};
            const pinflow::array& member = members[count++];
            check_content({member.dtype().descr(), pinflow::to_string(member.shape()),
                           text_of({member.view().data(), member.size_bytes()})},
                          expected);
            if (count % 10 != 0) continue;  // opening all of them one by one takes long
            check_content(read_back(mapped, entry.description->name), expected);
            check_content(read_back(deflated, entry.description->name), expected);
        }
        CHECK(count > 300);
        CHECK(pinflow::list_arrays(archive).size() == count);
        CHECK(pinflow::list_arrays(deflated).size() == count);
        for (const pinflow::array_listing& each : pinflow::list_arrays(mapped)) {
            CHECK(each.mappable);
            CHECK(each.offset_bytes.value_or(0) % 4096 == 0);
            --count;
        }
        CHECK(count == 0);
    }
}

TEST_CASE("convert: one dataset, named by its path from the root, becomes a file of any format") {
    ++cases_run;
    const temporary_folder folder;
    const auto is_wide = [](const pinflow::detail::hdf5_description& of) {
        return of.dtype.descr() == ">f4" && pinflow::element_count(of.shape) > 1;
    };
    using description = pinflow::detail::hdf5_description;
    for (const hdf5_file_entry* const entry :
         {&find_entry(
              [&](const description& of) { return of.storage == hdf5_storage::contiguous && is_wide(of); }),
          &find_entry([&](const description& of) {
              return of.storage == hdf5_storage::chunked && is_wide(of) && of.filters.size() == 3;
          }),
          &find_entry([&](const description& of) {
              return of.storage == hdf5_storage::chunked && of.filters.empty() && of.dtype.descr() == "<f4";
          }),
          &find_entry([](const description& of) {
              return of.storage == hdf5_storage::compact && of.dtype.descr() == ">i4";
          }),
          &find_entry([](const description& of) {
              return of.storage == hdf5_storage::absent && !of.fill.empty() && of.dtype.descr() == ">i4";
          }),
          &find_entry([](const description& of) { return of.shape.empty() && of.dtype.descr() == "<f8"; }),
          &find_entry([](const description& of) {
              return of.shape == pinflow::shape_vector{3, 0} && of.dtype.descr() == ">i8";
          })}) {
        CAPTURE(entry->file);
        CAPTURE(entry->description->name);
        const content expected{expected_descr(*entry), pinflow::to_string(entry->description->shape),
                               text_of(entry->little)};
        for (const char* const out : {"out.npy", "out.npz", "out.safetensors", "out.h5"}) {
            convert(
                {fmt::format("{}:/{}", source_path(entry->file), entry->description->name), folder / out});
            check_content(read_back(folder / out, ""), expected);
        }
        CHECK(pinflow::list_arrays(folder / "out.h5").front().name == "data");
        check_with_h5py(folder / "out.h5", "data", expected);
    }
}

TEST_CASE("convert: datasets that only libhdf5 reads are converted, and a damaged chunk keeps the old file") {
    ++cases_run;
    const temporary_folder made;
    REQUIRE(run_h5py("hdf5_metadata_files.py", {"write", made.path().string()}) == 0);
    std::map<std::string, std::string> numbers;  // of the files that hold their elements
    std::ifstream lines(made / "datasets.txt");
    for (std::string line; std::getline(lines, line);) {
        if (!line.starts_with("library.h5\t")) continue;
        const std::size_t name = line.find('\t') + 1;
        numbers[line.substr(name, line.find('\t', name) - name)] = line.substr(line.rfind('\t') + 1);
    }
    REQUIRE(numbers.contains("scaleoffset"));
    const content expected{"<i4", "(7, 10)", read_file(made / (numbers["scaleoffset"] + ".raw"))};
    const temporary_folder folder;
    const std::string source = (made / "library.h5").string() + ":scaleoffset";
    for (const char* const out : {"out.npy", "out.npz", "out.safetensors", "out.h5"}) {
        convert({source, folder / out});
        check_content(read_back(folder / out, ""), expected);
    }

    const std::string in = folder / "in.h5", out = folder / "out.npy";
    write_file(folder / "in.npy", npy("<i4", "(5000,)", counting_bytes(20'000)));
    convert({folder / "in.npy", in, "--deflate", "6"});
    std::string bytes = read_file(in);
    const auto described = pinflow::detail::describe_hdf5_dataset(pinflow::input_file(in), "data");
    REQUIRE(described.chunks.size() == 1);
    char& damaged = bytes[described.chunks[0].offset_bytes + described.chunks[0].size_bytes / 2];
    damaged = static_cast<char>(~damaged);
    write_file(in, bytes);
    const std::string before = read_file(out);
    check_fails(1, {"convert", in, out}, {"in.h5", "'data'"});
    CHECK(read_file(out) == before);
}

// ---- to HDF5 ---------------------------------------------------------------------------------------------

TEST_CASE("convert: any order and byte order becomes a dataset in C order, little-endian and aligned") {
    ++cases_run;
    const temporary_folder folder;
    const std::string plain = counting_bytes(24);
    std::string big = plain, fortran(24, '\0');
    for (std::size_t at = 0; at < plain.size(); at += 4)
        std::reverse(big.begin() + static_cast<std::ptrdiff_t>(at),
                     big.begin() + static_cast<std::ptrdiff_t>(at) + 4);
    for (std::size_t element = 0; element < 6; ++element)
        fortran.replace(element % 3 * 8 + element / 3 * 4, 4, plain, element * 4, 4);
    write_file(folder / "plain.npy", npy("<i4", "(2, 3)", plain));
    write_file(folder / "big.npy", npy(">i4", "(2, 3)", big));
    write_file(folder / "fortran.npy", npy("<i4", "(2, 3)", fortran, "True"));
    write_file(folder / "deflated.npz", zip_bytes::make({{"x.npy", npy(">i4", "(2, 3)", big), true}}).bytes);
    write_file(folder / "one.safetensors",
               cli::safetensors(R"({"x":{"dtype":"I32","shape":[2,3],"data_offsets":[0,24]}})", plain));
    for (const char* const in : {"plain.npy", "big.npy", "fortran.npy", "deflated.npz", "one.safetensors"}) {
        CAPTURE(in);
        const std::string name = std::string_view(in).ends_with(".npy") ? "data" : "x";
        convert({folder / in, folder / "out.h5"});
        check_with_h5py(folder / "out.h5", name, {"<i4", "(2, 3)", plain});
        convert({folder / in, folder / "out.hdf5", "--deflate", "9"});
        check_with_h5py(folder / "out.hdf5", name, {"<i4", "(2, 3)", plain}, {2, 3}, 9);
        check_content(read_back(folder / "out.hdf5", name), {"<i4", "(2, 3)", plain});
    }
    convert({folder / "one.safetensors", folder / "one.safetensors"});
    CHECK(pinflow::list_arrays(folder / "one.safetensors").front().name == "x");
    write_file(folder / "fields.npy",
               npy("[('x', '>i2'), ('y', '|u1', (3,))]", "(2,)", std::string("\0\1abc\0\2def", 10)));
    convert({folder / "fields.npy", folder / "out.h5"});
    check_with_h5py(folder / "out.h5", "data",
                    {"[('x', '<i2'), ('y', '|u1', (3,))]", "(2,)", std::string("\1\0abc\2\0def", 10)});
    write_file(folder / "time.npy", npy("<M8[ns]", "(3,)", plain));
    convert({folder / "time.npy", folder / "out.h5"});
    check_with_h5py(folder / "out.h5", "data", {"<M8[ns]", "(3,)", plain});

    // the floats that numpy lacks keep their type, so the tool gives no hint of --view-as
    write_file(folder / "float.npy", npy("<f4", "(2,)", std::string("\0\0\xc0\x3f\0\0\0\xc0", 8)));
    const std::string said = convert({folder / "float.npy", folder / "out.h5", "--dtype", "bfloat16"});
    CHECK(said.find("--view-as") == said.npos);
    check_content(read_back(folder / "out.h5", "data"),
                  {"bfloat16", "(2,)", std::string("\xc0\x3f\0\xc0", 4)});
    CHECK(names_in(folder.path()).size() == 10);  // nothing temporary is left
}

TEST_CASE(
    "convert: arrays of a whole file keep their names as paths, a chosen one is called data or as OUT names "
    "it") {
    ++cases_run;
    const temporary_folder folder;
    const std::string in = folder / "in.npz", out = folder / "out.h5", back = folder / "back.npz";
    write_file(in, zip_bytes::make({{"small.npy", npy("|u1", "(3,)", "123")},
                                    {"group/large.npy", npy("<f8", "(2,)", counting_bytes(16)), true},
                                    {"group/inner/two.npy", npy("<i2", "()", "ab")}})
                       .bytes);
    for (const cli::arguments& more : {cli::arguments{}, {"--deflate", "1"}}) {
        cli::arguments command{in, out};
        command.insert(command.end(), more.begin(), more.end());
        convert(command);
        CHECK(pinflow::list_arrays(out).size() == 3);
        check_content(read_back(out, "group/large"), {"<f8", "(2,)", counting_bytes(16)});
        check_content(read_back(out, "small"), {"|u1", "(3,)", "123"});
        check_content(read_back(out, "group/inner/two"), {"<i2", "()", "ab"});
        convert({out, back});
        CHECK(pinflow::list_arrays(back).size() == 3);
        check_content(read_back(back, "group/large"), {"<f8", "(2,)", counting_bytes(16)});
    }
    for (const auto& [named, name] : std::map<std::string, std::string>{
             {"", "data"}, {":x", "x"}, {":/x", "x"}, {":/group//x/", "group/x"}, {":a:b", "a:b"}}) {
        fs::remove(out);
        convert({in + ":small", out + named});
        const auto listed = pinflow::list_arrays(out);
        REQUIRE(listed.size() == 1);
        CHECK(listed.front().name == name);
        convert({in + ":group/large", out + named});  // the only one there may be replaced
        check_content(read_back(out, name), {"<f8", "(2,)", counting_bytes(16)});
    }
}

TEST_CASE("convert: --align chooses where a dataset begins, --deflate how its chunks are made") {
    ++cases_run;
    const temporary_folder folder;
    const std::string in = folder / "in.npy", out = folder / "out.h5";
    const std::string bytes = counting_bytes(3'000'000);
    write_file(in, npy("<i2", "(30000, 50)", bytes));
    for (const std::uint64_t alignment : {std::uint64_t{16}, std::uint64_t{4096}, std::uint64_t{2} << 20}) {
        convert({in, out, "--align", fmt::format("{}", alignment)});
        check_with_h5py(out, "data", {"<i2", "(30000, 50)", bytes}, nullptr, 0, alignment);
    }
    for (const unsigned level : {1u, 9u}) {
        convert({in, out, "--deflate", fmt::format("{}", level)});
        check_with_h5py(out, "data", {"<i2", "(30000, 50)", bytes}, {10485, 50}, level);
        CHECK(fs::file_size(out) < bytes.size() / 2);
        check_content(read_back(out, "data"), {"<i2", "(30000, 50)", bytes});
    }
}

TEST_CASE("convert: an HDF5 file is written whole from many pieces, in bounded memory") {
    ++cases_run;
    const temporary_folder folder;
    const std::string in = folder / "in.npy", out = folder / "out.h5";
    const std::string bytes = counting_bytes(25'000'003);
    write_file(in, npy("|u1", "(25000003,)", bytes));
    for (const cli::arguments& more : {cli::arguments{}, {"--deflate", "1"}}) {
        cli::arguments command{in, out};
        command.insert(command.end(), more.begin(), more.end());
        convert(command);
        check_content(read_back(out, "data"), {"|u1", "(25000003,)", bytes});
    }
    if (sanitized) return;
    write_file(in, npy("|u1", "(262144, 1024)", ""));
    fs::resize_file(in, fs::file_size(in) + (std::uint64_t{1} << 28));
    const std::uint64_t cores_bytes = 12 * (std::uint64_t{1} << 20) * std::thread::hardware_concurrency();
    for (const cli::arguments& more : {cli::arguments{}, {"--deflate", "1"}}) {
        cli::arguments command{"convert", in, out};
        command.insert(command.end(), more.begin(), more.end());
        const tool_result result = run_tool(command);
        CHECK(result.status == 0);
        CHECK(result.peak_bytes <
              (std::uint64_t{128} << 20) + std::min(cores_bytes, std::uint64_t{256} << 20));
    }
    const tool_result back = run_tool({"convert", out, folder / "back.npy"});
    CHECK(back.status == 0);
    CHECK(back.peak_bytes < (std::uint64_t{256} << 20));
    CHECK(fs::file_size(folder / "back.npy") == 4096 + (std::uint64_t{1} << 28));
}

// ---- what is left ----------------------------------------------------------------------------------------

TEST_CASE(
    "convert: an HDF5 file converted onto itself loses no dataset, and is replaced whole or not at all") {
    ++cases_run;
    const temporary_folder folder;
    const std::string path = folder / "a.h5";
    write_file(folder / "in.npz", zip_bytes::make({{"x.npy", npy("|u1", "(3,)", "123")},
                                                   {"group/y.npy", npy("<i2", "(1,)", "ab")}})
                                      .bytes);
    convert({folder / "in.npz", path, "--deflate", "1"});
    convert({path, path});
    check_content(read_back(path, "x"), {"|u1", "(3,)", "123"});
    check_content(read_back(path, "group/y"), {"<i2", "(1,)", "ab"});
    CHECK(pinflow::list_hdf5(path, "x").mappable);

    const std::string before = read_file(path);
    write_file(folder / "one.npy", npy("|u1", "(1,)", "1"));
    write_file(folder / "cut.h5", before.substr(0, before.size() / 2));
    const std::string cut = folder / "cut.h5", one = folder / "one.npy";
    const std::vector<std::pair<cli::arguments, std::vector<std::string>>> table{
        {{one, path + ":x"}, {"a.h5", "'group/y'", "lost"}},
        {{one, path + ":/x"}, {"'group/y'", "lost"}},
        {{one, path + ":group"}, {"'x'", "'group/y'", "lost"}},
        {{one, path + ":z"}, {"'x'", "'group/y'", "lost"}},
        {{path + ":x", path}, {"'group/y'", "lost"}},
        {{path + ":/group/y", path}, {"'x'", "lost"}},
        {{one, cut + ":x"}, {"cut.h5", "cannot be listed"}},
        {{path, path + ":x"}, {"'x'", "'group/y'", "several arrays"}},
        {{path + ":zz", path}, {"nothing called 'zz'"}},
        {{path, (folder / "out.h5").string() + ":x"},
         {"several arrays", ":NAME' (", "'group/y'", "without a name"}},
        {{path, folder / "out.npy"}, {"'x'", "'group/y'", "one array"}},
        {{path + ":z", folder / "out.npy"}, {"'z'"}},
        {{path + ":group", folder / "out.npy"}, {"'group'"}},
    };
    const auto names_before = names_in(folder.path());
    for (const auto& [arguments, says] : table) {
        cli::arguments command = arguments;
        command.insert(command.begin(), "convert");
        check_fails(1, command, says);
        CHECK(names_in(folder.path()) == names_before);
    }
    CHECK(read_file(path) == before);

    // only names in .npz files lose the extension .npy
    convert({one, folder / "b.h5:x"});
    check_fails(1, {"convert", one, folder / "b.h5:x.npy"}, {"'x'", "lost"});
    convert({folder / "b.h5:x", folder / "b.h5:x"});
    CHECK(pinflow::list_arrays(folder / "b.h5").size() == 1);
}

TEST_CASE("convert: arrays that HDF5 cannot hold are exit status 1 at once") {
    ++cases_run;
    const temporary_folder folder;
    const auto path = [&](const char* name) { return std::string(folder / name); };
    write_file(path("text.npy"), npy("<U2", "(3,)", counting_bytes(24)));
    write_file(path("bytes.npy"), npy("|u1", "(24,)", counting_bytes(24)));
    write_file(path("titled.npy"), npy("[(('title', 'a'), '<f4')]", "(2,)", counting_bytes(8)));
    write_file(path("both.npz"),
               zip_bytes::make({{"a.npy", npy("|u1", "(3,)", "123")}, {"a/b.npy", npy("|u1", "(3,)", "123")}})
                   .bytes);
    write_file(path("slashes.safetensors"),
               cli::safetensors(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                R"("b//c":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                                "12"));
    write_file(path("up.safetensors"),
               cli::safetensors(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                R"("../c":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                                "12"));
    write_file(path("out.h5"), "old");
    const std::vector<std::pair<cli::arguments, std::vector<std::string>>> table{
        {{path("text.npy"), path("out.h5")}, {"out.h5", "<U2", "|V8"}},
        {{path("bytes.npy"), path("out.h5"), "--view-as", "float8_e4m3fn"}, {"float8_e4m3fn", "|V1"}},
        {{path("titled.npy"), path("out.h5")}, {"title", "read back"}},
        {{path("both.npz"), path("out.h5")}, {"'a/b'", "'a'"}},
        {{path("slashes.safetensors"), path("out.h5")}, {"'b//c'", "empty part"}},
        {{path("up.safetensors"), path("out.h5")}, {"'../c'", "'..'"}},
        {{path("bytes.npy"), path("absent/out.h5")}, {"absent/out.h5"}},
        {{path("bytes.npy"), path("out.h5:a/../b")}, {"'..'"}},
    };
    const auto names_before = names_in(folder.path());
    for (const auto& [arguments, says] : table) {
        cli::arguments command = arguments;
        command.insert(command.begin(), "convert");
        check_fails(1, command, says);
        CHECK(names_in(folder.path()) == names_before);
    }
    CHECK(read_file(path("out.h5")) == "old");
    convert({path("text.npy"), path("out.h5"), "--view-as", "|V8"});
    check_content(read_back(path("out.h5"), "data"), {"|V8", "(3,)", counting_bytes(24)});
}

TEST_CASE("convert: wrong usage with HDF5 files is exit status 2, and touches nothing") {
    ++cases_run;
    const temporary_folder folder;
    const std::string in = folder / "in.npy", out = folder / "out.h5";
    write_file(in, npy("<f4", "(2, 3)", counting_bytes(24)));
    const std::vector<std::pair<cli::arguments, std::vector<std::string>>> table{
        {{in, folder / "out.npy", "--deflate", "1"}, {"--deflate", "out.npy"}},
        {{in, folder / "out.npz", "--deflate", "1"}, {"--deflate", "out.npz"}},
        {{in, folder / "out.safetensors", "--deflate", "1"}, {"--deflate"}},
        {{in, out, "--deflate"}, {"--deflate"}},
        {{in, out, "--deflate", "0"}, {"--deflate", "1 to 9"}},
        {{in, out, "--deflate", "10"}, {"--deflate", "1 to 9"}},
        {{in, out, "--deflate", "-1"}, {"--deflate"}},
        {{in, out, "--deflate", "fast"}, {"--deflate", "'fast'"}},
        {{in, out, "--deflate", "1", "--align", "4096"}, {"--deflate", "--align"}},
        {{in, out, "--align", "8"}, {"--align"}},
        {{in, out, "--align", "4MiB"}, {"--align", "2097152", "hdf5"}},
        {{in, out + ":"}, {"out.h5:"}},
        {{in, out + ":/"}, {"out.h5:/"}},
        {{in, folder / "out.H5"}, {".npy", ".h5"}},
        {{in, folder / ".h5"}, {".npy", ".h5"}},
    };
    for (const auto& [arguments, says] : table) {
        cli::arguments command = arguments;
        command.insert(command.begin(), "convert");
        check_fails(2, command, says);
    }
    CHECK(names_in(folder.path()) == std::set<std::string>{"in.npy"});
}

TEST_CASE("convert: an HDF5 file above the limit on file sizes is an error, and leaves nothing behind") {
    ++cases_run;
    const temporary_folder folder;
    const std::string in = folder / "in.npy", out = folder / "out.h5";
    std::string noise(3'000'000, '\0');
    std::uint64_t state = 1;
    for (char& character : noise)
        character = static_cast<char>((state = state * 6364136223846793005U + 1442695040888963407U) >> 56);
    write_file(in, npy("|u1", "(3000000,)", noise));
    write_file(out, "old");
    tool_surroundings narrow;
    narrow.max_file_bytes = 1 << 20;
    for (const cli::arguments& more : {cli::arguments{}, {"--deflate", "1"}}) {
        cli::arguments command{"convert", in, out};
        command.insert(command.end(), more.begin(), more.end());
        const tool_result result = run_tool(command, narrow);
        CAPTURE(result.errors);
        CHECK(result.status == 1);
        CHECK(result.one_error_line());
        CHECK(result.errors.find("File too large") != std::string::npos);
        CHECK(read_file(out) == "old");
    }
    CHECK(names_in(folder.path()) == std::set<std::string>{"in.npy", "out.h5"});
}

int main(int argc, char** argv) {
    return main_with_h5py(argc, argv, "hdf5_files.py", cases_run);
}
