// SPDX-License-Identifier: Apache-2.0
#include "program/policy_spec.hpp"

#include <cstdint>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "catch.hpp"

using Catch::Matchers::ContainsSubstring;
using kvtrim::AccumulateParams;
using kvtrim::Full;
using kvtrim::HeavyHitter;
using kvtrim::HeavyMode;
using kvtrim::PoolColumns;
using kvtrim::Pooling;
using kvtrim::Reduction;
using kvtrim::SinkForm;
using kvtrim::SnapKVSelector;
using kvtrim::StreamingSink;
using program::PolicySpec;

namespace {

template <class P>
P made(const std::string& spec, std::int32_t keep = 100, SinkForm form = SinkForm::exact) {
  const program::AnyPolicy policy = PolicySpec(spec).make(keep, form);
  REQUIRE(std::holds_alternative<P>(policy));
  return std::get<P>(policy);
}

template <HeavyMode Mode = HeavyMode::real_drop>
auto h2o(const std::string& keys, std::int32_t keep = 100) {
  return made<HeavyHitter<AccumulateParams, Mode>>("h2o" + keys, keep).params();
}

void make(const std::string& spec) {
  static_cast<void>(PolicySpec(spec).make(100, SinkForm::exact));
}

}  // namespace

TEST_CASE("policy spec: a name alone is the policy with its defaults", "[program]") {
  CHECK_NOTHROW(made<Full>("full"));
  CHECK(made<StreamingSink<SinkForm::exact>>("streaming").params().sinks == 4);
  CHECK(made<StreamingSink<SinkForm::exact>>("streaming").params().recent == 96);
  const auto heavy = h2o("");
  CHECK(heavy.recent == 50);
  CHECK(heavy.heavy == 50);
  CHECK(heavy.sinks == 0);
  CHECK(heavy.interval == 1);
  CHECK(heavy.grace == 0);
  CHECK(heavy.decay == 1.0F);
  CHECK_FALSE(heavy.age_normalised);
  CHECK_FALSE(heavy.squared);
  const auto snapkv = made<SnapKVSelector<>>("snapkv").params();
  CHECK(snapkv.window == 32);
  CHECK(snapkv.kernel == 5);
  CHECK(snapkv.pooling == Pooling::average);
  CHECK(snapkv.rows == Reduction::mean);
  CHECK(snapkv.group == Reduction::mean);
  CHECK(snapkv.columns == PoolColumns::candidates);
  CHECK(snapkv.sinks == 0);
  CHECK(snapkv.budget == 100);
}

TEST_CASE("policy spec: every key of streaming reaches the policy", "[program]") {
  const auto p = made<StreamingSink<SinkForm::pages>>("streaming:sinks=7,form=pages").params();
  CHECK(p.sinks == 7);
  CHECK(p.recent == 93);
  CHECK_NOTHROW(made<StreamingSink<SinkForm::exact>>("streaming:form=exact", 100, SinkForm::pages));
}

TEST_CASE("policy spec: streaming takes the caller's form where the spec names none", "[program]") {
  CHECK_NOTHROW(made<StreamingSink<SinkForm::pages>>("streaming", 100, SinkForm::pages));
  CHECK_NOTHROW(made<StreamingSink<SinkForm::exact>>("streaming", 100, SinkForm::exact));
}

TEST_CASE("policy spec: every key of h2o reaches the policy", "[program]") {
  const auto p = h2o<HeavyMode::promote>(
      ":recent=30,sinks=2,mode=promote,interval=8,grace=5,decay=0.5,age=1,squared=1,sums=exact");
  CHECK(p.recent == 30);
  CHECK(p.sinks == 2);
  CHECK(p.heavy == 68);
  CHECK(p.interval == 8);
  CHECK(p.grace == 5);
  CHECK(p.decay == 0.5F);
  CHECK(p.age_normalised);
  CHECK(p.squared);
  CHECK(p.sums == kvtrim::Sums::exact);
  CHECK(h2o(":sums=floating").sums == kvtrim::Sums::floating);
  CHECK(h2o(":mode=real_drop").recent == 50);
  CHECK_FALSE(h2o(":age=0").age_normalised);
  CHECK_FALSE(h2o(":squared=0").squared);
}

TEST_CASE("policy spec: every key of snapkv reaches the policy", "[program]") {
  const auto p =
      made<SnapKVSelector<>>(
          "snapkv:window=16,kernel=7,pool=max,rows=sum,group=max,columns=all,sinks=3,sums=exact")
          .params();
  CHECK(p.window == 16);
  CHECK(p.kernel == 7);
  CHECK(p.pooling == Pooling::max);
  CHECK(p.rows == Reduction::sum);
  CHECK(p.group == Reduction::max);
  CHECK(p.columns == PoolColumns::all_columns);
  CHECK(p.sinks == 3);
  CHECK(p.sums == kvtrim::Sums::exact);
  CHECK(p.budget == 100);
  const auto q =
      made<SnapKVSelector<>>("snapkv:pool=avg,rows=max,group=sum,columns=candidates").params();
  CHECK(q.pooling == Pooling::average);
  CHECK(q.rows == Reduction::max);
  CHECK(q.group == Reduction::sum);
  CHECK(q.columns == PoolColumns::candidates);
}

TEST_CASE("policy spec: h2o's recent is a share of the budget below 1 and rows from 1 on",
          "[program][edge]") {
  CHECK(h2o(":recent=0.25").recent == 25);
  CHECK(h2o(":recent=0.25").heavy == 75);
  CHECK(h2o(":recent=1").recent == 1);
  CHECK(h2o(":recent=1").heavy == 99);
  CHECK(h2o(":recent=25").recent == 25);
  CHECK(h2o(":recent=0.5,sinks=4").heavy == 46);
  // A share of few rows is a row, not none, which the policy refuses.
  CHECK(h2o(":recent=0.1", 2).recent == 1);
  CHECK(h2o(":recent=0,grace=3").recent == 0);
}

TEST_CASE("policy spec: greedy h2o has no recent window by default", "[program][edge]") {
  CHECK(h2o<HeavyMode::greedy>(":mode=greedy").recent == 0);
  CHECK(h2o<HeavyMode::greedy>(":mode=greedy").heavy == 100);
  CHECK_THROWS_WITH(make("h2o:mode=greedy,recent=5"), ContainsSubstring("greedy has no window"));
}

TEST_CASE("policy spec: fewer rows than must be protected still make a policy", "[program][edge]") {
  CHECK(made<StreamingSink<SinkForm::exact>>("streaming:sinks=8", 3).params().recent == 1);
  CHECK(made<SnapKVSelector<>>("snapkv:window=32,sinks=4", 3).params().budget == 36);
  CHECK(h2o(":recent=32", 3).heavy == 0);
  CHECK(h2o(":recent=0.5,sinks=8", 3).heavy == 0);
  CHECK(h2o(":recent=0.5,grace=8", 3).heavy == 6);
  for (const char* spec : {"streaming", "h2o", "h2o:mode=greedy", "h2o:mode=promote", "snapkv"}) {
    INFO(spec);
    CHECK_NOTHROW(PolicySpec(spec).make(1, SinkForm::exact));
  }
}

TEST_CASE("policy spec: removed is read as a decimal fraction of the rows", "[program][edge]") {
  const PolicySpec spec("h2o:removed=0.9");
  CHECK(spec.removed() == 0.9);
  CHECK(spec.has_size());
  CHECK(spec.rows_to_keep(15, 0) == 2);
  CHECK(spec.rows_to_keep(1000, 0) == 100);
  CHECK(spec.rows_to_keep(1, 0) == 1);
  CHECK(PolicySpec("h2o").rows_to_keep(15, 0.9) == 2);
  CHECK_FALSE(PolicySpec("h2o").has_size());
  CHECK(PolicySpec("h2o:removed=0").rows_to_keep(15, 0.9) == 15);
  CHECK(PolicySpec("h2o:removed=1").rows_to_keep(15, 0.9) == 1);
}

TEST_CASE("policy spec: a budget is rows, whatever the prompt's length", "[program][edge]") {
  const PolicySpec spec("snapkv:budget=256");
  CHECK(spec.has_size());
  CHECK_FALSE(spec.removed().has_value());
  CHECK(spec.rows_to_keep(1000, 0.5) == 256);
  // Above the rows that are there: what the cache may grow to.
  CHECK(spec.rows_to_keep(100, 0.5) == 256);
  CHECK(PolicySpec("snapkv:budget=2147483647").rows_to_keep(100, 0.5) == 2147483647);
}

TEST_CASE("policy spec: full keeps all and takes no key", "[program][edge]") {
  CHECK(PolicySpec("full").rows_to_keep(15, 0.9) == 15);
  CHECK(PolicySpec("full").has_size());
  CHECK_THROWS_WITH(PolicySpec("full:removed=0.5"),
                    ContainsSubstring("unknown key 'removed'; known are none"));
}

TEST_CASE("policy spec: a wrong name lists the policies", "[program][edge]") {
  for (const char* spec : {"", "H2O", "h2o ", "streamingllm:sinks=4", ":budget=3"}) {
    INFO(spec);
    CHECK_THROWS_WITH(PolicySpec(spec),
                      ContainsSubstring("unknown policy '") &&
                          ContainsSubstring("known are full, streaming, h2o, snapkv"));
  }
}

TEST_CASE("policy spec: a wrong key lists the policy's keys", "[program][edge]") {
  CHECK_THROWS_WITH(PolicySpec("streaming:window=4"),
                    ContainsSubstring("unknown key 'window'") &&
                        ContainsSubstring("sinks, form, removed, budget"));
  CHECK_THROWS_WITH(
      PolicySpec("h2o:sink=4"),
      ContainsSubstring("unknown key 'sink'") &&
          ContainsSubstring(
              "recent, sinks, mode, interval, grace, decay, age, squared, sums, removed, budget"));
  CHECK_THROWS_WITH(
      PolicySpec("snapkv:recent=4"),
      ContainsSubstring("unknown key 'recent'") &&
          ContainsSubstring(
              "window, kernel, pool, rows, group, columns, sums, sinks, removed, budget"));
}

TEST_CASE("policy spec: a wrong value names the key and lists the words", "[program][edge]") {
  CHECK_THROWS_WITH(make("streaming:form=page"),
                    ContainsSubstring("form=page is unknown; known are pages, exact"));
  CHECK_THROWS_WITH(
      make("h2o:mode=drop"),
      ContainsSubstring("mode=drop is unknown; known are real_drop, greedy, promote"));
  CHECK_THROWS_WITH(make("h2o:age=2"), ContainsSubstring("age=2 is unknown; known are 0, 1"));
  CHECK_THROWS_WITH(make("snapkv:pool=mean"),
                    ContainsSubstring("pool=mean is unknown; known are avg, max"));
  CHECK_THROWS_WITH(make("snapkv:rows=avg"),
                    ContainsSubstring("rows=avg is unknown; known are mean, sum, max"));
  CHECK_THROWS_WITH(make("snapkv:columns=window"),
                    ContainsSubstring("columns=window is unknown; known are candidates, all"));
  for (const char* spec : {"streaming:sinks=four",
                           "streaming:sinks=4.5",
                           "streaming:sinks=4 ",
                           "snapkv:window=1e3",
                           "snapkv:window=99999999999999999999",
                           "h2o:interval=0x10",
                           "snapkv:budget=1.5"}) {
    INFO(spec);
    CHECK_THROWS_WITH(make(spec), ContainsSubstring("is no whole number"));
  }
  for (const char* spec : {"h2o:recent=half",
                           "h2o:recent=nan",
                           "h2o:decay=inf",
                           "h2o:removed=50%",
                           "h2o:removed=nan",
                           "h2o:removed=0,5"}) {
    INFO(spec);
    CHECK_THROWS_AS(make(spec), std::invalid_argument);
  }
}

TEST_CASE("policy spec: what a policy refuses is said with the spec", "[program][edge]") {
  CHECK_THROWS_WITH(make("snapkv:kernel=4"),
                    ContainsSubstring("policy 'snapkv:kernel=4': kvtrim::SnapKVSelector") &&
                        ContainsSubstring("kernel 4 must be odd"));
  CHECK_THROWS_WITH(make("streaming:sinks=-1"), ContainsSubstring("sinks -1"));
  CHECK_THROWS_WITH(make("h2o:decay=2"), ContainsSubstring("decay 2"));
  CHECK_THROWS_WITH(make("h2o:recent=-0.5"), ContainsSubstring("recent=-0.5 is negative"));
  CHECK_THROWS_WITH(make("h2o:recent=0"), ContainsSubstring("with recent 0 and grace 0"));
}

TEST_CASE("policy spec: sizes out of range are refused when it is read", "[program][edge]") {
  CHECK_THROWS_WITH(PolicySpec("h2o:removed=1.5"),
                    ContainsSubstring("removed=1.5 is not within 0 and 1"));
  CHECK_THROWS_WITH(PolicySpec("h2o:removed=-0.1"), ContainsSubstring("not within 0 and 1"));
  CHECK_THROWS_WITH(PolicySpec("h2o:budget=0"), ContainsSubstring("budget=0 is not within 1"));
  CHECK_THROWS_WITH(PolicySpec("h2o:budget=2147483648"), ContainsSubstring("is not within 1"));
}

TEST_CASE("policy spec: a part that is not key=value, and a key given twice, are refused",
          "[program][edge]") {
  CHECK_THROWS_WITH(PolicySpec("h2o:recent"), ContainsSubstring("'recent' is not key=value"));
  CHECK_THROWS_WITH(PolicySpec("h2o:recent="), ContainsSubstring("'recent=' is not key=value"));
  CHECK_THROWS_WITH(PolicySpec("h2o:,sinks=4"), ContainsSubstring("'' is not key=value"));
  CHECK_THROWS_WITH(PolicySpec("h2o:sinks=4,sinks=4"),
                    ContainsSubstring("key 'sinks' is given twice"));
  CHECK_THROWS_WITH(PolicySpec("h2o:removed=0.5,budget=10"),
                    ContainsSubstring("removed and budget both fix the size"));
}

TEST_CASE("policy spec: the help names every policy and every key", "[program]") {
  const std::string help = program::spec_help();
  for (const auto& policy : program::methods()) {
    const std::size_t begin = help.find("\n  " + std::string(policy.name));
    REQUIRE(begin != std::string::npos);
    const program::SpecValues defaults = program::defaults_of(policy);
    for (const std::string& key : defaults.keys()) {
      INFO(policy.name << ' ' << key);
      CHECK(help.find(" " + key + "=" + defaults.shown(key), begin) != std::string::npos);
    }
  }
  CHECK(help.find("removed=") != std::string::npos);
  CHECK(help.find("budget=") != std::string::npos);
}

TEST_CASE("policy spec: the help shows defaults first", "[program]") {
  const std::string help = program::spec_help();
  for (const char* part : {"\n  streaming  sinks=4 form=pages|exact\n",
                           " mode=real_drop|greedy|promote ",
                           " pool=avg|max ",
                           " safeguard=0.2 ",
                           " epsilon=0.0001 ",
                           " unit=layer|head|group ",
                           " rows=max|mean|sum ",
                           " kernel=9 ",
                           "\n  tova       protect=1|0 "}) {
    INFO(part);
    CHECK(help.find(part) != std::string::npos);
  }
}

TEST_CASE("policy spec: a policy's word is its class's name up to what is inside", "[program]") {
  std::set<std::string_view> words;
  for (const auto& policy : program::methods()) { words.insert(policy.name); }
  CHECK(words.size() == program::methods().size());
  const auto names = []<class... P>(std::type_identity<std::variant<P...>>) {
    return std::set<std::string_view>{
        std::string_view(P::name).substr(0, std::string_view(P::name).find('<'))...};
  }(std::type_identity<program::AnyPolicy>{});
  CHECK(words == names);
}

TEST_CASE("policy spec: every key of page reaches its parameters", "[program]") {
  using kvtrim::PageSelector;
  const auto make = [](const std::string& text) {
    return PolicySpec(text).make(400, kvtrim::SinkForm::exact);
  };
  const auto plain = std::get<PageSelector<kvtrim::WindowParams>>(make("page")).params();
  CHECK(plain.budget == 400);
  CHECK(plain.unit == kvtrim::PageUnit::per_layer);
  CHECK(plain.scores.rows == kvtrim::Reduction::max);
  CHECK(plain.scores.window == 16);
  const auto all = std::get<PageSelector<kvtrim::WindowParams>>(
                       make("page:score=window,unit=group,window=16,kernel=9,pool=max,rows=sum,"
                            "group=max,columns=candidates,"
                            "sinks=4,norm=none,reduce=top,top=3,heads=max"))
                       .params();
  CHECK(all.unit == kvtrim::PageUnit::per_group);
  CHECK(all.window == 16);
  CHECK(all.scores.window == 16);
  CHECK(all.scores.kernel == 9);
  CHECK(all.scores.pooling == kvtrim::Pooling::max);
  CHECK(all.scores.rows == kvtrim::Reduction::sum);
  CHECK(all.scores.group == kvtrim::Reduction::max);
  CHECK(all.scores.columns == kvtrim::PoolColumns::candidates);
  CHECK(all.sinks == 4);
  CHECK(all.pages.norm == kvtrim::HeadNorm::none);
  CHECK(all.pages.reduction == kvtrim::PageReduction::top_m);
  CHECK(all.pages.top_m == 3);
  CHECK(all.pages.heads == kvtrim::Reduction::max);
  const auto exact =
      std::get<PageSelector<kvtrim::WindowParams>>(make("page:sums=exact,heads=sum")).params();
  CHECK(exact.scores.sums == kvtrim::Sums::exact);
  CHECK(exact.pages.sums == kvtrim::Sums::exact);
  CHECK(plain.pages.sums == kvtrim::Sums::floating);
  CHECK(std::get<PageSelector<kvtrim::AccumulateParams>>(make("page:score=h2o,sums=exact"))
            .params()
            .pages.sums == kvtrim::Sums::exact);
  const auto late =
      std::get<PageSelector<kvtrim::ExternalParams>>(make("page:score=surprisal,unit=head"))
          .params();
  CHECK(late.unit == kvtrim::PageUnit::per_table);
  CHECK(late.window == 16);
  CHECK(late.sinks == 4);
  CHECK(late.pages.norm == kvtrim::HeadNorm::none);
  CHECK(std::holds_alternative<PageSelector<kvtrim::KeyDiffParams>>(make("page:score=keydiff")));
  CHECK(std::holds_alternative<PageSelector<kvtrim::AccumulateParams>>(make("page:score=h2o")));
  CHECK_THROWS_WITH(make("page:kernel=4"), ContainsSubstring("scores.kernel 4 must be odd"));
  CHECK_THROWS_WITH(make("page:unit=row"), ContainsSubstring("known are head, layer, group"));
}

TEST_CASE("policy spec: snapkv's named configuration, and keys on top of it", "[program]") {
  const auto maxima =
      std::get<kvtrim::SnapKVSelector<>>(
          PolicySpec("snapkv:config=maxima,kernel=7").make(200, kvtrim::SinkForm::exact))
          .params();
  CHECK(maxima.rows == kvtrim::Reduction::max);
  CHECK(maxima.group == kvtrim::Reduction::max);
  CHECK(maxima.pooling == kvtrim::Pooling::max);
  CHECK(maxima.columns == kvtrim::PoolColumns::all_columns);
  CHECK(maxima.sinks == 4);
  CHECK(maxima.kernel == 7);
  CHECK(maxima.budget == 200);
}

TEST_CASE("policy spec: every name makes a policy that keeps the rows it is asked for",
          "[program]") {
  for (const auto& policy : program::methods()) {
    if (policy.name == "full") continue;
    const auto made = PolicySpec(std::string(policy.name)).make(200, SinkForm::exact);
    std::visit(
        [&](const auto& p) {
          kvtrim::DemandInput in;
          in.live = 1000;
          in.page_size = 1;
          in.state.next_position = 1000;
          in.layers = 1;
          INFO(policy.name);
          CHECK(p.demand(in).keep == 200);
        },
        made);
  }
}

TEST_CASE("policy spec: keys of the methods that are one score reach them", "[program]") {
  CHECK(made<kvtrim::KeyDiff>("keydiff:sinks=3,recent=7").params().recent == 7);
  CHECK(made<kvtrim::KeyNorm>("keynorm:sinks=3").params().sinks == 3);
  CHECK(made<kvtrim::QFilter>("qfilter:recent=2").params().recent == 2);
  CHECK(made<kvtrim::External>("external:sinks=2").params().sinks == 2);
  CHECK(made<kvtrim::Random>("random:seed=9").params().scores.seed == 9);
  CHECK(made<kvtrim::Tova>("tova").params().recent == 1);
  CHECK(made<kvtrim::Tova>("tova:protect=0").params().recent == 0);
  CHECK(made<kvtrim::Tova>("tova:sums=exact").params().scores.sums == kvtrim::Sums::exact);
  const auto expected =
      made<kvtrim::ExpectedAttention>("expected:sinks=2,future=9,epsilon=0.5,covariance=0,values=0")
          .params();
  CHECK(expected.sinks == 2);
  CHECK(expected.scores.sinks == 2);
  CHECK(expected.scores.future == 9);
  CHECK(expected.scores.epsilon == 0.5F);
  CHECK_FALSE(expected.scores.covariance);
  CHECK_FALSE(expected.scores.value_norm);
  const auto lag = made<kvtrim::LagKV>("lagkv:sinks=2,lag=10,cross=1").params();
  CHECK(lag.sinks == 2);
  CHECK(lag.lag == 10);
  CHECK(lag.cross_scoring);
  const auto cur = made<kvtrim::CurKV>("curkv:sinks=2,window=8,form=keys").params();
  CHECK(cur.sinks == 2);
  CHECK(cur.scores.window == 8);
  CHECK(cur.scores.form == kvtrim::CurForm::keys);
  const auto rkv = made<kvtrim::RKV>("rkv:config=code,window=4,kernel=3,threshold=0.25").params();
  CHECK(rkv.recent == 4);
  CHECK(rkv.scores.window == 4);
  CHECK(rkv.scores.kernel == 3);
  CHECK(rkv.scores.lambda == 0.07F);
  CHECK(rkv.scores.threshold == 0.25F);
  CHECK(rkv.scores.group == kvtrim::RKVGroup::logits);
  const auto chunk =
      made<kvtrim::ChunkKV<>>("chunkkv:chunk=8,window=16,kernel=3,rows=max").params();
  CHECK(chunk.chunk == 8);
  CHECK(chunk.recent == 16);
  CHECK(chunk.scores.window == 16);
  CHECK(chunk.scores.kernel == 3);
  CHECK(chunk.scores.rows == Reduction::max);
}

TEST_CASE("policy spec: chunkkv counts rows, or whole chunks as kvpress does", "[program][edge]") {
  CHECK(PolicySpec("chunkkv").rows_to_keep(1001, 0.75) == 250);
  // 51 chunks, 12 stay; the last has one token.
  CHECK(PolicySpec("chunkkv:form=chunks").rows_to_keep(1001, 0.75) == 221);
  CHECK(PolicySpec("chunkkv:form=chunks,removed=0.5").rows_to_keep(1001, 0.75) == 24 * 20 + 1);
}

TEST_CASE("policy spec: keys of the methods with budgets of their own reach them", "[program]") {
  using kvtrim::AdaKV;
  using kvtrim::CriticalKV;
  const auto pyramid = made<kvtrim::PyramidKV>("pyramidkv:beta=7,form=factory,window=9").params();
  CHECK(pyramid.beta == 7);
  CHECK(pyramid.form == kvtrim::PyramidForm::kvcache_factory);
  CHECK(pyramid.snapkv.window == 9);
  CHECK(pyramid.snapkv.budget == 100);
  const auto ada =
      made<AdaKV<SnapKVSelector<>>>("adakv:safeguard=0.4,form=floor,over=all,kernel=7").params();
  CHECK(ada.safeguard == 0.4);
  CHECK(ada.form == kvtrim::AdaptiveForm::floor);
  CHECK(ada.over == kvtrim::AdaptiveOver::all_heads);
  CHECK(ada.inner.kernel == 7);
  CHECK(made<AdaKV<kvtrim::ExpectedAttention>>("adakv:score=expected,future=5")
            .params()
            .inner.scores.future == 5);
  const auto critical =
      made<CriticalKV<SnapKVSelector<>>>("criticalkv:first=0.3,epsilon=0.1").params();
  CHECK(critical.first_stage == 0.3);
  CHECK(critical.epsilon == 0.1F);
  CHECK(made<CriticalKV<AdaKV<SnapKVSelector<>>>>("criticalkv:heads=adakv,safeguard=0.1")
            .params()
            .inner.safeguard == 0.1);
}

TEST_CASE("policy spec: the model's rotation reaches the methods that ask for it", "[program]") {
  const std::vector<double> frequencies{1.0, 0.5};
  const kvtrim::Rope rope{.inverse_frequencies = frequencies, .dim = 4};
  const auto policy = PolicySpec("expected").make(100, SinkForm::exact, rope);
  CHECK(std::get<kvtrim::ExpectedAttention>(policy).params().scores.rope.dim == 4);
}

TEST_CASE("policy spec: what a method refuses names the parameter and its value",
          "[program][edge]") {
  CHECK_THROWS_WITH(make("lagkv:lag=0"), ContainsSubstring("lag 0"));
  CHECK_THROWS_WITH(make("chunkkv:chunk=0"), ContainsSubstring("chunk 0"));
  CHECK_THROWS_WITH(make("adakv:safeguard=2"), ContainsSubstring("safeguard 2"));
  CHECK_THROWS_WITH(make("criticalkv:first=-1"), ContainsSubstring("first_stage -1"));
  CHECK_THROWS_WITH(make("pyramidkv:beta=0"), ContainsSubstring("beta 0"));
  CHECK_THROWS_WITH(make("expected:future=0"), ContainsSubstring("future 0"));
  CHECK_THROWS_WITH(make("rkv:lambda=3"), ContainsSubstring("lambda 3"));
  CHECK_THROWS_WITH(make("curkv:window=-1"), ContainsSubstring("window -1"));
  CHECK_THROWS_WITH(make("keydiff:sinks=-1"), ContainsSubstring("sinks -1"));
  CHECK_THROWS_WITH(make("tova:protect=2"), ContainsSubstring("known are 0, 1"));
}
