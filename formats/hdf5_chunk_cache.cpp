#include "formats/hdf5_chunk_cache.hpp"

#include <iterator>
#include <utility>

namespace pinflow::detail {

std::size_t hdf5_chunk_cache::key_hash::operator()(const hdf5_chunk_key& key) const noexcept {
    // readers count from 1, and chunks from 0: an odd factor keeps them apart
    return static_cast<std::size_t>(key.index + key.reader * 0x9E3779B97F4A7C15);
}

/// Marks a cached chunk as most recently used. In first_use_, chunks keep their order.
const hdf5_cached_chunk& hdf5_chunk_cache::touch(entry_list::iterator item) noexcept {
    if (item->is_reused) reused_.splice(reused_.begin(), reused_, item);
    return item->chunk;
}

hdf5_chunk_cache::answer hdf5_chunk_cache::ask(const hdf5_chunk_key& key, user& asking, std::size_t work,
                                               hdf5_cached_chunk& found) {
    const std::lock_guard lock(mutex_);
    const auto known = by_key_.find(key);
    if (known == by_key_.end()) {
        decoded_now_.push_front({key, {}, {}});
        try {
            by_key_.emplace(key, decoded_now_.begin());
        } catch (...) {
            decoded_now_.pop_front();
            throw;
        }
        return answer::claimed;
    }
    const auto item = known->second;
    if (!item->chunk) {
        item->promises.push_back({&asking, work});
        return answer::promised;
    }
    found = touch(item);
    return answer::found;
}

hdf5_cached_chunk hdf5_chunk_cache::peek(const hdf5_chunk_key& key) {
    const std::lock_guard lock(mutex_);
    const auto known = by_key_.find(key);
    if (known == by_key_.end() || !known->second->chunk) return {};
    return touch(known->second);
}

void hdf5_chunk_cache::complete(const hdf5_chunk_key& key, decoded_chunk chunk) noexcept {
    std::vector<promise> promises;
    entry_list dropped;  // their memory is released after the lock
    {
        const std::lock_guard lock(mutex_);
        const auto known = by_key_.find(key);
        const auto item = known->second;
        promises = std::move(item->promises);
        if (chunk.memory && max_bytes_ > 0) {
            item->chunk = {std::move(chunk.memory), chunk.bytes.shuffle_element_bytes};
            item->cost_bytes = cost_bytes(chunk.size_bytes);
            item->is_reused = chunk.wanted_again;
            (chunk.wanted_again ? reused_bytes_ : first_use_bytes_) += item->cost_bytes;
            entry_list& to = chunk.wanted_again ? reused_ : first_use_;
            to.splice(to.begin(), decoded_now_, item);
            evict_excess(dropped);
        } else {
            by_key_.erase(known);
            dropped.splice(dropped.begin(), decoded_now_, item);
        }
    }
    for (const promise& each : promises)
        each.to->use(each.work, chunk.bytes);
}

void hdf5_chunk_cache::evict_excess(entry_list& dropped) noexcept {
    while (first_use_bytes_ > max_first_use_bytes() && first_use_.size() > 1)
        drop(first_use_, std::prev(first_use_.end()), dropped);
    while (first_use_bytes_ + reused_bytes_ > max_bytes_ && first_use_.size() + reused_.size() > 1) {
        entry_list& from = reused_.empty() ? first_use_ : reused_;
        drop(from, std::prev(from.end()), dropped);
    }
}

void hdf5_chunk_cache::drop(entry_list& from, entry_list::iterator item, entry_list& dropped) noexcept {
    (item->is_reused ? reused_bytes_ : first_use_bytes_) -= item->cost_bytes;
    by_key_.erase(item->key);
    dropped.splice(dropped.begin(), from, item);
}

void hdf5_chunk_cache::give_up(const hdf5_chunk_key& key) noexcept {
    std::vector<promise> promises;
    {
        const std::lock_guard lock(mutex_);
        const auto known = by_key_.find(key);
        promises = std::move(known->second->promises);
        decoded_now_.erase(known->second);
        by_key_.erase(known);
    }
    for (const promise& broken : promises)
        broken.to->ask_again(broken.work);
}

void hdf5_chunk_cache::forget(std::uint64_t reader) noexcept {
    entry_list dropped;
    const std::lock_guard lock(mutex_);
    for (entry_list* const from : {&first_use_, &reused_}) {
        for (auto item = from->begin(); item != from->end();) {
            const auto next = std::next(item);
            if (item->key.reader == reader) drop(*from, item, dropped);
            item = next;
        }
    }
}

}  // namespace pinflow::detail
