// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/engine/tensor_view.hpp>
#include <kvtrim/engine/vllm.hpp>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/csr_tables.hpp>
#include <kvtrim/score/external.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/instances.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvtrim;

namespace {

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::invalid_argument& e) { return e.what(); }
  return "not refused";
}

// One layer [pages, N, H, D] of floats, and tables of any kind.
struct Cache {
  std::vector<float> keys = std::vector<float>(8 * 4 * 2 * 3), values = keys;
  CacheView view = tensor_view(Tensor<4>::contiguous(keys.data(), {8, 4, 2, 3}, DType::f32),
                               "PNHD",
                               Tensor<4>::contiguous(values.data(), {8, 4, 2, 3}, DType::f32),
                               "PNHD");

  ViewFault fault() const {
    check_layout(view);
    std::vector<std::uint64_t> scratch(static_cast<std::size_t>(check_tables_words(view.pages)));
    return check_tables(view, scratch);
  }
};

}  // namespace

TEST_CASE("tensor_view: an axis is what its letter says, whatever the order", "[tensor_view]") {
  std::vector<float> memory(2 * 3 * 4 * 5 * 6);
  const auto t = Tensor<5>::contiguous(memory.data(), {2, 3, 4, 5, 6}, DType::f32);
  const CacheView view = tensor_view(t, "HLDPN", t.narrow(2, 1, 2), "HLDPN");
  CHECK(view.kv_heads == 2);
  CHECK(view.layers == 3);
  CHECK(view.k.head_dim == 4);
  CHECK(view.v.head_dim == 2);
  CHECK(view.pages == 5);
  CHECK(view.page_size == 6);
  const auto* const from = reinterpret_cast<const std::byte*>(memory.data());
  CHECK(view.k.row(LayerId{2}, PageId{3}, HeadId{1}, Slot{4}) - from ==
        4 * (((1 * 3 + 2) * 4 + 0) * 5 * 6 + 3 * 6 + 4));
  CHECK(view.v.row(LayerId{2}, PageId{3}, HeadId{1}, Slot{4}) -
            view.k.row(LayerId{2}, PageId{3}, HeadId{1}, Slot{4}) ==
        4 * 5 * 6);
  CHECK(view.v.feature_offset(1) == 4 * 5 * 6);
}

TEST_CASE("tensor_view: what cannot be is refused with the numbers", "[tensor_view][edge]") {
  std::vector<float> memory(8 * 4 * 2 * 3);
  const auto t = Tensor<4>::contiguous(memory.data(), {8, 4, 2, 3}, DType::f32);
  const auto less = t.narrow(0, 0, 7);
  CHECK(refusal([&] { static_cast<void>(tensor_view(t, "PNHD", less, "PNHD")); }) ==
        "kvtrim::tensor_view: axis P of the keys (\"PNHD\") has 8 indices, of the values "
        "(\"PNHD\") 7");
  for (const char* const axes : {"PNH", "PNHH", "PNHd", "LNHD", "PNHDx"}) {
    const std::string why = refusal([&] { static_cast<void>(tensor_view(t, axes, t, "PNHD")); });
    CHECK(why.find(std::string("with axes \"") + axes) != std::string::npos);
  }
  auto empty = t;
  empty.extents[2] = 0;
  CHECK(refusal([&] {
          static_cast<void>(tensor_view(t, "PNHD", empty, "PNHD"));
        }).find("extent 0 of axis 2 of values") != std::string::npos);
  auto opaque = t;
  opaque.dtype = DType::opaque;
  CHECK(refusal([&] {
          static_cast<void>(tensor_view(opaque, "PNHD", t, "PNHD"));
        }).find("elements of a known size") != std::string::npos);
  CHECK(refusal([&] { static_cast<void>(t.at(0, 8)); }) ==
        "kvtrim::Tensor: indices 8 to 9 of axis 0 of 4, which has 8");
  CHECK(refusal([&] { static_cast<void>(t.narrow(4, 0, 1)); }).find("axis 4 of 4") !=
        std::string::npos);
}

TEST_CASE("tensor_view: strides that overlap, or a stride of the table below its width",
          "[tensor_view][edge]") {
  Cache c;
  const std::vector<std::int32_t> ids{5, 3, -1, 1}, lengths{6, 3};
  DenseTable table{.ids = ids.data(),
                   .lengths = lengths.data(),
                   .sequences = 2,
                   .row_stride = 2,
                   .max_pages = 2};
  set_tables(c.view, table);
  CHECK(c.fault().status == Status::page_out_of_range);  // the null id is used
  table.row_stride = 1;
  CHECK(refusal([&] { set_tables(c.view, table); }) ==
        "kvtrim::set_tables: 2 sequences of 2 entries at a stride of 1");
  table = {.ids = ids.data(), .sequences = 1, .row_stride = 2, .max_pages = 2};
  CHECK(refusal([&] { set_tables(c.view, table); }).find("null") != std::string::npos);
  table.lengths = lengths.data();
  set_tables(c.view, table);
  c.view.k.page_stride -= 4;
  CHECK(refusal([&] { check_layout(c.view); }).find("keys overlap: page stride") !=
        std::string::npos);
}

TEST_CASE("tensor_view: compressed rows that fall, or last pages beyond 1..N, are refused",
          "[tensor_view][edge]") {
  Cache c;
  const auto status = [&](std::vector<std::int32_t> indptr,
                          std::vector<std::int32_t> indices,
                          std::vector<std::int32_t> last) {
    indices.reserve(1);
    set_tables(c.view,
               CsrTable{.indptr = indptr.data(),
                        .indices = indices.data(),
                        .last_page_len = last.data(),
                        .sequences = static_cast<std::int32_t>(last.size())});
    const ViewFault fault = c.fault();
    // The planner says the same.
    std::vector<std::byte> workspace(plan_workspace_bytes(Full(), plan_shape(c.view)));
    if (fault.entry < 0) { CHECK((plan(Full(), c.view, {}, workspace).status() == fault.status)); }
    return fault.status;
  };
  CHECK(status({0, 2, 3}, {5, 3, 1}, {2, 4}) == Status::ok);
  CHECK(status({0, 2, 2}, {5, 3}, {1, 0}) == Status::ok);
  CHECK(status({0, 2, 1}, {5, 3, 1}, {2, 4}) == Status::length_beyond_table);
  CHECK(status({2, 0, 3}, {5, 3, 1}, {2, 4}) == Status::length_beyond_table);
  CHECK(status({0, 2, 3}, {5, 3, 1}, {0, 4}) == Status::length_beyond_table);
  CHECK(status({0, 2, 3}, {5, 3, 1}, {5, 4}) == Status::length_beyond_table);
  CHECK(status({0, 2, 3}, {5, 3, 1}, {-1, 4}) == Status::length_beyond_table);
  CHECK(status({0, 2, 2}, {5, 3}, {2, 1}) == Status::length_beyond_table);
  CHECK(status({0, 2, 3}, {5, 8, 1}, {2, 4}) == Status::page_out_of_range);
  CHECK(status({0, 2, 3}, {5, -1, 1}, {2, 4}) == Status::page_out_of_range);
  CHECK(status({0, 2, 3}, {5, 3, 5}, {2, 4}) == Status::page_twice);  // one writable page of two
}

TEST_CASE("stack_layers: layers that differ, or bases of another number, are refused",
          "[tensor_view][edge]") {
  Cache a, b;
  std::vector<std::byte*> bases(4);
  std::array layers{a.view, b.view};
  const CacheView both = stack_layers(layers, bases);
  CHECK(both.layers == 2);
  CHECK(both.k.row(LayerId{1}, PageId{1}, HeadId{1}, Slot{1}) ==
        b.view.k.row(LayerId{0}, PageId{1}, HeadId{1}, Slot{1}));
  CHECK(both.v.row(LayerId{0}, PageId{1}, HeadId{1}, Slot{1}) ==
        a.view.v.row(LayerId{0}, PageId{1}, HeadId{1}, Slot{1}));
  CHECK(refusal([&] {
          static_cast<void>(stack_layers(layers, std::span<std::byte*>(bases).first(2)));
        }).find("2 layers and room for 2 bases") != std::string::npos);
  CHECK(refusal([&] { static_cast<void>(stack_layers({}, {})); }).find("0 layers") !=
        std::string::npos);
  layers[1].v.token_stride += 4;
  CHECK(refusal([&] { static_cast<void>(stack_layers(layers, bases)); }) ==
        "kvtrim::stack_layers: layer 1 has token stride 28, layer 0 24");
}

TEST_CASE("tensor_view: features that do not lie side by side are read and moved all the same",
          "[tensor_view][edge]") {
  // [D, pages, H, N]: no two features of a row are neighbours.
  std::vector<float> memory(2 * 3 * 8 * 2 * 4);
  for (std::size_t i = 0; i < memory.size(); ++i) { memory[i] = static_cast<float>(i); }
  const auto both = Tensor<5>::contiguous(memory.data(), {2, 3, 8, 2, 4}, DType::f32);
  CacheView view = tensor_view(both.at(0, 0), "DPHN", both.at(0, 1), "DPHN");
  std::vector<std::int32_t> ids{6, 2, 7}, lengths{10};
  vllm::set_tables(view,
                   {.ids = ids.data(),
                    .lengths = lengths.data(),
                    .sequences = 1,
                    .row_stride = 3,
                    .max_pages = 3});
  check_layout(view);
  std::vector<float> scores{0, 9, 0, 9, 0, 9, 0, 9, 0, 9, 9, 0, 9, 0, 9, 0, 9, 0, 9, 0};
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 2, 10);
  const test::ByScore policy{.keep = 5};
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  const auto before = memory;
  const PlanRef made = plan(policy, view, obs, workspace);
  REQUIRE((apply(made, view) == Status::ok));
  std::vector<PageId> freed(3);
  DenseTables tables(view, ids.data(), lengths.data(), nullptr, freed);
  CHECK(commit(made, view, tables).released_pages == 1);
  CHECK(lengths[0] == 5);
  CHECK((ids == std::vector<std::int32_t>{6, 2, vllm::null_block}));
  const auto at = [](std::size_t v, std::size_t d, std::size_t p, std::size_t h, std::size_t t) {
    return (((v * 3 + d) * 8 + p) * 2 + h) * 4 + t;
  };
  const std::array<std::size_t, 3> pages{6, 2, 7};
  for (std::size_t h = 0; h < 2; ++h) {
    for (std::size_t r = 0; r < 5; ++r) {
      const std::size_t was = 2 * r + (h == 0 ? 1 : 0);
      for (std::size_t d = 0; d < 3; ++d) {
        for (std::size_t v = 0; v < 2; ++v) {
          CHECK(memory[at(v, d, pages[r / 4], h, r % 4)] ==
                before[at(v, d, pages[was / 4], h, was % 4)]);
        }
      }
    }
  }
}
