// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/table_update.hpp>

#include "catch.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <vector>

using namespace kvtrim;

namespace {

// An engine's tables and counts, in the plainest form.
struct Engine {
  std::vector<std::int32_t> table{4, 9, 2, -1};
  std::map<std::int32_t, int> counts{{4, 1}, {9, 2}, {2, 1}};
  std::int32_t length = 10;

  void update(const TableUpdate& u) noexcept {
    for (std::int32_t e = 0; e < u.pages_before; ++e) { table[static_cast<std::size_t>(e)] = -1; }
    for (std::size_t e = 0; e < u.k_pages.size(); ++e) { table[e] = raw(u.k_pages[e]); }
    length = u.state.live_rows;
  }
  int release(PageId p) noexcept { return --counts[raw(p)] == 0 ? 1 : 0; }  // converts to bool
};
struct NoRelease {
  void update(const TableUpdate&) noexcept {}
};
struct NoUpdate {
  bool release(PageId) noexcept { return true; }
};
struct SaysNothing {
  void update(const TableUpdate&) noexcept {}
  void release(PageId) noexcept {}
};
struct TakesAnInteger {
  void update(const TableUpdate&) noexcept {}
  bool release(std::int32_t) noexcept { return true; }
};

struct MayThrow {
  void update(const TableUpdate&) noexcept {}
  bool release(PageId) { return true; }
};

static_assert(TableSink<Engine>);
static_assert(!TableSink<NoRelease>);
static_assert(!TableSink<NoUpdate>);
static_assert(!TableSink<SaysNothing>);
static_assert(!TableSink<TakesAnInteger>);
static_assert(!TableSink<const Engine>);
static_assert(!TableSink<MayThrow>);

}  // namespace

TEST_CASE("table_update: holds all that an engine needs to store a table and to clear its rest",
          "[table_update]") {
  const std::array pages{PageId{4}, PageId{2}};
  TableUpdate u{};
  u.k_pages = pages;
  u.v_pages = pages;
  u.pages_before = 3;
  u.state.live_rows = 6;

  Engine engine;
  engine.update(u);
  CHECK(engine.table == std::vector<std::int32_t>{4, 2, -1, -1});
  CHECK(engine.length == 6);
  CHECK_FALSE(engine.release(PageId{9}));  // another sequence still holds it
  CHECK(engine.release(PageId{9}));
}
