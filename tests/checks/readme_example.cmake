# SPDX-License-Identifier: Apache-2.0
# cmake -D README=README.md -D EXAMPLE=file.cpp -P readme_example.cmake
#
# The first ```cpp block of README is EXAMPLE, word for word, less its licence line.

cmake_minimum_required(VERSION 3.25)

foreach(file IN ITEMS "${README}" "${EXAMPLE}")
  if(NOT EXISTS "${file}")
    message("skipped: there is no ${file} yet")
    return()
  endif()
endforeach()

file(READ "${README}" readme)
file(READ "${EXAMPLE}" example)
string(FIND "${readme}" "\n```cpp\n" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "${README} has no ```cpp block")
endif()
math(EXPR begin "${begin} + 8")
string(SUBSTRING "${readme}" ${begin} -1 block)
string(FIND "${block}" "\n```" end)
string(SUBSTRING "${block}" 0 ${end} block)

string(REGEX REPLACE "^// SPDX[^\n]*\n" "" example "${example}")
string(STRIP "${block}" block)
string(STRIP "${example}" example)
if(NOT block STREQUAL example)
  message(FATAL_ERROR "the first ```cpp block of ${README} differs from ${EXAMPLE}")
endif()
