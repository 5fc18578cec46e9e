#include <doctest/doctest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/npz.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/system.hpp"
#include "tests/fuzz/zip_directory_invariants.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/npz_contents.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/zip_bytes.hpp"

// .npz files that are damaged or too large, and what the fuzzer found.

namespace {

namespace fs = std::filesystem;
namespace sys = pinflow::detail::system;
using npy_bytes::header;
using npy_bytes::read_file;
using npy_bytes::text;
using npy_bytes::write_file;
using pinflow::dtype;
using pinflow::list_npz;
using pinflow::open_npz;
using zip_bytes::put;

}  // namespace

TEST_CASE("npz: refuses a deflated member that contradicts its directory entry") {
    const temporary_folder folder;
    const std::string content = int_npy({1000}, counted(1000));
    const zip_bytes::archive made =
        zip_bytes::make({{.name = "a.npy", .content = content, .deflated = true}});
    write_file(folder / "good.npz", made.bytes);
    CHECK(bytes_of(open_npz(folder / "good.npz", "a")) == counted(1000));
    struct {
        const char* what;
        std::size_t offset;
        std::uint64_t value;
        unsigned size;
        const char* sentence;
    } const cases[] = {
        {"CRC-32", made.entries[0] + 16, 1, 4, "the member 'a.npy' is damaged: its CRC-32 is "},
        {"content", made.datas[0] + 2000, 0xAAAA, 2, "the member 'a.npy' is damaged: its CRC-32 is "},
        {"size too large", made.entries[0] + 24, content.size() + 1, 4,
         "has 4129 bytes, but its .npy header declares 4128"},
        {"size too small", made.entries[0] + 24, content.size() - 1, 4, "the member 'a.npy': "},
        {"a bomb", made.entries[0] + 24, 0xFFFFFFFE, 4,
         "is said to have 4294967294 bytes, which 4133 compressed bytes cannot make"},
        {"a smaller bomb", made.entries[0] + 24, 4'000'000, 4,
         "has 4000000 bytes, but its .npy header declares 4128"},
        {"compressed size", made.entries[0] + 20, 2000, 4,
         "the member 'a.npy' is damaged: its compressed data"},
        {"no header there", made.entries[0] + 20, 3, 4, "is said to have 4128 bytes, which 3 compressed"},
        {"broken off in the header", made.entries[0] + 20, 100, 4,
         "is damaged: its compressed data is truncated after 95 of"},
        {"block", made.datas[0], 7, 1,
         "the member 'a.npy' is damaged: its compressed data is wrong after 0 of"},
        {"block length", made.datas[0] + 1, 100, 1, "is damaged: its compressed data is wrong after 0 of"},
    };
    for (const auto& c : cases) {
        CAPTURE(c.what);
        std::string bytes = made.bytes;
        put(bytes, c.offset, c.value, c.size);
        write_file(folder / "a.npz", bytes);
        const std::string opening =
            message_of<pinflow::format_error>([&] { open_npz(folder / "a.npz", "a"); });
        const std::string streaming =
            message_of<pinflow::format_error>([&] { streamed(folder / "a.npz", "a", 400); });
        CAPTURE(opening);
        CAPTURE(streaming);
        CHECK(contains(opening, c.sentence));
        CHECK(contains(streaming, c.sentence));
        CHECK(opening.starts_with("cannot open '" + (folder / "a.npz").string() + "': the member 'a.npy'"));
        CHECK(opening.find('\n') == std::string::npos);
    }
}

TEST_CASE("npz: a stored member with a wrong CRC-32 is mapped by open, and refused by an element stream") {
    const temporary_folder folder;
    for (const bool fortran_order : {false, true}) {
        zip_bytes::archive made = zip_bytes::make(
            {{.name = "a.npy",
              .content = npy(dtype::of<std::int32_t>(), {20, 50}, counted(1000), fortran_order)}});
        made.bytes[made.datas[0] + 3000] ^= 1;
        write_file(folder / "a.npz", made.bytes);
        CHECK(open_npz(folder / "a.npz", "a").size_bytes() == 4000);
        CHECK(contains(message_of<pinflow::format_error>([&] { streamed(folder / "a.npz", "a", 400); }),
                       "the member 'a.npy' is damaged: its CRC-32 is "));
    }
}

TEST_CASE("npz: names the path when the directory is wrong") {
    const temporary_folder folder;
    const std::string path = (folder / "a.npz").string();
    write_file(path, zip_bytes::make({{.name = "../a.npy", .content = int_npy({1}, counted(1))}}).bytes);
    CHECK(contains_all(refusal<pinflow::format_error>(path), {"cannot open '" + path + "'", "name '../a.npy'",
                                                              "of entry 0 ", "parent folder ('..')"}));
    CHECK_THROWS_AS(list_npz(path), pinflow::format_error);
    write_file(path, "");
    CHECK(contains_all(refusal<pinflow::format_error>(path),
                       {"cannot open '" + path + "'", "zip archive", "at least 22 bytes", "it has 0"}));
    CHECK_THROWS_AS(list_npz(folder / "absent.npz"), pinflow::system_failure);
    CHECK_THROWS_AS(list_npz(folder.path()), pinflow::format_error);
    CHECK_THROWS_AS(open_npz("/dev/zero", "a"), pinflow::format_error);
}

TEST_CASE("npz: a file truncated after any byte is refused") {
    const temporary_folder folder;
    const std::string bytes =
        zip_bytes::make({{.name = "a.npy", .content = int_npy({3}, counted(3)), .deflated = true}}).bytes;
    for (std::size_t size = 0; size < bytes.size(); ++size) {
        write_file(folder / "a.npz", bytes.substr(0, size));
        REQUIRE_THROWS_AS(list_npz(folder / "a.npz"), pinflow::format_error);
    }
}

TEST_CASE("npz: a file truncated while it is read is reported as changed, and does not crash") {
    const temporary_folder folder;
    const std::string path = (folder / "a.npz").string();
    const std::string content = int_npy({1'000'000}, counted(1'000'000));
    for (const bool deflated : {false, true}) {
        const std::string bytes =
            zip_bytes::make({{.name = "a.npy", .content = content, .deflated = deflated}}).bytes;
        const auto cut_at = [&](std::size_t nth_read, auto function) {
            write_file(path, bytes);
            std::size_t reads = 0;
            const sys::scoped_failure_hook hook([&](sys::call what, std::string_view) {
                if (what == sys::call::pread && ++reads == nth_read) {
                    CHECK(::truncate(path.c_str(), 3000) == 0);
                }
                return sys::injected_failure{};
            });
            return message_of<pinflow::data_changed>(function);
        };
        CHECK(contains(cut_at(2, [&] { list_npz(path); }), "the file has 3000 bytes now"));
        if (deflated) {
            // the header's reads come first, the whole member's last
            const std::string sentence = cut_at(6, [&] { open_npz(path, "a"); });
            CHECK(sentence.starts_with("cannot open '" + path + "': cannot read "));
        }
        CHECK(contains(cut_at(7, [&] { streamed(path, "a", 1 << 16); }), "3000 bytes now"));
    }
}

TEST_CASE("npz: a member larger than memory is refused at once") {
    const temporary_folder folder;
    // 64 GiB of a hole, taken for compressed data, could well be 64 TiB of zeros
    const std::uint64_t hole = std::uint64_t{1} << 36;
    const std::uint64_t payload = std::uint64_t{1} << 46;
    const std::string begin = header(text("'|u1'", "(" + std::to_string(payload) + ",)"));
    // a stored block that continues into the hole
    const std::string block = '\0' + zip_bytes::number(0xFFFF, 2) + zip_bytes::number(0, 2) + begin;
    const std::uint64_t compressed = block.size() + hole;
    const std::string sizes = zip_bytes::number(1, 2) + zip_bytes::number(16, 2) +
                              zip_bytes::number(begin.size() + payload, 8) + zip_bytes::number(compressed, 8);
    zip_bytes::archive made =
        zip_bytes::make({{.name = "a.npy", .deflated = true, .extra = sizes}}, {}, true);
    put(made.bytes, made.entries[0] + 20, 0xFFFFFFFF, 4);
    put(made.bytes, made.entries[0] + 24, 0xFFFFFFFF, 4);
    const std::uint64_t moved = made.datas[0] + compressed - made.directory;
    put(made.bytes, made.end + 16, 0xFFFFFFFF, 4);
    put(made.bytes, made.end64 + 48, made.directory + moved, 8);
    put(made.bytes, made.end - 20 + 8, made.end64 + moved, 8);
    {
        std::ofstream file(folder / "a.npz", std::ios::binary);
        file << made.bytes.substr(0, made.datas[0]) << block;
        file.seekp(static_cast<std::streamoff>(made.directory + moved));
        file << made.bytes.substr(made.directory);
        if (!file.flush()) {
            MESSAGE("skipped: this filesystem has no files of 64 GiB");
            return;
        }
    }
    const auto listings = list_npz(folder / "a.npz");
    REQUIRE(listings.size() == 1);
    CHECK(contains_all(listings[0].reason, {"member is compressed", "inflated into memory"}));
    CHECK(listings[0].size_bytes == payload);
    CHECK(contains(message_of<pinflow::system_failure>([&] { open_npz(folder / "a.npz", "a"); }),
                   "the member 'a.npy' of 70368744177"));
}

TEST_CASE("npz: members that together exceed the memory left are refused at once") {
    const temporary_folder folder;
    const auto member = [](const char* name, std::uint64_t mebibytes) {
        const std::string shape = "(" + std::to_string(mebibytes << 20) + ",)";
        return zip_bytes::member{.name = name,
                                 .content = header(text("'|u1'", shape)) + std::string(mebibytes << 20, '\0'),
                                 .deflated = true};
    };
    write_file(folder / "a.npz", zip_bytes::make({member("a.npy", 30), member("b.npy", 50)}).bytes);
    const std::vector<std::string> both{"a", "b"};
    const pinflow::detail::scoped_available_memory available(110 << 20);
    CHECK(open_npz(folder / "a.npz", "b").size_bytes() == 50 << 20);
    const std::string sentence =
        message_of<pinflow::system_failure>([&] { open_npz(folder / "a.npz", both); });
    CAPTURE(sentence);
    CHECK(contains(sentence, "cannot inflate the member 'b.npy' of 524288"));
    CHECK(contains(sentence, " bytes and 1 more: that takes 18876"));
    CHECK(contains(sentence, ", more than the 115343360 bytes that may be taken of the memory that "));
}

TEST_CASE("npz: memory that the system refuses is an error with the path") {
    const temporary_folder folder;
    write_file(
        folder / "a.npz",
        zip_bytes::make({{.name = "a.npy", .content = int_npy({1000}, counted(1000)), .deflated = true}})
            .bytes);
    const sys::scoped_failure_hook hook([](sys::call what, std::string_view) {
        return sys::injected_failure{what == sys::call::mmap ? ENOMEM : 0};
    });
    const std::string sentence =
        message_of<pinflow::system_failure>([&] { open_npz(folder / "a.npz", "a"); });
    CHECK(contains(sentence, "a.npz': cannot allocate "));
}

TEST_CASE("npz: the invariants hold for the fuzzer's seeds, findings and their mutations") {
    const auto folder = fs::path(__FILE__).parent_path() / "fuzz";
    std::size_t files = 0;
    for (const auto& inputs :
         {folder / "seeds" / "zip_directory", folder / "regressions" / "zip_directory"}) {
        if (!fs::exists(inputs)) continue;  // nothing found so far
        for (const auto& entry : fs::directory_iterator(inputs)) {
            CAPTURE(entry.path().filename().string());
            std::string bytes = read_file(entry.path().string());
            ++files;
            CHECK(zip_directory_invariants::broken_for(npy_bytes::as_bytes(bytes)) == "");
            constexpr std::size_t step = sanitized ? 5 : 1;  // the fuzz targets run under sanitizers, too
            for (std::size_t at = 0; at < bytes.size(); at += step) {
                const char original = bytes[at];
                for (const char replacement : {'\0', '\1', '\x08', '\x7F', '\xFF'}) {
                    bytes[at] = replacement;
                    const std::string broken =
                        zip_directory_invariants::broken_for(npy_bytes::as_bytes(bytes));
                    if (!broken.empty()) FAIL_CHECK("byte " << at << ": " << broken);
                }
                bytes[at] = original;
            }
        }
    }
    CHECK(files >= 8);
}
