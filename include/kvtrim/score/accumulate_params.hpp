// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtrim {

/// How attention is accumulated.
///
/// \par Source
/// Zhang et al., 2023, arXiv:2306.14048 (the plain sum); age normalisation as kvpress; decay and squares are ours
struct AccumulateParams {
  float decay = 1.0F;           ///< factor on the old sum at each query; 1: none
  bool squared = false;         ///< add squared probabilities
  bool age_normalised = false;  ///< rank by the sum divided by the queries that saw the row
};

}  // namespace kvtrim
