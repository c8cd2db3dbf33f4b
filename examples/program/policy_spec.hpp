// SPDX-License-Identifier: Apache-2.0
#pragma once

// A policy as a word on the command line. A method is a row of `table`: its classes, and its keys, each beside the member
// that it sets and its words. `AnyPolicy`, the parser, its errors, the defaults and the help follow.

#include <kvtrim/kvtrim.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "spec_values.hpp"

namespace program {

/// What a policy is made for.
struct Purpose {
  std::int32_t keep = 1024;                         ///< rows
  kvtrim::SinkForm form = kvtrim::SinkForm::pages;  ///< of `streaming` if the SPEC names none
  kvtrim::Rope rope{};  ///< for `expected`; its frequencies must outlive the policy
};

namespace detail {

// As many rows as requested, or as many as must be protected; of the policy inside, if there is one.
template <class Params>
void set_budget(Params& p, const Purpose& to) {
  if constexpr (requires { p.inner; }) set_budget(p.inner, to);
  if constexpr (requires { p.snapkv; }) set_budget(p.snapkv, to);
  if constexpr (requires { p.sinks, p.budget; }) {
    std::int64_t least = p.sinks;
    if constexpr (requires { p.recent; }) least += p.recent;
    if constexpr (requires { p.window; }) least += p.window;
    if constexpr (requires { p.chunk; }) {  // whole ones
      const std::int64_t chunk = std::max<std::int64_t>(1, p.chunk);
      least = (p.sinks + chunk - 1) / chunk * chunk + p.recent + chunk - 1;
    }
    p.budget = std::max<std::int64_t>({to.keep, least, 1});
  }
}

// The parameters of a class, which hold its defaults.
template <class P>
auto defaults() {
  if constexpr (requires { typename P::Params; })
    return typename P::Params{};
  else
    return P{};
}

// A method: `read(key, to, params...)` reads its keys into the parameters of its classes. If there are several, it returns
// the index of the one to make.
template <class Read, class... P>
struct Row {
  Read read;
  std::string_view note;  // what `--help` says after the keys
  bool once;              // acts at the end of the prompt only

  template <class Any>
  Any make(SpecValues& key, const Purpose& to) const {
    const auto make_one = [&](auto... params) {
      int left = 0;
      if constexpr (sizeof...(P) > 1)
        left = static_cast<int>(read(key, to, params...));
      else
        read(key, to, params...);
      Any policy;
      (set_budget(params, to), ...);
      ((left-- == 0 ? void(policy = P(params)) : void()), ...);
      return policy;
    };
    return make_one(defaults<P>()...);
  }
};
template <class... P, class Read>
constexpr Row<Read, P...> row(Read read, std::string_view note = "", bool once = false) {
  return {read, note, once};
}

using kvtrim::AdaKV, kvtrim::CriticalKV, kvtrim::ExpectedAttention, kvtrim::HeavyMode;
using kvtrim::PageSelector, kvtrim::SinkForm, kvtrim::StreamingSink;
using SnapKV = kvtrim::SnapKVSelector<>;
template <HeavyMode Mode>
using H2O = kvtrim::HeavyHitter<kvtrim::AccumulateParams, Mode>;

// clang-format off: keys that belong together share a line.

inline constexpr auto score_keys = [](auto& key, auto&, auto& p) { key("sinks", p.sinks)("recent", p.recent); };

// Of softmax, queries and heads.
inline constexpr auto sums_key = [](auto& key, auto& p) { key("sums", p.sums, "floating|exact"); };

// Of WindowParams, or of SnapKV's own parameters.
inline constexpr auto window_keys = [](auto& key, auto& p) {
  key("window", p.window)("kernel", p.kernel)("pool", p.pooling, "avg|max");
  key("rows", p.rows, "mean|sum|max")("group", p.group, "mean|sum|max")("columns", p.columns, "candidates|all");
  sums_key(key, p);
};

inline constexpr auto snapkv_keys = [](auto& key, auto& to, auto& p) {
  bool maxima = false;
  key("config", maxima, "paper|maxima");
  if (maxima) p = SnapKV::maxima(to.keep);
  window_keys(key, p);
  key("sinks", p.sinks);
};

inline constexpr auto expected_keys = [](auto& key, auto& to, auto& p) {
  auto& s = p.scores;
  key("sinks", p.sinks)("sinks", s.sinks)("future", s.future)("epsilon", s.epsilon);
  key("covariance", s.covariance)("values", s.value_norm);
  s.rope = to.rope;
};

inline constexpr auto adakv_keys = [](auto& key, auto& p) {
  key("safeguard", p.safeguard)("form", p.form, "safeguard|floor|rounded")("over", p.over, "layer|all");
};

inline constexpr auto page_keys = [](auto& key, auto& p) {
  p.unit = kvtrim::PageUnit::per_layer;
  key("unit", p.unit, "head|layer|group")("window", p.window)("sinks", p.sinks);
  key("norm", p.pages.norm, "none|sum")("reduce", p.pages.reduction, "max|mean|top")("top", p.pages.top_m);
  key("heads", p.pages.heads, "|sum|max");
};

inline constexpr std::tuple table{
    row<kvtrim::Full>([](auto&...) {}, "", true),
    row<StreamingSink<SinkForm::pages>, StreamingSink<SinkForm::exact>>([](auto& key, auto& to, auto&... p) {
      SinkForm form = to.form;
      (key("sinks", p.sinks), ...);
      key("form", form, "pages|exact");
      ((p.recent = std::max<std::int64_t>(1, to.keep - p.sinks)), ...);
      return form;
    }),
    row<H2O<HeavyMode::real_drop>, H2O<HeavyMode::greedy>, H2O<HeavyMode::promote>>([](auto& key, auto& to, auto&... p) {
      HeavyMode mode = HeavyMode::real_drop;
      const auto read = [&](auto& q) {
        double recent = q.recent == 0 ? 0 : 0.5;
        key("recent", recent)("sinks", q.sinks)("mode", mode, "real_drop|greedy|promote");
        key("interval", q.interval)("grace", q.grace);
        key("decay", q.decay)("age", q.age_normalised)("squared", q.squared);
        sums_key(key, q);
        if (recent < 0) key.fail("recent", "is negative");
        q.recent = std::llround(recent < 1 ? recent * to.keep : recent);
        if (recent > 0) q.recent = std::max<std::int64_t>(1, q.recent);  // a share of a small budget
        q.heavy = std::max<std::int64_t>({0, to.keep - q.recent - q.sinks, q.grace - q.recent});
      };
      (read(p), ...);
      return mode;
    }, "recent below 1: a share of the budget; from 1 on: rows; mode=greedy: recent=0"),
    row<SnapKV>(snapkv_keys,
        "config=maxima: rows=max, group=max, pool=max, kernel=15, columns=all, sinks=4", true),
    row<kvtrim::PyramidKV>([](auto& key, auto& to, auto& p) {
      key("beta", p.beta)("form", p.form, "exact|kvpress|factory");
      snapkv_keys(key, to, p.snapkv);
    }, "the budget is the layers' average; config as snapkv's", true),
    row<AdaKV<SnapKV>, AdaKV<ExpectedAttention>>([](auto& key, auto& to, auto& p, auto& e) {
      bool by_expected = false;
      key("score", by_expected, "snapkv|expected");
      adakv_keys(key, p), adakv_keys(key, e);
      snapkv_keys(key, to, p.inner), expected_keys(key, to, e.inner);
      return by_expected;
    }, "the budget is the heads' average; config as snapkv's; future to values are keys of score=expected, whose "
        "sinks=4", true),
    row<CriticalKV<SnapKV>, CriticalKV<AdaKV<SnapKV>>>([](auto& key, auto& to, auto& p, auto& shared) {
      bool shares = false;
      key("heads", shares, "equal|adakv")("first", p.first_stage)("epsilon", p.epsilon);
      key("first", shared.first_stage)("epsilon", shared.epsilon);
      adakv_keys(key, shared.inner);
      snapkv_keys(key, to, p.inner), snapkv_keys(key, to, shared.inner.inner);
      return shares;
    }, "safeguard, form, over: keys of heads=adakv; config as snapkv's", true),
    row<kvtrim::ChunkKV<>>([](auto& key, auto&, auto& p) {
      bool whole = false;  // `PolicySpec::rows_to_keep` counts them
      key("chunk", p.chunk)("form", whole, "rows|chunks")("sinks", p.sinks);
      window_keys(key, p.scores);
      p.recent = p.scores.window;
    }, "form=chunks: of removed, whole chunks only, counted as kvpress does", true),
    row<kvtrim::Tova>([](auto& key, auto&, auto& p) {
      key("protect", p.recent, "0|1");
      sums_key(key, p.scores);
    }, "protect: the last row"),
    row<kvtrim::KeyDiff>(score_keys),
    row<kvtrim::KeyNorm>(score_keys),
    row<ExpectedAttention>(expected_keys, "values: times the value's norm"),
    row<kvtrim::LagKV>([](auto& key, auto&, auto& p) {
      key("sinks", p.sinks)("lag", p.lag)("cross", p.cross_scoring);
    }),
    row<kvtrim::QFilter>(score_keys, "needs --filters"),
    row<kvtrim::CurKV>([](auto& key, auto&, auto& p) {
      key("sinks", p.sinks)("window", p.scores.window)("form", p.scores.form, "product|average|keys|values");
    }),
    row<kvtrim::RKV>([](auto& key, auto&, auto& p) {
      bool code = false;
      key("config", code, "paper|code");
      if (code) p.scores = kvtrim::RKVParams::authors_code();
      key("window", p.scores.window)("kernel", p.scores.kernel);
      key("lambda", p.scores.lambda)("threshold", p.scores.threshold);
      p.recent = p.scores.window;
    }, "config=code: lambda=0.07, maximum over the group before the softmax"),
    row<kvtrim::Random>([](auto& key, auto& to, auto& p) { score_keys(key("seed", p.scores.seed), to, p); }),
    row<kvtrim::External>(score_keys, "by how unexpected each token of the prompt was", true),
    row<PageSelector<kvtrim::WindowParams>, PageSelector<kvtrim::KeyDiffParams>,
        PageSelector<kvtrim::AccumulateParams>, PageSelector<kvtrim::ExternalParams>>(
        [](auto& key, auto& to, auto& window, auto& keydiff, auto& h2o, auto& surprisal) {
      int score = 0;
      key("score", score, "window|keydiff|h2o|surprisal");
      surprisal = kvtrim::agnostic_pages(to.keep);
      page_keys(key, window), page_keys(key, keydiff), page_keys(key, h2o), page_keys(key, surprisal);
      window_keys(key, window.scores);
      sums_key(key, h2o.scores);
      return score;
    }, "whole pages; unit: what shares a page set; kernel to columns are keys of score=window, sums also of h2o; "
        "score=surprisal (for questions that come later): norm=none, sinks=4"),
};

// clang-format on

template <class Read, class... P>
std::tuple<P...> classes(const Row<Read, P...>&);
template <class... P>
std::variant<P...> any_of(std::tuple<P...>);
template <class... Rows>
auto any_of_rows(const std::tuple<Rows...>&)
    -> decltype(any_of(std::tuple_cat(classes(std::declval<Rows>())...)));

}  // namespace detail

/// Any policy of the table.
using AnyPolicy = decltype(detail::any_of_rows(detail::table));

/// A row of the table, whatever its classes.
struct Method {
  std::string_view name;  ///< of its classes, up to what they are put around
  std::function<AnyPolicy(SpecValues& key, const Purpose& to)> make;
  std::string_view note;
  bool once;
};

/// All methods.
[[nodiscard]] inline const std::vector<Method>& methods() {
  const auto of = []<class Read, class P, class... Q>(const detail::Row<Read, P, Q...>& row) {
    const auto make = [&row](auto& key, auto& to) { return row.template make<AnyPolicy>(key, to); };
    return Method{P::name.substr(0, P::name.find('<')), make, row.note, row.once};
  };
  const auto list = [&](const auto&... rows) { return std::vector{of(rows)...}; };
  static const std::vector<Method> all = std::apply(list, detail::table);
  return all;
}

/// The method of a name.
/// \throws std::invalid_argument if there is none; the text lists the names
[[nodiscard]] inline const Method& method_of(const std::string& name) {
  std::vector<std::string> known;
  for (const Method& m : methods()) {
    if (m.name == name) return m;
    known.emplace_back(m.name);
  }
  throw std::invalid_argument("unknown policy '" + name + "'; known are " + listed(known));
}

/// The keys of a method, with their defaults.
[[nodiscard]] inline SpecValues defaults_of(const Method& method) {
  SpecValues defaults;
  static_cast<void>(method.make(defaults, {}));
  return defaults;
}

/// What `--help` says about a SPEC.
[[nodiscard]] inline std::string spec_help() {
  std::string text =
      "SPEC is a name, or name:key=value,... with these keys; a first word is the default:\n";
  for (const Method& m : methods()) {
    const SpecValues defaults = defaults_of(m);
    std::string words, line = "  " + std::string(m.name);
    for (const std::string& key : defaults.keys()) words += key + "=" + defaults.shown(key) + " ";
    if (!m.note.empty()) words += "(" + std::string(m.note) + ")";
    for (const std::string& word : split(words, ' ')) {
      if (line.size() + word.size() > 99) text += std::exchange(line, "") + "\n";
      line.resize(std::max<std::size_t>(line.size(), 12), ' ');
      line += " " + word;
    }
    text += line + "\n";
  }
  return text +
         "All except full also take the size: removed=0.5 (fraction of the rows that go) or "
         "budget=256 (rows).\n";
}

/// A parsed SPEC. Values are read when a policy is made from it.
class PolicySpec {
 public:
  /// \throws std::invalid_argument if the name or a key is unknown (the text lists the known ones), or a part is not key=value
  explicit PolicySpec(const std::string& text)
      : method_(&method_of(text.substr(0, text.find(':')))), values_(text, known_keys()) {
    double removed = 0;
    std::int64_t rows = 1;
    values_("removed", removed)("budget", rows);
    if (values_.has("removed") && values_.has("budget"))
      values_.refuse("removed and budget both fix the size; give one");
    if (!(removed >= 0 && removed <= 1)) values_.fail("removed", "is not within 0 and 1");
    if (rows < 1 || rows > std::numeric_limits<std::int32_t>::max())
      values_.fail("budget", "is not within 1 and 2147483647 rows");
    if (values_.has("removed")) removed_ = removed;
    if (values_.has("budget")) budget_ = static_cast<std::int32_t>(rows);
  }

  [[nodiscard]] const std::string& text() const noexcept { return values_.text(); }
  [[nodiscard]] std::string_view name() const noexcept { return method_->name; }
  /// Fraction removed, if the SPEC gives one.
  [[nodiscard]] std::optional<double> removed() const noexcept { return removed_; }
  /// Whether the SPEC itself says how much stays.
  [[nodiscard]] bool has_size() const { return name() == "full" || removed_ || budget_; }
  /// Whether the method acts once, at the end of the prompt; the others keep the size while tokens are generated.
  [[nodiscard]] bool acts_once() const { return method_->once || values_.is("score", "surprisal"); }

  /// Rows to keep of `rows`: the SPEC's budget (which may be above `rows`), otherwise by its fraction, otherwise by
  /// `removed_otherwise`.
  [[nodiscard]] std::int32_t rows_to_keep(std::int32_t rows, double removed_otherwise) const {
    if (name() == "full") return rows;
    if (budget_) return *budget_;
    const double fraction = removed_.value_or(removed_otherwise);
    if (!values_.is("form", "chunks")) return kvtrim::rows_kept(rows, fraction);
    auto chunk = static_cast<std::int32_t>(kvtrim::ChunkKV<>::Params{}.chunk);
    SpecValues key = values_;
    key("chunk", chunk);
    return kvtrim::kvpress_chunk_rows(rows, fraction, std::max(1, chunk));
  }

  /// The policy that keeps `keep` rows. If that is fewer than it must protect, it is made for what it protects, and passing
  /// `keep` in `Observation::budgets` makes the library report it (`over_budget`).
  ///
  /// \param form_otherwise  form of `streaming` if the SPEC names none
  /// \param rope            the model's, for `expected`; its frequencies must outlive the policy
  /// \throws std::invalid_argument if a value is not a number, out of range, or not a known word; the text starts with the SPEC
  [[nodiscard]] AnyPolicy make(std::int32_t keep,
                               kvtrim::SinkForm form_otherwise,
                               const kvtrim::Rope& rope = {}) const {
    SpecValues key = values_;
    try {
      return method_->make(key, {keep, form_otherwise, rope});
    } catch (const std::invalid_argument& error) {
      const std::string what = error.what();
      if (what.starts_with("policy '")) throw;
      key.refuse(what);
    }
  }

 private:
  [[nodiscard]] std::vector<std::string> known_keys() const {
    std::vector<std::string> keys = defaults_of(*method_).keys();
    if (name() != "full") keys.insert(keys.end(), {"removed", "budget"});
    return keys;
  }

  const Method* method_;
  SpecValues values_;
  std::optional<double> removed_;
  std::optional<std::int32_t> budget_;
};

}  // namespace program
