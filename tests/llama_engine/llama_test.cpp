// SPDX-License-Identifier: Apache-2.0
#include "llama_engine/llama.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "gguf_builder.hpp"

using Catch::Matchers::ContainsSubstring;
using engine::LayerObservation;
using engine::LlamaModel;
using engine::LogitRows;
using engine::Segment;
using engine_test::GgufBuilder;
using engine_test::tiny_llama;
using kvtrim::DType;
using kvtrim::HeadId;
using kvtrim::LayerId;
using kvtrim::PagedCache;
using kvtrim::SequenceId;
using kvtrim::Status;
using kvtrim::TableScope;

namespace {

using Row = std::vector<double>;
using Tokens = std::vector<std::int32_t>;

/// The model's equations, one token after the other, in double. Keeps all queries and LSE for comparison.
class Reference {
 public:
  explicit Reference(const GgufBuilder& file) : file_(file) {}

  std::vector<Row> queries;  // of layer 1: [tokens][heads * dim]
  std::vector<Row> lse;      // of layer 1: [tokens][heads]

  Row logits_after(const Tokens& tokens) {
    std::vector<Row> hidden;
    for (const std::int32_t token : tokens) {
      const auto& table = file_.values("token_embd.weight");
      hidden.emplace_back(table.begin() + token * width, table.begin() + (token + 1) * width);
    }
    for (int layer = 0; layer < 2; ++layer) {
      const std::string block = "blk." + std::to_string(layer) + ".";
      std::vector<Row> q, k, v;
      for (std::size_t t = 0; t < hidden.size(); ++t) {
        const Row x = norm(hidden[t], block + "attn_norm.weight");
        q.push_back(times(x, block + "attn_q.weight"));
        k.push_back(times(x, block + "attn_k.weight"));
        v.push_back(times(x, block + "attn_v.weight"));
        rotate(q.back(), static_cast<double>(t));
        rotate(k.back(), static_cast<double>(t));
      }
      queries = q;
      lse.assign(hidden.size(), Row(heads));
      for (std::size_t t = 0; t < hidden.size(); ++t) {
        const Row attended = attend(q[t], k, v, t);
        const Row out = times(attended, block + "attn_output.weight");
        std::transform(out.begin(), out.end(), hidden[t].begin(), hidden[t].begin(), std::plus<>());
        const Row x = norm(hidden[t], block + "ffn_norm.weight");
        Row inner = times(x, block + "ffn_gate.weight");
        const Row up = times(x, block + "ffn_up.weight");
        for (std::size_t i = 0; i < inner.size(); ++i)
          inner[i] *= up[i] / (1 + std::exp(-inner[i]));
        const Row down = times(inner, block + "ffn_down.weight");
        std::transform(
            down.begin(), down.end(), hidden[t].begin(), hidden[t].begin(), std::plus<>());
      }
    }
    const Row x = norm(hidden.back(), "output_norm.weight");
    return times(x, file_.has_tensor("output.weight") ? "output.weight" : "token_embd.weight");
  }

 private:
  static constexpr int width = 12;
  static constexpr std::size_t heads = 6;
  static constexpr std::size_t group = 2;
  static constexpr std::size_t dim = 8;
  static constexpr std::size_t rope_dims = 6;

  Row norm(const Row& x, const std::string& weight) const {
    const double mean = std::inner_product(x.begin(), x.end(), x.begin(), 0.0) / width;
    Row result = x;
    for (std::size_t i = 0; i < x.size(); ++i) {
      result[i] *= double{file_.values(weight)[i]} / std::sqrt(mean + 1e-5);
    }
    return result;
  }

  Row times(const Row& x, const std::string& weight) const {
    const auto& w = file_.values(weight);
    Row result(w.size() / x.size());
    for (std::size_t o = 0; o < result.size(); ++o) {
      for (std::size_t i = 0; i < x.size(); ++i) result[o] += double{w[o * x.size() + i]} * x[i];
    }
    return result;
  }

  static void rotate(Row& row, double position) {
    for (std::size_t head = 0; head < row.size(); head += dim) {
      for (std::size_t i = 0; i < rope_dims; i += 2) {
        const double angle = position * std::pow(100.0, -static_cast<double>(i) / rope_dims);
        const double a = row[head + i];
        const double b = row[head + i + 1];
        row[head + i] = a * std::cos(angle) - b * std::sin(angle);
        row[head + i + 1] = a * std::sin(angle) + b * std::cos(angle);
      }
    }
  }

  Row attend(const Row& q, const std::vector<Row>& k, const std::vector<Row>& v, std::size_t t) {
    Row out(heads * dim);
    for (std::size_t h = 0; h < heads; ++h) {
      Row weights;
      for (std::size_t s = 0; s <= t; ++s) {
        double score = 0;
        for (std::size_t d = 0; d < dim; ++d) score += q[h * dim + d] * k[s][h / group * dim + d];
        weights.push_back(std::exp(score / std::sqrt(8.0)));
      }
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      lse[t][h] = std::log(sum);
      for (std::size_t s = 0; s <= t; ++s) {
        for (std::size_t d = 0; d < dim; ++d) {
          out[h * dim + d] += weights[s] / sum * v[s][h / group * dim + d];
        }
      }
    }
    return out;
  }

  const GgufBuilder& file_;
};

PagedCache cache_for(const LlamaModel& model,
                     std::int32_t page_size = 4,
                     DType dtype = DType::f32,
                     TableScope scope = TableScope::group) {
  auto params = model.cache_params();
  params.pages = 4000 / page_size * (scope == TableScope::head ? 6 : 1);
  params.page_size = page_size;
  params.max_sequences = 5;
  params.max_rows = 400;
  params.dtype = dtype;
  params.scope = scope;
  return PagedCache(params);
}

Tokens random_tokens(std::size_t n, unsigned seed = 1) {
  std::mt19937 random(seed);
  Tokens tokens(n);
  for (auto& token : tokens) token = static_cast<std::int32_t>(random() % 11);
  return tokens;
}

std::vector<float> row_of(const LlamaModel& model, Eigen::Index row = 0) {
  const auto logits = model.logits(row);
  return {logits.begin(), logits.end()};
}

template <class A, class B>
double distance(const A& a, const B& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return worst;
}

}  // namespace

TEST_CASE("llama: logits, queries and LSE are those of the plain equations", "[llama][parity]") {
  for (const bool tied : {true, false}) {
    GgufBuilder builder = tiny_llama();
    if (!tied) {
      builder.tensor("output.weight",
                     {12, 11},
                     std::vector<float>(builder.values("blk.0.attn_q.weight").begin(),
                                        builder.values("blk.0.attn_q.weight").begin() + 132));
    }
    LlamaModel model(builder.file());
    // More than one tile of rows, more than one block of queries.
    const Tokens tokens = random_tokens(150);
    Reference reference(builder);
    const Row expected = reference.logits_after(tokens);
    PagedCache cache = cache_for(model);
    const SequenceId s = *cache.try_create();
    std::vector<float> queries;
    std::vector<float> lse;
    REQUIRE(model.prefill(cache, s, tokens, [&](const LayerObservation& seen) {
      if (seen.layer != LayerId{1}) return;
      queries.assign(seen.queries.begin(), seen.queries.end());
      lse.assign(seen.lse.begin(), seen.lse.end());
    }) == Status::ok);
    CHECK(distance(row_of(model), expected) < 2e-4);
    REQUIRE(queries.size() == 150 * 48);
    REQUIRE(lse.size() == 150 * 6);
    double worst_query = 0;
    double worst_lse = 0;
    for (std::size_t t = 0; t < 150; ++t) {
      for (std::size_t i = 0; i < 48; ++i) {
        worst_query =
            std::max(worst_query, std::abs(double{queries[t * 48 + i]} - reference.queries[t][i]));
      }
      for (std::size_t h = 0; h < 6; ++h) {
        worst_lse = std::max(worst_lse, std::abs(double{lse[h * 150 + t]} - reference.lse[t][h]));
      }
    }
    CHECK(worst_query < 1e-4);
    CHECK(worst_lse < 1e-4);
  }
}

TEST_CASE("llama: any cut of a prompt into chunks gives the same logits", "[llama][property]") {
  LlamaModel model(tiny_llama().file());
  const Tokens tokens = random_tokens(150);
  PagedCache cache = cache_for(model);
  const SequenceId whole = *cache.try_create();
  REQUIRE(model.prefill(cache, whole, tokens) == Status::ok);
  const auto expected = row_of(model);
  for (const std::size_t chunk : {1U, 7U, 64U, 149U}) {
    const SequenceId s = *cache.try_create();
    REQUIRE(model.prefill(cache, s, tokens, {}, chunk) == Status::ok);
    CHECK(distance(row_of(model), expected) < 1e-4);
    cache.destroy(s);
  }
}

TEST_CASE("llama: page size, placement and table scope do not change a bit", "[llama][property]") {
  LlamaModel model(tiny_llama().file());
  const Tokens tokens = random_tokens(150);
  std::vector<float> expected;
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    for (const std::int32_t page_size : {1, 4, 16, 400}) {
      PagedCache cache = cache_for(model, page_size, DType::f32, scope);
      const SequenceId other = *cache.try_create();  // takes the pages in between
      const SequenceId s = *cache.try_create();
      for (std::size_t begin = 0; begin < 150; begin += 50) {
        const Segment mine{s, std::span(tokens).subspan(begin, 50)};
        const Segment theirs{other, std::span(tokens).first(3)};
        REQUIRE(model.forward(cache, {&theirs, 1}, LogitRows::none) == Status::ok);
        REQUIRE(model.forward(cache, {&mine, 1}, LogitRows::last) == Status::ok);
      }
      if (expected.empty()) expected = row_of(model);
      CHECK(row_of(model) == expected);
    }
  }
}

TEST_CASE("llama: the number of threads does not change a bit", "[llama][property]") {
  const Tokens tokens = random_tokens(150);
  std::vector<float> expected;
  const int before = omp_get_max_threads();
  for (const int threads : {1, 2, 5}) {
    omp_set_num_threads(threads);
    LlamaModel model(tiny_llama().file());
    PagedCache cache = cache_for(model);
    REQUIRE(model.prefill(cache, *cache.try_create(), tokens) == Status::ok);
    if (expected.empty()) expected = row_of(model);
    CHECK(row_of(model) == expected);
  }
  omp_set_num_threads(before);
}

TEST_CASE("llama: a batch of ragged segments gives what each sequence gives alone", "[llama]") {
  LlamaModel model(tiny_llama().file());
  PagedCache cache = cache_for(model);
  std::vector<SequenceId> together;
  std::vector<Tokens> tokens;
  std::vector<std::vector<float>> expected;
  for (const std::size_t n : {1U, 30U, 77U}) {
    tokens.push_back(random_tokens(n + 1, static_cast<unsigned>(n)));
    const SequenceId s = *cache.try_create();
    REQUIRE(model.prefill(cache, s, std::span(tokens.back()).first(n)) == Status::ok);
    together.push_back(*cache.try_fork(s));
    const Segment segment{s, std::span(tokens.back()).last(1)};
    REQUIRE(model.forward(cache, {&segment, 1}, LogitRows::last) == Status::ok);
    expected.push_back(row_of(model));
    cache.destroy(s);
  }
  std::vector<Segment> step;
  for (std::size_t i = 0; i < 3; ++i) step.push_back({together[i], std::span(tokens[i]).last(1)});
  std::vector<std::size_t> segments;
  REQUIRE(model.forward(cache, step, LogitRows::last, [&](const LayerObservation& seen) {
    CHECK(seen.tokens == 1);
    REQUIRE(seen.positions.size() == 1);
    CHECK(seen.positions[0] ==
          kvtrim::Position{static_cast<std::int32_t>(tokens[seen.segment].size()) - 1});
    CHECK(seen.sequence == together[seen.segment]);
    CHECK(seen.queries.size() == 48);
    CHECK(seen.lse.size() == 6);
    segments.push_back(seen.segment);
  }) == Status::ok);
  CHECK(segments == std::vector<std::size_t>{0, 1, 2, 0, 1, 2});
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(distance(row_of(model, static_cast<Eigen::Index>(i)), expected[i]) < 1e-4);
  }
}

TEST_CASE("llama: rows of logits come as asked for", "[llama]") {
  LlamaModel model(tiny_llama().file());
  PagedCache cache = cache_for(model);
  const Tokens tokens = random_tokens(9);
  const SequenceId s = *cache.try_create();
  const Segment segment{s, tokens};
  REQUIRE(model.forward(cache, {&segment, 1}, LogitRows::all) == Status::ok);
  REQUIRE(model.logits().rows() == 9);
  const auto last = row_of(model, 8);
  const SequenceId t = *cache.try_create();
  const Segment again{t, tokens};
  REQUIRE(model.forward(cache, {&again, 1}, LogitRows::last) == Status::ok);
  REQUIRE(model.logits().rows() == 1);
  CHECK(distance(row_of(model), last) < 1e-5);
  const SequenceId u = *cache.try_create();
  const Segment none{u, tokens};
  REQUIRE(model.forward(cache, {&none, 1}, LogitRows::none) == Status::ok);
  CHECK(model.logits().rows() == 0);
}

TEST_CASE("llama: what a query sees is decided by positions, not by slots", "[llama]") {
  LlamaModel model(tiny_llama().file());
  const Tokens tokens = random_tokens(150);
  PagedCache cache = cache_for(model, 16);
  const SequenceId s = *cache.try_create();
  const Segment first{s, std::span(tokens).first(100)};
  const Segment second{s, std::span(tokens).last(50)};
  REQUIRE(model.forward(cache, {&first, 1}, LogitRows::none) == Status::ok);
  const SequenceId shuffled = *cache.try_fork(s);
  REQUIRE(model.forward(cache, {&second, 1}, LogitRows::last) == Status::ok);
  const auto expected = row_of(model);

  // The same rows in another order: each head its own.
  cache.destroy(s);
  const kvtrim::CacheView view = cache.view();
  std::mt19937 random(3);
  for (std::int32_t l = 0; l < 2; ++l) {
    for (std::int32_t h = 0; h < 3; ++h) {
      for (std::int32_t r = 99; r > 0; --r) {
        const auto other = static_cast<std::int32_t>(random() % static_cast<unsigned>(r + 1));
        const LayerId layer{l};
        const HeadId head{h};
        std::swap_ranges(view.key(shuffled, layer, head, r),
                         view.key(shuffled, layer, head, r) + 32,
                         view.key(shuffled, layer, head, other));
        if (other == r) continue;
        std::swap_ranges(view.value(shuffled, layer, head, r),
                         view.value(shuffled, layer, head, r) + 32,
                         view.value(shuffled, layer, head, other));
        std::swap(view.positions.at<kvtrim::Position>(shuffled, layer, head, r),
                  view.positions.at<kvtrim::Position>(shuffled, layer, head, other));
      }
    }
  }
  const Segment again{shuffled, std::span(tokens).last(50)};
  REQUIRE(model.forward(cache, {&again, 1}, LogitRows::last) == Status::ok);
  CHECK(distance(row_of(model), expected) < 1e-4);
}

TEST_CASE("llama: 16-bit caches change logits by their rounding only", "[llama]") {
  LlamaModel model(tiny_llama().file());
  const Tokens tokens = random_tokens(60);
  const auto run = [&](DType dtype) {
    PagedCache cache = cache_for(model, 4, dtype);
    REQUIRE(model.prefill(cache, *cache.try_create(), tokens) == Status::ok);
    return row_of(model);
  };
  const auto exact = run(DType::f32);
  const double f16 = distance(run(DType::f16), exact);
  const double bf16 = distance(run(DType::bf16), exact);
  CHECK(f16 > 0);
  CHECK(f16 < 0.05);
  CHECK(bf16 > f16);
  CHECK(bf16 < 0.5);
}

TEST_CASE("llama: un-rotated keys are kept where the cache has room for them", "[llama]") {
  LlamaModel model(tiny_llama().file());
  auto params = model.cache_params();
  params.pages = 10;
  params.unrotated_keys = true;
  PagedCache cache(params);
  const SequenceId s = *cache.try_create();
  const Tokens tokens = random_tokens(5);
  REQUIRE(model.prefill(cache, s, tokens) == Status::ok);
  const kvtrim::CacheView view = cache.view();
  const auto load = [&](const kvtrim::Plane& plane, std::int32_t row) {
    std::vector<float> key(8);
    const kvtrim::PageId page = view.k_page(s, LayerId{1}, HeadId{2}, 0);
    kvtrim::load_row(plane, plane.row(LayerId{1}, page, HeadId{2}, kvtrim::Slot{row}), key.data());
    return key;
  };
  CHECK(load(view.k, 0) == load(view.unrotated_keys, 0));  // position 0 does not turn
  CHECK(load(view.k, 4) != load(view.unrotated_keys, 4));
  const double turned = std::hypot(load(view.k, 4)[0], load(view.k, 4)[1]);
  const double plain = std::hypot(load(view.unrotated_keys, 4)[0], load(view.unrotated_keys, 4)[1]);
  CHECK(turned == Catch::Approx(plain).epsilon(1e-5));
}

TEST_CASE("llama: a step without room changes no sequence", "[llama][edge]") {
  LlamaModel model(tiny_llama().file());
  auto params = model.cache_params();
  params.pages = 3;
  params.page_size = 4;
  params.max_sequences = 2;
  PagedCache cache(params);
  const SequenceId a = *cache.try_create();
  const SequenceId b = *cache.try_create();
  const Tokens tokens = random_tokens(9);
  REQUIRE(model.prefill(cache, a, std::span(tokens).first(2)) == Status::ok);
  const std::vector<Segment> step{{a, std::span(tokens).first(4)}, {b, std::span(tokens).first(9)}};
  CHECK(model.forward(cache, step, LogitRows::last) == Status::out_of_pages);
  CHECK(cache.live_rows(a) == 2);
  CHECK(cache.next_position(a) == kvtrim::Position{2});
  CHECK(cache.next_rope_position(a) == 2);
  CHECK(cache.live_rows(b) == 0);
  CHECK(cache.pool().available() == 2);
}

TEST_CASE("llama: an empty prompt and one longer than the context are errors with the numbers",
          "[llama][edge]") {
  LlamaModel model(tiny_llama().file());
  PagedCache cache = cache_for(model);
  const SequenceId s = *cache.try_create();
  CHECK_THROWS_WITH(model.prefill(cache, s, {}), ContainsSubstring("the prompt is empty"));
  CHECK_THROWS_WITH(model.prefill(cache, s, random_tokens(201)),
                    ContainsSubstring("201 tokens") && ContainsSubstring("context of 200"));
  CHECK(cache.live_rows(s) == 0);
  REQUIRE(model.prefill(cache, s, random_tokens(200)) == Status::ok);
  const Tokens one{1};
  const Segment beyond{s, one};
  CHECK_THROWS_AS(model.forward(cache, {&beyond, 1}, LogitRows::last), std::length_error);
  CHECK(cache.live_rows(s) == 200);
}

TEST_CASE("llama: tokens outside the vocabulary, empty segments and a foreign cache are refused",
          "[llama][edge]") {
  LlamaModel model(tiny_llama().file());
  PagedCache cache = cache_for(model);
  const SequenceId s = *cache.try_create();
  for (const std::int32_t token : {-1, 11}) {
    CHECK_THROWS_WITH(model.prefill(cache, s, Tokens{token}),
                      ContainsSubstring("outside the vocabulary of 11"));
  }
  const Segment empty{s, {}};
  CHECK_THROWS_AS(model.forward(cache, {&empty, 1}, LogitRows::last), std::invalid_argument);
  CHECK_THROWS_AS(model.forward(cache, {}, LogitRows::last), std::invalid_argument);
  const Tokens one{1};
  const std::vector<Segment> twice{{s, one}, {s, one}};
  CHECK_THROWS_WITH(model.forward(cache, twice, LogitRows::last),
                    ContainsSubstring("two segments of sequence 0"));
  CHECK(cache.live_rows(s) == 0);
  auto params = model.cache_params();
  params.kv_heads = 2;
  params.pages = 4;
  PagedCache foreign(params);
  CHECK_THROWS_AS(model.prefill(foreign, *foreign.try_create(), Tokens{1}), std::invalid_argument);
}

TEST_CASE("llama: another architecture is refused by name", "[llama][edge]") {
  auto builder = tiny_llama();
  builder.string("general.architecture", "mamba");
  CHECK_THROWS_WITH(LlamaModel(builder.file()),
                    ContainsSubstring("'mamba'") && ContainsSubstring("known is llama"));
}

TEST_CASE("llama: every tensor that is missing is named with its shape", "[llama][edge]") {
  for (const char* name : {"token_embd.weight",
                           "output_norm.weight",
                           "blk.1.attn_norm.weight",
                           "blk.1.attn_q.weight",
                           "blk.0.ffn_down.weight"}) {
    auto builder = tiny_llama();
    builder.without(name);
    CHECK_THROWS_WITH(
        LlamaModel(builder.file()),
        ContainsSubstring(std::string("missing tensor ") + name + ", expected shape"));
  }
}

TEST_CASE("llama: tensors that the engine would ignore are refused", "[llama][edge]") {
  auto builder = tiny_llama();
  builder.tensor("blk.0.attn_q.bias", {48}, std::vector<float>(48));
  CHECK_THROWS_WITH(LlamaModel(builder.file()), ContainsSubstring("blk.0.attn_q.bias"));
}

TEST_CASE("llama: hyperparameters that cannot be are refused", "[llama][edge]") {
  const auto error = [](const char* key, std::uint32_t value) {
    auto builder = tiny_llama();
    builder.u32(key, value);
    try {
      LlamaModel model(builder.file());
      return std::string();
    } catch (const std::runtime_error& e) { return std::string(e.what()); }
  };
  CHECK_THAT(error("llama.block_count", 0), ContainsSubstring("llama.block_count is 0"));
  CHECK_THAT(error("llama.block_count", 0xFFFFFFFFU), ContainsSubstring("expected 1 to 2^24"));
  CHECK_THAT(error("llama.block_count", 1U << 24U), ContainsSubstring("missing tensor blk.2."));
  CHECK_THAT(error("llama.block_count", 1), ContainsSubstring("blk.1."));
  CHECK_THAT(error("llama.attention.head_count_kv", 4), ContainsSubstring("no multiple"));
  CHECK_THAT(error("llama.rope.dimension_count", 5), ContainsSubstring("rope.dimension_count"));
  CHECK_THAT(error("llama.rope.dimension_count", 10), ContainsSubstring("rope.dimension_count"));
  CHECK_THAT(error("llama.attention.value_length", 4), ContainsSubstring("different lengths"));
  CHECK_THAT(error("llama.embedding_length", 16), ContainsSubstring("expected 16 x 11"));
}

TEST_CASE("llama: rope scaling is honoured where it is known and refused where not", "[llama]") {
  auto builder = tiny_llama();
  builder.string("llama.rope.scaling.type", "yarn");
  CHECK_THROWS_WITH(LlamaModel(builder.file()), ContainsSubstring("'yarn'"));
  builder.string("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 2);
  const auto linear = LlamaModel(builder.file()).shape().frequencies;
  builder = tiny_llama();
  const auto plain = LlamaModel(builder.file()).shape().frequencies;
  builder.tensor("rope_freqs.weight", {3}, {2, 2, 2});
  const auto divided = LlamaModel(builder.file()).shape().frequencies;
  REQUIRE(plain.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(plain[i] == Catch::Approx(std::pow(100.0, -static_cast<double>(i) / 3)));
    CHECK(linear[i] == plain[i] / 2);
    CHECK(divided[i] == plain[i] / 2);
  }
}

TEST_CASE("llama: a damaged head never crashes the loader", "[llama][edge]") {
  const auto whole = tiny_llama().bytes();
  std::size_t refused = 0;
  for (std::size_t at = 24; at < 2000; ++at) {  // all keys, most heads of tensors
    for (const unsigned value : {0x00U, 0x01U, 0x7FU, 0xFFU}) {
      auto damaged = whole;
      damaged[at] = static_cast<std::byte>(value);
      try {
        LlamaModel model(engine::GgufFile("test.gguf", std::move(damaged)));
      } catch (const std::runtime_error&) { ++refused; }
    }
  }
  CHECK(refused > 1000);
}
