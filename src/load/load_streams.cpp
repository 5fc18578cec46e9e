#include "src/load/load_streams.hpp"

#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"

namespace pinflow::detail {

stream_view load_host_stream() {
    struct process_stream {
        ::pid_t process = ::getpid();
        stream of_host{device::host()};
    };
    static std::atomic<process_stream*> current = nullptr;
    process_stream* known = current;
    while (known == nullptr || known->process != ::getpid()) {  // a forked process has none of the threads
        auto made = std::make_unique<process_stream>();
        if (current.compare_exchange_strong(known, made.get()))
            return made.release()->of_host;  // never destroyed
    }
    return known->of_host;
}

stream_view load_release_stream(const device& device) {
    if (device.kind() == device_kind::host) return load_host_stream();
    static auto& mutex = *new std::mutex;
    static auto& streams = *new std::map<std::string, stream>;
    const std::scoped_lock lock(mutex);
    return streams.try_emplace(device.name(), device).first->second;
}

namespace {

struct stream_pool {
    static constexpr std::size_t max_count = 8;  ///< for each device
    std::mutex mutex;
    std::map<std::string, std::vector<stream>> by_device;
};

/// Never destroyed: CUDA may have unloaded by the time of static destructors.
stream_pool& pool() {
    static stream_pool& all = *new stream_pool;
    return all;
}

std::optional<stream> take_stream(const device& device) {
    if (device.kind() == device_kind::host) return std::nullopt;
    {
        stream_pool& all = pool();
        const std::scoped_lock lock(all.mutex);
        auto& unused = all.by_device[device.name()];
        unused.reserve(stream_pool::max_count);  // returning one must not allocate
        if (!unused.empty()) {
            std::optional<stream> taken(std::move(unused.back()));
            unused.pop_back();
            return taken;
        }
    }
    return std::optional<stream>(std::in_place, device);
}

}  // namespace

load_stream::load_stream(const device& device)
    : own_(take_stream(device)), view_(own_ ? own_->view() : load_host_stream()) {}

load_stream::~load_stream() {
    if (!own_) return;
    try {
        own_->synchronize();
    } catch (const error&) {
        return;  // the device has failed
    }
    stream_pool& all = pool();
    const std::scoped_lock lock(all.mutex);
    auto& unused = all.by_device.find(own_->device().name())->second;
    if (unused.size() < stream_pool::max_count) unused.push_back(std::move(*own_));
}

}  // namespace pinflow::detail
