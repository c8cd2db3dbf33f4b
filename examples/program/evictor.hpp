// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where the engine calls kvtrim: during a step it hands over each layer's queries, between steps it lets a policy evict.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/plan_options.hpp>
#include <kvtrim/observe/recorder.hpp>
#include <kvtrim/policy/peak_pages.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llama_engine/llama.hpp"
#include "llama_engine/openmp.hpp"
#include "policy_spec.hpp"

namespace program {

/// What the policy inside needs. Token scores are how unexpected each token of the prompt was.
[[nodiscard]] kvtrim::Needs needs_of(const AnyPolicy& policy);

/// What a sequence of `prompt` and `new_tokens` rows takes under the policy inside, in each of its tables.
/// \throws as `kvtrim::peak_pages`
[[nodiscard]] kvtrim::PeakPages peak_pages_of(const AnyPolicy& policy,
                                              std::int64_t prompt,
                                              std::int64_t new_tokens,
                                              std::int64_t page_size,
                                              std::int64_t chunk,
                                              const kvtrim::PeakOptions& options);

/// Reads QFilter's directions: fp32, little endian, [layers, kv_heads, head_dim].
/// \throws std::runtime_error if the file cannot be read, has another size, or a number is not finite
[[nodiscard]] std::vector<float> read_filters(const std::string& path,
                                              const engine::LlamaShape& shape);

/// Watches the steps of an engine and evicts between them.
class Evictor {
 public:
  /// \param filters  the result of `read_filters`, for policies that need it
  /// \param slots    sequences that are watched at the same time; 0: all that the cache can have, each in the slot of its number
  /// \throws std::invalid_argument if a policy needs filters and there are none
  Evictor(engine::LlamaModel& model,
          kvtrim::PagedCache& cache,
          const kvtrim::Needs& needs,
          std::vector<float> filters = {},
          std::int32_t slots = 0);

  /// Has sequence `s` watched in a slot of the recorder from now on, or no longer (-1): a policy that acts once has seen all it
  /// needs then. The caller resets or forks the slot.
  void watch(kvtrim::SequenceId s, std::int32_t slot) {
    slots_.at(static_cast<std::size_t>(kvtrim::raw(s))) = slot;
  }

  /// The hook to pass to `LlamaModel::forward`. After Ctrl-C it throws Interrupted.
  [[nodiscard]] engine::Observer observer() {
    return [this](const engine::LayerObservation& seen) { observe(seen); };
  }

  /// Runs a prompt through the model and records what the policies need from it.
  kvtrim::Status prefill(engine::LlamaModel& model,
                         kvtrim::SequenceId s,
                         std::span<const std::int32_t> prompt);

  /// Runs the next tokens of a prompt, for prompts that are read in parts. One prompt at a time where token scores are needed;
  /// the first token after a fork counts as expected.
  ///
  /// \param after  the token that follows, if the prompt goes on
  /// \param rows   logits to compute; all, where token scores are needed
  kvtrim::Status read(engine::LlamaModel& model,
                      kvtrim::SequenceId s,
                      std::span<const std::int32_t> tokens,
                      std::optional<std::int32_t> after,
                      engine::LogitRows rows);

  /// What was recorded: forked and reset with its sequence, by its slot.
  [[nodiscard]] kvtrim::Recorder& recorder() noexcept { return recorder_; }
  /// Bytes of what is recorded, and of the largest workspace until now.
  [[nodiscard]] std::size_t recorder_bytes() const noexcept {
    return kvtrim::Recorder::bytes(recorder_.needs(), recorder_.params());
  }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept { return workspace_.size(); }

  /// Lets `policy` keep `keep` rows of sequence `s`. Allocates.
  /// \throws std::runtime_error if the library refuses
  kvtrim::Report evict(const AnyPolicy& policy,
                       kvtrim::SequenceId s,
                       std::int32_t keep,
                       const kvtrim::PlanOptions& options = {});

 private:
  [[nodiscard]] kvtrim::Recorder::Params offered(const engine::LlamaModel& model,
                                                 std::int32_t slots) const;
  [[nodiscard]] std::int32_t slot_of(kvtrim::SequenceId s) const {
    return slots_.at(static_cast<std::size_t>(kvtrim::raw(s)));
  }
  void observe(const engine::LayerObservation& seen);
  // Makes the workspace large enough for `evict` of sequence `s` as it is now.
  void prepare(const AnyPolicy& policy, kvtrim::SequenceId s);

  kvtrim::PagedCache* cache_;
  engine::OpenMp executor_;
  std::vector<float> filters_;
  std::vector<float> output_;  // W_O of every query head, transposed: [heads, head_dim, hidden]
  kvtrim::Recorder recorder_;
  std::vector<std::int32_t> slots_;  // of each sequence; -1: not watched
  std::vector<float> seen_;          // surprisal of the last prompt's tokens
  std::vector<float> surprisal_;     // the same, pooled
  std::vector<std::byte> workspace_;
};

/// The dtype that `--cache-type` names: f32, f16 or bf16.
[[nodiscard]] inline kvtrim::DType cache_dtype(const std::string& name) {
  return name == "f16"    ? kvtrim::DType::f16
         : name == "bf16" ? kvtrim::DType::bf16
                          : kvtrim::DType::f32;
}

}  // namespace program
