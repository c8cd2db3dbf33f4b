// SPDX-License-Identifier: Apache-2.0
// That a Recorder serves every policy as the calls by hand do is a law: tests/policy/laws_test.cpp.
#include <kvtrim/observe/recorder.hpp>

#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/score/expected_attention.hpp>
#include <kvtrim/score/rkv.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/step_world.hpp"
#include "support/threads.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvtrim;
using test::Batch;
using test::ByHand;
using test::MethodSetup;
using test::MethodWorld;
using test::StepData;

namespace {

constexpr std::int32_t window = 5;

// All that a recorder gathers in memory of its own, and sums.
Needs everything() {
  Needs n;
  n.window = window;
  n.accumulate = AccumulateParams{};
  n.moments = MomentParams{2};
  n.score_planes = true;
  return n;
}

RecorderParams params_of(const MethodSetup& s) {
  return {.sequences = s.sequences,
          .layers = s.layers,
          .query_heads = s.kv_heads * s.group,
          .kv_heads = s.kv_heads,
          .head_dim = s.dim,
          .lse = true};
}

// A step of all layers over the view of all sequences.
Status run(MethodWorld& world, Recorder& recorder, const Batch& batch) {
  append_rows(world, batch);
  for (std::int32_t l = 0; l < world.setup().layers; ++l) {
    const StepData data(world, batch, l);
    LayerStep step = data.step(l, true);
    step.sequences = {};
    if (const Status s = recorder.record(world.view(), step); s != Status::ok) { return s; }
  }
  return Status::ok;
}

void run(MethodWorld& world, ByHand& hand, const Batch& batch) {
  append_rows(world, batch);
  for (std::int32_t l = 0; l < world.setup().layers; ++l) {
    hand.record(world, StepData(world, batch, l), l, false);
  }
}

// Everything that sequence s of an observation shows in `layers` layers, as bits.
std::vector<std::uint32_t> bits_of(const Observation& seen, std::int32_t s, std::int32_t layers) {
  std::vector<std::uint32_t> bits;
  const auto add = [&](const float* x, std::int32_t n) {
    for (std::int32_t i = 0; i < n; ++i) {
      std::uint32_t b;
      std::memcpy(&b, x + i, sizeof b);
      bits.push_back(b);
    }
  };
  const SequenceId id{s};
  const QueryBlock& q = seen.queries;
  for (std::int32_t i = 0; i < q.count(id); ++i) {
    bits.push_back(static_cast<std::uint32_t>(raw(q.position(id, i, -1000))));
    for (std::int32_t l = 0; l < layers; ++l) {
      for (std::int32_t h = 0; h < q.query_heads; ++h) {
        add(q.row(id, LayerId{l}, h, i), static_cast<std::int32_t>(q.row_stride));
        if (q.lse != nullptr) {
          const float lse = q.lse_of(id, LayerId{l}, h, i);
          add(&lse, 1);
        }
      }
    }
  }
  const QueryStatistics& m = seen.statistics;
  for (std::int32_t l = 0; m && l < layers; ++l) {
    for (std::int32_t h = 0; h < m.query_heads; ++h) {
      add(m.mean_of(id, LayerId{l}, h), m.dim);
      add(m.covariance_of(id, LayerId{l}, h), m.dim * m.dim);
    }
  }
  return bits;
}

// The positions that a slot's window shows.
std::vector<std::int32_t> positions_of(Recorder& recorder, std::int32_t slot) {
  const Observation seen = recorder.observation({&slot, 1});
  std::vector<std::int32_t> out;
  for (std::int32_t i = 0; i < seen.queries.count(SequenceId{0}); ++i) {
    out.push_back(raw(seen.queries.position(SequenceId{0}, i, -1000)));
  }
  return out;
}

using Ints = std::vector<std::int32_t>;

template <class F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& error) { return error.what(); }
  return {};
}

}  // namespace

TEST_CASE("recorder: ragged batches in chunks leave the bits of calls by hand", "[recorder]") {
  const MethodSetup setup{.sequences = 3};
  MethodWorld recorded(setup), by_hand(setup);
  Recorder recorder(everything(), params_of(setup));
  ByHand hand(everything(), setup, true);
  for (const Batch& batch : {Batch{{0, 7}, {1, 1}, {2, 12}},
                             Batch{{0, 1}, {1, 0}, {2, 3}},
                             Batch{{0, 9}, {1, 2}, {2, 0}}}) {
    REQUIRE(run(recorded, recorder, batch) == Status::ok);
    run(by_hand, hand, batch);
    const Observation got = recorder.observation();
    const Observation expected = hand.observation(by_hand);
    for (std::int32_t s = 0; s < 3; ++s) {
      REQUIRE(bits_of(got, s, 2) == bits_of(expected, s, 2));
      REQUIRE(got.queries.count(SequenceId{s}) == expected.queries.count(SequenceId{s}));
    }
    REQUIRE(sum_bits(recorded) == sum_bits(by_hand));
  }
  CHECK(recorder.fault().status == Status::ok);
}

TEST_CASE("recorder: a batch in another order than the slots records and shows the same",
          "[recorder]") {
  const MethodSetup setup{.sequences = 3};
  MethodWorld world(setup), other(setup);
  Recorder recorder(everything(), params_of(setup)), straight(everything(), params_of(setup));
  const Batch batch{{2, 12}, {1, 4}, {0, 7}};
  append_rows(world, batch);
  for (std::int32_t l = 0; l < 2; ++l) {
    const StepData data(world, batch, l);
    test::ReversedView reversed(world);
    REQUIRE(recorder.record(reversed.view, data.step(l, true)) == Status::ok);
  }
  REQUIRE(run(other, straight, {{0, 7}, {1, 4}, {2, 12}}) == Status::ok);
  REQUIRE(sum_bits(world) == sum_bits(other));
  const Observation expected = straight.observation();
  const Observation plain = recorder.observation();
  for (std::int32_t s = 0; s < 3; ++s) { REQUIRE(bits_of(plain, s, 2) == bits_of(expected, s, 2)); }
  const std::array<std::int32_t, 3> slots{2, 0, 1};
  const Observation turned = recorder.observation(slots);
  for (std::int32_t i = 0; i < 3; ++i) {
    REQUIRE(bits_of(turned, i, 2) == bits_of(expected, slots[static_cast<std::size_t>(i)], 2));
  }
}

TEST_CASE("recorder: a plan over a condensed batch keeps what the plan over all slots keeps",
          "[recorder]") {
  const MethodSetup setup{.sequences = 3};
  MethodWorld world(setup);
  Needs needs = everything();
  needs.moments = MomentParams{4};
  Recorder recorder(needs, params_of(setup));
  REQUIRE(run(world, recorder, {{0, 40}, {1, 27}, {2, 33}}) == Status::ok);
  const auto same = [&](const auto& policy) {
    REQUIRE(recorder.missing(policy, std::array{0, 1, 2}).empty());
    const auto kept = [&](const CacheView& view, const Observation& obs, std::int32_t s) {
      std::vector<std::byte> memory(plan_workspace_bytes(policy, plan_shape(view, obs)));
      const PlanRef made = plan(policy, view, obs, memory);
      REQUIRE(made.status() == Status::ok);
      std::vector<Ints> out;
      for (std::int32_t l = 0; l < 2; ++l) {
        for (std::int32_t h = 0; h < 2; ++h) {
          auto& rows = out.emplace_back();
          made.for_each_kept(
              SequenceId{s}, LayerId{l}, HeadId{h}, [&](std::int32_t r) { rows.push_back(r); });
          CHECK(rows.size() == 12);
        }
      }
      return out;
    };
    std::vector<std::vector<Ints>> all;
    for (std::int32_t s = 0; s < 3; ++s) {
      all.push_back(kept(world.view(), recorder.observation(), s));
      CHECK(kept(world.cache().view(SequenceId{s}), recorder.observation({&s, 1}), 0) ==
            all.back());
    }
    test::ReversedView reversed(world);
    const std::array<std::int32_t, 3> slots{2, 1, 0};
    for (std::int32_t s = 0; s < 3; ++s) {
      CHECK(kept(reversed.view, recorder.observation(slots), s) ==
            all[static_cast<std::size_t>(2 - s)]);
    }
  };
  same(SnapKVSelector({.window = window, .budget = 12, .kernel = 1}));
  same(Tova({.budget = 12}));
  RKV::Params rkv;
  rkv.budget = 12;
  rkv.recent = 3;
  rkv.scores.window = 3;
  same(RKV(rkv));
  static constexpr std::array<double, 4> frequencies{1, 0.25, 0.0625, 0.015625};
  ExpectedAttention::Params expected;
  expected.budget = 12;
  expected.scores.rope = {
      .inverse_frequencies = frequencies, .dim = 8, .same_for_all_layers = true};
  same(ExpectedAttention(expected));
}

TEST_CASE("recorder: a view of some layers is recorded under the model's, and shown by range",
          "[recorder]") {
  const MethodSetup setup{.layers = 3, .sequences = 2, .scope = TableScope::layer};
  MethodWorld world(setup), other(setup);
  Needs needs = everything();
  needs.filters = needs.output = true;
  const Observation given = world.observation();
  RecorderParams params = params_of(setup);
  params.filters = given.filters;
  params.output = given.output;
  Recorder recorder(needs, params), straight(needs, params);
  const Batch batch{{0, 9}, {1, 6}};
  append_rows(world, batch);
  for (std::int32_t l = 0; l < 3; ++l) {
    // One layer: its tables, states and planes begin where the layer's do.
    CacheView one = world.view();
    std::vector<SequenceState> states;
    for (std::int32_t s = 0; s < 2; ++s) { states.push_back(one.states[s * 3 + l]); }
    one.layers = 1;
    one.states = states.data();
    one.table.ids += l * one.table.rows.layer * one.table.row_stride;
    for (SequencePlane* plane : {&one.positions, &one.score_sums, &one.score_compensations}) {
      plane->base += l * plane->layer_stride;
    }
    const StepData data(world, batch, l);
    LayerStep step = data.step(l, true);
    one.layer_offset = l;
    one.model_layers = 3;
    REQUIRE(recorder.record(one, step) == Status::ok);
    // Layer by layer at the end of the prompt: each is shown as soon as it was recorded.
    const Observation alone = recorder.observation(std::array{1, 0}, LayerId{l}, 1);
    CHECK(alone.queries.count(SequenceId{0}) == 5);
    CHECK(alone.statistics.layers == 1);
    one.layer_offset = l + 1;
    CHECK(recorder.record(one, step) == Status::bad_observation);
    CHECK(recorder.fault().what == "view layer");
  }
  REQUIRE(run(other, straight, batch) == Status::ok);
  CHECK(sum_bits(world) == sum_bits(other));
  const Observation all = straight.observation();
  CHECK(bits_of(recorder.observation(), 1, 3) == bits_of(all, 1, 3));
  const Observation part = recorder.observation(std::array{1}, LayerId{1}, 2);
  for (std::int32_t l = 0; l < 2; ++l) {
    for (std::int32_t h = 0; h < 6; ++h) {
      const LayerId here{l}, there{l + 1};
      CHECK(part.queries.row(SequenceId{0}, here, h, 3)[2] ==
            all.queries.row(SequenceId{1}, there, h, 3)[2]);
      CHECK(part.queries.lse_of(SequenceId{0}, here, h, 3) ==
            all.queries.lse_of(SequenceId{1}, there, h, 3));
      CHECK(part.statistics.mean_of(SequenceId{0}, here, h)[1] ==
            all.statistics.mean_of(SequenceId{1}, there, h)[1]);
      CHECK(part.statistics.covariance_of(SequenceId{0}, here, h)[9] ==
            all.statistics.covariance_of(SequenceId{1}, there, h)[9]);
      CHECK(part.output.of(here, h) == given.output.of(there, h));
    }
    CHECK(part.filters.of(LayerId{l}, HeadId{1}) == given.filters.of(LayerId{l + 1}, HeadId{1}));
  }
}

TEST_CASE("recorder: 1, 2 and 8 threads leave the same bits", "[recorder][property]") {
  const MethodSetup setup{.sequences = 3};
  const std::vector<Batch> steps{{{0, 11}, {1, 6}, {2, 30}}, {{0, 1}, {1, 5}, {2, 2}}};
  std::vector<std::uint32_t> first;
  for (const std::int32_t threads : {1, 2, 8}) {
    MethodWorld world(setup);
    RecorderParams params = params_of(setup);
    params.workers = threads;
    Recorder recorder(everything(), params);
    for (const Batch& batch : steps) {
      append_rows(world, batch);
      for (std::int32_t l = 0; l < 2; ++l) {
        const StepData data(world, batch, l);
        REQUIRE(recorder.record(world.view(), data.step(l, true), test::Threads{threads}) ==
                Status::ok);
      }
    }
    std::vector<std::uint32_t> bits = sum_bits(world);
    const Observation seen = recorder.observation();
    for (std::int32_t s = 0; s < 3; ++s) {
      const auto more = bits_of(seen, s, 2);
      bits.insert(bits.end(), more.begin(), more.end());
    }
    if (first.empty()) { first = bits; }
    CHECK(bits == first);
  }
}

TEST_CASE("recorder: probabilities add up as the LSE does", "[recorder]") {
  const MethodSetup setup;
  MethodWorld by_lse(setup), by_probabilities(setup);
  Needs needs;
  needs.accumulate = AccumulateParams{.decay = 0.75F};
  RecorderParams params = params_of(setup);
  Recorder first(needs, params);
  params.lse = false;
  params.probabilities = true;
  Recorder second(needs, params);
  for (const std::int32_t n : {13, 1, 4}) {
    append_rows(by_lse, {{0, n}});
    append_rows(by_probabilities, {{0, n}});
    for (std::int32_t l = 0; l < 2; ++l) {
      const StepData data(by_lse, {{0, n}}, l);
      REQUIRE(first.record(by_lse.view(), data.step(l, true)) == Status::ok);
      LayerStep step = data.step(l, false);
      step.probabilities = {data.probabilities_of(0), 0, data.head_stride(), data.row_stride()};
      step.queries.data = nullptr;  // nothing looks at them
      REQUIRE(second.record(by_probabilities.view(), step) == Status::ok);
    }
  }
  by_lse.for_each_row(0, [&](std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t) {
    const auto sum = [&](MethodWorld& w) {
      return w.view().score_sums.at<float>(SequenceId{0}, LayerId{l}, HeadId{h}, r);
    };
    CHECK(sum(by_lse) == Catch::Approx(sum(by_probabilities)).epsilon(1e-5));
  });
}

TEST_CASE("recorder: scale, soft cap and base-2 LSE of the steps reach the scorers", "[recorder]") {
  const MethodSetup setup;
  MethodWorld world(setup);
  Recorder recorder(Needs{.window = 3}, params_of(setup));
  append_rows(world, {{0, 6}});
  for (std::int32_t l = 0; l < 2; ++l) {
    const StepData data(world, {{0, 6}}, l);
    LayerStep step = data.step(l, true);
    step.queries.scale = 0.5F;
    step.queries.soft_cap = 30;
    step.queries.lse_base = LseBase::two;
    REQUIRE(recorder.record(world.view(), step) == Status::ok);
    const Observation seen = recorder.observation(std::array{0}, LayerId{l}, 1);
    CHECK(seen.queries.scale == 0.5F);
    CHECK(seen.queries.soft_cap == 30);
    CHECK(seen.queries.lse_base == LseBase::e);
    CHECK(seen.queries.lse_of(SequenceId{0}, LayerId{0}, 4, 2) ==
          Catch::Approx(step.queries.lse_of(SequenceId{0}, LayerId{0}, 4, 5) * std::log(2.0F)));
  }
}

TEST_CASE("recorder: forks share what was seen until one of them goes on", "[recorder]") {
  const MethodSetup setup{.sequences = 3};
  MethodWorld world(setup);
  Recorder recorder(everything(), params_of(setup));
  REQUIRE(run(world, recorder, {{0, 9}, {1, 2}, {2, 0}}) == Status::ok);
  const auto of = [&](std::int32_t slot) {
    return bits_of(recorder.observation({&slot, 1}), 0, 2);
  };
  const auto before = of(0);
  recorder.fork(0, 1);
  recorder.fork(0, 2);
  recorder.fork(2, 2);
  CHECK(of(1) == before);
  CHECK(of(2) == before);
  CHECK(positions_of(recorder, 2) == Ints{4, 5, 6, 7, 8});

  // Slot 1 of the cache is another sequence than its fork: its next positions are given.
  const auto record_one = [&](std::int32_t slot, std::int32_t position) {
    append_rows(world, {{slot, 1}});
    for (std::int32_t l = 0; l < 2; ++l) {
      StepData data(world, {{slot, 1}}, l);
      data.positions()[0] = Position{position};
      REQUIRE(recorder.record(world.cache().view(SequenceId{slot}), data.step(l, true)) ==
              Status::ok);
    }
  };
  record_one(1, 9);
  CHECK(of(0) == before);
  CHECK(of(2) == before);
  CHECK(positions_of(recorder, 1) == Ints{5, 6, 7, 8, 9});
  record_one(0, 20);
  CHECK(of(2) == before);
  CHECK(positions_of(recorder, 0) == Ints{5, 6, 7, 8, 20});
  recorder.fork(1, 0);
  recorder.truncate(1, Position{7});
  CHECK(positions_of(recorder, 0) == Ints{5, 6, 7, 8, 9});
  CHECK(positions_of(recorder, 1) == Ints{5, 6});
  recorder.reset(2);
  CHECK(positions_of(recorder, 2).empty());
  recorder.fork(0, 2);
  recorder.reset(0);
  CHECK(positions_of(recorder, 0).empty());
  CHECK(positions_of(recorder, 2) == Ints{5, 6, 7, 8, 9});
}

TEST_CASE("recorder: a fork goes on from the moments and queries of both as copies would",
          "[recorder]") {
  const MethodSetup setup{.sequences = 2};
  MethodWorld world(setup);
  Needs needs = everything();
  needs.accumulate.reset();
  Recorder recorder(needs, params_of(setup));
  ByHand hand(needs, setup, true);
  const auto record = [&](std::int32_t slot, std::int32_t n, std::int32_t layers) {
    append_rows(world, {{slot, n}});
    for (std::int32_t l = 0; l < layers; ++l) {
      StepData data(world, {{slot, n}}, l);
      for (Position& p : data.positions()) { p = Position{raw(p) + 100 * slot}; }
      REQUIRE(recorder.record(world.cache().view(SequenceId{slot}), data.step(l, true)) ==
              Status::ok);
      hand.record(world, data, l, false);
    }
  };
  const auto agree = [&](std::int32_t slot, LayerId layer) {
    const Observation got = recorder.observation({&slot, 1}, layer, 1);
    Observation expected = hand.observation(world);
    const std::int64_t means = static_cast<std::int64_t>(raw(layer)) * 6 * 8;
    expected.queries.data += raw(layer) * expected.queries.layer_stride;
    expected.queries.lse += raw(layer) * expected.queries.lse_layer_stride;
    expected.statistics.mean += means;
    expected.statistics.covariance += means * 8;
    return bits_of(got, 0, 1) == bits_of(expected, slot, 1);
  };
  record(0, 9, 2);
  recorder.fork(0, 1);
  hand.ring->fork(SequenceId{0}, SequenceId{1});
  hand.moments->fork(SequenceId{0}, SequenceId{1});
  record(1, 2, 1);  // layer 1 of the copy is as it was, and nobody has looked at it yet
  CHECK(recorder.observation(std::array{1}, LayerId{1}, 1).statistics);
  const Observation copied = recorder.observation(std::array{1}, LayerId{1}, 1);
  const QueryStatistics untouched = hand.observation(world).statistics;
  CHECK(copied.statistics.mean_of(SequenceId{0}, LayerId{0}, 4)[3] ==
        untouched.mean_of(SequenceId{1}, LayerId{1}, 4)[3]);
  CHECK(agree(1, LayerId{0}));
  CHECK(agree(0, LayerId{0}));
  CHECK(agree(0, LayerId{1}));
  record(0, 3, 2);
  CHECK(agree(0, LayerId{1}));
  CHECK(agree(1, LayerId{0}));
  // The slot's next sequence has a past of its own.
  recorder.reset(1);
  CHECK_FALSE(recorder.observation(std::array{1}).statistics);
  hand.ring->reset(SequenceId{1});
  hand.moments->reset(SequenceId{1});
  record(1, 4, 2);
  CHECK(agree(1, LayerId{1}));
  CHECK(agree(0, LayerId{1}));
}

TEST_CASE("recorder: any order of forks, steps and resets leaves what copies would", "[recorder]") {
  // Against copies: each slot has a history of its own, the list of positions that it saw.
  const MethodSetup setup{.layers = 1, .sequences = 4, .max_rows = 400};
  MethodWorld world(setup);
  Recorder recorder(Needs{.window = window}, params_of(setup));
  std::vector<Ints> history(4);
  Ints after(4, 0);  // first position that may come next
  test::Random random(5);
  for (std::int32_t turn = 0; turn < 400; ++turn) {
    const std::int32_t a = random.below(4);
    const std::int32_t b = random.below(4);
    auto& mine = history[static_cast<std::size_t>(a)];
    switch (random.below(4)) {
      case 0:
        recorder.fork(a, b);
        history[static_cast<std::size_t>(b)] = mine;
        after[static_cast<std::size_t>(b)] = after[static_cast<std::size_t>(a)];
        break;
      case 1:
        if (turn % 3 == 0) {
          recorder.reset(a);
          mine.clear();
          after[static_cast<std::size_t>(a)] = 0;
        } else {
          std::int32_t& next = after[static_cast<std::size_t>(a)];
          next = std::max(0, next - b);
          recorder.truncate(a, Position{next});
          while (!mine.empty() && mine.back() >= next) { mine.pop_back(); }
          // What was pushed out of the ring does not come back.
          const auto kept = positions_of(recorder, a);
          REQUIRE(kept.size() <= mine.size());
          mine.assign(mine.end() - static_cast<std::ptrdiff_t>(kept.size()), mine.end());
        }
        break;
      default: {
        const std::int32_t n = 1 + random.below(2);
        std::int32_t& next = after[static_cast<std::size_t>(a)];
        const std::int32_t first = next + (mine.empty() ? random.below(3) : 0);
        if (raw(world.cache().next_position(SequenceId{a})) + n > 396) { break; }
        append_rows(world, {{a, n}});
        StepData data(world, {{a, n}}, 0);
        for (std::int32_t i = 0; i < n; ++i) {
          data.positions()[static_cast<std::size_t>(i)] = Position{first + i};
          mine.push_back(first + i);
        }
        next = first + n;
        REQUIRE(recorder.record(world.cache().view(SequenceId{a}), data.step(0, true)) ==
                Status::ok);
      }
    }
    for (std::int32_t s = 0; s < 4; ++s) {
      const Ints& all = history[static_cast<std::size_t>(s)];
      const auto count = static_cast<std::ptrdiff_t>(
          std::min<std::size_t>(all.size(), static_cast<std::size_t>(window)));
      REQUIRE(positions_of(recorder, s) == Ints(all.end() - count, all.end()));
    }
  }
}

TEST_CASE("recorder: truncation drops the window's last rows, and a step given up half-way",
          "[recorder]") {
  const MethodSetup setup;
  MethodWorld world(setup), other(setup);
  Recorder recorder(everything(), params_of(setup));
  REQUIRE(run(world, recorder, {{0, 12}}) == Status::ok);
  CHECK(positions_of(recorder, 0) == Ints{7, 8, 9, 10, 11});
  recorder.truncate(0, Position{10});
  CHECK(positions_of(recorder, 0) == Ints{7, 8, 9});
  recorder.truncate(0, Position{50});
  CHECK(positions_of(recorder, 0) == Ints{7, 8, 9});
  REQUIRE(world.cache().try_truncate(SequenceId{0}, Position{10}) == Status::ok);
  REQUIRE(run(world, recorder, {{0, 1}}) == Status::ok);
  CHECK(positions_of(recorder, 0) == Ints{7, 8, 9, 10});

  // Three more tokens reach layer 0 only.
  append_rows(world, {{0, 3}});
  {
    const StepData data(world, {{0, 3}}, 0);
    REQUIRE(recorder.record(world.view(), data.step(0, true)) == Status::ok);
  }
  const auto shown = recorder.observation();
  CHECK(shown.queries.data == nullptr);  // layer 1 is behind
  CHECK(recorder.fault().what == "window");
  CHECK(recorder.missing(SnapKVSelector({.window = 3, .budget = 9}), std::array{0}) == "window");
  CHECK(recorder.missing(SnapKVSelector({.window = 3, .budget = 9}), std::array{0}, LayerId{0}, 1)
            .empty());
  recorder.truncate(0, Position{11});
  REQUIRE(world.cache().try_truncate(SequenceId{0}, Position{11}) == Status::ok);
  // Their queries overwrote those of 7 and 8 in layer 0.
  CHECK(positions_of(recorder, 0) == Ints{9, 10});
  REQUIRE(run(world, recorder, {{0, 2}}) == Status::ok);
  CHECK(positions_of(recorder, 0) == Ints{9, 10, 11, 12});
  // What is left are the queries of those positions, in all layers.
  const Observation seen = recorder.observation();
  for (std::int32_t i = 0; i < 4; ++i) {
    for (std::int32_t l = 0; l < 2; ++l) {
      for (std::int32_t h = 0; h < 6; ++h) {
        const auto expected = world.query(0, l, h, 9 + i);
        CHECK(std::equal(
            expected.begin(), expected.end(), seen.queries.row(SequenceId{0}, LayerId{l}, h, i)));
      }
    }
  }
  // A chunk longer than the window leaves nothing to go back to.
  append_rows(world, {{0, 9}});
  {
    const StepData data(world, {{0, 9}}, 0);
    REQUIRE(recorder.record(world.view(), data.step(0, true)) == Status::ok);
  }
  recorder.truncate(0, Position{13});
  CHECK(positions_of(recorder, 0).empty());
  REQUIRE(world.cache().try_truncate(SequenceId{0}, Position{13}) == Status::ok);
  REQUIRE(run(world, recorder, {{0, 2}}) == Status::ok);
  CHECK(positions_of(recorder, 0) == Ints{13, 14});
}

TEST_CASE("recorder: without positions a step must follow the window", "[recorder][fault]") {
  const MethodSetup setup;
  MethodWorld world(setup);
  Recorder recorder(Needs{.window = window}, params_of(setup));
  const auto record = [&](std::int32_t n, bool positions) {
    const StepData data(world, {{0, n}}, 0);
    LayerStep step = data.step(0, true);
    if (!positions) { step.queries.positions = nullptr; }
    return recorder.record(world.view(), step);
  };
  append_rows(world, {{0, 10}});  // a prefix that was not computed here: the window begins at 10
  append_rows(world, {{0, 3}});
  REQUIRE(record(3, false) == Status::ok);
  append_rows(world, {{0, 2}});  // not recorded
  append_rows(world, {{0, 1}});
  CHECK(record(1, false) == Status::bad_observation);
  CHECK(recorder.fault().what == "positions");
  CHECK(recorder.fault().value == 15);
  CHECK(recorder.fault().expected == 13);
  REQUIRE(record(1, true) == Status::ok);
  // The same step again, and one whose positions do not ascend.
  CHECK(record(1, true) == Status::bad_observation);
  CHECK(recorder.fault().value == 15);
  CHECK(recorder.fault().expected == 16);
  append_rows(world, {{0, 2}});
  StepData data(world, {{0, 2}}, 0);
  std::swap(data.positions()[0], data.positions()[1]);
  CHECK(recorder.record(world.view(), data.step(0, true)) == Status::bad_observation);
  CHECK(recorder.fault().value == 16);
  CHECK(recorder.fault().expected == 18);
}

TEST_CASE("recorder: what cannot be recorded is refused with the numbers, nothing is half recorded",
          "[recorder][fault]") {
  const MethodSetup setup{.sequences = 3};
  MethodWorld world(setup);
  Recorder recorder(everything(), params_of(setup));
  REQUIRE(run(world, recorder, {{0, 6}, {1, 7}, {2, 8}}) == Status::ok);
  const Batch batch{{0, 1}, {1, 2}, {2, 1}};
  append_rows(world, batch);
  const auto sums = sum_bits(world);
  std::vector<std::vector<std::uint32_t>> shown;
  for (std::int32_t s = 0; s < 3; ++s) { shown.push_back(bits_of(recorder.observation(), s, 2)); }
  const StepData data(world, batch, 0);

  const auto refused = [&](auto&& spoil,
                           std::string_view what,
                           std::int64_t value,
                           std::int64_t expected,
                           std::int32_t sequence = -1) {
    CacheView view = world.view();
    LayerStep step = data.step(0, true);
    const std::vector<std::int32_t> slots = spoil(view, step);
    if (!slots.empty()) { step.sequences = slots; }
    INFO(what);
    CHECK(recorder.record(view, step) == Status::bad_observation);
    CHECK(recorder.fault().status == Status::bad_observation);
    CHECK(recorder.fault().what == what);
    CHECK(recorder.fault().value == value);
    CHECK(recorder.fault().expected == expected);
    CHECK(recorder.fault().sequence == sequence);
    CHECK(sum_bits(world) == sums);
    for (std::int32_t s = 0; s < 3; ++s) {
      CHECK(bits_of(recorder.observation(), s, 2) == shown[static_cast<std::size_t>(s)]);
    }
  };
  using V = CacheView;
  using L = LayerStep;
  const Ints none;
  refused([&](V&, L& s) { return s.layer = LayerId{2}, none; }, "layer", 2, 2);
  refused([&](V&, L& s) { return s.layer = LayerId{-1}, none; }, "layer", -1, 2);
  refused(
      [&](V& v, L&) { return v.layer_offset = 1, v.model_layers = 3, none; }, "view layer", -1, 2);
  refused([&](V& v, L&) { return v.kv_heads = 3, none; }, "kv_heads", 3, 2);
  refused([&](V& v, L&) { return v.k.head_dim = 16, none; }, "head_dim", 16, 8);
  refused([&](V&, L& s) { return s.queries.query_heads = 4, none; }, "query_heads", 4, 6);
  refused([&](V&, L&) { return Ints{0, 1}; }, "slots", 2, 3);
  refused([&](V&, L&) { return Ints{0, 1, 3}; }, "slot", 3, 3, 2);
  refused([&](V&, L&) { return Ints{0, -1, 2}; }, "slot", -1, 3, 1);
  refused([&](V&, L&) { return Ints{1, 0, 1}; }, "slot used twice", 1, 1, 2);
  refused([&](V&, L& s) { return s.queries.lse = nullptr, none; }, "lse", 0, 1);
  refused([&](V&, L& s) { return s.queries.data = nullptr, none; }, "queries", 0, 1);
  refused([&](V&, L& s) { return s.unrotated.data = nullptr, none; }, "unrotated", 6, 6);
  refused(
      [&](V&, L& s) { return s.unrotated.row_counts = nullptr, none; }, "unrotated rows", 0, 1, 0);
  refused([&](V& v, L&) { return v.score_sums = {}, none; }, "score planes", 1, 2);
  refused([&](V& v, L&) { return v.k.dtype = DType::opaque, none; },
          "dtype",
          static_cast<std::int64_t>(DType::opaque),
          0);
  std::vector<SequenceState> states(world.view().states, world.view().states + 3);
  states[1].append_row = 4;
  refused([&](V& v, L&) { return v.states = states.data(), none; }, "append_row", 4, -1, 1);
  const Ints negative{1, -2, 1};
  refused([&](V&, L& s) { return s.queries.row_counts = negative.data(), none; }, "rows", -2, 0, 1);

  CHECK(recorder.record(world.view(), data.step(0, true), test::Threads{2}) ==
        Status::workspace_too_small);
  CHECK(recorder.fault().what == "workers");
  CHECK(recorder.fault().value == 2);
  CHECK(recorder.fault().expected == 1);
  CHECK(recorder.record(world.view(), data.step(0, true)) == Status::ok);
  CHECK(recorder.fault().status == Status::ok);

  // More probabilities than an exact sum holds: three heads of a group, 5,592,406 queries.
  Needs exact;
  exact.accumulate = AccumulateParams{.sums = Sums::exact};
  Recorder adding(exact, params_of(setup));
  LayerStep many = data.step(0, true);
  const Ints too_many{5'592'406, 1, 1};
  many.queries.row_counts = too_many.data();
  CHECK(adding.record(world.view(), many) == Status::bad_observation);
  CHECK(adding.fault().what == "exact addends");
  CHECK(adding.fault().value == 16'777'218);
  CHECK(adding.fault().expected == 16'777'215);
  CHECK(adding.fault().sequence == 0);
  CHECK(adding.record(world.view(), data.step(0, true)) == Status::ok);

  // Slots of sequences without rows are padding: nobody looks at them.
  append_rows(world, {{2, 1}});
  const StepData one(world, {{2, 1}}, 1);
  LayerStep padded = one.step(1, true);
  const Ints firsts{0, 0, 0}, counts{0, 0, 1}, slots{-1, 99, 2};
  padded.sequences = slots;
  for (QueryBlock* q : {&padded.queries, &padded.unrotated}) {
    q->row_firsts = firsts.data();
    q->row_counts = counts.data();
  }
  CHECK(recorder.record(world.view(), padded) == Status::ok);
}

TEST_CASE(
    "recorder: layers that share a cache may be recorded under its owner where nothing but sums "
    "and moments is kept",
    "[recorder]") {
  const MethodSetup setup;
  MethodWorld world(setup);
  Needs needs;
  needs.accumulate = AccumulateParams{};
  Recorder recorder(needs, params_of(setup));
  append_rows(world, {{0, 4}});
  const StepData data(world, {{0, 4}}, 0);
  const auto total = [&] {
    double sum = 0;
    world.for_each_row(0, [&](std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t) {
      if (l == 0) {
        sum += static_cast<double>(world.view().score_sums.at<float>({}, {}, HeadId{h}, r));
      }
    });
    return sum;
  };
  REQUIRE(recorder.record(world.view(), data.step(0, true)) == Status::ok);
  CHECK(total() == Catch::Approx(8));  // 2 KV heads x 4 queries
  REQUIRE(recorder.record(world.view(), data.step(0, true)) == Status::ok);
  CHECK(total() == Catch::Approx(16));
}

TEST_CASE("recorder: observations of slots, layers or too many sequences out of range are empty",
          "[recorder][fault]") {
  const MethodSetup setup{.sequences = 2};
  MethodWorld world(setup);
  Recorder recorder(everything(), params_of(setup));
  REQUIRE(run(world, recorder, {{0, 6}, {1, 7}}) == Status::ok);
  const auto refused = [&](std::vector<std::int32_t> slots,
                           LayerId first,
                           std::int32_t layers,
                           std::string_view what,
                           std::int64_t value,
                           std::int64_t expected) {
    const Observation seen = recorder.observation(slots, first, layers);
    CHECK((seen.queries.data == nullptr && !seen.statistics));
    CHECK(recorder.fault().what == what);
    CHECK(recorder.fault().value == value);
    CHECK(recorder.fault().expected == expected);
    CHECK(recorder.missing(Needs{}, slots, first, layers) == "slots");
    const SnapKVSelector policy({.window = 2, .budget = 4});
    std::vector<std::byte> memory(plan_workspace_bytes(policy, plan_shape(world.view(), seen)));
    CHECK(plan(policy, world.view(), seen, memory).status() == Status::bad_observation);
  };
  refused({0, 2}, LayerId{0}, 0, "slot", 2, 2);
  refused({-1}, LayerId{0}, 0, "slot", -1, 2);
  refused({0, 1, 0}, LayerId{0}, 0, "sequences", 3, 2);
  refused({0}, LayerId{2}, 0, "layer", 2, 2);
  refused({0}, LayerId{-1}, 0, "layer", -1, 2);
  refused({0}, LayerId{1}, 2, "layers", 2, 1);
  refused({0}, LayerId{0}, -1, "layers", -1, 2);
}

TEST_CASE("recorder: names the first thing that a policy would lack", "[recorder]") {
  const MethodSetup setup{.sequences = 2};
  MethodWorld world(setup);
  Recorder recorder(everything(), params_of(setup));
  const SnapKVSelector snapkv({.window = window, .budget = 9});
  const HeavyHitter<> h2o;
  ExpectedAttention::Params p;
  p.scores.sinks = 2;
  const ExpectedAttention expected(p);
  const auto missing = [&](const auto& policy, std::vector<std::int32_t> slots) {
    return recorder.missing(policy, slots);
  };
  CHECK(missing(snapkv, {0}) == "window");
  CHECK(missing(h2o, {0}) == "accumulate");
  CHECK(missing(expected, {0}) == "moments");
  REQUIRE(run(world, recorder, {{0, 6}, {1, 0}}) == Status::ok);
  CHECK(missing(snapkv, {0}).empty());
  CHECK(missing(h2o, {0}).empty());
  CHECK(missing(expected, {0}).empty());
  CHECK(missing(snapkv, {0, 1}) == "window");
  CHECK(missing(h2o, {1}) == "accumulate");
  CHECK(missing(expected, {0, 1}) == "moments");
  CHECK(missing(SnapKVSelector({.window = window + 1, .budget = 9}), {0}) == "window");
  HeavyHitter<>::Params decayed;
  decayed.decay = 0.5F;
  CHECK(missing(HeavyHitter<>(decayed), {0}) == "accumulate");
  CHECK(missing(ExpectedAttention{}, {0}) == "moments");  // of all but 4
  CHECK(missing(QFilter{}, {0}) == "filters");
  CHECK(missing(CriticalKV<SnapKVSelector<>>({.inner = {.window = 3, .budget = 9}}), {0}) ==
        "output");
  CHECK(missing(External{}, {0}).empty());                      // the scores are the caller's
  CHECK_FALSE(recorder.observation(std::array{1}).statistics);  // so the plan is refused, too
}

TEST_CASE("recorder: needs that the engine cannot serve are refused with the numbers",
          "[recorder][fault]") {
  RecorderParams p{.layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 8, .lse = true};
  const auto text = [](const Needs& needs, const RecorderParams& params) {
    return refusal([&] { static_cast<void>(Recorder(needs, params)); });
  };
  CHECK(text({}, p).empty());
  RecorderParams odd = p;
  odd.kv_heads = 4;
  CHECK(text({}, odd) ==
        "kvtrim::Recorder: sequences 1, layers 2, head_dim 8 and workers 1 must be at least 1, "
        "query_heads 6 a multiple of kv_heads 4");
  for (std::int32_t RecorderParams::* extent : {&RecorderParams::sequences,
                                                &RecorderParams::layers,
                                                &RecorderParams::query_heads,
                                                &RecorderParams::kv_heads,
                                                &RecorderParams::head_dim,
                                                &RecorderParams::workers}) {
    RecorderParams none = p;
    none.*extent = 0;
    CHECK_FALSE(text({}, none).empty());
  }
  CHECK(text({.window = -1}, p) == "kvtrim::Recorder: window -1 is negative");
  CHECK(text({.moments = MomentParams{-1}}, p).find("sinks -1") != std::string::npos);
  CHECK(text({.accumulate = AccumulateParams{.decay = 2}}, p) ==
        "kvtrim::Recorder: decay 2 is not within (0, 1]");
  RecorderParams blind = p;
  blind.lse = false;
  CHECK(text({.accumulate = AccumulateParams{}}, blind) ==
        "kvtrim::Recorder: accumulated attention needs an LSE or probabilities, but lse false, "
        "probabilities false");
  CHECK(text({.window = 4}, blind).empty());
  CHECK(text({.filters = true}, p) ==
        "kvtrim::Recorder: filters of 8 features are needed, those given have 0 (0: none)");
  const std::vector<float> numbers(512);
  RecorderParams other = p;
  other.filters = {numbers.data(), 16, 32, 16};
  CHECK(text({.filters = true}, other) ==
        "kvtrim::Recorder: filters of 8 features are needed, those given have 16 (0: none)");
  CHECK(text({.output = true}, p) ==
        "kvtrim::Recorder: an output projection of 6 query heads is needed, the one given has 0 "
        "(0: none), hidden 0");
  other.output = {numbers.data(), 4, 8, 10, 320};
  CHECK(text({.output = true}, other) ==
        "kvtrim::Recorder: an output projection of 6 query heads is needed, the one given has 4 "
        "(0: none), hidden 10");
}

TEST_CASE("recorder: its memory is known first", "[recorder]") {
  // 32 layers x 32 heads x 128 features: 134 MB of moments for a sequence.
  const RecorderParams large{.layers = 32, .query_heads = 32, .kv_heads = 8, .head_dim = 128};
  const auto moments = static_cast<double>(
      Recorder::bytes(Needs{.moments = MomentParams{}}, large) - Recorder::bytes({}, large));
  CHECK(moments == Catch::Approx(134.2e6).epsilon(0.03));
  RecorderParams two = large;
  two.sequences = 2;
  CHECK(Recorder::bytes(everything(), two) > Recorder::bytes(everything(), large));
  CHECK(Recorder::bytes({}, large) < 1000);
}
