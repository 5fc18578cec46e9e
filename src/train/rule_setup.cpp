#include "src/train/rule_setup.hpp"

#include <fmt/format.h>

#include <cmath>
#include <type_traits>

#include "pinflow/error.hpp"

namespace pinflow::detail {

namespace {

template <typename Settings>
void set_betas(rule_numbers& numbers, const Settings& settings) {
    numbers.beta1 = settings.beta1;
    numbers.beta2 = settings.beta2;
    numbers.epsilon = settings.epsilon;
}

void set(rule_numbers& numbers, const sgd& settings) {
    numbers.momentum = settings.momentum;
    numbers.dampening = settings.dampening;
    numbers.nesterov = settings.nesterov;
}
template <typename Settings>
    requires requires(const Settings& settings) { settings.rate_decay; }  // adagrad and rowwise_adagrad
void set(rule_numbers& numbers, const Settings& settings) {
    numbers.rate_decay = settings.rate_decay;
    numbers.initial_sum = settings.initial_sum;
    numbers.epsilon = settings.epsilon;
}
void set(rule_numbers& numbers, const adadelta& settings) {
    numbers.rho = settings.rho;
    numbers.epsilon = settings.epsilon;
}
void set(rule_numbers& numbers, const rmsprop& settings) {
    numbers.rho = settings.alpha;
    numbers.epsilon = settings.epsilon;
    numbers.momentum = settings.momentum;
}
void set(rule_numbers& numbers, const rprop& settings) {
    numbers.shrink = settings.shrink;
    numbers.grow = settings.grow;
    numbers.min_step = settings.min_step;
    numbers.max_step = settings.max_step;
}
void set(rule_numbers& numbers, const adam& settings) {
    set_betas(numbers, settings);
}
void set(rule_numbers& numbers, const adamw& settings) {
    set_betas(numbers, settings);
    numbers.decoupled = true;
}
void set(rule_numbers& numbers, const adamax& settings) {
    set_betas(numbers, settings);
}
void set(rule_numbers& numbers, const nadam& settings) {
    set_betas(numbers, settings);
    numbers.decoupled = settings.decoupled_weight_decay;
    numbers.momentum_decay = settings.momentum_decay;
}
void set(rule_numbers& numbers, const radam& settings) {
    set_betas(numbers, settings);
    numbers.decoupled = settings.decoupled_weight_decay;
}
void set(rule_numbers& numbers, const asgd& settings) {
    numbers.decay_term = settings.decay_term;
    numbers.power = settings.power;
    numbers.average_from = settings.average_from;
}
void set(rule_numbers& numbers, const sparse_adam& settings) {
    set_betas(numbers, settings);
    numbers.epsilon_inside = true;
}

struct layouts {
    rule_layout operator()(const sgd& settings) const {
        if (settings.momentum == 0) return {rule_kind::sgd, {}};
        return {rule_kind::sgd_momentum, {"momentum_buffer"}};
    }
    rule_layout operator()(const adagrad&) const { return {rule_kind::adagrad, {"sum"}}; }
    rule_layout operator()(const rowwise_adagrad&) const {
        return {rule_kind::rowwise_adagrad, {"sum"}, true};
    }
    rule_layout operator()(const adadelta&) const {
        return {rule_kind::adadelta, {"square_avg", "acc_delta"}};
    }
    rule_layout operator()(const rmsprop& settings) const {
        rule_layout layout{rule_kind::rmsprop, {"square_avg"}};
        if (settings.centered) layout.states.emplace_back("grad_avg");
        if (settings.momentum != 0) layout.states.emplace_back("momentum_buffer");
        if (settings.centered)
            layout.kind =
                settings.momentum != 0 ? rule_kind::rmsprop_centered_momentum : rule_kind::rmsprop_centered;
        else if (settings.momentum != 0)
            layout.kind = rule_kind::rmsprop_momentum;
        return layout;
    }
    rule_layout operator()(const rprop&) const { return {rule_kind::rprop, {"prev", "step_size"}}; }
    rule_layout operator()(const adamax&) const { return {rule_kind::adamax, {"exp_avg", "exp_inf"}}; }
    rule_layout operator()(const nadam&) const { return {rule_kind::nadam, {"exp_avg", "exp_avg_sq"}}; }
    rule_layout operator()(const radam&) const { return {rule_kind::radam, {"exp_avg", "exp_avg_sq"}}; }
    rule_layout operator()(const asgd&) const { return {rule_kind::asgd, {"ax"}}; }
    rule_layout operator()(const sparse_adam&) const { return {rule_kind::adam, {"exp_avg", "exp_avg_sq"}}; }
    template <typename Settings>  // adam, adamw
    rule_layout operator()(const Settings& settings) const {
        if (settings.amsgrad) return {rule_kind::adam_amsgrad, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}};
        return {rule_kind::adam, {"exp_avg", "exp_avg_sq"}};
    }
};

}  // namespace

rule_layout layout_of(const optimizer& settings) {
    return std::visit(layouts{}, settings);
}

rule_numbers numbers_of(const optimizer& settings) {
    return std::visit(
        [](const auto& each) {
            rule_numbers numbers;
            numbers.rate = each.rate;
            numbers.maximize = each.maximize;
            if constexpr (requires { each.weight_decay; }) numbers.weight_decay = each.weight_decay;
            set(numbers, each);
            return numbers;
        },
        settings);
}

rule_tables::powers rule_tables::add_powers(std::string_view name, double base) {
    constexpr double max_base = 1 - 0x1p-20;  // at which the table has 0.7 million elements
    if (base > max_base)
        throw invalid_argument(fmt::format("{} is {}, and must be at most 1 - 2^-20", name, base));
    powers table;
    table.low = elements_.size();
    for (std::uint64_t i = 0; i < power_table::low_count; ++i)
        elements_.push_back(std::pow(base, static_cast<double>(i)));
    table.high = elements_.size();
    for (std::uint64_t i = 0;; ++i) {
        const double power =
            std::pow(base, static_cast<double>(i) * static_cast<double>(power_table::low_count));
        if (power < 0x1p-1000) break;  // 1 - power is 1
        elements_.push_back(power);
    }
    table.high_count = elements_.size() - table.high;
    return table;
}

void rule_tables::add(const optimizer& settings) {
    group_tables& tables = groups_.emplace_back();
    std::visit(
        [&](const auto& each) {
            if constexpr (requires { each.beta1; }) {
                tables.beta1 = add_powers("beta1", each.beta1);
                tables.beta2 = add_powers("beta2", each.beta2);
            }
        },
        settings);
    const auto* const momenta = std::get_if<nadam>(&settings);
    if (momenta == nullptr) return;
    constexpr std::uint64_t max_products = std::uint64_t{1} << 20;
    tables.products = elements_.size();
    double product = 1;
    for (std::uint64_t step = 0; product > 0x1p-60; ++step) {
        if (step == max_products)
            throw invalid_argument(fmt::format("nadam: beta1 = {} with momentum_decay = {} is too close to 1",
                                               momenta->beta1, momenta->momentum_decay));
        if (step > 0) {
            const double past = static_cast<double>(step) * momenta->momentum_decay;
            product *= momenta->beta1 * (1 - 0.5 * std::pow(0.96, past));
        }
        elements_.push_back(product);
    }
    tables.product_count = elements_.size() - tables.products;
}

void rule_tables::point(rule_numbers& numbers, std::size_t group, const double* base) const noexcept {
    const auto table_at = [&](const powers& table) {
        return power_table{base + table.low, base + table.high, table.high_count};
    };
    const group_tables& tables = groups_[group];
    numbers.beta1_powers = table_at(tables.beta1);
    numbers.beta2_powers = table_at(tables.beta2);
    numbers.momentum_products = base + tables.products;
    numbers.momentum_product_count = tables.product_count;
}

}  // namespace pinflow::detail
