// SPDX-License-Identifier: Apache-2.0
#include "ranked_evictor.hpp"

#include <kvtrim/kvtrim.hpp>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

namespace parallel {

using namespace kvtrim;

namespace {

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

void require(Status status, const std::string& what) {
  if (status != Status::ok) throw std::runtime_error(what + ": " + std::string(to_string(status)));
}

// The score of each row for itself: what neighbours, and the window's own rows, do to it is known to all ranks together only.
WindowParams alone(WindowParams params) {
  params.kernel = 1;
  params.own_columns = true;
  return params;
}
AccumulateParams alone(const AccumulateParams& params) {
  return params;
}

}  // namespace

RankedEvictor::RankedEvictor(const engine::LlamaModel& model,
                             PagedCache& cache,
                             program::Evictor& evictor,
                             const engine::Split& split,
                             Driver* driver)
    : model_(&model), cache_(&cache), evictor_(&evictor), split_(split), driver_(driver) {}

void RankedEvictor::cut(std::span<const SequenceId> sequences,
                        const program::AnyPolicy& policy,
                        std::int32_t keep) {
  if (driver_ == nullptr) {
    for (const SequenceId s : sequences) evictor_->evict(policy, s, keep);
    return;
  }
  ++traffic_.cuts;
  std::visit(
      [&]<class P>(const P& p) {
        constexpr bool window = std::is_same_v<P, SnapKVSelector<>>;
        constexpr bool sums = std::is_same_v<P, HeavyHitter<>>;
        if constexpr (std::is_same_v<P, Full>) {
          return;
        } else if constexpr (window || sums || std::is_same_v<P, PageSelector<>>) {
          const RankSplit how = split_.by_heads() ? RankSplit::heads : RankSplit::rows;
          if (const auto why = why_not_over_ranks(p, how); !why.empty())
            throw std::invalid_argument(std::string(P::name) + " over ranks: " + std::string(why));
          agree(sequences, p, keep);
          if constexpr (!window && !sums) {
            if (p.page_scores().heads != Reduction::max)
              throw std::invalid_argument("page sets over ranks take heads=max");
            if (p.unit() != PageUnit::per_layer)
              throw std::invalid_argument("page sets over ranks take unit=layer");
            split_.by_heads() ? cut_common_pages(sequences, p, keep)
                              : cut_pages(sequences, p, keep);
          } else if (split_.by_context()) {
            cut_rows(sequences, p, keep);
          } else {  // each head chooses for itself, and none keeps more rows than another
            carry_out(sequences,
                      p,
                      [&](std::size_t i, const CacheView&) {
                        const std::int32_t slot = raw(sequences[i]);
                        Observation seen = evictor_->recorder().observation({&slot, 1});
                        seen.budgets = &keep, seen.budget_rows = {0, 0, 0};
                        return seen;
                      },
                      {});
          }
        } else {
          throw std::invalid_argument("this example has no " + std::string(P::name) +
                                      " over ranks; known are snapkv, h2o, page");
        }
      },
      policy);
}

template <class Run>
void RankedEvictor::drive(Run& run) {
  while (const Round round = run.next()) {
    ++traffic_.rounds;
    const auto ranks = static_cast<std::int64_t>(driver_->rank().count);
    const auto bytes = static_cast<std::int64_t>(round.words.size_bytes());
    traffic_.bytes += round.kind == RoundKind::gather ? bytes / ranks : bytes;
    driver_->exchange(round);
  }
}

std::int32_t RankedEvictor::rows(SequenceId s) {
  auto word = static_cast<std::uint64_t>(cache_->live_rows(s));
  if (driver_ != nullptr && split_.by_context()) {
    OneRound sum(RoundKind::sum, {&word, 1});
    drive(sum);
  }
  return static_cast<std::int32_t>(word);
}

template <class P>
void RankedEvictor::agree(std::span<const SequenceId> sequences,
                          const P& policy,
                          std::int32_t keep) {
  const engine::LlamaShape& shape = model_->shape();
  const Rank rank = driver_->rank();
  const std::int32_t parts = split_.by_heads() ? shape.kv_heads : shape.layers;
  std::vector<std::int64_t> alike{keep};
  std::vector<std::uint64_t> rows;
  for (const SequenceId s : sequences) {
    alike.push_back(raw(cache_->next_position(s)));
    rows.push_back(static_cast<std::uint64_t>(cache_->live_rows(s)));
    if (split_.by_heads()) alike.push_back(cache_->live_rows(s));
  }
  HeaderAgreement header(rank,
                         {.split = split_.by_heads() ? RankSplit::heads : RankSplit::rows,
                          .ranks = split_.ranks->size(),
                          .policy = policy_hash(policy),
                          .layers = shape.layers,
                          .kv_heads = shape.kv_heads * (split_.by_heads() ? rank.count : 1),
                          .sequences = static_cast<std::int32_t>(sequences.size()),
                          .budgets = budgets_hash(alike),
                          .first_part = split_.by_heads() ? rank.index * parts : 0,
                          .parts = parts});
  drive(header);
  if (header.status() != Status::ok) throw std::runtime_error(header.message());
  if (split_.by_context()) {
    OneRound sum(RoundKind::sum, rows);
    drive(sum);
  }
  live_.assign(rows.begin(), rows.end());
}

template <class Params>
void RankedEvictor::score(std::span<const SequenceId> sequences, const Params& params) {
  using Scorer = detail::ScorerFor<Params>;
  const Scorer scorer(alone(params));
  const engine::LlamaShape& shape = model_->shape();
  pairs_.resize(sequences.size() * at(shape.layers * shape.kv_heads));
  auto pair = pairs_.begin();
  for (const SequenceId s : sequences) {
    const std::int32_t slot = raw(s);
    const CacheView view = cache_->view(s);
    const Observation seen = evictor_->recorder().observation({&slot, 1});
    require(scorer.check(view, seen), "scores");
    scratch_.resize(std::max(scratch_.size(), scorer.scratch_bytes(plan_shape(view, seen))));
    for (std::int32_t i = 0; i < shape.layers * shape.kv_heads; ++i, ++pair) {
      const HeadRef head{
          view, SequenceId{0}, LayerId{i / shape.kv_heads}, HeadId{i % shape.kv_heads}};
      pair->scores.resize(at(head.live_rows()));
      pair->positions.resize(pair->scores.size());
      scorer.score(head, seen, scratch_, pair->scores);
      for (std::int32_t r = 0; r < head.live_rows(); ++r) pair->positions[at(r)] = head.position(r);
    }
  }
  if constexpr (std::is_same_v<Params, WindowParams>) {
    // The window's own rows are the last ones on all ranks together: they always stay, so none is missing among them.
    const auto is_own = [&](const Pair& p, std::size_t r) {
      const SequenceId s = sequences[at(&p - pairs_.data()) / at(shape.layers * shape.kv_heads)];
      return raw(p.positions[r]) >= raw(cache_->next_position(s)) - params.window;
    };
    std::vector<RankedScores> given;
    std::int32_t longest = 0;
    for (const SequenceId s : sequences) longest = std::max(longest, raw(cache_->next_position(s)));
    for (const Pair& p : pairs_) {
      std::size_t n = p.scores.size();
      while (params.columns == PoolColumns::candidates && n > 0 && is_own(p, n - 1)) --n;
      given.push_back({std::span(p.scores).first(n), std::span(p.positions).first(n)});
    }
    const Placement placement(Spread::page_striped, driver_->rank().count, longest, split_.stripe);
    PooledScores pooled(driver_->rank(), placement, longest, params.pooling, params.kernel, given);
    drive(pooled);
    std::vector<float> out;
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      Pair& p = pairs_[i];
      out.resize(given[i].scores.size());
      pooled.pooled(i, out);
      std::copy(out.begin(), out.end(), p.scores.begin());
      for (std::size_t r = p.scores.size(); r > 0 && is_own(p, r - 1); --r) p.scores[r - 1] = 0;
    }
  }
}

template <class P>
void RankedEvictor::cut_rows(std::span<const SequenceId> sequences,
                             const P& policy,
                             std::int32_t keep) {
  const engine::LlamaShape& shape = model_->shape();
  const std::int32_t heads = shape.layers * shape.kv_heads;
  std::vector<RankedDemand> demands;
  bool any = false;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    for (std::int32_t h = 0; h < heads; ++h) {
      DemandInput in;
      in.state =
          cache_->state(sequences[i], LayerId{h / shape.kv_heads}, HeadId{h % shape.kv_heads});
      in.state.live_rows = in.live = live_[i];
      in.page_size = cache_->params().page_size;
      in.budget = keep;
      in.layer = LayerId{h / shape.kv_heads};
      in.layers = shape.layers;
      const Demand demand = policy.demand(in);
      demands.push_back({live_[i], in.state.next_position, demand.keep, demand.protection});
      any = any || demand.keep < live_[i];
    }
  }
  if (!any) return;
  score(sequences, policy.scorer());
  std::vector<std::vector<std::uint64_t>> keys(pairs_.size());
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    for (std::size_t r = 0; r < pairs_[i].scores.size(); ++r)
      keys[i].push_back(row_key(pairs_[i].scores[r], pairs_[i].positions[r]));
  }
  const std::vector<std::span<const std::uint64_t>> spans(keys.begin(), keys.end());
  ContextTopK top(demands, spans);
  drive(top);
  if (!usable(top.status())) require(top.status(), "rows over ranks");

  std::optional<KeptRows> kept;
  carry_out(
      sequences,
      KeptRows::policy(),
      [&](std::size_t i, const CacheView& view) {
        kept.emplace(view, [&](const HeadRef& head, std::int32_t row) {
          const std::size_t pair =
              i * at(heads) + at(raw(head.layer) * shape.kv_heads + raw(head.head));
          return top.keeps(pair, keys[pair][at(row)]);
        });
        return kept->observation();
      },
      top.fingerprint());
}

template <class P>
void RankedEvictor::cut_pages(std::span<const SequenceId> sequences,
                              const P& policy,
                              std::int32_t keep) {
  const engine::LlamaShape& shape = model_->shape();
  const std::int32_t page_size = cache_->params().page_size;
  std::vector<RankedDemand> demands;
  bool any = false;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    DemandInput in;
    in.live = live_[i];
    in.page_size = page_size;
    in.budget = keep;
    const Demand demand = policy.demand(in);
    demands.insert(
        demands.end(),
        at(shape.layers),
        {live_[i], raw(cache_->next_position(sequences[i])), demand.keep, demand.protection});
    any = any || demand.keep < live_[i];
  }
  if (!any) return;
  score(sequences, policy.scorer());

  // What makes heads comparable is a sum over the rows of all ranks.
  const PageScoreParams params = policy.page_scores();
  std::vector<std::span<const float>> rows;
  for (const Pair& p : pairs_) rows.emplace_back(p.scores);
  PageNormRounds norms(params, rows);
  drive(norms);
  std::vector<std::vector<RankedPage>> sets(sequences.size() * at(shape.layers));
  std::vector<float> own, scratch(at(page_size));
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    const auto& positions = pairs_[i].positions;
    std::vector<RankedPage>& set = sets[i / at(shape.kv_heads)];
    own.resize((positions.size() + at(page_size) - 1) / at(page_size));
    page_scores(params, rows[i], 0, page_size, norms.of(i), scratch, own);
    for (std::size_t page = set.size(); page < own.size(); ++page) {  // of the layer's first head
      const std::size_t begin = page * at(page_size);
      const std::size_t end = std::min(positions.size(), begin + at(page_size));
      set.push_back({own[page],
                     positions[begin],
                     positions[end - 1],
                     static_cast<std::int32_t>(end - begin)});
    }
    for (std::size_t page = 0; page < own.size(); ++page)
      set[page].score = std::max(set[page].score, own[page]);
  }
  std::vector<std::span<const RankedPage>> spans(sets.begin(), sets.end());
  std::vector<std::span<const Position>> positions;
  for (std::size_t u = 0; u < sets.size(); ++u)
    positions.emplace_back(pairs_[u * at(shape.kv_heads)].positions);
  ContextPages pages(demands, spans, positions, page_size);
  drive(pages);
  if (!usable(pages.status())) require(pages.status(), "pages over ranks");

  std::optional<KeptRows> kept;
  carry_out(sequences,
            KeptRows::policy(),
            [&](std::size_t i, const CacheView& view) {
              kept.emplace(view, [&](const HeadRef& head, std::int32_t row) {
                const std::size_t set = i * at(shape.layers) + at(raw(head.layer));
                return pages.keeps(set, sets[set][at(row / page_size)]);
              });
              return kept->observation();
            },
            pages.fingerprint(),
            {.removal = Removal::drop_pages});
}

template <class P>
void RankedEvictor::cut_common_pages(std::span<const SequenceId> sequences,
                                     const P& policy,
                                     std::int32_t keep) {
  const engine::LlamaShape& shape = model_->shape();
  const auto pages_of = [&](std::size_t i) {
    return at(pages_for(live_[i], cache_->params().page_size));
  };
  if (std::ranges::all_of(live_, [&](std::int32_t live) { return live <= keep; })) return;
  std::vector<float> scores;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const std::int32_t slot = raw(sequences[i]);
    const CacheView view = cache_->view(sequences[i]);
    const Observation seen = evictor_->recorder().observation({&slot, 1});
    scratch_.resize(
        std::max(scratch_.size(), page_accumulate_bytes(policy, plan_shape(view, seen))));
    const std::size_t begin = scores.size();
    scores.resize(begin + at(shape.layers) * pages_of(i));
    const PageScoreArray sums{scores.data() + begin, 0, static_cast<std::int64_t>(pages_of(i))};
    for (std::int32_t l = 0; l < shape.layers; ++l)
      require(accumulate_page_scores(policy, view, LayerId{l}, seen, sums, scratch_),
              "page scores");
  }
  // A page counts as the best of a layer's heads, on whatever rank.
  std::vector<std::uint64_t> words(scores.size());
  score_words(scores, words);
  OneRound best(RoundKind::max, words);
  drive(best);
  scores_of_words(words, scores);
  std::size_t begin = 0;
  carry_out(sequences,
            policy,
            [&](std::size_t i, const CacheView&) {
              Observation seen;
              seen.page_scores = {scores.data() + begin, 0, static_cast<std::int64_t>(pages_of(i))};
              seen.budgets = &keep, seen.budget_rows = {0, 0, 0};
              begin += at(shape.layers) * pages_of(i);
              return seen;
            },
            {});
}

template <class P>
void RankedEvictor::carry_out(std::span<const SequenceId> sequences,
                              const P& policy,
                              const Seen& seen,
                              std::uint64_t fingerprint,
                              const PlanOptions& options) {
  plans_.resize(std::max(plans_.size(), sequences.size()));
  std::vector<PlanRef> plans;
  std::size_t refused = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const CacheView view = cache_->view(sequences[i]);
    const Observation obs = seen(i, view);
    plans_[i].resize(
        std::max(plans_[i].size(), plan_workspace_bytes(policy, plan_shape(view, obs))));
    plans.push_back(plan(policy, view, obs, plans_[i], options));
    if (split_.by_heads())
      fingerprint =
          detail::mixed(fingerprint, plan_fingerprint(plans[i], RankSplit::heads, PagePolicy<P>));
    if (!usable(plans[i].status())) refused = i;
  }
  PlanAgreement agreement(driver_->rank(), plans[refused], fingerprint);
  drive(agreement);
  if (!usable(agreement.status())) throw std::runtime_error(agreement.message());
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const CacheView view = cache_->view(sequences[i]);
    require(apply(plans[i], view, Rerotator{}), "apply");
    auto sink = cache_->sink_for(view);
    if (const Report report = commit(plans[i], view, sink); !usable(report.status))
      require(report.status, "commit");
  }
}

}  // namespace parallel
