// SPDX-License-Identifier: Apache-2.0
#pragma once

// What many tests evict with is compiled once, in instances.cpp: whoever includes this does not instantiate it again. It only
// saves time; a test that forgets it passes all the same.

#include <kvtrim/evict/evict.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/tova.hpp>

#include "support/by_score.hpp"

#include <cstddef>
#include <span>

// Policies that three test files or more evict with.
#define KVTRIM_INSTANCES_OF(X)      \
  X(AdaKV<SnapKVSelector<>>)        \
  X(External)                       \
  X(Full)                           \
  X(HeavyHitter<>)                  \
  X(KeyDiff)                        \
  X(KeyNorm)                        \
  X(PageSelector<>)                 \
  X(PageSelector<ExternalParams>)   \
  X(PageSelector<KeyDiffParams>)    \
  X(QFilter)                        \
  X(Random)                         \
  X(SnapKVSelector<>)               \
  X(StreamingSink<>)                \
  X(StreamingSink<SinkForm::exact>) \
  X(Tova)                           \
  X(test::ByScore)

// Of one policy, a type that may have commas. `EXTERN` is `extern`, or nothing where it is compiled.
#define KVTRIM_INSTANCES(EXTERN, ...)                                                              \
  EXTERN template std::size_t plan_workspace_bytes(const __VA_ARGS__&, const PlanShape&) noexcept; \
  EXTERN template PlanRef plan(const __VA_ARGS__&,                                                 \
                               const CacheView&,                                                   \
                               const Observation&,                                                 \
                               std::span<std::byte>,                                               \
                               const PlanOptions&,                                                 \
                               const Serial&) noexcept;                                            \
  EXTERN template Report evict(const __VA_ARGS__&,                                                 \
                               PagedCache&,                                                        \
                               const CacheView&,                                                   \
                               const Observation&,                                                 \
                               std::span<std::byte>,                                               \
                               const PlanOptions&,                                                 \
                               const Serial&) noexcept;

// Of no policy.
#define KVTRIM_COMMON_INSTANCES(EXTERN)                                            \
  EXTERN template Status apply(                                                    \
      const PlanRef&, const CacheView&, const Rerotator&, const Serial&) noexcept; \
  EXTERN template Report commit(const PlanRef&, const CacheView&, PagedCache::Sink&) noexcept;

// Tests without assertions (tests/release) compile their own.
#ifndef NDEBUG
namespace kvtrim {

#  define KVTRIM_INSTANCES_ELSEWHERE(...) KVTRIM_INSTANCES(extern, __VA_ARGS__)
KVTRIM_INSTANCES_OF(KVTRIM_INSTANCES_ELSEWHERE)
KVTRIM_COMMON_INSTANCES(extern)

}  // namespace kvtrim
#endif
