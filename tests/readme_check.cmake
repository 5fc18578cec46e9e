# Fails unless README.md shows samples/stream_to_device.cpp, which is compiled and run, word for word.
#     cmake -P tests/readme_check.cmake

cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH root)
file(READ ${root}/README.md readme)
file(READ ${root}/samples/stream_to_device.cpp code)
string(FIND "${readme}" "\n```cpp\n${code}```\n" position)
if(position EQUAL -1)
  message(FATAL_ERROR "README.md does not show samples/stream_to_device.cpp as it is: copy it into the ```cpp block")
endif()
