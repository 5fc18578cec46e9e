#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "formats/hdf5_rows.hpp"
#include "pinflow/array.hpp"
#include "pinflow/file.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/row_source.hpp"
#include "tests/run_h5py.hpp"
#include "tests/support/temporary_folder.hpp"

/// Files that tests/hdf5_files.py wrote, and what h5py says of them: where bytes lie, and which elements they
/// are.

/// One dataset of such a file.
struct hdf5_file_entry {
    std::string file;
    std::shared_ptr<const pinflow::detail::hdf5_description> description;
    std::vector<std::byte> stored;  ///< its elements, in the byte order of the file
    std::vector<std::byte> little;  ///< and little-endian
};

inline std::vector<std::byte> bytes_of_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    std::vector<std::byte> bytes(content.size());
    if (!bytes.empty()) std::memcpy(bytes.data(), content.data(), bytes.size());
    return bytes;
}

inline std::vector<std::byte> bytes_of_hex(const std::string& hex) {
    std::vector<std::byte> bytes;
    for (std::size_t at = 0; at < hex.size(); at += 2)
        bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(at, 2), nullptr, 16)));
    return bytes;
}

/// What tests/hdf5_files.py wrote into `folder`.
inline std::vector<hdf5_file_entry> hdf5_file_entries(const std::filesystem::path& folder) {
    using pinflow::detail::hdf5_storage;
    const auto manifest = nlohmann::json::parse(std::ifstream(folder / "manifest.json"));
    std::vector<hdf5_file_entry> entries;
    for (std::size_t number = 0; number < manifest.size(); ++number) {
        const nlohmann::json& item = manifest[number];
        const pinflow::array array = pinflow::open_npy(folder / (std::to_string(number) + ".npy"));
        pinflow::detail::hdf5_description description;
        description.name = item["name"];
        description.dtype = array.dtype();
        description.shape = array.shape();
        description.fill = bytes_of_hex(item["fill"]);
        const std::string storage = item["storage"];
        if (storage == "contiguous") {
            description.storage = hdf5_storage::contiguous;
            description.offset_bytes = item["offset"];
        } else if (storage == "inline") {
            description.storage = hdf5_storage::compact;
            description.compact_data = bytes_of_hex(item["inline"]);
        } else if (storage == "chunked") {
            description.storage = hdf5_storage::chunked;
            description.chunk_shape = item["chunk_shape"].get<pinflow::shape_vector>();
            for (const auto& filter : item["filters"])
                description.filters.push_back(
                    {filter[0], filter[1], filter[2].get<std::vector<std::uint32_t>>()});
            for (const auto& chunk : item["chunks"])
                description.chunks.push_back({chunk[0], chunk[1], chunk[2]});
        } else if (storage != "absent") {
            throw std::runtime_error("storage " + storage + " is not known");
        }
        hdf5_file_entry entry;
        entry.file = item["file"];
        entry.stored.resize(array.size_bytes());
        if (!entry.stored.empty()) std::memcpy(entry.stored.data(), array.view().data(), entry.stored.size());
        entry.little = bytes_of_file(folder / (std::to_string(number) + ".little"));
        entry.description = std::make_shared<const pinflow::detail::hdf5_description>(std::move(description));
        entries.push_back(std::move(entry));
    }
    return entries;
}

/// The folder of the files, which `hdf5_entries` writes once for all cases.
inline const temporary_folder& hdf5_folder() {
    static const temporary_folder folder;
    return folder;
}

inline const std::vector<hdf5_file_entry>& hdf5_entries() {
    static const std::vector<hdf5_file_entry> entries = [] {
        if (run_h5py("hdf5_files.py", {"write", hdf5_folder().path().string()}) != 0)
            throw std::runtime_error("h5py failed");
        return hdf5_file_entries(hdf5_folder().path());
    }();
    return entries;
}

inline const hdf5_file_entry& entry_named(const std::string& name, const std::string& file = "512.h5") {
    for (const hdf5_file_entry& entry : hdf5_entries()) {
        if (entry.file == file && entry.description->name == name) return entry;
    }
    throw std::runtime_error("there is no " + name);
}

inline pinflow::detail::hdf5_dataset dataset_of(const hdf5_file_entry& entry) {
    static std::map<std::string, std::shared_ptr<const pinflow::input_file>> files;
    auto& file = files[entry.file];
    if (!file) file = std::make_shared<const pinflow::input_file>(hdf5_folder() / entry.file);
    return {file, entry.description, {}};
}

/// Rows with a cache of `cache_bytes` for decoded chunks.
inline std::shared_ptr<const pinflow::row_source> rows_with_cache(
    const pinflow::detail::hdf5_dataset& dataset, std::uint64_t cache_bytes) {
    constexpr std::uint64_t decoding_bytes = std::uint64_t{64} << 20;
    return make_hdf5_rows(dataset,
                          std::make_shared<pinflow::detail::hdf5_memory>(cache_bytes, decoding_bytes));
}

using row_ids = std::vector<std::uint64_t>;

inline std::vector<std::byte> read(const pinflow::row_source& rows, const row_ids& ids) {
    std::vector<std::byte> bytes(ids.size() * rows.row_size_bytes(), std::byte{0xAA});
    rows.read_rows(ids, bytes);
    return bytes;
}

inline std::vector<std::byte> rows_of(std::span<const std::byte> all, std::uint64_t row_bytes,
                                      const row_ids& ids) {
    std::vector<std::byte> bytes;
    bytes.reserve(ids.size() * row_bytes);
    for (const std::uint64_t id : ids) {
        const auto row = all.subspan(id * row_bytes, row_bytes);
        bytes.insert(bytes.end(), row.begin(), row.end());
    }
    return bytes;
}

inline row_ids all_rows(std::uint64_t count) {
    row_ids ids(count);
    for (std::uint64_t id = 0; id < count; ++id)
        ids[id] = id;
    return ids;
}
