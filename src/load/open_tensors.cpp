#include "src/load/open_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <map>
#include <optional>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "formats/hdf5_aliases.hpp"
#include "formats/safetensors_header.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/open.hpp"
#include "src/core/checked.hpp"
#include "src/core/descriptor_cache.hpp"
#include "src/core/quote.hpp"
#include "src/core/worker_threads.hpp"

namespace pinflow::detail {

namespace {

/// What a file has, before its tensors are known by name.
struct listed_file {
    std::shared_ptr<const input_file> file;
    file_format format = file_format::npy;
    header_content header;              ///< of a safetensors file
    std::vector<array_listing> arrays;  ///< of any other file
    std::vector<hdf5_alias> aliases;
};

/// Opens a safetensors file. It may be replaced meanwhile, because its descriptor stays open, if at most half
/// of the descriptors that input_files may have are held so: the others share the rest.
std::shared_ptr<const input_file> open_replaceable(const std::filesystem::path& path) {
    static std::atomic<std::size_t> kept_open = 0;
    if (kept_open.fetch_add(1) >= descriptor_cache::max_open() / 2) {
        --kept_open;
        return std::make_shared<const input_file>(path);
    }
    std::unique_ptr<const input_file> file;
    try {
        file = std::make_unique<const input_file>(path, change_check::file);
    } catch (...) {
        --kept_open;
        throw;
    }
    // if there is no memory for the control block, shared_ptr calls the deleter
    return {file.release(), [](const input_file* closed) {
                delete closed;
                --kept_open;
            }};
}

/// @param name the only tensor that is needed; empty if there may be others.
listed_file list_file(const std::filesystem::path& path, const std::string& name) {
    std::error_code no_status;
    if (std::filesystem::is_directory(path, no_status))
        throw format_error(fmt::format("cannot load tensors of {}: it is a folder; pass the files in it",
                                       quote(path.string(), max_shown_path)));
    listed_file listed;
    listed.format = format_of(path);
    const bool is_safetensors = listed.format == file_format::safetensors;
    // the others are opened by their paths when they are decoded
    listed.file = is_safetensors ? open_replaceable(path) : std::make_shared<const input_file>(path);
    if (is_safetensors) {
        listed.header = read_safetensors_header(*listed.file, safetensors_metadata::kept);
        return listed;
    }
    const bool is_hdf5 = listed.format == file_format::hdf5;
    if (is_hdf5 && !name.empty()) {
        if (auto found = find_listed_dataset(path, name)) {
            listed.arrays.push_back(*std::move(found));
            return listed;
        }
    }
    listed.arrays = list_arrays(path);
    if (is_hdf5) listed.aliases = list_hdf5_aliases(path);
    return listed;
}

/// Opens the files, in parallel.
std::vector<listed_file> list_files(const std::vector<std::filesystem::path>& paths,
                                    std::span<const std::string> names) {
    const std::string only_name = paths.size() == 1 && names.size() == 1 ? names[0] : std::string();
    std::vector<listed_file> listed(paths.size());
    std::vector<std::exception_ptr> failures(paths.size());
    const auto list = [&](std::size_t i) {
        try {
            listed[i] = list_file(paths[i], only_name);
        } catch (...) {
            failures[i] = std::current_exception();
        }
    };
    run_in_parallel(paths.size(), list);
    for (const std::exception_ptr& failure : failures) {
        if (failure) std::rethrow_exception(failure);
    }
    return listed;
}

/// Whether the elements are stored in another order than they are delivered.
bool is_reordered(const array_listing& array) {
    const auto long_axes = std::ranges::count_if(array.shape, [](std::uint64_t n) { return n > 1; });
    return array.fortran_order && long_axes > 1;
}

/// Where the elements lie in the file; empty if they must be decoded, and for structured types with
/// big-endian fields.
std::optional<std::uint64_t> raw_offset(const array_listing& array, const input_file& file) {
    std::uint64_t end = 0;
    if (!array.offset_bytes ||
        (!array.dtype->is_little_endian() && array.dtype->order() != std::endian::big) ||
        !add(*array.offset_bytes, array.size_bytes, end) || end > file.size_bytes())
        return std::nullopt;
    return array.offset_bytes;
}

/// Returns stored_tensor::part_rows: 0 for members of .npz files, as their element streams must read the
/// whole member to check its checksum.
std::uint64_t part_rows_of(const array_listing& array, file_format format) {
    if (array.shape.empty() || format == file_format::npz) return 0;
    if (is_reordered(array)) {
        // a part reads one run of each column: short runs are slow, and large parts leave threads without
        // work
        constexpr std::uint64_t min_run_bytes = 64 << 10;
        constexpr std::uint64_t max_part_bytes = std::uint64_t{16} << 20;
        const std::uint64_t element_bytes = std::max<std::uint64_t>(array.dtype->size_bytes(), 1);
        const std::uint64_t rows = (min_run_bytes - 1) / element_bytes + 1;
        const bool is_small =
            rows < array.shape[0] && array.size_bytes / array.shape[0] * rows <= max_part_bytes;
        return is_small ? rows : 0;
    }
    if (!array.chunk_shape.empty()) return std::min(array.chunk_shape[0], array.shape[0]);
    return array.offset_bytes ? 1 : 0;
}

[[noreturn]] void refuse_second(const std::vector<std::filesystem::path>& paths, std::string_view name,
                                std::size_t first_file, std::size_t second_file) {
    if (paths[first_file] == paths[second_file] && first_file != second_file)
        throw invalid_argument(fmt::format("the file {} is given twice, so that two tensors are called {}",
                                           quote(paths[first_file].string(), max_shown_path),
                                           quote(name, max_label_name)));
    throw invalid_argument(fmt::format("two tensors are called {}: one of {}, one of {}",
                                       quote(name, max_label_name),
                                       quote(paths[first_file].string(), max_shown_path),
                                       quote(paths[second_file].string(), max_shown_path)));
}

/// @throws invalid_argument for two tensors of one name.
void check_names(const opened_tensors& opened) {
    const auto& by_name = opened.by_name();
    for (const stored_tensor& tensor : opened.stored) {
        const stored_tensor& first = opened.stored[by_name.at(tensor.name)];
        if (&first != &tensor) refuse_second(opened.paths, tensor.name, first.file, tensor.file);
    }
    for (const auto& [name, why] : opened.refused) {
        const auto other = by_name.find(name);
        if (other == by_name.end()) continue;
        const std::size_t file = opened.stored[other->second].file;
        refuse_second(opened.paths, name, std::min(file, why.file), std::max(file, why.file));
    }
}

/// Adds a tensor that cannot be loaded. @throws invalid_argument if another one has its name.
void add_refused(opened_tensors& opened, std::size_t file, std::string name, const std::string& why) {
    const std::string reason = fmt::format("cannot load {} of {}: {}", quote(name, max_label_name),
                                           quote(opened.paths[file].string(), max_shown_path), why);
    if (opened.refused.empty()) opened.first_refused = name;
    const auto [other, is_new] = opened.refused.emplace(std::move(name), refusal{file, reason});
    if (!is_new) refuse_second(opened.paths, other->first, other->second.file, file);
}

void add_tensors(opened_tensors& opened, std::size_t file, header_content header) {
    for (const header_tensor& tensor : header.tensors()) {
        if (const dtype* const type = dtype_of(*tensor.type)) {
            opened.stored.push_back({.name = tensor.name,
                                     .shape = tensor.shape,
                                     .dtype = type,
                                     .size_bytes = tensor.size_bytes,
                                     .offset_bytes = tensor.offset_bytes,
                                     .file = static_cast<std::uint32_t>(file)});
        } else {
            add_refused(opened, file, std::string(tensor.name), unsupported_reason(tensor.type->name));
        }
    }
    std::ranges::move(header.memory, std::back_inserter(opened.memory));
    opened.metadata.merge(header.metadata);
}

void add_array(opened_tensors& opened, std::size_t file, file_format format, array_listing array) {
    const bool is_npy = format == file_format::npy;
    if (is_npy) array.name = opened.paths[file].stem().string();
    if (!array.dtype) return add_refused(opened, file, std::move(array.name), array.reason);
    const std::optional<std::uint64_t> offset_bytes = raw_offset(array, *opened.files[file]);
    const std::uint64_t swap_size_bytes =
        array.dtype->is_little_endian() ? 1 : array.dtype->swap_size_bytes();
    const std::uint64_t part_rows =
        offset_bytes || !array.chunk_shape.empty() ? part_rows_of(array, format) : 0;
    if (!array.dtype->is_little_endian()) array.dtype = array.dtype->little_endian();
    const array_listing& kept = opened.listings.emplace_back(std::move(array));
    opened.stored.push_back({.name = kept.name,
                             .shape = kept.shape,
                             .dtype = &*kept.dtype,
                             .size_bytes = kept.size_bytes,
                             .offset_bytes = offset_bytes,
                             .file = static_cast<std::uint32_t>(file),
                             .swap_size_bytes = static_cast<std::uint8_t>(swap_size_bytes),
                             .has_no_name = is_npy,
                             .is_fortran_order = kept.offset_bytes && is_reordered(kept),
                             .part_rows = part_rows,
                             .chunk_shape = kept.chunk_shape});
}

/// Adds the aliases of all tensors, but not those that have the name of another tensor or alias.
void add_aliases(opened_tensors& opened, std::vector<listed_file>& listed) {
    std::unordered_map<std::string, std::size_t> uses;
    for (const listed_file& file : listed) {
        for (const hdf5_alias& alias : file.aliases)
            ++uses[alias.name];
    }
    if (uses.empty()) return;
    std::map<std::pair<std::size_t, std::string_view>, std::uint32_t> by_name;
    for (std::size_t i = 0; i < opened.stored.size(); ++i) {
        const stored_tensor& tensor = opened.stored[i];
        by_name.emplace(std::pair(tensor.file, tensor.name), static_cast<std::uint32_t>(i));
        if (const auto same = uses.find(std::string(tensor.name)); same != uses.end()) ++same->second;
    }
    for (std::size_t file = 0; file < listed.size(); ++file) {
        for (hdf5_alias& alias : listed[file].aliases) {
            if (uses[alias.name] > 1 || opened.refused.contains(alias.name)) continue;
            const auto found = by_name.find(std::pair(file, std::string_view(alias.dataset)));
            if (found == by_name.end()) {
                add_refused(opened, file, std::move(alias.name),
                            fmt::format("it is a link to {}, which cannot be loaded", quote(alias.dataset)));
                continue;
            }
            stored_tensor tensor = opened.stored[found->second];
            tensor.name = opened.aliases.emplace_back(std::move(alias.name));
            tensor.alias_of = found->second;
            opened.stored.push_back(tensor);
        }
    }
}

}  // namespace

std::shared_ptr<opened_tensors> open_tensors(std::vector<std::filesystem::path> paths,
                                             std::span<const std::string> names) {
    if (paths.empty()) throw invalid_argument("cannot load tensors of no files");
    auto opened = std::make_shared<opened_tensors>();
    for (const std::filesystem::path& path : paths) {
        // without a working directory there is no absolute path
        std::error_code no_folder;
        opened->absolute_paths.push_back(std::filesystem::absolute(path, no_folder));
        if (no_folder) opened->absolute_paths.back() = path;
    }
    opened->paths = std::move(paths);
    std::vector<listed_file> listed = list_files(opened->paths, names);
    std::size_t count = 0;
    for (const listed_file& file : listed)
        count += file.header.count() + file.arrays.size() + file.aliases.size();
    opened->stored.reserve(count);
    for (std::size_t i = 0; i < listed.size(); ++i) {
        opened->files.push_back(listed[i].file);
        add_tensors(*opened, i, std::move(listed[i].header));
        for (array_listing& array : listed[i].arrays)
            add_array(*opened, i, listed[i].format, std::move(array));
    }
    add_aliases(*opened, listed);
    // the reader of safetensors headers has compared the names of a file
    const bool may_be_equal = listed.size() > 1 || listed[0].format != file_format::safetensors;
    if (may_be_equal) check_names(*opened);
    return opened;
}

std::shared_ptr<const opened_tensors> open_and_describe(std::vector<std::filesystem::path> paths) {
    const std::shared_ptr<opened_tensors> opened = open_tensors(std::move(paths));
    opened->descriptions.reserve(opened->stored.size());
    for (const stored_tensor& tensor : opened->stored)
        opened->descriptions.push_back({.name = std::string(tensor.name),
                                        .dtype = *tensor.dtype,
                                        .shape = {tensor.shape.begin(), tensor.shape.end()},
                                        .file = tensor.file,
                                        .size_bytes = tensor.size_bytes,
                                        .is_mappable = is_mappable(tensor)});
    return opened;
}

const std::byte* opened_tensors::pages_of(std::size_t file) const {
    const std::scoped_lock lock(pages_mutex_);
    const auto found = pages_.find(file);
    if (found != pages_.end()) return found->second ? found->second->data() : nullptr;
    if (has_many_mappings()) return nullptr;
    auto& pages = pages_[file];
    try {
        auto mapped = std::make_unique<const mapped_file>(files[file], 0, files[file]->size_bytes());
        count_mapping();
        pages = {mapped.release(), [](const mapped_file* each) {
                     delete each;
                     uncount_mapping();
                 }};
    } catch (const error&) {
        return nullptr;  // such as a limit of the address space
    }
    return pages->data();
}

const element_file& opened_tensors::elements_of(std::size_t file) const {
    decoded_file* found = nullptr;
    {
        const std::scoped_lock lock(decoded_files_mutex_);
        found = &decoded_files_[file];
    }
    std::call_once(found->opened, [&] { found->elements = open_elements(absolute_paths[file]); });
    return *found->elements;
}

}  // namespace pinflow::detail
