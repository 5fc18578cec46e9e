#include "src/cli/hdf5_child.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "formats/hdf5_description.hpp"
#include "src/cli/open.hpp"
#include "src/core/error_advice.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/quote.hpp"
#include "src/core/system.hpp"

namespace pinflow::cli {

namespace {

[[noreturn]] void fail_to_start(int error_number) {
    const std::error_code code(error_number, std::generic_category());
    throw system_failure(fmt::format("the child process that runs libhdf5 cannot be started: {}",
                                     pinflow::detail::described(code)),
                         code);
}

// ---- starting ---------------------------------------------------------------------------------------------

/// Settings of posix_spawn: the child gets its socket, /dev/null as its standard descriptors, and default
/// signal handling.
class spawn_settings {
 public:
    explicit spawn_settings(int socket) {
        ::posix_spawnattr_init(&attributes_);
        ::posix_spawn_file_actions_init(&actions_);
        try {
            set(socket);
        } catch (...) {
            destroy();
            throw;
        }
    }
    spawn_settings(const spawn_settings&) = delete;
    spawn_settings& operator=(const spawn_settings&) = delete;
    ~spawn_settings() { destroy(); }

    const ::posix_spawnattr_t* attributes() const noexcept { return &attributes_; }
    const ::posix_spawn_file_actions_t* actions() const noexcept { return &actions_; }

 private:
    static void check(int status) {
        if (status != 0) fail_to_start(status);
    }
    void set(int socket) {
        ::sigset_t none{};
        ::sigset_t all{};
        ::sigemptyset(&none);
        ::sigfillset(&all);
        check(::posix_spawnattr_setsigmask(&attributes_, &none));
        check(::posix_spawnattr_setsigdefault(&attributes_, &all));
        // its own process group: the tool decides about signals from the terminal
        check(::posix_spawnattr_setpgroup(&attributes_, 0));
        check(::posix_spawnattr_setflags(
            &attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP));
        check(::posix_spawn_file_actions_adddup2(&actions_, socket, hdf5_child_socket));
        for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
            check(::posix_spawn_file_actions_addopen(&actions_, standard, "/dev/null", O_RDWR, 0));
    }
    void destroy() noexcept {
        ::posix_spawn_file_actions_destroy(&actions_);
        ::posix_spawnattr_destroy(&attributes_);
    }

    ::posix_spawnattr_t attributes_{};
    ::posix_spawn_file_actions_t actions_{};
};

// ---- errors -----------------------------------------------------------------------------------------------

std::string describe_end(int status) {
    if (!WIFSIGNALED(status)) {
        return fmt::format("the process that reads it with libhdf5 has ended (exit status {})",
                           WEXITSTATUS(status));
    }
    const int signal = WTERMSIG(status);
    if (signal == SIGXCPU) {
        return fmt::format("libhdf5 did not finish within {} s of CPU time: the file is damaged or too large",
                           max_hdf5_cpu_time.count());
    }
    const char* const name = ::sigdescr_np(signal);
    const std::string which = fmt::format("signal {}, {}", signal, name == nullptr ? "unknown" : name);
    if (signal == SIGKILL) {
        return fmt::format("the process that reads it with libhdf5 was killed ({}): memory may be exhausted",
                           which);
    }
    return fmt::format("libhdf5 crashed on it ({}): the file is probably damaged", which);
}

[[noreturn]] void throw_as_told(hdf5_answer_kind kind, const std::string& sentence,
                                std::int64_t error_number) {
    switch (kind) {
        case hdf5_answer_kind::unsupported:
            throw unsupported(sentence);
        case hdf5_answer_kind::invalid_argument:
            throw invalid_argument(sentence);
        case hdf5_answer_kind::system_failure:
            throw system_failure(sentence, {static_cast<int>(error_number), std::generic_category()});
        case hdf5_answer_kind::data_changed:
            throw data_changed(sentence);
        case hdf5_answer_kind::answered:
        case hdf5_answer_kind::format_error:
        case hdf5_answer_kind::out_of_memory:
            break;
    }
    throw format_error(sentence);
}

}  // namespace

// ---- one process ------------------------------------------------------------------------------------------

hdf5_child::hdf5_child(hdf5_child_options options) : options_(std::move(options)) {
    int pair[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) fail_to_start(errno);
    int status = 0;
    try {
        pinflow::detail::system::fail_if_injected(pinflow::detail::system::call::spawn, options_.program,
                                                  "the child process that runs libhdf5 cannot be started");
        const spawn_settings settings(pair[1]);
        std::vector<char*> arguments;
        arguments.reserve(options_.arguments.size() + 1);
        for (std::string& argument : options_.arguments)
            arguments.push_back(argument.data());
        arguments.push_back(nullptr);
        status = ::posix_spawn(&process_, options_.program.c_str(), settings.actions(), settings.attributes(),
                               arguments.data(), environ);
    } catch (...) {
        ::close(pair[0]);
        ::close(pair[1]);
        throw;
    }
    ::close(pair[1]);
    if (status != 0) {
        ::close(pair[0]);
        fail_to_start(status);
    }
    socket_ = pair[0];
}

hdf5_child::~hdf5_child() {
    end();
}

/// Kills the child unless it has ended by itself.
/// @return its wait status (see waitpid).
int hdf5_child::end() noexcept {
    if (process_ == -1) return 0;
    ::kill(process_, SIGKILL);
    int status = 0;
    while (::waitpid(process_, &status, 0) == -1 && errno == EINTR) {
    }
    ::close(socket_);
    process_ = -1;
    return status;
}

void hdf5_child::lose(std::string sentence) {
    end();
    lost_reason_ = std::move(sentence);
    throw hdf5_child_lost(lost_reason_);
}

void hdf5_child::check(delivery result) {
    if (result == delivery::done) return;
    if (result == delivery::ended) lose(describe_end(end()));
    lose(fmt::format(
        "libhdf5 did not finish within {} s: the file is damaged, too large, or on a very slow disk",
        std::chrono::duration<double>(options_.max_waiting).count()));
}

void hdf5_child::refuse_answer() {
    lose("the child process that runs libhdf5 sent a malformed answer: the file is probably damaged");
}

/// Sends a request and receives the answer: the head, and then the content with `take`. Throws the error if
/// the answer is one.
template <typename Take>
void hdf5_child::exchange(const hdf5_request& request, std::uint64_t max_bytes, Take take) {
    if (process_ == -1) throw hdf5_child_lost(lost_reason_);
    const hdf5_deadline until = std::chrono::steady_clock::now() + options_.max_waiting;
    std::optional<hdf5_answer_head> head;
    std::vector<std::byte> sentence;
    try {
        check(send_request(socket_, request, until));
        delivery result = delivery::done;
        head = receive_answer_head(socket_, max_bytes, until, result);
        check(result);
        if (!head) refuse_answer();
        check(head->kind == hdf5_answer_kind::answered
                  ? take(head->content_bytes, until)
                  : receive_content(socket_, head->content_bytes, sentence, until));
    } catch (...) {
        end();  // if memory is exhausted here, the rest of this answer would be read as the next answer
        throw;
    }
    if (head->kind == hdf5_answer_kind::answered) return;
    if (head->kind == hdf5_answer_kind::out_of_memory)
        lose("libhdf5 ran out of memory on it: the file is damaged or too large");
    throw_as_told(head->kind, {reinterpret_cast<const char*>(sentence.data()), sentence.size()},
                  head->error_number);
}

std::vector<std::byte> hdf5_child::ask(const hdf5_request& request) {
    std::vector<std::byte> content;
    exchange(request, max_answer_bytes, [&](std::uint64_t size_bytes, hdf5_deadline until) {
        // up to three copies: the buffer and its larger replacement while it grows, then the parsed result
        constexpr std::uint64_t max_copies = 3;
        pinflow::detail::require_memory(
            max_copies * size_bytes,
            fmt::format("cannot open '{}': the answer of libhdf5 takes up to {} bytes of memory",
                        request.path, max_copies * size_bytes));
        return receive_content(socket_, size_bytes, content, until);
    });
    return content;
}

void hdf5_child::ask(const hdf5_request& request, std::span<std::byte> destination) {
    exchange(request, destination.size(), [&](std::uint64_t size_bytes, hdf5_deadline until) {
        if (size_bytes != destination.size()) refuse_answer();
        return receive_all(socket_, destination, until);
    });
}

// ---- lists and descriptions -------------------------------------------------------------------------------

namespace {

/// The path under which the child finds the file.
std::string path_for_child(const std::string& path) {
    if (!names_descriptor(path)) return path;
    std::error_code failure;
    const std::filesystem::path real = std::filesystem::canonical(path, failure);
    if (failure)
        throw unsupported(
            fmt::format("cannot open '{}': its file has no name any more, which libhdf5 needs", path));
    return real.string();
}

hdf5_request request_about(const input_file& file, hdf5_question question, std::string about = {}) {
    hdf5_request request;
    request.question = question;
    request.path = path_for_child(file.path());
    request.identity = file.identity();
    request.about = std::move(about);
    return request;
}

/// Calls `function`. Turns hdf5_child_lost into format_error, with `attempt` in front of its message.
template <typename Function>
auto naming(std::string_view attempt, Function function) -> decltype(function()) {
    try {
        return function();
    } catch (const hdf5_child_lost& failure) {
        throw format_error(fmt::format("{}: {}", attempt, failure.what()));
    }
}

std::string cannot_open(const std::string& path) {
    return fmt::format("cannot open '{}'", path);
}

std::unique_ptr<hdf5_child> start_for(const std::string& path, const hdf5_child_options& options) {
    try {
        return std::make_unique<hdf5_child>(options);
    } catch (const system_failure& failure) {
        throw system_failure(fmt::format("{}: {}", cannot_open(path), failure.what()), failure.code());
    }
}

}  // namespace

hdf5_in_child::hdf5_in_child(hdf5_child_options options) : options_(std::move(options)) {}

/// The parsed answer. If `parse` throws format_error, libhdf5 must have overwritten the answer.
template <typename Parse>
auto hdf5_in_child::ask(const hdf5_request& request, Parse parse) {
    const std::lock_guard lock(mutex_);
    if (!child_ || child_->process() == -1) child_ = start_for(request.path, options_);
    return naming(cannot_open(request.path), [&] {
        std::vector<std::byte> answer;
        try {
            answer = child_->ask(request);
        } catch (const format_error&) {
            child_.reset();  // a damaged file may have corrupted it
            throw;
        }
        try {
            return parse(answer);
        } catch (const format_error&) {
            child_->refuse_answer();
        }
    });
}

std::vector<array_listing> hdf5_in_child::list(const input_file& file) {
    return ask(request_about(file, hdf5_question::list),
               [](std::span<const std::byte> answer) { return detail::parse_array_listings(answer); });
}

detail::hdf5_description hdf5_in_child::describe(const input_file& file, std::string_view name) {
    return ask(request_about(file, hdf5_question::describe, std::string(name)),
               [&](std::span<const std::byte> answer) {
                   return detail::parse_hdf5_description(answer, file.size_bytes());
               });
}

// ---- rows -------------------------------------------------------------------------------------------------

namespace {

/// A dataset that its own child keeps open. Thread-safe; reads are serialised.
class child_reader {
 public:
    child_reader(const hdf5_child_options& options, const std::shared_ptr<const input_file>& file,
                 const detail::hdf5_description& description)
        : attempt_(fmt::format("cannot read the dataset {} of '{}'", detail::quote(description.name),
                               file->path())),
          child_(start_for(file->path(), options)) {
        const std::vector<std::byte> bytes = detail::serialize(description);
        const hdf5_request request = request_about(
            *file, hdf5_question::open, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
        naming(cannot_open(file->path()), [&] { child_->ask(request); });
    }

    void read(std::uint64_t first_row, std::uint64_t row_count, std::span<std::byte> destination);

 private:
    std::string attempt_;
    std::mutex mutex_;
    std::unique_ptr<hdf5_child> child_;
};

void child_reader::read(std::uint64_t first_row, std::uint64_t row_count, std::span<std::byte> destination) {
    if (row_count == 0 || destination.size() % row_count != 0) {
        throw invalid_argument(
            fmt::format("{}: {} bytes cannot be {} rows", attempt_, destination.size(), row_count));
    }
    const std::size_t row_bytes = destination.size() / row_count;
    const std::uint64_t max_rows =
        row_bytes == 0 ? row_count : std::max<std::uint64_t>(max_hdf5_rows_bytes / row_bytes, 1);
    const std::lock_guard lock(mutex_);
    while (row_count > 0) {
        hdf5_request request;
        request.question = hdf5_question::read;
        request.first_row = first_row;
        request.row_count = std::min(row_count, max_rows);
        request.size_bytes = request.row_count * row_bytes;
        naming(attempt_, [&] { child_->ask(request, destination.first(request.size_bytes)); });
        first_row += request.row_count;
        row_count -= request.row_count;
        destination = destination.subspan(request.size_bytes);
    }
}

}  // namespace

detail::hdf5_read_function hdf5_in_child::reader(std::shared_ptr<const input_file> file,
                                                 const detail::hdf5_description& description) {
    const auto opened = std::make_shared<child_reader>(options_, file, description);
    return [opened](std::uint64_t first_row, std::uint64_t count, std::span<std::byte> destination) {
        opened->read(first_row, count, destination);
    };
}

void use_hdf5_child() {
    detail::use_hdf5_access(std::make_shared<hdf5_in_child>());
}

}  // namespace pinflow::cli
