#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "formats/element_streams.hpp"
#include "pinflow/formats/open.hpp"
#include "src/cli/open.hpp"

namespace pinflow::cli {

/// The arrays of all files that match a pattern, as one array. Their rows follow each other or, if stacked,
/// each array is one row. The constructor reads all headers; elements are read file by file.
class pattern_array final : public pinflow::detail::element_file {
 public:
    /// @param text FILE[:NAME], in which FILE is a pattern.
    /// @throws invalid_argument if no file matches, if types or row shapes differ, if a file has several
    /// arrays and no NAME was given, if an array without axes is not stacked, or if there are 2^64 or more
    /// rows or bytes; unsupported for an array that cannot be opened. Otherwise as list_arrays and
    /// find_array.
    pattern_array(const std::string& text, bool stacked);

    std::size_t file_count() const noexcept { return parts_.size(); }
    /// The format of the first file.
    file_format format() const noexcept { return *parts_.front().source.format; }
    /// The description of the array, without a name. It is mappable if all parts are and need no conversion.
    array_listing description() const;
    /// The elements of all files, in order. `name` is not used.
    std::unique_ptr<pinflow::detail::element_stream> stream(std::string_view name,
                                                            std::uint64_t memory_bytes) const override;

    /// The array of one file.
    struct part {
        source_argument source;
        array_listing listing;
    };

 private:
    bool stacked_;
    std::vector<part> parts_;
    shape_vector shape_;
};

}  // namespace pinflow::cli
