// SPDX-License-Identifier: Apache-2.0
#pragma once

// Not part of <kvtrim/kvtrim.hpp>: it needs MPI's header (MPI 3.0 or newer; Debian: libopenmpi-dev, openmpi-bin).
//
// A rank that does not arrive must not hang the others. So every call is non-blocking, its words lie in memory of the
// communicator's own, and when it takes too long the communicator is broken: memory and request then stay as they are,
// since MPI may still write there whenever the late rank arrives.

#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/parallel/communicator.hpp>

// MPI's C++ bindings left the standard with 3.0, but would have to be linked.
#if !defined(OMPI_SKIP_MPICXX)
#  define OMPI_SKIP_MPICXX 1
#endif
#if !defined(MPICH_SKIP_MPICXX)
#  define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <thread>
#include <vector>

namespace kvtrim {

/// Ranks of an MPI communicator. Moves, does not copy.
///
/// \pre a call has fewer than 2^31 words, as MPI counts in ints
/// \par Allocation
/// in the constructor, and in a call that has more words than all before
/// \par Thread-safety
/// one thread; MPI must have been initialised, and be finalised after the last call
class MpiCommunicator {
 public:
  /// Takes part in `communicator` without owning it. Give it one of its own (`MPI_Comm_dup`): nothing else may use it, and
  /// to have errors reported rather than the program ended, its handler must be `MPI_ERRORS_RETURN`.
  ///
  /// \param deadline  how long a call waits for the other ranks
  explicit MpiCommunicator(MPI_Comm communicator,
                           std::chrono::steady_clock::duration deadline = std::chrono::seconds(30))
      : deadline_(deadline), call_(std::make_unique<Call>()) {
    call_->communicator = communicator;
    MPI_Comm_rank(communicator, &rank_.index);
    MPI_Comm_size(communicator, &rank_.count);
  }
  MpiCommunicator(MpiCommunicator&&) noexcept = default;
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(MpiCommunicator&&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  /// Does not wait. What a late rank may still make MPI write to is never freed.
  ~MpiCommunicator() {
    if (call_ != nullptr && !is_complete()) { leaked().push_back(std::move(call_)); }
  }

  /// Which rank this is.
  [[nodiscard]] Rank rank() const noexcept { return rank_; }
  /// Whether a rank did not arrive, or MPI reported an error: every further call is refused.
  [[nodiscard]] bool is_broken() const noexcept { return broken_; }
  /// Whether nothing of this communicator is under way any more: asked of a broken one before `MPI_Finalize`, it tells
  /// whether the missing rank has arrived after all. Does not wait.
  [[nodiscard]] bool is_complete() noexcept {
    int done = 1;
    if (call_->request != MPI_REQUEST_NULL) { MPI_Test(&call_->request, &done, MPI_STATUS_IGNORE); }
    return done != 0;
  }

  /// Adds the words of all ranks up.
  [[nodiscard]] Status sum(std::span<std::uint64_t> words) noexcept {
    return reduce(words, MPI_SUM);
  }
  /// Takes the maxima.
  [[nodiscard]] Status max(std::span<std::uint64_t> words) noexcept {
    return reduce(words, MPI_MAX);
  }
  /// Gathers every rank's part.
  [[nodiscard]] Status all_gather(std::span<std::uint64_t> words) noexcept {
    return call(words, [&](Call& c) {
      const int part = static_cast<int>(words.size() / static_cast<std::size_t>(rank_.count));
      return MPI_Iallgather(MPI_IN_PLACE,
                            0,
                            MPI_DATATYPE_NULL,
                            c.words.data(),
                            part,
                            MPI_UINT64_T,
                            c.communicator,
                            &c.request);
    });
  }

 private:
  // What MPI may write to.
  struct Call {
    MPI_Comm communicator = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
    std::vector<std::uint64_t> words;
  };

  // Never destroyed, so that it outlives MPI.
  [[nodiscard]] static std::vector<std::unique_ptr<Call>>& leaked() {
    static auto* const calls = new std::vector<std::unique_ptr<Call>>;
    return *calls;
  }

  [[nodiscard]] Status reduce(std::span<std::uint64_t> words, MPI_Op op) noexcept {
    return call(words, [&](Call& c) {
      return MPI_Iallreduce(MPI_IN_PLACE,
                            c.words.data(),
                            static_cast<int>(words.size()),
                            MPI_UINT64_T,
                            op,
                            c.communicator,
                            &c.request);
    });
  }
  template <class Start>
  [[nodiscard]] Status call(std::span<std::uint64_t> words, Start&& start) noexcept {
    KVTRIM_ASSERT(words.size() <= std::numeric_limits<std::int32_t>::max());
    if (broken_) { return Status::rank_missing; }
    call_->words.assign(words.begin(), words.end());
    broken_ = start(*call_) != MPI_SUCCESS || !wait();
    if (broken_) { return Status::rank_missing; }
    std::ranges::copy(call_->words, words.begin());
    return Status::ok;
  }
  // Looks again and again. MPI goes on with a large transfer only while it is looked at, so that pauses come late: a transfer
  // that is under way has ended before the first, and until then each look lets another process run.
  [[nodiscard]] bool wait() noexcept {
    using namespace std::chrono_literals;
    constexpr auto busy = 20ms;
    const auto begin = std::chrono::steady_clock::now();
    std::chrono::microseconds pause = 1us;
    while (true) {
      int done = 0;
      if (MPI_Test(&call_->request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) { return false; }
      if (done != 0) { return true; }
      const auto waited = std::chrono::steady_clock::now() - begin;
      if (waited >= deadline_) { return false; }
      if (waited < busy) {
        std::this_thread::yield();
        continue;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min<std::chrono::microseconds>(2 * pause, 1ms);
    }
  }

  Rank rank_;
  std::chrono::steady_clock::duration deadline_;
  bool broken_ = false;
  std::unique_ptr<Call> call_;
};
static_assert(Communicator<MpiCommunicator>);

}  // namespace kvtrim
