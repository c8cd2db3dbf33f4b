// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/sequence_plane.hpp>

#include "catch.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;

TEST_CASE("sequence_plane: a dense plane is the C-order array [sequences, layers, heads, rows]",
          "[sequence_plane]") {
  std::vector<std::int32_t> memory(2 * 3 * 4 * 5);
  for (std::size_t i = 0; i < memory.size(); ++i) { memory[i] = static_cast<std::int32_t>(i); }
  const auto plane = SequencePlane::dense(memory.data(), 3, 4, 5);
  CHECK(static_cast<bool>(plane));
  CHECK_FALSE(static_cast<bool>(SequencePlane{}));
  std::int32_t i = 0;
  for (std::int32_t s = 0; s < 2; ++s) {
    for (std::int32_t l = 0; l < 3; ++l) {
      for (std::int32_t h = 0; h < 4; ++h) {
        for (std::int32_t r = 0; r < 5; ++r) {
          CHECK(plane.at<std::int32_t>(SequenceId{s}, LayerId{l}, HeadId{h}, r) == i++);
        }
      }
    }
  }
}

TEST_CASE("sequence_plane: an array is given only where elements are contiguous",
          "[sequence_plane][edge]") {
  std::vector<float> memory{0, 1, 2, 3, 4, 5};
  auto plane = SequencePlane::dense(memory.data(), 1, 2, 3);
  CHECK(plane.array<float>(SequenceId{0}, LayerId{0}, HeadId{1}) == memory.data() + 3);
  plane.row_stride = 8;  // every other element
  CHECK(plane.array<float>(SequenceId{0}, LayerId{0}, HeadId{1}) == nullptr);
  CHECK(plane.at<float>(SequenceId{0}, LayerId{0}, HeadId{0}, 2) == 4);
  CHECK(SequencePlane{}.array<float>(SequenceId{0}, LayerId{0}, HeadId{0}) == nullptr);
}
