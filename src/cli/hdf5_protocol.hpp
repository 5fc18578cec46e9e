#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/file.hpp"

/// The protocol between the tool and the child process that calls libhdf5. Requests and answers alternate on
/// a socket. Each has a head of fixed size, and content whose size the head gives. Both sides run the same
/// program, so numbers are sent as they are in memory. The tool trusts no answer, because libhdf5 may have
/// overwritten any memory of the child.
namespace pinflow::cli {

// ---- bytes ------------------------------------------------------------------------------------------------

using hdf5_deadline = std::chrono::steady_clock::time_point;
inline constexpr hdf5_deadline no_deadline = hdf5_deadline::max();

enum class delivery : std::uint8_t {
    done,
    ended,  ///< the other side is gone
    late,   ///< the deadline has passed
};

/// Sends all of `bytes`, and never raises SIGPIPE.
delivery send_all(int socket, std::span<const std::byte> bytes, hdf5_deadline until);
/// Fills `bytes`.
delivery receive_all(int socket, std::span<std::byte> bytes, hdf5_deadline until);

// ---- requests ---------------------------------------------------------------------------------------------

enum class hdf5_question : std::uint64_t {
    list = 1,  ///< the datasets of a file: serialize(listings)
    describe,  ///< the dataset called `about`: serialize(description)
    open,      ///< opens the dataset with the serialized description `about` for `read`; the answer is empty
    read,      ///< rows of that dataset, `size_bytes` in all
};

struct hdf5_request {
    hdf5_question question = hdf5_question::list;
    std::string path;  ///< as it was given; both sides have the same working folder
    file_identity identity;
    std::string about;
    std::uint64_t first_row = 0;
    std::uint64_t row_count = 0;
    std::uint64_t size_bytes = 0;

    friend bool operator==(const hdf5_request&, const hdf5_request&) = default;
};

delivery send_request(int socket, const hdf5_request& request, hdf5_deadline until);
/// Waits for the next request; empty if the other side is gone, or sends something else.
std::optional<hdf5_request> receive_request(int socket);

// ---- answers ----------------------------------------------------------------------------------------------

/// Whether an answer holds what was asked for, or an error. The content of an error is its message.
enum class hdf5_answer_kind : std::uint64_t {
    answered = 1,
    format_error,
    unsupported,
    invalid_argument,
    system_failure,
    data_changed,
    out_of_memory,
};

struct hdf5_answer_head {
    std::uint64_t magic = 0;
    hdf5_answer_kind kind = hdf5_answer_kind::answered;
    std::int64_t error_number = 0;  ///< errno of a system_failure
    std::uint64_t content_bytes = 0;
};

/// The size limit of a description or of listings: enough for the largest number of chunks, and for a million
/// listings.
inline constexpr std::uint64_t max_answer_bytes = std::uint64_t{1} << 30;
inline constexpr std::uint64_t max_sentence_bytes = std::uint64_t{1} << 16;

/// Sends head and content. An error message that is too long is truncated.
delivery send_answer(int socket, hdf5_answer_kind kind, std::span<const std::byte> content,
                     int error_number = 0);
/// Receives a head.
/// @param max_bytes upper bound on the content of an answer; for an error it is max_sentence_bytes
/// @param result the outcome of the transfer
/// @return empty if the transfer failed (`result` says how), or if the head has a wrong magic, an unknown
/// kind or too much content (`result` is then `done`).
std::optional<hdf5_answer_head> receive_answer_head(int socket, std::uint64_t max_bytes, hdf5_deadline until,
                                                    delivery& result);
/// Receives content, into memory that grows as it arrives.
delivery receive_content(int socket, std::uint64_t size_bytes, std::vector<std::byte>& content,
                         hdf5_deadline until);

}  // namespace pinflow::cli
