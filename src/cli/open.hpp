#pragma once

#include <string>
#include <string_view>

#include "pinflow/array.hpp"

namespace pinflow::cli {

/// An array that was named on the command line.
struct opened_array {
    pinflow::array array;
    std::string format;  ///< "npy"
    bool fortran_order;  ///< as the file's header says
};

/// Opens FILE[:NAME], choosing the reader by the file's content and not by its name. @throws usage_error for
/// formats and shared segments, which this build cannot open; what the readers throw.
opened_array open_argument(const std::string& text);

}  // namespace pinflow::cli
