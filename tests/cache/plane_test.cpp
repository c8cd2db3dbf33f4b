// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/plane.hpp>

#include "catch.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <vector>

using namespace kvtrim;

namespace {

static_assert(std::is_trivially_copyable_v<Plane>);
static_assert(std::is_trivially_copyable_v<PagePlane> &&
              std::is_trivially_copyable_v<SequencePlane>);

// B129: an engine whose strides are 32 bits wide would not compile against these.
static_assert(std::is_same_v<decltype(Plane::layer_stride), std::int64_t>);
static_assert(std::is_same_v<decltype(Plane::page_stride), std::int64_t>);
static_assert(std::is_same_v<decltype(Plane::token_stride), std::int64_t>);
static_assert(std::is_same_v<decltype(Plane::head_stride), std::int64_t>);
static_assert(std::is_same_v<decltype(Plane::feature_stride), std::int64_t>);
static_assert(std::is_same_v<decltype(Plane::pack_stride), std::int64_t>);
static_assert(std::is_same_v<decltype(SequencePlane::sequence_stride), std::int64_t>);
static_assert(std::is_same_v<decltype(PagePlane::page_stride), std::int64_t>);

// Index of an element of a C-order array.
template <std::size_t Rank>
std::int64_t c_order(const std::array<std::int64_t, Rank>& extents,
                     const std::array<std::int64_t, Rank>& at) {
  std::int64_t index = 0;
  for (std::size_t i = 0; i < Rank; ++i) { index = index * extents[i] + at[i]; }
  return index;
}

constexpr std::int32_t pages = 3;
constexpr std::int32_t page_size = 5;
constexpr std::int32_t heads = 4;
constexpr std::int32_t dim = 16;

// Compares each element's address with index(page, slot, head, feature) of the plain array.
template <class Index>
std::int64_t misplaced(const Plane& plane, const std::byte* data, Index index) {
  std::int64_t wrong = 0;
  for (std::int32_t p = 0; p < pages; ++p) {
    for (std::int32_t t = 0; t < page_size; ++t) {
      for (std::int32_t h = 0; h < heads; ++h) {
        const std::byte* const row = plane.row(LayerId{0}, PageId{p}, HeadId{h}, Slot{t});
        for (std::int32_t d = 0; d < dim; ++d) {
          const std::int64_t bytes = index(p, t, h, d) * element_bytes(plane.dtype);
          if (row + plane.feature_offset(d) != data + bytes) { ++wrong; }
        }
      }
    }
  }
  return wrong;
}

}  // namespace

TEST_CASE("plane: each factory places elements as its C-order array does, in every dtype",
          "[plane]") {
  std::vector<std::byte> memory(pages * page_size * heads * dim * 4);
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::i8}) {
    const PlaneShape shape{page_size, heads, dim, type};
    CHECK(misplaced(Plane::nhd(memory.data(), shape),
                    memory.data(),
                    [](std::int64_t p, std::int64_t t, std::int64_t h, std::int64_t d) {
                      return c_order<4>({pages, page_size, heads, dim}, {p, t, h, d});
                    }) == 0);
    CHECK(misplaced(Plane::hnd(memory.data(), shape),
                    memory.data(),
                    [](std::int64_t p, std::int64_t t, std::int64_t h, std::int64_t d) {
                      return c_order<4>({pages, heads, page_size, dim}, {p, h, t, d});
                    }) == 0);
    CHECK(misplaced(Plane::transposed(memory.data(), shape),
                    memory.data(),
                    [](std::int64_t p, std::int64_t t, std::int64_t h, std::int64_t d) {
                      return c_order<4>({pages, heads, dim, page_size}, {p, h, d, t});
                    }) == 0);
    const std::int64_t x = 16 / element_bytes(type);
    CHECK(misplaced(Plane::vllm_packed_keys(memory.data(), shape),
                    memory.data(),
                    [x](std::int64_t p, std::int64_t t, std::int64_t h, std::int64_t d) {
                      return c_order<5>({pages, heads, dim / x, page_size, x},
                                        {p, h, d / x, t, d % x});
                    }) == 0);
  }
}

TEST_CASE("plane: layers lie at a stride or in buffers of their own", "[plane]") {
  std::vector<std::byte> memory(1000);
  Plane plane = Plane::nhd(memory.data(), {2, 3, 4, DType::f16});
  plane.layer_stride = 400;
  CHECK(plane.row(LayerId{2}, PageId{1}, HeadId{1}, Slot{1}) == memory.data() + 800 + 48 + 24 + 8);

  std::vector<std::byte> other(100);
  const std::array<std::byte*, 2> bases{memory.data() + 10, other.data()};
  plane.layer_bases = bases.data();
  plane.base = nullptr;
  CHECK(plane.row(LayerId{0}, PageId{0}, HeadId{1}, Slot{0}) == memory.data() + 18);
  CHECK(plane.row(LayerId{1}, PageId{1}, HeadId{0}, Slot{0}) == other.data() + 48);
}

TEST_CASE("plane: rows come back as written through every layout, and neighbours keep their bytes",
          "[plane]") {
  const PlaneShape shape{page_size, heads, dim, DType::f32};
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    PlaneShape typed = shape;
    typed.dtype = type;
    std::vector<std::byte> memory(static_cast<std::size_t>(pages * page_size * heads * dim) * 4);
    for (const Plane& plane : {Plane::nhd(memory.data(), typed),
                               Plane::hnd(memory.data(), typed),
                               Plane::transposed(memory.data(), typed),
                               Plane::vllm_packed_keys(memory.data(), typed)}) {
      std::fill(memory.begin(), memory.end(), std::byte{0x7F});
      std::vector<float> row(dim);
      for (std::int32_t d = 0; d < dim; ++d) {
        row[static_cast<std::size_t>(d)] = static_cast<float>(d - 3) * 0.25F;  // exact in all
      }
      std::byte* const at = plane.row(LayerId{0}, PageId{1}, HeadId{2}, Slot{3});
      store_row(plane, at, row.data());
      std::vector<float> back(dim, -1);
      load_row(plane, at, back.data());
      CHECK(back == row);

      std::byte* const to = plane.row(LayerId{0}, PageId{2}, HeadId{0}, Slot{4});
      copy_row(plane, at, to);
      std::fill(back.begin(), back.end(), -1.0F);
      load_row(plane, to, back.data());
      CHECK(back == row);

      std::size_t changed = 0;
      for (const std::byte b : memory) { changed += b != std::byte{0x7F} ? 1U : 0U; }
      CHECK(changed <= 2U * static_cast<std::size_t>(plane.row_bytes()));
    }
  }
}

TEST_CASE("plane: a copied row keeps its bits, NaN payloads and opaque blocks included",
          "[plane][nan]") {
  std::vector<std::byte> memory(200);
  for (std::size_t i = 0; i < memory.size(); ++i) {
    memory[i] = static_cast<std::byte>(i * 7 + 0xF0);
  }
  const auto before = memory;
  Plane plane;
  plane.base = memory.data();
  plane.dtype = DType::opaque;
  plane.opaque_row_bytes = 18;  // a block of 32 values, as Q4_0 has
  plane.token_stride = 20;
  CHECK(plane.contiguous_rows());
  CHECK(plane.row_bytes() == 18);
  copy_row(plane,
           plane.row(LayerId{0}, PageId{0}, HeadId{0}, Slot{1}),
           plane.row(LayerId{0}, PageId{0}, HeadId{0}, Slot{4}));
  CHECK(std::memcmp(memory.data() + 80, before.data() + 20, 18) == 0);
  CHECK(std::memcmp(memory.data(), before.data(), 80) == 0);
  CHECK(std::memcmp(memory.data() + 98, before.data() + 98, 102) == 0);

  Plane strided = Plane::transposed(memory.data(), {4, 1, 6, DType::f16});
  CHECK_FALSE(strided.contiguous_rows());
  const auto start = memory;
  copy_row(strided,
           strided.row(LayerId{0}, PageId{0}, HeadId{0}, Slot{0}),
           strided.row(LayerId{0}, PageId{0}, HeadId{0}, Slot{3}));
  for (std::size_t d = 0; d < 6; ++d) {
    CHECK(std::memcmp(memory.data() + d * 8 + 6, start.data() + d * 8, 2) == 0);
    CHECK(std::memcmp(memory.data() + d * 8, start.data() + d * 8, 6) == 0);
  }
}

TEST_CASE("plane: an impossible shape is refused with its numbers", "[plane][edge]") {
  using Catch::Matchers::ContainsSubstring;
  std::byte data{};
  for (const auto factory :
       {&Plane::nhd, &Plane::hnd, &Plane::transposed, &Plane::vllm_packed_keys}) {
    CHECK_THROWS_AS(factory(&data, {0, 1, 8, DType::f16}), std::invalid_argument);
    CHECK_THROWS_AS(factory(&data, {1, 0, 8, DType::f16}), std::invalid_argument);
    CHECK_THROWS_AS(factory(&data, {1, 1, 0, DType::f16}), std::invalid_argument);
    CHECK_THROWS_WITH(factory(&data, {16, -3, 8, DType::f16}),
                      ContainsSubstring("kv_heads -3") && ContainsSubstring("page_size 16"));
    CHECK_THROWS_WITH(factory(&data, {16, 1, 8, DType::opaque}), ContainsSubstring("opaque"));
  }
  CHECK_THROWS_WITH(Plane::vllm_packed_keys(&data, {16, 1, 12, DType::f16}),
                    ContainsSubstring("head_dim 12") && ContainsSubstring("8"));
  CHECK_NOTHROW(Plane::vllm_packed_keys(&data, {16, 1, 12, DType::f32}));
}

TEST_CASE("plane: the factories' strides do not wrap where a page is larger than 2^32 bytes",
          "[plane][edge]") {
  std::byte data{};
  const PlaneShape large{1 << 30, 8, 128, DType::f32};
  constexpr std::int64_t row = 512;
  CHECK(Plane::nhd(&data, large).page_stride == (row << 33));
  CHECK(Plane::nhd(&data, large).token_stride == 8 * row);
  CHECK(Plane::hnd(&data, large).head_stride == (row << 30));
  CHECK(Plane::transposed(&data, large).feature_stride == std::int64_t{1} << 32);
  CHECK(Plane::transposed(&data, large).feature_offset(127) == std::int64_t{127} << 32);
  CHECK(Plane::vllm_packed_keys(&data, large).pack_stride == std::int64_t{1} << 34);
  CHECK(Plane::vllm_packed_keys(&data, large).feature_offset(127) == (std::int64_t{31} << 34) + 12);
  CHECK(SequencePlane::dense(&data, 100, 100, 1 << 30).sequence_stride ==
        (std::int64_t{10'000} << 30));
}

TEST_CASE("plane: side data of pages lies at its strides, and a stride of 0 is common", "[plane]") {
  std::vector<std::byte> memory(500);
  PagePlane plane;
  plane.base = memory.data();
  plane.layer_stride = 200;
  plane.page_stride = 40;
  plane.token_stride = 8;
  plane.row_bytes = 4;
  CHECK(plane.row(LayerId{1}, PageId{3}, HeadId{7}, Slot{2}) == memory.data() + 200 + 120 + 16);
  plane.head_stride = 4;
  CHECK(plane.row(LayerId{1}, PageId{3}, HeadId{1}, Slot{2}) == memory.data() + 200 + 120 + 16 + 4);
}

TEST_CASE("plane: a row of 2^30 f32 features is 2^32 bytes long", "[plane][edge]") {
  Plane plane;
  plane.head_dim = 1 << 30;
  CHECK(plane.row_bytes() == std::int64_t{1} << 32);
  const Plane nhd = Plane::nhd(nullptr, {1, 2, 1 << 30, DType::f32});
  CHECK(nhd.head_stride == std::int64_t{1} << 32);
  CHECK(nhd.page_stride == std::int64_t{1} << 33);
}
