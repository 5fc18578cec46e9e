#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "formats/hdf5_description.hpp"
#include "formats/hdf5_library.hpp"
#include "pinflow/error.hpp"
#include "src/cli/hdf5_child.hpp"
#include "src/cli/hdf5_protocol.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/system.hpp"

/// The child's side: limits, and questions passed on to libhdf5.
namespace pinflow::cli {

namespace {

/// Exit statuses. Only the tool sees them, and only if it did not end the child itself.
enum end_status : int { served = 0, not_served = 1, parent_gone = 2 };

// Sanitizers reserve terabytes of address space.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PINFLOW_UNLIMITED_ADDRESSES 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PINFLOW_UNLIMITED_ADDRESSES 1
#endif
#endif
#ifdef PINFLOW_UNLIMITED_ADDRESSES
constexpr bool limits_addresses = false;
#else
constexpr bool limits_addresses = true;
#endif

// ---- limits -----------------------------------------------------------------------------------------------

/// Lowers a limit permanently. Does not raise a limit that is lower already.
void lower_limit(::__rlimit_resource resource, ::rlim_t value) {
    ::rlimit limit{};
    if (::getrlimit(resource, &limit) != 0) return;
    limit.rlim_max = std::min(limit.rlim_max, value);
    limit.rlim_cur = std::min(limit.rlim_cur, limit.rlim_max);
    if (::setrlimit(resource, &limit) != 0) ::_exit(not_served);
}

/// The RLIMIT_AS for this process: libhdf5 must fail to allocate before memory is exhausted.
std::uint64_t child_address_limit_bytes() {
    constexpr std::uint64_t min_left_bytes = std::uint64_t{64} << 20;  // a stack, and libhdf5 itself
    const std::uint64_t left_bytes =
        std::max(detail::read_available_memory().size_bytes / 4 * 3, min_left_bytes);
    return std::min(max_hdf5_memory_bytes, detail::own_address_bytes() + left_bytes);
}

void lower_limits() {
    constexpr ::rlim_t max_descriptors = 32;       // the standard ones, the socket, and files of libhdf5
    ::prctl(PR_SET_NAME, "pinflow-hdf5");          // instead of "exe"
    ::prctl(PR_SET_DUMPABLE, 0);                   // also disables core-dump handlers that use a pipe
    ::close_range(hdf5_child_socket + 1, ~0U, 0);  // descriptors that the tool inherited and does not know of
    lower_limit(RLIMIT_CORE, 0);
    lower_limit(RLIMIT_FSIZE, 0);
    lower_limit(RLIMIT_NOFILE, max_descriptors);
    if (limits_addresses) lower_limit(RLIMIT_AS, child_address_limit_bytes());
}

/// Makes the OOM killer choose this process and not its parent, which then reports it.
void prefer_for_oom_kill() {
    std::ofstream("/proc/self/oom_score_adj") << "1000\n";
}

/// Grants the CPU time of one request, in addition to the time used before.
void grant_cpu_time() {
    ::rusage used{};
    ::rlimit limit{};
    if (::getrusage(RUSAGE_SELF, &used) != 0 || ::getrlimit(RLIMIT_CPU, &limit) != 0) ::_exit(not_served);
    const auto begun = static_cast<::rlim_t>(used.ru_utime.tv_sec + used.ru_stime.tv_sec + 1);
    limit.rlim_cur = std::min(begun + static_cast<::rlim_t>(max_hdf5_cpu_time.count()), limit.rlim_max);
    if (::setrlimit(RLIMIT_CPU, &limit) != 0) ::_exit(not_served);
}

/// Ends this process when the tool has exited, whatever libhdf5 is doing. PR_SET_PDEATHSIG cannot be
/// used: it is sent when the thread that started this process exits, and the tool may go on.
void end_with_parent() {
    const auto wait_for_end = [] {
        ::pollfd parent{hdf5_child_socket, POLLRDHUP, 0};
        while (::poll(&parent, 1, -1) <= 0) {
        }
        ::_exit(parent_gone);
    };
    try {
        pinflow::detail::system::start_thread("waits for the end of the parent", wait_for_end).detach();
    } catch (const pinflow::system_failure&) {
        return;  // this process ends after its current answer, or when its CPU time is used up
    }
}

// ---- questions --------------------------------------------------------------------------------------------

/// The same file as the tool's. @throws data_changed.
std::shared_ptr<const input_file> open_same(const hdf5_request& request) {
    auto file = std::make_shared<const input_file>(request.path);
    if (file->identity() != request.identity) {
        throw data_changed(fmt::format(
            "'{}' changed while it was opened: it was written to, or another file has taken its place",
            request.path));
    }
    return file;
}

class server {
 public:
    std::vector<std::byte> answer(const hdf5_request& request) {
        switch (request.question) {
            case hdf5_question::list:
                return detail::serialize(detail::list_hdf5_datasets(*open_same(request)));
            case hdf5_question::describe:
                return detail::serialize(detail::describe_hdf5_dataset(*open_same(request), request.about));
            case hdf5_question::open: {
                auto file = open_same(request);
                const auto description = detail::parse_hdf5_description(
                    std::as_bytes(std::span(request.about)), file->size_bytes());
                reader_.emplace(std::move(file), description, detail::hdf5_unverified_chunks::decoded_twice);
                return {};
            }
            case hdf5_question::read:
                break;
        }
        std::vector<std::byte> rows(request.size_bytes);
        if (!reader_) throw invalid_argument("rows are asked for, but no dataset is open");
        reader_->read(request.first_row, request.row_count, rows);
        return rows;
    }

 private:
    std::optional<detail::hdf5_library_reader> reader_;
};

delivery send_sentence(hdf5_answer_kind kind, std::string_view sentence, int error_number = 0) {
    return send_answer(hdf5_child_socket, kind, std::as_bytes(std::span(sentence)), error_number);
}

/// Sends the answer of `serve`, or the exception that it throws.
delivery reply(server& serve, const hdf5_request& request) {
    try {
        const std::vector<std::byte> content = serve.answer(request);
        if (request.question != hdf5_question::read && content.size() > max_answer_bytes) {
            return send_sentence(
                hdf5_answer_kind::unsupported,
                fmt::format("cannot open '{}': the answer of libhdf5 takes {} bytes, and at most {} are read",
                            request.path, content.size(), max_answer_bytes));
        }
        return send_answer(hdf5_child_socket, hdf5_answer_kind::answered, content);
    } catch (const format_error& failure) {
        return send_sentence(hdf5_answer_kind::format_error, failure.what());
    } catch (const unsupported& failure) {
        return send_sentence(hdf5_answer_kind::unsupported, failure.what());
    } catch (const invalid_argument& failure) {
        return send_sentence(hdf5_answer_kind::invalid_argument, failure.what());
    } catch (const system_failure& failure) {
        return send_sentence(hdf5_answer_kind::system_failure, failure.what(), failure.code().value());
    } catch (const data_changed& failure) {
        return send_sentence(hdf5_answer_kind::data_changed, failure.what());
    } catch (const std::exception&) {  // std::bad_alloc, std::length_error
        return send_sentence(hdf5_answer_kind::out_of_memory, {});
    }
}

}  // namespace

void serve_as_hdf5_child() {
    int domain = 0;
    ::socklen_t size = sizeof domain;
    if (::getsockopt(hdf5_child_socket, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0 || domain != AF_UNIX)
        return;
    try {
        prefer_for_oom_kill();
        lower_limits();
        end_with_parent();
        server serve;
        while (true) {
            grant_cpu_time();
            const std::optional<hdf5_request> request = receive_request(hdf5_child_socket);
            // without cleaning up: libhdf5 may be in a corrupt state
            if (!request || reply(serve, *request) != delivery::done) ::_exit(served);
        }
    } catch (...) {
        ::_exit(not_served);
    }
}

}  // namespace pinflow::cli
