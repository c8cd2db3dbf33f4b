// SPDX-License-Identifier: Apache-2.0
// Random operations on caches of every kind, against a model that is a list of rows per (sequence, layer, KV head).
//
// KVTRIM_RANDOM_OPERATIONS: how many. KVTRIM_RANDOM_SEED: of one world alone, to see a failure again; it prints them.
#include <kvtrim/evict/evict.hpp>

#include <kvtrim/cache/check_layout.hpp>

#include "catch.hpp"
#include "random/engines.hpp"
#include "random/model.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <limits>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::random_test;

namespace {

constexpr std::int32_t operations_of_a_world = 400;

class World {
 public:
  // `talks`: every operation is printed, so that also an assertion of the library shows what came before it.
  explicit World(std::uint64_t seed, bool talks)
      : random_(seed), x_(random_setup(random_)), talks_(talks) {
    if (x_.foreign) {
      auto own = std::make_unique<ForeignEngine>(x_, random_.bits());
      foreign_ = own.get(), engine_ = std::move(own);
    } else {
      engine_ = std::make_unique<PagedEngine>(x_);
    }
    check_layout(engine_->view(-1));
    sequences_.resize(at(x_.sequences));
    for (Sequence& q : sequences_) { empty(q); }
    for (std::int32_t l = 0; l < x_.layers; ++l) {
      for (std::int32_t j = 0; j < 2; ++j) { frequencies_.push_back(frequency(l, j)); }
    }
    pristine_.assign(at(x_.sequences * x_.layers * x_.heads * x_.following * 4), 0.0F);
    const Rope rope{.inverse_frequencies = frequencies_, .dim = 4};
    if (x_.mode != PositionMode::keep) {
      rerotator_ = Rerotator(engine_->view(-1), rope, x_.mode, {pristine_.data(), x_.following});
    }
  }

  std::string words() const { return x_.words(); }
  std::string history() const {
    std::string text;
    for (const Done& done : done_) { text += done.words() + "\n"; }
    return text;
  }
  std::int32_t evictions() const { return evictions_; }

  void operate() {
    const std::int32_t s = pick();
    const std::int32_t size = x_.page_size;
    const std::int32_t what = random_.below(100);
    const auto below = [&](std::int32_t limit) { return what < limit; };
    if (!sequences_[at(s)].alive && random_.below(4) > 0) {
      random_.below(3) == 0 ? create() : fork((s + 1) % x_.sequences);
    } else if (below(32)) {
      append(s, random_.below(4) > 0 ? 1 : random_.below(3 * size));
    } else if (below(36)) {
      if (x_.states) { extend(s, 1 + random_.below(size)); }
    } else if (below(43)) {
      write_some(s);
    } else if (below(45)) {
      truncate(s, 0, true);
    } else if (below(49)) {
      truncate(s, std::max(0, sequences_[at(s)].next - random_.below(size + 2)), false);
    } else if (below(54)) {
      fork(s);
    } else if (below(55)) {
      make_private(s);
    } else if (below(59)) {
      end(s, random_.below(3) > 0);
    } else if (below(62)) {
      create();
    } else if (below(67)) {
      reserve(s);
    } else if (below(82)) {
      evict(s);
    } else if (below(88)) {
      if (pending_ == nullptr) { pending_ = plan(s); }
    } else if (pending_ != nullptr) {
      below(94) ? apply(*pending_) : commit(*pending_);
    }
    check();
  }

 private:
  void expect(bool right, const std::string& text) const {
    if (!right) { throw std::runtime_error(text); }
  }
  void expect(Status status, Status wanted) const {
    expect(status == wanted,
           "status " + std::string(to_string(status)) + ", not " + std::string(to_string(wanted)));
  }
  void note(const char* what, std::int32_t s, std::int32_t a, Status status) {
    done_.push_back({what, s, a, status});
    if (done_.size() > 12) { done_.pop_front(); }
    if (talks_) { std::cerr << done_.back().words() << std::endl; }
  }
  std::size_t head_index(std::int32_t l, std::int32_t h) const { return at(l * x_.heads + h); }
  // A sequence, seldom one that is dead or whose step is open.
  std::int32_t pick() {
    std::int32_t s = 0;
    for (std::int32_t i = 0; i < 4; ++i) {
      s = random_.below(x_.sequences);
      if (between(s) == Status::ok) { break; }
    }
    return s;
  }
  // Calls f(layer, head) for those that table `t` serves.
  template <class F>
  void for_each_head(std::int32_t t, F&& f) const {
    for (std::int32_t l = 0; l < x_.layers; ++l) {
      for (std::int32_t h = 0; h < x_.heads; ++h) {
        if (x_.table_of(l, h) == t) { f(l, h); }
      }
    }
  }
  template <class F>
  void for_each_table(F&& f) const {
    for (std::int32_t s = 0; s < x_.sequences; ++s) {
      for (std::int32_t t = 0; t < x_.tables(); ++t) { f(s, t); }
    }
  }
  void empty(Sequence& q) {
    const bool alive = q.alive;
    q = {};
    q.alive = alive;
    q.heads.resize(at(x_.layers * x_.heads));
    q.next_rope.assign(at(x_.tables()), 0);
    q.unwritten.assign(at(x_.layers), false);
    q.version.assign(at(x_.tables()), 0);
    q.applied.assign(at(x_.tables()), false);
    change(q);
  }
  void change(Sequence& q) {
    for (std::uint64_t& v : q.version) { v = ++clock_; }
  }
  std::int32_t live(std::int32_t s, std::int32_t t) const {
    std::int32_t n = 0;
    for_each_head(t, [&](std::int32_t l, std::int32_t h) {
      n = static_cast<std::int32_t>(sequences_[at(s)].heads[head_index(l, h)].size());
    });
    return n;
  }
  bool open(std::int32_t s, std::int32_t t) const {
    bool open = false;
    for_each_head(t, [&](std::int32_t l, std::int32_t) {
      open = open || sequences_[at(s)].unwritten[at(l)];
    });
    return open;
  }
  Status between(std::int32_t s) const {
    const Sequence& q = sequences_[at(s)];
    if (!q.alive) { return Status::no_such_sequence; }
    const auto any = [](const std::vector<bool>& x) {
      return std::find(x.begin(), x.end(), true) != x.end();
    };
    return any(q.applied)     ? Status::eviction_open
           : any(q.unwritten) ? Status::step_open
                              : Status::ok;
  }
  // A foreign engine's duty: where nothing would tell, a planned table is left alone.
  bool blocked(std::int32_t s) const {
    if (!x_.foreign || pending_ == nullptr) { return false; }
    if (!pending_->applied && (x_.states || x_.generations)) { return false; }
    for (std::int32_t t = 0; t < x_.tables(); ++t) {
      if (pending_->parts[at(s * x_.tables() + t)].evicts) { return true; }
    }
    return false;
  }
  bool may(std::int32_t s) const {
    return !x_.foreign || (between(s) == Status::ok && !blocked(s));
  }
  bool shared(const Table& table, std::size_t e) {
    return table.k[e] >= 0 && (engine_->count(table.k[e]) > 1 || engine_->count(table.v[e]) > 1);
  }
  // Table rows of a head by rank.
  Ints rows_of(const CacheView& all, std::int32_t s, std::int32_t l, std::int32_t h) {
    const SequenceState state = engine_->state(s, x_.table_of(l, h));
    Ints rows;
    for (std::int32_t r = 0; r < state.extent(); ++r) {
      if (r != state.append_row) { rows.push_back(r); }
    }
    if (all.positions && !state.ordered) {
      std::sort(rows.begin(), rows.end(), [&](std::int32_t a, std::int32_t b) {
        const auto position = [&](std::int32_t r) {
          return all.positions.at<std::int32_t>(SequenceId{s}, LayerId{l}, HeadId{h}, r);
        };
        return position(a) < position(b);
      });
    }
    return rows;
  }

  // --- what an engine does ----------------------------------------------------------------------

  std::int32_t pages_needed(std::int32_t s, std::int32_t n) {
    std::int32_t needed = 0;
    const std::int32_t first = engine_->first_row(s), both = x_.separate ? 2 : 1;
    for (std::int32_t t = 0; t < x_.tables(); ++t) {
      const Table table = engine_->table(s, t);
      const SequenceState state = engine_->state(s, t);
      const std::int32_t have =
          std::max(static_cast<std::int32_t>(table.k.size()), first / x_.page_size);
      std::set<std::int32_t> written;
      std::int32_t i = 0;
      if (state.append_row >= 0) { written.insert((state.append_row + first) / x_.page_size), ++i; }
      for (std::int32_t r = state.extent(); i < n; ++i, ++r) {
        written.insert((r + first) / x_.page_size);
      }
      for (const std::int32_t e : written) {
        if (e >= have) {
          needed += both;
        } else {
          needed += engine_->count(table.k[at(e)]) > 1 ? 1 : 0;
          needed += x_.separate && engine_->count(table.v[at(e)]) > 1 ? 1 : 0;
        }
      }
    }
    return needed;
  }
  bool extend(std::int32_t s, std::int32_t n) {
    if (!may(s) || (x_.foreign && n == 0)) { return false; }
    Sequence& q = sequences_[at(s)];
    Status wanted = between(s);
    if (wanted == Status::ok && n > 0) {
      bool fits = true;
      for (std::int32_t t = 0; t < x_.tables(); ++t) {
        fits = fits && live(s, t) + n <= x_.max_rows;
      }
      wanted = !fits                                       ? Status::too_many_rows
               : pages_needed(s, n) > engine_->available() ? Status::out_of_pages
                                                           : Status::ok;
    }
    const Status status = x_.foreign && wanted != Status::ok ? wanted : engine_->extend(s, n);
    note("extend", s, n, status);
    expect(status, wanted);
    if (status != Status::ok || n == 0) { return false; }
    for (std::int32_t l = 0; l < x_.layers; ++l) {
      for (std::int32_t h = 0; h < x_.heads; ++h) {
        const std::int32_t rope = q.next_rope[at(x_.table_of(l, h))];
        if (x_.foreign) { foreign_->number(s, l, h, q.next, rope); }
        for (std::int32_t i = 0; i < n; ++i) {
          const std::int32_t tag = tags_ + i;
          q.heads[head_index(l, h)].push_back(
              {q.next + i, rope + i, tag, key_of(tag, l, h, rope + i)});
          if (q.next + i >= x_.following) { continue; }
          const auto plain = plain_key(tag, l, h);
          std::copy(plain.begin(), plain.end(), pristine(s, l, h) + (q.next + i) * 4);
        }
      }
    }
    tags_ += n, q.next += n, q.step = n;
    for (std::int32_t& rope : q.next_rope) { rope += n; }
    q.unwritten.assign(at(x_.layers), true);
    change(q);
    return true;
  }
  std::vector<float>::iterator pristine(std::int32_t s, std::int32_t l, std::int32_t h) {
    return pristine_.begin() + ((s * x_.layers + l) * x_.heads + h) * x_.following * 4;
  }
  void write(std::int32_t s, std::int32_t l) {
    Sequence& q = sequences_[at(s)];
    bool applied = false;
    for (std::int32_t h = 0; q.alive && h < x_.heads; ++h) {
      const std::int32_t t = kvtrim::table_of(x_.scope, x_.heads, LayerId{l}, HeadId{h});
      applied = applied || q.applied[at(t)];
    }
    const Status wanted = !q.alive             ? Status::no_such_sequence
                          : q.unwritten[at(l)] ? Status::ok
                          : applied            ? Status::eviction_open
                                               : Status::no_open_step;
    if (x_.foreign && wanted != Status::ok) { return; }
    std::vector<float> keys, values;
    for (std::int32_t i = q.step; wanted == Status::ok && i > 0; --i) {
      for (std::int32_t h = 0; h < x_.heads; ++h) {
        const Row& row = *(q.heads[head_index(l, h)].end() - i);
        keys.insert(keys.end(), row.key.begin(), row.key.end());
        values.push_back(static_cast<float>(row.tag)),
            values.push_back(static_cast<float>(l * 8 + h));
      }
    }
    const Status status = engine_->write(s, l, keys, values);
    note("write", s, l, status);
    expect(status, wanted);
    q.unwritten[at(l)] = false;
  }
  // One layer of an open step, or all.
  void write_some(std::int32_t s) {
    for (std::int32_t i = 0; i < x_.sequences && between(s) != Status::step_open; ++i) {
      s = (s + 1) % x_.sequences;
    }
    const bool all = random_.below(2) == 0;
    for (std::int32_t l = 0; l < x_.layers; ++l) {
      if (all || random_.below(x_.layers) == 0) { write(s, l); }
    }
  }
  void append(std::int32_t s, std::int32_t n) {
    if (!extend(s, n)) { return; }
    const bool stays_open = x_.states && random_.below(8) == 0;
    for (std::int32_t l = 0; l < x_.layers - (stays_open ? 1 : 0); ++l) { write(s, l); }
  }
  void create() {
    const auto dead = std::find_if(
        sequences_.begin(), sequences_.end(), [](const Sequence& q) { return !q.alive; });
    const auto s = static_cast<std::int32_t>(dead - sequences_.begin());
    if (dead == sequences_.end() || blocked(s)) { return; }
    note("create", s, 0, Status::ok);
    expect(engine_->create(s), "the first free sequence was not created");
    dead->alive = true;
  }
  void end(std::int32_t s, bool destroy) {
    Sequence& q = sequences_[at(s)];
    if (!q.alive || (blocked(s) && !pending_->applied)) { return; }
    note(destroy ? "destroy" : "reset", s, 0, Status::ok);
    engine_->reset(s, destroy);
    for (std::int32_t t = 0; pending_ != nullptr && pending_->applied && t < x_.tables(); ++t) {
      if (Pending::Part* part = part_of(*pending_, s, t)) { part->ended = true; }
    }
    q.alive = !destroy;
    empty(q);
  }
  void fork(std::int32_t s) {
    const auto dead = std::find_if(
        sequences_.begin(), sequences_.end(), [](const Sequence& q) { return !q.alive; });
    const auto made = static_cast<std::int32_t>(dead - sequences_.begin());
    const Status now = between(s);
    const Status wanted =
        now == Status::ok && dead == sequences_.end() ? Status::too_many_sequences : now;
    if (x_.foreign && (wanted != Status::ok || !x_.refs || blocked(s) || blocked(made))) { return; }
    const Status status = engine_->fork(s, made);
    note("fork", s, made, status);
    expect(status, wanted);
    if (status != Status::ok) { return; }
    *dead = sequences_[at(s)];
    change(*dead);
    if (x_.following > 0) {
      const auto floats = x_.layers * x_.heads * x_.following * 4;
      std::copy_n(pristine(s, 0, 0), floats, pristine(made, 0, 0));
    }
  }
  void make_private(std::int32_t s) {
    if (x_.foreign) { return; }
    Status wanted = between(s) == Status::step_open ? Status::ok : between(s);
    std::int32_t needed = 0;
    for (std::int32_t t = 0; wanted == Status::ok && t < x_.tables(); ++t) {
      const Table table = engine_->table(s, t);
      for (std::size_t e = 0; e < table.k.size(); ++e) { needed += shared(table, e) ? 1 : 0; }
    }
    if (needed > engine_->available()) { wanted = Status::out_of_pages; }
    const Status status = engine_->make_private(s);
    note("make_private", s, needed, status);
    expect(status, wanted);
    if (status == Status::ok && needed > 0) { change(sequences_[at(s)]); }
  }
  void reserve(std::int32_t s) {
    const std::int32_t t = random_.below(x_.tables());
    if (!x_.reserved || !may(s) || live(s, t) == 0) { return; }
    const std::int32_t pages = std::max(0, random_.below(5) - 1);
    foreign_->reserve(s, t, pages);
    note("reserve", s, pages, Status::ok);
    sequences_[at(s)].version[at(t)] = ++clock_;
  }
  // Forgets the tokens from `next` on, or those of the open step.
  void truncate(std::int32_t s, std::int32_t next, bool cancel) {
    Sequence& q = sequences_[at(s)];
    const Status now = between(s);
    Status wanted = !cancel                    ? now
                    : now == Status::step_open ? Status::ok
                    : now == Status::ok        ? Status::no_open_step
                                               : now;
    if (cancel) { next = q.next - q.step; }
    const bool nothing = !cancel && next >= q.next;
    Ints kept(at(x_.tables()), -1);
    bool moves = false, any_shared = false, equal = true;
    for (std::int32_t t = 0; wanted == Status::ok && !nothing && t < x_.tables(); ++t) {
      const SequenceState state = engine_->state(s, t);
      const Table table = engine_->table(s, t);
      moves = moves || !state.ordered || state.append_row >= 0;
      for (std::size_t e = 0; e < table.k.size(); ++e) {
        any_shared = any_shared || shared(table, e);
      }
      for_each_head(t, [&](std::int32_t l, std::int32_t h) {
        const Rows& rows = q.heads[head_index(l, h)];
        const auto n = static_cast<std::int32_t>(std::count_if(
            rows.begin(), rows.end(), [&](const Row& row) { return row.position < next; }));
        equal = equal && (kept[at(t)] < 0 || kept[at(t)] == n);
        kept[at(t)] = n;
      });
    }
    if (x_.foreign && (wanted != Status::ok || nothing || moves || !equal || blocked(s))) {
      return;
    }
    const Ints ropes = ropes_at(q, next);
    Status status = Status::ok;
    if (x_.foreign) {
      for (std::int32_t t = 0; t < x_.tables(); ++t) {
        foreign_->shorten(s, t, kept[at(t)], next, ropes[at(t)]);
      }
    } else {
      status = engine_->truncate(s, next, cancel, 0);
    }
    note(cancel ? "cancel step" : "truncate", s, next, status);
    if (!(status == Status::shared_page && moves && any_shared && wanted == Status::ok)) {
      expect(status, wanted != Status::ok || equal ? wanted : Status::unequal_budget);
    }
    if (status != Status::ok || nothing) { return; }
    for (Rows& rows : q.heads) {
      std::erase_if(rows, [&](const Row& row) { return row.position >= next; });
    }
    q.next = next, q.next_rope = ropes;
    q.unwritten.assign(at(x_.layers), false);
    change(q);
  }
  // Rope position of a token at `next`, by table: where the first row behind stood, counted back; behind those that stay.
  Ints ropes_at(const Sequence& q, std::int32_t next) const {
    Ints ropes(at(x_.tables()), 0);
    for (std::int32_t t = 0; t < x_.tables(); ++t) {
      for_each_head(t, [&](std::int32_t l, std::int32_t h) {
        std::int32_t rope = q.next_rope[at(t)] - (q.next - next);
        const Rows& rows = q.heads[head_index(l, h)];
        const auto behind = std::find_if(
            rows.begin(), rows.end(), [&](const Row& row) { return row.position >= next; });
        if (behind != rows.end()) { rope = behind->rope - (behind->position - next); }
        if (behind != rows.begin()) { rope = std::max(rope, (behind - 1)->rope + 1); }
        ropes[at(t)] = std::max(ropes[at(t)], rope);
      });
    }
    return ropes;
  }

  // --- evictions --------------------------------------------------------------------------------

  Pending::Part* part_of(Pending& p, std::int32_t s, std::int32_t t) {
    const std::int32_t i = (p.first < 0 ? s : s - p.first) * x_.tables() + t;
    return i < 0 || i >= static_cast<std::int32_t>(p.parts.size()) ? nullptr : &p.parts[at(i)];
  }
  // Calls f(sequence of the world, sequence of the view, table, part) for tables of the pending plan that evict.
  template <class F>
  void for_each_part(Pending& p, F&& f) {
    for (std::size_t i = 0; i < p.parts.size(); ++i) {
      const auto s = static_cast<std::int32_t>(i) / x_.tables();
      if (p.parts[i].evicts) {
        f(std::max(0, p.first) + s,
          SequenceId{s},
          static_cast<std::int32_t>(i) % x_.tables(),
          p.parts[i]);
      }
    }
  }
  // Changes if anything does that a plan for the table depends on.
  std::vector<std::uint64_t> signature(std::int32_t s, std::int32_t t) {
    std::vector<std::uint64_t> out{sequences_[at(s)].version[at(t)]};
    const Table table = engine_->table(s, t);
    for (std::size_t e = 0; e < table.k.size(); ++e) {
      if (table.k[e] < 0) { continue; }
      const auto word = [&](std::int32_t p) {
        return static_cast<std::uint64_t>(p * 2 + (x_.refs && engine_->count(p) > 1 ? 1 : 0));
      };
      out.push_back(word(table.k[e])), out.push_back(word(table.v[e]));
    }
    return out;
  }
  // Every byte of the pools.
  std::vector<std::byte> memory() {
    const CacheView all = engine_->view(-1);
    std::vector<std::byte> out;
    for (const Plane& plane : {all.k, all.v}) {
      const std::int64_t layers = plane.layer_stride == 0 ? 1 : x_.layers;
      out.insert(out.end(), plane.base, plane.base + layers * x_.pages * plane.page_stride);
    }
    return out;
  }
  // Pages whose bytes are others than in `before`.
  std::set<std::int32_t> written_pages(const std::vector<std::byte>& before) {
    std::set<std::int32_t> pages;
    const CacheView all = engine_->view(-1);
    const std::byte* from = before.data();
    for (const Plane& plane : {all.k, all.v}) {
      const std::int64_t layers = plane.layer_stride == 0 ? 1 : x_.layers;
      for (std::int64_t i = 0; i < layers * x_.pages; ++i, from += plane.page_stride) {
        if (std::memcmp(from, plane.base + i * plane.page_stride, at(plane.page_stride)) != 0) {
          pages.insert(static_cast<std::int32_t>(i % x_.pages));
        }
      }
    }
    return pages;
  }

  Rule random_rule() {
    Rule rule;
    rule.kind = static_cast<Rule::Kind>(random_.below(4));
    rule.sinks = random_.below(4), rule.recent = 1 + random_.below(6);
    rule.keep = rule.sinks + rule.recent;
    rule.own = static_cast<Removal>(random_.below(5));
    if (rule.kind == Rule::by_score) { rule.keep = random_.below(16), rule.recent -= 1; }
    if (rule.kind == Rule::heavy) {
      rule.keep += random_.below(8), rule.interval = 1 + random_.below(2);
    }
    if (rule.kind == Rule::exact) { rule.own = Removal::overwrite_slot; }
    if (rule.kind == Rule::pages) { rule.own = Removal::drop_pages; }
    return rule;
  }
  float random_score() {
    const std::int32_t n = random_.below(40);
    return n == 0   ? std::numeric_limits<float>::quiet_NaN()
           : n == 1 ? -0.0F
           : n == 2 ? -std::numeric_limits<float>::infinity()
                    : static_cast<float>(n / 2 - 10);
  }

  // Makes a plan for sequence `s`, or for all, and checks it. Null: it was refused, rightly.
  std::unique_ptr<Pending> plan(std::int32_t s) {
    auto made = std::make_unique<Pending>();
    Pending& p = *made;
    p.first = x_.foreign || x_.following > 0 || random_.below(2) == 0 ? -1 : s;
    const std::int32_t begin = std::max(0, p.first), end = p.first < 0 ? x_.sequences : s + 1;
    p.view = engine_->view(p.first);
    const Rule rule = random_rule();
    PlanOptions options;
    options.removal = static_cast<Removal>(random_.below(5));
    if (random_.below(2) == 0) { options.removal = Removal::automatic; }
    options.reserved = static_cast<ReservedPages>(random_.below(2));
    if (x_.mode != PositionMode::keep && (x_.following > 0 || random_.below(4) > 0)) {
      p.rerotator = options.rerotator = &rerotator_;
    }
    const Removal way = options.removal != Removal::automatic ? options.removal : rule.own;
    const bool drops = way == Removal::drop_pages;
    bool bad_spares = false;
    if (random_.below(2) == 0) {
      options.shared = SharedPages::copy;
      for (std::int32_t n = random_.below(6); n > 0 && engine_->available() > 0; --n) {
        p.spares.push_back(PageId{engine_->acquire()});
      }
      bad_spares = p.spares.size() > 1 && random_.below(12) == 0;
      options.spare_pages = p.spares;
    }
    std::vector<PageId> doubled = p.spares;
    if (bad_spares) { doubled.back() = doubled.front(), options.spare_pages = doubled; }

    // Scores and budgets; what each table must do.
    std::vector<float> scores(at((end - begin) * x_.layers * x_.heads * x_.max_rows), 0.0F);
    for (float& score : scores) { score = random_score(); }
    if (x_.common && random_.below(4) > 0) {  // the same for all heads
      for (std::size_t i = 0; i < scores.size(); ++i) {
        const auto row = i % at(x_.max_rows), head = i / at(x_.max_rows);
        scores[i] = scores[head / at(x_.heads) * at(x_.heads) * at(x_.max_rows) + row];
      }
    }
    Observation obs;
    if (!rule.by_position()) {
      obs.scores = SequencePlane::dense(scores.data(), x_.layers, x_.heads, x_.max_rows);
    }
    Ints budgets;
    for (std::int32_t i = 0; i < (end - begin) * x_.tables(); ++i) {
      const bool again = i % x_.tables() > 0 && (x_.common || random_.below(2) == 0);
      const std::int32_t rows = live(begin + i / x_.tables(), i % x_.tables());
      const std::int32_t n = random_.below(6);
      budgets.push_back(again   ? budgets.back()
                        : n < 1 ? -1
                        : n < 3 ? std::max(0, rows - 1)
                        : n < 5 ? random_.below(rows + 2)
                                : random_.below(6));
    }
    if (random_.below(3) > 0) { obs.budgets = budgets.data(), obs.budget_rows = p.view.table.rows; }
    std::vector<Cut> cuts;
    std::set<Status> errors, later;
    bool over = false, any = false;
    for (std::int32_t q = begin; q < end; ++q) {
      for (std::int32_t t = 0; t < x_.tables(); ++t) {
        const std::int32_t i = (q - begin) * x_.tables() + t;
        const Cut cut = cuts.emplace_back(
            cut_of(rule, live(q, t), obs.budgets == nullptr ? -1 : budgets[at(i)]));
        const SequenceState state = engine_->state(q, t);
        over = over || cut.over, any = any || cut.evicts;
        if (x_.common && x_.heads > 1) { later.insert(Status::planes_disagree); }
        if (!cut.evicts) { continue; }
        if (way == options.removal &&
            (way == Removal::overwrite_slot || way == Removal::fill_holes) &&
            !(x_.states && x_.positions)) {
          errors.insert(Status::bad_options);
        }
        if (options.rerotator != nullptr && x_.following > cut.begin) {
          errors.insert(Status::bad_options);
        }
        if (x_.states && open(q, t)) { errors.insert(Status::step_open); }
        if (x_.states && sequences_[at(q)].applied[at(t)]) { errors.insert(Status::eviction_open); }
        if (drops && (!state.ordered || state.append_row >= 0)) {
          errors.insert(Status::rows_unordered);
        }
        const Table table = engine_->table(q, t);
        for (std::size_t e = 0; e < table.k.size(); ++e) {
          if (!x_.refs || !shared(table, e)) { continue; }
          if (options.shared == SharedPages::copy && !drops) { later.insert(Status::out_of_pages); }
          if (options.shared == SharedPages::leave && !drops) {
            later.insert({Status::shared_page, Status::unequal_budget});
          }
          if (drops && options.rerotator != nullptr) { later.insert(Status::shared_page); }
        }
      }
    }
    if (errors.empty() && any && bad_spares) { errors.insert(Status::bad_options); }

    const auto before = memory();
    p.plan = rule.with_policy([&](const auto& policy) {
      p.workspace.assign(plan_workspace_bytes(policy, plan_shape(p.view, obs)), std::byte{0x5A});
      return kvtrim::plan(policy, p.view, obs, p.workspace, options);
    });
    const Status status = p.plan.status();
    note("plan", p.first, static_cast<std::int32_t>(way), status);
    expect(before == memory(), "plan wrote a page");
    if (!errors.empty()) {
      expect(errors.contains(status),
             "plan " + std::string(to_string(status)) + ", not " +
                 std::string(to_string(*errors.begin())));
    } else if (!usable(status)) {
      expect(later.contains(status), "plan " + std::string(to_string(status)));
      if (status == Status::out_of_pages) {
        expect(p.plan.spares_needed() > static_cast<std::int32_t>(p.spares.size()),
               "spares_needed");
      }
    }
    if (!usable(status)) {
      expect(kvtrim::apply(p.plan, p.view, rerotator_) == status, "a refused plan was applied");
      finish(p);
      return nullptr;
    }
    for (std::int32_t i = 0; i < (end - begin) * x_.tables(); ++i) {
      over =
          check_table(p, begin + i / x_.tables(), i, cuts[at(i)], rule, options, drops, scores) ||
          over;
    }
    expect(status, over ? Status::over_budget : Status::ok);
    if (random_.below(4) == 0) { p.copy = Plan(p.plan), p.plan = p.copy->ref(); }
    if (random_.below(2) == 0) { send(p); }
    return made;
  }

  // Through bytes: they arrive as the same plan, to be applied from now on; changed on the way, they never do what no table
  // allows.
  void send(Pending& p) {
    const PlanOptions options{.spare_pages = p.spares, .rerotator = p.rerotator};
    const std::vector<std::byte> bytes(p.plan.bytes().begin(), p.plan.bytes().end());
    const detail::PlanLayout layout(p.plan.header());
    for (std::int32_t round = 0; round < 3; ++round) {
      std::vector<std::byte> changed = bytes;
      for (std::int32_t i = random_.below(2); i >= 0; --i) {
        const std::int64_t ends[] = {
            0, layout.table_plans, layout.rows, layout.pages, layout.bytes};
        const std::int32_t part = random_.below(4);
        const auto words = static_cast<std::int32_t>((ends[part + 1] - ends[part]) / 4);
        if (words == 0) { continue; }
        const std::int32_t values[] = {-1, 0, 1, 2, x_.pages, x_.max_rows, random_.below(x_.pages)};
        const std::int32_t value = values[random_.below(7)];
        std::memcpy(changed.data() + ends[part] + 4 * random_.below(words), &value, 4);
      }
      const Plan read = Plan::from_bytes(changed, p.view, options);
      if (!usable(read.view().status())) { continue; }
      for_each_part(p, [&](std::int32_t s, SequenceId of, std::int32_t t, const Pending::Part&) {
        const Table table = engine_->table(s, t);
        std::set<std::int32_t> own(table.k.begin(), table.k.end());
        own.insert(table.v.begin(), table.v.end());
        const PlanView plan = read.view();
        for (const auto list : {plan.k_pages(of, t), plan.v_pages(of, t), plan.released(of, t)}) {
          for (const PageId page : list) {
            expect(own.contains(raw(page)) ||
                       std::find(p.spares.begin(), p.spares.end(), page) != p.spares.end(),
                   "changed bytes name a page of another table, or a free one");
          }
        }
      });
    }
    Plan arrived = Plan::from_bytes(bytes, p.view, options);
    expect(arrived.view().status(), p.plan.status());
    expect(arrived.view() == p.plan, "a plan arrived as another one");
    p.copy = std::move(arrived), p.plan = p.copy->ref();
  }

  // Whether table `i` of the plan keeps what it must. Returns whether that is more than its budget.
  bool check_table(Pending& p,
                   std::int32_t s,
                   std::int32_t i,
                   const Cut& cut,
                   const Rule& rule,
                   const PlanOptions& options,
                   bool drops,
                   const std::vector<float>& scores) {
    const CacheView all = engine_->view(-1);
    const std::int32_t t = i % x_.tables();
    const SequenceId of{i / x_.tables()};
    const Table table = engine_->table(s, t);
    const std::int32_t first = engine_->first_row(s);
    const TablePlan& plan = p.plan.table(of, t);
    const auto entry = [&](std::int32_t row) { return at((row + first) / x_.page_size); };
    Pending::Part& part = p.parts.emplace_back();
    part.evicts = plan.evicts, part.live = live(s, t), part.signature = signature(s, t);
    expect(plan.live_before == part.live, "live_before");
    expect(!plan.evicts || cut.evicts, "a table evicts that is within its budget");
    if (!cut.evicts) { return false; }
    const SequenceState state = engine_->state(s, t);
    const bool known = x_.positions || !x_.states || (state.next_position == state.live_rows);
    expect(plan.positions_known == known, "positions_known");

    // What the heads keep by rank, and the pages where that is.
    std::vector<std::vector<bool>> wanted;
    std::set<std::size_t> pages;
    bool any_shared = false;
    for (std::size_t e = 0; e < at(table.used); ++e) {
      any_shared = any_shared || (x_.refs && shared(table, e));
    }
    for (std::int32_t e = 0; e * x_.page_size < first; ++e) { pages.insert(at(e)); }
    for_each_head(t, [&](std::int32_t l, std::int32_t h) {
      const Ints rows = rows_of(all, s, l, h);
      std::vector<bool>& keep = wanted.emplace_back(rows.size(), true);
      std::vector<std::pair<double, std::int32_t>> others;  // best first
      for (std::int32_t rank = cut.begin; rank < cut.end; ++rank) {
        const std::size_t head = at(raw(of) * x_.layers * x_.heads) + head_index(l, h);
        const auto score = static_cast<double>(scores[head * at(x_.max_rows) + at(rows[at(rank)])]);
        others.emplace_back(std::isnan(score) ? std::numeric_limits<double>::infinity() : -score,
                            rank);
      }
      std::sort(others.begin(), others.end());
      if (rule.by_position()) { std::reverse(others.begin(), others.end()); }
      const std::int32_t stay = cut.keep - (part.live - (cut.end - cut.begin));
      for (std::size_t j = at(stay); j < others.size(); ++j) { keep[at(others[j].second)] = false; }
      for (std::size_t rank = 0; rank < keep.size(); ++rank) {
        if (keep[rank]) { pages.insert(entry(rows[rank])); }
      }
    });

    // What the plan lists, as ranks.
    std::int32_t kept = -1;
    std::size_t head = 0;
    for_each_head(t, [&](std::int32_t l, std::int32_t h) {
      const Ints rows = rows_of(all, s, l, h);
      std::vector<bool>& keep = wanted[head++];
      if (drops) {
        for (std::size_t rank = 0; rank < keep.size(); ++rank) {
          keep[rank] = pages.contains(entry(rows[rank]));
        }
      }
      std::vector<bool> stays(rows.size(), true);
      std::int32_t previous = -1;
      Ints& gone = part.gone.emplace_back();
      const auto evicted = p.plan.evicted(of, LayerId{l}, HeadId{h});
      const Rows& model = sequences_[at(s)].heads[head_index(l, h)];
      for (std::size_t j = 0; plan.evicts && j < evicted.size(); ++j) {
        const std::int32_t position = raw(evicted[j]);
        expect(position > previous, "evicted positions ascend");
        previous = position;
        std::int32_t rank = position;
        if (x_.positions) {
          const auto row = std::lower_bound(
              model.begin(), model.end(), position, [](const Row& a, std::int32_t b) {
                return a.position < b;
              });
          expect(row != model.end() && row->position == position,
                 "an evicted position is not live");
          rank = static_cast<std::int32_t>(row - model.begin());
        }
        expect(rank < part.live, "an evicted row is not live");
        stays[at(rank)] = false;
        gone.push_back(rank);
      }
      std::set<std::int32_t> listed;
      p.plan.for_each_kept(of, LayerId{l}, HeadId{h}, [&](std::int32_t r) { listed.insert(r); });
      for (std::size_t rank = 0; rank < rows.size(); ++rank) {
        const auto r = static_cast<std::int32_t>(rank);
        expect(listed.contains(rows[rank]) == stays[rank],
               "kept and evicted rows are not all rows");
        expect(stays[rank] || (r >= cut.begin && r < cut.end), "a protected row goes");
      }
      expect(listed.size() == rows.size() - gone.size(), "for_each_kept");
      const bool exact = !any_shared || drops || options.shared == SharedPages::copy;
      if (exact) { expect(stays == keep, "other rows stay than the best"); }
      const std::int32_t n = part.live - static_cast<std::int32_t>(gone.size());
      expect(kept < 0 || n == kept, "heads of one table keep different counts");
      expect(n >= cut.keep || options.shared == SharedPages::leave,
             "fewer rows stay than the budget");
      kept = n;
    });
    expect(plan.live_after == kept && plan.evicts == (kept < part.live), "live_after");
    check_pages(p, of, s, t, table, options);
    return kept > cut.keep && !(drops && rule.by_position());
  }

  // Released pages come tail first; the others and spare ones are the table.
  void check_pages(Pending& p,
                   SequenceId of,
                   std::int32_t s,
                   std::int32_t t,
                   const Table& table,
                   const PlanOptions& options) {
    const TablePlan& plan = p.plan.table(of, t);
    if (!plan.evicts) { return; }
    const auto k = p.plan.k_pages(of, t), v = p.plan.v_pages(of, t);
    std::multiset<std::int32_t> before, after;
    for (std::size_t e = 0; e < table.k.size(); ++e) {
      before.insert(table.k[e]);
      if (x_.separate) { before.insert(table.v[e]); }
    }
    std::size_t taken = 0;
    for (std::size_t e = 0; e < k.size(); ++e) {
      const bool spare = p.plan.sources(of, t)[e] < 0;
      const auto add = [&](PageId page) {
        after.insert(raw(page));
        if (spare) { before.insert(raw(page)), ++taken; }
      };
      add(k[e]);
      if (x_.separate) { add(v[e]); }
    }
    expect(taken == at(plan.spare_pages * (x_.separate ? 2 : 1)), "spare_pages");
    std::size_t e = table.k.size();
    const auto released = p.plan.released(of, t);
    for (std::size_t i = 0; i < released.size(); ++i) {
      const Ints& entries = x_.separate && i % 2 == 1 ? table.v : table.k;
      if (!x_.separate || i % 2 == 0) {
        do { --e; } while (e < entries.size() && entries[e] != raw(released[i]));
      }
      expect(e < entries.size() && entries[e] == raw(released[i]),
             "released pages are not tail first");
      after.insert(raw(released[i]));
    }
    expect(before == after, "a page is neither kept nor released");
    const std::int32_t reserved = static_cast<std::int32_t>(table.k.size()) - table.used;
    expect(plan.reserved_after == (options.reserved == ReservedPages::follow ? reserved : 0),
           "reserved_after");
    for (std::int32_t i = 0; i < plan.reserved_after; ++i) {
      expect(raw(k[at(plan.pages_after + i)]) == table.k[at(table.used + i)],
             "reserved pages follow");
    }
    static_cast<void>(s);
  }

  void apply(Pending& p) {
    bool stale = p.applied && !p.plan.empty();
    for_each_part(p, [&](std::int32_t s, SequenceId, std::int32_t t, const Pending::Part& part) {
      stale = stale || part.signature != signature(s, t);
    });
    std::set<std::int32_t> own;
    for_each_part(p, [&](std::int32_t s, SequenceId, std::int32_t t, const Pending::Part&) {
      const Table table = engine_->table(s, t);
      for (const Ints* list : {&table.k, &table.v}) {
        for (const std::int32_t page : *list) {
          if (page >= 0 && engine_->count(page) == 1) { own.insert(page); }
        }
      }
    });
    for (const PageId page : p.spares) { own.insert(raw(page)); }
    const auto before = memory();
    const Status status =
        kvtrim::apply(p.plan, p.view, p.rerotator == nullptr ? Rerotator() : *p.rerotator);
    note("apply", p.first, 0, status);
    expect(status, stale ? Status::stale_plan : Status::ok);
    for (const std::int32_t page : written_pages(before)) {
      expect(!stale && own.contains(page), "page " + std::to_string(page) + " was written");
    }
    if (p.applied) { return; }
    if (stale) {
      finish(p);
      if (pending_.get() == &p) { pending_.reset(); }
      return;
    }
    p.applied = true;
    for_each_part(p, [&](std::int32_t s, SequenceId, std::int32_t t, const Pending::Part&) {
      sequences_[at(s)].applied[at(t)] = x_.states;
      sequences_[at(s)].version[at(t)] = ++clock_;
    });
  }

  void commit(Pending& p) {
    std::int64_t kept = 0, evicted = 0, dropped = 0, committed = 0, ended = 0;
    for (const Pending::Part& part : p.parts) {
      kept += std::int64_t{part.live} * x_.layers * x_.heads / x_.tables();
    }
    for_each_part(p, [&](std::int32_t, SequenceId of, std::int32_t t, const Pending::Part& part) {
      if (part.ended) {
        kept -= std::int64_t{part.live} * x_.layers * x_.heads / x_.tables(), ++ended;
        return;
      }
      ++committed;
      for (const Ints& gone : part.gone) { evicted += static_cast<std::int64_t>(gone.size()); }
      dropped += p.plan.table(of, t).released;
    });
    const std::int32_t free = engine_->available();
    const auto before = memory();
    const Report report = engine_->commit(p.plan, p.view);
    note("commit", p.first, static_cast<std::int32_t>(committed), report.status);
    expect(before == memory(), "commit wrote a page");
    if (!p.applied) {
      expect(report.status, Status::not_applied);
      return;
    }
    if (committed == 0 && ended > 0) {
      expect(report.status, Status::stale_plan);
    } else {
      expect(report.status, p.plan.status());
      expect(report.evicted_rows == evicted && report.kept_rows == kept - evicted,
             "rows of the report");
    }
    expect(report.dropped_pages == dropped, "dropped_pages");
    expect(engine_->available() - free == report.released_pages, "released_pages");
    for_each_part(p, [&](std::int32_t s, SequenceId, std::int32_t t, const Pending::Part& part) {
      if (part.ended) { return; }
      Sequence& q = sequences_[at(s)];
      std::size_t head = 0;
      for_each_head(t, [&](std::int32_t l, std::int32_t h) {
        Rows& rows = q.heads[head_index(l, h)];
        const Ints& gone = part.gone[head++];
        for (std::size_t i = gone.size(); i-- > 0;) { rows.erase(rows.begin() + gone[i]); }
        if (p.rerotator != nullptr) { renumber(rows, l, h); }
        if (p.rerotator != nullptr && x_.following == 0) {
          q.next_rope[at(t)] = static_cast<std::int32_t>(rows.size());
        }
      });
      q.applied[at(t)] = false;
      q.version[at(t)] = ++clock_;
    });
    ++evictions_;
    if (random_.below(4) == 0 && !p.plan.empty()) {
      expect(engine_->commit(p.plan, p.view).status, Status::stale_plan);
    }
    finish(p);
    if (pending_.get() == &p) { pending_.reset(); }
  }
  void renumber(Rows& rows, std::int32_t l, std::int32_t h) const {
    const auto n = static_cast<std::int32_t>(rows.size());
    if (x_.following > 0 && n <= x_.following) { return; }
    const std::int32_t begin = x_.following > 0 ? rows[at(x_.following)].rope - x_.following : 0;
    for (std::int32_t i = 0; i < (x_.following > 0 ? x_.following : n); ++i) {
      Row& row = rows[at(i)];
      if (row.rope == begin + i) { continue; }
      row.rope = begin + i;
      row.key = key_of(row.tag, l, h, row.rope);
    }
  }
  // Spare pages that no table took go back.
  void finish(Pending& p) {
    std::set<std::int32_t> in_tables;
    for_each_table([&](std::int32_t s, std::int32_t t) {
      const Table table = engine_->table(s, t);
      in_tables.insert(table.k.begin(), table.k.end()),
          in_tables.insert(table.v.begin(), table.v.end());
    });
    for (const PageId page : p.spares) {
      if (!in_tables.contains(raw(page))) { engine_->release(raw(page)); }
    }
    p.spares.clear();
  }
  void evict(std::int32_t s) {
    if (x_.foreign && pending_ != nullptr && !(x_.states && x_.positions)) { return; }
    const auto p = plan(s);
    if (p == nullptr) { return; }
    apply(*p);
    commit(*p);
  }

  // --- the cache is what the model says ---------------------------------------------------------

  void check() {
    const CacheView all = engine_->view(-1);
    named_.assign(at(x_.pages), 0);
    for_each_table([&](std::int32_t s, std::int32_t t) { check_table(all, s, t); });
    if (pending_ != nullptr) {
      for (const PageId page : pending_->spares) { ++named_[at(raw(page))]; }
    }
    std::int32_t held = 0;
    for (std::int32_t page = 0; page < x_.pages; ++page) {
      expect(engine_->count(page) == named_[at(page)],
             "page " + std::to_string(page) + " is counted " +
                 std::to_string(engine_->count(page)) + " times and named " +
                 std::to_string(named_[at(page)]) + " times");
      held += named_[at(page)] > 0 ? 1 : 0;
    }
    expect(held + engine_->available() == x_.pages, "free and held pages are not all pages");
  }
  void check_table(const CacheView& all, std::int32_t s, std::int32_t t) {
    const Sequence& q = sequences_[at(s)];
    const SequenceState state = engine_->state(s, t);
    const Table table = engine_->table(s, t);
    const std::int32_t first = engine_->first_row(s);
    for (std::size_t e = 0; e < table.k.size(); ++e) {
      expect((table.k[e] >= 0) == (at(first / x_.page_size) <= e),
             "null pages are those of the padding");
      if (table.k[e] < 0) { continue; }
      ++named_[at(table.k[e])];
      if (x_.separate) { ++named_[at(table.v[e])]; }
    }
    expect(state.live_rows == live(s, t), "live rows");
    if (state.live_rows > 0) {
      expect(table.used == pages_for(state.extent() + first, x_.page_size), "used entries");
    }
    if (x_.states) {
      expect(state.next_position == q.next, "next position");
      expect(state.next_rope_position == q.next_rope[at(t)],
             "next rope position " + std::to_string(state.next_rope_position) + ", not " +
                 std::to_string(q.next_rope[at(t)]));
      expect(state.open == open(s, t) && state.applied == q.applied[at(t)], "open or applied");
    }
    if (q.applied[at(t)] || (pending_ != nullptr && pending_->applied && moved(s, t))) { return; }
    for_each_head(t, [&](std::int32_t l, std::int32_t h) {
      const SequenceId sequence{s};
      const LayerId layer{l};
      const HeadId kv_head{h};
      const Rows& model = q.heads[head_index(l, h)];
      const Ints rows = rows_of(all, s, l, h);
      expect(rows.size() == model.size(), "rows of a head");
      const auto same = [&](bool right, const char* what, const Row& row) {
        if (!right) {
          throw std::runtime_error(
              std::string(what) + " of position " + std::to_string(row.position) + " @ sequence " +
              std::to_string(s) + " layer " + std::to_string(l) + " head " + std::to_string(h));
        }
      };
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const Row& row = model[i];
        const std::int32_t r = rows[i];
        if (x_.positions) {
          same(all.positions.at<std::int32_t>(sequence, layer, kv_head, r) == row.position,
               "position",
               row);
        }
        if (x_.ropes) {
          same(all.rope_positions.at<std::int32_t>(sequence, layer, kv_head, r) == row.rope,
               "rope position",
               row);
        }
        if (q.unwritten[at(l)] && row.position >= q.next - q.step) { continue; }
        const std::size_t e = at((r + first) / x_.page_size);
        const Slot slot{(r + first) % x_.page_size};
        const PageId k{table.k[e]}, v{table.v[e]};
        Key key;
        std::array<float, 2> value;
        std::memcpy(key.data(), all.k.row(layer, k, kv_head, slot), sizeof key);
        std::memcpy(value.data(), all.v.row(layer, v, kv_head, slot), sizeof value);
        same(value[0] == static_cast<float>(row.tag) && value[1] == static_cast<float>(l * 8 + h),
             "value",
             row);
        for (std::size_t d = 0; d < 4; ++d) {
          same(x_.mode == PositionMode::keep ? key[d] == row.key[d]
                                             : std::abs(key[d] - row.key[d]) < 1e-5F,
               "key",
               row);
        }
        if (!x_.marks) { continue; }
        std::int32_t mark = 0;
        const PagePlane& plane = all.page_planes[0];
        std::memcpy(&mark, plane.row(layer, plane.of_values ? v : k, kv_head, slot), 4);
        same(mark == row.tag, "page plane", row);
        same(all.more_planes[0].at<std::int32_t>(sequence, layer, kv_head, r) == row.tag,
             "sequence plane",
             row);
      }
    });
  }
  // Whether the pending plan has moved rows of this table.
  bool moved(std::int32_t s, std::int32_t t) {
    const Pending::Part* part = part_of(*pending_, s, t);
    return part != nullptr && part->evicts && !part->ended;
  }

  test::Random random_;
  Setup x_;
  bool talks_;
  std::unique_ptr<Engine> engine_;
  ForeignEngine* foreign_ = nullptr;
  std::vector<Sequence> sequences_;
  std::vector<double> frequencies_;
  std::vector<float> pristine_;
  Rerotator rerotator_;
  std::unique_ptr<Pending> pending_;
  std::deque<Done> done_;
  Ints named_;  // by page: tables that name it
  std::uint64_t clock_ = 0;
  std::int32_t tags_ = 1, evictions_ = 0;
};

std::int64_t environment(const char* name, std::int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

}  // namespace

TEST_CASE("random operations leave in every cache what a plain model says", "[random][property]") {
  const std::int64_t only = environment("KVTRIM_RANDOM_SEED", -1);
  const std::int64_t operations = environment("KVTRIM_RANDOM_OPERATIONS", 300'000);
  const std::int64_t worlds = (operations + operations_of_a_world - 1) / operations_of_a_world;
  std::int64_t evictions = 0;
  for (std::int64_t seed = only < 0 ? 1 : only; seed <= (only < 0 ? worlds : only); ++seed) {
    World world(static_cast<std::uint64_t>(seed), only >= 0);
    INFO("KVTRIM_RANDOM_SEED=" << seed << ": " << world.words());
    for (std::int32_t step = 0; step < operations_of_a_world; ++step) {
      try {
        world.operate();
      } catch (const std::runtime_error& error) {
        FAIL("step " << step << ": " << error.what() << "\nlast operations:\n" << world.history());
      }
    }
    evictions += world.evictions();
  }
  CHECK(evictions > (only < 0 ? worlds : 0));
}
