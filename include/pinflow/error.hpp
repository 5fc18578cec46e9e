#pragma once

#include <stdexcept>
#include <string>
#include <system_error>

namespace pinflow {

/// The base class of all exceptions of pinflow. `what()` is a full sentence: the operation, its object (path,
/// offset, shape), what happened and, if known, what would help.
class error : public std::runtime_error {
 public:
    using std::runtime_error::runtime_error;
};

/// The system refused an operation (file, memory, thread or signal), or would run out of memory.
class system_failure : public error {
 public:
    system_failure(const std::string& message, std::error_code code) : error(message), code_(code) {}

    /// The errno value behind the failure.
    const std::error_code& code() const noexcept { return code_; }

 private:
    std::error_code code_;
};

/// The bytes of a file contradict its format or its own header.
class format_error : public error {
 public:
    using error::error;
};

/// The input is valid, but pinflow (or this build of it) does not support the operation on it.
class unsupported : public error {
 public:
    using error::error;
};

/// The arguments of a call contradict each other or the data.
class invalid_argument : public error {
 public:
    using error::error;
};

/// A saved state does not fit. The state of a loader was saved for other data or another order; the state of
/// flat_parameters, for other parameters or another rule; that of an embedding_table, for another rule, type
/// or shape.
class state_mismatch : public invalid_argument {
 public:
    using invalid_argument::invalid_argument;
};

/// A file changed (size, modification time or identity) after it was opened.
class data_changed : public error {
 public:
    using error::error;
};

/// No slot of a loader is left: batches and tensors of the consumer have leased them, or they are lost
/// (loader_report::lost_slots). `next` cannot return another batch until some are released; lost slots never
/// come back. The message says how many slots tensors alone hold. An embedding_table throws it, too, if
/// leases and prefetches hold the memory of all its steps.
class all_slots_leased : public error {
 public:
    using error::error;
};

/// A device refused or failed an operation; the process can continue.
class device_error : public error {
 public:
    using error::error;
};

/// A device failed in a way that no later call in this process can recover from (a sticky CUDA error).
class fatal_device_error : public device_error {
 public:
    using device_error::device_error;
};

}  // namespace pinflow
