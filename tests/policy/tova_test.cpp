// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/tova.hpp>

#include <kvtrim/score/tova.hpp>

#include "catch.hpp"
#include "support/method_world.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

using namespace kvtrim;
using test::MethodWorld;

namespace {

// Mean over all query heads of the softmax row of the last query over the keys at `positions`.
std::vector<double> last_row(const MethodWorld& world,
                             std::int32_t l,
                             const std::vector<std::int32_t>& positions) {
  const test::MethodSetup& s = world.setup();
  std::vector<double> out(positions.size(), 0.0);
  const std::int32_t heads = s.kv_heads * s.group;
  for (std::int32_t head = 0; head < heads; ++head) {
    const auto query = world.query(0, l, head, positions.back());
    std::vector<double> row;
    for (const std::int32_t p : positions) {
      const auto key = world.key(0, l, head / s.group, p);
      double dot = 0;
      for (std::size_t d = 0; d < key.size(); ++d) {
        dot += static_cast<double>(key[d]) * static_cast<double>(query[d]);
      }
      row.push_back(std::exp(dot / std::sqrt(static_cast<double>(s.dim))));
    }
    const double sum = std::accumulate(row.begin(), row.end(), 0.0);
    for (std::size_t r = 0; r < row.size(); ++r) { out[r] += row[r] / sum / heads; }
  }
  return out;
}

std::vector<std::int32_t> best_of(const std::vector<double>& scores,
                                  const std::vector<std::int32_t>& positions,
                                  std::size_t budget,
                                  bool last_stays) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto rank = [&](std::size_t i) {
    return last_stays && i + 1 == scores.size() ? 2.0 : scores[i];
  };
  std::sort(
      order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return rank(a) > rank(b); });
  std::vector<std::int32_t> out;
  for (std::size_t n = 0; n < std::min(budget, order.size()); ++n) {
    out.push_back(positions[order[n]]);
  }
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace

TEST_CASE("tova policy: after a prompt and after every step the last query's best stay, per layer",
          "[tova][paper]") {
  for (const bool protect : {true, false}) {
    for (const Removal removal : {Removal::stable_pack, Removal::overwrite_slot}) {
      MethodWorld world({});
      const Tova policy(protect ? Tova::Params{.budget = 10} : tova_unprotected(10));
      std::vector<std::vector<std::int32_t>> kept(2);
      bool newest_went = false;
      for (std::int32_t step = 0; step < 20; ++step) {
        const std::int32_t n = step == 0 ? 30 : 1;
        const std::int32_t first = raw(world.cache().next_position(SequenceId{0}));
        REQUIRE(world.append(0, n) == Status::ok);
        REQUIRE(world.evict(policy, world.observation(), {.removal = removal}).status ==
                Status::ok);
        for (std::int32_t l = 0; l < 2; ++l) {
          auto& set = kept[static_cast<std::size_t>(l)];
          for (std::int32_t p = first; p < first + n; ++p) { set.push_back(p); }
          const auto best = best_of(last_row(world, l, set), set, 10, protect);
          newest_went = newest_went || best.back() != first + n - 1;
          set = best;
          INFO("step " << step << ", layer " << l);
          CHECK(world.kept(0)[static_cast<std::size_t>(2 * l)] == set);
          CHECK(world.kept(0)[static_cast<std::size_t>(2 * l + 1)] == set);
        }
        REQUIRE(world.rows_belong_to_their_positions());
      }
      CHECK(newest_went == !protect);
    }
  }
}

TEST_CASE("tova policy: needs a query, and heads that hold the same tokens", "[tova][edge]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 30) == Status::ok);
  const Tova policy({.budget = 10});
  CHECK(world.evict(policy, {}).status == Status::bad_observation);
  Observation obs = world.observation();
  obs.queries.query_heads = 5;
  MethodWorld other({});
  REQUIRE(other.append(0, 30) == Status::ok);
  CHECK(other.evict(policy, obs).status == Status::bad_observation);
  // A row of one head that is another token there.
  other.view().positions.at<Position>(SequenceId{0}, LayerId{1}, HeadId{1}, 7) = Position{99};
  CHECK(other.evict(policy, other.observation()).status == Status::bad_observation);
}

TEST_CASE("tova policy: the authors' form is had by name", "[tova]") {
  STATIC_REQUIRE(Tova().params().recent == 1);
  STATIC_REQUIRE(tova_unprotected(7).recent == 0);
  STATIC_REQUIRE(tova_unprotected(7).budget == 7);
}

TEST_CASE("tova_params: how probabilities are added up is all there is to set", "[tova]") {
  STATIC_REQUIRE(sizeof(TovaParams) == sizeof(Sums));
  STATIC_REQUIRE(TovaParams{}.sums == Sums::floating);
  STATIC_REQUIRE(std::is_aggregate_v<TovaParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<TovaParams>);
}
