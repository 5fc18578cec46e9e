#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/cast.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"
#include "src/load/device_conversions.hpp"
#include "src/load/load_plan.hpp"

// From requests to jobs.

namespace pinflow::detail {

namespace {

/// @throws invalid_argument.
void check_slice(const opened_tensors& opened, std::size_t index, const tensor_slice& slice) {
    const stored_tensor& tensor = opened.stored[index];
    if (slice.axis >= tensor.shape.size())
        throw invalid_argument(fmt::format("cannot slice {} along axis {}: its shape is {}",
                                           label_of(opened, index), slice.axis, to_string(tensor.shape)));
    if (slice.begin > slice.end || slice.end > tensor.shape[slice.axis])
        throw invalid_argument(fmt::format("cannot slice {} from {} to {} along axis {}: its shape is {}",
                                           label_of(opened, index), slice.begin, slice.end, slice.axis,
                                           to_string(tensor.shape)));
}

/// @throws invalid_argument.
void check_part(const opened_tensors& opened, std::size_t index, const tensor_part& part) {
    for (std::size_t i = 0; i < part.slice_count(); ++i) {
        check_slice(opened, index, part[i]);
        for (std::size_t before = 0; before < i; ++before) {
            if (part[before].axis == part[i].axis)
                throw invalid_argument(fmt::format("cannot slice {} twice along axis {}",
                                                   label_of(opened, index), part[i].axis));
        }
    }
}

/// @throws invalid_argument if two destinations overlap.
void check_destinations(const opened_tensors& opened, std::span<const load_job> jobs) {
    std::vector<const load_job*> placed;
    for (const load_job& job : jobs) {
        if (job.destination != nullptr && job.size_bytes != 0) placed.push_back(&job);
    }
    std::ranges::sort(placed, std::less{}, &load_job::destination);
    for (std::size_t i = 1; i < placed.size(); ++i) {
        const load_job &before = *placed[i - 1], &next = *placed[i];
        if (static_cast<std::uint64_t>(next.destination - before.destination) < before.size_bytes)
            throw invalid_argument(fmt::format("the destinations of {} and {} overlap",
                                               label_of(opened, before.tensor),
                                               label_of(opened, next.tensor)));
    }
}

}  // namespace

const std::unordered_map<std::string_view, std::size_t>& opened_tensors::by_name() const {
    std::call_once(by_name_made_, [&] {
        by_name_.reserve(stored.size());
        for (std::size_t i = 0; i < stored.size(); ++i)
            by_name_.emplace(stored[i].name, i);
    });
    return by_name_;
}

std::string name_of_files(std::span<const std::filesystem::path> paths) {
    return paths.size() == 1 ? quote(paths[0].string(), max_shown_path)
                             : fmt::format("{} files", paths.size());
}

std::string label_of(const opened_tensors& opened, std::size_t index) {
    const stored_tensor& tensor = opened.stored[index];
    return fmt::format("{} of {}", quote(tensor.name, max_label_name),
                       quote(opened.paths[tensor.file].string(), max_shown_path));
}

void refuse(const opened_tensors& opened, const std::string& name) {
    const refusal& refused = opened.refused.at(name);
    try {
        static_cast<void>(open(opened.absolute_paths[refused.file], name));
    } catch (const invalid_argument&) {
        throw unsupported(refused.reason);  // such as a link that leads nowhere
    }
    throw unsupported(refused.reason);
}

found_request find_request(const opened_tensors& opened, const tensor_request& request) {
    const auto found = opened.by_name().find(request.name);
    if (found == opened.by_name().end()) {
        if (opened.refused.contains(request.name)) refuse(opened, request.name);
        throw invalid_argument(fmt::format("cannot load {}: none of the {} tensors of {} has that name",
                                           quote(request.name, max_label_name), opened.stored.size(),
                                           name_of_files(opened.paths)));
    }
    return {.tensor = static_cast<std::uint32_t>(found->second),
            .part = {request.slice ? &*request.slice : nullptr, request.further_slices},
            .dtype = request.dtype ? &*request.dtype : nullptr,
            .destination = request.destination};
}

load_job job_of(const opened_tensors& opened, const found_request& request, const pinflow::device& device) {
    const stored_tensor& tensor = opened.stored[request.tensor];
    load_job job{
        .tensor = request.tensor, .size_bytes = tensor.size_bytes, .destination = request.destination};
    if (request.dtype != nullptr && !(*request.dtype == *tensor.dtype)) {
        if (!can_cast(*tensor.dtype, *request.dtype))
            throw invalid_argument(fmt::format("cannot cast {} from {} to {}", label_of(opened, job.tensor),
                                               tensor.dtype->descr(), request.dtype->descr()));
        job.cast = request.dtype;
    }
    if (needs_conversion(opened, job)) job.is_converted_by_device = can_convert(opened, job, device);
    job.is_decoded = !tensor.is_as_delivered() && !job.is_converted_by_device;
    if (!request.part.is_whole()) {
        check_part(opened, request.tensor, request.part);
        job.part = request.part;
        const byte_runs runs = runs_of(opened, job);
        job.first_bytes = runs.first_bytes;
        job.has_gaps = !runs.is_contiguous();
    }
    if (!job.is_cast() && job.part.is_whole()) return job;
    const pinflow::dtype& type = type_of(opened, job);
    const shape_vector shape = shape_of(opened, job);
    if (!multiply(element_count(shape), type.size_bytes(), job.size_bytes))
        throw invalid_argument(fmt::format("{} of shape {} is too large for elements of {}",
                                           label_of(opened, job.tensor), to_string(shape), type.descr()));
    return job;
}

std::vector<load_job> jobs_of(const opened_tensors& opened, std::span<const found_request> requests,
                              const pinflow::device& device) {
    std::vector<load_job> jobs;
    jobs.reserve(requests.size());
    std::vector<bool> is_requested(opened.stored.size(), false);
    for (const found_request& request : requests) {
        jobs.push_back(job_of(opened, request, device));
        if (is_requested[request.tensor])
            throw invalid_argument(
                fmt::format("cannot load {} twice at once", label_of(opened, request.tensor)));
        is_requested[request.tensor] = true;
    }
    check_destinations(opened, jobs);
    return jobs;
}

std::vector<aliased_job> remove_aliases(const opened_tensors& opened, std::vector<load_job>& jobs) {
    std::vector<aliased_job> aliases;
    if (opened.aliases.empty()) return aliases;
    const auto delivered_as = [&](const load_job& job) {
        std::vector<std::uint64_t> ranges;
        for (std::size_t axis = 0; axis < opened.stored[job.tensor].shape.size(); ++axis) {
            const auto [begin, end] = range_of(opened, job, axis);
            ranges.insert(ranges.end(), {begin, end});
        }
        return std::tuple(opened.stored[job.tensor].alias_of.value_or(job.tensor), std::move(ranges),
                          type_of(opened, job).descr());
    };
    std::map<decltype(delivered_as(jobs.front())), std::size_t> first_jobs;
    std::vector<load_job> left;
    for (std::size_t position = 0; position < jobs.size(); ++position) {
        const load_job& job = jobs[position];
        if (job.destination == nullptr) {
            const auto [first, is_new] = first_jobs.emplace(delivered_as(job), left.size());
            if (!is_new) {
                aliases.push_back({position, job.tensor, first->second});
                continue;
            }
        }
        left.push_back(job);
    }
    jobs = std::move(left);
    return aliases;
}

byte_runs runs_of(const opened_tensors& opened, const load_job& job) {
    const stored_tensor& tensor = opened.stored[job.tensor];
    if (job.part.is_whole()) return {.size_bytes = tensor.size_bytes, .stride_bytes = tensor.size_bytes};
    shape_vector shape(tensor.shape.begin(), tensor.shape.end());
    std::vector<axis_range> part;
    for (std::size_t axis = 0; axis < shape.size(); ++axis)
        part.push_back(range_of(opened, job, axis));
    if (tensor.is_fortran_order && job.is_converted_by_device) {  // as stored
        std::ranges::reverse(shape);
        std::ranges::reverse(part);
    }
    return runs_of_box(shape, part, tensor.dtype->size_bytes());
}

stored_span span_of(const opened_tensors& opened, const load_job& job, const load_piece& piece) {
    file_position begin = position_of(opened, job);
    if (!job.has_gaps) {
        begin.offset_bytes += piece.begin_bytes;
        return {begin, piece.size_bytes};
    }
    const byte_runs runs = runs_of(opened, job);
    const std::uint64_t first = runs.offset_of(piece.begin_bytes);
    const std::uint64_t last = runs.offset_of(piece.begin_bytes + piece.size_bytes - 1);
    begin.offset_bytes += first;
    return {begin, last - first + 1};
}

}  // namespace pinflow::detail
