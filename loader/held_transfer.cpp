#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "loader/array_transfer.hpp"
#include "pinflow/array.hpp"
#include "pinflow/memory.hpp"
#include "src/device/pin_limits.hpp"

namespace pinflow::detail {

namespace {

/// Reads all rows of an array with the loader's threads. Stops early if the loader stops.
void read_all(const row_reader& reader, std::byte* destination, const std::function<bool()>& is_stopped) {
    constexpr std::uint64_t task_bytes = std::uint64_t{1} << 20;
    const row_source& source = reader.source();
    const std::uint64_t row_count = source.row_size_bytes() == 0 ? 0 : source.row_count();
    const std::uint64_t task_rows =
        std::max<std::uint64_t>(1, task_bytes / std::max<std::uint64_t>(1, source.row_size_bytes()));
    tbb::parallel_for(std::uint64_t{0}, (row_count + task_rows - 1) / task_rows, [&](std::uint64_t task) {
        if (is_stopped()) return;
        std::vector<std::uint64_t> ids(std::min(task_rows, row_count - task * task_rows));
        std::iota(ids.begin(), ids.end(), task * task_rows);
        read_session session;
        static_cast<void>(reader.read(ids, destination + ids[0] * source.row_size_bytes(), session));
    });
    source.check_unchanged();
}

std::string reason_of(const sample_array& array) {
    return fmt::format("{}, {}", array.plan.reason,
                       in_binary_units(array.source->row_count() * array.row_bytes()));
}

/// Holds rows in the loader's own host memory.
class host_held_transfer final : public array_transfer {
 public:
    host_held_transfer(sample_array planned, const loader_setup& setup)
        : array_transfer(std::move(planned)), is_stopped_(setup.is_stopped) {}

    void begin() override {
        const row_source& source = *array().source;
        auto memory = memory_region::anonymous(source.row_count() * source.row_size_bytes());
        read_all(row_reader(array().source, row_access::memory), memory.data(), is_stopped_);
        shape_vector shape = source.row_shape();
        shape.insert(shape.begin(), source.row_count());
        reader_.emplace(pinflow::array(std::move(memory), source.dtype(), std::move(shape)).rows(),
                        row_access::memory);
    }
    void prepare(slot& filling, slot_group& group) override {
        if (array().row_bytes() == 0) return;
        group.jobs.push_back({&filling, &*reader_, filling.row_ids, device_rows(filling)});
    }
    std::string reason() const override { return reason_of(array()); }
    bool needs_cpu() const override { return true; }

 private:
    std::function<bool()> is_stopped_;
    std::optional<row_reader> reader_;
};

/// Holds rows in device memory: see device_held.
class device_held_transfer final : public array_transfer {
 public:
    device_held_transfer(sample_array planned, loader_setup setup)
        : array_transfer(std::move(planned)), setup_(std::move(setup)) {}

    void begin() override {
        const row_source& source = *array().source;
        const pinned_buffer staging(source.row_count() * source.row_size_bytes(), setup_.device);
        const stream upload(setup_.device);  // its end comes before that of the memory it copies from
        read_all(row_reader(array().source, row_access::memory), staging.data(), setup_.is_stopped);
        rows_ = device_buffer(staging.size_bytes(), upload, setup_.allocator.resource);
        copy_to_device_async(rows_.data(), staging.bytes(), upload);
        upload.synchronize();
        if (array().row_bytes() > 0)
            setup_.held->add({rows_.data(), array().row_bytes(), array().offset_bytes});
    }
    void prepare(slot& /*filling*/, slot_group& /*group*/) override {}
    std::string reason() const override { return reason_of(array()); }
    bool needs_cpu() const override { return false; }

 private:
    loader_setup setup_;
    device_buffer rows_;
};

}  // namespace

std::unique_ptr<array_transfer> make_held_transfer(sample_array array, const loader_setup& setup) {
    if (setup.device.kind() == device_kind::host)
        return std::make_unique<host_held_transfer>(std::move(array), setup);
    return std::make_unique<device_held_transfer>(std::move(array), setup);
}

}  // namespace pinflow::detail
