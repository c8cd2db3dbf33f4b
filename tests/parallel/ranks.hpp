// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ranks of a test: all of them in this thread, or, where the file is compiled with KVTRIM_TEST_MPI, this process as one
// of several. A test says for each rank that is here what it does, and exchanges the rounds of all of them.

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
/// Made by main, for all tests.
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

  /// Exchanges the rounds of one algorithm: `runs` has one for each rank that is here.
  template <class Run>
  Status drive(std::vector<Run>& runs) {
    REQUIRE(runs.size() == here_.size());
#if defined(KVTRIM_TEST_MPI)
    return kvtrim::drive(*communicator_, runs.front());
#else
    return drive_in_lock_step(std::span(runs), &traffic);
#endif
  }

  Traffic traffic;  // of one rank; not counted over MPI

 private:
  std::int32_t count_;
  std::vector<Rank> here_;
#if defined(KVTRIM_TEST_MPI)
  MpiCommunicator* communicator_;
#endif
};

/// Calls f(ranks): for 1, 2, 3, 4 and 8 of them, or for those that MPI has started.
template <class F>
void for_each_ranks(F&& f) {
#if defined(KVTRIM_TEST_MPI)
  Ranks ranks(*mpi);
  f(ranks);
#else
  for (const std::int32_t count : {1, 2, 3, 4, 8}) {
    CAPTURE(count);
    Ranks ranks(count);
    f(ranks);
  }
#endif
}

}  // namespace kvtrim::test
