# Finds Random123, which distributions package without a CMake file and which is headers alone: the target
# Random123::header.
find_path(Random123_INCLUDE_DIR Random123/philox.h)
mark_as_advanced(Random123_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Random123 REQUIRED_VARS Random123_INCLUDE_DIR)

if(Random123_FOUND AND NOT TARGET Random123::header)
  add_library(Random123::header INTERFACE IMPORTED)
  set_target_properties(Random123::header PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${Random123_INCLUDE_DIR}")
endif()
