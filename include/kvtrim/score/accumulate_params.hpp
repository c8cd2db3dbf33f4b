// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtrim {

/// How attention is accumulated.
struct AccumulateParams {
  float decay = 1.0F;           ///< factor on the old sum at each query; 1: none
  bool squared = false;         ///< add squared probabilities
  bool age_normalised = false;  ///< rank by the sum divided by the queries that saw the row
};

}  // namespace kvtrim
