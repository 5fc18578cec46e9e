#include <doctest/doctest.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "src/core/system.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/safetensors_bytes.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using npy_bytes::as_bytes;
using npy_bytes::read_file;
using npy_bytes::write_file;
using pinflow::dtype;
using pinflow::shape_vector;
using safetensors_bytes::eight_bytes;
using safetensors_bytes::entry;
using safetensors_bytes::file_of;
using safetensors_bytes::named_types;
using safetensors_bytes::only;
using safetensors_bytes::parsed;
using tensor = pinflow::safetensors_writer::tensor;

std::string bytes_of(const pinflow::array& array) {
    return {reinterpret_cast<const char*>(array.view().data()), array.size_bytes()};
}

}  // namespace

// ---- opening ----------------------------------------------------------------------------------------------

TEST_CASE("safetensors: opens a tensor in place") {
    const temporary_folder folder;
    const std::string path = folder / "model.safetensors";
    const std::string json =
        "{" + entry("a", "U8", "[3]", "[0,3]") + "," + entry("b", "F32", "[2,1]", "[3,11]") + "," +
        entry("c", "I64", "[0]", "[11,11]") + "," + entry("d", "F4", "[2]", "[11,12]") + "}";
    write_file(path, file_of(json, "abc12345678d"));
    const std::uint64_t data = 8 + json.size();

    const auto b = pinflow::open_safetensors(path, "b");
    CHECK(b.dtype() == dtype::of<float>());
    CHECK(b.shape() == shape_vector{2, 1});
    CHECK(b.has_view());
    CHECK(b.offset_bytes() == data + 3);
    CHECK(bytes_of(b) == "12345678");
    const auto c = pinflow::open_safetensors(path, "c");
    CHECK(c.shape() == shape_vector{0});
    CHECK(c.size_bytes() == 0);

    CHECK(contains(message_of<pinflow::invalid_argument>([&] { pinflow::open_safetensors(path, "e"); }),
                   "cannot open 'e' of '" + path + "': none of its 4 tensors has that name"));
    CHECK(contains(message_of<pinflow::unsupported>([&] { pinflow::open_safetensors(path, "d"); }),
                   "cannot open 'd' of '" + path + "': pinflow has no elements of the type F4"));

    const auto both = pinflow::open_safetensors(path, {"c", "b"});
    REQUIRE(both.size() == 2);
    CHECK(both[0].dtype() == dtype::of<std::int64_t>());
    CHECK(bytes_of(both[1]) == "12345678");
    CHECK(pinflow::open_safetensors(path, std::vector<std::string>()).empty());
    CHECK_THROWS_AS(pinflow::open_safetensors(path, std::vector<std::string>{"b", "e"}),
                    pinflow::invalid_argument);

    const auto listings = pinflow::list_safetensors(path);
    REQUIRE(listings.size() == 4);
    CHECK(listings[1].name == "b");
    CHECK(listings[1].dtype == dtype::of<float>());
    CHECK(listings[1].shape == shape_vector{2, 1});
    CHECK_FALSE(listings[1].fortran_order);
    CHECK(listings[1].offset_bytes == data + 3);
    CHECK(listings[1].size_bytes == 8);
    CHECK(listings[1].mappable);
    CHECK(listings[1].reason == b.reason());
    CHECK(listings[2].mappable);
    CHECK(listings[2].reason == c.reason());
    CHECK_FALSE(listings[3].mappable);
    CHECK_FALSE(listings[3].dtype.has_value());
    CHECK(listings[3].size_bytes == 1);
    CHECK(contains(listings[3].reason, "F4"));
}

TEST_CASE("safetensors: opening reads the header alone, and refuses before it reads much") {
    const temporary_folder folder;
    const std::string path = folder / "large.safetensors";
    const std::string json = only("U8", "[1048576,1048576]", "[0,1099511627776]");
    write_file(path, file_of(json));
    std::error_code refused;
    fs::resize_file(path, 8 + json.size() + (std::uint64_t{1} << 40), refused);
    if (refused) {
        MESSAGE("skipped: this filesystem has no sparse files of 1 TiB");
        return;
    }
    CHECK(pinflow::open_safetensors(path, "a").size_bytes() == std::uint64_t{1} << 40);

    // 100 MB of zeros are no header, and most of them are not read to find that out
    for (const std::string beginning : {"", "{", "{                   "}) {
        write_file(path, eight_bytes(100'000'000) + beginning);
        fs::resize_file(path, std::uint64_t{1} << 40);
        std::size_t reads = 0;
        const pinflow::detail::system::scoped_failure_hook hook(
            [&](pinflow::detail::system::call what, std::string_view) {
                if (what == pinflow::detail::system::call::pread) ++reads;
                return pinflow::detail::system::injected_failure{.error = 0, .max_bytes = 1 << 20};
            });
        CHECK_THROWS_AS(pinflow::list_safetensors(path), pinflow::format_error);
        CHECK(reads <= 6);
    }
    // a zero byte far into it is found, and named by its place in the header
    const std::string spaces = "{" + std::string(3 << 20, ' ');
    write_file(path, file_of(spaces + std::string(1, '\0') + "}"));
    CHECK(contains(
        message_of<pinflow::format_error>([&] { pinflow::list_safetensors(path); }),
        "large.safetensors': its header is not valid JSON at byte " + std::to_string(spaces.size() + 1)));
    write_file(path, file_of(spaces + "}"));
    CHECK(pinflow::list_safetensors(path).empty());
}

TEST_CASE("safetensors: refuses a file that is cut after any byte, or has an extra byte") {
    const temporary_folder folder;
    const std::string whole = file_of(
        "{" + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "U8", "[]", "[8,9]") + "}", "123456789");
    const std::string path = folder / "cut.safetensors";
    for (std::size_t size = 0; size <= whole.size() + 1; ++size) {
        CAPTURE(size);
        write_file(path, size <= whole.size() ? whole.substr(0, size) : whole + "x");
        const std::string sentence =
            message_of<pinflow::format_error>([&] { pinflow::list_safetensors(path); });
        if (size == whole.size()) {
            CHECK(sentence == "");
        } else {
            CHECK(sentence.starts_with("cannot open '" + path + "': "));
        }
    }
}

// ---- writing ----------------------------------------------------------------------------------------------

TEST_CASE("safetensors: what is written reads back, aligned") {
    const temporary_folder folder;
    const std::string path = folder / "written.safetensors";
    std::vector<tensor> tensors;
    std::string data;
    for (const auto& [name, type] : named_types()) {
        tensors.push_back({name + "\n\"\xc3\xa9", type, {3, 2}});
        data.append(static_cast<std::size_t>(6 * type.size_bytes()), tensors.size() % 2 == 0 ? 'x' : 'y');
    }
    tensors.push_back({"empty", dtype::of<float>(), {0, 7}});
    tensors.push_back({"scalar", dtype::of<std::uint8_t>(), {}});
    data += 'z';
    const std::map<std::string, std::string> metadata{{"format", "np"}, {"\xc3\xa9", "\t\\"}};
    for (const std::uint64_t alignment : {8u, 64u, 4096u, 1u << 21}) {
        CAPTURE(alignment);
        pinflow::safetensors_writer writer(path, tensors, metadata, alignment);
        for (std::size_t at = 0; at < data.size(); at += 5)  // not at the tensors' ends
            writer.write(as_bytes(data).subspan(at, std::min<std::size_t>(5, data.size() - at)));
        writer.finish();

        const std::string file = read_file(path);
        const auto header = parsed(file);
        CHECK(header.metadata == metadata);
        REQUIRE(header.tensors.size() == tensors.size());
        CHECK(header.tensors[0].offset_bytes % alignment == 0);
        CHECK(file.substr(header.tensors[0].offset_bytes) == data);
        for (std::size_t index = 0; index < tensors.size(); ++index) {
            CHECK(header.tensors[index].name == tensors[index].name);
            CHECK(header.tensors[index].dtype == tensors[index].dtype);
            CHECK(header.tensors[index].shape == tensors[index].shape);
        }
    }
    pinflow::safetensors_writer(path, {}).finish();
    CHECK(pinflow::list_safetensors(path).empty());
    CHECK(fs::file_size(path) == 4096);
}

TEST_CASE("safetensors: the writer refuses types and names that the format lacks") {
    const temporary_folder folder;
    const std::string path = folder / "refused.safetensors";
    const auto refused = [&](const std::vector<tensor>& tensors, std::uint64_t alignment = 4096,
                             const std::map<std::string, std::string>& metadata = {}) {
        const std::string sentence = message_of<pinflow::invalid_argument>(
            [&] { pinflow::safetensors_writer(path, tensors, metadata, alignment); });
        CHECK(sentence.starts_with("cannot write '" + path + "': "));
        return sentence;
    };
    const dtype byte = dtype::of<std::uint8_t>();
    for (const char* const descr : {"<c16", "<f16", "|S4", "<U2", "|V2", "<M8[ns]", "<m8"}) {
        CAPTURE(descr);
        CHECK(
            contains(refused({{"a", dtype::parse(descr), {1}}}),
                     fmt::format("no type for {}, the type of the tensor 'a'", dtype::parse(descr).descr())));
    }
    CHECK(contains(refused({{"a", dtype::parse(">f4"), {1}}}), "little-endian"));
    CHECK(contains(refused({{"a", byte, {1}}, {"a", byte, {2}}}), "two tensors named 'a'"));
    CHECK(contains(refused({{"a", byte, {0}}, {"a", byte, {0}}}), "two tensors named 'a'"));
    CHECK(contains(refused({{"__metadata__", byte, {1}}}), "no tensor can have the name '__metadata__'"));
    CHECK(contains(refused({{"\xff", byte, {1}}}), "is not UTF-8"));
    CHECK(contains(refused({{"\xed\xa0\x80", byte, {1}}}), "is not UTF-8"));
    CHECK(contains(refused({{"a", byte, {1}}}, 4096, {{"a", "\xff"}}), "is not UTF-8"));
    CHECK(contains(refused({{"a", byte, shape_vector(65, 1)}}), "more than 64 axes"));
    CHECK(contains(refused({{"a", byte, {std::uint64_t{1} << 32, std::uint64_t{1} << 32}}}),
                   "the tensor 'a' of |u1 and shape (4294967296, 4294967296) is too large"));
    CHECK(contains(refused({{"a", dtype::of<double>(), {std::uint64_t{1} << 62}}}), "too large"));
    constexpr std::uint64_t max_bytes = (std::uint64_t{1} << 63) - 1;
    CHECK(contains(refused({{"a", byte, {max_bytes}}, {"b", byte, {max_bytes}}, {"c", byte, {2}}}), "2^64"));
    for (const std::uint64_t alignment : {0u, 1u, 4u, 24u, 4097u, 1u << 22})
        CHECK(contains(refused({{"a", byte, {1}}}, alignment), "a power of two from 8 to 2097152"));
    CHECK(fs::is_empty(folder.path()));
}

TEST_CASE("safetensors: the writer takes exactly the bytes that it promised, and leaves nothing otherwise") {
    const temporary_folder folder;
    const std::string path = folder / "kept.safetensors";
    write_file(path, "what was there before");
    const std::vector<tensor> tensors{{"a", dtype::of<std::int16_t>(), {2}}, {"b", dtype::of<bool>(), {1}}};
    {
        pinflow::safetensors_writer writer(path, tensors);
        writer.write(as_bytes("1234"));
        CHECK(contains(message_of<pinflow::invalid_argument>([&] { writer.write(as_bytes("56")); }),
                       "cannot write 2 bytes after the first 4 bytes of data of '" + path +
                           "': its tensors take 5 bytes"));
        CHECK(contains(message_of<pinflow::invalid_argument>([&] { writer.finish(); }),
                       "take 5 bytes, but 4 were written"));
    }
    CHECK(read_file(path) == "what was there before");
    CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 1);
    pinflow::safetensors_writer writer(path, tensors);
    writer.write(as_bytes("12345"));
    CHECK(read_file(path) == "what was there before");
    writer.finish();
    CHECK(bytes_of(pinflow::open_safetensors(path, "a")) == "1234");
    CHECK(contains(message_of<pinflow::invalid_argument>([&] { writer.finish(); }), "twice"));
    CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 1);
}

// ---- against another implementation ----------------------------------------------------------------------

namespace {

/// Runs tests/safetensors_files.py. @return its exit status; 127 when there is no Python.
int run_python(std::vector<std::string> arguments) {
    const std::string script = (fs::path(__FILE__).parent_path() / "safetensors_files.py").string();
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

/// A tensor as the script describes it.
std::string line_of(const std::string& file, const std::string& name, const std::string& type_name,
                    const shape_vector& shape, const std::string& data) {
    const auto hex = [](const std::string& text) {
        std::string result;
        for (const char character : text)
            result += fmt::format("{:02x}", static_cast<unsigned char>(character));
        return result;
    };
    std::string lengths;
    for (const std::uint64_t length : shape)
        lengths += (lengths.empty() ? "" : ",") + std::to_string(length);
    return fmt::format("{}\t{}\t{}\t{}\t{}", file, hex(name), type_name, lengths, hex(data));
}

std::vector<std::string> lines_of(const std::string& path) {
    std::vector<std::string> lines;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);)
        lines.push_back(line);
    return lines;
}

}  // namespace

TEST_CASE("safetensors: pinflow and a few lines of Python read each other's files") {
    const temporary_folder folder;
    const int status = run_python({"write", folder.path().string()});
    if (status == 127) {
        MESSAGE("skipped: /usr/bin/python3 is not installed");
        return;
    }
    REQUIRE(status == 0);
    std::map<std::string, std::vector<std::string>> files;
    for (const std::string& line : lines_of(folder / "manifest.txt"))
        files[line.substr(0, line.find('\t'))].push_back(line);
    CHECK(files.size() > 100);
    unsigned written = 0;
    for (const auto& [file, lines] : files) {
        CAPTURE(file);
        std::vector<std::string> ours;
        std::vector<tensor> tensors;
        std::string data;
        for (const auto& listed : pinflow::list_safetensors(folder / file)) {
            const auto opened = pinflow::open_safetensors(folder / file, listed.name);
            std::string type_name;
            for (const auto& [name, type] : named_types())
                if (type == opened.dtype()) type_name = name;
            CHECK(listed.dtype == opened.dtype());
            ours.push_back(line_of(file, listed.name, type_name, opened.shape(), bytes_of(opened)));
            tensors.push_back({listed.name, opened.dtype(), opened.shape()});
            data += bytes_of(opened);
        }
        // empty tensors may share an offset, and are then listed by name
        std::vector<std::string> theirs = lines;
        std::ranges::sort(theirs);
        std::vector<std::string> sorted = ours;
        std::ranges::sort(sorted);
        CHECK(sorted == theirs);

        pinflow::safetensors_writer writer(folder / file, tensors, {{"from", file}}, 64);
        writer.write(as_bytes(data));
        writer.finish();
        if (written++ % 8 != 0) continue;  // each check starts a process, so few files are checked
        REQUIRE(run_python({"read", folder / file, folder / "read.txt"}) == 0);
        std::vector<std::string> read = lines_of(folder / "read.txt");
        REQUIRE(read.size() == ours.size() + 1);
        CHECK(std::stoull(read.back()) % 64 == 0);
        read.pop_back();
        CHECK(read == ours);
    }
}
