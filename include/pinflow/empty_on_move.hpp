#pragma once

#include <utility>

namespace pinflow::detail {

/// A plain value, such as a pointer or a count, that becomes T() when it is moved from. A class with such
/// members can use default moves and still be empty afterwards.
template <typename T>
class empty_on_move {
 public:
    empty_on_move() noexcept = default;
    empty_on_move(T value) noexcept : value_(value) {}
    empty_on_move(const empty_on_move&) noexcept = default;
    empty_on_move& operator=(const empty_on_move&) noexcept = default;
    empty_on_move(empty_on_move&& other) noexcept : value_(std::exchange(other.value_, T())) {}
    empty_on_move& operator=(empty_on_move&& other) noexcept {
        if (this != &other) value_ = std::exchange(other.value_, T());
        return *this;
    }
    ~empty_on_move() = default;

    operator const T&() const noexcept { return value_; }

 private:
    T value_ = T();
};

}  // namespace pinflow::detail
