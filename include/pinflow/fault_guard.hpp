#pragma once

namespace pinflow {

/// Installs a SIGBUS handler so that pinflow can copy rows directly from mapped files, which is faster than
/// reading them with pread. The handler catches the SIGBUS of a file that is truncated meanwhile. Without it,
/// the CPU reads rows of mapped files with pread. Only the first call has an effect.
///
/// Views and mapped tensors (device_tensor::is_mapped) are not protected if the program reads them itself, or
/// passes them to a function that takes memory, such as write_npy or copy_to_device_async. A truncated file
/// raises SIGBUS then.
///
/// The handler acts only on a thread that reads mapped rows for pinflow. A copy that fails is repeated with
/// pread, which throws data_changed or system_failure if rows are lost. If a fault happens while a
/// `digest` reads views of a file, a later call of its `add_async` or `value` throws data_changed. Any other
/// SIGBUS goes to the previous handler, or has the effect that it would have without ours. If the program
/// replaces the handler later, pinflow detects that and uses pread again.
///
/// Thread-safe. @throws system_failure if the handler cannot be installed.
void install_fault_guard();

/// Whether the handler is installed and still the process's action for SIGBUS. Thread-safe.
bool fault_guard_active() noexcept;

}  // namespace pinflow
