// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an eviction over ranks that share the context exchanges: by formula, for any size, and counted on ranks that are
// simulated in one thread. The two must be equal.

#include <kvtrim/evict/plan.hpp>
#include <kvtrim/parallel/agreement.hpp>
#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/parallel/context_pages.hpp>
#include <kvtrim/parallel/context_top_k.hpp>
#include <kvtrim/parallel/lock_step.hpp>
#include <kvtrim/parallel/placement.hpp>
#include <kvtrim/parallel/pooled_scores.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvtrim_bench {

/// An eviction from one sequence of a model.
struct Eviction {
  std::int32_t ranks = 8;
  std::int64_t tokens = 1 << 17;  ///< live rows of a KV head, on all ranks
  std::int32_t layers = 80;
  std::int32_t kv_heads = 8;
  std::int32_t query_heads = 64;
  std::int32_t head_dim = 128;
  std::int32_t window =
      0;  ///< queries that vote, with the engine's LSE missing; 0: scores need no denominators
  std::int32_t kernel = 1;  ///< of the pooling
  kvtrim::Spread spread = kvtrim::Spread::contiguous;
  std::int32_t page_size = 16;
  bool pages = false;  ///< whole pages, one set for each layer
  bool later =
      false;  ///< rows went before, so that the borders of the protected range are looked for

  [[nodiscard]] std::int64_t pairs() const { return std::int64_t{layers} * kv_heads; }
  [[nodiscard]] std::int64_t selections() const { return pages ? layers : pairs(); }
  [[nodiscard]] std::int32_t next_position() const {
    return static_cast<std::int32_t>(later ? 2 * tokens : tokens);
  }
  [[nodiscard]] kvtrim::Placement placement() const {
    return {spread, ranks, next_position(), page_size};
  }
};

/// What one rank exchanges.
struct Exchange {
  std::int64_t rounds = 0;
  std::int64_t own = 0;  ///< bytes that it hands to its communicator
  std::int64_t received =
      0;  ///< bytes that it receives, where reductions and gathers go round a ring

  void reduce(std::int64_t words, std::int64_t ranks) {
    ++rounds;
    own += 8 * words;
    received += 2 * 8 * words * (ranks - 1) / ranks;
  }
  void gather(std::int64_t words, std::int64_t ranks) {
    ++rounds;
    own += 8 * words;
    received += 8 * words * (ranks - 1);
  }
};

/// The formula.
[[nodiscard]] inline Exchange exchange_of(const Eviction& e) {
  Exchange x;
  x.gather(11, e.ranks);  // HeaderAgreement
  if (e.window > 0) {     // WindowRounds: maxima, denominators
    const std::int64_t queries = std::int64_t{e.layers} * e.query_heads * e.window;
    x.reduce(queries, e.ranks);
    x.reduce(queries, e.ranks);
  }
  if (e.kernel > 1) {  // PooledScores: of each run its first and its last scores
    const std::int64_t runs = e.placement().runs_per_rank(e.next_position());
    x.gather(e.pairs() * runs * (1 + e.kernel / 2), e.ranks);
  }
  if (e.pages) x.reduce(e.pairs(), e.ranks);  // the heads' norms
  for (int i = 0; i < 4 && e.later; ++i) x.reduce(2 * e.selections() * 256, e.ranks);
  if (e.pages) x.reduce(2 * e.selections(), e.ranks);  // rows, and rows that stay anyway
  for (int i = 0; i < 8; ++i) x.reduce(e.selections() * 256, e.ranks);
  x.gather(3, e.ranks);  // PlanAgreement
  return x;
}

/// What the engine exchanges to decode one token over the same ranks, every rank having its query: an output and an LSE of each
/// query head, fp32, are reduced.
[[nodiscard]] inline Exchange decode_step_of(const Eviction& e) {
  Exchange x;
  const std::int64_t floats = std::int64_t{e.query_heads} * (e.head_dim + 1);
  for (std::int32_t l = 0; l < e.layers; ++l) x.reduce(floats / 2, e.ranks);  // 8 B: two floats
  return x;
}

/// Bytes of the window's queries, which the engine brings to every rank.
[[nodiscard]] inline std::int64_t query_bytes_of(const Eviction& e) {
  return std::int64_t{4} * e.layers * e.query_heads * e.window * e.head_dim;
}

/// Runs the algorithms themselves on simulated ranks, with random scores. Denominators are not among them: they need a cache.
///
/// \throws std::runtime_error if the ranks do not agree, or do not keep `keep` rows (or as many whole pages) of each set
/// \par Complexity
/// O(pairs * tokens) memory
[[nodiscard]] inline kvtrim::Traffic counted(const Eviction& e, std::int32_t keep) {
  using namespace kvtrim;
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const Placement placement = e.placement();
  const auto tokens = static_cast<std::int32_t>(e.tokens);
  Traffic traffic;
  const auto drive = [&](auto& runs) {
    if (drive_in_lock_step(std::span(runs), &traffic) != Status::ok)
      throw std::runtime_error("the ranks' rounds are not alike");
  };

  std::vector<std::vector<Position>> positions(at(e.ranks));
  for (std::int32_t t = 0; t < tokens; ++t) {
    const Position p{e.later ? t + t / e.page_size * e.page_size : t};
    positions[at(placement.owner(p))].push_back(p);
  }
  const std::int32_t next = e.next_position();
  std::mt19937 random(1);
  std::vector<std::vector<float>> scores(at(e.ranks * e.pairs()));  // [ranks, pairs]
  for (std::size_t i = 0; i < scores.size(); ++i) {
    scores[i].resize(positions[i / at(e.pairs())].size());
    for (float& x : scores[i]) x = static_cast<float>(random()) * 0x1p-32F;
  }
  const auto rank = [&](std::int32_t r) { return Rank{r, e.ranks}; };

  std::vector<HeaderAgreement> headers;
  for (std::int32_t r = 0; r < e.ranks; ++r)
    headers.emplace_back(rank(r), RankHeader{.split = RankSplit::rows, .ranks = e.ranks});
  drive(headers);
  if (headers[0].status() != Status::ok) throw std::runtime_error(headers[0].message());

  if (e.kernel > 1) {
    std::vector<PooledScores> pooled;
    for (std::int32_t r = 0; r < e.ranks; ++r) {
      std::vector<RankedScores> own;
      for (std::int64_t p = 0; p < e.pairs(); ++p)
        own.push_back({scores[at(r * e.pairs() + p)], positions[at(r)]});
      pooled.emplace_back(rank(r), placement, next, Pooling::max, e.kernel, own);
    }
    drive(pooled);
  }
  std::vector<std::vector<std::uint64_t>> words(at(e.ranks),
                                                std::vector<std::uint64_t>(at(e.pairs())));
  std::vector<OneRound> norms;
  for (auto& own : words) norms.emplace_back(RoundKind::sum, own);
  if (e.pages) drive(norms);

  const std::vector<RankedDemand> demands(at(e.selections()), {tokens, next, keep, {4, 32}});
  std::int64_t kept = 0;
  if (e.pages) {
    std::vector<std::vector<RankedPage>> pages(at(e.ranks));
    std::vector<ContextPages> runs;
    for (std::int32_t r = 0; r < e.ranks; ++r) {
      const auto& own = positions[at(r)];
      for (std::size_t i = 0; i < own.size(); i += at(e.page_size)) {
        const std::size_t end = std::min(own.size(), i + at(e.page_size));
        pages[at(r)].push_back({scores[at(r * e.pairs())][i],
                                own[i],
                                own[end - 1],
                                static_cast<std::int32_t>(end - i)});
      }
      runs.emplace_back(demands,
                        std::vector<std::span<const RankedPage>>(at(e.layers), pages[at(r)]),
                        std::vector<std::span<const Position>>(at(e.layers), own),
                        e.page_size);
    }
    drive(runs);
    for (std::int32_t r = 0; r < e.ranks; ++r) {
      for (const RankedPage& page : pages[at(r)])
        kept += runs[at(r)].keeps(0, page) ? page.rows : 0;
    }
    if (runs[0].status() != Status::ok || kept > keep || kept <= keep - e.page_size)
      throw std::runtime_error(std::to_string(kept) + " rows stay, not " + std::to_string(keep));
  } else {
    std::vector<std::vector<std::uint64_t>> keys(scores.size());
    std::vector<ContextTopK> runs;
    for (std::int32_t r = 0; r < e.ranks; ++r) {
      std::vector<std::span<const std::uint64_t>> own;
      for (std::int64_t p = 0; p < e.pairs(); ++p) {
        const std::size_t i = at(r * e.pairs() + p);
        for (std::size_t t = 0; t < scores[i].size(); ++t)
          keys[i].push_back(row_key(scores[i][t], positions[at(r)][t]));
        own.emplace_back(keys[i]);
      }
      runs.emplace_back(demands, own);
    }
    drive(runs);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      for (const std::uint64_t key : keys[i])
        kept += runs[i / at(e.pairs())].keeps(i % at(e.pairs()), key) ? 1 : 0;
    }
    if (runs[0].status() != Status::ok || kept != keep * e.pairs())
      throw std::runtime_error(std::to_string(kept) + " rows stay, not " +
                               std::to_string(keep * e.pairs()));
  }
  std::vector<PlanAgreement> plans;
  for (std::int32_t r = 0; r < e.ranks; ++r) plans.emplace_back(rank(r), PlanView{}, 1);
  drive(plans);
  return traffic;
}

}  // namespace kvtrim_bench
