#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>

/// A new, empty folder that is removed with all its contents when this object ends.
class temporary_folder {
 public:
    temporary_folder() {
        std::string name = (std::filesystem::temp_directory_path() / "pinflow-test-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
        path_ = name;
    }
    temporary_folder(const temporary_folder&) = delete;
    temporary_folder& operator=(const temporary_folder&) = delete;
    ~temporary_folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

    const std::filesystem::path& path() const { return path_; }
    std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
    /// Whether its file system has files without names (O_TMPFILE).
    bool has_unnamed_files() const {
        const int descriptor = ::open(path_.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
        if (descriptor != -1) ::close(descriptor);
        return descriptor != -1;
    }

 private:
    std::filesystem::path path_;
};
