// SPDX-License-Identifier: Apache-2.0
#pragma once

// Evictions of a model that is split over ranks. A policy is asked once for all ranks' rows together; what it chooses is then
// carried out by each rank as a plan of its own over its own cache.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/core/executor.hpp>
#include <kvtrim/evict/plan_options.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/parallel/communicator.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "llama_engine/llama.hpp"
#include "llama_engine/split.hpp"
#include "program/evictor.hpp"
#include "program/policy_spec.hpp"

namespace parallel {

/// Exchanges the rounds of one algorithm over all ranks, in whatever way.
/// \throws std::runtime_error if the ranks do not answer
class Driver {
 public:
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  virtual ~Driver() = default;
  [[nodiscard]] virtual kvtrim::Rank rank() const = 0;
  virtual void exchange(const kvtrim::Round& round) = 0;
};

/// What evictions handed to the transport.
struct Traffic {
  std::int64_t cuts = 0;
  std::int64_t rounds = 0;
  std::int64_t bytes = 0;
};

/// Cuts sequences of a split model as the policy cuts those of a whole one. Knows the policies of which the example's models
/// are cut: window scores (`snapkv`, `page`) and accumulated ones (`h2o`); the window's attention is that of the engine's LSE.
class RankedEvictor {
 public:
  /// All must outlive it.
  /// \param evictor  records what the policies need; slot s is sequence s
  /// \param driver   null: a whole model
  RankedEvictor(const engine::LlamaModel& model,
                kvtrim::PagedCache& cache,
                program::Evictor& evictor,
                const engine::Split& split,
                Driver* driver);

  /// Lets `policy` keep `keep` rows of each of the sequences, which have as many rows.
  /// \throws std::runtime_error if the library refuses, or the ranks do not agree; on all ranks, and nothing was changed
  /// \throws std::invalid_argument if the policy is none of those above, and the ranks share its choice
  void cut(std::span<const kvtrim::SequenceId> sequences,
           const program::AnyPolicy& policy,
           std::int32_t keep);

  /// Rows of a sequence on all ranks together. All ranks ask for it.
  [[nodiscard]] std::int32_t rows(kvtrim::SequenceId s);

  [[nodiscard]] const Traffic& traffic() const noexcept { return traffic_; }

 private:
  /// Rows of one (sequence, layer, KV head), or of one set of pages, that are on this rank.
  struct Pair {
    std::vector<float> scores;
    std::vector<kvtrim::Position> positions;
  };

  /// What a plan of sequence i, which the view shows, looks at.
  using Seen = std::function<kvtrim::Observation(std::size_t i, const kvtrim::CacheView& view)>;

  template <class P>
  void cut_rows(std::span<const kvtrim::SequenceId> sequences, const P& policy, std::int32_t keep);
  template <class P>
  void cut_pages(std::span<const kvtrim::SequenceId> sequences, const P& policy, std::int32_t keep);
  template <class P>
  void cut_common_pages(std::span<const kvtrim::SequenceId> sequences,
                        const P& policy,
                        std::int32_t keep);
  /// Compares what the ranks are about to do; afterwards `live_` holds all ranks' rows of each sequence.
  template <class P>
  void agree(std::span<const kvtrim::SequenceId> sequences, const P& policy, std::int32_t keep);
  template <class Params>
  void score(std::span<const kvtrim::SequenceId> sequences, const Params& params);
  /// Plans, compares with the other ranks, applies and commits: all sequences or none.
  template <class P>
  void carry_out(std::span<const kvtrim::SequenceId> sequences,
                 const P& policy,
                 const Seen& seen,
                 std::uint64_t fingerprint,
                 const kvtrim::PlanOptions& options = {});
  template <class Run>
  void drive(Run& run);

  const engine::LlamaModel* model_;
  kvtrim::PagedCache* cache_;
  program::Evictor* evictor_;
  engine::Split split_;
  Driver* driver_;
  Traffic traffic_;
  std::vector<std::int32_t> live_;
  std::vector<Pair> pairs_;  // [sequences, layers, KV heads]
  std::vector<std::byte> scratch_;
  std::vector<std::vector<std::byte>> plans_;
};

}  // namespace parallel
