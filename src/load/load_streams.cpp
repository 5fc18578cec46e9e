#include "src/load/load_streams.hpp"

#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

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

}  // namespace pinflow::detail
