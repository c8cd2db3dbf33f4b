// SPDX-License-Identifier: Apache-2.0
#include "scheduler.hpp"

#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>

#include <algorithm>
#include <stdexcept>

#include "llama_engine/sampling.hpp"

namespace batch {

using kvtrim::SequenceId;
using kvtrim::Status;

namespace {

void require(Status status, const char* what) {
  if (status == Status::ok) return;
  throw std::runtime_error(std::string(what) + ": " + std::string(kvtrim::to_string(status)));
}

}  // namespace

Scheduler::Scheduler(engine::LlamaModel& model,
                     kvtrim::PagedCache& cache,
                     program::Evictor& evictor,
                     const program::PolicySpec& policy,
                     Settings settings,
                     std::span<const Request> requests,
                     std::span<const Token> prefix)
    : model_(&model),
      cache_(&cache),
      evictor_(&evictor),
      spec_(&policy),
      footprint_{&policy,
                 cache.params(),
                 model.rope(),
                 static_cast<std::int64_t>(prefix.size()),
                 settings.chunk},
      settings_(std::move(settings)),
      requests_(requests),
      tables_(
          kvtrim::tables_of(cache.params().scope, cache.params().layers, cache.params().kv_heads)),
      outcomes_(requests.size()) {
  if (!prefix.empty()) read_prefix(prefix);
  const std::int64_t room = cache_->pool().capacity() - reserved_pages();
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (const std::int64_t most = footprint_.peak(requests_[i]).most(); most > room) {
      outcomes_[i].end = Outcome::End::refused;
      outcomes_[i].refusal = "needs " + std::to_string(most) +
                             " pages at its peak, but the pool has " + std::to_string(room);
    } else {
      waiting_.push_back(i);
    }
  }
  if (settings_.interleave == 0) settings_.interleave = chosen_interleave();
}

std::int32_t Scheduler::chosen_interleave() const {
  std::int64_t chunks = 0, tokens = 1;
  for (const std::size_t i : waiting_) {
    const Request& r = requests_[i];
    chunks += (static_cast<std::int64_t>(r.prompt.size()) + settings_.chunk - 1) / settings_.chunk;
    tokens += r.max_tokens;
  }
  const auto streams = std::min({footprint_.streams(requests_),
                                 static_cast<std::int64_t>(waiting_.size()),
                                 std::int64_t{settings_.streams}});
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>((2 * streams * chunks + tokens - 1) / tokens, 1, 1 << 20));
}

void Scheduler::read_prefix(std::span<const Token> prefix) {
  prefix_ = cache_->try_create();
  if (!prefix_) throw std::logic_error("batch: no sequence for the prefix");
  const auto rows = static_cast<std::int32_t>(prefix.size());
  const std::int64_t needed = footprint_.prefix_pages();
  if (needed > cache_->pool().capacity()) {
    throw std::runtime_error("the prefix of " + std::to_string(rows) + " tokens needs " +
                             std::to_string(needed) + " pages, but the pool has " +
                             std::to_string(cache_->pool().capacity()));
  }
  evictor_->watch(*prefix_, 0);
  evictor_->recorder().reset(0);
  const auto chunk = static_cast<std::size_t>(settings_.chunk);
  for (std::size_t begin = 0; begin < prefix.size(); begin += chunk) {
    const auto tokens = prefix.subspan(begin, std::min(chunk, prefix.size() - begin));
    const std::size_t end = begin + tokens.size();
    const auto after = end < prefix.size() ? std::optional(prefix[end]) : std::nullopt;
    require(evictor_->read(*model_, *prefix_, tokens, after, engine::LogitRows::none),
            "the prefix");
  }
}

std::vector<std::pair<std::size_t, SequenceId>> Scheduler::live() const {
  std::vector<std::pair<std::size_t, SequenceId>> streams;
  for (const Stream& s : decoding_) streams.emplace_back(s.request, s.sequence);
  if (reading_) streams.emplace_back(reading_->request, reading_->sequence);
  return streams;
}

std::int64_t Scheduler::reserved_pages() const {
  std::int64_t pages = footprint_.prefix_pages();
  for (const Stream& s : decoding_) pages += s.peak.running;
  if (reading_) pages += reading_->peak.most();
  return pages;
}

Scheduler::Round Scheduler::round() {
  if (waiting_.empty() && decoding_.empty() && !reading_) return Round::over;
  for (; arrived_ < requests_.size() && requests_[arrived_].arrival <= clock_; ++arrived_) {
    outcomes_[arrived_].arrived = watch_.seconds();
  }
  bool worked = false;
  for (std::int32_t i = 0; i < settings_.interleave; ++i) {
    if (!reading_ && !admit()) break;
    if (!read_chunk()) break;
    worked = true;
  }
  if (!decoding_.empty()) {
    decode();
    worked = true;
  }
  if (worked) {
    ++clock_;
  } else if (const std::int64_t next = requests_[waiting_.front()].arrival; next > clock_) {
    clock_ = next;
  } else {
    return Round::stuck;
  }
  return Round::worked;
}

bool Scheduler::fits(const Stream& next) const {
  const kvtrim::PagePool& pool = cache_->pool();
  if (settings_.overcommit && outcomes_[next.request].preempted == 0) {
    return pool.available() >=
           next.peak.prompt + static_cast<std::int64_t>(decoding_.size()) * tables_;
  }
  return reserved_pages() + next.peak.most() <= pool.capacity() &&
         pool.available() >= next.peak.prompt;
}

bool Scheduler::admit() {
  if (waiting_.empty() || requests_[waiting_.front()].arrival > clock_ ||
      decoding_.size() >= static_cast<std::size_t>(settings_.streams)) {
    return false;
  }
  Stream next;
  next.request = waiting_.front();
  const Request& request = requests_[next.request];
  next.keep = footprint_.keep(request);
  next.policy = footprint_.policy_for(next.keep);
  next.peak = footprint_.peak(request);
  if (!fits(next)) return false;
  const auto made = prefix_ ? cache_->try_fork(*prefix_) : cache_->try_create();
  if (!made) throw std::logic_error("batch: no free sequence");
  next.sequence = *made;
  const std::int32_t slot = spec_->acts_once() ? (prefix_ ? 1 : 0) : kvtrim::raw(next.sequence);
  evictor_->watch(next.sequence, slot);
  if (prefix_) {
    evictor_->recorder().fork(0, slot);
  } else {
    evictor_->recorder().reset(slot);
  }
  waiting_.pop_front();
  reading_ = next;
  counters_.streams = std::max(counters_.streams, static_cast<std::int32_t>(decoding_.size()) + 1);
  return true;
}

bool Scheduler::read_chunk() {
  Stream& s = *reading_;
  const std::span<const Token> prompt = requests_[s.request].prompt;
  const auto tokens =
      prompt.subspan(s.read, std::min(prompt.size() - s.read, std::size_t(settings_.chunk)));
  const std::size_t end = s.read + tokens.size();
  const bool last = end == prompt.size();
  const Status status = evictor_->read(*model_,
                                       s.sequence,
                                       tokens,
                                       last ? std::nullopt : std::optional(prompt[end]),
                                       last ? engine::LogitRows::last : engine::LogitRows::none);
  if (status == Status::out_of_pages) {
    if (decoding_.empty()) preempt_youngest();  // nobody here will free any
    return false;
  }
  require(status, "a chunk of a prompt");
  s.read = end;
  note_pages();
  if (!last) return true;
  evict(s);
  if (spec_->acts_once()) {  // it has seen all it needs: the slot is the next prompt's
    evictor_->recorder().reset(prefix_ ? 1 : 0);
    evictor_->watch(s.sequence, -1);
  }
  const auto row = model_->logits(model_->logits().rows() - 1);
  const bool goes_on = !outcomes_[s.request].tokens.empty() || take(s, row);
  if (goes_on) {
    decoding_.push_back(s);
  } else {
    finish(s);
  }
  reading_.reset();
  return true;
}

void Scheduler::decode() {
  const program::Stopwatch watch;
  std::vector<engine::Segment> segments;
  for (bool done = false; !done;) {
    segments.clear();
    for (const Stream& s : decoding_) {
      segments.push_back({s.sequence, {&outcomes_[s.request].tokens[s.fed], 1}});
    }
    const Status status =
        model_->forward(*cache_, segments, engine::LogitRows::last, evictor_->observer());
    done = status == Status::ok;
    if (done) break;
    if (status != Status::out_of_pages) require(status, "a decode step");
    preempt_youngest();
    if (decoding_.empty()) return;
  }
  note_pages();
  std::size_t made = 0;
  std::vector<Stream> going;
  for (std::size_t i = 0; i < decoding_.size(); ++i) {
    Stream& s = decoding_[i];
    bool goes_on = true;
    if (++s.fed == outcomes_[s.request].tokens.size()) {  // otherwise it is replayed
      goes_on = take(s, model_->logits(static_cast<Eigen::Index>(i)));
      ++made;
    }
    if (!goes_on) {
      finish(s);
      continue;
    }
    if (!spec_->acts_once()) evict(s);
    going.push_back(s);
  }
  decoding_ = std::move(going);
  count(segments.size(), made, watch.seconds());
}

bool Scheduler::take(Stream& stream, std::span<const float> logits) {
  Outcome& outcome = outcomes_[stream.request];
  if (settings_.watches) settings_.watches(stream.request, logits);
  outcome.tokens.push_back(engine::greedy_token(logits));
  outcome.times.push_back(watch_.seconds());
  const bool full =
      outcome.tokens.size() == static_cast<std::size_t>(requests_[stream.request].max_tokens);
  return !full && !(settings_.ends && settings_.ends(outcome.tokens.back()));
}

void Scheduler::evict(Stream& stream) {
  if (spec_->name() == "full") return;
  static_cast<void>(evictor_->evict(stream.policy, stream.sequence, stream.keep));
}

void Scheduler::leave(const Stream& stream) {
  cache_->destroy(stream.sequence);
  evictor_->watch(stream.sequence, -1);
}

void Scheduler::finish(const Stream& stream) {
  outcomes_[stream.request].end = Outcome::End::done;
  leave(stream);
}

void Scheduler::preempt_youngest() {
  const Stream youngest = reading_ ? *reading_ : decoding_.back();
  leave(youngest);
  ++outcomes_[youngest.request].preempted;
  ++counters_.preempted;
  waiting_.push_front(youngest.request);
  if (reading_) {
    reading_.reset();
  } else {
    decoding_.pop_back();
  }
}

void Scheduler::note_pages() {
  counters_.peak_pages = std::max(counters_.peak_pages, std::int64_t{cache_->pool().in_use()});
}

void Scheduler::count(std::size_t streams, std::size_t made, double seconds) {
  ++counters_.steps;
  const std::int32_t page_size = cache_->params().page_size;
  for (const auto& [request, sequence] : live()) {
    const Own own = own_of(*cache_, sequence);
    counters_.wasted_pages += static_cast<double>(own.pages) -
                              static_cast<double>(own.rows) / static_cast<double>(page_size);
  }
  if (reading_) return;
  if (counters_.tokens.size() <= streams) {
    counters_.tokens.resize(streams + 1);
    counters_.seconds.resize(streams + 1);
  }
  counters_.tokens[streams] += static_cast<std::int64_t>(made);
  counters_.seconds[streams] += seconds;
}

}  // namespace batch
