# Installs headers, libraries, a relocatable package for find_package(pinflow), pinflow.pc for pkg-config, and pages.
# src/cli installs the tool.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(layers core device rows formats load loader train dlpack shared)  # components of find_package
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/pinflow)

set(header_exclusions "")
if(NOT PINFLOW_HAVE_CUDA)
  set(header_exclusions PATTERN cuda.hpp EXCLUDE)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} PATTERN "*.md" EXCLUDE ${header_exclusions})

foreach(layer IN LISTS layers)
  list(APPEND layer_targets pinflow_${layer})
endforeach()
install(TARGETS pinflow ${layer_targets} EXPORT pinflow-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT pinflow-targets NAMESPACE pinflow:: DESTINATION ${package_folder})

if(BUILD_SHARED_LIBS)
  set(static_libraries OFF)
else()
  set(static_libraries ON)
endif()
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/pinflow-config.cmake.in
  ${PROJECT_BINARY_DIR}/package/pinflow-config.cmake
  INSTALL_DESTINATION ${package_folder} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/pinflow-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(DIRECTORY ${PROJECT_BINARY_DIR}/package/ DESTINATION ${package_folder})
install(FILES ${CMAKE_CURRENT_LIST_DIR}/Findhdf5_serial.cmake ${CMAKE_CURRENT_LIST_DIR}/Findlibdeflate.cmake
  ${CMAKE_CURRENT_LIST_DIR}/Findlzf.cmake ${CMAKE_CURRENT_LIST_DIR}/PinflowCudaStandard.cmake DESTINATION ${package_folder})

# ---- pkg-config ------------------------------------------------------------------------------------------------------

set(pc_folder ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pc_prefix_of_file /${pc_folder} /)
string(REGEX REPLACE "/$" "" pc_prefix_of_file "${pc_prefix_of_file}")
set(pc_libraries -lpinflow_shared -lpinflow_dlpack -lpinflow_train -lpinflow_load -lpinflow_loader -lpinflow_rows -lpinflow_formats -lpinflow_device -lpinflow_core)
set(pc_cuda_libdir "")
if(static_libraries)  # their users link the private libraries
  set(pc_names deflate z)
  if(PINFLOW_SHARED_FMT)
    list(APPEND pc_names fmt)
  endif()
  if(PINFLOW_HAVE_HDF5)
    cmake_path(GET hdf5_serial_LIBRARY STEM pc_hdf5)
    string(REGEX REPLACE "^lib" "" pc_hdf5 ${pc_hdf5})
    list(APPEND pc_names ${pc_hdf5})
    if(lzf_FOUND)
      list(APPEND pc_names lzf)
    endif()
  endif()
  list(TRANSFORM pc_names PREPEND -l)
  list(APPEND pc_libraries ${pc_names})
  if(PINFLOW_HAVE_CUDA)
    set(pc_cuda_libdir "cuda_libdir=${CUDAToolkit_LIBRARY_DIR}\n")
    list(APPEND pc_libraries "-L\${cuda_libdir}" -lcudart_static -ldl -lrt)
  endif()
  list(APPEND pc_libraries -ltbb -pthread)
endif()
list(JOIN pc_libraries " " pc_libraries)
configure_file(${CMAKE_CURRENT_LIST_DIR}/pinflow.pc.in ${PROJECT_BINARY_DIR}/pinflow.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/pinflow.pc DESTINATION ${pc_folder})

# ---- pages -----------------------------------------------------------------------------------------------------------

install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
# the folders of the pages that README.md links to, and of those that src/README.md links to
foreach(folder IN ITEMS include/pinflow formats loader src src/cli src/shared samples samples/bench samples/python)
  file(GLOB pages ${PROJECT_SOURCE_DIR}/${folder}/*.md ${PROJECT_SOURCE_DIR}/${folder}/*.svg)
  install(FILES ${pages} DESTINATION ${CMAKE_INSTALL_DOCDIR}/${folder})
endforeach()
install(FILES ${PROJECT_SOURCE_DIR}/samples/stream_to_device.cpp ${PROJECT_SOURCE_DIR}/samples/train_cuda.cu
  DESTINATION ${CMAKE_INSTALL_DOCDIR}/samples)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/samples/python/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/samples/python FILES_MATCHING PATTERN "*.py")
