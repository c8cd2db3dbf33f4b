// SPDX-License-Identifier: Apache-2.0
// Every row of the reference's table of layouts: built by its own arithmetic, evicted from in every way, compared with a plain
// cache (layout_driver.hpp).
#include "engine/layout_driver.hpp"

using namespace kvtrim;
using test::c_order;
using test::EngineLayout;
using test::Index;
using test::run_layout;
using test::TableKind;

namespace {

constexpr Index L = 2, H = 2;

EngineLayout layout_of(std::string name, std::int32_t page_size = 4, std::int32_t value_dim = 16) {
  EngineLayout x;
  x.name = std::move(name);
  x.setup.group = 2;
  x.setup.dim = 16;
  x.setup.value_dim = value_dim;
  x.setup.page_size = page_size;
  x.setup.sequences = 2;
  x.setup.max_rows = 40;
  x.pages = page_size == 1 ? 64 : 24;
  return x;
}

std::byte* offset(std::byte* memory, Index elements, DType dtype) {
  return memory + elements * element_bytes(dtype);
}

// Strides of a tensor whose axes lie in memory in this order, outermost first.
template <std::size_t R>
Tensor<R> permuted(void* data,
                   const std::array<Index, R>& extents,
                   const std::array<std::size_t, R>& order) {
  Tensor<R> t{data, extents, {}, DType::f32};
  Index stride = 1;
  for (std::size_t i = R; i-- > 0;) {
    t.strides[order[i]] = stride;
    stride *= extents[order[i]];
  }
  return t;
}

// A view of each of the layers, `one(l)`, as one.
template <class F>
CacheView stacked(std::vector<std::byte*>& bases, F&& one) {
  const std::array layers{one(Index{0}), one(Index{1})};
  bases.resize(4);
  return stack_layers(layers, bases);
}

}  // namespace

TEST_CASE("layouts: legacy vLLM, packed keys and transposed values, of 4 and 2 bytes",
          "[layouts]") {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    EngineLayout x = layout_of("vLLM legacy " + std::string(to_string(dtype)), 4, 12);
    x.setup.dtype = dtype;
    x.brief = dtype == DType::bf16;
    x.null_id = vllm::null_block;
    const Index P = x.pages, N = 4, D = 16, Dv = 12, pack = 16 / element_bytes(dtype);
    const Index keys = P * H * D * N, layer = keys + P * H * Dv * N;
    x.elements = L * layer;
    x.at = [=](bool v, Index l, Index p, Index h, Index t, Index d) {
      return l * layer + (v ? keys + c_order({P, H, Dv, N}, {p, h, d, t})
                            : c_order({P, H, D / pack, N, pack}, {p, h, d / pack, t, d % pack}));
    };
    x.view = [=](std::byte* memory, std::vector<std::byte*>& bases) {
      return stacked(bases, [&](Index l) {
        return vllm::legacy_view(
            Tensor<5>::contiguous(
                offset(memory, l * layer, dtype), {P, H, D / pack, N, pack}, dtype),
            Tensor<4>::contiguous(offset(memory, l * layer + keys, dtype), {P, H, Dv, N}, dtype));
      });
    };
    run_layout(x);
  }
}

TEST_CASE("layouts: vLLM [2, pages, N, H, D] and [pages, 2, N, H, D], NHD and HND", "[layouts]") {
  for (const bool planes_first : {true, false}) {
    for (const bool nhd : {true, false}) {
      EngineLayout x = layout_of(std::string(planes_first ? "vLLM [2, pages" : "vLLM [pages, 2") +
                                 (nhd ? ", N, H, D]" : ", H, N, D]"));
      x.null_id = vllm::null_block;
      x.brief = planes_first != nhd;
      const Index P = x.pages, N = 4, D = 16, layer = 2 * P * N * H * D;
      x.elements = L * layer;
      x.at = [=](bool v, Index l, Index p, Index h, Index t, Index d) {
        const Index a = nhd ? t : h, b = nhd ? h : t, A = nhd ? N : H, B = nhd ? H : N;
        return (1 - l) * layer +  // layer 1 lies first
               (planes_first ? c_order({2, P, A, B, D}, {v, p, a, b, d})
                             : c_order({P, 2, A, B, D}, {p, v, a, b, d}));
      };
      x.view = [=](std::byte* memory, std::vector<std::byte*>& bases) {
        return stacked(bases, [&](Index l) {
          void* const from = offset(memory, (1 - l) * layer, DType::f32);
          const std::array<Index, 5> extents = planes_first ? std::array<Index, 5>{2, P, N, H, D}
                                                            : std::array<Index, 5>{P, 2, N, H, D};
          const auto order = nhd ? std::array<std::size_t, 5>{0, 1, 2, 3, 4}
                                 : std::array<std::size_t, 5>{0, 1, 3, 2, 4};
          const auto kv = permuted(from, extents, order);
          return planes_first ? vllm::split_view(kv) : vllm::joined_view(kv);
        });
      };
      run_layout(x);
    }
  }
}

TEST_CASE("layouts: vLLM's packed rows in six physical orders", "[layouts]") {
  // Of (layer, page, head, slot); the features are innermost.
  constexpr std::array<std::array<std::size_t, 5>, 6> orders{{{0, 1, 2, 3, 4},
                                                              {0, 1, 3, 2, 4},
                                                              {1, 0, 2, 3, 4},
                                                              {1, 0, 3, 2, 4},
                                                              {1, 2, 0, 3, 4},
                                                              {1, 3, 0, 2, 4}}};
  for (const auto& order : orders) {
    EngineLayout x = layout_of("vLLM packed", 4, 12);
    x.brief = &order != orders.data();
    for (const std::size_t axis : order) { x.name += " LPHNC"[axis + 1]; }
    x.null_id = vllm::null_block;
    const Index P = x.pages, N = 4, D = 16, C = 16 + 12;
    const std::array<Index, 5> extents{L, P, H, N, C};
    x.elements = L * P * H * N * C;
    x.at = [=](bool v, Index l, Index p, Index h, Index t, Index d) {
      const std::array<Index, 5> at{l, p, h, t, d + (v ? D : 0)};
      Index index = 0;
      for (const std::size_t axis : order) { index = index * extents[axis] + at[axis]; }
      return index;
    };
    x.view = [=](std::byte* memory, std::vector<std::byte*>&) {
      return vllm::packed_view(permuted(memory, extents, order), 16);
    };
    run_layout(x);
  }
}

TEST_CASE("layouts: MLA, one latent a token whose first features are the value", "[layouts]") {
  for (const bool slots : {false, true}) {
    EngineLayout x = layout_of(slots ? "SGLang MLA" : "vLLM MLA", 4, 10);
    x.setup.kv_heads = 1;
    x.setup.value_in_key = true;
    x.null_id = 0;
    x.tables = slots ? TableKind::slots : TableKind::dense;
    const Index P = x.pages, N = 4, D = 16;
    x.elements = L * P * N * D;
    x.at = [=](bool, Index l, Index p, Index, Index t, Index d) {
      return c_order({L, P, N, D}, {l, p, t, d});
    };
    x.view = [=](std::byte* memory, std::vector<std::byte*>& bases) {
      return stacked(bases, [&](Index l) {
        void* const from = offset(memory, l * P * N * D, DType::f32);
        return slots
                   ? sglang::mla_view(Tensor<3>::contiguous(from, {P * N, 1, D}, DType::f32), 10, 4)
                   : vllm::mla_view(Tensor<3>::contiguous(from, {P, N, D}, DType::f32), 10);
      });
    };
    run_layout(x);
  }
}

TEST_CASE("layouts: FlashInfer's compressed rows over K and V of strides of their own",
          "[layouts]") {
  for (const bool nhd : {true, false}) {
    EngineLayout x = layout_of(nhd ? "FlashInfer NHD" : "FlashInfer HND", 4, 12);
    x.tables = TableKind::csr;
    const Index P = x.pages, N = 4, D = 16, Dv = 12;
    const Index gap = 8;  // elements behind each page of keys
    const Index key_page = N * H * D + gap, keys = P * key_page, layer = keys + P * N * H * Dv;
    x.elements = L * layer;
    x.at = [=](bool v, Index l, Index p, Index h, Index t, Index d) {
      const Index a = nhd ? t : h, b = nhd ? h : t, A = nhd ? N : H, B = nhd ? H : N;
      return l * layer + (v ? keys + c_order({P, A, B, Dv}, {p, a, b, d})
                            : p * key_page + c_order({A, B, D}, {a, b, d}));
    };
    x.view = [=](std::byte* memory, std::vector<std::byte*>& bases) {
      return stacked(bases, [&](Index l) {
        const Index a = nhd ? N : H, b = nhd ? H : N;
        Tensor<4> k =
            Tensor<4>::contiguous(offset(memory, l * layer, DType::f32), {P, a, b, D}, DType::f32);
        k.strides[0] = key_page;
        const auto v = Tensor<4>::contiguous(
            offset(memory, l * layer + keys, DType::f32), {P, a, b, Dv}, DType::f32);
        return flashinfer::view(k, v, nhd ? flashinfer::KvLayout::nhd : flashinfer::KvLayout::hnd);
      });
    };
    run_layout(x);
  }
}

TEST_CASE("layouts: TensorRT-LLM's C++ manager, ids of K and V that count pieces of a block",
          "[layouts]") {
  EngineLayout x = layout_of("TensorRT-LLM V1");
  x.tables = TableKind::offsets;
  x.id_step = 2 * L;
  const Index P = x.pages, N = 4, D = 16;
  x.elements = P * L * 2 * H * N * D;
  x.at = [=](bool v, Index l, Index p, Index h, Index t, Index d) {
    return c_order({P, L, 2, H, N, D}, {p, l, v, h, t, d});
  };
  x.view = [=](std::byte* memory, std::vector<std::byte*>&) {
    return tensorrt_llm::pool_view(Tensor<6>::contiguous(memory, {P, L, 2, H, N, D}, DType::f32));
  };
  run_layout(x);
}

TEST_CASE("layouts: TensorRT-LLM's PyTorch manager, [pages, 2, H, N, D] a layer", "[layouts]") {
  EngineLayout x = layout_of("TensorRT-LLM V2");
  const Index P = x.pages, N = 4, D = 16, layer = P * 2 * H * N * D;
  x.elements = L * layer;
  x.at = [=](bool v, Index l, Index p, Index h, Index t, Index d) {
    return l * layer + c_order({P, 2, H, N, D}, {p, v, h, t, d});
  };
  x.view = [=](std::byte* memory, std::vector<std::byte*>& bases) {
    return stacked(bases, [&](Index l) {
      return tensorrt_llm::view(Tensor<5>::contiguous(
          offset(memory, l * layer, DType::f32), {P, 2, H, N, D}, DType::f32));
    });
  };
  run_layout(x);
}

TEST_CASE("layouts: SGLang's token slots, one by one and in pages", "[layouts]") {
  for (const std::int32_t page_size : {1, 4}) {
    EngineLayout x = layout_of("SGLang, pages of " + std::to_string(page_size), page_size, 12);
    x.tables = TableKind::slots;
    x.null_id = sglang::dummy_page;
    const Index S = x.pages * page_size, D = 16, Dv = 12, keys = S * H * D;
    const Index layer = keys + S * H * Dv;
    x.elements = L * layer;
    x.at = [=](bool v, Index l, Index p, Index h, Index t, Index d) {
      const Index slot = p * page_size + t;
      return l * layer +
             (v ? keys + c_order({S, H, Dv}, {slot, h, d}) : c_order({S, H, D}, {slot, h, d}));
    };
    x.view = [=](std::byte* memory, std::vector<std::byte*>& bases) {
      return stacked(bases, [&](Index l) {
        return sglang::view(
            Tensor<3>::contiguous(offset(memory, l * layer, DType::f32), {S, H, D}, DType::f32),
            Tensor<3>::contiguous(
                offset(memory, l * layer + keys, DType::f32), {S, H, Dv}, DType::f32),
            page_size);
      });
    };
    run_layout(x);
  }
}

TEST_CASE("layouts: llama.cpp's cells, values by cell and transposed; rows do not move",
          "[layouts]") {
  for (const bool transposed : {false, true}) {
    EngineLayout x = layout_of(transposed ? "llama.cpp, transposed values" : "llama.cpp", 1, 12);
    x.fixed = true;
    const Index P = x.pages, D = 16, Dv = 12, keys = P * H * D, layer = keys + P * H * Dv;
    x.elements = L * layer;
    x.at = [=](bool v, Index l, Index p, Index h, Index, Index d) {
      return l * layer + (!v           ? c_order({P, H, D}, {p, h, d})
                          : transposed ? keys + c_order({H, Dv, P}, {h, d, p})
                                       : keys + c_order({P, H, Dv}, {p, h, d}));
    };
    x.view = [=](std::byte* memory, std::vector<std::byte*>& bases) {
      CacheView view = stacked(bases, [&](Index l) {
        const auto k =
            Tensor<3>::contiguous(offset(memory, l * layer, DType::f32), {P, H, D}, DType::f32);
        void* const v = offset(memory, l * layer + keys, DType::f32);
        return llama_cpp::cells_view(k,
                                     transposed ? Tensor<3>::contiguous(v, {H, Dv, P}, DType::f32)
                                                : Tensor<3>::contiguous(v, {P, H, Dv}, DType::f32),
                                     transposed);
      });
      return view;
    };
    run_layout(x);
  }
}

TEST_CASE("layouts: KV-Compress, a page is one head of one layer", "[layouts]") {
  EngineLayout x = layout_of("KV-Compress");
  x.setup.scope = TableScope::head;
  x.tables = TableKind::layer_first;
  x.pages = 96;
  const Index P = x.pages, N = 4, D = 16, pack = 4, keys = P * D * N;
  x.elements = 2 * keys;
  x.at = [=](bool v, Index, Index p, Index, Index t, Index d) {
    return v ? keys + c_order({P, D, N}, {p, d, t})
             : c_order({P, D / pack, N, pack}, {p, d / pack, t, d % pack});
  };
  x.view = [=](std::byte* memory, std::vector<std::byte*>&) {
    CacheView view =
        tensor_view(Tensor<4>::contiguous(memory, {P, D / pack, N, pack}, DType::f32),
                    "PDNx",
                    Tensor<3>::contiguous(offset(memory, keys, DType::f32), {P, D, N}, DType::f32),
                    "PDN");
    view.layers = L, view.kv_heads = H;  // by table
    return view;
  };
  run_layout(x);
}

TEST_CASE("layouts: OpenVINO GenAI, tables of each layer", "[layouts]") {
  EngineLayout x = layout_of("OpenVINO", 4, 12);
  x.setup.scope = TableScope::layer;
  x.tables = TableKind::per_layer;
  x.pages = 48;
  const Index P = x.pages, N = 4, D = 16, Dv = 12, keys = L * P * H * N * D;
  x.elements = keys + L * P * H * N * Dv;
  x.at = [=](bool v, Index l, Index p, Index h, Index t, Index d) {
    return v ? keys + c_order({L, P, H, N, Dv}, {l, p, h, t, d})
             : c_order({L, P, H, N, D}, {l, p, h, t, d});
  };
  x.view = [=](std::byte* memory, std::vector<std::byte*>&) {
    return tensor_view(
        Tensor<5>::contiguous(memory, {L, P, H, N, D}, DType::f32),
        "LPHND",
        Tensor<5>::contiguous(offset(memory, keys, DType::f32), {L, P, H, N, Dv}, DType::f32),
        "LPHND");
  };
  run_layout(x);
}

TEST_CASE("layouts: dense [B, H, S, D] of Hugging Face and mlx", "[layouts]") {
  EngineLayout x = layout_of("dense", 40, 12);
  x.tables = TableKind::batch;
  x.pages = 2;
  const Index B = 2, S = 40, D = 16, Dv = 12, keys = B * H * S * D;
  const Index layer = keys + B * H * S * Dv;
  x.elements = L * layer;
  x.at = [=](bool v, Index l, Index p, Index h, Index t, Index d) {
    return l * layer +
           (v ? keys + c_order({B, H, S, Dv}, {p, h, t, d}) : c_order({B, H, S, D}, {p, h, t, d}));
  };
  x.view = [=](std::byte* memory, std::vector<std::byte*>& bases) {
    return stacked(bases, [&](Index l) {
      return dense::view(
          Tensor<4>::contiguous(offset(memory, l * layer, DType::f32), {B, H, S, D}, DType::f32),
          Tensor<4>::contiguous(
              offset(memory, l * layer + keys, DType::f32), {B, H, S, Dv}, DType::f32));
    });
  };
  run_layout(x);
}

TEST_CASE("layouts: Dynamo and LMCache, (blocks, layers, outer, N, inner) in two orders",
          "[layouts]") {
  for (const bool blocks_first : {true, false}) {
    EngineLayout x = layout_of(blocks_first ? "Dynamo FC" : "LMCache by layer");
    const Index P = x.pages, N = 4, D = 16;
    x.elements = P * L * 2 * N * H * D;
    x.at = [=](bool v, Index l, Index p, Index h, Index t, Index d) {
      return blocks_first ? c_order({P, L, 2, N, H * D}, {p, l, v, t, h * D + d})
                          : c_order({L, 2, P, N, H * D}, {l, v, p, t, h * D + d});
    };
    x.view = [=](std::byte* memory, std::vector<std::byte*>&) {
      if (blocks_first) {
        const auto all = Tensor<6>::contiguous(memory, {P, L, 2, N, H, D}, DType::f32);
        return tensor_view(all.at(2, 0), "PLNHD", all.at(2, 1), "PLNHD");
      }
      const auto all = Tensor<6>::contiguous(memory, {L, 2, P, N, H, D}, DType::f32);
      return tensor_view(all.at(1, 0), "LPNHD", all.at(1, 1), "LPNHD");
    };
    run_layout(x);
  }
}
