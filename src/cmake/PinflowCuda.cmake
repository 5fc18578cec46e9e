# Checks whether the CUDA device can be built, and prints the result. Sets PINFLOW_HAVE_CUDA in the including scope.

set(PINFLOW_HAVE_CUDA OFF)
set(pinflow_cuda_min_version 12.8)  # cudaMemcpyBatchAsync

# pinflow_find_cuda(RESULT): sets RESULT to "" if a CUDA compiler can be used, otherwise to the reason why not.
function(pinflow_find_cuda result)
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(PINFLOW_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
    mark_as_advanced(PINFLOW_NVCC)
    if(NOT PINFLOW_NVCC)
      set(${result} "no nvcc was found" PARENT_SCOPE)
      return()
    endif()
    set(ENV{CUDACXX} ${PINFLOW_NVCC})
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(log "CMakeFiles/CMakeConfigureLog.yaml, or CMakeError.log before CMake 3.26")
    set(${result}
      "CMake's test of nvcc failed, perhaps because nvcc does not support this host compiler (see ${log})"
      PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE answer ERROR_QUIET)
  if(NOT answer MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${result} "${CMAKE_CUDA_COMPILER} does not say its version" PARENT_SCOPE)
  elseif(CMAKE_MATCH_1 VERSION_LESS pinflow_cuda_min_version)
    set(${result} "the toolkit ${CMAKE_MATCH_1} is older than ${pinflow_cuda_min_version}" PARENT_SCOPE)
  else()
    set(${result} "" PARENT_SCOPE)
  endif()
endfunction()

if(PINFLOW_CUDA)  # AUTO is true, too
  pinflow_find_cuda(pinflow_no_cuda)
  if(pinflow_no_cuda STREQUAL "")
    enable_language(CUDA)
    find_package(CUDAToolkit ${pinflow_cuda_min_version} REQUIRED)
    set(PINFLOW_HAVE_CUDA ON)
    message(STATUS "CUDA device: toolkit ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
  elseif(PINFLOW_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA device: left out, ${pinflow_no_cuda}")
  else()
    message(FATAL_ERROR "PINFLOW_CUDA is ${PINFLOW_CUDA}, but ${pinflow_no_cuda}")
  endif()
else()
  message(STATUS "CUDA device: left out, PINFLOW_CUDA is ${PINFLOW_CUDA}")
endif()

# Links CUDA's runtime statically, so that programs start on machines without the CUDA toolkit. (Without a driver: see
# driver_functions in src/device/cuda/api.cpp.)
function(pinflow_use_cuda target)
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY None)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
endfunction()

# pinflow_add_cuda_backend(TARGET): adds the CUDA device to the device layer, when it can be built.
function(pinflow_add_cuda_backend target)
  if(NOT PINFLOW_HAVE_CUDA)
    return()
  endif()
  target_sources(${target} PRIVATE
    src/device/cuda/api.cpp
    src/device/cuda/context.cpp
    src/device/cuda/conversions.cu
    src/device/cuda/copy_list.cpp
    src/device/cuda/cuda_backend.cpp
    src/device/cuda/digest.cu
    src/device/cuda/digest_kernels.cpp
    src/device/cuda/flat.cu
    src/device/cuda/flat_kernels.cpp
    src/device/cuda/group_rows.cu
    src/device/cuda/host_functions.cpp
    src/device/cuda/page_locker.cpp
    src/device/cuda/pinned_memory.cpp
    src/device/cuda/held_rows.cu
    src/device/cuda/record_kernels.cpp
    src/device/cuda/records.cu
    src/device/cuda/row_kernels.cpp
    src/device/cuda/row_sums.cu
    src/device/cuda/rows.cu
    src/device/cuda/sort_by_cub.cu
    src/device/cuda/sort_rows.cu)
  # the host's rules give the same bits
  set_source_files_properties(src/device/cuda/flat.cu src/device/cuda/records.cu PROPERTIES COMPILE_OPTIONS -fmad=false)
  target_compile_definitions(${target} PRIVATE PINFLOW_HAVE_CUDA=1)
  # pinflow/cuda.hpp includes CUDA's headers; users of an installed copy find them themselves
  target_include_directories(${target} SYSTEM PUBLIC "$<BUILD_INTERFACE:${CUDAToolkit_INCLUDE_DIRS}>")
  pinflow_use_cuda(${target})
endfunction()

# pinflow_add_cuda_tests(): cuda_test, with tests that need a GPU, and the measurements link_speed, table_memory,
# overlap and, if cuBLAS is found, overlap_matmul. Call it in tests/.
function(pinflow_add_cuda_tests)
  if(NOT PINFLOW_HAVE_CUDA)
    return()
  endif()
  add_executable(cuda_test cuda_test.cpp cuda_digest_test.cpp cuda_dlpack_test.cpp cuda_flat_test.cpp cuda_loader_test.cpp cuda_pin_test.cpp
    cuda_process_test.cpp cuda_rows_test.cpp cuda_scalar_test.cpp cuda_steady_test.cpp cuda_unwind_test.cpp single_copies.cpp cuda_kernels.cu cuda_scalar.cu)
  target_include_directories(cuda_test PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(cuda_test PRIVATE pinflow::pinflow pinflow_warnings doctest::doctest fmt::fmt
    Threads::Threads)
  pinflow_use_cuda(cuda_test)
  add_test(NAME cuda_test COMMAND cuda_test)
  set_tests_properties(cuda_test PROPERTIES TIMEOUT 300 SKIP_RETURN_CODE 77 LABELS cuda)

  # measures this machine's link, with which streaming figures are compared
  add_executable(link_speed ${PROJECT_SOURCE_DIR}/samples/bench/link_speed.cpp)
  target_include_directories(link_speed PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(link_speed PRIVATE pinflow::pinflow pinflow_warnings)

  # measures which memory is best for a table of rows
  add_executable(table_memory ${PROJECT_SOURCE_DIR}/samples/bench/table_memory.cpp)
  target_include_directories(table_memory PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(table_memory PRIVATE pinflow::pinflow pinflow_warnings)

  # measures whether copies and a consumer's kernels overlap
  add_executable(overlap ${PROJECT_SOURCE_DIR}/samples/bench/overlap.cpp ${PROJECT_SOURCE_DIR}/samples/bench/busy.cu)
  target_include_directories(overlap PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(overlap PRIVATE pinflow::pinflow pinflow_warnings)
  pinflow_use_cuda(overlap)
  if(TARGET CUDA::cublas)
    add_executable(overlap_matmul ${PROJECT_SOURCE_DIR}/samples/bench/overlap_matmul.cpp)
    target_include_directories(overlap_matmul PRIVATE ${PROJECT_SOURCE_DIR})
    target_link_libraries(overlap_matmul PRIVATE pinflow::pinflow pinflow_warnings CUDA::cublas)
    pinflow_use_cuda(overlap_matmul)
  endif()
endfunction()
