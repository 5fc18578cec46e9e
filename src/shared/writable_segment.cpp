#include <fmt/format.h>
#include <memory>
#include <system_error>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/system.hpp"
#include "src/core/system_folders.hpp"
#include "src/shared/own_descriptor.hpp"
#include "src/shared/segment_file.hpp"

namespace pinflow {

namespace {

using namespace detail;

/// The lock of a segment's writer, on an open file of its own that is never mapped: a mapping would keep it.
/// @throws system_failure with errc::device_or_resource_busy if there is another writer.
std::unique_ptr<own_descriptor> lock_writer(int descriptor, const std::string& path) {
    auto lock = std::make_unique<own_descriptor>([&] { return system::open_again(descriptor, path); });
    if (system::lock_for_writing(lock->get(), path)) return lock;
    throw system_failure(fmt::format("cannot open '{}' for writing: it has a writer", path),
                         std::make_error_code(std::errc::device_or_resource_busy));
}

/// @throws system_failure if the segment exists; the message says how to open or remove it.
void refuse_existing(const std::filesystem::path& file) {
    std::error_code none;
    if (!std::filesystem::exists(std::filesystem::symlink_status(file, none))) return;
    throw system_failure(
        fmt::format("cannot create '{}': it exists; open it with writable_segment(name), or remove "
                    "it first (remove_segment or `pinflow unpin`)",
                    file.string()),
        std::make_error_code(std::errc::file_exists));
}

}  // namespace

struct writable_segment::state {
    std::unique_ptr<own_descriptor> lock;
    memory_region memory;
    std::span<std::byte> bytes;
    pinflow::dtype dtype;
    shape_vector shape;
};

writable_segment::writable_segment(std::shared_ptr<const state> opened)
    : state_(std::move(opened)), dtype_(state_->dtype), shape_(state_->shape) {}

writable_segment writable_segment::create(std::string_view name, const pinflow::dtype& type,
                                          shape_vector shape, const std::filesystem::path& folder) {
    const std::vector<std::string> names = parse_segment_name(name);
    if (names.size() != 1)
        throw invalid_argument(fmt::format("cannot create the segment '{}': its name has a slash", name));
    const checked_folder checked = checked_folder::create(folder);
    refuse_existing(checked.file_of(names));
    check_name_is_free(checked, names.front(), false, false);
    segment_file file(checked, checked.file_of(names), type, shape);
    file.allocate_pages();
    file.finish({});
    // locked before it has a name, so that nobody else is its first writer
    const std::string path = file.path().string();
    auto lock = lock_writer(file.descriptor(), path);
    give_name(file, checked, names.front(), false);
    const std::span<std::byte> bytes = file.data();
    return writable_segment(std::make_shared<const state>(
        state{std::move(lock), file.give_mapping(), bytes, type, std::move(shape)}));
}

writable_segment::writable_segment(std::string_view name, const std::filesystem::path& folder)
    : writable_segment([&] {
          const std::vector<std::string> names = parse_segment_name(name);
          const checked_folder checked(folder);
          const opened_segment opened = open_checked(checked, names);
          const std::string path = checked.file_of(names).string();
          if (!opened.trailer.is_writable) {
              throw unsupported(fmt::format(
                  "cannot open '{}' for writing: it was published with a checksum, for reading only", path));
          }
          const auto same = [&](int descriptor) {
              const struct ::stat status = system::status(descriptor, path);
              const file_identity& identity = opened.data.file()->identity();
              if (status.st_dev == identity.device && status.st_ino == identity.inode) return;
              throw data_changed(fmt::format("'{}' was replaced while it was being opened", path));
          };
          const own_descriptor mapped([&] { return system::open_for_writing(path); });
          same(mapped.get());
          auto lock = lock_writer(mapped.get(), path);
          // a sparse copy of a segment would raise SIGBUS on a full filesystem
          system::allocate(mapped.get(), path, opened.data.file()->size_bytes());
          memory_region memory = map_for_writing(mapped.get(), path, opened.data.file()->size_bytes());
          const std::span<std::byte> bytes =
              memory.bytes().subspan(opened.trailer.data_offset_bytes, opened.trailer.data_size_bytes);
          return std::make_shared<const state>(
              state{std::move(lock), std::move(memory), bytes, opened.data.dtype(), opened.data.shape()});
      }()) {}

std::span<std::byte> writable_segment::bytes() const noexcept {
    return state_ ? state_->bytes : std::span<std::byte>();
}

row_table writable_segment::table() const {
    if (!state_) throw invalid_argument("cannot use a moved-from writable_segment");
    if (shape_.empty()) throw unsupported("a segment without axes has no rows");
    const std::uint64_t row_bytes = element_count(std::span(shape_).subspan(1)) * dtype_.size_bytes();
    return {bytes(), row_bytes, dtype_, state_};
}

}  // namespace pinflow
