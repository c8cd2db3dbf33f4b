// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/rope.hpp>

#include <cstdint>

namespace kvtrim {

/// Parameters of `ExpectedAttentionScorer`.
///
/// \par Source
/// Devoto et al., 2025, arXiv:2510.00636; sizes and epsilon as kvpress's press (its benchmark adds epsilon 0.01)
struct ExpectedAttentionParams {
  std::int32_t sinks = 4;     ///< first rows: they take no part in the softmax; protect them
  std::int32_t future = 512;  ///< positions of the queries to come, counted from the next one
  float epsilon = 0;          ///< added to the expected attention before it meets the value's norm
  bool covariance = true;     ///< use the queries' covariance, not their mean alone
  bool value_norm = true;     ///< times the Euclidean norm of the value
  float scale = 0;            ///< factor of the logits; 0: 1 / sqrt(head_dim)
  Rope rope{};                ///< of the model; its frequencies must outlive what is made of this.
                              ///< Zero frequencies: a model without rotation
};

}  // namespace kvtrim
