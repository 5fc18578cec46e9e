#include "pinflow/loader/report.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "loader/stage_seam.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/loader/loader.hpp"
#include "src/core/descriptor_cache.hpp"
#include "src/core/system.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/limits.hpp"
#include "tests/support/temporary_folder.hpp"

// Limits that can be tested only through the seam. The others are in api/loader/verdict_test.cpp.
using namespace pinflow;
using namespace limits;

TEST_CASE("report: time of a slow disk counts as storage") {
    const temporary_folder folder;
    write_npy(folder / "rows.npy", numbered_rows(batch_rows * batch_count).view());
    const array rows = open_npy(folder / "rows.npy");
    on_each_device([&](const device& device) {
        check_limit("storage", &loader_report::storage_wait, [&](milliseconds slowness) {
            const detail::system::scoped_failure_hook hook([=](detail::system::call what, std::string_view) {
                if (what == detail::system::call::pread) block_for(slowness);
                return detail::system::injected_failure{};
            });
            return report_of(rows, device, route::read);
        });
    });
}

TEST_CASE("report: a filesystem that is slow to open and to stat files is distinguished from slow reads") {
    const temporary_folder folder;
    for (std::uint64_t file = 0; file < batch_count; ++file)
        write_npy(folder / ("rows-" + std::to_string(file) + ".npy"), numbered_rows(batch_rows).view());
    on_each_device([&](const device& device) {
        for (const auto slow : {detail::system::call::open, detail::system::call::stat}) {
            check_limit("filesystem", &loader_report::file_wait, [&](milliseconds slowness) {
                // files are closed between two uses of the same one
                const detail::scoped_descriptor_limit few(2);
                const auto rows = open_rows((folder / "rows-*.npy").string());
                const detail::system::scoped_failure_hook hook(
                    [=](detail::system::call what, std::string_view) {
                        if (what == slow) block_for(slowness);
                        return detail::system::injected_failure{};
                    });
                return report_of(rows, device, route::read);
            });
        }
    });
}

TEST_CASE("report: slow copies count as link, or as CPU if there is no link") {
    const array rows = numbered_rows(batch_rows * batch_count);
    on_each_device([&](const device& device) {
        const bool has_link = device.kind() != device_kind::host;
        check_limit(has_link ? "link" : "CPU",
                    has_link ? &loader_report::link_wait : &loader_report::cpu_wait,
                    [&](milliseconds slowness) {
                        const detail::scoped_stage_hook hook([=](detail::stage where, std::uint64_t) {
                            if (where == detail::stage::deliver) block_for(slowness);
                        });
                        return report_of(rows, device, route::staged);
                    });
    });
}
