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

/// `Method` of a decorator: what it decorates, under a longer name, with both parts checked.
template <template <class> class Decorator,
          class Scores,
          const std::string_view& NamePrefix,
          const std::string_view& TitlePrefix>
struct DecoratedMethod : Method<Scores> {
  static constexpr std::string_view name = JoinedName<NamePrefix, Method<Scores>::name>::value;
  static constexpr std::string_view title = JoinedName<TitlePrefix, Method<Scores>::title>::value;
  static constexpr void check(const Decorator<Scores>& p) {
    p.check(title);
    Method<Scores>::check(p.scores);
  }
  static constexpr std::int64_t window(const Decorator<Scores>& p) noexcept
    requires requires { Method<Scores>::window(p.scores); }
  {
    return Method<Scores>::window(p.scores);
  }
};

inline constexpr std::string_view per_layer_name = "per_layer_";
inline constexpr std::string_view per_layer_title = "kvtrim::PerLayer of ";
inline constexpr std::string_view value_norm_name = "value_norm_";
inline constexpr std::string_view value_norm_title = "kvtrim::ValueNorm of ";
inline constexpr std::string_view output_norm_name = "output_norm_";
inline constexpr std::string_view output_norm_title = "kvtrim::OutputNorm of ";

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
struct Method<PerLayer<Scores>>
    : detail::DecoratedMethod<PerLayer, Scores, detail::per_layer_name, detail::per_layer_title> {};

/// A method whose scores are rescaled by the values' lengths.
///
/// \par Source
/// as `ValueNorm`
template <class Scores>
struct Method<ValueNorm<Scores>>
    : detail::
          DecoratedMethod<ValueNorm, Scores, detail::value_norm_name, detail::value_norm_title> {};

/// A method whose scores are rescaled by what the values are worth after the output projection.
///
/// \par Source
/// as `OutputNorm`
template <class Scores>
struct Method<OutputNorm<Scores>>
    : detail::
          DecoratedMethod<OutputNorm, Scores, detail::output_norm_name, detail::output_norm_title> {
};

}  // namespace kvtrim
