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

struct kept_streams {
    static constexpr std::size_t max_count = 8;  ///< for each device
    std::mutex mutex;
    std::map<std::string, std::vector<stream>> of_device;
};

/// Never destroyed: CUDA may have unloaded by the time of static destructors.
kept_streams& kept() {
    static kept_streams& all = *new kept_streams;
    return all;
}

std::optional<stream> take_stream(const device& device) {
    if (device.kind() == device_kind::host) return std::nullopt;
    {
        kept_streams& all = kept();
        const std::scoped_lock lock(all.mutex);
        auto& free = all.of_device[device.name()];
        free.reserve(kept_streams::max_count);  // giving back must not allocate
        if (!free.empty()) {
            std::optional<stream> taken(std::move(free.back()));
            free.pop_back();
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
        return;  // the failure has been thrown already, or the memory is lost with the device
    }
    kept_streams& all = kept();
    const std::scoped_lock lock(all.mutex);
    auto& free = all.of_device.find(own_->device().name())->second;
    if (free.size() < kept_streams::max_count) free.push_back(std::move(*own_));
}

}  // namespace pinflow::detail
