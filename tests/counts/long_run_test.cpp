// SPDX-License-Identifier: Apache-2.0
// Decode steps without end on a small cache, with forks that live for a while: after any number of them scores are those that
// double gives, keys those that a fresh rotation gives, every page is named as often as it is counted, and a step costs what
// it cost at first. (Work is counted, so this is where the library is compiled with its counters.)
#define KVTRIM_COUNTS

#include <kvtrim/evict/evict.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "catch.hpp"
#include "support/long_steps.hpp"
#include "support/random.hpp"
#include "support/rope_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

using namespace kvtrim;
using test::at;

namespace {

constexpr std::int32_t kv_heads = 2, group = 2, dim = 8, page_size = 4, sequences = 2;
constexpr std::int32_t life = 400,
                       birth = 1'000;  // steps that a fork lives, and from one to the next

struct Kept {
  std::int32_t position;
  double score;
};

class LongRun {
 public:
  LongRun(DType dtype, bool scores)
      : cache_({.pages = 60,
                .page_size = page_size,
                .kv_heads = kv_heads,
                .key_dim = dim,
                .dtype = dtype,
                .max_sequences = sequences,
                .max_rows = 64,
                .scores = scores,
                .unrotated_keys = dtype != DType::f32}),
        frequencies_(rope_.frequencies(1)),
        rerotator_(cache_.view(), test::rope_of(rope_, frequencies_), PositionMode::in_cache),
        rows_(at(sequences * kv_heads)),
        queries_(at(kv_heads * group * dim)),
        lse_(at(kv_heads * group)),
        scratch_(column_sums_scratch_bytes(dim)) {
    REQUIRE(cache_.try_create() == SequenceId{0});
  }

  // What does not hold is counted: a million CHECKs would take longer than the steps.
  template <class P>
  void decode(const P& policy, std::int32_t steps) {
    for (std::int32_t step = 0; step < steps; ++step) {
      if (step % birth == birth - 1) { fork(policy.removal() == Removal::drop_pages); }
      if (step % birth == life && step > birth) { kill(step / birth % 2); }
      detail::work_counts = {};
      for (std::int32_t s = 0; s < sequences; ++s) {
        if (cache_.alive(SequenceId{s})) { append(s); }
      }
      for (std::int32_t s = 0; cache_.params().scores && s < sequences; ++s) {
        if (cache_.alive(SequenceId{s})) { attend(s); }
      }
      const Report report = evict(policy);
      // A fork's first evictions copy the pages that it shares, and it may die with a hole that its step had filled.
      if (step % birth > life + 50 && step % birth < birth - 1) { cost(report); }
      if (step % 997 == 0 || step + 1 == steps) { compare(); }
    }
    CHECK(refused_ == 0);
    CHECK(misplaced_ == 0);
    CHECK(other_costs_ == 0);
    CHECK(worst_score_ <= 1e-6);
    CHECK(worst_key_ <= 1);
    CHECK(worst_key_ > 0);
    CHECK((worst_score_ > 0) == cache_.params().scores);
    CHECK(lost_pages_ == 0);
    CHECK(forks_ == steps / birth);
    CHECK(costs_.size() == page_size);
    for (std::int32_t s = 0; s < sequences; ++s) {
      if (cache_.alive(SequenceId{s})) { cache_.destroy(SequenceId{s}); }
    }
    CHECK(cache_.pool().available() == cache_.params().pages);
  }

 private:
  std::vector<Kept>& rows(std::int32_t s, std::int32_t h) { return rows_[at(s * kv_heads + h)]; }
  static std::vector<double> plain(std::int32_t position, std::int32_t h) {
    test::Random random(static_cast<std::uint64_t>(position * kv_heads + h));
    std::vector<double> key(dim);
    for (double& x : key) { x = static_cast<double>(random.below(256) - 128) / 128; }
    return key;  // exact in bf16
  }

  // Pages that are dropped cannot be copied: where keys turn in them, the fork gets pages of its own at once.
  void fork(bool own_pages) {
    const SequenceId from{cache_.alive(SequenceId{0}) ? 0 : 1};
    const auto made = cache_.try_fork(from);
    refused_ += made ? 0 : 1;
    if (!made) { return; }
    ++forks_, shares_ = !own_pages;
    if (own_pages) { refused_ += cache_.try_make_private(*made) == Status::ok ? 0 : 1; }
    for (std::int32_t h = 0; h < kv_heads; ++h) { rows(raw(*made), h) = rows(raw(from), h); }
  }
  // The elder goes as often as the younger.
  void kill(std::int32_t s) {
    cache_.destroy(SequenceId{s});
    for (std::int32_t h = 0; h < kv_heads; ++h) { rows(s, h).clear(); }
  }
  void append(std::int32_t s) {
    const SequenceId id{s};
    refused_ += cache_.try_extend(id, 1) == Status::ok ? 0 : 1;
    const std::int32_t position = raw(cache_.next_position(id)) - 1;
    std::vector<float> keys, before;
    for (std::int32_t h = 0; h < kv_heads; ++h) {
      const auto key = plain(position, h);
      const auto turned = rope_.rotated(0, key, cache_.next_rope_position(id) - 1);
      before.insert(before.end(), key.begin(), key.end());
      keys.insert(keys.end(), turned.begin(), turned.end());
      rows(s, h).push_back({position, 0});
    }
    const bool source = cache_.params().unrotated_keys;
    refused_ +=
        cache_.write(
            id, LayerId{0}, {keys.data()}, {before.data()}, {source ? before.data() : nullptr}) ==
                Status::ok
            ? 0
            : 1;
  }
  // One query of each head: its probabilities are added, in the planes and in double.
  void attend(std::int32_t s) {
    for (float& x : queries_) { x = 2 * random_.uniform(); }
    const CacheView view = cache_.view();
    const SequenceId id{s};
    for (std::int32_t h = 0; h < kv_heads; ++h) {
      std::vector<Kept>& live = rows(s, h);
      const auto table = rows_by_position(s, h);
      for (std::int32_t g = h * group; g < (h + 1) * group; ++g) {
        std::vector<double> weights;
        double sum = 0;
        for (const Kept& row : live) {
          const auto* const key = reinterpret_cast<const float*>(
              view.key(id, LayerId{0}, HeadId{h}, table.at(row.position)));
          double dot = 0;
          for (std::int32_t d = 0; d < dim; ++d) {
            dot += static_cast<double>(key[d]) * static_cast<double>(queries_[at(g * dim + d)]);
          }
          sum += weights.emplace_back(std::exp(dot / std::sqrt(static_cast<double>(dim))));
        }
        for (std::size_t i = 0; i < live.size(); ++i) { live[i].score += weights[i] / sum / group; }
        lse_[at(g)] = static_cast<float>(std::log(sum));
      }
    }
    QueryBlock block{.data = queries_.data(), .query_heads = kv_heads * group, .rows = 1};
    block.row_stride = block.head_stride = dim;
    block.lse = lse_.data(), block.lse_head_stride = 1;
    for (std::int32_t h = 0; h < kv_heads; ++h) {
      accumulate_column_sums({}, {view, id, LayerId{0}, HeadId{h}}, block, LayerId{0}, scratch_);
    }
  }
  template <class P>
  Report evict(const P& policy) {
    const CacheView view = cache_.view();
    std::vector<PageId> spares;  // a copy of each shared page may be needed
    while (spares.size() < 20 && shares_) { spares.push_back(cache_.pool().try_acquire().value()); }
    PlanOptions options{.shared = SharedPages::copy, .rerotator = &rerotator_};
    options.spare_pages = spares;
    workspace_.resize(plan_workspace_bytes(policy, plan_shape(view)));
    const PlanRef made = plan(policy, view, {}, workspace_, options);
    refused_ += made.status() == Status::ok ? 0 : 1;
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (std::int32_t h = 0; h < kv_heads && made.table(SequenceId{s}, 0).evicts; ++h) {
        for (const Position p : made.evicted(SequenceId{s}, LayerId{0}, HeadId{h})) {
          refused_ +=
              std::erase_if(rows(s, h), [&](const Kept& k) { return k.position == raw(p); }) == 1
                  ? 0
                  : 1;
        }
      }
    }
    refused_ += apply(made, view, rerotator_) == Status::ok ? 0 : 1;
    auto sink = cache_.sink_for(view);
    const Report report = commit(made, view, sink);
    refused_ += report.status == Status::ok ? 0 : 1;
    if (shares_) {
      const auto named = names();
      for (const PageId page : spares) {
        if (!named.contains(raw(page))) { cache_.release(page); }
      }
      shares_ =
          std::any_of(named.begin(), named.end(), [](const auto& page) { return page.second > 1; });
    }
    return report;
  }
  // How often tables name each page.
  std::map<std::int32_t, std::int32_t> names() const {
    std::map<std::int32_t, std::int32_t> named;
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (const std::int32_t page : cache_.page_table(SequenceId{s})) {
        if (page >= 0) { ++named[page]; }
      }
    }
    return named;
  }
  std::map<std::int32_t, std::int32_t> rows_by_position(std::int32_t s, std::int32_t h) {
    const SequenceState& state = cache_.state(SequenceId{s});
    std::map<std::int32_t, std::int32_t> table;
    for (std::int32_t r = 0; r < state.extent(); ++r) {
      if (r == state.append_row) { continue; }
      table[raw(cache_.view().position(SequenceId{s}, LayerId{0}, HeadId{h}, r))] = r;
    }
    return table;
  }
  // What a step costs depends on how full the last page is, and on nothing else.
  void cost(const Report& report) {
    const SequenceId s{cache_.alive(SequenceId{0}) ? 0 : 1};
    const std::tuple now{detail::work_counts.rows_read,
                         detail::work_counts.product_flops,
                         report.evicted_rows,
                         report.status};
    const auto [first, fresh] = costs_.emplace(raw(cache_.next_position(s)) % page_size, now);
    other_costs_ += fresh || first->second == now ? 0 : 1;
    // At most a row of each head moves, or none where pages are dropped; a hole may be in a page of its own.
    other_costs_ += report.bytes_moved <= kv_heads * 2 * dim * 4 ? 0 : 1;
    const std::int32_t spare = cache_.pool().in_use() - pages_for(cache_.live_rows(s), page_size);
    other_costs_ += spare == 0 || spare == 1 ? 0 : 1;
  }
  void compare() {
    const CacheView view = cache_.view();
    const auto named = names();
    std::int32_t held = 0;
    for (std::int32_t page = 0; page < view.pages; ++page) {
      const auto it = named.find(page);
      lost_pages_ +=
          cache_.pool().ref_count(PageId{page}) == (it == named.end() ? 0 : it->second) ? 0 : 1;
      held += it == named.end() ? 0 : 1;
    }
    lost_pages_ += held + cache_.pool().available() == view.pages ? 0 : 1;
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (std::int32_t h = 0; h < kv_heads && cache_.alive(SequenceId{s}); ++h) {
        compare(view, SequenceId{s}, HeadId{h});
      }
    }
  }
  void compare(const CacheView& view, SequenceId s, HeadId h) {
    const auto table = rows_by_position(raw(s), raw(h));
    const std::vector<Kept>& live = rows(raw(s), raw(h));
    misplaced_ += table.size() == live.size() ? 0 : 1;
    for (std::size_t rank = 0; rank < live.size(); ++rank) {
      const auto it = table.find(live[rank].position);
      if (it == table.end()) {
        ++misplaced_;
        continue;
      }
      const std::int32_t r = it->second;
      const std::int32_t rope = view.rope_position(s, LayerId{0}, h, r);
      misplaced_ += rope == static_cast<std::int32_t>(rank) ? 0 : 1;
      const auto fresh = rope_.rotated(0, plain(live[rank].position, raw(h)), rope);
      const std::byte* const key = view.key(s, LayerId{0}, h, r);
      for (std::int32_t d = 0; d < dim; ++d) {
        const double x = fresh[at(d)];
        const double stored =
            static_cast<double>(load_element(key + d * element_bytes(view.k.dtype), view.k.dtype));
        // 1e-5, or one rounding of 8 or 11 bits.
        const double allowed = view.k.dtype == DType::f32   ? 1e-5
                               : view.k.dtype == DType::f16 ? std::abs(x) / 2048 + 1e-6
                                                            : std::abs(x) / 256 + 1e-6;
        worst_key_ = std::max(worst_key_, std::abs(stored - x) / allowed);
      }
      if (!view.score_sums) { continue; }
      const double score =
          static_cast<double>(view.score_sums.at<float>(s, LayerId{0}, h, r)) +
          static_cast<double>(view.score_compensations.at<float>(s, LayerId{0}, h, r));
      worst_score_ = std::max(worst_score_, std::abs(score - live[rank].score) / live[rank].score);
    }
  }

  using Cost = std::tuple<std::int64_t, std::int64_t, std::int64_t, Status>;
  test::RopeModel rope_{dim, 0, RopePairs::half_split};
  PagedCache cache_;
  std::vector<double> frequencies_;
  Rerotator rerotator_;
  std::vector<std::vector<Kept>> rows_;  // [sequences, kv_heads], by position
  std::vector<float> queries_, lse_;
  std::vector<std::byte> scratch_, workspace_;
  test::Random random_{3};
  std::map<std::int32_t, Cost> costs_;  // by how full the last page is
  std::int64_t refused_ = 0, misplaced_ = 0, other_costs_ = 0, lost_pages_ = 0;
  std::int32_t forks_ = 0;
  bool shares_ = false;  // pages
  double worst_score_ = 0, worst_key_ = 0;
};

constexpr std::int32_t few = 4'000;

void heavy(std::int32_t steps) {
  LongRun(DType::f32, true).decode(HeavyHitter({.heavy = 14, .recent = 8, .sinks = 2}), steps);
}
void streaming(std::int32_t steps) {
  LongRun(DType::f32, false).decode(StreamingSink({.sinks = 4, .recent = 20}), steps);
  LongRun(DType::bf16, false)
      .decode(StreamingSink<SinkForm::exact>({.sinks = 3, .recent = 21}), steps);
  LongRun(DType::f16, false).decode(StreamingSink({.sinks = 4, .recent = 20}), steps);
}

}  // namespace

TEST_CASE("long run: H2O's scores, keys, pages and costs are what they were", "[long_run]") {
  heavy(few);
}
TEST_CASE("long run: a stream's keys, pages and costs are what they were", "[long_run]") {
  streaming(few);
}
TEST_CASE("long run: H2O's are, after as many steps as one likes", "[long_run][slow]") {
  heavy(test::long_steps());
}
TEST_CASE("long run: a stream's are, after as many steps as one likes", "[long_run][slow]") {
  streaming(test::long_steps());
}
