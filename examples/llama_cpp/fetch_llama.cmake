# SPDX-License-Identifier: Apache-2.0
# cmake [-D HEADERS_ONLY=ON] -P examples/llama_cpp/fetch_llama.cmake
#
# Builds the llama.cpp inside PyPI's source distribution of llama-cpp-python and installs it under build/llama-<version>/,
# unless it is there already. HEADERS_ONLY unpacks its headers under build/llama-<version>/headers/, and builds nothing.

cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/llama.cmake")

if(EXISTS "${llama_prefix}/lib/cmake/llama/llama-config.cmake" AND NOT HEADERS_ONLY)
  message(STATUS "llama.cpp: ${llama_prefix}")
  return()
endif()
if(EXISTS "${llama_prefix}/include/llama.h" AND HEADERS_ONLY)
  file(COPY "${llama_prefix}/include/" DESTINATION "${llama_headers}")
endif()
if(EXISTS "${llama_headers}/llama.h" AND HEADERS_ONLY)
  message(STATUS "llama.cpp's headers: ${llama_headers}")
  return()
endif()

file(MAKE_DIRECTORY "${llama_prefix}")
file(LOCK "${llama_prefix}/lock" GUARD PROCESS TIMEOUT 3600) # two presets may run at once

# --- the source distribution ------------------------------------------------------------------
set(archive "${llama_prefix}/${llama_archive}")
set(sha256 "no such file")
if(EXISTS "${archive}")
  file(SHA256 "${archive}" sha256)
endif()
if(NOT sha256 STREQUAL llama_sha256)
  message(STATUS "llama.cpp: fetching ${llama_package} ${llama_version} from PyPI (77 MB)")
  find_program(python NAMES python3 python NO_CACHE)
  if(NOT python)
    message(FATAL_ERROR "python3 is not installed; with its pip llama.cpp is fetched")
  endif()
  # pip also asks the package's build system for its metadata, which it fetches for that; nothing is compiled.
  execute_process(
    COMMAND "${python}" -m pip download --no-deps --no-cache-dir --disable-pip-version-check
            --no-binary ${llama_package} --retries 2 -d "${llama_prefix}" ${llama_package}==${llama_version}
    RESULT_VARIABLE failed)
  if(EXISTS "${archive}")
    file(SHA256 "${archive}" sha256)
  endif()
  if(failed OR NOT sha256 STREQUAL llama_sha256)
    message(FATAL_ERROR "llama.cpp could not be fetched: see what pip says above.\n"
      "  sha256 of ${archive}\n  expected ${llama_sha256}\n  found    ${sha256}\n"
      "Without a network, bring that file from a machine that has one:\n"
      "  python3 -m pip download --no-deps --no-binary ${llama_package} ${llama_package}==${llama_version}")
  endif()
endif()

# --- unpack, build, install -----------------------------------------------------------------------
set(source "${llama_prefix}/source")
file(REMOVE_RECURSE "${source}")
file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${source}" PATTERNS "*/vendor/llama.cpp/*")
set(llama "${source}/${llama_folder}/vendor/llama.cpp")
if(HEADERS_ONLY)
  file(GLOB headers "${llama}/include/*.h" "${llama}/ggml/include/*.h")
  file(COPY ${headers} DESTINATION "${llama_headers}")
  file(REMOVE_RECURSE "${source}")
  message(STATUS "llama.cpp's headers: ${llama_headers}")
  return()
endif()
set(off)
foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP)
  list(APPEND off -DLLAMA_BUILD_${part}=OFF)
endforeach()
foreach(step IN ITEMS
    "-S;${llama};-B;${source}/build;-G;Ninja;-DCMAKE_BUILD_TYPE=Release;-DBUILD_SHARED_LIBS=OFF;-DLLAMA_OPENSSL=OFF;${off};-DCMAKE_INSTALL_PREFIX=${llama_prefix}"
    "--build;${source}/build" "--install;${source}/build")
  execute_process(COMMAND "${CMAKE_COMMAND}" ${step} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
file(REMOVE_RECURSE "${source}" "${archive}")
message(STATUS "llama.cpp: ${llama_prefix}")
