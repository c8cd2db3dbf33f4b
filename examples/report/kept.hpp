// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which tokens each policy kept. The page paints them itself (report.js), since there are thousands of pictures: one per prompt,
// size, layer and KV head.

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "html.hpp"
#include "quality.hpp"
#include "results.hpp"

namespace report {

namespace detail {

inline constexpr std::size_t most_prompts = 2, most_policies = 8;

// Prompts with what was kept of them, of these sizes only.
inline Json kept_data(const Results& results, std::size_t prompts, const std::set<double>& sizes) {
  Json data = Json::array();
  for (const Tokens& t : results.tokens) {
    std::vector<std::string> policies;
    for (const Kept& k : results.kept) {
      if (k.key == t.key && policies.size() < most_policies &&
          std::find(policies.begin(), policies.end(), k.policy) == policies.end())
        policies.push_back(k.policy);
    }
    Json runs = Json::array();
    for (const double removed : sizes) {
      for (const Kept& k : results.kept) {
        if (k.key != t.key || k.removed != removed ||
            std::find(policies.begin(), policies.end(), k.policy) == policies.end())
          continue;
        runs.push_back({{"policy", k.policy}, {"size", size_name(k.removed)}, {"rows", k.rows}});
      }
    }
    if (runs.empty()) continue;
    data.push_back({{"prompt", t.key.first},
                    {"question", t.key.second ? "question later" : "question known"},
                    {"texts", t.texts},
                    {"facts", t.facts},
                    {"runs", std::move(runs)}});
    if (data.size() == prompts) break;
  }
  return data;
}

// What report.js fills in.
inline constexpr std::string_view kept_markup = R"(<figure class=chart data-chart=kept id=kept>
<noscript><p class=note>This picture is drawn by the page's script, which your browser does not run.</p></noscript>
<div class=controls>
<div><label for=kept-prompt>Prompt</label><select id=kept-prompt></select></div>
<div><label for=kept-size>Rows asked to go</label><select id=kept-size></select></div>
<div><label for=kept-layer>Layer <output id=kept-layer-is for=kept-layer></output></label>
<input type=range id=kept-layer min=1 value=1></div>
<div><label for=kept-head>KV head <output id=kept-head-is for=kept-head></output></label>
<input type=range id=kept-head min=1 value=1></div>
</div>
<h4 class=row>All policies, along the prompt</h4>
<div id=kept-strips></div>
<div class=controls>
<div><label for=kept-policy>Painted over the text</label><select id=kept-policy></select></div>
<p class=legend><span class="tok on">kept</span> <span class=tok>evicted</span>
<span class="tok on fact">fact, kept</span> <span class="tok fact">fact, evicted</span></p>
</div>
<p id=kept-status role=status></p>
<div id=kept-text tabindex=0 role=region aria-label="The prompt's text, painted"></div>
<figcaption>Both sliders move by arrow keys. A bar is a token whose row was kept in this layer and head; the frame
is the fact.)";

}  // namespace detail

/// JSON within a script element: no `<` may stand there as it is.
[[nodiscard]] inline std::string script_json(const Json& data) {
  std::string out;
  for (const char c : data.dump(-1, ' ', false, Json::error_handler_t::replace)) {
    if (c == '<')
      out += "\\u003c";
    else
      out += c;
  }
  return out;
}

/// The figure; empty if there are no lines of kind `kept`.
///
/// \param room  bytes; sizes, then a prompt, are left out until the figure fits, and a sentence says so
[[nodiscard]] inline std::string kept_figure(const Results& results, std::size_t room) {
  std::set<double> sizes;
  for (const Kept& k : results.kept) sizes.insert(k.removed);
  std::size_t prompts = detail::most_prompts;
  std::string note, text;
  Json data;
  for (;;) {
    data = detail::kept_data(results, prompts, sizes);
    if (data.empty()) return "";
    text = script_json(data);
    if (text.size() + 4000 < room) break;
    if (sizes.size() > 1) {
      note += " " + size_name(*sizes.begin()) + " is left out, for the page's size.";
      sizes.erase(sizes.begin());
    } else if (prompts > 1) {
      note += " A prompt is left out, for the page's size.";
      --prompts;
    } else {
      return "<p class=note>What was kept is left out, for the page's size.</p>\n";
    }
  }
  std::set<std::string> policies;
  for (const Kept& k : results.kept) policies.insert(k.policy);
  if (policies.size() > detail::most_policies) {
    note += " The first " + std::to_string(detail::most_policies) + " of " +
            std::to_string(policies.size()) + " policies are shown.";
  }
  return std::string(detail::kept_markup) + escape(note) + R"(</figcaption>
<details class=data><summary>Table: tokens kept in this layer and head</summary>
<div class=scroll tabindex=0 role=region aria-label="tokens kept"><table>
<thead><tr><th scope=col>policy<th scope=col>kept here<th scope=col>of tokens
<th scope=col>of the fact's, kept here<th scope=col>kept, mean over layers and heads</thead>
<tbody id=kept-table></tbody></table></div></details>
</figure>
<script type="application/json" id=kept-data>)" +
         text + "</script>\n";
}

}  // namespace report
