# SPDX-License-Identifier: Apache-2.0
# cmake -D COMPILER=... -D SOURCE=case.cpp -D KIND=fail|ok -P compile_fail.cmake
#
# The first line of SOURCE is `// expect: <regex>`. `fail`: it does not compile, and the compiler's
# message matches. `ok`: with KVTRIM_TEST_VALID it compiles, which shows that it is the marked line
# that is refused and not a typing error next to it.

cmake_minimum_required(VERSION 3.25)

file(STRINGS "${SOURCE}" first LIMIT_COUNT 1)
if(NOT first MATCHES "^// expect: (.+)$")
  message(FATAL_ERROR "${SOURCE}: the first line must be `// expect: <regex>`")
endif()
set(expect "${CMAKE_MATCH_1}")

set(valid)
if(KIND STREQUAL "ok")
  set(valid -DKVTRIM_TEST_VALID)
endif()
execute_process(COMMAND ${COMPILER} -fsyntax-only ${valid} "${SOURCE}"
                RESULT_VARIABLE failed OUTPUT_VARIABLE words ERROR_VARIABLE words)
if(KIND STREQUAL "ok")
  if(failed)
    message(FATAL_ERROR "with KVTRIM_TEST_VALID it must compile:\n${words}")
  endif()
elseif(NOT failed)
  message(FATAL_ERROR "it compiles, and must not")
elseif(NOT words MATCHES "${expect}")
  message(FATAL_ERROR "it is refused in other words than `${expect}`:\n${words}")
endif()
