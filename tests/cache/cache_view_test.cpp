// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/cache/move.hpp>

#include "catch.hpp"
#include "support/generation.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using namespace kvtrim;

namespace {

using Index = std::int64_t;

constexpr std::int32_t sequences = 3;
constexpr std::int32_t heads = 3;
constexpr float poison = -7777.0F;

// Index of an element of a C-order array; the plain arithmetic that strides are compared with.
Index c_order(std::initializer_list<Index> extents, std::initializer_list<Index> at) {
  Index index = 0;
  auto i = at.begin();
  for (const Index extent : extents) { index = index * extent + *i++; }
  return index;
}

// Every element says what it belongs to. Exact in float.
float code(bool of_values, Index s, Index l, Index h, Index row, Index d) {
  return static_cast<float>(c_order({2, 4, 4, 4, 64, 16}, {of_values ? 1 : 0, s, l, h, row, d}) +
                            1);
}

// Where an engine keeps element (layer, page, head, slot, feature), as an index into its array.
using Place = std::function<Index(Index l, Index p, Index h, Index t, Index d)>;

enum class Tables { dense, csr, split };

// An engine: arrays, tables, lengths, and the view of them under test.
struct Engine {
  std::string name;
  std::int32_t page_size = 4;
  std::int32_t pages = 64;
  std::int32_t layers = 2;
  std::int32_t key_dim = 8;
  std::int32_t value_dim = 8;
  TableScope scope = TableScope::group;
  Tables tables = Tables::dense;
  bool lengths_by_layer_first = false;  // KV-Compress: [layers, sequences, heads]
  Index elements = 0;                   // of one array; of both where they are one
  bool one_array = false;
  Place k_at, v_at;
  CacheView view;
  std::vector<std::int32_t> padding;  // rows, [sequences]

  std::vector<float> k_memory, v_memory;
  std::vector<std::int32_t> ids, indptr, last, lengths;
  std::vector<SequenceState> states;
  std::vector<std::byte*> layer_bases;

  float* k_data() { return k_memory.data(); }
  float* v_data() { return one_array ? k_memory.data() : v_memory.data(); }

  // Strides in elements; `v_offset` is where the values begin in a common array.
  void planes(std::array<Index, 5> k, std::array<Index, 5> v, Index v_offset = 0) {
    k_memory.assign(static_cast<std::size_t>(elements), poison);
    if (!one_array) { v_memory.assign(static_cast<std::size_t>(elements), poison); }
    const auto plane = [](float* data, std::array<Index, 5> e, std::int32_t dim) {
      Plane p;
      p.base = reinterpret_cast<std::byte*>(data);
      p.layer_stride = e[0] * 4;
      p.page_stride = e[1] * 4;
      p.head_stride = e[2] * 4;
      p.token_stride = e[3] * 4;
      p.feature_stride = e[4] * 4;
      p.head_dim = dim;
      return p;
    };
    view.k = plane(k_data(), k, key_dim);
    view.v = plane(v_data() + v_offset, v, value_dim);
  }

  std::int32_t tables_per_sequence() const {
    return scope == TableScope::group ? 1 : scope == TableScope::layer ? layers : layers * heads;
  }
  std::int32_t table_of(std::int32_t l, std::int32_t h) const {
    return scope == TableScope::group ? 0 : scope == TableScope::layer ? l : l * heads + h;
  }

  // Ragged: none, one page and a part, whole pages; per table if tables are per layer or head.
  std::int32_t live(std::int32_t s, std::int32_t t) const {
    const std::array<std::int32_t, 3> base{page_size + 2, 0, 2 * page_size};
    return (base[static_cast<std::size_t>(s)] + t * (s + 1)) % (3 * page_size + 1);
  }

  std::int32_t pad(std::int32_t s) const {
    return padding.empty() ? 0 : padding[static_cast<std::size_t>(s)];
  }

  // Pages of (sequence, table): those of V differ where they have their own ids.
  std::vector<std::vector<std::int32_t>> k_pages, v_pages;

  void finish(std::uint32_t seed) {
    view.page_size = page_size;
    view.pages = pages;
    view.kv_heads = heads;
    view.layers = layers;
    view.sequences = sequences;
    view.scope = scope;
    if (!padding.empty()) { view.first_rows = padding.data(); }
    std::vector<std::int32_t> pool(static_cast<std::size_t>(pages - 1));
    std::iota(pool.begin(), pool.end(), 1);  // page 0 stays poison
    std::shuffle(pool.begin(), pool.end(), std::mt19937(seed));
    std::size_t next = 0;
    const std::int32_t count = tables_per_sequence();
    const std::int32_t wild =
        std::numeric_limits<std::int32_t>::max();  // ends the process if followed
    constexpr std::int32_t room = 16;
    const std::int32_t width = tables == Tables::split ? 2 * room : room;
    ids.clear();
    if (tables != Tables::csr) {
      ids.assign(static_cast<std::size_t>(sequences * count * width), wild);
    }
    indptr.assign(1, 0);
    lengths.assign(static_cast<std::size_t>(sequences * count), -1);
    k_pages.resize(static_cast<std::size_t>(sequences * count));
    v_pages.resize(k_pages.size());
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (std::int32_t t = 0; t < count; ++t) {
        const auto at = static_cast<std::size_t>(s * count + t);
        const std::int32_t row = lengths_by_layer_first
                                     ? (t / heads * sequences + s) * heads + t % heads
                                     : s * count + t;
        const std::int32_t used =
            live(s, t) == 0 ? 0 : (live(s, t) + pad(s) + page_size - 1) / page_size;
        lengths[static_cast<std::size_t>(row)] = live(s, t);
        for (std::int32_t e = 0; e < used; ++e) {
          REQUIRE(next + 2 < pool.size());
          const std::int32_t k = pool[next++];
          const std::int32_t v = tables == Tables::split ? pool[next++] : k;
          k_pages[at].push_back(k);
          v_pages[at].push_back(v);
          if (tables == Tables::csr) {
            ids.push_back(k);
          } else {
            const auto entry = static_cast<std::size_t>(row * width + e);
            const std::int32_t flag = tables == Tables::split && e % 2 == 1
                                          ? std::numeric_limits<std::int32_t>::min()
                                          : 0;
            ids[entry] = k | flag;
            if (tables == Tables::split) { ids[entry + room] = v | flag; }
          }
        }
        indptr.push_back(static_cast<std::int32_t>(ids.size()));
        last.push_back(live(s, t) == 0 ? 0 : (live(s, t) - 1) % page_size + 1);
      }
    }
    view.table.ids = ids.data();
    if (lengths_by_layer_first) {
      view.table.rows = {heads, sequences * heads, 1};
    } else {
      view.table.rows = {count,
                         scope == TableScope::group ? 0 : count / layers,
                         scope == TableScope::head ? 1 : 0};
    }
    if (tables == Tables::csr) {
      view.table.indptr = indptr.data();
      view.last_page_len = last.data();
    } else {
      view.table.row_stride = width;
      view.table.max_pages = room;
      view.lengths = lengths.data();
      view.length_rows = view.table.rows;
      if (tables == Tables::split) {
        view.table.v_offset = room;
        view.table.id_mask = std::numeric_limits<std::int32_t>::max();
      }
    }
    fill();
  }

  // Writes every live row by the array's own indices.
  void fill() {
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (std::int32_t l = 0; l < layers; ++l) {
        for (std::int32_t h = 0; h < heads; ++h) {
          const auto at = static_cast<std::size_t>(s * tables_per_sequence() + table_of(l, h));
          for (std::int32_t r = 0; r < live(s, table_of(l, h)); ++r) {
            const std::int32_t place = r + pad(s);
            const auto entry = static_cast<std::size_t>(place / page_size);
            const Index slot = place % page_size;
            for (Index d = 0; d < key_dim; ++d) {
              float& x = k_data()[k_at(l, k_pages[at][entry], h, slot, d)];
              REQUIRE(x == poison);  // the reference itself does not overlap
              x = code(false, s, l, h, r, d);
            }
            for (Index d = 0; d < value_dim; ++d) {
              float& x = v_data()[v_at(l, v_pages[at][entry], h, slot, d)];
              REQUIRE(x == poison);
              x = code(true, s, l, h, r, d);
            }
          }
        }
      }
    }
  }

  // Reads every live row through the view; finds foreign elements, and rows that are missing or visited twice.
  Index misread() const {
    Index wrong = 0;
    std::vector<float> row(16);
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (std::int32_t l = 0; l < layers; ++l) {
        for (std::int32_t h = 0; h < heads; ++h) {
          const SequenceId sequence{s};
          const LayerId layer{l};
          const HeadId head{h};
          const std::int32_t rows = live(s, table_of(l, h));
          wrong += view.live_rows(sequence, layer, head) == rows ? 0 : 1;
          std::int32_t next = 0;
          for_each_run({view, sequence, layer, head}, [&](const Run& run) {
            wrong +=
                run.row == next && run.count >= 1 && raw(run.slot) + run.count <= page_size ? 0 : 1;
            for (std::int32_t i = 0; i < run.count; ++i, ++next) {
              const Slot slot{raw(run.slot) + i};
              std::byte* const key = view.k.row(layer, run.k_page, head, slot);
              std::byte* const value = view.v.row(layer, run.v_page, head, slot);
              wrong += key == view.key(sequence, layer, head, next) ? 0 : 1;
              wrong += value == view.value(sequence, layer, head, next) ? 0 : 1;
              load_row(view.k, key, row.data());
              for (Index d = 0; d < key_dim; ++d) {
                wrong += row[static_cast<std::size_t>(d)] == code(false, s, l, h, next, d) ? 0 : 1;
              }
              load_row(view.v, value, row.data());
              for (Index d = 0; d < value_dim; ++d) {
                wrong += row[static_cast<std::size_t>(d)] == code(true, s, l, h, next, d) ? 0 : 1;
              }
            }
          });
          wrong += next == rows ? 0 : 1;
        }
      }
    }
    return wrong;
  }
};

void check_engine(Engine& engine, std::uint32_t seed = 1) {
  INFO(engine.name);
  engine.finish(seed);
  CHECK_NOTHROW(check_layout(engine.view));
  std::vector<std::uint64_t> scratch(static_cast<std::size_t>(check_tables_words(engine.pages)));
  CHECK(check_tables(engine.view, scratch).status == Status::ok);
  CHECK(engine.misread() == 0);
}

Engine sized(std::string name, Index elements_per_page_and_layer, bool one_array) {
  Engine e;
  e.name = std::move(name);
  e.elements = elements_per_page_and_layer;
  e.one_array = one_array;
  return e;
}

constexpr Index H = heads;

}  // namespace

TEST_CASE("cache_view: NHD and HND with layers stacked, K and V of different head dims",
          "[cache_view]") {
  for (const Tables tables : {Tables::dense, Tables::csr}) {
    for (const bool nhd : {true, false}) {
      Engine e;
      e.name = nhd ? "NHD" : "HND";
      e.value_dim = 5;
      e.tables = tables;
      const Index N = e.page_size, P = e.pages, D = e.key_dim, Dv = e.value_dim;
      e.elements = 2 * P * N * H * D;
      e.planes({}, {});
      const auto factory = nhd ? &Plane::nhd : &Plane::hnd;
      e.view.k = factory(e.k_data(), {e.page_size, heads, e.key_dim, DType::f32});
      e.view.v = factory(e.v_data(), {e.page_size, heads, e.value_dim, DType::f32});
      e.view.k.layer_stride = P * N * H * D * 4;
      e.view.v.layer_stride = P * N * H * Dv * 4;
      const auto place = [=](Index dim) -> Place {
        return [=](Index l, Index p, Index h, Index t, Index d) {
          return nhd ? c_order({2, P, N, H, dim}, {l, p, t, h, d})
                     : c_order({2, P, H, N, dim}, {l, p, h, t, d});
        };
      };
      e.k_at = place(D);
      e.v_at = place(Dv);
      check_engine(e);
    }
  }
}

TEST_CASE("cache_view: vLLM [2, pages, N, H, D] and [pages, 2, N, H, D], NHD and HND",
          "[cache_view]") {
  for (const bool planes_first : {true, false}) {
    for (const bool nhd : {true, false}) {
      Engine e = sized(
          std::string(planes_first ? "[2,pages" : "[pages,2") + (nhd ? " NHD" : " HND"), 0, true);
      const Index N = e.page_size, P = e.pages, D = 8;
      e.elements = 2 * 2 * P * N * H * D;
      const Index page = N * H * D;
      const Index layer = 2 * P * page;
      const Index head = nhd ? D : N * D;
      const Index token = nhd ? H * D : D;
      const Index page_stride = planes_first ? page : 2 * page;
      e.planes({layer, page_stride, head, token, 1},
               {layer, page_stride, head, token, 1},
               planes_first ? P * page : page);
      const auto place = [=](Index kv) -> Place {
        return [=](Index l, Index p, Index h, Index t, Index d) {
          const Index a = nhd ? t : h, b = nhd ? h : t;
          const Index A = nhd ? N : H, B = nhd ? H : N;
          return planes_first ? c_order({2, 2, P, A, B, D}, {l, kv, p, a, b, d})
                              : c_order({2, P, 2, A, B, D}, {l, p, kv, a, b, d});
        };
      };
      e.k_at = place(0);
      e.v_at = place(1);
      check_engine(e);
    }
  }
}

TEST_CASE(
    "cache_view: vLLM packed HNC and NHC, K and V in one row of K and V features, padded pages",
    "[cache_view]") {
  for (const bool hnc : {true, false}) {
    for (const Index pad : {Index{0}, Index{12}}) {
      Engine e = sized(hnc ? "HNC" : "NHC", 0, true);
      e.value_dim = 6;
      const Index N = e.page_size, P = e.pages, D = e.key_dim, C = e.key_dim + e.value_dim;
      const Index page = H * N * C + pad;
      e.elements = 2 * P * page;
      const std::array<Index, 5> strides{P * page, page, hnc ? N * C : C, hnc ? C : H * C, 1};
      e.planes(strides, strides, D);
      const auto place = [=](Index first) -> Place {
        return [=](Index l, Index p, Index h, Index t, Index d) {
          return (l * P + p) * page + first +
                 (hnc ? c_order({H, N, C}, {h, t, d}) : c_order({N, H, C}, {t, h, d}));
        };
      };
      e.k_at = place(0);
      e.v_at = place(D);
      check_engine(e);
    }
  }
}

TEST_CASE("cache_view: vLLM block-first with the layers inside a page", "[cache_view]") {
  Engine e = sized("[pages, L, H, N, C]", 0, true);
  const Index N = e.page_size, P = e.pages, C = 16;
  e.elements = P * 2 * H * N * C;
  const std::array<Index, 5> strides{H * N * C, 2 * H * N * C, N * C, C, 1};
  e.planes(strides, strides, 8);
  e.k_at = [=](Index l, Index p, Index h, Index t, Index d) {
    return c_order({P, 2, H, N, C}, {p, l, h, t, d});
  };
  e.v_at = [=](Index l, Index p, Index h, Index t, Index d) {
    return c_order({P, 2, H, N, C}, {p, l, h, t, d + 8});
  };
  check_engine(e);
}

TEST_CASE("cache_view: TensorRT-LLM blocks of K or V with ids of their own and a pool flag in each",
          "[cache_view]") {
  Engine e = sized("TRT-LLM V1", 0, true);
  e.tables = Tables::split;
  const Index N = e.page_size, P = e.pages, D = 8;
  // [pages, layers, H, N, D]: a page is a block of keys or of values.
  e.elements = P * 2 * H * N * D;
  const std::array<Index, 5> strides{H * N * D, 2 * H * N * D, N * D, D, 1};
  e.planes(strides, strides, 0);
  e.k_at = e.v_at = [=](Index l, Index p, Index h, Index t, Index d) {
    return c_order({P, 2, H, N, D}, {p, l, h, t, d});
  };
  check_engine(e);
}

TEST_CASE("cache_view: TensorRT-LLM [pages, layers, 2, H, N, D] of several layers",
          "[cache_view]") {
  Engine e = sized("TRT-LLM multi-layer", 0, true);
  const Index N = e.page_size, P = e.pages, D = 8;
  e.elements = P * 2 * 2 * H * N * D;
  const std::array<Index, 5> strides{2 * H * N * D, 2 * 2 * H * N * D, N * D, D, 1};
  e.planes(strides, strides, H * N * D);
  const auto place = [=](Index kv) -> Place {
    return [=](Index l, Index p, Index h, Index t, Index d) {
      return c_order({P, 2, 2, H, N, D}, {p, l, kv, h, t, d});
    };
  };
  e.k_at = place(0);
  e.v_at = place(1);
  check_engine(e);
}

TEST_CASE("cache_view: SGLang's one-token slots, each layer in a buffer of its own",
          "[cache_view]") {
  Engine e = sized("SGLang", 0, false);
  e.page_size = 1;
  e.value_dim = 4;
  const Index P = e.pages, D = e.key_dim, Dv = e.value_dim;
  e.elements = 2 * P * H * D;
  e.planes({}, {});
  e.view.k = Plane::nhd(nullptr, {1, heads, e.key_dim, DType::f32});
  e.view.v = Plane::nhd(nullptr, {1, heads, e.value_dim, DType::f32});
  // Layer 1 lies before layer 0: nothing may be computed from one base.
  const auto half = static_cast<std::size_t>(P * H * D);
  e.layer_bases = {reinterpret_cast<std::byte*>(e.k_data() + half),
                   reinterpret_cast<std::byte*>(e.k_data()),
                   reinterpret_cast<std::byte*>(e.v_data() + half),
                   reinterpret_cast<std::byte*>(e.v_data())};
  e.view.k.layer_bases = e.layer_bases.data();
  e.view.v.layer_bases = e.layer_bases.data() + 2;
  const auto place = [=](Index dim) -> Place {
    return [=](Index l, Index p, Index h, Index, Index d) {
      return (1 - l) * P * H * D + c_order({P, H, dim}, {p, h, d});
    };
  };
  e.k_at = place(D);
  e.v_at = place(Dv);
  check_engine(e);
}

TEST_CASE("cache_view: llama.cpp's cells, keys by cell and values transposed", "[cache_view]") {
  Engine e = sized("llama.cpp", 0, false);
  e.page_size = 1;
  e.value_dim = 6;
  const Index cells = e.pages, D = e.key_dim, Dv = e.value_dim;
  e.elements = 2 * cells * H * D;
  e.planes({cells * H * D, H * D, D, 0, 1}, {cells * H * Dv, 1, Dv * cells, 0, cells});
  e.k_at = [=](Index l, Index p, Index h, Index, Index d) {
    return c_order({2, cells, H, D}, {l, p, h, d});
  };
  e.v_at = [=](Index l, Index p, Index h, Index, Index d) {
    return c_order({2, H, Dv, cells}, {l, h, d, p});
  };
  check_engine(e);
}

TEST_CASE("cache_view: legacy vLLM's packed keys and transposed values", "[cache_view]") {
  Engine e = sized("vLLM legacy", 0, false);
  e.key_dim = 12;
  e.value_dim = 7;
  const Index N = e.page_size, P = e.pages, D = e.key_dim, Dv = e.value_dim,
              x = 4;  // 16 bytes of f32
  e.elements = 2 * P * H * D * N;
  e.planes({}, {});
  e.view.k = Plane::vllm_packed_keys(e.k_data(), {e.page_size, heads, e.key_dim, DType::f32});
  e.view.v = Plane::transposed(e.v_data(), {e.page_size, heads, e.value_dim, DType::f32});
  e.view.k.layer_stride = P * H * D * N * 4;
  e.view.v.layer_stride = P * H * Dv * N * 4;
  e.k_at = [=](Index l, Index p, Index h, Index t, Index d) {
    return c_order({2, P, H, D / x, N, x}, {l, p, h, d / x, t, d % x});
  };
  e.v_at = [=](Index l, Index p, Index h, Index t, Index d) {
    return c_order({2, P, H, Dv, N}, {l, p, h, d, t});
  };
  check_engine(e);
}

TEST_CASE(
    "cache_view: KV-Compress' tables and lengths per KV head, a page is one head of one layer",
    "[cache_view]") {
  for (const bool layer_first : {true, false}) {
    Engine e = sized("KV-Compress", 0, false);
    e.scope = TableScope::head;
    e.lengths_by_layer_first = layer_first;
    const Index N = e.page_size, P = e.pages, D = 8, x = 4;
    e.elements = P * D * N;
    e.planes({}, {});
    e.view.k = Plane::vllm_packed_keys(e.k_data(), {e.page_size, 1, 8, DType::f32});
    e.view.v = Plane::transposed(e.v_data(), {e.page_size, 1, 8, DType::f32});
    e.view.k.head_stride = e.view.v.head_stride = 0;
    e.k_at = [=](Index, Index p, Index, Index t, Index d) {
      return c_order({P, D / x, N, x}, {p, d / x, t, d % x});
    };
    e.v_at = [=](Index, Index p, Index, Index t, Index d) { return c_order({P, D, N}, {p, d, t}); };
    check_engine(e);
  }
}

TEST_CASE("cache_view: tables per layer over common pages", "[cache_view]") {
  Engine e = sized("OpenVINO", 0, false);
  e.scope = TableScope::layer;
  const Index N = e.page_size, P = e.pages, D = 8;
  e.elements = P * N * H * D;
  e.planes({0, N * H * D, N * D, D, 1}, {0, N * H * D, N * D, D, 1});
  e.k_at = e.v_at = [=](Index, Index p, Index h, Index t, Index d) {
    return c_order({P, H, N, D}, {p, h, t, d});
  };
  check_engine(e);
}

TEST_CASE("cache_view: a dense [B, H, S, D] batch of Hugging Face with left padding",
          "[cache_view]") {
  Engine e = sized("HF dense", 0, false);
  e.page_size = 24;  // one page per sequence
  e.pages = 12;
  e.padding = {17, 24, 0};
  e.value_dim = 3;
  const Index S = e.page_size, P = e.pages, D = e.key_dim, Dv = e.value_dim;
  e.elements = 2 * P * H * S * D;
  e.planes({P * H * S * D, H * S * D, S * D, D, 1}, {P * H * S * Dv, H * S * Dv, S * Dv, Dv, 1});
  const auto place = [=](Index dim) -> Place {
    return [=](Index l, Index p, Index h, Index t, Index d) {
      return c_order({2, P, H, S, dim}, {l, p, h, t, d});
    };
  };
  e.k_at = place(D);
  e.v_at = place(Dv);
  check_engine(e);
}

TEST_CASE("cache_view: left padding of whole and partial pages is never handed out",
          "[cache_view][edge]") {
  for (std::int32_t pad = 0; pad <= 9; ++pad) {
    Engine e = sized("padded pages", 0, false);
    e.padding = {pad, 3, 9 - pad};
    const Index N = e.page_size, P = e.pages, D = 8;
    e.elements = 2 * P * N * H * D;
    e.planes({P * N * H * D, N * H * D, D, H * D, 1}, {P * N * H * D, N * H * D, D, H * D, 1});
    e.k_at = e.v_at = [=](Index l, Index p, Index h, Index t, Index d) {
      return c_order({2, P, N, H, D}, {l, p, t, h, d});
    };
    check_engine(e, static_cast<std::uint32_t>(pad) + 5);
  }
}

TEST_CASE("cache_view: without planes a row is at its own position; with them they are read",
          "[cache_view]") {
  CacheView view;
  view.kv_heads = 2;
  view.layers = 2;
  view.sequences = 2;
  CHECK(view.position(SequenceId{1}, LayerId{1}, HeadId{1}, 9) == Position{9});
  CHECK(view.rope_position(SequenceId{1}, LayerId{1}, HeadId{1}, 9) == 9);
  std::vector<Position> positions(2 * 2 * 2 * 4, Position{-5});
  view.positions = SequencePlane::dense(positions.data(), 2, 2, 4);
  positions[((1 * 2 + 0) * 2 + 1) * 4 + 3] = Position{77};
  CHECK(view.position(SequenceId{1}, LayerId{0}, HeadId{1}, 3) == Position{77});
  CHECK(view.rope_position(SequenceId{1}, LayerId{0}, HeadId{1}, 3) == 77);  // the same by default
  std::vector<std::int32_t> rope(positions.size(), -6);
  view.rope_positions = SequencePlane::dense(rope.data(), 2, 2, 4);
  rope[((1 * 2 + 0) * 2 + 1) * 4 + 3] = 11;
  CHECK(view.rope_position(SequenceId{1}, LayerId{0}, HeadId{1}, 3) == 11);
}

TEST_CASE("cache_view: a table's number, layers and heads agree in every scope", "[cache_view]") {
  CacheView view;
  view.layers = 3;
  view.kv_heads = 4;
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    view.scope = scope;
    std::vector<std::int32_t> served(static_cast<std::size_t>(view.tables_per_sequence()), 0);
    for (std::int32_t l = 0; l < 3; ++l) {
      for (std::int32_t h = 0; h < 4; ++h) {
        const std::int32_t t = view.table_of(LayerId{l}, HeadId{h});
        REQUIRE(t >= 0);
        REQUIRE(t < view.tables_per_sequence());
        ++served[static_cast<std::size_t>(t)];
        CHECK(l >= raw(view.first_layer(t)));
        CHECK(l < raw(view.first_layer(t)) + view.layers_per_table());
        CHECK(h >= raw(view.first_head(t)));
        CHECK(h < raw(view.first_head(t)) + view.heads_per_table());
      }
    }
    for (const std::int32_t pairs : served) {
      CHECK(pairs == view.layers_per_table() * view.heads_per_table());
    }
  }
}

TEST_CASE("cache_view: a foreign sequence without states is a prompt never evicted from",
          "[cache_view]") {
  const std::array<std::int32_t, 2> lengths{7, 0};
  const std::array<std::int32_t, 3> indptr{0, 2, 2};
  const std::array<std::int32_t, 2> last{3, 0};
  CacheView view;
  view.kv_heads = 1;
  view.sequences = 2;
  view.page_size = 4;
  view.lengths = lengths.data();
  const SequenceState state = view.state(SequenceId{0}, LayerId{0}, HeadId{0});
  CHECK(state.live_rows == 7);
  CHECK(state.next_position == 7);
  CHECK(state.next_rope_position == 7);
  CHECK(state.append_row < 0);
  CHECK(state.ordered);
  view.lengths = nullptr;
  view.table.indptr = indptr.data();
  view.last_page_len = last.data();
  CHECK(view.state(SequenceId{0}, LayerId{0}, HeadId{0}).live_rows == 7);
  CHECK(view.state(SequenceId{1}, LayerId{0}, HeadId{0}).next_position == 0);
}

TEST_CASE("cache_view: a CSR length that is no number of rows is -1, which every check refuses",
          "[cache_view][edge]") {
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  std::vector<std::int32_t> ids(8), last{1}, reserved{0}, indptr{0, 4};
  CacheView view;
  view.kv_heads = view.sequences = 1;
  view.page_size = 1 << 20;
  view.pages = 8;
  view.table = {.ids = ids.data(), .indptr = indptr.data()};
  view.last_page_len = last.data();
  view.reserved_pages = reserved.data();
  const auto rows = [&](std::int32_t end, std::int32_t kept, std::int32_t in_last) {
    indptr[1] = end, reserved[0] = kept, last[0] = in_last;
    return view.live_rows({}, {}, {});
  };
  CHECK(rows(4, 0, 5) == 3 * (1 << 20) + 5);
  CHECK(rows(2048, 0, (1 << 20) - 1) == most);
  CHECK(rows(2048, 0, 1 << 20) == -1);  // 2^31
  CHECK(rows(most, 0, 1) == -1);
  CHECK(rows(4, -most, 1) == -1);
  CHECK(rows(4, 5, 1) == -1);
  CHECK(rows(4, 0, -most) == -1);
  CHECK(rows(-4, 0, 1) == -1);
  CHECK(check_lengths(view).status == Status::length_beyond_table);
}

TEST_CASE(
    "B048 cache_view: [pages, P, 2, H*d] and [pages, P, H = 2, 2*d] have one shape and two views",
    "[cache_view][fault]") {
  constexpr Index P = 4, d = 8, two = 2, pages = 3;
  std::vector<float> memory(static_cast<std::size_t>(pages * P * two * two * d));
  std::vector<std::int32_t> ids{2, 0, 1};
  const auto view_with = [&](Index head_stride, Index v_offset) {
    CacheView view;
    Plane plane;
    plane.base = reinterpret_cast<std::byte*>(memory.data());
    plane.page_stride = P * two * two * d * 4;
    plane.token_stride = two * two * d * 4;
    plane.head_stride = head_stride * 4;
    plane.feature_stride = 4;
    plane.head_dim = d;
    view.k = view.v = plane;
    view.v.base += v_offset * 4;
    view.page_size = P;
    view.pages = pages;
    view.kv_heads = two;
    view.sequences = 1;
    view.table.ids = ids.data();
    view.table.max_pages = 3;
    return view;
  };
  const CacheView kv_outside = view_with(d, two * d);     // [pages, P, 2(K/V), H * d]
  const CacheView heads_outside = view_with(two * d, d);  // [pages, P, H, 2(K/V) * d]
  const auto write = [&](const CacheView& view) {
    for (std::int32_t r = 0; r < 12; ++r) {
      for (std::int32_t h = 0; h < 2; ++h) {
        std::vector<float> key(d), value(d);
        for (Index i = 0; i < d; ++i) {
          key[static_cast<std::size_t>(i)] = code(false, 0, 0, h, r, i);
          value[static_cast<std::size_t>(i)] = code(true, 0, 0, h, r, i);
        }
        store_row(view.k, view.key({}, {}, HeadId{h}, r), key.data());
        store_row(view.v, view.value({}, {}, HeadId{h}, r), value.data());
      }
    }
  };
  const auto rows_read_right = [&](const CacheView& view, std::int32_t h, bool of_values) {
    std::int32_t right = 0;
    std::vector<float> row(d);
    for (std::int32_t r = 0; r < 12; ++r) {
      load_row(of_values ? view.v : view.k,
               of_values ? view.value({}, {}, HeadId{h}, r) : view.key({}, {}, HeadId{h}, r),
               row.data());
      right += row[0] == code(of_values, 0, 0, h, r, 0) && row[7] == code(of_values, 0, 0, h, r, 7)
                   ? 1
                   : 0;
    }
    return right;
  };
  write(kv_outside);
  CHECK(rows_read_right(kv_outside, 1, false) == 12);
  CHECK(rows_read_right(kv_outside, 0, true) == 12);
  CHECK(rows_read_right(heads_outside, 0, false) == 12);  // where the two agree
  CHECK(rows_read_right(heads_outside, 1, false) == 0);
  CHECK(rows_read_right(heads_outside, 0, true) == 0);
  write(heads_outside);
  CHECK(rows_read_right(heads_outside, 1, false) == 12);
  CHECK(rows_read_right(heads_outside, 0, true) == 12);
  CHECK(rows_read_right(kv_outside, 1, false) == 0);
}

namespace {

// Address space in which any access ends the process, except to what was opened.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : bytes_(bytes) {
    void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() {
    if (base_ != nullptr) { munmap(base_, bytes_); }
  }
  std::byte* base() const { return base_; }
  bool open(std::size_t from, std::size_t bytes) const {
    return mprotect(base_ + from, bytes, PROT_READ | PROT_WRITE) == 0;
  }

 private:
  std::size_t bytes_;
  std::byte* base_ = nullptr;
};

}  // namespace

TEST_CASE(
    "B067 cache_view: a null or reserved page beyond the length, and the entries there, are never "
    "touched",
    "[cache_view][fault]") {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  // Pool of 4 pages: 0 is reserved and guarded, as is everything before and after the pool.
  const Guarded pool(6 * page);
  const Guarded tables(2 * page);
  REQUIRE(pool.base() != nullptr);
  REQUIRE(tables.base() != nullptr);
  REQUIRE(pool.open(2 * page, 3 * page));
  REQUIRE(tables.open(0, page));
  const auto row_bytes = static_cast<std::int32_t>(page / 4);  // 4 slots, K and V in one row of f32
  CacheView view;
  view.page_size = 4;
  view.pages = 4;
  view.kv_heads = 1;
  view.sequences = 2;
  view.k = Plane::nhd(pool.base() + page, {4, 1, row_bytes / 8, DType::f32});
  view.k.token_stride = row_bytes;
  view.k.page_stride = static_cast<Index>(page);
  view.v = view.k;
  view.v.base += row_bytes / 2;
  for (const std::int32_t null_id : {-1, 0}) {
    // Sequence 1's row ends where the guard begins: its second entry does not exist in memory.
    auto* const ids = reinterpret_cast<std::int32_t*>(tables.base() + page) - 3;
    ids[0] = 2;
    ids[1] = null_id;
    ids[2] = 3;
    view.table.ids = ids;
    view.table.null_id = null_id;
    view.table.row_stride = 2;
    view.table.max_pages = 2;
    for (std::int32_t rows = 0; rows <= 4; ++rows) {
      const std::array<std::int32_t, 2> lengths{rows, rows};
      view.lengths = lengths.data();
      std::int32_t seen = 0;
      std::vector<float> row(static_cast<std::size_t>(row_bytes / 8));
      for (const SequenceId s : {SequenceId{0}, SequenceId{1}}) {
        const HeadRef head{view, s, LayerId{0}, HeadId{0}};
        for_each_run(head, [&](const Run& run) {
          seen += run.count;
          CHECK(run.k_page != null_page);
        });
        for (std::int32_t r = 0; r < rows; ++r) {
          load_row(view.k, view.key(s, {}, {}, r), row.data());
          load_row(view.v, view.value(s, {}, {}, r), row.data());
          static_cast<void>(place_of(head, r));
        }
        if (rows > 1) { move_page_data(head, place_of(head, rows - 1), place_of(head, 0)); }
      }
      CHECK(seen == 2 * rows);
      check_layout(view);
      std::array<std::uint64_t, 2> scratch{};
      CHECK(check_tables(view, scratch).status == Status::ok);
      static_cast<void>(test::generation_of(view));
    }
  }
}

TEST_CASE("B128 cache_view: page 1,000,000 of 16384 2-byte elements lies at byte 32,768,000,000",
          "[cache_view][fault]") {
  const Guarded space(std::size_t{1} << 36);  // addresses only: nothing is mapped
  if (space.base() == nullptr) {
    WARN("no address space of 2^36 bytes: not tested");
    return;
  }
  const Plane plane = Plane::nhd(space.base(), {16, 8, 128, DType::f16});
  REQUIRE(plane.page_stride == 16384 * 2);
  CHECK(plane.row({}, PageId{1'000'000}, HeadId{0}, Slot{0}) - space.base() == 32'768'000'000);
  CHECK(plane.row({}, PageId{1'000'000}, HeadId{7}, Slot{15}) - space.base() ==
        32'768'000'000 + 32768 - 256);

  // The same through a table, one-token slots, and side data.
  const std::int32_t id = 1'000'000;
  const std::int32_t length = 16;
  CacheView view;
  view.k = view.v = plane;
  view.page_size = 16;
  view.pages = 1'000'001;
  view.kv_heads = 8;
  view.sequences = 1;
  view.table.ids = &id;
  view.table.max_pages = 1;
  view.lengths = &length;
  CHECK(view.key({}, {}, HeadId{1}, 0) - space.base() == 32'768'000'000 + 256);
  PagePlane side;
  side.base = space.base();
  side.page_stride = 32768;
  side.token_stride = 64;
  CHECK(side.row({}, PageId{id}, HeadId{0}, Slot{2}) - space.base() == 32'768'000'128);
}

TEST_CASE("B129 cache_view: strides of 2^30 elements at index 4 give an offset of 2^32 elements",
          "[cache_view][fault]") {
  const Guarded space(std::size_t{1} << 36);
  if (space.base() == nullptr) {
    WARN("no address space of 2^36 bytes: not tested");
    return;
  }
  constexpr Index elements = Index{1} << 30;
  constexpr Index four = elements * 4 * 4;  // index 4, 4-byte elements
  const auto at = [&](std::int64_t Plane::* stride,
                      std::int32_t l,
                      std::int32_t p,
                      std::int32_t h,
                      std::int32_t t) {
    Plane plane;
    plane.base = space.base();
    plane.*stride = elements * 4;
    return plane.row(LayerId{l}, PageId{p}, HeadId{h}, Slot{t}) - space.base();
  };
  CHECK(at(&Plane::layer_stride, 4, 0, 0, 0) == four);
  CHECK(at(&Plane::page_stride, 0, 4, 0, 0) == four);
  CHECK(at(&Plane::head_stride, 0, 0, 4, 0) == four);
  CHECK(at(&Plane::token_stride, 0, 0, 0, 4) == four);
  Plane plane;
  plane.feature_stride = elements * 4;
  CHECK(plane.feature_offset(4) == four);
  plane.pack = 2;
  plane.pack_stride = elements * 4;
  CHECK(plane.feature_offset(8) == four);
  SequencePlane batch;
  batch.base = space.base();
  batch.sequence_stride = elements * 4;
  CHECK(batch.row(SequenceId{4}, {}, {}, 0) - space.base() == four);
  batch = {};
  batch.base = space.base();
  batch.row_stride = elements * 4;
  CHECK(batch.row({}, {}, {}, 4) - space.base() == four);
}

TEST_CASE(
    "B129 cache_view: rows beyond 2^33 bytes of a sparse cache are written and read back, and none "
    "wraps",
    "[cache_view][fault]") {
  // 2^18 + 3 pages of 64 KiB: the offsets pass 2^31, 2^32, 2^33 and 2^34 bytes.
  constexpr std::int32_t pages = (1 << 18) + 3;
  const Guarded memory(std::size_t{pages} << 16);
  if (memory.base() == nullptr || !memory.open(0, std::size_t{pages} << 16)) {
    WARN("no sparse mapping of 2^34 bytes: not tested");
    return;
  }
  std::vector<std::int32_t> ids{0, 1, 2};
  for (std::int32_t bit = 15; bit <= 18; ++bit) {
    for (const std::int32_t id : {(1 << bit) - 1, 1 << bit, (1 << bit) + 1}) { ids.push_back(id); }
  }
  const auto length = static_cast<std::int32_t>(ids.size()) * 16;
  const auto max_pages = static_cast<std::int32_t>(ids.size());
  for (const bool nhd : {true, false}) {
    CacheView view;
    view.k = nhd ? Plane::nhd(memory.base(), {16, 8, 64, DType::f32})
                 : Plane::hnd(memory.base(), {16, 8, 64, DType::f32});
    view.k.page_stride = 1 << 16;  // keys in the first half of a page, values in the second
    view.v = view.k;
    view.v.base += 1 << 15;
    view.page_size = 16;
    view.pages = pages;
    view.kv_heads = 8;
    view.sequences = 1;
    view.table.ids = ids.data();
    view.table.max_pages = max_pages;
    view.lengths = &length;
    check_layout(view);
    const auto mark = [](std::int32_t r, std::int32_t h, bool of_values) {
      return static_cast<float>((r * 8 + h) * 2 + (of_values ? 1 : 0)) + 0.5F;
    };
    std::vector<float> row(64);
    for (std::int32_t r = 0; r < length; r += 5) {
      for (std::int32_t h = 0; h < 8; ++h) {
        std::fill(row.begin(), row.end(), mark(r, h, false));
        store_row(view.k, view.key({}, {}, HeadId{h}, r), row.data());
        std::fill(row.begin(), row.end(), mark(r, h, true));
        store_row(view.v, view.value({}, {}, HeadId{h}, r), row.data());
      }
    }
    std::int64_t wrong = 0;
    for_each_run({view, {}, {}, {}}, [&](const Run& run) {
      for (std::int32_t r = (run.row + 4) / 5 * 5; r < run.row + run.count; r += 5) {
        for (std::int32_t h = 0; h < 8; ++h) {
          // By hand, from the pages' numbers.
          const Index page = static_cast<Index>(ids[static_cast<std::size_t>(r / 16)]) << 16;
          const Index in_page = (nhd ? (r % 16 * 8 + h) : (h * 16 + r % 16)) * Index{256};
          float key = 0;
          std::memcpy(&key, memory.base() + page + in_page, sizeof key);
          wrong += key == mark(r, h, false) ? 0 : 1;
          const Slot slot{raw(run.slot) + r - run.row};
          load_row(view.v, view.v.row({}, run.v_page, HeadId{h}, slot), row.data());
          wrong += row.front() == mark(r, h, true) && row.back() == mark(r, h, true) ? 0 : 1;
        }
      }
    });
    CHECK(wrong == 0);
  }
}
