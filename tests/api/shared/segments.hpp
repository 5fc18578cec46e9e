#pragma once

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "arrays.hpp"
#include "bytes.hpp"
#include "file_bytes.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/shared/segment.hpp"

/// A folder for segments in shared memory, of this test only; it and all segments are gone afterwards.
class test_segments {
 public:
    test_segments() {
        std::string name = "/dev/shm/pinflow-test-XXXXXX";
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a folder in /dev/shm");
        root_ = name;
    }
    test_segments(const test_segments&) = delete;
    test_segments& operator=(const test_segments&) = delete;
    ~test_segments() {
        std::error_code ignored;
        std::filesystem::remove_all(root_, ignored);
    }

    /// Does not exist before the first segment is published.
    std::filesystem::path folder() const { return root_ / "segments"; }
    const std::filesystem::path& root() const { return root_; }
    std::filesystem::path operator/(const std::string& name) const { return folder() / name; }
    pinflow::publish_options options(bool replace = false) const {
        return {.replace = replace, .folder = folder()};
    }
    pinflow::segment_info publish(const std::string& name, const pinflow::array& array,
                                  bool replace = false) const {
        return pinflow::publish(name, *array.rows(), options(replace));
    }
    pinflow::array open(const std::string& name) const { return pinflow::open_segment(name, folder()); }
    std::vector<pinflow::segment_info> list() const { return pinflow::list_segments(folder()); }
    /// Everything in the folder, by its path in it.
    std::vector<std::string> files() const {
        std::vector<std::string> found;
        if (!std::filesystem::exists(folder())) return found;
        for (const auto& entry : std::filesystem::recursive_directory_iterator(folder()))
            found.push_back(std::filesystem::relative(entry.path(), folder()).string());
        std::ranges::sort(found);
        return found;
    }

 private:
    std::filesystem::path root_;
};

inline std::span<const std::byte> bytes_of(const pinflow::array& array) {
    return {array.view().data(), array.size_bytes()};
}

/// Whether `function` throws a system_failure with this code.
template <typename Function>
bool fails_with(std::errc code, Function function) {
    try {
        function();
    } catch (const pinflow::system_failure& failure) {
        if (failure.code() == code) return true;
        MESSAGE("another code: ", failure.what());
    }
    return false;
}
