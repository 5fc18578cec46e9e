#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "loader/schedule.hpp"
#include "pinflow/loader/sampler.hpp"
#include "pinflow/loader/state.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow::detail {

/// Reads some rows of each source. @throws data_changed and what else row_source::read_rows throws.
data_fingerprint fingerprint_of(std::span<const std::shared_ptr<const row_source>> sources);

/// What the states of one loader have in common. The rows that tell its data from others are read when the
/// first state is asked for. Thread-safe; batches share it, as they may outlive their loader.
class state_origin {
 public:
    state_origin(order_identity order, std::vector<std::shared_ptr<const row_source>> sources);

    /// @throws as fingerprint_of.
    loader_state state_at(const epoch_position& where) const;

    /// Checks that `saved` is a state of these data in this order.
    /// @return where it continues. @throws state_mismatch when it is not; as fingerprint_of.
    epoch_position resume_position(const loader_state& saved) const;

 private:
    const data_fingerprint& data() const;

    order_identity order_;
    std::vector<std::shared_ptr<const row_source>> sources_;
    mutable std::mutex mutex_;
    mutable std::optional<data_fingerprint> data_;
};

}  // namespace pinflow::detail
