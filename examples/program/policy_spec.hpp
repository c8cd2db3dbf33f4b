// SPDX-License-Identifier: Apache-2.0
#pragma once

// A policy as a word on the command line: `name` or `name:key=value,...`. Adding a policy adds one entry to `known_policies`,
// one line to `spec_help` and one branch to `PolicySpec::make_unchecked`.

#include <kvtrim/budget/rows.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulate_params.hpp>
#include <kvtrim/score/key_diff_params.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

namespace program {

/// Any of the library's policies.
using AnyPolicy = std::variant<kvtrim::Full,
                               kvtrim::StreamingSink,
                               kvtrim::HeavyHitter,
                               kvtrim::SnapKVSelector,
                               kvtrim::PageSelector<kvtrim::WindowParams>,
                               kvtrim::PageSelector<kvtrim::KeyDiffParams>,
                               kvtrim::PageSelector<kvtrim::AccumulateParams>,
                               kvtrim::PageSelector<kvtrim::ExternalParams>>;

namespace detail {

struct KnownPolicy {
  std::string_view name;
  std::vector<std::string_view> keys;
};

inline const std::vector<KnownPolicy>& known_policies() {
  static const std::vector<KnownPolicy> known{
      {"full", {}},
      {"streaming", {"sinks", "form"}},
      {"h2o", {"recent", "sinks", "mode", "interval", "grace", "decay", "age", "squared"}},
      {"snapkv", {"config", "window", "kernel", "pool", "rows", "group", "columns", "sinks"}},
      {"page",
       {"score",
        "unit",
        "window",
        "kernel",
        "pool",
        "rows",
        "group",
        "columns",
        "sinks",
        "norm",
        "reduce",
        "top",
        "heads"}},
  };
  return known;
}

/// Names with commas between them.
template <class Names>
std::string join(const Names& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

}  // namespace detail

/// What `--help` says of a SPEC.
inline constexpr const char* spec_help =
    R"(SPEC is a name, or name:key=value,... with these keys and defaults:
  full
  streaming  sinks=4, form=pages|exact
  h2o        recent=0.5 (below 1: a share of the budget; else rows), sinks=0,
             mode=real_drop|greedy|promote, interval=1, grace=0, decay=1, age=0|1, squared=0|1
  snapkv     window=32, kernel=5, pool=avg|max, rows=mean|sum|max, group=mean|sum|max,
             columns=candidates|all, sinks=0; config=paper|maxima (maxima: rows=max, group=max,
             pool=max, kernel=15, columns=all, sinks=4)
  page       whole pages: score=window|keydiff|h2o|surprisal, unit=layer|group|head (who shares a page
             set), window=16, sinks=1, norm=sum|none, reduce=max|mean|top, top=4, heads=max|sum;
             score=window: kernel=9, pool=avg|max, rows=max|mean|sum, group=mean|max|sum,
             columns=all|candidates; score=surprisal (for questions that come later): sinks=4
All but full also take the size: removed=0.5 (fraction of the rows that go) or budget=256 (rows).
)";

/// A parsed SPEC. Values are read when a policy is made of it.
class PolicySpec {
 public:
  /// \throws std::invalid_argument if the name or a key is unknown (the text lists the known ones), or a part is no key=value
  explicit PolicySpec(const std::string& text) : text_(text) {
    const std::size_t colon = text.find(':');
    name_ = text.substr(0, colon);
    const auto& known = detail::known_policies();
    const auto policy =
        std::find_if(known.begin(), known.end(), [&](const auto& k) { return k.name == name_; });
    if (policy == known.end()) {
      std::vector<std::string_view> names;
      for (const auto& k : known) names.push_back(k.name);
      throw std::invalid_argument("unknown policy '" + name_ + "'; known are " +
                                  detail::join(names));
    }
    if (colon == std::string::npos) return;
    std::vector<std::string_view> keys = policy->keys;
    if (name_ != "full") keys.insert(keys.end(), {"removed", "budget"});
    std::string_view rest = std::string_view(text).substr(colon + 1);
    while (!rest.empty()) {
      const std::string_view part = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), part.size() + 1));
      const std::size_t equals = part.find('=');
      const std::string_view key = part.substr(0, equals);
      if (equals == std::string_view::npos || equals + 1 == part.size()) {
        throw std::invalid_argument("policy '" + text + "': '" + std::string(part) +
                                    "' is not key=value");
      }
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
        throw std::invalid_argument("policy '" + text + "': unknown key '" + std::string(key) +
                                    "'; known are " + (keys.empty() ? "none" : detail::join(keys)));
      }
      if (!values_.emplace(key, part.substr(equals + 1)).second) {
        throw std::invalid_argument("policy '" + text + "': key '" + std::string(key) +
                                    "' is given twice");
      }
    }
    if (values_.contains("removed") && values_.contains("budget")) {
      throw std::invalid_argument("policy '" + text +
                                  "': removed and budget both fix the size; give one");
    }
    if (const auto r = removed(); r && !(*r >= 0 && *r <= 1))
      fail("removed", "is not within 0 and 1");
    if (const std::int64_t rows = integer("budget", 1);
        rows < 1 || rows > std::numeric_limits<std::int32_t>::max()) {
      fail("budget", "is not within 1 and 2147483647 rows");
    }
  }

  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// Fraction removed, if the SPEC gives one.
  [[nodiscard]] std::optional<double> removed() const {
    return values_.contains("removed") ? std::optional(number("removed", 0)) : std::nullopt;
  }
  /// Whether the SPEC says itself how much stays.
  [[nodiscard]] bool has_size() const {
    return name_ == "full" || values_.contains("removed") || values_.contains("budget");
  }

  /// Rows to keep of `rows`: the SPEC's budget (which may be above `rows`), else by its fraction, else by
  /// `removed_otherwise`.
  [[nodiscard]] std::int32_t rows_to_keep(std::int32_t rows, double removed_otherwise) const {
    if (name_ == "full") return rows;
    if (values_.contains("budget")) return static_cast<std::int32_t>(integer("budget", 0));
    return kvtrim::rows_kept(rows, removed().value_or(removed_otherwise));
  }

  /// The policy that keeps `keep` rows. Where that is fewer than it must protect, it is made for what it protects, and
  /// `Observation::budgets` with `keep` makes the library say so (`over_budget`).
  ///
  /// \param form_otherwise  form of `streaming` where the SPEC names none
  /// \throws std::invalid_argument if a value is no number, is out of range, or no known word; the text starts with the SPEC
  [[nodiscard]] AnyPolicy make(std::int32_t keep, kvtrim::SinkForm form_otherwise) const {
    try {
      return make_unchecked(keep, form_otherwise);
    } catch (const std::invalid_argument& error) {
      const std::string what = error.what();
      const std::string spec = "policy '" + text_ + "': ";
      throw std::invalid_argument(what.starts_with(spec) ? what : spec + what);
    }
  }

 private:
  [[nodiscard]] AnyPolicy make_unchecked(std::int32_t keep, kvtrim::SinkForm form_otherwise) const {
    if (name_ == "streaming") {
      kvtrim::StreamingSink::Params p;
      p.sinks = integer("sinks", p.sinks);
      p.form = word("form",
                    form_otherwise,
                    {{"exact", kvtrim::SinkForm::exact}, {"pages", kvtrim::SinkForm::pages}});
      p.recent = std::max<std::int64_t>(1, keep - p.sinks);
      return kvtrim::StreamingSink(p);
    }
    if (name_ == "h2o") {
      using kvtrim::HeavyMode;
      kvtrim::HeavyHitter::Params p;
      p.mode = word("mode",
                    p.mode,
                    {{"real_drop", HeavyMode::real_drop},
                     {"greedy", HeavyMode::greedy},
                     {"promote", HeavyMode::promote}});
      p.sinks = integer("sinks", p.sinks);
      const double recent = number("recent", p.mode == HeavyMode::greedy ? 0 : 0.5);
      if (recent < 0) fail("recent", "is negative");
      p.recent = std::llround(recent < 1 ? recent * keep : recent);
      if (recent > 0) p.recent = std::max<std::int64_t>(1, p.recent);  // a share of a small budget
      p.interval = integer("interval", p.interval);
      p.grace = integer("grace", p.grace);
      p.heavy = std::max<std::int64_t>({0, keep - p.recent - p.sinks, p.grace - p.recent});
      p.decay = static_cast<float>(number("decay", 1));
      const std::vector<std::pair<std::string_view, bool>> switches{{"0", false}, {"1", true}};
      p.age_normalised = word("age", false, switches);
      p.squared = word("squared", false, switches);
      return kvtrim::HeavyHitter(p);
    }
    if (name_ == "snapkv") {
      const bool maxima = word("config", false, {{"paper", false}, {"maxima", true}});
      kvtrim::SnapKVSelector::Params p =
          maxima ? kvtrim::SnapKVSelector::maxima(keep) : kvtrim::SnapKVSelector::Params{};
      const kvtrim::WindowParams w = window_params({static_cast<std::int32_t>(p.window),
                                                    static_cast<std::int32_t>(p.kernel),
                                                    p.rows,
                                                    p.group,
                                                    p.pooling,
                                                    p.columns});
      p.window = integer("window", p.window);
      p.kernel = integer("kernel", p.kernel);
      p.sinks = integer("sinks", p.sinks);
      p.rows = w.rows, p.group = w.group, p.pooling = w.pooling, p.columns = w.columns;
      p.budget = std::max<std::int64_t>(keep, p.window + p.sinks);
      return kvtrim::SnapKVSelector(p);
    }
    if (name_ == "page") {
      enum class Score { window, keydiff, h2o, surprisal };
      switch (word("score",
                   Score::window,
                   {{"window", Score::window},
                    {"keydiff", Score::keydiff},
                    {"h2o", Score::h2o},
                    {"surprisal", Score::surprisal}})) {
        case Score::window: {
          kvtrim::PageSelector<kvtrim::WindowParams>::Params p;
          p.scores = window_params(p.scores);
          p.scores.window = static_cast<std::int32_t>(
              std::clamp<std::int64_t>(integer("window", p.window), 1, 1 << 20));
          p.scores.kernel = static_cast<std::int32_t>(
              std::clamp<std::int64_t>(integer("kernel", p.scores.kernel), 0, 1 << 20));
          if (p.scores.kernel % 2 == 0) fail("kernel", "is not odd");
          return pages(p, keep);
        }
        case Score::keydiff:
          return pages(kvtrim::PageSelector<kvtrim::KeyDiffParams>::Params{}, keep);
        case Score::h2o:
          return pages(kvtrim::PageSelector<kvtrim::AccumulateParams>::Params{}, keep);
        case Score::surprisal:
          return pages(kvtrim::agnostic_pages(keep), keep);
      }
    }
    return kvtrim::Full{};
  }

  [[nodiscard]] kvtrim::WindowParams window_params(kvtrim::WindowParams p) const {
    using kvtrim::Reduction;
    const std::vector<std::pair<std::string_view, Reduction>> reductions{
        {"mean", Reduction::mean}, {"sum", Reduction::sum}, {"max", Reduction::max}};
    p.rows = word("rows", p.rows, reductions);
    p.group = word("group", p.group, reductions);
    p.pooling =
        word("pool", p.pooling, {{"avg", kvtrim::Pooling::average}, {"max", kvtrim::Pooling::max}});
    p.columns = word("columns",
                     p.columns,
                     {{"candidates", kvtrim::PoolColumns::candidates},
                      {"all", kvtrim::PoolColumns::all_columns}});
    return p;
  }

  template <class Params>
  [[nodiscard]] AnyPolicy pages(Params p, std::int32_t keep) const {
    using kvtrim::PageUnit;
    p.unit = word("unit",
                  PageUnit::per_layer,
                  {{"layer", PageUnit::per_layer},
                   {"group", PageUnit::per_group},
                   {"head", PageUnit::per_table}});
    p.window = integer("window", p.window);
    p.sinks = integer("sinks", p.sinks);
    p.pages.norm = word(
        "norm", p.pages.norm, {{"sum", kvtrim::HeadNorm::sum}, {"none", kvtrim::HeadNorm::none}});
    p.pages.reduction = word("reduce",
                             p.pages.reduction,
                             {{"max", kvtrim::PageReduction::max},
                              {"mean", kvtrim::PageReduction::mean},
                              {"top", kvtrim::PageReduction::top_m}});
    p.pages.top_m = static_cast<std::int32_t>(
        std::clamp<std::int64_t>(integer("top", p.pages.top_m), 0, 1 << 20));
    p.pages.heads = word(
        "heads", p.pages.heads, {{"sum", kvtrim::Reduction::sum}, {"max", kvtrim::Reduction::max}});
    p.budget = std::max<std::int64_t>({keep, p.sinks + p.window, 1});
    return kvtrim::PageSelector<decltype(p.scores)>(p);
  }

  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    throw std::invalid_argument("policy '" + text_ + "': " + key + "=" + values_.find(key)->second +
                                " " + what);
  }
  [[nodiscard]] std::int64_t integer(const std::string& key, std::int64_t otherwise) const {
    return parse(key, otherwise, "is no whole number");
  }
  [[nodiscard]] double number(const std::string& key, double otherwise) const {
    return parse(key, otherwise, "is no number");
  }

  template <class T>
  [[nodiscard]] T parse(const std::string& key, T value, const char* what) const {
    const auto it = values_.find(key);
    if (it == values_.end()) return value;
    const char* const end = it->second.data() + it->second.size();
    const auto result = std::from_chars(it->second.data(), end, value);
    if (result.ec != std::errc() || result.ptr != end ||
        !(std::abs(static_cast<double>(value)) < 1e15))
      fail(key, what);
    return value;
  }
  template <class T>
  [[nodiscard]] T word(const std::string& key,
                       T otherwise,
                       const std::vector<std::pair<std::string_view, T>>& words) const {
    const auto it = values_.find(key);
    if (it == values_.end()) return otherwise;
    std::vector<std::string_view> names;
    for (const auto& [name, value] : words) {
      if (name == it->second) return value;
      names.push_back(name);
    }
    fail(key, "is unknown; known are " + detail::join(names));
  }

  std::string text_;
  std::string name_;
  std::map<std::string, std::string> values_;
};

}  // namespace program
