#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/system.hpp"
#include "tests/api/shared/segments.hpp"

using namespace pinflow;
namespace seam = pinflow::detail::system;

namespace {

/// Runs `work` with the first, second, ... system call failing, until it makes no further call. `check` runs
/// after each. @return how many calls failed.
template <typename Work, typename Check>
int fail_each_call(Work work, Check check) {
    for (int failing = 1;; ++failing) {
        int calls = 0;
        bool has_failed = false;
        bool threw = false;
        {
            const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
                // neither has an effect on the result
                if (what == seam::call::close || what == seam::call::madvise) return seam::injected_failure{};
                if (++calls != failing) return seam::injected_failure{};
                has_failed = true;
                return seam::injected_failure{.error = what == seam::call::fallocate ? ENOSPC : EIO};
            });
            try {
                work();
            } catch (const error& failure) {
                threw = true;
                CHECK(contains(failure.what(), "segments"));  // the folder or a path in it
            }
        }
        CAPTURE(failing);
        check(has_failed, threw);
        if (!has_failed) return failing - 1;
    }
}

}  // namespace

TEST_CASE("segments: each system call of a publisher may fail, which leaves nothing or a whole segment") {
    const test_segments segments;
    const array numbers = numbered_rows(100);
    const std::size_t descriptors = open_descriptors();
    const int calls = fail_each_call([&] { segments.publish("a", numbers); },
                                     [&](bool has_failed, bool threw) {
                                         if (!has_failed) CHECK_FALSE(threw);
                                         const auto files = segments.files();
                                         if (!files.empty()) {
                                             CHECK(files == std::vector<std::string>{"a.npy"});
                                             CHECK_NOTHROW(verify_segment("a", segments.folder()));
                                             remove_segment("a", segments.folder());
                                         }
                                         CHECK(open_descriptors() == descriptors);
                                     });
    CHECK(calls > 10);
}

TEST_CASE(
    "segments: each system call of a replacing publisher may fail, which leaves the old or the new one") {
    const test_segments segments;
    const array before = numbered_rows(100);
    const array after = numbered_rows(200);
    segments.publish("a", before);
    const named_rows old_members[] = {{"x", before.rows()}};
    const named_rows new_members[] = {{"x", after.rows()}, {"y/z", after.rows()}};
    publish_group("g", old_members, segments.options());
    const auto is_whole = [&](const std::string& name) {
        verify_segment(name, segments.folder());
        const std::uint64_t rows = segments.open(name).shape()[0];
        return rows == 100 || rows == 200;
    };
    fail_each_call([&] { segments.publish("a", after, true); }, [&](bool, bool) { CHECK(is_whole("a")); });
    CHECK(segments.open("a").shape()[0] == 200);
    fail_each_call([&] { publish_group("g", new_members, segments.options(true)); },
                   [&](bool, bool) { CHECK(is_whole("g/x")); });
    CHECK(segments.open("g/x").shape()[0] == 200);
    segments.publish("last", before);
    CHECK(segments.files() ==
          std::vector<std::string>{"a.npy", "g", "g/x.npy", "g/y", "g/y/z.npy", "last.npy"});
}

TEST_CASE("segments: each system call of a writer may fail, which leaves the lock free") {
    const test_segments segments;
    {
        writable_segment::create("a", dtype::of<float>(), {10}, segments.folder());
    }
    const std::size_t descriptors = open_descriptors();
    const int calls = fail_each_call([&] { writable_segment("a", segments.folder()); },
                                     [&](bool has_failed, bool threw) {
                                         if (!has_failed) CHECK_FALSE(threw);
                                         CHECK(open_descriptors() == descriptors);
                                         CHECK_NOTHROW(writable_segment("a", segments.folder()));
                                     });
    CHECK(calls > 8);
}

TEST_CASE("segments: each system call of a group's publisher may fail, which leaves no group") {
    const test_segments segments;
    const array numbers = numbered_rows(100);
    const named_rows members[] = {{"x", numbers.rows()}, {"y/z", numbers.rows()}};
    const std::size_t descriptors = open_descriptors();
    const int calls =
        fail_each_call([&] { publish_group("g", members, segments.options()); },
                       [&](bool, bool threw) {
                           const auto files = segments.files();
                           const auto is_visible = [](const auto& name) { return name.front() != '.'; };
                           CHECK(std::ranges::any_of(files, is_visible) != threw);
                           if (!threw) remove_segment("g", segments.folder());
                           CHECK(open_descriptors() == descriptors);
                       });
    CHECK(calls > 20);
}

TEST_CASE("segments: each system call of cleaning, listing and removing may fail, which loses no segment") {
    const test_segments segments;
    const array numbers = numbered_rows(100);
    segments.publish("a", numbers);
    segments.publish("b", numbers);
    const auto is_whole = [&](const std::string& name) {
        verify_segment(name, segments.folder());
        return true;
    };
    fail_each_call([&] { clean_segments(segments.folder()); },
                   [&](bool, bool) { CHECK((is_whole("a") && is_whole("b"))); });
    fail_each_call([&] { list_segments(segments.folder()); },
                   [&](bool, bool) { CHECK((is_whole("a") && is_whole("b"))); });
    fail_each_call([&] { remove_segment("a", segments.folder()); },
                   [&](bool, bool threw) {
                       CHECK(is_whole("b"));
                       CHECK(std::filesystem::exists(segments / "a.npy") == threw);
                       if (!threw) segments.publish("a", numbers, true);
                   });
}

TEST_CASE("segments: a filesystem that is too small is found before a byte is copied, with what helps") {
    const test_segments segments;
    publish_options options = segments.options();
    options.progress = [](std::uint64_t, std::uint64_t) { FAIL_CHECK("a byte was copied"); };
    const array numbers = numbered_rows(1000);
    {
        const seam::scoped_failure_hook hook([](seam::call what, std::string_view) {
            return seam::injected_failure{.error = what == seam::call::fallocate ? ENOSPC : 0};
        });
        try {
            publish("a", *numbers.rows(), options);
            FAIL_CHECK("no error");
        } catch (const system_failure& failure) {
            CHECK(failure.code() == std::errc::no_space_on_device);
            CHECK(contains_all(failure.what(), {"free", "unpin", "--shm-size"}));
        }
    }
    {
        const detail::scoped_available_memory little(1 << 20);
        const array large = numbered_rows(100'000);
        CHECK(fails_with(std::errc::not_enough_memory, [&] { publish("a", *large.rows(), options); }));
    }
    CHECK(segments.files().empty());
}

TEST_CASE(
    "segments: a filesystem that is filled while pieces are copied is the same error, and leaves nothing") {
    const test_segments segments;
    const array large = numbered_rows(400'000);
    // the first two are for the header and the trailer
    std::atomic<int> allocations = 0;
    {
        const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
            return seam::injected_failure{
                .error = what == seam::call::fallocate && ++allocations == 5 ? ENOSPC : 0};
        });
        try {
            publish("a", *large.rows(), segments.options());
            FAIL_CHECK("no error");
        } catch (const system_failure& failure) {
            CHECK(failure.code() == std::errc::no_space_on_device);
            CHECK(contains_all(failure.what(), {"free", "unpin", "--shm-size"}));
        }
    }
    CHECK(allocations >= 5);
    CHECK(segments.files().empty());
}
