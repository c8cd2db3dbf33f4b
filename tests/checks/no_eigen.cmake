# SPDX-License-Identifier: Apache-2.0
# cmake -D COMPILER=... -D INCLUDE=dir -D "FOLDERS=core;cache" -P no_eigen.cmake
#
# Asks the preprocessor which files each header of FOLDERS includes, at any depth: none may belong to
# Eigen.

cmake_minimum_required(VERSION 3.25)

set(guilty)
set(count 0)
foreach(folder IN LISTS FOLDERS)
  file(GLOB_RECURSE headers "${INCLUDE}/kvtrim/${folder}/*.hpp")
  foreach(header IN LISTS headers)
    execute_process(COMMAND ${COMPILER} -M "${header}"
                    RESULT_VARIABLE failed OUTPUT_VARIABLE files ERROR_VARIABLE words)
    if(failed)
      message(FATAL_ERROR "${header}:\n${words}")
    endif()
    math(EXPR count "${count} + 1")
    if(files MATCHES "[^ \n]*/Eigen/[^ \n]*")
      string(APPEND guilty "  ${header}: ${CMAKE_MATCH_0}\n")
    endif()
  endforeach()
endforeach()
if(guilty)
  message(FATAL_ERROR "these headers may not include Eigen:\n${guilty}")
endif()
message("${count} headers, none includes Eigen")
