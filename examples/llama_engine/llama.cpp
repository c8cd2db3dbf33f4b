// SPDX-License-Identifier: Apache-2.0
#include "llama.hpp"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <stdexcept>
#include <string>
#include <utility>

namespace engine {

LlamaModel::LlamaModel(const GgufFile& file, const Split& split)
    : split_(split), shape_(read_llama_shape(file)), weights_(read_llama_weights(file, shape_)) {
  if (split_.by_heads()) keep_heads(shape_, weights_, *split_.ranks);
  if (split_.ranks != nullptr) exchange_.emplace(*split_.ranks);
  const Eigen::Index group = shape_.heads / shape_.kv_heads;
  for (int i = 0; i < omp_get_max_threads(); ++i) {
    attention_.emplace_back(group, shape_.head_dim, shape_.head_dim);
  }
}

kvtrim::Status LlamaModel::forward(kvtrim::PagedCache& cache,
                                   std::span<const Segment> segments,
                                   LogitRows rows,
                                   const Observer& observe) {
  check(cache, segments);
  if (const kvtrim::Status status = extend(cache, segments); status != kvtrim::Status::ok) {
    return status;
  }
  embed(cache, segments);
  for (std::int32_t l = 0; l < shape_.layers; ++l) {
    const LlamaWeights::Layer& layer = weights_.layers[static_cast<std::size_t>(l)];
    const kvtrim::LayerId id{l};
    normalise(hidden_, layer.attention_norm, normal_);
    multiply(normal_,
             std::array<Product, 3>{
                 {{&layer.query, &query_}, {&layer.key, &key_}, {&layer.value, &value_}}});
    fill_cache(cache, segments, id);
    if (split_.by_context()) {
      exchange_->gather(query_, owners_);
      if (observe && observes_unrotated_) exchange_->gather(unrotated_query_, owners_);
    }
    attend(cache, segments, id);
    if (split_.by_context()) exchange_->combine(attended_, lse_, owners_, sizes_, shape_.heads);
    if (observe) report(segments, id, observe);
    multiply(attended_, std::array<Product, 1>{{{&layer.attention_out, &normal_}}});
    add_to_hidden();
    normalise(hidden_, layer.feed_forward_norm, normal_);
    multiply(normal_, std::array<Product, 2>{{{&layer.gate, &gate_}, {&layer.up, &up_}}});
    activate();
    multiply(gate_, std::array<Product, 1>{{{&layer.down, &normal_}}});
    add_to_hidden();
  }
  compute_logits(segments, rows);
  return kvtrim::Status::ok;
}

kvtrim::Status LlamaModel::prefill(kvtrim::PagedCache& cache,
                                   kvtrim::SequenceId sequence,
                                   std::span<const std::int32_t> prompt,
                                   const Observer& observe,
                                   std::size_t chunk) {
  if (prompt.empty()) throw std::invalid_argument("the prompt is empty");
  if (chunk == 0) throw std::invalid_argument("the prefill's chunk is 0 tokens");
  if (!beyond_context_ && prompt.size() > static_cast<std::size_t>(shape_.context)) {
    throw std::length_error("the prompt of " + std::to_string(prompt.size()) +
                            " tokens is longer than the model's context of " +
                            std::to_string(shape_.context));
  }
  for (std::size_t begin = 0; begin < prompt.size(); begin += chunk) {
    const auto tokens = prompt.subspan(begin, std::min(chunk, prompt.size() - begin));
    const Segment segment{sequence, tokens};
    const bool last = begin + tokens.size() == prompt.size();
    const kvtrim::Status status =
        forward(cache, {&segment, 1}, last ? LogitRows::last : LogitRows::none, observe);
    if (status != kvtrim::Status::ok) return status;
  }
  return kvtrim::Status::ok;
}

void LlamaModel::check(const kvtrim::PagedCache& cache, std::span<const Segment> segments) const {
  if (segments.empty()) throw std::invalid_argument("engine::LlamaModel: no segments");
  const auto& params = cache.params();
  if (params.layers != shape_.layers || params.kv_heads != shape_.kv_heads ||
      params.key_dim != shape_.head_dim || params.value_dim != shape_.head_dim) {
    throw std::invalid_argument("engine::LlamaModel: the cache was not made with cache_params()");
  }
  for (const Segment& segment : segments) {
    if (segment.tokens.empty()) {
      throw std::invalid_argument("engine::LlamaModel: a segment without tokens");
    }
    for (const std::int32_t token : segment.tokens) {
      if (token < 0 || token >= shape_.vocabulary) {
        throw std::invalid_argument("engine::LlamaModel: token " + std::to_string(token) +
                                    " is outside the vocabulary of " +
                                    std::to_string(shape_.vocabulary));
      }
    }
    const auto same = [&](const Segment& other) { return other.sequence == segment.sequence; };
    if (std::count_if(segments.begin(), segments.end(), same) != 1) {
      throw std::invalid_argument("engine::LlamaModel: two segments of sequence " +
                                  std::to_string(kvtrim::raw(segment.sequence)));
    }
    if (!cache.alive(segment.sequence)) continue;  // try_extend says so
    std::int64_t next = 0;
    for_each_head([&](kvtrim::LayerId l, kvtrim::HeadId h) {
      next = std::max(next, std::int64_t{cache.next_rope_position(segment.sequence, l, h)});
    });
    const auto end = next + static_cast<std::int64_t>(segment.tokens.size());
    if (end > shape_.context && !beyond_context_) {
      throw std::length_error("engine::LlamaModel: " + std::to_string(end) +
                              " positions are more than the model's context of " +
                              std::to_string(shape_.context));
    }
  }
}

kvtrim::Status LlamaModel::extend(kvtrim::PagedCache& cache, std::span<const Segment> segments) {
  find_own(cache, segments);
  auto status = kvtrim::Status::ok;
  std::size_t done = 0;
  while (done < segments.size() && status == kvtrim::Status::ok) {
    status = cache.try_extend(segments[done].sequence, own_counts_[done]);
    if (status == kvtrim::Status::ok) ++done;
  }
  if (split_.ranks != nullptr) {
    float failed = status == kvtrim::Status::ok ? 0 : 1;
    split_.ranks->sum({&failed, 1});
    if (failed > 0 && status == kvtrim::Status::ok) status = kvtrim::Status::out_of_pages;
  }
  if (status == kvtrim::Status::ok) {
    if (split_.by_context()) place_rows(cache, segments);
    return status;
  }
  for (std::size_t j = 0; j < done; ++j) {
    if (own_counts_[j] == 0) continue;
    const auto undone = cache.try_cancel_step(segments[j].sequence);
    if (undone != kvtrim::Status::ok) {
      throw std::runtime_error("engine::LlamaModel: rows of a failed step cannot be taken back: " +
                               std::string(kvtrim::to_string(undone)));
    }
  }
  return status;
}

void LlamaModel::find_own(const kvtrim::PagedCache& cache, std::span<const Segment> segments) {
  own_.clear();
  own_first_rows_.clear();
  own_counts_.clear();
  owners_.clear();
  sizes_.clear();
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const std::int32_t tokens = size_of(segments[s]);
    const bool apart = split_.by_context() && cache.alive(segments[s].sequence);
    const std::int32_t first = apart ? kvtrim::raw(cache.next_position(segments[s].sequence)) : 0;
    own_first_rows_.push_back(static_cast<Eigen::Index>(own_.size()));
    for (std::int32_t i = 0; i < tokens; ++i) {
      if (apart) owners_.push_back(split_.owner(first + i));
      if (!apart || owners_.back() == split_.ranks->rank()) own_.push_back({s, i});
    }
    own_counts_.push_back(
        static_cast<std::int32_t>(static_cast<Eigen::Index>(own_.size()) - own_first_rows_.back()));
    sizes_.push_back(tokens);
  }
}

void LlamaModel::place_rows(kvtrim::PagedCache& cache, std::span<const Segment> segments) const {
  const kvtrim::CacheView view = cache.view();
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const kvtrim::SequenceId id = segments[s].sequence;
    const std::int32_t own = own_counts_[s];
    const Own* const tokens = own_.data() + own_first_rows_[s];
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      kvtrim::SequenceState& state = view.states[view.table_index(id, t)];
      state.next_position -= own;
      state.next_rope_position -= own;
      if (own == 0) ++state.steps;  // as on the other ranks
      kvtrim::for_each_head(view, id, t, [&](const kvtrim::HeadRef& head) {
        for (std::int32_t i = 0; i < own; ++i) {
          const std::int32_t row = state.live_rows - own + i;
          view.positions.at<kvtrim::Position>(id, head.layer, head.head, row) =
              kvtrim::Position{state.next_position + tokens[i].token};
          view.rope_positions.at<std::int32_t>(id, head.layer, head.head, row) =
              state.next_rope_position + tokens[i].token;
        }
      });
      state.next_position += sizes_[s];
      state.next_rope_position += sizes_[s];
    }
  }
}

void LlamaModel::embed(const kvtrim::PagedCache& cache, std::span<const Segment> segments) {
  first_rows_.clear();
  positions_.clear();
  Eigen::Index total = 0;
  for (const Segment& segment : segments) {
    const std::int32_t end = kvtrim::raw(cache.next_position(segment.sequence));
    for (std::int32_t i = end - size_of(segment); i < end; ++i)
      positions_.push_back(kvtrim::Position{i});
    first_rows_.push_back(total);
    total += size_of(segment);
    for_each_head([&](kvtrim::LayerId l, kvtrim::HeadId h) {
      grow_rope_table(cache.next_rope_position(segment.sequence, l, h));
    });
  }
  hidden_.resize(static_cast<Eigen::Index>(own_.size()), shape_.embedding);
  Eigen::Index row = 0;
  for (const auto& [segment, token] : own_) {
    hidden_.row(row++) =
        weights_.embedding.row(segments[segment].tokens[static_cast<std::size_t>(token)]);
  }
}

void LlamaModel::add_to_hidden() {
  if (split_.by_heads())
    split_.ranks->sum({normal_.data(), static_cast<std::size_t>(normal_.size())});
  hidden_ += normal_;
}

void LlamaModel::grow_rope_table(std::int32_t positions) {
  const std::size_t pairs = shape_.frequencies.size();
  while (turns_.size() < static_cast<std::size_t>(positions) * pairs) {
    const std::size_t position = turns_.size() / pairs;
    for (const double frequency : shape_.frequencies) {
      const double angle =
          std::fmod(static_cast<double>(position) * frequency, 2 * std::numbers::pi);
      turns_.push_back({static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))});
    }
  }
}

void LlamaModel::normalise(const Matrix& x, const Eigen::RowVectorXf& weight, Matrix& out) const {
  out.resize(x.rows(), x.cols());
#pragma omp parallel for if (x.rows() >= 64)
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    const float mean = x.row(row).squaredNorm() / static_cast<float>(x.cols());
    const float scale = 1.0F / std::sqrt(mean + shape_.rms_epsilon);
    out.row(row) = (scale * x.row(row).array() * weight.array()).matrix();
  }
}

void LlamaModel::rotate(float* head, std::int32_t rope_position) const {
  const std::size_t pairs = shape_.frequencies.size();
  const Turn* turn = turns_.data() + static_cast<std::size_t>(rope_position) * pairs;
  for (std::size_t i = 0; i < pairs; ++i) {
    const float a = head[2 * i];
    const float b = head[2 * i + 1];
    head[2 * i] = a * turn[i].cosine - b * turn[i].sine;
    head[2 * i + 1] = a * turn[i].sine + b * turn[i].cosine;
  }
}

void LlamaModel::fill_cache(kvtrim::PagedCache& cache,
                            std::span<const Segment> segments,
                            kvtrim::LayerId layer) {
  const bool keep_unrotated = cache.params().unrotated_keys;
  if (keep_unrotated) unrotated_ = key_;
  if (observes_unrotated_) unrotated_query_ = query_;
  const std::int32_t group = shape_.heads / shape_.kv_heads;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const std::int32_t own = own_counts_[s];
    for (std::int32_t h = 0; h < shape_.kv_heads; ++h) {
      const std::int32_t first =
          cache.next_rope_position(segments[s].sequence, layer, kvtrim::HeadId{h}) - sizes_[s];
#pragma omp parallel for if (own >= 64)
      for (std::int32_t i = 0; i < own; ++i) {
        const Eigen::Index row = own_first_rows_[s] + i;
        const std::int32_t turn = first + own_[static_cast<std::size_t>(row)].token;
        rotate(key_.row(row).data() + h * shape_.head_dim, turn);
        for (std::int32_t g = 0; g < group; ++g) {
          rotate(query_.row(row).data() + (h * group + g) * shape_.head_dim, turn);
        }
      }
    }
  }
  bool written = true;
#pragma omp parallel for reduction(&& : written) if (segments.size() > 1)
  for (std::size_t s = 0; s < segments.size(); ++s) {
    if (own_counts_[s] == 0) continue;
    const Eigen::Index row = own_first_rows_[s];
    kvtrim::RowSource unrotated;
    if (keep_unrotated) unrotated.data = unrotated_.row(row).data();
    written = written && cache.write(segments[s].sequence,
                                     layer,
                                     {.data = key_.row(row).data()},
                                     {.data = value_.row(row).data()},
                                     unrotated) == kvtrim::Status::ok;
  }
  if (!written) throw std::logic_error("a sequence ended, or was written, within its own step");
}

void LlamaModel::attend(kvtrim::PagedCache& cache,
                        std::span<const Segment> segments,
                        kvtrim::LayerId layer) {
  const Eigen::Index dim = shape_.head_dim;
  const Eigen::Index group = shape_.heads / shape_.kv_heads;
  attended_.resize(query_.rows(), query_.cols());
  lse_.resize(static_cast<std::size_t>(query_.rows() * shape_.heads));
  blocks_.clear();
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const std::int32_t tokens = size_of(segments[s]);
    for (std::int32_t t = 0; t < tokens; t += BlockAttention::max_tokens) {
      for (std::int32_t h = 0; h < shape_.kv_heads; ++h) blocks_.push_back({s, h, t});
    }
  }
  const kvtrim::CacheView view = cache.view();
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(attention_.size()))
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto [s, h, t] = blocks_[i];
    const std::int32_t tokens = size_of(segments[s]);
    const Eigen::Index row = first_rows_[s] + t;
    const Eigen::Index column = h * group * dim;
    const AttentionBlock block{
        .queries = query_.row(row).data() + column,
        .query_stride = query_.cols(),
        .out = attended_.row(row).data() + column,
        .out_stride = attended_.cols(),
        .lse = lse_.data() + first_rows_[s] * shape_.heads + h * group * tokens + t,
        .lse_stride = tokens,
        .tokens = std::min(BlockAttention::max_tokens, static_cast<Eigen::Index>(tokens - t)),
        .first_position = kvtrim::raw(positions_[static_cast<std::size_t>(row)]),
    };
    attention_[static_cast<std::size_t>(omp_get_thread_num())].attend(
        view, segments[s].sequence, layer, kvtrim::HeadId{h}, block);
  }
}

void LlamaModel::report(std::span<const Segment> segments,
                        kvtrim::LayerId layer,
                        const Observer& observe) const {
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const std::size_t tokens = segments[s].tokens.size();
    LayerObservation seen;
    seen.segment = s;
    seen.sequence = segments[s].sequence;
    seen.layer = layer;
    seen.tokens = static_cast<std::int32_t>(tokens);
    seen.positions = {positions_.data() + first_rows_[s], tokens};
    seen.queries = {query_.row(first_rows_[s]).data(),
                    tokens * static_cast<std::size_t>(query_.cols())};
    if (observes_unrotated_) {
      seen.unrotated_queries = {unrotated_query_.row(first_rows_[s]).data(), seen.queries.size()};
    }
    seen.lse = {lse_.data() + first_rows_[s] * shape_.heads,
                tokens * static_cast<std::size_t>(shape_.heads)};
    observe(seen);
  }
}

void LlamaModel::activate() {
#pragma omp parallel for if (gate_.rows() >= 16)
  for (Eigen::Index row = 0; row < gate_.rows(); ++row) {
    auto gate = gate_.row(row).array();
    gate = gate / (1.0F + (-gate).exp()) * up_.row(row).array();
  }
}

void LlamaModel::compute_logits(std::span<const Segment> segments, LogitRows rows) {
  if (rows == LogitRows::none) {
    logits_.resize(0, shape_.vocabulary);
    return;
  }
  const auto keep = [&](const std::vector<Eigen::Index>& kept) {
    Matrix some(static_cast<Eigen::Index>(kept.size()), shape_.embedding);
    for (std::size_t i = 0; i < kept.size(); ++i)
      some.row(static_cast<Eigen::Index>(i)) = hidden_.row(kept[i]);
    hidden_ = std::move(some);
  };
  std::vector<Eigen::Index> kept;
  if (rows == LogitRows::last) {
    std::vector<std::int32_t> owners;
    for (std::size_t s = 0; s < segments.size(); ++s) {
      const Eigen::Index row = first_rows_[s] + sizes_[s] - 1;
      if (split_.by_context()) owners.push_back(owners_[static_cast<std::size_t>(row)]);
      if (owners.empty() || owners.back() == split_.ranks->rank())
        kept.push_back(own_first_rows_[s] + own_counts_[s] - 1);
    }
    owners_ = std::move(owners);
    keep(kept);
  }
  if (split_.by_heads()) {  // every rank has all rows: each takes some
    kept.clear();
    owners_.clear();
    for (Eigen::Index row = 0; row < hidden_.rows(); ++row) {
      owners_.push_back(static_cast<std::int32_t>(row % split_.ranks->size()));
      if (owners_.back() == split_.ranks->rank()) kept.push_back(row);
    }
    keep(kept);
  }
  normalise(hidden_, weights_.output_norm, normal_);
  const Matrix& head = weights_.output ? *weights_.output : weights_.embedding;
  multiply(normal_, std::array<Product, 1>{{{&head, &logits_}}});
  if (split_.ranks != nullptr) exchange_->gather(logits_, owners_);
}

}  // namespace engine
