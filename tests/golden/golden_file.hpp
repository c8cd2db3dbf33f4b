// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads tests/data/golden: `name shape...` on one line, the values, row-major, on the next; # starts a comment.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/observe/observation.hpp>

#include "catch.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace golden {

struct Tensor {
  std::vector<std::int32_t> shape;
  std::vector<double> values;

  std::vector<float> floats() const {
    std::vector<float> out;
    for (const double v : values) { out.push_back(static_cast<float>(v)); }
    return out;
  }
  /// Row `i` of the last axis.
  std::vector<double> row(std::int32_t i) const {
    const auto n = static_cast<std::ptrdiff_t>(shape.back());
    return {values.begin() + i * n, values.begin() + (i + 1) * n};
  }
};

class File {
 public:
  explicit File(const std::string& name) {
    const std::string path = KVTRIM_TEST_DATA "/golden/" + name;
    std::ifstream in(path);
    if (!in) { throw std::runtime_error("no golden file " + path); }
    std::string head;
    std::string body;
    while (std::getline(in, head)) {
      if (head.empty() || head.front() == '#') { continue; }
      if (!std::getline(in, body)) { throw std::runtime_error(path + ": no values for " + head); }
      std::istringstream words(head);
      std::string key;
      words >> key;
      Tensor t;
      std::size_t count = 1;
      for (std::int32_t n = 0; words >> n;) {
        t.shape.push_back(n);
        count *= static_cast<std::size_t>(n);
      }
      const char* at = body.c_str();
      for (char* end = nullptr; t.values.size() < count; at = end) {
        const double v = std::strtod(at, &end);  // reads `inf` too
        if (end == at) { throw std::runtime_error(path + ": too few values for " + key); }
        t.values.push_back(v);
      }
      tensors_[key] = t;
    }
  }

  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  const Tensor& operator[](const std::string& name) const { return tensors_.at(name); }

 private:
  std::map<std::string, Tensor> tensors_;
};

/// One attention layer of a golden file: keys and queries after RoPE, and the cache that holds the keys.
struct Layer {
  explicit Layer(const std::string& shape)
      : file("scores_" + shape + ".txt"),
        keys(file["key"].floats()),
        values(file["value"].floats()),
        queries(file["query"].floats()),
        lse(file["lse"].floats()),
        heads(file["query"].shape[0]),
        kv_heads(file["key"].shape[0]),
        tokens(file["key"].shape[1]),
        dim(file["key"].shape[2]) {}

  kvtrim::PagedCache make_cache(std::int32_t page_size,
                                bool scores = false,
                                kvtrim::TableScope scope = kvtrim::TableScope::group) const {
    kvtrim::PagedCache::Params p;
    p.pages = (tokens / page_size + 1) * kvtrim::tables_of(scope, 1, kv_heads);
    p.scope = scope;
    p.page_size = page_size;
    p.kv_heads = kv_heads;
    p.key_dim = dim;
    p.scores = scores;
    return kvtrim::PagedCache(p);
  }
  /// Appends tokens [first, first + n).
  void extend(kvtrim::PagedCache& cache, std::int32_t first, std::int32_t n) const {
    if (first == 0 && !cache.try_create()) { throw std::runtime_error("no sequence"); }
    if (cache.try_extend(kvtrim::SequenceId{0}, n) != kvtrim::Status::ok) {
      throw std::runtime_error("no pages");
    }
    const std::int64_t skip = static_cast<std::int64_t>(first) * dim;
    const std::int64_t head = static_cast<std::int64_t>(tokens) * dim;
    REQUIRE(cache.write(kvtrim::SequenceId{0},
                        kvtrim::LayerId{0},
                        {keys.data() + skip, dim, head},
                        {values.data() + skip, dim, head}) == kvtrim::Status::ok);
  }
  /// Queries [first, first + n); their LSE is given only if asked for.
  kvtrim::QueryBlock block(std::int32_t first, std::int32_t n, bool with_lse) const {
    kvtrim::QueryBlock b;
    b.data = queries.data() + static_cast<std::int64_t>(first) * dim;
    b.query_heads = heads;
    b.rows = n;
    b.head_stride = static_cast<std::int64_t>(tokens) * dim;
    b.row_stride = dim;
    if (with_lse) { b.lse = lse.data() + first; }
    b.lse_head_stride = tokens;
    return b;
  }

  File file;
  std::vector<float> keys;     // [kv_heads, tokens, dim]
  std::vector<float> values;   // [kv_heads, tokens, dim]
  std::vector<float> queries;  // [heads, tokens, dim]
  std::vector<float> lse;      // [heads, tokens]
  std::int32_t heads;
  std::int32_t kv_heads;
  std::int32_t tokens;
  std::int32_t dim;
};

inline const char* const all_shapes[] = {"gqa3", "mha", "gqa8"};

}  // namespace golden
