#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <numeric>
#include <optional>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "formats/hdf5_aliases.hpp"
#include "formats/safetensors_header.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/open.hpp"
#include "src/core/checked.hpp"
#include "src/core/descriptor_cache.hpp"
#include "src/core/quote.hpp"
#include "src/core/worker_threads.hpp"
#include "src/load/load_plan.hpp"
#include "src/load/load_run.hpp"

namespace pinflow {

namespace {

using detail::opened_tensors;
using detail::quote;
using detail::stored_tensor;

/// What a file has, before its tensors are known by name.
struct listed_file {
    std::shared_ptr<const input_file> file;
    file_format format = file_format::npy;
    detail::header_content header;      ///< of a safetensors file
    std::vector<array_listing> arrays;  ///< of any other file
    std::vector<detail::hdf5_alias> aliases;
};

/// Opens a safetensors file. It may be replaced meanwhile, because its descriptor stays open, if at most half
/// of the descriptors that input_files may have are held so: the others share the rest.
std::shared_ptr<const input_file> open_replaceable(const std::filesystem::path& path) {
    static std::atomic<std::size_t> kept_open = 0;
    if (kept_open.fetch_add(1) >= detail::descriptor_cache::max_open() / 2) {
        --kept_open;
        return std::make_shared<const input_file>(path);
    }
    try {
        auto file = std::make_unique<const input_file>(path, change_check::file);
        return {file.release(), [](const input_file* closed) {
                    delete closed;
                    --kept_open;
                }};
    } catch (...) {
        --kept_open;
        throw;
    }
}

listed_file list_file(const std::filesystem::path& path) {
    std::error_code no_status;
    if (std::filesystem::is_directory(path, no_status))
        throw format_error(fmt::format("cannot load tensors of {}: it is a folder; pass the files in it",
                                       quote(path.string(), detail::max_shown_path)));
    listed_file listed;
    listed.format = format_of(path);
    const bool is_safetensors = listed.format == file_format::safetensors;
    // the others are opened by their paths when they are decoded
    listed.file = is_safetensors ? open_replaceable(path) : std::make_shared<const input_file>(path);
    if (is_safetensors) {
        listed.header = detail::read_safetensors_header(*listed.file, detail::safetensors_metadata::kept);
    } else {
        listed.arrays = list_arrays(path);
        if (listed.format == file_format::hdf5) listed.aliases = detail::list_hdf5_aliases(path);
    }
    return listed;
}

/// Opens the files, in parallel.
std::vector<listed_file> list_files(const std::vector<std::filesystem::path>& paths) {
    std::vector<listed_file> listed(paths.size());
    std::vector<std::exception_ptr> failures(paths.size());
    const auto list = [&](std::size_t i) {
        try {
            listed[i] = list_file(paths[i]);
        } catch (...) {
            failures[i] = std::current_exception();
        }
    };
    detail::run_in_parallel(paths.size(), list);
    for (const std::exception_ptr& failure : failures) {
        if (failure) std::rethrow_exception(failure);
    }
    return listed;
}

/// Where the elements lie in the file as they are delivered; empty if they must be decoded.
std::optional<std::uint64_t> raw_offset(const array_listing& array, const input_file& file) {
    const auto long_axes = std::ranges::count_if(array.shape, [](std::uint64_t n) { return n > 1; });
    std::uint64_t end = 0;
    if (!array.offset_bytes || !array.dtype->is_little_endian() || (array.fortran_order && long_axes > 1) ||
        !detail::add(*array.offset_bytes, array.size_bytes, end) || end > file.size_bytes())
        return std::nullopt;
    return array.offset_bytes;
}

[[noreturn]] void refuse_second(const std::vector<std::filesystem::path>& paths, std::string_view name,
                                std::size_t first_file, std::size_t second_file) {
    throw invalid_argument(fmt::format("two tensors are called {}: one of {}, one of {}",
                                       quote(name, detail::max_label_name),
                                       quote(paths[first_file].string(), detail::max_shown_path),
                                       quote(paths[second_file].string(), detail::max_shown_path)));
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
    const std::string reason = fmt::format("cannot load {} of {}: {}", quote(name, detail::max_label_name),
                                           quote(opened.paths[file].string(), detail::max_shown_path), why);
    if (opened.refused.empty()) opened.first_refused = name;
    const auto [other, is_new] = opened.refused.emplace(std::move(name), detail::refusal{file, reason});
    if (!is_new) refuse_second(opened.paths, other->first, other->second.file, file);
}

void add_tensors(opened_tensors& opened, std::size_t file, detail::header_content header) {
    for (const detail::header_tensor& tensor : header.tensors()) {
        if (const dtype* const type = detail::dtype_of(*tensor.type)) {
            opened.stored.push_back({.name = tensor.name,
                                     .shape = tensor.shape,
                                     .dtype = type,
                                     .size_bytes = tensor.size_bytes,
                                     .offset_bytes = tensor.offset_bytes,
                                     .file = static_cast<std::uint32_t>(file)});
        } else {
            add_refused(opened, file, std::string(tensor.name),
                        detail::unsupported_reason(tensor.type->name));
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
    if (!array.dtype->is_little_endian()) array.dtype = array.dtype->little_endian();
    const array_listing& kept = opened.listings.emplace_back(std::move(array));
    opened.stored.push_back({.name = kept.name,
                             .shape = kept.shape,
                             .dtype = &*kept.dtype,
                             .size_bytes = kept.size_bytes,
                             .offset_bytes = offset_bytes,
                             .file = static_cast<std::uint32_t>(file),
                             .has_no_name = is_npy});
}

/// Adds the aliases of a file's tensors, which are the last ones in `opened`, from `first_tensor` on.
void add_aliases(opened_tensors& opened, std::size_t file, std::size_t first_tensor,
                 std::vector<detail::hdf5_alias> aliases) {
    if (aliases.empty()) return;
    std::unordered_map<std::string_view, std::uint32_t> by_name;
    for (std::size_t i = first_tensor; i < opened.stored.size(); ++i)
        by_name.emplace(opened.stored[i].name, static_cast<std::uint32_t>(i));
    for (detail::hdf5_alias& alias : aliases) {
        const auto found = by_name.find(alias.dataset);
        if (found == by_name.end()) {
            add_refused(opened, file, std::move(alias.name),
                        fmt::format("it is a hard link of {}, which cannot be loaded", quote(alias.dataset)));
            continue;
        }
        stored_tensor tensor = opened.stored[found->second];
        tensor.name = opened.aliases.emplace_back(std::move(alias.name));
        tensor.alias_of = found->second;
        opened.stored.push_back(tensor);
    }
}

std::shared_ptr<opened_tensors> open_all(std::vector<std::filesystem::path> paths) {
    if (paths.empty()) throw invalid_argument("cannot load tensors of no files");
    auto opened = std::make_shared<opened_tensors>();
    for (const std::filesystem::path& path : paths) {
        // without a working directory there is no absolute path
        std::error_code no_folder;
        opened->absolute_paths.push_back(std::filesystem::absolute(path, no_folder));
        if (no_folder) opened->absolute_paths.back() = path;
    }
    opened->paths = std::move(paths);
    std::vector<listed_file> listed = list_files(opened->paths);
    std::size_t count = 0;
    for (const listed_file& file : listed)
        count += file.header.count() + file.arrays.size() + file.aliases.size();
    opened->stored.reserve(count);
    for (std::size_t i = 0; i < listed.size(); ++i) {
        opened->files.push_back(listed[i].file);
        const std::size_t first_tensor = opened->stored.size();
        add_tensors(*opened, i, std::move(listed[i].header));
        for (array_listing& array : listed[i].arrays)
            add_array(*opened, i, listed[i].format, std::move(array));
        add_aliases(*opened, i, first_tensor, std::move(listed[i].aliases));
    }
    // the reader of safetensors headers has compared the names of a file
    const bool may_be_equal = listed.size() > 1 || listed[0].format != file_format::safetensors;
    if (may_be_equal) check_names(*opened);
    return opened;
}

std::shared_ptr<const opened_tensors> open_and_describe(std::vector<std::filesystem::path> paths) {
    const std::shared_ptr<opened_tensors> opened = open_all(std::move(paths));
    opened->descriptions.reserve(opened->stored.size());
    for (const stored_tensor& tensor : opened->stored)
        opened->descriptions.push_back({.name = std::string(tensor.name),
                                        .dtype = *tensor.dtype,
                                        .shape = {tensor.shape.begin(), tensor.shape.end()},
                                        .file = tensor.file,
                                        .size_bytes = tensor.size_bytes});
    return opened;
}

/// Marks the tensors that a name or pattern selects. @throws invalid_argument if there are none.
void select_matching(const opened_tensors& opened, const std::string& pattern,
                     std::vector<bool>& is_selected) {
    if (const auto found = opened.by_name().find(pattern); found != opened.by_name().end()) {
        is_selected[found->second] = true;
        return;
    }
    if (opened.refused.contains(pattern)) detail::refuse(opened, pattern);
    bool matches = false;
    std::string stored_name;  // ends with a zero
    for (std::size_t i = 0; i < opened.stored.size(); ++i) {
        stored_name = opened.stored[i].name;
        if (::fnmatch(pattern.c_str(), stored_name.c_str(), 0) != 0) continue;
        is_selected[i] = true;
        matches = true;
    }
    for (const auto& [name, why] : opened.refused) {
        if (::fnmatch(pattern.c_str(), name.c_str(), 0) == 0) detail::refuse(opened, name);
    }
    if (!matches)
        throw invalid_argument(fmt::format(
            "cannot load {}: none of the {} tensors of {} has this name or matches this pattern",
            quote(pattern, detail::max_label_name), opened.stored.size(), detail::name_of_files(opened)));
}

/// Whether load_options::dtype is for elements of this type.
bool can_be_cast(const dtype& type) {
    return type.kind() == dtype_kind::bfloat16 ||
           (type.kind() == dtype_kind::floating && type.size_bytes() <= 8);
}

}  // namespace

std::string_view to_string(load_route route) noexcept {
    switch (route) {
        case load_route::automatic:
            return "auto";
        case load_route::copy:
            return "copy";
        case load_route::staged:
            return "staged";
        case load_route::both:
            return "both";
    }
    return "unknown";
}

bool device_tensor::is_mapped() const noexcept {
    return block_ && block_->is_mapped();
}

void device_tensor::used_on(stream_view stream) const {
    if (!(stream.device() == device_))
        throw invalid_argument(fmt::format("the tensor {} is on {}, and the stream is one of {}",
                                           quote(name_, detail::max_label_name), device_.name(),
                                           stream.device().name()));
    if (block_) block_->use_on(stream);
}

std::shared_ptr<const void> device_tensor::share() const {
    return block_;
}

const device_tensor& loaded_tensors::operator[](const std::string& name) const {
    const auto found = indices.find(name);
    if (found == indices.end())
        throw invalid_argument(
            fmt::format("no tensor {} has been loaded", quote(name, detail::max_label_name)));
    return tensors[found->second];
}

tensor_files::tensor_files(without_descriptions, std::shared_ptr<const opened_tensors> opened)
    : opened_(std::move(opened)) {}

tensor_files::tensor_files(std::vector<std::filesystem::path> files)
    : opened_(open_and_describe(std::move(files))) {}

const std::vector<std::filesystem::path>& tensor_files::files() const noexcept {
    return opened_->paths;
}
const std::vector<tensor_description>& tensor_files::tensors() const noexcept {
    return opened_->descriptions;
}
void tensor_files::require_all() const {
    if (opened_->refused.empty()) return;
    const auto with_advice = [&](const error& failure) {
        return fmt::format("{}{}", failure.what(),
                           opened_->stored.empty() ? "" : "; to load the other tensors, give their names");
    };
    try {
        detail::refuse(*opened_, opened_->first_refused);
    } catch (const unsupported& failure) {
        throw unsupported(with_advice(failure));
    } catch (const format_error& failure) {
        throw format_error(with_advice(failure));
    } catch (const invalid_argument& failure) {
        throw invalid_argument(with_advice(failure));
    }
}
std::vector<std::string> tensor_files::refused_names() const {
    std::vector<std::string> names;
    for (const auto& [name, why] : opened_->refused)
        names.push_back(name);
    std::ranges::sort(names);
    return names;
}
const std::map<std::string, std::string>& tensor_files::metadata() const noexcept {
    return opened_->metadata;
}

const tensor_description& tensor_files::tensor(std::string_view name) const {
    const std::string text(name);
    if (const auto found = opened_->by_name().find(name); found != opened_->by_name().end())
        return opened_->descriptions[found->second];
    if (opened_->refused.contains(text)) detail::refuse(*opened_, text);
    throw invalid_argument(fmt::format("none of the {} tensors of {} is called {}", opened_->stored.size(),
                                       detail::name_of_files(*opened_), quote(name, detail::max_label_name)));
}

loaded_tensors tensor_files::load(std::span<const tensor_request> requests, const device& device,
                                  const load_options& options) const {
    const auto start = std::chrono::steady_clock::now();
    std::vector<detail::found_request> found;
    found.reserve(requests.size());
    for (const tensor_request& each : requests)
        found.push_back(detail::find_request(*opened_, each));
    loaded_tensors loaded = load_jobs(detail::jobs_of(*opened_, found), device, options);
    loaded.report.duration = std::chrono::steady_clock::now() - start;
    return loaded;
}

loaded_tensors tensor_files::load_jobs(std::vector<detail::load_job> jobs, const device& device,
                                       const load_options& options) const {
    loaded_tensors loaded;
    const std::vector<detail::aliased_job> aliases = detail::remove_aliases(*opened_, jobs);
    const detail::load_plan plan = detail::plan_load(*opened_, std::move(jobs), device);
    loaded.tensors.reserve(plan.jobs.size() + aliases.size());
    loaded.indices.reserve(plan.jobs.size() + aliases.size());
    // makes some tensors without their elements; returns whether others are left
    const auto make_some = [&] {
        constexpr std::size_t some = 64;
        const std::size_t end = std::min(loaded.tensors.size() + some, plan.jobs.size());
        while (loaded.tensors.size() < end) {
            const detail::load_job& job = plan.jobs[loaded.tensors.size()];
            device_tensor tensor(std::string(opened_->stored[job.tensor].name),
                                 detail::type_of(*opened_, job), detail::shape_of(*opened_, job), device);
            tensor.size_bytes_ = job.size_bytes;
            loaded.indices.emplace(tensor.name(), loaded.tensors.size());
            loaded.tensors.push_back(std::move(tensor));
        }
        return end < plan.jobs.size();
    };
    {
        detail::load_run run(*opened_, plan, device, options);
        run.allocate(make_some);
        while (make_some()) {
        }
        for (std::size_t i = 0; i < plan.jobs.size(); ++i) {
            const detail::load_job& job = plan.jobs[i];
            if (job.size_bytes == 0) continue;
            loaded.tensors[i].data_ = run.address_of(job.block) + job.block_offset_bytes;
            loaded.tensors[i].block_ = run.block(job.block);
        }
        run.finish();
        loaded.report = run.report();
        insert_aliases(loaded, aliases);
    }  // begins to unlock the pages of the files
    return loaded;
}

/// Inserts aliases, which share the memory of loaded tensors.
void tensor_files::insert_aliases(loaded_tensors& loaded,
                                  const std::vector<detail::aliased_job>& aliases) const {
    if (aliases.empty()) return;
    std::vector<device_tensor> of_jobs = std::move(loaded.tensors);
    loaded.tensors.clear();
    loaded.tensors.reserve(of_jobs.size() + aliases.size());
    std::vector<device_tensor> named;
    for (const detail::aliased_job& alias : aliases) {
        named.push_back(of_jobs[alias.job]);
        named.back().name_ = opened_->stored[alias.tensor].name;
    }
    for (std::size_t job = 0, next = 0; job < of_jobs.size() || next < named.size();) {
        const bool is_alias = next < named.size() && aliases[next].position == loaded.tensors.size();
        loaded.tensors.push_back(std::move(is_alias ? named[next++] : of_jobs[job++]));
    }
    loaded.indices.clear();
    for (std::size_t i = 0; i < loaded.tensors.size(); ++i)
        loaded.indices.emplace(loaded.tensors[i].name(), i);
}

std::vector<std::uint32_t> tensor_files::select_indices(std::span<const std::string> patterns) const {
    std::vector<std::uint32_t> indices;
    if (patterns.empty()) {
        require_all();
        indices.resize(opened_->stored.size());
        std::iota(indices.begin(), indices.end(), 0);
        return indices;
    }
    std::vector<bool> is_selected(opened_->stored.size(), false);
    for (const std::string& each : patterns)
        select_matching(*opened_, each, is_selected);
    for (std::uint32_t i = 0; i < is_selected.size(); ++i) {
        if (is_selected[i]) indices.push_back(i);
    }
    return indices;
}

std::vector<tensor_request> tensor_files::select(const load_options& options) const {
    const std::vector<std::uint32_t> indices = select_indices(options.names);
    std::vector<tensor_request> requests(indices.size());
    for (std::size_t i = 0; i < indices.size(); ++i) {
        const stored_tensor& tensor = opened_->stored[indices[i]];
        requests[i].name = tensor.name;
        if (can_be_cast(*tensor.dtype)) requests[i].dtype = options.dtype;
    }
    return requests;
}

loaded_tensors load_tensors(std::span<const std::filesystem::path> files, const device& device,
                            const load_options& options) {
    const auto start = std::chrono::steady_clock::now();
    const tensor_files opened(tensor_files::without_descriptions{}, open_all({files.begin(), files.end()}));
    const std::vector<std::uint32_t> indices = opened.select_indices(options.names);
    std::vector<detail::load_job> jobs;
    jobs.reserve(indices.size());
    for (const std::uint32_t index : indices) {
        detail::found_request request{.tensor = index};
        if (options.dtype && can_be_cast(*opened.opened_->stored[index].dtype))
            request.dtype = &*options.dtype;
        jobs.push_back(detail::job_of(*opened.opened_, request));
    }
    loaded_tensors loaded = opened.load_jobs(std::move(jobs), device, options);
    loaded.report.duration = std::chrono::steady_clock::now() - start;
    return loaded;
}

}  // namespace pinflow
