#include "src/rows/staging.hpp"

namespace pinflow::detail {

staging::staging(pinflow::device device, std::uint64_t slot_bytes, unsigned slots)
    : slot_bytes_(slot_bytes), cpu_(device), copies_(device), begin_(device), end_(device) {
    slots_.reserve(slots);
    for (unsigned i = 0; i < slots; ++i)
        slots_.emplace_back(device, slot_bytes, copies_);
}

void staging::begin_after(stream_view user) {
    begin_.record(user);
    cpu_.wait(begin_);
    copies_.wait(begin_);
}

void staging::end_before(stream_view user, stream_view last) {
    end_.record(last);
    user.wait(end_);
}

}  // namespace pinflow::detail
