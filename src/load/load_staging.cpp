#include "src/load/load_staging.hpp"

#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "src/load/load_plan.hpp"

namespace pinflow::detail {

namespace {

struct kept_buffers {
    std::mutex mutex;
    std::map<std::string, std::vector<load_buffer>> of_device;
};

/// Never destroyed: CUDA may have unloaded by the time of static destructors.
kept_buffers& kept() {
    static kept_buffers& all = *new kept_buffers;
    return all;
}

}  // namespace

load_buffer::load_buffer(const pinflow::device& device) : host(load_unit_bytes, device), copied(device) {}

load_buffers::load_buffers(const pinflow::device& device) : device_(device) {
    constexpr std::size_t count = 2;
    {
        kept_buffers& all = kept();
        const std::scoped_lock lock(all.mutex);
        auto& free = all.of_device[device.name()];
        free.reserve(kept_count);  // the destructor must not allocate
        while (!free.empty() && buffers_.size() < count) {
            buffers_.push_back(std::move(free.back()));
            free.pop_back();
        }
    }
    while (buffers_.size() < count)
        buffers_.emplace_back(device);
}

load_buffers::~load_buffers() {
    kept_buffers& all = kept();
    const std::scoped_lock lock(all.mutex);
    auto& free = all.of_device.find(device_.name())->second;
    while (!buffers_.empty() && free.size() < kept_count) {
        free.push_back(std::move(buffers_.back()));
        buffers_.pop_back();
    }
}

load_buffer& load_buffers::next() {
    load_buffer& buffer = buffers_[next_++ % buffers_.size()];
    buffer.copied.synchronize();
    return buffer;
}

}  // namespace pinflow::detail
