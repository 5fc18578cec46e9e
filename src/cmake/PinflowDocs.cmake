# The target `docs`: the API reference of the public headers, as HTML in docs/html of the build folder. Doxygen's
# warnings are errors: unknown parameters, broken links.

find_package(Doxygen QUIET)
if(NOT DOXYGEN_FOUND)
  return()
endif()
set(DOXYGEN_PROJECT_BRIEF "${PROJECT_DESCRIPTION}")
set(DOXYGEN_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/docs)
set(DOXYGEN_USE_MDFILE_AS_MAINPAGE include/pinflow/README.md)
set(DOXYGEN_STRIP_FROM_PATH include)
set(DOXYGEN_STRIP_FROM_INC_PATH include)
set(DOXYGEN_JAVADOC_AUTOBRIEF YES)
set(DOXYGEN_EXTRACT_ALL YES)  # some names need no comment
set(DOXYGEN_EXCLUDE_SYMBOLS pinflow::detail pinflow::detail::*)
set(DOXYGEN_HAVE_DOT NO)
set(DOXYGEN_SORT_MEMBER_DOCS NO)  # in the order of the header
set(DOXYGEN_QUIET YES)
set(DOXYGEN_WARN_AS_ERROR FAIL_ON_WARNINGS)
doxygen_add_docs(docs include WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} COMMENT "Writing the API reference to docs/html")
