#include "src/cli/hdf5_protocol.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <type_traits>

namespace pinflow::cli {

namespace {

using std::chrono::steady_clock;

constexpr std::uint64_t request_magic = 0x0001'5135'6866'6e70;  // "pnfh5Q", 1
constexpr std::uint64_t answer_magic = 0x0001'4135'6866'6e70;   // "pnfh5A", 1
/// Upper bound on the bytes of `path`, and on the bytes of `about`, in a request.
constexpr std::uint64_t max_request_bytes = std::uint64_t{1} << 30;

struct request_head {
    std::uint64_t magic;
    std::uint64_t question;
    file_identity identity;
    std::uint64_t first_row;
    std::uint64_t row_count;
    std::uint64_t size_bytes;
    std::uint64_t path_bytes;
    std::uint64_t about_bytes;
};
static_assert(std::is_trivially_copyable_v<request_head> && std::is_trivially_copyable_v<hdf5_answer_head>);

template <typename Head>
std::span<std::byte> bytes_of(Head& head) {
    return std::as_writable_bytes(std::span(&head, 1));
}

/// Waits until the socket is ready for `events`. Polls it once even if the deadline has passed, as time also
/// passes while a process is stopped.
delivery wait_for(int socket, short events, hdf5_deadline until) {
    while (true) {
        int timeout_ms = -1;
        if (until != no_deadline) {
            const auto left =
                std::chrono::ceil<std::chrono::milliseconds>(until - steady_clock::now()).count();
            timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max()));
        }
        ::pollfd polled{socket, events, 0};
        const int ready = ::poll(&polled, 1, timeout_ms);
        if (ready > 0) return delivery::done;
        if (ready == 0) return delivery::late;
        if (errno != EINTR) return delivery::ended;
    }
}

/// Sends or receives all of `bytes` with `call(rest)`, which is ::send or ::recv.
template <typename Byte, typename Call>
delivery transfer(int socket, std::span<Byte> bytes, short events, hdf5_deadline until, Call call) {
    while (!bytes.empty()) {
        const ::ssize_t count = call(bytes);
        if (count > 0) {
            bytes = bytes.subspan(static_cast<std::size_t>(count));
        } else if (count == -1 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (const delivery waited = wait_for(socket, events, until); waited != delivery::done)
                return waited;
        } else if (count == 0 || errno != EINTR) {
            return delivery::ended;
        }
    }
    return delivery::done;
}

}  // namespace

// ---- bytes ------------------------------------------------------------------------------------------------

delivery send_all(int socket, std::span<const std::byte> bytes, hdf5_deadline until) {
    return transfer(socket, bytes, POLLOUT, until, [&](std::span<const std::byte> rest) {
        return ::send(socket, rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    });
}

delivery receive_all(int socket, std::span<std::byte> bytes, hdf5_deadline until) {
    return transfer(socket, bytes, POLLIN, until, [&](std::span<std::byte> rest) {
        return ::recv(socket, rest.data(), rest.size(), MSG_DONTWAIT);
    });
}

// ---- requests ---------------------------------------------------------------------------------------------

delivery send_request(int socket, const hdf5_request& request, hdf5_deadline until) {
    request_head head{request_magic,       static_cast<std::uint64_t>(request.question),
                      request.identity,    request.first_row,
                      request.row_count,   request.size_bytes,
                      request.path.size(), request.about.size()};
    delivery result = send_all(socket, bytes_of(head), until);
    for (const std::string* const text : {&request.path, &request.about}) {
        if (result == delivery::done) result = send_all(socket, std::as_bytes(std::span(*text)), until);
    }
    return result;
}

std::optional<hdf5_request> receive_request(int socket) {
    request_head head{};
    if (receive_all(socket, bytes_of(head), no_deadline) != delivery::done) return std::nullopt;
    const bool known = head.question >= static_cast<std::uint64_t>(hdf5_question::list) &&
                       head.question <= static_cast<std::uint64_t>(hdf5_question::read);
    if (head.magic != request_magic || !known || head.path_bytes > max_request_bytes ||
        head.about_bytes > max_request_bytes) {
        return std::nullopt;
    }
    hdf5_request request{static_cast<hdf5_question>(head.question),
                         std::string(head.path_bytes, '\0'),
                         head.identity,
                         std::string(head.about_bytes, '\0'),
                         head.first_row,
                         head.row_count,
                         head.size_bytes};
    for (std::string* const text : {&request.path, &request.about}) {
        if (receive_all(socket, std::as_writable_bytes(std::span(*text)), no_deadline) != delivery::done)
            return std::nullopt;
    }
    return request;
}

// ---- answers ----------------------------------------------------------------------------------------------

delivery send_answer(int socket, hdf5_answer_kind kind, std::span<const std::byte> content,
                     int error_number) {
    if (kind != hdf5_answer_kind::answered)
        content = content.first(std::min<std::size_t>(content.size(), max_sentence_bytes));
    hdf5_answer_head head{answer_magic, kind, error_number, content.size()};
    const delivery result = send_all(socket, bytes_of(head), no_deadline);
    return result == delivery::done ? send_all(socket, content, no_deadline) : result;
}

std::optional<hdf5_answer_head> receive_answer_head(int socket, std::uint64_t max_bytes, hdf5_deadline until,
                                                    delivery& result) {
    hdf5_answer_head head;
    result = receive_all(socket, bytes_of(head), until);
    if (result != delivery::done || head.magic != answer_magic) return std::nullopt;
    if (head.kind < hdf5_answer_kind::answered || head.kind > hdf5_answer_kind::out_of_memory)
        return std::nullopt;
    if (head.kind != hdf5_answer_kind::answered) max_bytes = max_sentence_bytes;
    if (head.content_bytes > max_bytes) return std::nullopt;
    return head;
}

delivery receive_content(int socket, std::uint64_t size_bytes, std::vector<std::byte>& content,
                         hdf5_deadline until) {
    constexpr std::uint64_t min_piece_bytes = std::uint64_t{1} << 20;
    content.clear();
    while (content.size() < size_bytes) {
        // grows only as data arrives, at most doubling, so that a false size cannot allocate memory
        const std::size_t have = content.size();
        content.resize(have + std::min(size_bytes - have, std::max<std::uint64_t>(have, min_piece_bytes)));
        const delivery result = receive_all(socket, std::span(content).subspan(have), until);
        if (result != delivery::done) return result;
    }
    return delivery::done;
}

}  // namespace pinflow::cli
