// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cuda/evict/rerotate.cuh>

#include "catch.hpp"
#include "device_buffer.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using namespace kvtrim;
using kvtrim::test::device_message;
using kvtrim::test::DeviceBuffer;
using kvtrim::test::finish;

namespace {

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

struct Options {
  DType dtype = DType::f32;
  std::int32_t dim = 64;
  std::int32_t rope_dim = 64;
  std::int32_t offset = 0;
  RopePairs pairs = RopePairs::half_split;
  PositionMode mode = PositionMode::in_cache;
  bool unrotated = false;
  bool targets = false;
  bool same_for_all_layers = false;
  std::int32_t skew = 0;  // floats that the pool is moved by: 16-byte alignment is lost
};

constexpr std::int32_t layers = 2;
constexpr std::int32_t kv_heads = 2;
constexpr std::int32_t page_size = 4;
constexpr std::int32_t lengths[] = {13, 0, 150};
constexpr std::int32_t sequences = 3;
constexpr std::int32_t max_rows = 150;
constexpr std::int32_t sinks = 4;
constexpr std::int32_t shared_page_entry = 1;  // of sequence 2: its page must not be written

// The pools, tables and planes of one run, on the host.
class World {
 public:
  explicit World(const Options& options) : o(options), rng_(7) {
    const std::int32_t entries = pages_for(max_rows, page_size);
    pages = 2 + entries * sequences;
    ids.resize(at(entries * sequences));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng_);
    ref_counts.assign(at(pages), 1);
    ref_counts[at(ids[at(2 * entries + shared_page_entry)])] = 2;
    plane = Plane::nhd(nullptr, {page_size, kv_heads, o.dim, o.dtype});
    plane.layer_stride = plane.page_stride * pages;
    const std::int64_t bytes = plane.layer_stride * layers;
    keys.resize(at(bytes + o.skew * 4));
    originals.resize(at(bytes));
    for (std::int64_t i = 0; i < bytes / element_bytes(o.dtype); ++i) {
      store_element(keys.data() + o.skew * 4 + i * element_bytes(o.dtype), o.dtype, draw());
      store_element(originals.data() + i * element_bytes(o.dtype), o.dtype, draw());
    }
    pristine.resize(at(sequences * layers * kv_heads * sinks * o.dim));
    for (float& x : pristine) { x = draw(); }
    stands.resize(at(sequences * layers * kv_heads * max_rows));
    targets.resize(stands.size());
    for (std::size_t i = 0; i < stands.size(); ++i) {
      const auto r = static_cast<std::int32_t>(i % max_rows);
      stands[i] = r % 5 == 0 ? r : r + static_cast<std::int32_t>(rng_() % 100'000);
      targets[i] = static_cast<std::int32_t>(rng_() % 1000);
    }
    const std::int64_t half = o.rope_dim / 2;
    for (std::int64_t l = 0; l < (o.same_for_all_layers ? 1 : layers); ++l) {
      const auto of_layer = rope_frequencies(l == 0 ? 10'000.0 : 500'000.0, o.rope_dim);
      frequencies.insert(frequencies.end(), of_layer.begin(), of_layer.begin() + half);
    }
  }

  // With pointers to these arrays, wherever they are.
  CacheView view(std::byte* k,
                 std::byte* source,
                 const std::int32_t* table,
                 const std::int32_t* live,
                 const std::int32_t* counts,
                 std::int32_t* positions) const {
    CacheView v;
    v.k = plane;
    v.k.base = k + o.skew * 4;
    if (o.unrotated) {
      v.unrotated_keys = plane;
      v.unrotated_keys.base = source;
    }
    v.page_size = page_size;
    v.pages = pages;
    v.kv_heads = kv_heads;
    v.layers = layers;
    v.sequences = sequences;
    v.table.ids = table;
    v.table.row_stride = v.table.max_pages = pages_for(max_rows, page_size);
    v.lengths = live;
    v.writable.ref_counts = counts;
    v.rope_positions = SequencePlane::dense(positions, layers, kv_heads, max_rows);
    return v;
  }

  // What the CPU makes of it.
  void rotate_on_cpu() {
    const CacheView v =
        view(keys.data(), originals.data(), ids.data(), lengths, ref_counts.data(), stands.data());
    Rope rope;
    rope.inverse_frequencies = frequencies;
    rope.dim = o.rope_dim;
    rope.offset = o.offset;
    rope.pairs = o.pairs;
    rope.same_for_all_layers = o.same_for_all_layers;
    const Rerotator rerotator(v, rope, o.mode, {pristine.data(), sinks});
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (std::int32_t l = 0; l < layers; ++l) {
        for (std::int32_t h = 0; h < kv_heads; ++h) {
          for (std::int32_t r = 0;
               r <
               (o.mode == PositionMode::sinks_follow ? std::min(sinks, lengths[s]) : lengths[s]);
               ++r) {
            const PageId page = v.k_page(SequenceId{s}, LayerId{l}, HeadId{h}, r / page_size);
            if (!v.writable(page, LayerId{l}, HeadId{h})) { continue; }
            std::int32_t& from =
                v.rope_positions.at<std::int32_t>(SequenceId{s}, LayerId{l}, HeadId{h}, r);
            const std::int32_t to =
                o.targets ? targets[at(((s * layers + l) * kv_heads + h) * max_rows + r)] : r;
            rerotator.renumber({v, SequenceId{s}, LayerId{l}, HeadId{h}},
                               {page, page, Slot{r % page_size}},
                               r,
                               from,
                               to);
            from = to;
          }
        }
      }
    }
  }

  Options o;
  Plane plane;
  std::int32_t pages = 0;
  std::vector<std::int32_t> ids, ref_counts, stands, targets;
  std::vector<std::byte> keys, originals;
  std::vector<float> pristine;
  std::vector<double> frequencies;

 private:
  float draw() { return static_cast<float>(static_cast<std::int32_t>(rng_() % 256) - 128) / 64; }
  std::mt19937 rng_;
};

// Largest difference of a feature in units of its bound; infinite where a byte changed that must not, or a position.
double worst_error(const Options& options) {
  World w(options);
  DeviceBuffer<std::byte> keys(w.keys, "keys");
  DeviceBuffer<std::byte> originals(w.originals, "un-rotated keys");
  DeviceBuffer<std::int32_t> ids(w.ids, "page ids");
  DeviceBuffer<std::int32_t> live(std::vector<std::int32_t>(lengths, lengths + sequences),
                                  "lengths");
  DeviceBuffer<std::int32_t> counts(w.ref_counts, "ref counts");
  DeviceBuffer<std::int32_t> stands(w.stands, "rope positions");
  DeviceBuffer<std::int32_t> targets(w.targets, "targets");
  DeviceBuffer<float> pristine(w.pristine, "sinks");
  DeviceBuffer<double> frequencies(w.frequencies, "frequencies");
  const CacheView view =
      w.view(keys.data(), originals.data(), ids.data(), live.data(), counts.data(), stands.data());
  const std::size_t bytes = cuda::rerotate_workspace_bytes(view);
  DeviceBuffer<std::byte> workspace(bytes, "workspace");
  const cuda::DeviceRope rope{frequencies.data(),
                              options.rope_dim,
                              options.offset,
                              options.pairs,
                              RopeKind::standard,
                              options.same_for_all_layers};
  const cudaError_t error = cuda::rerotate(
      view,
      rope,
      options.mode,
      {pristine.data(), sinks},
      options.targets ? SequencePlane::dense(targets.data(), layers, kv_heads, max_rows)
                      : SequencePlane{},
      max_rows,
      workspace.data(),
      bytes,
      nullptr);
  INFO(device_message());
  REQUIRE(error == cudaSuccess);
  REQUIRE(finish() == cudaSuccess);
  const std::vector<std::byte> got = keys.download();
  const std::vector<std::byte> before = w.keys;
  w.rotate_on_cpu();
  if (stands.download() != w.stands) { return HUGE_VAL; }
  double worst = 0;
  const std::int32_t element = element_bytes(options.dtype);
  std::size_t changed = 0;
  for (std::size_t i = at(options.skew * 4); i < got.size(); i += at(element)) {
    if (std::memcmp(&w.keys[i], &before[i], at(element)) == 0 &&
        std::memcmp(&got[i], &before[i], at(element)) == 0) {
      continue;
    }
    ++changed;
    const auto x = static_cast<double>(load_element(&got[i], options.dtype));
    const auto y = static_cast<double>(load_element(&w.keys[i], options.dtype));
    // |x| and |y| of a pair are below 2: 4 * 2^-24 * 4, and an ulp of the type.
    const double ulp =
        options.dtype == DType::f32 ? 0 : std::ldexp(1, options.dtype == DType::f16 ? -9 : -6);
    worst = std::max(worst, std::fabs(x - y) / (std::ldexp(1, -20) + ulp));
  }
  return changed == 0 ? HUGE_VAL : worst;
}

std::string describe(const Options& o) {
  return std::string(to_string(o.dtype)) + ", rotary range [" + std::to_string(o.offset) + ", " +
         std::to_string(o.offset + o.rope_dim) + "), pairs " +
         std::to_string(static_cast<int>(o.pairs)) + ", skew " + std::to_string(o.skew) +
         ", targets " + std::to_string(o.targets);
}

}  // namespace

TEST_CASE("cuda rerotate: f32 keys are rotated in place as on the CPU", "[rerotate][parity]") {
  for (const RopePairs pairs : {RopePairs::half_split, RopePairs::interleaved}) {
    for (const std::int32_t skew : {0, 1}) {
      for (const bool targets : {false, true}) {
        for (const auto& [rope_dim, offset] :
             {std::pair{64, 0}, std::pair{32, 8}, std::pair{6, 2}, std::pair{4, 60}}) {
          const Options o{.rope_dim = rope_dim,
                          .offset = offset,
                          .pairs = pairs,
                          .targets = targets,
                          .same_for_all_layers = targets,
                          .skew = skew};
          INFO(describe(o));
          CHECK(worst_error(o) <= 1);
        }
      }
    }
  }
}

TEST_CASE("cuda rerotate: 16-bit keys come from un-rotated keys or pristine sinks",
          "[rerotate][parity]") {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const RopePairs pairs : {RopePairs::half_split, RopePairs::interleaved}) {
      Options o{.dtype = dtype, .rope_dim = 48, .offset = 8, .pairs = pairs, .unrotated = true};
      INFO(describe(o));
      CHECK(worst_error(o) <= 1);
      o.unrotated = false;
      o.mode = PositionMode::sinks_follow;
      o.targets = true;
      CHECK(worst_error(o) <= 1);
    }
  }
}

TEST_CASE("cuda rerotate: what cannot be rotated well is refused before any launch",
          "[rerotate][edge]") {
  World w({});
  DeviceBuffer<std::byte> keys(w.keys, "keys");
  DeviceBuffer<std::int32_t> ids(w.ids, "page ids");
  DeviceBuffer<std::int32_t> live(std::vector<std::int32_t>(lengths, lengths + sequences),
                                  "lengths");
  DeviceBuffer<std::int32_t> counts(w.ref_counts, "ref counts");
  DeviceBuffer<std::int32_t> stands(w.stands, "rope positions");
  DeviceBuffer<double> frequencies(w.frequencies, "frequencies");
  struct Call {
    CacheView view;
    cuda::DeviceRope rope;
    PositionMode mode;
    PristineSinks pristine;
    std::byte* memory;
    std::size_t bytes;
  };
  const CacheView view =
      w.view(keys.data(), nullptr, ids.data(), live.data(), counts.data(), stands.data());
  const std::size_t enough = cuda::rerotate_workspace_bytes(view);
  DeviceBuffer<std::byte> workspace(enough, "workspace");
  const auto code = [&](void (*change)(Call&)) {
    Call c{view, {frequencies.data(), 64}, PositionMode::in_cache, {}, workspace.data(), enough};
    change(c);
    return cuda::rerotate(
        c.view, c.rope, c.mode, c.pristine, {}, max_rows, c.memory, c.bytes, nullptr);
  };
  const auto refused = [&](void (*change)(Call&)) { return code(change) == cudaErrorInvalidValue; };
  CHECK(code([](Call& c) { c.mode = PositionMode::keep; }) == cudaSuccess);
  CHECK(keys.download() == w.keys);
  CHECK(refused([](Call& c) { c.rope.kind = RopeKind::mrope; }));
  CHECK(refused([](Call& c) { c.rope.kind = RopeKind::dynamic_ntk; }));
  CHECK(refused([](Call& c) { c.rope.kind = RopeKind::alibi; }));
  CHECK(refused([](Call& c) { c.rope.inverse_frequencies = nullptr; }));
  CHECK(refused([](Call& c) { c.rope.dim = 63; }));
  CHECK(refused([](Call& c) { c.rope.offset = 2; }));
  CHECK(refused([](Call& c) { c.view.k.dtype = DType::bf16; }));
  CHECK(refused([](Call& c) { c.view.k.dtype = DType::f8e4m3; }));
  CHECK(refused([](Call& c) { c.view.k.base += 2; }));
  CHECK(refused([](Call& c) {  // the first four features of a key are its value
    c.view.v = c.view.k;
    c.view.v.head_dim = 4;
  }));
  CHECK(refused([](Call& c) { c.mode = PositionMode::sinks_follow; }));
  CHECK(refused([](Call& c) { c.view.rope_positions = {}; }));
  CHECK(refused([](Call& c) { c.view.rope_positions.head_stride = 0; }));
  CHECK(refused([](Call& c) { c.view.rope_positions.layer_stride = 0; }));
  CHECK(refused([](Call& c) { --c.bytes; }));
  CHECK(refused([](Call& c) { c.memory += 8; }));
  CHECK(keys.download() == w.keys);
  CHECK(code([](Call&) {}) == cudaSuccess);
  CHECK(keys.download() != w.keys);
}
