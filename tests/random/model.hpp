// SPDX-License-Identifier: Apache-2.0
#pragma once

// The plain model of the random-operation test: rows in lists, what a policy demands said once more, and what a plan that is
// under way was made from.

#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "random/setup.hpp"
#include "support/by_score.hpp"
#include "support/instances.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvtrim::random_test {

struct Row {
  std::int32_t position, rope, tag;
  Key key;  // as it must stand in the cache
};
using Rows = std::vector<Row>;  // ascending by position

struct Sequence {
  bool alive = false;
  std::int32_t next = 0;
  std::vector<Rows> heads;             // [layers, heads]
  Ints next_rope;                      // [tables]
  std::int32_t step = 0;               // rows of the open step
  std::vector<bool> unwritten;         // [layers]
  std::vector<std::uint64_t> version;  // [tables]
  std::vector<bool> applied;           // [tables]
};

// What a policy demands, said once more.
struct Rule {
  enum Kind { by_score, heavy, exact, pages } kind = by_score;
  std::int32_t keep = 0, sinks = 0, recent = 0, interval = 1;
  Removal own = Removal::stable_pack;

  bool by_position() const { return kind == exact || kind == pages; }
  // Calls f(policy).
  template <class F>
  PlanRef with_policy(F&& f) const {
    switch (kind) {
      case by_score:
        return f(test::ByScore{keep, sinks, recent, own});
      case heavy:
        return f(HeavyHitter<>({.heavy = keep - sinks - recent,
                                .recent = recent,
                                .sinks = sinks,
                                .interval = interval,
                                .removal = own}));
      case exact:
        return f(StreamingSink<SinkForm::exact>({.sinks = sinks, .recent = recent}));
      case pages:
        break;
    }
    return f(StreamingSink<>({.sinks = sinks, .recent = recent}));
  }
};
struct Cut {
  bool evicts = false, over = false;
  std::int32_t keep = 0, begin = 0, end = 0;  // ranks [begin, end) compete
};
inline Cut cut_of(const Rule& rule, std::int32_t live, std::int32_t budget) {
  Cut cut;
  std::int32_t recent = rule.recent;
  cut.keep = budget >= 0 ? budget : rule.keep;
  if (rule.by_position()) {
    if (budget >= 0) { recent = std::max(0, budget - rule.sinks); }
    cut.keep = budget >= 0 && budget < rule.sinks ? budget : rule.sinks + recent;
  }
  if (live - cut.keep < rule.interval) { return cut; }
  cut.begin = std::min(rule.sinks, live);
  cut.end = live - std::min(recent, live - cut.begin);
  const std::int32_t fixed = live - (cut.end - cut.begin);
  cut.over = cut.keep < fixed;
  cut.keep = std::max(cut.keep, fixed);
  cut.evicts = cut.keep < live;
  return cut;
}

// A plan that is under way.
struct Pending {
  struct Part {  // of a table
    bool evicts = false, ended = false;
    std::int32_t live = 0;
    std::vector<std::uint64_t> signature;
    std::vector<Ints> gone;  // ranks, of each head that it serves
  };
  std::int32_t first = -1;  // sequence; -1: all
  CacheView view;
  std::vector<std::byte> workspace;
  PlanRef plan;
  std::optional<Plan> copy;
  const Rerotator* rerotator = nullptr;
  std::vector<PageId> spares;
  std::vector<Part> parts;
  bool applied = false;
};

// An operation, for those who must find out what went wrong.
struct Done {
  const char* what;
  std::int32_t s, a;
  Status status;
  std::string words() const {
    return std::string(what) + " sequence " + std::to_string(s) + " (" + std::to_string(a) +
           "): " + std::string(to_string(status));
  }
};

}  // namespace kvtrim::random_test
