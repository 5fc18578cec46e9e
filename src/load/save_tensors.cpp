#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <span>
#include <system_error>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "pinflow/load.hpp"
#include "src/core/fault_guard.hpp"
#include "src/core/quote.hpp"

namespace pinflow {

namespace {

constexpr std::chrono::milliseconds progress_interval{100};
constexpr std::uint64_t piece_bytes = std::uint64_t{16} << 20;

/// A page-locked buffer that pieces of tensors are copied to.
struct save_piece {
    explicit save_piece(const device& device) : buffer(piece_bytes, device), copied(device) {}
    save_piece(const save_piece&) = delete;
    save_piece& operator=(const save_piece&) = delete;
    /// Waits for the last copy: the buffer must outlive it.
    ~save_piece() {
        try {
            copied.synchronize();
        } catch (const error&) {
            return;  // the device has failed
        }
    }

    pinned_buffer buffer;
    event copied;
    std::uint64_t size_bytes = 0;
};

std::uint64_t size_of(const tensor_to_save& tensor) {
    return element_count(tensor.shape) * tensor.dtype.size_bytes();
}

/// The bytes of all tensors, one after the other.
class tensor_bytes {
 public:
    explicit tensor_bytes(std::span<const tensor_to_save> tensors) : tensors_(tensors) { skip_finished(); }

    bool has_more() const { return next_ < tensors_.size(); }
    /// Enqueues the copies of the next bytes, as many as fit into a piece.
    void copy_next(save_piece& piece, stream_view stream) {
        std::vector<host_copy_range> ranges;
        piece.size_bytes = 0;
        while (has_more() && piece.size_bytes < piece_bytes) {
            const std::uint64_t count =
                std::min(piece_bytes - piece.size_bytes, size_of(tensors_[next_]) - done_bytes_);
            ranges.push_back(
                {piece.buffer.data() + piece.size_bytes, tensors_[next_].data + done_bytes_, count});
            piece.size_bytes += count;
            done_bytes_ += count;
            skip_finished();
        }
        if (ranges.size() == 1) {
            copy_to_host_async({ranges[0].destination, ranges[0].size_bytes}, ranges[0].source, stream);
        } else {
            copy_batch_to_host_async(ranges, stream);
        }
        piece.copied.record(stream);
    }

 private:
    void skip_finished() {
        while (has_more() && done_bytes_ == size_of(tensors_[next_])) {
            ++next_;
            done_bytes_ = 0;
        }
    }

    std::span<const tensor_to_save> tensors_;
    std::size_t next_ = 0;
    std::uint64_t done_bytes_ = 0;  ///< of the next tensor
};

/// Called with the size of each piece that has been written.
using count_written = std::function<void(std::uint64_t size_bytes)>;

/// Writes tensors from device memory, by two staging buffers: one is filled while the other one is written.
void write_from_device(safetensors_writer& writer, std::span<const tensor_to_save> tensors,
                       stream_view stream, const count_written& written) {
    tensor_bytes bytes(tensors);
    if (!bytes.has_more()) return;
    std::array<save_piece, 2> pieces{save_piece(stream.device()), save_piece(stream.device())};
    bytes.copy_next(pieces[0], stream);
    for (std::size_t now = 0; pieces[now].size_bytes > 0; now = 1 - now) {
        save_piece& next = pieces[1 - now];
        next.size_bytes = 0;
        if (bytes.has_more()) bytes.copy_next(next, stream);
        pieces[now].copied.synchronize();
        writer.write(pieces[now].buffer.bytes().first(pieces[now].size_bytes));
        written(pieces[now].size_bytes);
    }
}

/// Writes tensors from memory of the host device.
class host_tensor_writer {
 public:
    host_tensor_writer(safetensors_writer& writer, const count_written& written)
        : writer_(writer), written_(written) {}

    /// @throws data_changed if the memory is a mapping of a file that has been truncated.
    void write(const tensor_to_save& tensor) {
        const std::span<const std::byte> all(tensor.data, static_cast<std::size_t>(size_of(tensor)));
        for (std::size_t begin = 0; begin < all.size(); begin += piece_bytes) {
            const auto piece = all.subspan(begin, std::min<std::size_t>(piece_bytes, all.size() - begin));
            if (!write_piece(piece)) {
                throw data_changed(fmt::format(
                    "cannot save {}: its memory cannot be read, probably because the file that it is mapped "
                    "from has been truncated",
                    detail::quote(tensor.name)));
            }
            written_(piece.size());
        }
    }

 private:
    /// Writes long pieces directly. Copies shorter ones under the fault guard first, because the writer
    /// collects them in memory without it.
    /// @return false if the memory cannot be read.
    bool write_piece(std::span<const std::byte> piece) {
        constexpr std::size_t min_direct_bytes = std::size_t{1} << 20;
        if (piece.size() < min_direct_bytes) {
            copied_.resize(min_direct_bytes);
            const auto copy = [&] { std::memcpy(copied_.data(), piece.data(), piece.size()); };
            if (!detail::run_guarded(copy)) return false;
            writer_.write(std::span(copied_).first(piece.size()));
            return true;
        }
        try {
            writer_.write(piece);
        } catch (const system_failure& failure) {
            if (failure.code() == std::errc::bad_address) return false;
            throw;
        }
        return true;
    }

    safetensors_writer& writer_;
    const count_written& written_;
    std::vector<std::byte> copied_;
};

}  // namespace

void save_tensors(const std::filesystem::path& path, std::span<const tensor_to_save> tensors,
                  stream_view stream, const std::map<std::string, std::string>& metadata,
                  const load_progress& progress) {
    std::vector<safetensors_writer::tensor> headers;
    headers.reserve(tensors.size());
    for (const tensor_to_save& each : tensors)
        headers.push_back({each.name, each.dtype, each.shape});
    safetensors_writer writer(path, headers, metadata);  // checks names, types and sizes
    for (const tensor_to_save& each : tensors) {
        if (each.data == nullptr && size_of(each) != 0)
            throw invalid_argument(fmt::format("cannot save {} of shape {}: it has no data",
                                               detail::quote(each.name), to_string(each.shape)));
    }

    std::uint64_t total_bytes = 0;
    for (const tensor_to_save& each : tensors)
        total_bytes += size_of(each);
    std::uint64_t done_bytes = 0;
    auto said = std::chrono::steady_clock::now();
    const auto say_progress = [&](bool is_last) {
        const auto now = std::chrono::steady_clock::now();
        if (!progress || (!is_last && now - said < progress_interval)) return;
        said = now;
        progress(done_bytes, total_bytes);
    };
    const count_written written = [&](std::uint64_t size_bytes) {
        done_bytes += size_bytes;
        say_progress(false);
    };
    if (stream.device().kind() == device_kind::host) {
        stream.synchronize();
        host_tensor_writer host(writer, written);
        for (const tensor_to_save& each : tensors)
            host.write(each);
    } else {
        write_from_device(writer, tensors, stream, written);
    }
    say_progress(true);
    writer.finish();
}

}  // namespace pinflow
