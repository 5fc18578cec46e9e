# Finds liblzf, whether or not its package has a CMake file: the target lzf::lzf.
find_path(lzf_INCLUDE_DIR lzf.h PATH_SUFFIXES liblzf)
find_library(lzf_LIBRARY lzf)
mark_as_advanced(lzf_INCLUDE_DIR lzf_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(lzf REQUIRED_VARS lzf_LIBRARY lzf_INCLUDE_DIR)

if(lzf_FOUND AND NOT TARGET lzf::lzf)
  add_library(lzf::lzf UNKNOWN IMPORTED)
  set_target_properties(lzf::lzf PROPERTIES IMPORTED_LOCATION "${lzf_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${lzf_INCLUDE_DIR}")
endif()
