// SPDX-License-Identifier: Apache-2.0
#pragma once

// A cache and its model, and what an engine does with both: rows, forks, steps, truncations, resets. After each operation
// the cache is what the model says. Over 400 lines: one class, and every operation is said twice.

#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/observe/accumulate.hpp>

#include "random/engines.hpp"
#include "random/model.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvtrim::random_test {

/// What worlds are made of. A test that plants a fault changes it here.
struct Parts {
  std::unique_ptr<Engine> (*paged)(const Setup&) = [](const Setup& x) -> std::unique_ptr<Engine> {
    return std::make_unique<PagedEngine>(x);
  };
  std::unique_ptr<ForeignEngine> (*foreign)(const Setup&, std::uint64_t) =
      [](const Setup& x, std::uint64_t seed) { return std::make_unique<ForeignEngine>(x, seed); };
  void (*told)(Rule&) = [](Rule&) {};  ///< what the library is told of a rule, and the model is not
};

class World {
 public:
  // `talks`: every operation is printed, so that also an assertion of the library shows what came before it.
  // `foreign`: what would be a PagedCache is the same in foreign memory.
  World(std::uint64_t seed, bool talks, const Parts& parts, bool foreign = false)
      : random_(seed), x_(random_setup(random_)), talks_(talks), told_(parts.told) {
    if (foreign && !x_.foreign) { x_ = in_foreign_memory(x_, random_); }
    if (x_.foreign) {
      auto own = parts.foreign(x_, random_.bits());
      foreign_ = own.get(), engine_ = std::move(own);
    } else {
      engine_ = parts.paged(x_);
    }
    check_layout(engine_->view(-1));
    sequences_.resize(at(x_.sequences)), held_.assign(at(x_.pages), false);
    for (Sequence& q : sequences_) { empty(q); }
    pristine_.assign(at(x_.sequences * x_.layers * x_.heads * x_.following * key_dim), 0.0F);
    frequencies_ = x_.rope.frequencies(x_.layers);
    const CacheView all = engine_->view(-1);
    if (x_.keys == KeyForm::plain) {
      rerotator_ = Rerotator::unrotated_cache(all);
    } else if (x_.mode != PositionMode::keep) {
      rerotator_ = Rerotator(
          all, test::rope_of(x_.rope, frequencies_), x_.mode, {pristine_.data(), x_.following});
    }
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::string words() const { return x_.words(); }
  const Setup& setup() const { return x_; }
  /// What the last operation did and left, as words that do not depend on where memory lies.
  struct Seen {
    const char* what;
    std::uint32_t word;
    bool operator==(const Seen& other) const { return word == other.word; }
  };
  const std::vector<Seen>& seen() const { return seen_; }
  /// Every operation so far, a line each.
  std::string history() const {
    std::string text;
    for (const Done& done : done_) { text += done.words() + "\n"; }
    return text;
  }

 protected:
  template <class T>
  void see(const char* what, T x) {
    if constexpr (sizeof(T) == 4 && std::is_floating_point_v<T>) {
      seen_.push_back({what, std::bit_cast<std::uint32_t>(x)});
    } else {
      seen_.push_back({what, static_cast<std::uint32_t>(x)});
    }
  }
  // `text`: parts of a message, put together only where it is wrong: these checks are most of what the test does.
  template <class... Text>
  void expect(bool right, const Text&... text) const {
    if (right) { return; }
    std::ostringstream message;
    (message << ... << text);
    throw std::runtime_error(message.str());
  }
  void expect(Status status, Status wanted) const {
    expect(status == wanted, "status ", to_string(status), ", not ", to_string(wanted));
  }
  void note(std::string what, std::int32_t s, std::int32_t a, Status status) {
    done_.push_back({std::move(what), s, a, status});
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
    const bool alive = q.alive, ended = q.ended;
    q = {};
    q.alive = alive, q.ended = ended;
    q.heads.resize(at(x_.layers * x_.heads));
    q.next_rope.assign(at(x_.tables()), 0);
    q.rows_at_eviction.assign(at(x_.tables()), 0);
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
  Pending::Part* part_of(Pending& p, std::int32_t s, std::int32_t t) const {
    const std::int32_t i = (p.first < 0 ? s : s - p.first) * x_.tables() + t;
    return i < 0 || i >= static_cast<std::int32_t>(p.parts.size()) ? nullptr : &p.parts[at(i)];
  }
  // A foreign engine's duty: where nothing would tell, a planned table is left alone.
  bool blocked(std::int32_t s) const {
    if (!x_.foreign || pending_ == nullptr) { return false; }
    if (!pending_->applied && (x_.states || x_.generations)) { return false; }
    for (std::int32_t t = 0; t < x_.tables(); ++t) {
      const Pending::Part* part = part_of(*pending_, s, t);
      if (part != nullptr && part->evicts && !(x_.states && part->ended)) { return true; }
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
  // `ok`: there are new rows. None: nothing was asked for.
  std::optional<Status> extend(std::int32_t s, std::int32_t n) {
    if (!may(s) || (x_.foreign && n == 0)) { return std::nullopt; }
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
    if (n == 0) { return std::nullopt; }
    if (status != Status::ok) { return status; }
    for (std::int32_t l = 0; l < x_.layers; ++l) {
      for (std::int32_t h = 0; h < x_.heads; ++h) {
        const std::int32_t rope = q.next_rope[at(x_.table_of(l, h))];
        if (x_.foreign) { foreign_->number(s, l, h, q.next, rope); }
        for (std::int32_t i = 0; i < n; ++i) {
          const std::int32_t tag = tags_ + i;
          q.heads[head_index(l, h)].push_back(
              {q.next + i, rope + i, tag, key_of(x_, tag, l, h, rope + i)});
          if (q.next + i >= x_.following) { continue; }
          const Key plain = plain_key(x_.dtype, tag, l, h);
          std::copy(plain.begin(), plain.end(), pristine(s, l, h) + (q.next + i) * key_dim);
        }
      }
    }
    tags_ += n, q.next += n, q.step = n;
    for (std::int32_t& rope : q.next_rope) { rope += n; }
    q.unwritten.assign(at(x_.layers), true);
    change(q);
    return Status::ok;
  }
  std::vector<float>::iterator pristine(std::int32_t s, std::int32_t l, std::int32_t h) {
    return pristine_.begin() + ((s * x_.layers + l) * x_.heads + h) * x_.following * key_dim;
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
    NewRows data;
    const auto add = [](std::vector<float>& to, const auto& row) {
      to.insert(to.end(), row.begin(), row.end());
    };
    for (std::int32_t i = q.step; wanted == Status::ok && i > 0; --i) {
      for (std::int32_t h = 0; h < x_.heads; ++h) {
        const Row& row = *(q.heads[head_index(l, h)].end() - i);
        add(data.keys, row.key), add(data.values, value_of(row.tag, l, h));
        add(data.plain, plain_key(x_.dtype, row.tag, l, h));
      }
    }
    const Status status = engine_->write(s, l, data);
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
  // Out of pages: another sequence may be preempted for it, as a scheduler does.
  void append(std::int32_t s, std::int32_t n) {
    std::optional<Status> status = extend(s, n);
    if (status == Status::out_of_pages && random_.below(2) == 0) {
      end((s + 1 + random_.below(x_.sequences - 1)) % x_.sequences, false);
      status = extend(s, n);
    }
    if (status != Status::ok) { return; }
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
    q.alive = !destroy, q.ended = true;
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
      const auto floats = x_.layers * x_.heads * x_.following * key_dim;
      std::copy_n(pristine(s, 0, 0), floats, pristine(made, 0, 0));
    }
  }
  void make_private(std::int32_t s) {
    Status wanted = between(s) == Status::step_open ? Status::ok : between(s);
    std::int32_t needed = 0;
    for (std::int32_t t = 0; wanted == Status::ok && t < x_.tables(); ++t) {
      const Table table = engine_->table(s, t);
      for (std::size_t e = 0; e < table.k.size(); ++e) {
        needed += shared(table, e) ? (x_.separate ? 2 : 1) : 0;
      }
    }
    if (needed > engine_->available()) { wanted = Status::out_of_pages; }
    if (x_.foreign && (wanted != Status::ok || blocked(s) || needed == 0)) { return; }
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
  // A query of each KV head looks at all rows of its sequence.
  void accumulate(std::int32_t s) {
    if (!x_.scores || between(s) != Status::ok || (pending_ != nullptr && pending_->applied)) {
      return;
    }
    constexpr std::int32_t heads = 2;
    const AccumulateParams params{.decay = random_.below(4) == 0 ? 0.75F : 1.0F,
                                  .squared = random_.below(4) == 0};
    const CacheView all = engine_->view(-1);
    std::vector<float> shares(at(heads * (x_.max_rows + 1)));
    for (std::int32_t l = 0; l < x_.layers; ++l) {
      for (std::int32_t h = 0; h < x_.heads; ++h) {
        const SequenceState state = engine_->state(s, x_.table_of(l, h));
        if (state.append_row >= 0) { continue; }
        for (float& x : shares) { x = std::abs(random_.uniform()); }
        accumulate_probabilities(params,
                                 {all, SequenceId{s}, LayerId{l}, HeadId{h}},
                                 {shares.data(), heads, x_.max_rows});
        const Ints rows = rows_of(all, s, l, h);
        for (std::size_t i = 0; i < rows.size(); ++i) {
          double sum = 0;
          for (std::int32_t g = 0; g < heads; ++g) {
            const auto p = static_cast<double>(shares[at(g * x_.max_rows + rows[i])]);
            sum += params.squared ? p * p : p;
          }
          double& score = sequences_[at(s)].heads[head_index(l, h)][i].score;
          score = score * static_cast<double>(params.decay) + sum / heads;
        }
      }
    }
    note("accumulate", s, 0, Status::ok);
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
    if (x_.foreign && (wanted != Status::ok || nothing || !equal || blocked(s))) { return; }
    if (x_.common && x_.heads > 1 && moves) { return; }  // heads might move rows apart
    const Ints ropes = ropes_at(q, next);
    Status status = Status::ok;
    if (x_.foreign) {
      for (std::int32_t t = 0; moves && t < x_.tables(); ++t) {
        if (foreign_->writes_shared(s, t, kept[at(t)], next)) { status = Status::shared_page; }
      }
      for (std::int32_t t = 0; status == Status::ok && t < x_.tables(); ++t) {
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
    for (std::int32_t t = 0; t < x_.tables(); ++t) {
      q.rows_at_eviction[at(t)] = std::min(q.rows_at_eviction[at(t)], live(s, t));
    }
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

  // --- the cache is what the model says ---------------------------------------------------------

  void check() {
    const CacheView all = engine_->view(-1);
    named_.assign(at(x_.pages), 0);
    for_each_table([&](std::int32_t s, std::int32_t t) { check_table(all, s, t); });
    if (pending_ != nullptr) {
      for (const PageId page : pending_->spares) { ++named_[at(raw(page))]; }
    }
    std::int32_t held = 0;
    if (x_.scrub) { check_scrubbed(all); }
    for (std::int32_t page = 0; page < x_.pages; ++page) {
      expect(engine_->count(page) == named_[at(page)],
             "page ",
             page,
             " is counted ",
             engine_->count(page),
             " times and named ",
             named_[at(page)],
             " times");
      held += named_[at(page)] > 0 ? 1 : 0;
      if (named_[at(page)] > 0) { held_[at(page)] = true; }
    }
    expect(held + engine_->available() == x_.pages, "free and held pages are not all pages");
    see("free pages", engine_->available());
  }
  // Nothing is left of a page that nobody holds any longer, nor of a sequence that has ended.
  void check_scrubbed(const CacheView& all) {
    const auto zero = [](const std::byte* from, std::int64_t bytes) {
      return std::all_of(from, from + bytes, [](std::byte b) { return b == std::byte{0}; });
    };
    for (const Plane& plane : {all.k, all.v, all.unrotated_keys}) {
      const std::int64_t layers = plane.layer_stride == 0 ? 1 : x_.layers;
      for (std::int64_t i = 0; plane && i < layers * x_.pages; ++i) {
        const std::size_t page = at(i % x_.pages);
        if (!held_[page] || named_[page] > 0) { continue; }
        expect(zero(plane.base + i * plane.page_stride, plane.page_stride),
               "page ",
               page,
               " is free and not scrubbed");
      }
    }
    for (std::int32_t s = 0; s < x_.sequences; ++s) {
      if (sequences_[at(s)].alive || !sequences_[at(s)].ended) { continue; }
      for (const SequencePlane& plane : {all.positions, all.score_sums, all.score_compensations}) {
        expect(!plane || zero(plane.row(SequenceId{s}, {}, {}, 0), plane.sequence_stride),
               "rows of an ended sequence are not scrubbed");
      }
    }
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
    see("sequence", s), see("table", t);
    see("live rows", state.live_rows), see("next position", state.next_position);
    see("next rope position", state.next_rope_position), see("order", state.ordered);
    see("append row", state.append_row), see("open", state.open), see("applied", state.applied);
    see("rows at the last eviction", state.rows_at_eviction), see("used entries", table.used);
    for (const std::int32_t page : table.k) {
      see("owners of a page", page < 0 ? 0 : engine_->count(page));
    }
    expect(state.live_rows == live(s, t), "live rows");
    if (state.live_rows > 0) {
      expect(table.used == pages_for(state.extent() + first, x_.page_size), "used entries");
    }
    if (x_.states) {
      expect(state.next_position == q.next, "next position");
      expect(state.next_rope_position == q.next_rope[at(t)],
             "next rope position ",
             state.next_rope_position,
             ", not ",
             q.next_rope[at(t)]);
      expect(state.open == open(s, t) && state.applied == q.applied[at(t)], "open or applied");
      expect(state.applied || state.rows_at_eviction == q.rows_at_eviction[at(t)],
             "rows at the last eviction");
    }
    if (q.applied[at(t)] || (pending_ != nullptr && pending_->applied && moved(s, t))) { return; }
    for_each_head(t, [&](std::int32_t l, std::int32_t h) {
      const SequenceId sequence{s};
      const LayerId layer{l};
      const HeadId kv_head{h};
      const Rows& model = q.heads[head_index(l, h)];
      const Ints rows = rows_of(all, s, l, h);
      expect(rows.size() == model.size(), "rows of a head");
      Ints read = rows;  // by whoever asks for runs, as attention does
      std::sort(read.begin(), read.end());
      std::size_t next = 0;
      for_each_run({all, sequence, layer, kv_head}, [&](const Run& run) {
        for (std::int32_t i = 0; i < run.count; ++i, ++next) {
          const std::int32_t r = run.row + i;
          const std::size_t e = at((r + first) / x_.page_size);
          expect(next < read.size() && read[next] == r && raw(run.k_page) == table.k[e] &&
                     raw(run.v_page) == table.v[e] &&
                     raw(run.slot) + i == (r + first) % x_.page_size,
                 "for_each_run");
        }
      });
      expect(next == read.size(), "for_each_run leaves rows out");
      const auto same = [&](bool right, const char* what, const Row& row) {
        expect(right,
               what,
               " of position ",
               row.position,
               " @ sequence ",
               s,
               " layer ",
               l,
               " head ",
               h);
      };
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const Row& row = model[i];
        const std::int32_t r = rows[i];
        see("row", r), see("position", row.position), see("rope position", row.rope);
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
        const auto load = [&](const Plane& plane, PageId page, float* to) {
          const std::byte* const from = plane.row(layer, page, kv_head, slot);
          for (std::int32_t d = 0; d < plane.head_dim; ++d) {
            to[d] = load_element(from + d * element_bytes(x_.dtype), x_.dtype);
          }
        };
        Key key;
        Value value;
        load(all.k, k, key.data()), load(all.v, v, value.data());
        for (const float x : key) { see("key", x); }
        for (const float x : value) { see("value", x); }
        same(value == value_of(row.tag, l, h), "value", row);
        for (std::size_t d = 0; d < key.size(); ++d) {
          same(std::abs(key[d] - row.key[d]) <= key_error(row.key[d]), "key", row);
        }
        if (x_.keys == KeyForm::with_source) {
          load(all.unrotated_keys, k, key.data());
          same(key == plain_key(x_.dtype, row.tag, l, h), "key before RoPE", row);
        }
        if (x_.scores) {
          const float sum = all.score_sums.at<float>(sequence, layer, kv_head, r);
          const float rest = all.score_compensations.at<float>(sequence, layer, kv_head, r);
          see("score", sum), see("score's compensation", rest);
          const double score = static_cast<double>(sum) + static_cast<double>(rest);
          same(std::abs(score - row.score) <= 1e-6 * row.score, "score", row);
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
  // How far from `x` a key may be: not at all where nothing turns it.
  float key_error(float x) const {
    if (x_.mode == PositionMode::keep || x_.keys == KeyForm::plain) { return 0; }
    return x_.dtype == DType::f32   ? 1e-5F
           : x_.dtype == DType::f16 ? std::abs(x) / 1024 + 1e-6F
                                    : std::abs(x) / 128 + 1e-6F;
  }
  // Whether the pending plan has moved rows of this table.
  bool moved(std::int32_t s, std::int32_t t) {
    const Pending::Part* part = part_of(*pending_, s, t);
    return part != nullptr && part->evicts && !part->ended;
  }

  test::Random random_;
  Setup x_;
  bool talks_;
  void (*told_)(Rule&);
  std::unique_ptr<Engine> engine_;
  ForeignEngine* foreign_ = nullptr;
  std::vector<Sequence> sequences_;
  std::vector<double> frequencies_;
  std::vector<float> pristine_;
  Rerotator rerotator_;
  std::unique_ptr<Pending> pending_;
  std::vector<Done> done_;
  std::vector<Seen> seen_;
  Ints named_;              // by page: tables that name it
  std::vector<bool> held_;  // by page: whether it ever was
  std::uint64_t clock_ = 0;
  std::int32_t tags_ = 1;
};

}  // namespace kvtrim::random_test
