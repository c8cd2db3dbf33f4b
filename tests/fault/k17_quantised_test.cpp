// SPDX-License-Identifier: Apache-2.0
// Nothing is quantised here: an engine's rows of any format are moved whole, and what belongs to them moves along.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <array>

using namespace kvtrim;
using namespace kvtrim::fault;
using Catch::Matchers::ContainsSubstring;
using test::ByScore;

namespace {

// Rows of `row_bytes` opaque bytes, `heads` of them a token, and any number of side arrays per row. Every byte says which
// sequence, token, head and array it belongs to.
struct QuantisedEngine {
  QuantisedEngine(std::int32_t row_bytes, std::int32_t heads, std::int32_t side_arrays, Rows rows)
      : lengths(std::move(rows)), k(rows_in_pool * index(heads) * index(row_bytes)), v(k) {
    for (auto [plane, memory] : {std::pair{&view.k, &k}, std::pair{&view.v, &v}}) {
      plane->base = memory->data();
      plane->dtype = DType::opaque;
      plane->opaque_row_bytes = row_bytes;
      plane->head_dim = 32;
      plane->head_stride = row_bytes;
      plane->token_stride = std::int64_t{row_bytes} * heads;
      plane->page_stride = page_size * plane->token_stride;
    }
    side.resize(index(side_arrays));
    for (std::size_t i = 0; i < side.size(); ++i) {
      const auto bytes = static_cast<std::int64_t>(i) + 1;  // of 1, 2, 3, ... bytes
      side[i].resize(rows_in_pool * index(heads) * index(bytes));
      planes.push_back({.base = side[i].data(),
                        .page_stride = page_size * heads * bytes,
                        .token_stride = heads * bytes,
                        .head_stride = bytes,
                        .row_bytes = bytes});
    }
    view.page_planes = planes.data();
    view.page_plane_count = side_arrays;
    view.page_size = page_size;
    view.pages = pool_pages;
    view.kv_heads = heads;
    view.sequences = static_cast<std::int32_t>(lengths.size());
    // Pages are dealt out in turn, so sequences lie between each other.
    for (std::int32_t s = 0; s < view.sequences; ++s) {
      for (std::int32_t e = 0; e < per_table; ++e) { ids.push_back(e * view.sequences + s); }
    }
    view.table = {.ids = ids.data(), .row_stride = per_table, .max_pages = per_table};
    view.lengths = lengths.data();
    for_each_byte([](std::byte& at, std::byte right) { at = right; }, {});
  }
  QuantisedEngine(const QuantisedEngine&) = delete;
  QuantisedEngine& operator=(const QuantisedEngine&) = delete;

  // Calls f(byte, what it must be) for all that belongs to live rows; row r of sequence s holds token kept[s][head][r].
  template <class F>
  void for_each_byte(F f, const std::vector<std::vector<Rows>>& kept, std::int32_t first_name = 0) {
    for (std::int32_t s = 0; s < view.sequences; ++s) {
      for (std::int32_t h = 0; h < view.kv_heads; ++h) {
        for (std::int32_t r = 0; r < lengths[index(s)]; ++r) {
          const std::int32_t token = kept.empty() ? r : kept[index(s)][index(h)][index(r)];
          const auto each = [&](std::byte* from, std::int64_t bytes, std::int32_t array) {
            for (std::int32_t i = 0; i < bytes; ++i) {
              f(from[i],
                static_cast<std::byte>(static_cast<std::int32_t>(
                                           noise(token, h, s + first_name, array * 256 + i) * 100) +
                                       128));
            }
          };
          const RowPlace at = place_of({view, SequenceId{s}, {}, HeadId{h}}, r);
          each(view.k.row({}, at.k_page, HeadId{h}, at.slot), view.k.row_bytes(), 0);
          each(view.v.row({}, at.v_page, HeadId{h}, at.slot), view.v.row_bytes(), 1);
          for (std::size_t i = 0; i < planes.size(); ++i) {
            each(planes[i].row({}, at.k_page, HeadId{h}, at.slot),
                 planes[i].row_bytes,
                 2 + static_cast<std::int32_t>(i));
          }
        }
      }
    }
  }

  // Keeps `keep` rows of each head by scores, and says how many bytes are then not those of their token.
  std::int32_t wrong_after(std::int32_t keep, Removal removal, std::int32_t first_name = 0) {
    Input in;
    in.options.removal = removal;
    in.score = [&](std::int32_t s, std::int32_t p, std::int32_t, std::int32_t h) {
      return noise(p, h, s + first_name);
    };
    std::vector<PageId> freed(pool_pages);
    DenseTables sink(view, ids.data(), lengths.data(), nullptr, freed);
    std::vector<std::vector<Rows>> kept;
    {
      Prepared prepared(view, in);
      const PlanRef plan = prepared.plan(ByScore{.keep = keep}, view, in.options);
      REQUIRE(plan.status() == Status::ok);
      bytes_moved = plan.bytes_moved();
      rows_moved = 0;
      for (std::int32_t s = 0; s < view.sequences; ++s) {
        kept.emplace_back(index(view.kv_heads));
        for (std::int32_t h = 0; h < view.kv_heads; ++h) {
          plan.for_each_kept(SequenceId{s}, {}, HeadId{h}, [&](std::int32_t r) {
            kept.back()[index(h)].push_back(r);
          });
          rows_moved += plan.head(SequenceId{s}, {}, HeadId{h}).moved;
        }
      }
    }
    REQUIRE(evict_into(ByScore{.keep = keep}, view, sink, in).report.status == Status::ok);
    std::int32_t wrong = 0;
    for_each_byte(
        [&](std::byte at, std::byte right) { wrong += at == right ? 0 : 1; }, kept, first_name);
    return wrong;
  }

  static constexpr std::int32_t page_size = 4, pool_pages = 16, per_table = 5;
  static constexpr std::size_t rows_in_pool = std::size_t{page_size} * pool_pages;
  Rows ids, lengths;
  std::vector<std::byte> k, v;
  std::vector<std::vector<std::byte>> side;
  std::vector<PagePlane> planes;
  CacheView view;
  std::int64_t bytes_moved = 0, rows_moved = 0;
};

}  // namespace

TEST_CASE("B113 quantised keys are refused where renumbering is asked for, not at the first shift",
          "[quantised][fault]") {
  const Rotation rotation = plain_rotation(32);
  std::vector<std::int32_t> rope_positions(2 * 20);
  for (const DType dtype : {DType::i8, DType::f8e4m3, DType::f8e5m2, DType::opaque}) {
    QuantisedEngine engine(32, 2, 0, {20});
    if (dtype != DType::opaque) { engine.view.k.dtype = dtype, engine.view.k.feature_stride = 1; }
    engine.view.rope_positions = SequencePlane::dense(rope_positions.data(), 1, 2, 20);
    check_layout(engine.view);
    for (const PositionMode mode : {PositionMode::in_cache, PositionMode::sinks_follow}) {
      const std::vector<float> sinks(2 * 32);
      CHECK_THAT(thrown_by([&] {
                   Rerotator(engine.view, rotation.rope(), mode, PristineSinks{sinks.data(), 1});
                 }),
                 ContainsSubstring("keys of dtype " + std::string(to_string(dtype))));
    }
    // Where positions are kept, or the engine rotates on read, no key is read.
    CHECK_NOTHROW(Rerotator(engine.view, rotation.rope(), PositionMode::keep));
    CHECK_NOTHROW(Rerotator::unrotated_cache(engine.view));
    CHECK(engine.wrong_after(7, Removal::stable_pack) == 0);
  }
  // What a cache of the library's own cannot hold, it does not promise.
  CHECK_THAT(thrown_by([] { PagedCache({.pages = 1, .key_dim = 32, .dtype = DType::i8}); }),
             ContainsSubstring("dtype i8"));
}

TEST_CASE("B116 rows of 34 bytes and 4 blocks, and of any odd size, are moved byte for byte",
          "[quantised][fault]") {
  for (const std::int32_t row_bytes : {4 * 34, 34, 20, 18, 17, 13, 3, 1}) {
    INFO("rows of " << row_bytes << " bytes");
    for (const std::int32_t keep : {1, 7, 16, 19}) {
      QuantisedEngine engine(row_bytes, 2, 0, {20});
      CHECK(engine.wrong_after(keep, Removal::stable_pack) == 0);
      CHECK(engine.bytes_moved == engine.rows_moved * 2 * row_bytes);
      CHECK(engine.lengths == Rows{keep});
    }
  }
}

TEST_CASE("B117 rows and scales of two sequences move apart: each is as it is alone",
          "[quantised][fault]") {
  // The fault is the engine's, which computes one scale for tokens of two sequences. Here scales are moved, and must never be
  // moved with the neighbour's rows.
  QuantisedEngine both(34, 2, 2, {20, 18});
  REQUIRE(both.wrong_after(7, Removal::stable_pack) == 0);
  for (std::int32_t s = 0; s < 2; ++s) {
    QuantisedEngine alone(34, 2, 2, {s == 0 ? 20 : 18});
    alone.for_each_byte([](std::byte& at, std::byte right) { at = right; }, {}, s);
    REQUIRE(alone.wrong_after(7, Removal::stable_pack, s) == 0);
    for (std::int32_t h = 0; h < 2; ++h) {
      for (std::int32_t r = 0; r < 7; ++r) {
        const auto bytes = [&](QuantisedEngine& e, std::int32_t sequence) {
          const RowPlace at = place_of({e.view, SequenceId{sequence}, {}, HeadId{h}}, r);
          std::vector<std::byte> all;
          const auto add = [&](const std::byte* from, std::int64_t n) {
            all.insert(all.end(), from, from + n);
          };
          add(e.view.k.row({}, at.k_page, HeadId{h}, at.slot), 34);
          add(e.view.v.row({}, at.v_page, HeadId{h}, at.slot), 34);
          for (const PagePlane& p : e.planes) {
            add(p.row({}, at.k_page, HeadId{h}, at.slot), p.row_bytes);
          }
          return all;
        };
        CHECK(bytes(both, s) == bytes(alone, 0));
      }
    }
  }
}

TEST_CASE("B118 any number of side arrays follows the rows, each counted in the bytes moved",
          "[quantised][fault]") {
  // An array that no view names cannot be known of; a plan's bytes_moved says what it will carry, so an engine can compare
  // it with the bytes of all that it keeps per row.
  for (const std::int32_t arrays : {0, 1, 2, 3, 6}) {
    INFO(arrays << " side arrays");
    QuantisedEngine engine(34, 2, arrays, {20});
    CHECK(engine.wrong_after(7, Removal::stable_pack) == 0);
    const std::int64_t row = 2 * 34 + arrays * (arrays + 1) / 2;  // of 1, 2, 3, ... bytes
    CHECK(engine.bytes_moved == engine.rows_moved * row);
    CHECK(engine.rows_moved > 0);
  }
}
