#include "pinflow/loader/route.hpp"

namespace pinflow {

std::string_view to_string(route route) noexcept {
    switch (route) {
        case route::automatic:
            return "auto";
        case route::direct:
            return "direct";
        case route::copy:
            return "copy";
        case route::staged:
            return "staged";
        case route::read:
            return "read";
    }
    return "unknown";
}

}  // namespace pinflow
