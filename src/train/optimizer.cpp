#include "pinflow/train/optimizer.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "pinflow/error.hpp"

namespace pinflow {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

struct names {
    std::string_view operator()(const sgd&) const { return "sgd/1"; }
    std::string_view operator()(const adagrad&) const { return "adagrad/1"; }
    std::string_view operator()(const adadelta&) const { return "adadelta/1"; }
    std::string_view operator()(const rmsprop&) const { return "rmsprop/1"; }
    std::string_view operator()(const rprop&) const { return "rprop/1"; }
    std::string_view operator()(const adam&) const { return "adam/1"; }
    std::string_view operator()(const adamw&) const { return "adamw/1"; }
    std::string_view operator()(const adamax&) const { return "adamax/1"; }
    std::string_view operator()(const nadam&) const { return "nadam/1"; }
    std::string_view operator()(const radam&) const { return "radam/1"; }
    std::string_view operator()(const asgd&) const { return "asgd/1"; }
    std::string_view operator()(const sparse_adam&) const { return "sparse_adam/1"; }
    std::string_view operator()(const rowwise_adagrad&) const { return "rowwise_adagrad/1"; }
};

/// Refuses settings of one rule that are out of range.
class settings_check {
 public:
    explicit settings_check(std::string_view rule) : rule_(rule.substr(0, rule.find('/'))) {}

    /// Numbers from `low` on that are below `end`.
    void range(std::string_view name, double value, double low, double end = infinity) const {
        if (value >= low && value < end) return;
        throw invalid_argument(
            end == infinity
                ? fmt::format("{}: {} must be a finite number from {} on, not {}", rule_, name, low, value)
                : fmt::format("{}: {} must be from {} to below {}, not {}", rule_, name, low, end, value));
    }
    /// Numbers above `low` and below `high`.
    void between(std::string_view name, double value, double low, double high) const {
        if (value > low && value < high) return;
        throw invalid_argument(
            fmt::format("{}: {} must be above {} and below {}, not {}", rule_, name, low, high, value));
    }
    void finite(std::string_view name, double value) const {
        if (!std::isfinite(value))
            throw invalid_argument(fmt::format("{}: {} must be a finite number, not {}", rule_, name, value));
    }
    template <typename Settings>
    void betas(const Settings& settings) const {
        range("beta1", settings.beta1, 0, 1);
        range("beta2", settings.beta2, 0, 1);
    }
    [[noreturn]] void refuse(std::string_view sentence) const {
        throw invalid_argument(fmt::format("{}: {}", rule_, sentence));
    }

 private:
    std::string_view rule_;
};

void check_rest(const settings_check& check, const sgd& settings) {
    check.range("momentum", settings.momentum, 0);
    check.finite("dampening", settings.dampening);
    if (settings.nesterov && (settings.momentum == 0 || settings.dampening != 0))
        check.refuse("nesterov needs a momentum above 0, and a dampening of 0");
}
template <typename Settings>
    requires requires(const Settings& settings) { settings.rate_decay; }  // adagrad and rowwise_adagrad
void check_rest(const settings_check& check, const Settings& settings) {
    check.range("rate_decay (lr_decay)", settings.rate_decay, 0);
    check.range("initial_sum (initial_accumulator_value)", settings.initial_sum, 0);
}
void check_rest(const settings_check& check, const adadelta& settings) {
    // 1 is allowed, as in torch.optim
    if (settings.rho != 1) check.range("rho", settings.rho, 0, 1);
}
void check_rest(const settings_check& check, const rmsprop& settings) {
    check.range("alpha", settings.alpha, 0);
    check.range("momentum", settings.momentum, 0);
}
void check_rest(const settings_check& check, const rprop& settings) {
    check.between("shrink (etas[0])", settings.shrink, 0, 1);
    check.between("grow (etas[1])", settings.grow, 1, infinity);
    check.range("min_step", settings.min_step, 0);
    check.range("max_step", settings.max_step, settings.min_step);
}
void check_rest(const settings_check& check, const nadam& settings) {
    check.betas(settings);
    check.range("momentum_decay", settings.momentum_decay, 0);
}
void check_rest(const settings_check& check, const asgd& settings) {
    check.range("decay_term (lambd)", settings.decay_term, 0);
    check.range("average_from (t0)", settings.average_from, 0);
    check.finite("power (alpha)", settings.power);
}
template <typename Settings>
void check_rest(const settings_check& check, const Settings& settings) {
    check.betas(settings);
}

}  // namespace

std::string_view rule_name(const optimizer& settings) noexcept {
    return std::visit(names{}, settings);
}

double rate_of(const optimizer& settings) noexcept {
    return std::visit([](const auto& each) { return each.rate; }, settings);
}

optimizer with_rate(optimizer settings, double rate) noexcept {
    std::visit([rate](auto& each) { each.rate = rate; }, settings);
    return settings;
}

void check_settings(const optimizer& settings) {
    const settings_check check(rule_name(settings));
    std::visit(
        [&](const auto& each) {
            check.range("rate (lr)", each.rate, 0);
            if constexpr (requires { each.weight_decay; }) check.range("weight_decay", each.weight_decay, 0);
            if constexpr (requires { each.epsilon; }) check.range("epsilon (eps)", each.epsilon, 0);
            check_rest(check, each);
        },
        settings);
}

}  // namespace pinflow
