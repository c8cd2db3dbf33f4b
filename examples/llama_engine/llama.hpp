// SPDX-License-Identifier: Apache-2.0
#pragma once

// A Llama forward pass over kvtrim's PagedCache. The file stores the rows of Wq and Wk permuted for interleaved rotation, and
// this engine rotates interleaved pairs (2i, 2i + 1): code that rotates cached keys again must do the same.
// A step runs the linear layers on all tokens of all its sequences at once (each weight is read once), attention by sequence.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/core/rope.hpp>
#include <kvtrim/core/status.hpp>

#include <Eigen/Core>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "attention.hpp"
#include "gguf.hpp"
#include "linear.hpp"
#include "llama_weights.hpp"
#include "split.hpp"

namespace engine {

/// The next tokens of one sequence: its share of a step.
struct Segment {
  kvtrim::SequenceId sequence{};
  std::span<const std::int32_t> tokens;
};

/// What a layer's attention of one segment has just done; spans are valid during the call.
struct LayerObservation {
  std::size_t segment = 0;  ///< index into the step's segments
  kvtrim::SequenceId sequence{};
  kvtrim::LayerId layer{};
  std::int32_t tokens = 0;
  std::span<const kvtrim::Position> positions;  ///< [tokens]
  std::span<const float> queries;  ///< [tokens, heads, head_dim] after RoPE, before the scale
  std::span<const float>
      unrotated_queries;       ///< the same before RoPE; empty unless observe_unrotated_queries()
  std::span<const float> lse;  ///< [heads, tokens] natural log; scores scaled by 1 / sqrt(head_dim)
};
using Observer = std::function<void(const LayerObservation&)>;

/// Which rows of logits a step computes.
enum class LogitRows {
  none,
  last,  ///< one row per segment, of its last token
  all,   ///< one row per token, segment after segment
};

/// A model, ready to run. Keeps its activations between steps.
///
/// \par Thread-safety
/// one thread, which uses all OpenMP threads
class LlamaModel {
 public:
  /// \param split  the ranks that share the model; all of them call the same functions, with the same tokens, and get the same
  ///   logits
  /// \throws std::runtime_error if the file is not a Llama model that this engine can run
  /// \throws std::invalid_argument if the model cannot be split so
  explicit LlamaModel(const GgufFile& file, const Split& split = {});

  /// The model's; where it is split by heads, with the heads of this rank.
  [[nodiscard]] const LlamaShape& shape() const noexcept { return shape_; }

  /// Whether observers get the queries before RoPE too.
  void observe_unrotated_queries(bool yes) noexcept { observes_unrotated_ = yes; }

  /// Whether positions may be beyond the context that the model was trained for, where it knows nothing any more.
  void allow_beyond_context(bool yes) noexcept { beyond_context_ = yes; }

  /// The matrix by which layer `layer` multiplies the heads' outputs, [embedding, heads * head_dim].
  [[nodiscard]] const Matrix& output_projection(kvtrim::LayerId layer) const {
    return weights_.layers[static_cast<std::size_t>(kvtrim::raw(layer))].attention_out;
  }

  /// How the model rotates, for policies that need to know; the model must outlive them.
  [[nodiscard]] kvtrim::Rope rope() const noexcept {
    return {.inverse_frequencies = shape_.frequencies,
            .dim = shape_.rope_dims,
            .pairs = kvtrim::RopePairs::interleaved,
            .same_for_all_layers = true};
  }

  /// The extents of a cache for this model. The caller adds pages, page size, dtype, scope and sequences.
  [[nodiscard]] kvtrim::PagedCache::Params cache_params() const {
    kvtrim::PagedCache::Params params;
    params.layers = shape_.layers;
    params.kv_heads = shape_.kv_heads;
    params.key_dim = shape_.head_dim;
    return params;
  }

  /// Runs the next tokens of one or more sequences through the model and puts their keys and values into the cache.
  ///
  /// A decode step over several sequences has one segment of one token for each.
  ///
  /// \param cache     made with cache_params()
  /// \param segments  different sequences, each with at least one token
  /// \param rows      which logits to compute; see logits()
  /// \param observe   called after each layer's attention, segment by segment; may be empty
  /// \returns `ok`; if the cache has no room, the status of `try_extend` (`out_of_pages` if it is another rank's): the
  ///   sequences are then unchanged
  /// \throws std::invalid_argument if there is no segment, a segment is empty, two segments are of the same sequence, or a
  ///   token is not in the vocabulary
  /// \throws std::length_error if a rope position would exceed the model's context, unless allow_beyond_context()
  kvtrim::Status forward(kvtrim::PagedCache& cache,
                         std::span<const Segment> segments,
                         LogitRows rows,
                         const Observer& observe = {});

  /// Runs a prompt in chunks; the logits afterwards are those of its last token.
  ///
  /// \param chunk  tokens per step
  /// \returns `ok`; otherwise the cache had no room for a chunk, and holds the chunks before it
  /// \throws std::invalid_argument if the prompt is empty
  /// \throws std::length_error if it is longer than the model's context, unless allow_beyond_context()
  kvtrim::Status prefill(kvtrim::PagedCache& cache,
                         kvtrim::SequenceId sequence,
                         std::span<const std::int32_t> prompt,
                         const Observer& observe = {},
                         std::size_t chunk = 512);

  /// Logits of the last forward(): the rows requested there, [rows, vocabulary].
  [[nodiscard]] const Matrix& logits() const noexcept { return logits_; }
  /// One row of logits().
  [[nodiscard]] std::span<const float> logits(Eigen::Index row) const {
    return {logits_.row(row).data(), static_cast<std::size_t>(logits_.cols())};
  }

 private:
  static std::int32_t size_of(const Segment& segment) {
    return static_cast<std::int32_t>(segment.tokens.size());
  }
  void check(const kvtrim::PagedCache& cache, std::span<const Segment> segments) const;
  template <class F>
  void for_each_head(F f) const {
    for (std::int32_t l = 0; l < shape_.layers; ++l) {
      for (std::int32_t h = 0; h < shape_.kv_heads; ++h) f(kvtrim::LayerId{l}, kvtrim::HeadId{h});
    }
  }
  /// Reserves rows for all segments or for none.
  kvtrim::Status extend(kvtrim::PagedCache& cache, std::span<const Segment> segments);
  /// Gives this rank's new rows their positions among those of all ranks.
  void place_rows(kvtrim::PagedCache& cache, std::span<const Segment> segments) const;
  /// Finds which tokens of the step this rank computes.
  void find_own(const kvtrim::PagedCache& cache, std::span<const Segment> segments);
  void embed(const kvtrim::PagedCache& cache, std::span<const Segment> segments);
  void grow_rope_table(std::int32_t positions);
  void normalise(const Matrix& x, const Eigen::RowVectorXf& weight, Matrix& out) const;
  void rotate(float* head, std::int32_t rope_position) const;
  /// Rotates queries and keys to the rope positions that the cache gave the new rows, and writes keys and values.
  void fill_cache(kvtrim::PagedCache& cache,
                  std::span<const Segment> segments,
                  kvtrim::LayerId layer);
  void attend(kvtrim::PagedCache& cache, std::span<const Segment> segments, kvtrim::LayerId layer);
  void report(std::span<const Segment> segments,
              kvtrim::LayerId layer,
              const Observer& observe) const;
  /// Adds what `normal_` holds, of all ranks where each has a part of the features.
  void add_to_hidden();
  /// SwiGLU: gate <- silu(gate) * up.
  void activate();
  void compute_logits(std::span<const Segment> segments, LogitRows rows);

  struct Turn {
    float cosine;
    float sine;
  };
  /// Work of one thread: queries of up to `BlockAttention::max_tokens` tokens, for one KV head.
  struct Block {
    std::size_t segment;
    std::int32_t kv_head;
    std::int32_t first_token;
  };

  /// A token of the step that this rank computes: all, unless the model is split by context.
  struct Own {
    std::size_t segment;
    std::int32_t token;
  };

  Split split_;
  std::optional<RowExchange> exchange_;
  LlamaShape shape_;
  LlamaWeights weights_;
  std::vector<BlockAttention> attention_;     // one per thread
  std::vector<Turn> turns_;                   // [rope positions, rope_dims / 2]
  std::vector<Eigen::Index> first_rows_;      // of each segment
  std::vector<kvtrim::Position> positions_;   // of each token of the step
  std::vector<Own> own_;                      // ascending
  std::vector<Eigen::Index> own_first_rows_;  // of each segment, among the own ones
  std::vector<std::int32_t> own_counts_;      // of each segment
  std::vector<std::int32_t> sizes_;           // of each segment
  std::vector<std::int32_t> owners_;  // of each token of the step; none unless split by context
  std::vector<Block> blocks_;
  bool observes_unrotated_ = false;
  bool beyond_context_ = false;
  Matrix hidden_, normal_, query_, unrotated_query_, key_, value_, unrotated_, attended_, gate_,
      up_, logits_;
  std::vector<float> lse_;  // segment after segment, [heads, tokens]
};

}  // namespace engine
