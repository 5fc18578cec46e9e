// pinflow and numpy read what the other wrote. Exits with 77 (skipped) if the distribution's Python has no
// numpy.
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
#include <iterator>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using pinflow::array_view;
using pinflow::dtype;
using pinflow::shape_vector;

unsigned cases_run = 0;

/// Runs tests/numpy_files.py. @return its exit status; 127 when there is no Python.
int run_numpy(std::vector<std::string> arguments) {
    const std::string script = (fs::path(__FILE__).parent_path() / "numpy_files.py").string();
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
    for (std::size_t end; (end = text.find(separator, begin)) != text.npos; begin = end + 1) {
        parts.push_back(text.substr(begin, end - begin));
    }
    parts.push_back(text.substr(begin));
    return parts;
}

shape_vector shape_from(const std::string& lengths) {
    shape_vector shape;
    if (lengths.empty()) return shape;
    for (const std::string& length : split(lengths, ','))
        shape.push_back(std::stoull(length));
    return shape;
}

std::string lengths_of(const shape_vector& shape) {
    std::string result;
    for (const std::uint64_t length : shape) {
        if (!result.empty()) result += ',';
        result += std::to_string(length);
    }
    return result;
}

/// The elements in C order, gathered one by one through the strides.
std::string elements_of(const array_view& view) {
    std::string result;
    for (std::uint64_t element = 0; element < view.size(); ++element) {
        std::uint64_t rest = element;
        std::int64_t offset = 0;
        for (std::size_t axis = view.shape().size(); axis-- > 0; rest /= view.shape()[axis]) {
            offset += static_cast<std::int64_t>(rest % view.shape()[axis]) * view.strides_bytes()[axis];
        }
        result.append(reinterpret_cast<const char*>(view.data() + offset), view.dtype().size_bytes());
    }
    return result;
}

// ---- what C++ writes --------------------------------------------------------------------------------------

enum class writing { whole, in_pieces, counted };

bool can_be_counted(const array_view& view) {
    if (view.shape().empty()) return false;
    return pinflow::element_count(std::span(view.shape()).subspan(1)) > 0;
}

/// The type as numpy reads it from a file: types that numpy lacks are raw bytes of the same size.
std::string descr_in_file(const dtype& type) {
    std::string descr = type.descr();
    const std::string quote = type.fields().empty() ? "" : "'";
    // a name that begins with another one stands before it
    for (const std::string_view name : {"bfloat16", "float8_e4m3fnuz", "float8_e4m3fn", "float8_e5m2fnuz",
                                        "float8_e5m2", "float8_e8m0fnu"}) {
        for (std::size_t at = 0;
             (at = descr.find(fmt::format("{0}{1}{0}", quote, name), at)) != descr.npos;) {
            descr.replace(at + quote.size(), name.size(), name == "bfloat16" ? "|V2" : "|V1");
        }
    }
    return descr;
}

dtype random_simple_type(std::mt19937_64& random) {
    constexpr const char* descrs[] = {"|b1",
                                      "|i1",
                                      "<i2",
                                      ">u4",
                                      "<i8",
                                      ">f2",
                                      "<f4",
                                      ">f8",
                                      "<f16",
                                      ">c8",
                                      "|S7",
                                      "|V3",
                                      "<M8[25us]",
                                      ">m8",
                                      "float8_e4m3fn",
                                      "float8_e5m2",
                                      "<c32",
                                      "|S1",
                                      "bfloat16",
                                      "<M8[generic]",
                                      "|u1",
                                      "float8_e8m0fnu",
                                      "float8_e4m3fnuz"};
    return dtype::parse(descrs[random() % std::size(descrs)]);
}

dtype random_structured_type(std::mt19937_64& random, unsigned depth) {
    constexpr const char* names[] = {"x",      "a b",    "it's",   R"(say "a")", R"(it's "a")", R"(a\b)",
                                     "\t\n\r", "\x7F",   "\u0085", "caf\u00e9",  "\u00a0",      "\u00ad",
                                     "\u00ff", "\u0100", "\u6570", "\U0001F600", "')]",         "#"};
    std::vector<pinflow::dtype_field> fields;
    std::uint64_t end = random() % 3 == 0 ? random() % 4 : 0;
    std::size_t name = random() % 4;
    const std::size_t count = 1 + random() % 4;
    while (fields.size() < count) {
        const bool nested = depth < 3 && random() % 4 == 0;
        pinflow::dtype_field field{
            names[name],
            "",
            nested ? random_structured_type(random, depth + 1) : random_simple_type(random),
            {},
            end};
        name += 1 + random() % 2;
        if (random() % 6 == 0) field.title = names[name++];
        if (random() % 3 == 0) {
            field.shape.resize(random() % 3);
            for (std::uint64_t& length : field.shape)
                length = random() % 4;
        }
        end += field.size_bytes() + (random() % 3 == 0 ? random() % 8 : 0);
        fields.push_back(std::move(field));
    }
    return end > 0 ? dtype::structured(std::move(fields), end) : random_structured_type(random, depth);
}

/// The folder of numpy's files, written once for all cases.
const temporary_folder& numpy_folder() {
    static const temporary_folder folder;
    static const int status = run_numpy({"write", folder.path().string()});
    if (status != 0) throw std::runtime_error("numpy_files.py write has failed");
    return folder;
}

}  // namespace

TEST_CASE("npy and numpy: every array that numpy wrote opens equal") {
    ++cases_run;
    const temporary_folder& folder = numpy_folder();
    std::ifstream manifest(folder / "manifest.txt");
    unsigned arrays = 0;
    unsigned structured = 0;
    for (std::string line; std::getline(manifest, line); ++arrays) {
        CAPTURE(line);
        const auto fields = split(line, '\t');
        REQUIRE(fields.size() == 4);
        const std::string path = folder / (fields[0] + ".npy");
        const pinflow::array opened = pinflow::open_npy(path);
        const array_view& view = opened.view();
        const bool fortran_order = fields[2] == "1";
        bool same = opened.dtype().descr() == fields[1] && opened.shape() == shape_from(fields[3]) &&
                    elements_of(view) == npy_bytes::read_file(folder / (fields[0] + ".raw")) &&
                    (fortran_order ? !view.c_contiguous() && view.fortran_contiguous() : view.c_contiguous());
        if (!opened.dtype().fields().empty()) {
            std::string elements;
            for (const pinflow::dtype_field& field : opened.dtype().fields()) {
                elements += elements_of(opened.field(field.name).view());
            }
            same = same && elements == npy_bytes::read_file(folder / (fields[0] + ".fields"));
            ++structured;
        }
        if (fields[0].ends_with("_default")) {
            const std::string header =
                pinflow::format_npy_header(opened.dtype(), opened.shape(), fortran_order);
            same = same && npy_bytes::read_file(path).starts_with(header) &&
                   header.size() == opened.offset_bytes();
        }
        CHECK(same);
    }
    CHECK(arrays > 2500);
    CHECK(structured > 700);
}

TEST_CASE(
    "npy and numpy: every array that pinflow wrote loads equal, byte for byte as numpy would write it") {
    ++cases_run;
    const temporary_folder folder;
    std::ofstream manifest(folder / "manifest.txt");
    unsigned arrays = 0;
    const auto add = [&](const array_view& view, writing how) {
        const std::string name = fmt::format("array{}", arrays++);
        const std::string path = folder / (name + ".npy");
        const std::string elements = elements_of(view);
        const bool whole = how == writing::whole || (how == writing::counted && !can_be_counted(view));
        if (whole) {
            pinflow::write_npy(path, view);
        } else {
            pinflow::npy_writer writer =
                how == writing::in_pieces
                    ? pinflow::npy_writer(path, view.dtype(), view.shape())
                    : pinflow::npy_writer::of_rows(path, view.dtype(),
                                                   {view.shape().begin() + 1, view.shape().end()});
            const auto bytes = npy_bytes::as_bytes(elements);
            writer.write(bytes.first(bytes.size() / 3));
            writer.write(bytes.subspan(bytes.size() / 3));
            writer.finish();
        }
        const bool fortran_order = whole && view.fortran_contiguous() && !view.c_contiguous();
        npy_bytes::write_file(folder / (name + ".raw"), elements);
        manifest << fmt::format("{}\t{}\t{}\t{}\n", name, descr_in_file(view.dtype()), fortran_order ? 1 : 0,
                                lengths_of(view.shape()));
    };

    std::vector<std::byte> content(4096);
    std::uint32_t state = 1;
    for (std::byte& byte : content) {
        state = state * 1664525 + 1013904223;
        byte = static_cast<std::byte>(state >> 24);
    }
    for (const char* const descr : {"|b1",  "|i1", "<i2", "<i4", ">i8",       "|u1",          "<u2",  "<u4",
                                    ">u8",  "<f2", ">f4", "<f8", "<f16",      "<c8",          ">c16", "<c32",
                                    "|S10", "<U5", ">U3", "|V7", "<M8[25us]", ">m8[generic]", "<M8"}) {
        const dtype type = dtype::parse(descr);
        const std::vector<std::byte> zeros(4096);
        // numpy itself would normalise booleans other than 0 and 1, and refuse code points past the last
        const bool any_bytes =
            type.kind() != pinflow::dtype_kind::boolean && type.kind() != pinflow::dtype_kind::unicode;
        const std::byte* const data = (any_bytes ? content : zeros).data();
        for (const shape_vector& shape : {shape_vector{}, shape_vector{0}, shape_vector{1}, shape_vector{5},
                                          shape_vector{3, 0}, shape_vector{2, 3}, shape_vector{2, 3, 4}}) {
            add({data, type, shape}, writing::whole);
            add({data, type, shape}, arrays % 2 == 0 ? writing::in_pieces : writing::counted);
            add({data, type, shape, pinflow::fortran_strides_bytes(shape, type.size_bytes())},
                writing::whole);
        }
        const auto item = static_cast<std::int64_t>(type.size_bytes());
        add({data + 6 * item, type, {3, 4}, {2 * item, -item}}, writing::whole);
        add({data, type, {2, 3, 4}, {item, 8 * item, 2 * item}}, writing::whole);
    }

    std::mt19937_64 random(20);
    for (unsigned repeat = 0; repeat < 400; ++repeat) {
        const dtype type = repeat % 4 == 0 ? random_simple_type(random) : random_structured_type(random, 0);
        shape_vector shape(random() % 5);
        for (std::uint64_t& length : shape)
            length = random() % 5;
        content.resize(pinflow::element_count(shape) * type.size_bytes() + 1);
        for (std::byte& byte : content)
            byte = static_cast<std::byte>(random() & 1);
        const auto strides = random() % 3 == 0 ? pinflow::fortran_strides_bytes(shape, type.size_bytes())
                                               : pinflow::c_strides_bytes(shape, type.size_bytes());
        add({content.data(), type, shape, strides}, static_cast<writing>(random() % 3));
    }
    manifest.close();
    CHECK(arrays > 900);
    CHECK(run_numpy({"read", folder.path().string()}) == 0);
}

TEST_CASE("npy and numpy: no header is accepted that numpy rejects or reads differently") {
    ++cases_run;
    std::ifstream file(numpy_folder() / "headers.bin", std::ios::binary);
    const auto read_part = [&](std::string& part) {
        std::uint32_t size = 0;
        if (!file.read(reinterpret_cast<char*>(&size), sizeof size)) return false;
        part.resize(size);
        return static_cast<bool>(file.read(part.data(), size));
    };
    unsigned accepted_by_both = 0;
    unsigned accepted_by_numpy = 0;
    unsigned structured = 0;
    unsigned headers = 0;
    for (std::string content, verdict; read_part(content) && read_part(verdict); ++headers) {
        if (!verdict.empty()) ++accepted_by_numpy;
        std::string ours;
        try {
            const auto header =
                pinflow::parse_npy_header(npy_bytes::as_bytes(content), std::uint64_t{1} << 62);
            ours = fmt::format("{}\t{}\t{}\t{}", header.dtype.descr(), header.fortran_order ? 1 : 0,
                               lengths_of(header.shape), header.data_offset_bytes);
        } catch (const pinflow::error&) {
            continue;
        }
        ++accepted_by_both;
        if (ours.starts_with('[')) ++structured;
        if (ours != verdict)
            FAIL_CHECK("read as '" << ours << "', by numpy as '" << verdict << "': " << content);
    }
    CHECK(headers == 16'000);
    CHECK(accepted_by_both > 2000);
    CHECK(structured > 700);
    CHECK(accepted_by_numpy < 5000);
    MESSAGE("of " << headers << " headers, numpy accepts " << accepted_by_numpy << ", pinflow "
                  << accepted_by_both);
}

TEST_CASE("npy and numpy: type strings mean the same to both, and all that numpy writes are accepted") {
    ++cases_run;
    std::ifstream file(numpy_folder() / "types.txt");
    unsigned accepted = 0;
    unsigned lines = 0;
    for (std::string line; std::getline(file, line); ++lines) {
        const auto fields = split(line, '\t');
        REQUIRE(fields.size() == 3);
        const bool numpy_writes_it = fields[0] == fields[1] && std::stoll(fields[2]) > 0 &&
                                     fields[1] != "|O" && fields[1].find("[0s]") == fields[1].npos;
        try {
            const dtype type = dtype::parse(fields[0]);
            ++accepted;
            const bool same = type.descr() == fields[1] && std::to_string(type.size_bytes()) == fields[2];
            if (!same)
                FAIL_CHECK(fields[0] << " is read as " << type.descr() << ", by numpy as " << fields[1]);
        } catch (const pinflow::error& failure) {
            if (numpy_writes_it) FAIL_CHECK(failure.what());
        }
    }
    CHECK(lines > 10'000);
    CHECK(accepted > 300);
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
