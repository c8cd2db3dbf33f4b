// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows stay, said once more from the scores: of one head, of heads that share a budget, and of whole pages. Sorted lists
// and sums, for clarity.

#include <kvtrim/budget/adaptive.hpp>
#include <kvtrim/policy/page_selector.hpp>

#include "random/setup.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <tuple>
#include <vector>

namespace kvtrim::random_test {

using Floats = std::vector<float>;

struct Cut {
  bool evicts = false, over = false;
  std::int32_t keep = 0, begin = 0, end = 0;  // ranks [begin, end) compete
  friend bool operator==(const Cut&, const Cut&) = default;
};
// `keep` rows stay of `live`, the first `sinks` and the last `recent` for sure.
inline Cut cut_to(std::int32_t keep, std::int32_t sinks, std::int32_t recent, std::int32_t live) {
  Cut cut;
  cut.begin = std::min(sinks, live);
  cut.end = live - std::min(recent, live - cut.begin);
  const std::int32_t fixed = live - (cut.end - cut.begin);
  cut.over = keep < fixed;
  cut.keep = std::max(keep, fixed);
  cut.evicts = cut.keep < live;
  return cut;
}

inline bool is_lowest(float score) {
  return std::isnan(score) || score == -std::numeric_limits<float>::infinity();
}
// Sorts ascending where higher scores come first: NaN is the lowest, as -inf is.
inline double descending(float score) {
  return is_lowest(score) ? std::numeric_limits<double>::infinity() : -static_cast<double>(score);
}

// A row of the pages that a sequence must leave as they are: it stays whatever its score, or its page leaves the table.
enum class Place : std::uint8_t { own, stays, goes };

/// Which rows of one head stay, by rank: protected ones, then the best; of those, the first until `first_stage` rows are
/// there (-1: all) by `scores`, the others by `second`.
inline std::vector<bool> kept_rows(const Cut& cut,
                                   const std::vector<Place>& places,
                                   const Floats& scores,
                                   std::int32_t first_stage,
                                   const Floats& second) {
  const auto live = static_cast<std::int32_t>(places.size());
  std::vector<bool> keep(places.size(), false);
  std::int32_t left = cut.keep;
  Ints others;
  for (std::int32_t rank = 0; rank < live; ++rank) {
    const bool competes = rank >= cut.begin && rank < cut.end;
    const Place place = places[at(rank)];
    if (place == Place::stays || (place == Place::own && !competes)) {
      keep[at(rank)] = true, --left;
    } else if (place == Place::own) {
      others.push_back(rank);
    }
  }
  const auto take = [&](std::int32_t n, const Floats& by) {
    std::sort(others.begin(), others.end(), [&](std::int32_t a, std::int32_t b) {
      return std::tuple(descending(by[at(a)]), a) < std::tuple(descending(by[at(b)]), b);
    });
    n = std::clamp(n, 0, static_cast<std::int32_t>(others.size()));
    for (std::int32_t i = 0; i < n; ++i) { keep[at(others[at(i)])] = true, --left; }
    others.erase(others.begin(), others.begin() + n);
  };
  if (first_stage >= 0) {
    take(std::min(first_stage - (live - (cut.end - cut.begin)), left), scores);
  }
  take(left, first_stage >= 0 ? second : scores);
  return keep;
}

/// A head that shares a budget with others.
struct Sharer {
  struct Candidate {
    float score;
    std::int32_t position;
  };
  std::vector<Candidate> candidates;
  std::int32_t fixed = 0, budget = 0;  // protected rows; rows that it would keep alone
};

/// Rows that each of the heads keeps (Ada-KV).
inline Ints shared_rows(const AdaptiveParams& params, const std::vector<Sharer>& heads) {
  std::vector<std::tuple<double, std::int32_t, std::size_t>> all;  // best first
  std::vector<double> due;
  Ints rows, room;
  std::int32_t total = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    for (const auto& c : heads[h].candidates) {
      all.emplace_back(descending(c.score), c.position, h);
    }
    total += heads[h].budget - heads[h].fixed;
    rows.push_back(heads[h].fixed);
    room.push_back(static_cast<std::int32_t>(heads[h].candidates.size()));
  }
  std::sort(all.begin(), all.end());
  std::int32_t left = std::clamp(total, 0, static_cast<std::int32_t>(all.size()));
  if (params.form == AdaptiveForm::safeguard) {
    Ints safe;  // the best rows of each head, as long as there is room
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const auto own = static_cast<std::int32_t>(heads[h].budget * params.safeguard);
      safe.push_back(std::clamp(std::min(own - heads[h].fixed, room[h]), 0, left));
      left -= safe.back();
    }
    for (const auto& [score, position, h] : all) {
      std::int32_t& from = safe[h] > 0 ? safe[h] : left;
      if (from > 0) { --from, ++rows[h]; }
    }
    return rows;
  }
  const bool rounded = params.form == AdaptiveForm::floor_rounded;
  std::vector<double> won(heads.size(), 0.0);
  for (std::int32_t i = 0; i < left; ++i) { won[std::get<2>(all[at(i)])] += 1; }
  const auto give = [&](std::size_t h, std::int32_t n) {
    rows[h] += n, room[h] -= n, due[h] -= n, left -= n;
  };
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const double equal = std::max(0, heads[h].budget - heads[h].fixed) * params.safeguard;
    due.push_back(won[h] * (1 - params.safeguard) + (rounded ? std::floor(equal) : equal));
    const double n = rounded ? std::nearbyint(due[h]) : std::min<double>(std::floor(due[h]), left);
    give(h, std::min(static_cast<std::int32_t>(n), room[h]));
  }
  while (!rounded && left > 0) {  // by largest remainder
    std::size_t next = heads.size();
    for (std::size_t h = 0; h < heads.size(); ++h) {
      if (room[h] > 0 && (next == heads.size() || due[h] > due[next])) { next = h; }
    }
    give(next, 1);
  }
  return rows;
}

/// Rows of a table on its pages: the first page begins with `first` rows of padding.
struct PageRows {
  std::int32_t live = 0, first = 0, size = 1;
  std::int32_t pages() const { return pages_for(live + first, size); }
  std::int32_t begin(std::int32_t p) const { return std::max(0, p * size - first); }
  std::int32_t end(std::int32_t p) const { return std::clamp((p + 1) * size - first, 0, live); }
};

// A probability as a whole number of 2^-40.
inline double exact_part(float x) {
  return std::nearbyint(std::clamp(static_cast<double>(x), 0.0, 1.0) * 0x1p40);
}

/// Scores of pages from one head's scores of rows.
inline Floats scores_of_pages(const PageScoreParams& params, Floats rows, const PageRows& on) {
  float lowest = 0, largest = 0;
  double total = 0, parts = 0;
  for (const float x : rows) {
    if (!std::isfinite(x)) { continue; }
    lowest = std::min(lowest, x), largest = std::max(largest, std::abs(x));
    total += static_cast<double>(std::abs(x));
  }
  for (float& x : rows) {
    if (std::isfinite(x) && largest > 0) { parts += exact_part(std::abs(x) / largest); }
    if (is_lowest(x)) { x = lowest; }
  }
  double factor = 1;
  if (params.norm == HeadNorm::sum && total > 0) {
    factor =
        params.sums == Sums::floating ? 1 / total : 0x1p40 / (static_cast<double>(largest) * parts);
  }
  Floats scores;
  for (std::int32_t p = 0; p < on.pages(); ++p) {
    Floats page(rows.begin() + on.begin(p), rows.begin() + std::max(on.begin(p), on.end(p)));
    std::sort(page.begin(), page.end(), std::greater<>());
    const auto n = static_cast<std::int32_t>(page.size());
    const std::int32_t m = params.reduction == PageReduction::max    ? std::min(n, 1)
                           : params.reduction == PageReduction::mean ? n
                                                                     : std::min(n, params.top_m);
    double sum = 0;
    for (std::int32_t i = 0; i < m; ++i) { sum += static_cast<double>(page[at(i)]); }
    scores.push_back(static_cast<float>(sum / std::max(1, m) * factor));
  }
  return scores;
}

/// Which pages stay: the protected ones and those that are not full, then the best that fit. `heads`: page scores of all that
/// share the set, one after the other.
inline std::vector<bool> kept_pages(const PageScoreParams& params,
                                    const std::vector<Floats>& heads,
                                    const PageRows& on,
                                    const Cut& cut) {
  std::vector<std::pair<double, std::int32_t>> others;  // best first
  std::vector<bool> keep;
  std::int32_t rows = 0;
  for (std::int32_t p = 0; p < on.pages(); ++p) {
    const std::int32_t n = on.end(p) - on.begin(p);
    keep.push_back(n < on.size || on.begin(p) < cut.begin || on.end(p) > cut.end);
    if (keep.back()) {
      rows += n;
      continue;
    }
    float score = heads.front()[at(p)];
    double parts = exact_part(score);
    for (std::size_t h = 1; h < heads.size(); ++h) {
      const float x = heads[h][at(p)];
      score = params.heads == Reduction::max ? std::max(score, x) : score + x;
      parts += exact_part(x);
    }
    if (params.sums == Sums::exact && params.heads != Reduction::max) {
      score = static_cast<float>(parts / 0x1p40);
    }
    others.emplace_back(descending(score), p);
  }
  std::sort(others.begin(), others.end());
  for (const auto& [score, p] : others) {
    rows += on.size;
    if (rows <= cut.keep) { keep[at(p)] = true; }
  }
  return keep;
}

}  // namespace kvtrim::random_test
