#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "formats/element_streams.hpp"
#include "formats/hdf5_path.hpp"
#include "formats/patterns.hpp"
#include "formats/safetensors_header.hpp"
#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/cli/arguments.hpp"
#include "src/cli/commands.hpp"
#include "src/cli/elapsed.hpp"
#include "src/cli/element_pipeline.hpp"
#include "src/cli/open.hpp"
#include "src/cli/output.hpp"
#include "src/cli/pattern_array.hpp"
#include "src/cli/target_file.hpp"
#include "src/core/cast.hpp"
#include "src/core/memory_limits.hpp"

namespace pinflow::cli {

namespace {

using clock = std::chrono::steady_clock;

std::uint64_t reordering_bytes() {
    constexpr std::uint64_t default_bytes = std::uint64_t{64} << 20;
    return std::min(default_bytes, pinflow::detail::read_available_memory().size_bytes / 4);
}

// ---- the command line -------------------------------------------------------------------------------------

struct convert_arguments {
    source_argument source;
    target_argument target;
    std::optional<dtype> view_as;
    std::optional<dtype> cast_to;
    target_layout layout;
    bool stack = false;  ///< each file of a pattern is one row
};

dtype parse_dtype(std::string_view flag, const std::string& text) {
    const auto parsed = [&] {
        try {
            return dtype::parse(text);
        } catch (const error& failure) {
            throw usage_error(fmt::format(
                "{} takes a type as numpy or ml_dtypes spells it, such as float32 or bfloat16: {}", flag,
                failure.what()));
        }
    }();
    if (!parsed.is_little_endian()) {
        throw usage_error(fmt::format(
            "{} takes no big-endian type, such as '{}': convert writes little-endian", flag, text));
    }
    return parsed;
}

/// Empty when help was asked for.
std::optional<convert_arguments> parse_convert_arguments(const argument_list& arguments) {
    CLI::App app(
        "Rewrites arrays as .npy, .npz (stored), .safetensors or HDF5 (.h5, .hdf5), by the extension of\n"
        "OUT. The output is in C order, little-endian and aligned, so that it can be mapped. IN without\n"
        "NAME means all of its arrays. OUT appears complete or not at all, and may be IN. Of HDF5 files,\n"
        "attributes, further names (links) of datasets and the names of enumerations are not copied.",
        "pinflow convert");
    std::string in, out, cast_to, view_as, alignment, deflate_level;
    app.add_option("IN", in,
                   "A file, or FILE:NAME for an array in it. A quoted pattern means all files that\n"
                   "match: their rows follow each other")
        ->type_name("")
        ->required();
    app.add_option("OUT", out,
                   "A file, or FILE:NAME. Without NAME, arrays keep their names; one that was\n"
                   "chosen as IN:NAME, or has no name, as in .npy files, is called `data`")
        ->type_name("")
        ->required();
    app.add_option(
           "--dtype", cast_to,
           "Cast numbers to this type. To floats: round to nearest even. To integers: truncate, saturate")
        ->type_name("T");
    app.add_option("--view-as", view_as,
                   "Reinterpret the elements as a type of the same size, before --dtype")
        ->type_name("T");
    app.add_option("--align", alignment,
                   "Start the data at a multiple of BYTES, a power of two from 16 to 8192, or to 2MiB for "
                   "safetensors\n"
                   "and HDF5 (default: 4096)")
        ->type_name("BYTES");
    app.add_option("--deflate", deflate_level,
                   "HDF5: compress in chunks of about 1 MiB, 1 (fast) to 9 (small); cannot be mapped")
        ->type_name("LEVEL");
    convert_arguments parsed;
    app.add_flag("--stack", parsed.stack, "Each file that a pattern matches is one row")
        ->disable_flag_override();
    app.footer(
        "Examples:\n"
        "  pinflow convert data.h5:images images.npy\n"
        "  pinflow convert 'part-*.npy' whole.npy\n"
        "  pinflow convert --dtype float32 a.npy a.safetensors:weights");
    if (!parse(app, arguments)) return std::nullopt;

    // errors that do not depend on IN come first
    target_argument target = parse_target(out);
    target_layout layout;
    if (app.count("--align") > 0) layout.alignment_bytes = parse_byte_count("--align", alignment);
    check_alignment(target.format, layout.alignment_bytes);
    if (app.count("--deflate") > 0) {
        if (target.format != file_format::hdf5) {
            throw usage_error(fmt::format("--deflate is for HDF5 files (.h5, .hdf5), not for '{}'", out));
        }
        if (app.count("--align") > 0) {
            throw usage_error("--align cannot be combined with --deflate: deflated arrays cannot be mapped");
        }
        layout.deflate_level = static_cast<unsigned>(parse_count("--deflate", deflate_level, 1, 9));
    }
    if (app.count("--view-as") > 0) parsed.view_as = parse_dtype("--view-as", view_as);
    if (app.count("--dtype") > 0) parsed.cast_to = parse_dtype("--dtype", cast_to);
    parsed.source = find_source(in);
    if (!parsed.view_as) parsed.view_as = parsed.source.type;
    parsed.target = std::move(target);
    parsed.layout = layout;
    check_stacks(parsed.stack, parsed.source);
    return parsed;
}

// ---- the plan ---------------------------------------------------------------------------------------------

/// The conversion of one array.
struct conversion {
    std::string source_name;  ///< as in list_arrays
    pinflow::dtype source;    ///< the type that its stream delivers
    pinflow::dtype viewed;    ///< the type after --view-as
    target_array target;
};

std::string named(const source_argument& source, const std::string& name) {
    return name.empty() ? fmt::format("'{}'", source.path) : fmt::format("'{}:{}'", source.path, name);
}

/// @throws unsupported when the file to be written has no such type.
void check_type_fits(file_format format, const conversion& conversion, const std::string& what) {
    const dtype& type = conversion.target.dtype;
    if (format != file_format::safetensors) return;
    const auto fits = [&](const pinflow::detail::safetensors_type& known) {
        return known.kind == type.kind() && known.bits == 8 * type.size_bytes();
    };
    if (std::ranges::any_of(pinflow::detail::safetensors_types(), fits)) return;
    throw unsupported(
        fmt::format("cannot convert {}: safetensors has no type for {} (--view-as reinterprets the bytes as "
                    "a type of the same size, --dtype casts numbers)",
                    what, type.descr()));
}

conversion plan_one(const convert_arguments& arguments, const std::string& source_name,
                    std::string target_name, const dtype& type, shape_vector shape) {
    const dtype source = type.little_endian();
    const dtype viewed = arguments.view_as.value_or(source);
    const dtype target = arguments.cast_to.value_or(viewed);
    const auto what = [&] { return named(arguments.source, source_name); };
    if (viewed.size_bytes() != source.size_bytes()) {
        throw invalid_argument(fmt::format(
            "cannot convert {}: its elements are {} of {}, but {} takes {}", what(), source.descr(),
            readable_count(source.size_bytes(), "byte", "bytes"), viewed.descr(), viewed.size_bytes()));
    }
    if (viewed != target && !pinflow::detail::can_cast(viewed, target)) {
        throw invalid_argument(fmt::format(
            "cannot convert {}: {} cannot be cast to {} (--dtype casts booleans, integers and "
            "floats of at most 8 bytes, except float8_e8m0fnu and float8_*fnuz, to one another, and "
            "complex numbers of at most 16 bytes to one another; --view-as reinterprets the "
            "bytes)",
            what(), viewed.descr(), target.descr()));
    }
    conversion planned{source_name, source, viewed, {std::move(target_name), target, std::move(shape)}};
    check_type_fits(arguments.target.format, planned, what());
    return planned;
}

/// Which arrays are converted, and to what.
std::vector<conversion> plan(const convert_arguments& arguments,
                             const pinflow::detail::element_file& elements) {
    const source_argument& source = arguments.source;
    const target_argument& target = arguments.target;
    if (source.is_pattern()) {
        const auto stream = elements.stream({}, reordering_bytes());
        return {plan_one(arguments, {}, target.name, stream->dtype(), stream->shape())};
    }
    std::vector<array_listing> listed;
    if (!source.name) listed = list_arrays(source.path);
    if (source.name || listed.size() == 1) {
        const std::string name = source.name.value_or(listed.empty() ? "" : listed.front().name);
        const auto stream = elements.stream(name, reordering_bytes());
        // the only array of a whole file keeps its name, if it has one
        const bool has_name =
            !target.named && !source.name && !name.empty() && target.format != file_format::npy;
        return {plan_one(arguments, name, has_name ? name : target.name, stream->dtype(), stream->shape())};
    }
    if (listed.empty() && (target.format == file_format::npy || target.named))
        throw invalid_argument(fmt::format("cannot convert '{}': there is no array in it", source.path));
    if (target.format == file_format::npy) {
        throw invalid_argument(fmt::format(
            "cannot convert '{}', which has several arrays, to a .npy file, which holds one array: choose "
            "one as '{}:NAME' ({})",
            source.path, source.path, names_of(listed)));
    }
    if (target.named) {
        throw invalid_argument(fmt::format(
            "cannot convert '{}', which has several arrays, to the one array '{}': choose one as '{}:NAME' "
            "({}), or give OUT without a name: '{}'",
            source.path, target.name, source.path, names_of(listed), target.path));
    }
    std::vector<conversion> conversions;
    for (const array_listing& each : listed) {
        if (!each.dtype) {
            throw unsupported(fmt::format("cannot convert {}: {}; choose one array as '{}:NAME'",
                                          named(source, each.name), each.reason, source.path));
        }
        conversions.push_back(plan_one(arguments, each.name, each.name, *each.dtype, each.shape));
    }
    if (target.format == file_format::safetensors) {
        // no gaps are allowed, but smaller elements after larger elements are always aligned
        std::multimap<std::uint64_t, conversion, std::greater<>> by_size;  // equal ones keep their order
        for (conversion& each : conversions)
            by_size.emplace(each.target.dtype.size_bytes(), std::move(each));
        conversions.clear();
        for (auto& [size_bytes, each] : by_size)
            conversions.push_back(std::move(each));
    }
    return conversions;
}

/// Whether both are names of one file, links included.
bool same_file(const std::string& a, const std::string& b) {
    std::error_code ignored;
    return std::filesystem::equivalent(a, b, ignored);
}

/// Refuses an OUT that the pattern IN matches.
/// @throws invalid_argument.
void refuse_matching_target(const source_argument& source, const target_argument& target) {
    if (source.is_pattern() && pinflow::detail::pattern_covers(source.path, target.path)) {
        throw invalid_argument(fmt::format(
            "cannot write '{}': the pattern '{}' matches it, so another run would read it as well",
            target.path, source.path));
    }
}

/// If OUT has a NAME, or IN:NAME is written to its own file, checks that no other array of the existing file
/// is lost: the new file replaces it as a whole.
/// @throws invalid_argument if an array would be lost.
void check_nothing_is_lost(const source_argument& source, const target_argument& target) {
    if (!pinflow::detail::exists(target.path)) return;
    const bool onto_itself = source.name && same_file(source.path, target.path);
    if (!onto_itself && !target.named) return;  // the file as a whole was named, to be replaced
    std::optional<file_format> format;
    try {
        format = format_of(target.path);
    } catch (const format_error&) {
        return;  // no arrays that could be lost
    }
    std::vector<array_listing> present;
    try {
        present = list_arrays(target.path);
    } catch (const error& failure) {
        throw invalid_argument(fmt::format(
            "cannot write '{}' to '{}': the file exists, and its arrays, which would be lost, cannot be "
            "listed: {}",
            target.name, target.path, failure.what()));
    }
    // the array that is read is written back, so it is not lost; a field is only a part of its array
    std::string kept = onto_itself ? *source.name : target.name;
    if (format == file_format::hdf5) kept = pinflow::detail::hdf5_path(kept);
    std::erase_if(present, [&](const array_listing& each) {
        return each.name == kept || (format == file_format::npz && each.name + ".npy" == kept);
    });
    if (present.empty()) return;
    if (present.size() == 1 && present.front().name.empty()) {
        throw invalid_argument(fmt::format(
            "cannot write the field '{}' to '{}' itself: the other fields of its array would be lost", kept,
            target.path));
    }
    throw invalid_argument(fmt::format(
        "cannot write '{}' to '{}': the file exists and has {}, which would be lost, because convert "
        "writes whole files",
        target.name, target.path, names_of(present)));
}

// ---- doing it ---------------------------------------------------------------------------------------------

std::uint64_t payload_bytes(const target_array& array) {
    return element_count(array.shape) * array.dtype.size_bytes();
}

/// The metadata that one safetensors file passes on to the next.
text_map metadata_of(const convert_arguments& arguments) {
    if (arguments.source.format != file_format::safetensors ||
        arguments.target.format != file_format::safetensors) {
        return {};
    }
    return pinflow::detail::read_safetensors_metadata(arguments.source.path);
}

/// @return the bytes of payload written.
std::uint64_t convert_all(const convert_arguments& arguments, const pinflow::detail::element_file& elements,
                          const std::vector<conversion>& conversions) {
    std::vector<target_array> arrays;
    double total_bytes = 0;
    for (const conversion& each : conversions) {
        arrays.push_back(each.target);
        total_bytes += static_cast<double>(payload_bytes(each.target));
    }
    target_file file(arguments.target, arrays, metadata_of(arguments), arguments.layout);
    element_pipeline pipeline;
    progress_line progress;
    std::uint64_t written_bytes = 0;
    const clock::time_point start = clock::now();
    const auto write = [&](std::span<const std::byte> bytes) {
        file.write(bytes);
        written_bytes += bytes.size();
        if (progress.due()) {
            const double written = static_cast<double>(written_bytes);
            progress.show(fmt::format("{:5.1f} %, {:.2f} GB/s", 100 * written / std::max(total_bytes, 1.0),
                                      written / seconds_since(start) / 1e9));
        }
    };
    const std::uint64_t memory_bytes = reordering_bytes();
    for (const conversion& each : conversions) {
        const auto stream = elements.stream(each.source_name, memory_bytes);
        if (stream->dtype() != each.source || stream->shape() != each.target.shape) {
            throw data_changed(fmt::format("{} changed after its header was read",
                                           named(arguments.source, each.source_name)));
        }
        file.begin(each.target);
        pipeline.run(*stream, each.viewed, each.target.dtype, write);
        stream->finish();  // before the new file can take the old one's name
    }
    file.finish();
    return written_bytes;
}

/// A note for each type that .npy headers cannot express, with the names of its arrays; empty if there is
/// none.
std::string notes_on(const convert_arguments& arguments, const std::vector<conversion>& conversions) {
    const file_format format = arguments.target.format;
    if (format != file_format::npy && format != file_format::npz) return {};
    std::map<std::string, std::vector<array_listing>> arrays;  // of each type that numpy lacks
    for (const conversion& each : conversions) {
        if (each.target.dtype.is_known_to_numpy()) continue;
        array_listing& listed = arrays[each.target.dtype.descr()].emplace_back();
        listed.name = each.target.name;
        listed.dtype = each.target.dtype;
    }
    std::string notes;
    for (const auto& [type, of_type] : arrays) {
        const std::string what = format == file_format::npy ? "it" : names_of(of_type);
        notes +=
            fmt::format("note: numpy has no {}: {} {} written as |V{}, to be read with --view-as {}\n", type,
                        what, of_type.size() == 1 ? "is" : "are", of_type.front().dtype->size_bytes(), type);
    }
    return notes;
}

std::unique_ptr<pinflow::detail::element_file> open_source(const convert_arguments& arguments) {
    if (!arguments.source.is_pattern()) return pinflow::detail::open_elements(arguments.source.path);
    return std::make_unique<pattern_array>(arguments.source.path, arguments.stack);
}

}  // namespace

void convert(const argument_list& arguments) {
    const std::optional<convert_arguments> parsed = parse_convert_arguments(arguments);
    if (!parsed) return;

    const clock::time_point start = clock::now();
    refuse_matching_target(parsed->source, parsed->target);
    const auto elements = open_source(*parsed);
    const std::vector<conversion> conversions = plan(*parsed, *elements);
    // after plan, which refuses an IN:NAME that is missing
    check_nothing_is_lost(parsed->source, parsed->target);
    const std::uint64_t bytes = convert_all(*parsed, *elements, conversions);
    const double seconds = seconds_since(start);
    print(fmt::format("{}: {}, {} in {:.3f} s, {:.2f} GB/s\n{}", escaped(parsed->target.path),
                      readable_count(conversions.size(), "array", "arrays"),
                      readable_count(bytes, "byte", "bytes"), seconds,
                      static_cast<double>(bytes) / seconds / 1e9, notes_on(*parsed, conversions)));
}

}  // namespace pinflow::cli
