#include "pinflow/formats/npy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "formats/npy_file.hpp"
#include "formats/npy_header.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/checked.hpp"
#include "src/core/output_file.hpp"

namespace pinflow {

namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
    return std::as_bytes(std::span(text));
}

npy_header read_header(const input_file& file) {
    // as long as most headers are: numpy pads them to a multiple of 64 bytes
    constexpr std::uint64_t typical_size_bytes = 128;
    static_assert(typical_size_bytes >= detail::npy_preamble_size_bytes);
    std::vector<std::byte> header(static_cast<std::size_t>(std::min(typical_size_bytes, file.size_bytes())));
    file.read(0, header);
    const auto preamble =
        std::span<const std::byte>(header).first(std::min(header.size(), detail::npy_preamble_size_bytes));
    const std::size_t begin = header.size();
    const auto size_bytes =
        static_cast<std::size_t>(detail::npy_data_offset_bytes(preamble, file.size_bytes()));
    if (size_bytes > begin) {
        header.resize(size_bytes);
        file.read(begin, std::span(header).subspan(begin));
    }
    return parse_npy_header(header, file.size_bytes());
}

// ---- writing a view ---------------------------------------------------------------------------------------

/// Elements of a view that are contiguous in C order, as (trailing axes, bytes).
struct packed_run {
    std::size_t axes = 0;
    std::uint64_t size_bytes = 0;
};

packed_run max_packed_run(const array_view& view) {
    packed_run run{0, view.dtype().size_bytes()};
    for (std::size_t axis = view.shape().size(); axis-- > 0;) {
        if (view.strides_bytes()[axis] != static_cast<std::int64_t>(run.size_bytes)) break;
        run.size_bytes *= view.shape()[axis];
        ++run.axes;
    }
    return run;
}

/// Writes the elements in C order, run by run; the file collects what is small.
void write_strided(detail::output_file& file, const array_view& view) {
    const packed_run run = max_packed_run(view);
    const std::size_t outer_axes = view.shape().size() - run.axes;
    std::vector<std::uint64_t> index(outer_axes);
    const std::byte* position = view.data();
    for (;;) {
        file.write({position, static_cast<std::size_t>(run.size_bytes)});
        std::size_t axis = outer_axes;
        for (; axis > 0; --axis) {
            const std::int64_t stride = view.strides_bytes()[axis - 1];
            if (++index[axis - 1] < view.shape()[axis - 1]) {
                position += stride;
                break;
            }
            position -= stride * static_cast<std::int64_t>(view.shape()[axis - 1] - 1);
            index[axis - 1] = 0;
        }
        if (axis == 0) return;
    }
}

/// Puts the path in front of messages that have none.
template <typename Function>
auto naming(const std::filesystem::path& path, Function function) -> decltype(function()) {
    try {
        return function();
    } catch (const invalid_argument& failure) {
        throw invalid_argument(fmt::format("cannot write '{}': {}", path.string(), failure.what()));
    }
}

}  // namespace

array detail::open_npy_file(std::shared_ptr<const input_file> file, array_mapping mapping) {
    const auto sentence = [&](const std::exception& failure) {
        return fmt::format("cannot open '{}': {}", file->path(), failure.what());
    };
    const auto open = mapping == array_mapping::own ? array::of_file : array::of_file_unmapped;
    try {
        npy_header header = read_header(*file);
        return open(file, header.data_offset_bytes, std::move(header.dtype), std::move(header.shape),
                    header.fortran_order);
    } catch (const format_error& failure) {
        throw format_error(sentence(failure));
    } catch (const unsupported& failure) {
        throw unsupported(sentence(failure));
    } catch (const data_changed& failure) {
        throw data_changed(sentence(failure));
    } catch (const system_failure& failure) {
        throw system_failure(sentence(failure), failure.code());
    }
}

array open_npy(const std::filesystem::path& path) {
    return detail::open_npy_file(std::make_shared<const input_file>(path), detail::array_mapping::own);
}

void write_npy(const std::filesystem::path& path, const array_view& view) {
    if (view.is_moved_from())
        throw invalid_argument(
            fmt::format("cannot write '{}': the view was moved from, so it has no elements", path.string()));
    if (view.data() == nullptr && view.size_bytes() > 0)
        throw invalid_argument(fmt::format("cannot write '{}': the array of shape {} has no data",
                                           path.string(), to_string(view.shape())));
    const bool fortran_order = !view.c_contiguous() && view.fortran_contiguous();
    const std::string header =
        naming(path, [&] { return format_npy_header(view.dtype(), view.shape(), fortran_order); });
    detail::output_file file(path);
    file.write(bytes_of(header));
    if (view.size() > 0) {
        if (fortran_order || view.c_contiguous()) {
            file.write({view.data(), static_cast<std::size_t>(view.size_bytes())});
        } else {
            write_strided(file, view);
        }
    }
    file.commit();
}

struct npy_writer::state {
    state(const std::filesystem::path& path, pinflow::dtype element_type, shape_vector first_shape,
          std::uint64_t alignment, bool shape_grows)
        : type(std::move(element_type)),
          shape(std::move(first_shape)),
          alignment_bytes(alignment),
          grows(shape_grows),
          unit_bytes(naming(path, [&] { return unit_size_bytes(); })),
          header(naming(path, [&] { return format_npy_header(type, shape, false, alignment_bytes); })),
          file(path) {
        file.write(bytes_of(header));
    }

    /// The unit that must arrive whole, in bytes: a row of a growing file, otherwise the whole array.
    std::uint64_t unit_size_bytes() const {
        const auto lengths = std::span(shape).subspan(grows ? 1 : 0);
        std::uint64_t size = element_count(lengths);
        if (!detail::multiply(size, type.size_bytes(), size)) {
            throw invalid_argument(
                fmt::format("an array of {} and shape {} is too large", type.descr(), to_string(lengths)));
        }
        if (grows && size == 0) {
            throw invalid_argument(fmt::format(
                "rows of shape {} have no bytes by which they could be counted", to_string(lengths)));
        }
        return size;
    }

    /// @return whether the file will hold what its header says.
    bool complete() const noexcept {
        return grows ? written_bytes % unit_bytes == 0 : written_bytes == unit_bytes;
    }

    /// The expected size, for messages.
    std::string promise() const {
        return grows ? fmt::format("whole rows of shape {} of {} have {} bytes each",
                                   to_string(std::span(shape).subspan(1)), type.descr(), unit_bytes)
                     : fmt::format("shape {} of {} declares {} bytes", to_string(shape), type.descr(),
                                   unit_bytes);
    }

    pinflow::dtype type;
    shape_vector shape;  ///< of a file that grows, with 0 rows
    std::uint64_t alignment_bytes;
    bool grows;
    std::uint64_t unit_bytes;
    std::uint64_t written_bytes = 0;
    std::string header;
    detail::output_file file;
    bool finished = false;
};

npy_writer::npy_writer(const std::filesystem::path& path, const pinflow::dtype& type, shape_vector shape,
                       std::uint64_t alignment_bytes)
    : npy_writer(std::make_unique<state>(path, type, std::move(shape), alignment_bytes, false)) {}

npy_writer npy_writer::of_rows(const std::filesystem::path& path, const pinflow::dtype& type,
                               const shape_vector& row_shape, std::uint64_t alignment_bytes) {
    shape_vector shape = {0};
    shape.insert(shape.end(), row_shape.begin(), row_shape.end());
    return npy_writer(std::make_unique<state>(path, type, std::move(shape), alignment_bytes, true));
}

npy_writer::npy_writer(std::unique_ptr<state> begun) noexcept : state_(std::move(begun)) {}
npy_writer::npy_writer(npy_writer&&) noexcept = default;
npy_writer& npy_writer::operator=(npy_writer&&) noexcept = default;
npy_writer::~npy_writer() = default;

npy_writer::state& npy_writer::valid_state() const {
    if (!state_) throw invalid_argument("cannot use a moved-from npy_writer");
    return *state_;
}

void npy_writer::write(std::span<const std::byte> bytes) {
    state& own = valid_state();
    if (own.finished) {
        throw invalid_argument(
            fmt::format("cannot write {} bytes to '{}': it is finished", bytes.size(), own.file.path()));
    }
    if (!own.grows && bytes.size() > own.unit_bytes - own.written_bytes) {
        throw invalid_argument(
            fmt::format("cannot write {} more bytes of data to '{}': {}, and {} are written", bytes.size(),
                        own.file.path(), own.promise(), own.written_bytes));
    }
    own.file.write(bytes);
    own.written_bytes += bytes.size();
}

void npy_writer::finish() {
    state& own = valid_state();
    if (own.finished) {
        throw invalid_argument(fmt::format("cannot finish '{}' twice", own.file.path()));
    }
    if (!own.complete()) {
        throw invalid_argument(fmt::format("cannot finish '{}': {}, but {} were written", own.file.path(),
                                           own.promise(), own.written_bytes));
    }
    if (own.grows && own.written_bytes > 0) {
        own.shape[0] = own.written_bytes / own.unit_bytes;
        // has the same size as the header that it replaces, which has room for any row count
        const auto header = format_npy_header(own.type, own.shape, false, own.alignment_bytes);
        own.file.write_at(0, bytes_of(header));
    }
    own.file.commit();
    own.finished = true;
}

}  // namespace pinflow
