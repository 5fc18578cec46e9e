#include "loader/state_origin.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "pinflow/array.hpp"
#include "pinflow/error.hpp"

namespace pinflow::detail {

namespace {

constexpr std::uint64_t max_probes = 16;
constexpr std::uint64_t max_probe_bytes = std::uint64_t{16} << 20;  // unless one row alone is larger

/// The rows to read: the middle rows of equal parts. They depend only on the row count and the row size.
std::vector<std::uint64_t> probes_of(const row_source& source) {
    const std::uint64_t fitting = max_probe_bytes / std::max<std::uint64_t>(1, source.row_size_bytes());
    const std::uint64_t count =
        std::min(std::clamp<std::uint64_t>(fitting, 1, max_probes), source.row_count());
    std::vector<std::uint64_t> rows(count);
    for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t part = source.row_count() / count;
        rows[i] = part * i + source.row_count() % count * i / count + part / 2;
    }
    return rows;
}

std::uint64_t hash_of_probes(const row_source& source) {
    const std::vector<std::uint64_t> rows = probes_of(source);
    std::vector<std::byte> bytes(rows.size() * source.row_size_bytes());
    static_cast<void>(source.read_rows(rows, bytes));
    source.check_unchanged();
    return XXH3_64bits(bytes.data(), bytes.size());
}

std::string listed(const data_fingerprint& data) {
    std::string names;
    for (const array_fingerprint& array : data.arrays)
        names += (names.empty() ? "" : ", ") + array.description;
    // the names may come from a file, so control characters are replaced
    std::ranges::replace_if(
        names, [](char character) { return static_cast<unsigned char>(character) < ' '; }, '?');
    return names;
}

[[noreturn]] void refuse_data(const std::string& saved, const std::string& given) {
    throw state_mismatch(fmt::format(
        "cannot resume, because the data differs: the state was saved with {}, and this loader has {}", saved,
        given));
}

}  // namespace

data_fingerprint fingerprint_of(std::span<const std::shared_ptr<const row_source>> sources) {
    data_fingerprint data;
    data.row_count = sources[0]->row_count();
    for (const auto& source : sources) {
        data.arrays.push_back(
            {source->description(), source->dtype().descr(), source->row_shape(), hash_of_probes(*source)});
    }
    return data;
}

state_origin::state_origin(order_identity order, std::vector<std::shared_ptr<const row_source>> sources)
    : order_(std::move(order)), sources_(std::move(sources)) {}

const data_fingerprint& state_origin::data() const {
    const std::lock_guard lock(mutex_);
    if (!data_) data_ = fingerprint_of(sources_);
    return *data_;
}

loader_state state_origin::state_at(const epoch_position& where) const {
    return {order_, where.epoch, where.position, data()};
}

epoch_position state_origin::resume_position(const loader_state& saved) const {
    const data_fingerprint& here = data();
    const data_fingerprint& there = saved.data;
    if (there.row_count != here.row_count) {
        refuse_data(fmt::format("{} rows ({})", there.row_count, listed(there)),
                    fmt::format("{} ({})", here.row_count, listed(here)));
    }
    if (there.arrays.size() != here.arrays.size()) {
        refuse_data(fmt::format("{} arrays ({})", there.arrays.size(), listed(there)),
                    fmt::format("{} ({})", here.arrays.size(), listed(here)));
    }
    for (std::size_t i = 0; i < here.arrays.size(); ++i) {
        const array_fingerprint& saved_array = there.arrays[i];
        const array_fingerprint& array = here.arrays[i];
        if (saved_array.dtype != array.dtype || saved_array.row_shape != array.row_shape) {
            const auto described = [](const array_fingerprint& each) {
                return fmt::format("rows of {} of shape {} ({})", each.dtype,
                                   pinflow::to_string(each.row_shape), listed({0, {each}}));
            };
            refuse_data(described(saved_array), described(array));
        }
        if (saved_array.hash != array.hash) {
            throw state_mismatch(fmt::format(
                "cannot resume, because the data differs: rows of {} are not those of {} that the state "
                "was saved with",
                listed({0, {array}}), listed({0, {saved_array}})));
        }
    }
    if (saved.order != order_) {
        throw state_mismatch(fmt::format(
            "cannot resume, because the order differs: the state was saved with {}, and this loader has {}",
            to_string(saved.order), to_string(order_)));
    }
    if (saved.position >= std::max<std::uint64_t>(1, order_.position_count)) {
        throw state_mismatch(fmt::format(
            "cannot resume: the state is at position {}, which is not below the {} positions of an epoch",
            saved.position, order_.position_count));
    }
    return {saved.epoch, saved.position};
}

}  // namespace pinflow::detail
