// SPDX-License-Identifier: Apache-2.0
// The contract between a scheduler that runs ahead and its worker (examples/engines/README.md), as a small model. The
// scheduler keeps numbers only; the worker has tables, rows and plans; reports come back one step late.
#include <kvtrim/engine/tensor_view.hpp>
#include <kvtrim/policy/released_pages.hpp>

#include "catch.hpp"
#include "support/instances.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <numeric>
#include <vector>

using namespace kvtrim;

namespace {

constexpr std::int32_t page_size = 4, pool_pages = 60, max_pages = 20;
using Ints = std::vector<std::int32_t>;

// What the scheduler asks of the worker for one request in one step.
struct Order {
  std::int32_t request = 0;
  std::int32_t rows = 0;      // to append: a chunk, or a token and drafts
  std::int32_t rejected = 0;  // of the rows of the step before: drafts that were not taken
  bool cut = false;           // evict after the step
  bool ends = false;          // the request ends, in this very step
  bool restarts = false;      // preempted: everything goes, the tokens come again
  Ints pages;                 // granted
};
struct Answer {
  std::int32_t request = 0;
  std::int32_t live = 0;
  Ints released;
};

// The worker: pages of one-float rows, `request * 1000 + position`.
template <class P>
class Worker {
 public:
  explicit Worker(const P& policy) : policy_(policy), keys_(pool_pages * page_size * 2) {}

  Answer run(const Order& o) {
    auto& r = requests_[o.request];
    if (o.restarts) {  // rows, positions and states together: no old score meets a new row (B082)
      Answer a{o.request, 0, r.pages};
      r = {};
      return a;
    }
    // Drafts that were rejected are the newest rows: none of them has been evicted.
    for (std::int32_t i = 0; i < o.rejected; ++i) {
      REQUIRE(r.positions.back() == r.state.next_position - 1);
      r.positions.pop_back();
      --r.state.live_rows, --r.state.next_position;
    }
    r.pages.insert(r.pages.end(), o.pages.begin(), o.pages.end());
    for (std::int32_t i = 0; i < o.rows; ++i) {
      std::int32_t row = r.state.live_rows;
      if (r.state.append_row >= 0) {
        row = r.state.append_row;
        r.state.ordered = r.state.ordered && row == r.state.live_rows;
        r.state.append_row = -1;
        r.positions[static_cast<std::size_t>(row)] = r.state.next_position;
      } else {
        r.positions.push_back(r.state.next_position);
      }
      key(r, row) = static_cast<float>(o.request * 1000 + r.state.next_position);
      key(r, row, true) = 1.0F / static_cast<float>(1 + r.state.next_position * 7 % 13);
      ++r.state.live_rows, ++r.state.next_position;
    }
    check(o.request, r);
    Answer a{o.request, r.state.live_rows, {}};
    if (o.cut || o.ends) { cut(r, o, a); }
    if (!o.ends) { check(o.request, r); }
    a.live = r.state.live_rows;
    if (o.ends) { requests_.erase(o.request); }
    return a;
  }

 private:
  struct Request {
    SequenceState state;
    Ints positions, pages;
  };
  float& key(Request& r, std::int32_t row, bool second = false) {
    const std::int32_t page = r.pages.at(static_cast<std::size_t>(row / page_size));
    return keys_[static_cast<std::size_t>((page * page_size + row % page_size) * 2 +
                                          (second ? 1 : 0))];
  }
  // Every row is what its position says: nobody else has written to its page.
  void check(std::int32_t id, Request& r) {
    for (std::int32_t row = 0; row < r.state.extent(); ++row) {
      if (row == r.state.append_row) { continue; }
      REQUIRE(key(r, row) ==
              static_cast<float>(id * 1000 + r.positions[static_cast<std::size_t>(row)]));
    }
  }
  void cut(Request& r, const Order& o, Answer& a) {
    const auto t = Tensor<3>::contiguous(keys_.data(), {pool_pages, page_size, 2}, DType::f32);
    CacheView view = tensor_view(t, "PND", t.narrow(2, 0, 1), "PND");
    Ints ids(max_pages, -1);
    std::copy(r.pages.begin(), r.pages.end(), ids.begin());
    Ints lengths{r.state.live_rows};
    set_tables(view, DenseTable{ids.data(), lengths.data(), 1, max_pages, max_pages});
    Ints reserved{static_cast<std::int32_t>(r.pages.size()) -
                  pages_for(r.state.extent(), page_size)};
    view.reserved_pages = reserved.data();
    view.states = &r.state;
    r.positions.resize(max_pages * page_size + 1);
    view.positions = SequencePlane::dense(r.positions.data(), 1, 1, max_pages * page_size);
    std::vector<std::byte> workspace(plan_workspace_bytes(policy_, plan_shape(view)));
    const PlanRef made = plan(policy_, view, {}, workspace, {.reserved = ReservedPages::release});
    REQUIRE(made.status() == Status::ok);
    REQUIRE((apply(made, view) == Status::ok));
    if (o.ends) {  // in the step it is evicted in: all pages go back by the end, none by the plan
      a.released = r.pages;
      const CacheView ended = [&] {
        CacheView v = view;
        lengths[0] = 0, r.state = {};
        return v;
      }();
      DenseTables sink(ended, ids.data(), lengths.data(), nullptr, {});
      const Report report = commit(made, ended, sink);
      CHECK(report.released_pages == 0);
      return;
    }
    std::vector<PageId> freed(max_pages);
    DenseTables sink(view, ids.data(), lengths.data(), nullptr, freed);
    CHECK(commit(made, view, sink).status == Status::ok);
    for (const PageId p : sink.freed()) { a.released.push_back(raw(p)); }
    r.pages.clear();
    for (const std::int32_t id : ids) {
      if (id >= 0) { r.pages.push_back(id); }
    }
    r.positions.resize(static_cast<std::size_t>(r.state.extent()));
  }

  P policy_;
  std::vector<float> keys_;
  std::map<std::int32_t, Request> requests_;
};

// The scheduler: two lengths of each request, page counts, and a free list. It never sees a row.
struct Numbers {
  std::int32_t logical = 0;   // the next token's position, hence its rotation and the text's length
  std::int32_t physical = 0;  // rows in the cache, hence slots and pages
  std::int32_t hole = 0;      // a slot that the next row overwrites
  std::int32_t since = 0;     // rows at the last cut
  std::int32_t pages = 0;
  std::int32_t prompt = 0;  // still to read
  std::int32_t drafts = 0;  // of the last step
  std::int32_t left = 0;    // tokens to write
};

template <class P>
void run(const P& policy, std::uint64_t seed) {
  test::Random random(seed);
  Worker<P> worker(policy);
  std::map<std::int32_t, Numbers> requests;
  Ints free(pool_pages);
  std::iota(free.begin(), free.end(), 0);
  // Pages to come, and what was predicted of each step that is under way.
  struct Step {
    std::vector<Order> orders;
    std::vector<std::int32_t> live, released;
  };
  std::deque<Step> in_flight;
  std::int32_t next_request = 1, ended = 0, preempted = 0, cuts = 0;
  const auto finish_oldest = [&] {
    const Step step = in_flight.front();
    in_flight.pop_front();
    for (std::size_t i = 0; i < step.orders.size(); ++i) {
      const Answer a = worker.run(step.orders[i]);
      // The counts were known before: the scheduler has long gone on with them.
      if (!step.orders[i].ends) { REQUIRE(a.live == step.live[i]); }
      REQUIRE(static_cast<std::int32_t>(a.released.size()) == step.released[i]);
      for (const std::int32_t p : a.released) {  // exactly once
        REQUIRE(std::find(free.begin(), free.end(), p) == free.end());
        free.push_back(p);
      }
    }
  };
  for (std::int32_t tick = 0; tick < 150; ++tick) {
    if (requests.size() < 3 && random.below(3) == 0) {
      Numbers n;
      n.prompt = 1 + random.below(30);
      n.left = random.below(25);
      requests[next_request++] = n;
    }
    Step step;
    std::vector<std::int32_t> gone;
    for (auto& [id, n] : requests) {
      Order o;
      o.request = id;
      if (n.physical > 0 && random.below(40) == 0) {  // preempted: replayed as a prompt
        o.restarts = true;
        n.prompt += n.logical;
        ++preempted;
        step.orders.push_back(o);
        step.live.push_back(0);
        step.released.push_back(n.pages);
        n.logical = n.physical = n.hole = n.since = n.pages = n.drafts = 0;
        continue;
      }
      o.rejected = n.drafts > 0 ? random.below(n.drafts + 1) : 0;
      const std::int32_t physical = n.physical - o.rejected;
      const std::int32_t drafts = n.prompt > 0 ? 0 : random.below(3);
      o.rows = n.prompt > 0 ? std::min(n.prompt, 1 + random.below(9)) : 1 + drafts;
      const std::int32_t need = std::max(
          0, pages_for(physical + o.rows + (n.hole > o.rows ? 1 : 0), page_size) - n.pages);
      if (need > static_cast<std::int32_t>(free.size())) { continue; }  // waits for the worker
      for (std::int32_t i = 0; i < need; ++i) { o.pages.push_back(free.back()), free.pop_back(); }
      n.pages += need;
      n.logical += o.rows - o.rejected;
      n.physical = physical + o.rows;
      n.since = std::min(n.since, physical);
      n.hole = 0;
      o.ends = n.prompt == 0 && --n.left <= 0;
      n.prompt -= n.prompt > 0 ? o.rows : 0;
      n.drafts = drafts;
      o.cut = !o.ends && random.below(2) == 0;
      std::int32_t released = o.ends ? n.pages : 0;
      if (o.cut) {
        DemandInput in;
        in.live = in.state.live_rows = n.physical;
        in.state.next_position = n.logical;
        in.state.rows_at_eviction = n.since;
        in.page_size = page_size;
        const CutCounts counts = cut_counts(policy, in);
        // Entries beyond the rows (of rejected drafts) leave, too, where anything goes.
        const bool any = counts.rows < n.physical;
        const std::int32_t beyond = n.pages - pages_for(n.physical, page_size);
        released = counts.pages + (any ? beyond : 0);
        n.hole =
            policy.removal() == Removal::overwrite_slot && n.physical - counts.rows == 1 ? 1 : 0;
        n.physical = counts.rows;
        if (any) { n.since = counts.rows; }
        n.pages -= released;
        cuts += any ? 1 : 0;
      }
      step.orders.push_back(o);
      step.live.push_back(n.physical);
      step.released.push_back(released);
      if (o.ends) { gone.push_back(id); }
    }
    for (const std::int32_t id : gone) { requests.erase(id), ++ended; }
    in_flight.push_back(step);
    if (in_flight.size() > 1) { finish_oldest(); }
    // Nothing is lost: free, held, or on its way back.
    std::int32_t all = static_cast<std::int32_t>(free.size());
    for (const auto& [id, n] : requests) { all += n.pages; }
    for (const Step& s : in_flight) {
      all += std::accumulate(s.released.begin(), s.released.end(), 0);
    }
    REQUIRE(all == pool_pages);
  }
  while (!in_flight.empty()) { finish_oldest(); }
  CHECK(ended > 3);
  CHECK(preempted > 0);
  CHECK(cuts > 20);
}

}  // namespace

TEST_CASE("scheduler: counts are known a step ahead, pages come back once, rows stay their own",
          "[scheduler][property]") {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    INFO(seed);
    run(StreamingSink<>({.sinks = 2, .recent = 9}), seed);
    run(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 9}), seed);
    run(KeyNorm({.budget = 11, .sinks = 1, .recent = 4}), seed);
    run(KeyDiff({.budget = 9, .recent = 3}), seed);
    run(PageSelector<KeyDiffParams>({.budget = 14, .sinks = 1, .window = 4}), seed);
  }
}
