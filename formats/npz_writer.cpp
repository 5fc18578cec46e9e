#include <fmt/format.h>

#include <bit>
#include <string>

#include "formats/zip_writer.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"

namespace pinflow {

struct npz_writer::state {
    state(const std::filesystem::path& path, std::uint64_t alignment)
        : zip(path), alignment_bytes(alignment) {}

    /// "cannot write 'a.npz'"
    std::string attempt() const { return fmt::format("cannot write '{}'", zip.path()); }
    void check_complete() const;

    detail::zip_writer zip;
    std::uint64_t alignment_bytes;
    std::string description;  // of the member begun last; empty before the first
    std::uint64_t expected_bytes = 0;
    std::uint64_t written_bytes = 0;
    bool finished = false;
};

void npz_writer::state::check_complete() const {
    if (finished) throw invalid_argument(fmt::format("{}: it is finished", attempt()));
    if (written_bytes != expected_bytes) {
        throw invalid_argument(fmt::format("{}: {} declares {} bytes, but {} were written", attempt(),
                                           description, expected_bytes, written_bytes));
    }
}

npz_writer::npz_writer(const std::filesystem::path& path, std::uint64_t alignment_bytes) {
    if (!std::has_single_bit(alignment_bytes) || alignment_bytes < 16 || alignment_bytes > 8192) {
        throw invalid_argument(fmt::format(
            "cannot write '{}': data cannot be aligned to {} bytes: it takes a power of two from 16 to 8192",
            path.string(), alignment_bytes));
    }
    state_ = std::make_unique<state>(path, alignment_bytes);
}

npz_writer::npz_writer(npz_writer&&) noexcept = default;
npz_writer& npz_writer::operator=(npz_writer&&) noexcept = default;
npz_writer::~npz_writer() = default;

npz_writer::state& npz_writer::valid_state() const {
    if (!state_) throw invalid_argument("cannot use a moved-from npz_writer");
    return *state_;
}

void npz_writer::begin(std::string_view name, const pinflow::dtype& type, const shape_vector& shape) {
    state& own = valid_state();
    own.check_complete();
    std::string header;
    std::uint64_t payload_bytes = 0;
    std::uint64_t size_bytes = 0;
    try {
        if (name.empty()) throw invalid_argument("the name is empty");
        header = format_npy_header(type, shape);
        if (!detail::multiply(element_count(shape), type.size_bytes(), payload_bytes) ||
            !detail::add(payload_bytes, header.size(), size_bytes)) {
            throw invalid_argument(
                fmt::format("an array of {} and shape {} is too large", type.descr(), to_string(shape)));
        }
    } catch (const invalid_argument& failure) {
        throw invalid_argument(
            fmt::format("{}: the member {}: {}", own.attempt(), detail::quote(name), failure.what()));
    }
    own.zip.begin(fmt::format("{}.npy", name), size_bytes, header.size(), own.alignment_bytes);
    own.zip.write(std::as_bytes(std::span(header)));
    own.description =
        fmt::format("the member {} of {} and shape {}", detail::quote(name), type.descr(), to_string(shape));
    own.expected_bytes = payload_bytes;
    own.written_bytes = 0;
    if (payload_bytes == 0) own.zip.end();
}

void npz_writer::write(std::span<const std::byte> bytes) {
    state& own = valid_state();
    if (bytes.size() > own.expected_bytes - own.written_bytes) {
        throw invalid_argument(
            fmt::format("{}: {} bytes are too many after {} of the {} bytes of {}", own.attempt(),
                        bytes.size(), own.written_bytes, own.expected_bytes,
                        own.description.empty() ? "a file in which no member was begun" : own.description));
    }
    if (bytes.empty()) return;
    own.zip.write(bytes);
    own.written_bytes += bytes.size();
    if (own.written_bytes == own.expected_bytes) own.zip.end();
}

void npz_writer::finish() {
    state& own = valid_state();
    own.check_complete();
    own.zip.finish();
    own.finished = true;
}

}  // namespace pinflow
