// SPDX-License-Identifier: Apache-2.0
#pragma once

// Window scores in double, each with the error that fp32 may make of it.

#include "score_world.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace kvtrim::test {

struct Bounded {
  double value = 0;
  double error = 0;
};

inline Bounded reduce(Reduction how, const std::vector<Bounded>& x) {
  Bounded r = x.front();
  for (std::size_t i = 1; i < x.size(); ++i) {
    if (how == Reduction::max) {
      r = {std::max(r.value, x[i].value), std::max(r.error, x[i].error)};
    } else {
      r = {r.value + x[i].value, r.error + x[i].error};
    }
  }
  const double n = how == Reduction::mean ? static_cast<double>(x.size()) : 1;
  return {r.value / n, r.error / n};
}

/// exp(x - lse) with the bound that `window_scores` promises. `sum`: 4, or 16 on tensor cores.
inline Bounded probability(double x, double size, double lse, double largest_size, double sum) {
  const double p = std::exp(x - lse);
  const double relative =
      std::ldexp(1, -21) +
      std::ldexp(sum * (size + largest_size) + 2 * std::fabs(x) + 2 * std::fabs(lse), -24);
  return {p, p * relative + std::ldexp(1, -126)};
}

/// Scores of (sequence, layer, KV head) by row of the table.
inline std::vector<Bounded> window_reference(ScoreWorld& w,
                                             const WindowParams& params,
                                             std::int32_t s,
                                             std::int32_t l,
                                             std::int32_t h,
                                             double sum_error) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::int32_t given = w.query_count(s);
  const std::int32_t votes = std::min(given, params.window);
  // probabilities[g][vote][row]; empty: no vote
  std::vector<std::vector<std::vector<Bounded>>> probabilities(at(w.o.group));
  for (std::int32_t g = 0; g < w.o.group; ++g) {
    for (std::int32_t i = given - votes; i < given; ++i) {
      auto& row = probabilities[at(g)].emplace_back();
      const double* const q = w.query(s, l, h * w.o.group + g, i);
      if (!std::all_of(q, q + w.o.dim, [](double v) { return std::isfinite(v); })) { continue; }
      std::vector<ScoreWorld::Logit> logits(at(w.extent(s)));
      double sum = 0;
      double largest = 0;
      for (std::int32_t r = 0; r < w.extent(s); ++r) {
        if (!w.sees(s, l, h, i, r)) { continue; }
        logits[at(r)] = w.logit(s, l, h, g, i, r);
        sum += std::exp(logits[at(r)].value);
        largest = std::max(largest, logits[at(r)].size);
      }
      const double lse = w.o.lse ? w.lse(s, l, h * w.o.group + g, i) : std::log(sum);
      if (!std::isfinite(lse)) { continue; }
      for (std::int32_t r = 0; r < w.extent(s); ++r) {
        row.push_back(w.sees(s, l, h, i, r) ? probability(logits[at(r)].value,
                                                          logits[at(r)].size,
                                                          lse,
                                                          w.o.lse ? 0 : largest,
                                                          sum_error)
                                            : Bounded{});
      }
    }
  }
  std::vector<std::int32_t> order;  // rows by position
  for (std::int32_t r = 0; r < w.extent(s); ++r) {
    if (r != w.hole(s)) { order.push_back(r); }
  }
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return w.position(s, l, h, a) < w.position(s, l, h, b);
  });
  std::vector<Bounded> raw_scores;
  for (const std::int32_t r : order) {
    std::vector<Bounded> heads;
    for (const auto& head : probabilities) {
      std::vector<Bounded> of_head;
      for (const auto& query : head) {
        if (!query.empty()) { of_head.push_back(query[at(r)]); }
      }
      if (!of_head.empty()) { heads.push_back(reduce(params.rows, of_head)); }
    }
    raw_scores.push_back(heads.empty() || !w.finite_key(s, l, h, r) ? Bounded{nan, 0}
                                                                    : reduce(params.group, heads));
  }
  const auto n = static_cast<std::int32_t>(order.size());
  const std::int32_t scored = std::max(0, n - params.window);
  const std::int32_t columns = params.columns == PoolColumns::all_columns ? n : scored;
  std::vector<Bounded> out(at(w.extent(s)));
  for (std::int32_t i = 0; i < scored; ++i) {
    Bounded sum;
    Bounded largest{nan, 0};
    for (std::int32_t j = i - params.kernel / 2; j <= i + params.kernel / 2; ++j) {
      if (j < 0 || j >= columns) { continue; }
      const Bounded& x = raw_scores[at(j)];
      sum = {sum.value + x.value, sum.error + x.error};
      largest = {std::fmax(largest.value, x.value), std::max(largest.error, x.error)};
    }
    Bounded& score = out[at(order[at(i)])];
    score = params.pooling == Pooling::max
                ? largest
                : Bounded{sum.value / params.kernel, sum.error / params.kernel};
    score.error += std::ldexp(std::fabs(score.value), -21);
  }
  return out;
}

}  // namespace kvtrim::test
