#include "src/cli/hdf5_protocol.hpp"

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/hdf5_sockets.hpp"

namespace {

using namespace pinflow::cli;
using namespace std::chrono_literals;

hdf5_deadline in(std::chrono::milliseconds time) {
    return std::chrono::steady_clock::now() + time;
}

}  // namespace

TEST_CASE("hdf5 protocol: a request arrives as it was sent, however large") {
    for (const std::size_t size : {0U, 1U, 5'000'000U}) {
        const hdf5_request sent{
            hdf5_question::read, "a/b.h5", {1, 2, 3, -4}, std::string(size, 'n'), 5, 6, 7};
        socket_pair sockets;
        std::thread sender(
            [&] { CHECK(send_request(sockets.ends[0], sent, no_deadline) == delivery::done); });
        const auto received = receive_request(sockets.ends[1]);
        sender.join();
        REQUIRE(received.has_value());
        CHECK((*received == sent));
    }
}

TEST_CASE("hdf5 protocol: malformed and truncated requests are refused") {
    const std::string whole = recorded(
        [](int socket) { send_request(socket, {hdf5_question::list, "path", {}, "n"}, no_deadline); });
    const auto received = [](const std::string& bytes) {
        socket_pair sockets;
        REQUIRE(send_all(sockets.ends[0], bytes_of(bytes), no_deadline) == delivery::done);
        ::shutdown(sockets.ends[0], SHUT_WR);
        return receive_request(sockets.ends[1]).has_value();
    };
    CHECK(received(whole));
    for (std::size_t size = 0; size < whole.size(); ++size)
        CHECK(!received(whole.substr(0, size)));
    std::string marked = whole;
    marked[0] = 'x';
    CHECK(!received(marked));
    std::string unknown = whole;
    unknown[8] = 9;
    CHECK(!received(unknown));
    std::string huge = whole;
    huge[whole.size() - 5 - 1] = '\x7f';  // the last byte of the last length
    CHECK(!received(huge));
}

TEST_CASE("hdf5 protocol: an answer arrives with its head, and a long sentence is cut") {
    const std::string text(100'000, 's');
    struct {
        hdf5_answer_kind kind;
        std::size_t size;
    } const table[] = {{hdf5_answer_kind::answered, text.size()},
                       {hdf5_answer_kind::system_failure, std::size_t{max_sentence_bytes}}};
    for (const auto& [kind, size] : table) {
        socket_pair sockets;
        std::thread sender([&, sent = kind] {
            CHECK(send_answer(sockets.ends[1], sent, bytes_of(text), ENOSPC) == delivery::done);
        });
        delivery result = delivery::late;
        const auto head = receive_answer_head(sockets.ends[0], text.size(), no_deadline, result);
        REQUIRE(head.has_value());
        CHECK(head->kind == kind);
        CHECK(head->error_number == ENOSPC);
        CHECK(head->content_bytes == size);
        std::vector<std::byte> content;
        CHECK(receive_content(sockets.ends[0], head->content_bytes, content, no_deadline) == delivery::done);
        sender.join();
        CHECK(content.size() == size);
    }
}

TEST_CASE(
    "hdf5 protocol: an answer head is refused if malformed, or if it announces more than was asked for") {
    const std::string whole = recorded_answer(hdf5_answer_kind::answered, bytes_of("12345678"));
    const auto received = [](const std::string& bytes, std::uint64_t max_bytes) {
        socket_pair sockets;
        REQUIRE(send_all(sockets.ends[1], bytes_of(bytes), no_deadline) == delivery::done);
        delivery result = delivery::late;
        const bool any = receive_answer_head(sockets.ends[0], max_bytes, no_deadline, result).has_value();
        CHECK(result == delivery::done);
        return any;
    };
    CHECK(received(whole, 8));
    CHECK(!received(whole, 7));
    for (const std::size_t at : {0U, 7U, 8U, 15U, 31U}) {  // magic, kind, length
        std::string changed = whole;
        changed[at] = '\x55';
        CHECK(!received(changed, 8));
    }
    std::string zero = whole;
    zero[8] = 0;
    CHECK(!received(zero, 8));
    // an error whose sentence is longer than max_sentence_bytes
    std::string talkative = recorded_answer(hdf5_answer_kind::format_error, bytes_of("a"));
    talkative[24 + 2] = 2;
    CHECK(!received(talkative, std::uint64_t{1} << 40));
}

TEST_CASE("hdf5 protocol: a wait ends at the deadline, or when the other side is gone") {
    std::vector<std::byte> room(10'000'000);
    socket_pair sockets;
    CHECK(receive_all(sockets.ends[0], room, in(1ms)) == delivery::late);
    CHECK(receive_all(sockets.ends[0], room, in(-1h)) == delivery::late);
    CHECK(send_all(sockets.ends[0], room, in(1ms)) == delivery::late);  // nobody reads it
    sockets.close_second();
    CHECK(receive_all(sockets.ends[0], room, no_deadline) == delivery::ended);
    CHECK(send_all(sockets.ends[0], room, no_deadline) == delivery::ended);  // and not by SIGPIPE
    // bytes that have arrived are taken even after the deadline, which may pass while the process is stopped
    socket_pair late;
    REQUIRE(send_all(late.ends[1], bytes_of("abc"), no_deadline) == delivery::done);
    CHECK(receive_all(late.ends[0], std::span(room).first(3), in(-1h)) == delivery::done);
}

TEST_CASE("hdf5 protocol: no memory is allocated for content that is only announced") {
    socket_pair sockets;
    REQUIRE(send_all(sockets.ends[1], bytes_of("abc"), no_deadline) == delivery::done);
    sockets.close_second();
    std::vector<std::byte> content;
    CHECK(receive_content(sockets.ends[0], max_answer_bytes, content, no_deadline) == delivery::ended);
    CHECK(content.capacity() <= std::size_t{2} << 20);
}
