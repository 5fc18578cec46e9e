#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/mapped_file.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/stream.hpp"
#include "src/load/load_plan.hpp"

namespace pinflow::detail {

/// The pages of the copyable units of a plan: mapped, and registered chunk by chunk from the front. The pages
/// of a chunk are released, by a thread of its own, while later chunks are copied: releasing pages takes a
/// third of the time of registering them. For one thread.
class load_pages {
 public:
    /// Begins to register the first chunk.
    load_pages(const opened_tensors& opened, const load_plan& plan, const pinflow::device& device,
               stream_view copies, const load_options& options);
    load_pages(const load_pages&) = delete;
    load_pages& operator=(const load_pages&) = delete;
    /// All copies must have finished.
    ~load_pages();

    /// The mapping of a file.
    const std::byte* data_of(std::size_t file) const { return mappings_[file]->data(); }
    /// Whether a unit is the first of another chunk than the unit before. Copies of units before must be
    /// enqueued before begin_unit is called for it.
    bool ends_chunk(std::size_t unit) const { return unit == chunks_[now_].end_unit; }
    /// To be called for the units one after the other, and again while one waits for its pages.
    void begin_unit(std::size_t unit);
    /// Whether all pages of the unit are registered. Does not wait.
    bool cover(const std::vector<copy_range>& ranges) const;
    /// Waits until they are, or until the time has passed. @return false if they will not be.
    bool wait_for(const std::vector<copy_range>& ranges, std::chrono::nanoseconds timeout) const;
    /// Why pages could not be registered.
    std::string reason() const { return chunks_[now_].pages->report().reason; }
    /// @throws unsupported, with that reason.
    void require() const { chunks_[now_].pages->require(); }

 private:
    struct page_chunk {
        explicit page_chunk(const pinflow::device& device) : copied(device) {}

        std::size_t end_unit = 0;
        std::vector<pin_range> ranges;
        std::uint64_t size_bytes = 0;
        std::unique_ptr<pinned_pages> pages;  ///< null until started, and once released
        event copied;
        std::thread releaser;
    };
    void plan_chunks(const opened_tensors& opened, const load_plan& plan);
    void add_range(page_chunk& chunk, const std::shared_ptr<const mapped_file>& mapping, std::uint64_t begin,
                   std::uint64_t size_bytes) const;
    void start_chunk();
    void release(page_chunk& chunk);

    pinflow::device device_;
    stream_view copies_;
    pin_options options_;
    std::vector<std::shared_ptr<const mapped_file>> mappings_;  ///< for each file
    std::vector<page_chunk> chunks_;
    std::size_t now_ = 0;      ///< the chunk that is being copied
    std::size_t started_ = 0;  ///< chunks that have been started
};

}  // namespace pinflow::detail
