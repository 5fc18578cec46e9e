#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bytes.hpp"
#include "child_process.hpp"
#include "devices.hpp"
#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "temporary_folder.hpp"
#include "tensors.hpp"

// Batches as tensors, which share the lease.
using namespace pinflow;

namespace {

using exported_tensor = dlpack::exported_tensor<>;

constexpr std::uint64_t row_count = 1000;
constexpr std::uint64_t width = 16;

loader_options options_for(const device& device, unsigned slots = 4) {
    return {.device = device,
            .batch_rows = 10,
            .order = order::shuffled,
            .slots = slots,
            .pin_budget_bytes = generous_pin_budget};
}

/// Whether a tensor of numbered rows still holds these rows.
bool holds(const exported_tensor& tensor, const std::vector<std::uint64_t>& ids, stream_view stream) {
    const auto bytes = bytes_of_tensor(tensor->dl_tensor, stream);
    std::vector<std::uint64_t> elements(bytes.size() / sizeof(std::uint64_t));
    std::memcpy(elements.data(), bytes.data(), bytes.size());
    if (elements.size() != ids.size() * width) return false;
    for (std::size_t i = 0; i < elements.size(); ++i) {
        if (elements[i] != ids[i / width]) return false;
    }
    return true;
}

std::vector<std::uint64_t> ids_of(const batch& batch) {
    return {batch.row_ids().begin(), batch.row_ids().end()};
}

std::string message_of_next(loader& loader, stream_view stream) {
    try {
        loader.next(stream);
    } catch (const all_slots_leased& error) {
        return error.what();
    }
    return "";
}

}  // namespace

TEST_CASE("dlpack: a batch is a tensor at the same address on its device") {
    const array rows = numbered_rows(row_count, width);
    on_each_device([&](const device& device) {
        const stream stream(device);
        loader loader({rows}, options_for(device));
        auto batch = loader.next(stream);
        REQUIRE(batch);
        const exported_tensor exported = to_dlpack(*batch, 0, stream);
        const dlpack::tensor& elements = exported->dl_tensor;
        CHECK(elements.data == static_cast<const void*>((*batch)[0].data()));
        CHECK(elements.device.device_type ==
              (device.kind() == device_kind::host ? dlpack::device_type::cpu : dlpack::device_type::cuda));
        CHECK(elements.device.device_id == device.index());
        REQUIRE(elements.ndim == 2);
        CHECK(elements.shape[0] == 10);
        CHECK(elements.shape[1] == width);
        CHECK(elements.strides[0] == width);
        CHECK(elements.strides[1] == 1);
        CHECK(exported->flags == 0);
        CHECK(holds(exported, ids_of(*batch), stream));
        CHECK(to_dlpack<dlpack::managed_tensor>(*batch, 0, stream)->dl_tensor.data == elements.data);
    });
}

TEST_CASE("dlpack: tensors kept while the loader goes on keep their rows, wherever they are released") {
    const array rows = numbered_rows(row_count, width);
    on_each_device([&](const device& device) {
        const stream stream(device);
        loader_options options = options_for(device, 6);
        options.epochs = 5;
        std::optional<loader> loader;
        loader.emplace(std::vector<std::shared_ptr<const row_source>>{rows}, options);
        struct kept_tensor {
            exported_tensor exported;
            std::vector<std::uint64_t> ids;
        };
        std::deque<kept_tensor> kept;
        std::uint64_t delivered = 0;
        while (auto batch = loader->next(stream)) {
            kept.push_back({to_dlpack(*batch, 0, stream), ids_of(*batch)});
            delivered += batch->row_count();
            batch.reset();
            if (kept.size() <= 3) continue;
            REQUIRE(holds(kept.front().exported, kept.front().ids, stream));
            if (delivered % 20 == 0) {
                std::thread([last = std::move(kept.front().exported)]() mutable { last.reset(); }).join();
            }
            kept.pop_front();
        }
        CHECK(delivered == 5 * row_count);
        loader.reset();
        for (const kept_tensor& each : kept)
            CHECK(holds(each.exported, each.ids, stream));
    });
}

TEST_CASE("dlpack: the lease ends with the last of the batch and its tensors") {
    const array rows = numbered_rows(row_count, width);
    on_each_device([&](const device& device) {
        const stream stream(device);
        loader loader({rows}, options_for(device, 2));
        auto first = loader.next(stream);
        auto second = loader.next(stream);
        REQUIRE(first);
        REQUIRE(second);
        exported_tensor one = to_dlpack(*first, 0, stream);
        exported_tensor other = to_dlpack(*first, 0, stream);
        const std::vector<std::uint64_t> ids = ids_of(*first);

        const std::string all_batches = message_of_next(loader, stream);
        CHECK(all_batches.find("all 2") != std::string::npos);
        CHECK(all_batches.find("held by tensors") == std::string::npos);
        first->release();
        CHECK(first->row_count() == 0);
        CHECK(message_of_next(loader, stream).find("1 of them held by tensors") != std::string::npos);
        one.reset();
        CHECK(message_of_next(loader, stream).find("1 of them held by tensors") != std::string::npos);
        CHECK(holds(other, ids, stream));
        other.reset();
        auto third = loader.next(stream);
        REQUIRE(third);
        const std::string again = message_of_next(loader, stream);
        CHECK(again.find("all 2") != std::string::npos);
        CHECK(again.find("held by tensors") == std::string::npos);

        // assigning to a batch releases it
        one = to_dlpack(*second, 0, stream);
        second = std::move(third);
        CHECK(message_of_next(loader, stream).find("1 of them held by tensors") != std::string::npos);
        one.reset();
        CHECK(loader.next(stream));
    });
}

TEST_CASE("dlpack: a slot is not filled again before the streams of its tensors have passed" *
          blocks_a_stream) {
    const array rows = numbered_rows(row_count, width);
    on_each_device([&](const device& device) {
        const stream first(device);
        const stream second(device);
        loader loader({rows}, options_for(device, 2));
        const gate gate;
        // pinned, because a copy to pageable memory would block this thread until `second` reaches it
        const pinned_buffer seen(10 * width * sizeof(std::uint64_t), device);
        std::vector<std::uint64_t> ids;
        {
            auto batch = loader.next(first);
            REQUIRE(batch);
            ids = ids_of(*batch);
            const exported_tensor exported = to_dlpack(*batch, 0, second);
            batch->release();
            hold(second, gate);
            copy_to_host_async(seen.bytes(), static_cast<const std::byte*>(exported->dl_tensor.data), second);
        }
        // the other slot is filled again and again meanwhile
        for (int i = 0; i < 5; ++i) {
            const auto batch = loader.next(first);
            REQUIRE(batch);
            CHECK(holds_its_rows(*batch, first));
        }
        gate.open();
        second.synchronize();
        std::vector<std::uint64_t> elements(10 * width);
        std::memcpy(elements.data(), seen.data(), elements.size() * sizeof(std::uint64_t));
        for (std::size_t i = 0; i < elements.size(); ++i)
            REQUIRE(elements[i] == ids[i / width]);
    });
}

TEST_CASE("dlpack: the owner of a stream lives until the lease ends") {
    const array rows = numbered_rows(row_count, width);
    on_each_device([&](const device& device) {
        loader loader({rows}, options_for(device));
        std::optional<stream> used(device);
        auto owner = std::make_shared<std::shared_ptr<const void>>(used->share());
        const std::weak_ptr<std::shared_ptr<const void>> watched = owner;
        auto batch = loader.next();
        REQUIRE(batch);
        const stream_view view = *used;
        batch->used_on(view, owner);
        batch->used_on(view, std::move(owner));
        exported_tensor exported = to_dlpack(*batch, 0);
        const std::vector<std::uint64_t> ids = ids_of(*batch);
        batch->release();
        used.reset();
        CHECK_FALSE(watched.expired());
        const stream other(device);
        CHECK(holds(exported, ids, other));
        exported.reset();
        CHECK(watched.expired());
        for (int i = 0; i < 10; ++i)
            CHECK(loader.next(other));
    });
}

TEST_CASE("dlpack: without a stream, a batch on a GPU is exported only if a stream uses it already") {
    const array rows = numbered_rows(row_count, width);
    on_each_device([&](const device& device) {
        const stream stream(device);
        loader loader({rows}, options_for(device));
        auto batch = loader.next();
        REQUIRE(batch);
        if (device.kind() == device_kind::host) {
            CHECK_NOTHROW(to_dlpack(*batch, 0));
        } else {
            CHECK_THROWS_AS(to_dlpack(*batch, 0), invalid_argument);
            batch->used_on(stream);
            CHECK_NOTHROW(to_dlpack(*batch, 0));
        }
        auto next = loader.next(stream);
        REQUIRE(next);
        CHECK_NOTHROW(to_dlpack(*next, 0));
    });
}

TEST_CASE("dlpack: views of a source are read-only") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(row_count, width).view());
    loader_options options = options_for(device::host());
    options.order = order::sequential;
    options.route = route::direct;
    const array mapped = open_npy(folder / "rows.npy");
    exported_tensor exported;
    std::vector<std::uint64_t> ids;
    const stream stream(device::host());
    {
        loader loader({mapped}, options);
        auto batch = loader.next();
        REQUIRE(batch);
        ids = ids_of(*batch);
        exported = to_dlpack(*batch, 0);
        CHECK(exported->dl_tensor.data == static_cast<const void*>(mapped.view().data()));
        CHECK_THROWS_AS(to_dlpack<dlpack::managed_tensor>(*batch, 0), unsupported);
    }
    CHECK(exported->flags == dlpack::flag_read_only);
    CHECK(holds(exported, ids, stream));
}

TEST_CASE("dlpack: what cannot be exported is refused, and changes nothing") {
    const array rows = numbered_rows(row_count, width);
    const array times = array_of<std::int64_t>(std::vector<std::int64_t>(row_count), {row_count})
                            .view_as(dtype::parse("<M8[ns]"));
    on_each_device([&](const device& device) {
        const stream stream(device);
        loader loader({rows, times}, options_for(device, 2));
        auto batch = loader.next(stream);
        REQUIRE(batch);
        CHECK_THROWS_AS(to_dlpack(*batch, 2, stream), invalid_argument);
        CHECK_THROWS_AS(to_dlpack(*batch, 1, stream), unsupported);
        if (device.kind() == device_kind::cuda) {
            const pinflow::stream host_stream(device::host());
            CHECK_THROWS_AS(to_dlpack(*batch, 0, host_stream), invalid_argument);
        }
        batch->release();
        CHECK_THROWS_AS(to_dlpack(*batch, 0, stream), invalid_argument);
        CHECK_THROWS_AS(to_dlpack(*batch, 0), invalid_argument);
        // no refused tensor holds a slot
        for (int i = 0; i < 5; ++i)
            CHECK(loader.next(stream));
    });
}

TEST_CASE("dlpack: tensors deleted in a forked child change nothing for the parent") {
    const array rows = numbered_rows(row_count, width);
    on_each_device([&](const device& device) {
        const stream stream(device);
        loader loader({rows}, options_for(device, 3));
        auto batch = loader.next(stream);
        REQUIRE(batch);
        exported_tensor exported = to_dlpack(*batch, 0, stream);
        const std::vector<std::uint64_t> ids = ids_of(*batch);
        CHECK(holds_in_child([&] {
            batch->release();
            exported.reset();
            return true;
        }));
        batch->release();
        for (int i = 0; i < 5; ++i)
            CHECK(loader.next(stream));
        CHECK(holds(exported, ids, stream));
    });
}
