#include "pinflow/loader/state.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "loader/state_origin.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/core/system.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;

namespace {

loader_state some_state() {
    loader_state state;
    state.order = {"windowed/1", ~std::uint64_t{0}, 4096, 50'000, 0xFEDCBA9876543210};
    state.epoch = 3;
    state.position = 49'999;
    state.data.row_count = 50'000;
    state.data.arrays = {{"'images.npy'", "<f4", {3, 224, 224}, 1},
                         {"'labels.npy'", "[('a', '<i8')]", {}, 2}};
    return state;
}

std::string quoted_key(const std::string& key) {
    return '"' + key + '"';
}

bool same(const loader_state& a, const loader_state& b) {
    const auto same_array = [](const array_fingerprint& x, const array_fingerprint& y) {
        return x.description == y.description && x.dtype == y.dtype && x.row_shape == y.row_shape &&
               x.hash == y.hash;
    };
    return a.order == b.order && a.epoch == b.epoch && a.position == b.position &&
           a.data.row_count == b.data.row_count &&
           std::ranges::equal(a.data.arrays, b.data.arrays, same_array);
}

void write(const std::filesystem::path& path, std::string_view text) {
    std::ofstream(path, std::ios::binary) << text;
}

std::string content_of(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

/// The error for a file with the content `text`.
template <typename Failure>
std::string refusal(const std::string& text) {
    const temporary_folder folder;
    write(folder / "state.json", text);
    try {
        static_cast<void>(loader_state::load(folder / "state.json"));
    } catch (const Failure& failure) {
        return failure.what();
    }
    return "it was not refused";
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

std::uint64_t hash_of(const std::shared_ptr<const row_source>& source) {
    return detail::fingerprint_of(std::span(&source, 1)).arrays[0].hash;
}

}  // namespace

TEST_CASE("state: is the same after JSON, and after a file") {
    const temporary_folder folder;
    loader_state empty;
    for (const loader_state& state : {some_state(), empty}) {
        CHECK(same(loader_state::from_json(state.to_json()), state));
        state.save(folder / "state.json");
        CHECK(same(loader_state::load(folder / "state.json"), state));
        CHECK(content_of(folder / "state.json") == state.to_json());
    }
}

TEST_CASE("state: version 1 is this text for ever") {
    const std::string text = R"({
  "pinflow_loader_state": 1,
  "order": {
    "name": "windowed/1",
    "seed": 18446744073709551615,
    "window_rows": 4096,
    "position_count": 50000,
    "content": "fedcba9876543210"
  },
  "epoch": 3,
  "position": 49999,
  "data": {
    "row_count": 50000,
    "arrays": [
      {
        "description": "'images.npy'",
        "dtype": "<f4",
        "row_shape": [
          3,
          224,
          224
        ],
        "hash": "0000000000000001"
      },
      {
        "description": "'labels.npy'",
        "dtype": "[('a', '<i8')]",
        "row_shape": [],
        "hash": "0000000000000002"
      }
    ]
  }
}
)";
    CHECK(some_state().to_json() == text);
    CHECK(same(loader_state::from_json(text), some_state()));
}

TEST_CASE("state: a path that is no UTF-8 does not keep it from being saved") {
    loader_state state = some_state();
    state.data.arrays[0].description = "'\xFF\x80.npy'";
    const loader_state read = loader_state::from_json(state.to_json());
    CHECK(read.data.arrays[0].hash == state.data.arrays[0].hash);
    CHECK(read.data.arrays[0].description != state.data.arrays[0].description);
}

TEST_CASE("state: a file appears complete or not at all, and what was there before stays until then") {
    const temporary_folder folder;
    const auto path = folder / "state.json";
    write(path, "what was there before");
    for (const detail::system::call failing :
         {detail::system::call::open_unnamed, detail::system::call::write, detail::system::call::fsync,
          detail::system::call::rename}) {
        CAPTURE(static_cast<int>(failing));
        {
            const detail::system::scoped_failure_hook hook([&](detail::system::call what, std::string_view) {
                return detail::system::injected_failure{.error = what == failing ? ENOSPC : 0};
            });
            CHECK_THROWS_AS(some_state().save(path), system_failure);
        }
        CHECK(content_of(path) == "what was there before");
        CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
    }
    some_state().save(path);
    CHECK(same(loader_state::load(path), some_state()));
    CHECK_THROWS_AS(some_state().save(folder / "missing" / "state.json"), system_failure);
}

TEST_CASE("state: a damaged file is reported in a sentence with its path") {
    const auto damaged = [](const char* from, const char* to) {
        std::string text = some_state().to_json();
        text.replace(text.find(from), std::string_view(from).size(), to);
        return refusal<format_error>(text);
    };
    CHECK(contains(refusal<format_error>(""), "it is not JSON"));
    // two values for one key are ambiguous, at any depth
    for (const char* const key : {"epoch", "seed", "hash"}) {
        std::string text = some_state().to_json();
        const std::string quoted = quoted_key(key);
        text.insert(text.find(quoted), quoted + ": 1, ");
        CHECK(contains(refusal<format_error>(text), "the key '" + std::string(key) + "' twice"));
    }
    CHECK(contains(refusal<format_error>("{"),
                   "state.json': cannot read the state of a loader: it is not JSON"));
    CHECK(contains(refusal<format_error>("[1, 2]"), "it is not a JSON object"));
    CHECK(contains(refusal<format_error>(std::string(100'000, '[')), "it is not JSON"));
    CHECK(contains(damaged("\"pinflow_loader_state\"", "\"something\""),
                   "\"pinflow_loader_state\" is missing"));
    CHECK(contains(damaged("49999", "50000"), "\"position\" is 50000, which is not below the 50000"));
    CHECK(contains(damaged("49999", "-1"), "\"position\" is not a whole number"));
    CHECK(contains(damaged("49999", "1.0"), "\"position\" is not a whole number"));
    CHECK(contains(damaged("49999", "18446744073709551616"), "\"position\" is not a whole number"));
    CHECK(contains(damaged("49999", "1e999"), "it is not JSON"));
    CHECK(contains(damaged("\"epoch\"", "\"epochs\""), "\"epoch\" is missing"));
    CHECK(contains(damaged("fedcba9876543210", "fedcba987654321g"), "\"content\" is not 16 hexadecimal"));
    CHECK(contains(damaged("fedcba9876543210", "fedcba98765432"), "\"content\" is not 16 hexadecimal"));
    CHECK(contains(damaged("fedcba9876543210", "-edcba9876543210"), "\"content\" is not 16 hexadecimal"));
    CHECK(contains(damaged("\"windowed/1\"", "7"), "\"name\" is not a string"));
    CHECK(contains(damaged("\"windowed/1\"", "\"\\u001b[31m\""),
                   "'\\x1b[31m', has characters that are not printable"));
    CHECK(contains(damaged("224", "\"224\""), "\"row_shape\" is not a whole number"));
    CHECK(contains(damaged("[\n          3", "3, \"x\": [ 3"), "\"row_shape\" is not an array"));
    CHECK(contains(damaged("\"arrays\": [", "\"arrays\": [ 5,"), "an array is not described by an object"));
    CHECK(contains(damaged("\"data\": {", "\"data\": [], \"x\": {"), "\"data\" is not an object"));
    CHECK(contains(refusal<format_error>(std::string((std::size_t{16} << 20) + 1, ' ')),
                   "it has 16777217 bytes, and a state has at most 16777216"));
    CHECK_THROWS_AS(loader_state::load("missing.json"), system_failure);
    CHECK_THROWS_WITH_AS(loader_state::load("/tmp"),
                         "'/tmp': cannot read the state of a loader: it is a folder, not a file",
                         format_error);
}

TEST_CASE("state: a state of a newer pinflow is distinguished from a damaged state") {
    nlohmann::json object = nlohmann::json::parse(some_state().to_json());
    object["pinflow_loader_state"] = 2;
    const std::string sentence = refusal<unsupported>(object.dump());
    CHECK(contains(sentence, "state.json': "));
    CHECK(contains(sentence, "version 2, and this build of pinflow reads version 1"));
}

TEST_CASE("state: bytes that are missing or flipped never do more than throw") {
    const std::string text = some_state().to_json();
    std::mt19937_64 random(1);
    const auto try_to_read = [](const std::string& damaged) {
        try {
            static_cast<void>(loader_state::from_json(damaged));
        } catch (const error& failure) {
            CHECK(std::string_view(failure.what()).starts_with("cannot read the state of a loader"));
        }
    };
    for (std::size_t size = 0; size < text.size(); ++size)
        try_to_read(text.substr(0, size));
    for (int i = 0; i < 3000; ++i) {
        std::string damaged = text;
        for (std::uint64_t flips = 1 + random() % 3; flips > 0; --flips)
            damaged[random() % damaged.size()] = static_cast<char>(random());
        try_to_read(damaged);
    }
}

TEST_CASE("state: a copy has the same fingerprint, wherever and however it is stored") {
    const temporary_folder folder;
    write_random_rows(folder / "rows.npy", 1000, 16, 1);
    std::filesystem::copy_file(folder / "rows.npy", folder / "copy.npy");
    write_random_rows(folder / "other.npy", 1000, 16, 2);
    const std::shared_ptr<const row_source> rows = open_npy(folder / "rows.npy");
    const std::shared_ptr<const row_source> copy = open_npy(folder / "copy.npy");
    const std::shared_ptr<const row_source> other = open_npy(folder / "other.npy");
    CHECK(hash_of(rows) == hash_of(copy));
    CHECK(hash_of(rows) != hash_of(other));
    // in memory, without a file
    CHECK(hash_of(numbered_rows(100)) == hash_of(std::make_shared<scripted_rows>(100)));
}

TEST_CASE("state: the fingerprint samples all rows of small data, and 16 rows spread over larger data") {
    for (const std::uint64_t count : {1U, 2U, 15U, 16U, 17U, 31U, 1000U}) {
        CAPTURE(count);
        // all rows of small data; of large data, rows from everywhere
        std::vector<std::uint64_t> rows(count);
        unsigned seen = 0;
        const std::uint64_t before = hash_of(array_of(rows, {count}));
        std::uint64_t first_seen = count;
        std::uint64_t last_seen = 0;
        for (std::uint64_t row = 0; row < count; ++row) {
            rows[row] = 1;
            if (hash_of(array_of(rows, {count})) != before) {
                ++seen;
                first_seen = std::min(first_seen, row);
                last_seen = row;
            }
            rows[row] = 0;
        }
        CHECK(seen == std::min<std::uint64_t>(count, 16));
        CHECK(first_seen <= count / 16);
        CHECK(last_seen + count / 16 + 1 >= count);
    }
    CHECK(hash_of(numbered_rows(0)) == hash_of(numbered_rows(0)));
    CHECK(hash_of(array_of<float>({}, {10, 0})) == hash_of(array_of<float>({}, {20, 0})));
    // only two rows of 8 MiB are sampled, so three equal rows have the hash of two
    CHECK(hash_of(array_of<std::uint8_t>(std::vector<std::uint8_t>(3 << 23), {3, 1 << 23})) ==
          hash_of(array_of<std::uint8_t>(std::vector<std::uint8_t>(2 << 23), {2, 1 << 23})));
}

TEST_CASE("state: is refused for other data, another order, seed or window, in a sentence that names both") {
    const array rows = numbered_rows(100);
    const loader_options shuffled{
        .device = device::host(), .batch_rows = 10, .order = order::shuffled, .seed = 5};
    const auto state_of = [](std::vector<std::shared_ptr<const row_source>> sources,
                             const loader_options& options) {
        loader loader(std::move(sources), options);
        return loader.next()->state();
    };
    const loader_state saved = state_of({rows}, shuffled);
    const auto refusal_of = [&](std::vector<std::shared_ptr<const row_source>> sources,
                                loader_options options, const loader_state& state) -> std::string {
        options.resume_from = state;
        try {
            const loader loader(std::move(sources), options);
        } catch (const invalid_argument& failure) {
            return failure.what();
        }
        return "it was not refused";
    };
    CHECK(refusal_of({rows}, shuffled, saved) == "it was not refused");

    CHECK(contains(refusal_of({numbered_rows(101)}, shuffled, saved),
                   "saved with 100 rows (an array in memory), and this loader has 101 (an array in memory)"));
    CHECK(contains(refusal_of({rows, rows}, shuffled, saved), "1 arrays (an array in memory), and"));
    CHECK(contains(refusal_of({numbered_rows(100, 5)}, shuffled, saved), "of shape (4,)"));
    CHECK(contains(refusal_of({numbered_rows(100, 5)}, shuffled, saved), "of shape (5,)"));
    std::vector<std::int64_t> words(400);
    CHECK(contains(refusal_of({array_of(words, {100, 4})}, shuffled, saved), "<i8"));
    std::vector<std::uint64_t> others(400);
    CHECK(contains(refusal_of({array_of(others, {100, 4})}, shuffled, saved),
                   "rows of an array in memory are not those of an array in memory"));

    loader_options other = shuffled;
    other.seed = 6;
    const std::string seeds = refusal_of({rows}, other, saved);
    CHECK(contains(seeds, "seed 5"));
    CHECK(contains(seeds, "seed 6"));
    other = shuffled;
    other.order = order::sequential;
    other.seed = 0;
    const std::string orders = refusal_of({rows}, other, saved);
    CHECK(contains(orders, "shuffled/1"));
    CHECK(contains(orders, "sequential/1"));
    other = shuffled;
    other.order = order::windowed;
    other.window_rows = 32;
    const loader_state windowed = state_of({rows}, other);
    other.window_rows = 64;
    const std::string windows = refusal_of({rows}, other, windowed);
    CHECK(contains(windows, "windows of 32 rows"));
    CHECK(contains(windows, "windows of 64 rows"));

    loader_options listed{.device = device::host(), .batch_rows = 2};
    listed.sampler = sampler::listed(100, {1, 2, 3, 4, 5});
    const loader_state of_list = state_of({rows}, listed);
    CHECK(refusal_of({rows}, listed, of_list) == "it was not refused");
    listed.sampler = sampler::listed(100, {1, 2, 3, 5, 4});
    CHECK(contains(refusal_of({rows}, listed, of_list), "the order differs"));
}

TEST_CASE("state: resumes with another device, route, batch size, shard or tail") {
    on_each_device([](const device& device) {
        const array rows = numbered_rows(100);
        loader_options options{.device = device::host(), .batch_rows = 10, .order = order::shuffled};
        options.resume_from = loader({rows}, options).next()->state();
        options.device = device;
        options.batch_rows = 7;
        options.shard = {1, 2};
        options.tail = tail::drop;
        options.route = route::staged;
        loader resumed({rows}, options);
        CHECK(resumed.batch_total() == 6);
        std::vector<std::uint64_t> expected(7);
        sampler::shuffled(100, 0).rows_at(0, 17, expected);
        const auto batch = resumed.next();
        REQUIRE(batch);
        CHECK(std::ranges::equal(batch->row_ids(), expected));
    });
}

TEST_CASE("state: batches have a state, and a loader has one from its beginning to its end") {
    on_each_device([](const device& device) {
        const loader_options options{
            .device = device, .batch_rows = 10, .order = order::shuffled, .epochs = 2};
        loader loader({numbered_rows(25)}, options);
        const auto resume_position = [](const loader_state& state) {
            return std::pair(state.epoch, state.position);
        };
        using place = std::pair<std::uint64_t, std::uint64_t>;
        CHECK(resume_position(loader.state()) == place(0, 0));
        for (const place& expected : {place(0, 10), place(0, 20), place(1, 0), place(1, 10)}) {
            auto batch = loader.next();
            REQUIRE(batch);
            CHECK(resume_position(batch->state()) == expected);
            CHECK(resume_position(loader.state()) == expected);
            CHECK(batch->last_of_epoch() == (expected == place(1, 0)));
            batch->release();
            CHECK_THROWS_AS(batch->state(), invalid_argument);
            CHECK_FALSE(batch->last_of_epoch());
        }
        while (loader.next()) {
        }
        CHECK(resume_position(loader.state()) == place(2, 0));
    });
    // a rank without a part in the tail is at the end as well, once next has returned nothing
    loader first({numbered_rows(11)}, {.device = device::host(), .batch_rows = 5, .shard = {0, 2}});
    std::optional<batch> last;
    while (auto batch = first.next()) {
        CHECK_FALSE(last.has_value());
        last = std::move(batch);
    }
    REQUIRE(last);
    CHECK(last->state().position == 10);
    CHECK(first.state().epoch == 1);
}

TEST_CASE("state: outlives its loader with the batch, and may be asked for by several threads") {
    std::optional<batch> kept;
    {
        loader loader({numbered_rows(100)}, {.device = device::host(), .batch_rows = 10});
        kept = loader.next();
    }
    REQUIRE(kept);
    std::vector<std::string> texts(4);
    std::vector<std::thread> threads;
    for (std::string& text : texts)
        threads.emplace_back([&] { text = kept->state().to_json(); });
    for (std::thread& thread : threads)
        thread.join();
    for (const std::string& text : texts) {
        CHECK(text == texts[0]);
        CHECK(loader_state::from_json(text).position == 10);
    }
}

TEST_CASE("state: data that has changed is an error of its own type") {
    const auto source = std::make_shared<scripted_rows>(100);
    bool changed = false;
    source->on_check = [&] {
        if (changed) throw data_changed("changed by the test");
    };
    loader loader({source}, {.device = device::host(), .batch_rows = 100});
    const auto batch = loader.next();
    REQUIRE(batch);
    CHECK_FALSE(loader.next().has_value());  // the pipeline is done
    changed = true;
    CHECK_THROWS_AS(batch->state(), data_changed);
    changed = false;
    CHECK(batch->state().epoch == 1);
}
