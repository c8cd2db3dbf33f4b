// SPDX-License-Identifier: Apache-2.0
#pragma once

// The evaluation callback of llama.cpp (`llama_context_params::cb_eval`): which cells a micro-batch was written to, and what
// its queries pay to each cell. Tensors are reused by the next node, so everything is copied inside the callback.

#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/engine/llama_cpp.hpp>

#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace llama_example {

namespace lc = kvtrim::llama_cpp;

/// A token of a batch.
struct Written {
  std::int32_t sequence = 0;
  kvtrim::Position position{};
};

/// What one layer's queries of a micro-batch, all of one sequence, pay to its rows: [query heads, queries, rows].
struct LayerScores {
  std::int32_t layer = 0;     ///< index among the scored layers
  std::int32_t sequence = 0;  ///< of all queries
  std::int32_t heads = 0;     ///< query heads
  std::int32_t queries = 0;   ///< the last of them is the sequence's last row
  std::int32_t rows = 0;      ///< of the sequence
  const float* data = nullptr;
};

/// Listens to a context. Pass `callback` and the object as `cb_eval` and `cb_eval_user_data`.
class ScoreTap {
 public:
  std::function<void(std::span<const Written>)> on_written;  ///< cells are known; before any scores
  std::function<void(const LayerScores&)> on_scores;

  ScoreTap(std::int32_t cells, std::int32_t sequences, std::int32_t layers)
      : map_(cells, sequences), layers_(static_cast<std::size_t>(layers)) {
    for (std::int32_t l = 0; l < layers; ++l) layers_[static_cast<std::size_t>(l)] = l;
  }

  /// Cells of all sequences. Tell it of every seq_rm, seq_cp and seq_add.
  [[nodiscard]] lc::CellMap& map() noexcept { return map_; }
  /// Layers of the model that are scored: those without a sliding window.
  [[nodiscard]] std::span<const std::int32_t> layers() const noexcept { return layers_; }

  /// Before `llama_decode`: its tokens, in batch order, and whether their scores are wanted.
  void expect(std::span<const Written> batch, bool scores) {
    batch_ = batch, micro_ = {}, wants_ = scores, checked_ = false, failure_ = nullptr;
  }
  /// After `llama_decode` returned `rc`.
  /// \throws what went wrong inside the callback; std::runtime_error if a node was never shown
  void finish(int rc) {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (rc != 0) return;
    if (!batch_.empty()) fail("no GGML_OP_SET_ROWS into cache_k of layer", layers_.front());
    if (!checked_) {
      throw std::runtime_error(
          "the callback was never shown kq_soft_max-" + std::to_string(layers_.front()) +
          ": flash attention is on, or a backend fused the softmax; set flash_attn_type to "
          "LLAMA_FLASH_ATTN_TYPE_DISABLED and n_gpu_layers to 0");
    }
  }

  /// Finds the layers that see everything, by their masks: `decode` runs a text of `tokens` tokens, longer than the sliding
  /// window, in an empty cache, which is emptied afterwards.
  template <class F>
  void find_layers(std::int32_t tokens, F&& decode) {
    surveyed_.assign(layers_.size(), 0);
    decode();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    layers_.clear();
    for (std::size_t l = 0; l < surveyed_.size(); ++l)
      if (surveyed_[l] == tokens) layers_.push_back(static_cast<std::int32_t>(l));
    surveyed_.clear();
    if (layers_.empty()) throw std::runtime_error("no layer of the model attends to all tokens");
  }

  /// `cb_eval`. It never returns false for a node that it asked for: llama.cpp would drop the rest of the graph in silence.
  static bool callback(ggml_tensor* node, bool ask, void* tap) {
    return static_cast<ScoreTap*>(tap)->evaluate(node, ask);
  }

 private:
  [[noreturn]] static void fail(const std::string& what, std::int64_t number) {
    throw std::runtime_error("llama.cpp's graph: " + what + " " + std::to_string(number));
  }

  bool evaluate(ggml_tensor* node, bool ask) {
    if (failure_) return !ask;
    if (!surveyed_.empty()) {
      const std::int32_t layer = lc::layer_of(node->name, "kq_soft_max-");
      if (layer >= 0 && !ask) guarded([&] { survey(node, layer); });
      return layer >= 0 || !ask;
    }
    if (node->op == GGML_OP_SET_ROWS && node->src[2] != nullptr) {
      const bool ours = lc::layer_of(node->src[2]->name, "cache_k_l") == layers_.front();
      if (ours && !ask) guarded([&] { read_cells(node->src[1]); });
      return ours || !ask;
    }
    const std::int32_t layer = lc::layer_of(node->name, "kq_soft_max-");
    const bool first = layer == layers_.front();
    const auto found = std::ranges::find(layers_, layer);
    const bool ours = found != layers_.end() && (wants_ || first);
    if (ours && !ask) {
      guarded([&] {
        check_mask(node->src[1], layer);
        if (wants_) read_scores(node, static_cast<std::int32_t>(found - layers_.begin()));
      });
    }
    return ours || !ask;
  }
  // Exceptions must not pass through C.
  template <class F>
  void guarded(F&& f) noexcept {
    try {
      f();
    } catch (...) { failure_ = std::current_exception(); }
  }

  void survey(const ggml_tensor* node, std::int32_t layer) {
    const ggml_tensor* mask = node->src[1];
    const auto row = read_row(mask, 0, node->ne[1] - 1);
    surveyed_.at(static_cast<std::size_t>(layer)) = lc::CellMap::visible(row);
  }

  // The cells of the next micro-batch, in batch order.
  void read_cells(const ggml_tensor* cells) {
    const auto count = static_cast<std::size_t>(cells->ne[0]);
    if (cells->type != GGML_TYPE_I64) fail("cells are not int64 but type", cells->type);
    if (count > batch_.size()) fail("more cells than tokens of the batch:", cells->ne[0]);
    std::vector<std::int64_t> at(count);
    ggml_backend_tensor_get(cells, at.data(), 0, count * sizeof(std::int64_t));
    micro_ = batch_.first(count), batch_ = batch_.subspan(count), checked_ = false;
    for (std::size_t i = 0; i < count; ++i) {
      const kvtrim::Status status = map_.write(at[i], micro_[i].sequence, micro_[i].position);
      if (status == kvtrim::Status::ok) continue;
      fail("cell map: " + std::string(to_string(status)) + ", sequence " +
               std::to_string(micro_[i].sequence) + ", position " +
               std::to_string(raw(micro_[i].position)) + ", cell",
           at[i]);
    }
    if (on_written) on_written(micro_);
  }

  // Every query sees the live cells of its sequence up to itself, and nothing else.
  void check_mask(const ggml_tensor* mask, std::int32_t layer) {
    for (std::size_t i = 0; i < micro_.size(); ++i) {
      const auto row = read_row(mask, 0, static_cast<std::int64_t>(i));
      const auto [sequence, position] = micro_[i];
      const std::int32_t wrong = map_.first_wrong_column(sequence, position, row);
      if (wrong < 0) continue;
      fail("the mask of layer " + std::to_string(layer) + ", sequence " + std::to_string(sequence) +
               ", position " + std::to_string(raw(position)) +
               " contradicts the cell map in column",
           wrong);
    }
    checked_ = true;
  }

  void read_scores(const ggml_tensor* node, std::int32_t index) {
    const std::int32_t sequence = micro_.front().sequence;
    for (const Written& w : micro_)
      if (w.sequence != sequence)
        fail("scores are read of one sequence, but there is also", w.sequence);
    const auto cells = map_.rows(sequence);
    LayerScores s{.layer = index,
                  .sequence = sequence,
                  .heads = static_cast<std::int32_t>(node->ne[2]),
                  .queries = static_cast<std::int32_t>(micro_.size()),
                  .rows = static_cast<std::int32_t>(cells.size())};
    scores_.resize(static_cast<std::size_t>(s.heads) * micro_.size() * cells.size());
    float* to = scores_.data();
    for (std::int32_t h = 0; h < s.heads; ++h) {
      for (std::int32_t q = 0; q < s.queries; ++q, to += s.rows)
        lc::gather_rows(read_row(node, h, q), cells, to);
    }
    s.data = scores_.data();
    if (on_scores) on_scores(s);
  }

  // Row `q` of head `h` of a tensor [columns, queries, heads].
  std::span<const float> read_row(const ggml_tensor* t, std::int64_t h, std::int64_t q) {
    if (t->type != GGML_TYPE_F32) fail("probabilities or a mask are not f32 but type", t->type);
    row_.resize(static_cast<std::size_t>(t->ne[0]));
    const auto offset =
        static_cast<std::size_t>(h) * t->nb[2] + static_cast<std::size_t>(q) * t->nb[1];
    ggml_backend_tensor_get(t, row_.data(), offset, row_.size() * sizeof(float));
    return row_;
  }

  lc::CellMap map_;
  std::vector<std::int32_t> layers_;
  std::vector<std::int32_t>
      surveyed_;                    // [layers] columns that the last query saw; empty: no survey
  std::span<const Written> batch_;  // tokens whose cells are not known yet
  std::span<const Written> micro_;  // of the micro-batch
  bool wants_ = false;
  bool checked_ = false;  // the mask of the micro-batch was seen
  std::exception_ptr failure_;
  std::vector<float> row_;
  std::vector<float> scores_;
};

/// In a model with a sliding window, finds the layers that see everything, and have the tap read those only: decodes a text
/// longer than the window in the empty context, and empties it again.
/// \throws std::invalid_argument if the context is not longer than the window
inline void find_scored_layers(ScoreTap& tap, const llama_model* model, llama_context* context) {
  const std::int32_t swa = llama_model_n_swa(model);
  if (swa < 1) return;
  if (swa + 1 > static_cast<std::int32_t>(llama_n_ctx(context))) {
    throw std::invalid_argument("n_ctx: is " + std::to_string(llama_n_ctx(context)) +
                                ", not above the model's sliding window of " + std::to_string(swa));
  }
  tap.find_layers(swa + 1, [&] {
    std::vector<llama_token> ids(static_cast<std::size_t>(swa) + 1,
                                 llama_vocab_bos(llama_model_get_vocab(model)));
    const auto step = static_cast<std::size_t>(llama_n_ubatch(context));
    for (std::size_t begin = 0; begin < ids.size(); begin += step) {
      const auto count = static_cast<std::int32_t>(std::min(step, ids.size() - begin));
      if (llama_decode(context, llama_batch_get_one(ids.data() + begin, count)) != 0)
        throw std::runtime_error("llama_decode failed on the first text");
    }
    llama_memory_clear(llama_get_memory(context), true);
  });
}

}  // namespace llama_example
