// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/executor.hpp>

#include <omp.h>

#include <cstdint>

namespace engine {

/// kvtrim's work items on OpenMP's threads.
struct OpenMp {
  [[nodiscard]] std::int32_t workers() const noexcept { return omp_get_max_threads(); }

  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept {
#pragma omp parallel for schedule(dynamic)
    for (std::int64_t i = 0; i < n; ++i) f(i, static_cast<std::int32_t>(omp_get_thread_num()));
  }
};
static_assert(kvtrim::Executor<OpenMp>);

}  // namespace engine
