// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/csr_tables.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/instances.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using namespace kvtrim;

namespace {

using Ints = std::vector<std::int32_t>;

// Five sequences, one of them empty; tables per KV head if asked for. Rows are single floats.
struct Csr {
  std::vector<float> keys = std::vector<float>(64 * 4 * 2), values = keys;
  std::int32_t heads;
  Ints indptr{0}, indices, last, counts, refs = Ints(64, 1);
  std::vector<PageId> freed = std::vector<PageId>(64);
  CacheView view;

  Csr(bool per_head, const Ints& lengths) : heads(per_head ? 2 : 1) {
    std::int32_t next = 0;
    for (const std::int32_t live : lengths) {
      for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t e = 0; e < pages_for(live, 4); ++e) {
          indices.push_back((next++ * 11 + 3) % 64);
        }
        indptr.push_back(static_cast<std::int32_t>(indices.size()));
        last.push_back(live == 0 ? 0 : (live - 1) % 4 + 1);
      }
    }
    counts.resize(last.size());
    view.k = Plane::nhd(keys.data(), {4, per_head ? 1 : 2, 1, DType::f32});
    view.v = Plane::nhd(values.data(), {4, per_head ? 1 : 2, 1, DType::f32});
    if (per_head) { view.k.head_stride = view.v.head_stride = 0; }
    view.page_size = 4, view.pages = 64, view.kv_heads = 2;
    view.sequences = static_cast<std::int32_t>(lengths.size());
    view.scope = per_head ? TableScope::head : TableScope::group;
    view.table.ids = indices.data();
    view.table.indptr = indptr.data();
    view.table.rows = {heads, 0, per_head ? 1 : 0};
    view.last_page_len = last.data();
    view.writable.ref_counts = refs.data();
  }
  Ints row(std::size_t r) const {
    return {indices.begin() + indptr[r], indices.begin() + indptr[r + 1]};
  }
};

}  // namespace

TEST_CASE("csr_tables: rows are closed up, whichever of them are evicted from", "[csr_tables]") {
  for (const bool per_head : {false, true}) {
    for (const std::int32_t keep : {0, 1, 4, 5, 9, 30}) {
      Csr c(per_head, {13, 4, 0, 18, 5});
      std::vector<Ints> before;
      for (std::size_t r = 0; r < c.last.size(); ++r) { before.push_back(c.row(r)); }
      const test::ByScore policy{.keep = keep};
      std::vector<float> scores(5 * 2 * 20);
      test::Random random(9);
      for (float& x : scores) { x = random.uniform(); }
      Observation obs;
      obs.scores = SequencePlane::dense(scores.data(), 1, 2, 20);
      std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(c.view, obs)));
      const PlanRef made = plan(policy, c.view, obs, workspace);
      REQUIRE((apply(made, c.view) == Status::ok));
      CsrTables sink(c.view,
                     c.indptr.data(),
                     c.indices.data(),
                     c.last.data(),
                     c.refs.data(),
                     c.counts,
                     c.freed);
      const Report report = commit(made, c.view, sink);
      CHECK(report.status == Status::ok);
      std::int32_t gone = 0;
      CHECK(c.indptr[0] == 0);
      for (std::size_t r = 0; r < before.size(); ++r) {
        const std::int32_t was = Ints{13, 4, 0, 18, 5}[r / static_cast<std::size_t>(c.heads)];
        const std::int32_t live = std::min(was, keep);
        const auto pages = static_cast<std::size_t>(pages_for(live, 4));
        // The first pages stay: rows are packed to the front.
        CHECK((c.row(r) == Ints(before[r].begin(), before[r].begin() + static_cast<long>(pages))));
        CHECK(c.last[r] == (live == 0 ? 0 : (live - 1) % 4 + 1));
        gone += static_cast<std::int32_t>(before[r].size() - pages);
      }
      CHECK(report.released_pages == gone);
      CHECK(sink.freed().size() == static_cast<std::size_t>(gone));
      for (const PageId p : sink.freed()) { CHECK(c.refs[static_cast<std::size_t>(raw(p))] == 0); }
    }
  }
}

namespace {
// What a sink is called with, in order.
struct Calls {
  std::string order;
  void update(const TableUpdate&) noexcept { order += 'u'; }
  void finish() noexcept { order += 'f'; }
  bool release(PageId) noexcept {
    order += 'r';
    return true;
  }
};
static_assert(TableSink<Calls>);
}  // namespace

TEST_CASE("commit: finish is called once, after the last update and before the first release",
          "[csr_tables][commit]") {
  Csr c(false, {13, 4, 18});
  const StreamingSink<SinkForm::pages> policy({.sinks = 1, .recent = 5});
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(c.view)));
  const PlanRef made = plan(policy, c.view, {}, workspace);
  REQUIRE((apply(made, c.view) == Status::ok));
  Calls calls;
  CHECK(commit(made, c.view, calls).status == Status::ok);
  CHECK(calls.order == "uufrrr");
}

TEST_CASE("csr_tables: a hole cannot be told by the last page's rows, so no slot is overwritten",
          "[csr_tables][edge]") {
  Csr c(false, {13});
  std::vector<SequenceState> states(1);
  states[0].live_rows = states[0].next_position = states[0].next_rope_position = 13;
  Ints positions(2 * 13);
  for (std::size_t i = 0; i < positions.size(); ++i) {
    positions[i] = static_cast<std::int32_t>(i % 13);
  }
  c.view.states = states.data();
  c.view.positions = SequencePlane::dense(positions.data(), 1, 2, 13);
  const StreamingSink<SinkForm::exact> policy({.sinks = 4, .recent = 8});
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(c.view)));
  CHECK((plan(policy, c.view, {}, workspace, {.removal = Removal::overwrite_slot}).status() ==
         Status::bad_options));
  const PlanRef made = plan(policy, c.view, {}, workspace);
  REQUIRE(made.status() == Status::ok);
  CHECK(made.table({}, 0).removal == Removal::stable_pack);
  CHECK(made.table({}, 0).replaced);
}
