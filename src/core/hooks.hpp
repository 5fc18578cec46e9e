#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace pinflow::detail {

/// The hooks that tests have installed at a seam. Asking costs one atomic load if there are none, and never
/// allocates. All functions may be called from any thread.
template <typename Hook>
class hooks {
    struct node {
        Hook hook;
        std::shared_ptr<node> next;
    };

 public:
    /// Installs a hook for its lifetime. When that has ended, another thread may still be calling the hook.
    class scope {
     public:
        scope(hooks& all, Hook hook) : all_(all), node_(std::make_shared<node>(std::move(hook), nullptr)) {
            const std::lock_guard lock(all_.mutex_);
            node_->next = all_.first_;
            all_.first_ = node_;
            all_.is_empty_.store(false, std::memory_order_release);
        }
        ~scope() {
            const std::lock_guard lock(all_.mutex_);
            std::shared_ptr<node>* at = &all_.first_;
            while (*at != node_)
                at = &(*at)->next;
            *at = node_->next;  // the node keeps its own `next` for threads that are asking it
            all_.is_empty_.store(all_.first_ == nullptr, std::memory_order_release);
        }
        scope(const scope&) = delete;
        scope& operator=(const scope&) = delete;

     private:
        hooks& all_;
        std::shared_ptr<node> node_;
    };

    bool is_empty() const noexcept { return is_empty_.load(std::memory_order_acquire); }

    /// Calls `ask(hook)`, the last installed hook first, until it returns true.
    template <typename Ask>
    void ask(Ask ask) const {
        if (is_empty()) return;
        for (std::shared_ptr<node> at = after(nullptr); at != nullptr; at = after(at)) {
            if (ask(std::as_const(at->hook))) return;
        }
    }

 private:
    std::shared_ptr<node> after(const std::shared_ptr<node>& at) const {
        const std::lock_guard lock(mutex_);
        return at == nullptr ? first_ : at->next;
    }

    mutable std::mutex mutex_;
    std::shared_ptr<node> first_;
    std::atomic<bool> is_empty_ = true;
};

}  // namespace pinflow::detail
