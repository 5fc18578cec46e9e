#include <doctest/doctest.h>
#include <fmt/format.h>
#include <hdf5.h>
#include <tbb/parallel_for.h>
#include <tbb/task.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/system.hpp"
#include "tests/hdf5_writing.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

// What hdf5_writer refuses, and what is left when something fails.

namespace {

namespace fs = std::filesystem;
namespace seam = pinflow::detail::system;
using npy_bytes::read_file;
using npy_bytes::write_file;
using pinflow::dtype;
using pinflow::hdf5_writer;
using pinflow::shape_vector;
using dataset = hdf5_writer::dataset;

}  // namespace

// ---- what is refused -------------------------------------------------------------------------------------

TEST_CASE("hdf5 writer: impossible names are refused, also before anything is written") {
    const temporary_folder folder;
    hdf5_writer writer(folder / "a.h5");
    const dtype type = dtype::parse("<u2");
    const std::vector<std::byte> bytes(2);
    for (const char* const name : {"data", "group/data", "group/inner/data"}) {
        writer.begin({name, type, {}});
        writer.write(bytes);
    }
    const std::vector<std::pair<std::string, std::string>> table{
        {"", "the dataset '' has an empty name"},
        {"data", "the dataset 'data' has the same name as another dataset"},
        {"group/data", "has the same name as another dataset"},
        {"group", "the dataset 'group' has the name of a group"},
        {"group/inner", "has the name of a group"},
        {"data/x", "the dataset 'data/x' cannot be in 'data', which is a dataset"},
        {"group/data/x/y", "cannot be in 'group/data'"},
        {"/", "empty part"},
        {"/x", "empty part"},
        {"x/", "empty part"},
        {"x//y", "empty part"},
        {".", "the part '.'"},
        {"..", "the part '..'"},
        {"x/../y", "the part '..'"},
        {"./x", "the part '.'"},
        {"x/.", "the part '.'"},
        {std::string("a\0b", 3), "zero byte"},
        {"\xff", "not UTF-8"}};
    for (const auto& [name, sentence] : table) {
        CAPTURE(name);
        const std::string begun =
            message_of<pinflow::invalid_argument>([&] { writer.begin({name, type, {}}); });
        CHECK(begun.starts_with(fmt::format("cannot write '{}': the dataset ", (folder / "a.h5").string())));
        CHECK(contains(begun, sentence));
        CHECK(begun.find('\n') == begun.npos);
        const std::vector<dataset> both{{"new/one", type, {}}, {name, type, {}}};
        CHECK(message_of<pinflow::invalid_argument>([&] { writer.check(both); }) == begun);
    }
    CHECK_THROWS_AS(writer.check(std::vector<dataset>{{"x", type, {}}, {"x/y", type, {}}}),
                    pinflow::invalid_argument);
    CHECK_NOTHROW(writer.check(std::vector<dataset>{{"x", type, {}}, {"y/x", type, {}}}));
    // none of them took a name away
    for (const char* const name : {"x/y", "new/one"}) {
        writer.begin({name, type, {}});
        writer.write(bytes);
    }
    writer.finish();
    CHECK(pinflow::list_hdf5(folder / "a.h5").size() == 5);
    for (const char* const name : {"data", "group/data", "group/inner/data", "x/y", "new/one"})
        check_read_back(folder / "a.h5", {name, type, {}}, bytes);
}

TEST_CASE("hdf5 writer: types that HDF5 or its readers would lose are refused") {
    const temporary_folder folder;
    hdf5_writer writer(folder / "a.h5");
    const dtype f4 = dtype::parse("<f4");
    const auto one_field = [](const char* name, const char* title, const dtype& type,
                              shape_vector shape = {}) {
        pinflow::dtype_field field{name, title, type, std::move(shape), 0};
        return dtype::structured({field}, 8);
    };
    const std::vector<std::pair<dtype, std::string>> table{
        {dtype::parse("<U5"),
         "the dataset 'x' holds <U5, which HDF5 has no type for; it can hold the same bytes as |V20"},
        {dtype::parse("float8_e4m3fn"), "holds float8_e4m3fn, which HDF5 has no type for"},
        {dtype::parse(">f16"), "holds >f16"},
        {dtype::structured({{"r", "", f4, {}, 0}, {"i", "", f4, {}, 4}}, 8), "would be read back as <c8"},
        {one_field("a", "a title", f4), "would be read back as [('a', '<f4'), ('', '|V4')]"},
        {one_field("a", "", dtype::parse("<U1")), "has a field 'a' that holds <U1"},
        {one_field("a", "", one_field("b", "", dtype::parse("<U1"))),
         "has a field 'a' that has a field 'b' that holds <U1"},
        {one_field("a", "", f4, {0}), "has a field 'a' that holds no elements, as its shape is (0,)"},
        {one_field("a", "", dtype::parse("|b1"), shape_vector(33, 1)), "arrays of 33 axes"},
    };
    for (const auto& [type, sentence] : table) {
        CAPTURE(type.descr());
        const std::string found = message_of<pinflow::unsupported>([&] { writer.begin({"x", type, {2}}); });
        CAPTURE(found);
        CHECK(found.starts_with(
            fmt::format("cannot write '{}': the dataset 'x' ", (folder / "a.h5").string())));
        CHECK(contains(found, sentence));
        CHECK_THROWS_AS(writer.check(std::vector<dataset>{{"x", type, {2}}}), pinflow::unsupported);
    }
    writer.begin({"x", f4, {0}});
    writer.finish();
    CHECK(pinflow::list_hdf5(folder / "a.h5").size() == 1);
}

TEST_CASE("hdf5 writer: impossible chunks, levels, shapes and alignments are refused") {
    const temporary_folder folder;
    const fs::path path = folder / "a.h5";
    hdf5_writer writer(path);
    const dtype f4 = dtype::parse("<f4");
    const auto refuse = [&](const dataset& made, const char* sentence) {
        CHECK_THROWS_WITH_AS(writer.check({&made, 1}), doctest::Contains(sentence),
                             pinflow::invalid_argument);
        CHECK_THROWS_WITH_AS(writer.begin(made), doctest::Contains(sentence), pinflow::invalid_argument);
    };
    refuse({"x", f4, {3}, 13}, "cannot be deflated at level 13: levels are 1 to 12, 0 is none");
    refuse({"x", f4, {3, 4}, 0, {3, 4}},
           "of shape (3, 4) cannot be stored in chunks of shape (3, 4): only deflated datasets have chunks");
    refuse({"x", f4, {3, 4}, 1, {3}}, "the numbers of axes differ");
    refuse({"x", f4, {}, 1, {1}}, "the numbers of axes differ");
    refuse({"x", f4, {3, 4}, 1, {0, 4}}, "a chunk has no elements");
    refuse({"x", f4, {3, 4}, 1, {4, 4}}, "a chunk is longer than the dataset");
    refuse({"x", f4, {1 << 16, 1 << 16}, 1, {1 << 15, 1 << 15}}, "4 GiB");
    refuse({"x", dtype::parse("|u1"), {1ull << 40}, 1, {1ull << 32}}, "4 GiB");
    refuse({"x", f4, {1ull << 40, 1ull << 40}},
           "the dataset 'x' of <f4 and shape (1099511627776, 1099511627776) is too");
    refuse({"x", f4, {0, 1ull << 63}}, "of <f4 and shape (0, 9223372036854775808) is too large");
    refuse({"x", f4, {1ull << 31, 1ull << 30}}, "of <f4 and shape (2147483648, 1073741824) is too large");
    for (const std::uint64_t alignment : {0u, 8u, 100u, 4u << 20}) {
        CHECK_THROWS_WITH_AS(hdf5_writer(folder / "b.h5", alignment),
                             doctest::Contains("a power of two from 16 to"), pinflow::invalid_argument);
    }
    writer.begin({"x", f4, {0, 5}, 1, {7, 7}});  // without elements there are no chunks
    writer.finish();
    CHECK(names_in(folder.path()) == std::set<std::string>{"a.h5"});
}

TEST_CASE("hdf5 writer: a dataset whose chunks do not fit into memory can be begun again with smaller ones") {
    const temporary_folder folder;
    hdf5_writer writer(folder / "a.h5");
    dataset large{"group/x", dtype::parse("|u1"), {1U << 28}, 1, {1U << 28}};
    {
        const pinflow::detail::scoped_available_memory little(64 << 20);
        CHECK_THROWS_AS(writer.begin(large), pinflow::system_failure);
    }
    large.shape = {100};
    large.chunk_shape = {10};
    writer.begin(large);
    writer.write(std::vector<std::byte>(100));
    writer.finish();
    CHECK(pinflow::list_hdf5(folder / "a.h5").size() == 1);

    // a dataset that was refused leaves no group in the file
    hdf5_writer other(folder / "b.h5");
    {
        const pinflow::detail::scoped_available_memory little(64 << 20);
        large.shape = large.chunk_shape = {1U << 28};
        CHECK_THROWS_AS(other.begin(large), pinflow::system_failure);
    }
    other.begin({"group", dtype::parse("|u1"), {0}, 0});
    other.finish();
    CHECK(pinflow::list_hdf5(folder / "b.h5").size() == 1);
}

TEST_CASE("hdf5 writer: a dataset takes all of its elements and no more, and a file ends once") {
    const temporary_folder folder;
    hdf5_writer writer(folder / "a.h5");
    const std::vector<std::byte> bytes(100);
    const auto refuse = [&](auto step, const char* sentence) {
        CHECK_THROWS_WITH_AS(step(), doctest::Contains(sentence), pinflow::invalid_argument);
    };
    refuse([&] { writer.write(bytes); },
           "100 bytes are too many after 0 of the 0 bytes of a file in which no dataset was begun");
    for (const unsigned level : {0u, 1u}) {
        const dataset made{fmt::format("{}", level), dtype::parse("<f4"), {20}, level};
        writer.begin(made);
        writer.write(std::span(bytes).first(50));
        refuse([&] { writer.begin({"next", made.dtype, {}}); }, "declares 80 bytes, but 50 were written");
        refuse([&] { writer.finish(); }, "of <f4 and shape (20,) declares 80 bytes, but 50 were written");
        refuse([&] { writer.write(std::span(bytes).first(31)); }, "31 bytes are too many after 50 of the 80");
        writer.write(std::span(bytes).first(30));
        refuse([&] { writer.write(std::span(bytes).first(1)); }, "1 bytes are too many after 80 of the 80");
    }
    writer.finish();
    refuse([&] { writer.finish(); }, "it is finished");
    refuse([&] { writer.begin({"next", dtype::parse("<f4"), {}}); }, "it is finished");
    CHECK(pinflow::list_hdf5(folder / "a.h5").size() == 2);
}

// ---- when something fails --------------------------------------------------------------------------------

TEST_CASE("hdf5 writer: without finish the old file stays, and no other file is left") {
    random_engine random(8);
    const temporary_folder folder;
    write_file(folder / "a.h5", "before");
    const std::size_t open_before = open_descriptors();
    for (const unsigned level : {0u, 1u}) {
        const dataset made{"group/x", dtype::parse("<f4"), {1000, 1000}, level};
        const auto bytes = sample(random, made);
        for (const std::size_t count : {std::size_t{0}, std::size_t{5}, bytes.size() / 2, bytes.size()}) {
            hdf5_writer writer(folder / "a.h5");
            writer.begin(made);
            writer.write(std::span(bytes).first(count));
            CHECK(read_file(folder / "a.h5") == "before");
        }
    }
    {
        hdf5_writer writer(folder / "a.h5");
        hdf5_writer moved = std::move(writer);
        writer = std::move(moved);
    }
    CHECK(read_file(folder / "a.h5") == "before");
    CHECK(names_in(folder.path()) == std::set<std::string>{"a.h5"});
    CHECK(open_descriptors() == open_before);
    CHECK(::H5Fget_obj_count(static_cast<::hid_t>(H5F_OBJ_ALL), H5F_OBJ_ALL) == 0);
}

TEST_CASE("hdf5 writer: the file takes the permissions of the old file, even if they forbid opening it") {
    const temporary_folder folder;
    const dataset made{"x", dtype::parse("<f4"), {}};
    for (const fs::perms mode : {fs::perms::owner_read, fs::perms(0640), fs::perms(0)}) {
        write_file(folder / "a.h5", "before");
        fs::permissions(folder / "a.h5", mode);
        write_one(folder / "a.h5", made, std::vector<std::byte>(4));
        CHECK(fs::status(folder / "a.h5").permissions() == mode);
        fs::permissions(folder / "a.h5", fs::perms::owner_all);
        CHECK(pinflow::list_hdf5(folder / "a.h5").size() == 1);
        fs::remove(folder / "a.h5");
    }
    CHECK_THROWS_AS(hdf5_writer(folder.path()), pinflow::system_failure);
    CHECK_THROWS_AS(hdf5_writer(folder / "absent/a.h5"), pinflow::system_failure);
}

namespace {

/// Makes each call of that kind fail while `write` makes a file at `path`, or only calls 1, 2, 4, ..., and
/// checks what is left. @return how many failed.
template <typename Write>
unsigned check_failures(const fs::path& path, seam::call failing, bool each, Write write) {
    const std::size_t open_before = open_descriptors();
    unsigned failures = 0;
    for (unsigned number = 1;; number = each ? number + 1 : 2 * number) {
        CAPTURE(number);
        write_file(path, "before");
        unsigned calls = 0;
        std::string sentence;
        {
            const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
                return seam::injected_failure{.error = what == failing && ++calls == number ? ENOSPC : 0};
            });
            sentence = message_of<pinflow::system_failure>(write);
        }
        if (calls < number) {
            CHECK(sentence.empty());
            return failures;
        }
        ++failures;
        CHECK(contains(sentence, "No space left on device"));
        CHECK(contains(sentence, path.parent_path().string()));
        // if only the folder cannot be made durable, the file exists
        const bool complete = failing == seam::call::fsync && number == 2;
        CHECK((read_file(path) == "before") == !complete);
        CHECK(names_in(path.parent_path()) == std::set<std::string>{"a.h5"});
        CHECK(::H5Fget_obj_count(static_cast<::hid_t>(H5F_OBJ_ALL), H5F_OBJ_ALL) == 0);
        CHECK(open_descriptors() == open_before);
    }
}

}  // namespace

TEST_CASE(
    "hdf5 writer: whichever system call fails, no incomplete file appears, and libhdf5 keeps nothing open") {
    random_engine random(9);
    const temporary_folder folder;
    const fs::path path = folder / "a.h5";
    std::vector<std::pair<dataset, std::vector<std::byte>>> written;
    for (const unsigned level : {0u, 1u, 0u, 1u}) {
        dataset made{
            fmt::format("group {}/{}", level, written.size()), dtype::parse("<f4"), {500, 600}, level};
        if (level > 0) made.chunk_shape = {100, 200};
        auto bytes = sample(random, made);
        written.emplace_back(std::move(made), std::move(bytes));
    }
    const auto write = [&] {
        hdf5_writer writer(path);
        for (const auto& [made, bytes] : written) {
            writer.begin(made);
            writer.write(bytes);
        }
        writer.finish();
    };
    CHECK(check_failures(path, seam::call::open_unnamed, true, write) == 1);
    CHECK(check_failures(path, seam::call::write, true, write) > 30);
    CHECK(check_failures(path, seam::call::fsync, true, write) == 2);
    CHECK(check_failures(path, seam::call::rename, true, write) == 1);
    write();
    for (const auto& [made, bytes] : written)
        check_read_back(path, made, bytes);

    const auto write_nothing = [&] {
        hdf5_writer writer(path);
        writer.begin({"empty", dtype::parse("<f4"), {0}});
        writer.finish();
    };
    CHECK(check_failures(path, seam::call::truncate, true, write_nothing) == 1);
}

TEST_CASE("hdf5 writer: a failure while libhdf5 rereads its own metadata is reported, too") {
    const temporary_folder folder;
    const std::vector<std::byte> bytes(2);
    // more groups than libhdf5 keeps in memory
    const auto write = [&] {
        hdf5_writer writer(folder / "a.h5");
        for (int number = 0; number < 6000; ++number) {
            writer.begin({fmt::format("{}/data", number), dtype::parse("<u2"), {}});
            writer.write(bytes);
        }
        writer.finish();
    };
    CHECK(check_failures(folder / "a.h5", seam::call::pread, false, write) > 3);
    CHECK(check_failures(folder / "a.h5", seam::call::write, false, write) > 10);
    write();
    CHECK(pinflow::list_hdf5(folder / "a.h5").size() == 6000);
}

TEST_CASE("hdf5 writer: after a failure every call is refused") {
    const temporary_folder folder;
    const std::vector<std::byte> bytes(4 << 20);
    for (const unsigned level : {0u, 1u}) {
        hdf5_writer writer(folder / "a.h5");
        writer.begin({"x", dtype::parse("|u1"), {8 << 20}, level});
        {
            const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
                return seam::injected_failure{.error = what == seam::call::write ? EIO : 0};
            });
            CHECK_THROWS_AS(writer.write(bytes), pinflow::system_failure);
        }
        const auto refuse = [&](auto step) {
            CHECK_THROWS_WITH_AS(step(), doctest::Contains("an earlier step of writing it has failed"),
                                 pinflow::system_failure);
        };
        refuse([&] { writer.write(bytes); });
        refuse([&] { writer.finish(); });
        refuse([&] { writer.begin({"y", dtype::parse("|u1"), {}}); });
        CHECK(names_in(folder.path()).empty());
    }
}

TEST_CASE("hdf5 writer: short and interrupted writes and reads change nothing") {
    random_engine random(10);
    const temporary_folder folder;
    std::vector<std::pair<dataset, std::vector<std::byte>>> written;
    std::uint64_t calls = 0;
    {
        const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
            if (what != seam::call::write && what != seam::call::pread) return seam::injected_failure{};
            return seam::injected_failure{.error = ++calls % 3 == 0 ? EINTR : 0, .max_bytes = 1000};
        });
        hdf5_writer writer(folder / "a.h5");
        for (const unsigned level : {0u, 1u}) {
            const dataset made{fmt::format("group/{}", level), dtype::parse("<f4"), {100, 600}, level};
            const auto bytes = sample(random, made);
            writer.begin(made);
            writer.write(bytes);
            written.emplace_back(made, bytes);
        }
        writer.finish();
    }
    CHECK(calls > 300);
    for (const auto& [made, bytes] : written)
        check_read_back(folder / "a.h5", made, bytes);
}

TEST_CASE("hdf5 writer: no chunk is missing if the writing tasks are cancelled") {
    random_engine random(12);
    const temporary_folder folder;
    const dataset made{"x", dtype::parse("<f4"), {600, 1000}, 1, {100, 100}};
    const auto bytes = sample(random, made);
    tbb::parallel_for(0, 1, [&](int) {
        tbb::task::current_context()->cancel_group_execution();
        write_one(folder / "a.h5", made, bytes);
    });
    check_read_back(folder / "a.h5", made, bytes);
}

TEST_CASE("hdf5 writer: several threads write and read files at the same time") {
    const temporary_folder folder;
    std::vector<std::thread> threads;
    std::atomic<unsigned> right = 0;
    for (unsigned thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
            random_engine random(thread);
            for (unsigned round = 0; round < 5; ++round) {
                const fs::path path = folder / fmt::format("{}.h5", thread);
                const dataset made{
                    fmt::format("{}/{}", thread, round), dtype::parse("<i4"), {400, 300}, round % 2};
                const auto bytes = sample(random, made);
                hdf5_writer writer(path);
                writer.begin(made);
                write_in_pieces(random, writer, bytes, 50'000);
                writer.finish();
                const pinflow::array array = pinflow::open_hdf5(path, made.name);
                if (std::ranges::equal(std::span(array.view().data(), array.size_bytes()), bytes)) ++right;
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(right == 20);
    CHECK(names_in(folder.path()).size() == 4);
}
