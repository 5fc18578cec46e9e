#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/npy.hpp"
#include "src/core/system.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
namespace sys = pinflow::detail::system;
using npy_bytes::counted;
using npy_bytes::header;
using npy_bytes::payload;
using npy_bytes::text;
using npy_bytes::write_file;
using pinflow::dtype;
using pinflow::open_npy;
using pinflow::shape_vector;

/// The sentence that opening `path` ends with; it must be an error of pinflow's.
std::string refusal(const fs::path& path) {
    try {
        open_npy(path);
        return "opened";
    } catch (const pinflow::error& failure) {
        return failure.what();
    }
}

}  // namespace

TEST_CASE("npy: opens a file in place") {
    const temporary_folder folder;
    const auto values = counted(6);
    const std::string begin = header(text("'<i4'", "(2, 3)") + "\n");
    const std::string path = folder / "a.npy";
    write_file(path, begin + std::string(reinterpret_cast<const char*>(values.data()), 24));
    const pinflow::array opened = open_npy(path);
    CHECK(opened.has_view());
    CHECK(opened.dtype() == dtype::of<std::int32_t>());
    CHECK(opened.shape() == shape_vector{2, 3});
    CHECK(opened.offset_bytes() == begin.size());
    CHECK(opened.file()->path() == path);
    CHECK(opened.view().c_contiguous());
    CHECK(payload(opened) == values);
}

TEST_CASE("npy: opens Fortran order with strides that say so") {
    const temporary_folder folder;
    write_file(folder / "a.npy", header(text("'<i4'", "(2, 3)", "True")) + std::string(24, 'x'));
    const pinflow::array opened = open_npy(folder / "a.npy");
    CHECK(opened.view().strides_bytes() == std::vector<std::int64_t>{4, 8});
    CHECK(opened.view().fortran_contiguous());
    CHECK_FALSE(opened.view().c_contiguous());
    CHECK_THROWS_AS(opened.rows(), pinflow::unsupported);
}

TEST_CASE("npy: opens arrays without axes and without elements") {
    const temporary_folder folder;
    write_file(folder / "scalar.npy", header(text("'<i4'", "()")) + std::string(4, '\0'));
    write_file(folder / "empty.npy", header(text("'<i4'", "(3, 0, 2)")));
    CHECK(open_npy(folder / "scalar.npy").view().size() == 1);
    CHECK(open_npy(folder / "empty.npy").view().size() == 0);
    CHECK(open_npy(folder / "empty.npy").shape() == shape_vector{3, 0, 2});
}

TEST_CASE("npy: opens structured types, whose fields are views of the same bytes") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    // a byte, a gap of three, a number: as numpy lays out aligned types
    write_file(path, header(text("[('a', '|u1'), ('', '|V3'), ('b', '<i4')]", "(2,)")) +
                         std::string("\1xxx\2\0\0\0\3xxx\4\0\0\0", 16));
    const pinflow::array opened = open_npy(path);
    CHECK(opened.has_view());
    CHECK(opened.size_bytes() == 16);
    const pinflow::array b = opened.field("b");
    CHECK(b.dtype() == dtype::of<std::int32_t>());
    CHECK(b.view().strides_bytes() == std::vector<std::int64_t>{8});
    CHECK(std::to_integer<int>(*b.view().data()) == 2);

    // a field is written without the bytes around it, the whole with them
    pinflow::write_npy(folder / "b.npy", b.view());
    CHECK(payload(open_npy(folder / "b.npy")) == std::vector<std::int32_t>{2, 4});
    pinflow::write_npy(folder / "again.npy", opened.view());
    const pinflow::array again = open_npy(folder / "again.npy");
    CHECK(again.dtype() == opened.dtype());
    CHECK(std::memcmp(again.view().data(), opened.view().data(), 16) == 0);
}

TEST_CASE("npy: tolerates bytes after the data") {
    const temporary_folder folder;
    write_file(folder / "a.npy", header(text("'<i4'", "(2,)")) + std::string(1000, '\1'));
    CHECK(open_npy(folder / "a.npy").size_bytes() == 8);
}

TEST_CASE("npy: opens a sparse file of 1 TiB in milliseconds and reads only its header") {
    const temporary_folder folder;
    const fs::path path = folder / "large.npy";
    const std::string begin =
        pinflow::format_npy_header(dtype::of<float>(), shape_vector{1ull << 20, 1ull << 18});
    write_file(path, begin);
    std::error_code too_large;
    fs::resize_file(path, begin.size() + (1ull << 40), too_large);
    if (too_large) {
        MESSAGE("skipped: this filesystem holds no file of 1 TiB");
        return;
    }
    unsigned reads = 0;
    {
        const sys::scoped_failure_hook hook([&](sys::call what, std::string_view) {
            if (what == sys::call::pread) ++reads;
            return sys::injected_failure{};
        });
        open_npy(path);
    }
    CHECK(reads <= 2);
    auto fastest = std::chrono::steady_clock::duration::max();
    for (int repeat = 0; repeat < 5; ++repeat) {
        const auto started = std::chrono::steady_clock::now();
        const pinflow::array opened = open_npy(path);
        fastest = std::min(fastest, std::chrono::steady_clock::now() - started);
        CHECK(opened.size_bytes() == 1ull << 40);
    }
    CHECK(fastest < std::chrono::milliseconds(20));
}

TEST_CASE("npy: refuses a file shorter than its header declares") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    write_file(path, header(text("'<f8'", "(512,)")) + std::string(4088, '\0'));
    CHECK(contains_all(refusal(path),
                       {"cannot open '" + path + "'", "header declares 4096 bytes", "file has 4088"}));
}

TEST_CASE("npy: refuses what is not a file to read, at once") {
    const temporary_folder folder;
    const std::string pipe = folder / "pipe";
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    const std::string missing = folder / "missing.npy";
    for (const std::string& path :
         {folder.path().string(), pipe, missing, std::string("/dev/zero"), std::string()}) {
        CAPTURE(path);
        const auto started = std::chrono::steady_clock::now();
        CHECK(refusal(path).starts_with("cannot open '" + path + "': "));
        CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(1));
    }
}

TEST_CASE("npy: every refusal names the file, on one line, and has its type") {
    using namespace std::string_literals;
    const temporary_folder folder;
    const std::string path = folder / "bad.npy";
    for (const std::string& content :
         {""s, "\x93"s, "\x93NUMPY\1"s, "\x93NUMPY\2\0\xF0\xFF\xFF\xFF"s, "\x93NUMPY\1\0\xFF\xFF"s,
          "\x93NUMPY\1\0\0\0"s, "PK\3\4 and so on"s, header("{'descr': \n"), header(text("'<f4'", "(-1,)")),
          header(text("'<f3'", "()")), header(text("'<f4'", "(4294967296, 4294967296)")),
          header(text("'<f4'", "(1,)"))}) {
        write_file(path, content);
        CHECK_THROWS_AS(open_npy(path), pinflow::format_error);
        const std::string sentence = refusal(path);
        CAPTURE(sentence);
        CHECK(sentence.starts_with("cannot open '" + path + "': "));
        CHECK(sentence.find('\n') == std::string::npos);
    }
    for (const char* const descr : {"'|O'", "[('a', '|O')]"}) {
        write_file(path, header(text(descr, "()")) + "data");
        CHECK_THROWS_AS(open_npy(path), pinflow::unsupported);
        CHECK(refusal(path).starts_with("cannot open '" + path + "': "));
    }
}

TEST_CASE("npy: a failing system call becomes a sentence with its code") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    write_file(path, header(text("'<i4'", "(2,)")) + "12345678");
    struct {
        sys::call what;
        int error;
    } const cases[] = {{sys::call::open, EACCES}, {sys::call::fstat, EIO}, {sys::call::pread, EIO}};
    for (const auto& [failing, error] : cases) {
        const sys::scoped_failure_hook hook([&](sys::call what, std::string_view) {
            return sys::injected_failure{what == failing ? error : 0};
        });
        try {
            open_npy(path);
            FAIL("it was opened");
        } catch (const pinflow::system_failure& failure) {
            CHECK(failure.code().value() == error);
            CHECK(std::string(failure.what()).find("'" + path + "'") != std::string::npos);
        }
    }
}

TEST_CASE("npy: a file that cannot be mapped is opened all the same, and says why") {
    const temporary_folder folder;
    write_file(folder / "a.npy", header(text("'<i4'", "(2,)")) + "12345678");
    const sys::scoped_failure_hook hook([](sys::call what, std::string_view) {
        return sys::injected_failure{what == sys::call::mmap ? ENOMEM : 0};
    });
    const pinflow::array opened = open_npy(folder / "a.npy");
    CHECK_FALSE(opened.has_view());
    CHECK(opened.reason().find("cannot map 8 bytes") != std::string::npos);
}
