// SPDX-License-Identifier: Apache-2.0
#pragma once

// A batch of sequences in device memory, its twin on the host, and attention to it in double as a textbook writes it.
// Every byte of the pool that is not part of a key is 0xFF: a NaN in every type.

#include "device_buffer.hpp"

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cuda/observe/detail/queries.cuh>
#include <kvtrim/policy/window_params.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace kvtrim::test {

inline std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

enum class Layout { nhd, hnd, padded, packed, transposed };
enum class Tables { dense, csr, per_head, per_layer };

struct WorldOptions {
  DType dtype = DType::f32;
  std::int32_t dim = 64;
  std::int32_t page_size = 4;
  std::int32_t kv_heads = 2;
  std::int32_t group = 1;
  std::int32_t layers = 1;
  std::vector<std::int32_t> lengths = {40};  // live rows of each sequence
  Layout layout = Layout::nhd;
  Tables tables = Tables::dense;
  bool shuffled = false;   // rows are out of order of their positions, which have gaps
  std::int32_t hole = -1;  // row that is a hole
  std::int32_t left_padding = 0;
  bool score_planes = false;
  std::int32_t queries = 8;  // maximum rows per sequence that have queries: its last ones
  DType query_dtype = DType::f32;
  bool lse = true;
  LseBase lse_base = LseBase::e;
  float scale = 0;
  float soft_cap = 0;
  std::int32_t skew = 0;  // elements that bases are moved by: 16-byte alignment is lost
  bool key_scales = false;
  std::uint32_t seed = 1;
  std::vector<std::int32_t> slots = {};  // where each sequence's queries lie; empty: s in slot s
  bool ring = false;                     // rows are found by their firsts, positions are given
};

/// Value of fp8 bits, by the definition of the format.
inline double fp8_value(std::uint8_t bits, DType dtype) {
  const int mantissa_bits = dtype == DType::f8e4m3 ? 3 : 2;
  const int bias = dtype == DType::f8e4m3 ? 7 : 15;
  const int exponent = (bits & 0x7F) >> mantissa_bits;
  const double fraction =
      static_cast<double>(bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits);
  const double sign = (bits & 0x80) != 0 ? -1 : 1;
  if (dtype == DType::f8e4m3 && (bits & 0x7F) == 0x7F) { return std::nan(""); }
  if (dtype == DType::f8e5m2 && exponent == 31) {
    return fraction == 0 ? sign * HUGE_VAL : std::nan("");
  }
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1 + fraction, exponent - bias);
}

/// Bits of one element and the value they stand for.
struct Stored {
  std::uint32_t bits;
  double value;
};
inline Stored store(double x, DType dtype) {
  const auto f = static_cast<float>(x);
  switch (dtype) {
    case DType::f16:
      return {float_to_f16(f), static_cast<double>(f16_to_float(float_to_f16(f)))};
    case DType::bf16:
      return {float_to_bf16(f), static_cast<double>(bf16_to_float(float_to_bf16(f)))};
    case DType::f8e4m3:
    case DType::f8e5m2: {
      if (std::isnan(x)) { return {0x7F, x}; }
      static const auto values = [] {
        std::array<std::array<double, 256>, 2> all{};
        for (int b = 0; b < 256; ++b) {
          all[0][at(b)] = fp8_value(static_cast<std::uint8_t>(b), DType::f8e4m3);
          all[1][at(b)] = fp8_value(static_cast<std::uint8_t>(b), DType::f8e5m2);
        }
        return all;
      }();
      const auto& of_type = values[dtype == DType::f8e4m3 ? 0 : 1];
      std::size_t nearest = 0;
      for (std::size_t b = 0; b < 256; ++b) {
        if (std::isfinite(of_type[b]) &&
            std::fabs(of_type[b] - x) < std::fabs(of_type[nearest] - x)) {
          nearest = b;
        }
      }
      return {static_cast<std::uint32_t>(nearest), of_type[nearest]};
    }
    default:
      return {std::bit_cast<std::uint32_t>(f), static_cast<double>(f)};
  }
}

/// Device memory that takes the size of what it is given.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const char* name) : name_(name) {}
  void upload(const std::vector<T>& values) {
    if (buffer_ == nullptr || buffer_->size() != values.size()) {
      buffer_ = std::make_unique<DeviceBuffer<T>>(values.size(), name_);
    }
    buffer_->upload(values);
  }
  T* data() const { return buffer_->data(); }
  std::vector<T> download() const { return buffer_->download(); }

 private:
  const char* name_;
  std::unique_ptr<DeviceBuffer<T>> buffer_;
};

/// The world. `view` and `queries` are the device's, `host_view` and `host_queries` the host's.
class ScoreWorld {
 public:
  explicit ScoreWorld(const WorldOptions& options) : o(options), rng_(options.seed) {
    sequences = static_cast<std::int32_t>(o.lengths.size());
    max_rows = *std::max_element(o.lengths.begin(), o.lengths.end()) + 1;
    make_tables();
    make_keys();
    make_positions();
    make_queries();
    make_host_view();
    fill();
    upload();
  }

  std::int32_t live(std::int32_t s) const { return o.lengths[at(s)]; }
  std::int32_t extent(std::int32_t s) const { return live(s) + (hole(s) >= 0 ? 1 : 0); }
  std::int32_t hole(std::int32_t s) const { return o.hole < live(s) ? o.hole : -1; }
  std::int64_t item(std::int32_t s, std::int32_t l, std::int32_t h) const {
    return (static_cast<std::int64_t>(s) * o.layers + l) * o.kv_heads + h;
  }
  std::int64_t row_index(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) const {
    return item(s, l, h) * max_rows + r;
  }
  double* key(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) {
    return keys_.data() + row_index(s, l, h, r) * o.dim;
  }
  std::int32_t position(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) const {
    return positions_[at(row_index(s, l, h, r))];
  }
  std::int32_t next_position(std::int32_t s) const { return next_[at(s)]; }
  std::int32_t slot(std::int32_t s) const { return o.slots.empty() ? s : o.slots[at(s)]; }
  std::int32_t query_count(std::int32_t s) const { return query_counts_[at(slot(s))]; }
  std::int64_t query_row(std::int32_t s, std::int32_t l, std::int32_t head, std::int32_t i) const {
    return ((static_cast<std::int64_t>(slot(s)) * o.layers + l) * o.kv_heads * o.group + head) *
               o.queries +
           i;
  }
  double* query(std::int32_t s, std::int32_t l, std::int32_t head, std::int32_t i) {
    return query_values_.data() + query_row(s, l, head, i) * o.dim;
  }
  std::int32_t query_position(std::int32_t s, std::int32_t i) const {
    return next_position(s) - query_count(s) + i;
  }
  double& lse(std::int32_t s, std::int32_t l, std::int32_t head, std::int32_t i) {
    return lse_[at(query_row(s, l, head, i))];
  }
  double scale(std::int32_t l, std::int32_t h) const {
    const double plain = o.scale != 0 ? static_cast<double>(o.scale) : 1 / std::sqrt(o.dim);
    return plain * (o.key_scales ? static_cast<double>(scales_[at(l * o.kv_heads + h)]) : 1);
  }

  /// Writes a value to a key, on both sides.
  void put_key(
      std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r, std::int32_t d, double x) {
    const Stored stored = store(x, o.dtype);
    key(s, l, h, r)[d] = stored.value;
    std::byte* const to =
        host_view.key(SequenceId{s}, LayerId{l}, HeadId{h}, r) + host_view.k.feature_offset(d);
    std::memcpy(to, &stored.bits, at(element_bytes(o.dtype)));
  }
  void put_query(
      std::int32_t s, std::int32_t l, std::int32_t head, std::int32_t i, std::int32_t d, double x) {
    const Stored stored = store(x, o.query_dtype);
    query(s, l, head, i)[d] = stored.value;
    const std::int64_t element = element_bytes(o.query_dtype);
    std::memcpy(query_bytes_.data() + (query_row(s, l, head, i) * o.dim + d + o.skew) * element,
                &stored.bits,
                at(element));
    host_query_values_[at(query_row(s, l, head, i) * o.dim + d)] = static_cast<float>(stored.value);
  }

  /// Copies all that the host has to the device; once more after the last `put_...`.
  void upload() {
    device_ids_.upload(ids_);
    device_indptr_.upload(indptr_);
    device_lengths_.upload(lengths_);
    device_last_page_len_.upload(last_page_len_);
    device_first_rows_.upload(first_rows_);
    device_positions_.upload(positions_);
    device_states_.upload(states_);
    device_pool_.upload(pool_bytes_);
    device_queries_.upload(query_bytes_);
    device_query_counts_.upload(query_counts_);
    device_query_firsts_.upload(query_firsts_);
    device_query_positions_.upload(query_positions_);
    device_slots_.upload(o.slots);
    device_scales_.upload(scales_);
    score_sums.upload(host_sums);
    score_rests.upload(host_rests);
    if (o.lse) {
      write_lse();
      device_lse_.upload(lse_floats_);
    }
    make_device_view();
  }

  CacheView view;
  CacheView host_view;
  cuda::DeviceQueries queries;
  QueryBlock host_queries;
  std::vector<float> host_sums, host_rests;  // the score planes
  DeviceArray<float> score_sums{"score sums"}, score_rests{"score compensations"};
  std::int32_t sequences = 0;
  std::int32_t max_rows = 0;
  WorldOptions o;

  /// Logits and their condition: sum of |q_d k_d| times the scale.
  struct Logit {
    double value;
    double size;
  };
  Logit logit(std::int32_t s,
              std::int32_t l,
              std::int32_t h,
              std::int32_t g,
              std::int32_t i,
              std::int32_t r) {
    const double* const q = query(s, l, h * o.group + g, i);
    const double* const k = key(s, l, h, r);
    double x = 0;
    double size = 0;
    for (std::int32_t d = 0; d < o.dim; ++d) {
      x += q[d] * k[d];
      size += std::fabs(q[d] * k[d]);
    }
    x *= scale(l, h);
    size *= std::fabs(scale(l, h));
    if (o.soft_cap > 0) {
      const auto cap = static_cast<double>(o.soft_cap);
      return {cap * std::tanh(x / cap), size};
    }
    return {x, size};
  }
  bool finite_key(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) {
    const double* const k = key(s, l, h, r);
    return std::all_of(k, k + o.dim, [](double v) { return std::isfinite(v); });
  }
  bool sees(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t i, std::int32_t r) {
    return r != hole(s) && position(s, l, h, r) <= query_position(s, i) && finite_key(s, l, h, r);
  }

 private:
  double draw() { return static_cast<double>(static_cast<std::int32_t>(rng_() % 256) - 128) / 64; }

  void make_tables() {
    const std::int32_t each = o.tables == Tables::per_head    ? o.layers * o.kv_heads
                              : o.tables == Tables::per_layer ? o.layers
                                                              : 1;
    const std::int32_t entries = pages_for(max_rows + 1 + o.left_padding, o.page_size);
    pages_ = entries * each * sequences + 3;
    std::vector<std::int32_t> ids(at(pages_));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng_);
    std::size_t next = 0;
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (std::int32_t t = 0; t < each; ++t) {
        const std::int32_t used = pages_for(extent(s) + o.left_padding, o.page_size);
        indptr_.push_back(static_cast<std::int32_t>(ids_.size()));
        for (std::int32_t e = 0; e < (o.tables == Tables::csr ? used : entries); ++e) {
          ids_.push_back(e < used ? ids[next++] : -1);
        }
        lengths_.push_back(live(s));
        last_page_len_.push_back(used == 0 ? 0 : (live(s) + o.left_padding - 1) % o.page_size + 1);
      }
    }
    indptr_.push_back(static_cast<std::int32_t>(ids_.size()));
    max_pages_ = entries;
  }

  void make_keys() {
    const PlaneShape shape{o.page_size, o.kv_heads, o.dim, o.dtype};
    switch (o.layout) {
      case Layout::hnd:
        plane_ = Plane::hnd(nullptr, shape);
        break;
      case Layout::packed:
        plane_ = Plane::vllm_packed_keys(nullptr, shape);
        break;
      case Layout::transposed:
        plane_ = Plane::transposed(nullptr, shape);
        break;
      default:
        plane_ = Plane::nhd(nullptr, shape);
    }
    if (o.layout == Layout::padded) {  // K and V of a token beside each other, pages with a tail
      plane_.head_stride *= 2;
      plane_.token_stride *= 2;
      plane_.page_stride = plane_.page_stride * 2 + 16;
    }
    plane_.layer_stride = plane_.page_stride * pages_;
    if (o.tables == Tables::per_head) {
      plane_.head_stride = o.kv_heads > 1 ? plane_.head_stride : 0;
    }
    pool_bytes_.assign(at(plane_.layer_stride * o.layers + 16 + o.skew * element_bytes(o.dtype)),
                       std::byte{0xFF});
    keys_.resize(
        at(static_cast<std::int64_t>(sequences) * o.layers * o.kv_heads * max_rows * o.dim));
  }

  void make_positions() {
    next_.resize(at(sequences));
    positions_.assign(at(item(sequences, 0, 0) * max_rows), -1);
    for (std::int32_t s = 0; s < sequences; ++s) {
      next_[at(s)] = o.shuffled ? 2 * extent(s) + 1 : extent(s);
      for (std::int32_t l = 0; l < o.layers; ++l) {
        for (std::int32_t h = 0; h < o.kv_heads; ++h) {
          std::vector<std::int32_t> p(at(extent(s)));
          std::iota(p.begin(), p.end(), 0);
          if (o.shuffled) {  // the last rows keep their place, as a window does
            for (auto& x : p) { x = 2 * x + 1; }
            std::shuffle(p.begin(), p.end(), rng_);
          }
          std::copy(p.begin(), p.end(), positions_.begin() + row_index(s, l, h, 0));
        }
      }
    }
  }

  void make_queries() {
    const std::int64_t rows =
        static_cast<std::int64_t>(sequences) * o.layers * o.kv_heads * o.group * o.queries;
    query_values_.resize(at(rows * o.dim));
    host_query_values_.resize(at(rows * o.dim));
    query_bytes_.assign(at((rows * o.dim + o.skew) * element_bytes(o.query_dtype)),
                        std::byte{0xFF});
    lse_.assign(at(rows), std::nan(""));
    query_counts_.resize(at(sequences));
    query_firsts_.resize(at(sequences));
    query_positions_.resize(at(rows));
    for (std::int32_t s = 0; s < sequences; ++s) {
      query_counts_[at(slot(s))] = std::min(o.queries, live(s));
      query_firsts_[at(slot(s))] = static_cast<std::int32_t>(query_row(s, 0, 0, 0));
      for (std::int32_t i = 0; i < query_count(s); ++i) {
        query_positions_[at(query_row(s, 0, 0, i))] = Position{query_position(s, i)};
      }
    }
    scales_.resize(at(o.layers * o.kv_heads));
    for (auto& x : scales_) {
      x = static_cast<float>(0.25 + 0.125 * static_cast<double>(rng_() % 8));
    }
  }

  void make_host_view() {
    CacheView& v = host_view;
    v.k = plane_;
    v.k.base = pool_bytes_.data() + o.skew * element_bytes(o.dtype);
    v.v = v.k;
    v.page_size = o.page_size;
    v.pages = pages_;
    v.kv_heads = o.kv_heads;
    v.layers = o.layers;
    v.sequences = sequences;
    v.scope = o.tables == Tables::per_head    ? TableScope::head
              : o.tables == Tables::per_layer ? TableScope::layer
                                              : TableScope::group;
    v.table.ids = ids_.data();
    v.table.row_stride = max_pages_;
    v.table.max_pages = max_pages_;
    v.table.rows = {v.tables_per_sequence(),
                    v.scope == TableScope::group   ? 0
                    : v.scope == TableScope::layer ? 1
                                                   : o.kv_heads,
                    v.scope == TableScope::head ? 1 : 0};
    v.length_rows = v.table.rows;
    for (std::int32_t s = 0; s < sequences; ++s) {
      first_rows_.push_back(o.left_padding);
      for (std::int32_t t = 0; t < v.tables_per_sequence(); ++t) {
        SequenceState state;
        state.live_rows = live(s);
        state.next_position = next_position(s);
        state.append_row = hole(s);
        state.ordered = !o.shuffled;
        states_.push_back(state);
      }
    }
    const bool states = o.shuffled || o.hole >= 0;
    if (states) { v.states = states_.data(); }
    if (o.left_padding > 0) { v.first_rows = first_rows_.data(); }
    if (o.tables == Tables::csr) { v.table.indptr = indptr_.data(); }
    if (o.tables == Tables::csr && o.left_padding == 0 && !states) {
      v.last_page_len = last_page_len_.data();
    } else {
      v.lengths = lengths_.data();
    }
    host_sums.assign(positions_.size(), 0.0F);
    host_rests.assign(positions_.size(), 0.0F);
    const auto dense = [&](auto& values) {
      return SequencePlane::dense(values.data(), o.layers, o.kv_heads, max_rows);
    };
    if (o.shuffled) { v.positions = dense(positions_); }
    if (o.score_planes) {
      v.score_sums = dense(host_sums);
      v.score_compensations = dense(host_rests);
    }
    QueryBlock& b = host_queries;
    b.data = host_query_values_.data();
    b.row_counts = query_counts_.data();
    b.query_heads = o.kv_heads * o.group;
    b.rows = o.queries;
    b.row_stride = o.dim;
    b.head_stride = static_cast<std::int64_t>(o.queries) * o.dim;
    b.layer_stride = b.head_stride * b.query_heads;
    b.sequence_stride = b.layer_stride * o.layers;
    b.lse_head_stride = o.queries;
    b.lse_layer_stride = b.lse_head_stride * b.query_heads;
    b.lse_sequence_stride = b.lse_layer_stride * o.layers;
    b.lse_base = o.lse_base;
    b.scale = o.scale;
    b.soft_cap = o.soft_cap;
    b.slots = o.slots.empty() ? nullptr : o.slots.data();
    if (o.ring) {
      b.row_firsts = query_firsts_.data();
      b.positions = query_positions_.data();
      b.sequence_stride = b.lse_sequence_stride = 0;
    }
  }

  void make_device_view() {
    view = host_view;
    view.k.base = device_pool_.data() + o.skew * element_bytes(o.dtype);
    view.v = view.k;
    view.table.ids = device_ids_.data();
    if (view.table.indptr != nullptr) { view.table.indptr = device_indptr_.data(); }
    if (view.lengths != nullptr) { view.lengths = device_lengths_.data(); }
    if (view.last_page_len != nullptr) { view.last_page_len = device_last_page_len_.data(); }
    if (view.first_rows != nullptr) { view.first_rows = device_first_rows_.data(); }
    if (view.states != nullptr) { view.states = device_states_.data(); }
    const auto dense = [&](auto& array) {
      return SequencePlane::dense(array.data(), o.layers, o.kv_heads, max_rows);
    };
    if (view.positions) { view.positions = dense(device_positions_); }
    if (o.score_planes) {
      view.score_sums = dense(score_sums);
      view.score_compensations = dense(score_rests);
    }
    queries.dtype = o.query_dtype;
    queries.block = host_queries;
    queries.block.data = reinterpret_cast<const float*>(device_queries_.data() +
                                                        o.skew * element_bytes(o.query_dtype));
    queries.block.row_counts = device_query_counts_.data();
    queries.block.lse = o.lse ? device_lse_.data() : nullptr;
    if (!o.slots.empty()) { queries.block.slots = device_slots_.data(); }
    if (o.ring) {
      queries.block.row_firsts = device_query_firsts_.data();
      queries.block.positions = device_query_positions_.data();
    }
    if (o.key_scales) {
      view.k.scales.base = reinterpret_cast<const std::byte*>(device_scales_.data());
      view.k.scales.layer_stride = 4 * o.kv_heads;
      view.k.scales.head_stride = 4;
    }
  }

  void fill() {
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (std::int32_t l = 0; l < o.layers; ++l) {
        for (std::int32_t h = 0; h < o.kv_heads; ++h) {
          for (std::int32_t r = 0; r < extent(s); ++r) {
            if (r == hole(s)) { continue; }  // stays a NaN
            for (std::int32_t d = 0; d < o.dim; ++d) { put_key(s, l, h, r, d, draw()); }
          }
        }
        for (std::int32_t head = 0; head < o.kv_heads * o.group; ++head) {
          for (std::int32_t i = 0; i < query_count(s); ++i) {
            for (std::int32_t d = 0; d < o.dim; ++d) { put_query(s, l, head, i, d, draw()); }
          }
        }
      }
    }
  }

  // What an engine would hand over: LSE in fp32.
  void write_lse() {
    lse_floats_.assign(lse_.size(), 0.0F);
    for (std::int32_t s = 0; s < sequences; ++s) {
      for (std::int32_t l = 0; l < o.layers; ++l) {
        for (std::int32_t h = 0; h < o.kv_heads; ++h) {
          for (std::int32_t g = 0; g < o.group; ++g) {
            for (std::int32_t i = 0; i < query_count(s); ++i) {
              double sum = 0;
              for (std::int32_t r = 0; r < extent(s); ++r) {
                if (sees(s, l, h, i, r)) { sum += std::exp(logit(s, l, h, g, i, r).value); }
              }
              const double natural = std::log(sum);
              const auto given = static_cast<float>(
                  o.lse_base == LseBase::two ? natural / std::log(2.0) : natural);
              lse_floats_[at(query_row(s, l, h * o.group + g, i))] = given;
              lse(s, l, h * o.group + g, i) = o.lse_base == LseBase::two
                                                  ? static_cast<double>(given) * std::log(2.0)
                                                  : static_cast<double>(given);
            }
          }
        }
      }
    }
    host_queries.lse = lse_floats_.data();
  }

  std::mt19937 rng_;
  Plane plane_;
  std::int32_t pages_ = 0;
  std::int32_t max_pages_ = 0;
  std::vector<std::int32_t> ids_, indptr_, lengths_, last_page_len_, first_rows_, positions_, next_,
      query_counts_, query_firsts_;
  std::vector<Position> query_positions_;
  std::vector<SequenceState> states_;
  std::vector<std::byte> pool_bytes_, query_bytes_;
  std::vector<double> keys_, query_values_, lse_;
  std::vector<float> host_query_values_, lse_floats_, scales_;

  DeviceArray<std::int32_t> device_ids_{"page ids"}, device_indptr_{"indptr"},
      device_lengths_{"lengths"}, device_last_page_len_{"last_page_len"},
      device_first_rows_{"first_rows"}, device_positions_{"positions"},
      device_query_counts_{"query counts"}, device_query_firsts_{"query firsts"},
      device_slots_{"slots"};
  DeviceArray<Position> device_query_positions_{"query positions"};
  DeviceArray<SequenceState> device_states_{"states"};
  DeviceArray<std::byte> device_pool_{"pool"}, device_queries_{"queries"};
  DeviceArray<float> device_lse_{"lse"}, device_scales_{"key scales"};
};

}  // namespace kvtrim::test
