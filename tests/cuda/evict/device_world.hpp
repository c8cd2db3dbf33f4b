// SPDX-License-Identifier: Apache-2.0
#pragma once

// A paged cache with random bytes in every row, twice: on the host and on the device. What one side does must leave both
// with the same bytes.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/observe/plan_shape.hpp>

#include "device_buffer.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace kvtrim::test {

enum class WorldLayout {
  nhd,
  hnd,
  packed,
  legacy,
  layer_bases,
  latent,        // values are the first features of the keys
  latent_bases,  // the same, layer by layer
  keys_only,
};

struct WorldShape {
  WorldLayout layout = WorldLayout::nhd;
  DType dtype = DType::bf16;
  std::int32_t k_dim = 16;
  std::int32_t v_dim = 16;
  std::int32_t sequences = 3;
  std::int32_t layers = 2;
  std::int32_t kv_heads = 2;
  std::int32_t page_size = 4;
  std::int32_t max_pages = 8;
  TableScope scope = TableScope::group;
  std::int32_t spare_pages = 0;
  bool positions = true;  // planes of positions and of sums, by KV head
  bool states = true;
  bool shuffled = false;              // slot order is not position order
  bool holes = false;                 // a hole in every second sequence
  bool padding = false;               // left padding in every second sequence
  bool scales = false;                // a page plane of 6 bytes per row and head
  std::int32_t tokens_per_scale = 1;  // rows of a page that have a scale in common; 0: all
  bool separate_values = false;
  bool flags = false;         // a bit beside the id of every second entry
  std::int32_t reserved = 0;  // entries behind the used ones of every table
  bool counters = false;      // `CacheView::generations`
  bool unrotated = false;     // keys before RoPE, layer by layer
  bool rope = false;          // rope positions; keys are numbers. Of shuffled rows, 0 to n - 1
  std::int32_t value_base_shift = 0;  // bytes that the values of layer l begin later: l times this
  std::uint32_t seed = 1;
};

/// One side: arrays that a view points into.
template <template <class> class Array>
struct WorldArrays {
  Array<std::byte> pool;
  Array<std::byte> scales;
  Array<std::int32_t> ids;
  Array<std::int32_t> first_rows;
  Array<std::int32_t> positions;
  Array<std::int32_t> ropes;
  Array<float> sums;
  Array<float> compensations;
  Array<SequenceState> states;
  Array<PagePlane> page_planes;
  Array<std::byte*> layer_bases;
  Array<std::int32_t> reserved;
  Array<std::uint64_t> counters;
  Array<std::byte> unrotated;
};
template <class T>
using HostArray = std::vector<T>;

class World {
 public:
  explicit World(const WorldShape& shape) : shape_(shape) {
    std::mt19937 random(shape.seed);
    const std::int32_t tables = tables_of(shape.scope, shape.layers, shape.kv_heads);
    const std::int32_t each = shape.separate_values ? 2 : 1;
    pages_ = shape.sequences * tables * shape.max_pages * each + shape.spare_pages;
    const std::int64_t row = (shape.k_dim + shape.v_dim) * std::int64_t{element_bytes(shape.dtype)};
    host_.pool.resize(
        static_cast<std::size_t>(row * shape.layers * pages_ * shape.page_size * shape.kv_heads));
    for (std::byte& b : host_.pool) { b = static_cast<std::byte>(random()); }
    host_.scales.resize(static_cast<std::size_t>(std::int64_t{6} * shape.layers * pages_ *
                                                 shape.page_size * shape.kv_heads));
    for (std::byte& b : host_.scales) { b = static_cast<std::byte>(random()); }
    std::vector<std::int32_t> order(static_cast<std::size_t>(pages_));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    spares_.assign(order.end() - shape.spare_pages, order.end());
    host_.ids.assign(static_cast<std::size_t>(shape.sequences * tables * shape.max_pages * each),
                     -1);
    const std::int32_t capacity = shape.max_pages * shape.page_size;
    const std::size_t elements = static_cast<std::size_t>(shape.sequences) *
                                 static_cast<std::size_t>(shape.layers * shape.kv_heads * capacity);
    host_.positions.resize(elements);
    host_.sums.resize(elements);
    host_.compensations.resize(elements);
    for (float& x : host_.sums) { x = static_cast<float>(random() % 8) * 0.5F; }
    for (float& x : host_.compensations) { x = static_cast<float>(random() % 2) * 1e-7F; }
    host_.first_rows.assign(static_cast<std::size_t>(shape.sequences), 0);
    std::size_t next = 0;
    for (std::int32_t s = 0; s < shape.sequences; ++s) {
      const std::int32_t first = shape.padding && s % 2 == 0 ? shape.page_size + 1 : 0;
      host_.first_rows[static_cast<std::size_t>(s)] = first;
      for (std::int32_t t = 0; t < tables; ++t) {
        const bool hole = shape.holes && s % 2 == 1;
        const std::int32_t room =
            capacity - shape.reserved * shape.page_size - first - (hole ? 1 : 0);
        const std::int32_t live =
            s == 0 ? room : 1 + static_cast<std::int32_t>(random() % static_cast<unsigned>(room));
        SequenceState state;
        state.live_rows = live;
        state.next_position = live + 10;
        state.append_row =
            hole ? static_cast<std::int32_t>(random() % static_cast<unsigned>(live + 1)) : -1;
        if (state.append_row == live) { state.append_row = -1; }
        state.ordered = !shape.shuffled;
        state.generation = random() % 100;
        state.rows_at_eviction = shape.shuffled ? live - 1 : 0;
        host_.states.push_back(state);
        const std::int32_t used =
            pages_for(state.extent() + first, shape.page_size) + shape.reserved;
        host_.reserved.push_back(shape.reserved);
        host_.counters.push_back(random() % 100);
        for (std::int32_t e = 0; e < used; ++e) {
          const std::size_t at =
              static_cast<std::size_t>((s * tables + t) * shape.max_pages * each + e);
          host_.ids[at] = order[next++];
          if (each == 2) {
            host_.ids[at + static_cast<std::size_t>(shape.max_pages)] = order[next++];
          }
        }
      }
    }
    for (std::size_t e = 0; shape.flags && e < host_.ids.size(); e += 2) {
      if (host_.ids[e] >= 0) { host_.ids[e] |= std::numeric_limits<std::int32_t>::min(); }
    }
    // Positions ascend by row, or are shuffled, and skip the hole.
    for (std::int32_t s = 0; s < shape.sequences; ++s) {
      for (std::int32_t l = 0; l < shape.layers; ++l) {
        for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
          const std::int32_t t = table_of(shape.scope, shape.kv_heads, LayerId{l}, HeadId{h});
          const SequenceState& state = host_.states[static_cast<std::size_t>(s * tables + t)];
          std::vector<std::int32_t> p(static_cast<std::size_t>(state.live_rows));
          std::iota(p.begin(), p.end(), 10);
          if (shape.shuffled) { std::shuffle(p.begin(), p.end(), random); }
          std::size_t i = 0;
          for (std::int32_t r = 0; r < capacity; ++r) {
            const bool row_there = r < state.extent() && r != state.append_row;
            host_.positions[static_cast<std::size_t>(
                ((s * shape.layers + l) * shape.kv_heads + h) * capacity + r)] =
                row_there ? p[i++] : -7;
          }
        }
      }
    }
    if (shape.rope) { number_rows(random); }
    host_.page_planes.resize(shape.scales ? 1 : 0);
    host_.layer_bases.resize(
        shape.layout == WorldLayout::layer_bases || shape.layout == WorldLayout::latent_bases
            ? static_cast<std::size_t>((shape.unrotated ? 3 : 2) * shape.layers)
            : 0);
    host_.pool.resize(host_.pool.size() +
                      static_cast<std::size_t>(shape.value_base_shift * shape.layers));
    host_.unrotated.resize(shape.unrotated ? static_cast<std::size_t>(half()) : 0);
    for (std::byte& b : host_.unrotated) { b = static_cast<std::byte>(random()); }
    if (shape.rope) { fill_numbers(host_.unrotated, random); }
    device_ = std::make_unique<Device>(*this);
    fill_pointers(host_, host_.pool.data(), host_.scales.data(), host_.unrotated.data());
    WorldArrays<HostArray> pointers;
    pointers.page_planes.resize(host_.page_planes.size());
    pointers.layer_bases.resize(host_.layer_bases.size());
    fill_pointers(
        pointers, device_->pool.data(), device_->scales.data(), device_->unrotated.data());
    device_->page_planes.upload(pointers.page_planes);
    device_->layer_bases.upload(pointers.layer_bases);
  }

  [[nodiscard]] CacheView host_view() { return view_of(host_); }
  [[nodiscard]] CacheView device_view() { return view_of(*device_); }
  [[nodiscard]] std::int32_t pages() const { return pages_; }
  [[nodiscard]] std::int32_t capacity() const { return shape_.max_pages * shape_.page_size; }
  [[nodiscard]] const std::vector<std::int32_t>& spares() const { return spares_; }

  /// What differs between the two sides; empty: nothing.
  [[nodiscard]] std::string difference() const {
    if (device_->pool.download() != host_.pool) { return "pages"; }
    if (device_->scales.download() != host_.scales) { return "scales"; }
    if (device_->unrotated.download() != host_.unrotated) { return "unrotated keys"; }
    if (device_->counters.download() != host_.counters) { return "counters"; }
    if (device_->ids.download() != host_.ids) { return "page ids"; }
    if (device_->positions.download() != host_.positions) { return "positions"; }
    if (device_->ropes.download() != host_.ropes) { return "rope positions"; }
    const auto same_bits = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;  // NaN too
    };
    if (!same_bits(device_->sums.download(), host_.sums)) { return "sums"; }
    if (!same_bits(device_->compensations.download(), host_.compensations)) {
      return "compensations";
    }
    const auto states = device_->states.download();
    for (std::size_t i = 0; i < states.size(); ++i) {
      const SequenceState& a = states[i];
      const SequenceState& b = host_.states[i];
      if (a.live_rows != b.live_rows || a.append_row != b.append_row || a.ordered != b.ordered ||
          a.generation != b.generation || a.open != b.open || a.applied != b.applied ||
          a.rows_at_eviction != b.rows_at_eviction || a.next_position != b.next_position ||
          a.next_rope_position != b.next_rope_position || a.steps != b.steps) {
        return "state " + std::to_string(i);
      }
    }
    return {};
  }

  struct Device {
    explicit Device(const World& w)
        : pool(w.host_.pool, "pages"),
          scales(w.host_.scales, "scales"),
          ids(w.host_.ids, "page ids"),
          first_rows(w.host_.first_rows, "first rows"),
          positions(w.host_.positions, "positions"),
          ropes(w.host_.ropes, "rope positions"),
          sums(w.host_.sums, "sums"),
          compensations(w.host_.compensations, "compensations"),
          states(w.host_.states, "states"),
          page_planes(w.host_.page_planes.size(), "page planes"),
          layer_bases(w.host_.layer_bases.size(), "layer bases"),
          reserved(w.host_.reserved, "reserved pages"),
          counters(w.host_.counters, "generations"),
          unrotated(w.host_.unrotated, "unrotated keys") {}
    DeviceBuffer<std::byte> pool;
    DeviceBuffer<std::byte> scales;
    DeviceBuffer<std::int32_t> ids;
    DeviceBuffer<std::int32_t> first_rows;
    DeviceBuffer<std::int32_t> positions;
    DeviceBuffer<std::int32_t> ropes;
    DeviceBuffer<float> sums;
    DeviceBuffer<float> compensations;
    DeviceBuffer<SequenceState> states;
    DeviceBuffer<PagePlane> page_planes;
    DeviceBuffer<std::byte*> layer_bases;
    DeviceBuffer<std::int32_t> reserved;
    DeviceBuffer<std::uint64_t> counters;
    DeviceBuffer<std::byte> unrotated;
  };
  [[nodiscard]] WorldArrays<HostArray>& host() { return host_; }
  [[nodiscard]] Device& device() { return *device_; }

 private:
  [[nodiscard]] std::int64_t half() const {  // bytes of the keys of all layers
    return static_cast<std::int64_t>(shape_.k_dim) * element_bytes(shape_.dtype) * shape_.layers *
           pages_ * shape_.page_size * shape_.kv_heads;
  }

  // Rope positions beside the positions, and keys and values that are numbers.
  void number_rows(std::mt19937& random) {
    host_.ropes = host_.positions;
    for (std::int32_t& p : host_.ropes) { p += shape_.shuffled ? -10 : p < 0 ? 0 : 5; }
    for (SequenceState& state : host_.states) {
      state.next_rope_position = state.live_rows + (shape_.shuffled ? 0 : 15);
    }
    fill_numbers(host_.pool, random);
  }
  void fill_numbers(std::vector<std::byte>& bytes, std::mt19937& random) const {
    std::normal_distribution<float> normal;
    const auto element = static_cast<std::size_t>(element_bytes(shape_.dtype));
    for (std::size_t i = 0; i + element <= bytes.size(); i += element) {
      store_element(bytes.data() + i, shape_.dtype, normal(random));
    }
  }

  void fill_pointers(WorldArrays<HostArray>& arrays,
                     std::byte* pool,
                     std::byte* scales,
                     std::byte* unrotated) const {
    const auto layers = static_cast<std::size_t>(shape_.layers);
    const std::int64_t shift = shape_.value_base_shift;
    const std::int64_t values =
        static_cast<std::int64_t>(host_.pool.size()) - half() - shift * shape_.layers;
    for (std::size_t l = 0; l < layers && !arrays.layer_bases.empty(); ++l) {
      const auto n = static_cast<std::int64_t>(l);
      arrays.layer_bases[l] = pool + n * half() / shape_.layers;
      arrays.layer_bases[l + layers] = pool + half() + n * values / shape_.layers + n * shift;
      if (shape_.unrotated) {
        arrays.layer_bases[l + 2 * layers] = unrotated + n * half() / shape_.layers;
      }
    }
    if (!arrays.page_planes.empty()) {
      PagePlane& p = arrays.page_planes[0];
      p.base = scales;
      p.row_bytes = 6;
      p.head_stride = 6;
      p.token_stride = 6 * shape_.kv_heads;
      p.page_stride = p.token_stride * shape_.page_size;
      p.layer_stride = p.page_stride * pages_;
      p.of_values = true;
      if (shape_.tokens_per_scale == 0) {
        p.token_stride = 0;
      } else {
        p.tokens_per_entry = shape_.tokens_per_scale;
      }
    }
  }

  template <class Arrays>
  [[nodiscard]] CacheView view_of(Arrays& a) const {
    CacheView v;
    v.page_size = shape_.page_size;
    v.pages = pages_;
    v.kv_heads = shape_.kv_heads;
    v.layers = shape_.layers;
    v.sequences = shape_.sequences;
    v.scope = shape_.scope;
    const PlaneShape k{shape_.page_size, shape_.kv_heads, shape_.k_dim, shape_.dtype};
    const PlaneShape values{shape_.page_size, shape_.kv_heads, shape_.v_dim, shape_.dtype};
    std::byte* const pool = a.pool.data();
    switch (shape_.layout) {
      case WorldLayout::nhd:
      case WorldLayout::layer_bases:
        v.k = Plane::nhd(pool, k);
        v.v = Plane::nhd(pool + half(), values);
        break;
      case WorldLayout::hnd:
        v.k = Plane::hnd(pool, k);
        v.v = Plane::hnd(pool + half(), values);
        break;
      case WorldLayout::legacy:
        v.k = Plane::vllm_packed_keys(pool, k);
        v.v = Plane::transposed(pool + half(), values);
        break;
      case WorldLayout::latent:
      case WorldLayout::latent_bases:
        v.k = Plane::nhd(pool, k);
        v.v = v.k;
        v.v.head_dim = shape_.v_dim;
        break;
      case WorldLayout::keys_only:
        v.k = Plane::nhd(pool, k);
        break;
      case WorldLayout::packed: {
        v.k = Plane::nhd(pool, k);
        const std::int64_t row =
            v.k.row_bytes() + shape_.v_dim * std::int64_t{element_bytes(shape_.dtype)};
        v.k.head_stride = row;
        v.k.token_stride = row * shape_.kv_heads;
        v.k.page_stride = v.k.token_stride * shape_.page_size;
        v.v = v.k;
        v.v.base = pool + v.k.row_bytes();
        v.v.head_dim = shape_.v_dim;
        break;
      }
    }
    v.k.layer_stride = v.k.page_stride * pages_;
    v.v.layer_stride = v.v.page_stride * pages_;
    if (shape_.layout == WorldLayout::layer_bases) {
      v.k.layer_bases = a.layer_bases.data();
      v.v.layer_bases = a.layer_bases.data() + shape_.layers;
    }
    if (shape_.layout == WorldLayout::latent_bases) {
      v.k.layer_bases = v.v.layer_bases = a.layer_bases.data();
    }
    if (shape_.unrotated) {
      v.unrotated_keys = Plane::nhd(a.unrotated.data(), k);
      v.unrotated_keys.layer_stride = v.k.layer_stride;
      if (!host_.layer_bases.empty()) {
        v.unrotated_keys.layer_bases = a.layer_bases.data() + 2 * shape_.layers;
      }
    }
    if (shape_.reserved > 0) { v.reserved_pages = a.reserved.data(); }
    if (shape_.counters) { v.generations = a.counters.data(); }
    const std::int32_t tables = v.tables_per_sequence();
    v.table.ids = a.ids.data();
    if (shape_.flags) { v.table.id_mask = std::numeric_limits<std::int32_t>::max(); }
    v.table.max_pages = shape_.max_pages;
    v.table.row_stride = shape_.max_pages * (shape_.separate_values ? 2 : 1);
    v.table.v_offset = shape_.separate_values ? shape_.max_pages : 0;
    v.table.rows = {tables,
                    shape_.scope == TableScope::layer  ? 1
                    : shape_.scope == TableScope::head ? shape_.kv_heads
                                                       : 0,
                    shape_.scope == TableScope::head ? 1 : 0};
    v.first_rows = a.first_rows.data();
    v.states = a.states.data();
    if (shape_.positions) {
      v.positions =
          SequencePlane::dense(a.positions.data(), shape_.layers, shape_.kv_heads, capacity());
      v.score_sums =
          SequencePlane::dense(a.sums.data(), shape_.layers, shape_.kv_heads, capacity());
      v.score_compensations =
          SequencePlane::dense(a.compensations.data(), shape_.layers, shape_.kv_heads, capacity());
    }
    if (shape_.rope) {
      v.rope_positions =
          SequencePlane::dense(a.ropes.data(), shape_.layers, shape_.kv_heads, capacity());
    }
    if (shape_.scales) {
      v.page_planes = a.page_planes.data();
      v.page_plane_count = 1;
    }
    return v;
  }

  WorldShape shape_;
  std::int32_t pages_ = 0;
  std::vector<std::int32_t> spares_;
  WorldArrays<HostArray> host_;
  std::unique_ptr<Device> device_;
};

}  // namespace kvtrim::test
