// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/evict/rerotate.hpp>

#include <kvtrim/cache/paged_cache.hpp>

#include "catch.hpp"
#include "support/rope_model.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;
using test::rope_of;
using test::RopeModel;

namespace {

PagedCache make_cache(DType dtype, bool unrotated = false, std::int32_t layers = 2) {
  return PagedCache({.pages = 8,
                     .page_size = 4,
                     .layers = layers,
                     .kv_heads = 2,
                     .key_dim = 8,
                     .dtype = dtype,
                     .unrotated_keys = unrotated});
}

}  // namespace

TEST_CASE("rerotate: each layer turns with its own frequencies, unless one array serves all",
          "[rerotate]") {
  for (const bool same : {false, true}) {
    PagedCache cache = make_cache(DType::f32);
    REQUIRE(cache.try_extend(*cache.try_create(), 1) == Status::ok);
    const RopeModel model{8, 0, RopePairs::half_split};
    const auto frequencies = model.frequencies(same ? 1 : 2);
    Rope rope = rope_of(model, frequencies);
    rope.same_for_all_layers = same;
    const CacheView view = cache.view();
    const Rerotator rerotator(view, rope, PositionMode::in_cache);
    const std::array<float, 8> ones{1, 1, 1, 1, 1, 1, 1, 1};
    for (std::int32_t l = 0; l < 2; ++l) {
      std::byte* const at = view.key(SequenceId{0}, LayerId{l}, HeadId{1}, 0);
      store_row(view.k, at, ones.data());
      const HeadRef head{view, SequenceId{0}, LayerId{l}, HeadId{1}};
      rerotator.renumber(head, place_of(head, 0), 0, 7, 3);
      std::array<float, 8> turned{};
      load_row(view.k, at, turned.data());
      const auto expected = model.rotated(same ? 0 : l, {ones.begin(), ones.end()}, -4);
      for (std::size_t d = 0; d < 8; ++d) {
        CHECK(std::abs(static_cast<double>(turned[d]) - expected[d]) < 1e-6);
      }
    }
  }
}

TEST_CASE("rerotate: a key that stays where it is keeps its bits", "[rerotate][edge]") {
  PagedCache cache = make_cache(DType::f32);
  REQUIRE(cache.try_extend(*cache.try_create(), 1) == Status::ok);
  const RopeModel model{};
  const auto frequencies = model.frequencies(2);
  const CacheView view = cache.view();
  const Rerotator rerotator(view, rope_of(model, frequencies), PositionMode::in_cache);
  const std::array<float, 8> key{1e-40F, -0.0F, 3, 4, 5, 6, 7, 8};
  std::byte* const at = view.key(SequenceId{0}, LayerId{0}, HeadId{0}, 0);
  store_row(view.k, at, key.data());
  const HeadRef head{view, SequenceId{0}, LayerId{0}, HeadId{0}};
  rerotator.renumber(head, place_of(head, 0), 0, 12, 12);
  CHECK(std::memcmp(at, key.data(), sizeof key) == 0);
}

TEST_CASE("rerotate: without a mode nothing is bound and nothing rotates", "[rerotate]") {
  const Rerotator none;
  CHECK(none.mode() == PositionMode::keep);
  CHECK_FALSE(none.rotates());
  PagedCache cache = make_cache(DType::bf16);
  const CacheView view = cache.view();
  CHECK_NOTHROW(Rerotator(view, Rope{}, PositionMode::keep));  // whatever the RoPE
  const Rerotator unrotated = Rerotator::unrotated_cache(view);
  CHECK(unrotated.mode() == PositionMode::in_cache);
  CHECK_FALSE(unrotated.rotates());
}

TEST_CASE("rerotate: the constructor refuses with the dtype and the reason", "[rerotate][edge]") {
  const RopeModel model{};
  const auto frequencies = model.frequencies(2);
  const Rope rope = rope_of(model, frequencies);
  PagedCache f32 = make_cache(DType::f32);
  PagedCache bf16 = make_cache(DType::bf16);
  PagedCache f16 = make_cache(DType::f16);
  PagedCache source = make_cache(DType::bf16, true);
  const auto in_cache = PositionMode::in_cache;

  CHECK_NOTHROW(Rerotator(f32.view(), rope, in_cache));
  CHECK_NOTHROW(Rerotator(source.view(), rope, in_cache));
  CHECK_THROWS_WITH(Rerotator(bf16.view(), rope, in_cache),
                    ContainsSubstring("bf16") && ContainsSubstring("1,000 rotations") &&
                        ContainsSubstring("unrotated_keys"));
  CHECK_THROWS_WITH(Rerotator(f16.view(), rope, in_cache), ContainsSubstring("f16"));
  CHECK_THROWS_AS(Rerotator(f16.view(), rope, in_cache), std::invalid_argument);

  CacheView opaque = f32.view();
  opaque.k.dtype = DType::opaque;
  CHECK_THROWS_WITH(Rerotator(opaque, rope, in_cache), ContainsSubstring("opaque"));
  CacheView fp8 = f32.view();
  fp8.k.dtype = DType::f8e4m3;
  CHECK_THROWS_WITH(Rerotator(fp8, rope, in_cache), ContainsSubstring("f8e4m3"));
  CacheView bad_source = source.view();
  bad_source.unrotated_keys.dtype = DType::i8;
  CHECK_THROWS_WITH(Rerotator(bad_source, rope, in_cache), ContainsSubstring("i8"));
  bad_source = source.view();
  bad_source.unrotated_keys.head_dim = 4;
  CHECK_THROWS_WITH(Rerotator(bad_source, rope, in_cache), ContainsSubstring("head_dim 4"));

  for (const auto& [kind, word] : {std::pair{RopeKind::mrope, "M-RoPE"},
                                   std::pair{RopeKind::dynamic_ntk, "NTK"},
                                   std::pair{RopeKind::alibi, "ALiBi"}}) {
    Rope other = rope;
    other.kind = kind;
    CHECK_THROWS_WITH(Rerotator(f32.view(), other, in_cache), ContainsSubstring(word));
  }
  Rope wide = rope;
  wide.offset = 2;
  CHECK_THROWS_WITH(Rerotator(f32.view(), wide, in_cache),
                    ContainsSubstring("[2, 10)") && ContainsSubstring("head_dim 8"));
  Rope odd = rope;
  odd.dim = 3;
  CHECK_THROWS_WITH(Rerotator(f32.view(), odd, in_cache), ContainsSubstring("[0, 3)"));
  Rope few = rope;
  few.inverse_frequencies = rope.inverse_frequencies.first(4);
  CHECK_THROWS_WITH(Rerotator(f32.view(), few, in_cache),
                    ContainsSubstring("4 frequencies for 2 layers of 4 pairs"));
  CHECK_THROWS_WITH(Rerotator(f32.view(), rope, PositionMode::sinks_follow),
                    ContainsSubstring("sinks_follow"));
  CacheView blind = f32.view();
  blind.rope_positions = {};
  CHECK_THROWS_WITH(Rerotator(blind, rope, in_cache), ContainsSubstring("rope positions"));
  CHECK_THROWS_WITH(Rerotator::unrotated_cache(blind), ContainsSubstring("2 KV heads"));
  CacheView common = f32.view();
  common.rope_positions.head_stride = 0;
  CHECK_THROWS_AS(Rerotator(common, rope, in_cache), std::invalid_argument);
  CacheView huge = f32.view();
  huge.k.head_dim = 1032;
  CHECK_THROWS_WITH(Rerotator(huge, rope, in_cache), ContainsSubstring("1032"));
}
