// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace evaluate {

/// SHA-256 of a file, as 64 hexadecimal digits: what says that two results are of one model.
///
/// \throws std::runtime_error if it cannot be read; Interrupted after Ctrl-C
/// \par Complexity
/// O(bytes) time, O(1) space
/// \par Source
/// FIPS 180-4, sections 4 to 6
[[nodiscard]] std::string sha256_of_file(const std::string& path);

}  // namespace evaluate
