#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pinflow/mapped_file.hpp"
#include "pinflow/pin.hpp"
#include "src/load/load_plan.hpp"

namespace pinflow::detail {

/// The pages of the copyable units of a plan: mapped, and registered piece by piece from the front.
/// Unregistering them takes half as long as registering, so the destructor leaves it to another thread.
class load_pages {
 public:
    /// Begins to register.
    load_pages(const opened_tensors& opened, const load_plan& plan, const pinflow::device& device,
               const load_options& options);
    load_pages(const load_pages&) = delete;
    load_pages& operator=(const load_pages&) = delete;
    /// All copies must have finished.
    ~load_pages();

    /// The mapping of a file.
    const std::byte* data_of(std::size_t file) const { return mappings_[file]->data(); }
    /// Whether all these pages are registered. Does not wait.
    bool cover(const std::vector<copy_range>& ranges) const;
    /// Waits until all these pages are registered, or until the time has passed. @return false if they will
    /// not be registered.
    bool wait_for(const std::vector<copy_range>& ranges, std::chrono::nanoseconds timeout) const;
    /// Why pages could not be registered; in detail once nothing more will be.
    std::string reason() const;
    /// @throws unsupported, with that reason.
    void require() const { pages_->require(); }

 private:
    std::vector<pin_range> map_all(const opened_tensors& opened, const load_plan& plan);
    static void add_range(std::vector<pin_range>& ranges, const std::shared_ptr<const mapped_file>& mapping,
                          const stored_span& span, std::uint64_t max_gap_bytes);

    std::vector<std::shared_ptr<const mapped_file>> mappings_;  ///< for each file
    std::optional<pinned_pages> pages_;
};

}  // namespace pinflow::detail
