#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/formats/listing.hpp"

namespace pinflow {

/// One tensor of a safetensors header.
struct safetensors_entry {
    std::string name;
    std::string type_name;                ///< as the format spells it: "BF16"
    std::optional<pinflow::dtype> dtype;  ///< empty for a type of the format that pinflow lacks
    shape_vector shape;
    std::uint64_t offset_bytes = 0;  ///< of the data, in the file
    std::uint64_t size_bytes = 0;    ///< of the data

    friend bool operator==(const safetensors_entry&, const safetensors_entry&) = default;
};

/// The contents of a safetensors header. The source of the format is the README of huggingface/safetensors.
struct safetensors_header {
    /// In the order of their data. Empty tensors at the same offset are in the order of their names.
    std::vector<safetensors_entry> tensors;
    std::map<std::string, std::string> metadata;  ///< "__metadata__"
};

/// Parses a header: a pure function of the file's first bytes. Checks every length against the file size
/// before it allocates.
/// @param bytes any prefix of the file that holds the whole header.
/// @param file_size_bytes the size of the whole file.
/// @throws format_error (a message without the path) for every header that the reference implementation
/// rejects: holes, overlaps, sizes that do not fit shape and type, unknown types, invalid JSON, a header
/// above 100 MB. Also for headers that it accepts although its specification forbids them: two tensors of one
/// name, two texts of one name in "__metadata__", a header that does not begin with '{', a tensor described
/// by a list. Also for shapes of more than 64 axes, or of 2^61 bytes or more (a length of 0 counts as 1).
/// @throws system_failure if memory is short (a message without the path).
safetensors_header parse_safetensors_header(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

/// Lists the tensors of a file, in the order of their data. A tensor of a type that pinflow lacks (F4,
/// F6_E2M3, F6_E3M2) is listed with that reason.
/// @throws system_failure, format_error; each message names the path.
std::vector<array_listing> list_safetensors(const std::filesystem::path& path);

/// Opens one tensor, mapped in place.
/// @throws invalid_argument if there is no tensor of that name.
/// @throws unsupported for a type that pinflow lacks; what list_safetensors throws.
array open_safetensors(const std::filesystem::path& path, std::string_view name);

/// Opens several tensors, in the order of `names`; reads the header once.
std::vector<array> open_safetensors(const std::filesystem::path& path, std::span<const std::string> names);
inline std::vector<array> open_safetensors(const std::filesystem::path& path,
                                           std::initializer_list<const char*> names) {
    return open_safetensors(path, std::vector<std::string>(names.begin(), names.end()));
}

/// Writes a safetensors file whose elements arrive in pieces, atomically as write_npy. Not thread-safe. A
/// moved-from writer throws invalid_argument.
class safetensors_writer {
 public:
    /// A tensor to be written: C order, little-endian.
    struct tensor {
        std::string name;
        pinflow::dtype dtype;
        shape_vector shape;
    };

    /// Begins a file of these tensors, in this order. The data of the first tensor begins at a multiple of
    /// `alignment_bytes` (the header is padded with spaces). The others follow without gaps, as the format
    /// demands. A tensor after one of a smaller type may therefore be misaligned: put larger types first.
    /// @throws invalid_argument for two tensors of one name, names that are not UTF-8, types that the format
    /// lacks, big-endian types, and an alignment that is not a power of two from 8 to 2 MiB.
    /// @throws system_failure if the file cannot be created.
    safetensors_writer(const std::filesystem::path& path, std::span<const tensor> tensors,
                       const std::map<std::string, std::string>& metadata = {},
                       std::uint64_t alignment_bytes = 4096);
    safetensors_writer(safetensors_writer&&) noexcept;
    safetensors_writer& operator=(safetensors_writer&&) noexcept;
    /// Discards the file unless `finish` has put it in place.
    ~safetensors_writer();

    /// Appends elements, one tensor after the other; a piece may end anywhere.
    /// @throws invalid_argument past the end; system_failure.
    void write(std::span<const std::byte> bytes);
    /// Makes the file durable and renames it into place. If only the last step fails, fsync of the folder,
    /// the new file is in place but may not survive a power failure.
    /// @throws invalid_argument if bytes are missing; system_failure.
    void finish();

 private:
    struct state;
    state& valid_state() const;

    std::unique_ptr<state> state_;
};

}  // namespace pinflow
