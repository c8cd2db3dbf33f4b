// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a plan is asked for, and what the model says must stay of each table: scores as the library's scorer made them, and
// choices of the model's own.

#include "random/choice.hpp"
#include "random/scores.hpp"
#include "random/world.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace kvtrim::random_test {

class ChoosingWorld : public World {
 protected:
  using World::World;

  struct Asked {
    Rule rule;
    PlanOptions options;
    Observation obs;
    std::int32_t begin = 0, end = 0;  // sequences of the world
    bool drops = false, given = false;
    Floats given_scores;                // [sequences, layers, kv_heads, max_rows]
    std::vector<Floats> first, second;  // by rank, [sequences, layers, kv_heads]: of both stages
    std::vector<Cut> cuts;              // [sequences, tables]
  };
  // A table of it.
  struct Item {
    std::int32_t s, of, t;  // sequence of the world and of the view
  };
  Item item(const Asked& a, std::int32_t i) const {
    return {a.begin + i / x_.tables(), i / x_.tables(), i % x_.tables()};
  }
  std::int32_t items(const Asked& a) const { return (a.end - a.begin) * x_.tables(); }
  std::size_t list(const Item& on, std::int32_t l, std::int32_t h) const {
    return at(on.of * x_.layers * x_.heads) + head_index(l, h);
  }
  // Rows that the table's heads may keep, as far as that is a number of their own.
  static std::int32_t budget_of(const Asked& a, std::int32_t of, std::int32_t l, std::int32_t h) {
    const std::int32_t given = a.obs.budget(SequenceId{of}, LayerId{l}, HeadId{h});
    return given >= 0 ? given : a.rule.keep;
  }

  // Scores of a table: where they are the policy's own, close to what they must be.
  void score_table(const Pending& p, const Item& on, Asked& a) {
    const bool refused = x_.states && (open(on.s, on.t) || sequences_[at(on.s)].applied[at(on.t)]);
    for_each_head(on.t, [&](std::int32_t l, std::int32_t h) {
      const HeadRef head{p.view, SequenceId{on.of}, LayerId{l}, HeadId{h}};
      const Ints rows = rows_of(engine_->view(-1), on.s, l, h);
      const Rows& model = sequences_[at(on.s)].heads[head_index(l, h)];
      Floats &first = a.first[list(on, l, h)], &second = a.second[list(on, l, h)];
      first.assign(rows.size(), 0.0F), second.assign(rows.size(), 0.0F);
      if (a.rule.by_position()) { std::iota(first.begin(), first.end(), 0.0F); }  // the last stay
      if (a.rule.by_position() || refused) { return; }
      const Floats own = a.given ? Floats{} : own_scores(a.rule, head, a.obs);
      const Floats factors = a.rule.two_stages() ? own_factors(head, a.obs) : Floats{};
      const Reference reference =
          a.given ? Reference{} : reference_scores(a.rule, head, a.obs, rows, model);
      const auto close =
          [&](const char* what, float got, double wanted, double error, const Row& row) {
            const double off = std::abs(static_cast<double>(got) - wanted);
            if (off <= error || (std::isnan(got) && std::isnan(wanted))) { return; }
            expect(false,
                   a.rule.words(),
                   ": ",
                   what,
                   got,
                   " of position ",
                   row.position,
                   ", not ",
                   wanted);
          };
      for (std::size_t rank = 0; rank < rows.size(); ++rank) {
        const std::size_t row = at(rows[rank]);
        first[rank] = a.given ? a.given_scores[list(on, l, h) * at(x_.max_rows) + row] : own[row];
        if (!reference.scores.empty()) {
          const double wanted = reference.scores[rank];
          const double error = reference.error * std::max(reference.floor, std::abs(wanted));
          close("score ", first[rank], wanted, error, model[rank]);
        }
        if (!a.rule.two_stages()) { continue; }
        const auto [wanted, error] = reference_factor(head, a.obs, model[rank].tag);
        close("factor ", factors[row], wanted, error, model[rank]);
        second[rank] = (first[rank] + a.rule.epsilon) * factors[row];
      }
    });
  }

  // Rows of each head of a sequence, [layers, kv_heads], that share budgets; why a plan for them is refused.
  Ints shares(const Asked& a, std::int32_t of, std::set<Status>& errors) const {
    const std::int32_t all = x_.layers * x_.heads, s = a.begin + of;
    const std::int32_t size = a.rule.sharing.over == AdaptiveOver::all_heads ? all : x_.heads;
    Ints rows;
    for (std::int32_t begin = 0; begin < all; begin += size) {
      std::vector<Sharer> heads;
      std::set<Status> now;
      std::int32_t longest = 0, more = 0;
      Ints live_rows;
      for (std::int32_t i = begin; i < begin + size; ++i) {
        live_rows.push_back(live(s, x_.table_of(i / x_.heads, i % x_.heads)));
        longest = std::max(longest, live_rows.back());
      }
      for (std::int32_t i = begin; i < begin + size; ++i) {
        const std::int32_t l = i / x_.heads, h = i % x_.heads, t = x_.table_of(l, h);
        const std::int32_t n = live_rows[at(i - begin)];
        const Cut cut = cut_to(0, a.rule.sinks, a.rule.recent, n);
        Sharer& head = heads.emplace_back();
        head.fixed = cut.keep, head.budget = std::min(budget_of(a, of, l, h), longest);
        more += n - head.budget;
        for (std::int32_t rank = cut.begin; rank < cut.end; ++rank) {
          const Row& row = sequences_[at(s)].heads[head_index(l, h)][at(rank)];
          head.candidates.push_back(
              {a.first[list({s, of, t}, l, h)][at(rank)], x_.positions ? row.position : rank});
        }
        if (x_.states && open(s, t)) { now.insert(Status::step_open); }
        if (sequences_[at(s)].applied[at(t)]) { now.insert(Status::eviction_open); }
      }
      const Ints shared = more > 0 ? shared_rows(a.rule.sharing, heads) : live_rows;
      rows.insert(rows.end(), shared.begin(), shared.end());
      if (more > 0) { errors.merge(now); }
    }
    return rows;
  }

  // The set of pages that table `t` belongs to.
  std::int32_t set_of(const Rule& rule, std::int32_t t) const {
    std::int32_t layer = -1;
    for_each_head(t, [&](std::int32_t l, std::int32_t) { layer = layer < 0 ? l : layer; });
    return rule.unit == PageUnit::per_table ? t : rule.unit == PageUnit::per_layer ? layer : 0;
  }
  // Whether all tables of each set of pages have the same to do. Where nothing goes, nobody looks.
  bool sets_agree(const Asked& a, bool any) const {
    bool agree =
        a.rule.unit != PageUnit::per_layer || x_.scope != TableScope::group || x_.layers == 1;
    for (std::int32_t i = 0; any && i < items(a); ++i) {
      const Item on = item(a, i);
      for (std::int32_t t = 0; t < on.t; ++t) {
        if (set_of(a.rule, t) != set_of(a.rule, on.t)) { continue; }
        const Cut &one = a.cuts[at(i)], &other = a.cuts[at(on.of * x_.tables() + t)];
        agree = agree && live(on.s, t) == live(on.s, on.t) && one.evicts == other.evicts &&
                (!one.evicts || one.keep == other.keep);
      }
    }
    return agree;
  }

  // Which rows of a table stay, by rank, of each head that it serves.
  std::vector<std::vector<bool>> wanted_rows(const Asked& a, const Item& on, const Cut& cut) {
    const std::int32_t padding = engine_->first_row(on.s);
    const Table table = engine_->table(on.s, on.t);
    std::vector<bool> pages(at(table.used), false);  // with a row that stays
    for (std::size_t e = 0; e < pages.size(); ++e) {
      pages[e] = at(padding) > e * at(x_.page_size);
    }
    if (a.rule.by_page()) {
      const PageRows rows{live(on.s, on.t), padding, x_.page_size};
      std::vector<Floats> heads;
      for (std::int32_t t = 0; t < x_.tables(); ++t) {
        if (set_of(a.rule, t) != set_of(a.rule, on.t)) { continue; }
        for_each_head(t, [&](std::int32_t l, std::int32_t h) {
          heads.push_back(scores_of_pages(a.rule.page, a.first[list(on, l, h)], rows));
        });
      }
      pages = kept_pages(a.rule.page, heads, rows, cut);
    }
    const std::int32_t stage =
        a.rule.two_stages() ? static_cast<std::int32_t>(cut.keep * a.rule.first_stage) : -1;
    std::vector<Place> places(pages.size(), Place::own);
    std::vector<std::vector<bool>> wanted;
    const auto choose = [&] {
      wanted.clear();
      for_each_head(on.t, [&](std::int32_t l, std::int32_t h) {
        std::vector<Place> of_rows;
        const auto entries = entries_of(on, l, h);
        for (const std::size_t e : entries) { of_rows.push_back(places[e]); }
        const Floats &first = a.first[list(on, l, h)], &second = a.second[list(on, l, h)];
        auto& keep = wanted.emplace_back(kept_rows(cut, of_rows, first, stage, second));
        for (std::size_t rank = 0; rank < keep.size(); ++rank) {
          if (keep[rank] && !a.rule.by_page()) { pages[entries[rank]] = true; }
        }
      });
    };
    choose();
    bool again = false;  // as pages of others stay as they are, if they have a row that stays
    for (std::size_t e = 0; e < pages.size(); ++e) {
      if (a.drops || a.options.shared == SharedPages::copy || !x_.refs || !shared(table, e)) {
        continue;
      }
      places[e] = pages[e] ? Place::stays : Place::goes, again = true;
    }
    if (again) { choose(); }
    std::size_t head = 0;
    for_each_head(on.t, [&](std::int32_t l, std::int32_t h) {
      std::vector<bool>& keep = wanted[head++];
      const auto entries = entries_of(on, l, h);
      for (std::size_t rank = 0; a.drops && rank < keep.size(); ++rank) {
        keep[rank] = pages[entries[rank]];
      }
    });
    return wanted;
  }

 private:
  // The table's entry of each row of a head, by rank.
  std::vector<std::size_t> entries_of(const Item& on, std::int32_t l, std::int32_t h) {
    std::vector<std::size_t> entries;
    for (const std::int32_t r : rows_of(engine_->view(-1), on.s, l, h)) {
      entries.push_back(at((r + engine_->first_row(on.s)) / x_.page_size));
    }
    return entries;
  }
};

}  // namespace kvtrim::random_test
