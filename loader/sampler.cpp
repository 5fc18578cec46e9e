#include "pinflow/loader/sampler.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "loader/order_key.hpp"
#include "loader/weighted_order.hpp"
#include "loader/windowed_order.hpp"
#include "pinflow/error.hpp"

namespace pinflow {

namespace {

class sequential_order final : public row_sequence {
 public:
    explicit sequential_order(std::uint64_t row_count) noexcept : row_count_(row_count) {}

    std::string name() const override { return "sequential/1"; }
    std::uint64_t position_count() const override { return row_count_; }
    void rows_at(std::uint64_t /*epoch*/, std::uint64_t first, std::span<std::uint64_t> rows) const override {
        std::iota(rows.begin(), rows.end(), first);
    }

 private:
    std::uint64_t row_count_;
};

class shuffled_order final : public row_sequence {
 public:
    shuffled_order(std::uint64_t row_count, std::uint64_t seed) noexcept
        : row_count_(row_count), seed_(seed) {}

    std::string name() const override { return "shuffled/1"; }
    std::uint64_t position_count() const override { return row_count_; }
    void rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const override {
        const permutation shuffled(row_count_, detail::order_key(seed_, epoch));
        shuffled.elements_at(first, rows);
    }

 private:
    std::uint64_t row_count_;
    std::uint64_t seed_;
};

class listed_order final : public row_sequence {
 public:
    explicit listed_order(std::vector<std::uint64_t> rows) noexcept : rows_(std::move(rows)) {}

    std::string name() const override { return "listed/1"; }
    std::uint64_t position_count() const override { return rows_.size(); }
    void rows_at(std::uint64_t /*epoch*/, std::uint64_t first, std::span<std::uint64_t> rows) const override {
        std::ranges::copy(std::span(rows_).subspan(first, rows.size()), rows.begin());
    }

    std::uint64_t content() const noexcept {
        return XXH3_64bits(rows_.data(), rows_.size() * sizeof(std::uint64_t));
    }

 private:
    std::vector<std::uint64_t> rows_;
};

constexpr std::array order_names{
    std::pair{order::sequential, std::string_view("sequential")},
    std::pair{order::shuffled, std::string_view("shuffled")},
    std::pair{order::windowed, std::string_view("windowed")},
    std::pair{order::listed, std::string_view("listed")},
    std::pair{order::weighted, std::string_view("weighted")},
    std::pair{order::custom, std::string_view("custom")},
};

/// @throws invalid_argument for more rows than a permutation can have.
void check_shuffled(std::uint64_t row_count) {
    static_cast<void>(permutation(row_count, 0));
}

/// @throws invalid_argument if it is not valid for row_sequence::name, or is one of pinflow's names.
void check_name(std::string_view name) {
    constexpr std::string_view digits = "0123456789";
    constexpr std::string_view allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    const std::size_t slash = name.find('/');
    const std::string_view stem = name.substr(0, slash);
    const std::string_view version =
        slash == std::string_view::npos ? std::string_view() : name.substr(slash + 1);
    if (stem.empty() || version.empty() || stem.find_first_not_of(allowed) != std::string_view::npos ||
        version.find_first_not_of(digits) != std::string_view::npos) {
        throw invalid_argument(fmt::format(
            "an order cannot be named '{}': it needs a name of letters, digits, '-', '_' and '.', then a "
            "slash and a version of digits, such as 'curriculum/1'",
            name));
    }
    if (std::ranges::any_of(order_names, [stem](const auto& known) { return known.second == stem; })) {
        throw invalid_argument(
            fmt::format("a custom order cannot be named '{}': pinflow uses the name '{}'", name, stem));
    }
}

order_identity identity_of(const row_sequence& sequence, std::uint64_t seed = 0) {
    return {.name = sequence.name(), .seed = seed, .position_count = sequence.position_count()};
}

}  // namespace

std::string_view to_string(order order) noexcept {
    const auto found = std::ranges::find(order_names, order, [](const auto& known) { return known.first; });
    return found == order_names.end() ? "unknown" : found->second;
}

std::string to_string(const order_identity& identity) {
    std::string words = fmt::format("{}, seed {}", identity.name, identity.seed);
    if (identity.window_rows > 0) words += fmt::format(", windows of {} rows", identity.window_rows);
    words += fmt::format(", {} positions", identity.position_count);
    if (identity.content != 0) words += fmt::format(", content {:016x}", identity.content);
    return words;
}

std::uint64_t default_window_rows(std::uint64_t row_size_bytes) noexcept {
    constexpr std::uint64_t window_bytes = std::uint64_t{64} << 20;
    return std::max<std::uint64_t>(1, window_bytes / std::max<std::uint64_t>(1, row_size_bytes));
}

sampler::sampler(pinflow::order order, std::uint64_t row_count, order_identity identity,
                 std::shared_ptr<const row_sequence> sequence) noexcept
    : order_(order), row_count_(row_count), identity_(std::move(identity)), sequence_(std::move(sequence)) {}

sampler sampler::sequential(std::uint64_t row_count) {
    auto sequence = std::make_shared<sequential_order>(row_count);
    order_identity identity = identity_of(*sequence);
    return {order::sequential, row_count, std::move(identity), std::move(sequence)};
}

sampler sampler::shuffled(std::uint64_t row_count, std::uint64_t seed) {
    check_shuffled(row_count);
    auto sequence = std::make_shared<shuffled_order>(row_count, seed);
    order_identity identity = identity_of(*sequence, seed);
    return {order::shuffled, row_count, std::move(identity), std::move(sequence)};
}

sampler sampler::windowed(std::uint64_t row_count, std::uint64_t seed, std::uint64_t window_rows) {
    check_shuffled(row_count);
    if (window_rows == 0) {
        throw invalid_argument("cannot shuffle within windows of 0 rows: at least one is needed");
    }
    // larger windows give the same order
    const std::uint64_t window = std::min(window_rows, row_count);
    auto sequence = std::make_shared<detail::windowed_order>(row_count, seed, window);
    order_identity identity = identity_of(*sequence, seed);
    identity.window_rows = window;
    return {order::windowed, row_count, std::move(identity), std::move(sequence)};
}

sampler sampler::listed(std::uint64_t row_count, std::vector<std::uint64_t> rows) {
    const auto wrong = std::ranges::find_if(rows, [&](std::uint64_t row) { return row >= row_count; });
    if (wrong != rows.end()) {
        throw invalid_argument(
            fmt::format("the list of rows has row {} at position {}, but the data has {} rows", *wrong,
                        wrong - rows.begin(), row_count));
    }
    auto sequence = std::make_shared<listed_order>(std::move(rows));
    order_identity identity = identity_of(*sequence);
    identity.content = sequence->content();
    return {order::listed, row_count, std::move(identity), std::move(sequence)};
}

sampler sampler::weighted(std::span<const double> weights, std::uint64_t position_count, std::uint64_t seed) {
    auto sequence = std::make_shared<detail::weighted_order>(weights, position_count, seed);
    order_identity identity = identity_of(*sequence, seed);
    identity.content = sequence->content();
    return {order::weighted, weights.size(), std::move(identity), std::move(sequence)};
}

sampler sampler::custom(std::uint64_t row_count, std::shared_ptr<const row_sequence> rows) {
    if (!rows) throw invalid_argument("a sampler was given a custom order that is null");
    order_identity identity = identity_of(*rows);
    check_name(identity.name);
    return {order::custom, row_count, std::move(identity), std::move(rows)};
}

void sampler::rows_at(std::uint64_t epoch, std::uint64_t first, std::span<std::uint64_t> rows) const {
    if (first > position_count() || rows.size() > position_count() - first) {
        throw invalid_argument(
            fmt::format("{} rows from position {} on were asked for, but an epoch has {} positions",
                        rows.size(), first, position_count()));
    }
    if (!sequence_) throw invalid_argument("cannot read rows of a moved-from sampler");
    sequence_->rows_at(epoch, first, rows);
    if (order_ != order::custom) return;  // only custom orders can give invalid rows
    const auto wrong = std::ranges::find_if(rows, [&](std::uint64_t row) { return row >= row_count_; });
    if (wrong != rows.end()) {
        throw invalid_argument(
            fmt::format("the order '{}' gives row {} at position {} of epoch {}, but the data has {} rows",
                        identity_.name, *wrong, first + static_cast<std::uint64_t>(wrong - rows.begin()),
                        epoch, row_count_));
    }
}

}  // namespace pinflow
