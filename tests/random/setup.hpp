// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a world of the random-operation test is like, and its keys: each says which token, layer and head it belongs to.

#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/types.hpp>

#include "support/random.hpp"
#include "support/rope_model.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvtrim::random_test {

using test::at;
using test::Random;
using Ints = std::vector<std::int32_t>;
using Key = std::array<float, 4>;

/// What a world is like. PagedCache: everything that is kept is there, and the rest of `foreign` is off.
struct Setup {
  bool foreign = false;
  TableScope scope = TableScope::group;
  std::int32_t page_size = 4, layers = 1, heads = 1, sequences = 2, max_rows = 16, pages = 16;
  PositionMode mode = PositionMode::keep;
  std::int32_t following = 0;  // sinks that follow
  bool states = true, positions = true, ropes = true, refs = true;
  bool lengths = false;  // besides states
  bool common = false;   // one plane of positions for all heads
  bool generations = false, separate = false, flags = false, padding = false, reserved = false;
  bool own_memory = false;  // layers and heads with tables have memory of their own
  bool marks = false;       // a page plane and a sequence plane more

  std::int32_t tables() const { return tables_of(scope, layers, heads); }
  std::int32_t table_of(std::int32_t l, std::int32_t h) const {
    return kvtrim::table_of(scope, heads, LayerId{l}, HeadId{h});
  }
  std::string words() const {
    std::string text = foreign ? "foreign" : "PagedCache";
    const auto number = [&](const char* name, std::int32_t n) {
      text += std::string(", ") + name + " " + std::to_string(n);
    };
    number("tables", tables()), number("page_size", page_size), number("layers", layers);
    number("kv_heads", heads), number("sequences", sequences), number("max_rows", max_rows);
    number("pages", pages), number("following sinks", following);
    text += ", positions " + std::string(to_string(mode)) + ", with:";
    for (const auto& [is, name] : {std::pair{states, " states"},
                                   {positions, " positions"},
                                   {ropes, " rope_positions"},
                                   {refs, " ref_counts"},
                                   {lengths, " lengths"},
                                   {common, " common_positions"},
                                   {generations, " generations"},
                                   {separate, " v_ids"},
                                   {flags, " flags"},
                                   {padding, " padding"},
                                   {reserved, " reserved"},
                                   {own_memory, " own_memory"},
                                   {marks, " marks"}}) {
      if (is) { text += name; }
    }
    return text;
  }
};

inline Setup random_setup(Random& random) {
  const auto coin = [&] { return random.below(2) == 0; };
  Setup x;
  x.foreign = random.below(5) < 3;
  x.scope = static_cast<TableScope>(random.below(3));
  x.page_size = 1 + random.below(5);
  x.layers = 1 + random.below(2);
  x.heads = 1 + random.below(3);
  x.sequences = 2 + random.below(3);
  x.max_rows = 8 + random.below(25);
  x.mode = static_cast<PositionMode>(random.below(3));
  x.following = x.mode == PositionMode::sinks_follow ? 1 + random.below(3) : 0;
  if (x.foreign) {
    x.states = random.below(3) > 0, x.positions = random.below(3) > 0;
    x.ropes = x.mode != PositionMode::keep || coin();
    x.refs = random.below(3) > 0, x.lengths = !x.states || coin();
    x.common = x.positions && random.below(4) == 0;
    x.generations = coin(), x.separate = coin(), x.flags = coin(), x.padding = coin();
    x.reserved = coin(), x.own_memory = coin(), x.marks = coin();
  }
  const std::int32_t most = x.sequences * x.tables() * (pages_for(x.max_rows, x.page_size) + 1);
  x.pages = 4 + most * (1 + random.below(4)) / 4 * (x.separate ? 2 : 1);
  return x;
}

/// Key of a token before RoPE: a fixed function of its name.
inline std::array<double, 4> plain_key(std::int32_t tag, std::int32_t l, std::int32_t h) {
  Random random(static_cast<std::uint64_t>((tag * 4 + l) * 4 + h));
  std::array<double, 4> key{};
  for (double& x : key) { x = static_cast<double>(random.uniform()); }
  return key;
}
inline double frequency(std::int32_t l, std::int32_t pair) {
  return (l + 1) * (pair == 0 ? 1.0 : 0.125);
}

/// The same at rope position `rope`: pairs (0, 2) and (1, 3).
inline Key key_of(std::int32_t tag, std::int32_t l, std::int32_t h, std::int32_t rope) {
  const auto plain = plain_key(tag, l, h);
  Key key{};
  for (std::size_t j = 0; j < 2; ++j) {
    const double angle = rope * frequency(l, static_cast<std::int32_t>(j));
    const double c = std::cos(angle), s = std::sin(angle);
    key[j] = static_cast<float>(plain[j] * c - plain[j + 2] * s);
    key[j + 2] = static_cast<float>(plain[j] * s + plain[j + 2] * c);
  }
  return key;
}

}  // namespace kvtrim::random_test
