// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ranks of a test: all of them in this thread, or this process as one of several that MPI has started
// (KVTRIM_TEST_RANKS). A test says for each rank that is here what it does, and exchanges the rounds of all of them.

#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/parallel/lock_step.hpp>
#if defined(KVTRIM_TEST_MPI)
#  include <kvtrim/parallel/mpi.hpp>
#endif

#include "catch.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim::test {

#if defined(KVTRIM_TEST_MPI)
/// Made before main; null: all ranks are in this thread.
inline MpiCommunicator* mpi = nullptr;
#endif

class Ranks {
 public:
  /// All here.
  explicit Ranks(std::int32_t count) : count_(count) {
    for (std::int32_t r = 0; r < count; ++r) { here_.push_back({r, count}); }
  }
#if defined(KVTRIM_TEST_MPI)
  explicit Ranks(MpiCommunicator& communicator)
      : count_(communicator.rank().count),
        here_{communicator.rank()},
        communicator_(&communicator) {}
#endif

  std::int32_t count() const { return count_; }
  /// Those of this process.
  const std::vector<Rank>& here() const { return here_; }

  /// Whether case `i` of several is tested: over MPI one of three, another one for each number of ranks, since each round
  /// waits until every rank has had a core.
  bool takes(std::int32_t i) const {
#if defined(KVTRIM_TEST_MPI)
    if (communicator_ != nullptr) { return i % 3 == count_ % 3; }
#endif
    return i >= 0;
  }

  /// Exchanges the rounds of one algorithm: `runs` has one for each rank that is here.
  template <class Run>
  Status drive(std::vector<Run>& runs) {
    REQUIRE(runs.size() == here_.size());
#if defined(KVTRIM_TEST_MPI)
    if (communicator_ != nullptr) { return kvtrim::drive(*communicator_, runs.front()); }
#endif
    return drive_in_lock_step(std::span(runs), &traffic);
  }

  Traffic traffic;  // of one rank; not counted over MPI

 private:
  std::int32_t count_;
  std::vector<Rank> here_;
#if defined(KVTRIM_TEST_MPI)
  MpiCommunicator* communicator_ = nullptr;
#endif
};

/// Calls f(ranks): for 1, 2, 3, 4 and 8 of them, or for those that MPI has started.
template <class F>
void for_each_ranks(F&& f) {
#if defined(KVTRIM_TEST_MPI)
  if (mpi != nullptr) {
    Ranks ranks(*mpi);
    f(ranks);
    return;
  }
#endif
  for (const std::int32_t count : {1, 2, 3, 4, 8}) {
    CAPTURE(count);
    Ranks ranks(count);
    f(ranks);
  }
}

}  // namespace kvtrim::test
