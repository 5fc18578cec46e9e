#pragma once

namespace pinflow {

/// Installs a SIGBUS handler so that pinflow can copy rows directly from mapped files, which is faster than
/// reading them with pread. The handler catches the SIGBUS of a file that is truncated meanwhile. Without it,
/// the CPU reads rows of mapped files with pread. Only the first call has an effect.
///
/// Two kinds of access are protected neither by the handler nor by pread. One is to views and mapped tensors
/// (device_tensor::is_mapped) that the program reads itself, or passes to a function that takes them as
/// memory, such as write_npy, save_tensors or copy_to_device_async. The other is a row_exchange on the host
/// device whose route is set to direct, copy or hybrid. In both, a truncated file raises SIGBUS.
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
