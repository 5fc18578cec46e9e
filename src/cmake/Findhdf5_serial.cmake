# Finds HDF5's C library as the target hdf5_serial::hdf5, without MPI if the distribution has both flavours. CMake's own
# FindHDF5 needs C as a language of the calling project, and takes the flavour of its compiler wrapper.
find_path(hdf5_serial_INCLUDE_DIR hdf5.h PATH_SUFFIXES hdf5/serial)
find_library(hdf5_serial_LIBRARY NAMES hdf5_serial hdf5)
mark_as_advanced(hdf5_serial_INCLUDE_DIR hdf5_serial_LIBRARY)

if(hdf5_serial_INCLUDE_DIR)
  file(STRINGS ${hdf5_serial_INCLUDE_DIR}/H5public.h hdf5_serial_VERSION
    REGEX "#define[ \t]+H5_VERS_(MAJOR|MINOR|RELEASE)[ \t]")
  list(TRANSFORM hdf5_serial_VERSION REPLACE "#define[ \t]+H5_VERS_[A-Z]+[ \t]+([0-9]+).*" "\\1")
  list(JOIN hdf5_serial_VERSION . hdf5_serial_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(hdf5_serial REQUIRED_VARS hdf5_serial_LIBRARY hdf5_serial_INCLUDE_DIR
  VERSION_VAR hdf5_serial_VERSION)

if(hdf5_serial_FOUND AND NOT TARGET hdf5_serial::hdf5)
  add_library(hdf5_serial::hdf5 UNKNOWN IMPORTED)
  set_target_properties(hdf5_serial::hdf5 PROPERTIES IMPORTED_LOCATION "${hdf5_serial_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${hdf5_serial_INCLUDE_DIR}")
endif()
