#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

/// What /proc says of the mappings of this process.

/// One mapping: its addresses, and what is mapped there.
struct mapped_pages {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    std::string path;
};

/// All mappings whose path contains `part`, in the order of their addresses.
inline std::vector<mapped_pages> mappings_of(const std::string& part) {
    std::ifstream maps("/proc/self/maps");
    std::vector<mapped_pages> found;
    for (std::string line; std::getline(maps, line);) {
        if (line.find(part) == std::string::npos) continue;
        mapped_pages pages;
        char dash = 0;
        std::string ignored;
        std::istringstream words(line);
        words >> std::hex >> pages.begin >> dash >> pages.end;
        words >> ignored >> ignored >> ignored >> ignored >> std::ws;
        std::getline(words, pages.path);
        found.push_back(pages);
    }
    return found;
}

/// The pages that hold `size_bytes` at `data`.
inline mapped_pages pages_of(const std::byte* data, std::uint64_t size_bytes) {
    const auto page_bytes = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    return {
        begin / page_bytes * page_bytes, (begin + size_bytes + page_bytes - 1) / page_bytes * page_bytes, {}};
}
