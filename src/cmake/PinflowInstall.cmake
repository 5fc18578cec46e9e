# Installs headers, libraries and a package that find_package(pinflow) finds wherever it is moved to.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(layers core device rows formats loader)  # the components of find_package
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
  ${CMAKE_CURRENT_LIST_DIR}/Findlzf.cmake DESTINATION ${package_folder})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
