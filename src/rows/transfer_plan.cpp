#include "src/rows/transfer_plan.hpp"

namespace pinflow::detail {

std::string_view to_string(transfer transfer) noexcept {
    switch (transfer) {
        case transfer::held:
            return "held";
        case transfer::copy_engine:
            return "copy engine";
        case transfer::kernel:
            return "kernel";
        case transfer::staged:
            return "staged";
        case transfer::decode:
            return "decode";
        case transfer::read:
            return "read";
        case transfer::slot_copy:
            return "slot copy";
        case transfer::view:
            return "view";
    }
    return "unknown";
}

row_route route_of(const transfer_plan& plan) {
    const bool has_staged = plan.find(transfer::staged) != nullptr;
    if (plan.find(transfer::kernel) != nullptr) return has_staged ? row_route::hybrid : row_route::direct;
    return has_staged ? row_route::staged : row_route::copy;
}

}  // namespace pinflow::detail
