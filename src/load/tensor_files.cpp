#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <numeric>
#include <system_error>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/core/error_advice.hpp"
#include "src/core/quote.hpp"
#include "src/load/load_plan.hpp"
#include "src/load/load_run.hpp"
#include "src/load/open_tensors.hpp"

namespace pinflow {

namespace {

using detail::opened_tensors;
using detail::quote;
using detail::stored_tensor;

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
        throw invalid_argument(
            fmt::format("cannot load {}: none of the {} tensors of {} has this name or matches this pattern",
                        quote(pattern, detail::max_label_name), opened.stored.size(),
                        detail::name_of_files(opened.paths)));
}

/// Calls `load`, and throws what is documented if memory is exhausted.
template <typename Function>
auto load_typed(std::span<const std::filesystem::path> files, Function load) {
    try {
        return load();
    } catch (const std::bad_alloc&) {
        throw system_failure(fmt::format("cannot load tensors of {}: memory is exhausted; {}",
                                         detail::name_of_files(files), detail::advice_for(ENOMEM)),
                             std::make_error_code(std::errc::not_enough_memory));
    }
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
    : opened_(load_typed(files, [&] { return detail::open_and_describe(files); })) {}

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
                                       detail::name_of_files(opened_->paths),
                                       quote(name, detail::max_label_name)));
}

loaded_tensors tensor_files::load(std::span<const tensor_request> requests, const device& device,
                                  const load_options& options) const {
    const auto start = std::chrono::steady_clock::now();
    return load_typed(opened_->paths, [&] {
        std::vector<detail::found_request> found;
        found.reserve(requests.size());
        for (const tensor_request& each : requests)
            found.push_back(detail::find_request(*opened_, each));
        loaded_tensors loaded = load_jobs(detail::jobs_of(*opened_, found, device), device, options);
        loaded.report.duration = std::chrono::steady_clock::now() - start;
        return loaded;
    });
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
    return load_typed(files, [&] {
        const tensor_files opened(tensor_files::without_descriptions{},
                                  detail::open_tensors({files.begin(), files.end()}, options.names));
        const std::vector<std::uint32_t> indices = opened.select_indices(options.names);
        std::vector<detail::load_job> jobs;
        jobs.reserve(indices.size());
        for (const std::uint32_t index : indices) {
            detail::found_request request{.tensor = index};
            if (options.dtype && can_be_cast(*opened.opened_->stored[index].dtype))
                request.dtype = &*options.dtype;
            jobs.push_back(detail::job_of(*opened.opened_, request, device));
        }
        loaded_tensors loaded = opened.load_jobs(std::move(jobs), device, options);
        loaded.report.duration = std::chrono::steady_clock::now() - start;
        return loaded;
    });
}

}  // namespace pinflow
