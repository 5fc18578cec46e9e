#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/loader/sampler.hpp"

namespace pinflow {

/// Identifies one array of a sample among arrays with the same number of rows.
struct array_fingerprint {
    std::string description;               ///< as row_source::description; only for messages, never compared
    std::string dtype;                     ///< as dtype::descr
    std::vector<std::uint64_t> row_shape;  ///< in elements
    std::uint64_t hash = 0;                ///< XXH3 of some rows, spread over the array, as delivered
};

/// Identifies the data of a loader. Data that was moved, or stored in another format, has the same
/// fingerprint if it is opened with the same type (.npy and .npz files lack bfloat16 and 8-bit floats: use
/// `view_as`). Other rows, types or shapes change it. A change of only a few rows may go unnoticed.
struct data_fingerprint {
    std::uint64_t row_count = 0;
    std::vector<array_fingerprint> arrays;
};

/// Where a loader resumes: the order, and how much of it has been delivered. It does not depend on the
/// batch size or the number of processes. So all ranks have the same state after the same step, and a run
/// can resume with more or fewer ranks. A plain value.
struct loader_state {
    /// Version of the JSON text; any other version is refused.
    static constexpr std::uint64_t format_version = 1;

    order_identity order;
    /// Epoch and position of the first sample that no rank has delivered; position 0 of the next epoch when
    /// an epoch is over.
    std::uint64_t epoch = 0;
    std::uint64_t position = 0;
    data_fingerprint data;

    /// The state as a small JSON object of several lines.
    std::string to_json() const;
    /// Reads the text that `to_json` returns.
    /// @throws format_error for any other text.
    /// @throws unsupported for a version that this pinflow does not know.
    static loader_state from_json(std::string_view text);

    /// Writes the JSON text to a file that appears under its name complete or not at all.
    /// @throws system_failure. If only the last step failed, fsync of the folder, the new file is in place
    /// but may not survive a power failure.
    void save(const std::filesystem::path& path) const;
    /// Reads a file that `save` wrote.
    /// @throws system_failure if the file cannot be read; what from_json throws, with the path in the
    /// message.
    static loader_state load(const std::filesystem::path& path);
};

}  // namespace pinflow
