// SPDX-License-Identifier: Apache-2.0
// A new method is one struct, with its parameters and their facts, and its scorer. Everything else is already there:
// protection, ties, NaN, plans, moves, tables, per-head budgets (AdaKV<Fading>), SnapKV's rules
// (SnapKVSelector<FadingNorm>), one set per layer (TopRows<PerLayer<FadingNorm>>), whole pages (PageSelector<FadingNorm>).
#include <kvtrim/kvtrim.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

// --- the method -------------------------------------------------------------------------------

/// The longer the key, the higher the score, halved for every `half_life` tokens since it was written.
struct FadingNorm {
  static constexpr std::string_view name = "fading";
  static constexpr std::string_view title = "Fading";
  static constexpr kvtrim::Protection protects{.sinks = 4, .recent = 0};
  float half_life = 64;
  constexpr void check(std::string_view who) const {
    if (!(half_life > 0)) {
      kvtrim::throw_invalid_argument("{}: half_life {} must be above 0", who, half_life);
    }
  }
  // Besides keys: how old a row is. With `.window = 8` a Recorder would keep the last 8 queries for it.
  constexpr kvtrim::Needs needs() const noexcept { return {.positions = true, .states = true}; }
  std::size_t scratch_bytes(const kvtrim::PlanShape& shape) const noexcept {
    return sizeof(float) * static_cast<std::size_t>(shape.head_dim);
  }
  kvtrim::Status check(const kvtrim::CacheView& view, const kvtrim::Observation&) const noexcept {
    return kvtrim::readable(view.k.dtype) ? kvtrim::Status::ok : kvtrim::Status::bad_observation;
  }
  void score(const kvtrim::HeadRef& head,
             const kvtrim::Observation&,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    auto* const key = reinterpret_cast<float*>(scratch.data());
    for (std::int32_t r = 0; r < head.live_rows(); ++r) {
      kvtrim::load_row(head.view.k, head.key(r), key);  // whatever its layout and dtype
      float square = 0;
      for (std::int32_t d = 0; d < head.view.k.head_dim; ++d) { square += key[d] * key[d]; }
      const auto age = static_cast<float>(head.state().next_position - raw(head.position(r)));
      out[static_cast<std::size_t>(r)] = std::sqrt(square) * std::exp2(-age / half_life);
    }
  }
};

using Fading = kvtrim::TopRows<FadingNorm>;

// --- in use ------------------------------------------------------------------------------------

int main() {
  // In SnapKV's place, at the end of the prompt: 50 rows per head, the last 8 always among them. Then 16 rows per head on
  // average, so that KV heads of different lengths need page tables of their own: the policy says so.
  const kvtrim::SnapKVSelector<FadingNorm> at_the_end({.budget = 50, .recent = 8});
  const kvtrim::AdaKV<Fading> policy({.inner = {.budget = 16}});
  const kvtrim::Needs needed = merge(needs(at_the_end), needs(policy));

  // One sequence of 100 tokens, 2 KV heads; a long key every 10 tokens in head 1.
  kvtrim::PagedCache cache(
      {.pages = 40, .page_size = 8, .kv_heads = 2, .key_dim = 4, .scope = needed.scope});
  std::vector<float> rows(100 * 2 * 4, 1.0F);
  for (std::size_t t = 0; t < 100; t += 10) { rows[(t * 2 + 1) * 4] = 20; }
  const auto sequence = cache.try_create();
  if (!sequence || cache.try_extend(*sequence, 100) != kvtrim::Status::ok) { return 1; }
  const kvtrim::Status written =
      cache.write(*sequence, kvtrim::LayerId{0}, {.data = rows.data()}, {.data = rows.data()});
  if (written != kvtrim::Status::ok) { return 1; }

  std::vector<std::byte> memory(
      kvtrim::plan_workspace_bytes(at_the_end, kvtrim::plan_shape(cache.view())));
  const auto cut = kvtrim::evict(at_the_end, cache, cache.view(), {}, memory);
  if (cut.status != kvtrim::Status::ok || cut.kept_rows != 100) { return 1; }

  memory.resize(kvtrim::plan_workspace_bytes(policy, kvtrim::plan_shape(cache.view())));
  const std::int32_t before = cache.pool().in_use();
  const auto report = kvtrim::evict(policy, cache, cache.view(), {}, memory);
  for (const int h : {0, 1}) {
    std::printf("head %d keeps positions", h);
    const std::int32_t live = cache.live_rows(*sequence, {}, kvtrim::HeadId{h});
    for (std::int32_t r = 0; r < live; ++r) {
      std::printf(" %d", raw(cache.view().position(*sequence, {}, kvtrim::HeadId{h}, r)));
    }
    std::printf("\n");
  }
  std::printf("%d of %d pages are free again, %lld of %lld rows of the others are used\n",
              report.released_pages,
              before,
              static_cast<long long>(report.kept_rows),
              static_cast<long long>(report.allocated_rows));
  return report.status == kvtrim::Status::ok && report.kept_rows == 32 ? 0 : 1;
}
