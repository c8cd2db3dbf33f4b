// SPDX-License-Identifier: Apache-2.0
// Random operations on caches of every kind, against a model that is a list of rows per (sequence, layer, KV head) and that
// chooses the rows of every policy itself. What happens to a PagedCache happens to the same cache in foreign memory, step by
// step, and the two are the same to the bit.
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

// What is left of accumulated scores differs in its last bit after a fork: less than the model sees.
class Inexact final : public ForeignEngine {
 public:
  using ForeignEngine::ForeignEngine;
  Status fork(std::int32_t s, std::int32_t made) override {
    const Status status = ForeignEngine::fork(s, made);
    const CacheView of = view(made);
    for (std::int32_t r = 0; of.score_sums && r < of.state({}, {}, {}).live_rows; ++r) {
      float& rest = of.score_compensations.at<float>({}, {}, {}, r);
      rest = std::nextafter(rest, 1.0F);
    }
    return status;
  }
};

// The second of some enumerators for the first, and the first for all others.
template <class E>
constexpr E other(E x) {
  return static_cast<E>(x == E{} ? 1 : 0);
}

// Whether the first worlds find a planted fault, and say `text` of it.
bool is_found(const Parts& parts, const std::string& text) {
  const Steps steps = all_steps(operations_of_a_world);
  for (std::uint64_t seed = 1; seed < 1000; ++seed) {
    const Outcome out = run(seed, steps, false, parts);
    if (out.failure && out.failure->find(text) != std::string::npos) { return true; }
  }
  return false;
}

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
      FAIL(EvictingWorld(seed, false, {}).words() << "\n"
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
  Parts parts;
  parts.paged = [](const Setup& x) -> std::unique_ptr<Engine> {
    return std::make_unique<Forgetful>(x);
  };
  std::int32_t found = 0;
  for (std::uint64_t seed = 1; found < 3; ++seed) {
    const Outcome out = run(seed, steps, false, parts);
    if (!out.failure) { continue; }
    ++found;
    const Steps few = shrunk(steps, [&](const Steps& s) { return fails(seed, s, false, parts); });
    const Outcome last = run(seed, few, false, parts);
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
      CHECK_FALSE(fails(seed, fewer, false, parts));
    }
  }
}

TEST_CASE("random: a bit that differs between PagedCache and foreign memory is seen", "[random]") {
  Parts parts;
  parts.foreign = [](const Setup& x, std::uint64_t seed) -> std::unique_ptr<ForeignEngine> {
    return std::make_unique<Inexact>(x, seed);
  };
  CHECK(is_found(parts, "another score's compensation in foreign memory"));
}

TEST_CASE("random: a policy that chooses by another rule than the model is seen", "[random]") {
  struct Fault {
    const char* what;
    void (*told)(Rule&);
  };
  const Fault fault =
      GENERATE(Fault{"safeguard", [](Rule& r) { r.sharing.safeguard = 1 - r.sharing.safeguard; }},
               Fault{"form", [](Rule& r) { r.sharing.form = other(r.sharing.form); }},
               Fault{"heads that share", [](Rule& r) { r.sharing.over = other(r.sharing.over); }},
               Fault{"first stage", [](Rule& r) { r.first_stage = 1 - r.first_stage / 2; }},
               Fault{"epsilon", [](Rule& r) { r.epsilon = 0; }},
               Fault{"rows of a page", [](Rule& r) { r.page.reduction = other(r.page.reduction); }},
               Fault{"top_m", [](Rule& r) { ++r.page.top_m; }},
               Fault{"norm",
                     [](Rule& r) {
                       if (r.kind == Rule::page_set) { r.page.norm = other(r.page.norm); }
                     }},
               Fault{"heads of a page", [](Rule& r) { r.page.heads = other(r.page.heads); }},
               Fault{"page set", [](Rule& r) { r.unit = PageUnit::per_table; }});
  INFO(fault.what);
  Parts parts;
  parts.told = fault.told;
  CHECK(is_found(parts, "other rows stay than the best"));
}
