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

/// Reads some rows of each source to identify the data.
/// @throws as row_source::read_rows, such as data_changed.
data_fingerprint fingerprint_of(std::span<const std::shared_ptr<const row_source>> sources);

/// Makes and checks the states of one loader. The rows that identify the data are read when the first state
/// is requested or checked. Thread-safe. Batches share it, because they may outlive their loader.
class state_origin {
 public:
    state_origin(order_identity order, std::vector<std::shared_ptr<const row_source>> sources);

    /// @throws as fingerprint_of.
    loader_state state_at(const epoch_position& where) const;

    /// Checks that `saved` is a state of these data in this order.
    /// @return the position to continue from.
    /// @throws state_mismatch if it is not, otherwise as fingerprint_of.
    epoch_position resume_position(const loader_state& saved) const;

 private:
    const data_fingerprint& data() const;

    order_identity order_;
    std::vector<std::shared_ptr<const row_source>> sources_;
    mutable std::mutex mutex_;
    mutable std::optional<data_fingerprint> data_;
};

}  // namespace pinflow::detail
