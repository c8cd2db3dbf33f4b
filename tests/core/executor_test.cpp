// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/executor.hpp>

#include "catch.hpp"

#include <cstdint>
#include <stdexcept>
#include <vector>

using namespace kvtrim;

namespace {

// What an engine's thread pool would look like; runs backwards, as no order is promised.
struct Backwards {
  std::int16_t workers() const { return 3; }
  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept {
    for (std::int64_t i = n; i-- > 0;) { f(i, static_cast<std::int32_t>(i % 3)); }
  }
};
struct NoWorkers {
  template <class F>
  void for_each(std::int64_t, F&&) const noexcept {}
};
struct NotConst {
  std::int32_t workers() const { return 1; }
  template <class F>
  void for_each(std::int64_t, F&&) noexcept {}
};
struct OneArgument {
  std::int32_t workers() const { return 1; }
  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept {
    for (std::int64_t i = 0; i < n; ++i) { f(i); }
  }
};

static_assert(Executor<Backwards>);
static_assert(!Executor<NoWorkers>);
static_assert(!Executor<NotConst>);
static_assert(!Executor<int>);
// A concept sees the signature of for_each, not its body: this one passes, and fails where used.
static_assert(Executor<OneArgument>);

}  // namespace

TEST_CASE("executor: Serial runs each item once, ascending, as worker 0", "[executor]") {
  for (const std::int64_t n : {0, 1, 7}) {
    std::vector<std::int64_t> items;
    std::int32_t others = 0;
    Serial().for_each(n, [&](std::int64_t item, std::int32_t worker) {
      items.push_back(item);
      others += worker != 0 ? 1 : 0;
    });
    std::vector<std::int64_t> expected;
    for (std::int64_t i = 0; i < n; ++i) { expected.push_back(i); }
    CHECK(items == expected);
    CHECK(others == 0);
  }
  CHECK(Serial().workers() == 1);
}

TEST_CASE("executor: Serial lets an item's exception through, and promises no more than the item",
          "[executor]") {
  const auto throws = [](std::int64_t, std::int32_t) { throw std::runtime_error("item"); };
  CHECK_THROWS_AS(Serial().for_each(2, throws), std::runtime_error);
  const auto quiet = [](std::int64_t, std::int32_t) noexcept {};
  static_assert(noexcept(Serial().for_each(2, quiet)));
  static_assert(!noexcept(Serial().for_each(2, throws)));
}
