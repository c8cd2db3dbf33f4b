// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cache of an engine, as benchmarks need it: one layer, [pages, kv_heads, page_size, dim], shuffled page ids, so that
// neighbours in memory are not neighbours in the table. Rows are slices of one table of normally distributed numbers: filling
// gigabytes costs a memcpy, and the same rows are available as contiguous floats for the bound.

#include <kvtrim/cache/cache_view.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace kvtrim_bench {

using namespace kvtrim;

/// One point of the axes; the defaults are the base case.
struct Shape {
  std::int32_t tokens = 32'768;
  std::int32_t page_size = 16;
  DType dtype = DType::f32;
  std::int32_t query_heads = 32;
  std::int32_t kv_heads = 8;
  std::int32_t dim = 128;
  std::int32_t sequences = 1;

  [[nodiscard]] std::int32_t group() const { return query_heads / kv_heads; }
  [[nodiscard]] std::string axes() const {
    return "/tokens:" + std::to_string(tokens) + "/page:" + std::to_string(page_size) + '/' +
           std::string(to_string(dtype)) + "/heads:" + std::to_string(query_heads) + ':' +
           std::to_string(kv_heads) + "/head_dim:" + std::to_string(dim) +
           (sequences > 1 ? "/sequences:" + std::to_string(sequences) : std::string());
  }
};

/// 65,536 normally distributed numbers, seeded, as floats and as elements of a dtype.
class Numbers {
 public:
  static constexpr std::size_t count = 65'536;
  static constexpr std::size_t longest = 512;  ///< longest row

  explicit Numbers(DType dtype)
      : floats_(count + longest), bytes_((count + longest) * element_size(dtype)), dtype_(dtype) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < floats_.size(); ++i) {
      std::byte* const at = bytes_.data() + i * element_size(dtype);
      store_element(at, dtype, normal(rng));
      floats_[i] = load_element(at, dtype);  // the bound sees the numbers that the cache holds
    }
  }
  /// Numbers of row `row`.
  [[nodiscard]] const float* floats(std::uint64_t row) const { return floats_.data() + start(row); }
  [[nodiscard]] const std::byte* bytes(std::uint64_t row) const {
    return bytes_.data() + start(row) * element_size(dtype_);
  }

 private:
  static std::size_t element_size(DType t) { return static_cast<std::size_t>(element_bytes(t)); }
  static std::size_t start(std::uint64_t row) {
    std::uint64_t x = (row + 1) * 0x9E37'79B9'7F4A'7C15U;
    x ^= x >> 29U;
    return static_cast<std::size_t>(x * 0xBF58'476D'1CE4'E5B9U >> 48U);
  }
  std::vector<float> floats_;
  std::vector<std::byte> bytes_;
  DType dtype_;
};

/// The memory, tables and states of one layer.
class EngineCache {
 public:
  struct Options {
    bool values = true;      ///< false: values lie where the keys lie
    bool positions = false;  ///< one position per (KV head, row)
    bool scores = false;     ///< planes of accumulated scores
    std::int32_t spare_rows = 0;
  };

  EngineCache(const Shape& shape, const Options& options)
      : shape_(shape), options_(options), numbers_(shape.dtype) {
    max_rows_ = shape.tokens + options.spare_rows;
    max_pages_ = pages_for(max_rows_, shape.page_size);
    pages_ = shape.sequences * max_pages_;
    row_bytes_ =
        static_cast<std::size_t>(shape.dim) * static_cast<std::size_t>(element_bytes(shape.dtype));
    const std::size_t bytes =
        size(pages_) * size(shape.page_size) * size(shape.kv_heads) * row_bytes_;
    keys_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    if (options.values) { values_ = std::make_unique_for_overwrite<std::byte[]>(bytes); }
    ids_.resize(size(pages_));
    std::iota(ids_.begin(), ids_.end(), 0);
    std::shuffle(ids_.begin(), ids_.end(), std::mt19937(2));
    own_ids_ = ids_;
    reset();
    const std::size_t elements = size(shape.sequences) * size(shape.kv_heads) * size(max_rows_);
    if (options.scores) {
      sums_.assign(elements, 0.0F);
      compensations_.assign(elements, 0.0F);
    }
    const CacheView all = view();
    for (std::int32_t s = 0; s < shape.sequences; ++s) {
      for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
        for (std::int32_t r = 0; r < max_rows_; ++r) {
          const std::byte* const row = numbers_.bytes(row_name(s, h, r));
          std::memcpy(all.key(SequenceId{s}, LayerId{0}, HeadId{h}, r), row, row_bytes_);
          std::memcpy(all.value(SequenceId{s}, LayerId{0}, HeadId{h}, r), row, row_bytes_);
        }
      }
    }
  }

  /// What a decode step does before attention: the new row fills the hole that the last cut left, or goes to the end.
  void append() {
    for (std::int32_t q = 0; q < shape_.sequences; ++q) {
      SequenceState& s = states_[size(q)];
      const std::int32_t row = s.append_row >= 0 ? s.append_row : s.live_rows;
      const std::size_t entry = size(q) * size(max_pages_) + size(row / shape_.page_size);
      ids_[entry] = own_ids_[entry];  // a page that a cut released returns to its place
      for (std::int32_t h = 0; h < shape_.kv_heads; ++h) {
        const std::size_t i = size((q * shape_.kv_heads + h)) * size(max_rows_) + size(row);
        if (options_.positions) { positions_[i] = Position{s.next_position}; }
        if (options_.scores) { sums_[i] = compensations_[i] = 0.0F; }
      }
      ++s.live_rows;
      ++s.next_position;
      s.append_row = -1;
      ++s.generation;
    }
  }

  /// Restores tables, states and positions of a prompt that was never cut; keys and values stay unchanged.
  void reset() {
    std::copy(own_ids_.begin(), own_ids_.end(), ids_.begin());
    states_.assign(size(shape_.sequences), {});
    for (SequenceState& s : states_) {
      s.live_rows = s.next_position = s.next_rope_position = shape_.tokens;
    }
    if (!options_.positions) { return; }
    positions_.resize(size(shape_.sequences) * size(shape_.kv_heads) * size(max_rows_));
    for (std::size_t i = 0; i < positions_.size(); ++i) {
      positions_[i] = Position{static_cast<std::int32_t>(i % size(max_rows_))};
    }
  }

  [[nodiscard]] CacheView view() {
    CacheView v;
    const PlaneShape plane{shape_.page_size, shape_.kv_heads, shape_.dim, shape_.dtype};
    v.k = Plane::hnd(keys_.get(), plane);
    v.v = Plane::hnd(options_.values ? values_.get() : keys_.get(), plane);
    v.page_size = shape_.page_size;
    v.pages = pages_;
    v.kv_heads = shape_.kv_heads;
    v.sequences = shape_.sequences;
    v.table.ids = ids_.data();
    v.table.row_stride = max_pages_;
    v.table.max_pages = max_pages_;
    v.states = states_.data();
    if (options_.positions) {
      v.positions = SequencePlane::dense(positions_.data(), 1, shape_.kv_heads, max_rows_);
    }
    if (options_.scores) {
      v.score_sums = SequencePlane::dense(sums_.data(), 1, shape_.kv_heads, max_rows_);
      v.score_compensations =
          SequencePlane::dense(compensations_.data(), 1, shape_.kv_heads, max_rows_);
    }
    return v;
  }

  /// The same keys, as floats: [sequences, kv_heads, tokens, dim].
  [[nodiscard]] std::vector<float> contiguous_keys() const {
    std::vector<float> out(size(shape_.sequences) * size(shape_.kv_heads) * size(shape_.tokens) *
                           size(shape_.dim));
    float* to = out.data();
    for (std::int32_t s = 0; s < shape_.sequences; ++s) {
      for (std::int32_t h = 0; h < shape_.kv_heads; ++h) {
        for (std::int32_t r = 0; r < shape_.tokens; ++r, to += shape_.dim) {
          std::copy_n(numbers_.floats(row_name(s, h, r)), shape_.dim, to);
        }
      }
    }
    return out;
  }

  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] std::int32_t* ids() { return ids_.data(); }
  /// Bytes of the keys in use.
  [[nodiscard]] double key_bytes() const {
    return static_cast<double>(shape_.sequences) * shape_.tokens * shape_.kv_heads *
           static_cast<double>(row_bytes_);
  }

 private:
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
  [[nodiscard]] std::uint64_t row_name(std::int32_t s, std::int32_t h, std::int32_t r) const {
    return (static_cast<std::uint64_t>(s) * 64 + static_cast<std::uint64_t>(h)) * 1'000'003 +
           static_cast<std::uint64_t>(r);
  }

  Shape shape_;
  Options options_;
  Numbers numbers_;
  std::int32_t max_rows_ = 0;
  std::int32_t max_pages_ = 0;
  std::int32_t pages_ = 0;
  std::size_t row_bytes_ = 0;
  std::unique_ptr<std::byte[]> keys_, values_;
  std::vector<std::int32_t> ids_, own_ids_;
  std::vector<SequenceState> states_;
  std::vector<Position> positions_;
  std::vector<float> sums_, compensations_;
};

/// Normally distributed numbers, seeded.
inline std::vector<float> normal_numbers(std::size_t n, std::uint32_t seed, float scale = 1.0F) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> out(n);
  for (float& x : out) { x = normal(rng); }
  return out;
}

/// Runs items on `count` threads of its own, dealt out in turn; with one, on the caller's thread.
struct Threads {
  std::int32_t count = 1;
  [[nodiscard]] std::int32_t workers() const { return count; }
  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept {
    const auto run = [&](std::int32_t w) {
      for (std::int64_t i = w; i < n; i += count) { f(i, w); }
    };
    std::vector<std::thread> others;
    for (std::int32_t w = 1; w < count; ++w) { others.emplace_back(run, w); }
    run(0);
    for (std::thread& t : others) { t.join(); }
  }
};

}  // namespace kvtrim_bench
