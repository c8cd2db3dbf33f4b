// SPDX-License-Identifier: Apache-2.0
#pragma once

// A policy as a word on the command line. To add a method, add its name and keys to `known_policies`, a line to
// `spec_help`, a branch to `PolicySpec::make_unchecked`, and its class to `AnyPolicy`.
// Over 400 lines: one function per method that reads its keys.

#include <kvtrim/budget/rows.hpp>
#include <kvtrim/policy/accumulate_params.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/cur_kv.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/tova.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "spec_values.hpp"

namespace program {

using SnapKV = kvtrim::SnapKVSelector<>;
using kvtrim::AdaKV;
using kvtrim::CriticalKV;
using kvtrim::PageSelector;

/// Any of the library's policies.
using AnyPolicy =
    std::variant<kvtrim::Full,
                 kvtrim::StreamingSink<kvtrim::SinkForm::pages>,
                 kvtrim::StreamingSink<kvtrim::SinkForm::exact>,
                 kvtrim::HeavyHitter<>,
                 kvtrim::HeavyHitter<kvtrim::AccumulateParams, kvtrim::HeavyMode::greedy>,
                 kvtrim::HeavyHitter<kvtrim::AccumulateParams, kvtrim::HeavyMode::promote>,
                 SnapKV,
                 kvtrim::PyramidKV,
                 AdaKV<SnapKV>,
                 AdaKV<kvtrim::ExpectedAttention>,
                 CriticalKV<SnapKV>,
                 CriticalKV<AdaKV<SnapKV>>,
                 kvtrim::ChunkKV<>,
                 kvtrim::Tova,
                 kvtrim::KeyDiff,
                 kvtrim::KeyNorm,
                 kvtrim::ExpectedAttention,
                 kvtrim::LagKV,
                 kvtrim::QFilter,
                 kvtrim::CurKV,
                 kvtrim::RKV,
                 kvtrim::Random,
                 kvtrim::External,
                 PageSelector<kvtrim::WindowParams>,
                 PageSelector<kvtrim::KeyDiffParams>,
                 PageSelector<kvtrim::AccumulateParams>,
                 PageSelector<kvtrim::ExternalParams>>;

namespace detail {

inline const std::vector<KnownName>& known_policies() {
  static const std::vector<KnownName> known = [] {
    using Keys = std::vector<std::string_view>;
    const auto with = [](Keys keys, const Keys& more) {
      keys.insert(keys.end(), more.begin(), more.end());
      return keys;
    };
    const Keys window{"window", "kernel", "pool", "rows", "group", "columns"};
    const Keys snapkv = with(with({"config"}, window), {"sinks"});
    const Keys expected{"sinks", "future", "epsilon", "covariance", "values"};
    std::vector<KnownName> names{
        {"streaming", {"sinks", "form"}},
        {"h2o", {"recent", "sinks", "mode", "interval", "grace", "decay", "age", "squared"}},
        {"snapkv", snapkv},
        {"pyramidkv", with({"beta", "form"}, snapkv)},
        {"adakv",
         with({"score", "safeguard", "form", "over", "future", "epsilon", "covariance", "values"},
              snapkv)},
        {"criticalkv", with({"heads", "first", "epsilon", "safeguard", "form", "over"}, snapkv)},
        {"chunkkv", with({"chunk", "form", "sinks"}, window)},
        {"tova", {"protect"}},
        {"keydiff", {"sinks", "recent"}},
        {"keynorm", {"sinks", "recent"}},
        {"expected", expected},
        {"lagkv", {"sinks", "lag", "cross"}},
        {"qfilter", {"sinks", "recent"}},
        {"curkv", {"sinks", "window", "form"}},
        {"rkv", {"config", "window", "kernel", "lambda", "threshold"}},
        {"random", {"seed", "sinks", "recent"}},
        {"external", {"sinks", "recent"}},
        {"page", with({"score", "unit", "sinks", "norm", "reduce", "top", "heads"}, window)},
    };
    for (KnownName& k : names) k.keys.insert(k.keys.end(), {"removed", "budget"});
    names.insert(names.begin(), {"full", {}});
    return names;
  }();
  return known;
}

}  // namespace detail

/// What `--help` says about a SPEC.
inline constexpr const char* spec_help =
    R"(SPEC is a name, or name:key=value,... with these keys and defaults:
  full
  streaming  sinks=4, form=pages|exact
  h2o        recent=0.5 (below 1: a share of the budget; from 1 on: rows), sinks=0,
             mode=real_drop|greedy|promote, interval=1, grace=0, decay=1, age=0|1, squared=0|1
  snapkv     window=32, kernel=5, pool=avg|max, rows=mean|sum|max, group=mean|sum|max,
             columns=candidates|all, sinks=0; config=paper|maxima (maxima: rows=max, group=max,
             pool=max, kernel=15, columns=all, sinks=4)
  pyramidkv  beta=20, form=exact|kvpress|factory, and snapkv's keys; the budget is the layers' average
  adakv      score=snapkv|expected, safeguard=0.2, form=safeguard|floor|rounded, over=layer|all, and
             the keys of snapkv or expected; the budget is the heads' average
  criticalkv heads=equal|adakv, first=0.5, epsilon=0.0001, and snapkv's keys; heads=adakv:
             safeguard=0.2, form=safeguard|floor|rounded, over=layer|all
  chunkkv    chunk=20, form=rows|chunks (chunks: of removed, whole chunks only, counted as kvpress
             does), and snapkv's keys except config
  tova       protect=1|0 (the last row)
  keydiff    sinks=0, recent=0
  keynorm    sinks=0, recent=0
  expected   sinks=4, future=512, epsilon=0, covariance=1|0, values=1|0 (times the value's norm)
  lagkv      sinks=4, lag=128, cross=0|1
  qfilter    sinks=0, recent=0; needs --filters
  curkv      sinks=4, window=16, form=product|average|keys|values
  rkv        window=8, kernel=7, lambda=0.1, threshold=0.5; config=paper|code (code: lambda=0.07,
             maximum over the group before the softmax)
  random     seed=0, sinks=0, recent=0
  external   sinks=0, recent=0; by how unexpected each token of the prompt was
  page       whole pages: score=window|keydiff|h2o|surprisal, unit=layer|group|head (what shares a page
             set), window=16, sinks=1, norm=sum|none, reduce=max|mean|top, top=4, heads=max|sum;
             score=window: kernel=9, pool=avg|max, rows=max|mean|sum, group=mean|max|sum,
             columns=all|candidates; score=surprisal (for questions that come later): sinks=4
All except full also take the size: removed=0.5 (fraction of the rows that go) or budget=256 (rows).
)";

/// A parsed SPEC. Values are read when a policy is made from it.
class PolicySpec {
 public:
  /// \throws std::invalid_argument if the name or a key is unknown (the text lists the known ones), or a part is not key=value
  explicit PolicySpec(const std::string& text) : values_(text, detail::known_policies()) {
    if (values_.has("removed") && values_.has("budget")) {
      throw std::invalid_argument(values_.start() +
                                  "removed and budget both fix the size; give one");
    }
    if (const auto r = removed(); r && !(*r >= 0 && *r <= 1))
      values_.fail("removed", "is not within 0 and 1");
    if (const std::int64_t rows = values_.integer("budget", 1);
        rows < 1 || rows > std::numeric_limits<std::int32_t>::max()) {
      values_.fail("budget", "is not within 1 and 2147483647 rows");
    }
  }

  [[nodiscard]] const std::string& text() const noexcept { return values_.text(); }
  [[nodiscard]] const std::string& name() const noexcept { return values_.name(); }
  /// Fraction removed, if the SPEC gives one.
  [[nodiscard]] std::optional<double> removed() const {
    return values_.has("removed") ? std::optional(values_.number("removed", 0)) : std::nullopt;
  }
  /// Whether the SPEC itself says how much stays.
  [[nodiscard]] bool has_size() const {
    return name() == "full" || values_.has("removed") || values_.has("budget");
  }

  /// Whether the method acts once, at the end of the prompt; the others keep the size while tokens are generated.
  [[nodiscard]] bool acts_once() const {
    constexpr std::array once{
        "full", "snapkv", "pyramidkv", "adakv", "criticalkv", "chunkkv", "external"};
    return std::find(once.begin(), once.end(), name()) != once.end() ||
           values_.word<bool>("score",
                              false,
                              {{"surprisal", true},
                               {"window", false},
                               {"keydiff", false},
                               {"h2o", false},
                               {"snapkv", false},
                               {"expected", false}});
  }

  /// Rows to keep of `rows`: the SPEC's budget (which may be above `rows`), otherwise by its fraction, otherwise by
  /// `removed_otherwise`.
  [[nodiscard]] std::int32_t rows_to_keep(std::int32_t rows, double removed_otherwise) const {
    if (name() == "full") return rows;
    if (values_.has("budget")) return static_cast<std::int32_t>(values_.integer("budget", 0));
    const double fraction = removed().value_or(removed_otherwise);
    if (name() == "chunkkv" &&
        values_.word<bool>("form", false, {{"rows", false}, {"chunks", true}}))
      return kvtrim::kvpress_chunk_rows(
          rows, fraction, std::max(1, values_.integer32("chunk", 20)));
    return kvtrim::rows_kept(rows, fraction);
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
    try {
      return make_unchecked(keep, form_otherwise, rope);
    } catch (const std::invalid_argument& error) {
      const std::string what = error.what();
      throw std::invalid_argument(what.starts_with(values_.start()) ? what
                                                                    : values_.start() + what);
    }
  }

 private:
  [[nodiscard]] AnyPolicy make_unchecked(std::int32_t keep,
                                         kvtrim::SinkForm form_otherwise,
                                         const kvtrim::Rope& rope) const {
    const std::string& method = name();
    if (method == "streaming") return streaming(keep, form_otherwise);
    if (method == "h2o") return heavy_hitter(keep);
    if (method == "snapkv") return SnapKV(snapkv(keep));
    if (method == "pyramidkv") return pyramid(keep);
    if (method == "adakv") return adaptive(keep, rope);
    if (method == "criticalkv") return critical(keep);
    if (method == "chunkkv") return chunks(keep);
    if (method == "tova") {
      kvtrim::Tova::Params p;
      p.recent = values_.yes("protect", true) ? 1 : 0;
      p.budget = std::max<std::int64_t>(keep, 1);
      return kvtrim::Tova(p);
    }
    if (method == "keydiff") return top_rows<kvtrim::KeyDiff>(keep, {});
    if (method == "keynorm") return top_rows<kvtrim::KeyNorm>(keep, {});
    if (method == "qfilter") return top_rows<kvtrim::QFilter>(keep, {});
    if (method == "external") return top_rows<kvtrim::External>(keep, {});
    if (method == "random") {
      kvtrim::Random::Params p;
      p.scores.seed = static_cast<std::uint64_t>(values_.integer("seed", 0));
      return top_rows<kvtrim::Random>(keep, p);
    }
    if (method == "expected") return kvtrim::ExpectedAttention(expected(keep, rope));
    if (method == "lagkv") {
      kvtrim::LagKV::Params p;
      p.sinks = values_.integer("sinks", p.sinks);
      p.lag = values_.integer("lag", p.lag);
      p.cross_scoring = values_.yes("cross", p.cross_scoring);
      p.budget = std::max<std::int64_t>({keep, p.sinks, 1});
      return kvtrim::LagKV(p);
    }
    if (method == "curkv") {
      using kvtrim::CurForm;
      kvtrim::CurKV::Params p;
      p.scores.window = values_.integer32("window", p.scores.window);
      p.scores.form = values_.word("form",
                                   p.scores.form,
                                   {{"product", CurForm::product},
                                    {"average", CurForm::average},
                                    {"keys", CurForm::keys},
                                    {"values", CurForm::values}});
      return top_rows<kvtrim::CurKV>(keep, p);
    }
    if (method == "rkv") return rkv(keep);
    if (method == "page") return pages(keep);
    return kvtrim::Full{};
  }

  template <class P>
  [[nodiscard]] P top_rows(std::int32_t keep, typename P::Params p) const {
    p.sinks = values_.integer("sinks", p.sinks);
    p.recent = values_.integer("recent", p.recent);
    p.budget = std::max<std::int64_t>({keep, p.sinks + p.recent, 1});
    return P(p);
  }

  [[nodiscard]] AnyPolicy streaming(std::int32_t keep, kvtrim::SinkForm form_otherwise) const {
    using kvtrim::SinkForm;
    const std::int64_t sinks = values_.integer("sinks", 4);
    const std::int64_t recent = std::max<std::int64_t>(1, keep - sinks);
    if (values_.word("form",
                     form_otherwise,
                     {{"exact", SinkForm::exact}, {"pages", SinkForm::pages}}) == SinkForm::exact) {
      return kvtrim::StreamingSink<SinkForm::exact>({.sinks = sinks, .recent = recent});
    }
    return kvtrim::StreamingSink<SinkForm::pages>({.sinks = sinks, .recent = recent});
  }

  [[nodiscard]] AnyPolicy heavy_hitter(std::int32_t keep) const {
    using kvtrim::HeavyMode;
    switch (values_.word("mode",
                         HeavyMode::real_drop,
                         {{"real_drop", HeavyMode::real_drop},
                          {"greedy", HeavyMode::greedy},
                          {"promote", HeavyMode::promote}})) {
      case HeavyMode::real_drop:
        return heavy_hitter_of<HeavyMode::real_drop>(keep);
      case HeavyMode::greedy:
        return heavy_hitter_of<HeavyMode::greedy>(keep);
      case HeavyMode::promote:
        return heavy_hitter_of<HeavyMode::promote>(keep);
    }
    return kvtrim::Full{};
  }

  template <kvtrim::HeavyMode Mode>
  [[nodiscard]] AnyPolicy heavy_hitter_of(std::int32_t keep) const {
    using H = kvtrim::HeavyHitter<kvtrim::AccumulateParams, Mode>;
    typename H::Params p;
    p.sinks = values_.integer("sinks", p.sinks);
    const double recent = values_.number("recent", Mode == kvtrim::HeavyMode::greedy ? 0 : 0.5);
    if (recent < 0) values_.fail("recent", "is negative");
    p.recent = std::llround(recent < 1 ? recent * keep : recent);
    if (recent > 0) p.recent = std::max<std::int64_t>(1, p.recent);  // a share of a small budget
    p.interval = values_.integer("interval", p.interval);
    p.grace = values_.integer("grace", p.grace);
    p.heavy = std::max<std::int64_t>({0, keep - p.recent - p.sinks, p.grace - p.recent});
    p.decay = static_cast<float>(values_.number("decay", 1));
    p.age_normalised = values_.yes("age", false);
    p.squared = values_.yes("squared", false);
    return H(p);
  }

  [[nodiscard]] SnapKV::Params snapkv(std::int32_t keep) const {
    const bool maxima = values_.word("config", false, {{"paper", false}, {"maxima", true}});
    SnapKV::Params p = maxima ? SnapKV::maxima(keep) : SnapKV::Params{};
    const kvtrim::WindowParams w = window_params({static_cast<std::int32_t>(p.window),
                                                  static_cast<std::int32_t>(p.kernel),
                                                  p.rows,
                                                  p.group,
                                                  p.pooling,
                                                  p.columns});
    p.window = values_.integer("window", p.window);
    p.kernel = values_.integer("kernel", p.kernel);
    p.sinks = values_.integer("sinks", p.sinks);
    p.rows = w.rows, p.group = w.group, p.pooling = w.pooling, p.columns = w.columns;
    p.budget = std::max<std::int64_t>(keep, p.window + p.sinks);
    return p;
  }

  [[nodiscard]] kvtrim::PyramidKV pyramid(std::int32_t keep) const {
    using kvtrim::PyramidForm;
    kvtrim::PyramidKV::Params p;
    p.snapkv = snapkv(keep);
    p.beta = values_.integer("beta", p.beta);
    p.form = values_.word("form",
                          p.form,
                          {{"exact", PyramidForm::exact},
                           {"kvpress", PyramidForm::kvpress},
                           {"factory", PyramidForm::kvcache_factory}});
    return kvtrim::PyramidKV(p);
  }

  template <class Inner>
  [[nodiscard]] typename AdaKV<Inner>::Params shared(const typename Inner::Params& inner) const {
    using kvtrim::AdaptiveForm;
    using kvtrim::AdaptiveOver;
    typename AdaKV<Inner>::Params p;
    p.inner = inner;
    p.safeguard = values_.number("safeguard", p.safeguard);
    p.form = values_.word("form",
                          p.form,
                          {{"safeguard", AdaptiveForm::safeguard},
                           {"floor", AdaptiveForm::floor},
                           {"rounded", AdaptiveForm::floor_rounded}});
    p.over =
        values_.word("over",
                     p.over,
                     {{"layer", AdaptiveOver::heads_of_layer}, {"all", AdaptiveOver::all_heads}});
    return p;
  }

  [[nodiscard]] AnyPolicy adaptive(std::int32_t keep, const kvtrim::Rope& rope) const {
    if (values_.word<bool>("score", false, {{"snapkv", false}, {"expected", true}})) {
      return AdaKV<kvtrim::ExpectedAttention>(
          shared<kvtrim::ExpectedAttention>(expected(keep, rope)));
    }
    return AdaKV<SnapKV>(shared<SnapKV>(snapkv(keep)));
  }

  template <class Inner>
  [[nodiscard]] CriticalKV<Inner> two_stages(const typename Inner::Params& inner) const {
    typename CriticalKV<Inner>::Params p;
    p.inner = inner;
    p.first_stage = values_.number("first", p.first_stage);
    p.epsilon = static_cast<float>(values_.number("epsilon", static_cast<double>(p.epsilon)));
    return CriticalKV<Inner>(p);
  }
  [[nodiscard]] AnyPolicy critical(std::int32_t keep) const {
    if (values_.word<bool>("heads", false, {{"equal", false}, {"adakv", true}})) {
      return two_stages<AdaKV<SnapKV>>(shared<SnapKV>(snapkv(keep)));
    }
    return two_stages<SnapKV>(snapkv(keep));
  }

  [[nodiscard]] kvtrim::ExpectedAttention::Params expected(std::int32_t keep,
                                                           const kvtrim::Rope& rope) const {
    kvtrim::ExpectedAttention::Params p;
    p.scores.rope = rope;
    p.sinks = values_.integer("sinks", p.sinks);
    p.scores.sinks = values_.integer32("sinks", p.scores.sinks);
    p.scores.future = values_.integer32("future", p.scores.future);
    p.scores.epsilon =
        static_cast<float>(values_.number("epsilon", static_cast<double>(p.scores.epsilon)));
    p.scores.covariance = values_.yes("covariance", p.scores.covariance);
    p.scores.value_norm = values_.yes("values", p.scores.value_norm);
    p.budget = std::max<std::int64_t>({keep, p.sinks + p.recent, 1});
    return p;
  }

  [[nodiscard]] kvtrim::ChunkKV<> chunks(std::int32_t keep) const {
    kvtrim::ChunkKV<>::Params p;
    p.scores = window_params(p.scores);
    p.scores.window = values_.integer32("window", p.scores.window);
    p.scores.kernel = values_.integer32("kernel", p.scores.kernel);
    p.chunk = values_.integer("chunk", p.chunk);
    p.sinks = values_.integer("sinks", p.sinks);
    p.recent = p.scores.window;
    const std::int64_t chunk = std::max<std::int64_t>(1, p.chunk);
    p.budget =
        std::max<std::int64_t>(keep, (p.sinks + chunk - 1) / chunk * chunk + p.recent + chunk - 1);
    return kvtrim::ChunkKV<>(p);
  }

  [[nodiscard]] kvtrim::RKV rkv(std::int32_t keep) const {
    using kvtrim::RKVGroup;
    kvtrim::RKV::Params p;
    if (values_.word("config", false, {{"paper", false}, {"code", true}})) {
      p.scores = kvtrim::RKVParams::authors_code();
    }
    p.scores.window = values_.integer32("window", p.scores.window);
    p.scores.kernel = values_.integer32("kernel", p.scores.kernel);
    p.scores.lambda =
        static_cast<float>(values_.number("lambda", static_cast<double>(p.scores.lambda)));
    p.scores.threshold =
        static_cast<float>(values_.number("threshold", static_cast<double>(p.scores.threshold)));
    p.recent = p.scores.window;
    p.budget = std::max<std::int64_t>(keep, p.recent);
    return kvtrim::RKV(p);
  }

  [[nodiscard]] AnyPolicy pages(std::int32_t keep) const {
    enum class Score { window, keydiff, h2o, surprisal };
    switch (values_.word("score",
                         Score::window,
                         {{"window", Score::window},
                          {"keydiff", Score::keydiff},
                          {"h2o", Score::h2o},
                          {"surprisal", Score::surprisal}})) {
      case Score::window: {
        kvtrim::PageSelector<kvtrim::WindowParams>::Params p;
        p.scores = window_params(p.scores);
        p.scores.window = static_cast<std::int32_t>(
            std::clamp<std::int64_t>(values_.integer("window", p.window), 1, 1 << 20));
        p.scores.kernel = static_cast<std::int32_t>(
            std::clamp<std::int64_t>(values_.integer("kernel", p.scores.kernel), 0, 1 << 20));
        if (p.scores.kernel % 2 == 0) values_.fail("kernel", "is not odd");
        return pages_by(p, keep);
      }
      case Score::keydiff:
        return pages_by(kvtrim::PageSelector<kvtrim::KeyDiffParams>::Params{}, keep);
      case Score::h2o:
        return pages_by(kvtrim::PageSelector<kvtrim::AccumulateParams>::Params{}, keep);
      case Score::surprisal:
        return pages_by(kvtrim::agnostic_pages(keep), keep);
    }
    return kvtrim::Full{};
  }

  [[nodiscard]] kvtrim::WindowParams window_params(kvtrim::WindowParams p) const {
    using kvtrim::Reduction;
    const std::vector<std::pair<std::string_view, Reduction>> reductions{
        {"mean", Reduction::mean}, {"sum", Reduction::sum}, {"max", Reduction::max}};
    p.rows = values_.word("rows", p.rows, reductions);
    p.group = values_.word("group", p.group, reductions);
    p.pooling = values_.word(
        "pool", p.pooling, {{"avg", kvtrim::Pooling::average}, {"max", kvtrim::Pooling::max}});
    p.columns = values_.word("columns",
                             p.columns,
                             {{"candidates", kvtrim::PoolColumns::candidates},
                              {"all", kvtrim::PoolColumns::all_columns}});
    return p;
  }

  template <class Params>
  [[nodiscard]] AnyPolicy pages_by(Params p, std::int32_t keep) const {
    using kvtrim::PageUnit;
    p.unit = values_.word("unit",
                          PageUnit::per_layer,
                          {{"layer", PageUnit::per_layer},
                           {"group", PageUnit::per_group},
                           {"head", PageUnit::per_table}});
    p.window = values_.integer("window", p.window);
    p.sinks = values_.integer("sinks", p.sinks);
    p.pages.norm = values_.word(
        "norm", p.pages.norm, {{"sum", kvtrim::HeadNorm::sum}, {"none", kvtrim::HeadNorm::none}});
    p.pages.reduction = values_.word("reduce",
                                     p.pages.reduction,
                                     {{"max", kvtrim::PageReduction::max},
                                      {"mean", kvtrim::PageReduction::mean},
                                      {"top", kvtrim::PageReduction::top_m}});
    p.pages.top_m = static_cast<std::int32_t>(
        std::clamp<std::int64_t>(values_.integer("top", p.pages.top_m), 0, 1 << 20));
    p.pages.heads = values_.word(
        "heads", p.pages.heads, {{"sum", kvtrim::Reduction::sum}, {"max", kvtrim::Reduction::max}});
    p.budget = std::max<std::int64_t>({keep, p.sinks + p.window, 1});
    return kvtrim::PageSelector<decltype(p.scores)>(p);
  }

  SpecValues values_;
};

}  // namespace program
