// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/executor.hpp>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvtrim::test {

/// Runs items on real threads, in unspecified order, the last ones first.
struct Threads {
  std::int32_t count = 3;
  std::int32_t workers() const { return count; }
  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept {
    std::atomic<std::int64_t> next{0};
    std::vector<std::thread> threads;
    for (std::int32_t w = 0; w < count; ++w) {
      threads.emplace_back([&, w] {
        for (std::int64_t i = next++; i < n; i = next++) { f(n - 1 - i, w); }
      });
    }
    for (std::thread& t : threads) { t.join(); }
  }
};
static_assert(Executor<Threads>);

}  // namespace kvtrim::test
