#pragma once

namespace pinflow {

/// Lets pinflow copy rows straight from the mapping of a file, which is faster than reading them, by handling
/// the SIGBUS of a file that was truncated meanwhile. Without it the library reads mapped files with pread
/// wherever the CPU copies rows. The first call installs a signal handler for the process, later calls do
/// nothing.
///
/// The handler acts only on a thread that is copying rows for pinflow: the copy fails there, and the rows are
/// read again with pread, which reports what is wrong as data_changed or system_failure. Any other SIGBUS
/// goes to the handler that was installed before, or does what it would have done without ours. If the
/// program replaces the handler later, pinflow notices and goes back to pread.
///
/// Thread-safe. @throws system_failure if the handler cannot be installed.
void install_fault_guard();

/// Whether the handler is installed and still the process's action for SIGBUS. Thread-safe.
bool fault_guard_active() noexcept;

}  // namespace pinflow
