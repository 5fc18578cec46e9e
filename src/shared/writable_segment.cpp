#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <system_error>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/system.hpp"
#include "src/core/system_folders.hpp"
#include "src/shared/segment_file.hpp"

namespace pinflow {

namespace {

using namespace detail;

/// The descriptors that hold locks of this process. A child made by fork closes its copies: otherwise it
/// would keep the locks when this process has ended.
class held_locks {
 public:
    static held_locks& all() {
        static held_locks* const only = new held_locks;  // never destroyed: threads may outlive main
        return *only;
    }
    void add(int descriptor) {
        const std::lock_guard lock(mutex_);
        descriptors_.insert(descriptor);
    }
    void close(int descriptor) noexcept {
        const std::lock_guard lock(mutex_);
        if (descriptors_.erase(descriptor) != 0) system::close(descriptor);
    }

 private:
    held_locks() {
        ::pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); },
                         [] {
                             for (const int descriptor : all().descriptors_)
                                 ::close(descriptor);
                             all().descriptors_.clear();
                             all().mutex_.unlock();
                         });
    }

    std::mutex mutex_;
    std::set<int> descriptors_;
};

/// The lock of a segment's writer, on an open file of its own that is never mapped: a mapping would keep it.
class writer_lock {
 public:
    /// Takes over `descriptor`.
    /// @throws system_failure with errc::device_or_resource_busy if there is another writer.
    writer_lock(int descriptor, const std::string& path) : descriptor_(descriptor) {
        try {
            if (!system::lock_for_writing(descriptor, path)) {
                throw system_failure(fmt::format("cannot open '{}' for writing: it has a writer", path),
                                     std::make_error_code(std::errc::device_or_resource_busy));
            }
            held_locks::all().add(descriptor);
        } catch (...) {
            system::close(descriptor);
            throw;
        }
    }
    writer_lock(const writer_lock&) = delete;
    writer_lock& operator=(const writer_lock&) = delete;
    ~writer_lock() { held_locks::all().close(descriptor_); }

 private:
    int descriptor_;
};

class closed_at_end {
 public:
    explicit closed_at_end(int descriptor) noexcept : descriptor_(descriptor) {}
    closed_at_end(const closed_at_end&) = delete;
    closed_at_end& operator=(const closed_at_end&) = delete;
    ~closed_at_end() { system::close(descriptor_); }
    int get() const noexcept { return descriptor_; }

 private:
    int descriptor_;
};

}  // namespace

struct writable_segment::state {
    std::unique_ptr<writer_lock> lock;
    memory_region memory;
    std::span<std::byte> bytes;
    pinflow::dtype dtype;
    shape_vector shape;
};

writable_segment::writable_segment(std::shared_ptr<const state> opened)
    : state_(std::move(opened)), bytes_(state_->bytes), dtype_(state_->dtype), shape_(state_->shape) {}

writable_segment writable_segment::create(std::string_view name, const pinflow::dtype& type,
                                          shape_vector shape, const std::filesystem::path& folder) {
    const std::vector<std::string> names = parse_segment_name(name);
    if (names.size() != 1)
        throw invalid_argument(fmt::format("cannot create the segment '{}': its name has a slash", name));
    const checked_folder checked = checked_folder::create(folder);
    check_name_is_free(checked, names.front(), false, false);
    segment_file file(checked, checked.file_of(names), type, shape);
    file.finish({});
    // locked before it has a name, so that nobody else is its first writer
    const std::string path = file.path().string();
    auto lock = std::make_unique<writer_lock>(system::open_again(file.descriptor(), path), path);
    give_name(file, checked, names.front(), false);
    const std::span<std::byte> bytes = file.data();
    return writable_segment(std::make_shared<const state>(
        state{std::move(lock), file.take_memory(), bytes, type, std::move(shape)}));
}

writable_segment::writable_segment(std::string_view name, const std::filesystem::path& folder)
    : writable_segment([&] {
          const checked_folder checked(folder);
          const std::vector<std::string> names = parse_segment_name(name);
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
          const closed_at_end mapped(system::open_for_writing(path));
          same(mapped.get());
          auto lock = std::make_unique<writer_lock>(system::open_again(mapped.get(), path), path);
          memory_region memory = map_for_writing(mapped.get(), path, opened.data.file()->size_bytes());
          const std::span<std::byte> bytes =
              memory.bytes().subspan(opened.trailer.data_offset_bytes, opened.trailer.data_size_bytes);
          return std::make_shared<const state>(
              state{std::move(lock), std::move(memory), bytes, opened.data.dtype(), opened.data.shape()});
      }()) {}

row_table writable_segment::table() const {
    if (shape_.empty()) throw unsupported("a segment without axes has no rows");
    const std::uint64_t row_bytes = element_count(std::span(shape_).subspan(1)) * dtype_.size_bytes();
    return {bytes_, row_bytes, dtype_, state_};
}

}  // namespace pinflow
