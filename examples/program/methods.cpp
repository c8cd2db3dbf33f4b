// SPDX-License-Identifier: Apache-2.0
#include "methods.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

namespace program {

// clang-format off: a key, its member and its words share a line.

namespace {

// As many rows as requested, or as many as must be protected.
template <class Params>
void set_budget(Params& p, const Purpose& to) {
  std::int64_t least = p.sinks;
  if constexpr (requires { p.recent; }) least += p.recent;
  if constexpr (requires { p.window; }) least += p.window;
  if constexpr (requires { p.chunk; }) {  // whole ones
    const std::int64_t chunk = std::max<std::int64_t>(1, p.chunk);
    least = (p.sinks + chunk - 1) / chunk * chunk + p.recent + chunk - 1;
  }
  p.budget = std::max<std::int64_t>({to.keep, least, 1});
}

// The row of one class, whose keys `Keys` reads.
template <class P, class Keys>
constexpr Method row(std::string_view name, Keys, std::string_view note = "", bool once = false) {
  return {name, [](SpecValues& key, const Purpose& to) -> AnyPolicy {
    typename P::Params p;
    Keys{}(key, p, to);
    if constexpr (requires { p.sinks; }) set_budget(p, to);
    return P(p);
  }, note, once};
}

// Of WindowParams, or of SnapKV's own parameters.
constexpr auto window_keys = [](auto& key, auto& p) {
  using kvtrim::PoolColumns, kvtrim::Pooling, kvtrim::Reduction;
  const Words<Reduction> reductions{{"mean", Reduction::mean}, {"sum", Reduction::sum}, {"max", Reduction::max}};
  key("window", p.window)("kernel", p.kernel);
  key("pool", p.pooling, {{"avg", Pooling::average}, {"max", Pooling::max}});
  key("rows", p.rows, reductions)("group", p.group, reductions);
  key("columns", p.columns, {{"candidates", PoolColumns::candidates}, {"all", PoolColumns::all_columns}});
};

constexpr auto snapkv_keys = [](auto& key, auto& p, auto& to) {
  bool maxima = false;
  key("config", maxima, {{"paper", false}, {"maxima", true}});
  if (maxima) p = SnapKV::maxima(to.keep);
  window_keys(key, p);
  key("sinks", p.sinks);
  set_budget(p, to);
};

constexpr auto expected_keys = [](auto& key, auto& p, auto& to) {
  auto& s = p.scores;
  key("sinks", p.sinks)("sinks", s.sinks)("future", s.future)("epsilon", s.epsilon);
  key("covariance", s.covariance)("values", s.value_norm);
  s.rope = to.rope;
  set_budget(p, to);
};

constexpr auto adakv_keys = [](auto& key, auto& p) {
  using enum kvtrim::AdaptiveForm;
  using enum kvtrim::AdaptiveOver;
  key("safeguard", p.safeguard);
  key("form", p.form, {{"safeguard", safeguard}, {"floor", floor}, {"rounded", floor_rounded}});
  key("over", p.over, {{"layer", heads_of_layer}, {"all", all_heads}});
};

// Of a method that is a score and nothing else.
constexpr auto score_keys = [](auto& key, auto& p, auto&) { key("sinks", p.sinks)("recent", p.recent); };

AnyPolicy streaming(SpecValues& key, const Purpose& to) {
  std::int64_t sinks = StreamingSink<>::Params{}.sinks;
  SinkForm form = to.form;
  key("sinks", sinks)("form", form, {{"exact", SinkForm::exact}, {"pages", SinkForm::pages}});
  const std::int64_t recent = std::max<std::int64_t>(1, to.keep - sinks);
  if (form == SinkForm::exact) return StreamingSink<SinkForm::exact>({sinks, recent});
  return StreamingSink<SinkForm::pages>({sinks, recent});
}

template <HeavyMode Mode = HeavyMode::real_drop>
AnyPolicy h2o(SpecValues& key, const Purpose& to) {
  using enum HeavyMode;
  typename H2O<Mode>::Params p;
  double recent = Mode == greedy ? 0 : 0.5;
  HeavyMode mode = real_drop;
  key("recent", recent)("sinks", p.sinks);
  key("mode", mode, {{"real_drop", real_drop}, {"greedy", greedy}, {"promote", promote}});
  if (mode != Mode) return mode == greedy ? h2o<greedy>(key, to) : h2o<promote>(key, to);
  key("interval", p.interval)("grace", p.grace);
  key("decay", p.decay)("age", p.age_normalised)("squared", p.squared);
  if (recent < 0) key.fail("recent", "is negative");
  p.recent = std::llround(recent < 1 ? recent * to.keep : recent);
  if (recent > 0) p.recent = std::max<std::int64_t>(1, p.recent);  // a share of a small budget
  p.heavy = std::max<std::int64_t>({0, to.keep - p.recent - p.sinks, p.grace - p.recent});
  return H2O<Mode>(p);
}

AnyPolicy adakv(SpecValues& key, const Purpose& to) {
  using ByExpected = AdaKV<kvtrim::ExpectedAttention>;
  bool by_expected = false;
  AdaKV<SnapKV>::Params p;
  ByExpected::Params e;
  key("score", by_expected, {{"snapkv", false}, {"expected", true}});
  adakv_keys(key, p), adakv_keys(key, e);
  snapkv_keys(key, p.inner, to), expected_keys(key, e.inner, to);
  return by_expected ? AnyPolicy(ByExpected(e)) : AdaKV<SnapKV>(p);
}

AnyPolicy criticalkv(SpecValues& key, const Purpose& to) {
  bool shares = false;
  CriticalKV<AdaKV<SnapKV>>::Params p;
  key("heads", shares, {{"equal", false}, {"adakv", true}});
  key("first", p.first_stage)("epsilon", p.epsilon);
  adakv_keys(key, p.inner);
  snapkv_keys(key, p.inner.inner, to);
  if (shares) return CriticalKV<AdaKV<SnapKV>>(p);
  return CriticalKV<SnapKV>({p.inner.inner, p.first_stage, p.epsilon});
}

template <class Scores>
AnyPolicy pages(SpecValues& key, const Purpose& to) {
  using enum kvtrim::PageReduction;
  using enum kvtrim::PageUnit;
  using kvtrim::HeadNorm, kvtrim::Reduction;
  typename PageSelector<Scores>::Params p;
  if constexpr (std::is_same_v<Scores, kvtrim::ExternalParams>) p = kvtrim::agnostic_pages(to.keep);
  p.unit = per_layer;
  key("unit", p.unit, {{"layer", per_layer}, {"group", per_group}, {"head", per_table}});
  key("window", p.window)("sinks", p.sinks);
  key("norm", p.pages.norm, {{"sum", HeadNorm::sum}, {"none", HeadNorm::none}});
  key("reduce", p.pages.reduction, {{"max", max}, {"mean", mean}, {"top", top_m}})("top", p.pages.top_m);
  key("heads", p.pages.heads, {{"sum", Reduction::sum}, {"max", Reduction::max}});
  if constexpr (std::is_same_v<Scores, kvtrim::WindowParams>) {
    window_keys(key, p.scores);
    if (p.scores.kernel % 2 == 0) key.fail("kernel", "is not odd");
  }
  set_budget(p, to);
  return PageSelector<Scores>(p);
}

AnyPolicy page(SpecValues& key, const Purpose& to) {
  Make by = pages<kvtrim::WindowParams>;
  key("score", by, {{"window", by}, {"keydiff", pages<kvtrim::KeyDiffParams>},
                    {"h2o", pages<kvtrim::AccumulateParams>}, {"surprisal", pages<kvtrim::ExternalParams>}});
  return by(key, to);
}

constexpr Method table[] = {
    {"full", [](SpecValues&, const Purpose&) -> AnyPolicy { return kvtrim::Full{}; }, "", true},
    {"streaming", streaming},
    {"h2o", h2o, "recent below 1: a share of the budget; from 1 on: rows; mode=greedy: recent=0"},
    row<SnapKV>("snapkv", snapkv_keys,
        "config=maxima: rows=max, group=max, pool=max, kernel=15, columns=all, sinks=4", true),
    row<kvtrim::PyramidKV>("pyramidkv", [](auto& key, auto& p, auto& to) {
      using enum kvtrim::PyramidForm;
      key("beta", p.beta)("form", p.form, {{"exact", exact}, {"kvpress", kvpress}, {"factory", kvcache_factory}});
      snapkv_keys(key, p.snapkv, to);
    }, "the budget is the layers' average; config as snapkv's", true),
    {"adakv", adakv, "the budget is the heads' average; config as snapkv's; future to values are keys of "
        "score=expected, whose sinks=4", true},
    {"criticalkv", criticalkv, "safeguard, form, over: keys of heads=adakv; config as snapkv's", true},
    row<kvtrim::ChunkKV<>>("chunkkv", [](auto& key, auto& p, auto&) {
      bool whole = false;  // `PolicySpec::rows_to_keep` counts them
      key("chunk", p.chunk)("form", whole, {{"rows", false}, {"chunks", true}})("sinks", p.sinks);
      window_keys(key, p.scores);
      p.recent = p.scores.window;
    }, "form=chunks: of removed, whole chunks only, counted as kvpress does", true),
    row<kvtrim::Tova>("tova", [](auto& key, auto& p, auto&) {
      key("protect", p.recent, {{"0", 0}, {"1", 1}});
    }, "protect: the last row"),
    row<kvtrim::KeyDiff>("keydiff", score_keys),
    row<kvtrim::KeyNorm>("keynorm", score_keys),
    row<kvtrim::ExpectedAttention>("expected", expected_keys, "values: times the value's norm"),
    row<kvtrim::LagKV>("lagkv", [](auto& key, auto& p, auto&) {
      key("sinks", p.sinks)("lag", p.lag)("cross", p.cross_scoring);
    }),
    row<kvtrim::QFilter>("qfilter", score_keys, "needs --filters"),
    row<kvtrim::CurKV>("curkv", [](auto& key, auto& p, auto&) {
      using enum kvtrim::CurForm;
      key("sinks", p.sinks)("window", p.scores.window);
      key("form", p.scores.form, {{"product", product}, {"average", average}, {"keys", keys}, {"values", values}});
    }),
    row<kvtrim::RKV>("rkv", [](auto& key, auto& p, auto&) {
      bool code = false;
      key("config", code, {{"paper", false}, {"code", true}});
      if (code) p.scores = kvtrim::RKVParams::authors_code();
      key("window", p.scores.window)("kernel", p.scores.kernel);
      key("lambda", p.scores.lambda)("threshold", p.scores.threshold);
      p.recent = p.scores.window;
    }, "config=code: lambda=0.07, maximum over the group before the softmax"),
    row<kvtrim::Random>("random", [](auto& key, auto& p, auto& to) {
      score_keys(key("seed", p.scores.seed), p, to);
    }),
    row<kvtrim::External>("external", score_keys,
        "by how unexpected each token of the prompt was", true),
    {"page", page, "whole pages; unit: what shares a page set; kernel to columns are keys of score=window; "
        "score=surprisal (for questions that come later): norm=none, sinks=4"},
};

}  // namespace
// clang-format on

std::span<const Method> methods() noexcept {
  return table;
}

}  // namespace program
