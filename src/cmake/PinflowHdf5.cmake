# Checks whether HDF5 files can be read and written, and prints the result. Sets PINFLOW_HAVE_HDF5 in the including
# scope.

set(PINFLOW_HAVE_HDF5 OFF)
set(pinflow_hdf5_min_version 1.10.5)  # H5Dget_num_chunks

if(PINFLOW_HDF5)  # AUTO is true, too
  find_package(hdf5_serial ${pinflow_hdf5_min_version} QUIET)
  find_package(lzf QUIET)
  if(hdf5_serial_FOUND)
    set(PINFLOW_HAVE_HDF5 ON)
    if(lzf_FOUND)
      message(STATUS "HDF5: ${hdf5_serial_VERSION}")
    else()
      message(STATUS "HDF5: ${hdf5_serial_VERSION}, without its filter lzf, as no liblzf was found")
    endif()
  elseif(PINFLOW_HDF5 STREQUAL "AUTO")
    message(STATUS "HDF5: left out, no HDF5 of ${pinflow_hdf5_min_version} or later was found")
  else()
    message(FATAL_ERROR "PINFLOW_HDF5 is ${PINFLOW_HDF5}, but no HDF5 of ${pinflow_hdf5_min_version} or later was found")
  endif()
else()
  message(STATUS "HDF5: left out, PINFLOW_HDF5 is ${PINFLOW_HDF5}")
endif()

# pinflow_add_hdf5(TARGET): adds the readers and writers, or replacements that report their absence.
function(pinflow_add_hdf5 target)
  if(NOT PINFLOW_HAVE_HDF5)
    target_sources(${target} PRIVATE formats/hdf5_missing.cpp)
    return()
  endif()
  target_sources(${target} PRIVATE
    formats/hdf5.cpp
    formats/hdf5_chunk_cache.cpp
    formats/hdf5_chunk_grid.cpp
    formats/hdf5_chunk_read.cpp
    formats/hdf5_chunk_reader.cpp
    formats/hdf5_content.cpp
    formats/hdf5_dataset.cpp
    formats/hdf5_description.cpp
    formats/hdf5_description_bytes.cpp
    formats/hdf5_file_types.cpp
    formats/hdf5_filters.cpp
    formats/hdf5_find_chunk.cpp
    formats/hdf5_kept_readers.cpp
    formats/hdf5_library.cpp
    formats/hdf5_library_filters.cpp
    formats/hdf5_library_reader.cpp
    formats/hdf5_links.cpp
    formats/hdf5_memory.cpp
    formats/hdf5_output.cpp
    formats/hdf5_rows.cpp
    formats/hdf5_types.cpp
    formats/hdf5_write_chunks.cpp
    formats/hdf5_writer.cpp)
  target_link_libraries(${target} PRIVATE hdf5_serial::hdf5)
  if(lzf_FOUND)
    target_compile_definitions(${target} PRIVATE PINFLOW_HAVE_LZF=1)
    target_link_libraries(${target} PRIVATE lzf::lzf)
  endif()
endfunction()
