#include <fmt/format.h>

#include <string_view>

#include "formats/element_streams.hpp"
#include "formats/hdf5_aliases.hpp"
#include "formats/hdf5_shared_rows.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/open.hpp"

/// The HDF5 functions of a build without HDF5. Those that list, open or write throw format_not_built.
namespace pinflow {

namespace {

constexpr std::string_view help =
    "install libhdf5 with its headers, and build pinflow with -DPINFLOW_HDF5=ON";

[[noreturn]] void refuse(const std::filesystem::path& path) {
    throw format_not_built(fmt::format("cannot open '{}': this build of pinflow cannot read HDF5 files; {}",
                                       path.string(), help));
}

}  // namespace

bool has_hdf5() noexcept {
    return false;
}

std::vector<array_listing> list_hdf5(const std::filesystem::path& path) {
    refuse(path);
}

std::vector<detail::hdf5_alias> detail::list_hdf5_aliases(const std::filesystem::path& path) {
    refuse(path);
}

std::optional<array_listing> detail::find_listed_dataset(const std::filesystem::path& /*path*/,
                                                         const std::string& /*name*/) {
    return std::nullopt;
}

array_listing list_hdf5(const std::filesystem::path& path, std::string_view /*name*/) {
    refuse(path);
}

array open_hdf5(const std::filesystem::path& path, std::string_view /*name*/) {
    refuse(path);
}

std::shared_ptr<const row_source> open_hdf5_rows(const std::filesystem::path& path, std::string_view /*name*/,
                                                 const hdf5_options& /*options*/) {
    refuse(path);
}

struct hdf5_writer::state {};

hdf5_writer::hdf5_writer(const std::filesystem::path& path, std::uint64_t /*alignment_bytes*/) {
    throw format_not_built(fmt::format("cannot write '{}': this build of pinflow cannot write HDF5 files; {}",
                                       path.string(), help));
}

hdf5_writer::hdf5_writer(hdf5_writer&&) noexcept = default;
hdf5_writer& hdf5_writer::operator=(hdf5_writer&&) noexcept = default;
hdf5_writer::~hdf5_writer() = default;
// never called: no writer can be constructed
void hdf5_writer::check(std::span<const dataset> /*datasets*/) const {}
void hdf5_writer::begin(const dataset& /*begun*/) {}
void hdf5_writer::write(std::span<const std::byte> /*bytes*/) {}
void hdf5_writer::finish() {}

namespace detail {

std::shared_ptr<hdf5_memory> make_hdf5_memory(std::uint64_t /*size_bytes*/) {
    return nullptr;
}

std::shared_ptr<const row_source> open_hdf5_rows(const std::filesystem::path& path, std::string_view /*name*/,
                                                 std::shared_ptr<hdf5_memory> /*memory*/) {
    refuse(path);
}

std::shared_ptr<const row_source> open_hdf5_row(const std::filesystem::path& path, std::string_view /*name*/,
                                                std::shared_ptr<hdf5_memory> /*memory*/) {
    refuse(path);
}

std::unique_ptr<element_file> open_hdf5_elements(const std::filesystem::path& path) {
    refuse(path);
}

}  // namespace detail

}  // namespace pinflow
