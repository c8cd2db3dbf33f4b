// SPDX-License-Identifier: Apache-2.0
// Kept rows of heads that share a budget against kvpress 0.5.5's masks. The files: tests/data/golden.
#include "golden_file.hpp"

#include <kvtrim/budget/rows.hpp>
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/instances.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using namespace kvtrim;
using golden::Layer;

namespace {

constexpr SequenceId seq{0};
constexpr LayerId layer{0};

SnapKVSelector<>::Params window_32(const Layer& l, const std::string& removed) {
  return {.window = 32, .budget = kvpress_rows(l.tokens, std::stod(removed)), .kernel = 5};
}

// Evicts, and says which rows of each head were kept, as a mask over the prompt.
template <class P>
std::vector<double> mask_after(const P& policy, const Layer& l, std::int32_t page_size) {
  PagedCache cache = l.make_cache(page_size, false, TableScope::head);
  l.extend(cache, 0, l.tokens);
  const std::vector<float> w_o = l.file["W_O"].floats();
  Observation obs;
  obs.queries = l.block(l.tokens - 32, 32, false);
  obs.output = {.data = w_o.data(),
                .query_heads = l.heads,
                .value_dim = l.dim,
                .hidden = l.file["W_O"].shape[2]};
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(cache.view(), obs)));
  const std::int32_t used = cache.pool().in_use();
  const Report report = evict(policy, cache, cache.view(), obs, workspace);
  CHECK(report.status == Status::ok);
  std::vector<double> mask;
  std::int32_t pages = 0;
  for (std::int32_t h = 0; h < l.kv_heads; ++h) {
    std::vector<double> head(static_cast<std::size_t>(l.tokens), 0.0);
    const std::int32_t live = cache.live_rows(seq, layer, HeadId{h});
    for (std::int32_t r = 0; r < live; ++r) {
      head[static_cast<std::size_t>(raw(cache.view().position(seq, layer, HeadId{h}, r)))] = 1;
    }
    mask.insert(mask.end(), head.begin(), head.end());
    pages += pages_for(live, page_size);
  }
  CHECK(used - report.released_pages == pages);  // what the heads do not use is free
  CHECK(cache.pool().in_use() == pages);
  return mask;
}

}  // namespace

TEST_CASE("golden: AdaKV over SnapKV keeps kvpress's rows, and frees the pages of the others",
          "[golden][policy][parity]") {
  std::int32_t compared = 0;
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    for (const char* const removed : {"0.5", "0.75"}) {
      const std::string name = std::string("mask_adakv_snapkv_w32_k5_") + removed;
      if (!l.file.has(name)) { continue; }
      for (const std::int32_t page_size : {1, 4, 16}) {
        auto inner = window_32(l, removed);
        inner.sums = page_size == 4 ? Sums::exact : Sums::floating;
        const AdaKV<SnapKVSelector<>> policy({.inner = inner});
        INFO(shape << ", page size " << page_size << ", removed " << removed);
        CHECK(mask_after(policy, l, page_size) == l.file[name].values);
        ++compared;
      }
    }
  }
  CHECK(compared == 3 * 5);  // mha has none at 0.75
}

TEST_CASE("golden: CriticalKV over AdaKV over SnapKV keeps kvpress's rows",
          "[golden][policy][parity]") {
  std::int32_t compared = 0;
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    for (const char* const removed : {"0.5", "0.75"}) {
      const std::string name = std::string("mask_critical_adakv_snapkv_w32_k5_") + removed;
      if (!l.file.has(name)) { continue; }
      for (const std::int32_t page_size : {1, 4, 16}) {
        auto inner = window_32(l, removed);
        inner.sums = page_size == 4 ? Sums::exact : Sums::floating;
        const CriticalKV<AdaKV<SnapKVSelector<>>> policy({.inner = {.inner = inner}});
        INFO(shape << ", page size " << page_size << ", removed " << removed);
        CHECK(mask_after(policy, l, page_size) == l.file[name].values);
        ++compared;
      }
    }
  }
  CHECK(compared == 3 * 5);
}
