#include "formats/hdf5_library.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "formats/hdf5_handles.hpp"
#include "formats/hdf5_path.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/quote.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

namespace hdf5 {

namespace {

std::mutex library_mutex;

// ---- what the library says of a failure ------------------------------------------------------------------

/// Text of the library, which may quote the file, made safe for messages.
std::string printable(const char* text) {
    return text == nullptr ? std::string() : detail::printable(text, 200);
}

extern "C" ::herr_t note_record(unsigned /*number*/, const ::H5E_error2_t* record, void* report_address) {
    auto& report = *static_cast<failure_report*>(report_address);
    try {
        if (!report.any) {
            report.description = printable(record->desc);
            report.function = printable(record->func_name);
            report.any = true;
        }
        const std::string_view text = record->desc == nullptr ? "" : record->desc;
        report.locked = report.locked || record->min_num == H5E_CANTLOCKFILE ||
                        text.find("unable to lock file") != text.npos;
    } catch (...) {
        return -1;
    }
    return 0;
}

}  // namespace

namespace {

/// Fork waits until no thread is in the library: the child would inherit a locked mutex.
std::mutex& mutex_kept_from_forks() {
    static const int status = ::pthread_atfork([] { library_mutex.lock(); }, [] { library_mutex.unlock(); },
                                               [] { library_mutex.unlock(); });
    if (status != 0) throw std::bad_alloc();
    return library_mutex;
}

}  // namespace

library_lock::library_lock() : lock_(mutex_kept_from_forks()) {
    // libhdf5 does not check its first allocations
    static bool has_memory = false;
    if (!has_memory) {
        constexpr std::uint64_t needed_bytes = std::uint64_t{4} << 20;
        require_memory(needed_bytes,
                       fmt::format("libhdf5 cannot be started: it takes {} bytes of memory", needed_bytes));
        has_memory = true;
    }
    if (::H5open() < 0) throw unsupported("libhdf5 could not be started");
    had_reporter_ = ::H5Eget_auto2(H5E_DEFAULT, &reporter_, &reporter_data_) >= 0;
    ::H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
    had_plugins_ = ::H5PLget_loading_state(&plugins_) >= 0;
    ::H5PLset_loading_state(0);
}

library_lock::~library_lock() {
    if (had_plugins_) ::H5PLset_loading_state(plugins_);
    ::H5Eclear2(H5E_DEFAULT);
    if (had_reporter_) ::H5Eset_auto2(H5E_DEFAULT, reporter_, reporter_data_);
}

failure_report report_failure() {
    failure_report report;
    ::H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, note_record, &report);
    if (report.description.empty()) report.description = "unknown error";
    return report;
}

void fail(std::string_view attempted) {
    const std::string words = report_failure().description;
    std::string hint;
    if (words.find("already open for write") != words.npos) {
        hint =
            ": a process has the file open for writing, or ended without closing it. Wait for that "
            "process; if it is gone, copy the file and run h5clear -s on the copy";
    } else if (words.find("version") != words.npos) {
        unsigned major = 0;
        unsigned minor = 0;
        unsigned release = 0;
        ::H5get_libversion(&major, &minor, &release);
        hint = fmt::format("; its version is {}.{}.{}, and a newer one may have written the file", major,
                           minor, release);
    }
    throw format_error(fmt::format("{}: libhdf5 says '{}'{}", attempted, words, hint));
}

// ---- the driver ------------------------------------------------------------------------------------------

namespace {

// guarded by library_mutex
std::optional<::H5FD_class_t> default_driver;
bool is_recording = false;
recorded_read recorded;

extern "C" ::herr_t read_or_record(::H5FD_t* file, ::H5FD_mem_t type, ::hid_t transfer, ::haddr_t address,
                                   std::size_t size_bytes, void* destination) {
    if (is_recording && type == H5FD_MEM_DRAW) {
        // the library has added the user block already
        recorded = {recorded.count + 1, address, size_bytes};
        return 0;
    }
    return default_driver->read(file, type, transfer, address, size_bytes, destination);
}

/// Registers a driver that is a copy of the default driver, except for reading. Registers it for each file,
/// since other code may have closed the library meanwhile, and with it all registrations.
driver_handle register_driver(const std::string& path) {
    const property_handle access(::H5Pcreate(H5P_FILE_ACCESS), "its properties cannot be made");
    checked(::H5Pset_fapl_sec2(access.id()), "its driver cannot be chosen");
    if (!default_driver) {
        ::H5FD_t* const opened = ::H5FDopen(path.c_str(), H5F_ACC_RDONLY, access.id(), HADDR_UNDEF);
        if (opened == nullptr) fail("it cannot be opened");
        default_driver = *opened->cls;
        ::H5FDclose(opened);
    }
    ::H5FD_class_t driver = *default_driver;
    driver.name = "pinflow";
    driver.read = read_or_record;
    driver.terminate = nullptr;  // would terminate the default driver
#if H5_VERSION_GE(1, 13, 2)
    driver.value = static_cast<::H5FD_class_value_t>(511);  // HDF5 assigns no driver a number of 256 to 511
#endif
    return {::H5FDregister(&driver), "a driver for it cannot be registered"};
}

}  // namespace

recording::recording() {
    recorded = {};
    is_recording = true;
}

recording::~recording() {
    is_recording = false;
}

recorded_read recording::take() noexcept {
    return std::exchange(recorded, {});
}

// ---- a file ----------------------------------------------------------------------------------------------

open_file::open_file(const input_file& file, std::size_t chunk_cache_bytes)
    : driver_(register_driver(file.path())), size_bytes_(file.size_bytes()) {
    const property_handle access(::H5Pcreate(H5P_FILE_ACCESS), "its properties cannot be made");
    checked(::H5Pset_driver(access.id(), driver_.id(), nullptr), "its driver cannot be chosen");
    checked(::H5Pset_fclose_degree(access.id(), H5F_CLOSE_STRONG), "its properties cannot be set");
    // each open dataset has a cache of its own; libhdf5's manual advises a prime number of hash entries
    const std::size_t hash_entries = chunk_cache_bytes > default_chunk_cache_bytes ? 12'421 : 521;
    checked(::H5Pset_cache(access.id(), 0, hash_entries, chunk_cache_bytes, 0.75),
            "its properties cannot be set");
    // reads that are only recorded must not be buffered for later reads
    checked(::H5Pset_sieve_buf_size(access.id(), 0), "its properties cannot be set");
    const ::hid_t opened = ::H5Fopen(file.path().c_str(), H5F_ACC_RDONLY, access.id());
    if (opened < 0 && report_failure().locked) {
        const std::error_code code(EWOULDBLOCK, std::generic_category());
        throw system_failure(
            "it is locked by a process that has it open for writing; wait until that process closes it, or "
            "set HDF5_USE_FILE_LOCKING=FALSE in the environment to read it as it is now (libhdf5 refuses "
            "files in the format of HDF5 1.10 and later even then)",
            code);
    }
    file_ = {opened, "it cannot be opened"};
    check_same_file(file, access.id());
    const property_handle creation(::H5Fget_create_plist(file_.id()), "its properties cannot be read");
    ::hsize_t user_block = 0;
    checked(::H5Pget_userblock(creation.id(), &user_block), "its user block cannot be found");
    user_block_bytes_ = user_block;
}

void open_file::check_same_file(const input_file& file, ::hid_t access) const {
    void* descriptor = nullptr;
    checked(::H5Fget_vfd_handle(file_.id(), access, &descriptor), "its file descriptor cannot be obtained");
    const struct ::stat theirs = system::status(*static_cast<const int*>(descriptor), file.path());
    if (theirs.st_dev != file.identity().device || theirs.st_ino != file.identity().inode) {
        throw data_changed(
            fmt::format("'{}' changed while it was opened: another file has taken its place", file.path()));
    }
}

}  // namespace hdf5

// ---- one dataset -----------------------------------------------------------------------------------------

namespace {

hdf5_description describe_in(const hdf5::open_file& opened, const input_file& file, std::string_view name) {
    hdf5::link_access links;
    const std::string path = hdf5_path(name);
    const hdf5::object_handle dataset = hdf5::open_dataset(opened, path, links);
    hdf5_description description = hdf5::describe(opened, dataset, path, hdf5::detail_wanted::all);
    check_hdf5_description(description, file.size_bytes());
    return description;
}

}  // namespace

hdf5_description describe_hdf5_dataset(const input_file& file, std::string_view name) {
    return hdf5::naming(file, [&] {
        const hdf5::library_lock lock;
        return describe_in(hdf5::open_file(file, hdf5::default_chunk_cache_bytes), file, name);
    });
}

namespace {

/// @param only_path whether other paths to the dataset's groups are refused.
std::optional<array_listing> list_one(const input_file& file, std::string_view name, bool only_path) {
    return hdf5::naming(file, [&]() -> std::optional<array_listing> {
        const hdf5::library_lock lock;
        const hdf5::open_file opened(file, hdf5::default_chunk_cache_bytes);
        hdf5::link_access links;
        const std::string path = hdf5_path(name);
        const hdf5::object_handle dataset = hdf5::open_dataset(opened, path, links);
        if (only_path && !hdf5::is_only_path(opened, path, links)) return std::nullopt;
        return hdf5_listing(hdf5::describe(opened, dataset, path, hdf5::detail_wanted::listing));
    });
}

}  // namespace

array_listing list_hdf5_dataset(const input_file& file, std::string_view name) {
    return *list_one(file, name, false);
}

std::optional<array_listing> find_hdf5_dataset(const input_file& file, std::string_view name) {
    return list_one(file, name, true);
}

std::vector<hdf5_description> describe_hdf5_datasets(const input_file& file,
                                                     std::span<const std::string_view> names,
                                                     std::size_t max_bytes) {
    return hdf5::naming(file, [&] {
        const hdf5::library_lock lock;
        const hdf5::open_file opened(file, hdf5::default_chunk_cache_bytes);
        std::vector<hdf5_description> descriptions;
        std::size_t size_bytes = 0;
        for (const std::string_view name : names) {
            try {
                hdf5_description description = describe_in(opened, file, name);
                size_bytes += memory_bytes(description);
                if (size_bytes <= max_bytes || descriptions.empty())
                    descriptions.push_back(std::move(description));
                if (size_bytes > max_bytes) break;
            } catch (const error&) {
                continue;  // whoever reads it will describe it again, and get the error
            }
        }
        return descriptions;
    });
}

}  // namespace pinflow::detail
