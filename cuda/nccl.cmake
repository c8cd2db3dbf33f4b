# SPDX-License-Identifier: Apache-2.0
# Looks for NCCL in NCCL_ROOT (a variable or in the environment), beside CUDA, in the system's paths and in the PyPI package
# nvidia-nccl-cu13 (nvidia/nccl below site-packages). Makes the target kvtrim::nccl if both header and library are there;
# kvtrim_nccl_skipped says why not.
find_package(Python3 QUIET COMPONENTS Interpreter)
set(kvtrim_nccl_hints ${NCCL_ROOT} $ENV{NCCL_ROOT} ${CUDAToolkit_LIBRARY_ROOT} $ENV{CUDA_HOME}
  ${Python3_SITELIB}/nvidia/nccl)
find_path(KVTRIM_NCCL_INCLUDE nccl.h HINTS ${kvtrim_nccl_hints} PATH_SUFFIXES include)
# By the file that is loaded: the package has no libnccl.so.
find_library(KVTRIM_NCCL_LIBRARY NAMES libnccl.so.2 HINTS ${kvtrim_nccl_hints} PATH_SUFFIXES lib lib64)
set(kvtrim_nccl_skipped)
if(NOT KVTRIM_NCCL_INCLUDE)
  set(kvtrim_nccl_skipped "no nccl.h; set NCCL_ROOT, or install libnccl-dev or PyPI's nvidia-nccl-cu13")
elseif(NOT KVTRIM_NCCL_LIBRARY)
  set(kvtrim_nccl_skipped "nccl.h is in ${KVTRIM_NCCL_INCLUDE}, but there is no libnccl.so.2; set NCCL_ROOT")
endif()
if(KVTRIM_NCCL_INCLUDE)
  file(STRINGS ${KVTRIM_NCCL_INCLUDE}/nccl.h lines REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
  list(JOIN numbers "." kvtrim_nccl_version)
endif()
if(NOT kvtrim_nccl_skipped AND NOT TARGET kvtrim::nccl)
  add_library(kvtrim::nccl INTERFACE IMPORTED)
  target_include_directories(kvtrim::nccl SYSTEM INTERFACE ${KVTRIM_NCCL_INCLUDE})
  target_link_libraries(kvtrim::nccl INTERFACE ${KVTRIM_NCCL_LIBRARY})
endif()
