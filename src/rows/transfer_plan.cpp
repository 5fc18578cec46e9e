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

}  // namespace pinflow::detail
