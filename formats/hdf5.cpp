#include "pinflow/formats/hdf5.hpp"

#include <algorithm>
#include <utility>

#include "formats/element_streams.hpp"
#include "formats/hdf5_access.hpp"
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
    hdf5_read_function reader(std::shared_ptr<const input_file> file,
                              const hdf5_description& description) override {
        const auto opened = std::make_shared<const hdf5_library_reader>(std::move(file), description);
        return [opened](std::uint64_t first_row, std::uint64_t count, std::span<std::byte> destination) {
            opened->read(first_row, count, destination);
        };
    }
};

std::shared_ptr<hdf5_access>& access() {
    static std::shared_ptr<hdf5_access> current = std::make_shared<in_this_process>();
    return current;
}

hdf5_dataset open_dataset(const std::filesystem::path& path, std::string_view name) {
    hdf5_dataset dataset;
    dataset.file = std::make_shared<const input_file>(path);
    dataset.description = std::make_shared<const hdf5_description>(access()->describe(*dataset.file, name));
    if (dataset.description->storage == hdf5_storage::library) {
        dataset.library = keep_hdf5_reader(access(), dataset);
    }
    return dataset;
}

}  // namespace

void use_hdf5_access(std::shared_ptr<hdf5_access> other) {
    access() = std::move(other);
}

std::vector<hdf5_alias> list_hdf5_aliases(const std::filesystem::path& path) {
    return access()->aliases(input_file(path));
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

std::unique_ptr<element_stream> open_hdf5_elements(const std::filesystem::path& path, std::string_view name,
                                                   std::uint64_t memory_bytes) {
    return make_hdf5_elements(open_dataset(path, name), memory_bytes);
}

}  // namespace detail

bool has_hdf5() noexcept {
    return true;
}

std::vector<array_listing> list_hdf5(const std::filesystem::path& path) {
    return detail::access()->list(input_file(path));
}

array_listing list_hdf5(const std::filesystem::path& path, std::string_view name) {
    return detail::hdf5_listing(detail::access()->describe(input_file(path), name));
}

array open_hdf5(const std::filesystem::path& path, std::string_view name) {
    return detail::make_hdf5_array(detail::open_dataset(path, name));
}

std::shared_ptr<const row_source> open_hdf5_rows(const std::filesystem::path& path, std::string_view name,
                                                 const hdf5_options& options) {
    return detail::open_hdf5_rows(path, name, detail::make_hdf5_memory(options.memory_bytes));
}

}  // namespace pinflow
