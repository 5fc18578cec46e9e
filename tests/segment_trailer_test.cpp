#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>

#include "pinflow/error.hpp"
#include "src/shared/segment_trailer.hpp"
#include "tests/fuzz/segment_trailer_invariants.hpp"
#include "tests/npy_bytes.hpp"

using namespace pinflow;
using namespace pinflow::detail;

namespace {

using trailer_bytes = std::array<std::byte, trailer_size_bytes>;

const segment_trailer whole{
    .data_offset_bytes = 4096,
    .data_size_bytes = 1000,
    .checksum = "0123456789abcdef0123456789abcdef",
    .boot_id = "c0ffee00-0000-4000-8000-000000000000",
    .pid = 17,
    .uid = 1000,
    .created_ns = 1'700'000'000'000'000'000,
    .type = "bfloat16",
};
constexpr std::uint64_t file_size_bytes = 4096 + 1000 + 4096;

trailer_bytes written(const segment_trailer& trailer) {
    trailer_bytes bytes{};
    write_trailer(trailer, bytes);
    return bytes;
}

}  // namespace

TEST_CASE("trailer: is read as it was written") {
    const segment_trailer read = read_trailer(written(whole), file_size_bytes);
    CHECK(read.data_offset_bytes == whole.data_offset_bytes);
    CHECK(read.data_size_bytes == whole.data_size_bytes);
    CHECK_FALSE(read.is_writable);
    CHECK(read.checksum == whole.checksum);
    CHECK(read.boot_id == whole.boot_id);
    CHECK(read.pid == whole.pid);
    CHECK(read.uid == whole.uid);
    CHECK(read.created_ns == whole.created_ns);
    CHECK(read.type == whole.type);
}

TEST_CASE("trailer: every field is where the page on the format says") {
    const trailer_bytes bytes = written(whole);
    const auto text_at = [&](std::size_t offset, std::size_t size) {
        return std::string(reinterpret_cast<const char*>(bytes.data()) + offset, size);
    };
    const auto number_at = [&](std::size_t offset) {
        std::uint64_t number = 0;
        std::memcpy(&number, bytes.data() + offset, sizeof number);
        return number;
    };
    CHECK(text_at(0, 8) == "pinflowS");
    CHECK(number_at(8) == 1);  // version 1, no flags
    CHECK(number_at(16) == 4096);
    CHECK(number_at(24) == 1000);
    CHECK(text_at(32, 32) == whole.checksum);
    CHECK(text_at(64, 36) == whole.boot_id);
    CHECK(number_at(104) == 17);
    CHECK(number_at(112) == 1000);
    CHECK(number_at(120) == 1'700'000'000'000'000'000);
    CHECK(text_at(128, 8) == "bfloat16");
}

TEST_CASE("trailer: a later version and sizes that contradict the file are refused") {
    trailer_bytes later = written(whole);
    later[8] = std::byte{2};
    CHECK_THROWS_AS(read_trailer(later, file_size_bytes), unsupported);
    CHECK_THROWS_AS(read_trailer(written(whole), file_size_bytes + 1), format_error);
    segment_trailer lying = whole;
    lying.data_size_bytes = ~std::uint64_t{0} - 4095;  // the sum of both would be 0
    CHECK_THROWS_AS(read_trailer(written(lying), 4096), format_error);
    segment_trailer writable = whole;
    writable.is_writable = true;
    CHECK_THROWS_AS(read_trailer(written(writable), file_size_bytes), format_error);  // it has a checksum
    writable.checksum.clear();
    CHECK(read_trailer(written(writable), file_size_bytes).is_writable);
    segment_trailer without = whole;
    without.checksum.clear();
    CHECK_THROWS_AS(read_trailer(written(without), file_size_bytes), format_error);
}

TEST_CASE("trailer: whatever the bytes are, what is read agrees with the file's size") {
    std::mt19937_64 random(90);
    const trailer_bytes good = written(whole);
    int read = 0;
    for (int i = 0; i < 20'000; ++i) {
        trailer_bytes bytes = good;
        for (std::uint64_t changes = random() % 4; changes-- > 0;)
            bytes[random() % 200] = static_cast<std::byte>(random());
        try {
            const segment_trailer trailer = read_trailer(bytes, file_size_bytes);
            ++read;
            CHECK(trailer.data_offset_bytes + trailer.data_size_bytes + trailer_size_bytes ==
                  file_size_bytes);
            CHECK(trailer.checksum.size() == (trailer.is_writable ? 0 : 32));
            CHECK(trailer.type.size() <= 64);
        } catch (const format_error&) {
        } catch (const unsupported&) {
        }
    }
    CHECK(read > 5'000);
}

TEST_CASE("trailer: the invariants hold for the fuzzer's seeds, findings and their mutations") {
    const auto folder = std::filesystem::path(__FILE__).parent_path() / "fuzz";
    std::size_t files = 0;
    for (const char* const kind : {"seeds", "regressions"}) {
        const auto inputs = folder / kind / "segment_trailer";
        if (!std::filesystem::exists(inputs)) continue;  // nothing found so far
        for (const auto& entry : std::filesystem::directory_iterator(inputs)) {
            CAPTURE(entry.path().filename().string());
            std::string bytes = npy_bytes::read_file(entry.path().string());
            ++files;
            CHECK(segment_trailer_invariants::broken_for(npy_bytes::as_bytes(bytes)) == "");
            for (std::size_t at = 0; at < bytes.size(); ++at) {
                const char original = bytes[at];
                for (int replacement = 0; replacement < 256; ++replacement) {
                    bytes[at] = static_cast<char>(replacement);
                    const std::string broken =
                        segment_trailer_invariants::broken_for(npy_bytes::as_bytes(bytes));
                    if (!broken.empty()) FAIL_CHECK("byte " << at << ": " << broken);
                }
                bytes[at] = original;
            }
        }
    }
    CHECK(files >= 3);
}
