// SPDX-License-Identifier: Apache-2.0
#pragma once

// One KV head of one layer of one sequence, and the index that stands for it: sequences outermost, KV heads innermost.

#include <kvtrim/core/types.hpp>

#include <cstdint>

namespace kvtrim::cuda::detail {

/// One KV head of one layer of one sequence.
struct HeadPlace {
  SequenceId s;
  LayerId l;
  HeadId h;
};

/// What index `head` of `layers` x `kv_heads` heads a sequence stands for.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr HeadPlace head_place(std::int32_t head,
                                                                std::int32_t layers,
                                                                std::int32_t kv_heads) noexcept {
  return {SequenceId{head / kv_heads / layers},
          LayerId{head / kv_heads % layers},
          HeadId{head % kv_heads}};
}

}  // namespace kvtrim::cuda::detail
