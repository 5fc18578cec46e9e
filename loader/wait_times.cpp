#include "loader/wait_times.hpp"

#include <algorithm>
#include <utility>

namespace pinflow::detail {

batch_times& batch_times::operator+=(const batch_times& other) noexcept {
    storage += other.storage;
    files += other.files;
    cpu += other.cpu;
    link += other.link;
    return *this;
}

wait_times::moment wait_times::now() const {
    const auto at = clock::now();
    return {at, data_awaited_ + (data_waiters_ > 0 ? at - data_awaited_since_ : clock::duration{})};
}

void wait_times::ask(const moment& at) noexcept {
    if (!first_asked_) first_asked_ = at.at;
}

void wait_times::end() noexcept {
    if (!ended_at_) ended_at_ = clock::now();
}

void wait_times::begin_data_wait(clock::time_point at) noexcept {
    if (data_waiters_++ == 0) data_awaited_since_ = at;
}

void wait_times::end_data_wait(clock::time_point at) noexcept {
    data_awaited_ += at - data_awaited_since_;
    data_awaited_since_ = at;
    --data_waiters_;
}

void wait_times::add_wait(const batch_times& costs, std::chrono::nanoseconds waited,
                          std::chrono::nanoseconds for_data) {
    using seconds = std::chrono::duration<double>;
    waits_.link += for_data;
    const double total = seconds(costs.sum()).count();
    if (total <= 0) {
        waits_.cpu += waited;
        return;
    }
    const auto share = [&](std::chrono::nanoseconds cost) {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(waited * (seconds(cost).count() / total));
    };
    waits_ += {share(costs.storage), share(costs.files), share(costs.cpu), share(costs.link)};
}

void wait_times::end_consumer_wait() {
    if (awaited_since_) consumer_wait_ += consumer_time(*awaited_since_, now());
    awaited_since_.reset();
}

void wait_times::add_consumer_wait(const moment& from, const moment& to) {
    consumer_wait_ += consumer_time(from, to);
}

void wait_times::add_link_wait(const moment& from, const moment& to) {
    link_waited_ += since_asked(from.at, to.at);
}

std::chrono::nanoseconds wait_times::take_link_wait() noexcept {
    return std::exchange(link_waited_, {});
}

std::chrono::nanoseconds wait_times::consumer_wait(const moment& until) const {
    return consumer_wait_ + (awaited_since_ ? consumer_time(*awaited_since_, until) : clock::duration{});
}

std::chrono::nanoseconds wait_times::wall(const moment& until) const {
    if (!first_asked_) return {};
    return ended_at_.value_or(until.at) - *first_asked_;
}

std::chrono::nanoseconds wait_times::since_asked(clock::time_point from, clock::time_point to) const {
    if (!first_asked_) return {};
    return std::max(to - std::max(from, *first_asked_), clock::duration{});
}

std::chrono::nanoseconds wait_times::consumer_time(const moment& from, const moment& to) const {
    return std::max(since_asked(from.at, to.at) - (to.data_awaited - from.data_awaited),
                    std::chrono::nanoseconds{});
}

}  // namespace pinflow::detail
