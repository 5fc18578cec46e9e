#include "pinflow/formats/hdf5.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "formats/element_streams.hpp"
#include "formats/hdf5_access.hpp"
#include "formats/hdf5_chunk_reader.hpp"
#include "formats/hdf5_kept_readers.hpp"
#include "formats/hdf5_library.hpp"
#include "formats/hdf5_memory.hpp"
#include "formats/hdf5_rows.hpp"
#include "formats/hdf5_shared_rows.hpp"
#include "pinflow/file.hpp"
#include "src/core/memory_limits.hpp"

namespace pinflow {

namespace detail {

namespace {

class in_this_process final : public hdf5_access {
 public:
    std::vector<array_listing> list(const input_file& file) override { return list_hdf5_datasets(file); }
    std::vector<hdf5_alias> aliases(const input_file& file) override { return list_hdf5_aliases(file); }
    hdf5_description describe(const input_file& file, std::string_view name) override {
        return describe_hdf5_dataset(file, name);
    }
    array_listing list_one(const input_file& file, std::string_view name) override {
        return list_hdf5_dataset(file, name);
    }
    std::optional<array_listing> find(const input_file& file, std::string_view name) override {
        return find_hdf5_dataset(file, name);
    }
    std::vector<hdf5_description> describe_several(const input_file& file,
                                                   std::span<const std::string_view> names,
                                                   std::size_t max_bytes) override {
        return describe_hdf5_datasets(file, names, max_bytes);
    }
    hdf5_read_function reader(std::shared_ptr<const input_file> file,
                              const hdf5_description& description) override {
        const auto opened = std::make_shared<const hdf5_library_reader>(std::move(file), description);
        const auto read_rows = [opened](std::uint64_t first_row, std::uint64_t count,
                                        std::span<std::byte> destination) {
            opened->read(first_row, count, destination);
        };
        if (!opened->reads_boxes()) return read_rows;
        return {
            read_rows,
            [opened](std::span<const std::uint64_t> first, std::span<const std::uint64_t> lengths,
                     std::span<std::byte> destination) { opened->read_box(first, lengths, destination); }};
    }
};

std::shared_ptr<hdf5_access>& access() {
    static std::shared_ptr<hdf5_access> current = std::make_shared<in_this_process>();
    return current;
}

hdf5_dataset open_dataset(std::shared_ptr<const input_file> file, std::string_view name) {
    hdf5_dataset dataset;
    dataset.file = std::move(file);
    dataset.description = std::make_shared<const hdf5_description>(access()->describe(*dataset.file, name));
    if (dataset.description->storage == hdf5_storage::library) {
        dataset.library = keep_hdf5_reader(access(), dataset);
    }
    return dataset;
}

hdf5_dataset open_dataset(const std::filesystem::path& path, std::string_view name) {
    return open_dataset(std::make_shared<const input_file>(path), name);
}

/// Keeps the descriptions of datasets: making one takes about 0.2 ms, of which 0.1 ms for opening the file,
/// and 0.3 us for each chunk. A description that is too large to keep is shared by the streams that use it.
class hdf5_elements final : public element_file {
 public:
    explicit hdf5_elements(std::filesystem::path path) : path_(std::move(path)) {}

    std::unique_ptr<element_stream> stream(std::string_view name, std::uint64_t memory_bytes) const override {
        return make_hdf5_elements(find(name), memory_bytes);
    }

    std::unique_ptr<element_stream> stream_of_part(std::string_view name,
                                                   std::uint64_t memory_bytes) const override {
        const hdf5_dataset opened = find(name);
        keep_last_dataset(opened);
        return make_hdf5_elements(opened, memory_bytes,
                                  can_be_kept(*opened.description) ? reader_of(name, opened) : nullptr);
    }

    void expect(std::span<const std::string_view> names) const override {
        const std::scoped_lock lock(mutex_);
        expected_at_.clear();
        expected_.assign(names.begin(), names.end());
        for (std::size_t i = 0; i < expected_.size(); ++i)
            expected_at_.emplace(expected_[i], i);
    }

 private:
    static constexpr std::size_t max_kept_bytes = 8 << 20;           ///< of descriptions
    static constexpr std::size_t max_last_dataset_bytes = 64 << 20;  ///< of the description in last_dataset_
    static constexpr std::uint64_t max_kept_chunk_bytes = 2 << 20;   ///< of one chunk

    /// Whether a reader is worth its memory: of its description, and of at least one chunk, if it is decoded.
    static bool can_be_kept(const hdf5_description& description) {
        if (description.storage != hdf5_storage::chunked || memory_bytes(description) > max_kept_bytes)
            return false;
        return description.filters.empty() || element_count(description.chunk_shape) <=
                                                  max_kept_chunk_bytes / description.dtype.size_bytes();
    }

    hdf5_dataset find(std::string_view name) const {
        const std::scoped_lock lock(mutex_);
        if (!file_) file_ = std::make_shared<const input_file>(path_);
        file_->check_unchanged();  // a description of other contents would look like damage
        const auto is_large = [&](const auto& large) { return large && large->name == name; };
        if (last_dataset_ && last_dataset_->description->name == name) return *last_dataset_;
        if (!kept_.contains(name) && !is_large(large_.lock())) describe_expected(name);
        if (const auto found = kept_.find(name); found != kept_.end()) return found->second;
        if (const auto large = large_.lock(); is_large(large))
            return {.file = file_, .description = large, .library = {}};
        hdf5_dataset opened = open_dataset(file_, name);
        keep(name, opened);
        return opened;
    }

    /// Keeps the last dataset that `keep` does not (large, or read by libhdf5): more slices of it may follow.
    void keep_last_dataset(const hdf5_dataset& dataset) const {
        const std::size_t size_bytes = memory_bytes(*dataset.description);
        const bool is_kept_otherwise =
            dataset.description->storage != hdf5_storage::library && size_bytes <= max_kept_bytes;
        if (is_kept_otherwise || size_bytes > max_last_dataset_bytes) return;
        std::optional<hdf5_dataset> before = dataset;  // closed after the lock is released
        const std::scoped_lock lock(mutex_);
        last_dataset_.swap(before);
    }

    /// A reader that keeps chunks: that of an earlier part, if it was of the same dataset.
    std::shared_ptr<const hdf5_chunk_reader> reader_of(std::string_view name,
                                                       const hdf5_dataset& dataset) const {
        constexpr std::uint64_t kept_chunk_bytes = std::uint64_t{16} << 20;
        constexpr std::uint64_t decoding_bytes = std::uint64_t{32} << 20;
        constexpr std::size_t max_readers = 16;
        const std::scoped_lock lock(mutex_);
        if (const auto found = readers_.find(name); found != readers_.end()) return found->second;
        if (readers_.size() == max_readers) readers_.clear();
        if (!part_memory_) part_memory_ = std::make_shared<hdf5_memory>(kept_chunk_bytes, decoding_bytes);
        return readers_.emplace(name, make_hdf5_chunk_reader(dataset, part_memory_)).first->second;
    }

    /// Describes an expected dataset and some that follow, each once. Leaves errors to open_dataset.
    void describe_expected(std::string_view name) const {
        const auto place = expected_at_.find(name);
        if (place == expected_at_.end()) return;
        constexpr std::size_t max_count = 256;  // other threads wait meanwhile
        std::vector<std::string_view> names;
        for (std::size_t i = place->second; i < expected_.size() && names.size() < max_count; ++i) {
            if (expected_at_.erase(expected_[i]) != 0 && !kept_.contains(expected_[i]))
                names.push_back(expected_[i]);
        }
        if (names.size() < 2) return;
        try {
            auto described = access()->describe_several(*file_, names, max_kept_bytes);
            std::size_t size_bytes = 0;
            for (const hdf5_description& each : described)
                size_bytes += memory_bytes(each);
            make_room_for(size_bytes);
            for (hdf5_description& each : described) {
                const auto shared = std::make_shared<const hdf5_description>(std::move(each));
                keep(shared->name, {.file = file_, .description = shared, .library = {}});
            }
        } catch (const error&) {
            return;
        }
    }

    void keep(std::string_view name, const hdf5_dataset& opened) const {
        // a reader of libhdf5 has a large cache
        if (opened.description->storage == hdf5_storage::library) return;
        const std::size_t size_bytes = memory_bytes(*opened.description);
        if (size_bytes > max_kept_bytes) {
            large_ = opened.description;
            return;
        }
        make_room_for(size_bytes);
        if (kept_.emplace(name, opened).second) kept_bytes_ += size_bytes;
    }
    void make_room_for(std::size_t size_bytes) const {
        if (kept_bytes_ + size_bytes <= max_kept_bytes) return;
        kept_.clear();
        kept_bytes_ = 0;
    }

    std::filesystem::path path_;
    mutable std::mutex mutex_;                        ///< guards what follows
    mutable std::shared_ptr<const input_file> file_;  ///< opened by the first stream
    mutable std::map<std::string, hdf5_dataset, std::less<>> kept_;
    mutable std::size_t kept_bytes_ = 0;  ///< of all kept descriptions
    mutable std::weak_ptr<const hdf5_description> large_;
    mutable std::optional<hdf5_dataset> last_dataset_;  ///< see keep_last_dataset
    mutable std::shared_ptr<hdf5_memory> part_memory_;  ///< of these readers
    mutable std::map<std::string, std::shared_ptr<const hdf5_chunk_reader>, std::less<>> readers_;
    mutable std::vector<std::string> expected_;
    mutable std::map<std::string_view, std::size_t> expected_at_;  ///< positions in expected_
};

}  // namespace

void use_hdf5_access(std::shared_ptr<hdf5_access> other) {
    access() = std::move(other);
}

std::vector<hdf5_alias> list_hdf5_aliases(const std::filesystem::path& path) {
    return access()->aliases(input_file(path));
}

std::optional<array_listing> find_listed_dataset(const std::filesystem::path& path, const std::string& name) {
    try {
        auto found = access()->find(input_file(path), name);
        return found && found->name == name && found->dtype ? std::move(found) : std::nullopt;
    } catch (const error&) {
        return std::nullopt;
    }
}

std::shared_ptr<hdf5_memory> make_hdf5_memory(std::uint64_t size_bytes) {
    // `size_bytes` is an upper bound; slots and other arrays need memory too
    return std::make_shared<hdf5_memory>(std::min(size_bytes, read_available_memory().size_bytes / 4));
}

std::shared_ptr<const row_source> open_hdf5_rows(const std::filesystem::path& path, std::string_view name,
                                                 std::shared_ptr<hdf5_memory> memory) {
    return make_hdf5_rows(open_dataset(path, name), std::move(memory));
}

std::shared_ptr<const row_source> open_hdf5_row(const std::filesystem::path& path, std::string_view name,
                                                std::shared_ptr<hdf5_memory> memory) {
    return make_hdf5_row(open_dataset(path, name), std::move(memory));
}

std::unique_ptr<element_file> open_hdf5_elements(const std::filesystem::path& path) {
    return std::make_unique<hdf5_elements>(path);
}

}  // namespace detail

bool has_hdf5() noexcept {
    return true;
}

std::vector<array_listing> list_hdf5(const std::filesystem::path& path) {
    return detail::access()->list(input_file(path));
}

array_listing list_hdf5(const std::filesystem::path& path, std::string_view name) {
    return detail::access()->list_one(input_file(path), name);
}

array open_hdf5(const std::filesystem::path& path, std::string_view name) {
    return detail::make_hdf5_array(detail::open_dataset(path, name));
}

std::shared_ptr<const row_source> open_hdf5_rows(const std::filesystem::path& path, std::string_view name,
                                                 const hdf5_options& options) {
    return detail::open_hdf5_rows(path, name, detail::make_hdf5_memory(options.memory_bytes));
}

}  // namespace pinflow
