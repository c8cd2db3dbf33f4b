// SPDX-License-Identifier: Apache-2.0
#pragma once

// The policies that the programs know. A method is a type in `AnyPolicy` and a row in `methods`, with its word and its
// keys (methods.cpp); each key stands once, beside the member that it sets and its words. Parser, errors, defaults and help
// follow.

#include <kvtrim/core/rope.hpp>
#include <kvtrim/policy/accumulate_params.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/cur_kv.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/tova.hpp>

#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

#include "spec_values.hpp"

namespace program {

using kvtrim::AdaKV;
using kvtrim::CriticalKV;
using kvtrim::HeavyMode;
using kvtrim::PageSelector;
using kvtrim::SinkForm;
using kvtrim::StreamingSink;
using SnapKV = kvtrim::SnapKVSelector<>;
template <HeavyMode Mode>
using H2O = kvtrim::HeavyHitter<kvtrim::AccumulateParams, Mode>;

// clang-format off: a key, its member and its words share a line.

/// Any of the library's policies.
using AnyPolicy = std::variant<
    kvtrim::Full, StreamingSink<SinkForm::pages>, StreamingSink<SinkForm::exact>,
    H2O<HeavyMode::real_drop>, H2O<HeavyMode::greedy>, H2O<HeavyMode::promote>, SnapKV, kvtrim::PyramidKV,
    AdaKV<SnapKV>, AdaKV<kvtrim::ExpectedAttention>, CriticalKV<SnapKV>, CriticalKV<AdaKV<SnapKV>>, kvtrim::ChunkKV<>,
    kvtrim::Tova, kvtrim::KeyDiff, kvtrim::KeyNorm, kvtrim::ExpectedAttention, kvtrim::LagKV, kvtrim::QFilter,
    kvtrim::CurKV, kvtrim::RKV, kvtrim::Random, kvtrim::External,
    PageSelector<kvtrim::WindowParams>, PageSelector<kvtrim::KeyDiffParams>,
    PageSelector<kvtrim::AccumulateParams>, PageSelector<kvtrim::ExternalParams>>;

/// What a policy is made for.
struct Purpose {
  std::int32_t keep = 1024;         ///< rows
  SinkForm form = SinkForm::pages;  ///< of `streaming` if the SPEC names none
  kvtrim::Rope rope{};              ///< for `expected`; its frequencies must outlive the policy
};

/// Reads the keys of a policy, each into the member that holds its default, and makes it.
using Make = AnyPolicy (*)(SpecValues& key, const Purpose& to);

/// A policy's row.
struct Method {
  std::string_view name;
  Make make;
  std::string_view note = "";  ///< what `--help` says after the keys
  bool once = false;           ///< acts at the end of the prompt only
};

/// All policies.
[[nodiscard]] std::span<const Method> methods() noexcept;

// clang-format on

}  // namespace program
