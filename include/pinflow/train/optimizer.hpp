#pragma once

#include <string_view>
#include <variant>

namespace pinflow {

// Settings of an optimizer, for one group of parameters. The update rules are those of torch.optim
// (PyTorch 2.11, implementation for single tensors), and so are the default values; `rate` is called `lr`
// there. With `maximize`, gradients are negated. `weight_decay` times the parameter is added to the gradient.
// If decay is decoupled, the parameter is multiplied by 1 - rate * weight_decay instead (Loshchilov and
// Hutter, Decoupled Weight Decay Regularization, 2019).

struct sgd {
    double rate = 1e-3;
    double momentum = 0;
    double dampening = 0;
    double weight_decay = 0;
    bool nesterov = false;  ///< needs momentum, and no dampening
    bool maximize = false;
};

struct adagrad {
    double rate = 1e-2;
    double rate_decay = 0;  ///< lr_decay
    double weight_decay = 0;
    double initial_sum = 0;  ///< initial_accumulator_value
    double epsilon = 1e-10;
    bool maximize = false;
};

/// Adagrad with one sum for each row of an embedding_table: that of the mean squares of the row's gradients
/// (torchrec.optim.RowWiseAdagrad). Not for flat parameters, which have no rows.
struct rowwise_adagrad {
    double rate = 1e-2;
    double rate_decay = 0;  ///< lr_decay
    double weight_decay = 0;
    double initial_sum = 0;  ///< initial_accumulator_value
    double epsilon = 1e-10;
    bool maximize = false;
};

struct adadelta {
    double rate = 1;
    double rho = 0.9;
    double epsilon = 1e-6;
    double weight_decay = 0;
    bool maximize = false;
};

struct rmsprop {
    double rate = 1e-2;
    double alpha = 0.99;
    double epsilon = 1e-8;
    double weight_decay = 0;
    double momentum = 0;
    /// Divides by the standard deviation instead of the root of the mean square. Unlike in torch.optim, a
    /// variance that rounding makes negative counts as 0.
    bool centered = false;
    bool maximize = false;
};

struct rprop {
    double rate = 1e-2;      ///< the size of the first step
    double shrink = 0.5;     ///< etas[0]
    double grow = 1.2;       ///< etas[1]
    double min_step = 1e-6;  ///< step_sizes
    double max_step = 50;
    bool maximize = false;
};

struct adam {
    double rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0;
    bool amsgrad = false;
    bool maximize = false;
};

/// Adam with decoupled decay.
struct adamw {
    double rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 1e-2;
    bool amsgrad = false;
    bool maximize = false;
};

struct adamax {
    double rate = 2e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0;
    bool maximize = false;
};

struct nadam {
    double rate = 2e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0;
    double momentum_decay = 4e-3;
    bool decoupled_weight_decay = false;
    bool maximize = false;
};

struct radam {
    double rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0;
    bool decoupled_weight_decay = false;
    bool maximize = false;
};

/// Averaged SGD. The state `ax` holds the averaged parameters. Unlike torch.optim, where a new rate has
/// effect one step later, every step uses the rate of that step.
struct asgd {
    double rate = 1e-2;
    double decay_term = 1e-4;   ///< lambd
    double power = 0.75;        ///< alpha
    double average_from = 1e6;  ///< t0
    double weight_decay = 0;
    bool maximize = false;
};

/// The rule of torch.optim.SparseAdam, which adds epsilon before it corrects the bias. In flat parameters,
/// all elements take part in each step.
struct sparse_adam {
    double rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    bool maximize = false;
};

using optimizer = std::variant<sgd, adagrad, adadelta, rmsprop, rprop, adam, adamw, adamax, nadam, radam,
                               asgd, sparse_adam, rowwise_adagrad>;

/// The rule's name with the version of its arithmetic and state, such as "adam/1". Saved state names it.
std::string_view rule_name(const optimizer& settings) noexcept;

double rate_of(const optimizer& settings) noexcept;
/// The same settings with another rate, for schedules.
optimizer with_rate(optimizer settings, double rate) noexcept;

/// Checks the settings of a rule.
/// @throws invalid_argument for a number that is not finite or outside the rule's range. Ranges are those of
/// torch.optim, but rprop needs 0 <= min_step <= max_step, asgd needs decay_term and average_from from 0 on,
/// and sparse_adam allows a rate and an epsilon of 0. flat_parameters and embedding_table also refuse betas
/// above 1 - 2^-20, and for nadam a beta1 too close to 1 with a large momentum_decay.
void check_settings(const optimizer& settings);

}  // namespace pinflow
