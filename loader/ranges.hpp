#pragma once

#include <cstdint>
#include <optional>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

#include <array>
#endif

/// Ranges that profilers show on the timeline (NVTX), in pinflow's own domain. Without the NVTX header they
/// compile to nothing. Without a profiler, NVTX calls after the first one only test a null pointer.
namespace pinflow::detail {

enum class range : unsigned { sample, fill, deliver, next };

#if __has_include(<nvtx3/nvToolsExt.h>)

/// A range from construction to destruction, on one thread, with the batch number if it is known.
class profiled_range {
 public:
    explicit profiled_range(range what, std::optional<std::uint64_t> number = std::nullopt) noexcept {
        const domain& all = the_domain();
        nvtxEventAttributes_t attributes{};
        attributes.version = NVTX_VERSION;
        attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
        attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
        attributes.message.registered = all.names[static_cast<unsigned>(what)];
        if (number) {
            attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
            attributes.payload.ullValue = *number;
        }
        nvtxDomainRangePushEx(all.handle, &attributes);
    }
    profiled_range(const profiled_range&) = delete;
    profiled_range& operator=(const profiled_range&) = delete;
    ~profiled_range() { nvtxDomainRangePop(the_domain().handle); }

 private:
    struct domain {
        nvtxDomainHandle_t handle = nvtxDomainCreateA("pinflow");
        std::array<nvtxStringHandle_t, 4> names{
            nvtxDomainRegisterStringA(handle, "sample"), nvtxDomainRegisterStringA(handle, "fill"),
            nvtxDomainRegisterStringA(handle, "deliver"), nvtxDomainRegisterStringA(handle, "next")};
    };
    static const domain& the_domain() noexcept {
        static const domain made;
        return made;
    }
};

#else

class profiled_range {
 public:
    explicit profiled_range(range /*what*/, std::optional<std::uint64_t> /*number*/ = std::nullopt) noexcept {
    }
    profiled_range(const profiled_range&) = delete;
    profiled_range& operator=(const profiled_range&) = delete;
    // non-trivial, so that an unused profiled_range gives no warning
    ~profiled_range() {}  // NOLINT(modernize-use-equals-default)
};

#endif

}  // namespace pinflow::detail
