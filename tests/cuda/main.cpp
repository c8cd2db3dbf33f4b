// SPDX-License-Identifier: Apache-2.0
// The main function of the tests on a GPU: without one they are skipped (77).
#define CATCH_CONFIG_RUNNER
#include "catch.hpp"

#include <cuda_runtime.h>

int main(int argc, char* argv[]) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) { return 77; }
  return Catch::Session().run(argc, argv);
}
