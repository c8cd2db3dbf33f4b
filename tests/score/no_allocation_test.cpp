// SPDX-License-Identifier: Apache-2.0
// Counts calls of malloc and its kin while scores are made: operator new and Eigen's aligned memory end there too. A
// sanitizer has its own malloc, so these tests exist only without one.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#  define KVTRIM_TEST_COUNTS_MALLOC 0
#elif defined(__has_feature)
#  if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
      __has_feature(memory_sanitizer)
#    define KVTRIM_TEST_COUNTS_MALLOC 0
#  endif
#endif

#include "method_fixture.hpp"

#if !defined(KVTRIM_TEST_COUNTS_MALLOC)
#  if defined(__GLIBC__)
#    define KVTRIM_TEST_COUNTS_MALLOC 1
#  else
#    define KVTRIM_TEST_COUNTS_MALLOC 0
#  endif
#endif

#if KVTRIM_TEST_COUNTS_MALLOC

#  include <kvtrim/evict/apply.hpp>
#  include <kvtrim/observe/accumulate.hpp>
#  include <kvtrim/observe/column_sums.hpp>
#  include <kvtrim/observe/query_moments.hpp>
#  include <kvtrim/observe/query_ring.hpp>
#  include <kvtrim/observe/recorder.hpp>
#  include <kvtrim/policy/snapkv_selector.hpp>
#  include <kvtrim/score/accumulated.hpp>
#  include <kvtrim/score/chunked.hpp>
#  include <kvtrim/score/cur.hpp>
#  include <kvtrim/score/expected_attention.hpp>
#  include <kvtrim/score/external.hpp>
#  include <kvtrim/score/key_diff.hpp>
#  include <kvtrim/score/key_norm.hpp>
#  include <kvtrim/score/lag_kv.hpp>
#  include <kvtrim/score/output_norm.hpp>
#  include <kvtrim/score/per_layer.hpp>
#  include <kvtrim/score/q_filter.hpp>
#  include <kvtrim/score/random.hpp>
#  include <kvtrim/score/rkv.hpp>
#  include <kvtrim/score/row_local.hpp>
#  include <kvtrim/score/tova.hpp>
#  include <kvtrim/score/value_norm.hpp>
#  include <kvtrim/score/window.hpp>
#  include <kvtrim/select/top_k.hpp>

#  include "catch.hpp"
#  include "support/step_world.hpp"

#  include <Eigen/Core>

#  include <array>
#  include <cerrno>
#  include <cstddef>
#  include <cstdint>
#  include <memory>
#  include <optional>
#  include <vector>

namespace {

thread_local bool counting = false;
thread_local std::int64_t allocations = 0;
thread_local std::size_t allocated_bytes = 0;

void count(std::size_t bytes) {
  if (!counting) { return; }
  ++allocations;
  allocated_bytes += bytes;
}

// Allocations of f().
template <class F>
std::int64_t allocations_of(F&& f) {
  allocations = 0;
  allocated_bytes = 0;
  counting = true;
  f();
  counting = false;
  return allocations;
}

}  // namespace

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t n) noexcept {
  count(n);
  return __libc_malloc(n);
}
void* calloc(std::size_t n, std::size_t size) noexcept {
  count(n * size);
  return __libc_calloc(n, size);
}
void* realloc(void* p, std::size_t n) noexcept {
  count(n);
  return __libc_realloc(p, n);
}
void* memalign(std::size_t alignment, std::size_t n) noexcept {
  count(n);
  return __libc_memalign(alignment, n);
}
void* aligned_alloc(std::size_t alignment, std::size_t n) noexcept {
  count(n);
  return __libc_memalign(alignment, n);
}
int posix_memalign(void** p, std::size_t alignment, std::size_t n) noexcept {
  count(n);
  *p = __libc_memalign(alignment, n);
  return *p == nullptr ? ENOMEM : 0;
}
}

using namespace score_test;

namespace {
// A pointer that the compiler must believe is used: without it, clang removes a new and its delete as a pair.
template <class T>
T* seen(T* p) {
  T* volatile kept = p;
  return kept;
}
}  // namespace

TEST_CASE("no_allocation: the counter sees new, aligned new and Eigen's products",
          "[no_allocation]") {
  struct alignas(64) Wide {
    float x[16];
  };
  CHECK(allocations_of([] { delete seen(new std::vector<int>(3)); }) >= 1);
  CHECK(allocations_of([] { delete seen(new Wide); }) >= 1);
  const Eigen::MatrixXf a = Eigen::MatrixXf::Ones(300, 300);
  Eigen::MatrixXf b = Eigen::MatrixXf::Ones(300, 300);
  CHECK(allocations_of([&] { b.noalias() += a * a; }) >= 1);
  CHECK(allocations_of([] {}) == 0);
}

TEST_CASE("no_allocation: scores, sums and selection allocate nothing", "[no_allocation]") {
  // 16 query heads per KV head, 32 rows of each: 512 query rows of up to 1 KiB.
  for (const std::int32_t dim : {64, 256}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      const Data d = make_data(1, 16, dim, 300, 60);
      for (const bool ordered : {true, false}) {
        CacheOptions o{.dtype = dtype, .page_size = 16, .scores = true};
        if (!ordered) { o.order = shuffled(300, 61); }
        TestCache cache(d, o);
        const CacheView view = cache.view();
        const Queries with_lse(d, 268, 32, LseForm::natural);
        const Queries without(d, 268, 32, LseForm::computed);
        for (const QueryBlock& block : {with_lse.block, without.block}) {
          Observation obs;
          obs.queries = block;
          const WindowScorer scorer({.window = 32, .kernel = 5});
          std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view, obs)));
          std::vector<float> out(300);
          CHECK(allocations_of([&] {
                  scorer.score({view, SequenceId{0}, LayerId{0}, HeadId{0}}, obs, scratch, out);
                }) == 0);

          const SnapKVSelector policy({.window = 32, .budget = 100});
          std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
          Status status = Status::stale_plan;
          CHECK(allocations_of([&] { status = plan(policy, view, obs, workspace).status(); }) == 0);
          CHECK(status == Status::ok);
        }
        std::vector<std::byte> scratch(column_sums_scratch_bytes(dim));
        CHECK(allocations_of([&] {
                accumulate_column_sums({.decay = 0.9F, .squared = true},
                                       {view, SequenceId{0}, LayerId{0}, HeadId{0}},
                                       with_lse.block,
                                       LayerId{0},
                                       scratch);
              }) == 0);
        const std::vector<float> p(16 * 300, 0.01F);
        std::vector<float> out(300);
        CHECK(allocations_of([&] {
                accumulate_probabilities(
                    {}, {view, SequenceId{0}, LayerId{0}, HeadId{0}}, {p.data(), 16, 300});
                AccumulatedScorer({.age_normalised = true})
                    .score({view, SequenceId{0}, LayerId{0}, HeadId{0}}, {}, {}, out);
              }) == 0);
      }
    }
  }
}

TEST_CASE("no_allocation: scores of methods and decorators allocate nothing", "[no_allocation]") {
  MethodWorld world({.dim = 64, .value_dim = 64, .hidden = 300, .max_rows = 300});
  REQUIRE(world.append(0, 300) == Status::ok);
  const CacheView view = world.view();
  const Observation obs = world.observation();
  const auto allocations_by = [&](const auto& scorer) {
    std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view, obs)));
    std::vector<float> out(300);
    return allocations_of([&] {
      static_cast<void>(scorer.check(view, obs));
      scorer.score({view, SequenceId{0}, LayerId{1}, HeadId{1}}, obs, scratch, out);
    });
  };
  CHECK(allocations_by(KeyNormScorer(KeyNormParams{})) == 0);
  CHECK(allocations_by(QFilterScorer(QFilterParams{})) == 0);
  CHECK(allocations_by(RandomScorer(RandomParams{})) == 0);
  CHECK(allocations_by(TovaScorer(TovaParams{})) == 0);
  CHECK(allocations_by(PerLayerScorer<KeyDiffParams>({})) == 0);
  CHECK(allocations_by(ValueNormScorer<KeyDiffParams>({})) == 0);
  CHECK(allocations_by(OutputNormScorer<KeyNormParams>({})) == 0);
  const ValueNorm<QFilterParams> scores;
  std::vector<std::byte> scratch(score_new_rows_bytes(scores, plan_shape(view, obs), 300));
  Status status = Status::stale_plan;
  CHECK(allocations_of([&] {
          status = score_new_rows(scores, view, SequenceId{0}, 300, obs, view.score_sums, scratch);
        }) == 0);
  CHECK(status == Status::ok);
}

TEST_CASE("no_allocation: ExpectedAttention, LagKV, CurKV, R-KV and chunks allocate nothing",
          "[no_allocation]") {
  for (const std::int32_t dim : {64, 256}) {
    const Data d = make_data(2, 8, dim, 300, 63);
    const Queries queries(d, 268, 32, LseForm::computed);
    QueryMoments moments({.query_heads = 16, .head_dim = dim});
    CHECK(allocations_of([&] {
            moments.accumulate(SequenceId{0}, LayerId{0}, queries.block, LayerId{0});
            moments.finish(SequenceId{0});
          }) == 0);
    const auto frequencies = rope_frequencies(10'000.0, dim);
    ExpectedAttentionParams expected;
    expected.rope.inverse_frequencies = frequencies;
    expected.rope.dim = dim;
    expected.rope.same_for_all_layers = true;
    for (const bool ordered : {true, false}) {
      CacheOptions o{.dtype = DType::bf16, .page_size = 16};
      if (!ordered) { o.order = shuffled(300, 64); }
      TestCache cache(d, o);
      const CacheView view = cache.view();
      Observation obs;
      obs.queries = queries.block;
      obs.statistics = moments.statistics();
      const auto check = [&](const auto& scorer) {
        REQUIRE(scorer.check(view, obs) == Status::ok);
        std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view, obs)));
        std::vector<float> out(300);
        CHECK(allocations_of([&] {
                scorer.score({view, SequenceId{0}, LayerId{0}, HeadId{1}}, obs, scratch, out);
              }) == 0);
      };
      check(ExpectedAttentionScorer(expected));
      check(LagKVScorer({.lag = 32}));
      check(CurScorer({}));
      check(RKVScorer({}));
      check(ChunkedScorer<WindowParams>({}));
    }
  }
}

TEST_CASE("no_allocation: pooling, keys, top_k, external scores and rings allocate nothing",
          "[no_allocation]") {
  const Data d = make_data(1, 1, 64, 64, 62);
  std::vector<float> out(4096);
  std::vector<std::uint32_t> keys(4096);
  std::vector<std::int32_t> kept(1000);
  Observation obs;
  obs.scores = SequencePlane::dense(const_cast<float*>(d.keys.data()), 1, 1, 4096);
  QueryRing ring({.head_dim = 64, .window = 32});
  const std::vector<Position> positions(64);
  CHECK(allocations_of([&] {
          pool(d.keys, Pooling::average, 15, out);
          pool(d.keys, Pooling::max, 15, out);
          static_cast<void>(order_keys(out, keys));
          top_k(keys, kept);
          ExternalScorer{}.score({{}, SequenceId{0}, LayerId{0}, HeadId{0}}, obs, {}, out);
          ring.push(SequenceId{0}, LayerId{0}, 64, d.queries.data(), positions.data());
          static_cast<void>(ring.queries());
          ring.fork(SequenceId{0}, SequenceId{0});
          ring.reset(SequenceId{0});
        }) == 0);
}

TEST_CASE("no_allocation: a Recorder allocates what it says, and nothing after it was made",
          "[no_allocation][recorder]") {
  for (const std::int32_t dim : {64, 256}) {
    test::MethodWorld world({.dim = dim, .sequences = 3});
    Needs needs{.window = 8, .score_planes = true};
    needs.accumulate = AccumulateParams{.decay = 0.9F};
    needs.moments = MomentParams{};
    const RecorderParams params{.sequences = 3,
                                .layers = 2,
                                .query_heads = 6,
                                .kv_heads = 2,
                                .head_dim = dim,
                                .workers = 2,
                                .lse = true};
    std::optional<Recorder> recorder;
    CHECK(allocations_of([&] { recorder.emplace(needs, params); }) > 0);
    CHECK(allocated_bytes == Recorder::bytes(needs, params));
    const auto run = [&](const test::Batch& batch) {
      append_rows(world, batch);
      for (std::int32_t l = 0; l < 2; ++l) {
        const test::StepData data(world, batch, l);
        const LayerStep step = data.step(l, true);
        const CacheView view = world.view();
        Status status = Status::stale_plan;
        CHECK(allocations_of([&] { status = recorder->record(view, step); }) == 0);
        CHECK(status == Status::ok);
        LayerStep bad = step;
        bad.queries.lse = nullptr;
        CHECK(allocations_of([&] { status = recorder->record(view, bad); }) == 0);
        CHECK(status == Status::bad_observation);
      }
    };
    run({{0, 20}, {1, 3}, {2, 9}});
    const std::array<std::int32_t, 2> slots{2, 0};
    CHECK(allocations_of([&] {
            recorder->fork(0, 1);
            static_cast<void>(recorder->missing(needs, slots));
            static_cast<void>(recorder->observation(slots, LayerId{1}, 1));
            static_cast<void>(recorder->observation());
            recorder->truncate(1, Position{18});
            recorder->reset(1);
            recorder->reset(2);
            recorder->fork(0, 1);
          }) == 0);
    run({{0, 1}, {1, 0}, {2, 1}});  // the block that 0 shares with 1 is copied
  }
}

#endif
