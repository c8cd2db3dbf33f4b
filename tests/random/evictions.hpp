// SPDX-License-Identifier: Apache-2.0
#pragma once

// Evictions of a world: what a plan must say, whether apply and commit may happen, and what they leave. Over 400 lines: one
// class, and a plan is said twice.

#include "random/choosing.hpp"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvtrim::random_test {

class EvictingWorld final : public ChoosingWorld {
 public:
  using ChoosingWorld::ChoosingWorld;

  /// A policy, how it removed rows, and what became of their positions.
  struct Eviction {
    Rule::Kind kind;
    Removal way;
    PositionMode mode;
    auto operator<=>(const Eviction&) const = default;
  };
  const std::set<Eviction>& evictions() const { return evictions_; }

  /// The operation that `seed` stands for, whatever came before it.
  /// \throws std::runtime_error if the cache is not what the model says
  void operate(std::uint64_t seed) {
    random_ = test::Random(seed);
    seen_.clear();
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
    } else if (below(65)) {
      reserve(s);
    } else if (below(68)) {
      accumulate(s);
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
  // --- evictions --------------------------------------------------------------------------------

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
    for (const Plane& plane : {all.k, all.v, all.unrotated_keys}) {
      if (!plane) { continue; }
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
    for (const Plane& plane : {all.k, all.v, all.unrotated_keys}) {
      if (!plane) { continue; }
      const std::int64_t layers = plane.layer_stride == 0 ? 1 : x_.layers;
      for (std::int64_t i = 0; i < layers * x_.pages; ++i, from += plane.page_stride) {
        if (std::memcmp(from, plane.base + i * plane.page_stride, at(plane.page_stride)) != 0) {
          pages.insert(static_cast<std::int32_t>(i % x_.pages));
        }
      }
    }
    return pages;
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
    p.first = x_.following > 0 || random_.below(2) == 0 ? -1 : s;
    p.view = engine_->view(p.first);
    Asked a;
    a.begin = std::max(0, p.first), a.end = p.first < 0 ? x_.sequences : s + 1;
    a.rule = random_rule(random_, x_.following);
    Rule& rule = a.rule;
    PlanOptions& options = a.options;
    options.removal = static_cast<Removal>(random_.below(5));
    if (random_.below(rule.by_page() ? 8 : 2) > 0) { options.removal = Removal::automatic; }
    options.reserved = static_cast<ReservedPages>(random_.below(2));
    if (x_.mode != PositionMode::keep && (x_.following > 0 || random_.below(4) > 0)) {
      p.rerotator = options.rerotator = &rerotator_;
    }
    const Removal way = options.removal != Removal::automatic ? options.removal : rule.own;
    const bool drops = a.drops = way == Removal::drop_pages;
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

    // Scores and budgets; what each table must do. Given scores have few values, so that many are equal.
    Ints next;
    for (std::int32_t q = a.begin; q < a.end; ++q) { next.push_back(sequences_[at(q)].next); }
    const Observed observed(random_, p.view, 1 + random_.below(6), next);
    Observation& obs = a.obs;
    observed.add_to(obs, p.view);
    a.given = rule.kind == Rule::by_score || (!rule.by_position() && random_.below(4) == 0);
    if (!a.given && check_scores(rule, p.view, obs) != Status::ok) {
      rule.kind = Rule::by_score, rule.interval = 1, rule.grace = 0, a.given = true;
    }
    p.kind = rule.kind, p.way = way == Removal::automatic ? Removal::stable_pack : way;
    Floats& scores = a.given_scores;
    const std::size_t heads = at((a.end - a.begin) * x_.layers * x_.heads);
    a.first.resize(heads), a.second.resize(heads), scores.resize(heads * at(x_.max_rows));
    for (float& score : scores) { score = random_score(); }
    if (x_.common && random_.below(4) > 0) {  // the same for all heads
      for (std::size_t i = 0; i < scores.size(); ++i) {
        const auto row = i % at(x_.max_rows), head = i / at(x_.max_rows);
        scores[i] = scores[head / at(x_.heads) * at(x_.heads) * at(x_.max_rows) + row];
      }
    }
    if (a.given) {
      obs.scores = SequencePlane::dense(scores.data(), x_.layers, x_.heads, x_.max_rows);
    }
    Ints budgets;
    for (std::int32_t i = 0; i < items(a); ++i) {
      const bool again = i % x_.tables() > 0 && (x_.common || random_.below(2) == 0);
      const std::int32_t rows = live(item(a, i).s, item(a, i).t);
      const std::int32_t n = random_.below(6);
      budgets.push_back(again   ? budgets.back()
                        : n < 1 ? -1
                        : n < 3 ? std::max(0, rows - 1)
                        : n < 5 ? random_.below(rows + 2)
                                : random_.below(6));
    }
    if (random_.below(3) > (rule.by_page() ? 1 : 0)) {
      obs.budgets = budgets.data(), obs.budget_rows = p.view.table.rows;
    }
    std::set<Status> errors, later;
    bool over = false, any = false;
    for (std::int32_t of = 0; of < a.end - a.begin; ++of) {
      const std::int32_t q = a.begin + of;
      Ints rows;  // of heads that share budgets
      for (std::int32_t t = 0; rule.shares() && t < x_.tables(); ++t) {
        score_table(p, {q, of, t}, a);
      }
      if (rule.shares()) { rows = shares(a, of, errors); }
      for (std::int32_t t = 0; t < x_.tables(); ++t) {
        Cut& cut = a.cuts.emplace_back();
        if (rule.shares()) {
          std::set<std::int32_t> keep;
          for_each_head(t, [&](std::int32_t l, std::int32_t h) {
            keep.insert(rows[head_index(l, h)]);
            cut = cut_to(budget_of(a, of, l, h), rule.sinks, rule.recent, live(q, t));
          });
          if (keep.size() > 1) { errors.insert(Status::unequal_budget); }
          cut.keep = *keep.begin(), cut.evicts = cut.keep < live(q, t);
          cut.over = cut.over && cut.evicts;
        } else if (rule.asks()) {
          const HeadRef head{p.view, SequenceId{of}, p.view.first_layer(t), p.view.first_head(t)};
          const auto asked = asked_cut(rule, head, obs);
          if (!asked) { errors.insert(Status::unequal_budget); }
          cut = asked.value_or(Cut{.evicts = true, .end = live(q, t)});
        } else {
          cut = cut_of(rule,
                       live(q, t),
                       obs.budgets == nullptr ? -1 : budgets[a.cuts.size() - 1],
                       x_.states ? sequences_[at(q)].rows_at_eviction[at(t)] : 0);
        }
        const SequenceState state = engine_->state(q, t);
        over = over || cut.over, any = any || cut.evicts;
        if (x_.common && x_.heads > 1) { later.insert(Status::planes_disagree); }
        if (!cut.evicts) { continue; }
        if (rule.by_page() && !drops) { errors.insert(Status::bad_options); }
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
    if (rule.by_page() && !sets_agree(a, any)) { errors.insert(Status::unequal_budget); }
    for (std::int32_t i = 0; i < items(a); ++i) {
      if (a.cuts[at(i)].evicts && !rule.shares()) { score_table(p, item(a, i), a); }
    }
    if (errors.empty() && any && bad_spares) { errors.insert(Status::bad_options); }

    const auto before = memory();
    Rule told = rule;
    told_(told);
    p.plan = told.with_policy([&](const auto& policy) {
      p.workspace.assign(plan_workspace_bytes(policy, plan_shape(p.view, obs)), std::byte{0x5A});
      return kvtrim::plan(policy, p.view, obs, p.workspace, options);
    });
    const Status status = p.plan.status();
    note("plan " + rule.words() + ", " + std::string(to_string(way)) + ",", p.first, 0, status);
    see("status of a plan", status);
    expect(before == memory(), "plan wrote a page");
    if (!errors.empty()) {
      expect(errors.contains(status),
             "plan ",
             to_string(status),
             ", not ",
             to_string(*errors.begin()));
    } else if (!usable(status)) {
      expect(later.contains(status), "plan ", to_string(status));
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
    for (std::int32_t i = 0; i < items(a); ++i) {
      over = check_table(p, item(a, i), a, a.cuts[at(i)]) || over;
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

  // Whether a table keeps what it must. Returns whether that is more than its budget.
  bool check_table(Pending& p, const Item& on, const Asked& a, const Cut& cut) {
    const CacheView all = engine_->view(-1);
    const std::int32_t s = on.s, t = on.t;
    const SequenceId of{on.of};
    const Table table = engine_->table(s, t);
    const TablePlan& plan = p.plan.table(of, t);
    Pending::Part& part = p.parts.emplace_back();
    part.evicts = plan.evicts, part.live = live(s, t), part.signature = signature(s, t);
    expect(plan.live_before == part.live, "live_before");
    expect(!plan.evicts || cut.evicts, "a table evicts that is within its budget");
    if (!cut.evicts) { return false; }
    const SequenceState state = engine_->state(s, t);
    const bool known = x_.positions || !x_.states || (state.next_position == state.live_rows);
    expect(plan.positions_known == known, "positions_known");

    const auto wanted = wanted_rows(a, on, cut);

    // What the plan lists, as ranks.
    std::int32_t kept = -1;
    std::size_t head = 0;
    for_each_head(t, [&](std::int32_t l, std::int32_t h) {
      const Ints rows = rows_of(all, s, l, h);
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
              model.begin(), model.end(), position, [](const Row& one, std::int32_t b) {
                return one.position < b;
              });
          expect(row != model.end() && row->position == position,
                 "an evicted position is not live");
          rank = static_cast<std::int32_t>(row - model.begin());
        }
        expect(rank < part.live, "an evicted row is not live");
        stays[at(rank)] = false;
        gone.push_back(rank);
        see("evicted row", rank);
      }
      std::set<std::int32_t> listed;
      p.plan.for_each_kept(of, LayerId{l}, HeadId{h}, [&](std::int32_t r) { listed.insert(r); });
      for (std::size_t rank = 0; rank < rows.size(); ++rank) {
        expect(listed.contains(rows[rank]) == stays[rank],
               "kept and evicted rows are not all rows");
      }
      expect(listed.size() == rows.size() - gone.size(), "for_each_kept");
      expect(stays == wanted[head++], a.rule.name(), ": other rows stay than the best");
      const std::int32_t n = part.live - static_cast<std::int32_t>(gone.size());
      expect(kept < 0 || n == kept, "heads of one table keep different counts");
      kept = n;
    });
    expect(plan.live_after == kept && plan.evicts == (kept < part.live), "live_after");
    check_pages(p, of, t, table, a.options);
    return kept > cut.keep && !(a.drops && a.rule.by_position());
  }

  // Released pages come tail first; the others and spare ones are the table.
  void check_pages(
      Pending& p, SequenceId of, std::int32_t t, const Table& table, const PlanOptions& options) {
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
    if (!p.applied && !stale) {
      for_each_part(p, [&](std::int32_t s, SequenceId, std::int32_t t, Pending::Part& part) {
        part.places = places(s, t, part.gone);
      });
    }
    const auto before = memory();
    const Status status =
        kvtrim::apply(p.plan, p.view, p.rerotator == nullptr ? Rerotator() : *p.rerotator);
    note("apply", p.first, 0, status);
    see("status of apply", status);
    expect(status, stale ? Status::stale_plan : Status::ok);
    for (const std::int32_t page : written_pages(before)) {
      expect(!stale && own.contains(page), "page ", page, " was written");
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

  // Where the rows of a table lie that do not go: pages of keys and values, and slot, head by head.
  std::vector<Ints> places(std::int32_t s, std::int32_t t, const std::vector<Ints>& gone) {
    const CacheView all = engine_->view(-1);
    const Table table = engine_->table(s, t);
    std::vector<Ints> out;
    for_each_head(t, [&](std::int32_t l, std::int32_t h) {
      const std::size_t head = out.size();
      Ints& list = out.emplace_back();
      const Ints rows = rows_of(all, s, l, h);
      for (std::size_t rank = 0; rank < rows.size(); ++rank) {
        if (head < gone.size() &&
            std::binary_search(
                gone[head].begin(), gone[head].end(), static_cast<std::int32_t>(rank))) {
          continue;
        }
        const std::int32_t place = rows[rank] + engine_->first_row(s);
        const std::size_t e = at(place / x_.page_size);
        list.insert(list.end(), {table.k[e], table.v[e], place % x_.page_size});
      }
    });
    return out;
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
    see("status of commit", report.status), see("evicted rows", report.evicted_rows);
    see("kept rows", report.kept_rows), see("dropped pages", report.dropped_pages);
    see("released pages", report.released_pages), see("NaN", report.nan_count);
    for (const std::int32_t page : written_pages(before)) {
      expect(x_.scrub && engine_->count(page) == 0, "commit wrote a page");
    }
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
    std::int64_t moved_rows = 0;
    for_each_part(p, [&](std::int32_t s, SequenceId of, std::int32_t t, const Pending::Part& part) {
      if (part.ended) { return; }
      const auto now = places(s, t, {});
      for (std::size_t h = 0; h < now.size(); ++h) {
        expect(now[h].size() == part.places[h].size(), "rows are lost or there twice");
        for (std::size_t i = 0; i < now[h].size(); i += 3) {
          moved_rows += std::equal(&now[h][i], &now[h][i] + 3, &part.places[h][i]) ? 0 : 1;
        }
      }
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
      q.rows_at_eviction[at(t)] = p.plan.table(of, t).live_after;
      q.applied[at(t)] = false;
      q.version[at(t)] = ++clock_;
    });
    if (ended == 0) {
      const CacheView all = engine_->view(-1);
      const std::int64_t row = all.k.row_bytes() + all.v.row_bytes() +
                               (all.unrotated_keys ? all.k.row_bytes() : 0) + (x_.marks ? 4 : 0);
      expect(report.bytes_moved == moved_rows * row,
             "bytes_moved ",
             report.bytes_moved,
             ", not ",
             moved_rows * row);
    }
    if (evicted > 0) {
      const PositionMode mode = p.rerotator == nullptr ? PositionMode::keep : x_.mode;
      evictions_.insert({p.kind, p.way, mode});
    }
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
      row.key = key_of(x_, row.tag, l, h, row.rope);
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

  std::set<Eviction> evictions_;
};

}  // namespace kvtrim::random_test
