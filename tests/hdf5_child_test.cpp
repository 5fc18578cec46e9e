#include "src/cli/hdf5_child.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "formats/hdf5_description.hpp"
#include "pinflow/error.hpp"
#include "src/cli/hdf5_protocol.hpp"
#include "tests/hdf5_sockets.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using namespace pinflow::cli;
using namespace std::chrono_literals;
using npy_bytes::read_file;
using npy_bytes::write_file;
using pinflow::array_listing;
using pinflow::format_error;
using pinflow::input_file;
using pinflow::detail::hdf5_description;
using pinflow::detail::hdf5_storage;

// ---- shells in the place of the child ---------------------------------------------------------------------

/// A shell that runs `script` as the child; its answers are the bytes written to descriptor 3.
hdf5_child_options shell(const std::string& script, std::vector<std::string> arguments = {},
                         std::chrono::milliseconds max_waiting = 60s) {
    arguments.insert(arguments.begin(), {"sh", "-c", script, "sh"});
    return {"/bin/sh", std::move(arguments), max_waiting};
}

/// A shell that gives the answers in a file, whatever is asked, and then reads on.
hdf5_child_options answering(const std::string& answers_path) {
    return shell("cat \"$1\" >&3; exec cat <&3 >/dev/null", {answers_path});
}

/// A shell that takes the first request, sends the answers in a file and crashes.
hdf5_child_options crashing_after(const hdf5_request& request, const std::string& answers_path,
                                  const std::string& starts_path) {
    const auto bytes = recorded([&](int socket) { send_request(socket, request, no_deadline); }).size();
    return shell("echo >>\"$3\"; head -c \"$2\" <&3 >/dev/null; cat \"$1\" >&3; kill -SEGV $$",
                 {answers_path, std::to_string(bytes), starts_path});
}

bool is_alive(::pid_t process) {
    return ::kill(process, 0) == 0;
}

bool has_children() {
    return ::waitpid(-1, nullptr, WNOHANG) != -1 || errno != ECHILD;
}

struct some_file {
    some_file() {
        write_file(folder / "a.h5", std::string(1000, 'x'));
        path = folder / "a.h5";
    }

    temporary_folder folder;
    std::string path;
};

hdf5_description library_dataset() {
    hdf5_description description;
    description.name = "group/d";
    description.dtype = pinflow::dtype::of<std::uint32_t>();
    description.shape = {100, 2};
    description.storage = hdf5_storage::library;
    description.library_reason = "its chunks went through the filter 6";
    return description;
}

std::string sentence_of_list(const hdf5_child_options& options) {
    const some_file file;
    hdf5_in_child access(options);
    std::string sentence = message_of<format_error>([&] { access.list(input_file(file.path)); });
    const std::string begin = fmt::format("cannot open '{}': ", file.path);
    REQUIRE(sentence.starts_with(begin));
    return sentence.substr(begin.size());
}

}  // namespace

// ---- what becomes of a child ------------------------------------------------------------------------------

TEST_CASE("hdf5 child: each way to die is a sentence of its own") {
    struct {
        const char* script;
        const char* what;
        const char* how;
        const char* more;
    } const table[] = {
        {"kill -SEGV $$", "libhdf5 crashed", "(signal 11, Segmentation fault)", "file is probably damaged"},
        {"kill -ABRT $$", "libhdf5 crashed", "(signal 6, Aborted)", "file is probably damaged"},
        {"kill -BUS $$", "libhdf5 crashed", "(signal 7, Bus error)", "file is probably damaged"},
        {"kill -XCPU $$", "libhdf5 did not finish", "60 s of CPU time", "damaged or too large"},
        {"kill -KILL $$", "was killed", "(signal 9, Killed)", "memory may be exhausted"},
        {"exit 3", "has ended", "(exit status 3)", "with libhdf5"},
        {"exit 0", "has ended", "(exit status 0)", "with libhdf5"},
        {"printf 12345678 >&3; kill -SEGV $$", "libhdf5 crashed", "(signal 11, Segmentation fault)",
         "file is probably damaged"},
        {"exec cat /dev/zero >&3", "libhdf5 sent", "malformed answer", "file is probably damaged"},
        // it lives on without its socket
        {"exec 3>&-; exec sleep 1000", "was killed", "(signal 9, Killed)", "memory may be exhausted"},
    };
    const std::size_t descriptors = open_descriptors();
    for (const auto& [script, what, how, more] : table) {
        CAPTURE(script);
        const std::string sentence = sentence_of_list(shell(script));
        CAPTURE(sentence);
        CHECK(contains_all(sentence, {what, how, more}));
        CHECK(open_descriptors() == descriptors);
        CHECK(!has_children());
    }
}

TEST_CASE("hdf5 child: a child that does not finish in time is killed") {
    for (const char* const script :
         {"exec sleep 1000", "trap '' TERM INT HUP; while :; do :; done", "printf x >&3; exec sleep 1000"}) {
        CAPTURE(script);
        const some_file file;
        hdf5_child child(shell(script, {}, 100ms));
        const ::pid_t process = child.process();
        REQUIRE(is_alive(process));
        const auto before = std::chrono::steady_clock::now();
        const std::string sentence = message_of<hdf5_child_lost>([&] { child.ask({}); });
        const auto waited = std::chrono::steady_clock::now() - before;
        CHECK(contains_all(sentence, {"libhdf5 did not finish", "within 0.1 s", "very slow disk"}));
        CHECK(waited >= 100ms);
        CHECK(waited < 30s);
        CHECK(child.process() == -1);
        CHECK(!is_alive(process));
        CHECK(!has_children());
        // it stays lost
        CHECK(message_of<hdf5_child_lost>([&] { child.ask({}); }) == sentence);
    }
}

TEST_CASE("hdf5 child: a child that reads no request does not block its sender") {
    hdf5_child child(shell("exec sleep 1000", {}, 100ms));
    const hdf5_request request = request_of(hdf5_question::list, std::string(8'000'000, 'x'));
    CHECK(contains(message_of<hdf5_child_lost>([&] { child.ask(request); }), "did not finish within 0.1 s"));
}

TEST_CASE(
    "hdf5 child: is killed if memory is short for its answer, so that the rest is not read as the next one") {
    if (sanitized) return;
    const some_file file;
    const std::string head_path = file.folder / "head";
    std::string head = recorded_answer(hdf5_answer_kind::answered, bytes_of("1")).substr(0, 32);
    head[24] = 0;  // the length
    head[27] = 0x40;
    write_file(head_path, head);
    hdf5_child child(shell("cat \"$1\" >&3; exec cat /dev/zero >&3", {head_path}));
    const ::pid_t process = child.process();
    ::rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_AS, &before) == 0);
    std::uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    ::rlimit tight = before;
    tight.rlim_cur = pages * page_bytes + (std::uint64_t{64} << 20);
    REQUIRE(::setrlimit(RLIMIT_AS, &tight) == 0);
    bool ran_out = false;
    try {
        child.ask({});
    } catch (const pinflow::system_failure& failure) {
        ran_out = failure.code() == std::errc::not_enough_memory;
    }
    ::setrlimit(RLIMIT_AS, &before);
    CHECK(ran_out);
    CHECK(child.process() == -1);
    CHECK(!is_alive(process));
    CHECK(!has_children());
    CHECK(contains(message_of<hdf5_child_lost>([&] { child.ask({}); }), "was ended"));
}

TEST_CASE("hdf5 child: ends with the object that started it") {
    ::pid_t process = -1;
    {
        const hdf5_child child(shell("exec sleep 1000"));
        process = child.process();
        CHECK(is_alive(process));
    }
    CHECK(!is_alive(process));
    CHECK(!has_children());
}

TEST_CASE("hdf5 child: a program that cannot be started is a system_failure") {
    const some_file file;
    hdf5_child_options options;
    options.program = file.folder / "nowhere";
    hdf5_in_child access(options);
    const std::size_t descriptors = open_descriptors();
    for (const bool as_reader : {false, true}) {
        const auto opened = std::make_shared<const input_file>(file.path);
        try {
            if (as_reader)
                access.reader(opened, library_dataset());
            else
                access.list(*opened);
            FAIL("it was started");
        } catch (const pinflow::system_failure& failure) {
            CHECK(contains_all(failure.what(), {"cannot open '" + file.path + "'", "child process",
                                                "cannot be started", "No such file"}));
            CHECK(failure.code() == std::errc::no_such_file_or_directory);
        }
    }
    CHECK(open_descriptors() == descriptors);
    CHECK(!has_children());
}

TEST_CASE(
    "hdf5 child: starts with its socket, nothing to read or print to, and no signal blocked or ignored") {
    const temporary_folder folder;
    const std::string path = folder / "seen";
    ::sigset_t all{};
    ::sigset_t before{};
    ::sigfillset(&all);
    ::sigprocmask(SIG_SETMASK, &all, &before);
    const auto ignored_before = std::signal(SIGINT, SIG_IGN);
    {
        hdf5_child child(shell(
            "seen=$(readlink /proc/$$/fd/[0-3]); echo \"$seen\" >\"$1\"; exec cat /proc/self/status >>\"$1\"",
            {path}));
        CHECK(::getpgid(child.process()) == child.process());
        message_of<hdf5_child_lost>([&] { child.ask({}); });
    }
    std::signal(SIGINT, ignored_before);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    const std::string seen = read_file(path);
    CAPTURE(seen.substr(0, 200));
    const auto signals = [&](const std::string& name) {  // without the real-time signals: glibc uses some
        return std::stoull(seen.substr(seen.find(name) + name.size()), nullptr, 16) & 0x7fff'ffff;
    };
    CHECK(signals("SigBlk:\t") == 0);
    CHECK(signals("SigIgn:\t") == 0);
    CHECK(seen.starts_with("/dev/null\n/dev/null\n/dev/null\nsocket:["));
}

// ---- what it answers --------------------------------------------------------------------------------------

TEST_CASE("hdf5 child: an error comes back as the type it was thrown as") {
    const some_file file;
    const std::string answers = file.folder / "answers";
    const auto thrown = [&](hdf5_answer_kind kind, int error_number = 0) {
        write_file(answers, recorded_answer(kind, bytes_of("what happened"), error_number));
        hdf5_in_child access(answering(answers));
        access.list(input_file(file.path));
    };
    CHECK_THROWS_WITH_AS(thrown(hdf5_answer_kind::format_error), "what happened", format_error);
    CHECK_THROWS_WITH_AS(thrown(hdf5_answer_kind::unsupported), "what happened", pinflow::unsupported);
    CHECK_THROWS_WITH_AS(thrown(hdf5_answer_kind::invalid_argument), "what happened",
                         pinflow::invalid_argument);
    CHECK_THROWS_WITH_AS(thrown(hdf5_answer_kind::data_changed), "what happened", pinflow::data_changed);
    try {
        thrown(hdf5_answer_kind::system_failure, EWOULDBLOCK);
        FAIL("nothing was thrown");
    } catch (const pinflow::system_failure& failure) {
        CHECK(failure.what() == std::string("what happened"));
        CHECK(failure.code() == std::errc::operation_would_block);
    }
    CHECK(contains_all(message_of<format_error>([&] { thrown(hdf5_answer_kind::out_of_memory); }),
                       {"cannot open '" + file.path + "'", "ran out of memory"}));
}

TEST_CASE("hdf5 child: no answer is trusted") {
    const some_file file;
    const std::string answers = file.folder / "answers";
    const auto described = [&](std::span<const std::byte> content) {
        write_file(answers, recorded_answer(hdf5_answer_kind::answered, content));
        hdf5_in_child access(answering(answers));
        return access.describe(input_file(file.path), "d");
    };
    const auto is_refused = [&](std::span<const std::byte> content) {
        return contains_all(
            message_of<format_error>([&] { described(content); }),
            {"cannot open '" + file.path + "'", "malformed answer", "file is probably damaged"});
    };
    hdf5_description description;
    description.name = "d";
    description.shape = {10};
    description.storage = hdf5_storage::contiguous;
    description.offset_bytes = 990;
    CHECK((described(serialize(description)) == description));
    description.offset_bytes = 991;  // the file has 1000 bytes
    CHECK(is_refused(serialize(description)));
    CHECK(is_refused(bytes_of("garbage")));
    CHECK(is_refused({}));
    CHECK(
        contains_all(sentence_of_list(answering(answers)), {"malformed answer", "file is probably damaged"}));
    CHECK(!has_children());
}

TEST_CASE("hdf5 child: is asked again and again, and started anew when it was lost or a file was damaged") {
    const some_file file;
    const std::string answers = file.folder / "answers";
    const std::string starts = file.folder / "starts";
    const std::vector<array_listing> none;
    const std::string good = recorded_answer(hdf5_answer_kind::answered, pinflow::detail::serialize(none));
    const std::string absent = recorded_answer(hdf5_answer_kind::invalid_argument, bytes_of("absent"));
    const std::string damaged = recorded_answer(hdf5_answer_kind::format_error, bytes_of("damaged"));
    write_file(answers, good + absent + good + damaged + good);
    hdf5_in_child access(shell("echo >>\"$2\"; cat \"$1\" >&3; exec cat <&3 >/dev/null", {answers, starts}));
    const input_file opened(file.path);
    CHECK(access.list(opened).empty());
    CHECK_THROWS_AS(access.list(opened), pinflow::invalid_argument);
    CHECK(access.list(opened).empty());
    CHECK(read_file(starts).size() == 1);
    CHECK_THROWS_AS(access.list(opened), format_error);
    CHECK(access.list(opened).empty());
    CHECK(read_file(starts).size() == 2);

    hdf5_in_child mortal(crashing_after(request_of(hdf5_question::list, file.path), answers, starts));
    write_file(answers, good);
    CHECK(mortal.list(opened).empty());
    CHECK_THROWS_AS(mortal.list(opened), format_error);
    CHECK(mortal.list(opened).empty());
    CHECK(read_file(starts).size() == 4);
}

TEST_CASE("hdf5 child: signals that arrive meanwhile change nothing") {
    const some_file file;
    const std::string answers = file.folder / "answers";
    const std::vector<array_listing> none;
    write_file(answers, recorded_answer(hdf5_answer_kind::answered, pinflow::detail::serialize(none)));
    static volatile std::sig_atomic_t alarms = 0;
    struct ::sigaction action{};
    struct ::sigaction before{};
    action.sa_handler = [](int) { alarms = alarms + 1; };  // without SA_RESTART
    ::sigaction(SIGALRM, &action, &before);
    const ::itimerval often{{0, 1000}, {0, 1000}};
    const ::itimerval never{};
    ::setitimer(ITIMER_REAL, &often, nullptr);
    // it answers once it has read 200 bytes of the request, one at a time
    hdf5_in_child access(
        shell("dd bs=1 count=200 <&3 >/dev/null 2>&1; cat \"$1\" >&3; exec cat <&3 >/dev/null", {answers}));
    const auto listed =
        message_of<pinflow::error>([&] { access.describe(input_file(file.path), std::string(300, 'n')); });
    ::setitimer(ITIMER_REAL, &never, nullptr);
    ::sigaction(SIGALRM, &before, nullptr);
    CHECK(contains(listed, "malformed answer"));  // listings are no description
    CHECK(alarms > 0);
}

// ---- rows -------------------------------------------------------------------------------------------------

TEST_CASE("hdf5 child: rows come in pieces, and have to be as many as were asked for") {
    const some_file file;
    const std::string answers = file.folder / "answers";
    hdf5_description description = library_dataset();
    const std::uint64_t row_bytes = max_hdf5_rows_bytes / 2 - 4;  // two to an answer
    description.shape = {5, row_bytes / 4};
    const std::string rows = [&] {
        std::string text;
        for (std::uint64_t row = 0; row < 5; ++row)
            text += std::string(row_bytes, static_cast<char>('a' + row));
        return text;
    }();
    const auto piece = [&](std::uint64_t first, std::uint64_t count) {
        return recorded_answer(hdf5_answer_kind::answered,
                               bytes_of(rows).subspan(first * row_bytes, count * row_bytes));
    };
    const std::string opened = recorded_answer(hdf5_answer_kind::answered, {});
    const auto read = [&](const std::string& given) {
        write_file(answers, given);
        hdf5_in_child access(answering(answers));
        const auto reader = access.reader(std::make_shared<const input_file>(file.path), description);
        std::string destination(rows.size(), '?');
        reader(0, 5, std::as_writable_bytes(std::span(destination)));
        return destination;
    };
    CHECK(read(opened + piece(0, 2) + piece(2, 2) + piece(4, 1)) == rows);
    const std::string nonsense = fmt::format(
        "cannot read the dataset 'group/d' of '{}': the child process that runs libhdf5 sent a malformed "
        "answer: the file is probably damaged",
        file.path);
    CHECK(message_of<format_error>([&] { read(opened + piece(0, 1)); }) == nonsense);
    CHECK(message_of<format_error>([&] { read(opened + piece(0, 3)); }) == nonsense);
}

TEST_CASE("hdf5 child: a reader that is lost stays lost, and an error of its own does not lose it") {
    const some_file file;
    const std::string answers = file.folder / "answers";
    const std::string opened = recorded_answer(hdf5_answer_kind::answered, {});
    const std::string row = recorded_answer(hdf5_answer_kind::answered, bytes_of("12345678"));
    const std::string failed = recorded_answer(hdf5_answer_kind::format_error, bytes_of("cannot read it"));
    const hdf5_description description = library_dataset();
    std::string destination(8, '?');

    write_file(answers, opened);
    const std::string about(serialize(description).size(), ' ');
    hdf5_in_child mortal(
        crashing_after(request_of(hdf5_question::open, file.path, about), answers, file.folder / "starts"));
    const auto reader = mortal.reader(std::make_shared<const input_file>(file.path), description);
    const std::string crashed = fmt::format(
        "cannot read the dataset 'group/d' of '{}': libhdf5 crashed on it (signal 11, Segmentation fault): "
        "the "
        "file is probably damaged",
        file.path);
    for (int time = 0; time < 3; ++time) {
        CHECK(message_of<format_error>(
                  [&] { reader(7, 1, std::as_writable_bytes(std::span(destination))); }) == crashed);
    }
    CHECK(read_file(file.folder / "starts").size() == 1);
    CHECK(!has_children());

    write_file(answers, opened + row + failed + row);
    hdf5_in_child alive(answering(answers));
    const auto other = alive.reader(std::make_shared<const input_file>(file.path), description);
    const auto read_other = [&] { other(7, 1, std::as_writable_bytes(std::span(destination))); };
    read_other();
    CHECK(destination == "12345678");
    CHECK(message_of<format_error>(read_other) == "cannot read it");
    read_other();
    CHECK_THROWS_AS(other(0, 3, std::as_writable_bytes(std::span(destination))), pinflow::invalid_argument);
    CHECK_THROWS_AS(other(0, 0, std::as_writable_bytes(std::span(destination))), pinflow::invalid_argument);
}

TEST_CASE("hdf5 child: any thread may send requests") {
    const some_file file;
    const std::string answers = file.folder / "answers";
    const std::vector<array_listing> none;
    std::string many;
    for (int answer = 0; answer < 400; ++answer)
        many += recorded_answer(hdf5_answer_kind::answered, pinflow::detail::serialize(none));
    write_file(answers, many);
    hdf5_in_child access(answering(answers));
    std::atomic<int> listed = 0;
    {
        std::vector<std::jthread> threads;
        for (int thread = 0; thread < 4; ++thread) {
            threads.emplace_back([&] {
                const input_file opened(file.path);
                for (int time = 0; time < 100; ++time) {
                    access.list(opened);
                    ++listed;
                }
            });
        }
    }
    CHECK(listed == 400);
}
