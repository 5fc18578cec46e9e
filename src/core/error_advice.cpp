#include "src/core/error_advice.hpp"

namespace pinflow::detail {

std::string_view advice_for(int error) noexcept {
    switch (error) {
        case EMFILE:
            return "raise the number of files that this process may have open (ulimit -n)";
        case ENFILE:
            return "the whole system has too many files open: close some, or raise fs.file-max";
        case ENOSPC:
            return "free space on that filesystem, or write to another one";
        case EDQUOT:
            return "the quota of this user is used up: remove files, or write to another filesystem";
        case EACCES:
            return "check the permissions of the file, and of every folder above it";
        case EPERM:
            return "this user's rights or a security policy forbid that: check the owner and the attributes "
                   "of the file";
        case ENOTDIR:
            return "a part of the path that should be a folder is a file";
        case ELOOP:
            return "a symbolic link is not followed here, or the links lead in a circle";
        case ENAMETOOLONG:
            return "shorten it: a path has at most 4095 bytes, and each name in it 255";
        case EROFS:
            return "the filesystem is mounted read-only: write to another one";
        case EFBIG:
            return "raise the limit on file sizes (ulimit -f), or write to a filesystem that allows larger "
                   "files";
        case ENOMEM:
            return "free memory, or raise the limits on it (ulimit -v, the cgroup's) and on mappings "
                   "(vm.max_map_count)";
        case ESTALE:
            return "the file was replaced on the server of this network filesystem: open it again";
        case ENODEV:
            return "this filesystem cannot do that: copy the file to another one";
        case ENXIO:
            return "there is no device or reader behind this name";
        case ETXTBSY:
            return "a process runs or swaps to this file: stop it first";
        default:
            return {};
    }
}

std::string described(const std::error_code& code) {
    const std::string_view advice =
        code.category() == std::generic_category() || code.category() == std::system_category()
            ? advice_for(code.value())
            : std::string_view();
    std::string text = code.message();
    if (!advice.empty()) {
        text += "; ";
        text += advice;
    }
    return text;
}

}  // namespace pinflow::detail
