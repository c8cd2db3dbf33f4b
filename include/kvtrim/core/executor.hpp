// SPDX-License-Identifier: Apache-2.0
#pragma once

// The library starts no threads: a caller who has a thread pool passes it in.

#include <kvtrim/core/types.hpp>

#include <concepts>
#include <cstdint>

namespace kvtrim {

namespace detail {
struct ExecutorProbe {
  void operator()(std::int64_t /*item*/, std::int32_t /*worker*/) const noexcept {}
};
}  // namespace detail

/// Runs independent work items, on as many threads as it likes.
///
/// | expression         | returns                     | meaning                                                     |
/// |--------------------|-----------------------------|-------------------------------------------------------------|
/// | `e.workers()`      | to `std::int32_t`           | number of items that may run at the same time; at least 1   |
/// | `e.for_each(n, f)` | `void`                      | calls `f(item, worker)` once for each item of [0, n)        |
///
/// Semantics the compiler cannot check: no two calls with the same `worker` (0..workers()-1) run at once, and all calls
/// have returned when `for_each` returns. Results never depend on the executor.
template <class E>
concept Executor = requires(const E& e, std::int64_t n, detail::ExecutorProbe f) {
  { e.workers() } -> std::convertible_to<std::int32_t>;
  { e.for_each(n, f) } noexcept;
};

namespace detail {
struct ExecutorArchetype {
  [[nodiscard]] std::int32_t workers() const noexcept { return 1; }
  template <class F>
  void for_each(std::int64_t, F&&) const noexcept {}
};
static_assert(Executor<ExecutorArchetype>);
}  // namespace detail

/// Runs the items one after the other on the calling thread.
struct Serial {
  /// Always 1.
  [[nodiscard]] constexpr std::int32_t workers() const noexcept { return 1; }

  /// Calls `f(item, 0)` for each item of [0, n), ascending.
  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept(noexcept(f(n, 0))) {
    for (std::int64_t i = 0; i < n; ++i) { f(i, 0); }
  }
};
static_assert(Executor<Serial>);

}  // namespace kvtrim
