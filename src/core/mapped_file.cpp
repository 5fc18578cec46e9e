#include "pinflow/mapped_file.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <boost/interprocess/detail/os_file_functions.hpp>
#include <boost/interprocess/mapped_region.hpp>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/error_advice.hpp"
#include "src/core/system.hpp"

namespace pinflow {

namespace {

namespace ipc = boost::interprocess;

/// Passes our own descriptor to Boost's mapped_region. Boost's file_mapping would open the file without
/// O_CLOEXEC, and block on a FIFO.
class descriptor_mapping {
 public:
    explicit descriptor_mapping(int descriptor) : descriptor_(descriptor) {}
    ipc::mapping_handle_t get_mapping_handle() const {
        return ipc::ipcdetail::mapping_handle_from_file_handle(descriptor_);
    }

 private:
    int descriptor_;
};

void release_mapping(std::byte*, std::uint64_t, void* context) noexcept {
    delete static_cast<ipc::mapped_region*>(context);
}

memory_region map(const std::shared_ptr<const input_file>& opened, std::uint64_t offset_bytes,
                  std::uint64_t size_bytes) {
    if (!opened) throw invalid_argument("cannot map a null pointer to an input_file");
    const input_file& file = *opened;
    // Boost maps past the end of a file without an error, so the range is checked here
    if (offset_bytes > file.size_bytes() || size_bytes > file.size_bytes() - offset_bytes) {
        throw format_error(fmt::format("cannot map {} bytes at offset {} of '{}': the file has {} bytes",
                                       size_bytes, offset_bytes, file.path(), file.size_bytes()));
    }
    if (size_bytes == 0) return {};
    const std::string attempt =
        fmt::format("cannot map {} bytes at offset {} of '{}'", size_bytes, offset_bytes, file.path());
    detail::system::fail_if_injected(detail::system::call::mmap, file.path(), attempt);
    const descriptor_lease lease = file.lease_descriptor();
    try {
        auto region =
            std::make_unique<ipc::mapped_region>(descriptor_mapping(lease.get()), ipc::read_only,
                                                 static_cast<ipc::offset_t>(offset_bytes), size_bytes);
        auto* const data = static_cast<std::byte*>(region->get_address());
        return {data, size_bytes, release_mapping, region.release()};
    } catch (const ipc::interprocess_exception& failure) {
        const std::error_code code(failure.get_native_error(), std::generic_category());
        throw system_failure(fmt::format("{}: {}", attempt, detail::described(code)), code);
    }
}

}  // namespace

mapped_file::mapped_file(std::shared_ptr<const input_file> file, std::uint64_t offset_bytes,
                         std::uint64_t size_bytes)
    : file_(std::move(file)), offset_bytes_(offset_bytes), region_(map(file_, offset_bytes, size_bytes)) {}

void mapped_file::advise(access_advice advice) const noexcept {
    if (data() == nullptr) return;
    const int value = [&] {
        switch (advice) {
            case access_advice::sequential:
                return MADV_SEQUENTIAL;
            case access_advice::random:
                return MADV_RANDOM;
            case access_advice::will_need:
                return MADV_WILLNEED;
            case access_advice::normal:
                break;
        }
        return MADV_NORMAL;
    }();
    detail::system::advise(data(), size_bytes(), value);
}

}  // namespace pinflow
