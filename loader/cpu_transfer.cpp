#include <utility>

#include "loader/array_transfer.hpp"

namespace pinflow::detail {

namespace {

/// Gathers rows with the CPU. On a GPU, into staging buffers or the slot's staging side, from which the copy
/// engine copies them. On the host device, only `staged` uses the staging side; all other transfers write to
/// the device side.
class cpu_transfer final : public array_transfer {
 public:
    cpu_transfer(sample_array planned, const loader_setup& setup)
        : array_transfer(std::move(planned)),
          is_staged_(setup.device.kind() != device_kind::host || main() == transfer::staged),
          reader_(array().source, main() == transfer::read ? row_access::source : row_access::memory,
                  setup.is_in_order ? row_reader::list_order::ascending : row_reader::list_order::any) {}

    void prepare(slot& filling, slot_group& group) override {
        const std::uint64_t size_bytes = filling.row_ids.size() * array().row_bytes();
        if (size_bytes == 0) return;
        std::byte* const on_device = device_rows(filling);
        if (array().plan.is_buffered) {
            group.jobs.push_back({&filling, &reader_, filling.row_ids, nullptr, on_device});
            group.has_buffered = true;
            return;
        }
        std::byte* const target = is_staged_ ? filling.host_side + array().offset_bytes : on_device;
        group.jobs.push_back({&filling, &reader_, filling.row_ids, target, nullptr});
        if (is_staged_) group.copies.push_back({on_device, target, size_bytes});
    }
    bool needs_cpu() const override { return true; }

 private:
    bool is_staged_;
    row_reader reader_;
};

/// Batches are views of the mapping.
class view_transfer final : public array_transfer {
 public:
    using array_transfer::array_transfer;

    void prepare(slot& /*filling*/, slot_group& /*group*/) override {}
    const std::byte* data_of(const slot& filled) const override {
        const auto extents = array().source->extents();
        if (extents.empty() || extents[0].data == nullptr || filled.row_ids.empty()) return nullptr;
        return extents[0].data + filled.row_ids[0] * array().row_bytes();
    }
    bool needs_cpu() const override { return false; }
};

}  // namespace

std::unique_ptr<array_transfer> make_cpu_transfer(sample_array array, const loader_setup& setup) {
    return std::make_unique<cpu_transfer>(std::move(array), setup);
}

std::unique_ptr<array_transfer> make_view_transfer(sample_array array) {
    return std::make_unique<view_transfer>(std::move(array));
}

std::unique_ptr<array_transfer> make_transfer(sample_array array, const loader_setup& setup) {
    switch (array.plan.main()) {
        case transfer::held:
            return make_held_transfer(std::move(array), setup);
        case transfer::view:
            return make_view_transfer(std::move(array));
        case transfer::copy_engine:
            return make_engine_transfer(std::move(array), setup);
        case transfer::kernel:
            return make_gather_transfer(std::move(array), setup);
        default:
            return make_cpu_transfer(std::move(array), setup);
    }
}

}  // namespace pinflow::detail
