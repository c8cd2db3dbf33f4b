// SPDX-License-Identifier: Apache-2.0
#pragma once

// OpenMP's threads spin while they wait for each other. Beside other work on the same cores the one that is waited for does not
// run meanwhile, and a step takes 20 times as long; asleep, they lose little on an idle machine.

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace program {

/// Lets OpenMP's threads sleep while they wait, unless the user chose by `OMP_WAIT_POLICY`: the program starts itself once more,
/// because OpenMP reads the variable before `main`. Call it first in `main`. Where a program cannot find itself, threads spin.
inline void wait_asleep(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error || setenv("OMP_WAIT_POLICY", "passive", 1) != 0) return;
  execv(self.c_str(), argv);  // returns only if it fails
}

}  // namespace program
