#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "formats/safetensors_header.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "src/core/cast.hpp"
#include "src/core/element_stream.hpp"
#include "src/core/quote.hpp"
#include "src/core/worker_threads.hpp"
#include "src/train/table_state.hpp"

// All rows of an embedding table from and to files, some records at a time.

namespace pinflow {

namespace {

/// Records that are read or written at once.
constexpr std::uint64_t records_bytes = std::uint64_t{16} << 20;
constexpr const char* table_rule_key = "pinflow.rule";

/// One part of every record: the weights, a state, or the number of steps.
struct record_part {
    std::string name;
    pinflow::dtype type;
    std::uint64_t offset_bytes = 0;  ///< in a record
    std::uint64_t numbers = 0;       ///< of each record

    std::uint64_t size_bytes() const noexcept { return numbers * type.size_bytes(); }
    shape_vector shape(std::uint64_t rows) const {
        return numbers == 1 ? shape_vector{rows} : shape_vector{rows, numbers};
    }
};

/// Calls work(record index) for all records, with several threads.
template <typename Work>
void for_each_record(std::uint64_t count, Work work) {
    constexpr std::uint64_t records_of_task = 256;
    detail::run_in_parallel((count + records_of_task - 1) / records_of_task, [&](std::size_t task) {
        const std::uint64_t begin = task * records_of_task;
        for (std::uint64_t row = begin; row < std::min(begin + records_of_task, count); ++row)
            work(row);
    });
}

record_part weights_part(const embedding_options& options) {
    return {"weights", options.type, 0, options.columns};
}

/// All parts, in the order of a file.
std::vector<record_part> parts_of(const embedding_options& options, const detail::record_layout& layout,
                                  const detail::rule_layout& rule) {
    std::vector<record_part> parts;
    for (std::size_t k = 0; k < rule.states.size(); ++k)
        parts.push_back({std::string(rule.states[k]), dtype::of<float>(), layout.states_bytes[k],
                         rule.is_rowwise ? 1 : options.columns});
    parts.push_back({"step", dtype::of<std::uint32_t>(), layout.steps_bytes, 1});
    parts.push_back(
        weights_part(options));  // last: an odd number of 16-bit weights would misalign the others
    return parts;
}

/// Copies a part of records to contiguous memory.
void pack(const record_part& part, std::span<const std::byte> records, std::uint64_t record_bytes,
          std::byte* packed) {
    for_each_record(records.size() / record_bytes, [&](std::uint64_t i) {
        std::memcpy(packed + i * part.size_bytes(), records.data() + i * record_bytes + part.offset_bytes,
                    part.size_bytes());
    });
}

/// The reverse of `pack`. Packed numbers of another type are cast.
void unpack(const record_part& part, const pinflow::dtype& type, const std::byte* packed,
            std::span<std::byte> records, std::uint64_t record_bytes) {
    const std::uint64_t packed_bytes = part.numbers * type.size_bytes();
    for_each_record(records.size() / record_bytes, [&](std::uint64_t i) {
        std::byte* const to = records.data() + i * record_bytes + part.offset_bytes;
        detail::cast_elements(type, packed + i * packed_bytes, part.type, to, part.numbers);
    });
}

/// Opens the arrays of a saved table, in the order of `parts`.
/// @throws state_mismatch.
std::vector<array> open_parts(const std::filesystem::path& path, const std::vector<record_part>& parts,
                              std::uint64_t row_count) {
    std::map<std::string, array_listing> found;
    for (array_listing& listing : list_safetensors(path))
        found.emplace(listing.name, std::move(listing));
    std::vector<std::string> names;
    for (const record_part& part : parts) {
        if (!found.contains(part.name))
            throw state_mismatch(
                fmt::format("{} has no tensor '{}'", detail::quote(path.string()), part.name));
        names.push_back(part.name);
    }
    if (found.size() != parts.size())
        throw state_mismatch(fmt::format("{} has {} tensors, and this embedding table with its state has {}",
                                         detail::quote(path.string()), found.size(), parts.size()));
    std::vector<array> arrays = open_safetensors(path, names);
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        const shape_vector expected = parts[i].shape(row_count);
        if (arrays[i].dtype() == parts[i].type && arrays[i].shape() == expected) continue;
        throw state_mismatch(
            fmt::format("'{}' has the type {} and the shape {} in {}, and {} and {} in this embedding table",
                        parts[i].name, arrays[i].dtype().descr(), to_string(arrays[i].shape()),
                        detail::quote(path.string()), parts[i].type.descr(), to_string(expected)));
    }
    return arrays;
}

}  // namespace

/// Calls work(records) for all records, some at a time, in their order. Those in device memory are copied to
/// host memory before, and back if `changes` is set.
template <typename Work>
void embedding_table::state::for_records(bool changes, Work work) {
    const std::uint64_t rows_at_once = std::max<std::uint64_t>(records_bytes / layout.size_bytes, 1);
    if (options.device_rows != 0) {
        const pinned_buffer piece(std::min(rows_at_once, options.device_rows) * layout.size_bytes, device);
        for (std::uint64_t row = 0; row < options.device_rows; row += rows_at_once) {
            const std::uint64_t count = std::min(rows_at_once, options.device_rows - row);
            const std::span<std::byte> records = piece.bytes().first(count * layout.size_bytes);
            std::byte* const on_device = first_rows_.data() + row * layout.size_bytes;
            copy_to_host_async(records, on_device, writes_);
            writes_.synchronize();
            work(records);
            if (!changes) continue;
            copy_to_device_async(on_device, records, writes_);
            writes_.synchronize();
        }
    }
    std::span<std::byte> rest = host_records();
    while (!rest.empty()) {
        const std::span<std::byte> records =
            rest.first(std::min<std::uint64_t>(rest.size(), rows_at_once * layout.size_bytes));
        work(records);
        rest = rest.subspan(records.size());
    }
}

void embedding_table::state::export_weights(const std::filesystem::path& path) {
    synchronize();
    const record_part part = weights_part(options);
    npy_writer writer(path, options.type, {options.row_count, options.columns});
    std::vector<std::byte> packed;
    for_records(false, [&](std::span<const std::byte> records) {
        packed.resize(records.size() / layout.size_bytes * part.size_bytes());
        pack(part, records, layout.size_bytes, packed.data());
        writer.write(packed);
    });
    writer.finish();
}

void embedding_table::state::import_weights(const std::filesystem::path& path) {
    const array weights = open(path);
    const shape_vector expected{options.row_count, options.columns};
    if (weights.shape() != expected)
        throw invalid_argument(fmt::format("{} has the shape {}, and the embedding table {}",
                                           detail::quote(path.string()), to_string(weights.shape()),
                                           to_string(expected)));
    const auto elements = detail::stream_elements(weights, records_bytes);
    // .npy files have no bfloat16: its elements are written as `|V2`
    const bool is_opaque =
        elements->dtype().kind() == dtype_kind::opaque && elements->dtype().size_bytes() == 2;
    const bool is_bfloat16 = options.type.kind() == dtype_kind::bfloat16 && is_opaque;
    const pinflow::dtype& type = is_bfloat16 ? options.type : elements->dtype();
    if (!detail::can_cast(type, options.type))
        throw unsupported(fmt::format("{} has elements of the type {}, which cannot be cast to {}",
                                      detail::quote(path.string()), type.descr(), options.type.descr()));
    begin_change();
    const record_part part = weights_part(options);
    std::vector<std::byte> packed;
    for_records(true, [&](std::span<std::byte> records) {
        packed.resize(records.size() / layout.size_bytes * part.numbers * type.size_bytes());
        elements->read(packed);
        unpack(part, type, packed.data(), records, layout.size_bytes);
    });
    elements->finish();
}

void embedding_table::state::save(const std::filesystem::path& path) {
    synchronize();
    const std::vector<record_part> parts = parts_of(options, layout, rule);
    std::vector<safetensors_writer::tensor> headers;
    for (const record_part& part : parts)
        headers.push_back({part.name, part.type, part.shape(options.row_count)});
    safetensors_writer writer(path, headers, {{table_rule_key, std::string(rule_name(options.rule))}});
    std::vector<std::byte> packed;
    for (const record_part& part : parts) {
        for_records(false, [&](std::span<const std::byte> records) {
            packed.resize(records.size() / layout.size_bytes * part.size_bytes());
            pack(part, records, layout.size_bytes, packed.data());
            writer.write(packed);
        });
    }
    writer.finish();
}

void embedding_table::state::load(const std::filesystem::path& path) {
    const std::map<std::string, std::string> metadata = detail::read_safetensors_metadata(path);
    const auto saved = metadata.find(table_rule_key);
    if (saved == metadata.end() || saved->second != rule_name(options.rule))
        throw state_mismatch(
            fmt::format("{} was saved with {}, and this embedding table is updated by the rule {}",
                        detail::quote(path.string()),
                        saved == metadata.end() ? "no rule" : fmt::format("the rule '{}'", saved->second),
                        rule_name(options.rule)));
    const std::vector<record_part> parts = parts_of(options, layout, rule);
    const std::vector<array> arrays = open_parts(path, parts, options.row_count);
    begin_change();
    std::vector<std::byte> packed;
    for (std::size_t k = 0; k < parts.size(); ++k) {
        const auto elements = detail::stream_elements(arrays[k], records_bytes);
        for_records(true, [&](std::span<std::byte> records) {
            packed.resize(records.size() / layout.size_bytes * parts[k].size_bytes());
            elements->read(packed);
            unpack(parts[k], parts[k].type, packed.data(), records, layout.size_bytes);
        });
        elements->finish();
    }
}

}  // namespace pinflow
