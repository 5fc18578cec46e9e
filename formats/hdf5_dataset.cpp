#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "formats/hdf5_filters.hpp"
#include "formats/hdf5_handles.hpp"
#include "formats/throw_formatted.hpp"
#include "src/core/quote.hpp"

/// Describes a dataset: its type, shape, storage and the locations of its bytes.
namespace pinflow::detail::hdf5 {

namespace {

/// HDF5 keeps compact datasets within a message of a header.
constexpr std::uint64_t max_compact_bytes = std::uint64_t{1} << 16;
/// A large grid of chunks is listed only if at least one in this many was written.
constexpr std::uint64_t sparse_part = 64;

// the messages of errors continue after the dataset's name
constexpr std::string_view not_examinable = "cannot be examined";
constexpr std::string_view unreadable = "cannot be read";

class describer {
 public:
    describer(const open_file& file, const object_handle& dataset, hdf5_description& description)
        : file_(file),
          dataset_(dataset),
          description_(description),
          creation_(::H5Dget_create_plist(dataset.id()), not_examinable),
          layout_(::H5Pget_layout(creation_.id())) {}

    void find_type_and_shape();
    void find_storage(detail_wanted wanted, std::uint64_t payload_bytes);

 private:
    void find_fill();
    void find_contiguous(std::uint64_t payload_bytes);
    void find_compact(detail_wanted wanted, std::uint64_t payload_bytes);
    void find_chunk_shape();
    void find_filters();
    void find_chunks(detail_wanted wanted);
    [[nodiscard]] std::uint64_t indexed_chunk_count() const;
    void leave_to_library(std::string why);
    void set_absent();

    const open_file& file_;
    const object_handle& dataset_;
    hdf5_description& description_;
    property_handle creation_;
    ::H5D_layout_t layout_;
    type_handle type_;
    std::uint64_t element_bytes_ = 0;  ///< including all elements of an array type
    std::size_t rank_ = 0;             ///< without the axes of an array type
    bool fill_varies_ = false;         ///< within one element of an array type
    untouched_memory memory_;
};

// ---- type, shape, fill value -----------------------------------------------------------------------------

void describer::find_type_and_shape() {
    // checked first: to get the shape of a virtual dataset, the library would open other files
    if (layout_ == H5D_LAYOUT_ERROR) fail(not_examinable);
    if (layout_ == H5D_VIRTUAL)
        throw_unsupported("is virtual: it shows parts of other datasets, which are not opened; open those");
    if (checked(::H5Pget_external_count(creation_.id()), not_examinable) > 0) {
        throw_unsupported("stores its data in other files (external storage), which are not opened");
    }
    type_ = {::H5Dget_type(dataset_.id()), not_examinable};
    element_type element = element_type_of(type_.id());
    description_.dtype = std::move(element.type);

    const space_handle space(::H5Dget_space(dataset_.id()), not_examinable);
    const ::H5S_class_t kind = ::H5Sget_simple_extent_type(space.id());
    if (kind == H5S_NULL) throw_unsupported("has a type, but no shape and no elements (a null dataspace)");
    if (kind != H5S_SCALAR && kind != H5S_SIMPLE) fail(not_examinable);
    std::array<::hsize_t, H5S_MAX_RANK> lengths{};
    const int rank = checked(::H5Sget_simple_extent_ndims(space.id()), not_examinable);
    if (rank > H5S_MAX_RANK) throw_format_error("has {} axes: HDF5 allows {}", rank, H5S_MAX_RANK);
    checked(::H5Sget_simple_extent_dims(space.id(), lengths.data(), nullptr), not_examinable);
    rank_ = static_cast<std::size_t>(rank);
    description_.shape.assign(lengths.begin(), lengths.begin() + rank);
    description_.shape.insert(description_.shape.end(), element.shape.begin(), element.shape.end());

    element_bytes_ = ::H5Tget_size(type_.id());
    std::uint64_t expected_bytes = description_.dtype.size_bytes();
    for (const std::uint64_t length : element.shape) {
        // on overflow the product stays different from element_bytes_, which is reported below
        if (length != 0 && expected_bytes > std::numeric_limits<std::uint64_t>::max() / length) break;
        expected_bytes *= length;
    }
    if (element_bytes_ != expected_bytes) {
        throw_format_error("has elements of {} bytes, but their parts take {}", element_bytes_,
                           expected_bytes);
    }
}

void describer::find_fill() {
    ::H5D_fill_value_t status = H5D_FILL_VALUE_ERROR;
    checked(::H5Pfill_value_defined(creation_.id(), &status), not_examinable);
    ::H5D_fill_time_t when = H5D_FILL_TIME_ERROR;
    checked(::H5Pget_fill_time(creation_.id(), &when), not_examinable);
    // if nothing is ever filled, the library leaves memory unchanged; h5py and others read zeros there
    if (status != H5D_FILL_VALUE_USER_DEFINED || when == H5D_FILL_TIME_NEVER) return;
    if (element_bytes_ > file_.size_bytes()) {
        throw_format_error("has a fill value of {} bytes, but the file has {}", element_bytes_,
                           file_.size_bytes());
    }
    std::vector<std::byte> value(static_cast<std::size_t>(element_bytes_));
    checked(::H5Pget_fill_value(creation_.id(), type_.id(), value.data()),
            "has a fill value that cannot be read");
    if (std::ranges::all_of(value, [](std::byte byte) { return byte == std::byte{}; })) return;
    const auto size = static_cast<std::size_t>(description_.dtype.size_bytes());
    for (std::size_t begin = size; begin < value.size() && !fill_varies_; begin += size) {
        fill_varies_ =
            !std::ranges::equal(std::span(value).first(size), std::span(value).subspan(begin, size));
    }
    value.resize(size);
    if (!fill_varies_) description_.fill = std::move(value);
}

// ---- storage ---------------------------------------------------------------------------------------------

void describer::find_storage(detail_wanted wanted, std::uint64_t payload_bytes) {
    find_fill();
    if (payload_bytes == 0) return set_absent();
    switch (layout_) {
        case H5D_CONTIGUOUS:
            return find_contiguous(payload_bytes);
        case H5D_COMPACT:
            return find_compact(wanted, payload_bytes);
        case H5D_CHUNKED:
            find_chunk_shape();
            find_filters();
            if (const std::string why = not_decoded_reason(description_.filters); !why.empty()) {
                leave_to_library(why);
            } else {
                description_.storage = hdf5_storage::chunked;
                find_chunks(wanted);
            }
            return;
        default:
            throw_unsupported("is stored in a way that pinflow does not know");
    }
}

void describer::set_absent() {
    if (fill_varies_) return leave_to_library("its fill value differs within an element");
    description_.storage = hdf5_storage::absent;
    description_.chunk_shape.clear();
    description_.filters.clear();
    description_.chunks.clear();
}

void describer::leave_to_library(std::string why) {
    for (const hdf5_filter& filter : description_.filters) {
        unsigned abilities = 0;
        if (::H5Zfilter_avail(filter.id) <= 0 || ::H5Zget_filter_info(filter.id, &abilities) < 0 ||
            (abilities & H5Z_FILTER_CONFIG_DECODE_ENABLED) == 0) {
            throw_unsupported(
                "has to be read by libhdf5 ({}), and this build of libhdf5 lacks the filter {}{}{}", why,
                filter.id, filter.name.empty() ? "" : " " + quote(filter.name),
                filter.id == filter_id::lzf && !knows_lzf() ? "; build pinflow with liblzf" : "");
        }
    }
    description_.storage = hdf5_storage::library;
    description_.library_reason = std::move(why);
    description_.chunks.clear();
}

void describer::find_contiguous(std::uint64_t payload_bytes) {
    ::H5D_space_status_t status = H5D_SPACE_STATUS_ERROR;
    checked(::H5Dget_space_status(dataset_.id(), &status), not_examinable);
    if (status == H5D_SPACE_STATUS_NOT_ALLOCATED) return set_absent();
    // a size of 0 with an offset is damage: libhdf5 would read the bytes at that offset
    const ::hsize_t stored_bytes = ::H5Dget_storage_size(dataset_.id());
    const ::haddr_t reported_offset = ::H5Dget_offset(dataset_.id());
    if (stored_bytes != payload_bytes)
        throw_format_error("takes {} bytes, but has {} in the file", payload_bytes, stored_bytes);
    if (payload_bytes > file_.size_bytes()) {
        throw_format_error("has {} bytes, but the file has {}", payload_bytes, file_.size_bytes());
    }
    // only the first element; a dataset without axes has no other
    const std::vector<::hsize_t> origin(rank_, 0);
    const std::vector<::hsize_t> one(rank_, 1);
    const int rank = static_cast<int>(rank_);
    space_handle from;
    space_handle to;
    if (rank_ > 0) {
        from = {::H5Dget_space(dataset_.id()), not_examinable};
        checked(::H5Sselect_hyperslab(from.id(), H5S_SELECT_SET, origin.data(), nullptr, one.data(), nullptr),
                not_examinable);
        to = {::H5Screate_simple(rank, one.data(), nullptr), not_examinable};
    }
    recording records;
    checked(::H5Dread(dataset_.id(), type_.id(), rank_ > 0 ? to.id() : H5S_ALL,
                      rank_ > 0 ? from.id() : H5S_ALL, H5P_DEFAULT, memory_.of(element_bytes_)),
            unreadable);
    const recorded_read read = records.take();
    const bool agrees = reported_offset == read.offset_bytes ||
                        reported_offset + file_.user_block_bytes() == read.offset_bytes;
    if (read.count != 1 || read.size_bytes != element_bytes_ || !agrees) {
        return leave_to_library(
            fmt::format("libhdf5 reports the data at byte {}, but reads it elsewhere", reported_offset));
    }
    description_.storage = hdf5_storage::contiguous;
    description_.offset_bytes = read.offset_bytes;
}

void describer::find_compact(detail_wanted wanted, std::uint64_t payload_bytes) {
    const ::hsize_t stored_bytes = ::H5Dget_storage_size(dataset_.id());
    if (stored_bytes != payload_bytes || payload_bytes > max_compact_bytes) {
        throw_format_error("takes {} bytes, but has {} in the metadata", payload_bytes, stored_bytes);
    }
    description_.storage = hdf5_storage::compact;
    if (wanted == detail_wanted::listing) return;
    description_.compact_data.resize(static_cast<std::size_t>(payload_bytes));
    checked(
        ::H5Dread(dataset_.id(), type_.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, description_.compact_data.data()),
        unreadable);
}

// ---- chunks ----------------------------------------------------------------------------------------------

void describer::find_chunk_shape() {
    std::array<::hsize_t, H5S_MAX_RANK> lengths{};
    const int rank = checked(::H5Pget_chunk(creation_.id(), H5S_MAX_RANK, lengths.data()), not_examinable);
    shape_vector& shape = description_.chunk_shape;
    if (rank < 1 || static_cast<std::size_t>(rank) != rank_)
        throw_format_error("has {} axes, but its chunks have {}", rank_, rank);
    shape.assign(lengths.begin(), lengths.begin() + rank);
    if (std::ranges::find(shape, 0u) != shape.end())
        throw_format_error("has chunks of shape {}", to_string(shape));
    // the axes of an array type are never divided
    shape.insert(shape.end(), description_.shape.begin() + rank, description_.shape.end());
}

void describer::find_filters() {
    const int count = checked(::H5Pget_nfilters(creation_.id()), not_examinable);
    if (count > H5Z_MAX_NFILTERS)
        throw_format_error("has {} filters: HDF5 allows {}", count, H5Z_MAX_NFILTERS);
    for (unsigned index = 0; index < static_cast<unsigned>(count); ++index) {
        // no filter that pinflow knows has more than a few parameters
        constexpr std::size_t max_parameters = 256;
        std::array<char, 256> name{};
        std::array<unsigned, max_parameters> parameters{};
        std::size_t parameter_count = parameters.size();
        unsigned flags = 0;
        unsigned abilities = 0;
        const ::H5Z_filter_t id =
            ::H5Pget_filter2(creation_.id(), index, &flags, &parameter_count, parameters.data(),
                             name.size() - 1, name.data(), &abilities);
        if (id < 0) fail("has filters that cannot be read");
        parameter_count = std::min(parameter_count, parameters.size());
        description_.filters.push_back(
            {id,
             name.data(),
             {parameters.begin(), parameters.begin() + static_cast<std::ptrdiff_t>(parameter_count)}});
    }
}

void describer::find_chunks(detail_wanted wanted) {
    const auto count = hdf5_grid_size(description_.shape, description_.chunk_shape);
    if (!count || *count > max_hdf5_chunks) {
        return leave_to_library(fmt::format("it has more than {} chunks", max_hdf5_chunks));
    }
    if (wanted == detail_wanted::listing) return;
    if (*count > many_hdf5_chunks) {
        const std::uint64_t written = indexed_chunk_count();
        if (written < *count / sparse_part) {
            return leave_to_library(
                fmt::format("only {} of its {} chunks were ever written", written, *count));
        }
    }
    std::vector<::hsize_t> position(rank_, 0);
    chunk_finder finder(file_, dataset_, description_);
    std::uint64_t found = 0;
    description_.chunks.resize(static_cast<std::size_t>(*count));
    for (hdf5_chunk& chunk : description_.chunks) {
        chunk = finder.find(position);
        found += chunk.size_bytes > 0 ? 1 : 0;
        for (std::size_t axis = rank_; axis-- > 0;) {  // the next one, in C order
            const std::uint64_t left = description_.shape[axis] - position[axis];
            if (left > description_.chunk_shape[axis]) {
                position[axis] += description_.chunk_shape[axis];
                break;
            }
            position[axis] = 0;
        }
    }
    if (found == *count) return;
    // A version 1 B-tree has no checksum. A chunk with damaged coordinates is in it, but cannot be found by
    // them.
    if (const std::uint64_t indexed = indexed_chunk_count(); indexed > found)
        throw_format_error("has {} chunks in its index, but only {} have valid coordinates for its shape {}",
                           indexed, found, to_string(description_.shape));
    if (found == 0) return set_absent();
    if (fill_varies_) leave_to_library("its fill value differs within an element");
}

/// The number of chunks in the dataset's index, whatever their coordinates.
std::uint64_t describer::indexed_chunk_count() const {
    const space_handle space(::H5Dget_space(dataset_.id()), not_examinable);
    ::hsize_t count = 0;
    checked(::H5Dget_num_chunks(dataset_.id(), space.id(), &count), "has chunks that cannot be counted");
    return count;
}

/// Puts the dataset's name in front of error messages.
template <typename Function>
void naming_dataset(const std::string& name, Function function) {
    const auto sentence = [&](const error& failure) {
        return fmt::format("the dataset {} {}", quote(name), failure.what());
    };
    try {
        function();
    } catch (const format_error& failure) {
        throw format_error(sentence(failure));
    } catch (const unsupported& failure) {
        throw unsupported(sentence(failure));
    }
}

}  // namespace

hdf5_description describe(const open_file& file, const object_handle& dataset, const std::string& name,
                          detail_wanted wanted) {
    hdf5_description description;
    description.name = name;
    std::optional<describer> maker;
    naming_dataset(name, [&] {
        maker.emplace(file, dataset, description);
        maker->find_type_and_shape();
    });
    const std::uint64_t size_bytes = payload_bytes(description);
    naming_dataset(name, [&] { maker->find_storage(wanted, size_bytes); });
    return description;
}

}  // namespace pinflow::detail::hdf5
