#include "tests/crash/injection.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unwind.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <unordered_set>

#include "src/core/system.hpp"
#ifdef PINFLOW_HAVE_CUDA
#include "src/device/cuda/api.hpp"
#endif

namespace injection {

namespace {

using pinflow::detail::system::call;

std::atomic<record*> active = nullptr;
target wanted;
std::atomic<bool> fails_onward = false;
std::mutex stacks_mutex;

/// True while the injection itself runs: its own allocations are not counted.
thread_local bool is_inside = false;
thread_local unsigned own_number = max_threads;

class inside {
 public:
    inside() { is_inside = true; }
    ~inside() { is_inside = false; }
    inside(const inside&) = delete;
    inside& operator=(const inside&) = delete;
};

unsigned number_of_thread(record& shared) {
    if (own_number == max_threads) own_number = std::min(shared.thread_count++, max_threads - 1);
    return own_number;
}

std::string_view name_of(call what) {
    switch (what) {
        case call::open:
            return "open";
        case call::open_unnamed:
            return "open_unnamed";
        case call::chmod:
            return "chmod";
        case call::close:
            return "close";
        case call::fstat:
            return "fstat";
        case call::stat:
            return "stat";
        case call::pread:
            return "pread";
        case call::write:
            return "write";
        case call::truncate:
            return "truncate";
        case call::fsync:
            return "fsync";
        case call::link:
            return "link";
        case call::rename:
            return "rename";
        case call::unlink:
            return "unlink";
        case call::mmap:
            return "mmap";
        case call::madvise:
            return "madvise";
        case call::sigaction:
            return "sigaction";
        case call::start_thread:
            return "start_thread";
        case call::spawn:
            return "spawn";
        case call::statfs:
            return "statfs";
        case call::mkdir:
            return "mkdir";
        case call::fallocate:
            return "fallocate";
        case call::lock:
            return "lock";
    }
    return "call";
}

/// The most frequent error of such a call. An open fails with EMFILE if its number among all calls of its
/// thread is even, otherwise with EACCES.
int typical_error(call what, unsigned number) {
    switch (what) {
        case call::open:
            return number % 2 == 0 ? EMFILE : EACCES;
        case call::spawn:
            return EMFILE;
        case call::open_unnamed:
        case call::write:
        case call::truncate:
        case call::link:
        case call::mkdir:
        case call::fallocate:
            return ENOSPC;
        case call::lock:
            return ENOLCK;
        case call::mmap:
            return ENOMEM;
        case call::start_thread:
            return EAGAIN;
        case call::chmod:
        case call::rename:
        case call::unlink:
            return EACCES;
        default:
            return EIO;
    }
}

void note(record& shared, const std::string& what, const call_stack& stack) {
    if (shared.injected_count++ > 0) return;
    shared.injected_stack = stack;
    std::strncpy(shared.first_injected.data(), what.c_str(), shared.first_injected.size() - 1);
}

/// Counts a call of this thread. @return whether it is to fail.
bool is_next_to_fail(record& shared) {
    const unsigned thread = number_of_thread(shared);
    const unsigned number = ++shared.calls[thread];
    if (fails_onward.load()) return true;
    if (wanted.what != target::kind::call || thread != wanted.thread || number != wanted.number) return false;
    fails_onward = wanted.is_onward;
    return true;
}

/// The frame of the scope's creator. Frames above it differ between kinds of run.
thread_local std::uintptr_t outermost_frame = UINTPTR_MAX;

/// The number of addresses that identify the call stack of an allocation.
constexpr unsigned allocation_depth = 8;

/// Takes the addresses of the callers. The frame pointers of libraries cannot be trusted.
_Unwind_Reason_Code take_frame(_Unwind_Context* context, void* data) {
    struct walk {
        call_stack* stack;
        unsigned depth;
        unsigned max_depth;
        unsigned skipped;
    };
    auto& at = *static_cast<walk*>(data);
    if (at.skipped > 0) {
        --at.skipped;
        return _URC_NO_REASON;
    }
    if (at.depth == at.max_depth || _Unwind_GetCFA(context) > outermost_frame) return _URC_END_OF_STACK;
    (*at.stack)[at.depth++] = reinterpret_cast<void*>(_Unwind_GetIP(context));
    return _URC_NO_REASON;
}

[[gnu::noinline]] call_stack current_stack(unsigned depth, unsigned skipped) {
    call_stack stack{};
    struct {
        call_stack* stack;
        unsigned depth;
        unsigned max_depth;
        unsigned skipped;
    } walk{&stack, 0, depth, skipped};
    _Unwind_Backtrace(take_frame, &walk);
    return stack;
}

/// Its name is not exported, so only the symbol table has it.
[[gnu::noinline]] call_stack stack_of_local_function() {
    call_stack stack = current_stack(1, 1);
    asm volatile("" : "+m"(stack));  // not a tail call
    return stack;
}

/// Whether another library made the allocation for its own use, not for an object of ours. Some libraries end
/// the process if they cannot allocate (oneTBB, the destructor of nlohmann's json, CLI11). This looks at the
/// names of functions, which the program exports.
bool is_foreign(const call_stack& stack) {
    ::Dl_info program{};
    ::dladdr(reinterpret_cast<void*>(&is_foreign), &program);
    for (void* const address : stack) {
        ::Dl_info info{};
        if (address == nullptr || ::dladdr(address, &info) == 0) return false;
        const std::string_view name = info.dli_sname == nullptr ? "" : info.dli_sname;
        const std::string_view file = info.dli_fname == nullptr ? "" : info.dli_fname;
        const bool is_standard = file.find("libstdc++") != std::string_view::npos ||
                                 name.starts_with("_ZNS") || name.starts_with("_ZNKS") ||
                                 name.starts_with("_ZS");
        if (is_standard) continue;
        if (info.dli_fbase != program.dli_fbase) return true;
        return name.starts_with("_ZN8nlohmann") || name.starts_with("_ZNK8nlohmann") ||
               name.starts_with("_ZN3CLI") || name.starts_with("_ZNK3CLI");
    }
    return false;
}

std::uint64_t hash_of(const call_stack& stack) {
    std::uint64_t hash = 1469598103934665603U;
    for (void* const address : stack)
        hash = (hash ^ reinterpret_cast<std::uintptr_t>(address)) * 1099511628211U;
    return hash;
}

void note_stack(record& shared, const call_stack& stack, std::uint64_t hash) {
    static std::unordered_set<std::uint64_t>& known = *new std::unordered_set<std::uint64_t>;
    const std::lock_guard lock(stacks_mutex);
    if (!known.insert(hash).second || shared.stack_count == max_stacks || is_foreign(stack)) return;
    shared.stacks[shared.stack_count++] = hash;
}

[[gnu::noinline]] bool fails_here() {
    record* const shared = active.load(std::memory_order_acquire);
    if (shared == nullptr || is_inside) return false;
    const inside here;
    if (wanted.what == target::kind::call) return false;
    // skips four frames: current_stack, fails_here, allocate, operator new
    const call_stack stack = current_stack(allocation_depth, 4);
    const std::uint64_t hash = hash_of(stack);
    if (wanted.what == target::kind::nothing) {
        note_stack(*shared, stack, hash);
        return false;
    }
    const bool fails = fails_onward.load() || (hash == wanted.stack && shared->injected_count == 0);
    if (!fails || is_foreign(stack)) return false;
    fails_onward = wanted.is_onward;
    note(*shared, "an allocation", stack);
    return true;
}

#ifdef PINFLOW_HAVE_CUDA
std::atomic<bool> device_finished = false;  ///< since the scope began

/// Waits for all work of this thread's device. A real device on which every call fails does no more work.
/// Here it works on, and would change memory that the scenario has freed and that the run after it uses.
void finish_device() {
    int device = 0;
    static_cast<void>(cudaGetDevice(&device));
    // a thread without a current context uses the primary context, which all work is in
    std::thread([device] {
        const inside within;
        static_cast<void>(cudaSetDevice(device));
        static_cast<void>(cudaDeviceSynchronize());
    }).join();
}
#endif

}  // namespace

struct scope::hooks {
    std::optional<pinflow::detail::system::scoped_failure_hook> system;
#ifdef PINFLOW_HAVE_CUDA
    std::optional<pinflow::detail::cuda::scoped_failure_hook> cuda;
#endif
};

[[gnu::noinline]] scope::scope(record& shared, const target& what) {
    const inside here;
    constexpr std::uintptr_t frame_head_bytes = 16;  // the return address and the saved frame pointer
    outermost_frame = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0)) + frame_head_bytes;
    wanted = what;
    fails_onward = false;
    const auto fail_call = [&shared](call asked, std::string_view path) {
        const inside within;
        if (!is_next_to_fail(shared)) return pinflow::detail::system::injected_failure{};
        const int error = typical_error(asked, shared.calls[number_of_thread(shared)]);
        note(shared, fmt::format("{} ({}) of '{}'", name_of(asked), ::strerrorname_np(error), path),
             current_stack(max_depth, 1));
        return pinflow::detail::system::injected_failure{.error = error};
    };
    hooks_ = new hooks;
    if (!what.cuda_only) hooks_->system.emplace(fail_call);
#ifdef PINFLOW_HAVE_CUDA
    const auto fail_cuda = [&shared](std::string_view asked) {
        const inside within;
        if (!is_next_to_fail(shared)) return cudaSuccess;
        if (fails_onward.load() && !device_finished.exchange(true)) finish_device();
        note(shared, std::string(asked), current_stack(max_depth, 1));
        return cudaErrorMemoryAllocation;
    };
    device_finished = false;
    hooks_->cuda.emplace(fail_cuda);
#endif
    active.store(&shared, std::memory_order_release);
}

scope::~scope() {
    const inside here;
    active.store(nullptr, std::memory_order_release);
    delete hooks_;
}

bool has_symbols() {
    return describe(stack_of_local_function()).find("stack_of_local_function") != std::string::npos;
}

std::string describe(const call_stack& stack) {
    ::Dl_info program{};
    ::dladdr(reinterpret_cast<void*>(&describe), &program);
    std::error_code unknown;  // the program's path may be relative to a folder that it has left
    const std::string path = std::filesystem::read_symlink("/proc/self/exe", unknown).string();
    std::string command = fmt::format("addr2line -Cfipe '{}'", path);
    for (void* const address : stack) {
        ::Dl_info info{};
        if (address == nullptr || ::dladdr(address, &info) == 0) break;
        if (info.dli_fbase != program.dli_fbase) continue;
        const auto offset = static_cast<char*>(address) - static_cast<char*>(program.dli_fbase) - 1;
        command += fmt::format(" {:#x}", offset);
    }
    std::string text;
    if (std::FILE* const pipe = ::popen(command.c_str(), "r"); pipe != nullptr) {
        std::array<char, 4096> line{};
        while (std::fgets(line.data(), line.size(), pipe) != nullptr)
            text += fmt::format("        {}", line.data());
        ::pclose(pipe);
    }
    return text;
}

}  // namespace injection

// ---- allocations: those of new expressions ----------------------------------------------------------------

namespace {

[[gnu::noinline]] void* allocate(std::size_t size, std::size_t alignment, bool throws) {
    if (injection::fails_here()) {
        if (throws) throw std::bad_alloc();
        return nullptr;
    }
    const std::size_t rounded = (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
    void* const data =
        alignment <= alignof(std::max_align_t) ? std::malloc(size) : std::aligned_alloc(alignment, rounded);
    if (data == nullptr && throws) throw std::bad_alloc();
    return data;
}

constexpr std::size_t usual = alignof(std::max_align_t);

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t size) {
    return allocate(size, usual, true);
}
[[gnu::noinline]] void* operator new[](std::size_t size) {
    return allocate(size, usual, true);
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
    return allocate(size, usual, false);
}
[[gnu::noinline]] void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
    return allocate(size, usual, false);
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
    return allocate(size, static_cast<std::size_t>(alignment), true);
}
[[gnu::noinline]] void* operator new[](std::size_t size, std::align_val_t alignment) {
    return allocate(size, static_cast<std::size_t>(alignment), true);
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment,
                                     const std::nothrow_t&) noexcept {
    return allocate(size, static_cast<std::size_t>(alignment), false);
}
[[gnu::noinline]] void* operator new[](std::size_t size, std::align_val_t alignment,
                                       const std::nothrow_t&) noexcept {
    return allocate(size, static_cast<std::size_t>(alignment), false);
}
[[gnu::noinline]] void operator delete(void* data) noexcept {
    std::free(data);
}
[[gnu::noinline]] void operator delete[](void* data) noexcept {
    std::free(data);
}
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept {
    std::free(data);
}
[[gnu::noinline]] void operator delete[](void* data, std::size_t) noexcept {
    std::free(data);
}
[[gnu::noinline]] void operator delete(void* data, std::align_val_t) noexcept {
    std::free(data);
}
[[gnu::noinline]] void operator delete[](void* data, std::align_val_t) noexcept {
    std::free(data);
}
[[gnu::noinline]] void operator delete(void* data, std::size_t, std::align_val_t) noexcept {
    std::free(data);
}
[[gnu::noinline]] void operator delete[](void* data, std::size_t, std::align_val_t) noexcept {
    std::free(data);
}
