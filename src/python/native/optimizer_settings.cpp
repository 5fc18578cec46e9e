#include "src/python/native/optimizer_settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "pinflow/error.hpp"

namespace pinflow::python {

namespace {

/// Takes settings out of a dictionary by name.
class settings_reader {
 public:
    settings_reader(std::string rule, numbers_by_name numbers)
        : rule_(std::move(rule)), numbers_(std::move(numbers)) {}

    void take(const char* name, double& value) {
        if (const auto found = numbers_.extract(name)) value = found.mapped();
    }
    void take(const char* name, bool& value) {
        if (const auto found = numbers_.extract(name)) value = found.mapped() != 0;
    }
    void refuse_rest() const {
        if (!numbers_.empty())
            throw invalid_argument("the rule '" + rule_ + "' has no setting '" + numbers_.begin()->first +
                                   "'");
    }

 private:
    std::string rule_;
    numbers_by_name numbers_;
};

// The names of torch.optim; pairs are split by Python.

template <typename Settings>
void read_common(settings_reader& reader, Settings& settings) {
    reader.take("lr", settings.rate);
    reader.take("maximize", settings.maximize);
    if constexpr (requires { settings.weight_decay; }) reader.take("weight_decay", settings.weight_decay);
    if constexpr (requires { settings.epsilon; }) reader.take("eps", settings.epsilon);
    if constexpr (requires { settings.beta1; }) {
        reader.take("beta1", settings.beta1);
        reader.take("beta2", settings.beta2);
    }
    if constexpr (requires { settings.rate_decay; }) {
        reader.take("lr_decay", settings.rate_decay);
        reader.take("initial_accumulator_value", settings.initial_sum);
    }
    if constexpr (requires { settings.amsgrad; }) reader.take("amsgrad", settings.amsgrad);
    if constexpr (requires { settings.decoupled_weight_decay; })
        reader.take("decoupled_weight_decay", settings.decoupled_weight_decay);
    if constexpr (requires { settings.momentum; }) reader.take("momentum", settings.momentum);
}
template <typename Settings>
void read_rest(settings_reader&, Settings&) {}
void read_rest(settings_reader& reader, sgd& settings) {
    reader.take("dampening", settings.dampening);
    reader.take("nesterov", settings.nesterov);
}
void read_rest(settings_reader& reader, adadelta& settings) {
    reader.take("rho", settings.rho);
}
void read_rest(settings_reader& reader, rmsprop& settings) {
    reader.take("alpha", settings.alpha);
    reader.take("centered", settings.centered);
}
void read_rest(settings_reader& reader, rprop& settings) {
    reader.take("eta1", settings.shrink);
    reader.take("eta2", settings.grow);
    reader.take("min_step", settings.min_step);
    reader.take("max_step", settings.max_step);
}
void read_rest(settings_reader& reader, nadam& settings) {
    reader.take("momentum_decay", settings.momentum_decay);
}
void read_rest(settings_reader& reader, asgd& settings) {
    reader.take("lambd", settings.decay_term);
    reader.take("alpha", settings.power);
    reader.take("t0", settings.average_from);
}

/// The names of all rules, each once: "sgd, adagrad, ...".
template <std::size_t... Index>
std::string rule_names(std::index_sequence<Index...>) {
    std::vector<std::string> names;
    const auto add = [&](std::string_view name) {
        const std::string known(name.substr(0, name.find('/')));
        if (std::ranges::find(names, known) == names.end()) names.push_back(known);
    };
    (add(rule_name(optimizer(std::in_place_index<Index>))), ...);
    return fmt::format("{}", fmt::join(names, ", "));
}

/// The settings of the first rule of that name from alternative `Index` on.
template <std::size_t Index>
optimizer first_of(const std::string& rule, const numbers_by_name& numbers) {
    if constexpr (Index == std::variant_size_v<optimizer>) {
        const auto all = std::make_index_sequence<std::variant_size_v<optimizer>>();
        throw invalid_argument(fmt::format("there is no rule '{}'; the rules are {}", rule, rule_names(all)));
    } else {
        std::variant_alternative_t<Index, optimizer> settings;
        const std::string_view name = rule_name(settings);
        if (name.substr(0, name.find('/')) != rule) return first_of<Index + 1>(rule, numbers);
        settings_reader reader(rule, numbers);
        read_common(reader, settings);
        read_rest(reader, settings);
        reader.refuse_rest();
        return settings;
    }
}

}  // namespace

optimizer optimizer_of(const std::string& rule, const numbers_by_name& numbers) {
    return first_of<0>(rule, numbers);
}

}  // namespace pinflow::python
