// SPDX-License-Identifier: Apache-2.0
#pragma once

// What walks keys can walk values: they are a plane and a table too.

#include <kvtrim/cache/cache_view.hpp>

namespace kvtrim::detail {

/// A view whose keys are the values of `view`.
[[nodiscard]] inline CacheView value_view(const CacheView& view) noexcept {
  CacheView values = view;
  values.k = view.v;
  values.table.ids += view.table.v_offset;
  values.table.v_offset = 0;
  return values;
}

}  // namespace kvtrim::detail
