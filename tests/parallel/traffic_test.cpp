// SPDX-License-Identifier: Apache-2.0
#include "../../bench/parallel/traffic.hpp"

#include <kvtrim/parallel/placement.hpp>

#include <cstdint>

#include "catch.hpp"

using kvtrim::Spread;
using kvtrim::Traffic;
using kvtrim_bench::counted;
using kvtrim_bench::Eviction;
using kvtrim_bench::exchange_of;

namespace {

Eviction on(std::int32_t ranks, std::int64_t tokens) {
  Eviction e;
  e.ranks = ranks;
  e.tokens = tokens;
  e.layers = 2;
  e.kv_heads = 2;
  e.query_heads = 4;
  return e;
}

void check(const Eviction& e) {
  CAPTURE(e.ranks, e.tokens, e.kernel, e.pages, e.later);
  const Traffic found = counted(e, static_cast<std::int32_t>(e.tokens) / 4);
  CHECK(found.rounds == exchange_of(e).rounds);
  CHECK(found.bytes == exchange_of(e).own);
}

}  // namespace

TEST_CASE("traffic: 256 ranks exchange what the formula says", "[parallel][traffic]") {
  for (const bool pages : {false, true}) {
    for (const bool later : {false, true}) {
      Eviction e = on(256, 8192);
      e.pages = pages;
      e.later = later;
      e.spread = Spread::page_striped;
      check(e);
      e.kernel = 9;
      check(e);
      e.spread = Spread::contiguous;
      check(e);
    }
  }
}

TEST_CASE("traffic: what is exchanged does not depend on the number of rows",
          "[parallel][traffic]") {
  Eviction few = on(8, 2048), many = on(8, 16384);
  few.kernel = many.kernel = 5;
  const Traffic a = counted(few, 512), b = counted(many, 512);
  CHECK(a.rounds == b.rounds);
  CHECK(a.bytes == b.bytes);
  // Where runs are short, pooling makes it depend.
  few.spread = many.spread = Spread::page_striped;
  CHECK(counted(many, 512).bytes > counted(few, 512).bytes);
}
