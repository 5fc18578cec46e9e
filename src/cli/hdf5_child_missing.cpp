#include "src/cli/hdf5_child.hpp"

/// The functions in a build without HDF5.
namespace pinflow::cli {

void use_hdf5_child() {}

void serve_as_hdf5_child() {}

}  // namespace pinflow::cli
