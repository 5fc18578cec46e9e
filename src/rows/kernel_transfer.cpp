#include <algorithm>

#include "src/device/backend.hpp"
#include "src/rows/call_transfer.hpp"
#include "src/rows/exchange_checks.hpp"
#include "src/rows/route_plan.hpp"

namespace pinflow::detail {

void move_by_kernel(const exchange_setup& setup, const row_call& call, row_transfer transfer,
                    stream_view stream) {
    device_backend& backend = setup.device.backend();
    const call_request& request = call.request();
    const bool sum = !call.is_gather() && request.policy == duplicate_policy::sum;
    // the plan does not depend on the policy or the addresses of the batches, so correct it here
    const bool is_busy = sum || !is_aligned(transfer);
    if (is_busy && transfer.blocks != 0 && setup.options.blocks == 0) {
        const unsigned blocks = busy_blocks(setup.facts_of({request.direction, call.count()}));
        transfer.blocks = std::max(transfer.blocks, blocks);
    }
    if (call.is_gather()) return backend.gather_rows(transfer, stream.native_handle());
    backend.scatter_rows(transfer, sum ? repeated_rows::sum : repeated_rows::last,
                         sum ? sum_type_of(setup.table.element()) : sum_type::float32,
                         stream.native_handle());
}

namespace {

class kernel_transfer final : public call_transfer {
 public:
    explicit kernel_transfer(const exchange_setup& setup) : setup_(setup) {}

    void move(row_call& call, std::uint64_t begin, std::uint64_t end) override {
        row_transfer transfer = call.transfer();
        transfer.begin = begin;
        transfer.end = end;
        move_by_kernel(setup_, call, transfer, call.stream());
    }

 private:
    const exchange_setup& setup_;
};

}  // namespace

std::unique_ptr<call_transfer> make_kernel_transfer(const exchange_setup& setup) {
    return std::make_unique<kernel_transfer>(setup);
}

}  // namespace pinflow::detail
