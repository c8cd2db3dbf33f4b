// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks that do not do the same hang, or corrupt each other's lengths. Before any words whose number depends on it they
// compare what they are about to do, and before anything moves, what came of it.

#include <kvtrim/cache/generation.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/version.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtrim {

/// How the ranks of one communicator share a model.
enum class RankSplit : std::uint8_t {
  heads,   ///< tensor parallel: each rank has some KV heads of every layer
  layers,  ///< pipeline parallel: each rank has some layers
  rows,    ///< context parallel: each rank has some rows of every layer and head
};

/// What ranks must agree on before they evict together, and which part of the model is whose.
struct RankHeader {
  RankSplit split = RankSplit::heads;  ///< how they share
  std::int32_t ranks = 1;              ///< of the communicator, as the engine was configured
  std::uint64_t policy = 0;            ///< `policy_hash`
  std::int32_t layers = 0;             ///< of the model
  std::int32_t kv_heads = 0;           ///< of a layer of the model
  std::int32_t sequences = 0;          ///< of the batch
  /// `budgets_hash` of what all ranks must keep alike: budgets, lengths, demands.
  std::uint64_t budgets = 0;
  std::int64_t addends =
      0;  ///< the most that an exact sum has, such as the rows of the longest sequence on all ranks
  std::int32_t first_part = 0;  ///< the rank's first KV head (`heads`) or layer (`layers`)
  std::int32_t parts = 0;       ///< how many of them it has
};

/// Hash of numbers that all ranks must have alike.
template <class Numbers>
[[nodiscard]] constexpr std::uint64_t budgets_hash(const Numbers& numbers) noexcept {
  std::uint64_t hash = 0;
  for (const auto x : numbers) { hash = detail::mixed(hash, static_cast<std::uint64_t>(x)); }
  return hash;
}

/// The first round of an eviction over ranks: one gather of 11 words.
///
/// \par Complexity
/// O(ranks); memory is taken by the constructor and by the message
class HeaderAgreement {
 public:
  /// \param rank    this rank, as the communicator says
  /// \param header  of this rank
  HeaderAgreement(Rank rank, const RankHeader& header)
      : rank_(rank), words_(static_cast<std::size_t>(rank.count) * word_count) {
    const auto word = [](auto x) { return static_cast<std::uint64_t>(x); };
    const std::array<std::uint64_t, word_count> own{
        word(KVTRIM_VERSION_MAJOR) << 32U | KVTRIM_VERSION_MINOR << 16U | KVTRIM_VERSION_PATCH,
        word(header.split),
        word(header.ranks),
        header.policy,
        word(header.layers),
        word(header.kv_heads),
        word(header.sequences),
        header.budgets,
        word(header.addends),
        word(header.first_part),
        word(header.parts)};
    std::ranges::copy(own, words_.begin() + rank.index * static_cast<std::ptrdiff_t>(word_count));
  }

  /// The gather.
  [[nodiscard]] Round next() noexcept {
    return std::exchange(done_, true) ? Round{} : Round{RoundKind::gather, words_};
  }
  /// Once the round is done: `ok`, or `ranks_differ`. The same on all ranks.
  [[nodiscard]] Status status() const {
    return message().empty() ? Status::ok : Status::ranks_differ;
  }
  /// What the ranks do not agree on, and which of them; empty where they do. The same on all ranks.
  [[nodiscard]] std::string message() const {
    static constexpr std::array<std::string_view, 9> names{
        "version", "split", "ranks", "policy", "layers", "kv_heads", "sequences", "budgets"};
    std::string text;
    for (std::size_t f = 0; f < names.size(); ++f) {
      std::string others;
      for (std::int32_t r = 1; r < rank_.count; ++r) {
        if (word(r, f) != word(0, f)) { others += text_of(", {} on rank {}", word(r, f), r); }
      }
      if (!others.empty()) {
        add(text, text_of("{} {} on rank 0{}", names[f], word(0, f), others));
      }
    }
    if (!text.empty()) { return text; }
    if (word(0, ranks_word) != static_cast<std::uint64_t>(rank_.count)) {
      add(text,
          text_of("a communicator of {} ranks, where the engine has {}",
                  rank_.count,
                  word(0, ranks_word)));
    }
    if (word(0, addends_word) > static_cast<std::uint64_t>(exact_addends)) {
      add(text,
          text_of("an exact sum of {} addends, but 64 bits hold at most {}",
                  word(0, addends_word),
                  exact_addends));
    }
    add_parts(text);
    return text;
  }

 private:
  static constexpr std::size_t word_count = 11;
  static constexpr std::size_t split_word = 1;
  static constexpr std::size_t ranks_word = 2;
  static constexpr std::size_t layers_word = 4;
  static constexpr std::size_t heads_word = 5;
  static constexpr std::size_t addends_word = 8;
  static constexpr std::size_t part_word = 9;

  [[nodiscard]] std::uint64_t word(std::int32_t rank, std::size_t field) const noexcept {
    return words_[static_cast<std::size_t>(rank) * word_count + field];
  }
  static void add(std::string& text, const std::string& more) {
    text += text.empty() ? "kvtrim: ranks cannot evict together: " : "; ";
    text += more;
  }
  template <class... Values>
  [[nodiscard]] static std::string text_of(std::string_view format, const Values&... values) {
    return detail::message(format, {detail::message_text(values)...});
  }
  // Each head or layer must be on one rank, and no rank without any.
  void add_parts(std::string& text) const {
    const auto split = static_cast<RankSplit>(word(0, split_word));
    if (split == RankSplit::rows) { return; }
    const bool heads = split == RankSplit::heads;
    const std::string_view what = heads ? "KV heads" : "layers";
    const std::uint64_t all = word(0, heads ? heads_word : layers_word);
    std::uint64_t covered = 0;
    for (std::int32_t r = 0; r < rank_.count; ++r) {
      const std::uint64_t first = word(r, part_word);
      const std::uint64_t parts = word(r, part_word + 1);
      if (parts == 0) {
        add(text, text_of("rank {} has none of the {} {}", r, all, what));
        continue;
      }
      if (first >= all || parts > all - first) {
        add(text,
            text_of("rank {} has {} {} from number {} on, of {}", r, parts, what, first, all));
        continue;
      }
      covered += parts;
      for (std::int32_t other = 0; other < r; ++other) {
        const std::uint64_t begin = word(other, part_word);
        const std::uint64_t end = begin + word(other, part_word + 1);
        if (first < end && begin < first + parts) {
          add(text, text_of("ranks {} and {} have {} in common", other, r, what));
        }
      }
    }
    if (text.empty() && covered != all) {
      add(text, text_of("{} of {} {} are on a rank", covered, all, what));
    }
  }

  Rank rank_;
  std::vector<std::uint64_t> words_;
  bool done_ = false;
};
static_assert(RankRun<HeaderAgreement>);

/// Hash of a plan of what ranks must have alike: how many rows each layer keeps, and with `same_rows` which positions go.
/// Where ranks share layers, one layer stands for all.
///
/// For sets that a layer's heads have in common, and for counts of tables that several heads share. Heads with tables of
/// their own may differ: take `SharedBudget::fingerprint`.
[[nodiscard]] inline std::uint64_t plan_fingerprint(const PlanView& plan,
                                                    RankSplit split,
                                                    bool same_rows) noexcept {
  std::uint64_t hash = 0;
  const std::int32_t layers = split == RankSplit::layers ? 1 : plan.layers();
  for (std::int32_t s = 0; s < plan.sequences(); ++s) {
    for (std::int32_t l = 0; l < layers; ++l) {
      const SequenceId id{s};
      const TablePlan& table = plan.table(id, plan.table_of(LayerId{l}, HeadId{0}));
      hash = detail::mixed(hash, static_cast<std::uint64_t>(table.live_after));
      if (!same_rows) { continue; }
      for (const Position p : plan.evicted(id, LayerId{l}, HeadId{0})) {
        hash = detail::mixed(hash, static_cast<std::uint64_t>(raw(p)));
      }
    }
  }
  return hash;
}

/// The last round before anything moves: one gather of 3 words. If one rank cannot apply its plan, none does.
///
/// \par Complexity
/// O(ranks); memory is taken by the constructor and by the message
class PlanAgreement {
 public:
  /// \param rank         this rank
  /// \param plan         of this rank
  /// \param fingerprint  of what all ranks must have alike: `plan_fingerprint`, or that of the algorithm that chose
  PlanAgreement(Rank rank, const PlanView& plan, std::uint64_t fingerprint)
      : rank_(rank), words_(static_cast<std::size_t>(rank.count) * 3) {
    const auto own = std::span(words_).subspan(static_cast<std::size_t>(rank.index) * 3, 3);
    own[0] = static_cast<std::uint64_t>(plan.status());
    own[1] = static_cast<std::uint64_t>(plan.spares_needed());
    own[2] = fingerprint;
  }

  /// The gather.
  [[nodiscard]] Round next() noexcept {
    return std::exchange(done_, true) ? Round{} : Round{RoundKind::gather, words_};
  }
  /// Once the round is done, the same on all ranks: `ok` or `over_budget`: apply; otherwise the status of the first rank
  /// that was refused, or `ranks_differ`. `over_budget`: some rank keeps more rows than were chosen, in pages that it shares.
  [[nodiscard]] Status status() const noexcept {
    Status status = Status::ok;
    for (std::int32_t r = 0; r < rank_.count; ++r) {
      if (!usable(status_of(r))) { return status_of(r); }
      if (status_of(r) != Status::ok) { status = status_of(r); }
    }
    for (std::int32_t r = 1; r < rank_.count; ++r) {
      if (word(r, 2) != word(0, 2)) { return Status::ranks_differ; }
    }
    return status;
  }
  /// Which ranks were refused and why, or which have another fingerprint than rank 0; empty where all may apply.
  [[nodiscard]] std::string message() const {
    std::string text;
    const auto add = [&](std::string_view format, auto... values) {
      text += text.empty() ? "kvtrim: nothing was evicted: " : "; ";
      text += detail::message(format, {detail::message_text(values)...});
    };
    for (std::int32_t r = 0; r < rank_.count; ++r) {
      if (usable(status_of(r))) { continue; }
      add("rank {}: {}, {} spare pages needed", r, to_string(status_of(r)), word(r, 1));
    }
    for (std::int32_t r = 1; text.empty() && r < rank_.count; ++r) {
      if (word(r, 2) == word(0, 2)) { continue; }
      add("rank {} keeps other rows than rank 0, or another number: fingerprint {} and {}",
          r,
          word(r, 2),
          word(0, 2));
    }
    return text;
  }

 private:
  [[nodiscard]] std::uint64_t word(std::int32_t rank, std::size_t i) const noexcept {
    return words_[static_cast<std::size_t>(rank) * 3 + i];
  }
  [[nodiscard]] Status status_of(std::int32_t rank) const noexcept {
    return static_cast<Status>(word(rank, 0));
  }

  Rank rank_;
  std::vector<std::uint64_t> words_;
  bool done_ = false;
};
static_assert(RankRun<PlanAgreement>);

}  // namespace kvtrim
