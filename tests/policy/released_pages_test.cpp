// SPDX-License-Identifier: Apache-2.0
// With a scheduler that relies on it: tests/engine/scheduler_test.cpp.
#include <kvtrim/engine/tensor_view.hpp>
#include <kvtrim/policy/released_pages.hpp>

#include "catch.hpp"
#include "support/instances.hpp"
#include "support/random.hpp"

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <vector>

using namespace kvtrim;
using Ints = std::vector<std::int32_t>;

TEST_CASE("released_pages: what a plan releases, for every length, page size and way",
          "[released_pages][property]") {
  const auto check = [](const auto& policy, std::initializer_list<Removal> ways) {
    for (const std::int32_t size : {1, 3, 4, 16}) {
      for (std::int32_t live = 0; live <= 40; ++live) {
        for (const Removal way : ways) {
          std::vector<float> memory(static_cast<std::size_t>(48 * size * 2));
          test::Random random(static_cast<std::uint64_t>(live * 31 + size));
          for (float& x : memory) { x = random.uniform(); }
          const auto t = Tensor<4>::contiguous(memory.data(), {48, size, 1, 2}, DType::f32);
          CacheView view = tensor_view(t, "PNHD", t.narrow(3, 0, 1), "PNHD");
          Ints ids(48), lengths{live}, positions(40);
          std::iota(ids.begin(), ids.end(), 0);
          std::iota(positions.begin(), positions.end(), 0);
          set_tables(view, DenseTable{ids.data(), lengths.data(), 1, 48, 48});
          SequenceState state;
          state.live_rows = state.next_position = state.next_rope_position = live;
          view.states = &state;
          view.positions = SequencePlane::dense(positions.data(), 1, 1, 40);
          std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view)));
          const PlanRef made = plan(policy, view, {}, workspace, {.removal = way});
          REQUIRE(usable(made.status()));
          INFO(std::remove_cvref_t<decltype(policy)>::name << " " << live << " of " << size);
          CHECK(released_pages(policy, live, size, way) ==
                static_cast<std::int32_t>(made.released({}, 0).size()));
        }
      }
    }
  };
  const auto all = {Removal::automatic,
                    Removal::stable_pack,
                    Removal::fill_holes,
                    Removal::overwrite_slot,
                    Removal::drop_pages};
  const auto rows = {
      Removal::automatic, Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot};
  check(StreamingSink<>({.sinks = 2, .recent = 9}), all);
  check(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 9}), all);
  check(KeyNorm({.budget = 11, .sinks = 1, .recent = 4}), rows);
  check(KeyDiff({.budget = 9, .recent = 3}), rows);
  check(PageSelector<KeyDiffParams>({.budget = 14, .sinks = 1, .window = 4}), {Removal::automatic});
  check(Full(), rows);
  static_assert(released_pages(StreamingSink<>({.sinks = 4, .recent = 12}), 40, 4) == 6);
  CHECK_THROWS_AS(released_pages(KeyNorm({.budget = 8}), 20, 4, Removal::drop_pages),
                  std::invalid_argument);
  CHECK_THROWS_AS(released_pages(Full(), -1, 4), std::invalid_argument);
  CHECK_THROWS_AS(released_pages(Full(), 1, 0), std::invalid_argument);
}
