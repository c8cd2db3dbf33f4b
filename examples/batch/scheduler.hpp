// SPDX-License-Identifier: Apache-2.0
#pragma once

// Continuous batching over one pool of pages. A round reads some chunks of the one prompt that is being read, then makes a token
// of every stream whose prompt is read: each in a step of its own, so that with at most 16 streams a token does not depend on
// what else goes on (the engine multiplies larger batches in another way).

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/policy/peak_pages.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "footprint.hpp"
#include "llama_engine/llama.hpp"
#include "program/console.hpp"
#include "program/evictor.hpp"
#include "program/policy_spec.hpp"
#include "request.hpp"

namespace batch {

/// How streams are run.
struct Settings {
  std::int32_t streams = 1;  ///< most at once
  std::int32_t chunk = 128;  ///< tokens of a prompt in a step
  /// Chunks between two decode steps; 0: so many that prompts are read twice as fast as streams end, and all are there at once.
  std::int32_t interleave = 0;
  /// Admits what fits now, not what fits at its peak: streams that find no page are preempted, the youngest first.
  bool overcommit = false;
  /// Sees the logits from which a request's next token is taken; may be empty.
  std::function<void(std::size_t, std::span<const float>)> watches{};
  std::function<bool(Token)> ends{};  ///< whether a stream ends at this token; empty: at max_tokens
};

/// What became of a request.
struct Outcome {
  enum class End : std::uint8_t { none, done, refused };
  End end = End::none;
  std::string refusal;         ///< why, with the numbers
  std::vector<Token> tokens;   ///< generated
  std::vector<double> times;   ///< seconds at which they were, from the scheduler's creation
  double arrived = 0;          ///< seconds
  std::int32_t preempted = 0;  ///< how often
};

/// What was seen of the run as a whole.
struct Counters {
  std::int32_t streams = 0;     ///< most at once, the one in prefill included
  std::int64_t peak_pages = 0;  ///< most in use
  std::int64_t preempted = 0;   ///< times a stream was
  std::int64_t steps = 0;       ///< decode steps
  double wasted_pages = 0;      ///< sum over decode steps: unused rows of pages in use, in pages
  std::vector<std::int64_t> tokens;  ///< by streams: made in steps while no prompt was being read
  std::vector<double> seconds;       ///< by streams: that those took
};

/// Runs requests to their ends.
///
/// A request that could not be alone in the pool is refused at once; any other ends with its tokens. Requests start in the order
/// in which they arrive.
class Scheduler {
 public:
  /// What a round did.
  enum class Round : std::uint8_t {
    worked,
    stuck,  ///< nothing: the next request waits for pages that others hold
    over,   ///< nothing is left to do
  };

  /// Reads the common prefix, and refuses requests that the pool cannot hold.
  ///
  /// \param cache     empty, of at least `sequences_for` sequences
  /// \param evictor   of `recorder_slots` slots
  /// \param requests  checked, ascending by arrival; must outlive the scheduler
  /// \throws std::runtime_error if the prefix does not fit the pool
  Scheduler(engine::LlamaModel& model,
            kvtrim::PagedCache& cache,
            program::Evictor& evictor,
            const program::PolicySpec& policy,
            Settings settings,
            std::span<const Request> requests,
            std::span<const Token> prefix = {});

  /// Sequences that the cache needs.
  [[nodiscard]] static std::int32_t sequences_for(std::int32_t streams, bool prefix) {
    return streams + (prefix ? 1 : 0);
  }
  /// Slots that the recorder needs: those of all sequences, or, where the policy acts once, one for all streams, which
  /// each has while its prompt is read.
  [[nodiscard]] static std::int32_t recorder_slots(const program::PolicySpec& policy,
                                                   std::int32_t streams,
                                                   bool prefix) {
    return sequences_for(policy.acts_once() ? 1 : streams, prefix);
  }

  /// One round.
  /// \throws program::Interrupted after Ctrl-C; nothing may be done then but look at outcomes and counters
  Round round();

  [[nodiscard]] const std::vector<Outcome>& outcomes() const noexcept { return outcomes_; }
  [[nodiscard]] const Counters& counters() const noexcept { return counters_; }
  /// Streams that are running, and the sequence of each; the one in prefill last.
  [[nodiscard]] std::vector<std::pair<std::size_t, kvtrim::SequenceId>> live() const;
  /// Pages that are promised to the streams that are running, and to the prefix.
  [[nodiscard]] std::int64_t reserved_pages() const;
  [[nodiscard]] const Footprint& footprint() const noexcept { return footprint_; }
  /// Decode steps until now, and jumps to an arrival when nothing is running.
  [[nodiscard]] std::int64_t clock() const noexcept { return clock_; }
  /// As given, and the interleave that follows.
  [[nodiscard]] const Settings& settings() const noexcept { return settings_; }
  [[nodiscard]] std::int64_t capacity() const { return cache_->pool().capacity(); }
  [[nodiscard]] double seconds() const { return watch_.seconds(); }

 private:
  struct Stream {
    std::size_t request = 0;
    kvtrim::SequenceId sequence{};
    program::AnyPolicy policy;
    std::int32_t keep = 0;
    kvtrim::PeakPages peak;  // in all tables
    std::size_t read = 0;    // tokens of the prompt
    std::size_t fed = 0;     // generated tokens that were read
  };

  [[nodiscard]] std::int32_t chosen_interleave() const;
  void read_prefix(std::span<const Token> prefix);
  [[nodiscard]] bool fits(const Stream& next) const;
  bool admit();
  bool read_chunk();
  void decode();
  /// Takes the stream's next token from the logits. \returns whether it goes on
  bool take(Stream& stream, std::span<const float> logits);
  void evict(Stream& stream);
  void finish(const Stream& stream);
  /// Lets the youngest stream go; it waits, and is resumed by replay: its prompt is read, cut, and its tokens are fed again.
  void preempt_youngest();
  void leave(const Stream& stream);
  void count(std::size_t streams, std::size_t made, double seconds);
  void note_pages();

  engine::LlamaModel* model_;
  kvtrim::PagedCache* cache_;
  program::Evictor* evictor_;
  const program::PolicySpec* spec_;
  Footprint footprint_;
  Settings settings_;
  std::span<const Request> requests_;
  program::Stopwatch watch_;
  std::int32_t tables_;
  std::optional<kvtrim::SequenceId> prefix_;
  std::vector<Outcome> outcomes_;
  Counters counters_;
  std::deque<std::size_t> waiting_;  // preempted ones first
  std::vector<Stream> decoding_;     // by admission
  std::optional<Stream> reading_;
  std::size_t arrived_ = 0;  // requests that have arrived
  std::int64_t clock_ = 0;
};

}  // namespace batch
