# Fails unless README.md shows, word for word, the function `train` of samples/stream_to_device.cpp, a sample that tests
# compile and run.
#     cmake -P tests/readme_check.cmake

cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH root)
file(READ ${root}/README.md readme)
file(READ ${root}/samples/stream_to_device.cpp code)
string(FIND "${code}" "void train(" begin)
string(FIND "${code}" "\n\nint main(" end)
math(EXPR length "${end} - ${begin}")
if(begin EQUAL -1 OR length LESS 0)
  message(FATAL_ERROR "samples/stream_to_device.cpp has no function train before main")
endif()
string(SUBSTRING "${code}" ${begin} ${length} shown)
string(FIND "${readme}" "\n```cpp\n${shown}\n```\n" position)
if(position EQUAL -1)
  message(FATAL_ERROR "README.md does not show train of samples/stream_to_device.cpp as it is: copy it into the ```cpp block")
endif()
