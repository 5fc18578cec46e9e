#include <doctest/doctest.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <string_view>

#include "pinflow/error.hpp"
#include "pinflow/stream.hpp"
#include "pinflow/train/flat_parameters.hpp"
#include "src/core/system.hpp"
#include "tests/support/flat_models.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;
namespace seam = pinflow::detail::system;

TEST_CASE("flat parameters: a file that is modified while it is loaded is an error") {
    const temporary_folder folder;
    const std::filesystem::path path = folder / "model.safetensors";
    const stream stream(device::host());
    flat_parameters flat = one_parameter<float>(1000, adam{}, stream);
    flat.save(path, stream);
    int reads = 0;
    {
        const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
            if (what == seam::call::pread) ++reads;
            return seam::injected_failure{};
        });
        flat.load(path, stream);
    }
    REQUIRE(reads > 0);
    // during the last read
    const seam::scoped_failure_hook hook([&](seam::call what, std::string_view) {
        if (what == seam::call::pread && --reads == 0)
            std::filesystem::last_write_time(
                path, std::filesystem::last_write_time(path) + std::chrono::seconds(10));
        return seam::injected_failure{};
    });
    CHECK_THROWS_AS(flat.load(path, stream), data_changed);
}
