#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "pinflow/train/optimizer.hpp"
#include "src/device/update_rules.hpp"

namespace pinflow::detail {

/// Which rule an optimizer is, and the names of its states in torch.optim.
struct rule_layout {
    rule_kind kind = rule_kind::adam;
    std::vector<std::string_view> states;
    bool is_rowwise = false;  ///< each state has one number for a row, not for an element
};

/// Settings of one rule can have different layouts: see rule_kind.
rule_layout layout_of(const optimizer& settings);

/// The numbers of one group, with all pointers null.
rule_numbers numbers_of(const optimizer& settings);

/// The tables that the pointers of rule_numbers refer to, for all groups of an object. They hold every step
/// until the powers vanish, so they never grow.
class rule_tables {
 public:
    /// Appends the tables of the next group.
    /// @throws invalid_argument for betas so close to 1 that a table would be too large.
    void add(const optimizer& settings);
    const std::vector<double>& elements() const noexcept { return elements_; }
    /// Sets the pointers in the numbers of group `group`, for a copy of `elements` at `base`.
    void point(rule_numbers& numbers, std::size_t group, const double* base) const noexcept;

 private:
    /// Where tables begin in elements_.
    struct powers {
        std::size_t low = 0;
        std::size_t high = 0;
        std::size_t high_count = 0;
    };
    struct group_tables {
        powers beta1, beta2;
        std::size_t products = 0;
        std::size_t product_count = 0;
    };

    powers add_powers(std::string_view name, double base);

    std::vector<double> elements_;
    std::vector<group_tables> groups_;
};

}  // namespace pinflow::detail
