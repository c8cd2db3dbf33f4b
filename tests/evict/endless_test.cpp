// SPDX-License-Identifier: Apache-2.0
// StreamingLLM's endless stream on the cache alone: millions of steps in the same pages, positions renumbered.
#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/core/rope.hpp>
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/evict/rerotate.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "support/instances.hpp"
#include "support/long_steps.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

using namespace kvtrim;

namespace {

constexpr std::int32_t dim = 64;
constexpr std::int32_t page_size = 16;
using Key = std::array<double, dim>;

// Number `d` of the key of position `p` before rotation, of [-1, 1).
double number(std::int32_t p, std::size_t d) {
  std::uint32_t x = static_cast<std::uint32_t>(p) * 2654435761U + static_cast<std::uint32_t>(d);
  x = (x ^ (x >> 15U)) * 2246822519U;
  return static_cast<double>((x >> 16U) & 0xFFFFU) / 32768.0 - 1.0;
}

// The key of position `p` rotated to `rope` at once.
Key rotated(std::int32_t p, std::int32_t rope, const std::vector<double>& frequencies) {
  Key key{};
  for (std::size_t i = 0; i < dim / 2; ++i) {
    const double a = number(p, i);
    const double b = number(p, i + dim / 2);
    const double angle = rope * frequencies[i];
    key[i] = a * std::cos(angle) - b * std::sin(angle);
    key[i + dim / 2] = a * std::sin(angle) + b * std::cos(angle);
  }
  return key;
}

// What does not hold is counted: checking every step would take longer than the steps.
void streams(std::int32_t steps) {
  const std::vector<double> frequencies = rope_frequencies(10'000, dim);
  const StreamingSink<> policy({.sinks = 4, .recent = 252});
  const std::int32_t most = policy.max_pages(page_size);
  PagedCache cache({.pages = most, .page_size = page_size, .key_dim = dim});
  const SequenceId s = *cache.try_create();
  const CacheView view = cache.view();
  const Rope rope{.inverse_frequencies = frequencies, .dim = dim, .same_for_all_layers = true};
  const Rerotator rerotator(view, rope, PositionMode::in_cache);
  PlanShape shape = plan_shape(view);
  shape.max_rows = most * page_size;
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, shape));
  std::int64_t refused = 0;
  std::int64_t other_pages = 0;
  std::int64_t misplaced = 0;
  double worst = 0;
  // Sinks first, the last rows behind them, without a gap; each key is what it would be if it were rotated there at once.
  const auto compare = [&](std::int32_t next) {
    const std::int32_t live = cache.live_rows(s);
    for (std::int32_t r = 0; r < live; ++r) {
      const std::int32_t p = raw(view.position(s, LayerId{0}, HeadId{0}, r));
      const std::int32_t at = view.rope_position(s, LayerId{0}, HeadId{0}, r);
      misplaced += at == r && p == (r < page_size ? r : next - live + r) ? 0 : 1;
      const Key fresh = rotated(p, r, frequencies);
      std::array<float, dim> stored{};
      std::memcpy(stored.data(), view.key(s, LayerId{0}, HeadId{0}, r), sizeof stored);
      for (std::size_t d = 0; d < dim; ++d) {
        worst = std::max(worst, std::abs(fresh[d] - static_cast<double>(stored[d])));
      }
    }
  };
  std::array<std::int32_t, page_size> pages{};  // whole pages leave, so the count has their period
  std::array<float, dim> row{};
  for (std::int32_t p = 0; p < steps; ++p) {
    refused += cache.try_extend(s, 1) == Status::ok ? 0 : 1;
    const Key key = rotated(p, cache.next_rope_position(s) - 1, frequencies);
    std::ranges::transform(key, row.begin(), [](double x) { return static_cast<float>(x); });
    refused += cache.write(s, LayerId{0}, {row.data()}, {row.data()}) == Status::ok ? 0 : 1;
    const Report report =
        evict(policy, cache, view, {}, workspace, {.rerotator = &rerotator}, Serial{});
    refused += report.status == Status::ok ? 0 : 1;
    if (p < 1'000) { continue; }
    std::int32_t& usual = pages[static_cast<std::size_t>(p % page_size)];
    if (usual == 0) { usual = cache.pool().in_use(); }
    other_pages += cache.pool().in_use() == usual ? 0 : 1;
    if (p % 99'991 == 0 || p + 1 == steps) { compare(p + 1); }
  }
  CHECK(refused == 0);
  CHECK(other_pages == 0);
  CHECK(misplaced == 0);
  CHECK(worst < 1e-5);
  CHECK(worst > 0);
  CHECK(raw(cache.next_position(s)) == steps);
  CHECK(cache.next_rope_position(s) == cache.live_rows(s));
  CHECK(cache.live_rows(s) >= 256);
  CHECK(cache.live_rows(s) <= page_size + 252 + page_size - 1);
}

}  // namespace

TEST_CASE("endless: a stream stays in its pages, and its keys where they belong", "[endless]") {
  streams(20'000);
}

TEST_CASE("endless: millions of steps later pages, positions and keys are the same",
          "[endless][slow]") {
  streams(4 * test::long_steps());  // 4,000,000 in the preset `long`
}
