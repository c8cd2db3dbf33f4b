// SPDX-License-Identifier: Apache-2.0
#pragma once

// Needs nccl.h and the library libnccl.so.2 (the CMake target kvtrim::nccl, where both are found). No kernel of its own:
// any host compiler will do.

#include <kvtrim/core/status.hpp>
#include <kvtrim/parallel/communicator.hpp>

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::cuda {

/// Ranks that NCCL connects: a communicator of the engine's, and the stream that its calls are queued on. Words lie in
/// device memory.
///
/// With an algorithm whose words lie there too (`cuda::ContextTopK`), `drive` queues all rounds and waits for none: nothing
/// is read back. The host's algorithms (`kvtrim::ContextTopK` and the others) need their words in host memory, and so MPI
/// or copies around each call.
///
/// No deadline, and nothing here waits: `ok` means that the call was queued. Whether all ranks arrived is the engine's
/// watchdog to find out, as for its other collectives: it polls `ncclCommGetAsyncError(communicator, &state)` from a
/// thread of its own or between steps. If `state` is an error, or the stream has not passed an event for too long,
/// `ncclCommAbort(communicator)` on every rank ends the kernels that wait; words and whatever was computed from them
/// (kept rows, statuses) are then of no value, and nothing may be applied from them. Both are calls of NCCL, on the
/// engine's own communicator; this object must not be used afterwards.
///
/// \par Stream
/// all calls on the stream given; they may be captured into a CUDA graph, as NCCL's may
/// \par Thread-safety
/// one thread; several ranks in one thread need `ncclGroupStart` and `ncclGroupEnd` around their calls of one round
/// \par Source
/// own
class NcclCommunicator {
 public:
  /// \param communicator  the engine's; it must outlive the object, and is not destroyed with it
  NcclCommunicator(ncclComm_t communicator, cudaStream_t stream) noexcept
      : communicator_(communicator), stream_(stream) {
    int index = 0;
    int count = 1;
    if (queued(ncclCommUserRank(communicator, &index)) &&
        queued(ncclCommCount(communicator, &count))) {
      rank_ = {index, count};
    }
  }

  /// Rank 0 of 1, if NCCL does not know its own (`error`).
  [[nodiscard]] Rank rank() const noexcept { return rank_; }
  /// \returns `ok`: queued; `rank_missing`: NCCL refused this call or one before it
  [[nodiscard]] Status sum(std::span<std::uint64_t> words) noexcept {
    return reduce(words, ncclSum);
  }
  /// The same.
  [[nodiscard]] Status max(std::span<std::uint64_t> words) noexcept {
    return reduce(words, ncclMax);
  }
  /// The same.
  /// \pre words are a multiple of the ranks
  [[nodiscard]] Status all_gather(std::span<std::uint64_t> words) noexcept {
    const std::size_t own = words.size() / static_cast<std::size_t>(rank_.count);
    KVTRIM_ASSERT(own * static_cast<std::size_t>(rank_.count) == words.size());
    // In place, as NCCL asks for it: a rank's part lies where it will be.
    const std::uint64_t* const from = words.data() + own * static_cast<std::size_t>(rank_.index);
    return call(
        [&] { return ncclAllGather(from, words.data(), own, ncclUint64, communicator_, stream_); });
  }

  /// The first error of a call; `ncclSuccess` if there was none. Errors of ranks that do not arrive are NCCL's to tell
  /// (`ncclCommGetAsyncError`).
  [[nodiscard]] ncclResult_t error() const noexcept { return error_; }

 private:
  [[nodiscard]] Status reduce(std::span<std::uint64_t> words, ncclRedOp_t how) noexcept {
    return call([&] {
      return ncclAllReduce(
          words.data(), words.data(), words.size(), ncclUint64, how, communicator_, stream_);
    });
  }
  template <class Call>
  [[nodiscard]] Status call(Call&& f) noexcept {
    return error_ == ncclSuccess && queued(f()) ? Status::ok : Status::rank_missing;
  }
  // Communicators that do not block answer `ncclInProgress`.
  [[nodiscard]] bool queued(ncclResult_t result) noexcept {
    if (result != ncclSuccess && result != ncclInProgress) { error_ = result; }
    return error_ == ncclSuccess;
  }

  ncclComm_t communicator_;
  cudaStream_t stream_;
  Rank rank_{};
  ncclResult_t error_ = ncclSuccess;
};
static_assert(Communicator<NcclCommunicator>);

}  // namespace kvtrim::cuda
