// SPDX-License-Identifier: Apache-2.0
// Random operations on caches of every kind, against a model that is a list of rows per (sequence, layer, KV head).
//
// KVTRIM_RANDOM_OPERATIONS: how many. KVTRIM_RANDOM_SEED: of one world alone; if it fails, the fewest of its operations that
// still do are printed, also where an assertion of the library or a sanitizer ends them.
#include "catch.hpp"
#include "random/shrink.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <set>
#include <string>

using namespace kvtrim;
using namespace kvtrim::random_test;

namespace {

constexpr std::int32_t operations_of_a_world = 400;

std::int64_t environment(const char* name, std::int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

// Pages lose the key of their first row when rows are evicted after any sequence was forked.
class Forgetful final : public PagedEngine {
 public:
  using PagedEngine::PagedEngine;
  Status fork(std::int32_t s, std::int32_t made) override {
    const Status status = PagedEngine::fork(s, made);
    forked_ = forked_ || status == Status::ok;
    return status;
  }
  Report commit(const PlanRef& plan, const CacheView& view) override {
    const Report report = PagedEngine::commit(plan, view);
    if (!forked_ || report.evicted_rows == 0) { return report; }
    const CacheView all = this->view(-1);
    for (std::int32_t page = 0; page < all.pages; ++page) {
      if (count(page) == 0) { continue; }
      std::memset(
          all.k.row(LayerId{0}, PageId{page}, HeadId{0}, Slot{0}), 0, at(all.k.row_bytes()));
    }
    return report;
  }

 private:
  bool forked_ = false;
};

}  // namespace

TEST_CASE("random operations leave in every cache what a plain model says", "[random][property]") {
  const std::int64_t only = environment("KVTRIM_RANDOM_SEED", -1);
  const std::int64_t operations = environment("KVTRIM_RANDOM_OPERATIONS", 300'000);
  const std::int64_t worlds = (operations + operations_of_a_world - 1) / operations_of_a_world;
  const Steps steps = all_steps(operations_of_a_world);
  if (only >= 0) {
    const auto seed = static_cast<std::uint64_t>(only);
    if (!fails(seed, steps)) { return; }
    const Steps few = shrunk(steps, [&](const Steps& s) { return fails(seed, s); });
    std::cerr << few.size() << " operations that fail:" << std::endl;
    CHECK(!fails(seed, few, true));
    return;
  }
  std::set<EvictingWorld::Eviction> evictions;
  for (std::int64_t world = 1; world <= worlds; ++world) {
    const auto seed = static_cast<std::uint64_t>(world);
    INFO("KVTRIM_RANDOM_SEED=" << seed);
    const Outcome out = run(seed, steps);
    if (out.failure) {
      const Steps all(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(out.done));
      const Steps few = shrunk(all, [&](const Steps& s) { return fails(seed, s); });
      FAIL(EvictingWorld(seed, false, make_paged).words()
           << "\n"
           << *out.failure << "\n"
           << few.size() << " operations that fail:\n"
           << run(seed, few).history);
    }
    evictions.insert(out.evictions.begin(), out.evictions.end());
  }
  // Every policy, way and mode; `full` keeps all rows, and sets of pages are dropped.
  std::string missing;
  for (std::int32_t i = 0; i < Rule::kinds * 12; ++i) {
    const EvictingWorld::Eviction one{static_cast<Rule::Kind>(i / 12),
                                      static_cast<Removal>(1 + i / 3 % 4),
                                      static_cast<PositionMode>(i % 3)};
    Rule rule;
    rule.kind = one.kind;
    if (one.kind == Rule::full || evictions.contains(one) ||
        (rule.by_page() && one.way != Removal::drop_pages)) {
      continue;
    }
    missing += "\n" + std::to_string(one.kind) + " " + std::string(to_string(one.way)) + " " +
               std::string(to_string(one.mode));
  }
  if (operations >= 1'000'000) { CHECK(missing == ""); }
}

TEST_CASE("random: of a run that fails, the operations stay that it takes", "[random]") {
  const Steps steps = all_steps(operations_of_a_world);
  const auto make = [](const Setup& x) -> std::unique_ptr<Engine> {
    return std::make_unique<Forgetful>(x);
  };
  std::int32_t found = 0;
  for (std::uint64_t seed = 1; found < 3; ++seed) {
    const Outcome out = run(seed, steps, false, make);
    if (!out.failure) { continue; }
    ++found;
    const Steps few = shrunk(steps, [&](const Steps& s) { return fails(seed, s, false, make); });
    const Outcome last = run(seed, few, false, make);
    INFO("seed " << seed << "\n" << last.history);
    REQUIRE(last.failure);
    CHECK(*last.failure == "commit wrote a page");
    CHECK(last.history.find("fork sequence") != std::string::npos);
    CHECK(last.history.find("commit sequence") != std::string::npos);
    CHECK(few.size() >= 3);  // rows, a fork, an eviction
    CHECK(few.size() <= 10);
    for (std::size_t i = 0; i < few.size(); ++i) {
      Steps fewer = few;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
      CHECK_FALSE(fails(seed, fewer, false, make));
    }
  }
}
