// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/engine/null_in_place.hpp>
#include <kvtrim/engine/vllm.hpp>

#include "catch.hpp"
#include "engine/layout_driver.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <stdexcept>
#include <vector>

using namespace kvtrim;
using test::Ids;
using test::MethodWorld;

namespace {

constexpr std::int32_t page_size = 4, max_pages = 10, pool_pages = 40, dim = 16;

// A group of vLLM's: [2, pages, N, H, D] a layer, the slot of a token follows from its position, block 0 is null. `sequences`
// of a batch; those beyond the world's two are dummies.
struct Group {
  explicit Group(std::int32_t n, std::int32_t dummy_length = 0) : sequences(n) {
    memory.assign(std::size_t{2} * 2 * pool_pages * page_size * 2 * dim, -1.0F);
    ids.assign(static_cast<std::size_t>(n * max_pages), vllm::null_block);
    lengths.assign(static_cast<std::size_t>(n), dummy_length);
    compact_ids.resize(ids.size()), compact_lengths.resize(lengths.size());
    states.resize(lengths.size()), positions.resize(ids.size() * page_size);
    for (std::int32_t p = pool_pages; --p > 0;) { free.push_back(p); }
    test::Random random(3);
    for (std::size_t i = free.size(); i > 1; --i) {
      std::swap(free[i - 1],
                free[static_cast<std::size_t>(random.below(static_cast<std::int32_t>(i)))]);
    }
    sums.resize(static_cast<std::size_t>(n * 4 * 40) * 2);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  CacheView view() {
    std::vector<CacheView> layers;
    for (std::int32_t l = 0; l < 2; ++l) {
      layers.push_back(vllm::split_view(
          Tensor<5>::contiguous(memory.data() + memory.size() / 2 * static_cast<std::size_t>(l),
                                {2, pool_pages, page_size, 2, dim},
                                DType::f32)));
    }
    bases.resize(4);
    CacheView v = stack_layers(layers, bases);
    vllm::set_tables(v,
                     {.ids = ids.data(),
                      .lengths = lengths.data(),
                      .sequences = sequences,
                      .row_stride = max_pages,
                      .max_pages = max_pages});
    v.score_sums = SequencePlane::dense(sums.data(), 2, 2, 40);
    v.score_compensations = SequencePlane::dense(sums.data() + sums.size() / 2, 2, 2, 40);
    return v;
  }
  CacheView compact() {
    return compact_tables(view(), {compact_ids, compact_lengths, positions, states, {}});
  }
  float* element(bool values, std::int32_t l, std::int32_t s, std::int32_t h, std::int32_t p) {
    const std::int32_t page = ids[static_cast<std::size_t>(s * max_pages + p / page_size)];
    REQUIRE(page != vllm::null_block);
    return memory.data() + test::c_order({2, 2, pool_pages, page_size, 2, dim},
                                         {l, values ? 1 : 0, page, p % page_size, h, 0});
  }
  // Tokens up to position `end`, as the engine's slot mapping has them.
  void write(MethodWorld& world, std::int32_t s, std::int32_t end) {
    std::int32_t& length = lengths[static_cast<std::size_t>(s)];
    for (; length < end; ++length) {
      std::int32_t& page = ids[static_cast<std::size_t>(s * max_pages + length / page_size)];
      if (page == vllm::null_block) { page = free.back(), free.pop_back(); }
      for (std::int32_t i = 0; i < 4; ++i) {
        const auto k = world.key(s, i / 2, i % 2, length);
        const auto v = world.value(s, i / 2, i % 2, length);
        std::copy(k.begin(), k.end(), element(false, i / 2, s, i % 2, length));
        std::copy(v.begin(), v.end(), element(true, i / 2, s, i % 2, length));
      }
    }
  }
  // Rows, positions and accumulated scores against those of a plain cache; and nothing else is named.
  bool matches(MethodWorld& world) {
    bool same = true;
    for (std::int32_t s = 0; s < 2; ++s) {
      std::set<std::int32_t> entries;
      for (std::int32_t i = 0; i < 4; ++i) {
        for (const std::int32_t p : world.positions(s, i / 2, i % 2)) {
          entries.insert(p / page_size);
          const auto k = world.key(s, i / 2, i % 2, p);
          const auto v = world.value(s, i / 2, i % 2, p);
          same = same && std::equal(k.begin(), k.end(), element(false, i / 2, s, i % 2, p)) &&
                 std::equal(v.begin(), v.end(), element(true, i / 2, s, i % 2, p));
        }
      }
      for (std::int32_t e = 0; e < max_pages; ++e) {
        const bool named = ids[static_cast<std::size_t>(s * max_pages + e)] != vllm::null_block;
        same = same && named == entries.contains(e);
      }
    }
    return same;
  }
  void take_sums(MethodWorld& world) {
    const CacheView plain = world.view();
    const CacheView mine = view();
    for (std::int32_t s = 0; s < 2; ++s) {
      world.for_each_row(s, [&](std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t) {
        mine.score_sums.at<float>(SequenceId{s}, LayerId{l}, HeadId{h}, r) =
            plain.score_sums.load<float>(SequenceId{s}, LayerId{l}, HeadId{h}, r);
      });
    }
  }

  std::int32_t sequences;
  std::vector<float> memory, sums;
  Ids ids, lengths, free, compact_ids, compact_lengths;
  std::vector<Position> positions;
  std::vector<SequenceState> states;
  std::vector<std::byte*> bases;
};

test::MethodSetup setup() {
  test::MethodSetup m;
  m.group = 2;
  m.dim = m.value_dim = dim;
  m.page_size = page_size;
  m.sequences = 2;
  m.max_rows = 40;
  return m;
}

}  // namespace

TEST_CASE("null_in_place: pages leave, what stays stays at its position's entry",
          "[null_in_place]") {
  for (const test::Runner& runner : test::runners()) {
    if (runner.scope != TableScope::group) { continue; }
    INFO(runner.name);
    MethodWorld world(setup());
    Group group(2);
    std::int32_t refused = 0;
    for (const std::int32_t more : {22, 1, 2, 5, 1}) {
      for (std::int32_t s = 0; s < 2; ++s) {
        const std::int32_t n = s == 0 ? more : (more + 1) / 2;
        REQUIRE(world.append(s, n) == Status::ok);
        group.write(world, s, group.lengths[static_cast<std::size_t>(s)] + n);
      }
      group.take_sums(world);
      const Ids logical = group.lengths;
      const Observation obs = world.observation(runner.given_scores);
      const CacheView compact = group.compact();
      check_layout(compact);
      std::vector<std::byte> workspace;
      // Ways that move rows are refused where anything goes.
      for (const Removal way :
           {Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot}) {
        const PlanRef moves = runner.plan(compact, obs, workspace, {.removal = way});
        CHECK((moves.status() == Status::bad_options || moves.empty()));
      }
      const PlanRef made = runner.plan(compact, obs, workspace, {.removal = Removal::drop_pages});
      if (made.status() == Status::bad_options) {
        ++refused;
        break;
      }
      REQUIRE((apply(made, compact) == Status::ok));
      std::vector<PageId> freed(pool_pages);
      NullInPlaceTables sink(group.view(), compact, group.ids.data(), nullptr, freed);
      const Report report = commit(made, compact, sink);
      const Report same = runner.plain(world, obs, {.removal = Removal::drop_pages});
      CHECK(report.status == same.status);
      CHECK(report.evicted_rows == same.evicted_rows);
      CHECK(report.released_pages == same.released_pages);
      CHECK(report.bytes_moved == 0);
      CHECK(group.lengths == logical);
      CHECK(group.matches(world));
      for (const PageId p : sink.freed()) { group.free.push_back(raw(p)); }
    }
    CHECK(refused == (runner.name == External::name ? 1 : 0));  // it protects no last row
  }
}

TEST_CASE("null_in_place: sequences that a padded batch adds have no rows", "[null_in_place]") {
  for (const std::int32_t dummy_length : {0, 1, 4}) {
    MethodWorld world(setup());
    Group group(4, dummy_length);
    group.lengths[0] = group.lengths[1] = 0;
    for (std::int32_t s = 0; s < 2; ++s) {
      REQUIRE(world.append(s, 18) == Status::ok);
      group.write(world, s, 18);
    }
    const CacheView compact = group.compact();
    CHECK((group.compact_lengths == Ids{18, 18, 0, 0}));
    const StreamingSink<> policy({.sinks = 2, .recent = 6});
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(compact)));
    const PlanRef made = plan(policy, compact, {}, workspace);
    REQUIRE(made.status() == Status::ok);
    REQUIRE((apply(made, compact) == Status::ok));
    std::vector<PageId> freed(pool_pages);
    NullInPlaceTables sink(group.view(), compact, group.ids.data(), nullptr, freed);
    CHECK(commit(made, compact, sink).released_pages == 4);
    CHECK(group.ids[2 * max_pages] == vllm::null_block);
  }
}

TEST_CASE("null_in_place: the page that the next position falls into is never dropped",
          "[null_in_place][edge]") {
  MethodWorld world(setup());
  Group group(2);
  REQUIRE(world.append(0, 18) == Status::ok);
  group.write(world, 0, 18);
  std::vector<float> scores(2 * 2 * 2 * 40);
  for (std::size_t i = 0; i < scores.size(); ++i) { scores[i] = -static_cast<float>(i % 40); }
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 2, 2, 40);
  const test::ByScore policy{.keep = 8};
  const auto status = [&] {
    const CacheView compact = group.compact();
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(compact, obs)));
    return plan(policy, compact, obs, workspace, {.removal = Removal::drop_pages}).status();
  };
  CHECK(status() == Status::bad_options);
  REQUIRE(world.append(0, 2) == Status::ok);  // 20: the next one opens a page
  group.write(world, 0, 20);
  CHECK(status() == Status::ok);
}

TEST_CASE("null_in_place: reserved entries stay behind the length, or leave", "[null_in_place]") {
  for (const ReservedPages rule : {ReservedPages::follow, ReservedPages::release}) {
    MethodWorld world(setup());
    Group group(2);
    REQUIRE(world.append(0, 18) == Status::ok);
    group.write(world, 0, 18);
    Ids reserved{2, 0}, compact_reserved(2);
    group.ids[5] = 38, group.ids[6] = 39;
    std::erase_if(group.free, [](std::int32_t p) { return p >= 38; });
    CacheView view = group.view();
    view.reserved_pages = reserved.data();
    if (std::count(group.ids.begin(), group.ids.begin() + 5, 38) +
            std::count(group.ids.begin(), group.ids.begin() + 5, 39) >
        0) {
      group.ids[5] = group.free.back(), group.free.pop_back();
      group.ids[6] = group.free.back(), group.free.pop_back();
    }
    const Ids before = group.ids;
    const CacheView compact = compact_tables(view,
                                             {group.compact_ids,
                                              group.compact_lengths,
                                              group.positions,
                                              group.states,
                                              compact_reserved});
    const StreamingSink<> policy({.sinks = 2, .recent = 6});
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(compact)));
    const PlanRef made = plan(policy, compact, {}, workspace, {.reserved = rule});
    REQUIRE(made.status() == Status::ok);
    REQUIRE((apply(made, compact) == Status::ok));
    std::vector<PageId> freed(pool_pages);
    NullInPlaceTables sink(view, compact, group.ids.data(), nullptr, freed);
    const bool follows = rule == ReservedPages::follow;
    CHECK(commit(made, compact, sink).released_pages == (follows ? 2 : 4));
    CHECK(group.ids[5] == (follows ? before[5] : vllm::null_block));
    CHECK(group.ids[6] == (follows ? before[6] : vllm::null_block));
    CHECK(group.ids[0] == before[0]);
    CHECK(group.ids[1] == vllm::null_block);
    CHECK(group.ids[4] == before[4]);
  }
}

TEST_CASE("null_in_place: lengths beyond the table and memory of another size are refused",
          "[null_in_place][edge]") {
  Group group(2);
  for (const std::int32_t wrong : {-1, max_pages * page_size + 1}) {
    group.lengths[0] = wrong;
    const CacheView compact = group.compact();
    std::vector<std::byte> workspace(plan_workspace_bytes(Full(), plan_shape(compact)));
    CHECK((plan(Full(), compact, {}, workspace).status() == Status::length_beyond_table));
  }
  group.lengths[0] = 3;
  group.positions.pop_back();
  CHECK_THROWS_AS(group.compact(), std::invalid_argument);
  group.positions.emplace_back();
  CacheView view = group.view();
  view.scope = TableScope::layer;
  CHECK_THROWS_AS(
      compact_tables(view,
                     {group.compact_ids, group.compact_lengths, group.positions, group.states, {}}),
      std::invalid_argument);
}
