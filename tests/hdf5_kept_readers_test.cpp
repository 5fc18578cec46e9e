#include "formats/hdf5_kept_readers.hpp"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "formats/element_streams.hpp"
#include "formats/hdf5_access.hpp"
#include "pinflow/error.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using pinflow::input_file;
using pinflow::detail::hdf5_description;
using pinflow::detail::hdf5_read_function;
using pinflow::detail::keep_hdf5_reader;
using pinflow::detail::max_kept_hdf5_readers;

namespace {

/// Readers that deliver the number of their dataset, and are counted.
class counting_access final : public pinflow::detail::hdf5_access {
 public:
    std::atomic<std::size_t> alive = 0;
    std::atomic<std::size_t> opened = 0;
    std::atomic<std::size_t> described = 0;
    std::atomic<bool> refuses = false;

    std::vector<pinflow::array_listing> list(const input_file&) override { return {}; }
    hdf5_description describe(const input_file&, std::string_view name) override {
        ++described;
        hdf5_description description;
        description.name = name;
        description.dtype = pinflow::dtype::of<std::uint8_t>();
        description.shape = {40};
        description.storage = pinflow::detail::hdf5_storage::library;
        description.library_reason = "of this test";
        return description;
    }
    hdf5_read_function reader(std::shared_ptr<const input_file>, const hdf5_description& dataset) override {
        if (refuses) throw pinflow::data_changed("refused");
        ++opened;
        const auto life = std::make_shared<lifetime>(alive);
        const auto number = static_cast<std::byte>(std::stoi(dataset.name));
        return [life, number](std::uint64_t, std::uint64_t, std::span<std::byte> destination) {
            destination[0] = number;
        };
    }

 private:
    struct lifetime {
        explicit lifetime(std::atomic<std::size_t>& counted) : count(counted) { ++count; }
        lifetime(const lifetime&) = delete;
        lifetime& operator=(const lifetime&) = delete;
        ~lifetime() { --count; }
        std::atomic<std::size_t>& count;
    };
};

struct datasets {
    explicit datasets(std::size_t count) {
        write_bytes(folder / "data", pattern_bytes(10));
        const auto file = std::make_shared<const input_file>(folder / "data");
        for (std::size_t index = 0; index < count; ++index) {
            hdf5_description description;
            description.name = std::to_string(index);
            readers.push_back(keep_hdf5_reader(
                access, {file, std::make_shared<const hdf5_description>(std::move(description)), {}}));
        }
    }

    bool reads_right(std::size_t index) const {
        std::array<std::byte, 1> read{};
        readers[index](0, 1, read);
        return read[0] == static_cast<std::byte>(index);
    }

    temporary_folder folder;
    std::shared_ptr<counting_access> access = std::make_shared<counting_access>();
    std::vector<hdf5_read_function> readers;
};

}  // namespace

TEST_CASE("hdf5 kept readers: a few datasets stay open, and are closed with the last copy") {
    datasets few(max_kept_hdf5_readers);
    for (int round = 0; round < 3; ++round) {
        for (std::size_t index = 0; index < max_kept_hdf5_readers; ++index)
            CHECK(few.reads_right(index));
    }
    CHECK(few.access->opened == max_kept_hdf5_readers);
    const hdf5_read_function copy = few.readers[0];
    few.readers.clear();
    CHECK(few.access->alive == 1);
    std::array<std::byte, 1> read{};
    copy(0, 1, read);
    CHECK(few.access->opened == max_kept_hdf5_readers);
}

TEST_CASE("hdf5 kept readers: of many datasets, those that were used last are open") {
    datasets many(100);
    CHECK(many.access->alive == max_kept_hdf5_readers);
    CHECK(many.access->opened == 100);  // keep_hdf5_reader opens each, to find its errors early
    for (std::size_t index = 0; index < 100; ++index) {
        CHECK(many.reads_right(index));
        CHECK(many.reads_right(7));
        CHECK(many.access->alive <= max_kept_hdf5_readers);
    }
    // each was opened again at most once: number 7, which is read in every turn, stayed open
    CHECK(many.access->opened <= 200);
    many.readers.clear();
    CHECK(many.access->alive == 0);
}

TEST_CASE("hdf5 kept readers: parts of one dataset after the other are read by one reader") {
    const temporary_folder folder;
    write_bytes(folder / "data", pattern_bytes(10));
    const auto access = std::make_shared<counting_access>();
    pinflow::detail::use_hdf5_access(access);
    auto elements = pinflow::detail::open_hdf5_elements(folder / "data");
    for (const char* const name : {"3", "4"}) {
        for (std::uint64_t row = 0; row < 40; ++row) {
            const auto part = elements->stream_of_part(name, 1 << 20);
            REQUIRE(part->select(0, row, row + 1));
            std::array<std::byte, 1> read{};
            part->read(read);
            CHECK(read[0] == static_cast<std::byte>(std::stoi(name)));
        }
    }
    CHECK(access->described == 2);
    CHECK(access->opened == 2);
    CHECK(access->alive == 1);
    elements.reset();
    CHECK(access->alive == 0);
}

TEST_CASE("hdf5 kept readers: what fails when a dataset is opened again reaches the caller") {
    datasets many(100);
    many.access->refuses = true;
    CHECK_THROWS_AS(many.reads_right(0), pinflow::data_changed);
    CHECK(many.reads_right(99));
    many.access->refuses = false;
    CHECK(many.reads_right(0));
}

TEST_CASE("hdf5 kept readers: threads may read more datasets than stay open") {
    datasets many(60);
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    threads.reserve(4);
    for (std::size_t thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
            for (std::size_t round = 0; round < 2'000; ++round) {
                if (!many.reads_right((round * (thread + 7)) % 60)) ++wrong;
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    CHECK(wrong == 0);
    CHECK(many.access->alive <= max_kept_hdf5_readers);
    many.readers.clear();
    CHECK(many.access->alive == 0);
}
