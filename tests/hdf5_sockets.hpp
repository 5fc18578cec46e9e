#pragma once

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "src/cli/hdf5_protocol.hpp"

/// Records what is sent through the socket of the HDF5 child, without a child.

inline std::span<const std::byte> bytes_of(std::string_view text) {
    return std::as_bytes(std::span(text));
}

/// Both ends of a socket.
struct socket_pair {
    socket_pair() { REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0); }
    ~socket_pair() {
        ::close(ends[0]);
        close_second();
    }
    void close_second() {
        if (ends[1] != -1) ::close(ends[1]);
        ends[1] = -1;
    }

    int ends[2] = {-1, -1};
};

/// What `send` sends through a socket.
inline std::string recorded(const std::function<void(int socket)>& send) {
    socket_pair sockets;
    std::thread sender([&] {
        send(sockets.ends[1]);
        sockets.close_second();
    });
    std::string text;
    char piece[4096];
    for (::ssize_t count; (count = ::recv(sockets.ends[0], piece, sizeof piece, 0)) > 0;)
        text.append(piece, static_cast<std::size_t>(count));
    sender.join();
    return text;
}

inline pinflow::cli::hdf5_request request_of(pinflow::cli::hdf5_question question, const std::string& path,
                                             const std::string& about = {}) {
    pinflow::cli::hdf5_request request;
    request.question = question;
    request.path = path;
    request.about = about;
    return request;
}

inline std::string recorded_answer(pinflow::cli::hdf5_answer_kind verdict, std::span<const std::byte> content,
                                   int error_number = 0) {
    return recorded([&](int socket) { send_answer(socket, verdict, content, error_number); });
}
