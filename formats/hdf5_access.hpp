#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "formats/hdf5_aliases.hpp"
#include "formats/hdf5_description.hpp"
#include "formats/hdf5_rows.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/listing.hpp"

namespace pinflow::detail {

/// Lists, describes and reads with libhdf5 for pinflow/formats/hdf5.hpp, in this process or in another.
/// Members are called from any thread. They throw as list_hdf5_datasets, describe_hdf5_dataset and
/// hdf5_library_reader, and their error messages name the same things.
class hdf5_access {
 public:
    hdf5_access() = default;
    hdf5_access(const hdf5_access&) = delete;
    hdf5_access& operator=(const hdf5_access&) = delete;
    virtual ~hdf5_access() = default;

    virtual std::vector<array_listing> list(const input_file& file) = 0;
    /// Lists aliases as list_hdf5_aliases does. The default returns none.
    virtual std::vector<hdf5_alias> aliases(const input_file& /*file*/) { return {}; }
    virtual hdf5_description describe(const input_file& file, std::string_view name) = 0;
    /// Lists one dataset. The default describes it, which finds its chunks, too.
    virtual array_listing list_one(const input_file& file, std::string_view name) {
        return hdf5_listing(describe(file, name));
    }
    /// Finds a dataset as find_hdf5_dataset does. The default finds none.
    virtual std::optional<array_listing> find(const input_file& /*file*/, std::string_view /*name*/) {
        return std::nullopt;
    }
    /// Describes several datasets, as describe_hdf5_datasets does. The default describes none.
    virtual std::vector<hdf5_description> describe_several(const input_file& /*file*/,
                                                           std::span<const std::string_view> /*names*/,
                                                           std::size_t /*max_bytes*/) {
        return {};
    }
    /// Opens a reader for a dataset of `hdf5_storage::library`.
    virtual hdf5_read_function reader(std::shared_ptr<const input_file> file,
                                      const hdf5_description& description) = 0;
};

/// Makes all later listing, describing and reading with libhdf5 go through `other`. Writing still calls
/// libhdf5 in this process, and rows opened before keep their access. The tool calls this before it opens
/// anything. Not thread-safe.
void use_hdf5_access(std::shared_ptr<hdf5_access> other);

}  // namespace pinflow::detail
