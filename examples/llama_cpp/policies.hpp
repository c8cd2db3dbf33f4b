// SPDX-License-Identifier: Apache-2.0
#pragma once

// Policies by the words of `evaluate --policy`, as far as a cache can serve them whose cells hold all layers and heads.

#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <variant>

#include "program/policy_spec.hpp"
#include "session.hpp"

namespace llama_example {

/// Whether a policy drops whole pages, by what llama.cpp shows.
template <class P>
inline constexpr bool serves =
    std::same_as<P, kvtrim::PageSelector<kvtrim::WindowParams>> ||
    std::same_as<P, kvtrim::PageSelector<kvtrim::AccumulateParams>> ||
    std::same_as<P, kvtrim::StreamingSink<>> || std::same_as<P, kvtrim::Full>;

/// What a policy needs to see.
/// \throws std::invalid_argument if llama.cpp's cache cannot serve it; the text says why
[[nodiscard]] inline kvtrim::Needs needs_of(const program::PolicySpec& spec) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("policy '" + spec.text() + "' cannot be used here: " + why);
  };
  const auto visit = [&]<class P>(const P& policy) {
    if constexpr (!serves<P>) {
      refuse(
          "it keeps other rows in each layer or KV head, moves rows, or reads keys or logits, but "
          "a cell of llama.cpp holds a token's rows of all of them, stays where it is and shows "
          "probabilities only; use page:unit=group, page:score=h2o,unit=group or streaming");
    } else if constexpr (kvtrim::PagePolicy<P>) {
      if (policy.unit() != kvtrim::PageUnit::per_group) {
        refuse(
            "it has a budget per layer or KV head, but a cell of llama.cpp holds a token's row "
            "of all of them; use unit=group");
      }
    }
    return kvtrim::needs(policy);
  };
  return std::visit(visit, spec.make(1024, kvtrim::SinkForm::pages));
}

/// Lets the policy keep `keep` rows of a sequence.
///
/// \param last  rows at the end that stay whatever they score; they count among `keep`
inline kvtrim::Report evict(Session& session,
                            const program::PolicySpec& spec,
                            llama_seq_id s,
                            std::int32_t keep,
                            std::int64_t last = 0) {
  const auto visit = [&]<class P>(const P& policy) -> kvtrim::Report {
    if constexpr (serves<P> && kvtrim::PagePolicy<P>) {
      typename P::Params params = policy.params();
      params.window = std::max(params.window, last);
      params.budget = std::max(params.budget, params.window + params.sinks);
      return session.evict(P(params), s, keep);
    } else if constexpr (serves<P>) {
      return session.evict(policy, s, keep);
    } else {
      throw std::invalid_argument(spec.text());  // `needs_of` refused it
    }
  };
  return std::visit(visit, spec.make(keep, kvtrim::SinkForm::pages));
}

}  // namespace llama_example
