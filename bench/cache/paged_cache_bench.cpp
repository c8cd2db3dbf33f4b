// SPDX-License-Identifier: Apache-2.0
// What `PagedCache::Params::scrub` costs: the same work on a cache that clears what nobody holds any longer, compared with one
// that does not. `stream`: decode steps of a sliding window that lose a page now and then. `request`: a prompt that is written
// and ends, so that every page is cleared once. `end`: its end alone, compared with one memset of as many bytes.

#include <kvtrim/evict/evict.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "../engine_cache.hpp"
#include "../harness.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace kvtrim_bench {
namespace {

enum class What : std::uint8_t { stream, request, end };

constexpr std::string_view names[] = {"stream", "request", "end"};
constexpr std::int32_t chunk = 512;

class Run {
 public:
  Run(const Shape& shape, bool scrub)
      : shape_(shape),
        cache_({.pages = shape.tokens / shape.page_size + 4,
                .page_size = shape.page_size,
                .kv_heads = shape.kv_heads,
                .key_dim = shape.dim,
                .dtype = shape.dtype,
                .scrub = scrub}),
        rows_(normal_numbers(static_cast<std::size_t>(chunk) *
                                 static_cast<std::size_t>(shape.kv_heads) *
                                 static_cast<std::size_t>(shape.dim),
                             3)),
        policy_({.recent = shape.tokens - 4 - 2 * shape.page_size}) {
    const PlanShape plan{.kv_heads = shape.kv_heads,
                         .page_size = shape.page_size,
                         .pages = cache_.params().pages,
                         .max_rows = cache_.params().max_rows};
    workspace_.resize(plan_workspace_bytes(policy_, plan));
    good_ = cache_.try_create().has_value();
  }

  bool good() const { return good_; }
  /// The whole prompt.
  void fill() {
    for (std::int32_t n = 0; n < shape_.tokens; n += chunk) { append(chunk); }
  }
  void end() { cache_.reset(SequenceId{0}); }
  /// As many steps as it takes to lose `pages` pages.
  void stream(std::int32_t pages) {
    for (std::int32_t i = 0; i < pages * shape_.page_size; ++i) {
      append(1);
      good_ = usable(evict(policy_, cache_, cache_.view(), {}, workspace_).status) && good_;
    }
  }

 private:
  void append(std::int32_t n) {
    const SequenceId s{0};
    good_ = cache_.try_extend(s, n) == Status::ok && good_;
    good_ = cache_.write(s, LayerId{0}, {rows_.data()}, {rows_.data()}) == Status::ok && good_;
  }

  Shape shape_;
  PagedCache cache_;
  std::vector<float> rows_;
  StreamingSink<> policy_;
  std::vector<std::byte> workspace_;
  bool good_ = false;
};

void scrub(benchmark::State& state, const Shape& shape, What what) {
  constexpr std::int32_t pages = 64;
  Run with(shape, true), without(shape, false);
  const auto prepare = [&] {
    for (Run* run : {&with, &without}) {
      run->end();
      if (what != What::request) { run->fill(); }
    }
  };
  const auto work = [&](Run& run) {
    if (what == What::stream) { run.stream(pages); }
    if (what == What::request) { run.fill(); }
    if (what != What::stream) { run.end(); }
  };
  const std::int32_t cleared =
      what == What::stream ? pages * shape.page_size : shape.tokens;  // rows, and steps of a stream
  const auto bytes = std::size_t{2} * static_cast<std::size_t>(cleared) *
                     static_cast<std::size_t>(shape.kv_heads * shape.dim) *
                     static_cast<std::size_t>(element_bytes(shape.dtype));
  std::vector<std::byte> plain(what == What::end ? bytes : 0);
  const auto bound = [&] {
    if (what != What::end) { return work(without); }
    std::memset(plain.data(), 0, plain.size());
  };
  const Pairs p = interleave(prepare, [&] { work(with); }, bound);
  if (!with.good() || !without.good()) {
    state.SkipWithError("a step was refused");
    return;
  }
  report(state, p, {.items = static_cast<double>(cleared), .bytes = static_cast<double>(bytes)});
  if (what != What::end) { state.counters["ns_a_row"] = (p.op - p.bound) / cleared * 1e9; }
}

const bool registered = [] {
  Shape base;
  base.query_heads = base.kv_heads;
  for (const What what : {What::stream, What::request, What::end}) {
    for (const std::int32_t tokens : {1024, 8192}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        Shape s = base;
        s.tokens = tokens, s.dtype = dtype;
        line("cache/scrub/" + std::string(names[static_cast<std::size_t>(what)]) + s.axes(),
             [=](benchmark::State& state) { scrub(state, s, what); });
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace kvtrim_bench
