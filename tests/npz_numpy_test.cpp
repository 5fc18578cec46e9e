// pinflow and numpy read the archives that the other wrote. Exits with 77 (skipped) if the distribution's
// Python has no numpy.
#ifndef __clang_analyzer__  // the analyzer reports false leaks in doctest's strings
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "formats/element_streams.hpp"
#include "formats/zip_writer.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using npy_bytes::as_bytes;
using npy_bytes::read_file;
using npy_bytes::write_file;
using pinflow::dtype;
using pinflow::shape_vector;

unsigned cases_run = 0;

/// Runs tests/npz_files.py. @return its exit status; 127 when there is no Python.
int run_numpy(std::vector<std::string> arguments) {
    const std::string script = (fs::path(__FILE__).parent_path() / "npz_files.py").string();
    arguments.insert(arguments.begin(), {"/usr/bin/python3", script});
    std::vector<char*> pointers;
    pointers.reserve(arguments.size() + 1);
    for (std::string& argument : arguments)
        pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    ::pid_t child = 0;
    if (::posix_spawn(&child, pointers[0], nullptr, nullptr, pointers.data(), environ) != 0) return 127;
    int status = 0;
    if (::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 126;
    return WEXITSTATUS(status);
}

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::size_t begin = 0;
    for (std::size_t end; (end = text.find(separator, begin)) != text.npos; begin = end + 1)
        parts.push_back(text.substr(begin, end - begin));
    parts.push_back(text.substr(begin));
    return parts;
}

std::string lengths_of(const shape_vector& shape) {
    std::string result;
    for (const std::uint64_t length : shape)
        result += (result.empty() ? "" : ",") + std::to_string(length);
    return result;
}

/// The elements in C order, gathered one by one through the strides.
std::string elements_of(const pinflow::array_view& view) {
    std::string result;
    for (std::uint64_t element = 0; element < view.size(); ++element) {
        std::uint64_t rest = element;
        std::int64_t offset = 0;
        for (std::size_t axis = view.shape().size(); axis-- > 0; rest /= view.shape()[axis])
            offset += static_cast<std::int64_t>(rest % view.shape()[axis]) * view.strides_bytes()[axis];
        result.append(reinterpret_cast<const char*>(view.data() + offset), view.dtype().size_bytes());
    }
    return result;
}

/// The elements as convert reads them.
std::string streamed(const fs::path& path, const std::string& name) {
    const auto stream = pinflow::detail::open_npz_elements(path)->stream(name, 1 << 20);
    std::string content(pinflow::element_count(stream->shape()) * stream->dtype().size_bytes(), '?');
    const auto bytes = std::as_writable_bytes(std::span(content));
    const std::size_t step = 4096 - 4096 % stream->dtype().size_bytes();
    for (std::size_t at = 0; at < bytes.size(); at += step)
        stream->read(bytes.subspan(at, std::min(step, bytes.size() - at)));
    stream->finish();
    return content;
}

}  // namespace

TEST_CASE("npz and numpy: every array that numpy wrote opens equal, however it wrote the archive") {
    ++cases_run;
    const temporary_folder folder;
    REQUIRE(run_numpy({"write", folder.path().string()}) == 0);
    struct expected {
        std::string name, type, fortran_order, lengths, number;
    };
    std::map<std::string, std::vector<expected>> archives;
    std::ifstream manifest(folder / "manifest.txt");
    for (std::string line; std::getline(manifest, line);) {
        const auto fields = split(line, '\t');
        REQUIRE(fields.size() == 6);
        archives[fields[0]].push_back({fields[1], fields[2], fields[3], fields[4], fields[5]});
    }
    CHECK(archives.size() == 11);
    std::size_t mapped = 0;
    std::size_t arrays = 0;
    for (const auto& [archive, members] : archives) {
        CAPTURE(archive);
        const auto listings = pinflow::list_npz(folder / archive);
        REQUIRE(listings.size() == members.size());
        std::vector<std::string> names;
        for (const expected& member : members)
            names.push_back(member.name);
        const auto opened = pinflow::open_npz(folder / archive, names);
        for (std::size_t index = 0; index < members.size(); ++index) {
            const expected& member = members[index];
            const pinflow::array& array = opened[index];
            CAPTURE(member.name);
            const bool fortran_order = member.fortran_order == "1";
            CHECK(listings[index].name == member.name);
            REQUIRE(listings[index].dtype.has_value());
            CHECK(*listings[index].dtype == array.dtype());
            CHECK(listings[index].fortran_order == fortran_order);
            CHECK(listings[index].mappable == (array.file() != nullptr));
            CHECK(listings[index].size_bytes == array.size_bytes());
            CHECK(array.dtype().descr() == member.type);
            CHECK(lengths_of(array.shape()) == member.lengths);
            CHECK((fortran_order ? array.view().fortran_contiguous() : array.view().c_contiguous()));
            const bool equal = elements_of(array.view()) == read_file(folder / (member.number + ".raw"));
            CHECK(equal);
            // in an archive of thousands, opening it for each takes long
            if (index < 300) {
                const bool equal_stream = streamed(folder / archive, member.name) ==
                                          read_file(folder / (member.number + ".little"));
                CHECK(equal_stream);
            }
            mapped += array.file() != nullptr ? 1u : 0u;
            ++arrays;
        }
    }
    CHECK(arrays > 3500);
    CHECK(mapped > 250);
}

TEST_CASE("npz and numpy: numpy, zipfile and unzip read every archive that pinflow wrote") {
    ++cases_run;
    const temporary_folder folder;
    std::ofstream manifest(folder / "manifest.txt");
    unsigned arrays = 0;
    const auto add = [&](const std::string& archive, const std::string& name, const dtype& type,
                         const shape_vector& shape, const std::string& content) {
        write_file(folder / fmt::format("{}.raw", arrays), content);
        manifest << fmt::format("{}\t{}\t{}\t{}\t{}\n", archive, name, type.descr(), lengths_of(shape),
                                arrays++);
    };
    std::string random(3'000'000, '\0');
    std::uint32_t state = 1;
    for (char& byte : random) {
        state = state * 1664525 + 1013904223;
        byte = static_cast<char>(state >> 24);
    }
    const auto content_of = [&](const dtype& type, const shape_vector& shape) {
        const std::uint64_t size = pinflow::element_count(shape) * type.size_bytes();
        // numpy itself would normalise booleans other than 0 and 1, and refuse code points past the last
        const bool any_bytes =
            type.kind() != pinflow::dtype_kind::boolean && type.kind() != pinflow::dtype_kind::unicode;
        return any_bytes ? random.substr(0, size) : std::string(size, '\0');
    };
    {
        pinflow::npz_writer writer(folder / "types.npz");
        for (const char* const descr :
             {"|b1", "|u1", "<i2", "<f2", "<f4", ">f8", "<c16", "|S10", "<U5", "|V7", "<M8[25us]"}) {
            const dtype type = dtype::parse(descr);
            for (const shape_vector& shape :
                 {shape_vector{}, shape_vector{0}, shape_vector{5}, shape_vector{2, 3, 4}}) {
                const std::string name = fmt::format("{}/{}", descr, lengths_of(shape));
                const std::string content = content_of(type, shape);
                writer.begin(name, type, shape);
                writer.write(as_bytes(content));
                add("types.npz", name, type, shape, content);
            }
        }
        const dtype type = dtype::structured(
            {{"a", "", dtype::parse("<i4"), {}, 0}, {"b", "", dtype::parse("<i2"), {3}, 4}}, 10);
        writer.begin("caf\xC3\xA9", type, {10});
        writer.write(as_bytes(content_of(type, {10})));
        add("types.npz", "caf\xC3\xA9", type, {10}, content_of(type, {10}));
        writer.begin("large", dtype::of<std::uint8_t>(), {random.size()});
        writer.write(as_bytes(random));
        add("types.npz", "large", dtype::of<std::uint8_t>(), {random.size()}, random);
        writer.finish();
    }
    pinflow::npz_writer(folder / "empty.npz").finish();
    // with zip64 records, as for large members, many members or large files
    unsigned number = 0;
    for (const pinflow::detail::zip64_thresholds thresholds :
         {pinflow::detail::zip64_thresholds{1000, 0xFFFF}, {0xFFFFFFFF, 3}, {2'000'000, 0xFFFF}, {0, 0}}) {
        const std::string archive = fmt::format("zip64_{}.npz", number++);
        pinflow::detail::zip_writer writer(folder / archive, thresholds);
        for (const std::uint64_t size : {10u, 1'900'000u, 20u, 900u}) {
            const std::string header =
                pinflow::format_npy_header(dtype::of<std::uint8_t>(), shape_vector{size});
            writer.begin(fmt::format("{}.npy", size), header.size() + size, header.size(), 4096);
            writer.write(as_bytes(header));
            writer.write(as_bytes(random).first(size));
            writer.end();
            add(archive, std::to_string(size), dtype::of<std::uint8_t>(), {size}, random.substr(0, size));
        }
        writer.finish();
    }
    manifest.close();
    CHECK(arrays > 50);
    CHECK(run_numpy({"read", folder.path().string()}) == 0);
}

int main(int argc, char** argv) {
    doctest::Context context(argc, argv);
    if (const int status = run_numpy({"check"}); status == 77 || status == 127) {
        std::puts("skipped: /usr/bin/python3 with numpy is not installed");
        return 77;
    }
    const int status = context.run();
    if (context.shouldExit()) return status;
    if (cases_run == 0) {
        std::fputs("no test case was run: the filters match none\n", stderr);
        return 1;
    }
    return status;
}
