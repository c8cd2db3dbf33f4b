# SPDX-License-Identifier: Apache-2.0
# Which llama.cpp the examples are written for, and where it is.

set(llama_package llama-cpp-python)
set(llama_version 0.3.36)
set(llama_folder llama_cpp_python-${llama_version})
set(llama_archive ${llama_folder}.tar.gz)
set(llama_sha256 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e)

cmake_path(SET llama_prefix NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../../build/llama-${llama_version}")
set(llama_headers "${llama_prefix}/headers")
