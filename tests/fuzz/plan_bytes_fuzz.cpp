// SPDX-License-Identifier: Apache-2.0
// libFuzzer: a plan's bytes, changed on their way, against the cache they are for. Whatever `Plan::from_bytes` accepts is
// applied and committed; then no page may be lost, shared, or written by a stranger. Memory has its exact size, for the
// sanitizer.
//
// The input: which world and plan, 5 bytes; then changes of 6 bytes each: part of the plan, word, value.
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/evict/planner.hpp>

#include "fuzz/fuzz.hpp"
#include "random/engines.hpp"
#include "support/by_score.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::random_test;
using kvtrim::fuzz::require;

namespace {

// An engine with two to four sequences of some rows, one of them a fork where pages can be shared.
struct World {
  random_test::Random random;
  Setup setup;
  std::unique_ptr<ForeignEngine> engine;

  explicit World(std::uint32_t seed) : random(seed), setup(random_setup(random)) {
    setup.foreign = true;
    setup.mode = PositionMode::keep;
    setup.following = 0;
    setup.lengths = setup.lengths || !setup.states;
    engine = std::make_unique<ForeignEngine>(setup, random.bits());
    for (std::int32_t s = 0; s < setup.sequences; ++s) {
      const bool forks = s == 1 && setup.refs && engine->first_row(0) == engine->first_row(1);
      if (forks) { require(engine->fork(0, 1) == Status::ok, "fork"); }
      grow(s, 1 + random.below(setup.max_rows / 2), forks);
    }
  }
  void grow(std::int32_t s, std::int32_t rows, bool forks) {
    const std::int32_t pages = (pages_for(rows, setup.page_size) + 2) * setup.tables() * 2;
    if (forks || engine->available() < pages) { return; }
    require(engine->extend(s, rows) == Status::ok, "extend");
    for (std::int32_t l = 0; l < setup.layers; ++l) {
      const auto floats = [&](std::int32_t dim) {
        return std::vector<float>(at(rows * setup.heads * dim), static_cast<float>(s));
      };
      const NewRows data{floats(key_dim), floats(value_dim), floats(key_dim)};
      for (std::int32_t h = 0; h < setup.heads; ++h) { engine->number(s, l, h, 0, 0); }
      require(engine->write(s, l, data) == Status::ok, "write");
    }
  }
  // Names of each page in tables.
  Ints named() {
    Ints count(at(setup.pages), 0);
    for (std::int32_t s = 0; s < setup.sequences; ++s) {
      for (std::int32_t t = 0; t < setup.tables(); ++t) {
        const Table table = engine->table(s, t);
        for (std::size_t e = 0; e < table.k.size(); ++e) {
          if (table.k[e] < 0) { continue; }
          ++count[at(table.k[e])];
          if (setup.separate) { ++count[at(table.v[e])]; }
        }
      }
    }
    return count;
  }
};

}  // namespace

KVTRIM_FUZZ_TARGET(plan_bytes) {
  const std::uint8_t* const data = input.data();
  const std::size_t size = input.size();
  if (size < 5) { return; }
  World world(static_cast<std::uint32_t>(data[0]) << 8U | data[1]);
  const Setup& x = world.setup;
  const CacheView view = world.engine->view(-1);
  std::vector<float> scores(at(x.sequences * x.layers * x.heads * x.max_rows));
  for (float& score : scores) { score = world.random.uniform(); }
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), x.layers, x.heads, x.max_rows);
  const test::ByScore policy{.keep = data[2] % x.max_rows,
                             .sinks = data[3] & 3,
                             .recent = data[3] >> 6U,
                             .way = static_cast<Removal>(1 + data[4] % 4)};
  std::vector<PageId> spares;
  PlanOptions options{.shared = data[4] > 127 ? SharedPages::copy : SharedPages::leave};
  while ((data[4] & 64) != 0 && spares.size() < 3 && world.engine->available() > 0) {
    spares.push_back(PageId{world.engine->acquire()});
  }
  options.spare_pages = spares;
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  const PlanRef made = plan(policy, view, obs, workspace, options);

  std::vector<std::byte> bytes(made.bytes().begin(), made.bytes().end());
  const detail::PlanLayout layout(made.header());
  const std::int64_t ends[] = {0,
                               layout.table_plans,
                               layout.head_plans,
                               layout.rows,
                               layout.ranks,
                               layout.pages,
                               layout.sources,
                               layout.released,
                               layout.bytes};
  for (std::size_t i = 5; i + 6 <= size; i += 6) {
    const std::size_t part = data[i] % 8;
    const auto length = static_cast<std::size_t>(ends[part + 1] - ends[part]);
    if (length == 0 || bytes.empty()) { continue; }
    const std::size_t word = (std::size_t{data[i]} / 8 * 256 + data[i + 1]) * 4;
    std::byte* const to = bytes.data() + ends[part] + word % length;
    std::memcpy(to, data + i + 2, std::min<std::size_t>(4, length - word % length));
  }
  if (size % 7 == 0 && !bytes.empty()) { bytes.resize(bytes.size() - size % bytes.size()); }

  const Plan seen = Plan::from_bytes(bytes);
  require(!to_string(seen.view()).empty() && seen.view() == seen.view(), "a plan that is read");
  Plan read = Plan::from_bytes(bytes, view, {.spare_pages = spares});
  if (!usable(read.view().status())) { return; }
  require(apply(read.ref(), view) == Status::ok, "accepted, but not applied");
  const Report report = world.engine->commit(read.ref(), view);
  require(usable(report.status), "applied, but not committed");
  std::vector<std::uint64_t> scratch(at(check_tables_words(view.pages)));
  require(check_tables(view, scratch).status == Status::ok, "tables are broken");
  const Ints after = world.named();
  for (std::int32_t page = 0; x.refs && page < x.pages; ++page) {
    const bool spare = std::find(spares.begin(), spares.end(), PageId{page}) != spares.end();
    const std::int32_t count = world.engine->count(page);
    require(count == after[at(page)] || (spare && after[at(page)] == 0),
            "a page is counted more or less often than it is named");
  }
}
