#include "pinflow/formats/npz.hpp"

#include <fmt/format.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <optional>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "formats/element_streams.hpp"
#include "formats/npy_header.hpp"
#include "formats/npz_member.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/checked.hpp"
#include "src/core/mapping_reason.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/quote.hpp"
#include "src/core/swap_plan.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow {

namespace detail {

npz_member begin_npz_member(const zip_entry& entry, const read_bytes& read, std::size_t piece_bytes) {
    check_zip_member_readable(entry);
    npz_member member{{dtype::of<std::byte>(), false, {}, 0}, 0, zip_data_offset_bytes(entry, read), nullptr};
    member.reader = std::make_unique<zip_member_reader>(entry, member.data_offset_bytes, read, piece_bytes);
    // the parser of the header does not know the member's name
    const auto naming_member = [&](auto parse) {
        const auto sentence = [&](const error& failure) {
            const bool is_of_torch = entry.name.ends_with("/data.pkl");
            return fmt::format(
                "the member {}: {}{}", quote(entry.name), failure.what(),
                is_of_torch ? ". torch.save writes such members: save the tensors as safetensors" : "");
        };
        try {
            return parse();
        } catch (const format_error& failure) {
            throw format_error(sentence(failure));
        } catch (const unsupported& failure) {
            throw unsupported(sentence(failure));
        }
    };
    std::vector<std::byte> header(
        static_cast<std::size_t>(std::min<std::uint64_t>(npy_preamble_size_bytes, entry.size_bytes)));
    member.reader->read(header);
    const std::size_t preamble_bytes = header.size();
    header.resize(static_cast<std::size_t>(
        naming_member([&] { return npy_data_offset_bytes(header, entry.size_bytes); })));
    if (header.size() > preamble_bytes) member.reader->read(std::span(header).subspan(preamble_bytes));
    member.header = naming_member([&] { return parse_npy_header(header, entry.size_bytes); });
    member.payload_bytes = element_count(member.header.shape) * member.header.dtype.size_bytes();
    // a .npy file may have bytes after its elements, but no writer of archives makes such members, and they
    // could make us inflate bytes that no header declares
    if (member.header.data_offset_bytes + member.payload_bytes != entry.size_bytes) {
        throw format_error(fmt::format("the member {} has {} bytes, but its .npy header declares {}",
                                       quote(entry.name), entry.size_bytes,
                                       member.header.data_offset_bytes + member.payload_bytes));
    }
    return member;
}

}  // namespace detail

namespace {

using detail::npz_member;
using detail::zip_entry;

/// Bytes of a deflated member per read: `peek_bytes` if only the header is needed, `piece_bytes` if the whole
/// member is read.
constexpr std::size_t peek_bytes = 4096;
constexpr std::size_t piece_bytes = 256 << 10;

/// numpy's name of the array in a member.
std::string_view array_name(std::string_view member_name) {
    if (member_name.ends_with(".npy")) member_name.remove_suffix(4);
    return member_name;
}

/// Puts the path in front of error messages.
template <typename Function>
auto naming(const input_file& file, Function function) -> decltype(function()) {
    const auto sentence = [&](const error& failure) {
        return fmt::format("cannot open '{}': {}", file.path(), failure.what());
    };
    try {
        return function();
    } catch (const format_error& failure) {
        throw format_error(sentence(failure));
    } catch (const unsupported& failure) {
        throw unsupported(sentence(failure));
    } catch (const invalid_argument& failure) {
        throw invalid_argument(sentence(failure));
    } catch (const data_changed& failure) {
        throw data_changed(sentence(failure));
    } catch (const system_failure& failure) {
        throw system_failure(sentence(failure), failure.code());
    }
}

/// An open file and its directory.
class archive {
 public:
    explicit archive(const std::filesystem::path& path);
    archive(const archive&) = delete;
    archive& operator=(const archive&) = delete;

    const std::shared_ptr<const input_file>& file() const noexcept { return file_; }
    const detail::read_bytes& read() const noexcept { return read_; }
    std::span<const zip_entry> entries() const noexcept { return entries_; }
    /// Finds a member by name.
    /// @throws invalid_argument if there is none; the message names the existing members.
    const zip_entry& find(std::string_view name) const;

 private:
    std::shared_ptr<const input_file> file_;
    detail::read_bytes read_;
    std::vector<zip_entry> entries_;
    std::unordered_map<std::string_view, const zip_entry*> by_name_;
};

archive::archive(const std::filesystem::path& path)
    : file_(std::make_shared<const input_file>(path)),
      read_([file = file_](std::uint64_t offset_bytes, std::span<std::byte> destination) {
          file->read(offset_bytes, destination);
      }) {
    naming(*file_, [&] {
        entries_ = detail::read_zip_directory(file_->size_bytes(), read_);
        for (const zip_entry& entry : entries_) {
            if (!by_name_.emplace(array_name(entry.name), &entry).second) {
                throw format_error(
                    fmt::format("two members are arrays named {}", detail::quote(array_name(entry.name))));
            }
        }
    });
}

const zip_entry& archive::find(std::string_view name) const {
    // the listed name first: "a.npy" may be the array in "a.npy.npy"
    for (const std::string_view wanted : {name, array_name(name)}) {
        if (const auto found = by_name_.find(wanted); found != by_name_.end()) return *found->second;
    }
    constexpr std::size_t max_names = 20;
    std::string names;
    for (const zip_entry& entry : entries().first(std::min(entries_.size(), max_names))) {
        names += (names.empty() ? "" : ", ") + detail::quote(array_name(entry.name));
    }
    if (entries_.empty()) names = "no arrays";
    if (entries_.size() > max_names) names += fmt::format(" and {} more", entries_.size() - max_names);
    throw invalid_argument(fmt::format("there is no array {} in it; it has {}", detail::quote(name), names));
}

// ---- inflating --------------------------------------------------------------------------------------------

/// Memory for a deflated member, its .npy header included.
class inflated_member {
 public:
    inflated_member(std::size_t index, zip_entry entry, npz_member member)
        : index_(index), entry_(std::move(entry)), member_(std::move(member)) {}

    std::size_t index() const noexcept { return index_; }
    const zip_entry& entry() const noexcept { return entry_; }
    /// All the memory that the member needs; the elements begin at a page boundary.
    std::uint64_t memory_bytes() const noexcept { return begin_bytes() + entry_.size_bytes; }

    void allocate() { memory_ = memory_region::anonymous(memory_bytes()); }
    void inflate(detail::zip_inflater& inflater, const detail::read_bytes& read) const {
        inflater.inflate(entry_, member_.data_offset_bytes, read, memory_.bytes().subspan(begin_bytes()));
    }
    /// The array, which takes the memory over.
    array take() &&;

 private:
    /// The offset of the .npy header in memory, such that it ends at the end of a page.
    std::uint64_t begin_bytes() const noexcept {
        constexpr std::uint64_t page_bytes = 4096;
        return (page_bytes - member_.header.data_offset_bytes % page_bytes) % page_bytes;
    }

    std::size_t index_;  // among the names asked for
    zip_entry entry_;
    npz_member member_;
    memory_region memory_;
};

array inflated_member::take() && {
    memory_region elements;
    if (member_.payload_bytes > 0) {
        auto* const data = memory_.data() + begin_bytes() + member_.header.data_offset_bytes;
        auto all = std::make_unique<memory_region>(std::move(memory_));
        elements = memory_region(
            data, member_.payload_bytes,
            [](std::byte*, std::uint64_t, void* region) noexcept {
                delete static_cast<memory_region*>(region);
            },
            all.release());
    }
    return array::of_memory(std::move(elements), std::move(member_.header.dtype),
                            std::move(member_.header.shape), member_.header.fortran_order,
                            "the member is compressed, so it is inflated into memory");
}

/// Checks the memory for all members and for what `thread_count` threads read at a time.
/// @throws system_failure if that does not fit.
void check_memory(std::span<const inflated_member> members, std::size_t thread_count) {
    if (members.empty()) return;
    std::uint64_t needed_bytes = 0;
    std::uint64_t compressed_bytes = 0;
    for (const inflated_member& member : members) {
        needed_bytes = detail::saturated(1, needed_bytes, member.memory_bytes());
        compressed_bytes = std::max(compressed_bytes, member.entry().compressed_bytes);
    }
    const inflated_member& largest = *std::ranges::max_element(members, {}, &inflated_member::memory_bytes);
    const std::string others = members.size() == 1 ? "" : fmt::format(" and {} more", members.size() - 1);
    const std::uint64_t all_bytes = detail::saturated(thread_count, compressed_bytes, needed_bytes);
    detail::require_memory(
        all_bytes,
        fmt::format("cannot inflate the member {} of {} bytes{}: that takes {} bytes of memory",
                    detail::quote(largest.entry().name), largest.entry().size_bytes, others, all_bytes),
        "save the file with numpy.savez: its members are mapped, not inflated");
}

/// Inflates all members, each on one core, the largest first, so that no long one runs alone at the end.
void inflate_all(std::span<inflated_member> members, const detail::read_bytes& read) {
    const auto cores = static_cast<std::size_t>(tbb::this_task_arena::max_concurrency());
    const std::size_t threads = std::min(cores, members.size());
    check_memory(members, threads);
    for (inflated_member& member : members)
        member.allocate();
    std::ranges::sort(members, std::ranges::greater{}, &inflated_member::memory_bytes);
    std::atomic<std::size_t> next = 0;
    const auto work = [&](std::size_t) {
        detail::zip_inflater inflater;
        try {
            for (std::size_t index; (index = next++) < members.size();)
                members[index].inflate(inflater, read);
        } catch (...) {
            next = members.size();  // the others need not continue
            throw;
        }
    };
    detail::run_in_parallel(threads, work);
}

std::vector<array> open_members(const archive& archive, std::span<const std::string> names) {
    std::vector<std::optional<array>> arrays(names.size());
    std::vector<inflated_member> deflated;
    for (std::size_t index = 0; index < names.size(); ++index) {
        const zip_entry& entry = archive.find(names[index]);
        npz_member member = detail::begin_npz_member(entry, archive.read(), peek_bytes);
        member.reader.reset();  // only the header was needed
        if (entry.deflated()) {
            deflated.emplace_back(index, entry, std::move(member));
        } else {
            arrays[index] =
                array::of_file(archive.file(), member.data_offset_bytes + member.header.data_offset_bytes,
                               member.header.dtype, member.header.shape, member.header.fortran_order);
        }
    }
    inflate_all(deflated, archive.read());
    for (inflated_member& member : deflated) {
        const std::size_t index = member.index();
        arrays[index] = std::move(member).take();
    }
    std::vector<array> result;
    result.reserve(arrays.size());
    for (std::size_t index = 0; index < arrays.size(); ++index) {
        const std::string_view name = array_name(archive.find(names[index]).name);
        result.push_back(arrays[index]->labelled(detail::array_label(archive.file()->path(), name)));
    }
    return result;
}

// ---- element by element -----------------------------------------------------------------------------------

/// A member with elements in C order, which is checked while it is read.
class member_elements final : public detail::element_stream {
 public:
    member_elements(std::shared_ptr<const input_file> file, npz_member member)
        : file_(std::move(file)),
          dtype_(member.header.dtype.little_endian()),
          shape_(std::move(member.header.shape)),
          left_bytes_(member.payload_bytes),
          swap_(member.header.dtype),
          reader_(std::move(member.reader)) {}

    const pinflow::dtype& dtype() const noexcept override { return dtype_; }
    const shape_vector& shape() const noexcept override { return shape_; }

    void read(std::span<std::byte> destination) override {
        if (!detail::is_multiple(destination.size(), dtype_.size_bytes()) ||
            destination.size() > left_bytes_) {
            throw invalid_argument(
                fmt::format("cannot read {} bytes: elements of {} take {} bytes each, and {} bytes are left",
                            destination.size(), dtype_.descr(), dtype_.size_bytes(), left_bytes_));
        }
        naming(*file_, [&] { reader_->read(destination); });
        swap_.apply(destination);
        left_bytes_ -= destination.size();
    }

    void finish() override {
        naming(*file_, [&] { reader_->finish(); });
        file_->check_unchanged();
    }

 private:
    std::shared_ptr<const input_file> file_;
    pinflow::dtype dtype_;
    shape_vector shape_;
    std::uint64_t left_bytes_;
    detail::swap_plan swap_;
    std::unique_ptr<detail::zip_member_reader> reader_;
};

/// A stored member whose elements are not in C order. Checking its CRC-32 takes a second pass.
class reordered_elements final : public detail::element_stream {
 public:
    reordered_elements(std::shared_ptr<const input_file> file, std::unique_ptr<element_stream> elements,
                       std::unique_ptr<detail::zip_member_reader> reader)
        : file_(std::move(file)), elements_(std::move(elements)), reader_(std::move(reader)) {}

    const pinflow::dtype& dtype() const noexcept override { return elements_->dtype(); }
    const shape_vector& shape() const noexcept override { return elements_->shape(); }
    void read(std::span<std::byte> destination) override { elements_->read(destination); }
    void finish() override {
        naming(*file_, [&] { reader_->finish(); });
        elements_->finish();
    }

 private:
    std::shared_ptr<const input_file> file_;
    std::unique_ptr<element_stream> elements_;
    std::unique_ptr<detail::zip_member_reader> reader_;
};

class npz_elements final : public detail::element_file {
 public:
    explicit npz_elements(const std::filesystem::path& path) : archive_(path) {}

    std::unique_ptr<detail::element_stream> stream(std::string_view name,
                                                   std::uint64_t memory_bytes) const override {
        return naming(*archive_.file(), [&] { return stream_member(name, memory_bytes); });
    }

 private:
    std::unique_ptr<detail::element_stream> stream_member(std::string_view name,
                                                          std::uint64_t memory_bytes) const {
        const zip_entry& entry = archive_.find(name);
        npz_member member = detail::begin_npz_member(entry, archive_.read(), piece_bytes);
        const bool in_order =
            !member.header.fortran_order ||
            array_view(nullptr, member.header.dtype, member.header.shape,
                       fortran_strides_bytes(member.header.shape, member.header.dtype.size_bytes()))
                .c_contiguous();
        if (in_order) return std::make_unique<member_elements>(archive_.file(), std::move(member));
        // deflated elements can only be read in stored order, so reordering needs all of them in memory
        array whole = std::move(open_members(archive_, std::array{std::string(name)})[0]);
        auto elements = detail::stream_elements(whole, memory_bytes);
        if (entry.deflated()) return elements;
        return std::make_unique<reordered_elements>(archive_.file(), std::move(elements),
                                                    std::move(member.reader));
    }

    archive archive_;
};

array_listing list_member(const zip_entry& entry, const detail::read_bytes& read) {
    array_listing listing;
    listing.name = array_name(entry.name);
    try {
        const npz_member member = detail::begin_npz_member(entry, read, peek_bytes);
        listing.dtype = member.header.dtype;
        listing.shape = member.header.shape;
        listing.fortran_order = member.header.fortran_order;
        listing.size_bytes = member.payload_bytes;
        listing.mappable = !entry.deflated();
        if (listing.mappable) {
            listing.offset_bytes = member.data_offset_bytes + member.header.data_offset_bytes;
            listing.reason =
                detail::mapping_reason(*listing.dtype, *listing.offset_bytes, listing.size_bytes);
        } else {
            listing.reason = "the member is compressed, so it is inflated into memory";
        }
    } catch (const format_error& failure) {
        listing.reason = failure.what();
    } catch (const unsupported& failure) {
        listing.reason = failure.what();
    }
    return listing;
}

}  // namespace

// ---- the public functions ---------------------------------------------------------------------------------

std::vector<array_listing> list_npz(const std::filesystem::path& path) {
    const archive archive(path);
    return naming(*archive.file(), [&] {
        std::vector<array_listing> listings;
        listings.reserve(archive.entries().size());
        for (const zip_entry& entry : archive.entries()) {
            const bool is_folder =
                entry.name.ends_with('/') && entry.size_bytes == 0;  // some archivers list them
            if (!is_folder) listings.push_back(list_member(entry, archive.read()));
        }
        return listings;
    });
}

array open_npz(const std::filesystem::path& path, std::string_view name) {
    return open_npz(path, std::array{std::string(name)})[0];
}

std::vector<array> open_npz(const std::filesystem::path& path, std::span<const std::string> names) {
    const archive archive(path);
    return naming(*archive.file(), [&] { return open_members(archive, names); });
}

std::unique_ptr<detail::element_file> detail::open_npz_elements(const std::filesystem::path& path) {
    return std::make_unique<npz_elements>(path);
}

}  // namespace pinflow
