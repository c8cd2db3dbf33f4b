// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a Recorder is made of, from what is needed and what the engine offers.

#include <kvtrim/core/error.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/observe/layer_step.hpp>
#include <kvtrim/observe/query_moments.hpp>
#include <kvtrim/observe/query_ring.hpp>
#include <kvtrim/policy/needs.hpp>

#include <cstddef>

namespace kvtrim::detail {

/// \throws std::invalid_argument as `Recorder`'s constructor
inline void check_recorder(const Needs& needs, const RecorderParams& p) {
  if (p.sequences < 1 || p.layers < 1 || p.query_heads < 1 || p.kv_heads < 1 || p.head_dim < 1 ||
      p.workers < 1 || p.query_heads % p.kv_heads != 0) {
    throw_invalid_argument(
        "kvtrim::Recorder: sequences {}, layers {}, head_dim {} and workers {} must be at least "
        "1, query_heads {} a multiple of kv_heads {}",
        p.sequences,
        p.layers,
        p.head_dim,
        p.workers,
        p.query_heads,
        p.kv_heads);
  }
  if (needs.window < 0) {
    throw_invalid_argument("kvtrim::Recorder: window {} is negative", needs.window);
  }
  if (needs.accumulate) {
    needs.accumulate->check("kvtrim::Recorder");
    if (!p.lse && !p.probabilities) {
      throw_invalid_argument(
          "kvtrim::Recorder: accumulated attention needs an LSE or probabilities, but lse {}, "
          "probabilities {}",
          p.lse,
          p.probabilities);
    }
  }
  if (needs.filters && (!p.filters || p.filters.dim != p.head_dim)) {
    throw_invalid_argument(
        "kvtrim::Recorder: filters of {} features are needed, those given have {} (0: none)",
        p.head_dim,
        p.filters ? p.filters.dim : 0);
  }
  if (needs.output && (!p.output || p.output.query_heads != p.query_heads || p.output.hidden < 1)) {
    throw_invalid_argument(
        "kvtrim::Recorder: an output projection of {} query heads is needed, the one given has "
        "{} (0: none), hidden {}",
        p.query_heads,
        p.output ? p.output.query_heads : 0,
        p.output.hidden);
  }
}

[[nodiscard]] inline QueryRing::Params ring_params(const Needs& needs,
                                                   const RecorderParams& p) noexcept {
  return {.sequences = p.sequences,
          .layers = p.layers,
          .query_heads = p.query_heads,
          .head_dim = p.head_dim,
          .window = needs.window,
          .lse = p.lse};
}

/// \pre `needs.moments`
[[nodiscard]] inline QueryMoments::Params moment_params(const Needs& needs,
                                                        const RecorderParams& p) noexcept {
  return {.sequences = p.sequences,
          .layers = p.layers,
          .query_heads = p.query_heads,
          .head_dim = p.head_dim,
          .sinks = needs.moments.value_or(MomentParams{}).sinks};
}

/// Of one worker.
[[nodiscard]] inline std::size_t record_scratch_bytes(const Needs& needs,
                                                      const RecorderParams& p) noexcept {
  return needs.accumulate && p.lse ? column_sums_scratch_bytes(p.head_dim) : 0;
}

}  // namespace kvtrim::detail
