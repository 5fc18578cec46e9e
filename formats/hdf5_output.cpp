#include "formats/hdf5_output.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>
#include <optional>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "src/core/checked.hpp"
#include "src/core/output_file.hpp"
#include "src/core/quote.hpp"

namespace pinflow::detail::hdf5 {

/// The state that the driver writes to.
struct output::state {
    explicit state(const std::filesystem::path& to) : path(to.string()) { file.emplace(to); }

    /// Runs a step for the library, unless a step has failed or the file is discarded.
    template <typename Step>
    void attempt(Step step) noexcept {
        if (!file || failed) return;
        try {
            step(*file);
        } catch (...) {
            failure = std::current_exception();
            failed = true;
        }
    }
    /// Throws the error of the failed step.
    void pass_on_failure() {
        if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
    }
    void check_not_failed() const {
        if (!failed) return;
        throw system_failure(fmt::format("cannot write '{}': an earlier step of writing it has failed", path),
                             std::make_error_code(std::errc::io_error));
    }

    std::string path;
    std::optional<output_file> file;  ///< empty once it is discarded
    bool failed = false;
    std::exception_ptr failure;         ///< of the step that failed, until it is thrown
    std::uint64_t alignment_bytes = 1;  ///< of the elements to allocate space for
    std::uint64_t allocated_bytes = 0;  ///< end of the space that the library has allocated
    std::uint64_t written_bytes = 0;    ///< end of the file
};

// ---- the driver ------------------------------------------------------------------------------------------

namespace {

constexpr std::uint64_t max_file_bytes = (std::uint64_t{1} << 63) - 1;

}  // namespace

/// The driver. libhdf5 calls its functions while the library lock is held. `file` derives from H5FD_t,
/// because libhdf5 accesses its members.
struct driver {
    using state = output::state;

    struct file : ::H5FD_t {
        std::shared_ptr<state> of;
    };

    static state& state_of(::H5FD_t* opened) noexcept { return *static_cast<file*>(opened)->of; }
    static const state& state_of(const ::H5FD_t* opened) noexcept {
        return *static_cast<const file*>(opened)->of;
    }

    /// The argument that H5Pset_driver passes to `open`.
    struct argument {
        const std::shared_ptr<state>* of;
    };

    static ::H5FD_t* open(const char* /*name*/, unsigned /*flags*/, ::hid_t access, ::haddr_t /*most*/) {
        const auto* const given = static_cast<const argument*>(::H5Pget_driver_info(access));
        auto* const opened = given == nullptr ? nullptr : new (std::nothrow) file{};
        if (opened != nullptr) opened->of = *given->of;
        return opened;
    }

    static ::herr_t close(::H5FD_t* opened) {
        delete static_cast<file*>(opened);
        return 0;
    }

    static ::herr_t query(const ::H5FD_t* /*opened*/, unsigned long* flags) {
        // libhdf5 must not put small datasets into shared blocks, because each dataset has to be aligned
        *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA;
        return 0;
    }

    static ::haddr_t allocate(::H5FD_t* opened, ::H5FD_mem_t type, ::hid_t /*transfer*/, ::hsize_t size) {
        state& of = state_of(opened);
        const std::uint64_t alignment = type == H5FD_MEM_DRAW ? of.alignment_bytes : 1;
        const std::uint64_t begin = rounded_up(of.allocated_bytes, alignment);
        if (begin > max_file_bytes || size > max_file_bytes - begin) return HADDR_UNDEF;
        of.allocated_bytes = begin + size;
        return begin;
    }

    static ::haddr_t end_of_space(const ::H5FD_t* opened, ::H5FD_mem_t /*type*/) {
        return state_of(opened).allocated_bytes;
    }

    static ::herr_t set_end_of_space(::H5FD_t* opened, ::H5FD_mem_t /*type*/, ::haddr_t end) {
        state_of(opened).allocated_bytes = end;
        return 0;
    }

    static ::haddr_t end_of_file(const ::H5FD_t* opened, ::H5FD_mem_t /*type*/) {
        return state_of(opened).written_bytes;
    }

    static ::herr_t read(::H5FD_t* opened, ::H5FD_mem_t /*type*/, ::hid_t /*transfer*/, ::haddr_t offset,
                         std::size_t size, void* destination) {
        const std::span bytes(static_cast<std::byte*>(destination), size);
        std::ranges::fill(bytes, std::byte{});
        state_of(opened).attempt([&](output_file& from) { from.read_at(offset, bytes); });
        return 0;
    }

    static ::herr_t write(::H5FD_t* opened, ::H5FD_mem_t /*type*/, ::hid_t /*transfer*/, ::haddr_t offset,
                          std::size_t size, const void* source) {
        state& of = state_of(opened);
        of.attempt(
            [&](output_file& to) { to.write_at(offset, {static_cast<const std::byte*>(source), size}); });
        of.written_bytes = std::max<std::uint64_t>(of.written_bytes, offset + size);
        return 0;
    }

    static ::herr_t truncate(::H5FD_t* opened, ::hid_t /*transfer*/, ::hbool_t /*closing*/) {
        state& of = state_of(opened);
        if (of.written_bytes == of.allocated_bytes) return 0;
        of.attempt([&](output_file& file) { file.resize(of.allocated_bytes); });
        of.written_bytes = of.allocated_bytes;
        return 0;
    }

    /// Registers the driver for each file, since other code may have closed the library meanwhile.
    static driver_handle registered() {
        ::H5FD_class_t driver{};
#if H5_VERSION_GE(1, 13, 2)
        driver.version = H5FD_CLASS_VERSION;
        driver.value = static_cast<::H5FD_class_value_t>(510);  // as in hdf5_library.cpp
#endif
        driver.name = "pinflow_output";
        driver.maxaddr = max_file_bytes;
        driver.fc_degree = H5F_CLOSE_STRONG;
        driver.fapl_size = sizeof(argument);
        driver.open = open;
        driver.close = close;
        driver.query = query;
        driver.alloc = allocate;
        driver.get_eoa = end_of_space;
        driver.set_eoa = set_end_of_space;
        driver.get_eof = end_of_file;
        driver.read = read;
        driver.write = write;
        driver.truncate = truncate;
        constexpr ::H5FD_mem_t kinds_of_space[] = H5FD_FLMAP_DICHOTOMY;
        std::ranges::copy(kinds_of_space, std::begin(driver.fl_map));
        return {::H5FDregister(&driver), "a driver for it cannot be registered"};
    }
};

// ---- the file --------------------------------------------------------------------------------------------

namespace {

constexpr std::string_view properties = "its properties cannot be set";

/// Creation properties without a time stamp, so that equal arrays give equal files.
property_handle creation_properties(::H5D_layout_t layout) {
    property_handle creation(::H5Pcreate(H5P_DATASET_CREATE), properties);
    checked(::H5Pset_layout(creation.id(), layout), properties);
    checked(::H5Pset_obj_track_times(creation.id(), false), properties);
    return creation;
}

}  // namespace

template <typename Step>
auto output::attempt(Step step) -> decltype(step()) {
    state_->check_not_failed();
    const library_lock lock;
    try {
        if constexpr (std::is_void_v<decltype(step())>) {
            step();
            state_->pass_on_failure();
        } else {
            auto result = step();
            state_->pass_on_failure();
            return result;
        }
    } catch (const format_error& refusal) {
        state_->failed = true;  // the library may have left something half-written
        state_->pass_on_failure();
        throw unsupported(fmt::format("cannot write '{}': {}", path(), refusal.what()));
    }
}

output::output(const std::filesystem::path& path) : state_(std::make_shared<state>(path)) {
    try {
        attempt([&] {
            driver_ = driver::registered();
            const property_handle access(::H5Pcreate(H5P_FILE_ACCESS), properties);
            const driver::argument argument{&state_};
            checked(::H5Pset_driver(access.id(), driver_.id(), &argument), properties);
            checked(::H5Pset_fclose_degree(access.id(), H5F_CLOSE_STRONG), properties);
            // formats that version 1.8, and usually older ones, can read
            checked(::H5Pset_libver_bounds(access.id(), H5F_LIBVER_EARLIEST, H5F_LIBVER_V18), properties);
            file_ = {::H5Fcreate(this->path().c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.id()),
                     "libhdf5 cannot begin it"};
        });
    } catch (...) {
        discard();
        throw;
    }
}

output::~output() {
    discard();
}

void output::discard() noexcept {
    state_->file.reset();  // the library's further writes are discarded
    try {
        const library_lock lock;
        chunked_ = {};
        file_ = {};
        driver_ = {};
    } catch (...) {  // the library is gone, and its handles with it, or memory is exhausted
        static_cast<void>(chunked_.release());
        static_cast<void>(file_.release());
        static_cast<void>(driver_.release());
    }
}

const std::string& output::path() const noexcept {
    return state_->path;
}

object_handle output::create(const std::string& name, const dtype& type, const shape_vector& shape,
                             const property_handle& creation) {
    const std::string attempted = fmt::format("the dataset {} cannot be made", quote(name));
    const type_handle file_type = file_type_of(type);
    const std::vector<::hsize_t> lengths(shape.begin(), shape.end());
    const space_handle space(
        lengths.empty() ? ::H5Screate(H5S_SCALAR)
                        : ::H5Screate_simple(static_cast<int>(lengths.size()), lengths.data(), nullptr),
        attempted);
    const property_handle links(::H5Pcreate(H5P_LINK_CREATE), properties);
    checked(::H5Pset_create_intermediate_group(links.id(), 1), properties);
    checked(::H5Pset_char_encoding(links.id(), H5T_CSET_UTF8), properties);
    return {::H5Dcreate2(file_.id(), name.c_str(), file_type.id(), space.id(), links.id(), creation.id(),
                         H5P_DEFAULT),
            attempted};
}

std::uint64_t output::create_contiguous(const std::string& name, const dtype& type, const shape_vector& shape,
                                        std::uint64_t size_bytes, std::uint64_t alignment_bytes) {
    return attempt([&]() -> std::uint64_t {
        chunked_ = {};
        const property_handle creation = creation_properties(H5D_CONTIGUOUS);
        if (size_bytes > 0) {
            // allocate the space now; the caller writes the elements
            checked(::H5Pset_alloc_time(creation.id(), H5D_ALLOC_TIME_EARLY), properties);
            checked(::H5Pset_fill_time(creation.id(), H5D_FILL_TIME_NEVER), properties);
        }
        state_->alignment_bytes = alignment_bytes;
        const object_handle dataset = create(name, type, shape, creation);
        state_->alignment_bytes = 1;
        if (size_bytes == 0) return 0;
        const ::haddr_t offset = ::H5Dget_offset(dataset.id());  // in a file without a user block
        if (offset == HADDR_UNDEF)
            fail(fmt::format("no space was allocated for the dataset {}", quote(name)));
        return offset;
    });
}

void output::create_chunked(const std::string& name, const dtype& type, const shape_vector& shape,
                            const shape_vector& chunk_shape, unsigned deflate_level) {
    attempt([&] {
        chunked_ = {};
        const property_handle creation = creation_properties(H5D_CHUNKED);
        const std::vector<::hsize_t> lengths(chunk_shape.begin(), chunk_shape.end());
        checked(::H5Pset_chunk(creation.id(), static_cast<int>(lengths.size()), lengths.data()), properties);
        checked(::H5Pset_shuffle(creation.id()), properties);
        checked(::H5Pset_deflate(creation.id(), deflate_level), properties);
        chunked_ = create(name, type, shape, creation);
    });
}

void output::write_at(std::uint64_t offset_bytes, std::span<const std::byte> bytes) {
    state_->check_not_failed();
    state_->attempt([&](output_file& file) { file.write_at(offset_bytes, bytes); });
    state_->pass_on_failure();
    state_->written_bytes = std::max<std::uint64_t>(state_->written_bytes, offset_bytes + bytes.size());
}

void output::write_chunk(std::span<const std::uint64_t> first_element, std::uint32_t filter_mask,
                         std::span<const std::byte> stored) {
    attempt([&] {
        const std::vector<::hsize_t> first(first_element.begin(), first_element.end());
        checked(::H5Dwrite_chunk(chunked_.id(), H5P_DEFAULT, filter_mask, first.data(), stored.size(),
                                 stored.data()),
                "a chunk cannot be written");
    });
}

void output::commit() {
    attempt([&] {
        chunked_ = {};
        checked(::H5Fclose(file_.release()), "libhdf5 cannot complete it");
        driver_ = {};
    });
    state_->attempt([](output_file& file) { file.commit(); });
    state_->pass_on_failure();
}

}  // namespace pinflow::detail::hdf5
