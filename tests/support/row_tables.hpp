#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "devices.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/rows.hpp"
#include "sanitized.hpp"

/// Tables and batches of rows between sentinels, lists of indices, and the expected results of moving
/// rows, by plain loops.

inline constexpr std::array every_route{pinflow::row_route::automatic, pinflow::row_route::direct,
                                        pinflow::row_route::copy, pinflow::row_route::staged,
                                        pinflow::row_route::hybrid};
inline constexpr std::array<std::uint64_t, 21> every_row_size{
    1,   2,   3,   7,    8,    15,    16,
    17,  31,  33,  64,   100,  200,   256,
    511, 512, 513, 1021, 4096, 65536, std::uint64_t{1} << 20};
inline constexpr std::array<std::uint64_t, 6> every_misalignment{0, 1, 2, 4, 8, 15};

/// Runs `body(device, route)` for each route on each device.
template <typename Body>
void on_each_route(Body body) {
    on_each_device([&](const pinflow::device& device) {
        for (const pinflow::row_route route : every_route) {
            INFO("route " << pinflow::to_string(route));
            body(device, route);
        }
    });
}

template <typename Values>
auto one_of(const Values& values, std::mt19937_64& random) {
    return values[random() % std::size(values)];
}

// ---- memory between sentinels -------------------------------------------------------------------

inline constexpr std::size_t margin_bytes = 128;
inline constexpr std::byte sentinel{0xA5};

/// Whether all bytes before and behind the `size_bytes` from `begin` on are still sentinels.
inline bool sentinels_are_left(std::span<const std::byte> whole, std::size_t begin, std::size_t size_bytes) {
    const auto is_sentinel = [](std::byte byte) { return byte == sentinel; };
    return std::ranges::all_of(whole.first(begin), is_sentinel) &&
           std::ranges::all_of(whole.subspan(begin + size_bytes), is_sentinel);
}

/// Page-locked host memory that begins `misalignment` bytes behind a multiple of 64.
class guarded_table {
 public:
    guarded_table(const pinflow::device& device, std::size_t size_bytes, std::size_t misalignment = 0)
        : memory_(size_bytes + 2 * margin_bytes + misalignment, device),
          begin_(margin_bytes + misalignment),
          size_bytes_(size_bytes) {
        std::memset(memory_.data(), std::to_integer<int>(sentinel), memory_.size_bytes());
    }
    guarded_table(const pinflow::device& device, std::span<const std::byte> content,
                  std::size_t misalignment = 0)
        : guarded_table(device, content.size(), misalignment) {
        if (!content.empty()) std::memcpy(bytes().data(), content.data(), content.size());
    }

    std::span<std::byte> bytes() const { return memory_.bytes().subspan(begin_, size_bytes_); }
    bool holds(std::span<const std::byte> content) const { return same_bytes(bytes(), content); }
    bool sentinels_left() const { return sentinels_are_left(memory_.bytes(), begin_, size_bytes_); }

 private:
    pinflow::pinned_buffer memory_;
    std::size_t begin_;
    std::size_t size_bytes_;
};

/// Rows in device memory between sentinels.
class guarded_rows {
 public:
    /// Holds `content` when the constructor returns.
    guarded_rows(const pinflow::device& device, std::span<const std::byte> content,
                 std::size_t misalignment = 0)
        : device_(device), begin_(margin_bytes + misalignment), size_bytes_(content.size()) {
        const pinflow::stream stream(device);
        memory_ = pinflow::device_buffer(content.size() + 2 * margin_bytes + misalignment, stream);
        std::vector<std::byte> whole(memory_.size_bytes(), sentinel);
        if (!content.empty()) std::memcpy(whole.data() + begin_, content.data(), content.size());
        pinflow::copy_to_device_async(memory_.data(), whole, stream);
        stream.synchronize();
    }
    guarded_rows(const pinflow::device& device, std::size_t size_bytes, std::size_t misalignment = 0)
        : guarded_rows(device, std::vector<std::byte>(size_bytes, std::byte{0x5A}), misalignment) {}

    std::byte* data() const { return memory_.data() + begin_; }
    std::size_t size_bytes() const { return size_bytes_; }

    /// Its current content; all writers must have finished.
    std::vector<std::byte> content() const {
        std::vector<std::byte> copy;
        const auto rows = whole(copy).subspan(begin_, size_bytes_);
        return {rows.begin(), rows.end()};
    }
    bool holds(std::span<const std::byte> content) const {
        std::vector<std::byte> copy;
        return same_bytes(whole(copy).subspan(begin_, size_bytes_), content);
    }
    bool sentinels_left() const {
        std::vector<std::byte> copy;
        return sentinels_are_left(whole(copy), begin_, size_bytes_);
    }

 private:
    /// All of the memory: in place if it is host memory, otherwise in `copy`.
    std::span<const std::byte> whole(std::vector<std::byte>& copy) const {
        if (device_.kind() == pinflow::device_kind::host) return {memory_.data(), memory_.size_bytes()};
        return copy = to_host(memory_.data(), memory_.size_bytes(), pinflow::stream(device_));
    }

    pinflow::device device_;
    pinflow::device_buffer memory_;
    std::size_t begin_;
    std::size_t size_bytes_;
};

// ---- indices ------------------------------------------------------------------------------------

using id_vector = std::vector<std::uint64_t>;

enum class id_order { random, sorted, reversed, all_equal, few };
inline constexpr std::array every_id_order{id_order::random, id_order::sorted, id_order::reversed,
                                           id_order::all_equal, id_order::few};

/// Indices below `row_count`. A list of two or more contains the last row, and usually row 0, unless `order`
/// is all_equal.
inline id_vector make_ids(id_order order, std::size_t count, std::uint64_t row_count,
                          std::mt19937_64& random) {
    const std::uint64_t below = order == id_order::few ? std::min<std::uint64_t>(row_count, 5) : row_count;
    id_vector ids(count);
    std::ranges::generate(ids, [&] { return random() % below; });
    if (order == id_order::all_equal) {
        std::ranges::fill(ids, random() % row_count);
        return ids;
    }
    if (count > 1) {
        ids[random() % count] = 0;
        ids[random() % count] = row_count - 1;
    }
    // by pointers, which are faster than iterators in builds that are not optimised
    if (order == id_order::sorted || order == id_order::reversed) std::sort(ids.data(), ids.data() + count);
    if (order == id_order::reversed) std::ranges::reverse(ids);
    return ids;
}

/// Indices in host memory, as an argument of a call.
inline pinflow::row_ids ids_of(const id_vector& ids) {
    return std::span(ids);
}

enum class id_place { host, host_signed, device };
inline constexpr std::array every_id_place{id_place::host, id_place::host_signed, id_place::device};

/// A list of indices, in host memory (unsigned or signed) or in device memory.
class id_list {
 public:
    id_list(const pinflow::device& device, id_vector ids, id_place place)
        : ids_(std::move(ids)), place_(place) {
        signed_.assign(ids_.begin(), ids_.end());
        if (place == id_place::device) on_device_.emplace(device, std::as_bytes(std::span(ids_)));
    }

    pinflow::row_ids get() const {
        if (place_ == id_place::device) return pinflow::row_ids::on_device(on_device_->data(), ids_.size());
        if (place_ == id_place::host_signed) return std::span(signed_);
        return std::span(ids_);
    }

 private:
    id_vector ids_;
    std::vector<std::int64_t> signed_;
    std::optional<guarded_rows> on_device_;
    id_place place_;
};

inline std::uint64_t to_id(std::int64_t id) {
    return static_cast<std::uint64_t>(id);
}

// ---- what should come out -----------------------------------------------------------------------

inline std::vector<std::byte> gathered(std::span<const std::byte> table, std::size_t row_bytes,
                                       const id_vector& ids) {
    std::vector<std::byte> rows(ids.size() * row_bytes);
    for (std::size_t i = 0; i < ids.size(); ++i)
        std::memcpy(rows.data() + i * row_bytes, table.data() + ids[i] * row_bytes, row_bytes);
    return rows;
}

/// The table after the rows were written to it one after the other.
inline std::vector<std::byte> scattered(std::vector<std::byte> table, std::size_t row_bytes,
                                        const id_vector& ids, std::span<const std::byte> rows) {
    for (std::size_t i = 0; i < ids.size(); ++i)
        std::memcpy(table.data() + ids[i] * row_bytes, rows.data() + i * row_bytes, row_bytes);
    return table;
}

// ---- combinations -------------------------------------------------------------------------------

/// One way to move rows, drawn from all of them.
struct row_combination {
    std::uint64_t row_bytes = 1;
    std::uint64_t row_count = 1;
    std::size_t count = 0;
    std::size_t table_misalignment = 0;
    std::size_t rows_misalignment = 0;
    id_order order = id_order::random;
    id_place place = id_place::host;
    bool waits = false;  ///< whether the call is synchronous
    pinflow::row_exchange_options options;
};

/// Draws a cheap combination for rows of this size and one route. It depends only on the arguments.
inline row_combination draw(std::uint64_t row_bytes, pinflow::row_route route, std::mt19937_64& random) {
    constexpr std::uint64_t max_bytes = std::uint64_t{sanitized ? 1 : 4} << 20;
    const std::uint64_t max_rows = std::max<std::uint64_t>(max_bytes / row_bytes, 3);
    row_combination drawn;
    drawn.row_bytes = row_bytes;
    drawn.row_count = std::min(one_of(std::array<std::uint64_t, 5>{1, 2, 3, 200, 70'000}, random), max_rows);
    drawn.count = static_cast<std::size_t>(
        std::min(one_of(std::array<std::uint64_t, 6>{0, 1, 2, 31, 1000, 100'000}, random), max_rows));
    drawn.table_misalignment = one_of(every_misalignment, random);
    drawn.rows_misalignment = one_of(every_misalignment, random);
    drawn.order = one_of(every_id_order, random);
    drawn.place = one_of(every_id_place, random);
    if (route == pinflow::row_route::copy && drawn.place == id_place::device) drawn.place = id_place::host;
    drawn.waits = random() % 2 == 0;
    drawn.options.route = route;
    drawn.options.threads = one_of(std::array<unsigned, 3>{0, 1, 3}, random);
    // some hundred pieces at most
    drawn.options.staging_bytes =
        std::max(one_of(std::array<std::uint64_t, 5>{0, 3000, 64 << 10, 1 << 20, 64 << 20}, random),
                 drawn.count * row_bytes / 100);
    return drawn;
}

/// Calls `body(combination, random)` for several combinations of every row size.
template <typename Body>
void for_combinations(pinflow::row_route route, std::uint64_t seed, Body body) {
    constexpr unsigned of_each_size = sanitized ? 2 : 6;
    for (const std::uint64_t row_bytes : every_row_size) {
        for (unsigned i = 0; i < of_each_size; ++i) {
            std::mt19937_64 random(seed * 1'000'003 + row_bytes * 101 + i);
            const row_combination drawn = draw(row_bytes, route, random);
            INFO(drawn.count << " rows of " << row_bytes << " bytes, of " << drawn.row_count << ", the table "
                             << drawn.table_misalignment << " and the batch " << drawn.rows_misalignment
                             << " bytes off, order " << static_cast<int>(drawn.order) << ", indices in place "
                             << static_cast<int>(drawn.place) << ", staging " << drawn.options.staging_bytes
                             << " bytes, " << drawn.options.threads << " threads, number " << i);
            body(drawn, random);
        }
    }
}
