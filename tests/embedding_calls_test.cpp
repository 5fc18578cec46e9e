#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/rows.hpp"
#include "pinflow/train/embedding_table.hpp"
#include "tests/fake_cuda_backend.hpp"
#include "tests/plain_embedding_table.hpp"
#include "tests/support/child_process.hpp"
#include "tests/support/devices.hpp"

// What the calls of embedding tables refuse, when errors are thrown, and how long leases and tables live.

using namespace pinflow;

TEST_CASE("embedding table: what fails in a thread that prefetches is thrown by the fetch") {
    class failing_backend : public fake_cuda_backend {
     public:
        std::atomic<bool> fails = false;

        // a table on a GPU gathers rows that are being written, which ThreadSanitizer reports
        device_kind kind() const noexcept override { return device_kind::host; }
        void gather_rows(const detail::row_transfer& transfer, void* stream) override {
            if (fails) throw device_error("injected");
            fake_cuda_backend::gather_rows(transfer, stream);
        }
    };
    failing_backend backend;
    const stream stream(backend.device());
    embedding_options options;
    options.row_count = 100;
    options.columns = 1;
    options.weights = [](std::uint64_t row, std::span<float> weights) {
        weights[0] = static_cast<float>(row);
    };
    options.max_batch_ids = 10'000;
    options.look_ahead = 2;
    options.device_rows = 100;
    embedding_table table(options, backend.device());
    plain_table expected(options);
    std::mt19937_64 random(5);
    const std::vector<float> ones(10'000, 1);
    const device_array gradients(ones, stream);
    const auto failing = random_ids(random, 100, 9000);
    const auto other = random_ids(random, 100, 10'000);
    const auto commit = [&](embedding_lease lease, const std::vector<std::uint64_t>& ids) {
        expected.step(ids, ones);
        table.commit(std::move(lease), gradients.data(), dtype::of<float>(), stream);
    };
    for (int round = 0; round < 3; ++round) {
        backend.fails = true;
        table.prefetch(failing);
        table.prefetch(failing);
        CHECK_THROWS_WITH_AS(table.fetch(failing, stream), "injected", device_error);
        table.prefetch(failing);
        table.cancel_prefetches();
        backend.fails = false;
        // the steps that have failed are used again
        embedding_lease first = table.fetch(failing, stream);
        commit(table.fetch(other, stream), other);
        commit(std::move(first), failing);
        table.prefetch(failing);
        commit(table.fetch(other, stream), other);
        commit(table.fetch(failing, stream), failing);
        CHECK(weights_of(table, all_ids(100)) == expected.weights_of(all_ids(100)));
    }
}

TEST_CASE("embedding table: an error of ids in device memory is thrown before their memory is used again") {
    class waiting_backend : public fake_cuda_backend {
     public:
        gate begun;

        device_kind kind() const noexcept override { return device_kind::host; }
        void synchronize_event(void* event) override {
            begun.open();
            fake_cuda_backend::synchronize_event(event);
        }
    };
    waiting_backend backend;
    const stream stream(backend.device());
    embedding_options options;
    options.row_count = 10;
    options.columns = 1;
    options.max_batch_ids = 2;
    options.look_ahead = 0;
    embedding_table table(options, backend.device());
    const std::vector<std::uint64_t> wrong{1, 10};
    const std::vector<std::uint64_t> right{1, 2};
    stream.synchronize();
    hold(stream, backend.begun);  // until the table waits for memory that it uses again
    for (int i = 0; i < 2; ++i)
        static_cast<void>(table.fetch(row_ids::on_device(wrong.data(), 2), stream));
    CHECK_THROWS_WITH_AS(table.fetch(right, stream), doctest::Contains("ids[1] = 10"), invalid_argument);
    stream.synchronize();
    CHECK_THROWS_WITH_AS(table.fetch(right, stream), doctest::Contains("ids[1] = 10"), invalid_argument);
    CHECK(table.fetch(right, stream).row_count() == 2);
}

TEST_CASE("embedding table: ids in device memory are refused if kernels cannot access the storage") {
    class unreached_backend : public fake_cuda_backend {
     public:
        detail::page_locker* locker() override { return nullptr; }
        bool reaches(const std::byte*, std::uint64_t) override { return false; }
    };
    unreached_backend backend;
    const stream stream(backend.device());
    embedding_options options;
    options.row_count = 10;
    options.columns = 1;
    options.max_batch_ids = 2;
    embedding_table table(options, backend.device());
    const std::vector<std::uint64_t> ids{1, 2};
    CHECK_THROWS_WITH_AS(table.fetch(row_ids::on_device(ids.data(), 2), stream),
                         doctest::Contains("cannot access the storage"), unsupported);
    CHECK(table.fetch(ids, stream).row_count() == 2);
    std::vector<std::byte> rows(64);
    CHECK_FALSE(row_exchange(row_table(rows, 16), backend.device()).is_in_place());
}

TEST_CASE("embedding table: a stream that is being captured into a graph is refused, and gets no event") {
    class capturing_backend : public fake_cuda_backend {
     public:
        unsigned captured_events = 0;

        void record_event(void* event, void* stream) override {
            captured_events += stream == captured ? 1U : 0U;
            fake_cuda_backend::record_event(event, stream);
        }
    };
    capturing_backend backend;
    const stream stream(backend.device());
    embedding_options options;
    options.row_count = 10;
    options.columns = 1;
    options.max_batch_ids = 2;
    embedding_table table(options, backend.device());
    const std::vector<std::uint64_t> ids{1, 2};
    embedding_lease lease = table.fetch(ids, stream);
    backend.captured = stream.view().native_handle();
    CHECK_THROWS_AS(table.fetch(ids, stream), unsupported);
    CHECK_THROWS_AS(table.fetch(row_ids::on_device(ids.data(), 2), stream), unsupported);
    CHECK_THROWS_AS(table.write_back(std::move(lease), stream), unsupported);
    CHECK(backend.captured_events == 0);
    backend.captured = nullptr;
    CHECK(lease.is_valid());
    table.write_back(std::move(lease), stream);
    CHECK_FALSE(lease.is_valid());
    table.synchronize();  // on a GPU, gathers read rows that are being written
    CHECK(table.fetch(ids, stream).row_count() == 2);
}

TEST_CASE("embedding table: leases dropped during a capture lose their memory, and hinder no other call") {
    fake_cuda_backend backend;
    const stream stream(backend.device());
    embedding_options options;
    options.row_count = 10;
    options.columns = 1;
    options.max_batch_ids = 2;
    options.look_ahead = 0;
    embedding_table table(options, backend.device());
    const std::vector<std::uint64_t> ids{1, 2};
    const auto lose = [&] {
        const embedding_lease lease = table.fetch(ids, stream);
        backend.captured = stream.view().native_handle();
        return lease.row_count();  // drops it
    };
    lose();
    backend.captured = nullptr;
    const std::vector<float> weights{3, 4};
    table.write_weights(ids, std::as_bytes(std::span(weights)));
    std::vector<float> found(2);
    table.read_weights(ids, std::as_writable_bytes(std::span(found)));
    CHECK(found == weights);
    table.grow(20);
    {
        const embedding_lease lease = table.fetch(ids, stream);
        stream.synchronize();
        CHECK(*reinterpret_cast<const float*>(lease.weights()) == 3);
        CHECK_THROWS_AS(table.write_weights(ids, std::as_bytes(std::span(weights))), invalid_argument);
    }
    lose();
    backend.captured = nullptr;
    CHECK_THROWS_WITH_AS(table.fetch(ids, stream),
                         "cannot fetch or prefetch: all 2 steps of the embedding table are in use (2 lost): "
                         "commit or drop leases, "
                         "fetch what was prefetched, or cancel the prefetches",
                         all_slots_leased);
}

TEST_CASE("embedding table: in a forked process calls are refused, and a table can be destroyed") {
    embedding_options options;
    options.row_count = 100;
    options.columns = 1;
    options.max_batch_ids = 10'000;
    const stream stream(device::host());
    std::optional<embedding_table> table(std::in_place, options, device::host());
    std::mt19937_64 random(3);
    const auto ids = random_ids(random, 100, 9000);
    table->prefetch(ids);
    static_cast<void>(table->fetch(ids, stream));  // from here on, a thread waits for the next prefetch
    stream.synchronize();
    gate gate;
    hold(stream, gate);
    static_cast<void>(table->fetch(ids, stream));  // work that the streams have not passed
    CHECK(holds_in_child([&] {
        ::alarm(20);
        bool right = true;
        const auto is_refused = [&](auto call) {
            try {
                call();
                right = false;
            } catch (const device_error&) {
            }
        };
        is_refused([&] { table->prefetch(ids); });
        is_refused([&] { static_cast<void>(table->fetch(ids, stream)); });
        is_refused([&] { table->cancel_prefetches(); });
        table.reset();
        return right;
    }));
    gate.open();
    table->prefetch(ids);
    CHECK(table->fetch(ids, stream).row_count() != 0);
}

TEST_CASE("embedding table: a lease has each row once, and the row of every position") {
    on_each_device([&](const device& device) {
        embedding_options options;
        options.row_count = 100;
        options.columns = 3;
        options.weights = [](std::uint64_t row, std::span<float> weights) {
            std::ranges::fill(weights, static_cast<float>(row));
        };
        embedding_table table(options, device);
        const stream stream(device);
        const std::vector<std::uint64_t> ids{7, 99, 7, 0, 42, 99, 7};
        const embedding_lease lease = table.fetch(ids, stream);
        const std::vector<std::uint64_t> different{0, 7, 42, 99};
        CHECK(std::ranges::equal(lease.ids(), different));
        CHECK(lease.row_count() == 4);
        const pinned_buffer host(1000, device);
        copy_to_host_async(host.bytes().first(7 * 8), reinterpret_cast<const std::byte*>(lease.positions()),
                           stream);
        copy_to_host_async(host.bytes().subspan(100, 4 * lease.stride_bytes()), lease.weights(), stream);
        stream.synchronize();
        for (std::size_t i = 0; i < ids.size(); ++i) {
            std::int64_t row = -1;
            std::memcpy(&row, host.data() + i * 8, 8);
            REQUIRE(row >= 0);
            REQUIRE(row < 4);
            float weight = -1;
            std::memcpy(&weight,
                        host.data() + 100 + static_cast<std::uint64_t>(row) * lease.stride_bytes() + 8, 4);
            CHECK(weight == static_cast<float>(ids[i]));
        }
    });
}

TEST_CASE("embedding table: wrong ids, leases and options are refused, and nothing has moved") {
    on_each_device([&](const device& device) {
        embedding_options options;
        options.row_count = 10;
        options.columns = 4;
        options.max_batch_ids = 4;
        embedding_table table(options, device);
        embedding_table other(options, device);
        const stream stream(device);
        const std::vector<std::uint64_t> wrong{1, 10, 12};
        CHECK_THROWS_WITH_AS(table.fetch(wrong, stream), doctest::Contains("ids[1] = 10"), invalid_argument);
        CHECK_THROWS_AS(table.prefetch(wrong), invalid_argument);
        const std::vector<std::int64_t> negative{-1};
        CHECK_THROWS_WITH_AS(table.fetch(negative, stream), doctest::Contains("-1"), invalid_argument);
        const std::vector<std::uint64_t> many(5, 1);
        CHECK_THROWS_AS(table.fetch(many, stream), invalid_argument);
        const std::vector<std::uint64_t> ids{1, 2};
        if (device.kind() == device_kind::host) {
            // more refused calls than the table has steps: each gives its step back
            for (int i = 0; i < 40; ++i)
                CHECK_THROWS_AS(table.fetch(ids, stream_view(device, nullptr)), invalid_argument);
        }
        table.prefetch(ids);
        CHECK_THROWS_AS(table.prefetch(ids), invalid_argument);
        const std::span<const std::uint64_t> nowhere(static_cast<const std::uint64_t*>(nullptr), ids.size());
        CHECK_THROWS_AS(table.fetch(nowhere, stream), invalid_argument);
        embedding_lease lease = table.fetch(ids, stream);
        const std::byte* const weights = lease.weights();
        CHECK_THROWS_AS(other.commit(std::move(lease), weights, dtype::of<float>(), stream),
                        invalid_argument);
        embedding_lease second = table.fetch(ids, stream);
        CHECK_THROWS_AS(table.commit(std::move(second), nullptr, dtype::of<float>(), stream),
                        invalid_argument);
        CHECK(weights_of(table, all_ids(10)) == std::vector<std::byte>(160));
        for (embedding_lease* const refused : {&lease, &second}) {
            CHECK(refused->is_valid());
            const embedding_lease dropped = std::move(*refused);
        }
        // all steps are leased
        std::vector<embedding_lease> leases;
        for (int i = 0; i < 4; ++i)
            leases.push_back(table.fetch(ids, stream));
        CHECK_THROWS_AS(table.fetch(ids, stream), all_slots_leased);
        leases.clear();
        CHECK(table.fetch(ids, stream).row_count() == 2);

        for (const auto& [rows, columns] : {std::pair<std::uint64_t, std::uint64_t>(0, 4), {4, 0}}) {
            embedding_options bad = options;
            bad.row_count = rows;
            bad.columns = columns;
            CHECK_THROWS_AS(embedding_table(bad, device), invalid_argument);
        }
        embedding_options bad = options;
        bad.type = dtype::of<double>();
        CHECK_THROWS_AS(embedding_table(bad, device), unsupported);
        bad = options;
        bad.device_rows = 11;
        CHECK_THROWS_AS(embedding_table(bad, device), invalid_argument);
        bad = options;
        std::vector<std::byte> memory(160);
        bad.storage.emplace(memory, 16);
        CHECK_THROWS_AS(embedding_table(bad, device), invalid_argument);
    });
}

TEST_CASE("embedding table: leases of several streams commit in turn, and rows are written back") {
    on_each_device([&](const device& device) {
        embedding_options options;
        options.row_count = 40;
        options.columns = 5;
        options.rule = sgd{.rate = 1};
        options.max_batch_ids = 20;
        for (const unsigned look_ahead : {0U, 2U}) {
            options.look_ahead = look_ahead;
            plain_table expected(options);
            embedding_table table(options, device);
            const stream first(device), second(device);
            std::mt19937_64 random(9);
            std::deque<device_array> gradients;
            const auto commit = [&](embedding_lease lease, const std::vector<std::uint64_t>& ids,
                                    stream_view on) {
                const auto values = random_gradients(random, ids.size() * options.columns);
                expected.step(ids, values);
                gradients.emplace_back(values, on);
                table.commit(std::move(lease), gradients.back().data(), dtype::of<float>(), on);
            };
            for (int round = 0; round < 30; ++round) {
                const auto ids = random_ids(random, options.row_count, 20);
                const auto others = random_ids(random, options.row_count, 20);
                embedding_lease lease = table.fetch(ids, first);
                embedding_lease other = table.fetch(others, second);
                commit(std::move(lease), ids, second);
                if (round % 3 == 2) {
                    {
                        const embedding_lease dropped = std::move(other);
                    }
                    table.write_back(table.fetch(others, first), second);
                } else {
                    commit(std::move(other), others, first);
                }
            }
            CHECK(weights_of(table, all_ids(40)) == expected.weights_of(all_ids(40)));
            first.synchronize();
            second.synchronize();
        }
    });
}

TEST_CASE("embedding table: a new rate is that of later commits, on any stream") {
    on_each_device([&](const device& device) {
        embedding_options options;
        options.row_count = 4;
        options.columns = 2;
        options.rule = sgd{.rate = 1};
        embedding_table table(options, device);
        const stream first(device), second(device);
        const std::vector<std::uint64_t> ids{0, 1, 2, 3};
        const device_array ones(std::vector<float>(8, 1.0F), first);
        first.synchronize();
        table.commit(table.fetch(ids, first), ones.data(), dtype::of<float>(), first);
        table.set_rate(0.25, second);
        table.commit(table.fetch(ids, first), ones.data(), dtype::of<float>(), first);
        const auto bytes = weights_of(table, ids);
        for (std::size_t i = 0; i < bytes.size(); i += 4) {
            float weight = 0;
            std::memcpy(&weight, &bytes[i], 4);
            CHECK(weight == -1.25F);
        }
        CHECK(rate_of(table.options().rule) == 0.25);
        CHECK_THROWS_AS(table.set_rate(-1, first), invalid_argument);
    });
}

TEST_CASE("embedding table: the rate set last stays, even if an earlier one is set late on another stream") {
    embedding_options options;
    options.row_count = 2;
    options.columns = 1;
    options.rule = sgd{.rate = 1.0};
    options.max_batch_ids = 1;
    const stream late(device::host());
    const stream stream(device::host());
    embedding_table table(options, device::host());
    const std::vector<float> ones(1, 1);
    gate gate;
    hold(late, gate);
    table.set_rate(0.5, late);
    table.set_rate(0.25, stream);
    gate.open();
    late.synchronize();
    stream.synchronize();
    const std::vector<std::uint64_t> ids{1};
    table.commit(table.fetch(ids, stream), reinterpret_cast<const std::byte*>(ones.data()),
                 dtype::of<float>(), stream);
    stream.synchronize();
    float weight = 0;
    table.read_weights(ids, std::as_writable_bytes(std::span(&weight, 1)));
    CHECK(weight == -0.25F);
}

TEST_CASE("embedding table: while a lease is kept, 1 + 2 * look_ahead others can be committed") {
    on_each_device([&](const device& device) {
        for (const unsigned look_ahead : {0U, 1U, 2U}) {
            embedding_options options;
            options.row_count = 30;
            options.columns = 4;
            options.max_batch_ids = 10;
            options.look_ahead = look_ahead;
            const stream stream(device);
            embedding_table table(options, device);
            const device_array gradients(std::vector<float>(40, 1), stream);
            const std::vector<std::uint64_t> ids(10, 3);
            std::optional<embedding_lease> kept = table.fetch(ids, stream);
            for (unsigned step = 0; step < 1 + 2 * look_ahead; ++step)
                table.commit(table.fetch(ids, stream), gradients.data(), dtype::of<float>(), stream);
            CHECK_THROWS_WITH_AS(table.fetch(ids, stream), doctest::Contains("(1 by leases, "),
                                 all_slots_leased);
            kept.reset();
            table.commit(table.fetch(ids, stream), gradients.data(), dtype::of<float>(), stream);
            stream.synchronize();  // it may not have copied the gradients yet
        }
    });
}

TEST_CASE("embedding table: prefetches are cancelled, and leases outlive the table") {
    on_each_device([&](const device& device) {
        embedding_options options;
        options.row_count = 30;
        options.columns = 4;
        options.max_batch_ids = 10;
        options.look_ahead = 2;
        const stream stream(device);
        std::optional<embedding_table> table(std::in_place, options, device);
        std::mt19937_64 random(1);
        const device_array gradients(random_gradients(random, 40), stream);
        for (int round = 0; round < 20; ++round) {
            const auto a = random_ids(random, 30, 10), b = random_ids(random, 30, 10),
                       c = random_ids(random, 30, 10);
            table->prefetch(a);
            table->prefetch(b);
            table->commit(table->fetch(c, stream), gradients.data(), dtype::of<float>(), stream);
            table->cancel_prefetches();
        }
        const auto ids = random_ids(random, 30, 10);
        const embedding_lease lease = table->fetch(ids, stream);
        table.reset();
        CHECK(lease.position_count() == 10);
        stream.synchronize();
    });
}

TEST_CASE("embedding table: a table continues from the records in its storage") {
    on_each_device([&](const device& device) {
        embedding_options options;
        options.row_count = 64;
        options.columns = 8;
        options.weights = uniform_weights(-1, 1, 5);
        options.max_batch_ids = 32;
        plain_table expected(options);
        const pinned_buffer memory(options.row_count * embedding_table::record_size_bytes(options), device);
        options.storage.emplace(memory.bytes(), embedding_table::record_size_bytes(options));
        const stream stream(device);
        std::mt19937_64 random(3);
        for (int part = 0; part < 3; ++part) {
            embedding_table table(options, device);
            for (int step = 0; step < 4; ++step) {
                const auto ids = random_ids(random, options.row_count, 32);
                const auto values = random_gradients(random, ids.size() * options.columns);
                const device_array gradients(values, stream);
                expected.step(ids, values);
                table.commit(table.fetch(ids, stream), gradients.data(), dtype::of<float>(), stream);
                table.synchronize();
                stream.synchronize();
            }
            options.keeps_records = true;
            CHECK(weights_of(table, all_ids(64)) == expected.weights_of(all_ids(64)));
        }
    });
}

TEST_CASE(
    "embedding table: random weights are the same for the same seed and row, and have the wanted moments") {
    std::vector<float> first(1000), second(1000);
    uniform_weights(-2, 3, 7)(5, first);
    uniform_weights(-2, 3, 7)(5, second);
    CHECK(first == second);
    uniform_weights(-2, 3, 7)(6, second);
    CHECK(first != second);
    CHECK(*std::ranges::min_element(first) >= -2);
    CHECK(*std::ranges::max_element(first) < 3);
    double sum = 0, squares = 0;
    constexpr int rows = 200;
    for (int row = 0; row < rows; ++row) {
        normal_weights(1, 2, 9)(static_cast<std::uint64_t>(row), first);
        for (const float weight : first) {
            sum += weight;
            squares += (weight - 1.0) * (weight - 1.0);
        }
    }
    CHECK(sum / (rows * 1000) == doctest::Approx(1).epsilon(0.02));
    CHECK(squares / (rows * 1000) == doctest::Approx(4).epsilon(0.02));
    CHECK_THROWS_AS(uniform_weights(1, 0, 1), invalid_argument);
    CHECK_THROWS_AS(normal_weights(0, -1, 1), invalid_argument);
}
