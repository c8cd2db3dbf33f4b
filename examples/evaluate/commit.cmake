# SPDX-License-Identifier: Apache-2.0
# cmake -D ROOT=<project> -D OUT=<header> -P commit.cmake
# Writes a header with the commit that is checked out, and "+" where files that git knows were changed; only if it is another.
execute_process(COMMAND git -C ${ROOT} describe --always --abbrev=12 --dirty=+ --exclude=*
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
if(failed OR NOT commit MATCHES "^[0-9a-f]+[+]?$")
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#pragma once\n#define KVTRIM_COMMIT \"${commit}\"\n")
