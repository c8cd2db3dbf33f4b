// expect: s\.check\(view, obs\)
// SPDX-License-Identifier: Apache-2.0
// A researcher's scorer without check(): the compiler names the missing expression, as the README shows.
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/top_rows.hpp>

struct MyScores {
  static constexpr std::string_view name = "mine";
  static constexpr std::string_view title = "Mine";
  static constexpr kvtrim::Protection protects{};
  constexpr void check(std::string_view) const noexcept {}

  std::size_t scratch_bytes(const kvtrim::PlanShape&) const noexcept { return 0; }
#if defined(KVTRIM_TEST_VALID)
  kvtrim::Status check(const kvtrim::CacheView&, const kvtrim::Observation&) const noexcept {
    return kvtrim::Status::ok;
  }
#endif
  void score(const kvtrim::HeadRef&,
             const kvtrim::Observation&,
             std::span<std::byte>,
             std::span<float>) const noexcept {}
};

kvtrim::Status use(const kvtrim::CacheView& view, std::span<std::byte> workspace) {
  return kvtrim::plan(kvtrim::TopRows<MyScores>{}, view, {}, workspace).status();
}
