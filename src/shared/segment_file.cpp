#include "src/shared/segment_file.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tbb/parallel_for.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <boost/interprocess/detail/os_file_functions.hpp>
#include <boost/interprocess/mapped_region.hpp>
#include <chrono>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include "formats/npy_file.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/npy.hpp"
#include "src/core/checked.hpp"
#include "src/core/error_advice.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/proc_text.hpp"
#include "src/core/system.hpp"
#include "src/core/system_folders.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::detail {

namespace {

namespace fs = std::filesystem;
namespace ipc = boost::interprocess;

constexpr std::uint64_t page_bytes = 4096;

/// Lets Boost's mapped_region map a descriptor that we have opened. Boost's own classes open their files by
/// name.
class descriptor_mapping {
 public:
    explicit descriptor_mapping(int descriptor) : descriptor_(descriptor) {}
    ipc::mapping_handle_t get_mapping_handle() const {
        return ipc::ipcdetail::mapping_handle_from_file_handle(descriptor_);
    }

 private:
    int descriptor_;
};

struct owned_mapping {
    ipc::mapped_region region;
    ::pid_t owner;
};

void release_mapping(std::byte*, std::uint64_t, void* context) noexcept {
    auto* const mapping = static_cast<owned_mapping*>(context);
    // a child made by fork has no mapping here, but perhaps another one at the same address
    if (mapping->owner != ::getpid()) return;
    delete mapping;
}

/// @param taken_bytes the bytes that the file itself already takes of its filesystem; they count as free.
[[noreturn]] void fail_full(const std::string& path, std::uint64_t needed_bytes, const std::string& folder,
                            std::uint64_t taken_bytes = 0) {
    const auto free = system::free_bytes(folder);
    throw system_failure(
        fmt::format(
            "cannot publish '{}': it takes {} bytes, and its filesystem has {} free; remove segments "
            "(pinflow unpin), or enlarge the filesystem (mount -o remount,size=; docker run --shm-size)",
            path, needed_bytes, free ? fmt::format("{} bytes", *free + taken_bytes) : "fewer bytes"),
        std::make_error_code(std::errc::no_space_on_device));
}

[[noreturn]] void fail_exists(const fs::path& path, std::string_view help) {
    throw system_failure(fmt::format("cannot publish '{}': it exists{}", path.string(), help),
                         std::make_error_code(std::errc::file_exists));
}

std::string boot_id() {
    std::string id = read_proc_text("/proc/sys/kernel/random/boot_id");
    while (!id.empty() && id.back() == '\n')
        id.pop_back();
    return id;
}

/// The type for the trailer; empty if a .npy header can say it, and for a structured type.
std::string type_beyond_npy(const dtype& type) {
    return type.is_known_to_numpy() ? std::string() : type.descr();
}

/// Whether a structured type has a field of a type that a .npy header cannot say.
bool has_field_beyond_npy(const dtype& type) {
    return std::ranges::any_of(type.fields(), [](const dtype_field& field) {
        return !type_beyond_npy(field.type).empty() || has_field_beyond_npy(field.type);
    });
}

fs::path hidden(const fs::path& path) {
    return path.parent_path() / ("." + path.filename().string());
}

bool is_there(const fs::path& path) {
    return system::status_of_link(path.string()).has_value();
}

}  // namespace

memory_region map_for_writing(int descriptor, const std::string& path, std::uint64_t size_bytes) {
    const std::string attempt = fmt::format("cannot map '{}'", path);
    system::fail_if_injected(system::call::mmap, path, attempt);
    try {
        auto mapping = std::make_unique<owned_mapping>(owned_mapping{
            ipc::mapped_region(descriptor_mapping(descriptor), ipc::read_write, 0, size_bytes), ::getpid()});
        auto* const data = static_cast<std::byte*>(mapping->region.get_address());
        system::advise(data, size_bytes, MADV_HUGEPAGE);
        system::advise(data, size_bytes, MADV_DONTFORK);
        return {data, size_bytes, release_mapping, mapping.release()};
    } catch (const ipc::interprocess_exception& failure) {
        const std::error_code code(failure.get_native_error(), std::generic_category());
        throw system_failure(fmt::format("{}: {}", attempt, described(code)), code);
    }
}

std::uint64_t min_file_bytes(std::uint64_t data_size_bytes) noexcept {
    const std::uint64_t pages = data_size_bytes / page_bytes + (data_size_bytes % page_bytes == 0 ? 0 : 1);
    return saturated(pages, page_bytes, page_bytes + trailer_size_bytes);
}

void check_room(const checked_folder& folder, const fs::path& path, std::uint64_t size_bytes) {
    const std::string folder_path = folder.path().string();
    if (const auto free = system::free_bytes(folder_path); free && *free < size_bytes)
        fail_full(path.string(), size_bytes, folder_path);
    require_memory(size_bytes,
                   fmt::format("cannot publish '{}': it takes {} bytes", path.string(), size_bytes),
                   "shared memory is charged to the cgroup of the process that publishes");
}

template <typename Take>
auto segment_file::fail_full_if_full(const Take& take) const {
    try {
        return take();
    } catch (const system_failure& failure) {
        if (failure.code() != std::errc::no_space_on_device) throw;
        struct ::stat status{};
        constexpr std::uint64_t block_bytes = 512;
        const std::uint64_t taken_bytes = ::fstat(descriptor(), &status) == 0
                                              ? static_cast<std::uint64_t>(status.st_blocks) * block_bytes
                                              : 0;
        fail_full(path_.string(), memory_.size_bytes(), folder_path_, taken_bytes);
    }
}

segment_file::segment_file(const checked_folder& folder, fs::path path, const dtype& type,
                           const shape_vector& shape)
    : path_(std::move(path)), type_(type), shape_(shape) {
    const std::string name = path_.string();
    if (has_field_beyond_npy(type))
        throw unsupported(fmt::format(
            "cannot publish '{}': a field of {} has a type that .npy files lack; view it as integers", name,
            type.descr()));
    const std::string header = [&] {
        try {
            return format_npy_header(type, shape, false, page_bytes);
        } catch (const invalid_argument& failure) {
            throw invalid_argument(fmt::format("cannot publish '{}': {}", name, failure.what()));
        }
    }();
    trailer_.data_offset_bytes = header.size();
    std::uint64_t total_bytes = 0;
    constexpr std::uint64_t max_bytes = std::uint64_t{1} << 62;
    if (!fits_strides(shape, type.size_bytes()) ||
        !multiply(element_count(shape), type.size_bytes(), trailer_.data_size_bytes) ||
        !add(trailer_.data_size_bytes, header.size() + trailer_size_bytes, total_bytes) ||
        total_bytes > max_bytes) {
        throw invalid_argument(fmt::format("cannot publish '{}': an array of {} and shape {} is too large",
                                           name, type.descr(), to_string(shape)));
    }
    folder_path_ = folder.path().string();
    check_room(folder, path_, total_bytes);
    descriptor_.emplace([&] {
        if (const auto unnamed = system::create_unnamed(folder_path_, 0600)) return *unnamed;
        throw unsupported(fmt::format(
            "cannot publish '{}': its filesystem has no unnamed files (O_TMPFILE), or /proc is missing",
            name));
    });
    system::set_mode(descriptor(), name, 0600);  // a umask may have removed bits
    system::resize(descriptor(), name, total_bytes);
    memory_ = map_for_writing(descriptor(), name, total_bytes);
    const std::span<std::byte> all = memory_.bytes();
    if (!map_new_pages(all.first(header.size()))) {
        fail_full_if_full([&] { system::allocate(descriptor(), name, total_bytes); });
        has_all_pages_ = true;
    }
    allocate_pages(all.last(trailer_size_bytes));
    std::memcpy(memory_.data(), header.data(), header.size());
}

bool segment_file::map_new_pages(std::span<std::byte> part) const {
    const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    const std::uintptr_t before = std::bit_cast<std::uintptr_t>(part.data()) % page;
    return fail_full_if_full(
        [&] { return system::allocate_mapped(part.data() - before, part.size() + before, path_.string()); });
}

void segment_file::allocate_pages(std::span<std::byte> part) const {
    if (has_all_pages_ || part.empty() || map_new_pages(part)) return;
    fail_full_if_full([&] { system::allocate(descriptor(), path_.string(), memory_.size_bytes()); });
}

void segment_file::unmap_pages(std::span<std::byte> part) const {
    const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto address = std::bit_cast<std::uintptr_t>(part.data());
    const std::uintptr_t begin = (address + page - 1) / page * page;
    const std::uintptr_t end = (address + part.size()) / page * page;
    if (begin < end) system::advise(part.data() + (begin - address), end - begin, MADV_DONTNEED);
}

void segment_file::allocate_pages() const {
    constexpr std::size_t piece_bytes = std::size_t{64} << 20;
    const std::span<std::byte> all = data();
    start_worker_threads();
    // isolated, so that a caller's cancelled task group leaves no memory out
    tbb::task_group_context context(tbb::task_group_context::isolated);
    tbb::parallel_for(
        std::size_t{0}, (all.size() + piece_bytes - 1) / piece_bytes,
        [&](std::size_t piece) {
            const std::size_t begin = piece * piece_bytes;
            allocate_pages(all.subspan(begin, std::min(piece_bytes, all.size() - begin)));
        },
        context);
}

void segment_file::finish(const std::string& checksum) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    trailer_.is_writable = checksum.empty();
    trailer_.checksum = checksum;
    trailer_.boot_id = boot_id();
    trailer_.pid = static_cast<std::uint64_t>(::getpid());
    trailer_.uid = ::geteuid();
    trailer_.created_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    trailer_.type = type_beyond_npy(type_);
    write_trailer(trailer_, memory_.bytes().last<trailer_size_bytes>());
}

segment_info segment_file::info(std::string name) const {
    return info_of(std::move(name), path_, memory_.size_bytes(), type_, shape_, trailer_);
}

// ---- names ------------------------------------------------------------------------------------------------

void check_name_is_free(const checked_folder& folder, const std::string& name, bool is_group, bool replace) {
    const fs::path file = folder.file_of({name});
    const fs::path group = folder.group_of(name);
    if (is_there(is_group ? file : group)) {
        fail_exists(is_group ? file : group,
                    is_group ? " as a single segment; remove it first (remove_segment or `pinflow unpin`)"
                             : " as a group of segments; remove it first (remove_segment or `pinflow "
                               "unpin`)");
    }
    if (is_group) system::remove_folder(group.string());  // if it is empty
    const fs::path& same = is_group ? group : file;
    if (!replace && is_there(same))
        fail_exists(same,
                    "; remove it first (remove_segment or `pinflow unpin`), or replace it by publishing "
                    "(publish_options::replace or `pinflow pin --replace`)");
}

void give_name(const segment_file& file, const checked_folder& folder, const std::string& name,
               bool replace) {
    const own_descriptor lock = folder.lock();
    for (const fs::path& left : folder.hidden())
        remove_tree(left);
    check_name_is_free(folder, name, false, replace);
    const fs::path path = folder.file_of({name});
    if (!is_there(path)) return system::give_name(file.descriptor(), path.string());
    const fs::path temporary = hidden(path);
    system::give_name(file.descriptor(), temporary.string());
    try {
        system::rename(temporary.string(), path.string());
    } catch (...) {
        remove_tree(temporary);
        throw;
    }
}

void give_names(std::span<const named_file> files, const checked_folder& folder, const std::string& group,
                bool replace) {
    const own_descriptor lock = folder.lock();
    for (const fs::path& left : folder.hidden())
        remove_tree(left);
    check_name_is_free(folder, group, true, replace);
    const fs::path path = folder.group_of(group);
    const fs::path temporary = hidden(path);
    try {
        if (!system::make_folder(temporary.string(), 0700)) fail_exists(temporary, " and cannot be removed");
        for (const named_file& each : files) {
            fs::path at = temporary;
            for (std::size_t i = 0; i + 1 < each.names.size(); ++i) {
                at /= each.names[i];
                system::make_folder(at.string(), 0700);
            }
            system::give_name(each.file.descriptor(), (at / (each.names.back() + ".npy")).string());
        }
        if (is_there(path)) {
            system::exchange_names(temporary.string(), path.string());
        } else {
            system::rename_to_new(temporary.string(), path.string());
        }
    } catch (...) {
        remove_tree(temporary);
        throw;
    }
    remove_tree(temporary);  // the old group
}

// ---- opening ----------------------------------------------------------------------------------------------

namespace {

segment_trailer trailer_of(const input_file& file) {
    if (file.size_bytes() < trailer_size_bytes) throw format_error("it ends before its trailer");
    std::array<std::byte, trailer_size_bytes> bytes{};
    file.read(file.size_bytes() - bytes.size(), bytes);
    return read_trailer(bytes, file.size_bytes());
}

/// The array in a segment, whose header must agree with the trailer.
array array_of(std::shared_ptr<const input_file> file, const segment_trailer& trailer) {
    array opened = open_npy_file(std::move(file), array_mapping::own);
    if (trailer.data_offset_bytes != opened.offset_bytes() ||
        trailer.data_size_bytes != opened.size_bytes()) {
        throw format_error(fmt::format(
            "its header declares {} bytes of data at offset {}, and its trailer {} bytes at {}",
            opened.size_bytes(), opened.offset_bytes(), trailer.data_size_bytes, trailer.data_offset_bytes));
    }
    if (trailer.type.empty()) return opened;
    try {
        return opened.view_as(dtype::parse(trailer.type));
    } catch (const error& failure) {
        throw format_error(fmt::format("the type in its trailer does not fit: {}", failure.what()));
    }
}

opened_segment open_once(const checked_folder& folder, const std::vector<std::string>& names) {
    const struct ::stat status = folder.check(names);
    const std::string path = folder.file_of(names).string();
    const auto check_same = [&](const input_file& file) {
        if (file.identity().device != status.st_dev || file.identity().inode != status.st_ino)
            throw data_changed(fmt::format("'{}' was replaced while it was being opened", path));
    };
    const input_file first(path);
    check_same(first);
    try {
        segment_trailer trailer = trailer_of(first);
        auto file = std::make_shared<const input_file>(
            path, trailer.is_writable ? change_check::size : change_check::file);
        check_same(*file);
        array data = array_of(std::move(file), trailer);
        return {std::move(data), std::move(trailer)};
    } catch (const unsupported& failure) {
        throw unsupported(fmt::format("cannot open '{}' as a segment: {}", path, failure.what()));
    } catch (const format_error& failure) {
        throw format_error(fmt::format("cannot open '{}' as a segment: {}", path, failure.what()));
    }
}

}  // namespace

opened_segment open_checked(const checked_folder& folder, const std::vector<std::string>& names) {
    constexpr int max_tries = 100;
    for (int tries = 1;; ++tries) {
        try {
            return open_once(folder, names);
        } catch (const data_changed&) {
            if (tries == max_tries) throw;  // it is replaced all the time
        }
    }
}

opened_segment open_named(std::string_view name, const fs::path& folder) {
    const std::vector<std::string> names = parse_segment_name(name);
    return open_checked(checked_folder(folder), names);
}

segment_info info_of(std::string name, const fs::path& path, std::uint64_t file_size_bytes, const dtype& type,
                     const shape_vector& shape, const segment_trailer& trailer) {
    segment_info info;
    info.name = std::move(name);
    info.path = path;
    info.file_size_bytes = file_size_bytes;
    info.dtype = type;
    info.shape = shape;
    info.size_bytes = trailer.data_size_bytes;
    info.is_writable = trailer.is_writable;
    info.checksum = trailer.checksum;
    info.creator_pid = trailer.pid;
    info.created =
        std::chrono::system_clock::time_point(std::chrono::duration_cast<std::chrono::system_clock::duration>(
            std::chrono::nanoseconds(trailer.created_ns)));
    return info;
}

}  // namespace pinflow::detail
