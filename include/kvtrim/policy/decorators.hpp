// SPDX-License-Identifier: Apache-2.0
#pragma once

// A decorator changes the scores of a method and nothing else of it, so `TopRows` takes decorated scores as they are:
// TopRows<PerLayer<KeyDiffParams>>.

#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/score/output_norm_params.hpp>
#include <kvtrim/score/per_layer_params.hpp>
#include <kvtrim/score/value_norm_params.hpp>
#include <kvtrim/score/window_params.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvtrim {

namespace detail {

/// Two names, one after the other.
template <const std::string_view& First, const std::string_view& Second>
struct JoinedName {
  static constexpr auto text = [] {
    std::array<char, First.size() + Second.size()> out{};
    for (std::size_t i = 0; i < First.size(); ++i) { out[i] = First[i]; }
    for (std::size_t i = 0; i < Second.size(); ++i) { out[First.size() + i] = Second[i]; }
    return out;
  }();
  static constexpr std::string_view value{text.data(), text.size()};
};

}  // namespace detail

/// SnapKV's scores, to be decorated: TopRows<ValueNorm<WindowParams>>. Undecorated they are `SnapKVSelector`.
///
/// \par Source
/// Li et al., 2024, arXiv:2404.14469
template <>
struct Method<WindowParams> {
  static constexpr std::string_view name = "window";
  static constexpr std::string_view title = "kvtrim::Window";
  static constexpr int sinks = 0;
  static constexpr int recent = WindowParams{}.window;
  static constexpr void check(const WindowParams& p) { p.check(title); }
  static constexpr std::int64_t window(const WindowParams& p) noexcept {
    return p.own_columns ? 0 : p.window;
  }
};

/// A method with one set of rows a layer.
///
/// \par Source
/// as `PerLayer`
template <class Scores>
struct Method<PerLayer<Scores>> : Method<Scores> {
  static constexpr std::string_view name_prefix = "per_layer_";
  static constexpr std::string_view title_prefix = "kvtrim::PerLayer of ";
  static constexpr std::string_view name =
      detail::JoinedName<name_prefix, Method<Scores>::name>::value;
  static constexpr std::string_view title =
      detail::JoinedName<title_prefix, Method<Scores>::title>::value;
  static constexpr void check(const PerLayer<Scores>& p) {
    p.check(title);
    Method<Scores>::check(p.scores);
  }
  static constexpr std::int64_t window(const PerLayer<Scores>& p) noexcept
    requires requires { Method<Scores>::window(p.scores); }
  {
    return Method<Scores>::window(p.scores);
  }
};

/// A method whose scores are rescaled by the values' lengths.
///
/// \par Source
/// as `ValueNorm`
template <class Scores>
struct Method<ValueNorm<Scores>> : Method<Scores> {
  static constexpr std::string_view name_prefix = "value_norm_";
  static constexpr std::string_view title_prefix = "kvtrim::ValueNorm of ";
  static constexpr std::string_view name =
      detail::JoinedName<name_prefix, Method<Scores>::name>::value;
  static constexpr std::string_view title =
      detail::JoinedName<title_prefix, Method<Scores>::title>::value;
  static constexpr void check(const ValueNorm<Scores>& p) {
    p.check(title);
    Method<Scores>::check(p.scores);
  }
  static constexpr std::int64_t window(const ValueNorm<Scores>& p) noexcept
    requires requires { Method<Scores>::window(p.scores); }
  {
    return Method<Scores>::window(p.scores);
  }
};

/// A method whose scores are rescaled by what the values are worth after the output projection.
///
/// \par Source
/// as `OutputNorm`
template <class Scores>
struct Method<OutputNorm<Scores>> : Method<Scores> {
  static constexpr std::string_view name_prefix = "output_norm_";
  static constexpr std::string_view title_prefix = "kvtrim::OutputNorm of ";
  static constexpr std::string_view name =
      detail::JoinedName<name_prefix, Method<Scores>::name>::value;
  static constexpr std::string_view title =
      detail::JoinedName<title_prefix, Method<Scores>::title>::value;
  static constexpr void check(const OutputNorm<Scores>& p) {
    p.check(title);
    Method<Scores>::check(p.scores);
  }
  static constexpr std::int64_t window(const OutputNorm<Scores>& p) noexcept
    requires requires { Method<Scores>::window(p.scores); }
  {
    return Method<Scores>::window(p.scores);
  }
};

}  // namespace kvtrim
