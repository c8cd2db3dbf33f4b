// SPDX-License-Identifier: Apache-2.0
// Moves of keys and values when 5 to 50 % of a layer's rows stay, compared with a loop of memcpy over the same runs of rows
// with precomputed addresses, and with one contiguous memcpy of as many bytes.

#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/score/external.hpp>

#include "../engine_cache.hpp"
#include "../harness.hpp"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace kvtrim_bench {
namespace {

/// Keeps the best rows by ready-made scores.
struct Best {
  static constexpr std::string_view name = "best";
  std::int32_t keep = 0;
  [[nodiscard]] Demand demand(const DemandInput& in) const noexcept {
    return {std::min(keep, in.live), {0, 32}, 32, Status::ok};
  }
  [[nodiscard]] Removal removal() const noexcept { return Removal::stable_pack; }
  [[nodiscard]] ExternalScorer scorer() const noexcept { return {}; }
};

struct Copy {
  const std::byte* from;
  std::byte* to;
  std::size_t bytes;
};

// What apply will copy: rows that are consecutive in memory, before and after, form one run.
std::vector<Copy> runs_of(const PlanView& plan, const CacheView& view) {
  std::vector<Copy> runs;
  const SequenceId s{0};
  for (std::int32_t h = 0; h < view.kv_heads; ++h) {
    for (const Plane* plane : {&view.k, &view.v}) {
      const std::size_t first = runs.size();
      const auto pages = plan.k_pages(s, 0);
      detail::for_each_target(
          plan.kept_list(s, LayerId{0}, HeadId{h}),
          plan.table(s, 0).removal,
          [&](std::int32_t from, std::int32_t to, std::int32_t) {
            const std::byte* const source =
                plane->row(LayerId{0},
                           view.k_page(s, LayerId{0}, HeadId{h}, from / view.page_size),
                           HeadId{h},
                           Slot{from % view.page_size});
            std::byte* const target =
                plane->row(LayerId{0},
                           pages[static_cast<std::size_t>(to / view.page_size)],
                           HeadId{h},
                           Slot{to % view.page_size});
            if (source == target) { return; }
            const auto bytes = static_cast<std::size_t>(plane->row_bytes());
            // A run never overlaps its own target, so memcpy will do.
            if (runs.size() > first && runs.back().from + runs.back().bytes == source &&
                runs.back().to + runs.back().bytes == target &&
                (source + bytes <= runs.back().to || source - runs.back().bytes >= target + bytes ||
                 target + bytes <= runs.back().from)) {
              runs.back().bytes += bytes;
            } else {
              runs.push_back({source, target, bytes});
            }
          });
    }
  }
  return runs;
}

void move(
    benchmark::State& state, const Shape& shape, Removal way, std::int32_t percent, bool planes) {
  EngineCache cache(shape, {.positions = planes});
  const CacheView view = cache.view();
  const auto keep = static_cast<std::int32_t>(std::int64_t{shape.tokens} * percent / 100);
  std::vector<float> scores = normal_numbers(
      static_cast<std::size_t>(shape.kv_heads) * static_cast<std::size_t>(shape.tokens), 6);
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, shape.kv_heads, shape.tokens);
  const Best policy{keep};
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  PlanOptions options;
  options.removal = way;
  const auto make = [&] {
    cache.reset();
    return plan(policy, view, obs, workspace, options);
  };
  PlanRef made = make();
  const std::vector<Copy> runs = runs_of(made, view);
  double bytes = 0;
  for (const Copy& c : runs) { bytes += static_cast<double>(c.bytes); }
  if (made.status() != Status::ok || bytes != static_cast<double>(made.bytes_moved())) {
    state.SkipWithError("the plan is not the one that the loop copies");
    return;
  }
  const auto op = [&] {
    const Status done = apply(made, view);
    benchmark::DoNotOptimize(done);
  };
  const auto bound = [&] {
    for (const Copy& c : runs) { std::memcpy(c.to, c.from, c.bytes); }
  };
  const Pairs p = interleave([&] { made = make(); }, op, bound);
  report(state, p, {.items = static_cast<double>(keep) * shape.kv_heads, .bytes = 2 * bytes});
  // As many bytes in one piece, from cache memory to cache memory.
  const auto half = static_cast<std::size_t>(std::min(bytes, cache.key_bytes() / 2));
  std::vector<double> whole;
  for (int i = 0; i < 5; ++i) {
    whole.push_back(seconds_of([&] { std::memcpy(view.k.base, view.v.base, half); }));
  }
  state.counters["of_one_memcpy"] = quantile(whole, 0.5) * bytes / static_cast<double>(half) / p.op;
  state.counters["runs"] = static_cast<double>(runs.size());
}

void add(const Shape& shape, Removal way, std::int32_t percent, bool planes = false) {
  line("evict/apply/" + std::string(to_string(way)) + shape.axes() +
           "/kept:" + std::to_string(percent) + (planes ? "/positions" : ""),
       [=](benchmark::State& state) { move(state, shape, way, percent, planes); });
}

const bool registered = [] {
  const Shape base;
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
    const bool planes = way == Removal::fill_holes;  // which needs positions to tell the order
    if (!planes) { add(base, way, 25); }
    add(base, way, 25, true);
    for (const std::int32_t percent : {5, 50}) { add(base, way, percent, planes); }
    Shape s = base;
    s.dtype = DType::bf16;
    add(s, way, 25, planes);
    s = base;
    s.tokens = 4096;
    add(s, way, 25, planes);
    s = base;
    s.page_size = 128;
    add(s, way, 25, planes);
  }
  return true;
}();

}  // namespace
}  // namespace kvtrim_bench
