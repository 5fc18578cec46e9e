#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/train/embedding_table.hpp"
#include "src/core/cast.hpp"
#include "src/train/rule_setup.hpp"
#include "src/train/table_layout.hpp"

/// What tests of embedding tables compare them with, and feed them. Files that include this are compiled
/// without contraction to fused multiply-adds: see CMakeLists.txt.
namespace pinflow {

/// The same table, updated one row after the other by a plain loop.
class plain_table {
 public:
    explicit plain_table(const embedding_options& options)
        : options_(options),
          layout_(detail::lay_out_record(options)),
          kind_(detail::layout_of(options.rule).kind),
          numbers_(detail::numbers_of(options.rule)),
          records_(options.row_count * layout_.size_bytes) {
        tables_.add(options.rule);
        elements_ = tables_.elements();
        tables_.point(numbers_, 0, elements_.data());
        std::vector<float> weights(options.columns);
        for (std::uint64_t row = 0; row < options.row_count && options.weights; ++row) {
            options.weights(row, weights);
            detail::cast_elements(dtype::of<float>(), reinterpret_cast<const std::byte*>(weights.data()),
                                  options.type, record(row), options.columns);
        }
    }

    /// @param gradients a row for each id
    void step(const std::vector<std::uint64_t>& ids, const std::vector<float>& gradients) {
        std::map<std::uint64_t, std::vector<float>> sums;
        for (std::size_t i = 0; i < ids.size(); ++i) {
            const auto begin = gradients.begin() + static_cast<std::ptrdiff_t>(i * options_.columns);
            const auto [sum, is_first] =
                sums.try_emplace(ids[i], begin, begin + static_cast<std::ptrdiff_t>(options_.columns));
            for (std::size_t column = 0; column < options_.columns && !is_first; ++column)
                sum->second[column] += begin[static_cast<std::ptrdiff_t>(column)];
        }
        for (const auto& [id, sum] : sums)
            update(id, sum);
    }

    std::vector<std::byte> weights_of(const std::vector<std::uint64_t>& ids) {
        std::vector<std::byte> bytes;
        const std::uint64_t row_bytes = options_.columns * options_.type.size_bytes();
        for (const std::uint64_t id : ids)
            bytes.insert(bytes.end(), record(id), record(id) + row_bytes);
        return bytes;
    }

 private:
    std::byte* record(std::uint64_t row) { return records_.data() + row * layout_.size_bytes; }

    void update(std::uint64_t row, const std::vector<float>& gradient) {
        std::uint32_t steps = 0;
        std::memcpy(&steps, record(row) + layout_.steps_bytes, sizeof steps);
        ++steps;
        std::memcpy(record(row) + layout_.steps_bytes, &steps, sizeof steps);
        detail::visit_rule(kind_, [&](auto rule) {
            using rule_type = decltype(rule);
            const auto now = rule_type::template prepare<float>(numbers_, steps);
            const auto decay = detail::prepare_decay<float>(numbers_);
            const std::uint64_t size_bytes = options_.type.size_bytes();
            if constexpr (detail::is_rowwise<rule_type>) add_mean_square(row, gradient, now, decay);
            for (std::uint64_t column = 0; column < options_.columns; ++column) {
                float weight = 0;
                std::byte* const stored = record(row) + column * size_bytes;
                detail::cast_elements(options_.type, stored, dtype::of<float>(),
                                      reinterpret_cast<std::byte*>(&weight), 1);
                float slope = gradient[column];
                float states[rule_type::state_count + 1] = {};
                const std::uint64_t offset = detail::is_rowwise<rule_type> ? 0 : column * 4;
                for (unsigned k = 0; k != rule_type::state_count; ++k)
                    std::memcpy(&states[k], record(row) + layout_.states_bytes[k] + offset, 4);
                detail::apply_decay(decay, weight, slope);
                rule_type::update(now, weight, slope, states);
                for (unsigned k = 0; k != rule_type::state_count; ++k)
                    std::memcpy(record(row) + layout_.states_bytes[k] + offset, &states[k], 4);
                detail::cast_elements(dtype::of<float>(), reinterpret_cast<const std::byte*>(&weight),
                                      options_.type, stored, 1);
            }
        });
    }

    /// Adds the mean square of the gradient to the row's state, in the order of record_work.hpp: column c
    /// belongs to sum (c / 4) % 32, and the sums are added in pairs.
    template <typename Step>
    void add_mean_square(std::uint64_t row, const std::vector<float>& gradient, const Step& now,
                         const detail::decay_step<float>& decay) {
        std::vector<float> totals(32);
        for (std::size_t column = 0; column < gradient.size(); ++column) {
            float weight = 0;
            detail::cast_elements(options_.type, record(row) + column * options_.type.size_bytes(),
                                  dtype::of<float>(), reinterpret_cast<std::byte*>(&weight), 1);
            float slope = gradient[column];
            detail::apply_decay(decay, weight, slope);
            totals[column / 4 % 32] += slope * slope;
        }
        while (totals.size() > 1) {
            const std::size_t half = totals.size() / 2;
            for (std::size_t i = 0; i < half; ++i)
                totals[i] += totals[half + i];
            totals.resize(half);
        }
        float sum = 0;
        std::memcpy(&sum, record(row) + layout_.states_bytes[0], 4);
        sum = sum + now.initial + totals[0] / static_cast<float>(gradient.size());
        std::memcpy(record(row) + layout_.states_bytes[0], &sum, 4);
    }

    embedding_options options_;
    detail::record_layout layout_;
    detail::rule_kind kind_;
    detail::rule_numbers numbers_;
    detail::rule_tables tables_;
    std::vector<double> elements_;
    std::vector<std::byte> records_;
};

inline std::vector<std::uint64_t> random_ids(std::mt19937_64& random, std::uint64_t rows, std::size_t count) {
    std::vector<std::uint64_t> ids(count);
    // half of them among few rows, so that many repeat and neighbouring steps share rows
    for (std::uint64_t& id : ids)
        id = random() % 2 == 0 ? random() % rows : random() % std::max<std::uint64_t>(rows / 16, 1);
    return ids;
}

inline std::vector<float> random_gradients(std::mt19937_64& random, std::size_t count) {
    std::uniform_real_distribution<float> numbers(-1, 1);
    std::vector<float> gradients(count);
    std::ranges::generate(gradients, [&] { return numbers(random); });
    return gradients;
}

/// Gradients or ids in device memory, which must live until the stream has passed the commit or the fetch.
class device_array {
 public:
    template <typename Number>
    device_array(const std::vector<Number>& values, stream_view stream)
        : host_(std::max<std::size_t>(values.size(), 1) * sizeof(Number), stream.device()),
          memory_(host_.size_bytes(), stream) {
        std::memcpy(host_.data(), values.data(), values.size() * sizeof(Number));
        copy_to_device_async(memory_.data(), host_.bytes(), stream);
    }
    const std::byte* data() const { return memory_.data(); }

 private:
    pinned_buffer host_;
    device_buffer memory_;
};

inline std::vector<std::byte> weights_of(embedding_table& table, const std::vector<std::uint64_t>& ids) {
    std::vector<std::byte> bytes(ids.size() * table.options().columns * table.options().type.size_bytes());
    table.read_weights(ids, bytes);
    return bytes;
}

inline std::vector<std::uint64_t> all_ids(std::uint64_t rows) {
    std::vector<std::uint64_t> ids(rows);
    for (std::uint64_t i = 0; i < rows; ++i)
        ids[i] = i;
    return ids;
}

}  // namespace pinflow
