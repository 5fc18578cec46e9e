#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define PINFLOW_DETAIL_HOST_DEVICE __host__ __device__
#else
#define PINFLOW_DETAIL_HOST_DEVICE
#endif

/// The update rules of optimizers, for the host and for CUDA. Both give the same bits, except in NaNs: only
/// operations are used whose results IEEE 754 defines (+ - * / sqrt floor), and host_flat.cpp, flat.cu,
/// host_records.cpp and records.cu, which evaluate the rules, are compiled without contraction to fused
/// multiply-adds.
///
/// Rules follow torch.optim's implementation for single tensors (PyTorch 2.11). But ASGD uses the rate of the
/// current step, and centered RMSprop takes a variance below 0 as 0. What a rule needs in one step is
/// prepared once, in double, from the step's number and the group's settings. `update` then does each element
/// in float or double.
namespace pinflow::detail {

// ---- settings of a group, in device memory ---------------------------------------------------------------

/// base^step for every step, made on the host: low[i] is base^i, high[i] is base^(i * low_count).
struct power_table {
    static constexpr std::uint64_t low_count = 1024;

    const double* low = nullptr;
    const double* high = nullptr;
    std::uint64_t high_count = 0;  ///< higher powers are below 2^-1000, and count as 0
};

PINFLOW_DETAIL_HOST_DEVICE inline double power_of(const power_table& table, std::uint64_t step) {
    const std::uint64_t high = step / power_table::low_count;
    return high < table.high_count ? table.low[step % power_table::low_count] * table.high[high] : 0.0;
}

/// A group's numbers. Those that its rule does not use are not read.
struct rule_numbers {
    double rate = 0;  ///< lr
    double weight_decay = 0;
    bool decoupled = false;  ///< decay multiplies the parameter by 1 - rate * weight_decay, instead of
                             ///< joining the gradient
    bool maximize = false;
    bool nesterov = false;
    double momentum = 0;
    double dampening = 0;
    double beta1 = 0;
    double beta2 = 0;
    double epsilon = 0;
    double rho = 0;               ///< Adadelta: rho; RMSprop: alpha
    double rate_decay = 0;        ///< Adagrad: lr_decay
    double initial_sum = 0;       ///< Adagrad: initial_accumulator_value
    double shrink = 0;            ///< Rprop: etas[0]
    double grow = 0;              ///< Rprop: etas[1]
    double min_step = 0;          ///< Rprop: step_sizes[0]
    double max_step = 0;          ///< Rprop: step_sizes[1]
    double decay_term = 0;        ///< ASGD: lambd
    double power = 0;             ///< ASGD: alpha
    double average_from = 0;      ///< ASGD: t0
    bool epsilon_inside = false;  ///< SparseAdam: epsilon is added before the bias is corrected

    power_table beta1_powers;
    power_table beta2_powers;
    double momentum_decay = 0;  ///< NAdam
    /// NAdam: momentum_products[step] is the product of its momenta up to that step; beyond the end, 0.
    const double* momentum_products = nullptr;
    std::uint64_t momentum_product_count = 0;
};

// ---- functions that the rules share ----------------------------------------------------------------------

PINFLOW_DETAIL_HOST_DEVICE inline float root(float value) {
    return sqrtf(value);
}
PINFLOW_DETAIL_HOST_DEVICE inline double root(double value) {
    return sqrt(value);
}
/// The larger of both; NaN if one is NaN.
template <typename Real>
PINFLOW_DETAIL_HOST_DEVICE inline Real larger(Real a, Real b) {
    return a <= b ? b : a > b ? a : a + b;
}
/// torch.lerp(mean, value, share), with `kept` = 1 - share. As in torch, it is computed from `mean` if share
/// is below 0.5, otherwise from `value`.
template <typename Real>
PINFLOW_DETAIL_HOST_DEVICE inline Real moved(Real mean, Real value, Real share, Real kept) {
    const Real difference = value - mean;
    return share < Real(0.5) ? mean + share * difference : value - kept * difference;
}
/// -1, 0 or 1; NaN for NaN.
template <typename Real>
PINFLOW_DETAIL_HOST_DEVICE inline Real sign_of(Real value) {
    return value > 0 ? Real(1) : value < 0 ? Real(-1) : value * 0;
}
template <typename Real>
PINFLOW_DETAIL_HOST_DEVICE inline Real magnitude(Real value) {
    return value < 0 ? -value : value;
}

PINFLOW_DETAIL_HOST_DEVICE inline double double_of(std::uint64_t bits) {
    double value = 0;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/// value^exponent, for a normal value above 0. Powers below e^-700 count as 0. The relative error is some
/// 1e-15, and up to 1e-13 for results near e^-700. Replaces pow, whose last bit differs between host and
/// device.
PINFLOW_DETAIL_HOST_DEVICE inline double real_power(double value, double exponent) {
    constexpr double ln2_high = 0x1.62e42fee00000p-1;
    constexpr double ln2_low = 0x1.a39ef35793c76p-33;
    // value = mantissa * 2^binary, with the mantissa in [sqrt(1/2), sqrt(2))
    std::uint64_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    auto binary = static_cast<double>(static_cast<std::int64_t>(bits >> 52) - 1023);
    double mantissa = double_of((bits & 0xFFFFFFFFFFFFFU) | 0x3FF0000000000000U);
    if (mantissa > 0x1.6a09e667f3bcdp0) {
        mantissa /= 2;
        binary += 1;
    }
    // log(mantissa) = 2 atanh(s)
    const double s = (mantissa - 1) / (mantissa + 1);
    double series = 0;
    for (int term = 23; term >= 3; term -= 2)
        series = series * (s * s) + 1.0 / term;
    const double logarithm = binary * ln2_high + (2 * s + (2 * s * (s * s) * series + binary * ln2_low));
    const double exponential = exponent * logarithm;
    if (exponential < -700) return 0;
    // e^x = 2^k e^rest
    const double k = floor(exponential / 0x1.62e42fefa39efp-1 + 0.5);
    const double rest = (exponential - k * ln2_high) - k * ln2_low;
    double sum = 1;
    for (int term = 16; term >= 1; --term)
        sum = sum * rest / term + 1;
    return sum * double_of(static_cast<std::uint64_t>(static_cast<std::int64_t>(k) + 1023) << 52);
}

/// What every rule does with a gradient before its own update: torch's `maximize` and `weight_decay`.
template <typename Real>
struct decay_step {
    Real added = 0;   ///< weight_decay, if it joins the gradient
    Real factor = 1;  ///< of the parameter, if decay is decoupled
    Real sign = 1;    ///< of the gradient
};

template <typename Real>
PINFLOW_DETAIL_HOST_DEVICE inline decay_step<Real> prepare_decay(const rule_numbers& numbers) {
    decay_step<Real> step;
    if (numbers.decoupled) {
        step.factor = static_cast<Real>(1 - numbers.rate * numbers.weight_decay);
    } else {
        step.added = static_cast<Real>(numbers.weight_decay);
    }
    step.sign = numbers.maximize ? Real(-1) : Real(1);
    return step;
}

template <typename Real>
PINFLOW_DETAIL_HOST_DEVICE inline void apply_decay(const decay_step<Real>& step, Real& parameter,
                                                   Real& gradient) {
    gradient *= step.sign;
    gradient = step.added != 0 ? gradient + step.added * parameter : gradient;
    parameter *= step.factor;
}

// ---- the rules -------------------------------------------------------------------------------------------
//
// state_count: numbers kept for each element (rowwise_adagrad: for each row), all of which are 0 before the
// first step. `prepare` makes what a step needs; `number` counts from 1.

/// torch.optim.SGD. State: the momentum buffer, if there is momentum.
template <bool Momentum>
struct sgd_rule {
    static constexpr unsigned state_count = Momentum ? 1 : 0;
    template <typename Real>
    struct step {
        Real rate, momentum, share;
        bool nesterov;
    };
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t number) {
        // the first buffer is the gradient itself
        const double share = number == 1 ? 1 : 1 - numbers.dampening;
        return {static_cast<Real>(numbers.rate), static_cast<Real>(numbers.momentum),
                static_cast<Real>(share), numbers.nesterov};
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        if constexpr (Momentum) {
            state[0] = state[0] * now.momentum + gradient * now.share;
            gradient = now.nesterov ? gradient + state[0] * now.momentum : state[0];
        }
        parameter -= now.rate * gradient;
    }
};

/// torch.optim.Adagrad. State: the sum of squares and of initial_accumulator_value.
struct adagrad_rule {
    static constexpr unsigned state_count = 1;
    template <typename Real>
    struct step {
        Real rate, epsilon, initial;
    };
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t number) {
        const double rate = numbers.rate / (1 + static_cast<double>(number - 1) * numbers.rate_decay);
        const double initial = number == 1 ? numbers.initial_sum : 0;
        return {static_cast<Real>(rate), static_cast<Real>(numbers.epsilon), static_cast<Real>(initial)};
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        state[0] = state[0] + now.initial + gradient * gradient;
        parameter -= now.rate * gradient / (root(state[0]) + now.epsilon);
    }
};

/// torchrec.optim.RowWiseAdagrad. State: the sum of the mean squares of a row's gradients. `add_mean_square`
/// adds those of a step before `update` is called.
struct rowwise_adagrad_rule {
    static constexpr unsigned state_count = 1;
    template <typename Real>
    using step = adagrad_rule::step<Real>;
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t number) {
        return adagrad_rule::prepare<Real>(numbers, number);
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static Real add_mean_square(const step<Real>& now, Real sum, Real squares,
                                                           std::uint64_t columns) {
        return sum + now.initial + squares / static_cast<Real>(columns);
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        parameter -= now.rate * gradient / (root(state[0]) + now.epsilon);
    }
};

/// torch.optim.Adadelta. State: the mean square of gradients, and that of updates.
struct adadelta_rule {
    static constexpr unsigned state_count = 2;
    template <typename Real>
    struct step {
        Real rate, rho, share, epsilon;
    };
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t) {
        return {static_cast<Real>(numbers.rate), static_cast<Real>(numbers.rho),
                static_cast<Real>(1 - numbers.rho), static_cast<Real>(numbers.epsilon)};
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        state[0] = state[0] * now.rho + now.share * gradient * gradient;
        const Real change = root(state[1] + now.epsilon) / root(state[0] + now.epsilon) * gradient;
        state[1] = state[1] * now.rho + now.share * change * change;
        parameter -= now.rate * change;
    }
};

/// torch.optim.RMSprop. State: the mean square, the mean gradient if centered, the buffer if there is
/// momentum.
template <bool Centered, bool Momentum>
struct rmsprop_rule {
    static constexpr unsigned state_count = 1 + (Centered ? 1 : 0) + (Momentum ? 1 : 0);
    template <typename Real>
    struct step {
        Real rate, alpha, share, epsilon, momentum;
    };
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t) {
        return {static_cast<Real>(numbers.rate), static_cast<Real>(numbers.rho),
                static_cast<Real>(1 - numbers.rho), static_cast<Real>(numbers.epsilon),
                static_cast<Real>(numbers.momentum)};
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        state[0] = state[0] * now.alpha + now.share * gradient * gradient;
        Real mean_square = state[0];
        if constexpr (Centered) {
            state[1] = moved(state[1], gradient, now.share, now.alpha);
            // rounding may make it negative
            mean_square = larger(mean_square - state[1] * state[1], Real(0));
        }
        const Real average = root(mean_square) + now.epsilon;
        if constexpr (Momentum) {
            Real& buffer = state[state_count - 1];
            buffer = buffer * now.momentum + gradient / average;
            parameter -= now.rate * buffer;
        } else {
            parameter -= now.rate * gradient / average;
        }
    }
};

/// torch.optim.Rprop. State: the last gradient, and the size of the step, which is the rate at first.
struct rprop_rule {
    static constexpr unsigned state_count = 2;
    template <typename Real>
    struct step {
        Real shrink, grow, min_step, max_step, initial;
    };
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t number) {
        const double initial = number == 1 ? numbers.rate : 0;
        return {static_cast<Real>(numbers.shrink), static_cast<Real>(numbers.grow),
                static_cast<Real>(numbers.min_step), static_cast<Real>(numbers.max_step),
                static_cast<Real>(initial)};
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        const Real agreement = gradient * state[0];
        const Real factor = agreement > 0 ? now.grow : agreement < 0 ? now.shrink : Real(1);
        const Real size = (state[1] + now.initial) * factor;
        state[1] = size < now.min_step ? now.min_step : size > now.max_step ? now.max_step : size;
        if (agreement < 0) gradient = 0;
        parameter -= sign_of(gradient) * state[1];
        state[0] = gradient;
    }
};

/// torch.optim.Adam, AdamW (decoupled) and SparseAdam (epsilon_inside). State: the means of gradients and of
/// their squares, and the largest of the latter for amsgrad.
template <bool Amsgrad>
struct adam_rule {
    static constexpr unsigned state_count = Amsgrad ? 3 : 2;
    template <typename Real>
    struct step {
        Real beta1, share1, beta2, share2, size, inverse_root, epsilon;
    };
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t number) {
        const double correction1 = 1 - power_of(numbers.beta1_powers, number);
        const double root2 = sqrt(1 - power_of(numbers.beta2_powers, number));
        const double size = numbers.rate / correction1;
        const bool inside = numbers.epsilon_inside;
        return {static_cast<Real>(numbers.beta1),
                static_cast<Real>(1 - numbers.beta1),
                static_cast<Real>(numbers.beta2),
                static_cast<Real>(1 - numbers.beta2),
                static_cast<Real>(inside ? size * root2 : size),
                static_cast<Real>(inside ? 1.0 : 1 / root2),
                static_cast<Real>(numbers.epsilon)};
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        state[0] = moved(state[0], gradient, now.share1, now.beta1);
        state[1] = state[1] * now.beta2 + now.share2 * gradient * gradient;
        Real square = state[1];
        if constexpr (Amsgrad) square = state[2] = larger(state[2], square);
        parameter -= now.size * state[0] / (root(square) * now.inverse_root + now.epsilon);
    }
};

/// torch.optim.Adamax. State: the mean gradient, and the decaying maximum.
struct adamax_rule {
    static constexpr unsigned state_count = 2;
    template <typename Real>
    struct step {
        Real beta1, share1, beta2, size, epsilon;
    };
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t number) {
        const double correction1 = 1 - power_of(numbers.beta1_powers, number);
        return {static_cast<Real>(numbers.beta1), static_cast<Real>(1 - numbers.beta1),
                static_cast<Real>(numbers.beta2), static_cast<Real>(numbers.rate / correction1),
                static_cast<Real>(numbers.epsilon)};
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        state[0] = moved(state[0], gradient, now.share1, now.beta1);
        state[1] = larger(state[1] * now.beta2, magnitude(gradient) + now.epsilon);
        parameter -= now.size * state[0] / state[1];
    }
};

/// torch.optim.NAdam. State: the means of gradients and of their squares.
struct nadam_rule {
    static constexpr unsigned state_count = 2;
    template <typename Real>
    struct step {
        Real beta1, share1, beta2, share2, inverse_root, epsilon, gradient_size, mean_size;
    };
    PINFLOW_DETAIL_HOST_DEVICE static double momentum_at(const rule_numbers& numbers, std::uint64_t number) {
        return numbers.beta1 *
               (1 - 0.5 * real_power(0.96, static_cast<double>(number) * numbers.momentum_decay));
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t number) {
        const double momentum = momentum_at(numbers, number);
        const double next = momentum_at(numbers, number + 1);
        const double product =
            number < numbers.momentum_product_count ? numbers.momentum_products[number] : 0.0;
        const double root2 = sqrt(1 - power_of(numbers.beta2_powers, number));
        return {static_cast<Real>(numbers.beta1),
                static_cast<Real>(1 - numbers.beta1),
                static_cast<Real>(numbers.beta2),
                static_cast<Real>(1 - numbers.beta2),
                static_cast<Real>(1 / root2),
                static_cast<Real>(numbers.epsilon),
                static_cast<Real>(numbers.rate * (1 - momentum) / (1 - product)),
                static_cast<Real>(numbers.rate * next / (1 - product * next))};
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        state[0] = moved(state[0], gradient, now.share1, now.beta1);
        state[1] = state[1] * now.beta2 + now.share2 * gradient * gradient;
        const Real denominator = root(state[1]) * now.inverse_root + now.epsilon;
        parameter -= now.gradient_size * gradient / denominator;
        parameter -= now.mean_size * state[0] / denominator;
    }
};

/// torch.optim.RAdam. State: the means of gradients and of their squares.
struct radam_rule {
    static constexpr unsigned state_count = 2;
    template <typename Real>
    struct step {
        Real beta1, share1, beta2, share2, size, epsilon;
        bool adapts;
    };
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t number) {
        const double power2 = power_of(numbers.beta2_powers, number);
        const double correction1 = 1 - power_of(numbers.beta1_powers, number);
        const double correction2 = 1 - power2;
        const double limit = 2 / (1 - numbers.beta2) - 1;
        const double length = limit - 2 * static_cast<double>(number) * power2 / correction2;
        const bool adapts = length > 5;
        double size = numbers.rate / correction1;
        if (adapts) {
            const double rectified =
                sqrt((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length));
            size *= rectified * sqrt(correction2);
        }
        return {static_cast<Real>(numbers.beta1),
                static_cast<Real>(1 - numbers.beta1),
                static_cast<Real>(numbers.beta2),
                static_cast<Real>(1 - numbers.beta2),
                static_cast<Real>(size),
                static_cast<Real>(numbers.epsilon),
                adapts};
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        state[0] = moved(state[0], gradient, now.share1, now.beta1);
        state[1] = state[1] * now.beta2 + now.share2 * gradient * gradient;
        parameter -= now.size * state[0] / (now.adapts ? root(state[1]) + now.epsilon : Real(1));
    }
};

/// torch.optim.ASGD. State: the averaged parameter.
struct asgd_rule {
    static constexpr unsigned state_count = 1;
    template <typename Real>
    struct step {
        Real rate, factor, share;
    };
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static step<Real> prepare(const rule_numbers& numbers, std::uint64_t number) {
        const auto past = static_cast<double>(number - 1);
        const double rate =
            number == 1
                ? numbers.rate
                : numbers.rate / real_power(1 + numbers.decay_term * numbers.rate * past, numbers.power);
        const double averaged = number == 1 ? 1 : past - numbers.average_from;
        return {static_cast<Real>(rate), static_cast<Real>(1 - numbers.decay_term * rate),
                static_cast<Real>(averaged > 1 ? 1 / averaged : 1.0)};
    }
    template <typename Real>
    PINFLOW_DETAIL_HOST_DEVICE static void update(const step<Real>& now, Real& parameter, Real gradient,
                                                  Real* state) {
        parameter = parameter * now.factor - now.rate * gradient;
        state[0] = now.share == 1 ? parameter : state[0] + now.share * (parameter - state[0]);
    }
};

// ---- choosing --------------------------------------------------------------------------------------------

/// Every rule, with the options that change its state.
enum class rule_kind : std::uint8_t {
    sgd,
    sgd_momentum,
    adagrad,
    adadelta,
    rmsprop,
    rmsprop_centered,
    rmsprop_momentum,
    rmsprop_centered_momentum,
    rprop,
    adam,
    adam_amsgrad,
    adamax,
    nadam,
    radam,
    asgd,
    rowwise_adagrad,  ///< for embedding tables only
};
inline constexpr unsigned rule_kinds = 16;
inline constexpr unsigned max_rule_states = 3;

/// Calls visit(rule) with an object of the rule's type.
template <typename Visitor>
auto visit_rule(rule_kind kind, Visitor visit) {
    switch (kind) {
        case rule_kind::sgd:
            return visit(sgd_rule<false>{});
        case rule_kind::sgd_momentum:
            return visit(sgd_rule<true>{});
        case rule_kind::adagrad:
            return visit(adagrad_rule{});
        case rule_kind::adadelta:
            return visit(adadelta_rule{});
        case rule_kind::rmsprop:
            return visit(rmsprop_rule<false, false>{});
        case rule_kind::rmsprop_centered:
            return visit(rmsprop_rule<true, false>{});
        case rule_kind::rmsprop_momentum:
            return visit(rmsprop_rule<false, true>{});
        case rule_kind::rmsprop_centered_momentum:
            return visit(rmsprop_rule<true, true>{});
        case rule_kind::rprop:
            return visit(rprop_rule{});
        case rule_kind::adam_amsgrad:
            return visit(adam_rule<true>{});
        case rule_kind::adamax:
            return visit(adamax_rule{});
        case rule_kind::nadam:
            return visit(nadam_rule{});
        case rule_kind::radam:
            return visit(radam_rule{});
        case rule_kind::asgd:
            return visit(asgd_rule{});
        case rule_kind::rowwise_adagrad:
            return visit(rowwise_adagrad_rule{});
        case rule_kind::adam:
            break;
    }
    return visit(adam_rule<false>{});
}

}  // namespace pinflow::detail

#undef PINFLOW_DETAIL_HOST_DEVICE
