// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a world of the random-operation test is like, and its keys and values: each says which token, layer and head it
// belongs to.

#include <kvtrim/core/dtype.hpp>
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

constexpr std::int32_t key_dim = 4, value_dim = 3;
using Key = std::array<float, key_dim>;
using Value = std::array<float, value_dim>;

/// What lies in the pools: keys after RoPE, these and the keys before it, or the latter alone (the engine rotates on read).
enum class KeyForm : std::uint8_t { rotated, with_source, plain };

/// What a world is like. PagedCache: everything that is kept is there, and the rest of `foreign` is off.
struct Setup {
  bool foreign = false;
  TableScope scope = TableScope::group;
  std::int32_t page_size = 4, layers = 1, heads = 1, sequences = 2, max_rows = 16, pages = 16;
  PositionMode mode = PositionMode::keep;
  std::int32_t following = 0;  // sinks that follow
  DType dtype = DType::f32;
  KeyForm keys = KeyForm::rotated;
  test::RopeModel rope{4, 0, RopePairs::half_split};
  bool scores = false;  // planes of accumulated scores
  bool scrub = false;   // PagedCache
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
    text += ", " + std::string(to_string(dtype)) + ", rotary " + std::to_string(rope.offset) +
            " to " + std::to_string(rope.offset + rope.dim);
    text += rope.pairs == RopePairs::half_split ? " half_split" : " interleaved";
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
                                   {keys == KeyForm::with_source, " unrotated_keys"},
                                   {keys == KeyForm::plain, " plain_keys"},
                                   {scores, " scores"},
                                   {scrub, " scrub"},
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
  // From numbers of their own: what came first stays as it was, and so do the worlds of inputs that were committed.
  Random more(Random(random).bits() ^ 0x5DEE'CE66'D000'0001U);
  x.rope = std::array{test::RopeModel{4, 0, RopePairs::half_split},
                      test::RopeModel{4, 0, RopePairs::interleaved},
                      test::RopeModel{2, 2, RopePairs::half_split}}[at(more.below(3))];
  x.dtype = std::array{DType::f32, DType::f32, DType::f16, DType::bf16}[at(more.below(4))];
  x.scores = more.below(2) == 0, x.scrub = !x.foreign && more.below(2) == 0;
  if (x.mode == PositionMode::in_cache) {
    x.keys = static_cast<KeyForm>(more.below(3));
    if (x.dtype != DType::f32 && x.keys == KeyForm::rotated) { x.keys = KeyForm::with_source; }
  } else if (more.below(4) == 0) {
    x.keys = KeyForm::with_source;  // moved with the rows, and not read
  }
  return x;
}

/// The same in foreign memory, with all that PagedCache has: the same operations do the same there.
inline Setup in_foreign_memory(Setup x, Random& random) {
  const auto coin = [&] { return random.below(2) == 0; };
  x.foreign = true, x.scrub = false;
  x.lengths = coin(), x.generations = coin(), x.flags = coin(), x.own_memory = coin();
  x.marks = coin();
  return x;
}

inline float rounded(DType dtype, float x) {
  std::byte memory[4];
  store_element(memory, dtype, x);
  return load_element(memory, dtype);
}

/// Key of a token before RoPE: a fixed function of its name.
inline Key plain_key(DType dtype, std::int32_t tag, std::int32_t l, std::int32_t h) {
  Random random(static_cast<std::uint64_t>((tag * 4 + l) * 4 + h));
  Key key{};
  for (float& x : key) { x = rounded(dtype, random.uniform()); }
  return key;
}

/// The same as it must stand in the pool at rope position `rope`.
inline Key key_of(
    const Setup& x, std::int32_t tag, std::int32_t l, std::int32_t h, std::int32_t rope) {
  Key key = plain_key(x.dtype, tag, l, h);
  if (x.keys == KeyForm::plain) { return key; }
  const auto turned = x.rope.rotated(l, {key.begin(), key.end()}, rope);
  for (std::size_t d = 0; d < key.size(); ++d) {
    key[d] = rounded(x.dtype, static_cast<float>(turned[d]));
  }
  return key;
}

/// Value of a token, exact in every dtype.
inline Value value_of(std::int32_t tag, std::int32_t l, std::int32_t h) {
  return {
      static_cast<float>(tag % 128), static_cast<float>(tag / 128), static_cast<float>(l * 8 + h)};
}
inline std::int32_t tag_of(const float* value) {
  return static_cast<std::int32_t>(value[0]) + static_cast<std::int32_t>(value[1]) * 128;
}

/// Rows that a step writes in one layer: [n, kv_heads, dim] each.
struct NewRows {
  std::vector<float> keys, values, plain;
};

}  // namespace kvtrim::random_test
