#include "formats/hdf5_kept_readers.hpp"

#include <algorithm>
#include <iterator>
#include <list>
#include <mutex>
#include <utility>

namespace pinflow::detail {

namespace {

/// Reopens the reader of a dataset when needed.
class kept_reader {
 public:
    kept_reader(std::shared_ptr<hdf5_access> access, const hdf5_dataset& dataset)
        : access_(std::move(access)), file_(dataset.file), description_(dataset.description) {
        static_cast<void>(open());  // errors show at once
    }
    kept_reader(const kept_reader&) = delete;
    kept_reader& operator=(const kept_reader&) = delete;
    ~kept_reader();

    /// The reader; it stays open as long as the pointer lives.
    std::shared_ptr<const hdf5_read_function> open() const;

 private:
    std::shared_ptr<hdf5_access> access_;
    std::shared_ptr<const input_file> file_;
    std::shared_ptr<const hdf5_description> description_;
};

/// A reader that is open.
struct open_reader {
    const kept_reader* owner;
    std::shared_ptr<const hdf5_read_function> read;
};

std::mutex readers_mutex;

/// Open readers, most recently used first. Guarded by the mutex, which is not held while readers are opened
/// or closed, since that may take long.
std::list<open_reader>& readers() {
    static auto& readers = *new std::list<open_reader>;  // never destroyed: static objects may hold datasets
    return readers;
}

std::shared_ptr<const hdf5_read_function> find(const kept_reader& owner) {
    const std::lock_guard lock(readers_mutex);
    const auto found = std::ranges::find(readers(), &owner, &open_reader::owner);
    if (found == readers().end()) return nullptr;
    readers().splice(readers().begin(), readers(), found);
    return found->read;
}

void keep(const kept_reader& owner, std::shared_ptr<const hdf5_read_function> read) {
    std::list<open_reader> closed;
    const std::lock_guard lock(readers_mutex);
    readers().push_front({&owner, std::move(read)});
    while (readers().size() > max_kept_hdf5_readers)
        closed.splice(closed.end(), readers(), std::prev(readers().end()));
}

std::shared_ptr<const hdf5_read_function> kept_reader::open() const {
    if (auto read = find(*this)) return read;
    auto read = std::make_shared<const hdf5_read_function>(access_->reader(file_, *description_));
    keep(*this, read);
    return read;
}

kept_reader::~kept_reader() {
    std::list<open_reader> closed;
    const std::lock_guard lock(readers_mutex);
    for (auto each = readers().begin(); each != readers().end();) {
        const auto next = std::next(each);
        // there are two if two threads have opened it at the same time
        if (each->owner == this) closed.splice(closed.end(), readers(), each);
        each = next;
    }
}

}  // namespace

hdf5_read_function keep_hdf5_reader(std::shared_ptr<hdf5_access> access, const hdf5_dataset& dataset) {
    const auto kept = std::make_shared<const kept_reader>(std::move(access), dataset);
    const auto read_rows = [kept](std::uint64_t first_row, std::uint64_t count,
                                  std::span<std::byte> destination) {
        (*kept->open())(first_row, count, destination);
    };
    if (!kept->open()->reads_boxes()) return read_rows;
    return {read_rows, [kept](std::span<const std::uint64_t> first, std::span<const std::uint64_t> lengths,
                              std::span<std::byte> destination) {
                kept->open()->read_box(first, lengths, destination);
            }};
}

}  // namespace pinflow::detail
